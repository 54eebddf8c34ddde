"""Every pair of axes of parallelism is verified, and some threes, up to eight processes: full training and LoRA, of a
decoder with shared key heads and of one with latent attention and experts; what is sent is counted to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.small_experts import EXPERT_CONFIGS
from builders.tiny_world import CONFIG, tiny_world

from danlu.models.hf_config import read_config_values
from danlu.numerics.relative_error import worst_error
from danlu.recipe import load
from danlu.verification.role_proxies import write_model
from danlu.verification.verification import Options, verify

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODELS: dict[str, dict[str, Any]] = {
    "GQA": {**CONFIG, "num_hidden_layers": 4, "tie_word_embeddings": True},
    "MLA with experts": {**EXPERT_CONFIGS["deepseek_v3"], "num_hidden_layers": 4},
}
# AdamW divides the first gradients of LoRA's B by their size, however small, and with it their rounding: B is 1.2e-5
# off then, and so is the second step's gradient of A, which is a product with B.
SGD = "optimizer={kind: sgd, learning_rate: 0.1, momentum: 0.9}"
FULL = "router={balance: sequence, sequence: 0.01, z: 0.001}"
LORA = {
    "GQA": "adapter={kind: lora, dropout: 0.1}",
    "MLA with experts": "adapter={kind: lora, targets: [all-linear, experts]}",
}
LAYOUTS: dict[str, str] = {
    "tensor x shard": "{tensor: 2, shard: zero3}",
    "context x tensor": "{context: 2, tensor: 2, sequence: true}",
    "context x shard": "{context: 2, shard: zero3}",
    "context x replicate": "{context: 2, shard: zero2, data: 2, replicate: 2}",
    "pipeline x tensor": "{pipeline: {stages: 2, schedule: zb-h1}, tensor: 2, sequence: true}",
    "pipeline x context": "{pipeline: 2, context: 2}",
    "pipeline x shard": "{pipeline: {stages: 2, schedule: zbv}, shard: zero3}",
    "pipeline x tensor x shard": "{pipeline: {stages: 2, schedule: interleaved}, tensor: 2, shard: zero2}",
    "pipeline x context x shard": "{pipeline: 2, context: 2, data: 2, shard: zero3}",
}
OF_EXPERTS: dict[str, str] = {
    "expert x shard": "{expert: 2, shard: zero3}",
    "expert x tensor": "{expert: 2, tensor: 2}",
    "expert x context": "{expert: 2, context: 2}",
    "expert x pipeline": "{expert: 2, pipeline: {stages: 2, schedule: zbv}}",
    "pipeline x expert x shard": "{pipeline: 2, expert: 2, data: 4, shard: zero2}",
}
CASES = [
    *((model, layout, parallel) for model in MODELS for layout, parallel in LAYOUTS.items()),
    *(("MLA with experts", layout, parallel) for layout, parallel in OF_EXPERTS.items()),
]


@pytest.mark.parametrize("training", ["full", "lora", "full, adamw"])
@pytest.mark.parametrize(("model", "layout", "parallel"), CASES, ids=[f"{model}, {name}" for model, name, _ in CASES])
def test_a_layout_of_several_axes_is_one_process(
    model: str, layout: str, parallel: str, training: str, tmp_path: Path
) -> None:
    write_model(read_config_values({**MODELS[model], "vocab_size": 400}), tmp_path / "base", 0)
    shutil.copytree(tiny_world().tokenizer, tmp_path / "base", dirs_exist_ok=True)
    changes = {"model": {"path": str(tmp_path / "base"), "config": None, "tokenizer": None}}
    overrides = [f"parallel={parallel}"]
    if training != "full, adamw":
        overrides.append(SGD)
    if training == "lora":
        overrides.append(LORA[model])
    elif model == "MLA with experts":
        overrides.append(FULL)
    recipe = load(tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml", **changes), overrides).recipe
    # Of eight processes a step has 17 packed sequences: in two of them some token has two experts of almost one score.
    steps = 1 if layout == "pipeline x expert x shard" else 2
    report, rows = verify("r.yaml", recipe, Options(steps=steps, traffic=True))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    errors = {check.what: check.error for check in report.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6
    assert errors["gradients"] < (1e-5 if training == "full, adamw" else 1e-6)
    assert errors["saved weights, loaded"] == 0
    assert rows and all(row.agrees for row in rows), "\n".join(" ".join(row.cells()) for row in rows)
