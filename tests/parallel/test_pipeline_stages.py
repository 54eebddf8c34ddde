"""Stages of a pipeline compute what one process does with a score head, and with models beside the policy."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from builders.equal_traces import differences
from builders.parallel_steps import recipe_file
from builders.process_group import run_group
from builders.stage_steps import see
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

LORA = {"adapter": {"kind": "lora", "dropout": 0.1}}
REWARD = {"stage": "reward", "objective": {"kind": "bradley-terry", "centring": 0.1}}
STEPWISE = {"stage": "reward", "objective": "stepwise"}
SIMPO = {"stage": "simpo"}
DPO = {"stage": "dpo", "reference": {"kind": "frozen", "model": "REFERENCE"}}
CACHED = {"stage": "dpo", "reference": "cached"}
MOVING = {"stage": "dpo", "reference": {"kind": "frozen", "every": 1}}
ADAPTER_OFF = {"stage": "dpo", "reference": "adapter-off", **LORA}
KTO = {"stage": "kto", "reference": {"kind": "frozen", "model": "REFERENCE"}}
BCO = {
    "stage": "preference",
    "objective": [{"kind": "bco", "shift": "running-mean"}, "aot"],
    "reference": "adapter-off",
    **LORA,
}
DISTILL = {"stage": "distill", "teacher": "TEACHER", "objective": {"kind": "forward", "cross_entropy": 0.3}}
HIDDEN = {"stage": "distill", "teacher": ["TEACHER", "REFERENCE"], "objective": ["jensen-shannon", {"kind": "hidden"}]}
ZB_H1, ZBV, INTERLEAVED = ({"stages": 2, "schedule": kind} for kind in ("zb-h1", "zbv", "interleaved"))

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "reward, 1f1b": (2, {"pipeline": 2}, REWARD),
    "reward, lora": (2, {"pipeline": 2}, {**REWARD, **LORA}),
    "reward, zbv x data": (4, {"pipeline": ZBV}, REWARD),
    "reward by steps, interleaved x data": (4, {"pipeline": INTERLEAVED}, STEPWISE),
    "reward x zero3": (4, {"pipeline": 2, "shard": "zero3"}, STEPWISE),
    "reward x tensor, sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True}, REWARD),
    "simpo": (2, {"pipeline": 2}, SIMPO),
    "dpo": (2, {"pipeline": 2}, DPO),
    "dpo, zb-h1": (2, {"pipeline": ZB_H1}, DPO),
    "cached": (2, {"pipeline": ZBV}, CACHED),
    "adapter-off": (2, {"pipeline": 2}, ADAPTER_OFF),
    "kto, zbv": (2, {"pipeline": ZBV}, KTO),
    "bco and aot, lora": (2, {"pipeline": 2}, BCO),
    "dpo x data": (4, {"pipeline": 2}, DPO),
    "dpo, zbv x zero3": (4, {"pipeline": ZBV, "shard": "zero3"}, DPO),
    "moving x zero3": (4, {"pipeline": 2, "shard": "zero3"}, MOVING),
    "adapter-off x zero3": (4, {"pipeline": 2, "shard": "zero3"}, ADAPTER_OFF),
    "dpo x tensor, sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True}, DPO),
    "bco and aot, lora x context": (4, {"pipeline": 2, "context": 2}, BCO),
    "hidden states, interleaved": (2, {"pipeline": INTERLEAVED}, HIDDEN),
    "distill, zb-h1 x zero3": (4, {"pipeline": ZB_H1, "shard": "zero3"}, DISTILL),
    "hidden states x tensor, sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True}, HIDDEN),
}
MISTAKEN = {
    "head as if on every stage": ("reward, 1f1b", "step 1: loss and norm"),
    "reference of another micro-batch": ("dpo", "step 1: gradient of"),
    "statistics without dropout": ("bco and aot, lora", "step 2: gradient of"),
}
"""Mistakes of `builders.stage_steps`: in which case each is made, and what is different then."""


@pytest.fixture(scope="module")
def files(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The recipe of each case, and that of one process of each kind of training."""
    folder = tmp_path_factory.mktemp("stages")
    shapes = {"base": {}, "reference": {}, "teacher": {"hidden_size": 48, "num_hidden_layers": 5}}
    for seed, (name, shape) in enumerate(shapes.items()):
        config = {**CONFIG, "num_hidden_layers": 4, "vocab_size": 400, "tie_word_embeddings": False, **shape}
        model = build(read_config_values(config))
        initialize(model, seed)
        save(model, folder / name, tokenizer_from=tiny_world.tokenizer)
    models = {name.upper(): str(folder / name) for name in shapes}

    def file(name: str, **changes: Any) -> str:
        common = {
            "model": {"path": str(folder / "base"), "config": None, "tokenizer": None},
            "optimizer": {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9},
            "batch": {"sequences": None, "sequences" if changes["stage"] == "distill" else "rows": 7, "micro": 1},
            "data": {"max_length": 32},
        }
        named = json.loads(re.sub('"([A-Z]+)"', lambda match: json.dumps(models[match[1]]), json.dumps(changes)))
        return recipe_file(tiny_world, folder, name, **common, **named)

    kinds = {json.dumps(changes): changes for _, _, changes in CASES.values()}
    alone = {kind: file(f"one-{number}", **changes) for number, (kind, changes) in enumerate(kinds.items())}
    return alone | {name: file(name, parallel=layout, **changes) for name, (_, layout, changes) in CASES.items()}


@pytest.fixture(scope="module")
def traces(files: dict[str, str]) -> dict[str, tuple[list[Trace], Trace]]:
    """Of each case what its processes saw, and one process."""
    reference = see([files[kind] for kind in dict.fromkeys(json.dumps(case[2]) for case in CASES.values())], 1)
    seen: dict[str, tuple[list[Trace], Trace]] = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case[0] == size]
        mistaken = {mistake: files[name] for mistake, (name, _) in MISTAKEN.items() if size == 2}
        by_rank = run_group(see, size, [files[name] for name in names], None, mistaken, timeout=900)
        for name in names:
            seen[name] = [rank[files[name]] for rank in by_rank], reference[files[json.dumps(CASES[name][2])]]
        for mistake in mistaken:
            name, _ = MISTAKEN[mistake]
            seen[mistake] = [rank[mistake] for rank in by_rank], seen[name][1]
    return seen


@pytest.mark.parametrize("name", CASES)
def test_stages_are_one_process(traces: dict[str, tuple[list[Trace], Trace]], name: str) -> None:
    by_rank, reference = traces[name]
    assert differences(by_rank, reference) == []


@pytest.mark.parametrize("mistake", MISTAKEN)
def test_a_mistake_shows(traces: dict[str, tuple[list[Trace], Trace]], mistake: str) -> None:
    _, sign = MISTAKEN[mistake]
    assert sign in "\n".join(differences(*traces[mistake]))
