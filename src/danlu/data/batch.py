"""Collating packs into a micro-batch on the device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from danlu.core.token_buckets import padding_to_bucket
from danlu.core.types import ROUTES, Batch, Branch, Pack, Sample, TargetSources

# T packed tokens · N trained targets · M branches


def collate(
    packs: Sequence[Pack],
    device: torch.device | str = "cpu",
    *,
    virtual_token_ids: Sequence[int] = (),
    source_names: Sequence[str] = (),
) -> Batch:
    """Lays the samples of `packs` end to end and picks out the targets that carry weight.

    A target is predicted from the token before it in the same branch, or the last one of the parent; the first token of
    a document has none, so it is never a target. All arrays travel to the device in one copy, from page-locked memory
    where the device is a GPU; facts of branches stay on the host.

    Args:
        virtual_token_ids: tokens that every document begins with, counted by positions and never targets: those of soft
            prompts and prefixes.
        source_names: names of the files or mixture parts that losses are reported for. Where there are any, the batch
            has the source of each target.
    """
    samples = [sample for pack in packs for sample in pack.samples]
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    stage_length, *others = {pack.stage_length for pack in packs}
    assert not others, "a step's packs are of one stage of lengths, and are rotated together"
    virtual = len(virtual_token_ids)
    has_trees = any(sample.branches for sample in samples)
    documents: list[_Document] = []
    for sample in samples:
        documents += _documents_of(sample) if sample.branches else [_Document(sample, 0, len(sample.tokens))]
    lengths = [virtual + stop - start for _, start, stop, _ in documents]
    boundaries = np.cumsum([0, *lengths])
    trees = _trees(documents, boundaries, virtual) if has_trees else ()
    front = np.asarray(virtual_token_ids, dtype=np.int64)
    front_weights = np.zeros(virtual, dtype=np.float32)
    tokens = _end_to_end([sample.tokens[start:stop] for sample, start, stop, _ in documents], front)  # [T]
    weights = _end_to_end([sample.weights[start:stop] for sample, start, stop, _ in documents], front_weights)  # [T]
    _check_weights(weights, documents, boundaries[:-1] + virtual)
    real = _end_to_end(
        [np.full(stop - start, not sample.is_filler) for sample, start, stop, _ in documents],
        np.zeros(virtual, dtype=bool),
    )  # [T]
    pack_sizes = [pack.tokens + virtual * pack.documents for pack in packs]
    trained = np.flatnonzero(weights)  # [N]
    trained_weights = weights[trained].astype(np.float32, copy=False)
    arrays = [
        tokens, _positions(trees, boundaries), real, _predicted_from(trained, trees), tokens[trained], trained_weights,
    ]  # fmt: skip
    source_weights: tuple[float, ...] = ()
    if source_names:
        of_documents = source_numbers([document.sample.source for document in documents], source_names)
        of_targets = np.repeat(of_documents, lengths)[trained]  # [N]
        arrays.append(of_targets)
        source_weights = weights_by_source(of_targets, trained_weights, source_names)
    if trees:
        arrays.append(np.searchsorted([branch.stop for branch in trees], trained, side="right"))  # [N]
    columns = {name: _column(documents, name, virtual)[trained] for name in samples[0].columns if name != ROUTES}
    has_routes = ROUTES in samples[0].columns
    if has_routes:
        arrays.append(_column(documents, ROUTES, virtual, fill=-1))
    arrays += columns.values()
    tokens_, positions_, real_, logits_indices, targets, weights_, *rest = _to_device(arrays, torch.device(device))
    source_indices = rest.pop(0) if source_names else None
    branch = rest.pop(0) if trees else None
    routes = rest.pop(0) if has_routes else None
    return Batch(
        tokens=tokens_,
        positions=positions_,
        real=real_,
        boundaries=tuple(boundaries.tolist()),
        packs=tuple(itertools.accumulate(pack_sizes, initial=0)),
        logits_indices=logits_indices,
        targets=targets,
        weights=weights_,
        weight=float(trained_weights.sum(dtype=np.float64)),
        rows=tuple(document.sample.row for document in documents),
        target_sources=None
        if source_indices is None
        else TargetSources(tuple(source_names), source_indices, source_weights),
        trees=trees,
        branch=branch,
        columns=dict(zip(columns, rest, strict=True)),
        facts={
            name: torch.from_numpy(np.concatenate([sample.facts[name] for sample in samples]).astype(np.float32))
            for name in samples[0].facts
        },
        stage_length=stage_length,
        routes=routes,
    )


class _Document(NamedTuple):
    """Tokens `start` to `stop` of a sample: all of it, or one of its roots with its descendants."""

    sample: Sample
    start: int
    stop: int
    branches: tuple[Branch, ...] = ()  # of the sample, those of this document; empty: it is one


def _documents_of(sample: Sample) -> list[_Document]:
    assert all(start < stop for _, start, stop in sample.branches), f"{sample.row}: a branch without tokens"
    roots = [number for number, branch in enumerate(sample.branches) if branch.parent < 0]
    by_root = [sample.branches[first:end] for first, end in itertools.pairwise([*roots, len(sample.branches)])]
    return [_Document(sample, branches[0].start, branches[-1].stop, branches) for branches in by_root]


def _trees(documents: Sequence[_Document], boundaries: np.ndarray, virtual: int) -> tuple[Branch, ...]:
    """The branches of all documents, with offsets into T; a root begins with its virtual tokens."""
    trees: list[Branch] = []
    of_sample = 0  # the number that the first branch of the present sample has
    for document, boundary in zip(documents, boundaries.tolist(), strict=False):
        if document.start == 0:
            of_sample = len(trees)
        moved = boundary + virtual - document.start
        for parent, start, stop in document.branches or (Branch(-1, document.start, document.stop),):
            is_root = parent < 0
            place = start + moved - virtual * is_root
            trees.append(Branch(-1 if is_root else of_sample + parent, place, stop + moved))
    return tuple(trees)


def _positions(trees: Sequence[Branch], boundaries: np.ndarray) -> np.ndarray:
    """[T] int64: from 0 in each document; in a branch they go on from the end of its parent."""
    positions: np.ndarray = np.arange(boundaries[-1])
    positions -= np.repeat(boundaries[:-1], np.diff(boundaries))
    for parent, start, stop in trees:
        if parent >= 0:
            first = positions[trees[parent].stop - 1] + 1
            positions[start:stop] = np.arange(first, first + stop - start)
    return positions


def _predicted_from(targets: np.ndarray, trees: Sequence[Branch]) -> np.ndarray:
    """[N] int64: the token that each target is predicted from, given the targets' places [N], rising."""
    predicted_from: np.ndarray = targets - 1
    children = [branch for branch in trees if branch.parent >= 0]
    if children and len(targets):
        numbers = np.searchsorted(targets, [branch.start for branch in children])
        for number, (parent, start, _) in zip(numbers.clip(max=len(targets) - 1).tolist(), children, strict=True):
            if targets[number] == start:
                predicted_from[number] = trees[parent].stop - 1
    return predicted_from


def _end_to_end(of_documents: Sequence[np.ndarray], front: np.ndarray) -> np.ndarray:
    """[T, ...] in the type of `front`: values of each token, behind `front` in every document."""
    if len(front):
        of_documents = [values for of_document in of_documents for values in (front, of_document)]
    return np.concatenate(of_documents, dtype=front.dtype)


def _column(documents: Sequence[_Document], name: str, virtual: int, fill: int = 0) -> np.ndarray:
    """A column of all samples as [T, ...]; `fill` for virtual tokens."""
    values = [sample.columns[name][start:stop] for sample, start, stop, _ in documents]
    return _end_to_end(values, np.full((virtual, *values[0].shape[1:]), fill, dtype=values[0].dtype))


def _check_weights(weights: np.ndarray, documents: Sequence[_Document], first: np.ndarray) -> None:
    """Refuses weights [T] below 0, and those of the documents' `first` tokens."""
    of_first = weights[first]
    if of_first.any():
        row = documents[int(np.flatnonzero(of_first)[0])].sample.row
        raise ValueError(f"{row}: the first token of a sample carries weight, but nothing predicts it")
    if weights.min() < 0:
        row = next(document.sample.row for document in documents if (document.sample.weights < 0).any())
        raise ValueError(f"{row}: a weight of {weights.min()}; weights count from 0 up")


def source_numbers(sources: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """[n] int64, the place of each source in `names`; their number for one that is not among them."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(source, len(names)) for source in sources], dtype=np.int64)


def weights_by_source(numbers: np.ndarray, weights: np.ndarray, names: Sequence[str]) -> tuple[float, ...]:
    """Returns the sum of `weights` [N] for each of `names`; `numbers` [N] are their places, as in `source_numbers`."""
    sums = np.bincount(numbers, weights=weights, minlength=len(names))
    return tuple(sums[: len(names)].tolist())


EMPTY_PACK = Pack(
    (Sample(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32), "filled up", is_filler=True),),
)
"""A pack without targets, for a process that has none left where others have."""


def empty_like(sample: Sample) -> Pack:
    """Returns a pack without targets that has branches, columns and facts as `sample` has.

    It has one branch if `sample` has any; its facts are NaN, which does not set it apart from branches of real samples.
    """
    nothing = EMPTY_PACK.samples[0]
    return Pack(
        (
            replace(
                nothing,
                branches=(Branch(-1, 0, len(nothing.tokens)),) if sample.branches else (),
                columns={
                    name: np.full((len(nothing.tokens), *values.shape[1:]), -1 if name == ROUTES else 0, values.dtype)
                    for name, values in sample.columns.items()
                },
                facts={name: np.full(1, np.nan, np.float32) for name in sample.facts},
            ),
        )
    )


def pad_to_bucket(batch: Batch, multiple: int = 1) -> Batch:
    """Returns the batch padded to one of few sizes: T and N grow by a thirty-second at most, and padding adds nothing
    to any sum.

    multiple: T becomes one of it, for processes that cut tokens among them.

    Every new shape of product makes oneDNN generate code and keep it (1.6 ms and up to a megabyte), and packs seldom
    have the same length. The tokens added are a document and a pack of their own and not `real`, the targets added have
    weight 0; they are in no branch, and have no columns, facts and routes.
    """
    more_tokens, more_targets = (padding_to_bucket(len(column)) for column in (batch.tokens, batch.targets))
    more_tokens += -(len(batch.tokens) + more_tokens) % multiple
    more_tokens = more_tokens or (0 if len(batch.tokens) else multiple)  # a context rank may have none
    size = len(batch.tokens) + more_tokens
    added, lengths = Branch(-1, len(batch.tokens), size), batch.document_lengths
    return replace(
        batch,
        trees=(*batch.trees, added) if batch.trees and more_tokens and not batch.shares else batch.trees,
        tokens=F.pad(batch.tokens, (0, more_tokens)),
        positions=F.pad(batch.positions, (0, more_tokens)),
        real=F.pad(batch.real, (0, more_tokens)),
        boundaries=batch.boundaries + ((size,) if more_tokens else ()),
        packs=batch.packs + ((size,) if more_tokens else ()),
        logits_indices=F.pad(batch.logits_indices, (0, more_targets)),
        targets=F.pad(batch.targets, (0, more_targets)),
        weights=F.pad(batch.weights, (0, more_targets)),
        routes=None if batch.routes is None else F.pad(batch.routes, (0, 0, 0, 0, 0, more_tokens), value=-1),
        document_lengths=None if lengths is None else F.pad(lengths, (0, more_tokens), value=1),
    )


def _to_device(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`; for anything but the CPU they share one buffer and one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    buffer = _in_one_buffer(arrays, pinned=device.type == "cuda")
    return _of_one_buffer(buffer.to(device, non_blocking=True), arrays)


def _starts(arrays: list[np.ndarray]) -> list[int]:
    """Returns the offset of each array in a buffer, and its end: multiples of 8 bytes, so that views of any type are
    aligned.
    """
    starts: list[int] = np.cumsum([0, *(-(-array.nbytes // 8) * 8 for array in arrays)]).tolist()
    return starts


def _in_one_buffer(arrays: list[np.ndarray], *, pinned: bool) -> torch.Tensor:
    *starts, size = _starts(arrays)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for array, start in zip(arrays, starts, strict=True):
        buffer[start : start + array.nbytes].numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return buffer


def _of_one_buffer(buffer: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
    """Views of the buffer in the types and shapes of the arrays that it was made of."""
    *starts, _ = _starts(arrays)
    return [
        buffer[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
