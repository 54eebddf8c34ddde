"""From packs to a micro-batch on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from danlu.types import Batch, Pack, Sample, TargetSources

# T packed tokens · N trained targets


def collate(
    packs: Sequence[Pack],
    device: torch.device | str = "cpu",
    *,
    virtual_token_ids: Sequence[int] = (),
    source_names: Sequence[str] = (),
) -> Batch:
    """Lay the samples of `packs` end to end and pick out the targets that carry weight.

    A target is predicted from the token before it in the same sample; the first token of a sample has none, so it is
    never a target. All arrays travel to the device in one copy, from page-locked memory where the device is a GPU.

    Args:
        virtual_token_ids: tokens that every document begins with, counted by positions and never targets: those of soft
            prompts and prefixes.
        source_names: of the files or mixture parts whose losses are told apart. The batch says which one each target is
            from, where there are any.
    """
    samples = [sample for pack in packs for sample in pack.samples]
    if not samples:
        raise ValueError("a micro-batch needs at least one sample")
    front = (np.asarray(virtual_token_ids, dtype=np.int64), np.zeros(len(virtual_token_ids), dtype=np.float32))
    segments = [segment for sample in samples for segment in (front, (sample.tokens, sample.weights))]
    boundaries = np.cumsum([0, *(len(virtual_token_ids) + len(sample.tokens) for sample in samples)])
    tokens = np.concatenate([ids for ids, _ in segments]).astype(np.int64, copy=False)  # [T]
    weights = np.concatenate([weight for _, weight in segments])  # [T]
    first = boundaries[:-1]
    of_first = weights[first + len(virtual_token_ids)]
    if of_first.any():
        row = samples[int(np.flatnonzero(of_first)[0])].row
        raise ValueError(f"{row}: the first token of a sample carries weight, but nothing predicts it")
    if weights.min() < 0:
        row = next(sample.row for sample in samples if (sample.weights < 0).any())
        raise ValueError(f"{row}: a weight of {weights.min()}; weights count from 0 up")
    positions = np.arange(len(tokens)) - np.repeat(first, np.diff(boundaries))
    trained = np.flatnonzero(weights)  # [N]
    trained_weights = weights[trained].astype(np.float32, copy=False)
    arrays = [tokens, positions, trained - 1, tokens[trained], trained_weights]
    source_weights: tuple[float, ...] = ()
    if source_names:
        of_samples = source_numbers([sample.source for sample in samples], source_names)
        of_targets = np.repeat(of_samples, np.diff(boundaries))[trained]  # [N]
        arrays.append(of_targets)
        source_weights = weights_by_source(of_targets, trained_weights, source_names)
    tokens_, positions_, logits_indices, targets, weights_, *source_indices = _to_device(arrays, torch.device(device))
    return Batch(
        tokens=tokens_,
        positions=positions_,
        boundaries=tuple(boundaries.tolist()),
        logits_indices=logits_indices,
        targets=targets,
        weights=weights_,
        weight=float(trained_weights.sum(dtype=np.float64)),
        rows=tuple(sample.row for sample in samples),
        target_sources=TargetSources(tuple(source_names), source_indices[0], source_weights)
        if source_indices
        else None,
    )


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


def pad_to_bucket(batch: Batch, multiple: int = 1) -> Batch:
    """The same batch in one of few sizes: T and N grow by a thirty-second at most, by what adds nothing to any sum.

    multiple: T becomes one of it, for processes that cut tokens among them.

    Every new shape of product makes oneDNN generate code and keep it (1.6 ms and up to a megabyte), and packs seldom
    have the same length. The tokens added are a document of their own, the targets added have weight 0.
    """
    more_tokens, more_targets = (_padding_to_bucket(len(column)) for column in (batch.tokens, batch.targets))
    more_tokens += -(len(batch.tokens) + more_tokens) % multiple
    return replace(
        batch,
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
