"""Recipes whose rollout engine cannot be had."""

from __future__ import annotations

from hostile.case import Case, recipe

TRAIN = ("train", "r.yaml")
SAMPLED = {"evaluation": {"every": 2, "samples": "hi"}}

CASES = [
    Case(
        "rollout of nothing",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout: nothing is sampled: stage sft draws no answers, and there are no evaluation.sam"),
        recipe(rollout={"cache_gib": 1}),
    ),
    Case(
        "rollout engine misspelt",
        TRAIN,
        2,
        (
            "error: r.yaml:",
            "rollout.engine: expected one of embedded, http, vllm, sglang, not 'vlm'. Did you mean 'vllm'",
        ),
        recipe(**SAMPLED, rollout="vlm"),
    ),
    Case(
        "rollout server nowhere",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.url: missing: sglang runs as a server of its own. Say where it listens, such as"),
        recipe(**SAMPLED, rollout="sglang"),
    ),
    Case(
        "rollout servers nowhere",
        TRAIN,
        2,
        (
            "error: r.yaml:",
            "rollout.urls: missing: say where servers listen, such as [http://node1:8000, http://node2:",
        ),
        recipe(**SAMPLED, rollout="http"),
    ),
    Case(
        "rollout cache of nothing",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.cache_gib: expected a number above 0, not 0"),
        recipe(**SAMPLED, rollout={"cache_gib": 0}),
    ),
    Case(
        "rollout block beyond all memory",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.block: 1,000,000 is more than the 65,536 tokens: what a block does not use is"),
        recipe(**SAMPLED, rollout={"block": 1000000}),
    ),
    Case(
        "rollout draft model not there",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.draft.model: no file or folder './small'"),
        recipe(**SAMPLED, rollout={"draft": {"kind": "model", "model": "./small"}}),
    ),
    Case(
        "rollout draft without its model",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.draft.model: missing"),
        recipe(**SAMPLED, rollout={"draft": "model"}),
    ),
    Case(
        "numerics exact on a server",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.engine: vllm has kernels of its own, which do not round as the trainer's do. Use"),
        recipe(**SAMPLED, numerics="exact", rollout={"engine": "vllm", "url": "http://localhost:1"}),
    ),
    Case(
        "numerics exact compiled",
        TRAIN,
        2,
        ("error: r.yaml:", "compile: compiled code rounds by the shapes it is made for, so numerics: exact cannot"),
        recipe(numerics="exact", compile=True),
    ),
    Case(
        "numerics exact in odd blocks",
        TRAIN,
        2,
        ("error: r.yaml:", "rollout.block: 48 does not divide the 64 keys that numerics: exact looks at together. Use"),
        recipe(**SAMPLED, numerics="exact", rollout={"block": 48}),
    ),
]
