"""Magpie (arXiv:2406.08464): a model of chats continues the header of a user's turn, and so asks what users ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from danlu.curation.rows import Part
from danlu.curation.steps import KEEP
from danlu.production.synthesis.candidates import Candidate, Taken, unusable
from danlu.production.synthesis.requests import Answered, Draw, Request


@dataclass(frozen=True)
class Magpie:
    """A generator for slots: rows without texts, one for each request.

    Attributes:
        header: the text of the chat template before a user's first turn.
        request: with the temperature, the bound of tokens, and what ends a user's turn.
    """

    header: str
    request: Request

    def requests(self, row: Candidate, draw: Draw) -> list[Request]:
        """One request, which has no text but the header: its tokens alone are drawn."""
        return [replace(self.request, key=draw.key, prompt=self.header)]

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]:
        """The user's turn that the model has written."""
        return [
            Taken((Part("user", each.completion.text.strip()),), unusable(each, "magpie") or KEEP) for each in answered
        ]
