"""The origin of a number that is not finite: the step, the rows and the tensor, in one error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from danlu.core.errors import TrainingError
from danlu.core.types import Item
from danlu.optim.gradients import non_finite
from danlu.parallel.comm import Group
from danlu.training.units import first_few


def non_finite_on_any(world: Group, named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the tensors that are not finite on some process, each once; every process asks with its own part."""
    return list(dict.fromkeys(name for names in world.all_gather_objects(non_finite(named)) for name in names))


def explain_gradient(names: Sequence[str], items: Sequence[Item], step: int) -> TrainingError:
    """The error of a step in which every loss was finite, and the gradients of these names were not."""
    rows = [row for item in items for row in item.rows]
    return TrainingError(
        f"step {step}: the loss is finite but its gradient is not, in {first_few(names) or 'its global norm'}. "
        f"The run stopped before the update. The step's rows: {first_few(rows)}. "
        "Lower optimizer.learning_rate, or use precision: fp32 to see whether the range of the type is what fails."
    )


def explain_weights(names: Sequence[str], step: int) -> TrainingError | None:
    """The error of weights of these names, which are not finite after the update of `step`; None for no names."""
    if not names:
        return None
    return TrainingError(
        f"step {step}: its update made weights that are not finite: {first_few(names)}. They are not saved: earlier "
        "checkpoints stay. Lower optimizer.learning_rate, and start again or go on from one of them."
    )
