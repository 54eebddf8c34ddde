"""Configs of small decoders, from the fields of their parts by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Dense, LayerSpec
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.rope_config import Rope, RopeScaling

SMALL: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
}


def small_config(
    *,
    layers: int = 2,
    windows: tuple[int | None, ...] = (),
    mixer: type[Heads | Latent | Factorized] = Heads,
    rope_scaling: RopeScaling | None = None,
    rope_theta: float = 10_000.0,
    deltas: tuple[int, ...] = (),
    **changes: Any,
) -> ModelConfig:
    """A Llama of two layers of width 32 with 4 query heads of width 8 on 2 key/value heads.

    windows: of each layer; by default none has one. mixer: of all layers, the latent one with 4 rotated features.
    deltas: layers that have linear attention. changes: fields of ModelConfig, LayerSpec, the mixer and Dense.
    """
    values = SMALL | changes
    rotated = 4 if mixer is Latent else values["head_dim"]
    rope = Rope(rope_theta, rotated, values["max_position_embeddings"], rope_scaling)
    parts = (ModelConfig, LayerSpec, Heads, mixer, Dense)
    of_part = {part: {field.name for field in fields(part)} for part in parts}
    unknown = values.keys() - set().union(*of_part.values())
    assert not unknown, f"no part of a config has {unknown}"

    def given(part: type) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in of_part[part]}

    feed = Dense(**given(Dense))
    if mixer is Heads:
        mixers: list[Any] = [Heads(**given(Heads), rope=rope, window=each) for each in windows or (None,) * layers]
    else:
        mixers = [mixer(**given(mixer), rope=rope)] * layers
    specs = tuple(LayerSpec(each, feed, **given(LayerSpec)) for each in mixers)
    specs = tuple(
        replace(spec, mixer=Delta(heads=4, key_heads=2, key_dim=8, value_dim=6)) if number in deltas else spec
        for number, spec in enumerate(specs)
    )
    return ModelConfig(**given(ModelConfig), layers=specs)
