"""Several LoRA adapters made one adapter folder, without their base, unless PEFT takes the start of one out of it.

What is exact and what is not: `cat` puts factors side by side and is the weighted sum of changes. `linear` sums A and B
apart, as PEFT does under that name, which is another thing. What ties and dare make of the changes has full rank, and
the adapter holds its largest singular directions.

O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu import __version__
from danlu.adapters.adapter_config import CONFIG, AdapterFolder, adapter_stack, init_taken_from_base, open_adapter
from danlu.adapters.combine import Combination, weighted_sum
from danlu.adapters.low_rank_init import pissa
from danlu.adapters.peft_folder import read_tensors, write_files
from danlu.adapters.peft_lora import (
    Factors,
    for_original_base,
    peft_of_factors,
    read_factors,
)
from danlu.adapters.peft_values import PREFIX
from danlu.assembly.base_model import Base, base_of, check_base, find_base
from danlu.assembly.merging import common_below, find_tokenizer
from danlu.errors import ModelError
from danlu.models.initialize import named_generator
from danlu.models.loading import read_tensor
from danlu.models.saving import copy_tokenizer
from danlu.output_folder import refuse_existing, replace_folder

_LARGE, _POWER_ITERATIONS = 16, 16
"""From so many times the rank on, a whole singular value decomposition takes minutes, a few directions seconds."""


@dataclass(frozen=True)
class Combined:
    """What was written, and how far it is from the combination of the changes."""

    adapters: tuple[Path, ...]
    errors: Mapping[str, float]
    """By module: ||s B A - D|| / ||D||, Frobenius norms, where D is what the changes combine to; empty for cat."""

    @property
    def mean(self) -> float:
        return sum(self.errors.values()) / len(self.errors) if self.errors else 0.0

    @property
    def worst(self) -> tuple[str, float]:
        # What is not finite comes first, as `max` alone would pass over a NaN.
        return max(self.errors.items(), key=lambda one: (not math.isfinite(one[1]), one[1]), default=("", 0.0))


@torch.no_grad()
def combine(
    sources: Sequence[str | Path],
    target: Path,
    combination: Combination,
    *,
    rank: int | None = None,
    into: str | Path | None = None,
) -> Combined:
    """Writes one LoRA folder from several.

    rank: of what ties and dare leave; by default the sum of the ranks. into: the base, if not the one they name; its
    weights are read only for an adapter whose start PEFT takes out of them.

    Raises ModelError for adapters that are not plain LoRA, or not of one base, and for `linear` of unequal ranks;
    ResourceError if `target` holds anything.
    """
    refuse_existing(target)
    base = None if into is None else find_base(into)
    stacks = [adapter_stack(source) for source in sources]
    below = common_below(stacks)
    folders = [open_adapter(stack[-1].path) for stack in stacks]
    for folder in folders:
        _check_same_base(folders[0], folder)
        if base is not None:
            check_base(folder, base)
    embeddings: dict[str, Tensor] = {}
    read = [_factors(folder, embeddings, base) for folder in folders]
    written: dict[str, Factors] = {}
    errors: dict[str, float] = {}
    for name in dict.fromkeys(name for one in read for name in one):
        parts = [one.get(name) for one in read]
        there = [(one, weight) for one, weight in zip(parts, combination.weights, strict=True) if one is not None]
        _check_shapes(name, [one for one, _ in there])
        if combination.method == "cat":
            written[name] = concatenated(there)
            continue
        wanted = _wanted(name, parts, combination)
        if combination.method == "linear":
            written[name] = summed_apart(name, there)
        else:
            ranks = min(rank or sum(one.rank for one, _ in there), *wanted.shape)
            generator = named_generator(combination.seed, f"{name}.svd")
            written[name] = refactored(wanted, ranks, generator, embedding=there[0][0].embedding)
        size = float(wanted.norm())
        lost = float((_change(written[name]) - wanted).norm())
        errors[name] = lost / size if size else lost
    values, tensors = peft_of_factors(written)
    _write(target, folders, base, below, values, tensors | embeddings)
    return Combined(tuple(folder.path for folder in folders), errors)


def _wanted(name: str, parts: Sequence[Factors | None], combination: Combination) -> Tensor:
    """What the changes themselves combine to, [O, I] or [V, D] as the weight is."""
    found = [None if one is None else _change(one) for one in parts]
    (shape, *_) = (one.shape for one in found if one is not None)
    changes = [torch.zeros(shape) if one is None else one for one in found]
    return combination.of(changes, lambda n: named_generator(combination.seed, f"{name}.weight.{n}"))


def _change(one: Factors) -> Tensor:
    """s B A, float32; of an embedding its transpose."""
    change = one.scale * (one.b.float() @ one.a.float())
    return change.t() if one.embedding else change


def concatenated(parts: Sequence[tuple[Factors, float]]) -> Factors:
    """The weighted sum of changes, with the ranks one after the other."""
    a = torch.cat([one.a * (weight * one.scale) for one, weight in parts])
    return Factors(a, torch.cat([one.b for one, _ in parts], dim=1), 1.0, embedding=parts[0][0].embedding)


def summed_apart(name: str, parts: Sequence[tuple[Factors, float]]) -> Factors:
    """PEFT's `linear`: A and B are summed each by itself, times the root of weight and scale; the sign goes to A.

    The product has what each A makes with the other's B beside what is wanted.
    """
    ranks = sorted({one.rank for one, _ in parts})
    if len(ranks) > 1:
        raise ModelError(f"{name}: linear sums factors of one rank, here are {ranks}. Use --method cat, which is exact")
    strengths = [weight * one.scale for one, weight in parts]
    a = weighted_sum([one.a for one, _ in parts], [math.copysign(math.sqrt(abs(one)), one) for one in strengths])
    b = weighted_sum([one.b for one, _ in parts], [math.sqrt(abs(one)) for one in strengths])
    return Factors(a, b, 1.0, embedding=parts[0][0].embedding)


def refactored(change: Tensor, rank: int, generator: torch.Generator, *, embedding: bool = False) -> Factors:
    """The nearest change of this rank: the first singular directions, of a large matrix by power iterations."""
    matrix = change.t() if embedding else change
    small = min(matrix.shape) < _LARGE * rank
    start = pissa(matrix, rank, 1.0, iterations=None if small else _POWER_ITERATIONS, generator=generator)
    return Factors(start.a.contiguous(), start.b.contiguous(), 1.0, embedding=embedding)


def _factors(folder: AdapterFolder, embeddings: dict[str, Tensor], base: Base | None) -> dict[str, Factors]:
    """The factors of a plain LoRA, by module.

    PEFT writes the base's embedding beside an adapter of it; it goes into `embeddings`, where it must be the same.
    """
    where = str(folder.path)
    if folder.kind != "LORA":
        raise ModelError(f"{where}: is {folder.kind}; only LoRA adapters become one adapter. Merge it into its base")
    values, tensors = folder.values, read_tensors(folder)
    if init_taken_from_base(values, where) is not None:
        of = base_of([folder], None, "--into") if base is None else base
        weight = partial(_base_weight, of.folder)
        values, changed = for_original_base(values, tensors, weight, where)
        tensors = dict(changed)
    factors, used = read_factors(values, tensors, where)
    if folder.values.get("use_dora") or any(one.magnitude is not None for one in factors.values()):
        raise ModelError(f"{where}: is DoRA, whose change is not the product of two factors. Merge it into its base")
    for key in [key for key in tensors if key.endswith(".base_layer.weight")]:
        if not torch.equal(embeddings.setdefault(key, tensors[key]), tensors.pop(key)):
            raise ModelError(f"{where}: {key} is not that of the others: they are adapters of different models")
    more = [key for key in tensors if key not in used]
    if more:
        raise ModelError(
            f"{where}: trains {more[0].removeprefix(PREFIX)} in full, which no LoRA adapter can add up. "
            "Merge it into its base"
        )
    return factors


def _base_weight(base: Path, module: str) -> Tensor:
    """The weight of a module in the folder of a base, in float32 or wider."""
    stored = read_tensor(base, f"{module}.weight")
    return stored.to(torch.promote_types(stored.dtype, torch.float32))


def _check_shapes(name: str, parts: Sequence[Factors]) -> None:
    shapes = {(one.b.shape[0], one.a.shape[1], one.embedding) for one in parts}
    if len(shapes) > 1:
        found = " and ".join(f"[{outputs}, {inputs}]" for outputs, inputs, _ in sorted(shapes))
        raise ModelError(f"{name}: the adapters are of different models: it is {found}")


def _check_same_base(first: AdapterFolder, other: AdapterFolder) -> None:
    known = [folder.danlu.get("base_fingerprint") for folder in (first, other)]
    same = known[0] == known[1] if all(known) else first.base == other.base
    if not same:
        raise ModelError(
            f"{other.path}: was trained on another base ({other.base}) than {first.path} ({first.base}): "
            "their changes do not add up"
        )


def _write(
    target: Path,
    folders: Sequence[AdapterFolder],
    base: Base | None,
    below: Sequence[AdapterFolder],
    values: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    first = folders[0]
    named = [folder.values.get("target_modules") for folder in folders]
    narrowed = any(folder.values.get(key) for folder in folders for key in ("layers_to_transform", "exclude_modules"))
    if all(isinstance(one, list) for one in named) and not narrowed:  # the short names together mean the same modules
        values["target_modules"] = sorted({name for names in named for name in names or ()})
    config = {
        **values,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": first.base if base is None else base.named,
        "inference_mode": True,
        "modules_to_save": None,
    }
    own = {
        "version": __version__,
        "base_fingerprint": first.danlu.get("base_fingerprint"),
        "below": [str(folder.path.resolve()) for folder in below],
        "made_from": [str(folder.path.resolve()) for folder in folders],
    }
    words = find_tokenizer([folder.path for folder in folders])
    with replace_folder(target, 3 * sum(4 * tensor.numel() for tensor in tensors.values()), own_file=CONFIG) as fresh:
        write_files(fresh, config, own, tensors)
        if words is not None:
            copy_tokenizer(words, fresh)
