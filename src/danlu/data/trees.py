"""Samples that are trees: how long their paths are, and the same rows with every path written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from danlu.core.types import Branch, Sample


def path_lengths(branches: Sequence[Branch]) -> list[int]:
    """Tokens from the beginning of its root to the end of each branch."""
    lengths: list[int] = []
    for parent, start, stop in branches:
        lengths.append(stop - start + (lengths[parent] if parent >= 0 else 0))
    return lengths


def longest_path(sample: Sample) -> int:
    """Tokens from the beginning of a root to the end of a leaf, of the longest such path."""
    return max(path_lengths(sample.branches), default=len(sample.tokens))


def repeat_stem(sample: Sample) -> Sample:
    """Returns the sample with a root for each leaf, which has its own copy of the shared prefix.

    A copy becomes the beginning of the first branch behind it that no other leaf shares, and has that one's facts;
    facts of the shared prefix are gone. Columns are copied with the tokens. A chain, and a sample without branches, is
    returned as it is.

    Raises ValueError if a shared prefix carries weight: it would count once for each copy.
    """
    branches = sample.branches
    leaves = [0] * len(branches)  # below each branch
    parents = {branch.parent for branch in branches}
    for number in range(len(branches) - 1, -1, -1):
        leaves[number] += number not in parents
        if branches[number].parent >= 0:
            leaves[branches[number].parent] += leaves[number]
    if all(count == 1 for count in leaves):
        return sample
    taken: list[np.ndarray] = []  # tokens of the sample, in their new order
    repeated: list[Branch] = []
    kept: list[int] = []  # the branch that each of `repeated` has the facts of
    renumbered: dict[int, int] = {}
    end = 0
    for number, branch in enumerate(branches):
        if leaves[number] > 1:
            if sample.weights[branch.start : branch.stop].any():
                raise ValueError(
                    f"{sample.row}: tokens that several branches share carry weight; copies count it twice"
                )
            continue
        own = [np.arange(branch.start, branch.stop)]
        if branch.parent not in renumbered:
            above = branch.parent
            while above >= 0:
                own.insert(0, np.arange(branches[above].start, branches[above].stop))
                above = branches[above].parent
        taken += own
        renumbered[number] = len(repeated)
        kept.append(number)
        length = sum(map(len, own))
        repeated.append(Branch(renumbered.get(branch.parent, -1), end, end + length))
        end += length
    return sample.rearranged(np.concatenate(taken), repeated, kept)
