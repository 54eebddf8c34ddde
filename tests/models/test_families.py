"""Every family against transformers: logits, folders both ways, configs both ways."""

from __future__ import annotations

import csv
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.family_twins import random_tokens, twin
from builders.reference_attention import ReferenceAttention
from safetensors.torch import load_file, save_file

from danlu.core.errors import ModelError
from danlu.core.layer_types import Attend, Keys
from danlu.models.attend import PackedAttention
from danlu.models.config import parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.families import FAMILIES
from danlu.models.hf_config import UNSUPPORTED as REFUSED_TYPES
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.hf_folder import check_headers, ignored_settings, read_config
from danlu.models.loading import load
from danlu.models.mixer_spec import Delta
from danlu.models.saving import save

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def load_theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def logits(
    model: Decoder,
    tokens: torch.Tensor,
    attention: Callable[[tuple[int, ...]], Attend] = PackedAttention,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    with torch.no_grad():
        hidden = model(tokens, torch.arange(len(tokens)), attention((0, len(tokens))), dtype)
        return model.logits(hidden)


def oracle(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = model(tokens[None]).logits[0]
        return answer


def in_float64(model: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The logits of a transformers model all in float64, also where its code asks for float32 by name."""
    with monkeypatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
        return oracle(model.double(), tokens)


def test_logits_equal_transformers_and_the_folder_goes_back(
    hf_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    model = twin(hf_values, theirs)
    tokens = random_tokens(hf_values["vocab_size"])
    expected = oracle(model, tokens)

    decoder, allowed = load(theirs), 1e-5
    if any(isinstance(layer.mixer, Delta) for layer in decoder.config.layers):
        # The recurrence makes more of what is rounded: transformers is up to 2e-5 from itself in float64, by processor.
        exact = in_float64(load_theirs(theirs), tokens, monkeypatch)
        computed = logits(load(theirs).double(), tokens, dtype=torch.float64).double()
        torch.testing.assert_close(computed, exact, atol=1e-6, rtol=0)
        allowed += float((expected - exact).abs().max())
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=allowed, rtol=0)
    assert expected.std() > 0.1  # or the comparison would say little

    save(decoder, mine)
    assert read_config(mine) == read_config(theirs)
    assert torch.equal(oracle(load_theirs(mine), tokens), expected)
    before, after = load_file(theirs / "model.safetensors"), load_file(mine / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_kimi_k2_is_computed_as_deepseek_v3(tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """Its folders bring their own code, which transformers does not run: the oracle is their config renamed."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    values = tiny_values("deepseek-v3-moe") | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
    tokens = random_tokens(values["vocab_size"])
    expected = oracle(twin(values, theirs), tokens)
    own_code = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    kimi = {key: value for key, value in values.items() if key != "rope_interleave"}
    (theirs / "config.json").write_text(
        json.dumps(kimi | own_code | {"model_type": "kimi_k2", "scoring_func": "sigmoid"})
    )
    decoder = load(theirs)
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=1e-5, rtol=0)
    save(decoder, mine)
    assert json.loads((mine / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert read_config(mine) == read_config(theirs)
    (theirs / "config.json").write_text(json.dumps(kimi | {"model_type": "kimi_k2", "routed_scaling_factor": 1.0}))
    assert (logits(load(theirs), tokens) - expected).abs().max() > 1e-3  # control


def test_mimo_is_computed_as_qwen2_without_its_further_layers(
    tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """Its folders bring their own code, which transformers does not run, and layers that predict further tokens."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    values = tiny_values("qwen2") | {"tie_word_embeddings": False, "rope_theta": 640000.0}
    tokens = random_tokens(values["vocab_size"])
    expected = oracle(twin(values, theirs), tokens)
    stored = load_file(theirs / "model.safetensors")
    further = {"model.mtp_layers.0.input_proj.weight": torch.ones(48, 96)}
    save_file(stored | further, theirs / "model.safetensors", metadata={"format": "pt"})
    own_code = {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "num_nextn_predict_layers": 1}
    (theirs / "config.json").write_text(json.dumps(values | own_code | {"model_type": "mimo", "attention_bias": True}))
    check_headers(theirs, read_config(theirs), quantized=False)
    decoder = load(theirs)
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=1e-5, rtol=0)
    save(decoder, mine, origin=theirs)
    assert json.loads((mine / "config.json").read_text())["model_type"] == "qwen2"
    assert read_config(mine) == read_config(theirs)
    written = load_file(mine / "model.safetensors")
    assert written.keys() == stored.keys() and all(torch.equal(written[name], stored[name]) for name in stored)
    (told,) = ignored_settings(theirs)
    assert told.endswith(
        "config.json: num_nextn_predict_layers: the layers that predict further tokens (MTP) are left "
        "out of the result, which is a qwen2 model"
    )
    assert ignored_settings(mine) == []
    save_file(stored | {"model.other.weight": torch.ones(2)}, theirs / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.other.weight in model.safetensors: not a tensor of this"):
        check_headers(theirs, read_config(theirs), quantized=False)


def test_hunyuan_norms_behind_its_rotation(tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """The control: norms before the rotation, as other families have them, make other logits."""
    tokens = random_tokens(131)
    expected = oracle(twin(tiny_values("hunyuan"), tmp_path), tokens)
    decoder = load(tmp_path)
    for layer in decoder.layers.values():
        layer.attention.norms_rotated = False
    assert (logits(decoder, tokens) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("part", ["normed values", "values before the norm of keys", "scalar"])
def test_the_parts_of_gemma4_show_in_the_logits(
    part: str, tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """The control: without one of them logits are others."""
    tokens = random_tokens(131)
    expected = oracle(twin(tiny_values("gemma4"), tmp_path), tokens)
    decoder = load(tmp_path)
    for layer in decoder.layers.values():
        if part == "scalar":
            layer.layer_scalar = None
        elif part == "normed values":
            layer.attention.norms_values = False
        elif layer.attention.v_proj is None:
            layer.attention.normed_values = layer.attention.k_norm.forward
    assert (logits(decoder, tokens) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("part", ["rows", "product", "network", "layer", "keys"])
def test_embeddings_of_layers_and_shared_keys_show_in_the_logits(
    part: str, tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """The control: without one of them, or with keys of another layer, logits are others."""
    tokens = random_tokens(131)
    expected = oracle(twin(tiny_values("gemma4-e2b"), tmp_path), tokens)
    decoder = load(tmp_path)
    assert (logits(decoder, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    if part == "rows":
        decoder.embed_tokens_per_layer.multiplier = 1.0
    elif part == "product":
        decoder.per_layer_projection_norm.eps = 10.0
    else:
        for layer in decoder.layers.values():
            match part:
                case "network":
                    layer.per_layer.activation = "gelu"
                    layer.per_layer.gate_proj.weight.data *= 0.5
                case "layer":  # the embeddings of a neighbour
                    own = layer.forward
                    layer.forward = partial(_with_embeddings_of_a_neighbour, own, layer.number)
                case "keys" if layer.source is not None:
                    layer.attention._mix = partial(_with_keys_of_a_neighbour, layer.attention._mix)
    assert (logits(decoder, tokens) - expected).abs().max() > 1e-3


def _with_keys_of_a_neighbour(mix: Any, attend: Attend, q: torch.Tensor, keys: Keys) -> torch.Tensor:
    mixed: torch.Tensor = mix(attend, q, replace(keys, stored=tuple(x.roll(1, 0) for x in keys.stored)))
    return mixed


def _with_embeddings_of_a_neighbour(forward: Any, number: int, *args: Any) -> Any:
    *others, carried = args
    return forward(*others, carried._replace(embeddings={number: carried.embeddings[number].roll(1, 0)}))


def _gemma4_ropes(**changes: float) -> dict[str, Any]:
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 900.0, **changes}
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1", {"rope_theta": 10000.0}),
    ("llama-biased-multi-query", {"rms_norm_eps": 1e-2}),
    ("llama-dynamic", {"rope_scaling": None}),
    ("llama-linear", {"rope_scaling": None}),
    ("llama-longrope", {"max_position_embeddings": 64, "rope_scaling": None}),
    ("phi3-longrope", {"original_max_position_embeddings": 40}),
    ("mistral", {"sliding_window": 8}),
    ("phi3-partial", {"partial_rotary_factor": 1.0}),
    ("qwen2-windows", {"max_window_layers": 2}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 13}),
    ("gemma2", {"layer_types": ["sliding_attention"] * 3}),
    ("gemma3", {"rope_local_base_freq": 10000.0}),
    ("gemma3", {"rope_scaling": None}),
    ("gemma3", {"sliding_window_pattern": 2}),
    ("olmo2", {"rope_theta": 10000.0}),
    ("olmo3", {"rope_scaling": None}),
    ("olmo3", {"sliding_window": 9}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ("smollm3-windows", {"use_sliding_window": False}),
    ("qwen3.5", {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}}),
    ("qwen3.5-tied", {"rms_norm_eps": 1e-2}),
    ("ministral3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.0, "mscale": 1.0}}),
    ("deepseek-v2", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}}),
    ("deepseek-v3", {"rope_interleave": False}),
    ("deepseek-v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.9}}),
    ("granite", {"attention_multiplier": 0.3}),
    ("granite", {"embedding_multiplier": 1.0}),
    ("granite", {"residual_multiplier": 1.0}),
    ("granite", {"logits_scaling": 1.0}),
    ("gemma", {"rope_theta": 100.0}),
    ("glm", {"partial_rotary_factor": 0.25}),
    ("glm4", {"rms_norm_eps": 1e-1}),
    ("cohere2", {"logit_scale": 0.0625}),
    ("cohere2", {"sliding_window_pattern": 3}),
    ("cohere2-biased", {"layer_norm_eps": 1e-1}),
    ("glm4-moe-lite", {"routed_scaling_factor": 1.0}),
    ("glm4-moe-lite-pattern", {"rope_interleave": True}),
    ("gpt-neox", {"hidden_act": "silu"}),
    ("gpt-neox", {"rotary_emb_base": 10000.0}),
    ("gpt-neox", {"rotary_pct": 0.5}),
    ("gpt-neox", {"use_parallel_residual": False}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("mixtral-windows", {"rope_theta": 1e6}),
    ("qwen3-moe", {"norm_topk_prob": False}),
    ("olmoe", {"norm_topk_prob": True}),
    ("glm4-moe", {"routed_scaling_factor": 1.0}),
    ("glm4-moe", {"topk_group": 4}),
    ("minimax-m2", {"partial_rotary_factor": 1.0}),
    ("minimax-m2-as-published", {"rotary_dim": 16}),
    ("gpt-oss", {"swiglu_limit": 7.0}),
    ("gpt-oss", {"swiglu_alpha": 1.0}),
    ("gpt-oss", {"sliding_window": 9}),
    ("ernie", {"rope_theta": 10000.0}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("exaone4-full", {"sliding_window": 64}),
    ("granite-moe", {"num_experts_per_tok": 2}),
    ("granite-moe", {"attention_multiplier": 0.3}),
    ("granite-4", {"position_embedding_type": None}),
    ("granite-4-experts", {"position_embedding_type": "rope"}),
    ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": 100.0, "factor": 1.0}}),
    ("phimoe", {"router_jitter_noise": 0.1}),
    ("phimoe", {"rms_norm_eps": 1e-1}),
    ("phimoe-plain", {"sliding_window": None}),
    ("seed-oss", {"rope_theta": 10000.0}),
    ("gemma4", {"rope_parameters": _gemma4_ropes(partial_rotary_factor=0.5)}),
    ("gemma4", {"rope_parameters": _gemma4_ropes(rope_theta=500.0)}),
    ("gemma4", {"sliding_window": 5}),
    ("gemma4", {"final_logit_softcapping": None}),
    ("gemma4-plain", {"rope_parameters": None}),
    ("gemma4-experts", {"top_k_experts": 3}),
    ("gemma4-unified", {"rms_norm_eps": 1e-1}),
    ("gemma4-e2b", {"sliding_window": 5}),
    ("gemma4-e2b", {"rms_norm_eps": 1e-1}),
]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], tuple[Path, torch.Tensor]]:
    """A function: a case and its values -> the folder of a transformers model of them, and its logits."""

    @functools.cache
    def made(case: str, values: str) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp(case)
        config = json.loads(values)
        return folder, oracle(twin(config, folder), random_tokens(config["vocab_size"]))

    return lambda case, values: made(case, json.dumps(values))


@pytest.mark.parametrize(("case", "wrong"), WRONG, ids=[f"{case}-{next(iter(wrong))}" for case, wrong in WRONG])
def test_a_wrong_setting_shows_in_the_logits(
    case: str,
    wrong: dict[str, Any],
    tiny_values: Callable[[str], dict[str, Any]],
    twins: Callable[[str, dict[str, Any]], tuple[Path, torch.Tensor]],
    tmp_path: Path,
) -> None:
    values = tiny_values(case)
    folder, expected = twins(case, values)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | wrong))
    assert (logits(load(tmp_path), random_tokens(values["vocab_size"])) - expected).abs().max() > 1e-3


def test_bfloat16_activations_follow_transformers_rounding(
    tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """Gemma's multiplier is rounded to bfloat16 there (sqrt(48) = 6.928 becomes 6.9375), in float32 it is not."""
    model = twin(tiny_values("gemma2"), tmp_path).to(torch.bfloat16)
    decoder, tokens = load(tmp_path), random_tokens(131)
    embedded = decoder.embed_tokens(tokens, torch.bfloat16)
    assert torch.equal(embedded, model.model.embed_tokens(tokens))
    assert not torch.equal(embedded, (decoder.embed_tokens(tokens, torch.float32)).to(torch.bfloat16))


def test_configs_of_real_models_count_their_parameters(shared_data: Path) -> None:
    with (shared_data / "configs" / "params.csv").open() as file:
        rows = list(csv.DictReader(file))
    counted = 0
    for row in rows:
        folder = shared_data / "configs" / row["config"]
        if row["model_type"] in FAMILIES:
            values = json.loads((folder / "config.json").read_text())
            values.pop("quantization_config", None)  # how weights are stored changes no count
            config = read_config_values(values)
            shapes = parameter_shapes(config).items()  # what corrects routers are buffers in transformers
            corrections = sum(math.prod(shape) for name, shape in shapes if name.endswith(".correction"))
            assert config.parameter_count() - corrections == int(row["total_params"]), row["config"]
            assert read_config_values(config_values(config, torch_dtype="bfloat16")) == config
            counted += 1
        else:
            with pytest.raises(ModelError, match=f"model_type '{row['model_type']}' is not supported[:;] "):
                read_config(folder)
    assert counted == 25


@pytest.mark.parametrize("model_type", sorted(REFUSED_TYPES))
def test_what_cannot_be_trained_is_refused_with_its_reason(model_type: str) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type)  # transformers knows it
    assert model_type not in FAMILIES
    with pytest.raises(ModelError) as caught:
        read_config_values({"model_type": model_type}, where="there")
    assert str(caught.value) == f"there: model_type '{model_type}' is not supported: {REFUSED_TYPES[model_type]}"


def test_stories_model_tells_the_published_story(shared_data: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = shared_data / "weights" / "stories260K-hf"
    decoder = load(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = [1]
    for _ in range(256):  # what llama2.c takes unless told otherwise
        tokens.append(int(logits(decoder, torch.tensor(tokens))[-1].argmax()))
    document = (shared_data / "weights" / "stories260K-llama2c" / "reference_sample.md").read_text()
    story = document.split("-t 0.0\n")[1].split("```")[0].strip()
    assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == story
    assert len(story) == 565
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    told = torch.tensor(tokens)
    expected = oracle(theirs, told)
    torch.testing.assert_close(logits(decoder, told, ReferenceAttention), expected, atol=1e-5, rtol=0)
    # Logits reach 22, and every float32 answer is 1.6e-5 from the float64 one: so are transformers' own two kernels.
    torch.testing.assert_close(logits(decoder, told), expected, atol=3e-5, rtol=0)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama-2", {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config: weights stored quantised"),
    ("llama-2", {"hidden_act": "relu"}, "hidden_act: activation 'relu' is not supported; supported: gelu, gelu_fast"),
    ("llama-2", {"num_local_experts": 8}, "num_local_experts: mixtures of experts are not supported"),
    ("llama-2", {"rope_scaling": {"rope_type": "nosuch"}}, "rotary scaling 'nosuch' is not supported for this"),
    ("llama-2", {"rope_scaling": {"rope_type": "linear"}}, "linear: factor is missing"),
    ("llama-2", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2', which it cannot be"),
    ("llama-2", {"rope_scaling": {**YARN, "warp": 1}}, "yarn: unknown settings: warp"),
    ("llama-2", {"rope_scaling": {**YARN, "factor": 0}}, "yarn: factor is 0, which it cannot be"),
    ("llama-2", {"rope_scaling": {**YARN, "factor": 10**400}}, "yarn: factor is 10{400}, which it cannot be"),
    ("llama-2", {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, "embeddings is 0, which it"),
    ("llama-2", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a number that is finite"),
    ("llama-2", {"rope_theta": float("nan")}, "rope_theta: expected a number that is finite"),
    ("llama-2", {"num_hidden_layers": 10**6}, "num_hidden_layers: 1,000,000 layers; at most 10,000 can be built"),
    ("gemma2", {"num_hidden_layers": 10**15}, "num_hidden_layers: 1,000,000,000,000,000 layers; at most 10,000 can"),
    ("llama-2", {"intermediate_size": 10**12}, "intermediate_size is 1,000,000,000,000: at most 2,147,483,647 can be"),
    ("llama-2", {"head_dim": 10**400}, "head_dim is 10"),
    ("llama-2", {"max_position_embeddings": 0}, "max_position_embeddings is 0: it must be at least 1"),
    ("llama-2", {"hidden_size": "48"}, "hidden_size: expected an integer, found '48'"),
    ("llama-2", {"hidden_size": None}, "hidden_size: missing"),
    ("llama-2", {"num_key_value_heads": 3}, "4 query heads cannot share 3 key/value heads evenly"),
    ("llama-2", {"hidden_size": 50}, "50 does not divide over 4 attention heads"),
    ("llama-2", {"rope_scaling": {**YARN, "beta_fast": 0}}, "yarn: beta_fast is 0, which it cannot be"),
    ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate: transformers does not apply it in a family"),
    ("llama-2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: transformers reads it for this family and"),
    ("llama-2", {"head_dim": 7}, "7 of head_dim 7 .* is not a positive even number"),
    ("llama-2", {"eos_token_id": "</s>"}, "eos_token_id: expected a token id or a list of them"),
    ("llama-2", {"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
    (
        "phi-4",
        {"rope_scaling": {"type": "llama3"}},
        "rotary scaling 'llama3' is not supported for this family; supported: default, longrope",
    ),
    (
        "phi-4",
        {"rope_scaling": {"type": "su"}},
        "rope_scaling: longrope: short_factor is missing; long_factor is missing",
    ),
    (
        "phi3-longrope",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 5}},
        "long_factor has 5 factors, and 12 rotated features of a head are 6 pairs",
    ),
    (
        "phi3-longrope",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0, "3"] * 3}},
        "long_factor is .*, which it cannot be",
    ),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "the same window in every"),
    ("gemma2", {"use_bidirectional_attention": True}, "only causal attention is supported"),
    ("gemma2", {"layer_types": ["full_attention"]}, "one entry for each of 3 layers"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types: not supported: chunked_attention"),
    ("gemma2", {"layer_types": ["sliding_attention"] * 3, "sliding_window": None}, "sliding_window: missing"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 has no root"),
    ("gemma3", {"attn_logit_softcapping": 3.0}, "transformers reads it for this family and does not apply it"),
    ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is no number of layers"),
    ("gemma3", {"rope_parameters": YARN}, "rope_parameters: expected settings for each of full_attention and sliding"),
    ("llama-2", {"rope_parameters": {"full_attention": YARN}}, "the same rotary embedding in every layer"),
    ("llama-2", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "unknown settings: llama_4_scaling_beta"),
    ("olmo3", {"rope_theta": 10000.0}, "rope_theta: is ambiguous for this family; say it for each type of layer"),
    ("smollm3", {"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers: expected a 0 or 1 for each of 4 layers"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: 0 is no number of layers"),
    ("ministral3", {"rope_parameters": YARN}, "rope_parameters: llama_4_scaling_beta and original_max_position"),
    ("cohere2", {"logit_scale": 0}, "logit_scale: logits cannot be multiplied by 0"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm: True is not supported: transformers builds the model with False"),
    ("cohere2", {"head_dim": 16}, "head_dim: transformers takes 48 / 4 for this family"),
    ("glm4-moe-lite", {"first_k_dense_replace": 2}, "first_k_dense_replace: transformers does not read it for this"),
    ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected a list with one entry for each of 3"),
    ("glm4-moe-lite", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: all of qk_rope_head_dim is rotated"),
    ("gpt-neox-sequential", {"head_dim": 16}, "head_dim: transformers takes 48 / 4 for this family"),
    ("gpt-neox", {"num_key_value_heads": 2}, "num_key_value_heads: transformers does not read it for this family"),
    ("granite", {"logits_scaling": 0}, "logits_scaling: logits cannot be divided by 0"),
    ("granite-4", {"layer_types": ["mamba", "mamba", "attention"]}, "layer_types: 2 layers of 3 are no attention but"),
    ("granite-4", {"layer_types": None}, "layer_types: missing, which stands for layers that are all state-space mod"),
    ("granite-4", {"layer_types": ["attention"]}, "layer_types: expected a list with one entry for each of 3 layers"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: 'LLLG' is not read without layer_types"),
    ("exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern: 0 is no number of layers"),
    ("hunyuan", {"use_cla": True}, "use_cla: keys and values that layers share are not supported"),
    ("hunyuan", {"use_qk_norm": False}, "use_qk_norm: transformers norms queries and keys of this family all the sam"),
    ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "rope_scaling: alpha -1 must be above 0"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok: transformers gives a token 2 experts in this family"),
    ("phimoe", {"tie_word_embeddings": True}, "lm_head_bias: the bias of a head that is tied to the embedding is not"),
    ("phimoe", {"router_jitter_noise": -0.1}, "router_jitter_noise: -0.1 is no share: expected 0 or more, and less"),
    ("phimoe", {"input_jitter_noise": 1}, "input_jitter_noise: 1 is no share"),
    (
        "phimoe",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}},
        "longrope: long_mscale is missing; short_mscale is missing",
    ),
    (
        "phi3-longrope",
        {
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
                "short_mscale": 1.0,
                "long_mscale": 1.0,
            }
        },
        "longrope: unknown settings: long_mscale, short_mscale",
    ),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: only causal attention is"),
    (
        "gemma4",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types: transformers makes the last",
    ),
    ("gemma4", {"rope_scaling": YARN}, "rope_scaling: transformers does not read it for this family; say it in rope_p"),
    ("gemma4", {"rope_theta": 10000.0}, "rope_theta: transformers does not read it for this family; say it in rope_p"),
    ("gemma4", {"hidden_size_per_layer_input": 8}, "vocab_size_per_layer_input: 262144 tokens have embeddings of"),
    ("gemma4-e2b", {"num_kv_shared_layers": 7}, "num_kv_shared_layers: 7 of 8 layers have no keys and values"),
    ("gemma4-experts", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: layers with experts that share keys"),
    ("gemma4-unified", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input: transformers does not read"),
    ("gemma4-unified", {"enable_moe_block": True}, "enable_moe_block: transformers does not read it for this family"),
    ("gemma4-experts", {"num_experts": None}, "num_experts: missing"),
    ("gemma4", {"rope_parameters": _gemma4_ropes(partial_rotary_factor=1.5)}, "partial_rotary_factor 1.5 must be in"),
    (
        "gemma4",
        {"per_layer_config": {"0": {"head_dim": 24}}},
        "per_layer_config: only head_dim and num_key_value_h",
    ),
    (
        "gemma4",
        {"per_layer_config": {"1": {"head_dim": 24}}},
        "per_layer_config: only head_dim and num_key_value_h",
    ),
    ("gemma4", {"per_layer_config": {"1": {"x": 1}, "3": {"x": 1}}}, "per_layer_config: only head_dim and num_key_va"),
    ("llama-dynamic", {"rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 2.0}}, "unknown settings: alpha"),
]


@pytest.mark.parametrize(("case", "change", "message"), UNSUPPORTED)
def test_what_would_be_computed_wrongly_is_refused(
    case: str, change: dict[str, Any], message: str, tiny_values: Callable[[str], dict[str, Any]]
) -> None:
    values = tiny_values(case)
    read_config_values(values)
    with pytest.raises(ModelError, match=f"^some/config.json.*{message}"):
        read_config_values(values | change, where="some/config.json")


def test_a_config_that_its_family_cannot_say_is_not_written(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    config = read_config_values(tiny_values("llama-2"))
    normed = config.with_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, qk_norm="head")))
    with pytest.raises(ModelError, match=r"a llama config.json cannot say this model's mixer.qk_norm, final_softcap$"):
        config_values(replace(normed, final_softcap=30.0), torch_dtype="float32")


def test_families_are_sorted_and_their_configs_are_read_without_torch() -> None:
    assert list(FAMILIES) == sorted(FAMILIES)
    code = (
        "import sys, danlu.models.hf_folder, danlu.models.hf_layout, danlu.models.presets; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
