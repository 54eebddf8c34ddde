"""Adapters that a recipe starts from bring along what they were trained upon."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder
from builders.tiny_adapters import logits
from builders.tiny_world import World

from danlu.adapters.adapter_set import AdapterSet
from danlu.assembly.adapter_training import adapted_model, merged_model, write_result
from danlu.assembly.base_model import Base
from danlu.assembly.recipe_adapters import base_changes, base_identity
from danlu.core.errors import ModelError
from danlu.core.layer_types import TRAINED
from danlu.data.tokenizer import load_tokenizer
from danlu.models.decoder import Decoder
from danlu.recipe import sections


@pytest.fixture
def stack(tiny_world: World, tmp_path: Path) -> tuple[Path, Path]:
    """An adapter, and one that was trained upon it."""
    lower = adapter_folder(tiny_world.base, tmp_path / "lower", sections.Lora(modules_to_save=["norm"]), size=0.2)
    upper = adapter_folder(
        tiny_world.base, tmp_path / "upper", sections.Lora(rank=2, modules_to_save=["norm"]), seed=2, below=(lower,)
    )
    return lower, upper


def started(base: Path, adapter: sections.AdapterSection, *paths: Path) -> tuple[Decoder, AdapterSet, Base]:
    model = sections.Model(path=str(base), adapters=[str(path) for path in paths])
    adapted, found = adapted_model(
        model, adapter, None, dtype=torch.float32, device=torch.device("cpu"), seed=0, encode=None, saved_adapter=None
    )
    return adapted.model, adapted.adapters, found


def test_a_hub_id_that_moved_on_is_told_with_both_revisions(tiny_world: World, tmp_path: Path) -> None:
    """Snapshots of the hub lie in folders that are named by their commit."""
    found = []
    for revision in ("0a1b2c", "3d4e5f"):
        folder = copytree(tiny_world.base, tmp_path / "models--owner--name" / "snapshots" / revision)
        found.append(base_identity(sections.Model(path=str(folder))))
    assert base_changes(*found) == []  # the same weights in another commit
    found[1]["model"]["fingerprint"] = "f" * 32
    (said,) = base_changes(*found)
    for revision, one in zip(("0a1b2c", "3d4e5f"), found, strict=True):
        assert f"(revision {revision}, fingerprint {one['model']['fingerprint']})" in said
    assert json.loads(json.dumps(found)) == found  # as a checkpoint brings it back


def test_a_new_adapter_starts_from_the_whole_stack(tiny_world: World, stack: tuple[Path, Path]) -> None:
    expected = adapted_logits(tiny_world.base, *stack)
    for named in (stack[1:], stack):
        model, adapters, _ = started(tiny_world.base, sections.Lora(), *named)
        assert torch.equal(logits(model), expected) and len(adapters.active) == 3
    assert not torch.allclose(adapted_logits(tiny_world.base, stack[1]), expected, atol=1e-3)
    whole = merged_model(
        sections.Model(path=str(tiny_world.base), adapters=[str(stack[1])]), device=torch.device("cpu")
    )
    torch.testing.assert_close(logits(whole), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("section", "token_ids"),
    [
        (sections.Lora(), {"embedding": [5, 9], "head": [5, 9]}),
        (sections.Lora(targets=["embed_tokens"]), {}),
        (sections.Lora(modules_to_save=["embed_tokens", "lm_head"]), {}),
        (sections.Prompt(), {}),
    ],
    ids=["rows", "factors", "whole", "virtual tokens"],
)
def test_rows_of_a_new_adapter_start_from_those_that_lie_below(
    tiny_world: World, tmp_path: Path, section: sections.AdapterSection, token_ids: dict[str, list[int]]
) -> None:
    lower = adapter_folder(tiny_world.base, tmp_path / "lower", section, size=0.1, token_ids=token_ids)
    (text,) = (text for text, own in load_tokenizer(str(tiny_world.tokenizer)).vocabulary.items() if own == 9)
    tokens = torch.tensor([9, 5, 3, 9] * 4)
    model, adapters, _ = started(tiny_world.base, sections.Lora(rank=2, trainable_tokens=[text]), lower)
    below = adapted_logits(tiny_world.base, lower, tokens=tokens)
    virtual = adapters.virtual_token_ids
    torch.testing.assert_close(logits(model, tokens, virtual_token_ids=virtual), below, rtol=1e-5, atol=1e-5)
    rows = [tensor for name, tensor in adapters.tensors(TRAINED).items() if name.endswith("token_rows")]
    assert len(rows) == 2
    for tensor in rows:
        tensor.data += 1
    assert not torch.allclose(logits(model, tokens, virtual_token_ids=virtual), below, atol=1e-2)


def test_an_adapter_that_is_trained_on_keeps_what_lies_below(
    tiny_world: World, tmp_path: Path, stack: tuple[Path, Path]
) -> None:
    lower, upper = stack
    model, adapters, base = started(tiny_world.base, sections.Continue(), upper)
    torch.testing.assert_close(logits(model), adapted_logits(tiny_world.base, *stack), rtol=1e-5, atol=1e-6)
    for continued, below in ((True, [lower]), (False, [lower, upper])):
        out = tmp_path / f"continued-{continued}"
        write_result(
            adapters, base, out, started_from=[str(upper)], continued=continued, quantization=sections.Nf4(),
            tokenizer_from=tiny_world.tokenizer, chat_template=None,
        )  # fmt: skip
        said = json.loads((out / "danlu.json").read_text())
        assert said["below"] == [str(path) for path in below]
        assert said["quantization"] == {"kind": "nf4", "block": 64, "double": True}


def test_what_lies_below_cannot_be_trained_on_above(tiny_world: World, stack: tuple[Path, Path]) -> None:
    with pytest.raises(
        ModelError, match="lower: is stacked below .*upper, which was trained on top of it, and so cannot be train"
    ):
        started(tiny_world.base, sections.Continue(), stack[1], stack[0])
