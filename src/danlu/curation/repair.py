"""Repair of texts: wrongly decoded characters, control characters, and lines that pages have around their text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from danlu.curation.packages import require
from danlu.curation.rows import Row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import column

# Without tabs and line ends; with characters that are not seen and mean nothing between letters. Joiners stay: Persian,
# Indian scripts and emojis are written with them.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u2060\ufeff\ufff9-\ufffb]")
_LINE_ENDS = re.compile("\r\n?")
# UTF-8 that was decoded wrongly has letters with accents, Cyrillic or Greek ones, or signs that stand for the first
# bytes of characters. A text without any of them, such as English with curly quotes or Chinese, needs no look. Kana's
# combining marks are doubtful too: ftfy composes them.
_DOUBTFUL = re.compile("[^\x00-\x7f‘’“”–—…\u3000-\u3098\u309b-\u9fff\uff00-\uffef]")
_LONGEST_BOILERPLATE = 120  # characters of a line
_BOILERPLATE = re.compile(
    r"""
    (?: skip\ to\ (?:main\ )?(?:content|navigation) | back\ to\ top | (?:read|show|load|see|view)\ (?:more|all)
      | click\ (?:here|on\ the\ link)\b.* | share\ (?:this|on|via)\b.* | follow\ us\b.* | (?:sign|log)\ ?(?:in|up|out)
      | subscribe\b.*newsletter.* | (?:leave|post|add)\ a\ (?:comment|reply) | \d+\ (?:comments?|likes?|views?|shares?)
      | (?:©|\(c\)|copyright)\ .*\d{4}.* | .*\ball\ rights\ reserved | page\ \d+\ of\ \d+ | advertisements? | sponsored
      | (?:we|this\ (?:web)?site)\ uses?\ cookies\b.* | accept\ (?:all\ )?cookies | print\ this\ page
      | home(?:\s*[|»>/·]\s*[\w ]+)+ | [\w ]+(?:\s*\|\s*[\w ]+){2,}
      | 版权所有.* | .*保留所有权利 | 责任编辑[：:].* | 点击(?:这里|查看|进入).* | 分享到.* | [上下]一[篇页][：:]?.*
      | 返回(?:顶部|首页) | 阅读全文 | 查看更多 | (?:登录|注册|首页|关于我们|联系我们)(?:\s*[|｜/]\s*\w+)* | 扫码关注.*
    )
    [\s.!…»>。！]*
    """,
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True)
class Repair:
    """Mends the texts of rows, those of system prompts and tools too.

    Text that was decoded wrongly is decoded again (ftfy), line ends become newlines, control characters go. Curly
    quotes and the width of characters stay: they are right in many languages.

    Attributes:
        boilerplate: whether documents lose lines that pages have around their text, such as "Share this" and notices of
            copyright, in English and Chinese. Conversations keep all lines.
    """

    boilerplate: bool = True
    name: ClassVar[str] = "repair"
    version: ClassVar[int] = 1
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {"boilerplate": self.boilerplate}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """Texts of each row that were decoded wrongly, control characters in it, and lines that are boilerplate."""
        counts = np.array([self._repaired(row)[1] for row in rows], np.int64).reshape(len(rows), 3)
        return dict(zip(_KINDS, counts.T, strict=True))

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        counts = np.stack([column(marks, name) for name in _KINDS], axis=1)
        return [
            self._verdict(row, of_row) if any(of_row) else KEEP
            for row, of_row in zip(rows, counts.tolist(), strict=True)
        ]

    def _verdict(self, row: Row, counts: list[int]) -> Verdict:
        texts, _ = self._repaired(row)
        kinds = ", ".join(kind for kind, count in zip(_KINDS.values(), counts, strict=True) if count)
        if not any(text.strip() for text in texts):
            return Verdict("drop", f"repair: nothing but {kinds}", value=float(sum(counts)), threshold=0.0)
        return Verdict("change", f"repair: {kinds}", value=float(sum(counts)), threshold=0.0, texts=tuple(texts))

    def _repaired(self, row: Row) -> tuple[list[str], tuple[int, int, int]]:
        """The texts of a row after repair, and the counts of `_KINDS`."""
        texts, wrong, controls, lines = list[str](), 0, 0, 0
        for part in row.parts:
            decoded = decode_again(part.text)
            wrong += decoded != part.text
            text, count = _CONTROLS.subn("", decoded)
            controls += count
            if self.boilerplate and row.is_document:
                text, count = without_boilerplate(text)
                lines += count
            texts.append(text)
        return texts, (wrong, controls, lines)


_KINDS = {"encoding": "encoding", "controls": "control characters", "lines": "boilerplate lines"}
"""Names of marks, and the words of verdicts for them."""


def decode_again(text: str) -> str:
    """A text in which characters that were decoded wrongly are what they were, with newlines as line ends."""
    if "\r" in text:
        text = _LINE_ENDS.sub("\n", text)
    if "&" not in text and (text.isascii() or not _DOUBTFUL.search(text)):
        return text
    fixed: str = require("ftfy").fix_text(text, _settings())
    return fixed


@cache
def _settings() -> Any:
    return require("ftfy").TextFixerConfig(
        uncurl_quotes=False, fix_character_width=False, remove_control_chars=False, fix_line_breaks=False
    )


def without_boilerplate(text: str) -> tuple[str, int]:
    """A text without the lines that are boilerplate as a whole, and how many there were."""
    lines = text.split("\n")
    remaining = [line for line in lines if not is_boilerplate(line)]
    count = len(lines) - len(remaining)
    return ("\n".join(remaining) if count else text), count


def is_boilerplate(line: str) -> bool:
    """Whether a line is one that pages have around their text, and nothing else."""
    stripped = line.strip()
    return 0 < len(stripped) <= _LONGEST_BOILERPLATE and _BOILERPLATE.fullmatch(stripped) is not None
