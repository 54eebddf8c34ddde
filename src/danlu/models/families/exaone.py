"""EXAONE 4: norms behind each half, and layers that see everything without rotation where others have a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import Family
from danlu.models.families.layer_keys import interval_of, layer_types_of, one_window, windows_by_type, with_windows
from danlu.models.families.olmo import POST_NORM_MODULES
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec


def read_exaone4(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    windows = _windows(hf, layers)
    plain = replace(plain, norms="post")
    rotated: tuple[LayerSpec, ...] = with_windows(plain, windows, qk_norm="head")["layers"]
    if "sliding_window" not in hf:
        return {"layers": rotated}
    # The key alone says it: where some layers may have a window, the others are not rotated.
    unrotated = [
        layer if layer.mixer.window else replace(layer, mixer=replace(layer.attention, rope=None)) for layer in rotated
    ]
    return {"layers": tuple(unrotated)}


def _windows(hf: HFValues, layers: int) -> Sequence[int | None]:
    if "layer_types" in hf:
        return windows_by_type(hf, layers)
    window = hf.optional_integer("sliding_window")
    if window is None:
        return [None] * layers
    if isinstance(pattern := hf.raw("sliding_window_pattern"), str):
        raise hf.error(
            "sliding_window_pattern", f"{pattern!r} is not read without layer_types, which name the type of each layer"
        )
    every = interval_of(hf, "sliding_window_pattern")
    return [window if (layer + 1) % every else None for layer in range(layers)]


def write_exaone4(config: ModelConfig) -> dict[str, Any]:
    window = one_window(config)
    if window is None and not config.ropes:  # the key also says that layers without a window are not rotated
        window = config.max_position_embeddings
    return {"sliding_window": window, "sliding_window_pattern": None, "layer_types": layer_types_of(config)}


FAMILIES: dict[str, Family] = {
    "exaone4": Family(
        architecture="Exaone4",
        read=read_exaone4,
        write=write_exaone4,
        modules=POST_NORM_MODULES,
        defaults={
            "bos_token_id": 0,
            "eos_token_id": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
}
