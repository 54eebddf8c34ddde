"""Quantization-aware training in every layout: as on one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from builders.equal_traces import distance, gradients
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World

from danlu.verification.trace import Trace

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PACKS, MICRO = 4, 1
SGD = {"kind": "sgd", "learning_rate": 0.1}
DENSE = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "num_key_value_heads": 4}
EXPERTS = {**DENSE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"dense": {"model": {"config": DENSE}}, "experts": {"model": {"config": EXPERTS}}}
ADAPTED = {"adapter": {"kind": "lora", "rank": 4, "init": "default"}}
INT3 = {"kind": "int3", "group": 16, "trained": True}
INT4 = {"kind": "int4", "group": 32, "symmetric": False, "scale": "float16", "trained": True}


class Case(NamedTuple):
    layout: dict[str, Any]
    model: str = "dense"
    quantization: str = "int3"


FORMATS = {"int3": INT3, "int4": INT4, "mxfp4": {"kind": "mxfp4", "trained": True}}
CASES = {
    "ddp": Case({}),
    "zero3": Case({"shard": "zero3"}, quantization="int4"),
    "tensor": Case({"tensor": 2}, quantization="int4"),
    "tensor, sequence": Case({"tensor": 2, "sequence": True}, quantization="mxfp4"),
    "context": Case({"context": 2}),
    "experts": Case({"expert": 2}, "experts"),
    "experts, zero3": Case({"expert": 2, "shard": "zero3"}, "experts", "mxfp4"),
    "tensor of experts": Case({"tensor": 2}, "experts"),
    "lora, ddp": Case({}, "lora"),
    "lora, zero3": Case({"shard": "zero3"}, "lora"),
    "lora, tensor": Case({"tensor": 2}, "lora"),
    "lora, tensor, sequence": Case({"tensor": 2, "sequence": True}, "lora"),
    "lora, context": Case({"context": 2}, "lora"),
}


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Trace], Trace, Trace]]:
    """Of each case what its two processes saw, one process, and one process without quantization."""
    folder = tmp_path_factory.mktemp("trained")
    start = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    models = {**MODELS, "lora": {"model": start, **ADAPTED}}

    def file(name: str, model: str, quantization: str | None, **more: Any) -> str:
        own = {} if quantization is None else {"quantization": FORMATS[quantization]}
        return recipe_file(tiny_world, folder, name, **models[model], optimizer=SGD, **own, **more)

    files = {name: file(name, *case[1:], parallel=case.layout) for name, case in CASES.items()}
    alone = {case[1:]: file("one " + " ".join(case[1:]), *case[1:]) for case in CASES.values()}
    plain = {model: file(f"plain {model}", model, None) for model in models}
    one = see([*alone.values(), *plain.values()], PACKS, MICRO, 1)
    by_rank = run_group(see, 2, list(files.values()), PACKS, MICRO, timeout=900)
    return {
        name: ([rank[files[name]] for rank in by_rank], one[alone[case[1:]]], one[plain[case.model]])
        for name, case in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_ranks_round_the_weights_of_one_process(traces: dict[str, tuple[list[Trace], Trace, Trace]], name: str) -> None:
    """The first step's weights are those of one process, to the bit, and so are their codes. Afterwards a weight next
    to the border between two codes may get the other one, for gradients are added up in another order. The control is
    one process that does not round.
    """
    many, one, plain = traces[name]
    errors = [distance(gradients(many, step), gradients([one], step))[0] for step in (0, 1)]
    assert errors[0] < 1e-5 and errors[1] < 5e-2, errors
    assert all(distance(gradients([plain], step), gradients([one], step))[0] > 1e-1 for step in (0, 1))
