"""A preview on the terminal: coloured tokens where there are colours, else plain lines with the reasons in content."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TextIO

from danlu.data.dataset_summary import DatasetSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.recipe.sections import Data, Recipe
from danlu.report import preview_content as content
from danlu.terminal import printable
from danlu.types import Pack

if TYPE_CHECKING:
    from rich.console import Console

BAR = 40  # columns
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


class Screen(Protocol):
    """Where a preview is written."""

    def heading(self, text: str) -> None: ...

    def title(self, text: str) -> None: ...

    def line(self, text: str, label: str = "") -> None: ...

    def tokens(self, sample: PreviewSample, most: int | None) -> None: ...

    def legend(self, reasons: Iterable[Reason]) -> None: ...


def screen(stream: TextIO) -> Screen:
    """Colours on a terminal that has them, unless NO_COLOR is set; else plain lines."""
    # Here, not above: the words of this file are used without it.
    from rich.console import Console

    console = Console(file=stream, highlight=False, soft_wrap=True)
    if console.color_system is not None and not console.no_color:
        return Coloured(console)
    return Plain(stream)


def show_rows(out: Screen, rows: Iterable[PreviewRow], data: Data, most: int | None) -> None:
    """Rows token by token.

    Args:
        most: tokens shown of a sample; None for all.
    """
    rows = list(rows)
    if not rows:
        return
    out.heading("rows")
    out.legend(content.reasons_in(rows))
    for row in rows:
        out.title(content.title(row, data))
        for remark in content.remarks(row, data):
            out.line(remark)
        samples = content.samples_of(row, most)
        for number, sample in enumerate(samples, 1):
            out.line(content.measure_of(sample, number, len(row.samples)))
            out.tokens(sample, most)
        if more := len(row.samples) - len(samples):
            out.line(f"… {content.many(more, 'sample')} of this row not shown (--tokens 0 shows all)")


def show_overview(out: Screen, overview: DatasetSummary, recipe: Recipe) -> None:
    """The first packs, and the counts over everything."""
    if (packed := overview.train.packed) is not None:
        out.heading(content.packs_title(packed, recipe.data))
        for number, pack in enumerate(packed.first):
            out.line(*_pack(pack, recipe.data, number))
    if (said := content.steps(recipe, overview)) is not None:
        out.line(said)
    for heading, side in content.sides(overview, recipe.data):
        out.heading(heading)
        if overview.eval is not None and side is overview.eval and side.packed is not None:
            out.line(content.packs_title(side.packed, recipe.data), "packs")
        for fact in content.facts(side, recipe.data):
            _fact(out, fact)
    for warning in content.warnings(overview):
        out.line(warning, "note")


def _fact(out: Screen, fact: content.Fact) -> None:
    if fact.value:
        out.line(fact.value, fact.label)
    for example in fact.examples:
        out.line(f"  {example}", " ")
    most = max((share for _, _, share in fact.bars), default=1.0)
    width = max((len(name) for name, _, _ in fact.bars), default=0)
    for place, (name, number, share) in enumerate(fact.bars):
        filled = "█" * round(BAR * share / most) or "▏" * (number > 0)
        text = f"{name:>{width}}  {content.count(number):>9} {share:>6.1%}  {filled}"
        out.line(text.rstrip(), fact.label if place == 0 else " ")


def _pack(pack: Pack, data: Data, number: int) -> tuple[str, str]:
    """What a pack holds, and its label."""
    named = [content.document(sample) for sample in pack.samples[: content.MAX_DOCUMENTS]]
    if more := len(pack.samples) - len(named):
        named.append(f"{more} more")
    listed = " · ".join(named)
    if data.packing.kind == "none":
        return listed, f"sequence {number}"
    return f"{bar(pack, data.max_length)} {pack.tokens / data.max_length:>6.1%}  {listed}", f"sequence {number}"


def bar(pack: Pack, capacity: int) -> str:
    """Its documents by turns in two shades, and the room that is left: `████▓▓▓▓████░`."""
    filled = ""
    end = 0
    for number, sample in enumerate(pack.samples):
        end += len(sample.tokens)
        filled += "█▓"[number % 2] * (round(BAR * end / capacity) - len(filled))
    return filled.ljust(BAR, "░")


class Plain:
    """Lines that can be read, searched and compared without colours: a line for each run of tokens of one reason."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def heading(self, text: str) -> None:
        self._write(f"\n== {text}")

    def title(self, text: str) -> None:
        self._write(f"\n{text}")

    def line(self, text: str, label: str = "") -> None:
        self._write(f"  {label:<15}{text}" if label else f"  {text}")

    def legend(self, reasons: Iterable[Reason]) -> None:
        self._write(f"  label mask: {content.TRAINED}; {content.CONTEXT}")
        for reason in reasons:
            self._write(f"  {f'[{content.name(reason)}]':<13} {content.ABOUT[reason]}")
        signs = ", ".join(f"{sign} {meaning}" for sign, meaning in content.SIGNS.items())
        self._write(f"  {BORDER} between tokens, {signs}, ‹E9› a byte or character that cannot be shown")
        self._write(f"  {content.FIRST_TOKEN}")

    def tokens(self, sample: PreviewSample, most: int | None) -> None:
        runs = list(content.runs_of(sample, most))
        width = max(len(run.state) for run in runs)
        for run in runs:
            if run.omitted:
                self._write(f"    … {content.tokens(run.omitted)} not shown (--tokens 0 shows all)")
            start = f"    {run.state:<{width}}  {f'[{content.name(run.reason)}]':<13} "
            held: list[str] = []
            for text in sample.texts[run.start : run.stop]:
                held.append(content.visible(text).replace(BORDER, f"\\{BORDER}"))
                if "\n" in text:
                    self._write(start + BORDER.join(held))
                    held = []
            if held:
                self._write(start + BORDER.join(held))

    def _write(self, line: str) -> None:
        self._stream.write(f"{printable(line)}\n")


class Coloured:
    """Text as it reads, in the colours of the reasons: filled where it is trained, every second token underlined."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def heading(self, text: str) -> None:
        self._write((f"\n{text}", "bold"))

    def title(self, text: str) -> None:
        self._write(("\n", ""), (text, "bold underline"))

    def line(self, text: str, label: str = "") -> None:
        self._write((f"  {label:<15}" if label else "  ", "cyan"), (text, ""))

    def legend(self, reasons: Iterable[Reason]) -> None:
        self._write(("  label mask: ", ""), (content.TRAINED, "reverse"), (f"; {content.CONTEXT}", ""))
        for reason in reasons:
            self._write((f"  {content.name(reason):<11}", COLOURS[reason]), (f" {content.ABOUT[reason]}", ""))
        signs = ", ".join(f"{sign} {meaning}" for sign, meaning in content.SIGNS.items())
        self._write(
            (f"  every second token is underlined, {signs}, ‹E9› a byte or character that cannot be shown", "dim")
        )
        self._write((f"  {content.FIRST_TOKEN}", "dim"))

    def tokens(self, sample: PreviewSample, most: int | None) -> None:
        parts: list[tuple[str, str]] = []
        for run in content.runs_of(sample, most):
            if run.omitted:
                parts.append((f"\n… {content.tokens(run.omitted)} not shown (--tokens 0 shows all)\n", "dim"))
            if run.weight not in (0, 1):
                parts.append((f"‹x{run.weight:g}›", "dim"))
            style = f"{COLOURS[run.reason]}{' reverse' if run.weight else ''}"
            for place in range(run.start, run.stop):
                marks = f"{' underline' if place % 2 else ''}{' bold' if sample.special[place] else ''}"
                parts.append((content.visible(sample.texts[place]), style + marks))
                if "\n" in sample.texts[place] and place + 1 < len(sample.texts):
                    parts.append(("\n", ""))  # without the style, which would fill the rest of the line
        self._write(*parts)

    def _write(self, *parts: tuple[str, str]) -> None:
        from rich.text import Text

        self._console.print(Text.assemble(*((printable(text), style) for text, style in parts)))
