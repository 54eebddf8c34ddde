"""The fused product of linear layers with LoRA and DoRA, against autograd over the definition written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.lora import row_squares
from danlu.adapters.low_rank import Branch, LowRankFactors, low_rank_linears
from danlu.core.layer_types import Recomputed
from danlu.models import ops
from danlu.models.modules import Linear
from danlu.numerics.four_bit_weight import FourBitWeight

TOKENS, INPUTS = 7, 10
OUTPUTS, RANKS = (12, 6, 5), (4, 3, None)  # the last layer has no adapter


def layer(outputs: int, seed: int, *, bias: bool = True, dtype: torch.dtype = torch.float64) -> Linear:
    torch.manual_seed(seed)
    linear = Linear(INPUTS, outputs, bias=bias)
    linear.weight = nn.Parameter(torch.randn(outputs, INPUTS, dtype=dtype), requires_grad=False)
    if bias:
        linear.bias = nn.Parameter(torch.randn(outputs, dtype=dtype))
    return linear


def factors(linear: Linear, rank: int | None, *, dora: bool, exact: bool = False) -> LowRankFactors | None:
    if rank is None:
        return None
    dtype = linear.weight.dtype
    a, b = torch.randn(rank, INPUTS, dtype=dtype), torch.randn(linear.shape[0], rank, dtype=dtype)
    m = torch.rand(linear.shape[0], dtype=dtype) + 0.5 if dora else None
    norm = row_squares(linear.weight) if dora else None
    trained = (tensor if tensor is None else tensor.requires_grad_() for tensor in (a, b, m))
    a, b, m = trained
    return LowRankFactors(a, b, 0.7, m, norm, exact)


def written_out(x: Tensor, linear: Linear, one: LowRankFactors | None, mask: Tensor | None = None) -> Tensor:
    """The definition, by autograd."""
    if one is None:
        return F.linear(x, linear.weight, linear.bias)
    dropped = x if mask is None else x * mask
    y = F.linear(x, linear.weight) + one.scale * F.linear(F.linear(dropped, one.a), one.b)
    if one.magnitude is not None:
        norm = torch.linalg.vector_norm(linear.weight + one.scale * one.b @ one.a, dim=1)
        y = y * (one.magnitude / (norm if one.exact_norm else norm.detach()))
    return y if linear.bias is None else y + linear.bias


Case = tuple[list[Linear], list[LowRankFactors | None]]


def case(*, dora: bool = False, exact: bool = False, bias: bool = True) -> Case:
    layers = [layer(outputs, seed, bias=bias) for seed, outputs in enumerate(OUTPUTS)]
    return layers, [factors(one, rank, dora=dora, exact=exact) for one, rank in zip(layers, RANKS, strict=True)]


def gradients(run: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor, made: Case) -> list[Tensor]:
    """Outputs, and gradients of x and of everything trained, for one random direction of the outputs."""
    trained = [x]
    for linear, one in zip(*made, strict=True):
        trained += [linear.bias] if linear.bias is not None else []
        trained += [] if one is None else [tensor for tensor in (one.a, one.b, one.magnitude) if tensor is not None]
    ys = run(x)
    torch.manual_seed(9)
    loss = sum((y * torch.randn_like(y)).sum() for y in ys)
    return [*ys, *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dora", "exact"), [(False, False), (True, False), (True, True)])
def test_outputs_and_gradients_are_those_of_the_definition(dora: bool, exact: bool, bias: bool) -> None:
    made = case(dora=dora, exact=exact, bias=bias)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    branches = [Branch(linear, one) for linear, one in zip(*made, strict=True)]
    ours = gradients(lambda x: low_rank_linears(x, branches), x, made)
    plain = gradients(lambda x: tuple(written_out(x, *pair) for pair in zip(*made, strict=True)), x, made)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_norm_as_a_constant_and_its_exact_gradient_differ() -> None:
    """The negative control of `exact_norm`: with it A's gradient is another one."""
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    found = []
    for exact in (False, True):
        torch.manual_seed(0)
        made = case(dora=True, exact=exact)
        branches = [Branch(linear, one) for linear, one in zip(*made, strict=True)]
        found.append(gradients(lambda x, branches=branches: low_rank_linears(x, branches), x, made))
    assert all(torch.equal(one, other) for one, other in zip(found[0][:3], found[1][:3], strict=True))
    assert not torch.allclose(found[0][5], found[1][5], rtol=1e-3)


@pytest.mark.parametrize("dora", [False, True])
def test_dropout_reaches_the_low_rank_path_alone_and_backward_draws_the_same_mask(dora: bool) -> None:
    made = case(dora=dora)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    dropout_state = DropoutState(3)
    dropout_state.begin(5, [(2, TOKENS)])
    dropout = Dropout(0.4, "layers.0", dropout_state)
    mask = dropout(torch.ones(TOKENS, INPUTS, dtype=torch.float64))
    branches = [Branch(linear, one) for linear, one in zip(*made, strict=True)]

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        dropout_state.begin(5, [(2, TOKENS)])
        ys = low_rank_linears(x, branches, dropout)
        dropout_state.begin(6, [(0, TOKENS)])  # by the time of the backward pass the run may be elsewhere
        return ys

    found = gradients(ours, x, made)
    plain = gradients(lambda x: tuple(written_out(x, *pair, mask) for pair in zip(*made, strict=True)), x, made)
    undropped = gradients(lambda x: tuple(written_out(x, *pair) for pair in zip(*made, strict=True)), x, made)
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found[0], undropped[0], rtol=1e-3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_what_is_kept_for_the_backward_pass(recomputed: bool) -> None:
    """x once for all layers, A x, and nothing as large as a weight or (made again) as x."""
    torch.manual_seed(0)
    gate, up = (torch.randn(TOKENS, INPUTS, requires_grad=True) for _ in range(2))
    layers = [layer(40, seed, bias=False, dtype=torch.float32) for seed in range(2)]
    ones = [factors(linear, 2, dora=False) for linear in layers]
    inner = ops.gated_mlp_activation(gate, up, "silu")
    again = Recomputed(lambda gate, up: ops.gated_mlp_activation(gate, up, "silu"), (gate, up)) if recomputed else None
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ys = low_rank_linears(inner, [Branch(*pair) for pair in zip(layers, ones, strict=True)], None, again)
    own = {tensor.untyped_storage().data_ptr() for pair in ones for tensor in (pair.a, pair.b)}
    new = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in own]
    shapes = sorted(tuple(tensor.shape) for tensor in new)
    assert shapes == sorted([(TOKENS, 4)] + ([(TOKENS, INPUTS)] * (2 if recomputed else 1)))
    if recomputed:
        assert {tensor.untyped_storage().data_ptr() for tensor in new if tensor.shape == (TOKENS, INPUTS)} == {
            tensor.untyped_storage().data_ptr() for tensor in (gate, up)
        }
    plain = F.silu(gate) * up
    loss = sum((y * y).sum() for y in ys)
    reference = sum((y * y).sum() for y in (written_out(plain, *pair) for pair in zip(layers, ones, strict=True)))
    trained = [gate, up, *(tensor for pair in ones for tensor in (pair.a, pair.b))]
    for one, other in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(reference, trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_input_without_gradient_and_a_frozen_a_cost_nothing() -> None:
    linear = layer(6, 0, bias=False)
    one = factors(linear, 3, dora=False)
    frozen = LowRankFactors(one.a.detach(), one.b, one.scale)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        (y,) = low_rank_linears(x, [Branch(linear, frozen)])
    assert not any(tensor.shape == x.shape for tensor in kept)  # LoRA-FA's point: no inputs are kept
    (grad_b,) = torch.autograd.grad(y.sum(), [one.b])
    (expected,) = torch.autograd.grad(written_out(x, linear, one).sum(), [one.b])
    torch.testing.assert_close(grad_b, expected, rtol=1e-10, atol=1e-10)


def test_without_gradients_the_result_is_the_same() -> None:
    made = case(dora=True)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64)
    branches = [Branch(linear, one) for linear, one in zip(*made, strict=True)]
    with torch.no_grad():
        quiet = low_rank_linears(x, branches)
    assert all(torch.equal(one, other) for one, other in zip(quiet, low_rank_linears(x, branches), strict=True))


def test_a_row_of_zeros_in_the_base_gives_dora_no_nan() -> None:
    linear = layer(6, 0, bias=False)
    linear.weight.data[2] = 0
    one = factors(linear, 3, dora=True)
    one.b.data.zero_()
    one.magnitude.data.copy_(one.base_row_squares.sqrt())
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    (y,) = low_rank_linears(x, [Branch(linear, one)])
    assert torch.equal(y[:, 2], torch.zeros(TOKENS, dtype=torch.float64))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), [x, one.a, one.b, one.magnitude]))


@pytest.mark.parametrize("exact", [False, True])
def test_dora_over_a_packed_base_holds_one_dense_matrix(exact: bool) -> None:
    """It is scaled in the memory that is lent for the product; results are as over dense weights."""
    torch.manual_seed(0)
    outputs, inputs = 96, 128
    packed, dense = Linear(inputs, outputs, bias=False), Linear(inputs, outputs, bias=False)
    packed.store(FourBitWeight.quantize(torch.randn(outputs, inputs)))
    dense.weight = nn.Parameter(packed.dense_weight(torch.float32), requires_grad=False)
    a, b, m = (torch.randn(shape, requires_grad=True) for shape in ((2, inputs), (outputs, 2), (outputs,)))
    one = LowRankFactors(a, b, 0.7, m, row_squares(dense.weight), exact)
    x = torch.randn(4, inputs, requires_grad=True)
    found, largest = [], []
    for linear in (packed, dense):
        low_rank_linears(x, [Branch(linear, one)])  # the memory that is lent is there from the first use on
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            (y,) = low_rank_linears(x, [Branch(linear, one)])
            found.append((y, *torch.autograd.grad(y.square().sum(), [x, a, b, m])))
        events = profiled.profiler.kineto_results.events()
        largest.append(max(event.nbytes() for event in events if event.name() == "[memory]"))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-4)
    if not exact:  # over dense weights a scaled copy is made each time
        assert largest[0] < 4 * outputs * inputs == largest[1]
    assert torch.equal(packed.dense_weight(torch.float32), dense.weight)
