"""Bytes counted from a config, against the tensors that packed weights really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from danlu.assembly.frozen_base import quantize_stack, quantize_weight
from danlu.planning.packed_shapes import packed_bytes
from danlu.recipe import sections


@pytest.mark.parametrize(
    "section",
    [
        sections.Nf4(),
        sections.Fp4(block=128, double=False),
        sections.Nf4(block=32),
        sections.Int8(group=48),
        *(section() for section in sections.QUANTIZATIONS[3:]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("shape", [(1, 1), (3, 21), (16, 64), (100, 1000), (257, 64)])
def test_packed_matrices_of_every_kind(section: Any, shape: tuple[int, int]) -> None:
    assert quantize_weight(torch.randn(shape), section).stored_bytes() == packed_bytes(shape, section)
    stacked = quantize_stack(torch.randn(3, *shape), section)
    assert stacked.stored_bytes() == packed_bytes((3, *shape), section) == 3 * packed_bytes(shape, section)
