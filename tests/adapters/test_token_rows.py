"""Rows of single tokens next to LoRA (`trainable_token_indices`): PEFT reads ours, and we read PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.peft_reference import TOKENS, hugging_face, theirs
from builders.tiny_adapters import adapter_set, logits, perturb
from builders.tiny_run import saved_models
from safetensors.torch import load_file
from torch import Tensor

from danlu.adapters.adapter_config import CONFIG, read_adapter_config
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.merge import merged_parameter, unties_head
from danlu.adapters.peft_folder import WEIGHTS, add_adapter, write_adapter
from danlu.assembly.base_model import find_base
from danlu.core.errors import ModelError, RecipeError
from danlu.models.loading import load
from danlu.recipe import sections

IDS = sorted({int(TOKENS[3]), int(TOKENS[9]), 60}, reverse=True)
BASES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "tie_word_embeddings": True,
    },
}
BOTH = {"embedding": IDS, "head": IDS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.mktemp("bases"), BASES)


def with_rows(base: Path, **section: Any) -> AdapterSet:
    adapters = adapter_set(load(base))
    adapters.add("mine", sections.Lora(rank=2, **section), token_ids=BOTH)
    adapters.train_only("mine")
    return adapters


def close(ours: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(ours, expected, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("name", BASES)
def test_peft_computes_the_same_from_our_folder(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    base = folders[name]
    adapters = with_rows(base)
    model: Any = adapters.model
    assert close(logits(model, TOKENS), logits(load(base), TOKENS))  # it starts without effect
    perturb(adapters, "mine")
    ours = logits(model, TOKENS)
    assert not close(ours, logits(load(base), TOKENS))
    write_adapter(adapters, "mine", tmp_path, base=str(base), base_fingerprint=find_base(base).fingerprint)
    assert close(ours, theirs(peft.PeftModel.from_pretrained(hugging_face(base), tmp_path)))
    rows = {key: tensor for key, tensor in load_file(tmp_path / WEIGHTS).items() if "token_adapter" in key}
    assert len(rows) == (2 if name == "untied" else 1)

    again = adapter_set(load(base))
    add_adapter(again, "again", read_adapter_config(tmp_path))
    assert torch.equal(logits(again.model, TOKENS), ours)  # type: ignore[arg-type]
    with again.disabled():
        assert torch.equal(logits(again.model, TOKENS), logits(load(base), TOKENS))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BASES)
def test_we_compute_the_same_from_peft_s_folder(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    base = folders[name]
    both = {"embed_tokens": IDS, "lm_head": IDS} if name == "untied" else IDS
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices=both, task_type="CAUSAL_LM")
    model = peft.get_peft_model(hugging_face(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    adapters = adapter_set(load(base))
    without = logits(adapters.model, TOKENS)  # type: ignore[arg-type]
    add_adapter(adapters, "theirs", read_adapter_config(tmp_path))
    ours = logits(adapters.model, TOKENS)  # type: ignore[arg-type]
    assert close(ours, theirs(model))
    assert not close(ours, without)


@pytest.mark.parametrize("name", BASES)
def test_a_merged_model_computes_the_same_and_a_tied_head_stays_tied(folders: dict[str, Path], name: str) -> None:
    adapters = with_rows(folders[name])
    perturb(adapters, "mine")
    assert not unties_head(adapters)
    merged = load(folders[name])
    for parameter, own in merged.named_parameters():
        own.data.copy_(merged_parameter(adapters, parameter))
    model: Any = adapters.model
    assert close(logits(merged, TOKENS), logits(model, TOKENS))


def test_only_the_named_rows_have_gradients(folders: dict[str, Path]) -> None:
    adapters = with_rows(folders["tied"])
    model: Any = adapters.model
    weight = model.head_weight
    assert torch.equal(weight, model.embed_tokens.weight)
    weight.square().sum().backward()
    (rows,) = (parameter for name, parameter in adapters.tensors("mine").items() if name.endswith("token_rows"))
    assert torch.allclose(rows.grad, 2 * rows.detach())
    assert model.embed_tokens.weight.grad is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (sections.Vera(rank=2), "adapter.kind: vera trains no rows of single tokens"),
        (sections.Lora(targets=["q_proj", "lm_head"]), "adapter.targets: lm_head has rows of its own"),
        (sections.Lora(targets=["embed_tokens"]), r"adapter.targets: model.embed_tokens has rows of its own"),
    ],
)
def test_adapters_that_can_have_no_rows_are_refused(folders: dict[str, Path], section: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapter_set(load(folders["untied"])).add("mine", section, token_ids=BOTH)


def test_a_matrix_that_is_trained_in_full_has_no_rows(folders: dict[str, Path]) -> None:
    names = with_rows(folders["untied"], modules_to_save=["embed_tokens"]).tensors("mine")
    assert [name for name in names if name.endswith("token_rows")] == ["lm_head.adapter.mine.token_rows"]
    names = with_rows(folders["tied"], modules_to_save=["embed_tokens"]).tensors("mine")
    assert not [name for name in names if name.endswith("token_rows")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([64], "has 64, and this base has 64 rows"),
        ([1, 1], "expected different ids"),
        ({"q_proj": [1]}, "names q_proj, and only rows of embedding and head"),
        ([], "expected different ids"),
    ],
)
def test_indices_that_cannot_be_are_named(folders: dict[str, Path], tmp_path: Path, value: Any, message: str) -> None:
    adapters = with_rows(folders["tied"])
    write_adapter(adapters, "mine", tmp_path, base="base", base_fingerprint=None)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "trainable_token_indices": value}))
    with pytest.raises(ModelError, match=message):
        add_adapter(adapter_set(load(folders["tied"])), "again", read_adapter_config(tmp_path))
