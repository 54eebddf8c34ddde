"""Quantization-aware training: products with rounded weights, gradients past the rounding, codes after updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.small_layers import recomputed, small_decoder
from builders.tiny_adapters import adapter_set, perturb
from builders.tiny_run import tiny_run
from torch import Tensor

from danlu.assembly import trained_quantization
from danlu.assembly.trained_quantization import (
    RoundedWeights,
    set_trained_quantization,
    trained_format,
)
from danlu.core.layer_types import LowRankSum
from danlu.core.weight_gradients import DeferredWeightGradients
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.packed_weights import PackedWeights
from danlu.models.saving import save
from danlu.numerics.format import Format, encode
from danlu.optim.build import build as build_optimizer
from danlu.planning.rounded_weights import code_bytes, rounded_linears, trained_block
from danlu.recipe import sections
from danlu.recipe.sections.quantizing import QuantizeRecipe
from danlu.run.quantize import quantize
from danlu.training.loop import take_step

LENGTHS = (5, 11)
INT3 = sections.Int3(group=32, trained=True)
SECTIONS = [
    INT3,
    sections.Int4(group=64, trained=True, symmetric=False, scale="float16"),
    sections.Int2(group=32, trained=True, scale="bfloat16"),
    sections.Int8(group=128, trained=True),
    sections.Fp8(trained=True),
    sections.Mxfp8(trained=True),
    sections.Mxfp4(trained=True),
    sections.Nvfp4(trained=True),
]
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
each_feed = pytest.mark.parametrize("feed", [None, "experts"])


def rounded_decoder(section: Any = INT3, mixer: str | None = None, feed: str | None = None, **more: Any) -> Decoder:
    model = small_decoder(mixer, feed, 1)
    set_trained_quantization(model, section, **{"keeps": True, **more})
    return model


def weights_of(model: Decoder) -> dict[str, Tensor]:
    """The weights that are rounded."""
    return {
        name: module.stored_weight
        for name, module in model.named_modules()
        if isinstance(module, Linear | GroupedLinear) and module.arithmetic is not None
    }


def with_rounded_weights(model: Decoder, section: Any) -> Decoder:
    """The same model in float32, with the numbers of the codes as its weights."""
    plain = Decoder(model.config)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name in weights_of(model):
            weight = plain.get_parameter(f"{name}.weight")
            weight.copy_(encode(weight, trained_format(section)).decode())
    return plain


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


@each_section
def test_a_quantized_folder_has_the_numbers_that_were_trained(section: Any, tmp_path: Path) -> None:
    """`danlu quantize` of the masters, dense, or as codes; the control are codes of masters in bfloat16."""
    model = rounded_decoder(section)
    save(model, tmp_path / "masters", dtype=torch.float32)
    is_integer = section.kind.startswith("int")
    rounding: dict[str, Any] = {"kind": "nearest"}
    if is_integer:
        bits = int(section.kind[3:])
        rounding |= {"bits": bits, "group": section.group, "symmetric": section.symmetric}
    export = "dense" if section.kind in ("int3", "int8") else "fp8" if section.kind == "fp8" else section.kind
    if is_integer and section.scale != "float32":
        export = "awq" if not section.symmetric else "compressed-tensors"
    values = {"stage": "quantize", "model": str(tmp_path / "masters"), "quantization": [rounding], "export": export}
    dtype = "bf16" if is_integer and section.scale == "bfloat16" else "auto"
    recipe = QuantizeRecipe.model_validate({**values, "dtype": dtype, "output": str(tmp_path / "out")})
    written: dict[str, Tensor] = {}
    kept = {name: model.get_submodule(name).rounded_weight(torch.float32) for name in weights_of(model)}  # type: ignore[operator]
    quantize_with_values(recipe, written)
    assert written.keys() == kept.keys()
    for name, numbers in written.items():
        assert torch.equal(kept[name], numbers), name
    narrow = encode(model.get_parameter("layers.0.mlp.up_proj.weight").bfloat16(), trained_format(section))
    assert not torch.equal(narrow.decode(), kept["layers.0.mlp.up_proj"])


def quantize_with_values(recipe: QuantizeRecipe, written: dict[str, Tensor]) -> None:
    """Runs `danlu quantize`, and notes the numbers of the codes that it writes, by layer."""
    import io
    from unittest import mock

    from danlu.run import quantize as module

    scaled = module._Written.scaled

    def noting(self: Any, name: str) -> Any:
        result = scaled(self, name)
        written[name.removesuffix(".weight")] = result.decode()
        return result

    with mock.patch.object(module._Written, "scaled", noting):
        quantize(recipe, io.StringIO(), progress=lambda done, all_of: None)


@each_feed
@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_are_those_of_a_model_with_the_rounded_weights(feed: str | None, keeps: bool) -> None:
    """What is rounded is the weight alone, and its gradient passes through. Gradients of an input that layers share add
    up in another order. The control is the model without rounding."""
    model = rounded_decoder(feed=feed, keeps=keeps)
    rounded, plain = with_rounded_weights(model, INT3), small_decoder(None, feed, 1)
    assert torch.equal(loss_of(model), loss_of(rounded))
    got, want, without = gradients(model), gradients(rounded), gradients(plain)
    for name, gradient in want.items():
        assert float((got[name] - gradient).norm()) <= 2e-6 * float(gradient.norm()), name
        assert float((got[name] - without[name]).norm()) > 1e-3 * float(gradient.norm()), name


def test_numbers_are_those_of_a_formula_in_float64() -> None:
    """Integers as torchao's `Int8DynActInt4WeightQATQuantizer` has its weights: a scale of the largest magnitude over
    half the range, ties to even. The control has groups of half the size."""
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(3))

    def by_formula(group: int) -> Tensor:
        groups = weight.double().unflatten(1, (-1, group))
        scale = (groups.abs().amax(-1, keepdim=True).float() / 3.5).double()
        # Rounded as float32, in which the largest weights are halfway between two codes.
        return ((groups / scale).float().round().clamp(-4, 3) * scale).flatten(1)

    numbers = RoundedWeights(trained_format(INT3), keeps=True).numbers(weight, torch.float32)
    assert (numbers - by_formula(32)).abs().max() < 1e-6
    assert (numbers - by_formula(16)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["elementwise", "full"])
def test_recomputation_changes_no_bit(kind: Any) -> None:
    want = gradients(rounded_decoder())
    assert_same(gradients(recomputed(rounded_decoder(), kind)), want)


@each_feed
def test_weight_gradients_may_be_put_off(feed: str | None) -> None:
    """The same bits from the queue of a zero-bubble pipeline. Hooks on saved tensors make other objects of weights."""
    model = rounded_decoder(feed=feed)
    want = gradients(model)
    model.zero_grad()
    queue = DeferredWeightGradients()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.detach())
    with queue.active():
        with hooks:
            loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
    assert set(weights_of(model).values()) <= queue.weights
    queue.accumulate()
    assert_same({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, want)


@pytest.mark.parametrize("optimizer", [sections.AdamW(), sections.SGD(), sections.Lion()], ids=lambda each: each.kind)
def test_codes_follow_updates(optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One encoding of each weight in a step of two micro-batches, of the weights as they are then. torch counts no
    change by its fused optimizers."""
    run = tiny_run(tmp_path)
    model, encoded = run.learner.model, list[Tensor]()
    assert isinstance(model, Decoder)
    set_trained_quantization(model, sections.Int3(group=16, trained=True), keeps=True)
    encoding = trained_quantization._packed

    def noting(weight: Tensor, form: Format) -> Any:
        encoded.append(weight)
        return encoding(weight, form)

    monkeypatch.setattr(trained_quantization, "_packed", noting)
    run.optimizer = build_optimizer(model.named_parameters(), optimizer)
    run.optimizer.set_learning_rate(1e-2)
    layers = len(weights_of(model))
    for step in (1, 2):
        take_step(run)
        assert len(encoded) == step * layers
    rounded = with_rounded_weights(model, sections.Int3(group=16, trained=True))
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(rounded))


def test_rollouts_multiply_with_the_rounded_weights() -> None:
    """Copies that an engine packs are of rounded weights; the control is the model without rounding."""
    model = rounded_decoder()
    rounded, plain = with_rounded_weights(model, INT3), small_decoder(None, None, 1)
    for limit in (0, 1 << 30):
        with torch.no_grad(), PackedWeights(limit).active():
            got = loss_of(model)
            assert torch.allclose(got, loss_of(rounded), rtol=1e-6, atol=0)
            assert not torch.allclose(got, loss_of(plain), rtol=1e-5, atol=0)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["all-linear"]])
def test_the_sum_with_an_adapter_is_rounded(targets: list[str]) -> None:
    """The loss is that of the merged model, and gradients are those of its weights by the chain rule of W + s B A. The
    control are gradients without rounding."""
    model = small_decoder(None, None, 1)
    adapters = adapter_set(model)
    adapters.add("default", sections.Lora(rank=4, alpha=8.0, targets=targets))
    adapters.activate("default")
    adapters.train_only("default")
    perturb(adapters, "default", size=0.05)
    plain = gradients(model)
    set_trained_quantization(model, INT3, keeps=True)
    got, loss = gradients(model), loss_of(model).detach()
    merged = merged_decoder(model, adapters)
    assert torch.equal(loss, loss_of(with_rounded_weights(merged, INT3)))
    dense = gradients(with_rounded_weights(merged, INT3))
    for name, gradient in got.items():
        site, _, factor = name.partition(".adapter.default.")
        adapter, of_weight = model.get_submodule(f"{site}.adapter.default"), dense[f"{site}.weight"]
        a, b = adapter.lora_A, adapter.lora_B
        want = adapter.scale * (b.t() @ of_weight if factor == "lora_A" else of_weight @ a.t())  # type: ignore[operator]
        assert float((gradient - want).norm() / want.norm()) < 1e-5, name  # type: ignore[operator]
        assert float((gradient - plain[name]).norm() / plain[name].norm()) > 1e-3, name
    with adapters.switched_to([]), torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(with_rounded_weights(base_of(model), INT3)))


def base_of(model: Decoder) -> Decoder:
    plain = Decoder(model.config)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if ".adapter." not in name})
    set_trained_quantization(plain, INT3, keeps=True)
    return plain


def merged_decoder(model: Decoder, adapters: Any) -> Decoder:
    from danlu.adapters.merge import merged_parameter

    merged = base_of(model)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(merged_parameter(adapters, name))
    return merged


def test_an_adapter_s_gradients_may_be_put_off_too() -> None:
    model = small_decoder(None, None, 1)
    adapters = adapter_set(model)
    adapters.add("default", sections.Lora(rank=4))
    adapters.activate("default")
    adapters.train_only("default")
    perturb(adapters, "default", size=0.05)
    set_trained_quantization(model, INT3, keeps=True)
    want = gradients(model)
    model.zero_grad()
    queue = DeferredWeightGradients()
    with queue.active():
        loss_of(model).backward()  # type: ignore[no-untyped-call]
    assert len(queue.weights) == 14
    queue.accumulate()
    assert_same({name: each.grad for name, each in model.named_parameters() if each.grad is not None}, want)


def test_a_sum_is_encoded_when_any_of_its_terms_changes() -> None:
    rounded = RoundedWeights(trained_format(INT3), keeps=True)
    weight, a, b = torch.randn(8, 32), torch.randn(2, 32), torch.randn(8, 2)
    before = rounded.numbers(weight, torch.float32, LowRankSum(a, b, 0.5))
    for term in (weight, a, b):
        term.mul_(1.5)
        after = rounded.numbers(weight, torch.float32, LowRankSum(a, b, 0.5))
        assert torch.equal(after, encode(weight.addmm(b, a, alpha=0.5), rounded.encoded.form).decode())
        assert not torch.equal(after, before)
        before = after


@each_section
def test_bytes_of_codes_are_those_of_the_plan(section: Any) -> None:
    for shape in ((40, 128), (3, 24, 256)):
        rounded = RoundedWeights(trained_format(section), keeps=True)
        rounded.numbers(torch.randn(shape), torch.float32)
        assert rounded.encoded.stored_bytes == code_bytes(section, shape)


@each_section
def test_blocks_and_layers_are_those_of_the_plan(section: Any) -> None:
    assert trained_block(section) == trained_format(section).block
    for feed in (None, "experts"):
        rounded = {f"{name}.weight" for name in weights_of(rounded_decoder(section, feed=feed))}
        assert rounded == rounded_linears(small_decoder(None, feed, 1).config)
