"""Where a number that is not finite came from: the step, the rows and the tensor, in one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from danlu.errors import TrainingError
from danlu.optim.clip import non_finite
from danlu.train.units import first_few
from danlu.types import Item


def explain_gradient(
    named_gradients: Iterable[tuple[str, Tensor | None]], items: Sequence[Item], step: int
) -> TrainingError:
    """Which gradients are not finite, when every loss was."""
    names = non_finite(named_gradients)
    rows = [row for item in items for row in item.rows]
    return TrainingError(
        f"step {step}: the loss is finite but its gradient is not, in {first_few(names) or 'its global norm'}. "
        f"The run stopped before the update. The step's rows: {first_few(rows)}. "
        "Lower optimizer.learning_rate, or use precision: fp32 to see whether the range of the type is what fails."
    )


def explain_weights(weights: Mapping[str, Tensor], step: int) -> TrainingError | None:
    """Which weights are not finite after the update of `step`; None when all are."""
    names = non_finite(weights.items())
    if not names:
        return None
    return TrainingError(
        f"step {step}: its update made weights that are not finite: {first_few(names)}. They are not saved: earlier "
        "checkpoints stay. Lower optimizer.learning_rate, and start again or go on from one of them."
    )
