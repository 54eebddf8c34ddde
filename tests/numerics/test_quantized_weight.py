"""Products with packed weights against float64 autograd of their definition; what they keep and where they are made."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from builders.scaled_formats import FORMATS
from torch import Tensor, nn

from danlu.numerics import quantized_weight
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.quantized_weight import QuantizedWeightModule
from danlu.numerics.scaled_weight import ScaledWeight

# Rounding of one product, over sums of a few hundred numbers.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def weights(outputs: int = 48, inputs: int = 80) -> list[QuantizedWeightModule]:
    matrix = normal(outputs, inputs, dtype=torch.bfloat16)
    return [
        FourBitWeight.quantize(matrix),
        FourBitWeight.quantize(matrix, kind="fp4", double=False),
        ScaledWeight.quantize(matrix, FORMATS["int8"]),
        ScaledWeight.quantize(matrix, FORMATS["int4"]),
        ScaledWeight.quantize(matrix, FORMATS["nvfp4"]),
    ]


def distance(seen: Tensor, expected: Tensor) -> float:
    return ((seen.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_value_and_gradient(dtype: torch.dtype, tokens: int) -> None:
    for weight in weights():
        x = normal(tokens, 80, dtype=dtype).requires_grad_()
        grad = normal(tokens, 48, dtype=dtype)
        y = weight.product(x)
        y.backward(grad)
        matrix = weight.dense(dtype).double()
        wide = x.detach().double().requires_grad_()
        expected = wide @ matrix.t()
        expected.backward(grad.double())
        assert y.dtype == x.grad.dtype == dtype
        assert distance(y, expected.detach()) < TOLERANCE[dtype]
        assert distance(x.grad, wide.grad) < TOLERANCE[dtype]
        # Another weight has another product.
        assert distance(y, wide.detach() @ matrix.roll(1, 0).t()) > 0.5


def test_equals_the_product_with_the_dense_matrix_bit_for_bit() -> None:
    for weight in weights():
        x = normal(5, 80)
        assert torch.equal(weight.product(x), F.linear(x, weight.dense(torch.float32)))
        assert torch.equal(weight.product(normal(2, 3, 80)).view(6, 48), weight.product(normal(2, 3, 80).view(6, 80)))


def test_strides_of_x_and_of_its_gradient_do_not_matter() -> None:
    for weight in weights():
        x, grad = normal(6, 80).double(), normal(6, 48).double()  # a product of other strides adds in another order
        results = []
        for turned in (False, True):
            leaf = (x.t().contiguous().t() if turned else x).detach().requires_grad_()
            y = weight.product(leaf)
            y.backward(grad.t().contiguous().t() if turned else grad)
            results.append((y.detach(), leaf.grad))
        assert torch.allclose(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
        assert torch.allclose(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)


def kept(function, x: Tensor) -> list[int]:  # type: ignore[no-untyped-def]
    """Elements of each tensor that `function` keeps for the backward pass of x."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(x.requires_grad_())
    return sizes


def test_nothing_is_kept_for_the_backward_pass() -> None:
    for weight in weights():
        assert kept(weight.product, normal(3, 80)) == []
        assert kept(lambda x, weight=weight: F.linear(x, weight.dense(torch.float32)), normal(3, 80)) == [48 * 80]
        graph = weight.product(normal(3, 80).requires_grad_()).grad_fn
        assert not [value for value in vars(graph).values() if isinstance(value, Tensor)]


def test_all_products_are_made_in_the_same_memory() -> None:
    quantized_weight._spare.clear()
    assert quantized_weight.dense_workspace_bytes() == 0
    small, large = weights(48, 80)[0], weights(96, 160)[0]
    expected = [weight.dense(torch.float32) for weight in (small, large)]
    for _ in range(2):
        for weight, matrix in zip((small, large), expected, strict=True):
            x = normal(3, matrix.shape[1])
            assert torch.equal(weight.product(x), F.linear(x, matrix))
            assert weight.product(x.bfloat16()).dtype == torch.bfloat16
    assert quantized_weight.dense_workspace_bytes() == 96 * 160 * 4  # the largest matrix, once
    quantized_weight._spare.clear()
    assert quantized_weight.dense_workspace_bytes() == 0


def test_memory_that_inference_left_serves_training() -> None:
    quantized_weight._spare.clear()
    for weight in weights():
        with torch.inference_mode():
            expected = weight.product(normal(3, 80)).clone()
        x = normal(3, 80).requires_grad_()
        y = weight.product(x)
        y.sum().backward()
        assert torch.equal(y, expected) and x.grad is not None


def test_two_threads_do_not_share_memory() -> None:
    weight = weights()[0]
    inside, release = threading.Event(), threading.Event()
    write = weight.write

    def held(out: Tensor) -> None:
        write(out)
        inside.set()
        assert release.wait(10)

    results: list[Tensor] = []
    weight.write = held  # type: ignore[method-assign]
    other = threading.Thread(target=lambda: results.append(weight.product(normal(3, 80))))
    other.start()
    assert inside.wait(10)
    del weight.write  # the method again
    zeros = FourBitWeight.quantize(torch.zeros(48, 80))
    assert torch.equal(zeros.product(normal(3, 80)), torch.zeros(3, 48))
    release.set()
    other.join()
    assert torch.equal(results[0], F.linear(normal(3, 80), weight.dense(torch.float32)))


def test_casting_the_model_leaves_constants_alone() -> None:
    for weight in weights():
        expected = weight.dense(torch.float32)
        model = nn.Sequential(weight)
        for cast in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
            cast(model)
            assert torch.equal(weight.dense(torch.float32), expected)
            assert all(buffer.dtype != torch.float16 for buffer in weight.buffers())
    # It would matter.
    weight = weights()[3]
    expected = weight.dense(torch.float32)
    weight.scales = weight.scales.half()  # type: ignore[assignment, union-attr]
    assert not torch.equal(weight.dense(torch.float32), expected)


def test_buffers_move_to_another_device() -> None:
    for weight in weights():
        moved = nn.Sequential(weight).to("meta")[0]
        assert moved.device.type == "meta" and {buffer.device.type for buffer in moved.buffers()} == {"meta"}


def test_no_parameter_trains() -> None:
    for weight in weights():
        assert not list(weight.parameters())
        assert all(not buffer.requires_grad for buffer in weight.buffers())


@pytest.mark.slow
def test_a_compiled_model_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuantizedWeightModule, "product", QuantizedWeightModule.product)  # put back afterwards
    quantized_weight.leave_products_uncompiled.cache_clear()
    quantized_weight.leave_products_uncompiled()

    class Model(nn.Module):
        def __init__(self, weight: QuantizedWeightModule) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.product(x.sin()).tanh()

    for weight in weights()[:1]:
        model = Model(weight)
        results = []
        for forward in (model, torch.compile(model, dynamic=True)):
            x = normal(5, 80).requires_grad_()
            y = forward(x)
            y.sum().backward()
            results.append((y.detach(), x.grad))
        assert torch.allclose(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
        assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
