"""Decoders with products in FP8: which products these are, what is kept, and that no way of running changes a bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.small_layers import recomputed, saved_bytes, small_decoder
from builders.tiny_adapters import adapter_set
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.assembly.arithmetic import set_arithmetic
from danlu.core.types import Pack, Sample
from danlu.core.weight_gradients import DeferredWeightGradients
from danlu.data.batch import collate, pad_to_bucket
from danlu.memory import activation_offload
from danlu.memory.activation_offload import offload_for
from danlu.memory.layer_plan import Kind
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.packed_weights import PackedWeights
from danlu.numerics.format import Scaled
from danlu.numerics.products import product
from danlu.recipe import sections
from danlu.recipe.sections import Fp8Products
from danlu.stages.roles import DecoderPass

LENGTHS = (40, 90)
_PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "mv")


def fp8_decoder(mixer: str | None = None, feed: str | None = None, *, recipe: Any = "tile", layers: int = 1) -> Decoder:
    model = small_decoder(mixer, feed, layers)
    set_arithmetic(model, Fp8Products(recipe=recipe))
    return model


def loss_of(model: Decoder, dtype: torch.dtype = torch.float32) -> Tensor:
    tokens = torch.arange(sum(LENGTHS)) % model.config.vocab_size
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = model(tokens, positions, PackedAttention((0, LENGTHS[0], sum(LENGTHS))), dtype)
    return model.logits(hidden).float().logsumexp(-1).sum()


def gradients(model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


class Products(TorchDispatchMode):
    """Notes the types of matrix products' factors, and whether each is of decoded numbers."""

    def __init__(self) -> None:
        self.decoded = False
        self.others: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self.in_8_bits: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.partition(".")[0] in _PRODUCTS and not self.decoded:
            factor = next(each for each in reversed(args) if isinstance(each, Tensor) and each.ndim > 1)
            if factor.ndim == 2:
                self.others.append((factor.dtype, tuple(factor.shape)))
        return func(*args, **(kwargs or {}))


@contextmanager
def products_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    noted = Products()

    def noting(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
        noted.in_8_bits.append((a.format.element, b.format.element))
        noted.decoded = True
        try:
            return product(a, b, dtype)
        finally:
            noted.decoded = False

    monkeypatch.setattr("danlu.numerics.arithmetic.product", noting)
    with noted:
        yield noted


@pytest.mark.parametrize("recipe", ["tile", "tensor"])
@pytest.mark.parametrize("feed", [None, "experts"])
def test_every_product_of_a_step_by_its_type(recipe: Any, feed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three in 8 bits of each linear layer, or of each expert with rows. Head, router and gate keep their types, and so
    do attention's products, which are batched."""
    model = fp8_decoder(feed=feed, recipe=recipe)
    linears = [each for each in model.layers.modules() if isinstance(each, Linear) and each.arithmetic is not None]
    grouped = [each for each in model.layers.modules() if isinstance(each, GroupedLinear)]
    with products_noted(monkeypatch) as noted:
        loss_of(model).backward()  # type: ignore[no-untyped-call]
    experts = 8 * len(grouped)
    assert all(each.arithmetic is not None for each in grouped) and len(linears) == 7
    count = len(linears) + experts
    gradient = "e5m2" if recipe == "tensor" else "e4m3"
    assert noted.in_8_bits.count(("e4m3", "e4m3")) == (count if recipe == "tensor" else 3 * count)
    assert noted.in_8_bits.count((gradient, "e4m3")) == (2 if recipe == "tensor" else 3) * count
    tokens, width, vocabulary = sum(LENGTHS), model.config.hidden_size, model.config.vocab_size
    of_head = {(width, vocabulary), (vocabulary, width)}
    of_router = {(width, 8), (8, width), (tokens, width)} if feed else {(tokens, width)}
    of_gate = {(width, 1), (1, width)} if feed else set()
    assert of_head <= {shape for _, shape in noted.others} <= of_head | of_router | of_gate


@pytest.mark.parametrize("feed", [None, "experts"])
def test_gradients_are_near_those_of_float32(feed: str | None) -> None:
    """The error of each product is 0.04. Experts are chosen by float32 scores, which differ a little."""
    plain, narrow = gradients(small_decoder(None, feed, 1)), gradients(fp8_decoder(feed=feed))
    for name, gradient in plain.items():
        if gradient.ndim == 2 and "router" not in name and "shared_gate" not in name:
            assert float((narrow[name] - gradient).norm() / gradient.norm()) < 0.2, name


CASES: list[Any] = [
    ("elementwise", None, None, "tile"),
    ("full", None, "experts", "tile"),
    *(
        pytest.param(kind, mixer, feed, recipe, marks=pytest.mark.slow)
        for kind in ("elementwise", "selective", "full")
        for mixer, feed in ((None, None), ("latent", None), ("delta rule", None), (None, "experts"))
        for recipe in ("tile", "row", "tensor")
    ),
]


@pytest.mark.parametrize(("kind", "mixer", "feed", "recipe"), CASES)
def test_recomputation_changes_no_bit(kind: Kind, mixer: str | None, feed: str | None, recipe: Any) -> None:
    want = gradients(fp8_decoder(mixer, feed, recipe=recipe))
    assert_same(gradients(recomputed(fp8_decoder(mixer, feed, recipe=recipe), kind)), want)
    plain = gradients(small_decoder(mixer, feed, 1))
    assert not torch.equal(plain["layers.0.attention.o_proj.weight"], want["layers.0.attention.o_proj.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "full"])
def test_codes_may_be_offloaded(kind: Kind | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a file; the control changes E4M3 on the way, which a layer that is computed again never sends."""
    want = gradients(fp8_decoder())
    model = fp8_decoder() if kind is None else recomputed(fp8_decoder(), kind)

    def offloaded() -> dict[str, Tensor]:
        offload = offload_for(torch.device("cpu"), tmp_path, min_bytes=0)
        assert offload is not None
        model.zero_grad()
        with offload.active():
            loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        assert offload.offloaded_bytes > 0
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    assert_same(offloaded(), want)
    copy_out = activation_offload._MappedCopy.__init__

    def changed(copy: Any, tensor: Tensor, folder: Path) -> None:
        copy_out(copy, torch.zeros_like(tensor) if tensor.dtype == torch.float8_e4m3fn else tensor, folder)

    monkeypatch.setattr(activation_offload._MappedCopy, "__init__", changed)
    name = "layers.0.mlp.down_proj.weight"
    assert torch.equal(offloaded()[name], want[name]) == (kind == "full")


@pytest.mark.parametrize("feed", [None, "experts"])
def test_weight_gradients_may_be_put_off(feed: str | None) -> None:
    """The queue of a zero-bubble pipeline keeps codes; the same bits come of them, and only later.

    Hooks on saved tensors, as the pipeline has them, make other objects of saved weights.
    """
    model = fp8_decoder(feed=feed)
    want = gradients(model)
    model.zero_grad()
    queue = DeferredWeightGradients()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.detach())
    with queue.active():
        with hooks:
            loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
    linears = [each for each in model.modules() if isinstance(each, Linear | GroupedLinear) and each.arithmetic]
    assert all(each.weight is not None and each.weight.grad is None for each in linears)
    assert {each.weight for each in linears} <= queue.weights
    codes = [each for entry in queue._entries for each in entry.tensors if each.dtype == torch.float8_e4m3fn]
    assert len({each.data_ptr() for each in codes}) == (3 if feed is None else 5)
    queue.accumulate()
    assert_same({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, want)


PADDED: list[Any] = [
    (None, None, None),
    ("full", None, "experts"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("elementwise", None, None), (None, None, "experts"), ("selective", "latent", None))
    ),
]


@pytest.mark.parametrize(("kind", "mixer", "feed"), PADDED)
def test_tokens_that_fill_a_batch_up_have_no_part_in_a_scale_of_all(
    kind: Kind | None, mixer: str | None, feed: str | None
) -> None:
    """The control: products that are not given the number of the other ones."""
    tokens = np.arange(128, dtype=np.int32) % 60 + 1  # a size that nothing is added to
    batch = collate([Pack((Sample(tokens, np.ones(len(tokens), np.float32) * (np.arange(len(tokens)) > 0), "row"),))])
    results = []
    for multiple, knows in ((1, True), (96, True), (96, False)):
        model = fp8_decoder(mixer, feed, recipe="tensor", layers=2)
        with torch.no_grad():
            model.embed_tokens.weight[0] = 10 * torch.eye(1, model.config.hidden_size)  # its norm has a large feature
        model = model if kind is None else recomputed(model, kind)
        if not knows:
            model.real_rows = None
        filled = pad_to_bucket(batch, multiple)
        assert len(filled.tokens) == {1: 128, 96: 192}[multiple]
        decoder = DecoderPass(model, model, torch.float32)
        hidden = decoder.hidden(batch, filled, PackedAttention(filled.boundaries), 0, None)[: len(tokens)]
        model.logits(hidden).float().logsumexp(-1).sum().backward()
        results.append(torch.cat([each.grad.flatten() for each in model.layers.parameters() if each.grad is not None]))
    alone, padded, control = results
    assert (padded - alone).norm() < 1e-5 * alone.norm() and (control - alone).norm() > 1e-2 * alone.norm()


def test_layers_that_share_an_input_keep_it_once() -> None:
    """The formula of kept bytes counts it so (tests/planning/test_layer_graph.py); here is the ratio to bfloat16."""
    lengths = [100, 156]
    plain = saved_bytes(small_decoder("a rotated half", None, 2), lengths, torch.bfloat16)
    assert saved_bytes(fp8_decoder("a rotated half", layers=2), lengths, torch.bfloat16) < 0.7 * plain
    assert saved_bytes(fp8_decoder("a rotated half", layers=2, recipe="row"), lengths, torch.bfloat16) == plain


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]])
def test_an_adapter_sits_on_products_in_8_bits(targets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products of each layer of the frozen base; the adapter's own are in the type of activations."""
    model = small_decoder(None, None, 1)
    adapters = adapter_set(model)
    adapters.add("a", sections.Lora(rank=4, targets=targets))
    adapters.train_only("a")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    plain = gradients(model)
    set_arithmetic(model, Fp8Products())
    with products_noted(monkeypatch) as noted:
        got = gradients(model)
    # Behind the embedding, which is frozen, no gradient is needed but by an adapter.
    assert len(noted.in_8_bits) in (11, 12, 14)
    assert got.keys() == plain.keys() and all("lora" in name for name in got)
    for name, gradient in plain.items():
        assert 1e-3 < float((got[name] - gradient).norm() / gradient.norm()) < 0.15, name


def test_rollouts_multiply_in_the_type_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of weights that an engine multiplies with have no other arithmetic."""
    plain, model = small_decoder(None, None, 1), fp8_decoder()
    with torch.no_grad(), PackedWeights(0).active():
        want = loss_of(plain)
        with products_noted(monkeypatch) as noted:
            got = loss_of(model)
    assert torch.equal(got, want) and not noted.in_8_bits
    with torch.no_grad():
        assert not torch.equal(loss_of(model), want)  # control
