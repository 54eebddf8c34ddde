"""Products in FP8 in every layout: as on one process."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from builders.equal_traces import differences, distance, gradients
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World

from danlu.verification.trace import Trace

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PACKS, MICRO = 4, 1
SGD = {"kind": "sgd", "learning_rate": 0.1}
WHOLE_BLOCKS = {**CONFIG, "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4}
"""Two tensor ranks have 128 features of each matrix."""
NARROW = {**CONFIG, "intermediate_size": 96}
EXPERTS = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {"whole blocks": WHOLE_BLOCKS, "narrow": NARROW, "experts": EXPERTS}


class Case(NamedTuple):
    layout: dict[str, Any]
    model: str = "whole blocks"
    recipe: str = "tile"


CASES = {
    "ddp": Case({}),
    "zero3": Case({"shard": "zero3"}),
    "tensor": Case({"tensor": 2}),
    "tensor, sequence, row": Case({"tensor": 2, "sequence": True}, recipe="row"),
    "tensor, tensor": Case({"tensor": 2}, "narrow", "tensor"),
    "tensor, sequence, tensor": Case({"tensor": 2, "sequence": True}, "narrow", "tensor"),
    "tensor of experts, sequence, tensor": Case({"tensor": 2, "sequence": True}, "experts", "tensor"),
    "context, tensor": Case({"context": 2}, "narrow", "tensor"),
    "context of experts, tensor": Case({"context": {"size": 2, "method": "ulysses"}}, "experts", "tensor"),
    "tensor of experts, tensor": Case({"tensor": 2}, "experts", "tensor"),
    "tensor, mxfp8": Case({"tensor": 2}, recipe="mxfp8"),
    "tensor, half a block": Case({"tensor": 2}, "narrow"),
    "tensor, half a block, row": Case({"tensor": 2, "sequence": True}, "narrow", "row-with-bf16-weight-gradient"),
    "context": Case({"context": 2}, "narrow"),
    "context, row": Case({"context": {"size": 2, "method": "ulysses"}}, "narrow", "row"),
    "tensor of experts": Case({"tensor": 2}, "experts"),
    "experts": Case({"expert": 2}, "experts"),
    "experts, row, zero3": Case({"expert": 2, "shard": "zero3"}, "experts", "row"),
}


@pytest.fixture(scope="module")
def traces(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Trace], Trace, Trace]]:
    """Of each case what its two processes saw, one process, and one process in float32."""
    folder = tmp_path_factory.mktemp("fp8")

    def file(name: str, model: str, precision: Any, **more: Any) -> str:
        config = {"config": MODELS[model]}
        return recipe_file(tiny_world, folder, name, model=config, precision=precision, optimizer=SGD, **more)

    def fp8(recipe: str) -> dict[str, Any]:
        return {"kind": "fp8", "recipe": recipe, "activations": "fp32"}

    files = {name: file(name, case.model, fp8(case.recipe), parallel=case.layout) for name, case in CASES.items()}
    alone = {case[1:]: file("one " + " ".join(case[1:]), case.model, fp8(case.recipe)) for case in CASES.values()}
    plain = {model: file(f"plain {model}", model, "fp32") for model in MODELS}
    one = see([*alone.values(), *plain.values()], PACKS, MICRO, 1)
    by_rank = run_group(see, 2, list(files.values()), PACKS, MICRO, timeout=900)
    return {
        name: ([rank[files[name]] for rank in by_rank], one[alone[case[1:]]], one[plain[case.model]])
        for name, case in CASES.items()
    }


def test_data_ranks_are_one_process(traces: dict[str, tuple[list[Trace], Trace, Trace]]) -> None:
    """The same micro-batches have the same tiles; the control is one process in float32."""
    many, one, plain = traces["ddp"]
    assert differences(many, one) == []
    assert differences(many, plain)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_layer_are_one_process(
    traces: dict[str, tuple[list[Trace], Trace, Trace]], name: str
) -> None:
    """Ranks add terms of sums in another order than one process does, and multiply shards at other addresses; a number
    next to the border between two codes then gets the other one, and a single one that differs by 6 % moves a gradient
    by some thousandths. In one of the two steps there is none. The control is one process in float32.
    """
    many, one, plain = traces[name]
    errors = [distance(gradients(many, step), gradients([one], step))[0] for step in (0, 1)]
    assert min(errors) < 1e-6 and max(errors) < 1e-2, errors
    assert all(distance(gradients([plain], step), gradients([one], step))[0] > 5e-2 for step in (0, 1))
