"""Rotary settings of a config.json, both ways: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from danlu.core.errors import ModelError
from danlu.models.hf_values import HFValues
from danlu.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryTemperature,
    Rope,
    RopeScaling,
    YarnScaling,
    ntk_theta,
)

SCALINGS: dict[str, type[RopeScaling]] = {
    scaling.kind: scaling
    for scaling in (
        DynamicScaling,
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        ProportionalScaling,
        YarnScaling,
    )
}
# Read elsewhere, or notes of whoever made the file that change nothing.
_NOT_OF_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned", "max_position_embeddings"}
_NOT_OF_SCALING |= {"mrope_section", "mrope_interleaved", "attn_factor"}
_TYPES = ("full_attention", "sliding_attention")
_TEMPERATURE = "llama_4_scaling_beta"
_ORIGINAL = "original_max_position_embeddings"
_MSCALES = {"short_mscale", "long_mscale"}
_POSITIVE = ("factor", "beta_fast", "beta_slow")
"""Settings that are divided by, or have a logarithm."""


@dataclass(frozen=True)
class RopeRules:
    """The rotary settings that a family may have, and its defaults for those that are not given."""

    scalings: tuple[str, ...] = ("linear", "dynamic", "llama3", "yarn", "longrope")
    theta: float = 10_000.0
    has_temperature: bool = False
    """Whether queries may grow with their position (`llama_4_scaling_beta`)."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Other names of scalings that folders of the family have: (name, the scaling's)."""
    rotates_part: bool = False
    """Whether transformers rotates a part of a head where a config says so (`partial_rotary_factor`)."""
    has_alpha: bool = False
    """Whether "dynamic" with an `alpha` stands for a base that is fixed, theta alpha^(R / (R - 2)) (Hunyuan)."""
    has_mscales: bool = False
    """Whether LongRoPE has a factor of cos and sin for short documents, and one for long ones."""
    dim_key: str | None = None
    """The key by which published folders say how many features of a head are rotated, in place of their share."""


def read_rope(values: HFValues, head_dim: int, rules: RopeRules) -> Rope:
    """The rotary settings of `values`, for heads of `head_dim` features.

    Raises ModelError for a scaling the family cannot have or danlu does not know, and for a share of a head that cannot
    be rotated.
    """
    key = "rope_scaling" if values.section("rope_scaling") else "rope_parameters"  # an empty one counts as absent
    rope = HFValues(values.section(key), {}, f"{values.where}: {key}")
    if _is_by_type(rope):
        raise values.error(key, "this family has the same rotary embedding in every layer")
    return _read(values, rope, head_dim, rules, ("rope_theta", key), values.optional_integer(_ORIGINAL))


def read_ropes_by_type(
    values: HFValues, head_dim: int | Mapping[str, int], rules: RopeRules, *, local_theta: tuple[str, float]
) -> dict[str, Rope]:
    """Returns the rotary settings of each type of attention layer, `full_attention` and `sliding_attention`.

    head_dim: of all layers, or of the layers of each type.

    They are in `rope_parameters`, by type (transformers 5); or, as transformers 4 wrote them, `rope_theta` and
    `rope_scaling` belong to `full_attention`, and `sliding_attention` has only a theta. Where a config has both forms,
    `rope_scaling` overrides `rope_parameters`. local_theta: the key of that theta, and its default. Raises as
    `read_rope`.
    """
    by_type = HFValues(values.section("rope_parameters"), {}, f"{values.where}: rope_parameters")
    if by_type.keys() and not _is_by_type(by_type):
        raise values.error("rope_parameters", f"expected settings for each of {' and '.join(_TYPES)}")
    ropes = {}
    for layer_type in _TYPES:
        of_type, theta_key = rules, "rope_theta"
        if layer_type == "sliding_attention":
            of_type, theta_key = replace(rules, theta=local_theta[1]), local_theta[0]
        where = f"rope_parameters: {layer_type}" if by_type.keys() else "rope_scaling"
        scaling = values.section("rope_scaling") if layer_type == "full_attention" else {}
        rope = HFValues({**by_type.section(layer_type), **scaling}, {}, f"{values.where}: {where}")
        if rope.raw("truncate") is False:
            raise rope.error(
                "truncate", "transformers does not apply it in a family that may rotate layers differently"
            )
        width = head_dim if isinstance(head_dim, int) else head_dim[layer_type]
        ropes[layer_type] = _read(values, rope, width, of_type, (theta_key, where), None)
    return ropes


def _is_by_type(rope: HFValues) -> bool:
    return any(isinstance(rope.raw(layer_type), dict) for layer_type in _TYPES)


def _read(
    values: HFValues, rope: HFValues, head_dim: int, rules: RopeRules, keys: tuple[str, str], original: int | None
) -> Rope:
    """Returns the embedding that `rope` describes, with missing keys taken from `values`.

    keys: the key of theta in `values`, and the key of `rope`, for messages. original: the length before scaling, where
    `rope` does not have it.
    """
    longest = values.integer("max_position_embeddings")
    theta_key, key = keys
    if "rope_theta" in rope:
        theta = rope.number("rope_theta")
    else:
        theta = values.number(theta_key) if theta_key in values else rules.theta
    kind = rope.text("rope_type") if "rope_type" in rope else rope.text("type") if "type" in rope else "default"
    kind = dict(rules.aliases).get(kind, kind)
    share = 1.0 if kind == ProportionalScaling.kind else _read_share(values, rope, head_dim, rules)
    if theta <= 1 or not 0 < share <= 1:
        raise values.error(key, f"rope_theta {theta} must be above 1 and partial_rotary_factor {share} in (0, 1]")
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise ModelError(
            f"rotary embedding turns pairs of features, but {dim} of head_dim {head_dim} "
            f"(partial_rotary_factor {share}) is not a positive even number"
        )
    if rules.has_alpha and kind == "dynamic" and rope.raw("alpha"):
        # Written as the theta that it comes to, which all programs read alike.
        alpha = rope.number("alpha")
        if alpha <= 0:
            raise values.error(key, f"alpha {alpha:g} must be above 0")
        theta, kind = ntk_theta(theta, dim, alpha), "default"
    if kind == "default":
        temperature = _read_temperature(rope, rules, original, longest)
        return Rope(theta, dim, longest, None, temperature, _read_sections(rope))
    if kind not in rules.scalings:
        supported = ", ".join(("default", *rules.scalings))
        raise values.error(key, f"rotary scaling {kind!r} is not supported for this family; supported: {supported}")
    known = {_TEMPERATURE} if rules.has_temperature else set[str]()
    known |= _MSCALES if rules.has_mscales else set()
    scaling = _read_scaling(rope, SCALINGS[kind], original, longest, known)
    if isinstance(scaling, LongRopeScaling):
        _check_factors(rope, scaling, dim)
    temperature = _read_temperature(rope, rules, original, longest)
    return Rope(theta, dim, longest, scaling, temperature, _read_sections(rope))


def _read_share(values: HFValues, rope: HFValues, head_dim: int, rules: RopeRules) -> float:
    """The share of a head that is rotated: as `rope` has it, else `values`, else by the family's own key."""
    source = rope if "partial_rotary_factor" in rope else values
    if "partial_rotary_factor" in source:
        share = source.number("partial_rotary_factor")
        if share != 1 and not rules.rotates_part:
            raise source.error(
                "partial_rotary_factor", "transformers reads it for this family and rotates the whole head all the same"
            )
        return share
    if rules.dim_key is not None and rules.dim_key in values:
        return values.integer(rules.dim_key) / head_dim
    return 1.0


def _read_sections(rope: HFValues) -> tuple[int, ...]:
    sections = rope.raw("mrope_section") or []
    if not isinstance(sections, list) or any(not isinstance(each, int) for each in sections):
        raise rope.error("mrope_section", f"expected a list of numbers of pairs, found {sections!r}")
    if sections and not rope.flag("mrope_interleaved"):
        raise rope.error("mrope_section", "is supported with mrope_interleaved: true, as transformers computes it")
    return tuple(sections)


def _read_temperature(rope: HFValues, rules: RopeRules, original: int | None, longest: int) -> QueryTemperature | None:
    if not rules.has_temperature or _TEMPERATURE not in rope:
        return None
    length = original or rope.optional_integer(_ORIGINAL) or longest
    if length < 1:
        raise rope.error(_ORIGINAL, f"{length} is no length")
    return QueryTemperature(rope.number(_TEMPERATURE), length)


def _read_scaling(
    rope: HFValues, scaling: type[RopeScaling], original: int | None, longest: int, known_besides: set[str]
) -> RopeScaling:
    """original: a length before scaling that stands next to `rope`, and takes precedence over the one in it."""
    known = {field.name: field for field in fields(scaling) if field.name not in _MSCALES - known_besides}
    given = {name: rope.raw(name) for name in known if name in rope}
    if _ORIGINAL in known:
        given[_ORIGINAL] = original or given.get(_ORIGINAL, longest)
    trained = given.get(_ORIGINAL)
    if scaling in (YarnScaling, LongRopeScaling) and "factor" not in given and isinstance(trained, int) and trained > 0:
        given["factor"] = longest / trained
    problems = [f"{name} is missing" for name, field in known.items() if name not in given and field.default is MISSING]
    problems += [f"{name} is missing" for name in sorted(_MSCALES & known.keys() - given.keys())]
    for name, value in given.items():
        if name == "truncate":
            fits = isinstance(value, bool)
        elif name == _ORIGINAL:
            fits = isinstance(value, int) and value > 0
        elif name in ("short_factor", "long_factor"):
            fits = isinstance(value, list) and all(_is_number(factor) and factor > 0 for factor in value)
            given[name] = tuple(map(float, value)) if fits else value
        else:
            fits = _is_number(value) and (name not in _POSITIVE or value > 0)
            given[name] = float(value) if fits else value
        if not fits:
            problems.append(f"{name} is {value!r}, which it cannot be")
    # An attribute of another scaling is ignored, as transformers does; an unknown one may change the numbers.
    known_keys = set(known).union(*({field.name for field in fields(kind)} for kind in SCALINGS.values()))
    unknown = sorted(set(rope.keys()) - (known_keys - _MSCALES) - _NOT_OF_SCALING - known_besides)
    if unknown:
        problems.append(f"unknown settings: {', '.join(unknown)}")
    if problems:
        raise ModelError(f"{rope.where}: {scaling.kind}: " + "; ".join(problems))
    return scaling(**given)


def ignored_rope_settings(values: Mapping[str, Any]) -> list[str]:
    """Returns warnings about rotary settings of a config.json that transformers and danlu ignore."""
    remarks = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if isinstance(rope, dict) and rope.get("attn_factor") is not None:
            own = YarnScaling(float(rope.get("factor") or 1.0), 1).attention_scaling
            remarks.append(
                f"{key}: attn_factor {rope['attn_factor']:g} is ignored, as transformers does: its key is "
                f"attention_factor. Queries and keys are scaled by {own:.4f}. vLLM multiplies that by attn_factor, and "
                "computes another model of the same folder. The config.json of the result has no attn_factor"
            )
    return remarks


def _check_factors(rope: HFValues, scaling: LongRopeScaling, dim: int) -> None:
    """Raises ModelError for factors of another number of pairs than `dim` rotated features are."""
    for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
        if len(factors) != dim // 2:
            raise ModelError(
                f"{rope.where}: {name} has {len(factors)} factors, and {dim} rotated features of a head are "
                f"{dim // 2} pairs: give a factor for each"
            )


def _is_number(value: Any) -> bool:
    """Whether the value is a number that a float64 holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


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
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        written["rope_scaling"] = {"rope_type": scaling.kind, **settings}
    if rope.temperature is not None:
        length = {_ORIGINAL: rope.temperature.length, _TEMPERATURE: rope.temperature.beta}
        written["rope_scaling"] = {"rope_type": "default", **written.get("rope_scaling", {}), **length}
    if rope.sections:
        sections = {"mrope_section": list(rope.sections), "mrope_interleaved": True}
        written["rope_scaling"] = {"rope_type": "default", **written.get("rope_scaling", {}), **sections}
    return written


def write_rope_parameters(rope: Rope, head_dim: int) -> dict[str, Any]:
    """One object with all of it, as transformers 5 has it in `rope_parameters`."""
    written = write_rope(rope, head_dim)
    return {"rope_type": "default", **written.pop("rope_scaling", {}), **written}
