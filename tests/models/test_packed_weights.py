"""Products with packed copies of weights are torch's up to rounding; copies are never stale, and bounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from danlu.models import ops
from danlu.models.modules import Linear, forward_shared
from danlu.models.packed_weights import ACTIVE, LEAST_OF_ONE_ROW, PackedWeights, can_pack

NO_LIMIT = 1 << 40
LARGE = LEAST_OF_ONE_ROW // 256


def parameter(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 65])
@pytest.mark.parametrize("features", [LARGE, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_products_and_biases(rows, features, dtype, weight_dtype):
    if dtype == torch.float32 and weight_dtype == torch.bfloat16:
        pytest.skip("activations are never wider than weights")
    weight, bias = parameter(features, 256, dtype=weight_dtype), parameter(features, dtype=weight_dtype)
    x = parameter(rows, 256, dtype=dtype).detach()
    for own in (None, bias):
        with PackedWeights(NO_LIMIT).active(), torch.inference_mode():
            y = ops.linear(x, weight, own)
        expected = F.linear(x.float(), weight.to(dtype).float(), None if own is None else own.float())
        assert y.dtype == dtype and y.shape == (rows, features)
        torch.testing.assert_close(y.float(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=3e-2)
        if rows and dtype == torch.float32:
            assert not torch.allclose(y, expected + 1e-3)  # control


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_layers_that_share_their_input_are_one_product(bias, rows):
    layers = [Linear(256, width, bias=bias) for width in (LARGE, 24, 24)]
    for layer in layers:
        layer.weight = parameter(*layer.shape)
        layer.bias = parameter(layer.shape[0]) if bias else None
    x = parameter(rows, 256).detach()
    packed = PackedWeights(NO_LIMIT)
    with torch.inference_mode():
        expected = [layer(x) for layer in layers]
        with packed.active():
            for _ in range(2):
                outputs = forward_shared(x, *layers)
    for y, of_layer in zip(outputs, expected, strict=True):
        torch.testing.assert_close(y, of_layer, rtol=1e-5, atol=1e-4)
    assert packed.copies == (1 if can_pack(torch.float32, x.device) else 0)
    if bias:
        with torch.no_grad():
            layers[1].bias.add_(1)
        with torch.inference_mode(), packed.active():
            moved = forward_shared(x, *layers)[1]
        torch.testing.assert_close(moved, expected[1] + 1, rtol=1e-5, atol=1e-4)


def test_products_are_the_usual_ones_outside():
    x, weight = torch.randn(4, 512), parameter(1024, 512)
    with PackedWeights(NO_LIMIT).active():
        assert ACTIVE.packed_weights is not None
    assert ACTIVE.packed_weights is None
    assert torch.equal(ops.linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_follows_its_weight(dtype):
    weight = parameter(64, 32)
    x = torch.randn(2, 32).to(dtype)
    packed = PackedWeights(NO_LIMIT)

    def product():
        with packed.active(), torch.inference_mode():
            return ops.linear(x, weight)

    first = product()
    copies = dict(packed._copies)
    assert torch.equal(product(), first) and packed._copies == copies
    with torch.no_grad():
        weight.mul_(2)  # as an optimizer does
    assert torch.equal(product(), 2 * first)
    assert not torch.equal(product(), first)
    packed.clear()
    assert packed.copies == 0


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this torch has no oneDNN")
def test_copies_that_could_be_done_without_have_a_limit():
    x = torch.randn(2, 32)
    first, second = parameter(64, 32), parameter(65, 32)
    packed = PackedWeights(first.nbytes)
    with packed.active(), torch.inference_mode():
        ops.linear(x, first)
        assert packed.copies == 1
        y = ops.linear(x, second)
        assert packed.copies == 1  # the second would be past the limit
        torch.testing.assert_close(y, F.linear(x, second))
        ops.linear(x.bfloat16(), second)
        assert packed.copies == 2  # a cast is needed either way


def test_weights_that_are_made_for_one_product_are_not_kept():
    packed = PackedWeights(NO_LIMIT)
    with packed.active(), torch.inference_mode():
        for _ in range(3):
            ops.linear(torch.randn(2, 32), torch.randn(64, 32))
            ops.linear(torch.randn(2, 32).bfloat16(), torch.randn(64, 32))
    assert packed.copies == 0


@pytest.mark.skipif(not can_pack(torch.float32, torch.device("cpu")), reason="this torch packs no weights")
class TestCopies:
    """What a copy is made of, and when there is none."""

    def test_no_rows_need_none(self):
        packed, weight = PackedWeights(NO_LIMIT), parameter(LARGE, 256)
        with torch.inference_mode():
            assert packed.product(torch.zeros(0, 256), weight, None).shape == (0, LARGE) and packed.copies == 0
            packed.product(torch.zeros(3, 256), weight, None)
        assert packed.copies == 1  # control

    def test_room_that_was_given_back_is_there_again(self):
        first, second = parameter(LARGE, 256), parameter(LARGE + 8, 256)
        packed, x = PackedWeights(second.nbytes), torch.zeros(3, 256)
        with torch.inference_mode():
            packed.product(x, first, None)
            packed.product(x, second, None)
            assert packed.copies == 1  # there is room for one
            packed.clear()
            assert packed.copies == 0
            packed.product(x, second, None)
        assert packed.copies == 1

    def test_those_that_were_active_before_are_so_again(self):
        outer, inner = PackedWeights(NO_LIMIT), PackedWeights(NO_LIMIT)
        with outer.active():
            with inner.active():
                assert ACTIVE.packed_weights is inner
            assert ACTIVE.packed_weights is outer

    @pytest.mark.parametrize("first", [True, False])
    def test_where_only_some_have_a_bias_each_keeps_its_own(self, first):
        weights, x = [parameter(LARGE, 256), parameter(24, 256)], parameter(3, 256).detach()
        biases = [parameter(LARGE) if first else None, None if first else parameter(24)]
        with torch.inference_mode():
            products = PackedWeights(NO_LIMIT).products(x, weights, biases)
            for y, weight, bias in zip(products, weights, biases, strict=True):
                torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)

    def test_another_bias_for_the_same_weight_is_another_copy(self):
        weight, x = parameter(LARGE, 256), parameter(3, 256).detach()
        packed, bias = PackedWeights(NO_LIMIT), parameter(LARGE)
        other = torch.nn.Parameter(bias.detach() + 1)
        with torch.inference_mode():
            y, moved = packed.product(x, weight, bias), packed.product(x, weight, other)
        torch.testing.assert_close(moved, y + 1, rtol=1e-5, atol=1e-4)
