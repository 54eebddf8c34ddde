"""Questions that a document answers, with the answers that it gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from danlu.curation.rows import Part
from danlu.curation.steps import KEEP
from danlu.production.synthesis.candidates import Candidate, Taken, drop, quoted, unusable
from danlu.production.synthesis.requests import Answered, Draw, Message, Request

_FORM = re.compile(r"\s*Question:\s*(?P<question>.+?)\s*^Answer:\s*(?P<answer>.+?)\s*", re.DOTALL | re.MULTILINE)
_SIDES = (
    "what it says in passing",
    "its main point",
    "a reason or a cause that it gives",
    "how parts of it belong together",
    "a number, a name or a date in it",
    "what follows from it",
)
"""Where a question looks, so that those of one document differ."""


@dataclass(frozen=True)
class FromDocuments:
    """A generator that asks about a document.

    Attributes:
        questions: requests for each document.
        most_characters: of a document that are shown; a longer one is shown from a drawn line on.
        request: with the temperature and the bound of tokens.
    """

    questions: int
    most_characters: int
    request: Request

    def requests(self, row: Candidate, draw: Draw) -> list[Request]:
        """A request for each question, about different sides of the document."""
        sides = draw.sample(_SIDES, len(_SIDES))
        asked = list[Request]()
        for number in range(self.questions):
            shown = excerpt(row.row.text, self.most_characters, draw)
            text = (
                "Read the document between the marks. Write one question that it answers, about "
                f"{sides[number % len(sides)]}, and the answer to it by what the document says. The question can be "
                "understood by somebody who does not see the document, so it does not mention one; the answer is whole "
                "sentences. Write two lines, and nothing else:\nQuestion: ...\nAnswer: ...\n\n"
                f"{quoted(shown, draw.mark())}"
            )
            key = draw.key._replace(sample=number)
            asked.append(replace(self.request, key=key, messages=(Message("user", text),), parents=(row.row.id,)))
        return asked

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]:
        """A row with question and answer for each answer that has both."""
        taken = list[Taken]()
        for each in answered:
            verdict, match = unusable(each, "from-documents"), _FORM.fullmatch(each.completion.text)
            if verdict is None and match is None:
                verdict = drop("from-documents.form", 0, 1)
            if match is None or verdict is not None:
                parts: tuple[Part, ...] = (Part("user", each.completion.text),)
            else:
                parts = (Part("user", match["question"]), Part("assistant", match["answer"]))
            taken.append(Taken(parts, verdict or KEEP, each.request.parents, row.columns))
        return taken


def excerpt(text: str, most: int, draw: Draw) -> str:
    """A text, or of a longer one `most` characters at most, from the beginning of a line that is drawn."""
    if len(text) <= most:
        return text
    starts = [0, *(match.end() for match in re.finditer(r"\n", text) if match.end() <= len(text) - most // 2)]
    start = starts[draw.integer(len(starts))]
    return text[start : start + most].rsplit("\n", 1)[0] if "\n" in text[start : start + most] else text[start:][:most]
