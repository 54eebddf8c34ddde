"""The steps of a synthesis, one after the other, over all rows that the step before has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from danlu.curation.rows import Provenance, row_of
from danlu.curation.run_steps import run_steps
from danlu.curation.steps import Step
from danlu.production.ledger import Decision
from danlu.production.synthesis import choosing
from danlu.production.synthesis.answerer import Answerer
from danlu.production.synthesis.asking import Asking
from danlu.production.synthesis.candidates import Candidate, Generator, Taken
from danlu.production.synthesis.choosing import SCORE, Judged
from danlu.production.synthesis.generators.answer import Answer
from danlu.production.synthesis.generators.evolve import Evolve
from danlu.production.synthesis.generators.from_documents import FromDocuments
from danlu.production.synthesis.generators.judge import Judge, JudgeAccount, marks_of
from danlu.production.synthesis.generators.magpie import Magpie
from danlu.production.synthesis.generators.self_instruct import SelfInstruct, TaskType, keep_novel
from danlu.production.synthesis.novelty import Novelty
from danlu.production.synthesis.records import Records
from danlu.production.synthesis.requests import Answered, Draw, Key, Request
from danlu.production.synthesis.seeds import slot
from danlu.recipe.sections.curating import DecontaminateStep, DeduplicationStep
from danlu.recipe.sections.synthesis import (
    AnswerStep,
    BestStep,
    DistillStep,
    EvolveStep,
    FromDocumentsStep,
    JudgeStep,
    MagpieStep,
    PairsStep,
    RejectionStep,
    SelfInstructStep,
    SynthesisStep,
)

ROUND = 64
"""The most requests of a round of self-instruct. A round's tasks are shown in later rounds alone, so that what is shown
hangs neither on the order in which answers arrive nor on how many requests are under way."""
FRUITLESS_ROUNDS = 3
"""Rounds of self-instruct in a row without a new task after which it ends."""
Rewards = Callable[[Sequence[Candidate]], Sequence[float | None]]


@dataclass
class StepRunner:
    """Runs the steps of a recipe.

    Attributes:
        first_source: the number of the first step among the sources: rows that a step makes are placed behind all that
            were read.
        types: for self-instruct.
        rubrics: the text for each step that judges, by the step's number.
        rewards: those of each step that rejects, likewise.
        curation: the steps of curation of each step that is one, likewise.
        notes: remarks for the console.
        accounts: of each step that judges, by its number.
    """

    seed: int
    asking: Asking
    records: Records
    first_source: int
    types: Sequence[TaskType] = ()
    rubrics: Mapping[int, str] = field(default_factory=dict)
    rewards: Mapping[int, Rewards] = field(default_factory=dict)
    curation: Mapping[int, Sequence[Step]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    accounts: dict[int, JudgeAccount] = field(default_factory=dict)
    _count: int = 0  # rows of the present step

    def run(
        self, number: int, step: SynthesisStep, rows: Sequence[Candidate], answerer: Answerer | None
    ) -> list[Candidate]:
        """The rows that a step leaves, or makes of those that it is given. answerer: None for a step that asks none."""
        self._count = 0
        match step:
            case PairsStep():
                return self._judged(step.kind, choosing.pairs(rows, step.margin))
            case BestStep():
                return self._judged(step.kind, choosing.best(rows, step.at_least))
            case RejectionStep():
                rewards = self.rewards[number]
                return self._judged(step.kind, choosing.accepted(rows, rewards, step.at_least, step.most))
            case DeduplicationStep() | DecontaminateStep():
                return self._curated(number, rows)
        assert answerer is not None, f"{step.kind} asks a model"
        request = Request(
            Key(self.seed, number, "", 0),
            temperature=step.temperature,
            top_p=step.top_p,
            max_new_tokens=step.max_new_tokens,
        )
        match step:
            case SelfInstructStep():
                return self._grow(step, rows, request, answerer)
            case EvolveStep():
                return self._evolve(step, rows, request, answerer)
            case JudgeStep():
                return self._judge(number, step, rows, request, answerer)
            case MagpieStep():
                header = step.header if step.header is not None else answerer.user_header
                assert header is not None, "the recipe's rules ask for it"
                request = replace(request, stop=tuple(step.stop) or answerer.user_end)
                rows = [slot(self.first_source + number, index) for index in range(step.rows)]
                return self._each(step.kind, Magpie(header, request), rows, request, answerer, slots=True)
            case FromDocumentsStep():
                asker = FromDocuments(step.questions, step.most_characters, request)
                return self._each(step.kind, asker, rows, request, answerer)
            case AnswerStep():
                answer = Answer(step.samples, request, step.system)
            case DistillStep():
                answer = Answer(step.samples, replace(request, top_logprobs=step.top_k), step.system, step.kind)
        return self._each(step.kind, answer, rows, request, answerer)

    def _ask(
        self, name: str, generator: Generator, rows: Sequence[Candidate], request: Request, answerer: Answerer,
        sample: int = 0,
    ) -> list[list[Taken]]:  # fmt: skip
        """The rows that a generator makes of the answers about each row. sample: the first number of the rows' keys."""
        asked = [generator.requests(row, Draw(request.key._replace(row=row.row.id, sample=sample))) for row in rows]
        answers = iter(self.asking.answers(answerer, [each for group in asked for each in group], name))
        taken = list[list[Taken]]()
        for row, group in zip(rows, asked, strict=True):
            answered: list[Answered] = [next(answers) for _ in group]
            taken.append(generator.take(row, answered))
        return taken

    def _each(
        self, name: str, generator: Generator, rows: Sequence[Candidate], request: Request, answerer: Answerer,
        *, slots: bool = False,
    ) -> list[Candidate]:  # fmt: skip
        """The rows that a generator makes of each row, which they replace. slots: the rows are none themselves."""
        remaining = list[Candidate]()
        for row, taken in zip(rows, self._ask(name, generator, rows, request, answerer), strict=True):
            kept = self._settle(name, row, taken, request, answerer)
            if not slots:
                self.records.replaced(row, name, len(kept))
            remaining += kept
        return remaining

    def _settle(
        self, name: str, row: Candidate, taken: Iterable[Taken], request: Request, answerer: Answerer
    ) -> list[Candidate]:
        """Gives rows their places and their origin, and an account; returns those that stay."""
        kept = list[Candidate]()
        for each in taken:
            provenance = Provenance(each.parents, answerer.name, self.seed, (*row.row.provenance.steps, name))
            new_row = row_of(each.parts, self.first_source + request.key.step, self._count, provenance)
            self._count += 1
            candidate = Candidate(
                new_row,
                new_row.id if each.group is None else each.group,
                each.columns,
                each.rejected,
                row.given,
                f"{answerer.name} ({name})",
            )
            self.records.add(candidate)
            self.records.judge(candidate, name, each.verdict)
            if each.verdict.outcome == "keep":
                kept.append(candidate)
        return kept

    def _grow(
        self, step: SelfInstructStep, seeds: Sequence[Candidate], request: Request, answerer: Answerer
    ) -> list[Candidate]:
        """Self-instruct: rounds of requests, each of which shows the tasks of the rounds before."""
        novelty, accepted = Novelty(step.novelty), list[Candidate]()
        for seed in seeds:
            novelty.add(seed.instruction)
        slots, fruitless = 0, 0
        while len(accepted) < step.rows and fruitless < FRUITLESS_ROUNDS:
            missing = step.rows - len(accepted)
            count = min(ROUND, -(-missing // step.per_request))
            shots = (step.shots.seed, step.shots.made)
            generator = SelfInstruct(seeds, tuple(accepted), shots, step.per_request, request, self.types)
            rows = [slot(self.first_source + request.key.step, slots + index) for index in range(count)]
            slots += count
            taken = [each for group in self._ask(step.kind, generator, rows, request, answerer) for each in group]
            novel = keep_novel(taken, novelty, step.novelty, missing)
            new = self._settle(step.kind, rows[0], novel, request, answerer)
            fruitless = 0 if new else fruitless + 1
            accepted += new
        for seed in seeds:
            self.records.note(seed, Decision(step.kind, "drop", f"{step.kind}.seed"))
        if len(accepted) < step.rows:
            self.notes.append(
                f"self-instruct: {len(accepted):,} of {step.rows:,} tasks: the last {fruitless} rounds brought none "
                "that is new. More seeds, data.types or a higher temperature make them more varied"
            )
        return accepted

    def _evolve(
        self, step: EvolveStep, rows: Sequence[Candidate], request: Request, answerer: Answerer
    ) -> list[Candidate]:
        """Evol-Instruct: what could not be rewritten in a round is tried again in the next, by another draw."""
        generator, everything, latest = Evolve(step.operations, step.novelty, request), list(rows), list(rows)
        for round in range(step.rounds):
            taken = self._ask(step.kind, generator, latest, request, answerer, sample=round)
            results = [
                self._settle(step.kind, row, of_row, request, answerer)
                for row, of_row in zip(latest, taken, strict=True)
            ]
            everything += [each for group in results for each in group]
            latest = [group[0] if group else row for row, group in zip(latest, results, strict=True)]
        return everything

    def _judge(
        self, number: int, step: JudgeStep, rows: Sequence[Candidate], request: Request, answerer: Answerer
    ) -> list[Candidate]:
        """Scores in a column; no row is dropped."""
        judge = Judge(self.rubrics[number], step.votes, step.swap, request)
        groups = choosing.in_groups(rows)
        asked = [judge.requests(group, Draw(request.key._replace(row=group[0].row.id))) for group in groups]
        answers = iter(self.asking.answers(answerer, [each for group in asked for each in group], step.kind))
        account, scored = self.accounts.setdefault(number, JudgeAccount()), list[Candidate]()
        for group, requests in zip(groups, asked, strict=True):
            readings = judge.readings(group, [next(answers) for _ in requests])
            marks = marks_of(readings, len(group), step.votes)
            account.add(group, marks)
            for each, score, votes in zip(group, marks.scores, marks.votes, strict=True):
                reason = f"{step.kind}.unread" if score is None else f"{step.kind}.score"
                self.records.note(each, Decision(step.kind, "keep", reason, score))
                columns: dict[str, Any] = {**each.columns, SCORE: score, "votes": votes}
                scored.append(replace(each, columns=columns))
        return scored

    def _curated(self, number: int, rows: Sequence[Candidate]) -> list[Candidate]:
        """The rows that steps of curation leave, which change none of them."""
        curated = run_steps([[each.row for each in rows]], self.curation[number])
        by_place = {each.row.place: each for each in rows}
        for account in curated.accounts:
            assert account.outcome != "changed", "these steps drop rows alone"
            for name, verdict in account.decisions:
                self.records.judge(by_place[account.place], name, verdict)
        return [by_place[row.place] for row in curated.rows]

    def _judged(self, name: str, judged: Sequence[Judged]) -> list[Candidate]:
        """The rows that verdicts leave."""
        for candidate, verdict in judged:
            self.records.judge(candidate, name, verdict)
        return [candidate for candidate, verdict in judged if verdict.outcome == "keep"]
