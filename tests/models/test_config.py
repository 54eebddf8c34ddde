from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from danlu.errors import ModelError
from danlu.models.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
    parameter_shapes,
)
from danlu.models.families import read_config_values
from danlu.models.loading import build


@pytest.fixture
def config(tiny_values: Callable[[str], dict[str, Any]]) -> ModelConfig:
    return read_config_values(tiny_values("qwen3"))


def test_predicted_parameters_are_those_of_the_model(hf_values: dict[str, Any]) -> None:
    config = read_config_values(hf_values)
    model = build(config, device="meta")
    assert [(name, tuple(one.shape)) for name, one in model.named_parameters()] == list(
        parameter_shapes(config).items()
    )
    assert config.parameter_count() == sum(one.numel() for one in model.parameters())
    other = replace(config, tie_word_embeddings=not config.tie_word_embeddings)
    assert other.parameter_count() != config.parameter_count()


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 100),
        (LinearScaling(4.0), 400),
        (DynamicScaling(2.5), 250),
        (Llama3Scaling(8.0, 1.0, 4.0, 25), 100),  # whose max_position_embeddings is the length after scaling
        (YarnScaling(4.0, 25), 100),
        (YarnScaling(4.0, 100), 400),  # left as it was before
        (YarnScaling(0.5, 100), 100),
    ],
    ids=str,
)
def test_the_context_is_what_a_scaling_makes_of_the_positions(
    config: ModelConfig, scaling: RopeScaling | None, context: int
) -> None:
    assert replace(config, max_position_embeddings=100, rope_scaling=scaling).context_length == context


def test_derived_values(config: ModelConfig) -> None:
    assert config.windows == (None, None, None)
    assert config.attention_scale == 0.25
    assert replace(config, query_pre_attn_scalar=64).attention_scale == 0.125
    assert replace(config, partial_rotary_factor=0.75).rotary_dim == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 key/value heads evenly"),
        ({"layers": 0, "windows": ()}, "layers is 0: it must be at least 1"),
        ({"windows": (None, 4)}, "2 attention windows are given for 3 layers"),
        ({"windows": (None, 0, 4)}, "a sliding window must be at least 1 token"),
        ({"partial_rotary_factor": 0.7}, "11 of head_dim 16 .partial_rotary_factor 0.7. is not a positive even number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: ModelConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(config, **change)
