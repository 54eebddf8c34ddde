"""The pictures of a study: which lines are in them, and that they are written. Looked at as objects, not as pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.study_folders import write_run, write_study
from matplotlib.axes import Axes

from danlu.report.study_plots import draw, figures
from danlu.report.study_results import Study, read_study


def made(folder: Path, values: dict[str, dict[str, str]], **runs: dict[str, Any]) -> Study:
    """A study of runs by name; `runs` has what is special of one."""
    write_study(folder, values)
    for number, name in enumerate(values):
        losses = {step: 4.0 / step + number for step in range(1, 5)}
        given: dict[str, Any] = {"losses": losses, "evaluations": {2: 3.0 + number, 4: 2.0 + number}}
        write_run(folder / name, **{**given, **runs.get(name, {})})
    return read_study(folder)


def points(axes: Axes) -> list[list[tuple[float, float]]]:
    return [list(zip(*map(list, line.get_data()), strict=True)) for line in axes.lines]


def tick_labels(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_xticklabels()]


def test_one_key(tmp_path: Path) -> None:
    study = made(tmp_path, {f"r{rank}": {"adapter.rank": str(rank)} for rank in (2, 8, 32)})
    drawn = figures(study)
    assert list(drawn) == ["evaluation_loss", "cost", "loss_curves"]
    (loss,) = drawn["evaluation_loss"].axes
    assert points(loss) == [[(2.0, 2.0), (8.0, 3.0), (32.0, 4.0)]]  # the last is the best in every run
    assert loss.get_xlabel() == "adapter.rank" and loss.get_xscale() == "log" and tick_labels(loss) == ["2", "8", "32"]
    speed, memory = drawn["cost"].axes
    assert points(speed) == [[(2.0, 80.0), (8.0, 80.0), (32.0, 80.0)]]
    assert points(memory) == [[(2.0, 300.0), (8.0, 300.0), (32.0, 300.0)]]
    assert speed.get_ylim()[0] == memory.get_ylim()[0] == 0
    training, evaluation = drawn["loss_curves"].axes
    assert len(training.lines) == len(evaluation.lines) == 3
    assert points(training)[1] == [(step, 4.0 / step + 1) for step in range(1, 5)]
    assert points(evaluation)[2] == [(2, 5.0), (4, 4.0)]
    labels = [text.get_text() for text in evaluation.get_legend().get_texts()]
    assert labels == ["rank 2", "rank 8", "rank 32"]


def test_the_best_is_a_line_of_its_own_where_it_is_not_the_last(tmp_path: Path) -> None:
    rising = {"evaluations": {2: 1.0, 4: 2.0}}
    study = made(tmp_path, {name: {"a.b": name} for name in ("x", "y")}, y=rising)
    (loss,) = figures(study)["evaluation_loss"].axes
    assert points(loss) == [[(0.0, 2.0), (1.0, 1.0)], [(0.0, 2.0), (1.0, 2.0)]]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["best", "last"]
    assert tick_labels(loss) == ["x", "y"] and loss.get_xscale() == "linear"


def test_several_keys_and_seeds(tmp_path: Path) -> None:
    values = {
        f"{rank}_{rate}_{seed}": {"adapter.rank": rank, "optimizer.learning_rate": rate, "seed": seed}
        for rank in ("4", "8", "16") for rate in ("1e-4", "1e-3") for seed in ("0", "1")
    }  # fmt: skip
    drawn = figures(made(tmp_path, values))
    (loss,) = drawn["evaluation_loss"].axes
    assert points(loss) == [
        [(4.0, 2.5), (8.0, 6.5), (16.0, 10.5)],
        [(4.0, 4.5), (8.0, 8.5), (16.0, 12.5)],
    ]
    assert len(loss.collections) == 2  # bars of the spread over seeds
    assert loss.get_xscale() == "linear"
    labels = [text.get_text() for text in loss.get_legend().get_texts()]
    assert labels == ["learning_rate 1e-4 last", "learning_rate 1e-3 last"]
    training, evaluation = drawn["loss_curves"].axes
    assert len(training.lines) == len(evaluation.lines) == 12
    assert len({line.get_color() for line in training.lines}) == 6  # seeds of one combination share theirs
    assert len(training.get_legend_handles_labels()[1]) == 6


def test_without_evaluation_and_with_unfinished_runs(tmp_path: Path) -> None:
    none: dict[str, Any] = {"evaluations": None}
    study = made(
        tmp_path,
        {name: {"a.b": name} for name in ("1", "2", "3")},
        **{"1": none, "2": none, "3": {**none, "finished": False}},
    )
    drawn = figures(study)
    assert list(drawn) == ["training_loss", "cost", "loss_curves"]
    assert points(drawn["training_loss"].axes[0]) == [[(1.0, 1.0), (2.0, 2.0)]]
    (training,) = drawn["loss_curves"].axes
    assert len(training.lines) == 2


def test_seeds_alone_have_curves_only(tmp_path: Path) -> None:
    drawn = figures(made(tmp_path, {f"seed-{seed}": {"seed": seed} for seed in ("0", "1")}))
    assert list(drawn) == ["loss_curves"]
    assert [len(axes.lines) for axes in drawn["loss_curves"].axes] == [2, 2]


def test_long_curves_are_running_means(tmp_path: Path) -> None:
    losses = {step: float(step % 2) for step in range(1, 101)}
    study = made(tmp_path, {"run": {"a.b": "1"}}, run={"losses": losses})
    (curve,) = points(figures(study)["loss_curves"].axes[0])
    # A twentieth of a hundred steps is five, of which two or three have a loss of 1.
    assert curve[:4] == [(1, 1.0), (2, 0.5), (3, 2 / 3), (4, 0.5)]
    assert {height for _, height in curve[4:]} == {0.4, 0.6}


def test_files_are_written_and_the_same_each_time(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    study = made(tmp_path / "study", {name: {"model.path": name} for name in ("$a_b$", "丹炉", "ꙮ")})
    written = draw(study, tmp_path)
    assert sorted(path.name for path in written) == sorted(
        f"{name}.{kind}" for name in ("evaluation_loss", "cost", "loss_curves") for kind in ("png", "svg")
    )
    for path in written:
        start = path.read_bytes()[:5]
        assert start == (b"\x89PNG\r" if path.suffix == ".png" else b"<?xml")
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in draw(study, tmp_path)] == before
    assert not recwarn.list
