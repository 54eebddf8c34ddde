"""What a verification asks of the kind of thing that a recipe trains. All else is the same for all kinds.

`language.py` has the answers for decoders on packs of tokens, `images.py` those for classifiers of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.stage_protocols import PlacedModel
from danlu.train.step import AnyLearner
from danlu.types import Item

Groups = Sequence[Sequence[tuple[int, Any]]]
"""The micro-batches of a process: (number in the step, item)."""


@dataclass
class PlacedProxy:
    """A recipe's model on the processes of a layout."""

    placed: PlacedModel
    learner: AnyLearner
    recipe: Recipe
    ranks: Ranks


class Proxy(Protocol):
    """What all processes of a verification know of the small model, beside the recipe."""

    @property
    def tied(self) -> bool: ...  # its head is its embedding

    @property
    def norms(self) -> bool: ...  # it has parameters that shards leave whole

    def place(self, recipe: Recipe, ranks: Ranks, device: torch.device, resumed: Path | None) -> PlacedModel:
        """The model on the processes of a layout; resumed: a checkpoint that will be loaded into it."""
        ...

    def sent(self, learning: PlacedProxy, groups: Groups) -> list[CollectiveTraffic]:
        """What this process sends in a step, by formulas."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A recipe made ready to be verified: small, unless it was asked for as it is."""

    recipe: Recipe
    proxy: Proxy
    items: Sequence[Item]
    parameters: int
    counted_in: str  # "packed sequences", "images"
    model: str  # in words
    data: str  # where items are from, in words
    notes: Sequence[str] = ()  # what is not as the recipe says, beside sizes
