"""Where a number that is not finite came from: the step, the rows and the tensor, in one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from danlu.data.batch import pad_to_bucket
from danlu.errors import TrainingError
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.objectives.crossentropy import linear_cross_entropy
from danlu.optim.clip import non_finite
from danlu.types import Batch, Item

_ROWS_SHOWN = 3


def explain_non_finite(
    model: Decoder, batch: Batch, dtype: torch.dtype, step: int, names: Sequence[str], *, multiple: int = 1
) -> TrainingError:
    """Why the loss of `batch` is not finite: a weight that already is not, or the first module to make it so.

    names: of weights that are not, on any process; they have to agree, for to look further is to communicate.
    multiple: as `data.batch.pad_to_bucket` has it.
    """
    if names:
        return TrainingError(
            f"step {step}: the loss is not finite because a weight is not: {some(names)}. "
            "The run stopped before the update. If the weights were loaded, check their folder; if they were trained, "
            "go back to an earlier checkpoint with a lower optimizer.learning_rate."
        )
    first, hidden = _first_non_finite(model, pad_to_bucket(batch, multiple), dtype)
    rows = _rows_of(model, batch, hidden)
    where = f"first in the output of {first}" if first else "in the cross-entropy over the vocabulary"
    return TrainingError(
        f"step {step}: the loss is not finite, {where}, for {some(rows)}. The weights themselves are finite, and the "
        "run stopped before the update. Look at these rows, lower optimizer.learning_rate, or use precision: fp32 to "
        "see whether the range of the type is what fails."
    )


def explain_gradient(
    named_gradients: Iterable[tuple[str, Tensor | None]], packs: Sequence[Item], step: int
) -> TrainingError:
    """Which gradients are not finite, when every loss was."""
    names = non_finite(named_gradients)
    rows = [row for pack in packs for row in pack.rows]
    return TrainingError(
        f"step {step}: the loss is finite but its gradient is not, in {some(names) if names else 'its global norm'}. "
        f"The run stopped before the update. The step's rows: {some(rows)}. "
        "Lower optimizer.learning_rate, or use precision: fp32 to see whether the range of the type is what fails."
    )


def explain_weights(weights: Mapping[str, Tensor], step: int) -> TrainingError | None:
    """Which weights are not finite after the update of `step`; None when all are."""
    names = non_finite(weights.items())
    if not names:
        return None
    return TrainingError(
        f"step {step}: its update made weights that are not finite: {some(names)}. They are not saved: earlier "
        "checkpoints stay. Lower optimizer.learning_rate, and start again or go on from one of them."
    )


def _first_non_finite(model: Decoder, batch: Batch, dtype: torch.dtype) -> tuple[str, Tensor]:
    """Name of the first module, in the order they run, whose output is not finite ("" if none); and the last states."""
    found: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and isinstance(output, Tensor) and not output.isfinite().all():
            found.append(names[module] or "the decoder")

    # Leaves first: a child's hook runs before its parent's, so the innermost module that fails is named.
    handles = [module.register_forward_hook(look) for module in model.modules()]
    try:
        with torch.no_grad():
            hidden = model(batch.tokens, batch.positions, PackedAttention(batch.boundaries), dtype)
    finally:
        for handle in handles:
            handle.remove()
    return (found[0] if found else ""), hidden


def _rows_of(model: Decoder, batch: Batch, hidden: Tensor) -> list[str]:
    """Rows whose own loss is not finite, by one document at a time (all of them, if only their sum is not)."""
    rows: list[str] = []
    with torch.no_grad():
        for row, start, end in zip(batch.rows, batch.boundaries[:-1], batch.boundaries[1:], strict=True):
            mine = (batch.sources >= start) & (batch.sources < end)
            total = linear_cross_entropy(
                hidden[batch.sources[mine]],
                model.head_weight,
                batch.targets[mine],
                batch.weights[mine],
                softcap=model.config.final_softcap,
                tensor_group=None if model.vocab_shard is None else model.vocab_shard.group,
                vocab_start=0 if model.vocab_shard is None else model.vocab_shard.start,
                vocab_size=model.config.vocab_size,
            ).total
            if not total.isfinite():
                rows.append(row)
    return rows or list(batch.rows)


def some(names: Sequence[str]) -> str:
    """The first few of the names, and how many more there are."""
    shown = ", ".join(names[:_ROWS_SHOWN])
    return shown if len(names) <= _ROWS_SHOWN else f"{shown} and {len(names) - _ROWS_SHOWN} more"
