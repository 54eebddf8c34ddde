"""Every kind but LoRA in PEFT's words: ours loaded there, theirs loaded here, and the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.peft_reference import TOKENS, hugging_face, perturbed_adapter, save_adapter, theirs
from builders.tiny_adapters import adapter_set, logits
from builders.tiny_run import tiny_model
from safetensors.torch import load_file
from torch import Tensor

from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.peft_folder import CONFIG, FORMATS, WEIGHTS, add_adapter, format_of, write_adapter
from danlu.adapters.peft_values import PeftReader
from danlu.core.errors import ModelError
from danlu.models.decoder import Decoder
from danlu.models.loading import load
from danlu.recipe import sections


def ours(model: Decoder, adapters: AdapterSet) -> Tensor:
    return logits(model, TOKENS, virtual_token_ids=adapters.virtual_token_ids)


def written(adapters: AdapterSet, name: str, folder: Path, base: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One adapter of the set as a folder, its config values and its tensors."""
    write_adapter(adapters, name, folder, base=str(base), base_fingerprint=None)
    return json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)


CASES: list[tuple[str, Any]] = [
    ("llama", sections.Vera(rank=9)),
    ("llama", sections.Vera(rank=6, targets=["q_proj", "layers.1.mlp.up_proj"], projection_seed=4)),
    ("llama", sections.Vera(rank=6, targets=["v_proj", "lm_head"], save_projection=False)),
    ("phi3", sections.Vera(rank=9)),
    ("phi3", sections.Vera(rank=9, targets=["v_proj", "down_proj", "gate_proj"])),
    ("gemma2", sections.Vera(rank=9)),
    ("llama", sections.Ia3()),
    ("llama", sections.Ia3(targets=["attention", "mlp"], feedforward=["o_proj", "down_proj"])),
    ("llama", sections.Ia3(targets=["up_proj", "v_proj"], feedforward=["layers.1.mlp.up_proj"])),
    ("llama", sections.Ia3(targets=["v_proj"])),
    ("phi3", sections.Ia3()),
    ("phi3", sections.Ia3(targets=["mlp"], feedforward=["gate_proj", "up_proj"])),
    ("gemma2", sections.Ia3()),
    ("llama", sections.Prompt(tokens=3)),
    ("gemma2", sections.Prompt(tokens=3)),
    ("tied", sections.Prompt(tokens=4)),
    ("llama", sections.Prefix(tokens=3)),
    ("llama", sections.Prefix(tokens=2, projection=6)),
    ("phi3", sections.Prefix(tokens=3)),
    ("gemma2", sections.Prefix(tokens=3)),
    ("tied", sections.Prefix(tokens=1)),
]
OWN_CASES: list[tuple[str, Any]] = [
    ("llama", sections.Mora(rank=3, targets=["all-linear", "lm_head"])),
    ("llama", sections.Mora(modules_to_save=["norm"])),
    ("phi3", sections.Mora(rank=2, form="sharing", targets=["k_proj", "mlp"])),
    ("llama", sections.Bottleneck(width=5)),
    ("gemma2", sections.Bottleneck(placement="pfeiffer", activation="silu", width=3)),
]


@pytest.mark.parametrize(("family", "section"), CASES)
def test_peft_computes_what_danlu_wrote(bases: dict[str, Path], tmp_path: Path, family: str, section: Any) -> None:
    adapters, expected, base = perturbed_adapter(bases[family], section, size=0.2)
    written(adapters, "mine", tmp_path, bases[family])
    with_peft = theirs(peft.PeftModel.from_pretrained(hugging_face(bases[family]), tmp_path))
    torch.testing.assert_close(with_peft, expected, rtol=1e-5, atol=1e-5)
    assert (expected - base).abs().max() > 1e-2  # the negative control: without the adapter they are far apart


@pytest.mark.parametrize(("family", "section"), CASES + OWN_CASES)
def test_danlu_reads_what_it_wrote(bases: dict[str, Path], tmp_path: Path, family: str, section: Any) -> None:
    adapters, expected, base = perturbed_adapter(bases[family], section, size=0.2)
    values, tensors = written(adapters, "mine", tmp_path, bases[family])
    assert not any("mine" in key for key in tensors)
    if values["peft_type"].startswith("DANLU"):
        assert "written by danlu; PEFT has no such kind" in values["description"]
    again = load(bases[family])
    fresh = adapter_set(again, seed=9)
    add_adapter(fresh, "back", open_adapter(tmp_path))
    if getattr(section, "projection", None) is None:  # a projection is folded in another order
        assert torch.equal(ours(again, fresh), expected)
    torch.testing.assert_close(ours(again, fresh), expected, rtol=1e-5, atol=1e-5)
    assert (expected - base).abs().max() > 1e-2
    rewritten, same = FORMATS[values["peft_type"]].to_peft(
        fresh.added["back"].section, fresh.added["back"].modules, fresh.sites
    )
    assert {key: values[key] for key in rewritten} == rewritten and set(same) == {
        key for key in tensors if "model.norm." not in key
    }


PEFT_CONFIGS: list[tuple[str, Any]] = [
    ("llama", peft.VeraConfig(target_modules="all-linear", r=7)),
    ("llama", peft.VeraConfig(target_modules=["q_proj", "down_proj"], r=7, projection_prng_key=3, d_initial=0.3)),
    ("llama", peft.VeraConfig(target_modules=["k_proj", "up_proj"], r=7, save_projection=False)),
    ("phi3", peft.VeraConfig(target_modules="all-linear", r=7)),
    ("gemma2", peft.VeraConfig(target_modules=r".*\.1\.mlp\.(up|down)_proj", r=7)),
    ("llama", peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])),
    ("llama", peft.IA3Config(target_modules=r".*\.(q_proj|up_proj)", feedforward_modules=r".*\.1\..*up_proj")),
    ("phi3", peft.IA3Config(target_modules=["qkv_proj", "gate_up_proj"], feedforward_modules=["gate_up_proj"])),
    ("llama", peft.PromptTuningConfig(num_virtual_tokens=3)),
    ("llama", peft.PromptTuningConfig(num_virtual_tokens=2, prompt_tuning_init="SAMPLE_VOCAB")),
    ("gemma2", peft.PromptTuningConfig(num_virtual_tokens=3)),
    ("llama", peft.PrefixTuningConfig(num_virtual_tokens=3)),
    ("llama", peft.PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=5)),
    ("phi3", peft.PrefixTuningConfig(num_virtual_tokens=2)),
    ("gemma2", peft.PrefixTuningConfig(num_virtual_tokens=2)),
    ("tied", peft.PrefixTuningConfig(num_virtual_tokens=2)),
]


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A")
@pytest.mark.parametrize(("family", "config"), PEFT_CONFIGS)
def test_danlu_computes_what_peft_wrote(bases: dict[str, Path], tmp_path: Path, family: str, config: Any) -> None:
    torch.manual_seed(0)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(hugging_face(bases[family]), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    expected = theirs(model)
    save_adapter(model, tmp_path)
    decoder = load(bases[family])
    before = logits(decoder, TOKENS)
    adapters = adapter_set(decoder)
    add_adapter(adapters, "theirs", open_adapter(tmp_path))
    torch.testing.assert_close(ours(decoder, adapters), expected, rtol=1e-5, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        (sections.Vera(rank=4), {"bias": "all"}, "file: bias is 'all', which danlu does not support"),
        (sections.Vera(rank=4), {"r": 5}, r"q_proj.vera_lambda_d is \[4\], this model needs \[5\]: the adapter is of"),
        (sections.Vera(rank=4), {"d_initial": "x"}, "file: d_initial is 'x'; expected a number"),
        (sections.Vera(rank=4), {"projection_prng_key": [7]}, r"file: projection_prng_key is \[7\]; expected a number"),
        (sections.Vera(rank=4), {"vera_dropout": {}}, "file: vera_dropout is {}; expected a number"),
        (sections.Mora(rank=2), {"mora_dropout": "x"}, "file: mora_dropout is 'x'; expected a number"),
        (sections.Bottleneck(), {"placement": [7]}, r"placement is \[7\], which is none of houlsby, pfeiffer"),
        (sections.Ia3(), {"fan_in_fan_out": True}, "fan_in_fan_out is True, which danlu does not support"),
        (sections.Prompt(tokens=3), {"num_virtual_tokens": 4}, r"prompt_embeddings is \[3, 32\], this model needs"),
        (sections.Prefix(tokens=3), {"num_transformer_submodules": 2}, "num_transformer_submodules is 2, which"),
        (sections.Bottleneck(), {"placement": "parallel"}, "placement is 'parallel', which is none of houlsby, pfeif"),
        (sections.Bottleneck(), {"width": None}, "file: width is None; expected a whole number above 0"),
        (sections.Prompt(), {"num_virtual_tokens": 0}, "num_virtual_tokens is 0; expected a whole number above 0"),
        (sections.Mora(rank=2), {"mora_form": "type 2"}, "mora_form is 'type 2', which is none of rotation, sharing"),
        (sections.Mora(rank=2), {"r": 4}, r"mora_M is \[10, 10\], this model needs \[16, 16\]"),
    ],
)
def test_what_does_not_fit_is_said(section: Any, change: dict[str, Any], said: str) -> None:
    adapters = adapter_set(tiny_model())
    adapters.add("one", section)
    kind = format_of(section)
    values, tensors = kind.to_peft(section, adapters.added["one"].modules, adapters.sites)
    kind.from_peft(PeftReader(values, tensors, "file"), adapters.sites)
    with pytest.raises(ModelError, match=said):
        kind.from_peft(PeftReader(values | change, tensors, "file"), adapters.sites)


@pytest.mark.parametrize(
    "section",
    [sections.Vera(), sections.Mora(rank=2), sections.Ia3(), sections.Prompt(), sections.Prefix(),
     sections.Bottleneck()],
    ids=lambda section: section.kind,
)  # fmt: skip
def test_tensors_that_are_missing_or_of_another_model_are_said(section: Any) -> None:
    adapters = adapter_set(tiny_model())
    adapters.add("one", section)
    kind = format_of(section)
    values, tensors = kind.to_peft(section, adapters.added["one"].modules, adapters.sites)
    wider = adapter_set(tiny_model(hidden_size=48, intermediate_size=40, num_key_value_heads=1)).sites
    with pytest.raises(
        ModelError, match=r"file: .* is \[.*\], this model needs \[.*\]: the adapter is of another base"
    ):
        kind.from_peft(PeftReader(values, tensors, "file"), wider)
    with pytest.raises(ModelError, match=r"file: (.* is missing|holds no tensor of an? .* adapter of this model)"):
        kind.from_peft(PeftReader(values, {}, "file"), adapters.sites)
    if section.kind in ("vera", "bottleneck"):  # which have several tensors at a place
        last = next(key for key in tensors if key.endswith(("lambda_d", "up_bias")))
        del tensors[last]
        with pytest.raises(ModelError, match=f"file: {last} is missing"):
            kind.from_peft(PeftReader(values, tensors, "file"), adapters.sites)
