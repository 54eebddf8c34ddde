"""Every layout computes what one process does: gradients, norms, weights and evaluation, on uneven shares of packs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.equal_traces import differences, distance, gradients
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.tiny_world import World
from torch import Tensor

from danlu.verification.trace import Trace

pytestmark = pytest.mark.distributed

PACKS, MICRO = 5, 2  # of a step: no number of processes divides them, and some have a micro-batch more than others

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ddp": {},
        "zero1": {"shard": "zero1"},
        "zero2": {"shard": "zero2"},
        "zero3": {"shard": "zero3"},
        "tensor": {"tensor": 2},
        "tensor+sequence": {"tensor": 2, "sequence": True},
    },
    4: {
        "hybrid": {"shard": "zero3", "replicate": 2},
        "zero3+local": {"shard": "zero3", "accumulate": "local"},
        "ddp+tensor": {"tensor": 2},
        "zero3+tensor": {"shard": "zero3", "tensor": 2},
        "zero2+tensor+sequence": {"shard": "zero2", "tensor": 2, "sequence": True},
        "tensor+sequence": {"tensor": 4, "sequence": True},  # of two key/value heads
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": {"kind": "lora", "dropout": 0.1}},
    "qlora": {"adapter": {"kind": "lora", "dropout": 0.1}, "quantization": {"kind": "nf4", "block": 32}},
}
RECOMPUTE = ("none", "full", "selective")
PRECISIONS = ("fp32", "bf16")

Case = tuple[int, str, str, str, str]
"""Processes, layout, what is trained, what is made again, precision."""

ALL: list[Case] = [
    (size, layout, kind, recompute, precision)
    for size, layouts in LAYOUTS.items()
    for layout, kind, recompute, precision in itertools.product(layouts, KINDS, RECOMPUTE, PRECISIONS)
]
FAST = [
    case
    for case in ALL
    if (case[3:] == ("none", "fp32"))
    or (case[0] == 2 and case[2] == "qlora" and case[4] == "fp32" and case[1] in ("zero3", "tensor+sequence"))
    or (case[3:] == ("none", "bf16") and case[2] == "full")
]
SLOW = [case for case in ALL if case not in FAST]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """What was seen: by each process in each case, and by one process of each kind and precision."""

    many: Mapping[Case, list[Trace]]
    one: Mapping[tuple[str, str], Trace]


def matrix_of(cases: list[Case], world: World, folder: Path) -> Matrix:
    def file(name: str, kind: str, precision: str, **changes: Any) -> str:
        model = {"model": {"path": str(world.base), "config": None, "tokenizer": None}} if kind != "full" else {}
        # Of plain steps rounding stays rounding; AdamW's first makes a gradient's sign of what may be rounding alone.
        optimizer = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
        changes |= {**KINDS[kind], **model, "optimizer": optimizer, "precision": precision}
        return recipe_file(world, folder, name, **changes)

    files = {
        case: file("-".join(map(str, case)), case[2], case[4], parallel=LAYOUTS[case[0]][case[1]], memory=case[3])
        for case in cases
    }
    many: dict[Case, list[Trace]] = {}
    for size in LAYOUTS:
        own = {case: path for case, path in files.items() if case[0] == size}
        found = run_group(see, size, list(own.values()), PACKS, MICRO, timeout=900)
        many |= {case: [seen[path] for seen in found] for case, path in own.items()}
    alone = {
        (kind, precision): file(f"one-{kind}-{precision}", kind, precision)
        for kind, precision in itertools.product(KINDS, PRECISIONS)
    }
    one = see(list(alone.values()), PACKS, MICRO, 1)
    return Matrix(many, {key: one[path] for key, path in alone.items()})


@pytest.fixture(scope="module")
def fast(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return matrix_of(FAST, tiny_world, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def rest(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return matrix_of(SLOW, tiny_world, tmp_path_factory.mktemp("parity"))


def problems(matrix: Matrix, case: Case) -> list[str]:
    """What is not as on one process: in float32 to a millionth; in bfloat16 as near to float32 as one process is."""
    many, precision = matrix.many[case], case[4]
    one, exact = matrix.one[case[2], precision], matrix.one[case[2], "fp32"]
    return differences(many, one) if precision == "fp32" else further_off(many, one, exact)


def further_off(many: list[Trace], one: Trace, exact: Trace) -> list[str]:
    wanted = gradients([exact], 0)

    def off(found: Mapping[str, Tensor]) -> float:
        squares = [float((found[name].double() - value.double()).square().sum()) for name, value in wanted.items()]
        return sum(squares) ** 0.5

    here, alone = off(gradients(many, 0)), off(gradients([one], 0))
    loss, other = many[0].steps[0].loss, one.steps[0].loss
    found = [f"gradients are {here:.2e} off, one process's {alone:.2e}"] if not here < 1.5 * alone else []
    return found + ([f"loss {loss}, not {other}"] if loss != pytest.approx(other, rel=2e-3) else [])


@pytest.mark.parametrize("case", FAST, ids=lambda case: "-".join(map(str, case)))
def test_a_layout_is_one_process(fast: Matrix, case: Case) -> None:
    assert problems(fast, case) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: "-".join(map(str, case)))
def test_the_rest_of_the_matrix(rest: Matrix, case: Case) -> None:
    assert problems(rest, case) == []


def test_recomputation_changes_no_bit(fast: Matrix) -> None:
    made_again = [case for case in FAST if case[3] != "none"]
    assert made_again
    for size, layout, kind, recompute, precision in made_again:
        plain, again = (fast.many[size, layout, kind, one, precision] for one in ("none", recompute))
        for step in range(2):
            want, got = gradients(plain, step), gradients(again, step)
            assert all(torch.equal(got[name], value) for name, value in want.items()), (layout, kind, recompute)


def test_a_difference_is_seen(fast: Matrix) -> None:
    one = fast.one["full", "fp32"]
    changed = gradients([one], 0)
    changed["norm.weight"] = changed["norm.weight"] * (1 + 2e-6)
    assert distance(changed, gradients([one], 0))[0] > 1e-6
    # Steps in another order, and the gradients of another precision, are problems.
    assert len(differences([dataclasses.replace(one, steps=one.steps[::-1])], one)) >= 4
    bf16 = fast.one["full", "bf16"]
    assert differences([bf16], one)
    halved = {name: (box, value / 2) for name, (box, value) in bf16.steps[0].gradients.items()}
    assert further_off(
        [dataclasses.replace(bf16, steps=[dataclasses.replace(bf16.steps[0], gradients=halved)])], bf16, one
    )
    # Three processes' parts of four are no whole.
    with pytest.raises(ValueError, match="no process holds all of it"):
        gradients(fast.many[4, "zero3+tensor", "full", "none", "fp32"][:3], 0)
