"""Answers to prompts: several samples, and for distillation the likeliest tokens next to each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from danlu.curation.rows import Part
from danlu.curation.steps import KEEP, Verdict
from danlu.production.synthesis.candidates import Candidate, Taken, drop, unusable
from danlu.production.synthesis.requests import Answered, Draw, Message, Request

TEACHER_LOGPROBS = "teacher_logprobs"
"""The column of a distilled row: for each token of the answer its likeliest tokens, as [text, log-probability]."""


@dataclass(frozen=True)
class Answer:
    """A generator that answers a row's prompt; an answer that the row has is left out.

    Attributes:
        samples: answers to each prompt, each drawn by itself.
        request: with the temperature and the bound of tokens; with `top_logprobs` rows have a column of them.
        system: a message before prompts that have none, which is no part of the row.
        kind: the name of the step in reasons.
    """

    samples: int
    request: Request
    system: str | None = None
    kind: str = "answer"

    def requests(self, row: Candidate, draw: Draw) -> list[Request]:
        """A request for each sample; all of a prompt ask the same, and their draws differ."""
        messages = row.messages
        if self.system is not None and not any(message.role == "system" for message in messages):
            messages = (Message("system", self.system), *messages)
        return [
            replace(self.request, key=draw.key._replace(sample=sample), messages=messages, parents=(row.row.id,))
            for sample in range(self.samples)
        ]

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]:
        """A row for each answer; one that repeats an earlier answer to the prompt is dropped."""
        taken, texts = list[Taken](), dict[str, int]()
        for sample, each in enumerate(answered):
            text = each.completion.text
            verdict: Verdict = unusable(each, self.kind) or KEEP
            if verdict.outcome == "keep" and texts.setdefault(text, sample) != sample:
                verdict = drop(f"{self.kind}.repeated", texts[text] + 1, 0)
            columns = dict(row.columns)
            if each.completion.top is not None:
                columns[TEACHER_LOGPROBS] = each.completion.top
            parts = (*row.prompt, Part("assistant", text))
            taken.append(Taken(parts, verdict, each.request.parents, columns, group=row.group))
        return taken
