"""AWQ's factors and clips, and SmoothQuant's factors, by their formulas."""

import torch

from danlu.numerics.format import Format, encode
from danlu.numerics.quantizers.awq import Awq, candidate_factors, clipped
from danlu.numerics.quantizers.smooth_quant import smoothing_factors
from danlu.numerics.quantizers.statistics import Statistics

FORM = Format("int4", (1, 16), zero="integer")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 40, generator=generator), torch.randn(64, 40, generator=generator)


def test_factors_are_powers_of_the_mean_magnitude_around_one() -> None:
    magnitude = torch.tensor([0.5, 2.0, 8.0])
    factors = dict(candidate_factors(magnitude))
    assert list(factors) == [step / 20 for step in range(20)]
    torch.testing.assert_close(factors[0.0], torch.ones(3))
    torch.testing.assert_close(factors[0.5], magnitude.sqrt() / (0.5**0.5 * 8**0.5) ** 0.5)


def test_clips_lose_no_more_than_none_do_in_each_group() -> None:
    weight, x = inputs()
    weight[:, ::16] *= 4  # an outlier in each group
    bounded = clipped(weight, x, FORM)
    solved = Awq().solve(weight, Statistics(64, sample=x), FORM)
    assert solved.decode().equal(encode(bounded, FORM).decode())
    better = 0
    for start in range(0, 40, 16):
        part = slice(start, start + 16)
        errors = [
            ((encode(each, FORM).decode()[:, part] - weight[:, part]) @ x[:, part].T).square().mean(1)
            for each in (bounded, weight)
        ]
        assert bool((errors[0] <= errors[1] * (1 + 1e-5)).all())
        better += int((errors[0] < 0.9 * errors[1]).sum())
    assert better > 4
    assert Awq(clip=False).solve(weight, Statistics(64, sample=x), FORM).codes.equal(encode(weight, FORM).codes)


def test_smoothing_takes_the_root_of_inputs_over_weights() -> None:
    factors = smoothing_factors(torch.tensor([4.0, 9.0, 0.0]), torch.tensor([1.0, 4.0, 2.0]), 0.5)
    torch.testing.assert_close(factors, torch.tensor([2.0, 1.5, 1.0]))
    torch.testing.assert_close(smoothing_factors(torch.tensor([16.0]), torch.tensor([1.0]), 0.75), torch.tensor([8.0]))
