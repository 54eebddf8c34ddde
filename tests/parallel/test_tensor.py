"""A decoder cut among processes against the whole one, in float64: states, loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from builders import tensor_worker
from builders.process_group import run_group
from builders.tensor_worker import FAMILIES, Case

from danlu.numerics.relative_error import worst_error
from danlu.recipe import sections

pytestmark = pytest.mark.distributed

Errors = dict[str, dict[str, float]]
LARGEST = 1e-11
SEEN = 1e-3  # what a fault makes of some error, at least

WHOLE: dict[str, Case] = {
    **{name: Case(config) for name, config in FAMILIES.items()},
    **{f"{kind} recompute": Case(prepare=kind) for kind in ("full", "every", "selective")},
    "norms of all heads, full recompute": Case(FAMILIES["olmo2"], prepare="full"),
    "norms of all heads, selective recompute": Case(FAMILIES["olmo2"], prepare="selective"),
    "latents, full recompute": Case(FAMILIES["deepseek_v3"], prepare="full"),
    "latents, selective recompute": Case(FAMILIES["deepseek_v3"], prepare="selective"),
    "key reuse, selective recompute": Case(FAMILIES["mfa, key reuse"], prepare="selective"),
    "shared keys, full recompute": Case(FAMILIES["gemma4-e2b"], prepare="full"),
    "shared keys, selective recompute": Case(FAMILIES["gemma4-e2b"], prepare="selective"),
    "sinks and gates": Case(mixer={"sinks": True, "output_gate": True}),
    "sinks and gates, selective recompute": Case(mixer={"sinks": True, "output_gate": True}, prepare="selective"),
    "gradients of rows": Case({"tie_word_embeddings": True}, prepare="rows"),
}
LINEAR = ["all-linear"]
EVERYWHERE = ["all-linear", "embed_tokens", "lm_head"]
BIASED = {"attention_bias": True, "mlp_bias": True}


def case(*adapters: Any, config: dict[str, Any] = BIASED, **more: Any) -> Case:
    dropout = any(getattr(one, "dropout", 0.0) for one in adapters)
    return Case(config, adapters, dropout=dropout, **more)


ADAPTERS: dict[str, Case] = {
    "lora": case(sections.Lora(targets=EVERYWHERE)),
    "lora, tied head": case(sections.Lora(targets=["q_proj", "lm_head"]), config=FAMILIES["tied"]),
    "lora, dropout": case(sections.Lora(targets=LINEAR, dropout=0.3)),
    "rslora": case(sections.RsLora(targets=LINEAR)),
    "lora-fa": case(sections.LoraFa(targets=LINEAR)),
    "lora-plus": case(sections.LoraPlus(targets=LINEAR)),
    "pissa": case(sections.Pissa(targets=LINEAR)),
    "pissa, asleep": case(sections.Pissa(targets=LINEAR), asleep=True),
    "olora": case(sections.Olora(targets=LINEAR)),
    "dora": case(sections.Dora(targets=[*LINEAR, "lm_head"])),
    "dora, exact norm": case(sections.Dora(targets=LINEAR, exact_norm=True)),
    "dora, dropout": case(sections.Dora(targets=LINEAR, dropout=0.2)),
    "vera": case(sections.Vera(targets=[*LINEAR, "lm_head"], rank=8)),
    "vera, dropout": case(sections.Vera(targets=LINEAR, rank=8, dropout=0.3)),
    "vera, fused layers": case(sections.Vera(targets=LINEAR, rank=8), config={"model_type": "phi3", "pad_token_id": 0}),
    "mora, rotation": case(sections.Mora(targets=LINEAR, rank=4, form="rotation", dropout=0.2)),
    "mora, sharing": case(sections.Mora(targets=LINEAR, rank=4, form="sharing", dropout=0.2)),
    "mora, head": case(sections.Mora(targets=["lm_head"], rank=2)),
    "ia3": case(sections.Ia3()),
    "ia3, other sides": case(
        sections.Ia3(targets=["q_proj", "gate_proj", "o_proj", "down_proj"], feedforward=["q_proj", "o_proj"])
    ),
    "ia3, head": case(sections.Ia3(targets=["lm_head"], feedforward=[])),
    "bottleneck": case(sections.Bottleneck(width=5)),
    "prefix": case(sections.Prefix(tokens=4)),
    "prefix, projection": case(sections.Prefix(tokens=4, projection=6)),
    "prompt": case(sections.Prompt(tokens=4)),
    "prompt, gemma2": case(sections.Prompt(tokens=4), config=FAMILIES["gemma2"]),
    "lora on lora": case(sections.Lora(targets=LINEAR), sections.Lora(targets=[*LINEAR, "embed_tokens"], dropout=0.2)),
    "lora, linear attention": case(sections.Lora(targets=LINEAR, rank=4), config=FAMILIES["qwen3.5"]),
    "vera, linear attention": case(sections.Vera(targets=LINEAR, rank=4), config=FAMILIES["qwen3.5"]),
    "dora, full recompute": case(sections.Dora(targets=LINEAR, dropout=0.2, exact_norm=True), prepare="full"),
    "mora, selective recompute": case(sections.Mora(targets=LINEAR, rank=4, dropout=0.2), prepare="selective"),
    "ia3 on dora": case(sections.Dora(targets=LINEAR), sections.Ia3()),
    "norms of all heads": case(sections.Lora(targets=LINEAR, dropout=0.2), config=FAMILIES["olmo2"]),
    "norms behind halves alone": case(sections.Lora(targets=LINEAR, dropout=0.2), config=FAMILIES["exaone4"]),
    "lora on shared keys": case(sections.Lora(targets=LINEAR, rank=4, dropout=0.2), config=FAMILIES["gemma4-e2b"]),
    "lora on latents": case(sections.Lora(targets=LINEAR, dropout=0.2), config=FAMILIES["deepseek_v3"]),
    "dora on factors": case(sections.Dora(targets=LINEAR), config=FAMILIES["mfa, key reuse"]),
    "trained in full": case(
        sections.Lora(
            targets=["q_proj"], modules_to_save=["lm_head", "norm", "embed_tokens", "0.mlp.down_proj"], bias="all"
        )
    ),
    "nf4": case(sections.Lora(targets=LINEAR), quantization=sections.Nf4()),
    "fp4": case(sections.Lora(targets=LINEAR), quantization=sections.Fp4(double=False)),
    "int8": case(sections.Vera(targets=LINEAR, rank=4), quantization=sections.Int8()),
    "nvfp4": case(sections.Dora(targets=LINEAR), quantization=sections.Nvfp4()),
}  # fmt: skip
# Each: the fault, and a gradient that must show it.
FAULTS: dict[str, tuple[Case, str]] = {
    "the head is untied": (Case(FAMILIES["tied"], wrong="untied"), "embed_tokens.weight"),
    "every process adds the bias": (Case(FAMILIES["biased multi-query"], wrong="every bias"), "hidden"),
    "every process gives the prompt": (case(sections.Prompt(tokens=4), wrong="every prompt"), "hidden"),
    "norms of all heads are of local ones": (Case(FAMILIES["olmo2"], wrong="local norms"), "hidden"),
    "their gradients are of local ones": (
        Case(FAMILIES["olmo2"], wrong="local gradients of norms"),
        "layers.0.attention.q_proj.weight",
    ),
    "dora's norms are of cut rows": (
        case(sections.Dora(targets=LINEAR), wrong="local norms of rows"),
        "layers.0.mlp.down_proj.adapter.a0.lora_A",
    ),
    "masks are the same on all features": (
        case(sections.Lora(targets=["down_proj"], dropout=0.3), wrong="same masks"),
        "layers.0.mlp.down_proj.adapter.a0.lora_B",
    ),
}
FAULTS_OF_SEQUENCE: dict[str, tuple[Case, str]] = {
    "norms are not summed": (Case(wrong="unsummed norms", sequence=True), "layers.0.mlp_norm.weight"),
}
FAULTS_OF_FOUR: dict[str, tuple[Case, str]] = {
    "heads on two processes are not summed": (Case(wrong="uncounted heads"), "layers.0.attention.k_proj.weight"),
    "keys on two processes are normed twice": (
        Case(FAMILIES["olmo2"], wrong="copies of keys"),
        "layers.0.attention.k_proj.weight",
    ),
    "norms of heads are not summed": (
        Case(FAMILIES["qwen3"], wrong="unsummed norms"),
        "layers.0.attention.q_norm.weight",
    ),
}


def sequence(cases: dict[str, Case]) -> dict[str, Case]:
    return {name: replace(one, sequence=True) for name, one in cases.items()}


def faulty(faults: dict[str, tuple[Case, str]]) -> dict[str, Case]:
    return {name: one for name, (one, _) in faults.items()}


@pytest.fixture(scope="module")
def of_two() -> Callable[[str], Errors]:
    """Process -> errors by case. Adapters without sequence parallelism."""
    runs = {
        "whole": WHOLE,
        "sequence": sequence(WHOLE),
        "adapters": ADAPTERS,
        "faults": faulty(FAULTS | FAULTS_OF_SEQUENCE),
    }
    return together(2, runs)


@pytest.fixture(scope="module")
def of_four() -> Callable[[str], Errors]:
    """The same, where two processes share a head of keys and values; adapters under sequence parallelism."""
    runs = {
        "whole": WHOLE,
        "sequence": sequence(WHOLE),
        "adapters": sequence(ADAPTERS),
        "faults": faulty(FAULTS_OF_FOUR),
    }
    return together(4, runs)


def together(size: int, runs: dict[str, dict[str, Case]]) -> Callable[[str], Errors]:
    """Runs all in one group; gives the largest error over its processes, by run, case and name."""
    flat = {f"{run}: {name}": one for run, cases in runs.items() for name, one in cases.items()}
    by_rank: list[Errors] = run_group(tensor_worker.each, size, tensor_worker.compare, flat)
    worst = {
        key: {name: worst_error(errors[key][name] for errors in by_rank) for name in by_rank[0][key]}
        for key in by_rank[0]
    }
    return lambda run: {name: worst[f"{run}: {name}"] for name in runs[run]}


@pytest.mark.parametrize("run", ["whole", "sequence"])
@pytest.mark.parametrize("size", ["of_two", "of_four"])
@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_cut_model_computes_what_the_whole_one_does(
    request: pytest.FixtureRequest, size: str, run: str, name: str
) -> None:
    errors = request.getfixturevalue(size)(run)[name]
    assert len(errors) > 20
    assert worst(errors)[1] < LARGEST, worst(errors)


@pytest.mark.parametrize("size", ["of_two", "of_four"])
@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_adapters_of_every_kind_are_cut_with_their_layers(request: pytest.FixtureRequest, size: str, name: str) -> None:
    errors = request.getfixturevalue(size)("adapters")[name]
    assert len(errors) > 4, "states, sums, and gradients of an adapter"
    assert worst(errors)[1] < LARGEST, worst(errors)


@pytest.mark.parametrize("name", sorted(FAULTS | FAULTS_OF_SEQUENCE))
def test_faults_show(of_two: Callable[[str], Errors], name: str) -> None:
    """Negative controls: what the comparison must find."""
    where = (FAULTS | FAULTS_OF_SEQUENCE)[name][1]
    assert of_two("faults")[name][where] > SEEN


@pytest.mark.parametrize("name", sorted(FAULTS_OF_FOUR))
def test_faults_of_shared_heads_show(of_four: Callable[[str], Errors], name: str) -> None:
    assert of_four("faults")[name][FAULTS_OF_FOUR[name][1]] > SEEN


def worst(errors: dict[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: item[1])
