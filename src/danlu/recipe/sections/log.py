"""What a run writes down while training."""

from __future__ import annotations

from danlu.recipe.sections.base import PositiveInt, Section


class Log(Section):
    """What is written down while training."""

    short = "every"

    every: PositiveInt = 1
    """Steps between lines of metrics.jsonl and of the console."""
    tensorboard: bool = True
    """Write TensorBoard events to the run folder."""
    wandb: str | None = None
    """Weights & Biases project; needs the wandb package."""
