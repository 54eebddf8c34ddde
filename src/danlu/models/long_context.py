"""A model's config with its rotary embedding scaled for more tokens than it was trained at. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES
from danlu.models.layer_spec import LayerSpec
from danlu.models.mixer_spec import Delta
from danlu.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    ntk_theta,
)
from danlu.recipe.sections import LongContext

_KEPT_BY_METHOD: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
}


def with_long_context(config: ModelConfig, section: LongContext | None, length: int) -> ModelConfig:
    """Returns the config scaled by `section` for documents of `length` tokens.

    The scaling is in transformers' form: NTK-aware, which has none of its own, is a larger rope_theta; linear and
    dynamic leave max_position_embeddings at the length before them, the others raise it to `length`. Layers with a
    window of attention keep their rotation where the family's layers may differ. Up to the length that the model was
    trained at nothing is scaled, except by LongRoPE, where factors also follow from each document's own length.

    Raises ModelError for a model that is scaled in another way already, for factors of another number of pairs, and for
    a family with a config.json that cannot express the method.
    """
    if section is None or section.method == "none":
        return config
    possible = FAMILIES[config.family].rope.scalings
    if section.method != "ntk" and section.method not in possible:
        raise ModelError(
            f"long_context.method: {section.method} is nothing that a {config.family} config.json could say. Use "
            f"{', '.join(('none', 'ntk', *(name for name in _KEPT_BY_METHOD if name in possible)))}"
        )
    ropes = [layer.mixer.rope for layer in _scaled_layers(config)]
    if not ropes:
        raise ModelError(f"long_context.method: {section.method}, but no layer of the model that sees all is rotated")
    original = section.original_length or original_length(config, section.method)
    by_rope = {rope: _scaled(rope, section, original, length) for rope in dict.fromkeys(ropes) if rope is not None}
    positions = max(rope.max_position_embeddings for rope in by_rope.values())

    def changed(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if isinstance(mixer, Delta) or mixer.rope is None:
            return layer
        rope = mixer.rope
        scaled = by_rope[rope] if _is_scaled(layer, config) else replace(rope, max_position_embeddings=positions)
        return replace(layer, mixer=replace(mixer, rope=scaled))

    return replace(config.with_layers(changed), max_position_embeddings=positions)


def original_length(config: ModelConfig, method: str) -> int:
    """Tokens that the model was trained at, by its config. Raises ModelError where another scaling than `method`'s
    stretched it already."""
    scalings = {
        layer.mixer.rope.scaling: None for layer in _scaled_layers(config) if layer.mixer.rope is not None
    }  # in order, each once
    for scaling in scalings:
        if scaling is None:
            continue
        if not isinstance(scaling, _KEPT_BY_METHOD.get(method, ())):
            raise ModelError(
                f"long_context.method: {method}, but the model's rotary embedding is scaled already ({scaling.kind}). "
                "Two scalings have no common form. Use its own method, or none, or a model from before it was scaled"
            )
        if isinstance(scaling, YarnScaling | LongRopeScaling):
            return scaling.original_max_position_embeddings
    return config.max_position_embeddings


def ropes_by_length(config: ModelConfig, section: LongContext | None) -> dict[int, tuple[Rope, ...]]:
    """The rotary embeddings of each stage of lengths, in the order of `ropes` of the config for the longest stage.

    config: before scaling. Empty where there are no stages. Raises ModelError where stages would scale scores
    differently (`YarnScaling.score_scale`): a model has one scale of scores, not one for each stage.
    """
    if section is None or not section.stages:
        return {}
    longest = with_long_context(config, section, max(stage.length for stage in section.stages))
    by_length = {}
    for length in dict.fromkeys(stage.length for stage in section.stages):
        staged = with_long_context(config, section, length)
        if _score_scales(staged) != _score_scales(longest):
            raise ModelError(
                f"long_context.stages: at {length:,} tokens the model's mscale_all_dim would scale scores in another "
                "way than at the longest length, and a run has one scale. Train each length in a run of its own"
            )
        pairs = zip(longest.layers, staged.layers, strict=True)
        own = {at_last.mixer.rope: now.mixer.rope for at_last, now in pairs}
        by_length[length] = tuple(rope for last in longest.ropes if (rope := own[last]) is not None)
    return by_length


def _scaled(rope: Rope, section: LongContext, original: int, length: int) -> Rope:
    """The rotary embedding for documents of `length` tokens, of a model that was trained at `original`."""
    factor = length / original
    if section.method == "longrope":
        pairs = rope.dim // 2
        # Until they are searched, those of linear scaling: sizes do not depend on them.
        long = tuple(section.long_factor or (max(factor, 1.0),) * pairs)
        short = tuple(section.short_factor or (1.0,) * pairs)
        for name, factors in (("long_factor", long), ("short_factor", short)):
            if len(factors) != pairs:
                raise ModelError(
                    f"long_context.{name}: {len(factors)} factors, and the model's {rope.dim} rotated features of a "
                    f"head are {pairs} pairs: give {pairs}, the fastest first"
                )
        longrope = LongRopeScaling(short, long, original, max(factor, 1.0))
        return replace(rope, max_position_embeddings=max(length, original), scaling=longrope)
    if factor <= 1:
        return replace(rope, max_position_embeddings=original, scaling=None)
    match section.method:
        case "linear":
            return replace(rope, max_position_embeddings=original, scaling=LinearScaling(factor))
        case "dynamic":
            return replace(rope, max_position_embeddings=original, scaling=DynamicScaling(factor))
        case "ntk":
            theta = ntk_theta(rope.theta, rope.dim, factor)
            return replace(rope, theta=theta, max_position_embeddings=length)
        case "yarn":
            yarn = rope.scaling if isinstance(rope.scaling, YarnScaling) else YarnScaling(factor, original)
            is_same = (yarn.factor, yarn.original_max_position_embeddings) == (factor, original)
            # The attention factor of a config is that of its own stretch: of another it follows from the new factor.
            attention_factor = yarn.attention_factor if is_same else None
            yarn = replace(
                yarn, factor=factor, original_max_position_embeddings=original, attention_factor=attention_factor
            )
            temperature = rope.temperature and replace(rope.temperature, length=original)  # which have one key
            return replace(rope, max_position_embeddings=length, scaling=yarn, temperature=temperature)
        case _:
            raise AssertionError(f"no method {section.method}")


def _score_scales(config: ModelConfig) -> list[float]:
    return [layer.mixer.attention_scale for layer in config.layers if not isinstance(layer.mixer, Delta)]


def _scaled_layers(config: ModelConfig) -> Sequence[LayerSpec]:
    return [layer for layer in config.layers if layer.mixer.rope is not None and _is_scaled(layer, config)]


def _is_scaled(layer: LayerSpec, config: ModelConfig) -> bool:
    """A window bounds how far a query sees, so its rotation needs no scaling; but most families have one for all."""
    return layer.mixer.window is None or not FAMILIES[config.family].ropes_differ
