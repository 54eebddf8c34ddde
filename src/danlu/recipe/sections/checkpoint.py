"""Which checkpoints a run writes and keeps."""

from __future__ import annotations

from danlu.recipe.sections.base import PositiveInt, Section


class Checkpoint(Section):
    """What is kept to go on from, and how often."""

    short = "every"

    every: PositiveInt | None = None
    """Steps between checkpoints; by default ten over the run. The last step is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: bool = False
    """Also keep the one with the lowest evaluation loss, saved as soon as it is seen, and export it at the end."""
    background: bool = True
    """Flush to disk and publish in a thread while training goes on."""
