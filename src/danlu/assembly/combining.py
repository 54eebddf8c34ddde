"""Several LoRA adapters combined into one adapter folder.

The base is read only for an adapter with a start that PEFT takes out of it (PiSSA, OLoRA). `cat` puts factors side by
side, which is exactly the weighted sum of changes. `linear` sums the As and the Bs, as PEFT does under that name, and
so has cross terms. Rows of single tokens are combined exactly by each method (see `combined_rows`), for which the
base is read too. The combinations of ties (arXiv:2306.01708) and dare (arXiv:2311.03099) have full rank, and the
adapter holds their largest singular directions.

O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu import __version__
from danlu.adapters.adapter import in_float32
from danlu.adapters.adapter_config import (
    CONFIG,
    ROTATED,
    TOKENS,
    AdapterFolder,
    adapter_stack,
    init_taken_from_base,
    open_adapter,
)
from danlu.adapters.combine import Combination, weighted_sum
from danlu.adapters.low_rank_init import pissa
from danlu.adapters.peft_folder import read_tensors, write_files
from danlu.adapters.peft_lora import Factors, for_original_base, peft_of_factors, read_factors
from danlu.adapters.peft_values import PREFIX, PeftReader
from danlu.assembly.base_model import Base, base_of, check_base, find_base
from danlu.assembly.combined_rows import combine_rows
from danlu.assembly.merging import common_below, find_tokenizer
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.core.output_folder import refuse_existing, replace_folder
from danlu.data.tokenizer_export import end_of_turn_ids
from danlu.models.config import same_rotation
from danlu.models.hf_folder import CONFIG as MODEL_CONFIG
from danlu.models.hf_folder import read_config
from danlu.models.initialize import named_generator
from danlu.models.loading import read_tensor
from danlu.models.saving import copy_tokenizer, write_stop_ids
from danlu.numerics.relative_error import RelativeErrors

_LARGE, _POWER_ITERATIONS = 16, 16
"""The multiple of the rank from which on a whole singular value decomposition takes minutes, a few directions seconds;
and the power iterations of these."""


@dataclass(frozen=True)
class Combined:
    """The report of `combine`: the adapters, and how far the result is from the exact combination of their changes."""

    adapters: tuple[Path, ...]
    errors: RelativeErrors
    """The error of each module: ||s B A - D|| / ||D||, Frobenius norms, where D is the combined change; empty for
    cat."""


@torch.no_grad()
def combine(
    sources: Sequence[str | Path],
    target: Path,
    combination: Combination,
    *,
    rank: int | None = None,
    into: str | Path | None = None,
) -> Combined:
    """Combines several LoRA folders into one.

    rank: the rank of the result of ties and dare; by default the sum of the ranks. into: the base, if not the one they
    name; its weights are read only for an adapter with a start that PEFT takes out of them.

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
        _check_rotation(folders[0], folder)
    embeddings: dict[str, Tensor] = {}
    by_folder = [_factors(folder, embeddings, base) for folder in folders]
    written: dict[str, Factors] = {}
    errors = RelativeErrors()
    for name in dict.fromkeys(name for factors in by_folder for name in factors):
        parts = [factors.get(name) for factors in by_folder]
        weighted = [(part, weight) for part, weight in zip(parts, combination.weights, strict=True) if part is not None]
        _check_shapes(name, [part for part, _ in weighted])
        if combination.method == "cat":
            written[name] = concatenated(weighted)
            continue
        exact = _exact_change(name, parts, combination)
        if combination.method == "linear":
            written[name] = summed_apart(name, weighted)
        else:
            new_rank = min(rank or sum(part.rank for part, _ in weighted), *exact.shape[-2:])
            generator = named_generator(combination.seed, f"{name}.svd")
            written[name] = refactored(exact, new_rank, generator, embedding=weighted[0][0].embedding)
        exact_norm = float(exact.norm())
        error_norm = float((_change(written[name]) - exact).norm())
        errors[name] = error_norm / exact_norm if exact_norm else error_norm
    values, tensors = peft_of_factors(written)
    rows = combine_rows(folders, below, combination, into, written)
    _write(target, folders, base, below, values | rows.values, tensors | embeddings | rows.tensors, rows.tokens)
    return Combined(tuple(folder.path for folder in folders), errors)


def _exact_change(name: str, parts: Sequence[Factors | None], combination: Combination) -> Tensor:
    """Combines the changes themselves to one of the shape of the weight, of any rank."""
    known = [None if part is None else _change(part) for part in parts]
    shape = next(change.shape for change in known if change is not None)
    changes = [torch.zeros(shape) if change is None else change for change in known]
    experts = shape[0] if len(shape) == 3 else None
    return combination.of(changes, lambda n: named_generator(combination.seed, f"{name}.weight.{n}"), experts=experts)


def _change(factors: Factors) -> Tensor:
    """Computes the change s B A, float32; for an embedding its transpose."""
    change = factors.scale * (factors.b.float() @ factors.a.float())
    return change.t() if factors.embedding else change


def concatenated(parts: Sequence[tuple[Factors, float]]) -> Factors:
    """The weighted sum of changes, with the ranks one after the other."""
    a = torch.cat([factors.a * (weight * factors.scale) for factors, weight in parts], dim=-2)
    return Factors(a, torch.cat([factors.b for factors, _ in parts], dim=-1), 1.0, embedding=parts[0][0].embedding)


def summed_apart(name: str, parts: Sequence[tuple[Factors, float]]) -> Factors:
    """PEFT's `linear`: the As and the Bs are summed, each times the root of weight x scale; the sign goes to A.

    The product of the sums has cross terms, each A with the B of another adapter, in addition to the sum of the
    products.
    """
    ranks = sorted({factors.rank for factors, _ in parts})
    if len(ranks) > 1:
        raise ModelError(f"{name}: linear sums factors of one rank, here are {ranks}. Use --method cat, which is exact")
    strengths = [weight * factors.scale for factors, weight in parts]
    roots = [math.sqrt(abs(strength)) for strength in strengths]
    signed_roots = [math.copysign(root, strength) for root, strength in zip(roots, strengths, strict=True)]
    a = weighted_sum([factors.a for factors, _ in parts], signed_roots)
    b = weighted_sum([factors.b for factors, _ in parts], roots)
    return Factors(a, b, 1.0, embedding=parts[0][0].embedding)


def refactored(change: Tensor, rank: int, generator: torch.Generator, *, embedding: bool = False) -> Factors:
    """The nearest change of this rank (Eckart-Young): the first singular directions, of a large matrix by power
    iterations. change: [O, I], of experts [E, O, I], or [V, D] with `embedding`."""
    if change.ndim == 3:
        by_expert = [refactored(matrix, rank, generator) for matrix in change]
        a, b = (torch.stack(factors) for factors in zip(*((each.a, each.b) for each in by_expert), strict=True))
        return Factors(a, b, 1.0)
    matrix = change.t() if embedding else change
    small = min(matrix.shape) < _LARGE * rank
    start = pissa(matrix, rank, 1.0, iterations=None if small else _POWER_ITERATIONS, generator=generator)
    return Factors(start.a.contiguous(), start.b.contiguous(), 1.0, embedding=embedding)


def _factors(folder: AdapterFolder, embeddings: dict[str, Tensor], base: Base | None) -> dict[str, Factors]:
    """Reads the factors of a plain LoRA, by module.

    PEFT writes the base's embedding with an adapter of it; it goes into `embeddings`, where it must be the same.
    """
    where = str(folder.path)
    if folder.kind != "LORA":
        raise ModelError(f"{where}: is {folder.kind}; only LoRA adapters become one adapter. Merge it into its base")
    reader = PeftReader(folder.values, read_tensors(folder), where)
    if init_taken_from_base(folder.values, where) is not None:
        known = (base_of([folder], None, "--into") if base is None else base).folder
        reader = for_original_base(reader, lambda module: in_float32(read_tensor(known, f"{module}.weight")))
    factors, tensors = read_factors(reader), dict(reader.tensors)
    if folder.values.get("use_dora") or any(part.magnitude is not None for part in factors.values()):
        raise ModelError(f"{where}: is DoRA, and its change is not the product of two factors. Merge it into its base")
    tensors = {key: tensor for key, tensor in tensors.items() if ".token_adapter." not in key}
    for key in [key for key in tensors if key.endswith(".base_layer.weight")]:
        if not torch.equal(embeddings.setdefault(key, tensors[key]), tensors.pop(key)):
            raise ModelError(f"{where}: {key} is not that of the others: they are adapters of different models")
    unused = [key for key in tensors if key not in reader.used]
    if unused:
        raise ModelError(
            f"{where}: trains {unused[0].removeprefix(PREFIX)} in full, which no LoRA adapter can add up. "
            "Merge it into its base"
        )
    return factors


def _check_shapes(name: str, parts: Sequence[Factors]) -> None:
    shapes = {((*part.b.shape[:-1], part.a.shape[-1]), part.embedding) for part in parts}
    if len(shapes) > 1:
        listed = " and ".join(str(list(shape)) for shape, _ in sorted(shapes))
        raise ModelError(f"{name}: the adapters are of different models: it is {listed}")


def _check_same_base(first: AdapterFolder, second: AdapterFolder) -> None:
    known = [folder.danlu.get("base_fingerprint") for folder in (first, second)]
    same = known[0] == known[1] if all(known) else first.base == second.base
    if not same:
        raise ModelError(
            f"{second.path}: was trained on another base ({second.base}) than {first.path} ({first.base}): "
            "their changes do not add up"
        )


def _check_rotation(first: AdapterFolder, second: AdapterFolder) -> None:
    """Raises ModelError for adapters under which the base's rotary embedding differs."""
    if first.rotation_folder is None or second.rotation_folder is None:
        alike = first.rotation_folder == second.rotation_folder
    else:
        alike = same_rotation(read_config(first.rotation_folder), read_config(second.rotation_folder))
    if not alike:
        raise ModelError(
            f"{second.path}: was trained with another rotary embedding of the base (long_context) than {first.path}: "
            "their changes do not add up"
        )


def _write(
    target: Path,
    folders: Sequence[AdapterFolder],
    base: Base | None,
    below: Sequence[AdapterFolder],
    values: dict[str, Any],
    tensors: Mapping[str, Tensor],
    tokens: Sequence[AddedToken],
) -> None:
    first = folders[0]
    narrowed = any(folder.values.get(key) for folder in folders for key in ("layers_to_transform", "exclude_modules"))
    for key in ("target_modules", "target_parameters"):
        targets = [folder.values.get(key) for folder in folders]
        if all(isinstance(names, list) for names in targets) and not narrowed:
            # The union of short names means the same modules as the long ones.
            values[key] = sorted({name for names in targets for name in names or ()})
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
        ROTATED: first.rotation_folder is not None,
        TOKENS: [asdict(token) for token in tokens],
    }
    tokenizer_folder = find_tokenizer([folder.path for folder in folders], tokens)
    with replace_folder(target, 3 * sum(4 * tensor.numel() for tensor in tensors.values()), own_file=CONFIG) as fresh:
        write_files(fresh, config, own, tensors)
        if tokenizer_folder is not None:
            copy_tokenizer(tokenizer_folder, fresh)
            write_stop_ids(fresh, end_of_turn_ids(str(tokenizer_folder)))
        if first.rotation_folder is not None:
            shutil.copyfile(first.rotation_folder / MODEL_CONFIG, fresh / MODEL_CONFIG)
