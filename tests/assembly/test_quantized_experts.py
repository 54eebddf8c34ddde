"""QLoRA of experts: a frozen base whose experts are quantized one by one, with LoRA on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.small_experts import BIASED, small_decoder
from builders.tiny_adapters import DOCUMENTS, logits, perturb
from builders.tiny_run import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.merge import merge_weights, merged_parameter
from danlu.assembly.frozen_base import (
    Adapted,
    adapter_sites,
    adapters_of,
    check_frozen,
    load_frozen,
    quantize_stack,
    quantize_weight,
)
from danlu.assembly.parameters import model_bytes
from danlu.assembly.quantizing import quantization_errors, quantize
from danlu.core.errors import ModelError
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import CONFIG, SINGLE_FILE, read_json
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.modules import GroupedLinear
from danlu.models.saving import save
from danlu.numerics.quantized_weight import StackedWeight
from danlu.parallel.comm import Group
from danlu.parallel.expert import ExpertDistributor
from danlu.recipe import sections

EXPERTS = 8
SECTIONS = [
    sections.Nf4(block=32),
    sections.Nf4(double=False),
    sections.Fp4(),
    sections.Int8(group=16),
    sections.Int4(group=16),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral with experts that make a difference; on the disk each of their matrices is a tensor of its own."""
    folder = tmp_path_factory.mktemp("experts") / "base"
    model = tiny_model(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.mul_(10)
    save(model, folder)
    return folder


def grouped(model: Decoder) -> dict[str, GroupedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)}


@pytest.mark.parametrize("section", SECTIONS, ids=repr)
def test_each_expert_is_quantized_by_itself(folder: Path, section: Any) -> None:
    model, plain = load_frozen(folder, dtype=torch.float32, quantization=section).model, load(folder)
    whole = logits(plain)
    for name, module in grouped(model).items():
        assert module.weight is None and isinstance(module.quantized, StackedWeight)
        dense = plain.get_parameter(f"{name}.weight")
        for index, matrix in enumerate(dense.data):
            alone = quantize_weight(matrix, section)
            ours = module.quantized.matrix(index)
            assert all(torch.equal(ours.get_buffer(key), value) for key, value in alone.named_buffers())
            dense.data[index] = alone.dense(torch.float32)
    only_experts = logits(plain)
    for layer in plain.layers.values():
        for part in layer.attention.tensor_cut.roles:
            linear = getattr(layer.attention, part)
            linear.weight.data = quantize_weight(linear.weight.data, section).dense(torch.float32)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)
    assert (only_experts - whole).abs().max() > 1e-3  # control: it is not the experts as they were


def test_codes_are_those_of_bitsandbytes(folder: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model, plain = load_frozen(folder, dtype=torch.float32, quantization=sections.Nf4(block=64)).model, load(folder)
    for name, module in grouped(model).items():
        assert isinstance(module.quantized, StackedWeight)
        for index, matrix in enumerate(plain.get_parameter(f"{name}.weight").data):
            codes, state = functional.quantize_4bit(matrix, blocksize=64, compress_statistics=True, quant_type="nf4")
            assert torch.equal(module.quantized.codes[index], codes)
            assert torch.equal(module.quantized.absmax[index], state.absmax)
            assert torch.equal(module.quantized.nested_offset[index], state.offset)
        assert not torch.equal(module.quantized.codes[0], module.quantized.codes[1])


def test_a_base_is_as_small_as_its_codes(folder: Path) -> None:
    """All but embedding, head, norms and routers is in 4 bits and constants; in bfloat16 it was in 16."""
    wide, narrow = (load_frozen(folder, dtype=torch.bfloat16, quantization=q).model for q in (None, sections.Nf4()))
    experts = sum(module.shape[0] * module.shape[1] * EXPERTS for module in grouped(narrow).values())
    quantized = sum(module.quantized.stored_bytes() for module in grouped(narrow).values())  # type: ignore[union-attr]
    constants = 3 * len(narrow.layers) * EXPERTS * 16  # of so small matrices
    assert quantized < experts * 4.6 / 8 + constants
    assert model_bytes(wide) - model_bytes(narrow) > 1.3 * experts


def test_other_gradients_than_the_adapters_are_not_made(folder: Path) -> None:
    section = sections.Lora(targets=["experts"], rank=2)
    adapted = load_frozen(folder, dtype=torch.float32, quantization=sections.Nf4(), new={"one": section})
    adapted.adapters.train_only("one")
    trained = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapted.adapters.tensors("one")) and all(".experts." in name for name in trained)


def on_dense(adapters: AdapterSet) -> AdapterSet:
    """The same base with experts and linear layers dequantized, and the same adapter."""
    model = adapters.model
    assert isinstance(model, Decoder)
    other = build(model.config)
    initialize(other, 0)
    for name in other.state_dict():
        other.get_parameter(name).data = merged_parameter(adapters, name).clone()
    return adapters_of(other)


@pytest.mark.parametrize("section", SECTIONS[:1] + SECTIONS[3:4], ids=repr)
def test_lora_on_quantized_experts_is_lora_on_what_their_codes_stand_for(folder: Path, section: Any) -> None:
    lora = sections.Lora(targets=["all-linear", "experts"], rank=2)
    adapters = load_frozen(folder, dtype=torch.float32, quantization=section, new={"one": lora}).adapters
    with adapters.disabled():
        dense = on_dense(adapters)
    dense.add("one", lora)
    for each in (adapters, dense):
        each.activate("one")
        each.train_only("one")
        perturb(each, "one", size=0.1)
    gradients = []
    for each in (adapters, dense):
        model: Any = each.model
        states = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        y = model.layers["0"].mlp(states.requires_grad_())
        y.square().sum().backward()
        own = {name: parameter.grad for name, parameter in each.tensors("one").items() if "layers.0.mlp" in name}
        gradients.append(own | {"x": states.grad})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 7
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-7)
    assert gradients[0]["x"].abs().max() > 1e-3
    torch.testing.assert_close(logits(adapters.model), logits(dense.model), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_merged_into_what_the_codes_stand_for(folder: Path) -> None:
    lora = sections.Lora(targets=["experts"], rank=2)
    section = sections.Nf4()
    adapters = load_frozen(folder, dtype=torch.float32, quantization=section, new={"one": lora}).adapters
    perturb(adapters, "one", size=0.1)
    model: Any = adapters.model
    apart = logits(model)
    name = "layers.0.mlp.experts.up_proj"
    module, layer = adapters.added["one"].modules[name], model.get_submodule(name)
    change = module.scale * module.lora_B @ module.lora_A
    merged = merged_parameter(adapters, f"{name}.weight")
    torch.testing.assert_close(merged, layer.quantized.dense(torch.float32) + change, rtol=1e-6, atol=1e-7)
    merge_weights(adapters)
    assert layer.quantized is None and torch.equal(layer.weight, merged)
    torch.testing.assert_close(logits(model), apart, rtol=1e-4, atol=1e-5)
    assert (change.abs().max() > 0.01) and grouped(model)[name] is layer


def test_each_rank_keeps_the_codes_of_its_own_experts(folder: Path) -> None:
    models = [load_frozen(folder, dtype=torch.float32, quantization=sections.Nf4()).model for _ in range(3)]
    sizes = {name: module.quantized.stored_bytes() for name, module in grouped(models[2]).items()}  # type: ignore[union-attr]
    for rank, model in enumerate(models[:2]):
        distributor = ExpertDistributor(model, None, Group("expert", (0, 1), rank))
        for layer in model.layers:
            distributor.layer(layer)
    first, second, whole = (grouped(model) for model in models)
    for name in whole:
        parts = [each[name].quantized.dense() for each in (first, second)]  # type: ignore[union-attr]
        expected = whole[name].quantized.dense()  # type: ignore[union-attr]
        assert first[name].quantized.stored_bytes() == sizes[name] // 2  # type: ignore[union-attr]
        assert torch.equal(torch.cat(parts), expected) and not torch.equal(torch.cat(parts[::-1]), expected)


class _Hook:
    """Distributes experts as `placing.LayerPlacer` does, and notes nothing else."""

    def __init__(self, model: Decoder, rank: int) -> None:
        self.distributor = ExpertDistributor(model, None, Group("expert", (0, 1), rank))
        self.boxes = self.distributor.own_boxes()

    def layer_loaded(self, name: str) -> None:
        self.distributor.layer(name)


@pytest.mark.parametrize("form", ["quantized while read", "quantized in the folder", "wide"])
def test_each_rank_reads_its_own_experts_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    section = sections.Nf4() if form == "quantized while read" else None
    if form == "quantized in the folder":
        quantize(folder, tmp_path / "nf4", sections.Nf4())
        folder = tmp_path / "nf4"
    counted: list[int] = []
    stacked = StackedWeight.__init__

    def watched(self: StackedWeight, matrices: Any, **more: Any) -> None:
        counted.append(len(matrices))
        stacked(self, matrices, **more)

    monkeypatch.setattr(StackedWeight, "__init__", watched)
    hooks: list[_Hook] = []

    def read(rank: int) -> dict[str, torch.Tensor]:
        def factory(loading: Adapted) -> _Hook:
            hooks.append(_Hook(loading.model, rank))
            return hooks[-1]

        model = load_frozen(folder, dtype=torch.float32, quantization=section, layer_hook_factory=factory).model
        return {name: module.dense_weight(torch.float32) for name, module in grouped(model).items()}

    first, second = read(0), read(1)
    assert set(counted) == (set() if form == "wide" else {EXPERTS // 2})
    whole = load_frozen(folder, dtype=torch.float32, quantization=section).model
    for name, module in grouped(whole).items():
        expected = module.dense_weight(torch.float32)
        assert torch.equal(torch.cat((first[name], second[name])), expected)
        assert not torch.equal(torch.cat((second[name], first[name])), expected)
        if form == "wide":
            assert hooks[1].distributor.boxes_by_name[f"{name}.weight"].offsets == (EXPERTS // 2, 0, 0)


def test_biases_of_quantized_experts_are_added() -> None:
    model = small_decoder(BIASED)
    before = logits(model)
    for module in grouped(model).values():
        assert module.weight is not None
        module.store(quantize_stack(module.weight.data, sections.Int8(group=4)))
    assert (logits(model) - before).abs().max() < 0.02
    for module in grouped(model).values():
        assert module.bias is not None
        module.bias.data.add_(1.0)
    assert (logits(model) - before).abs().max() > 0.02


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE_FILE)


@pytest.mark.parametrize("section", [sections.Nf4(), sections.Fp4(double=False)], ids=repr)
def test_a_folder_of_quantized_experts_is_the_model_quantized_while_it_is_read(
    folder: Path, tmp_path: Path, section: Any
) -> None:
    report = quantize(folder, tmp_path / "out", section)
    made = load_frozen(folder, dtype=torch.float32, quantization=section).model
    check_frozen(tmp_path / "out")
    read = load_frozen(tmp_path / "out", dtype=torch.float32).model
    assert torch.equal(logits(made), logits(read)) and not torch.equal(logits(load(folder)), logits(read))
    for name, module in grouped(read).items():
        expected = grouped(made)[name].quantized
        assert isinstance(module.quantized, StackedWeight) and isinstance(expected, StackedWeight)
        assert all(torch.equal(module.quantized.get_buffer(key), one) for key, one in expected.named_buffers())
    linears = [site for site in adapter_sites(read) if site.layer is not None]
    assert report.quantized == sum(site.shape[0] * site.shape[1] * (site.experts or 1) for site in linears)
    assert report.quantized_bytes == sum(site.module.quantized.stored_bytes() for site in linears)
    assert report.bytes == sum(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    values = read_json(tmp_path / "out" / CONFIG)["quantization_config"]
    assert "model.layers.0.block_sparse_moe.gate" in values["llm_int8_skip_modules"]


def test_transformers_reads_a_folder_whose_experts_stay_as_they_are(tmp_path: Path) -> None:
    """It stacks experts when it loads them, which bitsandbytes' codes cannot be."""
    # bitsandbytes' AVX-512 kernel takes rows that are no multiple of its blocks of 64 wrongly.
    folder, sizes = tmp_path / "base", {"hidden_size": 64, "intermediate_size": 128}
    save(tiny_model(model_type="mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2, **sizes), folder)
    quantize(folder, tmp_path / "out", sections.Nf4(), experts=False)
    model = load_frozen(tmp_path / "out", dtype=torch.float32).model
    assert all(module.weight is not None for module in grouped(model).values())
    tokens = torch.randint(0, 64, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        seen = theirs.train()(input_ids=tokens[: DOCUMENTS[1]].unsqueeze(0)).logits[0]
    torch.testing.assert_close(seen, logits(model, tokens)[: DOCUMENTS[1]], rtol=1e-4, atol=1e-4)
    assert (seen - logits(load(folder), tokens)[: DOCUMENTS[1]]).abs().max() > 1e-3


def test_experts_that_share_tensors_stay_as_they_are_in_a_folder(tmp_path: Path) -> None:
    gpt_oss = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    save(tiny_model(**gpt_oss), tmp_path / "base")
    report = quantize(tmp_path / "base", tmp_path / "out", sections.Nf4())
    read, original = stored(tmp_path / "out"), stored(tmp_path / "base")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(read[name], original[name]) and report.quantized_bytes > 0
    made = load_frozen(tmp_path / "base", dtype=torch.float32, quantization=sections.Nf4()).model
    assert all(module.weight is None for module in grouped(made).values())


def test_a_layer_of_which_some_experts_are_quantized_is_refused(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "out", sections.Nf4())
    name, tensors = "model.layers.1.block_sparse_moe.experts.3.w2.weight", stored(tmp_path / "out")
    mixed = {key: value for key, value in tensors.items() if not key.startswith(name)} | {name: stored(folder)[name]}
    save_file(mixed, tmp_path / "out" / SINGLE_FILE)
    with pytest.raises(ModelError, match="the experts of a layer are held alike. Quantize the original model: all of"):
        load_frozen(tmp_path / "out", dtype=torch.float32)
    with pytest.raises(ModelError, match=f"{name}.* is not; the experts"):
        check_frozen(tmp_path / "out")


def test_the_error_of_a_format_counts_every_expert(folder: Path) -> None:
    errors = quantization_errors(folder, {"int8": sections.Int8(group=16)})["int8"]
    model = load(folder)
    linears = [site for site in adapter_sites(model) if site.layer is not None]
    assert errors.elements == sum(site.shape[0] * site.shape[1] * (site.experts or 1) for site in linears)
    matrix = model.get_parameter("layers.0.mlp.experts.up_proj.weight").data[3]
    lost = (quantize_weight(matrix, sections.Int8(group=16)).dense() - matrix).norm() / matrix.norm()
    assert errors.worst > 0 and float(lost) <= errors.worst
