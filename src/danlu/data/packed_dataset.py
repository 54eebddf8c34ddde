"""The endless sequence of packs over stored samples: pack n is a pure function of (samples, packing, seed, n)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import Pack, Sample
from danlu.data.packing import efficiency, plan_packing
from danlu.data.permutation import Permutation
from danlu.data.samples import Samples
from danlu.recipe.sections import Packing


class PackedDataset:
    """Samples shuffled by the seed, packed once, and walked in a new order of packs every epoch.

    Any pack can be asked for at any time, so a resumed run needs no more than its number.

    Attributes:
        packs_per_epoch: packs that hold every sample once.
        tokens_per_epoch: real tokens in them (there is no padding).
        efficiency: share of the packs' room that holds tokens.

    Raises:
        DataError: there are no samples, or one is longer than a pack.
    """

    def __init__(self, samples: Samples, packing: Packing, max_length: int, seed: int, *, shuffle: bool = True) -> None:
        if not len(samples):
            raise DataError("there are no samples to pack: every row was skipped, dropped or held out")
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle
        count = len(samples)
        self._order = Permutation.of(count, seed, "samples").all() if shuffle else np.arange(count)
        lengths = samples.lengths[self._order]
        self._layout = plan_packing(lengths, packing.kind, max_length, packing.window)
        self.packs_per_epoch = len(self._layout)
        self.tokens_per_epoch = int(lengths.sum(dtype=np.int64))
        self.efficiency = efficiency(lengths, self.packs_per_epoch, max_length)
        described = f"{samples.digest()} {packing.kind} {packing.window} {max_length} {seed} {shuffle}"
        self._digest = hashlib.sha256(described.encode()).hexdigest()[:16]

    def at(self, number: int) -> Pack:
        """Pack `number` of the endless sequence; epoch = number // packs_per_epoch."""
        epoch, place = divmod(number, self.packs_per_epoch)
        if self._shuffle:
            place = Permutation.of(self.packs_per_epoch, self._seed, "packs", epoch)[place]
        return Pack(tuple(self._segment(*segment) for segment in self._layout.pack(place)))

    def epoch(self) -> Sequence[Pack]:
        """The packs of the first epoch in its order, each made when it is asked for."""
        return _Epoch(self)

    def state(self, number: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint, whichever pack comes next: a digest by which `restore` recognises the
        samples.
        """
        return {"samples": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Check that these are the packs the checkpoint was made with.

        Raises:
            CheckpointError: they are not.
        """
        if state != self.state():
            raise CheckpointError(
                "the training data is not what the checkpoint was made with "
                f"(samples {self._digest}, checkpoint {state.get('samples')}): the rows, tokenizer, packing or seed "
                "changed. Restore them, or start a new run"
            )

    def _segment(self, place: int, start: int, stop: int) -> Sample:
        sample = self._samples.sample(int(self._order[place]))
        return sample if (start, stop) == (0, len(sample.tokens)) else cut(sample, start, stop)


@dataclass(frozen=True)
class _Epoch(Sequence[Pack]):
    dataset: PackedDataset

    def __len__(self) -> int:
        return self.dataset.packs_per_epoch

    @overload
    def __getitem__(self, index: int) -> Pack: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pack]: ...
    def __getitem__(self, index: int | slice) -> Pack | Sequence[Pack]:
        numbers = range(len(self))[index]
        return self.dataset.at(numbers) if isinstance(numbers, int) else list(map(self.dataset.at, numbers))


def cut(sample: Sample, start: int, stop: int) -> Sample:
    """Tokens `start` to `stop` as a sample of its own: the first has nothing before it, so it is context only."""
    weights = sample.weights[start:stop].copy()
    weights[:1] = 0
    columns = {name: values[start:stop] for name, values in sample.columns.items()}
    return Sample(sample.tokens[start:stop], weights, sample.row, sample.source, columns=columns)
