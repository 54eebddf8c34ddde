"""LoRA and DoRA in PEFT's format: to the values of adapter_config.json and the tensors, and back.

Two things need translating. PEFT adapts modules as Hugging Face folders have them, where q, k and v (or gate and up)
may be one: adapters of its parts are written as one with the sum of their ranks, with B block by block, and one of the
whole is read as one for each part. And where an initialisation subtracted its factors A0, B0 from the base, the adapter
is written as an ordinary LoRA of twice the rank on the original base: W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]. One
that PEFT wrote is read the same way: when PEFT loads it, its `init_lora_weights` may subtract such factors from the
base again.

Names and orders of stacked parameters, which differ, are in `peft_stacked`.

O, I outputs and inputs of a layer · r rank · E experts
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
from danlu.adapters.hf_layers import HFLayer, adapted_layers, hf_layers
from danlu.adapters.lora import EmbeddingLowRank, GroupedLowRank, LowRank
from danlu.adapters.peft_stacked import check_target_parameters, stacked_tensors, unstacked, wrapped_parameter
from danlu.adapters.peft_values import (
    PREFIX,
    ModuleValues,
    PeftContent,
    PeftReader,
    is_taken_for_experts,
    target_modules,
    target_parameters,
    target_weights,
)
from danlu.adapters.targets import value_by_pattern
from danlu.core.errors import ModelError
from danlu.core.layer_types import Site
from danlu.recipe import sections

_FACTORS = ("lora_A.weight", "lora_B.weight")
_MAGNITUDE = "lora_magnitude_vector"
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
# Settings of PEFT's LoraConfig that danlu does not compute: (key, values that change nothing).
HARMLESS: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "fan_in_fan_out": (False, None),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False, None),
    "velora_config": (None,),
}
_BASE_LAYER = ".base_layer.weight"


@dataclass(frozen=True)
class Factors:
    """The adapter of one module of a Hugging Face folder, or of one stacked parameter."""

    a: Tensor  # [r, I]; of an embedding [r, V]; of experts [E, r, I]
    b: Tensor  # [O, r]; of an embedding [D, r]; of experts [E, O, r]
    scale: float
    magnitude: Tensor | None = None  # [O]
    embedding: bool = False

    @property
    def rank(self) -> int:
        """The rank r of A and B."""
        return self.a.shape[-2]

    @property
    def stacked(self) -> bool:
        """Whether the factors are those of the matrices of all experts."""
        return self.a.ndim == 3


def to_peft(section: sections.LowRank, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by site name; sites: all of the model's."""
    by_module = {layer.name: _layer_factors(layer, modules) for layer in adapted_layers(modules, sites)}
    values, tensors = peft_of_factors(by_module, rslora=section.scaling == "rslora")
    weights = {site.name for site in sites if site.name in modules and is_taken_for_experts(site, sites)}
    parameters = target_parameters(modules, sites) + target_weights(weights, sites)
    for layer in adapted_layers(weights, sites):
        for patterns in (values["rank_pattern"], values["alpha_pattern"]):
            if layer.name in patterns:  # PEFT matches it with the parameter's name, danlu with the module's
                patterns[f"{layer.name}.weight"] = patterns[layer.name]
    values |= {
        "lora_dropout": 0.0 if parameters else section.dropout,  # PEFT loads no other together with `target_parameters`
        "target_modules": target_modules([name for name in modules if name not in weights], sites),
        "target_parameters": parameters or None,
        "bias": {"none": "none", "all": "all", "adapted": "lora_only"}[section.bias],
        "use_dora": section.kind == "dora",
    }
    if isinstance(section, sections.QaLora):
        values |= {"use_qalora": True, "qalora_group_size": section.group}
    return values, tensors


def peft_of_factors(by_module: Mapping[str, Factors], *, rslora: bool = False) -> PeftContent:
    """Values of adapter_config.json, and tensors by name, of factors by the module's name in Hugging Face folders.

    `target_modules` and `target_parameters` are whole names.
    """
    power = 0.5 if rslora else 1.0
    ranks = {name: factors.rank for name, factors in by_module.items()}
    alphas = {name: _round(factors.scale * factors.rank**power) for name, factors in by_module.items()}
    # The most frequent rank and alpha become `r` and `lora_alpha`; the others are patterns.
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    tensors: dict[str, Tensor] = {}
    stacked = {name: (factors.a, factors.b) for name, factors in by_module.items() if factors.stacked}
    for name, factors in by_module.items():
        if name not in stacked:
            tensors |= {f"{PREFIX}{name}.{key}": tensor for key, tensor in _named_tensors(factors).items()}
    values = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": [name for name in by_module if name not in stacked],
        "target_parameters": list(stacked) or None,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": rslora,
        "use_dora": False,
    }
    return values, tensors | stacked_tensors(stacked)


def read_factors(reader: PeftReader) -> dict[str, Factors]:
    """Reads the output of `peft_of_factors`, without a model: factors by module. Rows of single tokens stay unread.

    Raises ModelError for settings that danlu does not compute, and for tensors that are missing.
    """
    reader.check_supported(HARMLESS)
    _check_types(reader)
    power = 0.5 if reader.values.get("use_rslora") else 1.0
    factors = _read(reader)
    for name, unscaled in factors.items():
        _check_rank(name, reader, unscaled.rank)
        factors[name] = replace(unscaled, scale=_alpha(name, reader) / unscaled.rank**power)
    return factors


@torch.no_grad()
def for_original_base(reader: PeftReader, weight: Callable[[str], Tensor | None]) -> PeftReader:
    """Config values and tensors of an adapter, converted to the base as it is stored.

    Where PEFT subtracts initial factors from the base as it loads the adapter, it becomes an ordinary LoRA of twice the
    rank; any other adapter is returned unchanged. An embedding keeps its rank: PEFT subtracts nothing from it.

    weight: from a module's name in Hugging Face folders to its weight [O, I], in float32 or wider, or None where the
    model has no such layer; of a weight on the meta device only the shape is used. Raises ModelError as
    `init_taken_from_base` does, and for factors that do not have the weight's shape.
    """
    values, where = reader.values, reader.where
    init = init_taken_from_base(values, where)
    if init is None:
        return reader
    _check_types(reader)
    power = 0.5 if values.get("use_rslora") else 1.0
    by_module = _read(reader)
    rest = {key: tensor for key, tensor in reader.tensors.items() if key not in reader.used}
    for name, factors in by_module.items():
        if factors.stacked:
            raise ModelError(
                f"{where}: init_lora_weights is {init!r}, which PEFT does not compute for stacked parameters ({name})"
            )
        # A rank above the smaller side is cut to it by PEFT, which goes on to scale by the rank that was asked for.
        scale = _alpha(name, reader) / _rank(name, reader) ** power
        base = None if factors.embedding else weight(name)
        if base is None:
            by_module[name] = replace(factors, scale=scale)
            continue
        if (factors.b.shape[0], factors.a.shape[1]) != base.shape:
            raise ModelError(
                f"{where}: the factors of {name} make a [{factors.b.shape[0]}, {factors.a.shape[1]}] matrix, this "
                f"model has {list(base.shape)}: the adapter is of another base"
            )
        a, b = _initial_factors(init, base, factors.rank, scale)
        if (stored := rest.get(f"{PREFIX}{name}{_BASE_LAYER}")) is not None and not base.is_meta:
            rest[f"{PREFIX}{name}{_BASE_LAYER}"] = stored.float().addmm(b, a, alpha=scale)
        a, b = torch.cat([factors.a, a]), torch.cat([factors.b, -b], dim=1)
        by_module[name] = replace(factors, a=a, b=b, scale=scale)
    new_values, new_tensors = peft_of_factors(by_module, rslora=bool(values.get("use_rslora")))
    kept = ("lora_dropout", "target_modules", "target_parameters", "bias", "use_dora")
    changed = {key: value for key, value in new_values.items() if key not in kept}
    return PeftReader({**values, **changed}, rest | new_tensors, where)


def _initial_factors(init: str, weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 [r, I] and B0 [O, r], float32 on the CPU, as PEFT computes them from a weight [O, I]."""
    if weight.is_meta:
        return torch.zeros(rank, weight.shape[1]), torch.zeros(weight.shape[0], rank)
    if init == "pissa":
        initial = low_rank_init.pissa(weight, rank, scale, iterations=None, generator=torch.Generator())
    else:
        initial = low_rank_init.olora(weight, rank, scale)
    return initial.a.to("cpu", torch.float32), initial.b.to("cpu", torch.float32)


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.LowRank, ModuleValues]:
    """The section, and the values of each site's module.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    reader.check_supported({key: harmless for key, harmless in HARMLESS.items() if key != "use_qalora"})
    _check_types(reader)
    values, where = reader.values, reader.where
    group = reader.positive_int("qalora_group_size", 16) if values.get("use_qalora") else 1
    layers = hf_layers(sites)
    by_module = _read(reader, {layer.name for layer in layers})
    by_site: ModuleValues = {}
    ranks: dict[str, int] = {}
    for layer in layers:
        if (factors := by_module.get(layer.name)) is None:
            continue
        _check_shapes(layer, factors, reader, group)
        if not factors.embedding and (factors.magnitude is None) == bool(values.get("use_dora")):
            what = "is missing" if factors.magnitude is None else "is there, though use_dora is not set"
            raise ModelError(f"{where}: {PREFIX}{layer.name}.{_MAGNITUDE} {what}: the two files are not of one adapter")
        _check_rank(layer.name, reader, factors.rank)
        for site, rows in layer.rows():
            ranks[site.name] = factors.rank
            if factors.embedding:
                by_site[site.name] = {"lora_embedding_A": factors.a, "lora_embedding_B": factors.b}
                continue
            by_site[site.name] = {"lora_A": factors.a, "lora_B": factors.b[..., rows, :]}
            if factors.magnitude is not None:
                by_site[site.name][_MAGNITUDE] = factors.magnitude[rows]
    rank, alpha = reader.positive_int("r", 8), reader.finite_number("lora_alpha", 8.0)
    alphas = {site.name: _alpha(site.hf_name, reader) for site in sites if site.name in by_site}
    common: dict[str, Any] = {
        "rank": rank,
        "alpha": alpha,
        "dropout": reader.finite_number("lora_dropout", 0.0),
        "scaling": "rslora" if values.get("use_rslora") else "standard",
        "targets": list(by_site),
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
    }
    if values.get("use_qalora"):
        return sections.QaLora(group=group, **common), by_site
    return (sections.Dora if values.get("use_dora") else sections.Lora)(**common), by_site


@torch.no_grad()
def _layer_factors(layer: HFLayer, modules: Mapping[str, nn.Module]) -> Factors:
    """The adapter of one layer of a Hugging Face folder; its rank is the sum of the ranks of its parts."""
    by_site = {site.name: _site_factors(modules[site.name]) for site in layer.parts if site.name in modules}
    if len(layer.parts) == 1:
        return by_site[layer.parts[0].name]
    parts = list(by_site.values())
    scale = max(part.scale for part in parts)
    magnitudes = [part.magnitude for part in parts if part.magnitude is not None]
    if magnitudes and len(parts) < len(layer.parts):
        lacking = ", ".join(site.name for site in layer.parts if site.name not in by_site)
        raise ModelError(
            f"{layer.name}: DoRA on a part of what Hugging Face folders keep in one tensor cannot be written for PEFT; "
            f"{lacking} would need it too. Add it to adapter.targets"
        )
    a = torch.cat([part.a for part in parts], dim=-2)
    b = a.new_zeros(*a.shape[:-2], layer.shape[0], a.shape[-2])
    column = 0
    for site, rows in layer.rows():
        # Block by block: outputs of one part see the columns of B that belong to its own A alone.
        if (part := by_site.get(site.name)) is not None:
            b[..., rows, column : column + part.rank] = part.b * (part.scale / scale)
            column += part.rank
    return Factors(a, b, scale, layer.assembled(magnitudes) if magnitudes else None)


def _site_factors(module: nn.Module) -> Factors:
    """The factors of one site's module, for the original base."""
    if isinstance(module, EmbeddingLowRank):
        return Factors(module.lora_embedding_A, module.lora_embedding_B, module.scale, embedding=True)
    if isinstance(module, GroupedLowRank):
        return Factors(module.lora_A.detach(), module.lora_B.detach(), module.scale)
    assert isinstance(module, LowRank)
    a, b = module.lora_A.detach(), module.lora_B.detach()
    if module.initial_A is not None and module.initial_B is not None:
        a, b = torch.cat([a, module.initial_A]), torch.cat([b, -module.initial_B], dim=1)
    return Factors(a, b, module.scale, module.lora_magnitude_vector)


def _read(reader: PeftReader, known: set[str] | None = None) -> dict[str, Factors]:
    """Factors with scale 1, by the module's name in Hugging Face folders.

    known: the names of the model's modules, where there is a model. Raises ModelError for factors of other modules, for
    factors without their counterpart, and for an adapter without any.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    stacked: dict[str, bool] = {}
    for key, tensor in reader.tensors.items():
        name = key.removeprefix(PREFIX)
        for end in (*_FACTORS, _MAGNITUDE, *_EMBEDDING):
            if name.endswith(f".{end}"):
                owner = name.removesuffix(f".{end}")
                module = wrapped_parameter(owner, reader) or owner
                stacked[module] = module != owner
                if known is not None and module not in known:
                    raise ModelError(
                        f"{reader.where}: {key} is for {module}, a layer that this model does not have: "
                        "the adapter is of another base"
                    )
                reader.used.add(key)
                parts.setdefault(module, {})[end] = tensor
    factors = {}
    for module, ends in parts.items():
        embedding = any(end in ends for end in _EMBEDDING)
        required = _EMBEDDING if embedding else _FACTORS
        if missing := [end for end in required if end not in ends]:
            raise ModelError(f"{reader.where}: {PREFIX}{module}.{missing[0]} is missing")
        a, b = (ends[end].float() for end in required)
        if stacked[module]:
            a, b = unstacked(module, a, b, _rank(module, reader), reader.where)
        factors[module] = Factors(a, b, 1.0, ends.get(_MAGNITUDE), embedding)
    if not factors:
        raise ModelError(f"{reader.where}: holds no tensor of an adapter")
    return factors


def _named_tensors(factors: Factors) -> dict[str, Tensor]:
    """The tensors of one module's adapter by the ends of their names."""
    named = dict(zip(_EMBEDDING if factors.embedding else _FACTORS, (factors.a, factors.b), strict=True))
    return named if factors.magnitude is None else {**named, _MAGNITUDE: factors.magnitude}


def _check_shapes(layer: HFLayer, factors: Factors, reader: PeftReader, group: int = 1) -> None:
    """Raises ModelError for factors that do not fit the layer; the embedding's shape is (V, D). group: inputs that A
    has one column for."""
    (outputs, inputs), rank = layer.shape, factors.rank
    if group > 1 and (inputs % group or factors.stacked or factors.embedding):
        raise ModelError(
            f"{reader.where}: qalora_group_size is {group}, which does not divide the {inputs} inputs of {layer.name}"
        )
    inputs //= group
    if (experts := layer.parts[0].experts) is not None:
        stored = [factors.a.shape[0], factors.b.shape[1], factors.a.shape[2]]
        if stored != [experts, outputs, inputs]:
            raise ModelError(
                f"{reader.where}: the factors of {layer.name} make {stored} matrices, this model has "
                f"{[experts, outputs, inputs]}: the adapter is of another base"
            )
        return
    # An embedding's outputs are its vocabulary, which its A is the side of; it has no magnitudes.
    shapes = [(rank, outputs), (inputs, rank)] if factors.embedding else [(rank, inputs), (outputs, rank), (outputs,)]
    for key, shape in zip(_named_tensors(factors), shapes, strict=False):
        reader.tensor(f"{PREFIX}{layer.name}.{key}", shape)


def _check_types(reader: PeftReader) -> None:
    """Raises ModelError for settings that are not of PEFT's types."""
    for key in ("lora_alpha", "lora_dropout"):
        reader.finite_number(key, 0.0)
    reader.positive_int("r", 8)
    check_target_parameters(reader)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = reader.values.get(key) or {}
        if not isinstance(patterns, dict) or any(not _is_pattern(pattern) for pattern in patterns):
            raise ModelError(f"{reader.where}: {key} is {patterns!r}; expected regular expressions with numbers")
        numbers = PeftReader(patterns, {}, f"{reader.where}: {key}")
        for pattern in patterns:
            if key == "rank_pattern":
                numbers.positive_int(pattern)
            else:
                numbers.finite_number(pattern, 0.0)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _check_rank(name: str, reader: PeftReader, rank: int) -> None:
    """Raises ModelError where the factors' rank is not the config's, of which the scale alpha / r is; so does PEFT."""
    if (configured := _rank(name, reader)) != rank:
        raise ModelError(
            f"{reader.where}: the factors of {name} have rank {rank}, its config says {configured} (r and "
            "rank_pattern): the two files are not of one adapter"
        )


def _alpha(name: str, reader: PeftReader) -> float:
    alpha = reader.finite_number("lora_alpha", 8.0)
    return float(value_by_pattern((name,), reader.values.get("alpha_pattern") or {}, alpha))


def _rank(name: str, reader: PeftReader) -> int:
    return int(value_by_pattern((name,), reader.values.get("rank_pattern") or {}, reader.positive_int("r", 8)))


def _round(alpha: float) -> float:
    """alpha to the nearest integer where it only differs from it by the rounding of a square root."""
    near = round(alpha)
    return near if math.isclose(alpha, near, rel_tol=1e-12) else alpha
