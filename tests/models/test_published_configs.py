"""config.json of published models, each read raw by danlu and by transformers' own config class, and compared.

transformers builds its model on the meta device, so sizes are those that are published, and nothing is allocated.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.published_configs import PUBLISHED

from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES, READ_AS
from danlu.models.families.layer_keys import HF_ACTIVATIONS
from danlu.models.hf_config import UNSUPPORTED as REFUSED_TYPES
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.hf_layout import hf_tensors
from danlu.models.hf_rope import ignored_rope_settings
from danlu.models.layer_spec import Experts, LayerSpec
from danlu.models.mixer_spec import Delta, Heads, Latent
from danlu.models.multimodal import MULTIMODAL
from danlu.models.rope import rotary_tables
from danlu.models.rope_config import QueryTemperature, Rope

FOLDERS = ("Qwen__Qwen3-0.6B", "Qwen__Qwen3-30B-A3B", "deepseek-ai__DeepSeek-V3", "meta-llama__Meta-Llama-3.1-8B")
FOLDERS += ("mistralai__Mixtral-8x7B-v0.1", "openai__gpt-oss-20b")
"""Whole published files; the others of that folder hold some of the keys (params.csv is compared with all of them)."""
DEPTH = 8
"""Layers of the models that are built: a multiple of 4, and enough for Gemma 3's first layer that sees everything."""
GEMMA4_DEPTH = 6
"""Layers to the first that sees everything, which the last one must be."""
DERIVED = ("Gemma-2-2b", "Mistral-7B-v0.1", "Qwen2.5-0.5B", "phi-4", "pythia-160m")
NAMES = sorted(PUBLISHED)


def shallow(values: dict[str, Any]) -> dict[str, Any]:
    """The config of a model of the first few layers, which has every kind of layer; building all of them takes long."""
    values, part = copy.deepcopy(values), "text_config"
    if part in values:
        return {**values, part: shallow(values[part])}
    full = values["num_hidden_layers"]
    depth = min(full, GEMMA4_DEPTH if values["model_type"].startswith("gemma4") else DEPTH)
    if values.get("num_kv_shared_layers"):  # a layer of each kind that has keys, and one of each that reads them
        pattern = values["layer_types"].index("full_attention") + 1
        values, depth = {**values, "num_kv_shared_layers": pattern}, 2 * pattern
    cut = {key: value[:depth] for key, value in values.items() if isinstance(value, list) and len(value) == full}
    return {**values, **cut, "num_hidden_layers": depth}


def their_config(values: dict[str, Any]) -> Any:
    """transformers' reading of a config.json as it lies on the disk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[READ_AS.get(values["model_type"], values["model_type"])].from_dict(copy.deepcopy(values))


def their_model(values: dict[str, Any]) -> Any:
    """transformers' model of a config.json, on the meta device; of a multimodal one all of it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    auto = AutoModelForImageTextToText if values["model_type"] in MULTIMODAL else AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        return auto.from_config(their_config(values))


def language_part(model: Any) -> Any:
    return getattr(model.base_model, "language_model", model.base_model)


def their_rotation(model: Any, layer_type: str | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each rotated pair, [T, R / 2], of the model's own rotary module built anew on the CPU."""
    meta = language_part(model).rotary_emb
    rotary = type(meta)(copy.deepcopy(meta.config))
    if rotary.config.model_type == "phimoe":  # transformers 5.23 forgets the length here, and keeps the short factors
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=int(positions.max()) + 1)
    arguments = [layer_type] if "layer_type" in inspect.signature(rotary.forward).parameters else []
    rotated = rotary(torch.zeros(1), positions[None], *arguments)
    if isinstance(rotated, torch.Tensor):  # complex
        return rotated[0].real, rotated[0].imag
    half = rotated[0].shape[-1] // 2 if rotated[0].shape[-1] == rotated[1].shape[-1] else 0
    cos, sin = rotated[0][0], rotated[1][0]
    if half and torch.equal(cos[:, ::2], cos[:, 1::2]) and not torch.equal(cos[:, 0], cos[:, 2]):  # of neighbours
        return cos[:, ::2], sin[:, ::2]
    is_doubled = cos.shape[-1] % 2 == 0 and torch.equal(cos[:, :half], cos[:, half:])
    return (cos[:, :half], sin[:, :half]) if is_doubled else (cos, sin)


def check_rotation(model: Any, layer_type: str | None, rope: Rope, config: ModelConfig) -> None:
    """Raises AssertionError unless both rotate short and the longest documents alike."""
    for length in (17, min(config.context_length, config.max_position_embeddings)):
        positions = torch.tensor([0, 1, 2, 7, length // 2, length - 1])
        own = rotary_tables(rope, positions, torch.full_like(positions, length))
        half = own.cos.shape[-1] // 2
        cos, sin = their_rotation(model, layer_type, positions)
        assert cos.shape == (len(positions), half), f"{2 * half} features are rotated, and {2 * cos.shape[-1]} are"
        # float32 angles of late positions differ in their last digit where a product is taken in another order.
        torch.testing.assert_close(own.cos[:, :half], cos, atol=2e-2 if length > 10_000 else 1e-5, rtol=0)
        torch.testing.assert_close(own.sin[:, :half], sin, atol=2e-2 if length > 10_000 else 1e-5, rtol=0)


def their_layers(model: Any) -> list[dict[str, Any]]:
    """What each layer of transformers' model does beside its parameters."""
    config = language_part(model).config
    layers = []
    for layer in language_part(model).layers:
        attention = getattr(layer, "self_attn", getattr(layer, "attention", None))
        facts: dict[str, Any] = {"linear": attention is None}
        if attention is not None:
            facts |= {
                "scale": attention.scaling,
                "window": their_window(attention, config),
                "softcap": getattr(attention, "attn_logit_softcapping", None),
                "rotated": is_rotated(attention, config),
            }
        facts["activation"] = getattr(config, "hidden_activation", None) or config.hidden_act
        mixture = getattr(layer, "mlp", getattr(layer, "block_sparse_moe", None))
        facts["routing"] = their_routing(layer if hasattr(layer, "experts") else mixture, config)
        layers.append(facts)
    return layers


def their_window(attention: Any, config: Any) -> int | None:
    if not getattr(attention, "is_sliding", True):  # EXAONE 4 keeps the window of the others there
        return None
    return getattr(attention, "sliding_window", getattr(config, "sliding_window", None)) or None


def is_rotated(attention: Any, config: Any) -> bool:
    if config.model_type == "exaone4":
        return config.sliding_window is None or attention.is_sliding
    if config.model_type == "cohere2":
        return attention.sliding_window is not None
    if config.model_type == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    return bool(getattr(attention, "use_rope", True))


def their_routing(mlp: Any, config: Any) -> dict[str, Any] | None:
    if mlp is None or not hasattr(mlp, "experts"):
        return None
    return {
        "experts": mlp.experts.num_experts,
        "top_k": getattr(config, "top_k_experts", None) or config.num_experts_per_tok,
        # Families that have no key for these have them in their code, whose numbers test_families.py compares.
        **{
            own: getattr(config, key)
            for own, key in (("normalise", "norm_topk_prob"), ("scale", "routed_scaling_factor"))
            if hasattr(config, key)
        },
        **(
            {"groups": config.n_group, "top_groups": config.topk_group}
            if getattr(config, "n_group", None) and getattr(config, "topk_method", "") != "greedy"
            else {}
        ),
    }


def own_layer(layer: LayerSpec, theirs: dict[str, Any]) -> dict[str, Any]:
    mixer, feed = layer.mixer, layer.feed
    facts: dict[str, Any] = {"linear": isinstance(mixer, Delta)}
    if isinstance(mixer, Heads | Latent):
        facts |= {
            "scale": pytest.approx(mixer.attention_scale, rel=1e-6),
            "window": mixer.window,
            "softcap": mixer.softcap,
            "rotated": mixer.rope is not None,
        }
    router = None
    if isinstance(feed, Experts):
        router = {"experts": feed.num_experts, "top_k": feed.top_k}
        router |= {name: getattr(feed.router, name) for name in theirs["routing"] or {} if name not in router}
    activation = HF_ACTIVATIONS.get(feed.activation, "silu")  # gpt-oss' own is compared in test_families.py
    return {**facts, "activation": activation, "routing": router}


def check(values: dict[str, Any]) -> ModelConfig:
    """Raises AssertionError where danlu reads a config.json in another way than transformers."""
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    whole, language = read_config_values(values), their_config(values).get_text_config()
    assert len(whole.layers) == language.num_hidden_layers
    if types := getattr(language, "layer_types", None):
        assert [own_type(layer) for layer in whole.layers] == types
    config, model = read_config_values(shallow(values)), their_model(shallow(values))
    check_parameters(config, model)
    assert config.rms_norm_eps == getattr(language, "rms_norm_eps", getattr(language, "layer_norm_eps", None))
    assert config.max_position_embeddings == language.max_position_embeddings
    assert config.embedding_multiplier == pytest.approx(their_embedding_multiplier(language))
    assert config.residual_multiplier == getattr(language, "residual_multiplier", 1.0)
    assert config.logits_divisor == getattr(language, "logits_scaling", 1 / getattr(language, "logit_scale", 1.0))
    assert config.final_softcap == getattr(language, "final_logit_softcapping", None)
    layers = their_layers(model)
    assert [own_layer(own, each) for own, each in zip(config.layers, layers, strict=True)] == layers
    types = getattr(language, "layer_types", None) or [None] * len(whole.layers)
    kinds = {(kind, each.mixer.rope): None for kind, each in zip(types, whole.layers, strict=True) if each.mixer.rope}
    parameters = language.rope_parameters or {}
    temperature = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    for kind, rope in kinds:
        assert rope is not None
        assert temperature[0] is None or rope.temperature == QueryTemperature(*temperature)
        check_rotation(model, kind, rope, config)
    return whole


def own_type(layer: LayerSpec) -> str:
    if isinstance(layer.mixer, Delta):
        return "linear_attention"
    return "full_attention" if layer.mixer.window is None else "sliding_attention"


def check_parameters(config: ModelConfig, model: Any) -> None:
    """Raises AssertionError unless both have the same tensors: heads, widths, experts, norms, biases, a tied head."""
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.multimodal is not None:
        theirs = {n: s for n, s in theirs.items() if n.startswith(("model.language_model.", "lm_head."))}
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    tensors = hf_tensors(config, stacked=config.has_experts)
    if config.multimodal is not None and MULTIMODAL[config.multimodal].transposed_experts:  # in folders alone
        tensors = [tensor.transposed if ".experts." in tensor.name else tensor for tensor in tensors]
    own = {tensor.name.replace("embed_out.", "lm_head."): tensor.shape for tensor in tensors}  # as in GPT-NeoX' folders
    assert own == theirs


def their_embedding_multiplier(config: Any) -> float:
    scaled = config.model_type.startswith("gemma")
    return math.sqrt(config.hidden_size) if scaled else float(getattr(config, "embedding_multiplier", 1.0))


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    config = check(PUBLISHED[name].values)
    written = config_values(config, torch_dtype="bfloat16")
    if config.multimodal is None:  # and so is what danlu writes of it
        assert check(written) == config
        assert written.get("rotary_dim") == PUBLISHED[name].values.get("rotary_dim")  # which vLLM reads alone


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a length beside the scaling": ("deepseek-r1-0528-qwen3-8b", {"original_max_position_embeddings": 16384}),
    "a length beside scalings by type": (
        "gemma-3-12b-text",
        {"original_max_position_embeddings": 16384, "rope_scaling": YARN},
    ),
    "both forms": (
        "olmo3-7b-think",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
    "an empty scaling": (
        "qwen3-next-80b-a3b",
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    ),
    "a share beside the features": ("minimax-m2", {"partial_rotary_factor": 0.25}),
    "experts of GLM": ("glm-4.5-air", {"num_local_experts": 64}),
    "experts of OLMoE": ("olmoe-1b-7b", {"num_local_experts": 32}),
    "experts of DeepSeek-V2": ("deepseek-v2.5", {"num_experts": 80}),
    "experts of DeepSeek-V3": ("kimi-k2", {"num_local_experts": 96}),
}
"""Keys that transformers converts while it reads them, or that outweigh others."""


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_that_transformers_converts_are_converted(variant: str) -> None:
    name, changes = VARIANTS[variant]
    assert check(PUBLISHED[name].values | changes) != read_config_values(PUBLISHED[name].values)


def test_an_attention_factor_under_another_name_is_ignored_and_told() -> None:
    published = PUBLISHED["deepseek-r1-0528-qwen3-8b"].values
    (remark,) = ignored_rope_settings(published)
    assert remark.startswith(
        "rope_scaling: attn_factor 0.878249 is ignored, as transformers does: its key is attention"
    )
    assert "are scaled by 1.1386. vLLM multiplies" in remark
    assert "attn_factor" not in json.dumps(config_values(read_config_values(published), torch_dtype="bfloat16"))
    assert ignored_rope_settings(PUBLISHED["olmo3-7b-think"].values) == []


@pytest.mark.parametrize("name", [*FOLDERS, *DERIVED])
def test_a_published_file_is_read_as_transformers_reads_it(name: str, shared_data: Path) -> None:
    values = json.loads((shared_data / "configs" / name / "config.json").read_text())
    check(values)


def test_there_is_a_published_config_for_every_family(shared_data: Path) -> None:
    files = [shared_data / "configs" / name / "config.json" for name in (*FOLDERS, *DERIVED)]
    read = [json.loads(file.read_text()) for file in files] + [each.values for each in PUBLISHED.values()]
    types = {READ_AS.get(each["model_type"], each["model_type"]) for each in read}
    own = {"mfa"}  # which transformers has no class for, and nobody has published
    assert types == (FAMILIES.keys() - own) | MULTIMODAL.keys()
    assert READ_AS.keys() <= {each["model_type"] for each in read}
    assert all(each.source for each in PUBLISHED.values())


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("minimax-m2", {"rotary_dim": 32}),
    ("phi-4-mini", {"original_max_position_embeddings": 8192}),
    ("olmo3-7b-think", {"layer_types": None, "sliding_window": 4095}),
    ("glm-4.5-air", {"partial_rotary_factor": 0.25}),
    ("deepseek-v2.5", {"routed_scaling_factor": 1.0}),
    ("gemma-3-1b", {"sliding_window_pattern": 5}),
    ("granite-4.1-3b", {"tie_word_embeddings": False}),
    ("granite-3.1-3b-a800m", {"num_experts_per_tok": 4}),
    ("granite-4.0-micro", {"position_embedding_type": None}),
    ("exaone-4.0-32b", {"sliding_window_pattern": 3}),
    ("hunyuan-7b", {"rope_scaling": {"alpha": 100, "factor": 1, "type": "dynamic"}}),
    ("mimo-7b", {"rope_theta": 10000.0}),
    ("phi-3.5-moe", {"lm_head_bias": False}),
    ("seed-oss-36b", {"attention_out_bias": True}),
    ("gemma-4-31b-text", {"num_global_key_value_heads": 8}),
    ("gemma-4-31b-text", {"attention_k_eq_v": False}),
    ("gemma-4-12b-text", {"sliding_window": 512}),
    ("gemma-4-26b-a4b", {"top_k_experts": 4}),
    ("gemma-4-e2b-text", {"use_double_wide_mlp": False}),
    ("gemma-4-e2b-text", {"hidden_size_per_layer_input": 128}),
    ("gemma-4-26b-a4b", {"moe_intermediate_size": 512}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=[f"{name}-{next(iter(wrong))}" for name, wrong in WRONG])
def test_a_config_that_danlu_read_otherwise_would_be_found(
    name: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: transformers is shown another config than danlu."""
    config, model = their_config, their_model
    monkeypatch.setattr(f"{__name__}.their_config", lambda values: config(values | wrong))
    monkeypatch.setattr(f"{__name__}.their_model", lambda values: model(values | wrong))
    with pytest.raises(AssertionError):
        check(PUBLISHED[name].values)


def test_the_page_of_models_names_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for heading, types in (
        ("## Families", FAMILIES.keys() | READ_AS.keys()),
        ("## Models that see or hear", MULTIMODAL.keys()),
        ("## Refused", REFUSED_TYPES.keys()),
    ):
        section = page.split(f"{heading}\n")[1].split("\n## ")[0]
        named = {
            name for row in re.findall(r"^\| (.*)$", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        first = {
            name for row in re.findall(r"^\| ([^|]*) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert first - {"model_type"} <= types <= named, types ^ named
