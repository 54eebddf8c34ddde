"""A frozen base: the same bits as the float32 one, packed as it is loaded, and read from 4-bit folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_adapters import logits, perturb
from builders.tiny_run import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.assembly import frozen_base
from danlu.assembly.frozen_base import load_frozen, quantize_weight
from danlu.core.errors import ModelError
from danlu.models.hf_folder import CONFIG, SINGLE_FILE
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.numerics.bitsandbytes_config import config_values
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe import sections

SECTIONS = [
    sections.Nf4(),
    sections.Nf4(double=False),
    sections.Fp4(),
    sections.Int8(group=16),
    sections.Int4(group=16),
    sections.Nvfp4(),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tiny_model(attention_bias=True), tmp_path / "base")
    return tmp_path / "base"


def test_a_base_in_the_type_of_activations_gives_the_bits_of_a_float32_one(folder: Path) -> None:
    wide = logits(load(folder), dtype=torch.bfloat16)
    model = load_frozen(folder, dtype=torch.bfloat16).model
    assert torch.equal(logits(model, dtype=torch.bfloat16), wide)
    assert {
        parameter.dtype for name, parameter in model.named_parameters() if "norm" not in name and "bias" not in name
    } == {torch.bfloat16}
    assert not torch.equal(logits(load(folder)), wide)  # the negative control: float32 activations give other bits
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_routers_of_a_frozen_base_stay_float32_and_experts_do_not(tmp_path: Path) -> None:
    """In bfloat16 a router would send tokens elsewhere than the float32 one does."""
    glm4 = {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }
    base = tiny_model(**glm4)
    correction = base.get_parameter("layers.1.mlp.router.correction")
    with torch.no_grad():
        correction.copy_(torch.linspace(0.1, 0.2, 8))
    save(base, tmp_path / "base")
    wide = logits(load(tmp_path / "base"), dtype=torch.bfloat16)
    model = load_frozen(tmp_path / "base", dtype=torch.bfloat16).model
    assert torch.equal(logits(model, dtype=torch.bfloat16), wide)
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert types["layers.1.mlp.experts.up_proj.weight"] == torch.bfloat16
    assert types["layers.1.mlp.router.weight"] == types["layers.1.mlp.router.correction"] == torch.float32
    # The result of a run in bfloat16 keeps what moved the corrections, and so does who loads it in bfloat16.
    save(base, tmp_path / "narrow", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "narrow" / SINGLE_FILE)
    assert torch.equal(stored["model.layers.1.mlp.gate.e_score_correction_bias"], correction)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    narrow = load(tmp_path / "narrow", dtype=torch.bfloat16)
    assert torch.equal(narrow.get_parameter("layers.1.mlp.router.correction"), correction)
    assert narrow.get_parameter("layers.1.mlp.router.weight").dtype == torch.float32
    assert not narrow.get_parameter("layers.1.mlp.router.correction").requires_grad


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
def test_a_packed_base_computes_with_the_rounded_weights(folder: Path, section: Any) -> None:
    model = load_frozen(folder, dtype=torch.float32, quantization=section).model
    plain = load(folder)
    for layer in plain.layers.values():
        for half in (layer.attention, layer.mlp):
            for part in half.tensor_cut.roles:
                linear = getattr(half, part)
                linear.weight.data = quantize_weight(linear.weight.data, section).dense(torch.float32)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(model), logits(load(folder)), atol=1e-4)
    assert model.lm_head.weight is not None and all(
        model.get_submodule(f"layers.{layer}.mlp.up_proj").weight is None for layer in range(2)
    )


@pytest.mark.parametrize("quantization", [None, sections.Nf4()], ids=str)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_from_the_weights_leaves_the_model_nearly_what_it_was(
    folder: Path, init: str, quantization: Any
) -> None:
    before = logits(load_frozen(folder, dtype=torch.float32, quantization=quantization).model)
    start = sections.Lora(init=init, rank=8, targets=["all-linear"])
    after = logits(load_frozen(folder, dtype=torch.float32, quantization=quantization, new={"one": start}).model)
    exact = logits(load(folder))
    if quantization is None:
        torch.testing.assert_close(after, exact, rtol=1e-4, atol=1e-5)
        return
    lost, lost_before = ((one - exact).square().mean() for one in (after, before))
    assert lost < 2 * lost_before
    if init == "pissa":  # the large directions are kept in float32, so less is lost than without them
        assert lost < lost_before


@pytest.mark.parametrize("iterations", [1, 3])
def test_loftq_is_nearer_to_the_weights_than_quantization_alone(folder: Path, iterations: int) -> None:
    section = sections.Loftq(rank=8, loftq_iterations=iterations)
    adapted = load_frozen(folder, dtype=torch.float32, quantization=sections.Nf4(), new={"one": section})
    plain = load(folder)
    for name, module in adapted.adapters.added["one"].modules.items():
        weight = plain.get_submodule(name).weight
        linear = adapted.model.get_submodule(name)
        held = linear.quantized.dense(torch.float32)
        both = held + module.scale * module.lora_B @ module.lora_A
        alone = FourBitWeight.quantize(weight.data).dense(torch.float32)
        assert (weight - both).norm() < 0.9 * (weight - alone).norm()
        left = weight - held
        u, s, v = torch.linalg.svd(left)
        if iterations == 1:
            assert torch.equal(held, alone)
            torch.testing.assert_close(
                module.scale * module.lora_B @ module.lora_A, u[:, :8] * s[:8] @ v[:8], rtol=1e-4, atol=1e-5
            )


def quantized_folder(folder: Path, target: Path, **more: Any) -> Path:
    """As transformers and bitsandbytes write it."""
    target.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / SINGLE_FILE).items():
        tensors |= FourBitWeight.quantize(tensor, **more).tensors(name) if "_proj.weight" in name else {name: tensor}
    save_file(tensors, target / SINGLE_FILE, metadata={"format": "pt"})
    values = json.loads((folder / CONFIG).read_text())
    values["quantization_config"] = config_values("nf4", double=more.get("double", True), compute_dtype="float32")
    (target / CONFIG).write_text(json.dumps(values))
    return target


@pytest.mark.parametrize("double", [True, False])
def test_a_folder_in_4_bits_is_the_model_packed_here(folder: Path, tmp_path: Path, double: bool) -> None:
    stored = quantized_folder(folder, tmp_path / "nf4", double=double)
    read = load_frozen(stored, dtype=torch.float32).model
    made = load_frozen(folder, dtype=torch.float32, quantization=sections.Nf4(double=double)).model
    assert torch.equal(logits(read), logits(made))
    assert not torch.equal(logits(read), logits(load(folder)))


def test_quantizing_twice_is_refused(folder: Path, tmp_path: Path) -> None:
    stored = quantized_folder(folder, tmp_path / "nf4")
    with pytest.raises(ModelError, match=r"is quantized already \(nf4\); quantizing it again would round twice"):
        load_frozen(stored, dtype=torch.float32, quantization=sections.Nf4())
    with pytest.raises(ModelError, match="quantized already; an initialisation that takes a part out of the weight"):
        load_frozen(stored, dtype=torch.float32).adapters.add("one", sections.Pissa())
    with pytest.raises(ModelError, match="its weights are stored in 4 bits; here the original weights are needed"):
        load(stored)


def test_a_corrupted_quantized_folder_is_told(folder: Path, tmp_path: Path) -> None:
    stored = quantized_folder(folder, tmp_path / "nf4")
    tensors = load_file(stored / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != f"{name}.absmax"}, stored / SINGLE_FILE)
    with pytest.raises(ModelError, match=f"{name}.absmax"):
        load_frozen(stored, dtype=torch.float32)
    save_file(tensors | {name: tensors[name][:-3].clone()}, stored / SINGLE_FILE)
    with pytest.raises(ModelError, match=name):
        load_frozen(stored, dtype=torch.float32)


def test_at_most_one_weight_is_held_as_it_is_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is packed before the next one is read."""
    order: list[str] = []
    packed = frozen_base.quantize_weight

    def watched(weight: Tensor, section: Any, name: str = "") -> Any:
        order.append(f"packed {name}")
        return packed(weight, section, name)

    monkeypatch.setattr(frozen_base, "quantize_weight", watched)
    model = load_frozen(folder, dtype=torch.bfloat16, quantization=sections.Nf4()).model
    assert len(order) == 14
    held = sum(buffer.nbytes for buffer in model.buffers()) + sum(parameter.nbytes for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in model.parameters())
    linears = sum(
        site.shape[0] * site.shape[1] for site in frozen_base.adapters_of(model).sites if site.layer is not None
    )
    rest = 2 * 2 * 64 * 32 + 4 * (5 * 32 + 2 * (32 + 16 + 16 + 32))  # embedding and head, norms, biases
    assert held < rest + linears * 4.6 / 8 + 14 * 60  # 4.13 bits a number and a few constants for each matrix


def test_only_the_adapter_of_a_packed_base_gets_gradients(folder: Path) -> None:
    adapted = load_frozen(
        folder, dtype=torch.float32, quantization=sections.Nf4(), new={"one": sections.Dora(modules_to_save=["norm"])}
    )
    adapted.adapters.train_only("one")
    perturb(adapted.adapters, "one", size=0.1)
    trained = {name for name, parameter in adapted.model.named_parameters() if parameter.requires_grad}
    assert trained == set(adapted.adapters.tensors("one"))
    assert all(buffer.grad is None for buffer in adapted.model.buffers())
