"""How a preview is put into words, lines, colours and a page: on samples written by hand."""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import World

from danlu.core.errors import RecipeError
from danlu.core.types import Pack, Sample
from danlu.data.dataset_summary import DatasetSummary, PackingSummary, SplitSummary
from danlu.data.message_spans import Reason
from danlu.data.preview import PreviewRow, PreviewSample
from danlu.data.statistics import Statistics
from danlu.recipe import Recipe
from danlu.recipe import load as load_recipe
from danlu.report import html_page, preview_page, preview_text
from danlu.report import preview_content as content

T, U, A, E = Reason.TEMPLATE, Reason.USER, Reason.ASSISTANT, Reason.TERMINATOR


def made(*tokens: tuple[str, Reason, float]) -> PreviewSample:
    texts, reasons, weights = zip(*tokens, strict=True)
    return PreviewSample(
        tokens=np.arange(100, 100 + len(texts), dtype=np.int32),
        weights=np.array(weights, np.float32),
        reasons=np.array(reasons, np.uint8),
        special=np.array([text.startswith("<|") for text in texts]),
        texts=texts,
    )


ANSWER = made(
    ("<|user|>", T, 0), ("龘", U, 0), ("", U, 0), ("?", U, 0), ("\n", T, 0),
    ("<script>", A, 1), (" a│b", A, 1), ("&", A, 1), ("\n\n", A, 1), ("half", A, 0.5), (" ", A, 0.5), ("<|end|>", E, 1),
)  # fmt: skip
ROW = PreviewRow(0, 0, "chat.jsonl:1", samples=(ANSWER,))


@pytest.fixture
def recipe(tiny_world: World, tmp_path: Path) -> Any:
    """A recipe with other sections."""
    numbers = iter(range(9))
    return lambda **changes: load_recipe(tiny_world.recipe(tmp_path / f"run{next(numbers)}", **changes)).recipe


def overview_of(statistics: Statistics, first: tuple[Pack, ...] = (), packs: int = 10) -> DatasetSummary:
    lengths = np.full(statistics.samples, 50, np.int32)
    packed = PackingSummary(packs, statistics.samples, statistics.tokens, 0.875, first)
    return DatasetSummary(SplitSummary(statistics, lengths, packed), None, block=False)


COUNTS = Statistics(
    rows=9, bad_rows=1, samples=7, tokens=350, trained_tokens=70, longest=50, lost_tokens=50,
    shortened=Counter(truncated=2), dropped=Counter({"longer than max_length": 1}),
    reasons=Counter(user=280, assistant=70), answers=7, endless_answers=2, endless_example="chat.jsonl:3: answers ...",
    bad_examples=["chat.jsonl:2:1: broken \x1b[31m"],
)  # fmt: skip
PACK = Pack(
    tuple(
        Sample(np.zeros(n, np.int32), np.zeros(n, np.float32), f"chat.jsonl:{row}")
        for row, n in enumerate((32, 8, 8, 4, 1, 1, 1, 1))
    )
)


# -- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "‥"),
        ("word", "word"),
        (" word", " word"),
        ("  word", "␣␣word"),
        ("word ", "word␣"),
        (" ", "␣"),
        ("   ", "␣␣␣"),
        ("a b", "a b"),
        ("a\n\tb", "a↵⇥b"),
        ("\r\n", "‹000D›↵"),
        ("\x1b[31m", "‹001B›[31m"),
        ("\u202eabc", "‹202E›abc"),
        ("\u3000", "‹3000›"),
        ("\u00a0x", "‹00A0›x"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("龘😀", "龘😀"),
    ],
)
def test_whatever_cannot_be_seen_is_made_visible(text: str, shown: str) -> None:
    assert content.visible_text(text) == shown


def test_runs_are_of_one_reason_and_weight() -> None:
    runs = [(run.reason, run.state, run.start, run.stop, run.omitted) for run in content.token_runs(ANSWER, None)]
    assert runs == [
        (T, "context", 0, 1, 0),
        (U, "context", 1, 4, 0),
        (T, "context", 4, 5, 0),
        (A, "trained", 5, 9, 0),
        (A, "trained x0.5", 9, 11, 0),
        (E, "trained", 11, 12, 0),
    ]


@pytest.mark.parametrize("most", range(1, 14))
def test_of_a_long_sample_the_beginning_and_the_end_are_shown(most: int) -> None:
    runs = list(content.token_runs(ANSWER, most))
    places = [place for run in runs for place in range(run.start, run.stop)]
    assert len(places) == min(most, 12) == len(set(places)) and places == sorted(places)
    assert sum(run.omitted for run in runs) == 12 - len(places)
    assert (places[0] == 0 or most == 1) and places[-1] == 11


def test_facts_count_what_was_lost(recipe: Any) -> None:
    chosen = recipe(data={"on_bad_row": "skip"})
    facts = {fact.label: fact for fact in content.count_lines(overview_of(COUNTS).train, chosen.data)}
    assert {label: fact.value for label, fact in facts.items() if fact.value} == {
        "rows": "9",
        "bad rows": "1 (skipped)",
        "over-long": "2 rows longer than max_length 64: truncated",
        "dropped": "1 row: longer than max_length 64",
        "lost tokens": "50 cut off or dropped with their row (12.5% of all)",
        "samples": "7, the longest of 50 tokens",
        "tokens": "350, 70 trained (20.0%)",
        "without end": "2 of 7 samples train an answer but not its end-of-turn token, the first:",
    }
    assert facts["bad rows"].examples == ("chat.jsonl:2:1: broken ‹001B›[31m",)
    assert facts["by reason"].bars == (("user", 280, 0.8), ("assistant", 70, 0.2))
    assert facts["sample lengths"].bars[-1] == ("49-56", 7, 1.0)
    nothing = SplitSummary(Statistics(rows=2), np.empty(0, np.int32), None)
    assert [fact.label for fact in content.count_lines(nothing, chosen.data)] == ["rows", "samples", "tokens"]


def test_lengths_fall_into_ranges_of_one_width() -> None:
    assert list(content.length_histogram(np.array([5, 5, 5]))) == [("5", 3, 1.0)]
    lengths = np.array([*range(1, 1025)])
    bins = list(content.length_histogram(lengths))
    assert bins[0] == ("1-128", 128, 0.125) and bins[-1][0] == "897-1024" and len(bins) == 8
    assert next(content.length_histogram(np.array([100, 700]))) == ("65-128", 1, 0.5)
    assert sum(number for _, number, _ in content.length_histogram(np.array([1, 17, 300, 301]))) == 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": None}, "4 packed sequences a step: 3 steps an epoch; this run has 3 (epochs: 1)"),
        ({"steps": None, "epochs": 2.5}, "4 packed sequences a step: 3 steps an epoch; this run has 7 (epochs: 2.5)"),
        ({"steps": 5}, "4 packed sequences a step: 3 steps an epoch; this run has 5, 2 epochs"),
        ({"batch": {"sequences": None, "tokens": 64, "micro": 1}}, "1 packed sequence a step: 10 steps an epoch"),
        ({"data": {"packing": False}}, "4 samples a step: 3 steps an epoch"),
        (
            {
                "long_context": {"method": "none", "stages": [{"length": 16, "steps": 1}, {"length": 64, "steps": 9}]},
                "batch": {"sequences": None, "tokens": 128, "micro": 1},
                "steps": 10,
            },
            "this run has 1 step of 8 x 16 tokens, then 9 steps of 2 x 64 tokens; shown is the longest",
        ),
    ],
)
def test_steps_are_those_of_the_recipes_batch(recipe: Any, changes: Any, said: str) -> None:
    found = content.describe_steps(recipe(**changes), overview_of(COUNTS))
    assert found is not None and found.startswith(said)


def test_no_steps_for_data_that_is_refused(recipe: Any) -> None:
    refused = replace(overview_of(COUNTS), train=replace(overview_of(COUNTS).train, packed=None))
    assert content.describe_steps(recipe(), refused) is None


# -- lines and colours ------------------------------------------------------------------------------------------------


def lines_of(*rows: PreviewRow, recipe: Recipe, most: int | None = None) -> list[str]:
    stream = io.StringIO()
    preview_text.write_rows(preview_text.preview_writer(stream), rows, recipe.data, most)
    text = stream.getvalue()
    assert "\x1b" not in text
    return text.splitlines()


def test_plain_lines_name_the_reason_of_every_token(recipe: Any) -> None:
    lines = lines_of(ROW, recipe=recipe())
    assert lines[lines.index("chat.jsonl:1") + 1 :] == [
        "  12 tokens, 7 trained",
        "    context       [template]    <|user|>",
        "    context       [user]        龘│‥│?",
        "    context       [template]    ↵",
        "    trained       [assistant]   <script>│ a\\│b│&│↵↵",
        "    trained x0.5  [assistant]   half│␣",
        "    trained       [end-of-turn] <|end|>",
    ]
    legend = "\n".join(lines[: lines.index("chat.jsonl:1")])
    for said in (
        "[end-of-turn] end-of-turn token",
        "label mask: trained: its target carries loss",
        "‥ rest of a character",
    ):
        assert said in legend
    assert "[tool]" not in legend


def test_what_is_left_out_is_said(recipe: Any) -> None:
    many = replace(ROW, samples=(ANSWER,) * 5)
    lines = lines_of(many, recipe=recipe(), most=4)
    assert lines.count("    … 8 tokens not shown (--tokens 0 shows all)") == 3
    assert lines[-1] == "  … 2 samples of this row not shown (--tokens 0 shows all)"
    assert "  sample 3 of 5: 12 tokens, 7 trained" in lines
    assert not any("not shown" in line for line in lines_of(many, recipe=recipe()))


def test_rows_that_are_not_trained_on_say_why(recipe: Any) -> None:
    bad = PreviewRow(1, 4, "eval.jsonl:5", bad="eval.jsonl:5: no\x07", columns='{"text": "' + "x" * 600 + '"}')
    dropped = replace(ROW, dropped="longer than max_length", shortened="dropped", lost_tokens=12)
    cut = replace(ROW, shortened="truncated", lost_tokens=1200)
    lines = lines_of(bad, dropped, cut, recipe=recipe())
    assert "eval.jsonl:5 (evaluation)" in lines
    assert "  cannot be used: eval.jsonl:5: no‹0007›" in lines
    assert f'  its columns: {{"text": "{"x" * 490}…' in lines
    assert "  dropped: longer than max_length 64. It would have been:" in lines
    assert "  truncated: longer than max_length 64; 1,200 tokens of it lost" in lines


def test_packs_show_their_documents_and_how_full_they_are(recipe: Any) -> None:
    stream = io.StringIO()
    preview_text.write_summary(preview_text.preview_writer(stream), overview_of(COUNTS, (PACK,)), recipe(steps=None))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "== 10 packed sequences of 64 tokens (best-fit), 87.5% full: 7 samples, 350 tokens"
    shades = "█" * 20 + "▓" * 5 + "█" * 5 + "▓▓" + "█" * 1 + "▓" * 1 + "█" * 0 + "▓" * 1 + "░" * 5
    assert lines[2].startswith(f"  sequence 0     {shades}  87.5%  32 chat.jsonl:0 · 8 chat.jsonl:1 · ")
    assert lines[2].endswith(" · 2 more")
    assert lines[3] == "  4 packed sequences a step: 3 steps an epoch; this run has 3 (epochs: 1)"
    assert "  by reason           user        280  80.0%  ████████████████████████████████████████" in lines
    assert "                 assistant         70  20.0%  ██████████" in lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_colours_show_reasons_and_filling_shows_what_is_trained(recipe: Any, terminal: Terminal) -> None:
    preview_text.write_rows(preview_text.preview_writer(terminal), [ROW], recipe().data, None)
    text = terminal.getvalue()
    styled = re.findall(r"\x1b\[([\d;]+)m([^\x1b]+)\x1b\[0m", text[text.index("12 tokens") :])
    found = [(set(codes.split(";")), shown) for codes, shown in styled]
    assert (({"36", "4"}, "龘")) in found  # cyan; every second token underlined
    assert (({"36"}, "‥")) in found and (({"36", "4"}, "?")) in found
    assert (({"32", "7", "4"}, "<script>")) in found  # filled
    assert (({"31", "7", "4", "1"}, "<|end|>")) in found  # bold: a special token
    assert (({"2"}, "‹x0.5›")) in found
    assert all(("7" in codes) == (shown in TRAINED) for codes, shown in found if shown in {*TRAINED, *CONTEXT})
    assert re.sub(r"\x1b\[[\d;]*m", "", text).endswith("\n<|user|>龘‥?↵\n<script> a│b&↵↵\n‹x0.5›half␣<|end|>\n")


TRAINED = ("<script>", " a│b", "&", "↵↵", "half", "␣", "<|end|>")
CONTEXT = ("<|user|>", "龘", "‥", "?")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_without_colours_a_terminal_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    assert isinstance(preview_text.preview_writer(terminal), preview_text.ColouredWriter)
    monkeypatch.setenv(name, value)
    assert isinstance(preview_text.preview_writer(terminal), preview_text.PlainWriter)
    monkeypatch.delenv(name)
    assert isinstance(preview_text.preview_writer(io.StringIO()), preview_text.PlainWriter)


# -- the page ---------------------------------------------------------------------------------------------------------

VOID = {"br", "meta"}


class Page(HTMLParser):
    """Checks that every element is closed in order, and keeps the elements and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[tuple[str, str]] = []  # title, text
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        title = self.elements[-1][1].get("title") if self.elements else None
        if title is not None and self.open[-1] == "span":
            self.tokens.append((title, data))
        if "style" not in self.open:
            self.text += data


def page_of(*rows: PreviewRow, recipe: Recipe, most: int | None = None, refusal: str | None = None) -> str:
    return preview_page.page("sft.yaml", recipe, rows, overview_of(COUNTS, (PACK,)), most, refusal)


def test_the_checker_finds_what_is_not_well_formed() -> None:
    for wrong in ("<p><b></p></b>", "<p>", "<p></p></p>"):
        with pytest.raises((AssertionError, IndexError)):
            Page(wrong)


def test_every_token_is_on_the_page_once_with_its_reason(recipe: Any) -> None:
    page = Page(page_of(ROW, recipe=recipe()))
    assert [shown for _, shown in page.tokens] == [content.visible_text(text) for text in ANSWER.texts]
    assert page.tokens[1] == ("user, context, token 1 of the sample, id 101", "龘")
    assert page.tokens[9] == ("assistant, trained x0.5, token 9 of the sample, id 109", "half")
    runs = [attributes["class"] for tag, attributes in page.elements if "run" in (attributes.get("class") or "")]
    assert runs[2:] == [
        "run r-template",
        "run r-user",
        "run r-template",
        "run r-assistant trained",
        "run r-assistant trained",
        "run r-end-of-turn trained",
    ]
    assert "assistant x0.5 · trained" in page.text and "end-of-turn · trained" in page.text


def test_text_is_escaped_and_nothing_comes_from_outside(recipe: Any) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=y>'
    row = replace(ROW, where=evil, samples=(made((evil, U, 0), (evil, A, 1)),))
    statistics = replace(COUNTS, bad_examples=[evil], endless_example=evil)
    pack = Pack((Sample(np.zeros(9, np.int32), np.zeros(9, np.float32), evil),) * 9)
    bad = PreviewRow(0, 1, evil, bad=evil, columns=evil)
    overview = overview_of(statistics, (pack,))
    text = preview_page.page(evil, recipe(), [row, bad], overview, None, evil, [(evil, 9, [1])])
    page = Page(text)
    assert not {tag for tag, _ in page.elements} & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") or name in ("src", "href") for _, found in page.elements for name in found)
    assert not re.search(r"https?:|url\(|@import", text)
    assert [shown for _, shown in page.tokens] == [evil, evil]
    policy = next(found["content"] for tag, found in page.elements if found.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_the_page_says_what_the_terminal_says(recipe: Any) -> None:
    page = Page(page_of(ROW, recipe=recipe(steps=None), refusal="nothing is trained\nSet data.train_on"))
    for said in (
        "A run refuses this data",
        "nothing is trained",
        "10 packed sequences of 64 tokens (best-fit), 87.5% full",
        "4 packed sequences a step: 3 steps an epoch",
        "2 rows longer than max_length 64: truncated",
        "350, 70 trained (20.0%)",
        "49-56",
        "32 chat.jsonl:0",
    ):
        assert said in page.text
    assert "refuses" not in Page(page_of(ROW, recipe=recipe())).text
    assert page.text.count("1 chat.jsonl:7") == 1  # the last document of the pack is in the details
    short = Page(page_of(ROW, recipe=recipe(), most=4))
    assert "8 tokens not shown" in short.text and len(short.tokens) == 4


def test_the_page_lists_new_tokens_with_old_and_new_ids(recipe: Any) -> None:
    tokens = [("<plan>", 64, [60, 7, 62]), ("\n", 65, [3])]
    text = preview_page.page("sft.yaml", recipe(), [ROW], overview_of(COUNTS), None, None, tokens)
    assert "New tokens" in Page(text).text
    table = text.partition('<table class="new-tokens">')[2].partition("</table>")[0]
    assert re.findall(r"<td>(.*?)</td>|<code>(.*?)</code>", table) == [
        ("", "&lt;plan&gt;"), ("64", ""), ("60 7 62", ""), ("", "↵"), ("65", ""), ("3", "")
    ]  # fmt: skip
    assert "New tokens" not in Page(page_of(ROW, recipe=recipe())).text


def test_both_grounds_have_enough_contrast() -> None:
    """WCAG 2: 4.5 for text of this size."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    style = (html_page.TEMPLATES / "page.html.j2").read_text()
    grounds = re.findall(r"--ground: (#\w+)", style)
    assert grounds == ["#fff", "#0d1117"]
    for text in ("ink", "quiet", "wrong"):
        light, dark = re.findall(rf"--{text}: (#\w+)", style)
        assert contrast(light, "#ffffff") >= 4.5 and contrast(dark, grounds[1]) >= 4.5
    assert (
        set(preview_page.REASON_COLOURS)
        == {reason.label for reason in Reason}
        == {reason.label for reason in content.REASON_DESCRIPTIONS}
    )
    for light, dark in preview_page.REASON_COLOURS.values():
        assert contrast(light, "#ffffff") >= 4.5 and contrast(dark, grounds[1]) >= 4.5
        assert contrast(light, grounds[1]) < contrast(dark, grounds[1])


def test_only_an_earlier_preview_is_written_over(recipe: Any, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    preview_page.PAGE.check_target(target)
    target.write_text(page_of(ROW, recipe=recipe()), encoding="utf-8")
    preview_page.PAGE.check_target(target)
    for text in ("", "<!doctype html>\n<p>mine", "notes"):
        target.write_text(text)
        with pytest.raises(RecipeError, match=r"page.html: exists and is no danlu preview, so it stays as it is"):
            preview_page.PAGE.check_target(target)
        assert target.read_text() == text
    with pytest.raises(RecipeError, match=r"there is no folder .*nowhere"):
        preview_page.PAGE.check_target(tmp_path / "nowhere" / "page.html")
    with pytest.raises(RecipeError, match="this is a folder; name a file in it"):
        preview_page.PAGE.check_target(tmp_path)
