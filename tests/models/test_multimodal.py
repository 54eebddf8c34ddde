"""Folders of multimodal models: the language part trains, everything else reaches the result byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.adapters.peft_folder import write_adapter
from danlu.assembly.frozen_base import load_frozen
from danlu.core.errors import ModelError
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.families import FAMILIES
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import check_headers, fingerprint, read_config, untouched_tensors
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections

TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
LINEAR_TEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
GEMMA4_TEXT = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "depth": 1,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
AXES = {"rope_type": "default", "rope_theta": 2000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**TEXT, "sliding_window": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {
            **TEXT,
            **GEMMA4_TEXT,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
        "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 32},
        "image_token_id": 120,
    },
    "gemma4_unified": {
        "text_config": {**TEXT, **GEMMA4_TEXT, "use_bidirectional_attention": None},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 48, "mm_posemb_size": 16, "output_proj_dims": 48},
        "image_token_id": 120,
    },
    "qwen2_5_vl": {
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]},
        },
        "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0], "window_size": 28},
        "image_token_id": 120,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": AXES},
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        "image_token_id": 120,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "mlp_only_layers": [0],
            "rope_parameters": AXES,
        },
        "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        "image_token_id": 120,
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            **LINEAR_TEXT,
        },
        "vision_config": QWEN_VISION,
        "image_token_id": 120,
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            **LINEAR_TEXT,
            "mtp_num_hidden_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
        "vision_config": QWEN_VISION,
        "image_token_id": 120,
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "ministral3", "rope_parameters": ROPE},
        "vision_config": {**VISION, "head_dim": 8},
        "tie_word_embeddings": False,
    },
}
_EXPERTS = ("layers.1.mlp.experts.up_proj.weight", "1.mlp.experts.gate_up_proj")
TRAINED = {
    "gemma4": ("layers.1.mlp.shared.down_proj.weight", "1.mlp.down_proj.weight"),
    "qwen3_5_moe": _EXPERTS,
    "qwen3_vl_moe": _EXPERTS,
}
"""Case -> a parameter of the second layer and the tensor it is in, where there is no dense network."""
FURTHER = {"qwen3_5_moe": {"mtp.layers.0.mlp.experts.gate_up_proj": torch.arange(24.0).view(2, 4, 3).bfloat16()}}
"""Case -> tensors that no class of transformers has, of layers that predict further tokens."""


def random_model(case: str, folder: Path) -> Any:
    """A random multimodal model of transformers in bfloat16 towers and float32 language, saved to `folder`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(case, image_token_index=120, **CASES[case])
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "norm" in name else 0.15))
            if "norm" in name and case.startswith(("gemma4", "mistral3", "qwen2_5_vl", "qwen3_vl")):
                parameter.add_(1.0)
    # Experts stacked, as Qwen publishes them; by itself transformers gives each its own tensors.
    model.save_pretrained(folder, save_original_format=case != "qwen3_5_moe")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}\n')
    return model


def reread(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def turned(experts: Tensor) -> Tensor:
    """The matrices [outputs, inputs] of stacked experts as [inputs, outputs], or back."""
    return experts.transpose(1, 2).contiguous()


TOKENS = torch.randint(0, 119, (40,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def oracle(model: Any) -> Tensor:
    answer: Tensor = model(TOKENS[None]).logits[0]
    return answer


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), PackedAttention((0, len(TOKENS)))))


def stored_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and content of every tensor of a folder."""
    content = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                tensor = handle.get_tensor(name)
                raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                content[name] = (str(tensor.dtype), tuple(tensor.shape), raw)
    return content


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Tensor]:
    """Name, folder and expected logits. Of the folder a vision tensor is in bfloat16."""
    folder = tmp_path_factory.mktemp(request.param)
    expected = oracle(random_model(request.param, folder))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "vis" in name and tensors[name].ndim == 2)
    changed = {name: tensors[name].bfloat16()} | FURTHER.get(request.param, {})
    if request.param == "qwen3_vl_moe":  # transformers 5 reads the published form, and writes another
        changed |= {name: turned(one) for name, one in tensors.items() if ".experts." in name}
    save_file(tensors | changed, folder / "model.safetensors", metadata={"format": "pt"})
    return request.param, folder, expected


def test_logits_of_the_language_part_are_transformers(case: tuple[str, Path, Tensor]) -> None:
    name, folder, expected = case
    model = load(folder)
    assert model.config.multimodal == name
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


def test_everything_else_reaches_the_result_byte_for_byte(case: tuple[str, Path, Tensor], tmp_path: Path) -> None:
    kind, folder, expected = case
    model = load(folder)
    name, on_disk = TRAINED.get(kind, ("layers.1.mlp.down_proj.weight", "1.mlp.down_proj.weight"))
    with torch.no_grad():
        model.get_parameter(name).neg_()
    save(model, tmp_path / "result", origin=folder, shard_bytes=100_000)
    before, after = stored_bytes(folder), stored_bytes(tmp_path / "result")
    untouched = untouched_tensors(folder, model.config)
    assert len(untouched) > (5 if kind == "gemma4_unified" else 10)  # which has no encoder
    assert any(before[name][0] == "torch.bfloat16" for name in untouched)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert {name.rpartition("layers.")[2] for name in changed} == {on_disk}
    back = reread(tmp_path / "result")
    torch.testing.assert_close(oracle(back), logits(model), atol=1e-5, rtol=0)
    assert not torch.allclose(oracle(back), expected, atol=1e-2)  # control
    assert read_config(tmp_path / "result") == read_config(folder) == model.config
    processor = "preprocessor_config.json"
    assert (tmp_path / "result" / processor).read_bytes() == (folder / processor).read_bytes()
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "result", folder))
    of_images = [one["text_config"].get("use_bidirectional_attention", "absent") for one in (ours, theirs)]
    assert kind not in ("gemma4", "gemma4_unified") or of_images == [{"gemma4": "vision"}.get(kind)] * 2
    assert ours["vision_config"] == theirs["vision_config"] and ours["architectures"] == theirs["architectures"]
    further = [{k: v for k, v in one["text_config"].items() if k.startswith("mtp_")} for one in (ours, theirs)]
    assert further[0] == further[1] and bool(further[0]) == (kind == "qwen3_5_moe")
    assert fingerprint(tmp_path / "result") != fingerprint(folder)


def test_without_its_folder_the_language_part_is_a_model_of_its_own(
    case: tuple[str, Path, Tensor], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    _, folder, expected = case
    model = load(folder)
    save(model, tmp_path)
    assert read_config(tmp_path) == replace(model.config, multimodal=None)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(oracle(alone), expected, atol=1e-5, rtol=0)


def test_adapters_have_the_names_that_peft_has(case: tuple[str, Path, Tensor], tmp_path: Path) -> None:
    from peft import PeftModel

    kind, folder, expected = case
    adapted = load_frozen(
        folder, dtype=torch.float32, new={"own": sections.Lora(rank=2, targets=["q_proj", "down_proj"])}
    )
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in adapted.adapters.tensors("own").values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
    write_adapter(adapted.adapters, "own", tmp_path, base=str(folder), base_fingerprint=None)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert len(names) == (2 * 2 * 2 if kind != "qwen3_vl_moe" else 2 * 2 + 2)  # its second layer has experts alone
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    theirs = PeftModel.from_pretrained(reread(folder), str(tmp_path)).eval()
    torch.testing.assert_close(oracle(theirs), logits(adapted.model), atol=1e-5, rtol=0)
    assert not torch.allclose(oracle(theirs), expected, atol=1e-2)  # control
    vision = [name for name, _ in theirs.named_parameters() if "lora" in name and "vision" in name]
    assert not vision


def test_experts_are_read_either_way_round_and_written_as_published(tmp_path: Path) -> None:
    folder, result = tmp_path / "theirs", tmp_path / "result"
    expected = oracle(random_model("qwen3_vl_moe", folder))
    model = load(folder)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    save(model, result, origin=folder)
    before, after = (load_file(each / "model.safetensors") for each in (folder, result))
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert before[name].shape == (5, 24, 48) and torch.equal(after[name], turned(before[name]))
    torch.testing.assert_close(oracle(reread(result)), expected, atol=1e-5, rtol=0)
    changed = before | {name: before[name].reshape(5, 12, 96)}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"{name} in model.safetensors: expected shape"):
        load(folder)


def test_a_published_qwen2_5_vl_has_no_text_config_and_names_of_a_text_model(tmp_path: Path) -> None:
    """transformers writes its tensors under these names; its config.json is flattened here, as the hub has it."""
    folder, result = tmp_path / "flat", tmp_path / "result"
    expected = oracle(random_model("qwen2_5_vl", folder))
    nested = json.loads((folder / "config.json").read_text())
    own = {key: value for key, value in nested.items() if key != "text_config"}
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}}
    flat = {**nested["text_config"], **own, **rope}
    flat.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(flat))
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.self_attn.q_proj.weight" in names and any(name.startswith("visual.") for name in names)
    model = load(folder)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.down_proj.weight").neg_()
    save(model, result, origin=folder)
    written = json.loads((result / "config.json").read_text())
    assert "text_config" not in written and written["model_type"] == "qwen2_5_vl"
    assert written["rope_scaling"] == {"rope_type": "default", "mrope_section": [1, 2, 3]}
    assert written["vision_config"] == flat["vision_config"] and written["hidden_size"] == 48
    assert read_config(result) == read_config(folder) == model.config
    torch.testing.assert_close(oracle(reread(result)), logits(model), atol=1e-5, rtol=0)
    before, after = stored_bytes(folder), stored_bytes(result)
    assert {name for name in before if before[name] != after[name]} == {"model.layers.1.mlp.down_proj.weight"}


def test_positions_of_a_text_are_the_same_along_all_axes_of_an_image() -> None:
    """So the sections change no logits of a text, and only the config.json of a result keeps them."""
    values = {"model_type": "qwen3_vl", **CASES["qwen3_vl"]}
    plain = {**values["text_config"], "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}}
    assert read_config_values(values) == read_config_values({**values, "text_config": plain})
    from transformers import AutoConfig, AutoModelForImageTextToText

    answers = []
    for axes in (AXES, {**AXES, "mrope_section": [2, 2, 4]}, {**AXES, "rope_theta": 1000.0}):
        text = {**values["text_config"], "rope_parameters": axes}
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3_vl", **{**CASES["qwen3_vl"], "text_config": text})
        answers.append(oracle(AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()))
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])  # control


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "text_config.norm_topk_prob: False, but transformers computes"),
        ("qwen3_vl", {"use_sliding_window": True}, "text_config.use_sliding_window: True, but transformers computes"),
        ("qwen3_vl_moe", {"moe_intermediate_size": 24}, "matrices of experts are square at a hidden_size of 48"),
        ("qwen2_5_vl", {"model_type": "qwen2_vl_text"}, "'qwen2_vl_text' is not supported in qwen2_5_vl; supported: q"),
    ],
)
def test_settings_that_transformers_computes_otherwise_are_refused(
    case: str, change: dict[str, Any], message: str
) -> None:
    values = {"model_type": case, **CASES[case]}
    read_config_values(values)
    with pytest.raises(ModelError, match=message):
        read_config_values({**values, "text_config": {**values["text_config"], **change}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config: expected an object, found None"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type: 'llama' is not supported in gemma3"),
    ],
)
def test_other_language_parts_are_refused(change: dict[str, Any], message: str) -> None:
    values = {"model_type": "gemma3", **CASES["gemma3"], **change}
    with pytest.raises(ModelError, match=message):
        read_config_values(values)


def test_a_tensor_of_the_language_part_that_is_none_is_refused(case: tuple[str, Path, Tensor], tmp_path: Path) -> None:
    _, folder, _ = case
    tensors = load_file(folder / "model.safetensors")
    changed = tensors | {"language_model.model.layers.7.extra.weight": torch.ones(2)}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="layers.7.extra.weight in model.safetensors: not a tensor of this"):
        check_headers(tmp_path, read_config(folder), quantized=False)


def test_a_head_beside_a_config_that_says_nothing_of_tying_is_its_own(
    case: tuple[str, Path, Tensor], tmp_path: Path
) -> None:
    name, folder, _ = case
    values = json.loads((folder / "config.json").read_text())
    del values["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path).tie_word_embeddings == (not name.startswith("qwen"))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_config(tmp_path).tie_word_embeddings == name.startswith("gemma")


@pytest.mark.parametrize(
    ("case", "beyond"),
    [
        ("glm4-moe", "model.layers.3."),
        ("deepseek-v3-moe", "model.layers.3."),
        ("qwen3-next", "mtp."),
        ("qwen3-next", "model.layers.4."),
    ],
)
def test_layers_that_predict_further_tokens_are_untouched(
    case: str, beyond: str, tiny_model: Callable[..., Decoder], tmp_path: Path
) -> None:
    folder, result = tmp_path / "model", tmp_path / "result"
    model = tiny_model(case)
    save(model, folder)
    assert beyond in ("mtp.", f"model.layers.{len(model.config.layers)}.")
    further = {f"{beyond}eh_proj.weight": torch.randn(4, 8).bfloat16(), f"{beyond}enorm.weight": torch.randn(4)}
    save_file(
        load_file(folder / "model.safetensors") | further, folder / "model.safetensors", metadata={"format": "pt"}
    )
    values = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(values))
    save(load(folder), result, origin=folder)
    assert stored_bytes(result) == stored_bytes(folder) and further.keys() <= stored_bytes(result).keys()
    told = json.loads((result / "config.json").read_text()).get("num_nextn_predict_layers")
    assert told == (1 if "num_nextn_predict_layers" in FAMILIES[model.config.family].mtp_keys else None)
    save(load(folder), tmp_path / "alone")
    assert not further.keys() & stored_bytes(tmp_path / "alone").keys()
