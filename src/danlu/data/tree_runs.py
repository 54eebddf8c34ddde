"""The runs of stored trees as flat arrays: how long each branch is, and what it sees, without reading any token.

They are laid out as a step has them (`stages.tree_reader`, `data.mismatched`), row by row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from danlu.data.samples import BRANCH, Selection


class TreeRuns(NamedTuple):
    """The branches of some rows, one row after the other."""

    runs: np.ndarray
    """[runs, 2] int64: the tokens of each branch, and those of its path before them; 0 in front of a document."""
    offsets: np.ndarray
    """[rows + 1] int64: of each row's first run."""
    targets: np.ndarray
    """[rows] int64: tokens of answers that a loss is computed from."""

    def taken(self, rows: np.ndarray) -> TreeRuns:
        """Returns some rows, in another order."""
        counts = np.diff(self.offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], counts)
        return TreeRuns(self.runs[places], offsets, self.targets[rows])


class _Branches(NamedTuple):
    """Branches by their numbers within all rows."""

    rows: np.ndarray
    """[branches] int64: the row of each."""
    parents: np.ndarray
    """[branches] int64: -1 for a root."""
    tokens: np.ndarray
    """[branches] int64."""
    before: np.ndarray
    """[branches] int64: tokens of the path before the first one."""


def tree_runs(
    samples: Selection, *, mismatched_to: int | None = None, longest_shared: int | None = None
) -> TreeRuns | None:
    """The runs of rows as a step lays them out; None where the samples are no trees.

    mismatched_to: each row has the next one's answer too (`MismatchedAnswers`), in paths of so many tokens at most.
    longest_shared: tokens of the longest path that shares its prefix; None: any. A longer row has copies of it.
    """
    stored = samples.branches()
    if stored is None:
        return None
    branches, offsets = stored
    if mismatched_to is not None:
        branches, offsets = _with_mismatched(branches, offsets, mismatched_to)
    numbered = _numbered(branches, offsets)
    is_answer = numbered.parents >= 0
    has_stem = np.zeros(len(offsets) - 1, bool)
    has_stem[numbered.rows[is_answer]] = True
    is_answer |= ~has_stem[numbered.rows]  # answers that have no token in common
    if mismatched_to is not None:
        is_answer[offsets[1:] - 1] = False
    targets = np.bincount(numbered.rows, np.where(is_answer, numbered.tokens, 0), len(offsets) - 1).astype(np.int64)
    if longest_shared is None:
        return TreeRuns(np.stack((numbered.tokens, numbered.before), axis=1), offsets, targets)
    has_mismatched = mismatched_to is not None
    return TreeRuns(*_with_copies(numbered, len(offsets) - 1, longest_shared, has_mismatched), targets)


def _numbered(branches: np.ndarray, offsets: np.ndarray) -> _Branches:
    rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    parents = np.where(branches["parent"] < 0, -1, branches["parent"] + offsets[:-1][rows])
    tokens = (branches["stop"] - branches["start"]).astype(np.int64)
    before = np.zeros(len(tokens), np.int64)
    while True:  # once for each level of the deepest tree
        deeper = np.where(parents < 0, 0, (before + tokens)[parents])
        if (deeper == before).all():
            return _Branches(rows, parents, tokens, before)
        before = deeper


def _with_mismatched(branches: np.ndarray, offsets: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The branches with one more behind each row's: the last one of the next row, cut to what its path has room for."""
    first, last = branches[offsets[:-1]], branches[offsets[1:] - 1]
    following = np.roll(last, -1)
    tokens = np.minimum(following["stop"] - following["start"], np.maximum(1, max_length - first["stop"]))
    added = np.zeros(len(last), BRANCH)
    added["start"], added["stop"] = last["stop"], last["stop"] + tokens
    return np.insert(branches, offsets[1:], added), offsets + np.arange(len(offsets))


def _with_copies(own: _Branches, rows: int, longest_shared: int, has_mismatched: bool) -> tuple[np.ndarray, np.ndarray]:
    """(runs, offsets) in which a row with a longer path repeats the prefix that its answers share."""
    paths = own.before + own.tokens
    longest = np.zeros(rows, np.int64)
    np.maximum.at(longest, own.rows, paths)
    is_copied = (longest > longest_shared)[own.rows]
    runs = np.stack((own.tokens, own.before), axis=1)
    if has_mismatched:  # the prompt once more, as the root of the last branch
        is_last = np.append(own.rows[1:] != own.rows[:-1], True) & is_copied
        places = np.flatnonzero(is_last)
        roots = np.stack((own.before[places], np.zeros_like(places)), axis=1)
        runs, of_rows = np.insert(runs, places, roots, axis=0), np.insert(own.rows, places, own.rows[places])
    else:
        is_shared = (_leaves(own) > 1) & is_copied
        begins = (own.parents >= 0) & is_shared[own.parents]
        runs = np.where(begins[:, None], np.stack((paths, np.zeros_like(paths)), axis=1), runs)[~is_shared]
        of_rows = own.rows[~is_shared]
    return runs, np.concatenate(([0], np.cumsum(np.bincount(of_rows, minlength=rows))))


def _leaves(own: _Branches) -> np.ndarray:
    """[branches] int64: the leaves below each; 1 of a leaf."""
    is_leaf = np.ones(len(own.parents), bool)
    is_leaf[own.parents[own.parents >= 0]] = False
    leaves, above = is_leaf.astype(np.int64), own.parents[is_leaf]
    while len(above := above[above >= 0]):
        np.add.at(leaves, above, 1)
        above = own.parents[above]
    return leaves
