"""Packs from data larger than memory or disk: rows are read and tokenised while training, nothing is stored.

The rows of all sources form one endless sequence: by weights, at every point each source has given its share to within
a row; without weights the sources take turns until each is used up, and begin again. The sequence is cut into blocks of
`shuffle_buffer` rows, and within a block samples are shuffled, packed, and the packs shuffled by (seed, block). So pack
n is a pure function of the data and (seed, n), and the state of a stream is small: how many rows of each source lie
before the current block, and how many of the block's packs are used. `restore` reads up to there and tokenises one
block again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import Pack
from danlu.data import sources
from danlu.data.packed_dataset import PackedDataset
from danlu.data.permutation import key
from danlu.data.prepare import BadRowPolicy, DatasetSpec, check_trained, read, tokenise_rows, worker_count
from danlu.data.raw_rows import RawRow
from danlu.data.samples import SampleBlock, Selection
from danlu.data.statistics import Statistics
from danlu.data.worker_pool import WorkerPool

REMEMBERED_BLOCKS = 2**16
"""The number of blocks with positions kept, so that `state` can go back to the start of a failed step: at most
25 MB.
"""


@dataclass(frozen=True)
class Position:
    """A place in the sequence of rows, for each source."""

    given: tuple[int, ...]  # rows given since its share was last reckoned
    rows: tuple[int, ...]  # rows given in this pass over it
    used_up: tuple[bool, ...]  # without weights: waits for the others


class InterleavedRows:
    """The endless sequence of rows of several sources.

    Args:
        readers: for each source a function that reads its rows from the first.
        weights: relative shares of rows; all None to take turns.
    """

    def __init__(self, readers: Sequence[Callable[[], Iterator[RawRow]]], weights: Sequence[float | None]) -> None:
        count = len(readers)
        self._readers = readers
        self._shares = [1.0 if weight is None else weight for weight in weights]
        self._weighted = weights[0] is not None
        self._iterators: list[Iterator[RawRow] | None] = [None] * count
        self.position = Position((0,) * count, (0,) * count, (False,) * count)

    @property
    def position(self) -> Position:
        """The position of the next row; setting it continues from there, and reads the sources again."""
        return Position(tuple(self._given), tuple(self._rows), tuple(self._used_up))

    @position.setter
    def position(self, position: Position) -> None:
        self._given, self._rows, self._used_up = list(position.given), list(position.rows), list(position.used_up)
        self._iterators = [None] * len(self._readers)

    def take(self, count: int) -> list[list[RawRow]]:
        """The next `count` rows, sorted by source; without weights fewer where a pass over all sources ends.

        Raises:
            DataError: a source has no rows.
        """
        taken: list[list[RawRow]] = [[] for _ in self._readers]
        while count:
            source = min(self._waiting(), key=lambda number: ((self._given[number] + 1) / self._shares[number], number))
            row = self._next(source)
            if row is not None:
                taken[source].append(row)
                count -= 1
            elif not self._waiting():
                self._used_up = [False] * len(self._readers)
                self._given = [0] * len(self._readers)
                if any(taken):
                    break
        return taken

    def _waiting(self) -> list[int]:
        return [number for number, used_up in enumerate(self._used_up) if not used_up]

    def _next(self, source: int) -> RawRow | None:
        """The next row of a source, or None when a pass over it ends."""
        iterator = self._iterators[source]
        if iterator is None:
            # Rows before the position are read and dropped: the formats have no index to jump by.
            iterator = self._iterators[source] = islice(self._readers[source](), self._rows[source], None)
        row = next(iterator, None)
        if row is not None:
            self._rows[source] += 1
            self._given[source] += 1
            return row
        if not self._rows[source]:
            raise DataError(f"data.train.{source}: no rows")
        self._iterators[source], self._rows[source] = None, 0
        self._used_up[source] = not self._weighted
        return None


@dataclass(frozen=True)
class _PackedBlock:
    """The packs of `data.shuffle_buffer` rows, with the positions before the first and behind the last of them."""

    number: int
    start: Position  # of its first row
    end: Position
    packs: PackedDataset | None  # None when no row of the block gave a sample
    statistics: Statistics
    bad: tuple[str, ...]


class StreamingDataset:
    """Packs in order, from rows read while training. Use as a context manager, or `close` it.

    While the packs of one block are used, the next block is read and tokenised in the background.

    Attributes:
        statistics: of the blocks begun so far, since the stream was opened or restored.

    Raises:
        DataError: from `at`, for bad rows, or when a whole block has nothing to train on.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self._data = data = spec.data
        self._seed = spec.seed
        job = spec.job()
        # Opened once to learn the formats, and that every source is there, before anything expensive begins.
        self._sources = sources.source_names(data.train)
        self._settings = [spec.settings(read(source, spec)[0]) for source in data.train]
        readers = [partial(sources.read_rows, source, data.columns) for source in data.train]
        self._rows = InterleavedRows(readers, [source.weight for source in data.train])
        self._workers = WorkerPool(job, worker_count(data))
        self._background = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._bad_rows = BadRowPolicy(data)
        self.statistics = Statistics()
        self._begin(0, self._rows.position, number=0, used=0)

    def __enter__(self) -> StreamingDataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the background work."""
        self._background.shutdown(wait=False, cancel_futures=True)
        self._workers.close()

    def at(self, number: int) -> Pack:
        """Pack `number`; packs are asked for in order.

        Raises:
            ValueError: it is not the next one.
        """
        if number != self._number:
            raise ValueError(f"the packs of a stream come in order: asked for {number}, the next is {self._number}")
        while self._block is None or self._block.packs is None or self._used == self._block.packs.packs_per_epoch:
            self._advance()
        pack = self._block.packs.at(self._used)
        self._number += 1
        self._used += 1
        return pack

    def state(self, number: int | None = None) -> dict[str, Any]:
        """Returns the state for a checkpoint with which pack `number` comes next (by default the one that would); JSON
        values.

        Raises:
            ValueError: `number` lies further back than the last few blocks, or ahead.
        """
        number = self._number if number is None else number
        # Where a block ends, the end of the one before is meant, read ahead or not: the same place has one state.
        oldest = self._begun[0][0]
        for first, block, position in reversed(self._begun):
            if first < number <= self._number or first == number == oldest:
                # Lists: JSON has no tuples, and a checkpoint keeps only what comes back as it was.
                lists = {name: list(values) for name, values in asdict(position).items()}
                return {"pack": number, "block": block, "used": number - first, "position": lists}
        raise ValueError(f"pack {number} is not among those kept: the next is {self._number}")

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: the state belongs to another set of sources.
        """
        position = Position(**{name: tuple(values) for name, values in state["position"].items()})
        if len(position.rows) != len(self._data.train):
            raise CheckpointError(
                f"the checkpoint was made with {len(position.rows)} sources in data.train, the recipe has "
                f"{len(self._data.train)}. Restore them, or start a new run"
            )
        self._next.cancel()
        wait([self._next])
        self.statistics = Statistics()
        self._begin(state["block"], position, number=state["pack"], used=state["used"])

    def _begin(self, block: int, position: Position, *, number: int, used: int) -> None:
        """Make block `block` at `position` the next, of which `used` packs are done with."""
        self._number = number
        self._used = 0
        self._skip = used
        self._block: _PackedBlock | None = None
        self._begun = deque([(number - used, block, position)], maxlen=REMEMBERED_BLOCKS)
        self._next: Future[_PackedBlock] = self._background.submit(self._load, block, position)

    def _advance(self) -> None:
        block = self._next.result()
        self._bad_rows.check(block.bad, block.statistics.rows)
        check_trained(block.statistics, f"rows of block {block.number} of the stream")
        self.statistics.add(block.statistics)
        if self._block is not None:
            self._begun.append((self._number, block.number, block.start))
        self._block, self._used, self._skip = block, self._skip, 0
        self._next = self._background.submit(self._load, block.number + 1, block.end)

    def _load(self, number: int, start: Position) -> _PackedBlock:
        if self._rows.position != start:
            self._rows.position = start
        blocks: list[list[SampleBlock]] = [[] for _ in self._sources]
        bad: list[str] = []
        statistics = Statistics()
        taken = self._rows.take(self._data.shuffle_buffer)
        for settings, rows, blocks_of_source in zip(self._settings, taken, blocks, strict=True):
            for chunk in tokenise_rows(rows, settings, self._workers):
                blocks_of_source.append(chunk.block)
                statistics.add(chunk.statistics)
                bad += chunk.bad
        samples = Selection.all_of([SampleBlock.join(blocks_of_source) for blocks_of_source in blocks], self._sources)
        seed = key(self._seed, "stream", number)
        packs = PackedDataset(samples, self._data.packing, self._data.max_length, seed) if len(samples) else None
        return _PackedBlock(number, start, self._rows.position, packs, statistics, tuple(bad))
