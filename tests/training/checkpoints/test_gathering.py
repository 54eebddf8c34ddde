"""Whole tensors on the first of several processes; results written from them equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import checkpoint_worker
from builders.checkpoint_worker import KINDS, LAYOUTS, adapted
from builders.process_group import run_group

from danlu.adapters.peft_folder import write_adapter
from danlu.core.shard_box import ShardBox
from danlu.models.saving import save
from danlu.parallel.comm import ALONE
from danlu.training.checkpoints.gathering import Gathering


@pytest.mark.distributed
def test_boxes_of_every_layout_come_together_on_the_first_rank() -> None:
    for wrong in run_group(checkpoint_worker.gathers, 4):
        assert wrong == {layout: [] for layout in LAYOUTS}


def test_alone_a_tensor_is_itself() -> None:
    tensor = torch.ones(2, 2)
    with Gathering(ALONE) as gathering:
        assert gathering.first
        assert gathering.whole("w", tensor, None).data_ptr() == tensor.data_ptr()  # type: ignore[union-attr]
        found = gathering.whole("w", tensor, ShardBox.full((2, 2)))
    assert found is not None and found.data_ptr() == tensor.data_ptr()


@pytest.mark.distributed
@pytest.mark.parametrize("after", [0, 2, 6])
def test_what_fails_on_the_first_rank_is_raised_on_all(after: int) -> None:
    first, *others = run_group(checkpoint_worker.gathering_fails, 3, after)
    assert first == "OSError: [Errno 28] No space left on device"
    assert others == ["CheckpointError: rank 0: OSError: [Errno 28] No space left on device"] * 2


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.distributed
def test_results_of_boxes_are_those_of_one_process(tmp_path: Path) -> None:
    run_group(checkpoint_worker.exports, 4, str(tmp_path))
    model, _ = adapted(None)
    save(model, tmp_path / "model")
    one = content(tmp_path / "model")
    assert content(tmp_path / "model-rows") == content(tmp_path / "model-grid") == one
    model.get_parameter("norm.weight").data[0] += 1
    save(model, tmp_path / "other")
    assert content(tmp_path / "other") != one
    for kind in KINDS:
        _, adapters = adapted(kind)
        (tmp_path / kind).mkdir()
        write_adapter(adapters, "mine", tmp_path / kind, base="b", base_fingerprint=None)
        assert content(tmp_path / f"adapter-{kind}") == content(tmp_path / kind), kind
