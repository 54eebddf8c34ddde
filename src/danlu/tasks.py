"""What a run asks of the kind of thing that it trains. `run.py` chooses one `Task` and knows no more of it than this.

A task reads its data and places its model; the model it placed makes the `Learner` of the loop, and is written as the
result. `language.py` has the one for language models, `classifying.py` the one for classifiers of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from danlu.memory_estimate import MemoryEstimate
from danlu.optim.build import Optimizers
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.plan.gemm import Peak
from danlu.train.memory_parts import MemoryParts
from danlu.train.position import PackSource
from danlu.train.run_folder import Start
from danlu.train.state import Generate, Run
from danlu.train.step import Learner
from danlu.types import Item

LeastSeconds = Callable[[Sequence[int], int], float]
"""(document lengths, targets) of a step -> the seconds it would take at the matrix-product speed of all its devices."""


@dataclass(frozen=True)
class Material:
    """What is trained on."""

    source: PackSource
    per_epoch: int | None  # items; None for a stream
    held_out: Sequence[Item] | None
    lines: Sequence[str]  # what became of the rows, for the console
    late_lines: Callable[[], Sequence[str]] = tuple  # the same, of what is known only when all was read
    close: Callable[[], None] = lambda: None


class PlacedModel(Protocol):
    """A model on the processes of a run: all that is asked of it before it is trained, and after."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def parallel(self) -> StepParallel: ...

    @property
    def name(self) -> str: ...  # for the console: "llama"

    @property
    def notes(self) -> Sequence[str]: ...  # likewise, of how it was placed

    def parameters(self) -> list[tuple[str, Parameter]]: ...  # as much of each as is here

    def base(self) -> Mapping[str, Any] | None: ...  # what tells the base of a trained adapter from another; JSON

    def weights(self) -> dict[str, Tensor]: ...  # what a checkpoint has of it, by name, live; of one that is whole

    def micro(self, optimizer: Optimizers, most: int) -> int: ...  # items in a micro-batch, at most so many

    def learner(self, micro: int) -> Learner: ...

    def generate(self) -> Generate | None: ...  # texts, where the recipe asks for samples

    def peak(self) -> Peak | None: ...  # what utilisation is measured against; None where that says nothing

    def least_seconds(self) -> LeastSeconds | None: ...

    def expected(self, run: Run) -> MemoryEstimate | None: ...  # what a step will hold in memory

    def memory(self, run: Run) -> MemoryParts: ...  # of a run that has counted its activations

    def write(self, target: Path, value: Callable[[str], Tensor | None] | None, *, writes: bool) -> None:
        """Writes the result; `value` and `writes` as in `models.saving.save`."""


class Task(Protocol):
    """What a stage trains, and on what."""

    @property
    def items(self) -> str: ...  # what a batch is counted in: "packs", "images"

    @property
    def counted(self) -> str: ...  # what a model reads, and its speed is told in: "tokens", "images"

    def check(self, start: Start | None) -> None: ...  # what can be wrong before any data is read; start: see `place`

    def read(self, stream: TextIO) -> Material: ...  # showing its progress on `stream`

    def place(self, ranks: Ranks, device: torch.device, start: Start | None) -> PlacedModel: ...  # once data is read

    def unplaced(self, checkpoint: Path) -> PlacedModel: ...  # on the CPU, to load a checkpoint into and write it

    def amount(self, items: int) -> str: ...  # in words: "4 x 64 tokens", "128 images"

    def targets(self, items: int) -> int: ...  # at most, of so many
