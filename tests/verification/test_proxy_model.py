"""A small model is cut by a layout as the large one is, and is as large as a test may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.published_configs import PUBLISHED
from builders.tiny_world import CONFIG, tiny_world

from danlu.adapters.adapter_config import read_adapter_config
from danlu.assembly.recipe_adapters import trained_tokens
from danlu.core.types import Pack, Sample
from danlu.memory import recompute_choice, recompute_planner
from danlu.memory.layer_plan import KINDS
from danlu.models.attend import PackedAttention
from danlu.models.config import ModelConfig
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.loading import load as load_model
from danlu.models.long_context import ropes_by_length, with_long_context
from danlu.models.mixer_spec import Heads
from danlu.models.rope_config import DynamicScaling, LongRopeScaling, QueryTemperature, Rope, RopeScaling
from danlu.parallel.layout import Layout, problems
from danlu.recipe import Recipe, load, sections
from danlu.recipe.sections import Parallel
from danlu.verification.proxy_model import (
    MAX_LENGTH,
    WINDOW,
    proxy_config,
    rope_trained_at,
    staged_ropes,
    trained_length,
)
from danlu.verification.proxy_recipe import EPS, LEAST_RATE, proxy_optimizer, proxy_recipe
from danlu.verification.role_proxies import write_model

LARGE: dict[str, dict[str, Any]] = {
    "cohere2": {
        "model_type": "cohere2",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
    },
    "gemma4-e2b": PUBLISHED["gemma-4-e2b-text"].values,
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50432,
    },
    "gemma": {
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 256000,
    },
    "glm4": {
        "model_type": "glm4",
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
    },
    "exaone4": {
        "model_type": "exaone4",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 102400,
    },
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128167,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256000,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "granite": {
        "model_type": "granite",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49155,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "tie_word_embeddings": True,
    },
    "llama": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128257,
        "mlp_bias": True,
    },
    "mistral": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    "phi3": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32064,
        "partial_rotary_factor": 0.75,
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "vocab_size": 151937,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "max_window_layers": 20,
    },
    "smollm3": {
        "model_type": "smollm3",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 128256,
    },
}
LAYOUTS = (Layout(shard=2), Layout(tensor=2), Layout(replicate=2, shard=2), Layout(shard=2, tensor=2), Layout(tensor=4))


def fits(config: ModelConfig, layout: Layout) -> list[str]:
    return list(problems(Parallel(tensor=layout.tensor), config))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_what_decides_how_it_is_cut_is_kept(name: str, layout: Layout, quantized: bool) -> None:
    large = read_config_values(LARGE[name])
    if fits(large, layout):
        pytest.skip("the large model cannot be cut so")
    small = proxy_config(large, layout, quantized=quantized)
    assert fits(small, layout) == []
    assert small.parameter_count() < 3_000_000 < 100 * 3_000_000 < large.parameter_count()
    degree = layout.tensor * layout.data
    assert small.vocab_size % degree == large.vocab_size % degree
    mine, its = (
        next(layer.mixer for layer in config.layers if isinstance(layer.mixer, Heads)) for config in (small, large)
    )
    assert (mine.kv_heads < layout.tensor) == (its.kv_heads < layout.tensor)
    assert (its.heads // its.kv_heads) % (mine.heads // mine.kv_heads) == 0
    for kept in ("family", "tie_word_embeddings", "norm_offset"):
        assert getattr(small, kept) == getattr(large, kept)
    sizes = {"heads", "kv_heads", "head_dim", "rope", "scale", "window", "key_heads", "key_dim", "value_dim"}
    differences = {f"mixer.{name}" for name in sizes} | {"feed.intermediate_size"}
    assert set(small.layers[0].differences(large.layers[0])) <= differences | {"per_layer_width"}
    assert {layer.mixer.sharing for layer in small.layers} == {layer.mixer.sharing for layer in large.layers}
    windows = {layer.mixer.window for layer in small.layers}
    assert {one is None for one in windows} == {layer.mixer.window is None for layer in large.layers}
    assert windows <= {None, WINDOW}
    # Files can say it: a base of adapters is written as a folder.
    assert read_config_values(config_values(small, torch_dtype="float32")) == small
    if quantized:
        assert small.hidden_size % (32 * layout.tensor) == 0
        assert small.layers[0].feed.intermediate_size % (32 * layout.tensor) == 0


def test_what_large_sizes_do_not_divide_by_small_ones_do_not_either() -> None:
    even = read_config_values({**LARGE["llama"], "vocab_size": 128256})
    odd = read_config_values(LARGE["llama"])
    layout = Layout(shard=2, tensor=2)
    assert [proxy_config(one, layout).vocab_size % 4 for one in (even, odd)] == [0, 1]


def recipe(folder: Path, **changes: Any) -> Recipe:
    return load(tiny_world().recipe(folder / "run", folder / "recipe.yaml", **changes)).recipe


def on_base(folder: Path, **changes: Any) -> Recipe:
    made = recipe(folder, **changes)
    return made.model_copy(update={"model": type(made.model)(path=str(tiny_world().base))})


def test_a_base_is_written_with_norms_that_differ(tmp_path: Path) -> None:
    given = on_base(tmp_path).model_copy(update={"adapter": None})
    small, config, _ = proxy_recipe(given, read_config_values(LARGE["llama"]), Layout(shard=2), tmp_path, 64)
    assert small.model.path == str(tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert model.config == config
    norms = [parameter for name, parameter in model.named_parameters() if name.endswith("norm.weight")]
    assert norms and all(len(norm.unique()) > 1 for norm in norms)


def test_a_reward_model_is_written_without_a_head_over_the_vocabulary(tmp_path: Path) -> None:
    config = replace(read_config(tiny_world().base), task="sequence-classification")
    write_model(config, tmp_path / "model", 0)
    assert load_model(tmp_path / "model").lm_head is None


def test_adapters_blocks_and_lengths_get_small(tmp_path: Path) -> None:
    adapter = {"kind": "lora", "rank": 64, "dropout": 0.1, "rank_pattern": {"q_proj": 32}}
    made = load(
        tiny_world().recipe(
            tmp_path / "run",
            tmp_path / "recipe.yaml",
            model=None,
            adapter=None,
            data={"max_length": 4096},
            optimizer={"kind": "adamw", "eps": 1e-8},
        ),
        [f"model={tiny_world().base}", f"adapter={adapter}", "quantization={kind: int8, group: 128}"],
    ).recipe
    small = proxy_recipe(made, read_config_values(LARGE["llama"]), Layout(tensor=2), tmp_path, 64)[0]
    assert small.adapter is not None and small.quantization is not None
    assert (small.adapter.rank, small.adapter.dropout, small.adapter.rank_pattern) == (4, 0.1, {"q_proj": 6})
    assert (small.quantization.kind, small.quantization.group) == ("int8", 16)
    assert (small.data.max_length, small.optimizer.eps) == (MAX_LENGTH, EPS)


def test_a_planned_recompute_has_something_to_plan(tmp_path: Path) -> None:
    given = recipe(tmp_path, memory={"recompute": {"kind": "planned", "budget": 8.0}}, batch={"micro": 2})
    for name in ("gemma2", "llama", "qwen3"):
        small, config, _ = proxy_recipe(given, read_config_values(LARGE[name]), Layout(shard=2), tmp_path, 64)
        budget, length = small.memory.recompute.budget, small.data.max_length
        assert budget is not None and length == 64
        model = build(config)
        initialize(model, 0)
        tokens, positions = torch.zeros(2 * length, dtype=torch.int64), torch.arange(length).repeat(2)
        attend = PackedAttention((0, length, 2 * length))
        costs = recompute_planner.measure_layers(model, tokens, positions, attend, torch.float32)
        costs = [replace(one, options=tuple(map(as_on_an_idle_machine, one.options))) for one in costs]
        kinds = {one.kind for one in recompute_choice.fastest_plan(costs, int(budget * 2**30))}
        assert "none" in kinds and len(kinds) > 1


def as_on_an_idle_machine(option: recompute_choice.Option) -> recompute_choice.Option:
    """The bytes as measured, but no seconds: on a machine with other work to do a layer takes any time."""
    return replace(option, time_s=float(KINDS.index(option.kind)))


def test_adapters_below_are_written_beside_the_small_base(tmp_path: Path) -> None:
    below = adapter_folder(tiny_world().base, tmp_path / "below", sections.Vera(rank=32))
    made = on_base(tmp_path)
    given = made.model_copy(update={"model": made.model.model_copy(update={"adapters": [str(below)]})})
    small, _, notes = proxy_recipe(given, read_config(tiny_world().base), Layout(shard=2), tmp_path, 64)
    assert small.model.adapters == [str(tmp_path / "adapters" / "0-below")]
    assert read_adapter_config(Path(small.model.adapters[0])).kind == "VERA"
    assert notes[-1].endswith("with numbers of their own: vera")


@pytest.mark.parametrize("section", [{"tokens": ["<plan>"]}, {}, None], ids=["new tokens", "tokens", "neither"])
def test_rows_of_single_tokens_are_trained_in_the_small_model_too(tmp_path: Path, section: Any) -> None:
    made = on_base(tmp_path)
    rows = {} if section is None else {"trainable_tokens": [] if section else ["a"]}
    given = made.model_copy(
        update={
            "model": made.model.model_copy(update=section or {}),
            "adapter": sections.Lora(**rows),
        }
    )
    small, config, notes = proxy_recipe(given, read_config(tiny_world().base), Layout(tensor=2), tmp_path, 64)
    trained = trained_tokens(small.model, small.adapter)
    wanted = [] if section is None else [1, config.vocab_size // 2, config.vocab_size - 1]
    assert trained == wanted
    assert any("rows of single tokens" in note for note in notes) == bool(wanted)


def test_updates_of_a_small_learning_rate_are_made_large_enough_to_see() -> None:
    raised, notes = proxy_optimizer(sections.AdamW(learning_rate=5e-7))
    assert raised.learning_rate == LEAST_RATE and "larger than rounding" in notes[-1]
    kept, notes = proxy_optimizer(sections.AdamW(learning_rate=3e-4, eps=EPS))
    assert kept.learning_rate == 3e-4 and notes == []


def rope_with(scaling: RopeScaling | None, temperature: QueryTemperature | None = None) -> Rope:
    return Rope(1e4, 16, 131072, scaling=scaling, temperature=temperature)


def test_rotations_by_length_are_trained_at_a_short_one() -> None:
    long = LongRopeScaling((1.0,) * 8, (4.0,) * 8, 4096, 32.0)
    small = rope_trained_at(rope_with(long), 24)
    assert (
        small.short_length == 24 and small.max_position_embeddings == 768 and isinstance(small.scaling, LongRopeScaling)
    )
    assert small.scaling.attention_scaling > 1 and small.scaling.long_factor == long.long_factor
    dynamic = rope_trained_at(rope_with(DynamicScaling(4.0)), 24)
    assert dynamic.short_length == dynamic.max_position_embeddings == 24
    assert rope_trained_at(rope_with(None), 24) == rope_with(None)
    turned = rope_trained_at(rope_with(None, QueryTemperature(0.1, 8192)), 24)
    assert turned.temperature == QueryTemperature(0.1, 24)


def test_a_small_model_is_trained_at_half_of_the_longest_documents() -> None:
    def pack(*lengths: int) -> Pack:
        return Pack(tuple(Sample(np.zeros(n, np.int32), np.ones(n, np.float32), "row") for n in lengths))

    assert trained_length([pack(10, 60, 20), pack(128), pack(40)]) == 30
    assert trained_length([pack(3)]) == 2


def test_stages_of_lengths_are_as_those_of_the_large_model() -> None:
    large = read_config_values({"vocab_size": 400, **CONFIG, "max_position_embeddings": 4096})
    section = sections.LongContext.model_validate(
        {"method": "dynamic", "stages": [{"length": 4096, "steps": 1}, {"length": 16384, "steps": 1}]}
    )
    scaled = with_long_context(large, section, 16384)
    small = proxy_config(scaled, Layout(), trained_length=24)
    stages = staged_ropes(scaled, small, ropes_by_length(large, section), 24)
    (first, second) = stages.values()
    assert [rope.scaling for rope in (*first, *second)] == [None, DynamicScaling(4.0)]
    assert second == small.ropes and second[0].short_length == 24
    keys = list(stages)
    assert len(keys) == 2 and max(keys) // min(keys) == 1, "as many packs in a micro-batch of each"
    assert staged_ropes(scaled, small, {}, 24) == {}
