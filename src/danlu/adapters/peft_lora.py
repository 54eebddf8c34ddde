"""LoRA and DoRA in PEFT's words: the values of adapter_config.json and the tensors, there and back.

Two things need translating. PEFT sits on modules as Hugging Face folders have them, where q, k and v (or gate and up)
may be one: adapters of its parts are written as one of the sum of their ranks, block by block, and one of the whole is
read as one for each part. And an initialisation that took its start (A0, B0) out of the base is written as an ordinary
LoRA of twice the rank on the original base: W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]. One that PEFT wrote is read
the same way: as PEFT loads it, its `init_lora_weights` may take a start out of the base again.

O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from danlu.adapters import low_rank_init
from danlu.adapters.adapter_config import init_taken_from_base
from danlu.adapters.hf_layers import HFLayer, hf_layers
from danlu.adapters.lora import EmbeddingLowRank, LowRank
from danlu.adapters.peft_values import PREFIX, check_supported, finite_number, positive_int
from danlu.errors import ModelError
from danlu.recipe import sections
from danlu.types import Site

_FACTORS = {"lora_A.weight": "lora_A", "lora_B.weight": "lora_B"}
_MAGNITUDE = "lora_magnitude_vector"
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
# What PEFT's LoraConfig may say beyond what danlu computes: (key, values that change nothing).
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "fan_in_fan_out": (False, None),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False, None),
    "velora_config": (None,),
}
_BASE_LAYER = ".base_layer.weight"


@dataclass(frozen=True)
class Factors:
    """The adapter of one module of a Hugging Face folder."""

    a: Tensor  # [r, I]; of an embedding [r, V]
    b: Tensor  # [O, r]; of an embedding [D, r]
    scale: float
    magnitude: Tensor | None = None  # [O]
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def to_peft(
    section: sections.LowRank, modules: Mapping[str, nn.Module], sites: Sequence[Site]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of an adapter: `modules` by site name, `sites` all of the model's."""
    layers = hf_layers(sites)
    chosen = [layer for layer in layers if any(site.name in modules for site in layer.parts)]
    written = {layer.name: _joined(layer, modules) for layer in chosen}
    values, tensors = described(written, rslora=section.scaling == "rslora")
    values |= {
        "lora_dropout": section.dropout,
        "target_modules": target_modules(list(written), [layer.name for layer in layers]),
        "bias": {"none": "none", "all": "all", "adapted": "lora_only"}[section.bias],
        "use_dora": section.kind == "dora",
    }
    return values, tensors


def described(written: Mapping[str, Factors], *, rslora: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of factors by module name on disk; `target_modules` are their whole names."""
    power = 0.5 if rslora else 1.0
    ranks = {name: one.rank for name, one in written.items()}
    alphas = {name: _round(one.scale * one.rank**power) for name, one in written.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    tensors: dict[str, Tensor] = {}
    for name, one in written.items():
        keys = _EMBEDDING if one.embedding else tuple(_FACTORS)
        tensors |= {f"{PREFIX}{name}.{key}": value for key, value in zip(keys, (one.a, one.b), strict=True)}
        if one.magnitude is not None:
            tensors[f"{PREFIX}{name}.{_MAGNITUDE}"] = one.magnitude
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(written),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": rslora,
        "use_dora": False,
    }
    return values, tensors


def read_factors(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Factors], set[str]]:
    """What `described` wrote, with no model to compare it with; and the keys of `tensors` that it was.

    Raises ModelError for settings that danlu does not compute, and for tensors that are missing.
    """
    check_supported(values, _HARMLESS, where)
    _check_types(values, where)
    alpha, power = finite_number(values, "lora_alpha", 8.0, where), 0.5 if values.get("use_rslora") else 1.0
    factors: dict[str, Factors] = {}
    used: set[str] = set()
    for name, (keys, one) in _read(tensors, None, where).items():
        _check_rank(name, values, one.rank, where)
        scale = _alpha(name, values, alpha) / one.rank**power
        factors[name] = replace(one, scale=scale)
        used |= keys
    return factors, used


@torch.no_grad()
def for_original_base(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], weight: Callable[[str], Tensor | None], where: str
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Config values and tensors of an adapter as they are for the base as it is stored.

    An adapter whose start PEFT takes out of the base when it loads it becomes an ordinary LoRA of twice the rank; any
    other is given back as it is. An embedding keeps its rank: PEFT takes nothing out of it.

    weight: a module's weight [O, I] by its name on disk, in float32 or wider, or None where the model has no such
    layer; of a weight on the meta device only the shape is asked. Raises ModelError as `init_taken_from_base` does, and
    for factors that do not have the weight's shape.
    """
    init = init_taken_from_base(values, where)
    if init is None:
        return values, tensors
    _check_types(values, where)
    alpha, power = finite_number(values, "lora_alpha", 8.0, where), 0.5 if values.get("use_rslora") else 1.0
    rest = dict(tensors)
    written: dict[str, Factors] = {}
    for name, (keys, one) in _read(tensors, None, where).items():
        for key in keys:
            del rest[key]
        # A rank above the smaller side is cut to it by PEFT, which goes on to scale by the rank that was asked for.
        scale = _alpha(name, values, alpha) / _rank(name, values) ** power
        base = None if one.embedding else weight(name)
        if base is None:
            written[name] = replace(one, scale=scale)
            continue
        if (one.b.shape[0], one.a.shape[1]) != base.shape:
            raise ModelError(
                f"{where}: the factors of {name} make a [{one.b.shape[0]}, {one.a.shape[1]}] matrix, this model has "
                f"{list(base.shape)}: the adapter is of another base"
            )
        a, b = _start(init, base, one.rank, scale)
        if (stored := rest.get(f"{PREFIX}{name}{_BASE_LAYER}")) is not None and not base.is_meta:
            rest[f"{PREFIX}{name}{_BASE_LAYER}"] = stored.float().addmm(b, a, alpha=scale)
        written[name] = replace(one, a=torch.cat([one.a, a]), b=torch.cat([one.b, -b], dim=1), scale=scale)
    changed, made = described(written, rslora=bool(values.get("use_rslora")))
    kept = ("lora_dropout", "target_modules", "bias", "use_dora")
    return {**values, **{key: value for key, value in changed.items() if key not in kept}}, rest | made


def _start(init: str, weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 [r, I] and B0 [O, r], float32 on the CPU, as PEFT takes them out of a weight."""
    if weight.is_meta:
        return torch.zeros(rank, weight.shape[1]), torch.zeros(weight.shape[0], rank)
    if init == "pissa":
        start = low_rank_init.pissa(weight, rank, scale, iterations=None, generator=torch.Generator())
    else:
        start = low_rank_init.olora(weight, rank, scale)
    return start.a.to("cpu", torch.float32), start.b.to("cpu", torch.float32)


def from_peft(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], sites: Sequence[Site], where: str
) -> tuple[sections.LowRank, dict[str, dict[str, Tensor]], set[str]]:
    """The section, the values of each site's module by name, and the keys of `tensors` that they came from.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    check_supported(values, _HARMLESS, where)
    _check_types(values, where)
    layers = hf_layers(sites)
    found = _read(tensors, {layer.name for layer in layers}, where)
    by_site: dict[str, dict[str, Tensor]] = {}
    used: set[str] = set()
    ranks: dict[str, int] = {}
    for layer in layers:
        if layer.name not in found:
            continue
        keys, one = found[layer.name]
        used |= keys
        _check_shapes(layer, one, where)
        if not one.embedding and (one.magnitude is None) == bool(values.get("use_dora")):
            what = "is missing" if one.magnitude is None else "is there, though use_dora is not set"
            raise ModelError(f"{where}: {PREFIX}{layer.name}.{_MAGNITUDE} {what}: the two files are not of one adapter")
        _check_rank(layer.name, values, one.rank, where)
        for site, rows in layer.rows():
            ranks[site.name] = one.rank
            if one.embedding:
                by_site[site.name] = {"lora_embedding_A": one.a, "lora_embedding_B": one.b}
                continue
            by_site[site.name] = {"lora_A": one.a, "lora_B": one.b[rows]}
            if one.magnitude is not None:
                by_site[site.name][_MAGNITUDE] = one.magnitude[rows]
    rank, alpha = int(values.get("r", 8)), finite_number(values, "lora_alpha", 8.0, where)
    alphas = {site.name: _alpha(site.hf_name, values, alpha) for site in sites if site.name in by_site}
    common: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "dropout": finite_number(values, "lora_dropout", 0.0, where),
        "scaling": "rslora" if values.get("use_rslora") else "standard",
        "targets": list(by_site),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }
    return (sections.Dora if values.get("use_dora") else sections.Lora)(**common), by_site, used


def target_modules(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Ends of names that mean exactly the chosen modules, as PEFT matches them: `q_proj`, or whole names."""
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    meant = [name for name in every if name.rpartition(".")[2] in ends]
    return ends if set(meant) == set(chosen) else list(chosen)


@torch.no_grad()
def _joined(layer: HFLayer, modules: Mapping[str, nn.Module]) -> Factors:
    """One layer's adapter from those of its parts, the ranks one after the other."""
    own = {site.name: _factors(modules[site.name]) for site in layer.parts if site.name in modules}
    if len(layer.parts) == 1:
        return own[layer.parts[0].name]
    scale = max(one.scale for one in own.values())
    if any(one.magnitude is not None for one in own.values()) and len(own) < len(layer.parts):
        lacking = ", ".join(site.name for site in layer.parts if site.name not in own)
        raise ModelError(
            f"{layer.name}: DoRA on a part of what Hugging Face folders keep in one tensor cannot be written for PEFT; "
            f"{lacking} would need it too. Add it to adapter.targets"
        )
    a = torch.cat([one.a for one in own.values()])
    b = a.new_zeros(layer.shape[0], a.shape[0])
    column = 0
    for site, rows in layer.rows():
        if (one := own.get(site.name)) is not None:
            b[rows, column : column + one.rank] = one.b * (one.scale / scale)
            column += one.rank
    magnitudes = [one.magnitude for one in own.values() if one.magnitude is not None]
    return Factors(a, b, scale, torch.cat(magnitudes) if magnitudes else None)


def _factors(module: nn.Module) -> Factors:
    """A module's own factors, on the original base."""
    if isinstance(module, EmbeddingLowRank):
        return Factors(module.lora_embedding_A, module.lora_embedding_B, module.scale, embedding=True)
    assert isinstance(module, LowRank)
    a, b = module.lora_A.detach(), module.lora_B.detach()
    if module.initial_A is not None and module.initial_B is not None:
        a, b = torch.cat([a, module.initial_A]), torch.cat([b, -module.initial_B], dim=1)
    return Factors(a, b, module.scale, module.lora_magnitude_vector)


def _read(tensors: Mapping[str, Tensor], known: set[str] | None, where: str) -> dict[str, tuple[set[str], Factors]]:
    """Factors by module name on disk, and the keys they were read from; known: the model's modules, if there is one."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        for end in (*_FACTORS, _MAGNITUDE, *_EMBEDDING):
            if name.endswith(f".{end}"):
                module = name.removesuffix(f".{end}")
                if known is not None and module not in known:
                    raise ModelError(
                        f"{where}: {key} is for {module}, a layer that this model does not have: "
                        "the adapter is of another base"
                    )
                parts.setdefault(module, {})[end] = tensor
    found = {}
    for module, ends in parts.items():
        embedding = any(end in ends for end in _EMBEDDING)
        wanted = _EMBEDDING if embedding else tuple(_FACTORS)
        if lost := [end for end in wanted if end not in ends]:
            raise ModelError(f"{where}: {PREFIX}{module}.{lost[0]} is missing")
        keys = {f"{PREFIX}{module}.{end}" for end in ends}
        a, b = (ends[end].float() for end in wanted)
        found[module] = keys, Factors(a, b, 1.0, ends.get(_MAGNITUDE), embedding)
    if not found:
        raise ModelError(f"{where}: holds no tensor of an adapter")
    return found


def _check_shapes(layer: HFLayer, one: Factors, where: str) -> None:
    outputs, inputs = layer.shape
    wanted: dict[str, tuple[int, ...]]
    if one.embedding:
        wanted = {"lora_embedding_A": (one.rank, outputs), "lora_embedding_B": (inputs, one.rank)}
        found = {"lora_embedding_A": one.a, "lora_embedding_B": one.b}
    else:
        wanted = {"lora_A.weight": (one.rank, inputs), "lora_B.weight": (outputs, one.rank)}
        found = {"lora_A.weight": one.a, "lora_B.weight": one.b}
        if one.magnitude is not None:
            wanted[_MAGNITUDE], found[_MAGNITUDE] = (outputs,), one.magnitude
    for key, shape in wanted.items():
        if tuple(found[key].shape) != shape:
            raise ModelError(
                f"{where}: {PREFIX}{layer.name}.{key} is {list(found[key].shape)}, this model needs {list(shape)}: "
                "the adapter is of another base"
            )


def _check_types(values: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for settings that are not of PEFT's types."""

    for key, default in (("lora_alpha", 8.0), ("lora_dropout", 0.0)):
        finite_number(values, key, default, where)
    positive_int({"r": 8, **values}, "r", where)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = values.get(key) or {}
        if not isinstance(patterns, dict) or any(not _is_pattern(pattern) for pattern in patterns):
            raise ModelError(f"{where}: {key} is {patterns!r}; expected regular expressions with numbers")
        for pattern in patterns:
            if key == "rank_pattern":
                positive_int(patterns, pattern, f"{where}: {key}")
            else:
                finite_number(patterns, pattern, 0.0, f"{where}: {key}")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _check_rank(name: str, values: Mapping[str, Any], found: int, where: str) -> None:
    """The scale alpha / r is of the rank that the config says, so the two must agree, as PEFT asks too."""
    if (said := _rank(name, values)) != found:
        raise ModelError(
            f"{where}: the factors of {name} have rank {found}, its config says {said} (r and rank_pattern): the two "
            "files are not of one adapter"
        )


def _alpha(name: str, values: Mapping[str, Any], default: float) -> float:
    return float(_by_pattern(name, values.get("alpha_pattern"), default))


def _rank(name: str, values: Mapping[str, Any]) -> int:
    return int(_by_pattern(name, values.get("rank_pattern"), values.get("r", 8)))


def _by_pattern(name: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT matches them."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _round(alpha: float) -> float:
    """An alpha that went through a root comes back as the number it was."""
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-12) else alpha
