"""Comparing how two configs of one model rotate queries and keys, and copying the rotation to another. No torch."""

from __future__ import annotations

from dataclasses import replace

from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.delta_spec import Delta
from danlu.models.layer_spec import LayerSpec


def with_rotation_of(config: ModelConfig, rotated: ModelConfig) -> ModelConfig:
    """The config with the rotary embedding of each layer, and the positions, that `rotated` has.

    Raises ModelError where the two differ in their layers otherwise, so that they cannot be of one model.
    """
    features = [[_rotated_features(layer) for layer in each.layers] for each in (config, rotated)]
    if features[0] != features[1]:
        raise ModelError(
            f"the rotary embedding of {len(rotated.layers)} layers of {rotated.family} does not fit the "
            f"{len(config.layers)} layers of {config.family}, or rotates other features: they are of different models"
        )
    ropes = iter([layer.mixer.rope for layer in rotated.layers])

    def changed(layer: LayerSpec) -> LayerSpec:
        mixer, rope = layer.mixer, next(ropes)
        return layer if isinstance(mixer, Delta) or rope is None else replace(layer, mixer=replace(mixer, rope=rope))

    return replace(config.with_layers(changed), max_position_embeddings=rotated.max_position_embeddings)


def same_rotation(first: ModelConfig, second: ModelConfig) -> bool:
    """Whether two configs of one model rotate queries and keys alike."""
    positions = first.max_position_embeddings == second.max_position_embeddings
    ropes = [[layer.mixer.rope for layer in config.layers] for config in (first, second)]
    return positions and ropes[0] == ropes[1]


def _rotated_features(layer: LayerSpec) -> tuple[type, int | None]:
    return type(layer.mixer), None if layer.mixer.rope is None else layer.mixer.rope.dim
