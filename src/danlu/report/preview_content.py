"""What a preview says, in words that the terminal and the page share."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from danlu.data.dataset_summary import DatasetSummary, PackingSummary, SplitSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.data.statistics import Statistics
from danlu.recipe.sections import Data, Recipe
from danlu.types import Sample

ABOUT = {
    Reason.TEMPLATE: "the chat template's own text",
    Reason.SYSTEM: "system message",
    Reason.USER: "user message",
    Reason.ASSISTANT: "assistant's answer, with its tool calls",
    Reason.REASONING: "assistant's thoughts",
    Reason.TOOL: "result of a tool call",
    Reason.TERMINATOR: "end-of-turn token",
    Reason.BOS: "beginning-of-text token",
    Reason.EOS: "end-of-text token",
    Reason.TEXT: "plain text",
    Reason.PROMPT: "prompt, given as a string",
    Reason.COMPLETION: "completion, given as a string",
}

TRAINED = "trained: its target carries loss"
CONTEXT = "context: masked out (label -100), only read"

INSIDE = "‥"
SIGNS = {"↵": "newline", "⇥": "tab", "␣": "space", INSIDE: "rest of a character that the token before began"}
FIRST_TOKEN = "the first token of a sample is context, since nothing comes before it to predict it from"
MAX_DOCUMENTS = 6  # named for each pack
MAX_BINS = 12
MAX_SAMPLES = 3  # of a row that gives many
MAX_COLUMNS = 500  # characters of a row that cannot be used


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one reason and weight; `omitted` tokens are left out before it."""

    reason: Reason
    weight: float
    start: int
    stop: int
    omitted: int = 0

    @property
    def state(self) -> str:
        """`trained`, `trained x0.5` or `context`."""
        return "context" if self.weight == 0 else "trained" if self.weight == 1 else f"trained x{self.weight:g}"


def runs_of(sample: PreviewSample, most: int | None) -> Iterator[Run]:
    """The tokens of a sample in order, at most `most` of them: three quarters from its beginning, the rest its end."""
    count = len(sample.tokens)
    changes = (np.diff(sample.reasons) != 0) | (np.diff(sample.weights) != 0)
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), count]
    kept = [(0, count)]
    if most is not None and count > most:
        end = math.ceil(most / 4)
        kept = [(0, most - end), (count - end, count)]
    shown = 0
    for start, stop in pairwise(borders):
        for low, high in kept:
            first, last = max(start, low), min(stop, high)
            if first < last:
                reason, weight = Reason(int(sample.reasons[first])), float(sample.weights[first])
                yield Run(reason, weight, first, last, omitted=first - shown)
                shown = last
    assert shown == count, "the end of a sample is always shown"


def visible(text: str) -> str:
    """A token's text with everything to be seen in it: white space, controls, lone combining marks.

    A single space before a word stays one, since most tokens begin so. Newlines become signs: nothing that comes out
    moves a cursor, changes a colour or the direction of writing.
    """
    if not text:
        return INSIDE
    inner = text.lstrip(" ")
    spaces = len(text) - len(inner)
    body = inner.rstrip(" ")
    start = " " if spaces == 1 and body else "␣" * spaces
    # A space in the middle of a token stands between letters on both sides and cannot be overlooked.
    shown = printable(body)
    mark = "◌" if body and unicodedata.category(body[0]).startswith("M") else ""
    return start + mark + shown + "␣" * (len(inner) - len(body))


def printable(text: str) -> str:
    """A text in which only letters, signs and single spaces are left as they are."""
    return "".join(character if character == " " else _printable(character) for character in text)


def _printable(character: str) -> str:
    if character == "\n":
        return "↵"
    if character == "\t":
        return "⇥"
    if unicodedata.category(character)[0] in "CZ":  # controls, formats, unassigned; separators
        return f"‹{ord(character):04X}›"
    return character


def reasons_in(rows: Iterable[PreviewRow]) -> list[Reason]:
    """The reasons that occur, in the order of `Reason`."""
    seen = {int(reason) for row in rows for sample in row.samples for reason in np.unique(sample.reasons)}
    return [Reason(number) for number in sorted(seen)]


def name(reason: Reason) -> str:
    return reason.label


# -- rows -------------------------------------------------------------------------------------------------------------


def title(row: PreviewRow, data: Data) -> str:
    """`alpaca.json:17`, with what it is for where there is more than training."""
    return row.where if row.source < len(data.train) else f"{row.where} (evaluation)"


def remarks(row: PreviewRow, data: Data) -> list[str]:
    """What happened to a row besides being rendered."""
    if row.bad:
        columns = printable(row.columns)
        cut = f"{columns[:MAX_COLUMNS]}…" if len(columns) > MAX_COLUMNS else columns
        return [f"cannot be used: {printable(row.bad)}", *([f"its columns: {cut}"] if cut else [])]
    if row.dropped:
        return [f"dropped: {_with_length(row.dropped, data)}. It would have been:"]
    if row.shortened:
        lost = f"; {tokens(row.lost_tokens)} of it lost" if row.lost_tokens else ""
        return [_with_length(f"{row.shortened}: longer than max_length{lost}", data)]
    return []


def _with_length(reason: str, data: Data) -> str:
    return reason.replace("max_length", f"max_length {count(data.max_length)}")


def samples_of(row: PreviewRow, most: int | None) -> tuple[PreviewSample, ...]:
    """The samples of a row to show: all of them where all tokens are asked for."""
    return row.samples if most is None else row.samples[:MAX_SAMPLES]


def measure_of(sample: PreviewSample, number: int, of: int) -> str:
    """`sample 2 of 3: 160 tokens, 87 trained`."""
    which = f"sample {number} of {of}: " if of > 1 else ""
    return f"{which}{tokens(len(sample.tokens))}, {count(int(np.count_nonzero(sample.weights)))} trained"


# -- packs ------------------------------------------------------------------------------------------------------------


def packs_title(packed: PackingSummary, data: Data) -> str:
    kind = data.packing.kind
    if kind == "none":
        return f"{many(packed.packs, 'sample')}, each a sequence of its own (packing: none)"
    return (
        f"{many(packed.packs, 'packed sequence')} of {count(data.max_length)} tokens ({kind}), "
        f"{packed.efficiency:.1%} full: "
        f"{many(packed.samples, 'sample' if kind == 'best-fit' else 'document')}, {tokens(packed.tokens)}"
    )


def document(sample: Sample) -> str:
    """`160 alpaca.json:17`."""
    return f"{count(len(sample.tokens))} {sample.row}"


# -- counts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A line of the counts, with what is listed below it: a name, a number and its share of the longest bar's."""

    label: str
    value: str
    examples: tuple[str, ...] = ()
    bars: tuple[tuple[str, int, float], ...] = ()  # name, number, share of all


def facts(side: SplitSummary, data: Data) -> list[Fact]:
    """The counts of one side of the data."""
    found = side.statistics
    rows = Fact("rows", count(found.rows))
    longest = f", the longest of {tokens(found.longest)}" if found.samples else ""
    trained = f"{count(found.tokens)}, {count(found.trained_tokens)} trained ({found.trained_share:.1%})"
    bars = tuple(
        (Reason[reason.upper()].label, number, number / found.tokens)
        for reason, number in found.reasons.most_common()
        if number
    )
    return [
        rows,
        *_losses(found, data),
        Fact("samples", f"{count(found.samples)}{longest}"),
        Fact("tokens", trained),
        *([Fact("by reason", "", bars=bars)] if bars else []),
        *([Fact("sample lengths", "", bars=tuple(histogram(side.lengths)))] if len(side.lengths) else []),
        *_endless(found),
        *(Fact("look at", printable(line)) for line in found.template_lines()),
        *(Fact("not read", printable(line.removeprefix("not read: "))) for line in found.unread_lines()),
    ]


def _losses(found: Statistics, data: Data) -> Iterator[Fact]:
    if found.bad_rows:
        rule = "skipped" if data.on_bad_row == "skip" else "data.on_bad_row is error: a run stops at the first"
        yield Fact("bad rows", f"{count(found.bad_rows)} ({rule})", tuple(map(printable, found.bad_examples)))
    for how, number in found.shortened.items():
        yield Fact("over-long", f"{many(number, 'row')} longer than max_length {count(data.max_length)}: {how}")
    for why, number in found.dropped.items():
        yield Fact("dropped", f"{many(number, 'row')}: {_with_length(why, data)}")
    if found.lost_tokens:
        share = found.lost_tokens / (found.lost_tokens + found.tokens)
        yield Fact("lost tokens", f"{count(found.lost_tokens)} cut off or dropped with their row ({share:.1%} of all)")


def _endless(found: Statistics) -> Iterator[Fact]:
    if found.endless_answers:
        value = (
            f"{count(found.endless_answers)} of {count(found.answers)} samples train an answer but not its "
            "end-of-turn token, the first:"
        )
        yield Fact("without end", value, (found.endless_example,))


def histogram(lengths: np.ndarray) -> Iterator[tuple[str, int, float]]:
    """Samples by length: (range, number, share)."""
    for first, last, number in length_bins(lengths):
        yield f"{first}-{last}" if first < last else f"{first}", number, number / len(lengths)


def length_bins(lengths: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Samples by length: (shortest, longest, number), in ranges of one width, a power of two; none before the first."""
    longest = int(lengths.max(initial=1))
    width = 2 ** max(0, math.ceil(math.log2(longest / MAX_BINS)))
    counts = np.bincount((lengths - 1) // width)
    for place, number in enumerate(counts.tolist()):
        if not counts[: place + 1].any():
            continue  # shorter than all of them
        first, last = place * width + 1, (place + 1) * width
        yield first, last, number


def steps(recipe: Recipe, overview: DatasetSummary) -> str | None:
    """`8 packed sequences a step: 21 steps an epoch, 42 in this run`; None where no run would begin."""
    packed = overview.train.packed
    if packed is None:
        return None
    per_step = recipe.batch.packs(recipe.data.max_length)
    unit = "sample" if recipe.data.packing.kind == "none" else "packed sequence"
    begin = f"{many(per_step, unit)} a step"
    if overview.block:
        return (
            f"{begin}, {many(recipe.steps or 0, 'step')} in this run; these are the sequences "
            "of the stream's first block"
        )
    epoch = many(math.ceil(packed.packs / per_step), "step")
    if recipe.steps is not None:
        passes = recipe.steps * per_step / packed.packs
        return f"{begin}: {epoch} an epoch; this run has {count(recipe.steps)}, {passes:.3g} epochs"
    epochs = recipe.epochs or 1
    total = math.ceil(math.ceil(epochs * packed.packs) / per_step)
    return f"{begin}: {epoch} an epoch; this run has {count(total)} (epochs: {epochs:g})"


def sides(overview: DatasetSummary, data: Data) -> list[tuple[str, SplitSummary]]:
    """Training and, where there is one, evaluation, each with its heading."""
    held_out = ", with those held out" if isinstance(data.eval, int | float) else ""
    heading = "training rows: the first block of the stream" if overview.block else f"training rows{held_out}"
    found = [(heading, overview.train)]
    if overview.eval is not None:
        found.append(("evaluation rows", overview.eval))
    return found


def warnings(overview: DatasetSummary) -> Iterator[str]:
    """What is to be known before a run: rows that the cache holds otherwise, a tokenizer that loses text."""
    if overview.changed:
        yield (
            f"{', '.join(overview.changed)}: the token cache holds other tokens than those shown, and a run trains on "
            "the cache. Remove the folder that data.cache names"
        )
    if overview.date is not None:
        yield (
            f"the chat template writes the date: {overview.date} here; a run keeps that of the day it begins, or "
            "model.chat_template_date"
        )
    yield from overview.beyond
    if overview.tokenizer is not None and overview.tokenizer.warning:
        yield overview.tokenizer.warning


def count(number: int) -> str:
    return f"{number:,}"


def tokens(number: int) -> str:
    return many(number, "token")


def many(number: int, what: str) -> str:
    """`1 pack`, `2,000 packs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
