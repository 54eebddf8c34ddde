"""Several stacks of adapters over one base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder
from builders.tiny_adapters import logits
from builders.tiny_run import tiny_model

from danlu.adapters.adapter_config import adapter_stack
from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.frozen_base import adapters_of
from danlu.core.errors import ModelError
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    save(tiny_model(), folder)
    return folder


def test_each_stack_is_as_if_it_were_alone(base: Path, tmp_path: Path) -> None:
    """Also where their adapters train the same parameters in full, and where one lies in two of them."""
    norm = sections.Lora(rank=2, modules_to_save=["norm"])
    lower = adapter_folder(base, tmp_path / "lower.v1", norm)
    upper = adapter_folder(base, tmp_path / "upper", sections.Lora(rank=3), seed=2, below=(lower,))
    other = adapter_folder(base, tmp_path / "forward", norm, seed=3)
    model = load(base)
    plain = logits(model)
    stacks = AdapterStacks(adapters_of(model))
    assert [stacks.add(adapter_stack(folder)) for folder in (lower, upper, other)] == [0, 1, 2]
    assert torch.equal(logits(model), plain) and len(stacks.adapters.added) == 3
    seen = []
    for number, folders in ((0, [lower]), (1, [lower, upper]), (2, [other]), (None, []), (0, [lower])):
        stacks.use(number)
        seen.append(logits(model))
        assert torch.equal(seen[-1], adapted_logits(base, *folders))
    assert torch.equal(seen[0], seen[4]) and torch.equal(seen[3], plain)
    assert not any(torch.allclose(seen[one], seen[two], atol=1e-3) for one, two in ((0, 1), (1, 2), (2, 3), (0, 3)))


def test_an_order_without_a_meaning_is_told_by_name(base: Path, tmp_path: Path) -> None:
    lower = adapter_folder(base, tmp_path / "lower", sections.Lora())
    upper = adapter_folder(base, tmp_path / "run" / "adapter", sections.Dora(), below=(lower,))
    stacks = AdapterStacks(adapters_of(load(base)))
    number = stacks.add(adapter_stack(upper))
    with pytest.raises(ModelError, match="adapter '1-run' is DoRA, which scales the weight itself"):
        stacks.use(number)
