"""Rotary settings of a config.json, both ways: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5)."""

from __future__ import annotations

import math
import sys
from dataclasses import MISSING, asdict, fields
from typing import Any

from danlu.errors import ModelError
from danlu.models.hf_values import HFValues
from danlu.models.rope_config import DynamicScaling, LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling

SCALINGS: dict[str, type[RopeScaling]] = {
    scaling.kind: scaling for scaling in (DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling)
}
# Read elsewhere, or notes of whoever made the file that change nothing.
_NOT_OF_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
_DEFAULT_THETA = 10_000.0


def read_rope(values: HFValues, head_dim: int, *, scalings: tuple[str, ...]) -> Rope:
    """The rotary settings of `values`, for heads of `head_dim` features.

    Raises ModelError for a scaling the family cannot have or danlu does not know, and for a share of a head that cannot
    be rotated.
    """
    longest = values.integer("max_position_embeddings")
    key = "rope_scaling" if "rope_scaling" in values else "rope_parameters"
    rope = HFValues(values.section(key), {}, f"{values.where}: {key}")
    if any(isinstance(rope.raw(layer_type), dict) for layer_type in ("full_attention", "sliding_attention")):
        raise values.error(key, "different rotary embeddings for different layers are not supported")
    source = rope if "rope_theta" in rope else values
    theta = source.number("rope_theta") if "rope_theta" in source else _DEFAULT_THETA
    source = rope if "partial_rotary_factor" in rope else values
    share = source.number("partial_rotary_factor") if "partial_rotary_factor" in source else 1.0
    if theta <= 1 or not 0 < share <= 1:
        raise values.error(key, f"rope_theta {theta} must be above 1 and partial_rotary_factor {share} in (0, 1]")
    kind = rope.text("rope_type") if "rope_type" in rope else rope.text("type") if "type" in rope else "default"
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"rotary embedding turns pairs of features, but {dim} of head_dim {head_dim} "
            f"(partial_rotary_factor {share}) is not a positive even number"
        )
    if kind == "default":
        return Rope(theta, dim, longest)
    if kind not in scalings:
        supported = ", ".join(("default", *scalings))
        raise values.error(key, f"rotary scaling {kind!r} is not supported for this family; supported: {supported}")
    trained = values.optional_integer("original_max_position_embeddings") or longest
    return Rope(theta, dim, longest, _read_scaling(rope, SCALINGS[kind], trained, longest))


def _read_scaling(rope: HFValues, scaling: type[RopeScaling], trained: int, longest: int) -> RopeScaling:
    known = {field.name: field for field in fields(scaling)}
    given = {name: rope.raw(name) for name in known if name in rope}
    if "original_max_position_embeddings" in known:
        trained = given.setdefault("original_max_position_embeddings", trained)
    if scaling is YarnScaling and "factor" not in given and isinstance(trained, int) and trained > 0:
        given["factor"] = longest / trained
    problems = [f"{name} is missing" for name, field in known.items() if name not in given and field.default is MISSING]
    for name, value in given.items():
        if name == "truncate":
            fits = isinstance(value, bool)
        elif name == "original_max_position_embeddings":
            fits = isinstance(value, int) and value > 0
        else:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
            # Within what a float64 holds, and a factor that can be divided by.
            fits = fits and abs(value) <= sys.float_info.max and (name != "factor" or value > 0)
            given[name] = float(value) if fits else value
        if not fits:
            problems.append(f"{name} is {value!r}, which it cannot be")
    # An attribute of another scaling is ignored, as transformers does; an unknown one may change the numbers.
    known_keys = set(known).union(*({field.name for field in fields(kind)} for kind in SCALINGS.values()))
    unknown = sorted(set(rope.keys()) - known_keys - _NOT_OF_SCALING)
    if unknown:
        problems.append(f"unknown settings: {', '.join(unknown)}")
    if problems:
        raise ModelError(f"{rope.where}: {scaling.kind}: " + "; ".join(problems))
    return scaling(**given)


def write_rope(rope: Rope, head_dim: int) -> dict[str, Any]:
    """The older form, which transformers 4 and 5, vLLM and llama.cpp all read."""
    written: dict[str, Any] = {"rope_theta": rope.theta}  # without `rope_scaling: null`, at which transformers 5 warns
    scaling = rope.scaling
    if rope.dim != head_dim:
        share = rope.dim / head_dim
        # Readers take the whole part of head_dim times this.
        written["partial_rotary_factor"] = share if int(head_dim * share) == rope.dim else math.nextafter(share, 1.0)
    if scaling is not None:
        defaults = {field.name: field.default for field in fields(scaling)}
        settings = {name: value for name, value in asdict(scaling).items() if value != defaults[name]}
        written["rope_scaling"] = {"rope_type": scaling.kind, **settings}
    return written
