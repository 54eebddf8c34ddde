"""Families with parts of their own are cut by tensor, pipeline and experts, and compute what one process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.family_values import GEMMA4, GEMMA4_E2B
from builders.faults import injected
from builders.tiny_world import CONFIG, tiny_world

from danlu.models.hf_config import read_config_values
from danlu.numerics.relative_error import worst_error
from danlu.recipe import Recipe, load
from danlu.verification import verification
from danlu.verification.comparison import Comparison, compare
from danlu.verification.role_proxies import write_model
from danlu.verification.verification import Options, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
_GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
_GRANITE_4 = {
    **_GRANITE,
    "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 4,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 64,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "cohere2": {"model_type": "cohere2", "sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 0.5},
    "ernie": {"model_type": "ernie4_5", "use_bias": True, "tie_word_embeddings": True},
    "exaone4": {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": 2},
    "gemma": {"model_type": "gemma", "head_dim": 8, "hidden_act": "gelu"},
    "gemma4": {
        **GEMMA4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "gemma4-e2b": {
        **GEMMA4_E2B,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 400,
    },
    "gemma4-experts": {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
    },
    "glm": {"model_type": "glm", "head_dim": 8, "eos_token_id": 2, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 8, "eos_token_id": 2, "pad_token_id": 0},
    "glm4-moe-lite": {**_EXPERTS, **_LATENT, "model_type": "glm4_moe_lite", "moe_intermediate_size": 32},
    "gpt-neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "rotary_pct": 0.5},
    "granite-moe": {**_GRANITE, **_EXPERTS, "model_type": "granitemoe"},
    "granite-4": {**_GRANITE_4, "num_local_experts": 0},
    "granite-4-experts": {**_GRANITE_4, **_EXPERTS},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 50.0}},
    "phimoe": {
        "model_type": "phimoe",
        **_EXPERTS,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.3,
        "input_jitter_noise": 0.05,
    },
    "seed-oss": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
}
ROUNDED = {"exaone4": 3e-6, "gemma4": 1e-5, "gemma4-e2b": 3e-5, "gemma4-experts": 1e-5}
"""Norms behind both halves, and behind the embeddings of each layer, multiply what float32 rounds (3e-6 with gemma3; of
exaone4's adapters 1.4e-6, half of what a change of two units in the last place of each weight does): test_tensor.py
compares in float64."""
LAYOUTS = {
    "tensor": "{tensor: 2, sequence: true}",
    "pipeline": "{pipeline: {stages: 2, schedule: zbv}}",
    "tensor x shard": "{tensor: 2, shard: zero3}",
}
OF_EXPERTS = {"expert": "{expert: 2}", "expert x tensor": "{expert: 2, tensor: 2}"}
NOT_BY_TENSOR = {"gemma4-experts"}
"""Models with norms behind each of two sums, which tensor ranks have parts of."""
CASES = [
    (model, layout, parallel)
    for model, values in MODELS.items()
    for layout, parallel in (
        LAYOUTS | (OF_EXPERTS if values.get("num_local_experts") or values.get("num_experts") else {})
    ).items()
    if model not in NOT_BY_TENSOR or "tensor" not in parallel
    if model != "gemma4-e2b" or "pipeline" not in parallel  # stages pass on the residual stream alone
]


def gradient_error(comparison: Comparison) -> float:
    """The largest relative error of a gradient.

    Some gradients are nothing but rounding, as those of the biases of keys that are rotated in part (a number that all
    keys of a head have changes no softmax): errors are relative to a hundredth of the largest gradient of the step at
    the least.
    """
    errors = []
    for stage in dict.fromkeys(each.stage for each in comparison.compared if each.kind == "gradients"):
        sizes = {each.name: float(each.reference.norm()) for each in comparison.of(stage)}
        least = 1e-2 * max(sizes.values())
        errors += [each.error * min(1.0, sizes[each.name] / least) for each in comparison.of(stage)]
    return worst_error(errors)


def recipe_of(model: str, parallel: str, training: str, folder: Path) -> Recipe:
    """A recipe that trains a small model of the family in a layout."""
    config = {**CONFIG, "num_hidden_layers": 4, "vocab_size": 400, **MODELS[model]}
    write_model(read_config_values(config), folder / "base", 0)
    shutil.copytree(tiny_world().tokenizer, folder / "base", dirs_exist_ok=True)
    changes = {"model": {"path": str(folder / "base"), "config": None, "tokenizer": None}}
    overrides = [f"parallel={parallel}", "optimizer={kind: sgd, learning_rate: 0.1, momentum: 0.9}"]
    overrides += ["adapter={kind: lora, dropout: 0.1}"] if training == "lora" else []
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml", **changes), overrides).recipe


@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize(("model", "layout", "parallel"), CASES, ids=[f"{model}, {name}" for model, name, _ in CASES])
def test_a_layout_of_a_family_is_one_process(
    model: str, layout: str, parallel: str, training: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(model, parallel, training, tmp_path)
    comparisons: list[Comparison] = []

    def compared(*args: Any, **options: Any) -> Comparison:
        comparisons.append(compare(*args, **options))
        return comparisons[-1]

    monkeypatch.setattr(verification, "compare", compared)
    report, rows = verify("r.yaml", recipe, Options(steps=2, traffic=True))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    errors = {check.what: check.error for check in report.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6
    assert len(comparisons) == 1 and gradient_error(comparisons[0]) < ROUNDED.get(model, 1e-6)
    assert errors["saved weights, loaded"] == 0
    assert rows and all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)


MISTAKES: dict[str, tuple[str, str, str]] = {
    "a bias has the role of another": ("seed-oss", "builders.family_faults:bias-on-every-rank", "embed_tokens.weight"),
    "gradients of norms are not summed": ("gpt-neox", injected("missing-norm-sum"), "layers.0.attention_norm.weight"),
}
"""By mistake: the model, the fault, and the first that is wrong."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_layout_of_a_family_is_noticed(name: str, tmp_path: Path) -> None:
    model, fault, first = MISTAKES[name]
    report, _ = verify("r.yaml", recipe_of(model, LAYOUTS["tensor"], "full", tmp_path), Options(steps=1, fault=fault))
    assert report.finding is not None and not all(check.holds for check in report.checks)
    assert report.finding.parameter == first
