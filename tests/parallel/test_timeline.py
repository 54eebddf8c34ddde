"""Files of what ranks did when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import DataError
from danlu.parallel.schedules import schedule
from danlu.parallel.timeline import TimelineEvent, read_timeline, timeline_line, timeline_name
from danlu.planning.pipeline_simulation import simulate


def written(folder: Path, steps: dict[int, tuple[int, ...]]) -> list[TimelineEvent]:
    """A timeline of two ranks with these steps of each; the events of a step."""
    events = simulate(schedule("zb-h1", 2, 1, 2))
    for rank, numbers in steps.items():
        lines = [timeline_line(event, step) for step in numbers for event in events if event.rank == rank]
        (folder / timeline_name(rank)).write_text("".join(f"{line}\n" for line in lines))
    return sorted(events, key=lambda event: (event.start_s, event.end_s))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    events = written(tmp_path, {0: (3, 4), 1: (3, 4)})
    step, found = read_timeline(tmp_path)
    assert step == 4
    assert sorted(map(str, found)) == sorted(map(str, events))
    assert [event.start_s for event in found] == [event.start_s for event in events]
    assert read_timeline(tmp_path, 3)[0] == 3
    line = json.loads((tmp_path / "timeline-0.jsonl").read_text().splitlines()[0])
    assert line == {
        "step": 3, "rank": 0, "kind": "forward", "chunk": 0, "micro": 0, "start_s": 0.0, "end_s": 1.0
    }  # fmt: skip


def test_the_last_step_is_one_that_all_ranks_ended(tmp_path: Path) -> None:
    written(tmp_path, {0: (3, 4, 5), 1: (3, 4)})
    assert read_timeline(tmp_path)[0] == 4
    # A line that was torn, and a step without its update: the run was stopped there.
    file = tmp_path / "timeline-1.jsonl"
    file.write_text(file.read_text()[:-5])
    assert read_timeline(tmp_path)[0] == 3


def test_steps_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no timeline-0.jsonl in it"):
        read_timeline(tmp_path)
    written(tmp_path, {0: (3,), 1: (4,)})
    with pytest.raises(DataError, match="no step that all 2 ranks have gone through: their last ones differ"):
        read_timeline(tmp_path)
    with pytest.raises(DataError, match=r"no step 4 that all 2 ranks have gone through: timeline-0.jsonl has none"):
        read_timeline(tmp_path, 4)


EVENT = {"step": 1, "rank": 0, "kind": "forward", "chunk": 0, "micro": 0, "start_s": 0.0, "end_s": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "foward"}, "kind: 'foward' is none of forward, backward"),
        ({"micro": None}, "micro: None is no number from 0 up"),
        ({"chunk": -1}, "chunk: -1 is no number from 0 up"),
        ({"step": True}, "step: True is no number"),
        ({"rank": 1}, "rank: 1, in the file of rank 0"),
        ({"end_s": -1.0}, "start_s and end_s: 0.0 and -1.0 are no two times"),
        ({"end_s": float("nan")}, "start_s and end_s: 0.0 and nan are no two times"),
        ({"end_s": "late"}, "start_s and end_s: 0.0 and 'late' are no two times"),
        ({"other": 1}, "an event is an object with step, rank, kind"),
    ],
)
def test_a_line_that_is_no_event_is_told_with_its_number(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "timeline-0.jsonl").write_text(f"{json.dumps(EVENT)}\n{json.dumps(EVENT | change)}\n")
    with pytest.raises(DataError) as refused:
        read_timeline(tmp_path)
    assert f"timeline-0.jsonl:2: {message}" in str(refused.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "timeline-0.jsonl"
    file.write_text("[\n")
    with pytest.raises(DataError, match=r"timeline-0.jsonl:1: this is no JSON"):
        read_timeline(tmp_path)
    file.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"timeline-0.jsonl: cannot be read"):
        read_timeline(tmp_path)
