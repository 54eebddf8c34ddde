"""AWQ's factors and clips, and SmoothQuant's factors, by their formulas."""

from dataclasses import replace

import pytest
import torch

from danlu.numerics.format import Format, encode, encode_as
from danlu.numerics.quantizers.awq import Awq, candidate_factors, weight_share
from danlu.numerics.quantizers.smooth_quant import smoothing_factors
from danlu.numerics.quantizers.statistics import Statistics

FORM = Format("int4", (1, 16), zero="integer")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 40, generator=generator), torch.randn(64, 40, generator=generator)


def test_factors_are_of_mean_inputs_and_of_shares_of_weights() -> None:
    magnitude, share = torch.tensor([0.5, 2.0, 8.0]), torch.tensor([0.25, 0.5, 0.25])
    ones, *others = candidate_factors(magnitude, share)
    assert ones[0] == 0 and ones[1].equal(torch.ones(3))
    assert [ratio for ratio, _ in others] == [step / 19 for step in range(20)]
    for ratio, factors in others:
        wanted = magnitude**ratio / share ** (1 - ratio)
        torch.testing.assert_close(factors, wanted / (wanted.max() * wanted.min()).sqrt(), rtol=1e-3, atol=0)
    rows = torch.tensor([[1.0, -2.0, 0.5, 4.0, 3.0], [2.0, 2.0, -1.0, 1.0, 0.0]])
    weights = [rows, torch.tensor([[[0.0, 1.0, -1.0, 0.0, 7.0]]])]
    found = weight_share(weights, Format("int4", (1, 2)))
    torch.testing.assert_close(found, torch.tensor([0.5, 1.0, 2.125 / 3, 2 / 3, 2 / 3]))


@pytest.mark.parametrize("form", [FORM, Format("int4", (1, 16))], ids=["zeros", "symmetric"])
def test_clips_are_the_best_of_all_bounds_for_the_output_of_the_row(form: Format) -> None:
    """By outputs over all tokens in float64: the last group is the best one next to the others, and rows lose less than
    with groups that are searched alone, as in AWQ's own code."""
    weight, x = inputs()
    weight[:, ::16] *= 4  # an outlier in each group
    x += 2 * x[:, :1]  # what groups lose is added up, or taken away
    statistics = Statistics(64, hessian=x.T @ x / len(x))
    solved = Awq().solve(weight, statistics, form)

    def losses(numbers: torch.Tensor) -> torch.Tensor:  # [.., O]
        return ((numbers - weight).double() @ x.T.double()).square().mean(-1)

    def candidates(group: torch.Tensor) -> torch.Tensor:  # [bounds, O, columns]
        bounds = [group.abs().amax(1, keepdim=True) * (1 - step / 40) for step in range(21)]
        grids = [encode(group.clamp(-bound, bound), replace(form, block=(1, 0))) for bound in bounds]
        return torch.stack([encode_as(group, grid).decode() for grid in grids])

    own, alone = solved.decode(), torch.zeros_like(weight)
    for start in range(0, 40, 16):
        part = slice(start, start + 16)
        of_bounds = candidates(weight[:, part])
        change = (of_bounds - weight[:, part]).double() @ x[:, part].T.double()
        chosen = change.square().mean(2).argmin(0)
        alone[:, part] = of_bounds[chosen, torch.arange(len(weight))]
    others = own.repeat(21, 1, 1)
    others[:, :, 32:] = candidates(weight[:, 32:])
    torch.testing.assert_close(losses(own), losses(others).amin(0), rtol=1e-4, atol=0)
    assert (losses(alone) > 1.01 * losses(others).amin(0)).sum() > 4  # the control
    assert losses(own).sum() < 0.9 * losses(alone).sum() < 0.9 * losses(encode(weight, form).decode()).sum()
    unclipped = Awq(clip=False).solve(weight, statistics, form)
    assert unclipped.codes.equal(encode(weight, form).codes)


def test_smoothing_takes_the_root_of_inputs_over_weights() -> None:
    factors = smoothing_factors(torch.tensor([4.0, 9.0, 0.0]), torch.tensor([1.0, 4.0, 2.0]), 0.5)
    torch.testing.assert_close(factors, torch.tensor([2.0, 1.5, 1.0]))
    torch.testing.assert_close(smoothing_factors(torch.tensor([16.0]), torch.tensor([1.0]), 0.75), torch.tensor([8.0]))
