"""The gated delta rule in chunks against its recurrence, token by token, and against transformers'."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders.delta_recurrence import delta_inputs, delta_recurrence, paths
from torch import Tensor

from danlu.core.types import Branch
from danlu.models import delta_rule
from danlu.models.delta_rule import gated_delta_rule, gated_delta_rule_from, gated_delta_step
from danlu.models.recurrent_order import RecurrentOrder
from danlu.numerics.relative_error import relative_error

TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 1e-5)]
"""Of numbers of about 1; float32's worst of these was 3.2e-6."""

PACKS = {
    "one": (0, 192),
    "short": (0, 5, 9, 10),
    "uneven": (0, 70, 71, 200, 203, 267),
    "rising": (0, 3, 40, 210),
}
TREE = (
    Branch(-1, 0, 70),
    Branch(0, 70, 75),
    Branch(0, 75, 150),
    Branch(2, 150, 152),
    Branch(2, 152, 220),
    Branch(-1, 220, 230),
    Branch(5, 230, 231),  # a chain, which is one run
)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    (out.double() * weights).sum().backward()
    return [x.grad for x in inputs if x.grad is not None]


def both(
    dtype: torch.dtype, boundaries: tuple[int, ...], trees: tuple[Branch, ...] = ()
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients, in chunks and by the recurrence in float64."""
    inputs = [x.requires_grad_() for x in delta_inputs(boundaries[-1], dtype)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = gated_delta_rule(*inputs, RecurrentOrder(boundaries, trees))
    expected, _ = delta_recurrence(*wide, paths(boundaries, trees))
    return [out, *gradients(out, inputs)], [expected, *gradients(expected, wide)]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_chunks_equal_the_recurrence_forward_and_backward(pack: str, dtype: torch.dtype, tolerance: float) -> None:
    for mine, expected in zip(*both(dtype, PACKS[pack]), strict=True):
        assert mine.dtype == dtype
        assert (mine - expected).abs().max() <= tolerance * max(1.0, float(expected.detach().abs().max()))


def test_the_gradient_of_the_decay_is_as_exact_as_the_others() -> None:
    """Most of what its sums are made of cancels: summed in float32 it was twice as far off as they are."""
    q, k, v, _, beta = (x.detach() for x in delta_inputs(640, torch.float32))
    decay = -0.5 * torch.rand(beta.shape, generator=torch.Generator().manual_seed(3))
    of_type = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v, decay, beta)]
        of_type.append(gradients(gated_delta_rule(*inputs, RecurrentOrder((0, 640))), inputs))
    errors = [relative_error(mine, expected) for mine, expected in zip(*of_type, strict=True)]
    of_decay = errors.pop(3)
    assert of_decay < 1.4 * max(errors)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_branches_begin_with_the_state_of_their_stem(dtype: torch.dtype, tolerance: float) -> None:
    mine, expected = both(dtype, (0, 220, 231), TREE)
    for one, other in zip(mine, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.detach().abs().max()))
    without = gated_delta_rule(*delta_inputs(231, dtype), RecurrentOrder((0, 220, 231)))
    assert (without - mine[0]).abs().max() > 1e-2  # one document of what are branches is something else


def test_documents_leave_each_other_alone() -> None:
    """To the bit, also beside a document that is not finite, as rows that fill a batch up may be."""
    inputs = delta_inputs(140, torch.float32)
    alone = gated_delta_rule(*(x[:70] for x in inputs), RecurrentOrder((0, 70)))
    inputs[2][70:] = float("nan")
    inputs[1][70:] = float("inf")
    beside = gated_delta_rule(*inputs, RecurrentOrder((0, 70, 140)))
    assert torch.equal(beside[:70], alone)
    joined = gated_delta_rule(*delta_inputs(140, torch.float32), RecurrentOrder((0, 140)))
    assert not torch.equal(
        joined[70:], gated_delta_rule(*delta_inputs(140, torch.float32), RecurrentOrder((0, 70, 140)))[70:]
    )


def test_the_backward_pass_keeps_to_documents() -> None:
    inputs = [x.requires_grad_() for x in delta_inputs(140, torch.float32)]
    gated_delta_rule(*inputs, RecurrentOrder((0, 70, 140)))[70:].sum().backward()
    assert all(not x.grad[:70].any() and x.grad[70:].any() for x in inputs if x.grad is not None)


def test_equal_keys_without_decay_are_exact_enough() -> None:
    """The worst case of the triangular system, whose powers are binomial coefficients: nothing may cancel."""
    q, k, v, g, beta = delta_inputs(128, torch.float32)
    k = k[:1].expand(128, -1, -1).contiguous()
    g, beta = torch.zeros_like(g), torch.full_like(beta, 0.999)
    out = gated_delta_rule(q, k, v, g, beta, RecurrentOrder((0, 128)))
    expected, _ = delta_recurrence(*(x.double() for x in (q, k, v, g, beta)), paths((0, 128)))
    assert (out - expected).abs().max() <= TOLERANCES[1][1]


def test_strong_decay_neither_overflows_nor_vanishes_into_nan() -> None:
    inputs = delta_inputs(128, torch.float32)
    inputs[3] = torch.full_like(inputs[3], -60.0)  # exp of a chunk's sum, and of its negative, leave float32
    inputs = [x.requires_grad_() for x in inputs]
    out = gated_delta_rule(*inputs, RecurrentOrder((0, 128)))
    expected, _ = delta_recurrence(*(x.detach().double() for x in inputs), paths((0, 128)))
    assert (out - expected).abs().max() <= TOLERANCES[1][1]
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("elements", [1, 1 << 30])
def test_groups_of_heads_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = both(torch.float64, PACKS["uneven"])[0]
    monkeypatch.setattr(delta_rule, "GROUP_ELEMENTS", elements)
    for mine, other in zip(both(torch.float64, PACKS["uneven"])[0], expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_states_go_on_in_chunks_and_token_by_token() -> None:
    inputs = delta_inputs(150, torch.float64)
    whole, states = delta_recurrence(*inputs, paths((0, 150)))
    with torch.no_grad():
        first, state = gated_delta_rule_from(
            *(x[:90] for x in inputs), RecurrentOrder((0, 90)), torch.zeros(1, 4, 8, 6, dtype=torch.float64)
        )
        torch.testing.assert_close(state[0], states[89], rtol=0, atol=1e-13)
        second, state = gated_delta_rule_from(*(x[90:149] for x in inputs), RecurrentOrder((0, 59)), state)
        last, state = gated_delta_step(*(x[149:] for x in inputs), state)
        torch.testing.assert_close(state[0], states[149], rtol=0, atol=1e-13)
        torch.testing.assert_close(torch.cat([first, second, last]), whole, rtol=0, atol=1e-13)


def test_states_of_several_runs_stay_with_their_runs() -> None:
    """Chunks are sorted by the length of their runs; what goes in and comes out is in the order of the runs."""
    inputs = delta_inputs(230, torch.float64)
    order, boundaries = RecurrentOrder((0, 3, 203, 230)), (0, 3, 203, 230)
    begin = torch.randn(3, 4, 8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        out, ends = gated_delta_rule_from(*inputs, order, begin)
        for run, (start, stop) in enumerate(itertools.pairwise(boundaries)):
            alone, end = gated_delta_rule_from(
                *(x[start:stop] for x in inputs), RecurrentOrder((0, stop - start)), begin[run : run + 1]
            )
            torch.testing.assert_close(out[start:stop], alone, rtol=0, atol=1e-13)
            torch.testing.assert_close(ends[run], end[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, g, beta = delta_inputs(150, torch.float32, key=16, value=16)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = gated_delta_rule(q, k, v, g, beta, RecurrentOrder((0, 150)))
    expected, _ = torch_chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True
    )
    assert out.dtype == dtype
    assert (out.float() - expected[0].float()).abs().max() <= (TOLERANCES[1][1] if dtype == torch.float32 else 2e-2)
