"""Runs from folders that hold more than danlu trains, or whose weights their publisher stored in 4 bits."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import World, danlu
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.assembly.base_model import weight_layouts
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.saving import save
from danlu.training import loop

pytestmark = pytest.mark.usefixtures("tokenising_here")

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rope_scaling": None,
}
VISION = {"vision_tower.patch.weight": torch.arange(12.0).view(3, 4).bfloat16()}


def base_of(world: World, folder: Path, values: dict[str, Any]) -> Path:
    model = build(read_config_values(values))
    initialize(model, 0)
    save(model, folder, tokenizer_from=world.tokenizer)
    return folder


def recipe(world: World, output: Path, base: Path, **changes: Any) -> Path:
    return world.recipe(output, **{"model": {"config": None, "path": str(base), "tokenizer": None}, **changes})


def rewritten(folder: Path, tensors: dict[str, Tensor], **values: Any) -> None:
    """The folder with other tensors, and with more in its config.json."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.fixture
def multimodal(tiny_world: World, tmp_path: Path) -> Path:
    """A folder of Gemma 3 with one tensor of a vision tower."""
    folder = base_of(tiny_world, tmp_path / "base", GEMMA3)
    stored = load_file(folder / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    text = json.loads((folder / "config.json").read_text())
    architectures = ["Gemma3ForConditionalGeneration"]
    rewritten(folder, named | VISION, model_type="gemma3", architectures=architectures, text_config=text)
    return folder


def test_a_multimodal_run_whose_folder_is_gone_is_told_before_it_goes_on(
    tiny_world: World,
    multimodal: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, accumulate, steps = tmp_path / "run", loop.accumulate, 0
    file = recipe(tiny_world, run, multimodal, steps=4, checkpoint={"every": 2})

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGTERM)
        return accumulate(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", counted)
    assert danlu("train", file) == 143
    weights, made = multimodal / "model.safetensors", steps
    away = weights.rename(tmp_path / "away.safetensors")
    capfd.readouterr()
    assert danlu("train", file) == 4
    told = capfd.readouterr().err
    assert "The result takes the tensors that are not trained over from this folder: put it back" in told
    assert str(multimodal) in told and steps == made
    away.rename(weights)
    assert danlu("train", file) == 0
    before, after = load_file(weights), load_file(run / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(after["vision_tower.patch.weight"], VISION["vision_tower.patch.weight"])
    assert after["vision_tower.patch.weight"].dtype == torch.bfloat16
    trained = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert len(trained) == len(before) - 1
    values = json.loads((run / "model" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("gemma3", ["Gemma3ForConditionalGeneration"])


def test_lora_over_mxfp4_is_lora_over_the_dequantized_weights(tiny_world: World, tmp_path: Path) -> None:
    packed, dense, other = tmp_path / "packed", tmp_path / "dense", tmp_path / "other"
    tensors = load_file(base_of(tiny_world, packed, GPT_OSS) / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape[:-1], dtype=torch.uint8, generator=draw)
    rewritten(packed, tensors, quantization_config={"quant_method": "mxfp4"})
    save(load(packed), dense, tokenizer_from=tiny_world.tokenizer)
    changed = load_file(dense / "model.safetensors")
    changed["model.layers.1.mlp.experts.down_proj"] *= 1.01
    save(load(packed), other, tokenizer_from=tiny_world.tokenizer)
    rewritten(other, changed)
    results = []
    for base in (packed, dense, other):
        run = tmp_path / f"run-{base.name}"
        assert danlu("train", recipe(tiny_world, run, base, adapter={"kind": "lora", "rank": 2}, steps=3)) == 0
        results.append(load_file(run / "adapter" / "adapter_model.safetensors"))
    over_packed, over_dense, over_other = results
    assert over_packed.keys() == over_dense.keys() and len(over_packed) > 8
    assert all(torch.equal(over_packed[name], over_dense[name]) for name in over_packed)
    assert any(tensor.any() for name, tensor in over_packed.items() if "lora_B" in name)
    assert not all(torch.equal(over_other[name], over_dense[name]) for name in over_dense)  # control


def test_a_folder_of_codes_is_trained_on_evaluated_and_merged(
    tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """LoRA over codes that stay as they are equals LoRA over their numbers; a whole model starts from these."""
    codes, dense = tmp_path / "codes", tmp_path / "dense"
    rounding = [{"kind": "nearest", "group": 16, "bits": 3}]
    values = {"stage": "quantize", "model": str(tiny_world.base), "quantization": rounding, "output": str(codes)}
    (tmp_path / "quantize.yaml").write_text(json.dumps({**values, "export": "compressed-tensors", "threads": 1}))
    assert danlu("quantize", tmp_path / "quantize.yaml") == 0
    assert f"danlu eval {codes}" in capfd.readouterr().err
    save(load(codes, layouts=weight_layouts(codes)), dense, tokenizer_from=tiny_world.tokenizer)
    adapter = {"kind": "lora", "rank": 2}
    results = {}
    for base in (codes, dense, tiny_world.base):
        run = tmp_path / f"lora-{base.name}"
        assert danlu("train", recipe(tiny_world, run, base, adapter=adapter, steps=3)) == 0
        results[base] = load_file(run / "adapter" / "adapter_model.safetensors")
    assert len(results[codes]) > 8
    assert all(torch.equal(results[codes][name], results[dense][name]) for name in results[dense])
    assert not all(torch.equal(results[codes][name], results[tiny_world.base][name]) for name in results[dense])
    capfd.readouterr()
    assert danlu("eval", codes, "--data", tiny_world.chat, "--json") == 0
    of_codes = capfd.readouterr().out
    assert danlu("eval", dense, "--data", tiny_world.chat, "--json") == 0
    assert json.loads(of_codes)["loss"] == json.loads(capfd.readouterr().out)["loss"]
    assert danlu("merge", tmp_path / "lora-codes" / "adapter", tmp_path / "merged") == 0
    assert danlu("merge", tmp_path / "lora-dense" / "adapter", tmp_path / "merged-dense") == 0
    merged, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "merged-dense"))
    assert all(torch.equal(merged[name], expected[name]) for name in expected) and merged.keys() == expected.keys()
    capfd.readouterr()
    assert danlu("train", recipe(tiny_world, tmp_path / "full", codes, steps=3)) == 0
    shown = capfd.readouterr().err
    assert "model.path: weights stored as compressed-tensors are dequantised; the result has them in float32" in shown
    assert danlu("train", recipe(tiny_world, tmp_path / "full-dense", dense, steps=3)) == 0
    trained, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("full", "full-dense"))
    assert all(torch.equal(trained[name], other[name]) for name in other)
    assert "quantization_config" not in json.loads((tmp_path / "full" / "model" / "config.json").read_text())
