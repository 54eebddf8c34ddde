"""Diagnosis of a language model's loss that is not finite: the weight, or the module and the rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.errors import TrainingError
from danlu.core.layer_types import Attend
from danlu.core.types import Batch
from danlu.models.decoder import Decoder
from danlu.stages.outputs import DecoderOutputs
from danlu.training.units import first_few


def explain_non_finite(
    model: Decoder, batch: Batch, filled: Batch, attend: Attend, dtype: torch.dtype, step: int, names: Sequence[str]
) -> TrainingError:
    """The error for a micro-batch with a loss that is not finite; it names the cause.

    Args:
        batch, filled: the micro-batch, and as it goes through the model with its padding.
        names: of weights that are not finite, on any process. Processes have to agree on them, since the further search
            communicates.
    """
    if names:
        return TrainingError(
            f"step {step}: the loss is not finite because a weight is not: {first_few(names)}. "
            "The run stopped before the update. If the weights were loaded, check their folder; if they were trained, "
            "go back to an earlier checkpoint with a lower optimizer.learning_rate."
        )
    if model.chunks.last > 0:
        return TrainingError(
            f"step {step}: the loss is not finite, for {first_few(list(dict.fromkeys(batch.rows)))}. The weights "
            "themselves are finite, and the run stopped before the update. Look at these rows, lower "
            "optimizer.learning_rate, or train these steps without parallel.pipeline, where one process sees which "
            "module it begins in."
        )
    module, hidden = _first_non_finite_module(model, filled, attend, dtype)
    rows = _rows_without_finite_loss(DecoderOutputs(model, hidden, batch, len(batch.tokens), len(batch.targets)))
    where = f"first in the output of {module}" if module else "in the cross-entropy over the vocabulary"
    return TrainingError(
        f"step {step}: the loss is not finite, {where}, for {first_few(rows)}. The weights themselves are finite, and "
        "the run stopped before the update. Look at these rows, lower optimizer.learning_rate, or use precision: fp32 "
        "to see whether the range of the type is what fails."
    )


def _first_non_finite_module(model: Decoder, batch: Batch, attend: Attend, dtype: torch.dtype) -> tuple[str, Tensor]:
    """Returns (name of the first module, in the order they run, with an output that is not finite, "" if none; hidden
    states)."""
    non_finite: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not non_finite and isinstance(output, Tensor) and not output.isfinite().all():
            non_finite.append(names[module] or "the decoder")

    with ExitStack() as hooks, torch.no_grad():
        for module in names:  # a child's hook runs before its parent's, so the innermost module that fails is named
            hooks.enter_context(module.register_forward_hook(look))
        hidden = model(batch.tokens, batch.positions, attend, dtype)
    return (non_finite[0] if non_finite else ""), hidden


def _rows_without_finite_loss(outputs: DecoderOutputs) -> list[str]:
    """Rows with a cross-entropy that is not finite; all of them, if only their sum is not."""
    batch, rows = outputs.batch, []
    with torch.no_grad():
        for row, start, end in zip(batch.rows, batch.boundaries[:-1], batch.boundaries[1:], strict=True):
            inside = (batch.logits_indices >= start) & (batch.logits_indices < end)
            document = replace(
                batch,
                logits_indices=batch.logits_indices[inside],
                targets=batch.targets[inside],
                weights=batch.weights[inside],
            )
            if not replace(outputs, batch=document).cross_entropy().total.isfinite():
                rows.append(row)
    return list(dict.fromkeys(rows or batch.rows))  # a sample may be several documents
