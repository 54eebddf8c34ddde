"""From packs to a micro-batch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from danlu.types import Batch, Branch, Pack, Sample, TargetSources

# T packed tokens · N trained targets · M branches


def collate(
    packs: Sequence[Pack],
    device: torch.device | str = "cpu",
    *,
    virtual_token_ids: Sequence[int] = (),
    source_names: Sequence[str] = (),
) -> Batch:
    """Lay the samples of `packs` end to end and pick out the targets that carry weight.

    A target is predicted from the token before it in the same branch, or the last one of the parent; the first token of
    a document has none, so it is never a target. All arrays travel to the device in one copy, from page-locked memory
    where the device is a GPU; facts of branches stay on the host.

    Args:
        virtual_token_ids: tokens that every document begins with, counted by positions and never targets: those of soft
            prompts and prefixes.
        source_names: of the files or mixture parts whose losses are told apart. The batch says which one each target is
            from, where there are any.
    """
    samples = [sample for pack in packs for sample in pack.samples]
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    virtual = np.asarray(virtual_token_ids, dtype=np.int64)
    laid_out = _lay_out(samples, len(virtual))
    places, first = laid_out.places, laid_out.boundaries[:-1]
    total = int(laid_out.boundaries[-1])
    tokens = np.empty(total, dtype=np.int64)  # [T]
    weights = np.zeros(total, dtype=np.float32)  # [T]
    if len(virtual):
        tokens[first[:, None] + np.arange(len(virtual))] = virtual
    tokens[places] = np.concatenate([sample.tokens for sample in samples])
    weights[places] = np.concatenate([sample.weights for sample in samples])
    of_first = weights[first + len(virtual)]
    if of_first.any():
        row = laid_out.rows[int(np.flatnonzero(of_first)[0])]
        raise ValueError(f"{row}: the first token of a sample carries weight, but nothing predicts it")
    if weights.min() < 0:
        row = next(sample.row for sample in samples if (sample.weights < 0).any())
        raise ValueError(f"{row}: a weight of {weights.min()}; weights count from 0 up")
    trained = np.flatnonzero(weights)  # [N]
    trained_weights = weights[trained].astype(np.float32, copy=False)
    positions, predicted_from = laid_out.positions(), laid_out.predicted_from(trained)
    arrays = [tokens, positions, predicted_from, tokens[trained], trained_weights]
    source_weights: tuple[float, ...] = ()
    if source_names:
        of_samples = source_numbers([sample.source for sample in samples], source_names)
        of_targets = np.repeat(of_samples, laid_out.sample_lengths)[trained]  # [N]
        arrays.append(of_targets)
        source_weights = weights_by_source(of_targets, trained_weights, source_names)
    if laid_out.trees:
        arrays.append(laid_out.branch_of(trained))
    columns = {name: _column(samples, name, places, total)[trained] for name in samples[0].columns}
    arrays += columns.values()
    tokens_, positions_, logits_indices, targets, weights_, *rest = _to_device(arrays, torch.device(device))
    source_indices = rest.pop(0) if source_names else None
    return Batch(
        tokens=tokens_,
        positions=positions_,
        boundaries=tuple(laid_out.boundaries.tolist()),
        logits_indices=logits_indices,
        targets=targets,
        weights=weights_,
        weight=float(trained_weights.sum(dtype=np.float64)),
        rows=tuple(sample.row for sample in samples),
        target_sources=None
        if source_indices is None
        else TargetSources(tuple(source_names), source_indices, source_weights),
        trees=laid_out.trees,
        branch=rest.pop(0) if laid_out.trees else None,
        columns=dict(zip(columns, rest, strict=True)),
        facts={name: torch.from_numpy(_facts(samples, name)) for name in samples[0].facts},
    )


@dataclass(frozen=True)
class _LaidOut:
    """Where the tokens of samples lie in a batch of T tokens, behind the virtual tokens of their documents."""

    boundaries: np.ndarray  # [documents + 1] int64
    places: np.ndarray  # [tokens of all samples] int64: in T
    sample_lengths: np.ndarray  # [samples] int64, virtual tokens included
    trees: tuple[Branch, ...]  # [M] in T; a root begins with its virtual tokens
    rows: tuple[str, ...]  # [documents]

    def positions(self) -> np.ndarray:
        """[T] int64: from 0 in each document, and on from its parent's end in each branch."""
        first, total = self.boundaries[:-1], int(self.boundaries[-1])
        positions: np.ndarray = np.arange(total) - np.repeat(first, np.diff(self.boundaries))
        for parent, start, stop in self.trees:
            if parent >= 0:
                positions[start:stop] = np.arange(stop - start) + positions[self.trees[parent].stop - 1] + 1
        return positions

    def predicted_from(self, targets: np.ndarray) -> np.ndarray:
        """[N] int64: the token that each target is predicted from, given the targets' places [N]."""
        if not self.trees:
            return targets - 1
        before: np.ndarray = np.arange(int(self.boundaries[-1])) - 1
        for parent, start, _ in self.trees:
            if parent >= 0:
                before[start] = self.trees[parent].stop - 1
        return before[targets]

    def branch_of(self, targets: np.ndarray) -> np.ndarray:
        """[N] int64: the branch of each target, given the targets' places [N]."""
        return np.searchsorted([branch.stop for branch in self.trees], targets, side="right")


def _lay_out(samples: Sequence[Sample], virtual: int) -> _LaidOut:
    """Where the tokens of `samples` go, with so many virtual tokens before each document."""
    branched = any(sample.branches for sample in samples)
    if not branched:
        lengths = np.array([virtual + len(sample.tokens) for sample in samples])
        boundaries = np.cumsum([0, *lengths])
        places = np.arange(boundaries[-1])
        if virtual:
            places = np.delete(places, (boundaries[:-1, None] + np.arange(virtual)).ravel())
        return _LaidOut(boundaries, places, lengths, (), tuple(sample.row for sample in samples))
    boundaries_, trees, place_parts, lengths_, rows = [0], list[Branch](), list[np.ndarray](), list[int](), list[str]()
    end = 0
    for sample in samples:
        base, begin = len(trees), end
        for parent, start, stop in sample.branches or (Branch(-1, 0, len(sample.tokens)),):
            is_root = parent < 0
            if is_root and trees:
                boundaries_.append(end)
            if is_root:
                rows.append(sample.row)
            own = end + virtual * is_root
            place_parts.append(np.arange(own, own + stop - start))
            trees.append(Branch(-1 if is_root else base + parent, end, own + stop - start))
            end = own + stop - start
        lengths_.append(end - begin)
    boundaries_.append(end)
    places = np.concatenate(place_parts)
    return _LaidOut(np.array(boundaries_), places, np.array(lengths_), tuple(trees), tuple(rows))


def _column(samples: Sequence[Sample], name: str, places: np.ndarray, total: int) -> np.ndarray:
    """A column of all samples as [T, ...]; 0 for virtual tokens."""
    values = np.concatenate([sample.columns[name] for sample in samples])
    column = np.zeros((total, *values.shape[1:]), dtype=values.dtype)
    column[places] = values
    return column


def _facts(samples: Sequence[Sample], name: str) -> np.ndarray:
    """A fact of all branches: [M] float32."""
    return np.concatenate([sample.facts[name] for sample in samples]).astype(np.float32)


def source_numbers(sources: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """[n] int64, the place of each source in `names`; their number for one that is not among them."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(source, len(names)) for source in sources], dtype=np.int64)


def weights_by_source(numbers: np.ndarray, weights: np.ndarray, names: Sequence[str]) -> tuple[float, ...]:
    """The sum of the `weights` [N] of each of `names`, whose places are `numbers` [N] as in `source_numbers`."""
    sums = np.bincount(numbers, weights=weights, minlength=len(names))
    return tuple(sums[: len(names)].tolist())


EMPTY_PACK = Pack((Sample(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32), "filled up"),))
"""A pack without targets, for a process that has none left where others have."""


def empty_like(sample: Sample) -> Pack:
    """A pack without targets whose sample has the branches, columns and facts that samples of a stage have.

    It has one branch if `sample` has any; its facts are NaN, which no branch of a real sample is told by alone.
    """
    nothing = EMPTY_PACK.samples[0]
    return Pack(
        (
            replace(
                nothing,
                branches=(Branch(-1, 0, len(nothing.tokens)),) if sample.branches else (),
                columns={
                    name: np.zeros((len(nothing.tokens), *values.shape[1:]), values.dtype)
                    for name, values in sample.columns.items()
                },
                facts={name: np.full(1, np.nan, np.float32) for name in sample.facts},
            ),
        )
    )


def pad_to_bucket(batch: Batch, multiple: int = 1) -> Batch:
    """The same batch in one of few sizes: T and N grow by a thirty-second at most, by what adds nothing to any sum.

    multiple: T becomes one of it, for processes that cut tokens among them.

    Every new shape of product makes oneDNN generate code and keep it (1.6 ms and up to a megabyte), and packs seldom
    have the same length. The tokens added are a document of their own, the targets added have weight 0.
    """
    more_tokens, more_targets = (_padding_to_bucket(len(column)) for column in (batch.tokens, batch.targets))
    more_tokens += -(len(batch.tokens) + more_tokens) % multiple
    added = Branch(-1, len(batch.tokens), len(batch.tokens) + more_tokens)
    return replace(
        batch,
        trees=(*batch.trees, added) if batch.trees and more_tokens else batch.trees,
        tokens=F.pad(batch.tokens, (0, more_tokens)),
        positions=F.pad(batch.positions, (0, more_tokens)),
        boundaries=batch.boundaries + ((len(batch.tokens) + more_tokens,) if more_tokens else ()),
        logits_indices=F.pad(batch.logits_indices, (0, more_targets)),
        targets=F.pad(batch.targets, (0, more_targets)),
        weights=F.pad(batch.weights, (0, more_targets)),
    )


def _padding_to_bucket(count: int) -> int:
    """How much is missing to a multiple of a thirty-second of `count`, that rounded down to a power of two."""
    grain = 1 << max(0, (count // 32).bit_length() - 1)
    return -count % grain


def _to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`; for anything but the CPU they share one buffer and one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Each array starts on a multiple of 8 bytes, so that views of int64 and float32 are aligned.
    sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
    starts = np.cumsum([0, *sizes])
    buffer = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, start in zip(arrays, starts, strict=False):
        buffer[start : start + array.nbytes].numpy()[:] = np.ascontiguousarray(array).view(np.uint8)
    on_device = buffer.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
        for array, start in zip(arrays, starts.tolist(), strict=False)
    ]
