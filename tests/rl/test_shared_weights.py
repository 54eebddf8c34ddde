"""Weights in shared memory: what one process writes another reads, to the bit."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
import torch

from danlu.core.errors import ResourceError
from danlu.rl.shared_weights import SharedWeights

SHAPES = {"a.weight": ((3, 5), torch.float32), "b": ((), torch.bfloat16), "empty": ((0, 2), torch.float32),
          "c.bias": ((7,), torch.bfloat16)}  # fmt: skip


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def test_another_mapping_reads_what_was_written_last():
    weights = SharedWeights.create(SHAPES)
    other = SharedWeights(weights.file)
    for seed in (1, 2):
        weights.write(values(seed).items())
        read = dict(other.read())
        assert read.keys() == SHAPES.keys() - {"empty"}
        assert all(torch.equal(read[name], values(seed)[name]) for name in read)
        assert all(read[name].dtype == SHAPES[name][1] for name in read)
    assert not torch.equal(dict(other.read())["a.weight"], values(1)["a.weight"])  # control
    starts = [(each.start, each.stop) for each in weights.file.tensors]
    assert all(start % 64 == 0 for start, _ in starts)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(starts))
    weights.close()


def test_values_have_to_be_all_there():
    weights = SharedWeights.create(SHAPES)
    with pytest.raises(AssertionError, match=r"no values of c\.bias"):
        weights.write((name, value) for name, value in values(1).items() if name != "c.bias")
    with pytest.raises(KeyError):
        weights.write([("d", torch.zeros(1))])
    weights.close()


def test_too_little_memory_is_told(monkeypatch):
    def fallocate(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate, raising=False)
    with pytest.raises(ResourceError, match=r"no memory for the 4\.00 GiB .*No space left.*Use staleness: 0"):
        SharedWeights.create({"a": ((1 << 30,), torch.float32)})
