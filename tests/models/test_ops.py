"""The short ways that decoding takes give the numbers of the long ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from danlu.models import ops
from danlu.models.layer_spec import ClampedSwiGLU

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_is_multiplied_as_in_a_larger_product(dtype: torch.dtype, bias: bool) -> None:
    x, weight = drawn(1, 96, dtype=dtype), drawn(40, 96, dtype=dtype, seed=1)
    given = drawn(40, dtype=dtype, seed=2) if bias else None
    exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
    got = ops.linear(x, weight, given)
    assert got.shape == (1, 40) and got.dtype == dtype
    torch.testing.assert_close(got, exact.to(dtype))
    assert (got.double() - F.linear(x.double(), weight.flip(0).double())).abs().max() > 1  # control: rows keep places
    torch.testing.assert_close(ops.linear(x.unsqueeze(0), weight, given), exact.to(dtype).unsqueeze(0))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_without_gradients_has_the_same_bits(dtype: torch.dtype, offset: float) -> None:
    x, weight = drawn(7, 64, dtype=dtype), drawn(64, dtype=dtype, seed=1)
    with_gradients = ops.rms_norm(x, weight, 1e-5, offset=offset)
    with torch.no_grad():
        assert torch.equal(ops.rms_norm(x, weight, 1e-5, offset=offset), with_gradients)
        assert not torch.equal(ops.rms_norm(x, weight, 1e-1, offset=offset), with_gradients)  # control


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_norm_without_a_weight_is_one_of_ones(dtype: torch.dtype) -> None:
    x, grad = drawn(7, 5, 64, dtype=dtype).requires_grad_(), drawn(7, 5, 64, dtype=dtype, seed=2)
    ones = torch.ones(64, dtype=dtype)
    y, given = ops.rms_norm(x, None, 1e-5), grad.clone()
    (found,) = torch.autograd.grad(y, x, given)
    (wanted,) = torch.autograd.grad(ops.rms_norm(x, ones, 1e-5), x, grad)
    assert torch.equal(y, ops.rms_norm(x, ones, 1e-5)) and torch.equal(given, grad)
    torch.testing.assert_close(found, wanted)
    (other,) = torch.autograd.grad(ops.rms_norm(x, ones * 1.1, 1e-5), x, grad)
    assert not torch.allclose(found, other)  # control


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_with_half_precision_weights_has_gradients_in_their_type(offset: float) -> None:
    """As under FSDP2, which gathers weights in the type of activations."""
    x, weight = (drawn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((7, 64), (64,)))
    grad = drawn(7, 64, dtype=torch.bfloat16, seed=2)
    found = torch.autograd.grad(ops.rms_norm(x, weight, 1e-5, offset=offset), (x, weight), grad)
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    wanted = torch.autograd.grad(ops.rms_norm(*exact, 1e-5, offset=offset), exact, grad.double())
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
        assert not torch.allclose(got.double(), want * 1.1, rtol=2e-2, atol=2e-2)  # control


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_layer_norm_is_computed_wide_and_has_gradients_in_the_types_of_what_they_are_of(
    dtype: torch.dtype, bias: bool
) -> None:
    x = drawn(7, 64, dtype=dtype).requires_grad_()
    parameters = [drawn(64, seed=seed).requires_grad_() for seed in range(1, 2 + bias)]
    grad = drawn(7, 64, dtype=dtype, seed=3)
    exact = [one.detach().double().requires_grad_() for one in (x, *parameters)]
    wanted = F.layer_norm(exact[0], (64,), *exact[1:], eps=1e-3)
    got = ops.layer_norm(x, parameters[0], parameters[1] if bias else None, 1e-3)
    assert got.dtype == dtype
    torch.testing.assert_close(got, wanted.to(dtype))
    assert not torch.allclose(got.double(), F.layer_norm(exact[0], (64,), *exact[1:], eps=1e-1), atol=1e-2)  # control
    allowed = {} if dtype in (torch.float32, torch.float64) else {"rtol": 2e-2, "atol": 2e-2}
    pairs = zip(torch.autograd.grad(got, (x, *parameters), grad), (x, *parameters), strict=True)
    of_exact = torch.autograd.grad(wanted, exact, grad.double())
    for (found, of), want in zip(pairs, of_exact, strict=True):
        assert found.dtype == of.dtype
        torch.testing.assert_close(found, want.to(of.dtype), **allowed)
        assert not torch.allclose(found.double(), want * 1.1, rtol=2e-2, atol=2e-2)  # control


def test_pairs_of_neighbours_become_halves() -> None:
    x = torch.arange(8.0).expand(1, 2, 8)
    assert ops.halves_of_pairs(x, 8)[0, 1].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert ops.halves_of_pairs(x, 4)[0, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("name", "kind"), [("gelu", "gelu"), ("gelu_fast", "gelu_tanh"), ("gelu_new", "gelu_tanh")])
def test_activations_are_transformers_ones_of_these_names(name: str, kind: Literal["gelu", "gelu_tanh"]) -> None:
    from transformers.activations import ACT2FN

    x, up = drawn(5, 64), drawn(5, 64, seed=1)
    torch.testing.assert_close(ops.mlp_activation(x, kind), ACT2FN[name](x))
    torch.testing.assert_close(ops.gated_mlp_activation(x, up, kind), ACT2FN[name](x) * up)
    assert (ops.mlp_activation(x, "silu") - ACT2FN[name](x)).abs().max() > 1e-2  # control


def test_half_precision_weights_that_are_differences_from_one_keep_their_digits() -> None:
    """Gemma's: 1 + 0.001 is 1 in bfloat16. transformers adds in float32 too."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    x, weight = drawn(5, 64, dtype=torch.bfloat16), drawn(64, seed=1).mul_(0.003).bfloat16()
    oracle = Gemma2RMSNorm(64, eps=1e-5).bfloat16()
    oracle.weight.data.copy_(weight)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, offset=1.0), oracle(x))
    assert not torch.equal(ops.rms_norm(x, weight + 1.0, 1e-5), oracle(x))  # control: added in bfloat16


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_without_gradients_has_the_same_bits(dtype: torch.dtype, kind: ops.Activation) -> None:
    gate, up = drawn(7, 64, dtype=dtype).requires_grad_(), drawn(7, 64, dtype=dtype, seed=1)
    with_gradients = ops.gated_mlp_activation(gate, up, kind)
    before = gate.detach().clone(), up.clone()
    with torch.no_grad():
        assert torch.equal(ops.gated_mlp_activation(gate, up, kind), with_gradients)
        assert not torch.equal(ops.gated_mlp_activation(up, gate, kind), with_gradients)  # control
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_activation_and_its_gradients(dtype: torch.dtype) -> None:
    """Against autograd over gpt-oss' formula in float64; some numbers are beyond the limit on either side."""
    kind = ClampedSwiGLU(alpha=1.7, limit=0.625)
    inputs = drawn(40, 16, dtype=dtype).requires_grad_(), drawn(40, 16, dtype=dtype, seed=1).requires_grad_()
    gate, up = (each.detach().double().requires_grad_() for each in inputs)
    towards = drawn(40, 16, dtype=dtype, seed=2)

    def formula(limit: float) -> torch.Tensor:
        clamped = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * clamped * torch.sigmoid(1.7 * clamped)

    got = ops.gated_mlp_activation(*inputs, kind)
    want = formula(0.625)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (got.double() - want).norm() <= tolerance * want.norm()
    assert (got.double() - formula(7.0)).norm() > 0.1 * want.norm()
    gradients = torch.autograd.grad(got, inputs, towards)
    expected = torch.autograd.grad(want, (gate, up), towards.double())
    for one, other in zip(gradients, expected, strict=True):
        assert one.dtype == dtype and (other == 0).any()
        assert (one.double() - other).norm() <= tolerance * other.norm()


def test_gradients_of_a_frequent_word_in_half_precision_are_summed_in_float32() -> None:
    """As under FSDP2: 2000 gradients of one word, of which torch's own sum in bfloat16 loses most on a CPU."""
    tokens = torch.zeros(2000, dtype=torch.int64)
    tokens[::100] = 1
    grad = drawn(2000, 8, dtype=torch.bfloat16).add_(0.5)
    exact = torch.zeros(3, 8, dtype=torch.float64).index_add_(0, tokens, grad.double())

    def gradient(look_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weight = torch.zeros(3, 8, dtype=torch.bfloat16, requires_grad=True)
        return torch.autograd.grad(look_up(weight), weight, grad)[0]

    found = gradient(lambda weight: ops.embedding(tokens, weight, torch.bfloat16))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-7, atol=0)  # rounded once
    control = gradient(lambda weight: F.embedding(tokens, weight))
    assert ((control.double() - exact).norm() > 0.1 * exact.norm()).item()


def test_a_wide_product_of_narrow_rows_has_the_bits_of_a_float32_one_and_keeps_them_narrow() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(33, 24, generator=generator).bfloat16(), torch.randn(8, 24, generator=generator)
    upstream = torch.randn(33, 8, generator=generator)

    def results(product: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = product(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)], sum(each.nbytes for each in kept)

    wide, kept = results(ops.wide_linear)
    plain, kept_plain = results(lambda x, weight: F.linear(x.float(), weight))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(wide, plain, strict=True))
    assert kept_plain - kept == 2 * x.numel()
    narrow, _ = results(ops.linear)
    assert not torch.equal(narrow[0].float(), plain[0])  # control
