"""The texts of a preview that the terminal and the HTML page share: runs of tokens, rows, packs, counts."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from danlu.core.types import Sample
from danlu.data.dataset_summary import DatasetSummary, PackingSummary, SplitSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewBranch, PreviewRow, PreviewSample
from danlu.data.statistics import Statistics, unread_margins
from danlu.recipe.sections import Data, Recipe
from danlu.recipe.staged_lengths import amount_per_step

REASON_DESCRIPTIONS = {
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

TRAINED_LEGEND = "trained: its target carries loss"
CONTEXT_LEGEND = "context: masked out (label -100), only read"

CONTINUATION = "‥"
VISIBLE_SIGNS = {
    "↵": "newline",
    "⇥": "tab",
    "␣": "space",
    CONTINUATION: "rest of a character that the token before began",
}
FIRST_TOKEN_LEGEND = "the first token of a sample is context, since nothing comes before it to predict it from"
MAX_DOCUMENTS = 6  # that are named for each pack
MAX_BINS = 12
MAX_SAMPLES = 3  # of a row that gives many
MAX_COLUMN_CHARACTERS = 500  # shown of the columns of a row that cannot be used


# -- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRun:
    """Tokens `start` to `stop` of a sample, of one reason and weight; `omitted` tokens before them are not shown.

    branch: which one begins with them, or with the tokens before that are not shown: "chosen: 40 tokens"; else empty.
    """

    reason: Reason
    weight: float
    start: int
    stop: int
    omitted: int = 0
    branch: str = ""

    @property
    def state(self) -> str:
        """`trained`, `trained x0.5` or `context`."""
        return "context" if self.weight == 0 else "trained" if self.weight == 1 else f"trained x{self.weight:g}"


def token_runs(sample: PreviewSample, max_tokens: int | None) -> Iterator[TokenRun]:
    """The tokens of a sample in order, at most `max_tokens`: three quarters from its start, the rest from its end.

    The branches of a tree have as many each.
    """
    count = len(sample.tokens)
    changes = (np.diff(sample.reasons) != 0) | (np.diff(sample.weights) != 0)
    begun = {branch.start: branch for branch in sample.branches}
    borders = sorted({0, *(np.flatnonzero(changes) + 1).tolist(), *begun, count})
    parts = [(branch.start, branch.stop) for branch in sample.branches] or [(0, count)]
    spans: list[tuple[int, int]] = []
    for start, stop in parts:
        allowed = None if max_tokens is None else max(1, max_tokens // len(parts))
        if allowed is None or stop - start <= allowed:
            spans.append((start, stop))
        else:
            end = math.ceil(allowed / 4)
            spans += [(start, start + allowed - end), (stop - end, stop)]
    shown = 0
    for start, stop in pairwise(borders):
        for low, high in spans:
            first, last = max(start, low), min(stop, high)
            if first < last:
                reason, weight = Reason(int(sample.reasons[first])), float(sample.weights[first])
                title = next((describe_branch(begun[place]) for place in begun if shown <= place <= first), "")
                yield TokenRun(reason, weight, first, last, omitted=first - shown, branch=title)
                shown = last
    assert shown == count, "the end of a sample is always shown"


def describe_branch(branch: PreviewBranch) -> str:
    """Formats a branch: `chosen: 40 tokens`."""
    return f"{branch.title}: {quantity(branch.stop - branch.start, 'token')}"


def visible_text(text: str) -> str:
    """A token's text with everything in it made visible: white space, control characters, lone combining marks.

    A single space before a word stays one, since most tokens begin so. Newlines become signs: nothing that comes out
    moves a cursor, changes a colour or the direction of writing.
    """
    if not text:
        return CONTINUATION
    inner = text.lstrip(" ")
    spaces = len(text) - len(inner)
    body = inner.rstrip(" ")
    start = " " if spaces == 1 and body else "␣" * spaces
    # A space in the middle of a token stands between letters on both sides and cannot be overlooked.
    shown = escape_invisible(body)
    mark = "◌" if body and unicodedata.category(body[0]).startswith("M") else ""
    return start + mark + shown + "␣" * (len(inner) - len(body))


def escape_invisible(text: str) -> str:
    """A text with signs or code points in the place of all but letters, marks, symbols and single spaces."""
    return "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    """A sign for a newline or tab, the code point (`‹E9›`) of a character without a shape of its own, else the
    character."""
    if unicodedata.category(character)[0] in "CZ":  # controls, formats, unassigned; separators
        return {" ": " ", "\n": "↵", "\t": "⇥"}.get(character, f"‹{ord(character):04X}›")
    return character


def reasons_in(rows: Iterable[PreviewRow]) -> list[Reason]:
    """The reasons that occur, in the order of `Reason`."""
    seen = {int(reason) for row in rows for sample in row.samples for reason in np.unique(sample.reasons)}
    return [Reason(number) for number in sorted(seen)]


# -- rows -------------------------------------------------------------------------------------------------------------


def row_title(row: PreviewRow, data: Data) -> str:
    """`alpaca.json:17`, marked if it is an evaluation row."""
    return row.where if row.source < len(data.train) else f"{row.where} (evaluation)"


def row_remarks(row: PreviewRow, data: Data) -> list[str]:
    """The reasons why a row cannot be used, was dropped or shortened; none for a row that is trained on as it is."""
    if row.bad:
        columns = escape_invisible(row.columns)
        cut = f"{columns[:MAX_COLUMN_CHARACTERS]}…" if len(columns) > MAX_COLUMN_CHARACTERS else columns
        return [f"cannot be used: {escape_invisible(row.bad)}", *([f"its columns: {cut}"] if cut else [])]
    if row.dropped:
        return [f"dropped: {_with_length(row.dropped, data)}. It would have been:"]
    if row.shortened:
        lost = f"; {quantity(row.lost_tokens, 'token')} of it lost" if row.lost_tokens else ""
        return [_with_length(f"{row.shortened}: longer than max_length{lost}", data)]
    return []


def _with_length(reason: str, data: Data) -> str:
    return reason.replace("max_length", f"max_length {data.max_length:,}")


def shown_samples(row: PreviewRow, max_tokens: int | None) -> tuple[PreviewSample, ...]:
    """The samples of a row to show: the first few, or all where all tokens are asked for (`max_tokens` None)."""
    return row.samples if max_tokens is None else row.samples[:MAX_SAMPLES]


def describe_sample(sample: PreviewSample, number: int, of: int) -> str:
    """Formats a sample: `sample 2 of 3: 160 tokens, 87 trained`."""
    which = f"sample {number} of {of}: " if of > 1 else ""
    return f"{which}{quantity(len(sample.tokens), 'token')}, {int(np.count_nonzero(sample.weights)):,} trained"


# -- packs ------------------------------------------------------------------------------------------------------------


def describe_packs(packed: PackingSummary, data: Data) -> str:
    """Formats packs: `10 packed sequences of 64 tokens (best-fit), 87.5% full: 40 samples, 560 tokens`."""
    kind = data.packing.kind
    if kind == "none":
        return f"{quantity(packed.packs, 'sample')}, each a sequence of its own (packing: none)"
    return (
        f"{quantity(packed.packs, 'packed sequence')} of {data.max_length:,} tokens ({kind}), "
        f"{packed.efficiency:.1%} full: {quantity(packed.samples, 'sample' if kind == 'best-fit' else 'document')}, "
        f"{quantity(packed.tokens, 'token')}"
    )


def describe_document(sample: Sample) -> str:
    """Formats a document: `160 alpaca.json:17`."""
    return f"{len(sample.tokens):,} {sample.row}"


# -- counts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountLine:
    """A line of the counts: its label and value, and the examples or the bars of a histogram below it."""

    label: str
    value: str
    examples: tuple[str, ...] = ()
    bars: tuple[tuple[str, int, float], ...] = ()  # (name, number, share of all)


def count_lines(split: SplitSummary, data: Data) -> list[CountLine]:
    """The counts of one split of the data."""
    statistics = split.statistics
    longest = f", the longest of {quantity(statistics.longest, 'token')}" if statistics.samples else ""
    trained = f"{statistics.tokens:,}, {statistics.trained_tokens:,} trained ({statistics.trained_share:.1%})"
    bars = tuple(
        (Reason[reason.upper()].label, number, number / statistics.tokens)
        for reason, number in statistics.reasons.most_common()
        if number
    )
    return [
        CountLine("rows", f"{statistics.rows:,}"),
        *_lost_rows(statistics, data),
        CountLine("samples", f"{statistics.samples:,}{longest}"),
        CountLine("tokens", trained),
        *([CountLine("by reason", "", bars=bars)] if bars else []),
        *([CountLine("sample lengths", "", bars=tuple(length_histogram(split.lengths)))] if len(split.lengths) else []),
        *_unterminated_answers(statistics),
        *(CountLine("look at", escape_invisible(line)) for line in statistics.template_lines()),
        *(
            CountLine("not read", escape_invisible(line.removeprefix("not read: ")))
            for line in statistics.unread_lines()
        ),
    ]


def _lost_rows(statistics: Statistics, data: Data) -> Iterator[CountLine]:
    """Rows and tokens that are not trained on, or not as a whole: bad, over-long, dropped."""
    if statistics.bad_rows:
        rule = "skipped" if data.on_bad_row == "skip" else "data.on_bad_row is error: a run stops at the first"
        yield CountLine(
            "bad rows", f"{statistics.bad_rows:,} ({rule})", tuple(map(escape_invisible, statistics.bad_examples))
        )
    for how, number in statistics.shortened.items():
        yield CountLine("over-long", f"{quantity(number, 'row')} longer than max_length {data.max_length:,}: {how}")
    for why, number in statistics.dropped.items():
        yield CountLine("dropped", f"{quantity(number, 'row')}: {_with_length(why, data)}")
    if statistics.lost_tokens:
        share = statistics.lost_tokens / (statistics.lost_tokens + statistics.tokens)
        yield CountLine(
            "lost tokens", f"{statistics.lost_tokens:,} cut off or dropped with their row ({share:.1%} of all)"
        )


def _unterminated_answers(statistics: Statistics) -> Iterator[CountLine]:
    """Samples that train an answer without the token that ends it, so that a model learns never to stop."""
    if statistics.endless_answers:
        value = (
            f"{statistics.endless_answers:,} of {statistics.answers:,} samples train an answer but not its "
            "end-of-turn token, the first:"
        )
        yield CountLine("without end", value, (statistics.endless_example,))


def length_histogram(lengths: np.ndarray) -> Iterator[tuple[str, int, float]]:
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


def describe_steps(recipe: Recipe, overview: DatasetSummary) -> str | None:
    """`8 packed sequences a step: 21 steps an epoch; this run has 42`; None where no run would begin.

    Of stages of lengths, `this run has 5 steps of 8 x 32 tokens, then 7 steps of 4 x 64 tokens`.
    """
    packed = overview.train.packed
    if packed is None:
        return None
    per_step = recipe.batch.packs(recipe.data.max_length)
    if recipe.long_context is not None and recipe.long_context.stages:
        stages = recipe.long_context.stages
        parts = [f"{quantity(stage.steps, 'step')} of {amount_per_step(recipe, stage)}" for stage in stages]
        return f"this run has {', then '.join(parts)}; shown is the longest"
    unit = "sample" if recipe.data.packing.kind == "none" else "packed sequence"
    begin = f"{quantity(per_step, unit)} a step"
    if overview.block:
        return (
            f"{begin}, {quantity(recipe.steps or 0, 'step')} in this run; these are the sequences "
            "of the stream's first block"
        )
    epoch = quantity(math.ceil(packed.packs / per_step), "step")
    if recipe.steps is not None:
        passes = recipe.steps * per_step / packed.packs
        return f"{begin}: {epoch} an epoch; this run has {recipe.steps:,}, {passes:.3g} epochs"
    epochs = recipe.epochs or 1
    total = math.ceil(math.ceil(epochs * packed.packs) / per_step)
    return f"{begin}: {epoch} an epoch; this run has {total:,} (epochs: {epochs:g})"


def splits(overview: DatasetSummary, data: Data) -> list[tuple[str, SplitSummary]]:
    """Training and, where there is one, evaluation, each with its heading."""
    held_out = ", with those held out" if isinstance(data.eval, int | float) else ""
    heading = "training rows: the first block of the stream" if overview.block else f"training rows{held_out}"
    headed = [(heading, overview.train)]
    if overview.eval is not None:
        headed.append(("evaluation rows", overview.eval))
    return headed


def warnings(overview: DatasetSummary, recipe: Recipe) -> Iterator[str]:
    """Yields warnings before a run: rows that the token cache holds otherwise, a tokenizer that loses text, ..."""
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
    yield from unread_margins(overview.train.statistics, recipe.answer_terms)
    if overview.tokenizer is not None and overview.tokenizer.warning:
        yield overview.tokenizer.warning


def quantity(number: int, what: str) -> str:
    """Formats a count with its noun: `1 pack`, `2,000 packs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
