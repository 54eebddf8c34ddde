"""The order in which layers with a recurrent state go through packed tokens: documents and branches, cut into chunks.

A state is zero at the beginning of each document. A branch begins with the state behind its parent's last token, so
tokens that several branches share are gone through once.

T packed tokens · N chunks · C tokens of a chunk · P tokens before a run that a convolution sees
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.types import Branch
from danlu.models.kernel_limits import CHUNK_SIZES
from danlu.models.segments import Document, Segment, documents_of


@dataclass(frozen=True)
class Level:
    """Chunks that are computed at once: the state of each is that behind a chunk of the level before."""

    first: int  # number of its first chunk
    stop: int
    sources: Tensor | None
    """[chunks] int64: the chunk of the level before that each one follows; None: the first ones of it, in order."""
    last: Tensor | None
    """[chunks of it] int64: those that are the last of their runs; None where all of them are."""
    last_runs: Tensor
    """[as many] int64: numbers of these runs."""


@dataclass(frozen=True)
class Chunks:
    """Tokens as rows of chunks, in the order of the levels."""

    size: int  # C
    rows: Tensor  # [N, C] int64: which token each row is; 0 where a row fills a chunk up
    fill: Tensor | None  # [N, C] bool: rows that fill a chunk up; None where there are none
    places: Tensor  # [T] int64: of the N * C rows, the one that each token is
    levels: tuple[Level, ...]
    roots: Tensor  # [chunks of the first level] int64: numbers of the runs that begin with them

    @property
    def count(self) -> int:
        """N."""
        return len(self.rows)


@dataclass(frozen=True)
class Windows:
    """Tokens as rows, with the P before each run in front of it: a convolution over them needs no boundaries."""

    count: int  # of rows: T + P for each run
    places: Tensor  # [T] int64: the row that each token is
    shared: tuple[Tensor, Tensor] | None
    """Rows of tokens that stand in front of a branch, and the tokens; both [S] int64. None where there are none."""
    earlier: tuple[Tensor, Tensor]
    """Rows in front of runs that begin a document, and which of the P rows of every run each is; both [E] int64."""


class RecurrentOrder:
    """The order of a pack's runs: its documents, or the segments of trees. Indices are made once for all layers.

    boundaries, trees: as in `attend.PackedAttention`.
    """

    def __init__(self, boundaries: Sequence[int], trees: Sequence[Branch] = ()) -> None:
        documents: Sequence[Document] = documents_of(boundaries, trees)
        self.runs = tuple(segment for each in documents for segment in each if segment.stop > segment.start)
        self._chunks: dict[torch.device, Chunks] = {}
        self._windows: dict[tuple[torch.device, int], Windows] = {}

    @property
    def tokens(self) -> int:
        """T."""
        return self.runs[-1].stop if self.runs else 0

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Number of the run that each one follows; -1 where it begins a document."""
        ending = {run.stop - 1: number for number, run in enumerate(self.runs)}
        return tuple(ending[_tokens_before(run, 1)[0]] if run.before else -1 for run in self.runs)

    def chunks(self, device: torch.device) -> Chunks:
        """The runs as chunks."""
        if device not in self._chunks:
            self._chunks[device] = self._cut(device)
        return self._chunks[device]

    def windows(self, width: int, device: torch.device) -> Windows:
        """The runs, each behind the `width` tokens before it."""
        key = device, width
        if key not in self._windows:
            self._windows[key] = self._with_tokens_before(width, device)
        return self._windows[key]

    def _with_tokens_before(self, width: int, device: torch.device) -> Windows:
        places, shared, earlier = list[np.ndarray](), list[tuple[int, int]](), list[tuple[int, int]]()
        row = 0
        for number, run in enumerate(self.runs):
            before = _tokens_before(run, width)
            missing = width - len(before)
            earlier += [(row + place, number * width + place) for place in range(missing)]
            shared += [(row + missing + place, token) for place, token in enumerate(before)]
            row += width
            places.append(np.arange(row, row + run.stop - run.start))
            row += run.stop - run.start
        pairs = [torch.tensor(each, dtype=torch.int64).view(-1, 2).unbind(1) for each in (shared, earlier)]
        shared_rows, earlier_rows = ((copy_to(rows, device), copy_to(of, device)) for rows, of in pairs)
        return Windows(
            row,
            copy_to(torch.from_numpy(np.concatenate(places)), device),
            shared_rows if shared else None,
            earlier_rows,
        )

    def _cut(self, device: torch.device) -> Chunks:
        longest = max(run.stop - run.start for run in self.runs)
        size = next((size for size in CHUNK_SIZES if size >= longest), CHUNK_SIZES[-1])
        counts = [-(-(run.stop - run.start) // size) for run in self.runs]
        children: dict[int, list[int]] = {}
        for number, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(number)
        # The longest runs first: those that go on are then the first ones of the level before, and none is copied.
        roots = sorted(children[-1], key=lambda number: -counts[number])
        level = [(number, 0) for number in roots]  # (run, chunk of it)
        chunks: list[tuple[int, int]] = []
        levels: list[Level] = []
        sources: Tensor | None = None
        while level:
            last = [place for place, (number, chunk) in enumerate(level) if chunk == counts[number] - 1]
            last_runs = torch.tensor([level[place][0] for place in last], dtype=torch.int64)
            is_last = None if len(last) == len(level) else copy_to(torch.tensor(last, dtype=torch.int64), device)
            levels.append(Level(len(chunks), len(chunks) + len(level), sources, is_last, copy_to(last_runs, device)))
            chunks += level
            following: list[tuple[int, int]] = []
            source: list[int] = []
            for place, (number, chunk) in enumerate(level):
                after = (
                    [(number, chunk + 1)] if chunk + 1 < counts[number] else [(n, 0) for n in children.get(number, ())]
                )
                following += after
                source += [place] * len(after)
            sources = None if source == list(range(len(source))) else copy_to(torch.tensor(source), device)
            level = following
        starts = np.array([self.runs[number].start + chunk * size for number, chunk in chunks])
        stops = np.array([self.runs[number].stop for number, _ in chunks])
        rows = starts[:, None] + np.arange(size)
        fill = rows >= stops[:, None]
        places = np.empty(self.tokens, dtype=np.int64)
        places[rows[~fill]] = np.flatnonzero(~fill)
        rows[fill] = 0
        return Chunks(
            size,
            copy_to(torch.from_numpy(rows), device),
            copy_to(torch.from_numpy(fill), device) if fill.any() else None,
            copy_to(torch.from_numpy(places), device),
            tuple(levels),
            copy_to(torch.tensor(roots), device),
        )


class RecurrentCache(Protocol):
    """States that some tokens of a pass continue: of one sequence or several."""

    @property
    def tokens(self) -> slice: ...  # of the pass

    @property
    def order(self) -> RecurrentOrder | None: ...  # of these tokens, a run of each sequence; None: each has one token

    def read(self, layer: int) -> Sequence[Tensor]: ...  # [sequences, *shape] of each of `LayerCache.states`

    def write(self, layer: int, *states: Tensor) -> None: ...  # likewise, behind these tokens


class HeadExchange(Protocol):
    """Exchanges tokens for heads among processes that have parts of the same documents: each gets some heads of all
    their tokens, which are whole documents then."""

    @property
    def size(self) -> int: ...  # processes

    @property
    def index(self) -> int: ...  # of this one: it gets the heads of the part with this number of so many equal ones

    @property
    def order(self) -> RecurrentOrder: ...  # of the tokens of all

    def to_heads(self, x: Tensor) -> Tensor: ...  # [t, H, ..] of the tokens here -> [T, H / size, ..] in that order

    def to_tokens(self, x: Tensor) -> Tensor: ...  # the way back


@dataclass(frozen=True)
class RecurrentPart:
    """Some of the tokens of a forward pass, and how they are gone through."""

    tokens: slice
    order: RecurrentOrder | HeadExchange
    """The order of these tokens, or the exchange that makes whole documents of them and of other processes' tokens."""


@dataclass(frozen=True)
class RecurrentRuns:
    """How layers with a state go through the tokens of a forward pass; `runs` of an `Attend`."""

    order: RecurrentOrder
    """The order of all tokens; states are zero at the beginning of each document."""
    caches: Sequence[RecurrentCache] | None = None
    """The caches that parts of the tokens, in order, continue in a rollout; None elsewhere."""
    parts: Sequence[RecurrentPart] = ()
    """The parts of the tokens on a context rank, in order and independent of each other; they replace `order`."""


def _tokens_before(run: Segment, most: int) -> list[int]:
    """The last tokens, `most` at most, that come before a run on its path."""
    missing = min(most, run.before)
    tokens: list[int] = []
    for start, stop in reversed(run.path):
        stop = min(stop, run.start) if start <= run.start else stop
        taken = range(max(start, stop - (missing - len(tokens))), stop)
        tokens = [*taken, *tokens]
    return tokens
