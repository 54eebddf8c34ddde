"""Answers that are drawn in stages: every schedule and every kind of cache answers what one process does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders import rollout_worker
from builders.parallel_steps import LINEAR_ATTENTION, recipe_file
from builders.process_group import run_group
from builders.rollout_worker import TIGHT, difference
from builders.tiny_world import CONFIG, World

from danlu.inference.request import Completion

pytestmark = pytest.mark.distributed

FOUR = {**CONFIG, "num_hidden_layers": 4}
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MODELS: dict[str, dict[str, Any]] = {
    "llama": FOUR,
    "tied": {**FOUR, "tie_word_embeddings": True},
    "states on the first stage": {
        **LINEAR_ATTENTION["model"]["config"],
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, FULL, FULL],
    },
    "windows on the first stage": {
        **FOUR,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": [SLIDING, SLIDING, FULL, FULL],
        "query_pre_attn_scalar": 8,
    },
    "windows": {**FOUR, "model_type": "mistral", "sliding_window": 6},
    "experts": {**FOUR, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
}
NGRAM = {"draft": {"kind": "ngram", "tokens": 3}}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tight": TIGHT,
    "tight, swapped": {**TIGHT, "preempt": "swap", "swap_gib": 1e-4},
    "ngram": NGRAM,
}
PIPELINES: dict[str, Any] = {
    "naive": {"stages": 2, "schedule": "naive"},
    "interleaved": {"stages": 2, "schedule": "interleaved", "chunks": 2},
    "zbv": {"stages": 2, "schedule": "zbv"},
    "uneven": {"stages": 2, "split": [3, 1]},
}
CASES = [
    *(("llama", "roomy", pipeline) for pipeline in PIPELINES),
    *(("llama", rollout, "interleaved") for rollout in ROLLOUTS if rollout != "roomy"),
    *((model, "roomy", "naive") for model in MODELS if model != "llama"),
    ("windows on the first stage", "tight", "uneven"),
    ("tied", "ngram", "zbv"),
]


def file_of(world: World, folder: Path, case: tuple[str, str, str | None]) -> str:
    model, rollout, pipeline = case
    return recipe_file(
        world,
        folder,
        "-".join(each or "one" for each in case).replace(" ", "_"),
        model={"config": MODELS[model]},
        rollout=ROLLOUTS[rollout],
        evaluation={"every": 5, "samples": "hi"},
        **({} if pipeline is None else {"parallel": {"pipeline": PIPELINES[pipeline]}}),
    )


@dataclass(frozen=True)
class Answers:
    stages: Mapping[tuple[str, str, str], list[list[Completion]]]  # by each process
    one: Mapping[str, list[Completion]]  # by one process, of each model
    scored: list[list[Completion]]
    mistaken: list[dict[str, list[Completion]]]
    cache: list[tuple[int, int]]  # blocks and bytes on each stage
    failed: list[list[str]]


@pytest.fixture(scope="module")
def found(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("stages")
    alone = {model: file_of(tiny_world, folder, (model, "roomy", None)) for model in MODELS}
    one = rollout_worker.answers([*alone.values()], 1)
    files = {case: file_of(tiny_world, folder, case) for case in CASES}
    llama = files["llama", "roomy", "interleaved"]
    uneven = files["windows on the first stage", "tight", "uneven"]
    by_rank = run_group(rollout_worker.of_stages, 2, [*files.values()], llama, uneven)
    return Answers(
        {case: [seen["answers"][file] for seen in by_rank] for case, file in files.items()},
        {model: one[file] for model, file in alone.items()},
        [rollout_worker.scored(alone["llama"], 1), *(seen["scored"] for seen in by_rank)],
        [seen["mistaken"] for seen in by_rank],
        [seen["cache"] for seen in by_rank],
        [seen["failed"] for seen in by_rank],
    )


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_stages_answer_what_one_process_does(found: Answers, case: tuple[str, str, str]) -> None:
    for seen in found.stages[case]:
        assert difference(seen, found.one[case[0]]) <= 1e-5


def test_prompts_are_scored_alike(found: Answers) -> None:
    one, *stages = found.scored
    for seen in stages:
        assert difference(seen, one) <= 1e-5
        for own, other in zip(one, seen, strict=True):
            assert own.prompt_logprobs == pytest.approx(other.prompt_logprobs, abs=1e-5)
            tops = [[[token for token, _ in top] for top in each.prompt_top or ()] for each in (own, other)]
            assert tops[0] == tops[1] and len(tops[0]) == len(own.prompt_logprobs or ())
    assert [len(each.prompt_logprobs or ()) for each in one] == [3, 6, 6, 6, 17, 0, 1, 1]


@pytest.mark.parametrize("mistake", rollout_worker.MISTAKES)
def test_mistakes_are_noticed(found: Answers, mistake: str) -> None:
    """The control: stages that are given other hidden states, and those that keep what they drew themselves."""
    assert max(difference(seen[mistake], found.one["llama"]) for seen in found.mistaken) > 1e-3


def test_a_stage_that_fails_ends_the_others(found: Answers) -> None:
    """Where logits are not finite, which every stage learns, and where the first one fails in the middle of a pass."""
    (not_finite, failed), (same, gone) = found.failed
    assert not_finite == same == "ModelError: rank 0: " + not_finite.partition("rank 0: ")[2]
    assert "not finite" in not_finite
    assert failed == "RuntimeError: out of memory"
    assert gone.startswith("RuntimeError: ") and "out of memory" not in gone


def test_each_stage_caches_its_own_layers(found: Answers) -> None:
    """Three layers take what `cache_gib` allows, and a stage with one layer as many blocks of it."""
    (blocks, first), (same, last) = found.cache
    layer_bytes = 2 * 2 * 8 * TIGHT["block"] * 4  # keys and values, heads, width, tokens, float32
    assert blocks == same == int(TIGHT["cache_gib"] * 2**30) // (3 * layer_bytes)
    assert (first, last) == (3 * layer_bytes * blocks, layer_bytes * blocks)
