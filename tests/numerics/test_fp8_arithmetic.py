"""The products of linear layers in FP8 against float64, and against the definition of their blocks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from danlu.numerics.arithmetic import BEHIND_ATTENTION, OTHER_BLOCKS, RECIPES, Fp8Arithmetic
from danlu.numerics.format import Format, encode

T, OUT, IN = 256, 144, 272


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(y: Tensor, exact: Tensor) -> float:
    """The root of the summed squares of differences, relative."""
    return float((y.double() - exact).norm() / exact.norm())


def errors(arithmetic: Fp8Arithmetic, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[float, float, float]:
    """Of the output, of the gradient of x, and of that of the weight."""
    (y,), kept = arithmetic.forward(x, (weight,))
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    return (
        error(y, wide_x @ wide_weight.t()),
        error(arithmetic.input_gradient(grad, weight), wide_grad @ wide_weight),
        error(arithmetic.weight_gradient(grad, kept), wide_grad.t() @ wide_x),
    )


# E4M3 has a rounding error of 0.026 of normal numbers, two factors 0.037; E5M2 0.052, with one of E4M3 0.059. MXFP8
# lets the largest numbers of a block saturate.
BOUNDS = {
    "tile": (0.038, 0.038, 0.038),
    "row": (0.038, 0.038, 0.038),
    "row-with-bf16-weight-gradient": (0.038, 0.038, 1e-6),
    "tensor": (0.039, 0.060, 0.060),
    "mxfp8": (0.045, 0.045, 0.045),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_are_near_those_of_float64(recipe: str) -> None:
    x, weight, grad = numbers(T, IN), numbers(OUT, IN, seed=1) / 50, numbers(T, OUT, seed=2) * 1e-4
    got = errors(Fp8Arithmetic(recipe), x, weight, grad)
    assert all(value <= bound for value, bound in zip(got, BOUNDS[recipe], strict=True)), got
    assert all(value > 0.02 for value in got[:2])  # control: they are in 8 bits


def test_a_token_of_another_size_does_not_spoil_those_of_other_tokens() -> None:
    """The control: one scale for all of a tensor."""
    x, weight = numbers(T, IN), numbers(OUT, IN, seed=1)
    x[3] *= 1e5
    others = torch.arange(T) != 3
    exact = x.double() @ weight.double().t()

    def of_others(recipe: str) -> float:
        (y,), _ = Fp8Arithmetic(recipe).forward(x, (weight,))
        return error(y[others], exact[others])

    assert of_others("tile") < 0.038
    assert of_others("tensor") > 0.38


def test_gradients_of_log_normal_size_keep_their_tokens() -> None:
    """The mean over tokens of the relative error; the controls are one scale, and E4M3 as it is."""
    grad, weight = numbers(T, OUT), numbers(OUT, IN, seed=1)
    grad = grad * (numbers(T, 1, seed=2) * 8 - 20).exp()
    exact = grad.double() @ weight.double()

    def by_tokens(y: Tensor) -> float:
        return float(((y.double() - exact).norm(dim=1) / exact.norm(dim=1)).mean())

    assert by_tokens(Fp8Arithmetic("tile").input_gradient(grad, weight)) < 0.038
    assert by_tokens(Fp8Arithmetic("tensor").input_gradient(grad, weight)) > 0.5
    assert by_tokens(grad.to(torch.float8_e4m3fn).float() @ weight) > 0.9


@pytest.mark.parametrize("recipe", RECIPES)
def test_groups_are_products_of_single_layers(recipe: str) -> None:
    """Rows of stacked layers, of which one has none. One scale of a tensor is that of all rows together."""
    arithmetic, counts = Fp8Arithmetic(recipe), torch.tensor([100, 0, 130, 26])
    x, weight, grad = numbers(T, IN), numbers(4, OUT, IN, seed=1), numbers(T, OUT, seed=2)
    (y,), kept = arithmetic.grouped_forward(x, (weight,), counts)
    grad_x = arithmetic.grouped_input_gradient(grad, weight, counts)
    grad_weight = arithmetic.grouped_weight_gradient(grad, kept, counts)
    assert not grad_weight[1].any()
    start = 0
    for layer, count in enumerate(counts.tolist()):
        rows, start = slice(start, start + count), start + count
        if not count:
            continue
        (single,), kept_single = arithmetic.forward(x[rows], (weight[layer],))
        single_x = arithmetic.input_gradient(grad[rows], weight[layer])
        single_weight = arithmetic.weight_gradient(grad[rows], kept_single)
        for got, want in ((y[rows], single), (grad_x[rows], single_x), (grad_weight[layer], single_weight)):
            if recipe == "tensor":
                assert error(got, want.double()) < 0.12
            else:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_tile_keeps_e4m3_and_turns_it_to_tiles_of_tokens() -> None:
    """By the definition: rounded in tiles of features, then in tiles of tokens; the control leaves the first out."""
    x, grad = numbers(T, IN), numbers(T, OUT, seed=2)
    x[::3, 5] *= 1e5  # next to which other features of a token are hardly there
    arithmetic = Fp8Arithmetic("tile")
    _, kept = arithmetic.forward(x, (numbers(OUT, IN, seed=1),))
    assert [each.dtype for each in kept] == [torch.float8_e4m3fn, torch.float32]
    assert sum(each.nbytes for each in kept) == T * (IN + 4 * 3)
    by_features = Format("e4m3", (1, 128), "power-of-two")
    by_tokens = Format("e4m3", (128, 1), "power-of-two")
    of_grad = encode(grad, by_tokens).decode()
    got = arithmetic.weight_gradient(grad, kept)
    assert torch.equal(got, of_grad.t() @ encode(encode(x, by_features).decode(), by_tokens).decode())
    assert not torch.equal(got, of_grad.t() @ encode(x, by_tokens).decode())


def test_behind_attention_tile_keeps_the_input_and_rounds_it_to_e5m6() -> None:
    x, grad, weight = numbers(T, IN), numbers(T, OUT, seed=2), numbers(OUT, IN, seed=1)
    arithmetic = Fp8Arithmetic("tile", behind_attention=True)
    _, (kept,) = arithmetic.forward(x, (weight,))
    assert kept is x
    rounded = encode(x, BEHIND_ATTENTION).decode()
    assert torch.equal(arithmetic.kept_values((kept,), torch.float32), rounded)
    assert 2e-3 < error(rounded, x.double()) < 5e-3  # six digits; control: E4M3's four are 0.026
    got = arithmetic.weight_gradient(grad, (kept,))
    assert error(got, grad.double().t() @ x.double()) < 0.039


def test_scales_of_powers_of_two_survive_other_tiles() -> None:
    """Numbers of normal size are the same after tiles of features became tiles of tokens; the control scales by the
    largest number."""
    x = numbers(T, 256)
    x = x.sign() * x.abs().clamp(0.1)

    def second_rounding(scale: str) -> int:
        first = encode(x, Format("e4m3", (1, 128), scale)).decode()  # type: ignore[arg-type]
        second = encode(first, Format("e4m3", (128, 1), scale)).decode()  # type: ignore[arg-type]
        return int((first != second).sum())

    assert second_rounding("power-of-two") == 0
    assert second_rounding("float32") > 0.3 * x.numel()


@pytest.mark.parametrize("cuts", [(128, 256, 272), (96, 272), (40, 200, 272)])
def test_other_blocks_move_numbers_by_the_stated_bound(cuts: tuple[int, ...]) -> None:
    """As ranks have them that share features: not at all at whole blocks, else by `OTHER_BLOCKS` of the largest number.

    The controls: scales that are no powers of two, and powers that are rounded down.
    """
    x = numbers(64, IN) * (numbers(64, IN, seed=3) * 3).exp()

    def largest(edges: tuple[int, ...]) -> Tensor:
        """Of the block of each number."""
        blocks = [x[:, start:end].abs() for start, end in itertools.pairwise((0, *edges))]
        return torch.cat([block.amax(1, keepdim=True).expand_as(block) for block in blocks], dim=1)

    def furthest(form: Format) -> float:
        """Of the bound, with the larger one of the two blocks in which a number lies."""
        pieces = [encode(x[:, start:end], form).decode() for start, end in itertools.pairwise((0, *cuts))]
        moved = (torch.cat(pieces, dim=1) - encode(x, form).decode()).abs()
        return float((moved / (OTHER_BLOCKS * torch.maximum(largest((128, 256, IN)), largest(cuts)))).amax())

    at_blocks = cuts[0] == 128
    by_tiles = furthest(Format("e4m3", (1, 128), "power-of-two"))
    assert by_tiles == 0 if at_blocks else 0.1 < by_tiles <= 1
    for other in (Format("e4m3", (1, 128)), Format("e4m3", (1, 128), "e8m0", rounding="floor")):
        assert furthest(other) == 0 if at_blocks else furthest(other) > 100


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_hidden(recipe: str, value: float) -> None:
    """E4M3 has no infinity, and a cast makes 448 of it: the output of the token says so, and the gradients."""
    x, weight, grad = numbers(64, 96), numbers(32, 96, seed=1), numbers(64, 32, seed=2)
    x[5, 7] = grad[9, 3] = value
    (y,), _ = Fp8Arithmetic(recipe).forward(x, (weight,))
    assert not y[5].isfinite().any()
    assert recipe == "tensor" or y[torch.arange(64) != 5].isfinite().all()
    arithmetic = Fp8Arithmetic(recipe)
    assert not arithmetic.input_gradient(grad, weight)[9].isfinite().any()
    assert not arithmetic.weight_gradient(grad, arithmetic.keep(numbers(64, 96)))[3].isfinite().any()


def test_cuts_at_whole_tiles_of_tokens_change_no_bit() -> None:
    """A weight's gradient of 256 tokens is the sum of those of 128; the control cuts at 100."""
    arithmetic, weight = Fp8Arithmetic("tile"), numbers(OUT, IN, seed=1)
    x, grad = numbers(T, IN) * (numbers(T, 1, seed=3) * 2).exp(), numbers(T, OUT, seed=2)

    def numbers_of(start: int, end: int) -> Tensor:
        """The factor of x as tiles of tokens make it."""
        kept = arithmetic.keep(x[start:end])
        return encode(arithmetic.kept_values(kept, torch.float32), arithmetic.formats.by_tokens[1]).decode()  # type: ignore[index]

    whole = numbers_of(0, T)
    assert torch.equal(torch.cat((numbers_of(0, 128), numbers_of(128, T))), whole)
    assert not torch.equal(torch.cat((numbers_of(0, 100), numbers_of(100, T))), whole)

    def gradient(start: int, end: int) -> Tensor:
        _, kept = arithmetic.forward(x[start:end], (weight,))
        return arithmetic.weight_gradient(grad[start:end], kept)

    torch.testing.assert_close(gradient(0, 128) + gradient(128, T), gradient(0, T), rtol=1e-5, atol=1e-4)


def test_weights_are_rounded_to_the_type_of_activations_first() -> None:
    """So that shards may be gathered in it."""
    x, weight = numbers(32, IN).bfloat16(), numbers(OUT, IN, seed=1)
    (y,), _ = Fp8Arithmetic("tile").forward(x, (weight,))
    (gathered,), _ = Fp8Arithmetic("tile").forward(x, (weight.bfloat16(),))
    assert torch.equal(y, gathered)
