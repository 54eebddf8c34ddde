"""The packs of a run with lengths that grow in stages; packs are numbered within each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.core.errors import CheckpointError
from danlu.core.types import Pack
from danlu.data.packed_dataset import PackedDataset

STAGE_ITEMS = 2**40
"""Numbers of packs that each stage has: pack n of stage k, counted from 0, is item k x 2^40 + n of the run. So where a
stage begins does not depend on how many packs those before it took, and a rewind may leave some out."""


class StagedPacks:
    """An `ItemSource`: pack n of a stage is a pure function of (samples, packing, seed, stage, n).

    Args:
        packs: of each stage, in order.
        lengths: tokens of a pack, of each stage.
    """

    def __init__(self, packs: Sequence[PackedDataset], lengths: Sequence[int]) -> None:
        self._packs, self._lengths = packs, lengths

    def at(self, number: int) -> Pack:
        """Item `number` of the run."""
        stage, place = divmod(number, STAGE_ITEMS)
        return replace(self._packs[stage].at(place), stage_length=self._lengths[stage])

    def state(self, number: int) -> dict[str, Any]:
        """Returns the state for a checkpoint: a digest of each stage's samples."""
        return {"stages": [packs.state() for packs in self._packs]}

    def restore(self, state: dict[str, Any]) -> None:
        """Checks that these are the packs the checkpoint was made with.

        Raises:
            CheckpointError: they are not.
        """
        kept = state.get("stages", [])
        if len(kept) != len(self._packs):
            raise CheckpointError(
                f"the checkpoint was made with {len(kept)} stages of lengths, the recipe has {len(self._packs)}. "
                "Restore them, or start a new run"
            )
        for packs, of_stage in zip(self._packs, kept, strict=True):
            packs.restore(of_stage)
