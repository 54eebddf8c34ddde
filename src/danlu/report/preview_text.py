"""A preview on the terminal: coloured tokens where there are colours, else plain lines with the reasons in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from danlu.core.terminal import printable
from danlu.core.types import Pack
from danlu.data.dataset_summary import DatasetSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.recipe.sections import Data, Recipe
from danlu.report import preview_content as content

if TYPE_CHECKING:
    from rich.console import Console

BAR_COLUMNS = 40
BORDER = "│"
COLOURS = {
    Reason.TEMPLATE: "dim",
    Reason.SYSTEM: "magenta",
    Reason.USER: "cyan",
    Reason.ASSISTANT: "green",
    Reason.REASONING: "yellow",
    Reason.TOOL: "blue",
    Reason.TERMINATOR: "red",
    Reason.BOS: "bright_red",
    Reason.EOS: "red",
    Reason.TEXT: "green",
    Reason.PROMPT: "cyan",
    Reason.COMPLETION: "green",
}


def preview_writer(stream: TextIO) -> PlainWriter:
    """A writer with colours on a terminal that has them, unless NO_COLOR is set; else one of plain lines."""
    # Here, not above: plain lines are written without it.
    from rich.console import Console

    console = Console(file=stream, highlight=False, soft_wrap=True)
    if console.color_system is not None and not console.no_color:
        return ColouredWriter(stream, console)
    return PlainWriter(stream)


def write_rows(out: PlainWriter, rows: Sequence[PreviewRow], data: Data, max_tokens: int | None) -> None:
    """Writes rows token by token.

    Args:
        max_tokens: tokens shown of a sample; None for all.
    """
    if not rows:
        return
    out.heading("rows")
    out.legend(content.reasons_in(rows))
    for row in rows:
        out.title(content.row_title(row, data))
        for remark in content.row_remarks(row, data):
            out.line(remark)
        samples = content.shown_samples(row, max_tokens)
        for number, sample in enumerate(samples, 1):
            out.line(content.describe_sample(sample, number, len(row.samples)))
            out.tokens(sample, max_tokens)
        if more := len(row.samples) - len(samples):
            out.line(f"… {content.quantity(more, 'sample')} of this row not shown (--tokens 0 shows all)")


def write_summary(out: PlainWriter, overview: DatasetSummary, recipe: Recipe) -> None:
    """Writes the first packed sequences, and the counts over everything."""
    if (packed := overview.train.packed) is not None:
        out.heading(content.describe_packs(packed, recipe.data))
        for number, pack in enumerate(packed.first):
            out.line(*_pack(pack, recipe.data, number))
    if (steps := content.describe_steps(recipe, overview)) is not None:
        out.line(steps)
    for heading, split in content.splits(overview, recipe.data):
        out.heading(heading)
        if overview.eval is not None and split is overview.eval and split.packed is not None:
            out.line(content.describe_packs(split.packed, recipe.data), "packs")
        for entry in content.count_lines(split, recipe.data):
            _write_counts(out, entry)
    for warning in content.warnings(overview, recipe):
        out.line(warning, "note")


def _write_counts(out: PlainWriter, entry: content.CountLine) -> None:
    """A line of the counts, its examples and its histogram as bars."""
    if entry.value:
        out.line(entry.value, entry.label)
    for example in entry.examples:
        out.line(f"  {example}", " ")
    largest = max((share for _, _, share in entry.bars), default=1.0)
    width = max((len(name) for name, _, _ in entry.bars), default=0)
    for place, (name, number, share) in enumerate(entry.bars):
        filled = "█" * round(BAR_COLUMNS * share / largest) or "▏" * (number > 0)
        text = f"{name:>{width}}  {number:>9,} {share:>6.1%}  {filled}"
        out.line(text.rstrip(), entry.label if place == 0 else " ")


def _pack(pack: Pack, data: Data, number: int) -> tuple[str, str]:
    """The line of a packed sequence, how full it is and its documents, and its label."""
    documents = [content.describe_document(sample) for sample in pack.samples[: content.MAX_DOCUMENTS]]
    if more := len(pack.samples) - len(documents):
        documents.append(f"{more} more")
    listed = " · ".join(documents)
    if data.packing.kind == "none":
        return listed, f"sequence {number}"
    return f"{bar(pack, data.max_length)} {pack.tokens / data.max_length:>6.1%}  {listed}", f"sequence {number}"


def bar(pack: Pack, capacity: int) -> str:
    """A packed sequence as a bar: its documents by turns in two shades, then the room left: `████▓▓▓▓████░`."""
    filled = ""
    end = 0
    for number, sample in enumerate(pack.samples):
        end += len(sample.tokens)
        filled += "█▓"[number % 2] * (round(BAR_COLUMNS * end / capacity) - len(filled))
    return filled.ljust(BAR_COLUMNS, "░")


class PlainWriter:
    """Writes the parts of a preview as lines that can be read, searched and compared without colours."""

    section_mark = "== "  # in front of a section's heading
    borders = f"{BORDER} between tokens"  # how tokens are told apart, for the legend

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def heading(self, text: str) -> None:
        """Begins a section."""
        self._write((f"\n{self.section_mark}{text}", "bold"))

    def title(self, text: str) -> None:
        """Begins a row."""
        self._write(("\n", ""), (text, "bold underline"))

    def line(self, text: str, label: str = "") -> None:
        """Writes a line of text, after a label where one is given."""
        self._write((f"  {label:<15}" if label else "  ", "cyan"), (text, ""))

    def legend(self, reasons: Iterable[Reason]) -> None:
        """Explains colours and signs."""
        self._write(("  label mask: ", ""), (content.TRAINED_LEGEND, "reverse"), (f"; {content.CONTEXT_LEGEND}", ""))
        for reason in reasons:
            self._write(
                (f"  {self._reason_mark(reason)}", COLOURS[reason]), (f" {content.REASON_DESCRIPTIONS[reason]}", "")
            )
        signs = ", ".join(f"{sign} {meaning}" for sign, meaning in content.VISIBLE_SIGNS.items())
        self._write((f"  {self.borders}, {signs}, ‹E9› a byte or character that cannot be shown", "dim"))
        self._write((f"  {content.FIRST_TOKEN_LEGEND}", "dim"))

    def tokens(self, sample: PreviewSample, max_tokens: int | None) -> None:
        """Shows a sample's tokens, at most `max_tokens` of them: a line for each run of tokens of one reason."""
        runs = list(content.token_runs(sample, max_tokens))
        width = max(len(run.state) for run in runs)
        for run in runs:
            if run.omitted:
                self._write((f"    {describe_omitted(run)}", ""))
            if run.branch:
                self._write((f"   {run.branch}", ""))
            start = f"    {run.state:<{width}}  {self._reason_mark(run.reason)} "
            line: list[str] = []
            for text in sample.texts[run.start : run.stop]:
                line.append(content.visible_text(text).replace(BORDER, f"\\{BORDER}"))
                if "\n" in text:
                    self._write((start + BORDER.join(line), ""))
                    line = []
            if line:
                self._write((start + BORDER.join(line), ""))

    def _reason_mark(self, reason: Reason) -> str:
        return f"{f'[{reason.label}]':<13}"

    def _write(self, *parts: tuple[str, str]) -> None:
        """Writes a line of (text, style in colours) parts."""
        self._stream.write(f"{''.join(printable(text) for text, _ in parts)}\n")


class ColouredWriter(PlainWriter):
    """Text as it reads, in the colours of the reasons: filled where it is trained, every second token underlined."""

    section_mark = ""
    borders = "every second token is underlined"

    def __init__(self, stream: TextIO, console: Console) -> None:
        super().__init__(stream)
        self._console = console

    def tokens(self, sample: PreviewSample, max_tokens: int | None) -> None:
        """Shows a sample's tokens as text, at most `max_tokens` of them."""
        parts: list[tuple[str, str]] = []
        for run in content.token_runs(sample, max_tokens):
            if run.omitted:
                parts.append((f"\n{describe_omitted(run)}\n", "dim"))
            if run.branch:
                parts.append((f"{chr(10) if run.start else ''}{run.branch}\n", "bold"))
            if run.weight not in (0, 1):
                parts.append((f"‹x{run.weight:g}›", "dim"))
            style = f"{COLOURS[run.reason]}{' reverse' if run.weight else ''}"
            for place in range(run.start, run.stop):
                marks = f"{' underline' if place % 2 else ''}{' bold' if sample.special[place] else ''}"
                parts.append((content.visible_text(sample.texts[place]), style + marks))
                if "\n" in sample.texts[place] and place + 1 < len(sample.texts):
                    parts.append(("\n", ""))  # without the style, which would fill the rest of the line
        self._write(*parts)

    def _reason_mark(self, reason: Reason) -> str:
        return f"{reason.label:<11}"

    def _write(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*((printable(text), style) for text, style in parts)))


def describe_omitted(run: content.TokenRun) -> str:
    """Formats the tokens before a run that are left out: `… 40 tokens not shown (--tokens 0 shows all)`."""
    return f"… {content.quantity(run.omitted, 'token')} not shown (--tokens 0 shows all)"
