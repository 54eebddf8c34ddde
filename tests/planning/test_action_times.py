"""Times from files and from runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.core.errors import RecipeError
from danlu.parallel.schedules import schedule
from danlu.planning.action_times import ActionTimes, mean_times, read_times
from danlu.planning.pipeline_simulation import simulate


def test_a_file_of_numbers_and_lists(tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    file.write_text("forward: 0.01\nweight: [0.01, 0.02]  # the head is there\nsend: 1e-3\n")
    assert read_times(file, 2) == ActionTimes(forward=0.01, weight=(0.01, 0.02), send=0.001)
    file.write_text('{"backward": 3}')
    assert read_times(file, 2) == ActionTimes(backward=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forwrad: 1", "times.yaml:1:1 forwrad: no kind of action with a time. Did you mean 'forward'?"),
        ("forward: [1, 2, 3]", "times.yaml:1:10 forward: 3 numbers, but it takes one number, or one for each of the 2"),
        ("update: [1, 2]", "times.yaml:1:9 update: 2 numbers, but it takes one number"),
        ("forward: -1", "times.yaml:1:10 forward: -1 is no number of seconds, from 0 up"),
        ("send: .nan", "times.yaml:1:7 send: nan is no number of seconds"),
        ("send: true", "times.yaml:1:7 send: True is no number of seconds"),
        ("input: [1, fast]", "times.yaml:1:12 input: 'fast' is no number of seconds"),
        ("- 1", "times.yaml:1:1: no mapping of kinds (forward, input,"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "times.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as refused:
        read_times(file, 2)
    assert message in str(refused.value)


def test_all_mistakes_come_together(tmp_path: Path) -> None:
    file = tmp_path / "times.yaml"
    file.write_text("forwrad: 1\nsend: -1\n")
    with pytest.raises(RecipeError) as refused:
        read_times(file, 2)
    assert len(refused.value.problems) == 2


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--times .*gone.yaml: cannot be read: No such file"):
        read_times(tmp_path / "gone.yaml", 2)


@pytest.mark.parametrize(("kind", "chunks"), [("1f1b", 1), ("zbv", 2), ("pipedream", 1)])
def test_the_means_of_a_step_give_that_step_again(kind: str, chunks: int) -> None:
    """Not at other times: the control is a simulation in units."""
    lists = schedule(kind, 2, chunks, 4)
    times = ActionTimes(
        forward=tuple(1.0 + chunk / 8 for chunk in range(2 * chunks)),
        input=0.75,
        weight=0.5,
        send=0.25,
        reduce=0.125,
        update=0.5,
    )
    events = simulate(lists, times)
    assert simulate(lists, mean_times(events, 2 * chunks)) == events != simulate(lists)


def test_a_message_that_waited_is_no_measure_of_its_time() -> None:
    events = simulate(schedule("gpipe", 2, 1, 2), ActionTimes(send=0.25))
    waited = [
        event if (event.kind, event.micro, event.rank) != ("send", 1, 0) else type(event)(0, "send", 0, 1, 2.0, 9.0)
        for event in events
    ]
    assert mean_times(waited, 2).send == (0.25, 0.25)
