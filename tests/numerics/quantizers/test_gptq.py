"""GPTQ against its definition in float64: one column after the other, each taken out of the inverse Hessian."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from danlu.core.errors import ModelError
from danlu.numerics.format import Format, Scaled, encode
from danlu.numerics.quantizers import gptq
from danlu.numerics.quantizers.gptq import Gptq
from danlu.numerics.quantizers.statistics import Statistics, StatisticsSum

GROUPS = Format("int4", (1, 16))
DAMPING = 0.01


def correlated(inputs: int, tokens: int = 256, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator) + 2 * torch.eye(inputs)
    return torch.randn(tokens, inputs, generator=generator) @ mix * torch.rand(inputs, generator=generator).mul(3)


def statistics_of(x: torch.Tensor) -> Statistics:
    total = StatisticsSum(x.shape[1], {"hessian"})
    for part in x.split(100):
        total.add(part)
    statistics = total.statistics()
    assert statistics is not None
    return statistics


ActOrder = bool | Literal["group"]


def order_of(importance: list[float], wide: int, act_order: ActOrder) -> list[int]:
    """The columns in their order."""
    if act_order == "group":
        groups = [range(start, min(start + wide, len(importance))) for start in range(0, len(importance), wide)]
        groups.sort(key=lambda group: (len(group) < wide, -max(importance[column] for column in group)))
        return [column for group in groups for column in sorted(group, key=lambda column: -importance[column])]
    return sorted(range(len(importance)), key=lambda column: -importance[column] if act_order else column)


def one_by_one(weight: torch.Tensor, hessian: torch.Tensor, form: Format, *, act_order: ActOrder) -> torch.Tensor:
    """Optimal Brain Quantization of all rows in one order of columns (arXiv:2210.17323, eq. 2 and 3), float64."""
    inputs, wide = weight.shape[1], form.block[1]
    damped = hessian.double() + DAMPING * hessian.double().diagonal().mean() * torch.eye(inputs, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    order = order_of(hessian.diagonal().tolist(), wide, act_order)
    own, rounded = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    scales = encode(weight, form).scales if act_order is True else None
    for number, column in enumerate(order):
        if scales is not None:
            unit = scales[:, column // wide].double()
        else:
            if number % wide == 0:
                start = column // wide * wide
                group = encode(own[:, start : start + wide].float(), replace(form, block=(1, 0)))
            unit = group.scales[:, 0].double()
        rounded[:, column] = (own[:, column] / unit).round().clamp(-8, 7) * unit
        error = (own[:, column] - rounded[:, column]) / inverse[column, column]
        own -= error.unsqueeze(1) * inverse[column].unsqueeze(0)
        inverse = inverse - inverse[:, column : column + 1] * inverse[column : column + 1] / inverse[column, column]
        inverse[column], inverse[:, column] = 0, 0
        inverse[column, column] = 1
    return rounded


@pytest.mark.parametrize(("act_order", "inputs"), [(False, 64), (True, 64), ("group", 64), ("group", 56)])
def test_equals_the_definition(act_order: ActOrder, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 56 inputs the last group has 8."""
    monkeypatch.setattr(gptq, "BLOCK_COLUMNS", 24)  # groups of 16 lie across blocks
    # Other seeds have numbers halfway between two codes, which float32 and float64 round differently.
    x = correlated(inputs, seed=3)
    weight = torch.randn(8, inputs, generator=torch.Generator().manual_seed(1))
    statistics = statistics_of(x)
    assert statistics.hessian is not None
    solved = Gptq(act_order=act_order, damping=DAMPING).solve(weight, statistics, GROUPS)
    expected = one_by_one(weight, statistics.hessian, GROUPS, act_order=act_order)
    torch.testing.assert_close(solved.decode().double(), expected, rtol=0, atol=1e-4)
    # A control: in other orders the numbers are others.
    orders: tuple[ActOrder, ...] = (False, True, "group")
    for other in (each for each in orders if each != act_order):
        numbers = one_by_one(weight, statistics.hessian, GROUPS, act_order=other)
        assert (solved.decode() - numbers).abs().max() > 0.1


def output_error(solved: Scaled, weight: torch.Tensor, x: torch.Tensor) -> float:
    return float(((solved.decode() - weight) @ x.T).square().mean())


@pytest.mark.parametrize(
    "form",
    [
        GROUPS,
        Format("int4", (1, 16), zero="integer"),
        Format("int3", (1, 0)),
        Format("e2m1", (1, 32), "e8m0", rounding="floor"),
        Format("e2m1", (1, 16), "e4m3"),
        Format("e4m3", (32, 32)),
    ],
    ids=lambda form: f"{form.element}-{form.block}-{form.zero}",
)
def test_outputs_are_nearer_than_those_of_rounding(form: Format) -> None:
    x = correlated(64)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    solved = Gptq().solve(weight, statistics_of(x), form)
    assert output_error(solved, weight, x) < 0.7 * output_error(encode(weight, form), weight, x)


def test_columns_of_dead_inputs_are_rounded_to_the_nearest() -> None:
    x = correlated(64)
    x[:, 5] = 0
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    solved, rounded = Gptq().solve(weight, statistics_of(x), GROUPS), encode(weight, GROUPS)
    assert solved.codes[:, 5].equal(rounded.codes[:, 5])
    assert not solved.codes[:, 6].equal(rounded.codes[:, 6])


def test_all_inputs_dead_is_rounding_to_the_nearest() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    solved = Gptq().solve(weight, statistics_of(torch.zeros(4, 64)), GROUPS)
    assert solved.codes.equal(encode(weight, GROUPS).codes)


def test_act_order_keeps_groups_of_neighbouring_columns() -> None:
    """Group i // 16 of column i, as `g_idx` has it on disk, with the original weight's scales."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    solved = Gptq(act_order=True).solve(weight, statistics_of(correlated(64)), GROUPS)
    assert solved.scales.equal(encode(weight, GROUPS).scales)
    steps = solved.decode().unflatten(1, (4, 16)) / solved.scales.unsqueeze(2)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    # Without it a group's scale is that of its columns as earlier ones have changed them.
    assert not Gptq(act_order=False).solve(weight, statistics_of(correlated(64)), GROUPS).scales.equal(solved.scales)


def test_damping_grows_where_there_is_no_factor() -> None:
    x = correlated(64, tokens=8)  # of rank 8
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    solved = Gptq(damping=0.0).solve(weight, statistics_of(x), GROUPS)
    assert torch.isfinite(solved.decode()).all()


def test_a_hessian_without_a_factor_is_refused() -> None:
    indefinite = Statistics(8, hessian=torch.diag(torch.tensor([-1e6] + [1.0] * 63)))
    with pytest.raises(ModelError, match="no Cholesky factor even with a damping"):
        Gptq().solve(torch.randn(8, 64), indefinite, GROUPS)
    with pytest.raises(ModelError, match="not finite"):
        Gptq().solve(torch.randn(8, 64), Statistics(8, hessian=torch.full((64, 64), torch.nan)), GROUPS)
