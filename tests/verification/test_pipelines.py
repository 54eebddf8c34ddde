"""Pipelines are verified, alone and with the other axes, and what they are known to get wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.faults import injected, pipelines
from builders.small_experts import KINDS, experts_config
from builders.tiny_world import CONFIG, tiny_world

from danlu.numerics.relative_error import worst_error
from danlu.recipe import Recipe, load
from danlu.verification import decoder_proxy
from danlu.verification.verification import Options, verify

pytestmark = pytest.mark.distributed

DEEP = {**CONFIG, "num_hidden_layers": 4, "tie_word_embeddings": True}
LORA = "adapter={kind: lora, rank: 8, dropout: 0.2}"
VERA = "adapter={kind: vera, rank: 4}"
PIPELINE = "parallel={pipeline: 2}"
PIPEDREAM = "parallel={pipeline: {stages: 2, schedule: pipedream}}"
BALANCED = "router={balance: step, rate: 0.01}"

LAYOUTS: dict[str, tuple[list[str], str | None, str]] = {
    "1f1b, tied": ([PIPELINE], None, "pipeline 2"),
    "interleaved": (["parallel={pipeline: {stages: 2, schedule: interleaved}}"], None, "pipeline 2"),
    "interleaved, copies of shards": (
        ["parallel={pipeline: {stages: 2, schedule: interleaved}, shard: zero3, replicate: 2, data: 2}"],
        "untied",
        "zero3, data 2 x pipeline 2",
    ),
    "vera": ([PIPELINE, VERA], "base", "pipeline 2, vera"),
    "qlora": ([PIPELINE, LORA, "quantization=nf4"], "base", "pipeline 2, lora, nf4"),
    "experts": ([PIPELINE, BALANCED], "mixtral", "pipeline 2"),
    "zero3": (["parallel={pipeline: 2, shard: zero3}"], None, "zero3, data 2 x pipeline 2"),
    "expert 2": (["parallel={pipeline: 2, expert: 2}", BALANCED], "mixtral", "data 2 x expert 2 x pipeline 2"),
    "zbv, zero2": (
        ["parallel={pipeline: {stages: 2, schedule: zbv}, shard: zero2}"],
        None,
        "zero2, data 2 x pipeline 2",
    ),
    "pipedream": ([PIPEDREAM], "untied", "pipeline 2, pipedream"),
    "tensor 2, sequence": (["parallel={pipeline: 2, tensor: 2, sequence: true}"], None, "tensor 2 x pipeline 2"),
}
"""Overrides, the model that they are over (experts of a kind, or a base for adapters), the layout in words."""
MISTAKES: dict[str, tuple[list[str], str | None, str | None, str]] = {
    "dropout-of-another-micro-batch": (
        [PIPELINE, LORA],
        "base",
        "layers.1.attention.q_proj.adapter.default.lora_B",
        "dropout masks",
    ),
    "newest-weights-in-backward": (
        [PIPEDREAM],
        "untied",
        "embed_tokens.weight",
        "a backward pass with other weights than its forward pass",
    ),
    "norm-of-one-stage": ([PIPELINE], None, None, "the norm of what it holds"),
    "router-loss-missing-on-stage": (
        [PIPELINE, BALANCED],
        "mixtral",
        "embed_tokens.weight",
        "a stage of the pipeline leaves out what balances",
    ),
    "sum-before-last-gradient": ([PIPELINE], None, "embed_tokens.weight", "do not sum its gradient to the same"),
    "sum-over-stages-missing": ([PIPELINE], None, "embed_tokens.weight", "over pipeline ranks is missing"),
    "unstepped-of-first-stage": ([PIPELINE], None, None, "state that is kept of one process's parameters alone"),
}


def recipe(folder: Path, overrides: list[str], over: str | None, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    changes: dict[str, Any] = {"model": {"config": DEEP}}
    if over == "untied":
        changes = {"model": {"config": {**DEEP, "tie_word_embeddings": False}}}
    elif over == "base":
        changes = {"model": {"path": str(tiny_world().base), "config": None, "tokenizer": None}}
    elif over is not None:
        monkeypatch.setattr(decoder_proxy, "_config", lambda *args: experts_config(KINDS[over], vocab_size=400))
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml", **changes), overrides).recipe


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_layout_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, over, layout = LAYOUTS[name]
    report, _ = verify("r.yaml", recipe(tmp_path, overrides, over, monkeypatch), Options(steps=2))
    assert report.finding is None and all(check.holds for check in report.checks), report.finding
    assert report.layout.startswith(layout)
    errors = {check.what: check.error for check in report.checks}
    assert worst_error([errors["loss"], errors["evaluation"]]) < 1e-6 and errors["gradients"] < 1e-5
    assert errors["first weights"] == errors["saved weights, loaded"] == 0


def test_every_mistake_has_a_case() -> None:
    assert list(MISTAKES) == sorted(pipelines.FAULTS) == list(pipelines.FAULTS)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_known_mistake_is_caught_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, over, parameter, cause = MISTAKES[name]
    report, _ = verify("r.yaml", recipe(tmp_path, overrides, over, monkeypatch), Options(steps=2, fault=injected(name)))
    assert report.finding is not None and not all(check.holds for check in report.checks)
    assert (report.finding.parameter, cause in report.finding.cause) == (parameter, True), report.finding


def test_what_stages_send_is_set_beside_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, rows = verify("r.yaml", recipe(tmp_path, [PIPELINE], None, monkeypatch), Options(steps=1, traffic=True))
    assert report.finding is None and all(row.agrees for row in rows)
    (row,) = (row for row in rows if (row.axis, row.kind) == ("pipeline", "point-to-point"))
    assert row.measured_bytes == row.formula_bytes > 0


def test_gradients_that_are_too_large_are_caught_with_stages_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = verify(
        "r.yaml", recipe(tmp_path, [PIPELINE], None, monkeypatch), Options(steps=1, fault=injected("doubled"))
    )
    assert report.finding is not None and "too large by a constant" in report.finding.cause
