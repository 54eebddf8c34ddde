from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.hf_config import read_config_values
from danlu.models.loading import build
from danlu.models.rope_config import DynamicScaling, LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling


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
    rope = Rope(10_000.0, 16, 100, scaling)
    config = replace(config, max_position_embeddings=100)
    config = config.with_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, rope=rope)))
    assert config.context_length == rope.context_length == context


def test_derived_values(config: ModelConfig) -> None:
    assert len(config.layers) == 3 and config.kinds == config.layers[:1]
    mixer = config.layers[0].mixer
    assert mixer.window is None and mixer.attention_scale == 0.25
    assert replace(mixer, scale=0.125).attention_scale == 0.125
    assert mixer.rope.dim == 16
    windowed = replace(config.layers[0], mixer=replace(mixer, window=3))
    mixed = replace(config, layers=(*config.layers, windowed))
    assert mixed.kinds == (config.layers[0], windowed) and len(mixed.ropes) == 1
    assert windowed.differences(config.layers[0]) == ["mixer.window"]
    assert mixed.largest_size == ("layers", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 key/value heads evenly"),
        ({"heads": 2**20 + 2}, "heads is 1,048,578: at most 1,048,576 can be built"),
        ({"window": 0}, "a sliding window must be at least 1 token"),
        ({"rope": Rope(10_000.0, 18, 64)}, "rotary embedding of 18 features does not fit a head of 16"),
    ],
)
def test_heads_that_do_not_fit_are_refused(config: ModelConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(config.layers[0].mixer, **change)


def test_sizes_that_do_not_fit_are_refused(config: ModelConfig) -> None:
    with pytest.raises(ModelError, match="layers is 0: it must be at least 1"):
        replace(config, layers=())
    with pytest.raises(ModelError, match="hidden_size is 0: it must be at least 1"):
        replace(config, hidden_size=0)
    with pytest.raises(ModelError, match="turns pairs of features: 11 features of a head is not a positive even"):
        Rope(10_000.0, 11, 64)
