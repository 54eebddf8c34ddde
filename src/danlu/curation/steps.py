"""The seam of curation: a step measures rows, may gather what it measured over the whole set, and decides on each row.

Measuring is apart from deciding, so that another threshold decides again without measuring. Marks and summaries are
columns, so that they can be kept in files and sent between processes as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from danlu.curation.rows import Row
from danlu.curation.tables import Table

Needs = Literal["text", "tokens", "logprobs", "embedding"]
Outcome = Literal["keep", "drop", "change"]
Marks = Table
"""The table of what was measured: a row for each row of a batch, in order."""
Summary = Table
"""A table about the whole set."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision on a row.

    Attributes:
        reason: the rule that decided, such as "gopher.words"; empty where none applied.
        value: the measured value that the rule compares.
        threshold: the bound that it compares with.
        texts: of a change the new texts, one for each part of the row.
        kept: the place of the row that stays in place of a duplicate.
    """

    outcome: Outcome
    reason: str = ""
    value: float | None = None
    threshold: float | None = None
    texts: tuple[str, ...] | None = None
    kept: int | None = None

    def __post_init__(self) -> None:
        assert (self.texts is not None) == (self.outcome == "change"), f"{self.outcome} with texts {self.texts}"
        is_explained = bool(self.reason) and self.value is not None and self.threshold is not None
        assert is_explained or self.outcome == "keep", (
            f"{self.outcome} for '{self.reason}' without a value or threshold"
        )


KEEP = Verdict("keep")


@runtime_checkable
class Step(Protocol):
    """A step that judges each row by itself.

    It is a frozen dataclass of its settings: pure, picklable, and the same in every process.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised when the same rows get other marks: those kept from before are then measured again."""
    needs: ClassVar[Needs]

    def measured_with(self) -> Mapping[str, object]:
        """The settings that `measure` reads, as JSON can hold them; another value of them gives other marks."""

    def measure(self, rows: Sequence[Row]) -> Marks:
        """The marks of some rows, each measured by itself: how rows are batched changes nothing."""

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        """A verdict for each row. summary: empty for steps that gather none."""


@runtime_checkable
class GatheringStep(Step, Protocol):
    """A step that needs to know the whole set before it can judge a row.

    It passes over the set `rounds` times, and in each round gathers more of the rows that the rounds before left in
    question. `merge` is associative and commutative, and a batch that is merged twice counts once: a summary is the
    same in whatever order partitions come, and when some are repeated.
    """

    rounds: ClassVar[int]

    def gather(self, rows: Sequence[Row], marks: Marks, earlier: Sequence[Summary]) -> Summary:
        """The part of some rows in the summary of a round. earlier: the conclusions of the rounds before."""

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """The summary of all rows of the given ones, at least one."""

    def conclude(self, round: int, summary: Summary) -> Summary:
        """Computes, once from a summary of all rows, the table that the next round or `decide` is given."""


@runtime_checkable
class SplitStep(GatheringStep, Protocol):
    """A step with rounds that can be gathered in parts, so that the summary of one part is in memory at a time."""

    def split(self, round: int, earlier: Sequence[Summary]) -> list[Sequence[Summary]]:
        """The `earlier` of each part of a round, at least one: `gather` with it takes the rows of that part alone."""

    def join(self, round: int, conclusions: Sequence[Summary]) -> Summary:
        """The conclusion of the round, from those of its parts in any order."""


def parts_of_round(step: GatheringStep, round: int, earlier: Sequence[Summary]) -> list[Sequence[Summary]]:
    """Returns the `earlier` of each part of a round; one part of a step that does not split it."""
    return step.split(round, earlier) if isinstance(step, SplitStep) else [earlier]


def join_parts(step: GatheringStep, round: int, conclusions: Sequence[Summary]) -> Summary:
    """The conclusion of a round from those of its parts, at least one."""
    return step.join(round, conclusions) if isinstance(step, SplitStep) else conclusions[0]
