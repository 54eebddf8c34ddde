"""Products and activations whose rows have the same bits in any company, with torch's own operators as controls."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from builders.covering import fast
from torch import Tensor

from danlu.numerics import batch_invariant as module
from danlu.numerics.batch_invariant import TILE_ROWS, batch_invariant

COUNTS = (1, 2, 3, 5, 31, 32, 33, 63, 64, 100, 191, 300)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """300 tokens [T, I], a weight [O, I] and a bias [O]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 1536), (512, 1536), (512,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def products(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Of tokens [T, I] everything that layers and adapters call."""
    base = F.linear(x, weight)
    low = x @ weight[:8].t()
    return (
        F.linear(x, weight, bias),
        x @ weight.t(),
        torch.addmm(bias, x, weight.t(), alpha=0.5),
        base.addmm_(low, weight[:, :8].t()),
        F.linear(x.unsqueeze(1), weight, bias).squeeze(1),
        (x.unsqueeze(1).expand(-1, 2, -1) @ weight.t())[:, 1],
    )


def same_in_any_company(
    of_tokens: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, counts: tuple[int, ...] = COUNTS
) -> bool:
    whole = of_tokens(x)
    parts = [(of_tokens(x[:count]), 0, count) for count in counts] + [(of_tokens(x[7:8]), 7, 8)]
    return all(
        torch.equal(one, all_of_it[start:stop])
        for got, start, stop in parts
        for one, all_of_it in zip(got, whole, strict=True)
    )


@pytest.mark.parametrize(
    ("dtype", "inference"),
    fast(
        itertools.product([torch.float32, torch.bfloat16], [False, True]),
        (torch.float32, False),
        (torch.bfloat16, True),
    ),
)
def test_rows_of_products_do_not_depend_on_other_rows(dtype: torch.dtype, inference: bool) -> None:
    x, weight, bias = operands(dtype)
    counts = (1, 5, 33, 100) if inference else COUNTS  # the same kernels, reached in another way
    with torch.inference_mode(inference), batch_invariant():
        assert same_in_any_company(lambda part: products(part, weight, bias), x, counts)
        mine = products(x, weight, bias)
    for got, want in zip(mine, products(x.double(), weight.double(), bias.double()), strict=True):
        assert (got.double() - want).norm() <= (1e-6 if dtype == torch.float32 else 0.01) * want.norm()


def test_plain_products_do_depend_on_other_rows() -> None:
    x, weight, bias = operands()
    assert not same_in_any_company(lambda part: products(part, weight, bias), x)


def test_products_with_one_token_as_the_vector_are_among_them() -> None:
    x, weight, bias = operands(torch.bfloat16)
    with batch_invariant():
        assert torch.equal(torch.mv(weight, x[5]), (x @ weight.t())[5])
        assert torch.equal(torch.addmv(bias, weight, x[5]), F.linear(x, weight, bias)[5])


def test_memory_that_is_not_aligned_changes_nothing() -> None:
    x, weight, _ = operands()
    moved = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    with batch_invariant():
        assert torch.equal(moved @ weight.t(), x @ weight.t())
        strided = torch.cat((x, x), dim=1)[:, : x.shape[1]]
        assert torch.equal(strided @ weight.t(), x @ weight.t())


@pytest.mark.parametrize("columns", [2, 5, 8, 11])
@pytest.mark.parametrize("depth", [10, 17, 64])
def test_few_columns_are_multiplied_alike_wherever_a_row_lies(columns: int, depth: int) -> None:
    x, weight, bias = torch.randn(40, depth), torch.randn(columns, depth), torch.randn(columns)
    with batch_invariant():
        whole, with_bias = F.linear(x, weight), F.linear(x, weight, bias)
        for first in (1, 2, 3, 7, 33):
            assert torch.equal(F.linear(x[first:], weight), whole[first:])
            assert torch.equal(F.linear(x[first:], weight, bias), with_bias[first:])
            assert torch.equal(x[first:] @ weight.t().contiguous(), (x @ weight.t().contiguous())[first:])
    torch.testing.assert_close(whole, F.linear(x, weight))
    torch.testing.assert_close(with_bias, F.linear(x, weight, bias))
    assert with_bias.is_contiguous()


def test_gradients_are_those_of_the_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands()

    def gradients() -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
        F.linear(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    want = gradients()
    rows: list[int] = []
    plain = module._in_tiles
    monkeypatch.setattr(module, "_in_tiles", lambda left, *rest: rows.append(left.shape[0]) or plain(left, *rest))
    with batch_invariant():
        got = gradients()
    assert len(got) == 3
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-3)
    assert sorted(rows) == [300, 300, 512], (
        "the output, the gradient of x, and that of the weight, whose rows are outputs"
    )


def test_products_for_a_weights_gradient_are_made_at_once() -> None:
    x, _, _ = operands()
    assert module._rows_are_tokens(x)
    assert module._rows_are_tokens(x[:, :8])
    assert module._rows_are_tokens(x[:1])
    assert module._rows_are_tokens(x[:, :1])
    assert not module._rows_are_tokens(x.t())
    assert not module._rows_are_tokens(x[:, :8].t())


@pytest.mark.parametrize("kind", ["sigmoid", "silu", "gelu_tanh", "gelu"])
def test_activations_compute_each_number_alike(kind: str) -> None:
    function: Callable[[Tensor], Tensor] = {
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[kind]
    x = torch.linspace(-9, 9, 20_001)

    def one_by_one() -> Tensor:
        return torch.cat([function(part) for part in x.split(7)])

    with batch_invariant():
        assert torch.equal(one_by_one(), function(x))
        torch.testing.assert_close(function(x).double(), function(x.double()), rtol=2e-5, atol=1e-6)
        half = x.bfloat16()
        torch.testing.assert_close(function(half), function(x).bfloat16(), rtol=0.02, atol=0.02)
    if kind != "gelu":
        assert not torch.equal(one_by_one(), function(x)), "torch's own last numbers are computed by other code"


def test_the_override_ends_with_its_context_and_says_nothing() -> None:
    x, weight, _ = operands()
    before = x[:7] @ weight.t(), x @ weight.t()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with batch_invariant():
            assert module._library is not None
            with batch_invariant():
                pass
            assert module._library is not None
    assert module._library is None
    assert torch.equal(before[0], x[:7] @ weight.t())
    assert torch.equal(before[1], x @ weight.t())


def test_products_of_nothing_and_of_other_types_are_made() -> None:
    with batch_invariant():
        assert (torch.zeros(0, 4) @ torch.zeros(4, 3)).shape == (0, 3)
        ones = torch.ones(TILE_ROWS + 1, 2, dtype=torch.int64)
        assert (ones @ ones.t()).eq(2).all()
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(3, 4) @ torch.ones(3, 4)
