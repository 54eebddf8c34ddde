"""Models opened for answering: plain, with adapters, in 4 bits; merged where that can be done."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder, changed
from builders.tiny_adapters import logits
from builders.tiny_world import CONFIG, World

from danlu.assembly.quantizing import quantize
from danlu.core.errors import ModelError, ResourceError
from danlu.inference.load_model import LoadedModel, load_chat_tokenizer, load_model
from danlu.inference.resolve_model import resolve_model
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.saving import save
from danlu.recipe import sections


def opened(path: Path, base: Path | None = None, **more: Any) -> LoadedModel:
    resolved = resolve_model(str(path), None if base is None else str(base))
    return load_model(resolved, load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder), **more)


@pytest.fixture
def tied(tiny_world: World, tmp_path: Path) -> Path:
    model = build(read_config_values({**CONFIG, "vocab_size": 400, "tie_word_embeddings": True}))
    initialize(model, 0)
    save(model, tmp_path / "tied", tokenizer_from=tiny_world.tokenizer)
    return tmp_path / "tied"


def test_a_plain_model_in_the_type_it_is_stored_in(tiny_world: World, tmp_path: Path) -> None:
    plain = opened(tiny_world.base)
    assert plain.dtype == torch.float32 and plain.stacks is None and plain.virtual_token_ids == ()
    assert torch.equal(logits(plain.model), logits(load(tiny_world.base)))
    assert not any(parameter.requires_grad for parameter in plain.model.parameters())
    for stored, on_cpu in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        folder = tmp_path / str(stored)
        save(plain.model, folder, dtype=stored, tokenizer_from=tiny_world.tokenizer)
        assert opened(folder, device="cpu").dtype == on_cpu
        assert opened(folder, precision="fp32").dtype == torch.float32


MERGED: list[tuple[Any, bool]] = [
    (sections.Lora(), True),
    (sections.Dora(), True),
    (sections.Lora(modules_to_save=["norm"]), True),
    (sections.Prefix(tokens=2), False),
    (sections.Bottleneck(width=4), False),
]


@pytest.mark.parametrize(("section", "mergeable"), MERGED, ids=lambda value: getattr(value, "kind", ""))
def test_an_adapter_beside_its_base_or_in_it(tiny_world: World, tmp_path: Path, section: Any, mergeable: bool) -> None:
    folder = adapter_folder(tiny_world.base, tmp_path / "adapter", section, size=0.2)
    expected = adapted_logits(tiny_world.base, folder)
    apart, merged = opened(folder), opened(folder, merged=True)
    assert apart.stacks is not None and len(apart.virtual_token_ids) == (2 if section.kind == "prefix" else 0)
    assert torch.equal(logits(apart.model, virtual_token_ids=apart.virtual_token_ids), expected)
    assert (merged.stacks is None) == mergeable
    torch.testing.assert_close(
        logits(merged.model, virtual_token_ids=merged.virtual_token_ids), expected, rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(logits(opened(tiny_world.base).model), expected, atol=1e-3)
    assert not any(parameter.requires_grad for parameter in merged.model.parameters())


def test_a_tied_head_stays_tied_or_the_adapter_beside_it(tied: Path, tmp_path: Path) -> None:
    for targets, together in ((["all-linear"], True), (["lm_head"], False)):
        folder = adapter_folder(tied, tmp_path / targets[0], sections.Lora(targets=targets))
        merged = opened(folder, merged=True)
        assert (merged.stacks is None) == together
        expected = adapted_logits(tied, folder)
        torch.testing.assert_close(logits(merged.model), expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(logits(load(tied)), expected, atol=1e-3)


def test_a_folder_in_4_bits_stays_packed(tiny_world: World, tmp_path: Path) -> None:
    quantize(tiny_world.base, tmp_path / "nf4", sections.Nf4(), dtype=torch.bfloat16)
    shutil.copytree(tiny_world.base, tmp_path / "base")
    adapter = adapter_folder(tmp_path / "base", tmp_path / "adapter", sections.Lora())
    for found in (opened(tmp_path / "nf4"), opened(adapter, tmp_path / "nf4", merged=True)):
        assert found.dtype == torch.bfloat16
        linear = found.model.layers["0"].mlp.up_proj
        assert linear.weight is None and linear.quantized is not None
    here = opened(tiny_world.base, quantization=sections.Nf4())
    quantize(tiny_world.base, tmp_path / "wide", sections.Nf4())
    assert torch.equal(logits(here.model), logits(opened(tmp_path / "wide").model))
    assert not torch.allclose(logits(here.model), logits(opened(tiny_world.base).model), atol=1e-3)
    with pytest.raises(ModelError, match="is quantized already"):
        opened(tmp_path / "nf4", quantization=sections.Nf4())
    changed(tmp_path / "nf4", "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ModelError, match=r"gate_proj.weight in model.safetensors: expected shape"):
        opened(tmp_path / "nf4")


def test_stops_are_those_of_adapter_and_base(tiny_world: World, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_world.base, tmp_path / "base"))
    (base / "generation_config.json").write_text('{"eos_token_id": [300]}')
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    shutil.copytree(tiny_world.tokenizer, folder, dirs_exist_ok=True)
    (folder / "generation_config.json").write_text('{"eos_token_id": 301}')
    assert {300, 301} <= opened(folder).stop_ids
    assert 301 not in opened(base).stop_ids


def test_what_cannot_be_opened(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="device cuda: torch sees no CUDA device here"):
        opened(tiny_world.base, device="cuda")
    folder = adapter_folder(tiny_world.base, tmp_path / "adapter", sections.Lora())
    changed(folder, "adapter_config.json", peft_type="POLY")
    with pytest.raises(ModelError, match="peft_type 'POLY' is not supported; supported: .*LORA"):
        opened(folder)
