"""Folders in other tools' layouts, read as models: dense ones of the same numbers, or frozen bases by their codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.exported_folders import FAMILIES, export, linears_of, rewrite, tensors_of
from builders.scaled_formats import FORMATS
from builders.tiny_run import saved_models, tiny_model
from torch import Tensor

from danlu.assembly.base_model import stored_method, weight_layouts
from danlu.assembly.frozen_base import check_frozen, load_frozen
from danlu.assembly.stored_base import stored_base
from danlu.core.errors import ModelError
from danlu.models import safetensors_io
from danlu.models.hf_folder import check_headers, read_config
from danlu.models.loading import load
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.saving import save
from danlu.numerics.format import Format
from danlu.numerics.weight_layout_config import Export
from danlu.planning.packed_shapes import packed_bytes
from danlu.recipe import sections

GPTQ = Format("int4", (1, 32), "float16")
STORED: dict[str, tuple[Export, Format]] = {
    "pack-quantized": ("compressed-tensors", Format("int4", (1, 32), "bfloat16")),
    "pack-quantized, zeros": ("compressed-tensors", Format("int3", (1, 16), "float16", "integer")),
    "int8 rows": ("compressed-tensors", Format("int8", (1, 0), "bfloat16")),
    "fp8 rows": ("compressed-tensors", Format("e4m3", (1, 0), "bfloat16")),
    "fp8 tensor": ("compressed-tensors", Format("e4m3", (0, 0))),
    "fp8 blocks": ("compressed-tensors", Format("e4m3", (32, 32), "bfloat16")),
    "mxfp8": ("mxfp8", FORMATS["mxfp8"]),
    "mxfp4": ("mxfp4", FORMATS["mxfp4"]),
    "nvfp4": ("nvfp4", FORMATS["nvfp4"]),
    "awq": ("awq", Format("int4", (1, 32), "float16", "integer")),
    "gptq": ("gptq", GPTQ),
    "fp8": ("fp8", Format("e4m3", (32, 32))),
    "gptq_v2": ("gptq", Format("int8", (1, 0), "float16", "integer")),
}
CASES = [*(("llama", name) for name in STORED), ("phi3", "pack-quantized"), ("phi3", "gptq"), ("mixtral", "awq")]
CASES += [("mixtral", "mxfp4"), ("phi3", "fp8")]
FAST = (
    *(("llama", name) for name in ("pack-quantized, zeros", "fp8 rows", "mxfp8", "nvfp4", "awq")),
    *(("phi3", "gptq"), ("mixtral", "mxfp4"), ("phi3", "fp8")),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.mktemp("models"), FAMILIES)


def read_dense(folder: Path) -> dict[str, Tensor]:
    return dict(load(folder, layouts=weight_layouts(folder)).named_parameters())


def kept(folder: Path, **options: Any) -> dict[str, Any]:
    """The quantized weights of a folder as a frozen base, by parameter."""
    model = load_frozen(folder, dtype=torch.float32, keep_blocks=True, **options).model
    linears = ((name, each) for name, each in model.named_modules() if isinstance(each, Linear | GroupedLinear))
    return {f"{name}.weight": each.quantized for name, each in linears if each.quantized is not None}


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_a_folder_is_a_dense_model_or_keeps_its_codes(
    folders: dict[str, Path], tmp_path: Path, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, form = STORED[name]
    model, _ = export(folders[family], tmp_path / "out", form, kind)
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", 1000)  # some rows at a time
    dense = read_dense(tmp_path / "out")
    for key, value in model.named_parameters():
        assert torch.equal(dense[key], value), key
    codes = kept(tmp_path / "out")
    assert sorted(codes) == sorted(linears_of(folders[family]))
    planned = stored_base(sections.Model(path=str(tmp_path / "out")), model.config).packings
    for key, weight in codes.items():
        value = model.get_parameter(key)
        assert torch.equal(weight.dense(torch.float32), value), key
        assert not torch.equal(weight.dense(torch.float32), value.roll(1, -1)), key
        assert weight.stored_bytes() == packed_bytes(value.shape, planned[key]), key
    check_frozen(tmp_path / "out")
    if form.scale != "float32" or kind == "fp8":  # config.json does not say of what type scales are
        (tmp_path / "out" / "model.safetensors").unlink()
        assert stored_base(sections.Model(path=str(tmp_path / "out")), model.config).packings == planned


def test_act_order_keeps_the_group_of_each_input(folders: dict[str, Path], tmp_path: Path) -> None:
    """Inputs whose groups are not neighbours: the same weight with its columns in another order."""
    model, _ = export(folders["llama"], tmp_path, GPTQ, "gptq")
    tensors = tensors_of(tmp_path)
    module = "model.layers.0.mlp.up_proj"
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (tensors[f"{module}.qweight"].unsqueeze(1) >> shifts.view(1, 8, 1)) & 15  # [I / 8, 8, O]
    words = codes.flatten(0, 1)[order].unflatten(0, (-1, 8)).long() << shifts.view(1, 8, 1)
    tensors[f"{module}.qweight"] = words.sum(dim=1).to(torch.int32)
    tensors[f"{module}.g_idx"] = tensors[f"{module}.g_idx"][order]
    rewrite(tmp_path, tensors)
    name = "layers.0.mlp.up_proj.weight"
    expected = model.get_parameter(name)[:, order]
    assert torch.equal(read_dense(tmp_path)[name], expected)
    weight = kept(tmp_path)[name]
    planned = stored_base(sections.Model(path=str(tmp_path)), model.config).packings[name]
    assert torch.equal(weight.dense(torch.float32), expected)
    assert weight.stored_bytes() == packed_bytes(expected.shape, planned) == 96 * 32 + 96 * 2 * 3 + 4 * 64
    part = weight.shard(slice(8, 24), slice(16, 48))
    assert torch.equal(part.dense(torch.float32), expected[8:24, 16:48])
    rewrite(tmp_path, {**tensors, f"{module}.g_idx": tensors[f"{module}.g_idx"] + 1})
    with pytest.raises(ModelError, match=r"up_proj\.weight: its inputs are of groups 1 to 2, of 2"):
        load(tmp_path, layouts=weight_layouts(tmp_path))


def test_experts_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    """gpt-oss as published: rows of two matrices take turns in one tensor of all experts."""
    changes = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
    model = tiny_model(**changes, num_local_experts=4, num_experts_per_tok=2, rope_scaling=None)
    save(model, tmp_path)
    tensors, draw = tensors_of(tmp_path), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        tensors[f"{name}_scales"] = torch.randint(118, 122, shape[:-1], dtype=torch.uint8, generator=draw)
    rewrite(tmp_path, tensors, quantization_config={"quant_method": "mxfp4"})
    dense, codes = read_dense(tmp_path), kept(tmp_path)
    assert len(codes) == 2 * 3 and all(".experts." in name for name in codes)
    planned = stored_base(sections.Model(path=str(tmp_path)), model.config).packings
    for name, weight in codes.items():
        assert torch.equal(weight.dense(torch.float32), dense[name]), name
        assert not torch.equal(weight.dense(torch.float32), dense[name].roll(1, 1)), name
        assert weight.stored_bytes() == packed_bytes(dense[name].shape, planned[name]) == 17 * 4 * 32 * 64 // 32
    assert kept(tmp_path, quantization=sections.Int8()).keys() > codes.keys()  # a section packs all, as before


def test_what_is_not_kept(folders: dict[str, Path], tmp_path: Path) -> None:
    """A fully trained layer, one of which an adapter takes a part, and a head with codes are dense."""
    model, _ = export(folders["llama"], tmp_path, GPTQ, "gptq")
    name = "layers.0.mlp.up_proj.weight"
    full = kept(tmp_path, new={"own": sections.Lora(rank=2, modules_to_save=["layers.0.mlp.up_proj"])})
    assert len(full) == 13 and name not in full
    pissa = load_frozen(tmp_path, dtype=torch.float32, new={"own": sections.Pissa(rank=2, targets=["up_proj"])})
    linear = pissa.model.layers["0"].mlp.up_proj
    module = pissa.adapters.added["own"].modules["layers.0.mlp.up_proj"]
    both = linear.weight + module.scale * module.lora_B @ module.lora_A
    torch.testing.assert_close(both, model.get_parameter(name), rtol=0, atol=1e-6)
    assert not torch.allclose(linear.weight, model.get_parameter(name), rtol=0, atol=1e-4)
    with pytest.raises(ModelError, match=r"is quantized already \(gptq\); quantizing it again would round twice"):
        load_frozen(tmp_path, dtype=torch.float32, quantization=sections.Nf4())
    with pytest.raises(ModelError, match="its weights are stored as gptq; here the original weights are needed"):
        load(tmp_path)


Damage = Callable[[dict[str, Tensor]], dict[str, Tensor]]
Q = "model.layers.0.self_attn.q_proj"
DAMAGED: dict[str, tuple[str, Damage]] = {
    r"q_proj in model\.safetensors: its tensor qzeros is missing": (
        "awq",
        lambda own: {key: value for key, value in own.items() if key != f"{Q}.qzeros"},
    ),
    r"q_proj in model\.safetensors: scales of shape \[1, 64\], not \[2, 64\], for \[64, 64\]": (
        "awq",
        lambda own: {**own, f"{Q}.scales": own[f"{Q}.scales"][:1].clone()},
    ),
    r"q_proj\.weight in model\.safetensors: expected shape \[64, 64\], found \[128, 64\]": (
        "gptq",
        lambda own: {
            **own,
            **{f"{Q}.{end}": own[f"{Q}.{end}"].repeat(1, 2) for end in ("qweight", "qzeros", "scales")},
        },
    ),
    r"q_proj in model\.safetensors: weight_packed of shape \[64, 8\] does not hold \[64, 32\] in 4 bits": (
        "pack-quantized",
        lambda own: {**own, f"{Q}.weight_shape": torch.tensor([64, 32])},
    ),
    r"q_proj\.bias in model\.safetensors: not a tensor of this llama model": (
        "gptq",
        lambda own: {**own, f"{Q}.bias": torch.ones(64)},
    ),
    r"q_proj\.weight: its scales are not finite": (
        "fp8 rows",
        lambda own: {**own, f"{Q}.weight_scale": own[f"{Q}.weight_scale"] * torch.nan},
    ),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_torn_weight_names_its_file_and_tensor(folders: dict[str, Path], tmp_path: Path, message: str) -> None:
    name, damage = DAMAGED[message]
    kind, form = STORED[name]
    export(folders["llama"], tmp_path, form, kind)
    rewrite(tmp_path, damage(tensors_of(tmp_path)))
    with pytest.raises(ModelError, match=message) as error:
        load(tmp_path, layouts=weight_layouts(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "missing; expected shape" not in str(error.value)  # nothing is said twice


def test_what_tools_store_besides_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    """Scales of activations and caches, and biases of zeros, which change no number; and dense weights."""
    model, _ = export(folders["llama"], tmp_path, GPTQ, "gptq")
    own = tensors_of(tmp_path)
    more = {f"{Q}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    rewrite(tmp_path, own | more | {f"{Q}.bias": torch.zeros(64)})
    name = "layers.0.attention.q_proj.weight"
    assert torch.equal(read_dense(tmp_path)[name], model.get_parameter(name))
    assert stored_method(tmp_path) == "gptq"
    save(model, tmp_path / "dense")
    rewrite(tmp_path, tensors_of(tmp_path / "dense"))  # and config.json still names gptq
    assert stored_method(tmp_path) is None and kept(tmp_path) == {}
    assert torch.equal(read_dense(tmp_path)[name], model.get_parameter(name))


PUBLISHED: dict[str, tuple[str, Format, dict[str, Any]]] = {
    # Qwen2.5 in AWQ and GPTQ, Llama 2 in AutoGPTQ, RedHatAI's w4a16, w8a8 and FP8-dynamic
    "qwen awq": (
        "awq",
        STORED["awq"][1],
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
        | {"modules_to_not_convert": None},
    ),
    "qwen gptq": (
        "gptq",
        GPTQ,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
        | {
            "static_groups": False,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
        },
    ),
    "gptqmodel": (
        "gptq",
        GPTQ,
        {"quant_method": "gptq", "bits": 8, "group_size": 128, "checkpoint_format": "gptq", "pack_dtype": "int32"}
        | {"dynamic": {"-:.*lm_head": {}, r"+:.*\.layers\..*": {"bits": 4, "group_size": 32}}, "lm_head": False},
    ),
    "w4a16": (
        "compressed-tensors",
        STORED["pack-quantized"][1],
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
        | {"kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.45}
        | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": [], "targets": []}}
        | {
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
                    | {"actorder": "weight", "block_structure": None, "dynamic": False, "observer": "minmax"},
                }
            }
        },
    ),
    "fp8-dynamic": (
        "compressed-tensors",
        STORED["fp8 rows"][1],
        {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
        | {"quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.10.2"}
        | {
            "config_groups": {
                "group_0": {
                    "format": None,
                    "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
                    | {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax"},
                }
            }
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_as_they_are_published(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    kind, form, settings = PUBLISHED[name]
    model, _ = export(folders["llama"], tmp_path, form, kind)  # type: ignore[arg-type]
    rewrite(tmp_path, tensors_of(tmp_path), quantization_config=settings)
    layouts = weight_layouts(tmp_path)
    assert layouts is not None and layouts.quantizes_activations == (name == "fp8-dynamic")
    for key, value in load(tmp_path, layouts=layouts).named_parameters():
        assert torch.equal(value, model.get_parameter(key)), key


def test_schemes_by_the_names_of_modules(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of two schemes the one that names a module comes before the one of its class; a module of none is refused."""
    model, _ = export(folders["llama"], tmp_path, STORED["int8 rows"][1], "compressed-tensors")
    own = tensors_of(tmp_path)
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {
        "first": {"targets": ["Linear"], "weights": {**eight, "num_bits": 4}, "format": "pack-quantized"},
        "second": {"targets": [r"re:.*(self_attn|mlp)\..*_proj$"], "weights": eight, "format": "pack-quantized"},
    }
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    rewrite(tmp_path, own, quantization_config=settings)
    for key, value in read_dense(tmp_path).items():
        assert torch.equal(value, model.get_parameter(key)), key
    groups["second"]["targets"] = [r"re:.*self_attn\..*"]
    del groups["first"]
    rewrite(tmp_path, own, quantization_config=settings)
    message = re.escape("mlp.gate_proj in model.safetensors: quantization_config of config.json has no settings for it")
    with pytest.raises(ModelError, match=message):
        check_headers(tmp_path, read_config(tmp_path), quantized=False, layouts=weight_layouts(tmp_path))
