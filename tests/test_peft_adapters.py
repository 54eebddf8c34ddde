"""Adapters that PEFT itself saved, in everything that danlu does with one: the logits are those of PEFT's reload."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import changed
from builders.covering import fast
from builders.peft_reference import TOKENS, hugging_face, save_adapter, theirs
from builders.tiny_adapters import logits
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.adapters.adapter_config import CONFIG, adapter_stack
from danlu.adapters.combine import Combination
from danlu.assembly.adapter_training import adapted_model, merged_model
from danlu.assembly.combining import combine
from danlu.assembly.merging import merge
from danlu.core.errors import ModelError, RecipeError
from danlu.inference.load_adapted import load_adapted_model
from danlu.inference.resolve_model import ResolvedModel
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections

CPU = torch.device("cpu")
LORA = {"target_modules": ["q_proj", "up_proj"], "r": 4}
KINDS: dict[str, Any] = {
    **{
        f"init {init}": peft.LoraConfig(**LORA, init_lora_weights=init)
        for init in (True, False, "gaussian", "orthogonal", "mica", "lora_ga", "pissa", "olora")
    },
    "rslora": peft.LoraConfig(**LORA, use_rslora=True, lora_alpha=3),
    "pissa rslora": peft.LoraConfig(**LORA, use_rslora=True, lora_alpha=3, init_lora_weights="pissa"),
    "dora": peft.LoraConfig(**LORA, use_dora=True),
    "dora olora": peft.LoraConfig(**LORA, use_dora=True, init_lora_weights="olora"),
    "vera": peft.VeraConfig(target_modules=["q_proj", "up_proj"], r=7),
    "ia3": peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(target_modules=["q_proj", "up_proj"], r=3, alpha=5),
    "lokr": peft.LoKrConfig(target_modules=["q_proj", "up_proj"], r=2, alpha=5, decompose_both=True),
    "lokr of whole factors": peft.LoKrConfig(target_modules=["q_proj", "up_proj"], r=16, rank_pattern={"up_proj": 1}),
    "adalora": peft.AdaLoraConfig(target_modules=["q_proj", "up_proj"], init_r=5, total_step=10, lora_alpha=3),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=3),
}
MERGED = [kind for kind in KINDS if kind not in ("prompt", "prefix")]
LORAS = [kind for kind, config in KINDS.items() if type(config) is peft.LoraConfig and not config.use_dora]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    save(tiny_model(num_key_value_heads=4), folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """For each kind the folder that PEFT wrote, and the logits of PEFT's reload of it."""
    made = {}
    for kind, config in KINDS.items():
        folder = tmp_path_factory.mktemp("adapter") / kind.replace(" ", "-")
        config.task_type = "CAUSAL_LM"
        torch.manual_seed(0)
        model = peft.get_peft_model(hugging_face(base), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        save_adapter(model, folder)
        changed(folder, CONFIG, base_model_name_or_path=str(base))
        made[kind] = folder, theirs(peft.PeftModel.from_pretrained(hugging_face(base), folder))
    return made


def close(ours: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(ours, expected, rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("kind", fast(KINDS, *list(KINDS)[::2]))
def test_answering_and_evaluating(base: Path, saved: dict[str, tuple[Path, Tensor]], kind: str) -> None:
    """What `generate`, `chat` and `eval` open, with the adapter beside its base and merged into it."""
    folder, expected = saved[kind]
    for merged in (False, True):
        model, stacks = load_adapted_model(
            ResolvedModel(folder, base, base, (tuple(adapter_stack(folder)),)),
            dtype=torch.float32,
            device="cpu",
            quantization=None,
            merged=merged,
        )
        virtual_token_ids = () if stacks is None else stacks.adapters.virtual_token_ids
        assert close(logits(model, TOKENS, virtual_token_ids=virtual_token_ids), expected)
    assert not close(logits(load(base), TOKENS), expected)  # the negative control: the base is not near


@pytest.mark.parametrize("kind", fast(MERGED, *MERGED[::2]))
def test_merging(saved: dict[str, tuple[Path, Tensor]], tmp_path: Path, kind: str) -> None:
    folder, expected = saved[kind]
    merge([folder], tmp_path / "out")
    assert close(logits(load(tmp_path / "out"), TOKENS), expected)
    assert close(theirs(hugging_face(tmp_path / "out")), expected)


@pytest.mark.parametrize("kind", fast(LORAS, *list(LORAS)[::2]))
def test_merging_as_an_adapter(base: Path, saved: dict[str, tuple[Path, Tensor]], tmp_path: Path, kind: str) -> None:
    """With another adapter at weight 0 and 1: what PEFT computes of the result is what danlu merges into the base."""
    folder, expected = saved[kind]
    other, _ = saved["rslora"]
    combine([folder, other], tmp_path / "alone", Combination((1.0, 0.0), "cat"))
    alone = theirs(peft.PeftModel.from_pretrained(hugging_face(base), tmp_path / "alone"))
    assert close(alone, expected)
    combine([folder, other], tmp_path / "both", Combination((1.0, 1.0), "cat"), into=base)
    merge([folder, other], tmp_path / "whole")
    both = theirs(peft.PeftModel.from_pretrained(hugging_face(base), tmp_path / "both"))
    assert close(both, logits(load(tmp_path / "whole"), TOKENS)) and not close(both, expected)


def test_a_start_needs_the_base_that_it_is_a_part_of(saved: dict[str, tuple[Path, Tensor]], tmp_path: Path) -> None:
    lost = copytree(saved["init pissa"][0], tmp_path / "lost")
    changed(lost, CONFIG, base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match="the model it was trained on cannot be had.*Say where it is with --into"):
        combine([lost, lost], tmp_path / "out", Combination((1.0, 1.0), "cat"))


@pytest.mark.parametrize("kind", fast(KINDS, *list(KINDS)[1::2]))
def test_training_starts_where_peft_left_off(base: Path, saved: dict[str, tuple[Path, Tensor]], kind: str) -> None:
    """`model.adapters`: a new adapter upon it, itself trained on, the whole model trained with it merged."""
    folder, expected = saved[kind]
    model = sections.Model(path=str(base), adapters=[str(folder)])
    elsewhere = "k_proj" if "dora" in kind else "q_proj"  # nothing may lie below DoRA, nor a start beside it
    for section in (sections.Pissa(targets=[elsewhere], rank=2), sections.Continue()):
        adapted, _ = adapted_model(
            model, section, None, dtype=torch.float32, device=CPU, seed=0, encode=None, saved_adapter=None
        )
        ours = logits(adapted.model, TOKENS, virtual_token_ids=adapted.adapters.virtual_token_ids)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)
    if kind not in ("prompt", "prefix"):
        assert close(logits(merged_model(model, device=CPU), TOKENS), expected)


@pytest.mark.parametrize("kind", ["OFT", "BOFT", "HRA"])
def test_kinds_that_are_no_sum_are_refused_by_name(
    saved: dict[str, tuple[Path, Tensor]], tmp_path: Path, kind: str
) -> None:
    folder = copytree(saved["loha"][0], tmp_path / "other")
    changed(folder, CONFIG, peft_type=kind)
    with pytest.raises(ModelError, match=f"peft_type '{kind}' is not supported; .* Merge it with PEFT"):
        merge([folder], tmp_path / "out")


@pytest.mark.parametrize("change", [{"lora_bias": True}, {"use_dora": True, "target_modules": ["embed_tokens"]}])
def test_settings_that_danlu_does_not_compute_are_refused_by_name(
    base: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    model = hugging_face(base)
    for name, module in model.named_modules():
        if name.endswith("q_proj") and "lora_bias" in change:  # PEFT wants a bias of the base
            module.bias = torch.nn.Parameter(torch.zeros(module.out_features))
    config = peft.LoraConfig(**{**LORA, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **change})
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    message = "lora_bias is True, which danlu does not support|dora cannot sit on an embedding"
    with pytest.raises((ModelError, RecipeError), match=message):
        merge([tmp_path / "theirs"], tmp_path / "out", into=base)
