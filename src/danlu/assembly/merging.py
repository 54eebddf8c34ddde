"""Adapters merged into their base and written as a whole model: parameter by parameter, each rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.adapters.adapter_config import AdapterFolder, adapter_stack
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.combine import Combination
from danlu.adapters.merge import check_mergeable, merged_parameter, unties_head
from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.base_model import Base, base_of, check_base, check_same_rotation, config_with_adapters
from danlu.assembly.frozen_base import load_frozen
from danlu.assembly.score_head import required_score_head
from danlu.core.added_token import AddedToken
from danlu.core.errors import DataError, ModelError
from danlu.core.output_folder import refuse_existing
from danlu.data.new_tokens import tokenizer_with
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizer_export import end_of_turn_ids, padding_token
from danlu.data.tokenizer_folder import fast_tokenizer_folder
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config
from danlu.models.hf_layout import hf_tensors
from danlu.models.initialize import named_generator
from danlu.models.loading import stored_dtype, widest_dtype
from danlu.models.saving import boxes_of, save
from danlu.numerics.relative_error import RelativeErrors

_CHUNK_ELEMENTS = 1 << 22
"""The number of elements of a matrix in which rounding errors are measured at a time: no second matrix is made."""


@dataclass(frozen=True)
class Merged:
    """The report of a merge: the adapters, their base, and the rounding errors."""

    base: Path
    adapters: tuple[Path, ...]
    quantized: bool
    """Whether the base is stored in 4 or 8 bits."""
    dtype: torch.dtype
    rounding: RelativeErrors
    """The errors of rounding each merged matrix to the written dtype: ||rounded - W|| / ||W||, Frobenius norms; empty
    where nothing was rounded. W is base and adapters in float32; for a base in 4 bits, the values of its codes."""
    trained_over: str | None
    """The kind of quantization ("nf4") under which the last adapter was trained, if any."""


def merge(
    sources: Sequence[str | Path],
    target: Path,
    *,
    into: str | Path | None = None,
    force: bool = False,
    dtype: torch.dtype | None = None,
    combination: Combination | None = None,
    quantization: Any = None,
) -> Merged:
    """Merges adapters into their base and writes the result as a Hugging Face model folder.

    Adapters that the sources were trained upon are merged with them. Memory: the base as it is stored, and a few times
    its largest matrix in float32.

    Args:
        sources: adapter folders, or runs that ended with one, each with its change of the same base.
        into: the base, if not the one they name; force: also another one than they were trained on.
        dtype: the type in which weights are written; by default that of the base.
        combination: the rule by which several become one; by default their sum.
        quantization: section of a recipe; the base is quantized and dequantized by it first, as QLoRA trains over.

    Raises ModelError for sources that are no adapters, do not fit the base or are no change of weights, and
    ResourceError if
    `target` holds anything.
    """
    refuse_existing(target)
    stacks = [adapter_stack(source) for source in sources]
    trained_over = (stacks[-1][-1].quantization or {}).get("kind")
    below = common_below(stacks)
    base = base_of(stacks[0], into, "--into", [folder for stack in stacks[1:] for folder in stack])
    if not force:
        for stack in stacks:
            _check(stack, base, given=into is not None)
    # In the widest stored type: what goes into the sum is what is stored.
    classifies = [folder for stack in stacks for folder in stack if folder.task != "causal-lm"]
    if len(stacks) > 1 and classifies:
        raise ModelError(f"{classifies[0].path}: an adapter with a score head is merged alone: heads do not add up")
    check_same_rotation(read_config(base.folder), stacks)
    shape = config_with_adapters(base.folder, stacks[0])
    head = required_score_head(base.folder, stacks[0]) if shape.task != "causal-lm" else None
    adapted = load_frozen(base.folder, dtype=widest_dtype(base.folder), quantization=quantization, config=shape)
    opened = AdapterStacks(adapted.adapters)
    for stack in stacks:
        opened.add(stack)
    lowest = opened.add(below)
    for number in range(lowest):
        opened.use(number)
        check_mergeable(adapted.adapters)
    if combination is None and len(stacks) > 1:
        combination = Combination((1.0,) * len(stacks))
    value, unties = _values(opened, lowest, combination)
    written = dtype or stored_dtype(base.folder)
    written = torch.float32 if written == torch.float64 else written
    rounding = RelativeErrors()
    config = adapted.model.config
    tokenizer = find_tokenizer(
        [*(folder.path for stack in stacks for folder in reversed(stack)), base.folder], base.tokens
    )
    save(
        adapted.model,
        target,
        dtype=written,
        tokenizer_from=tokenizer,
        generation_from=base.folder,
        config=replace(config, tie_word_embeddings=False) if unties else config,
        value=boxes_of(lambda name: _measured(name, value(name), written, rounding)),
        origin=base.folder,
        score_head=head,
        pad_token=None
        if head is None or tokenizer is None
        else padding_token(load_tokenizer(str(tokenizer)), config.eos_token_ids),
        stop_ids=() if head is not None or tokenizer is None else end_of_turn_ids(str(tokenizer)),
    )
    quantized = any(getattr(site.module, "quantized", None) is not None for site in adapted.adapters.sites)
    paths = tuple(stack[-1].path for stack in stacks)
    return Merged(base.folder, paths, quantized, written, rounding, trained_over)


def common_below(stacks: Sequence[Sequence[AdapterFolder]]) -> list[AdapterFolder]:
    """The adapters that all stacks have below their top one. Raises ModelError if they differ."""
    under = [[folder.path.resolve() for folder in stack[:-1]] for stack in stacks]
    for stack, paths in zip(stacks, under, strict=True):
        if paths != under[0]:
            raise ModelError(
                f"{stack[-1].path} was trained on top of other adapters than {stacks[0][-1].path}: they change "
                "different models. Merge each with those below it first"
            )
    return list(stacks[0][:-1])


def find_tokenizer(folders: Sequence[Path], tokens: Sequence[AddedToken] = ()) -> Path | None:
    """The tokenizer of the first of the folders that has one, with these new tokens; None if none has.

    Raises DataError as `new_tokens.tokenizer_with` does.
    """
    for folder in folders:
        try:
            tokenizer_folder = fast_tokenizer_folder(str(folder))
        except DataError:
            continue
        return tokenizer_with(tokenizer_folder, tokens)
    return None


def _check(stack: Sequence[AdapterFolder], base: Base, *, given: bool) -> None:
    """Raises ModelError for adapters that were trained on another base, as far as their folders say."""
    for folder in stack:
        try:
            check_base(folder, base)
        except ModelError as error:
            raise ModelError(f"{error}, or give --force to merge into this one all the same") from None
        by_another_tool = folder.danlu.get("base_fingerprint") is None
        if by_another_tool and not given and folder.base not in (base.named, str(base.folder)):
            raise ModelError(
                f"{folder.path}: was trained on {folder.base}, the first adapter on {base.named}. If that is the same "
                "model, name it with --into"
            )


def _values(
    opened: AdapterStacks, lowest: int, combination: Combination | None
) -> tuple[Callable[[str], Tensor], bool]:
    """Returns (parameter -> its merged value in float32, whether a tied head must be untied for it)."""
    adapters = opened.adapters
    sources = range(lowest)
    if combination is None:
        opened.use(0)
        return partial(merged_parameter, adapters), unties_head(adapters)
    unties = False
    for number in sources:
        opened.use(number)
        unties = unties_head(adapters) or unties
    return _Combining(opened, lowest, combination).value, unties


class _Combining:
    """Computes the parameters of a base with the changes of several adapters combined, in the order they are asked."""

    def __init__(self, opened: AdapterStacks, lowest: int, combination: Combination) -> None:
        self._opened, self._lowest, self._combination = opened, lowest, combination
        self._changed_names = _changed_names(opened.adapters)
        self._pending: dict[str, Tensor] = {}  # parts of the last Hugging Face tensor that are still to be asked for
        model = opened.adapters.model
        assert isinstance(model, Decoder)
        self._experts = {site.name: site.experts for site in opened.adapters.sites}
        self._parts = {part: tensor.parameters for tensor in hf_tensors(model.config) for part in tensor.parameters}

    def value(self, name: str) -> Tensor:
        """The combined value of a parameter, float32."""
        if name not in self._pending:
            self._pending = self._combined(self._parts.get(name, (name,)))
        return self._pending.pop(name)

    def _combined(self, parts: Sequence[str]) -> dict[str, Tensor]:
        """The parts of a tensor of a Hugging Face folder, combined as one tensor: trimming (ties) and dropping (dare)
        go over all of it, as in other tools; of stacked experts trimming goes over the tensor of each expert."""
        adapters, combination = self._opened.adapters, self._combination
        self._opened.use(self._lowest)
        starts = [merged_parameter(adapters, part) for part in parts]
        if not self._changed_names & set(parts):
            return dict(zip(parts, starts, strict=True))
        changes = []
        for number in range(self._lowest):
            self._opened.use(number)
            changes.append(
                torch.cat([merged_parameter(adapters, part) - at for part, at in zip(parts, starts, strict=True)])
            )
        name = adapters.hf_name(parts[0])
        experts = self._experts.get(parts[0].rpartition(".")[0])
        change = combination.of(changes, lambda n: named_generator(combination.seed, f"{name}.{n}"), experts=experts)
        changes = list(change.split([len(start) for start in starts]))
        return {part: start + delta for part, start, delta in zip(parts, starts, changes, strict=True)}


def _changed_names(adapters: AdapterSet) -> set[str]:
    """Names of the parameters that some adapter changes."""
    names = set(adapters.fully_trained())
    for added in adapters.added.values():
        names |= {f"{site.name}.{attribute}" for site in added.sites for attribute in ("weight", "bias")}
    if adapters.tied and "embed_tokens.weight" in names:
        names.add("lm_head.weight")
    return names


def _measured(name: str, value: Tensor, dtype: torch.dtype, rounding: RelativeErrors) -> Tensor:
    """The value itself; the relative error of rounding it to `dtype` goes into `rounding`."""
    if value.ndim > 1 and dtype != value.dtype:
        error = norm = 0.0  # squared
        for chunk in value.detach().reshape(-1).split(_CHUNK_ELEMENTS):
            error += float((chunk.to(dtype).to(chunk.dtype) - chunk).square().sum(dtype=torch.float64))
            norm += float(chunk.square().sum(dtype=torch.float64))
        rounding[name] = (error / norm) ** 0.5 if norm else 0.0
    return value
