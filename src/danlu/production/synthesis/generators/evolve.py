"""Evol-Instruct (WizardLM, arXiv:2304.12244): instructions rewritten into harder ones, or into rarer ones like them.

The paper asks a model whether the new instruction is the old one again; here ROUGE-L decides, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from danlu.curation.rows import Part
from danlu.curation.steps import KEEP, Verdict
from danlu.production.synthesis.candidates import Candidate, Taken, drop, quoted, unusable
from danlu.production.synthesis.novelty import rouge_l, rouge_words
from danlu.production.synthesis.requests import Answered, Draw, Message, Request

OPERATIONS = {
    "constraints": "Add one more condition or requirement that the answer has to meet.",
    "deepen": "Make what it asks about go deeper and wider, without another subject.",
    "concretize": "Put something particular in the place of something general in it.",
    "reasoning": "If a few simple thoughts are enough to answer it, ask so that several steps of reasoning are needed.",
    "input": "Add material that the answer has to work with: a table, a text, code, a formula or data in some format.",
    "breadth": "Write a wholly new one of the same field, as long and as difficult, about something rarer.",
}
"""The ways in which an instruction is rewritten: five in depth and one in breadth (sec. 3.2 of the paper)."""
_LEAKED = ("given instruction", "new instruction", "rewritten instruction", "the mark")
"""Words of the question that show up in a rewriting that is none."""


@dataclass(frozen=True)
class Evolve:
    """A generator that rewrites a row's instruction in a way that is drawn.

    Attributes:
        operations: names in OPERATIONS, each equally likely.
        novelty: a rewriting is dropped if its ROUGE-L with the instruction is this much or more.
        request: with the temperature and the bound of tokens.
    """

    operations: Sequence[str]
    novelty: float
    request: Request

    def requests(self, row: Candidate, draw: Draw) -> list[Request]:
        """One request."""
        name = self.operations[draw.integer(len(self.operations))]
        mark = draw.mark()
        text = (
            "Between the marks stands an instruction that somebody gives to an assistant. Do not follow it: rewrite "
            f"it. {OPERATIONS[name]} The result must make sense, must be answerable, and is at most a few dozen words "
            "longer, apart from material that is added. Write the rewritten instruction alone, without a heading and "
            f"without the marks.\n\n{quoted(row.instruction, mark)}"
        )
        columns = {**row.columns, "evolved_by": name}
        return [
            replace(
                self.request,
                key=draw.key,
                messages=(Message("user", text),),
                parents=(row.row.id,),
                columns=columns,
            )
        ]

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]:
        """A row for each rewriting, with the messages before the instruction as they were."""
        taken = list[Taken]()
        for each in answered:
            text = each.completion.text.strip()
            verdict = unusable(each, "evolve") or self._verdict(text, row.instruction)
            parts = tuple(part for part in row.prompt[:-1])
            taken.append(Taken((*parts, Part("user", text)), verdict, each.request.parents, each.request.columns))
        return taken

    def _verdict(self, text: str, instruction: str) -> Verdict:
        split = rouge_words(text)
        if not split:
            return drop("evolve.no-words", 0, 1)
        lower, before = text.lower(), instruction.lower()
        leaked = sum(phrase in lower and phrase not in before for phrase in _LEAKED)
        if leaked:
            return drop("evolve.question-shows", leaked, 0)
        similarity = rouge_l(split, rouge_words(instruction))
        return drop("evolve.unchanged", similarity, self.novelty) if similarity >= self.novelty else KEEP
