"""Layouts of models with experts are verified, and what they are known to get wrong is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.faults import injected
from builders.small_experts import EXPERT_CONFIGS, KINDS, experts_config
from builders.tiny_world import tiny_world

from danlu.core.errors import RecipeError
from danlu.models.hf_config import read_config_values
from danlu.recipe import Recipe, load
from danlu.verification import decoder_proxy
from danlu.verification.role_proxies import write_model
from danlu.verification.verification import Options, verify

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "expert 2": ("qwen2-moe", ["parallel={expert: 2}"], "data 2 x expert 2"),
    "zero3, expert 2": ("deepseek-v3", ["parallel={shard: zero3, expert: 2}"], "zero3, data 4 x expert 2"),
    "expert 2 x tensor 2": (
        "mixtral",
        ["parallel={expert: 2, tensor: 2}", "router={balance: sequence, sequence: 0.01, z: 0.001}"],
        "data 2 x expert 2 x tensor 2",
    ),
    "zero3, expert 2, recompute full": (
        "mixtral",
        ["parallel={shard: zero3, expert: 2}", "memory=full", "router={balance: step, rate: 0.01}"],
        "zero3, data 4 x expert 2, recompute full",
    ),
    "expert 2 x context 2": (
        "mixtral",
        ["parallel={expert: 2, context: 2}", "router={balance: sequence, sequence: 0.01, z: 0.001}"],
        "expert 2 x context 2",
    ),
}
BALANCED = "router={balance: sequence, sequence: 0.01, z: 0.001}"
MISTAKES: dict[str, tuple[list[str], str | None, str]] = {
    "balance-of-one-share": (["parallel={context: 2}", BALANCED], "embed_tokens.weight", "one context rank's share"),
    "balance-on-each-tensor-rank": (["parallel={tensor: 2}", BALANCED], "embed_tokens.weight", "each tensor rank adds"),
    "counted-filler": (["parallel={expert: 2}"], "layers.0.mlp.router", "fill a batch up"),
    "counts-of-one-rank": (["parallel={expert: 2}"], "layers.0.mlp.router", "its own tokens alone"),
    "counts-of-recomputed-rows": (["parallel={expert: 2}", "memory=full"], "layers.0.mlp.router", "recomputed"),
    "expert-gradients-times-expert": (
        ["parallel={shard: zero2, expert: 2}"],
        "layers.0.mlp.experts.gate_proj.weight",
        "nor times the 2 ranks that have others",
    ),
    "experts-not-in-norm": (["parallel={expert: 2}"], None, "squares of experts are not in the norm"),
    "idle-expert-without-gradient": (
        ["parallel={expert: 2}", "optimizer={kind: adamw, weight_decay: 0.1}"],
        "layers.0.mlp.experts.gate_proj.weight",
        "that no token went to",
    ),
    "large-gradients-not-summed": (
        ["parallel={data: 4, expert: 2}"],
        "layers.0.mlp.experts.gate_proj.weight",
        "do not sum its gradient to the same",
    ),
    "router-by-balance-alone": (["parallel={expert: 2}", BALANCED], "embed_tokens.weight", "trains the router alone"),
}


def recipe(folder: Path, kind: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    def config(*args: Any) -> Any:
        return experts_config(KINDS[kind], vocab_size=400)

    monkeypatch.setattr(decoder_proxy, "_config", config)
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml"), overrides).recipe


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_layout_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, overrides, layout = LAYOUTS[name]
    report, rows = verify("r.yaml", recipe(tmp_path, kind, overrides, monkeypatch), Options(steps=2, traffic=True))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    assert report.layout == layout
    errors = {check.what: check.error for check in report.checks}
    assert errors["expert counts"] == 0 and errors["saved weights, loaded"] == 0 and errors["gradients"] < 1e-5
    assert rows and all(row.agrees for row in rows)
    assert any(line.startswith("items with clear routes") for line in report.about)


SIGMOID_ROUTERS: dict[str, dict[str, Any]] = {
    # huggingface.co/deepseek-ai/DeepSeek-V3, config.json
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 163840,
    },
    # GLM-4.5 as docs/models/llm/glm45.md of Megatron-Bridge and scripts/models/glm4.5-355B-A32B.sh of slime have it.
    "glm-4.5": {
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 1000000,
        "max_position_embeddings": 131072,
    },
}


@pytest.mark.parametrize("name", SIGMOID_ROUTERS)
def test_models_with_sigmoid_routers_are_verified(name: str, tmp_path: Path) -> None:
    file = tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml")
    values = yaml.safe_load(file.read_text())
    values["model"]["config"] = SIGMOID_ROUTERS[name]
    file.write_text(yaml.safe_dump(values))
    balanced = "router={balance: bias, rate: 0.001, sequence: 0.0001}"
    report, _ = verify("r.yaml", load(file, ["parallel={expert: 2}", balanced]).recipe, Options(steps=3))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    assert any(line.startswith("items with clear routes") for line in report.about)


FOLDERS = {
    "lora": (
        "mixtral",
        ["parallel={shard: zero3, expert: 2}", "adapter={kind: lora, targets: all-linear}"],
        "zero3, data 4 x expert 2, lora",
    ),
    "lora on experts": (
        "mixtral",
        ["parallel={shard: zero3, expert: 2}", "adapter={kind: lora, targets: [all-linear, experts]}"],
        "zero3, data 4 x expert 2, lora",
    ),
    "lora on experts, expert x tensor": (
        "deepseek_v3",
        ["parallel={expert: 2, tensor: 2}", "adapter={kind: lora, targets: [attention, experts]}", "memory=full"],
        "data 2 x expert 2 x tensor 2, recompute full, lora",
    ),
    "qlora": (
        "mixtral",
        ["parallel={expert: 2, tensor: 2}", "adapter={kind: lora, dropout: 0.1}", "quantization=nf4", "memory=full"],
        "data 2 x expert 2 x tensor 2, recompute full, lora, nf4",
    ),
    "qlora on experts": (
        "mixtral",
        [
            "parallel={shard: zero3, expert: 2}",
            "adapter={kind: lora, targets: [all-linear, experts]}",
            "quantization=nf4",
            "memory=full",
        ],
        "zero3, data 4 x expert 2, recompute full, lora, nf4",
    ),
    "latent attention": (
        "deepseek_v3",
        ["parallel={expert: 2, tensor: 2}", "router={balance: bias, sequence: 0.01, z: 0.001}"],
        "data 2 x expert 2 x tensor 2",
    ),
}


def recipe_of_folder(folder: Path, family: str, overrides: list[str], **changes: Any) -> Recipe:
    """A recipe that trains a model of a Hugging Face folder."""
    write_model(read_config_values(EXPERT_CONFIGS[family]), folder / "base", 0)
    shutil.copytree(tiny_world().tokenizer, folder / "base", dirs_exist_ok=True)
    model = {"path": str(folder / "base"), "config": None, "tokenizer": None}
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml", model=model, **changes), overrides).recipe


@pytest.mark.parametrize("name", FOLDERS)
def test_experts_of_a_folder_are_distributed_too(name: str, tmp_path: Path) -> None:
    family, overrides, layout = FOLDERS[name]
    report, rows = verify("r.yaml", recipe_of_folder(tmp_path, family, overrides), Options(steps=1, traffic=True))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    assert report.layout == layout
    assert rows and all(row.agrees for row in rows)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_known_mistake_is_caught_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, parameter, cause = MISTAKES[name]
    report, _ = verify(
        "r.yaml", recipe(tmp_path, "mixtral", overrides, monkeypatch), Options(steps=2, fault=injected(name))
    )
    assert report.finding is not None
    assert report.finding.parameter == parameter
    assert cause in report.finding.cause


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("balance-on-each-tensor-rank", "router-by-balance-alone"),
        ("router-by-balance-alone", "balance-on-each-tensor-rank"),
    ],
)
def test_two_mistakes_of_tensor_ranks_are_told_apart(
    name: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = recipe(tmp_path, "mixtral", ["parallel={tensor: 2}", BALANCED], monkeypatch)
    report, _ = verify("r.yaml", cut, Options(steps=1, fault=injected(name)))
    assert report.finding is not None
    assert MISTAKES[name][2] in report.finding.cause and MISTAKES[other][2] not in report.finding.cause


MISTAKES_WITH_LORA: dict[str, tuple[list[str], str | None]] = {
    "expert-gradients-times-expert": (
        ["parallel={shard: zero2, expert: 2}"],
        "layers.0.mlp.experts.gate_proj.adapter.default.lora_B",
    ),
    "experts-not-in-norm": (["parallel={expert: 2}"], None),
    "idle-expert-without-gradient": (
        ["parallel={shard: zero3, expert: 2}", "optimizer={kind: adamw, weight_decay: 0.1}"],
        "layers.0.mlp.experts.gate_proj.adapter.default.lora_A",
    ),
}
"""By mistake: overrides, and the first parameter that is wrong, where LoRA sits on the experts."""


@pytest.mark.parametrize("name", MISTAKES_WITH_LORA)
def test_a_mistake_is_named_where_lora_sits_on_experts(name: str, tmp_path: Path) -> None:
    layout, parameter = MISTAKES_WITH_LORA[name]
    on_experts = recipe_of_folder(
        tmp_path, "mixtral", [*layout, "adapter={kind: lora, targets: [all-linear, experts]}"]
    )
    report, _ = verify("r.yaml", on_experts, Options(steps=2, fault=injected(name)))
    assert report.finding is not None
    assert report.finding.parameter == parameter
    assert MISTAKES[name][2] in report.finding.cause


def test_mistakes_of_experts_need_an_adapter_that_sits_on_them(tmp_path: Path) -> None:
    beside_experts = recipe_of_folder(tmp_path, "mixtral", ["parallel={expert: 2}", "adapter=lora"])
    for name in MISTAKES_WITH_LORA:
        with pytest.raises(RecipeError, match=f"--inject {injected(name)}: not a mistake that this layout can make"):
            verify("r.yaml", beside_experts, Options(steps=1, fault=injected(name)))


REPLAYED = {
    "expert 2": ["parallel={expert: 2}"],
    "expert 2 x tensor 2, recompute full": ["parallel={expert: 2, tensor: 2}", "memory=full"],
}


def recipe_of_rollouts(folder: Path, overrides: list[str]) -> Recipe:
    """A recipe of stage rl for a model with experts."""
    return recipe_of_folder(
        folder,
        "mixtral",
        overrides,
        stage="grpo",
        data={"train": str(tiny_world().text), "prompt": "{text}"},
        rewards=[{"kind": "length", "most": 6}],
        rollout={"samples": 2, "max_new_tokens": 8},
        batch={"sequences": None, "prompts": 4},
    )


@pytest.mark.parametrize("name", REPLAYED)
def test_tokens_of_rollouts_go_where_these_say(name: str, tmp_path: Path) -> None:
    report, _ = verify("r.yaml", recipe_of_rollouts(tmp_path, REPLAYED[name]), Options(steps=1))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    assert any("routing_replay" in line for line in report.about)


def test_routes_that_are_not_replayed_are_named(tmp_path: Path) -> None:
    replayed = recipe_of_rollouts(tmp_path, REPLAYED["expert 2"])
    report, _ = verify("r.yaml", replayed, Options(steps=1, fault=injected("routes-not-replayed")))
    assert report.finding is not None and report.finding.stage == "expert counts of step 1"
    assert "that their rollout says they went to" in report.finding.cause
    chosen_anew = recipe_of_rollouts(tmp_path, [*REPLAYED["expert 2"], "rollout.routing_replay=false"])
    with pytest.raises(RecipeError, match="--inject builders.faults:routes-not-replayed: not a mistake that this"):
        verify("r.yaml", chosen_anew, Options(steps=1, fault=injected("routes-not-replayed")))


def test_a_router_that_the_family_does_not_keep_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = recipe(tmp_path, "mixtral", ["parallel={expert: 2}", "router={balance: bias}"], monkeypatch)
    with pytest.raises(RecipeError, match="no place for the biases"):
        verify("r.yaml", wrong, Options(steps=2))
