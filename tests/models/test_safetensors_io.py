"""Files written tensor by tensor, read back by safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from danlu.core.safetensors_format import read_header
from danlu.models.safetensors_io import TensorStream

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "model.layers.0.self_attn.q_proj.weight": torch.arange(7, dtype=torch.uint8).view(7, 1),
    "half": torch.arange(5).to(torch.bfloat16),
    "of no size": torch.zeros(0, 3),
    "across": torch.arange(6.0).view(2, 3).t(),
}


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "some.safetensors"
    with TensorStream(file, [*TENSORS, "a name that never comes"]) as stream:
        for name, tensor in TENSORS.items():
            stream.add(name, tensor)
    back = load_file(file)
    assert back.keys() == TENSORS.keys() == read_header(file).keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert stream.names == list(TENSORS) and stream.bytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert not torch.equal(back["across"], TENSORS["a"].view(3, 2))  # the negative control


def test_room_that_does_not_suffice_is_a_defect(tmp_path: Path) -> None:
    def write() -> None:
        with TensorStream(tmp_path / "x", ["a"]) as stream:
            for number in range(9):
                stream.add(f"number {number}", TENSORS["a"])

    with pytest.raises(AssertionError, match="the header takes"):
        write()


def test_an_error_passes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), TensorStream(tmp_path / "x", []):
        raise KeyError("mine")
