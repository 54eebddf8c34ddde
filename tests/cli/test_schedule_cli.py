"""`danlu schedule`: numbers beside formulas, the picture, a run's own timeline, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.docs_scripts import TOP
from builders.tiny_world import danlu

from danlu.parallel.schedules import schedule
from danlu.parallel.timeline import timeline_line, timeline_name
from danlu.planning.action_times import ActionTimes
from danlu.planning.pipeline_simulation import simulate

ZBV = ("--kind", "zbv", "--stages", "4", "--microbatches", "8")


def test_bubble_and_activations_in_flight_beside_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("schedule", *ZBV) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "zbv, 4 stages of 2 chunks, 8 micro-batches",
        "bubble 0.0625 of the busy time; (p - 1)/6m = 0.0625",
        "step 51 units, of which each rank computes 48 on average",
        "in flight, chunks of micro-batches by rank: 8 8 8 8; min(2p, 2m, m + r + 1) = 8 8 8 8",
    ]
    assert lines[4].startswith("rank 0  FFFFFFFfiwfiw")


def test_times_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.yaml"
    times.write_text("{forward: 0.5, input: 0.5, weight: 0.5}")
    assert danlu("schedule", *ZBV, "--times", str(times)) == 0
    assert "step 25.5 s, of which each rank computes 24" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["1f1b", "zbv"])
def test_pictures_of_the_docs_are_what_the_command_draws(kind: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    assert danlu("schedule", "--kind", kind, *ZBV[2:], "--svg", str(picture)) == 0
    drawn = picture.read_text()
    assert drawn == (TOP / "docs" / "pictures" / f"schedule_{kind}.svg").read_text(), (
        "danlu schedule --svg draws it anew"
    )
    assert danlu("schedule", *ZBV, "--svg", str(picture)) == 0  # over an earlier one


def test_the_timeline_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """216 units of 0.001 s, worked out by hand, of which each rank computes 180."""
    run = tmp_path / "run"
    run.mkdir()
    events = simulate(schedule("1f1b", 2, 1, 6), ActionTimes(forward=0.01, input=0.01, weight=0.01, send=0.001))
    for rank in (0, 1):
        lines = [timeline_line(event, 7) for event in events if event.rank == rank]
        (run / timeline_name(rank)).write_text("".join(f"{line}\n" for line in lines))
    assert danlu("schedule", "--run", str(run), "--svg", str(tmp_path / "picture.svg")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run, step 7: 1f1b, 2 stages, 6 micro-batches",
        "measured: bubble 0.2000 of the busy time; 0.2000 simulated with its mean times; (p - 1)/m = 0.1667",
        "in flight, micro-batches by rank: 2 1; min(m, p - r) = 2 1",
    ]
    assert "measured: bubble 0.2000" in (tmp_path / "picture.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--kind", "zvb", *ZBV[2:]), 2, "--kind: there is no schedule 'zvb'. Did you mean 'zbv'?"),
        (("--kind", "interleaved", "--stages", "4", "--microbatches", "9"), 2, "--microbatches: 9, which interleaved"),
        ((*ZBV, "--chunks", "3"), 2, "--chunks: 3, but zbv has 2 on each rank. Use 2"),
        (("--kind", "zbv", "--stages", "4"), 2, "--microbatches: needed, as in --kind zbv --stages 4"),
        ((*ZBV[:4], "--microbatches", "9999"), 2, "the most that are simulated. Use 6,250 or fewer"),
        (("--kind", "1f1b", "--stages", "60000", "--microbatches", "1"), 2, "Use fewer --stages"),
        ((*ZBV, "--step", "1"), 2, "--step: only with --run RUN"),
        (("--run", ".", "--kind", "zbv"), 2, "--kind: not with --run"),
        (("--run", "gone"), 5, "gone: there is no such folder"),
        ((*ZBV, "--svg", "notes.md"), 2, "--svg notes.md: exists and is no danlu schedule"),
        ((*ZBV, "--svg", "gone/picture.svg"), 2, "there is no folder gone"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.md").write_text("mine")
    assert danlu("schedule", *arguments) == code
    out, said = capsys.readouterr()
    assert out == "" and message in said
    assert Path("notes.md").read_text() == "mine"
