"""Samples while training, and how far the log-probabilities that they were drawn with are from those of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import World, danlu, metrics

import danlu.stages.samples as samples_module
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.request import Completion, Request
from danlu.models.packed_weights import PackedWeights
from danlu.recipe import load
from danlu.stages.placed import PlacedDecoder
from danlu.training.state import Generate

PROMPTS = ["What colour is the fox?", "Hi", "How many apples has Tom, and who else has some?"]


def recorded(world: World, output: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl with samples, and those about all samples of an evaluation."""
    evaluation = {"every": 2, "samples": {"prompts": PROMPTS, "max_new_tokens": 12, "temperature": 0.7}}
    changes = {"steps": 4, "evaluation": evaluation, "schedule": "constant", **changes}
    assert danlu("train", world.recipe(output, **changes)) == 0
    lines = metrics(output)
    return [[line for line in lines if line.get("event") == name] for name in ("sample", "samples")]


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("changes", [{}, {"adapter": {"kind": "prompt", "tokens": 3}}], ids=["full", "prompt"])
def test_the_gap_to_training_is_rounding(tiny_world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes:
        changes = {**changes, "model": {"path": str(tiny_world.base), "tokenizer": None, "config": None}}
    texts, gaps = recorded(tiny_world, tmp_path / "run", **changes)
    assert [(line["step"], line["prompt"]) for line in texts] == [
        (step, prompt) for step in (2, 4) for prompt in PROMPTS
    ]
    assert [line["step"] for line in gaps] == [2, 4]
    assert all(0 <= line["rollout_gap_mean"] <= line["rollout_gap_max"] < 1e-5 for line in gaps)


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_with_exact_numerics_there_is_none(tiny_world: World, tmp_path: Path, precision: str) -> None:
    gaps = recorded(tiny_world, tmp_path / "exact", numerics="exact", precision=precision)[1]
    assert [(line["rollout_gap_max"], line["rollout_gap_mean"]) for line in gaps] == [(0, 0), (0, 0)]
    if precision == "bf16":  # control: else there would be one
        gaps = recorded(tiny_world, tmp_path / "fast", precision=precision)[1]
        assert all(line["rollout_gap_max"] > 1e-4 for line in gaps)


@pytest.mark.usefixtures("tokenising_here")
def test_control_weights_that_changed_in_between_are_seen(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = EmbeddedEngine.generate

    def changed_afterwards(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
        completions = generate(engine, requests)
        with torch.no_grad():
            engine._runner.model.norm.weight.mul_(1.1)
        return completions

    monkeypatch.setattr(EmbeddedEngine, "generate", changed_afterwards)
    gaps = recorded(tiny_world, tmp_path / "run")[1]
    assert all(line["rollout_gap_max"] > 1e-3 for line in gaps)


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("drops_copies", [True, False], ids=["", "control"])
def test_samples_in_bf16_follow_the_weights_as_they_are_trained(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops_copies: bool
) -> None:
    """Decoding multiplies with bfloat16 copies of the float32 weights, which must not outlive an update of these."""
    if not drops_copies:
        monkeypatch.setattr(PackedWeights, "clear_trained", lambda packed_weights: None)
    gaps = [line["rollout_gap_mean"] for line in recorded(tiny_world, tmp_path / "run", precision="bf16", steps=6)[1]]
    if drops_copies:
        assert max(gaps) < 0.02
    else:
        assert gaps[0] < 0.02 and gaps[1] > 0.1 and gaps[2] > 1.5 * gaps[1]


@pytest.mark.usefixtures("tokenising_here")
def test_log_probabilities_come_back_in_the_order_of_the_samples(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many packed sequences they take: here one for the longest, and one for the others."""
    seen: list[tuple[list[list[float]], list[list[float]]]] = []
    policy_logprobs = samples_module.policy_logprobs

    def both(recipe: Any, placed: Any, rows: Any, prompt_lengths: Any, **options: Any) -> list[list[float]]:
        packed = policy_logprobs(recipe, placed, rows, prompt_lengths, **options)
        short = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 40})})
        seen.append((packed, policy_logprobs(short, placed, rows, prompt_lengths, **options)))
        assert [len(own) for own in packed] == [len(row) - n for row, n in zip(rows, prompt_lengths, strict=True)]
        changed = [(*rows[0][:-1], rows[0][-1] ^ 1), *rows[1:]]
        assert policy_logprobs(recipe, placed, changed, prompt_lengths, **options)[0] != packed[0]  # control
        return packed

    monkeypatch.setattr(samples_module, "policy_logprobs", both)
    recorded(tiny_world, tmp_path / "run")
    assert len(seen) == 2
    for packed, short in seen:
        for one, other in zip(packed, short, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.usefixtures("tokenising_here")
def test_the_cache_is_no_larger_than_the_samples_and_goes_while_training(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[EmbeddedEngine] = []
    create = EmbeddedEngine.__init__

    def created(engine: EmbeddedEngine, *args: Any, **options: Any) -> None:
        create(engine, *args, **options)
        engines.append(engine)

    monkeypatch.setattr(EmbeddedEngine, "__init__", created)
    generate, asleep = PlacedDecoder.generate, []

    def checked(placed: PlacedDecoder) -> Generate | None:
        write = generate(placed)
        asleep.append(engines[-1].is_asleep)
        return write

    monkeypatch.setattr(PlacedDecoder, "generate", checked)
    recorded(tiny_world, tmp_path / "run")
    (engine,) = engines
    assert asleep == [True] and engine.is_asleep and engine.version == 2
    assert 3 <= engine.statistics.blocks <= 3 * 128 // 16
    assert load(tmp_path / "run" / "recipe.yaml").recipe.rollout.cache_gib == 2.0
