"""A run writes the timeline of the steps that it is asked for, in a form that `danlu schedule --run` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World
from builders.train_worker import train

from danlu.core.errors import DataError
from danlu.parallel.comm import ALONE
from danlu.parallel.timeline import read_timeline, timeline_name
from danlu.planning.pipeline_simulation import measured_orders, measured_shape
from danlu.training.timeline import TimelineWriter


def writer(folder: Path, after_step: int = 0) -> TimelineWriter:
    return TimelineWriter.in_folder(folder, 2, ALONE, torch.device("cpu"), after_step=after_step)


def take(step: int, timeline: TimelineWriter) -> None:
    timeline.begin(step)
    with timeline.timed("forward", 0, 0):
        pass
    with timeline.timed("update"):
        pass
    timeline.end()


def test_every_so_many_steps_are_written(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    for step in range(1, 6):
        take(step, timeline)
    assert read_timeline(tmp_path)[0] == 4
    step, events = read_timeline(tmp_path, 2)
    assert step == 2 and [(event.kind, event.chunk, event.micro) for event in events] == [
        ("forward", 0, 0),
        ("update", None, None),
    ]
    assert 0 <= events[0].start_s <= events[0].end_s <= events[1].start_s


def test_a_step_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    timeline.begin(2)
    with timeline.timed("forward", 0, 0):
        pass
    take(4, timeline)
    assert (tmp_path / timeline_name(0)).read_text().count("\n") == 2


def test_what_comes_after_the_checkpoint_is_dropped(tmp_path: Path) -> None:
    timeline = writer(tmp_path)
    for step in (2, 4, 6):
        take(step, timeline)
    take(6, writer(tmp_path, after_step=4))
    assert len(read_timeline(tmp_path, 6)[1]) == len(read_timeline(tmp_path, 4)[1]) == 2


def test_what_else_is_in_the_file_is_told_with_its_line(tmp_path: Path) -> None:
    take(2, writer(tmp_path))
    with (tmp_path / timeline_name(0)).open("a") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"timeline-0.jsonl:3: this is no JSON"):
        writer(tmp_path, after_step=2)


@pytest.mark.distributed
def test_a_run_of_stages_can_be_drawn(tiny_world: World, tmp_path: Path) -> None:
    files = [
        str(
            tiny_world.recipe(
                tmp_path / schedule,
                tmp_path / f"{schedule}.yaml",
                model={"config": {**CONFIG, "num_hidden_layers": 4}},
                parallel={"pipeline": {"stages": 2, "schedule": schedule}},
                log={"timeline": 2, "tensorboard": False},
                batch={"sequences": 4, "micro": 1},
                steps=3,
            )
        )
        for schedule in ("1f1b", "zbv")
    ]
    run_group(train, 2, files)
    for schedule in ("1f1b", "zbv"):
        step, events = read_timeline(tmp_path / schedule)
        shape = measured_shape(measured_orders(events))
        assert step == 2 and str(shape).startswith(f"{schedule}, 2 stages") and shape.micro_batches == 4
        assert {event.rank for event in events if event.kind == "reduce"} == {0, 1}
