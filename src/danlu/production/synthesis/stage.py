"""Stage synthesize: from seeds or documents to the folder of a data set, with an account of every row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.core.run_files import RunLock
from danlu.curation.steps import Step
from danlu.data.sources import file_digests
from danlu.production.data_set import WORK, DataSetWriter, check_output
from danlu.production.ledger import ledger_part
from danlu.production.recipe_steps import steps_of
from danlu.production.synthesis.answerer import Answerer
from danlu.production.synthesis.asking import Asking, Budget
from danlu.production.synthesis.candidates import Candidate
from danlu.production.synthesis.journal import Journal, Spent
from danlu.production.synthesis.models import answerer_of
from danlu.production.synthesis.records import Records, row_line
from danlu.production.synthesis.rejection import rewards_of
from danlu.production.synthesis.seeds import read_documents, read_tasks, read_text, read_types
from danlu.production.synthesis.steps import Rewards, StepRunner
from danlu.recipe.sections.curating import DecontaminateStep, DeduplicationStep
from danlu.recipe.sections.synthesis import (
    AnsweringModel,
    DistillStep,
    JudgeStep,
    RejectionStep,
    SynthesisStep,
    SynthesizeRecipe,
)
from danlu.recipe.synthesize_recipe import FIRST, model_of

JOURNAL = Path(WORK) / "synthesis" / "answers.jsonl"
"""The journal in the folder of the data set; it stays, so that another recipe pays for no answer again."""
_LINES = 1024
_WITHOUT_EFFECT = {
    "output": True,
    "budget": True,
    "threads": True,
}
"""Keys of a recipe that change no row; those of a model are `_OF_REQUESTS`."""
_OF_REQUESTS = ("in_flight", "retries", "timeout_s", "device", "key", "price")


@dataclass(frozen=True)
class Synthesized:
    """The outcome of a recipe.

    Attributes:
        rows: of the data set.
        asked: requests that this run has made; the answers to others were in the journal.
        spent: by all answers that the data set is made of.
    """

    folder: Path
    rows: int
    asked: int
    spent: Spent
    notes: tuple[str, ...]
    outcomes: dict[str, int]


@dataclass(frozen=True)
class Prepared:
    """A recipe after its files were read and its models looked for."""

    recipe: SynthesizeRecipe
    rows: list[Candidate]
    """Those that the first step is given."""
    read: list[Candidate]
    """All that were read."""
    runner: Callable[[Asking, Records], StepRunner]
    answerers: Sequence[Answerer | None]
    """The model of each step; None for one that asks none."""
    digests: dict[str, str]
    """The hashes of the files that were read, by name."""


def prepare(recipe: SynthesizeRecipe) -> Prepared:
    """Reads all files of a recipe and looks for its models; asks nothing but, for distill, a token.

    Raises DataError for rows that cannot be used, and RecipeError, ModelError or ResourceError for what is missing.
    """
    check_output(Path(recipe.output).expanduser())
    seeds = read_tasks(recipe.data.seeds)
    documents = read_documents(recipe.data.documents, first=len(recipe.data.seeds))
    types = [] if recipe.data.types is None else read_types(recipe.data.types)
    rubrics, rewards, curation = dict[int, str](), dict[int, Rewards](), dict[int, Sequence[Step]]()
    for number, step in enumerate(recipe.steps):
        if isinstance(step, JudgeStep):
            rubrics[number] = read_text(step.rubric, f"steps.{number}.rubric")
        if isinstance(step, RejectionStep):
            judged_seeds = [] if isinstance(recipe.steps[0], FIRST) else seeds
            rewards[number] = rewards_of(step, judged_seeds, f"steps.{number}")
        if isinstance(step, DeduplicationStep | DecontaminateStep):
            curation[number] = steps_of([step])  # benchmarks are read here
    sources = len(recipe.data.seeds) + len(recipe.data.documents)

    def runner(asking: Asking, records: Records) -> StepRunner:
        return StepRunner(recipe.seed, asking, records, sources, types, rubrics, rewards, curation)

    digests = {
        name: digest
        for source in (*recipe.data.seeds, *recipe.data.documents)
        for name, digest in file_digests(source).items()
    }
    rows = documents if recipe.steps[0].kind == "from-documents" else seeds
    return Prepared(recipe, rows, [*seeds, *documents], runner, _answerers(recipe), digests)


def _answerers(recipe: SynthesizeRecipe) -> list[Answerer | None]:
    """The model of each step, equal ones once, all of them there."""
    by_model = dict[str, tuple[Answerer, int]]()
    sections = [model_of(recipe, step) for step in recipe.steps]
    for section, step in zip(sections, recipe.steps, strict=True):
        if section is not None:
            answerer, top = by_model.get(_name(section), (None, 0))
            top = max(top, step.top_k if isinstance(step, DistillStep) else 0)
            by_model[_name(section)] = (answerer or answerer_of(section, recipe.threads), top)
    for answerer, top in by_model.values():
        answerer.check(top)
    return [None if section is None else by_model[_name(section)][0] for section in sections]


def _name(section: AnsweringModel) -> str:
    return section.model_dump_json()


def synthesize(prepared: Prepared, progress: Callable[[int, int], None] = lambda done, total: None) -> Synthesized:
    """Runs the steps and writes the data set. A run that was stopped, by a kill or its budget, goes on.

    progress: called with the answers of a step that are there, and all.

    Raises:
        BudgetSpent: the budget is spent; what has arrived is kept.
        DataError: a step leaves no row.
        ResourceError: a model is gone, or the folder is in use or cannot be written.
    """
    recipe = prepared.recipe
    folder = Path(recipe.output).expanduser()
    with ExitStack() as stack:
        stack.enter_context(RunLock(folder))
        journal = Journal(folder / JOURNAL)
        stack.callback(journal.close)
        for answerer in prepared.answerers:
            if answerer is not None:
                stack.callback(answerer.close)
        asking = Asking(journal, Budget(recipe.budget.tokens, recipe.budget.cost), progress)
        records = Records()
        for candidate in prepared.read:
            records.add(candidate)
        runner = prepared.runner(asking, records)
        rows: Sequence[Candidate] = prepared.rows
        for number, (step, answerer) in enumerate(zip(recipe.steps, prepared.answerers, strict=True)):
            rows = runner.run(number, step, rows, answerer)
            if not rows:
                raise DataError(_nothing_left(number, step, records))
        return _write(prepared, folder, rows, runner)


def _nothing_left(number: int, step: SynthesisStep, records: Records) -> str:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in records.reasons(step.kind)[:5])
    return f"steps.{number}: {step.kind} leaves no row: {reasons or 'it made none'}. The answers are kept"


def _write(prepared: Prepared, folder: Path, rows: Sequence[Candidate], runner: StepRunner) -> Synthesized:
    """Writes rows, ledger and card."""
    writer = DataSetWriter(folder)
    lines = list(runner.records.lines())
    ordered = sorted(rows, key=lambda each: each.row.place)
    for start in range(0, max(len(lines), len(ordered)), _LINES):
        block, ledger = ordered[start : start + _LINES], lines[start : start + _LINES]
        writer.add(b"".join(map(row_line, block)), ledger_part(ledger) if ledger else b"")
    spent, counts = runner.asking.used, runner.records.counts()
    accounts = {f"steps.{number}": account.as_json() for number, account in sorted(runner.accounts.items())}
    names = [None if answerer is None else answerer.name for answerer in prepared.answerers]
    card = {
        "stage": "synthesize",
        **counts,
        "recipe": recipe_of_card(prepared.recipe),
        "models": sorted({name for name in names if name is not None}),
        "sources": prepared.digests,
        "answers": spent.answers,
        "tokens": spent.tokens,
        "cost": spent.cost,
        **({"judges": accounts} if accounts else {}),
    }
    writer.finish(card)
    return Synthesized(
        folder, len(rows), runner.asking.asked, spent, (*runner.notes, *_judge_notes(runner)), counts["outcomes"]
    )


def _judge_notes(runner: StepRunner) -> list[str]:
    """Remarks on what the marks of judges hang on besides the answers."""
    notes = list[str]()
    for account in runner.accounts.values():
        place = "" if account.position_bias is None else f", {account.position_bias:+.2f} marks for the first place"
        length = "" if account.length_bias is None else f", correlation with length {account.length_bias:+.2f}"
        notes.append(
            f"judge: {account.read:,} marks{place}{length}; {account.unread:,} replies could not be read, "
            f"{account.unscored:,} answers have no score"
        )
    return notes


def recipe_of_card(recipe: SynthesizeRecipe) -> dict[str, Any]:
    """A recipe without what changes no row, so that a run that went on with another budget has the same card."""
    values: dict[str, Any] = recipe.model_dump(mode="json", exclude=set(_WITHOUT_EFFECT), exclude_defaults=True)
    for section in (values["model"], *(step["model"] for step in values["steps"] if step.get("model"))):
        for name in _OF_REQUESTS:
            section.pop(name, None)
    for step, values_of_step in zip(recipe.steps, values["steps"], strict=True):
        values_of_step["kind"] = step.kind
    return values


def expected_requests(prepared: Prepared) -> list[tuple[str, int]]:
    """How many requests each step makes at most, if nothing is dropped and self-instruct wastes no task."""
    rows, groups, counts = len(prepared.rows), len(prepared.rows), list[tuple[str, int]]()
    for step in prepared.recipe.steps:
        requests = 0
        match step.kind:
            case "self-instruct":
                rows = groups = step.rows
                requests = math.ceil(step.rows / step.per_request)
            case "magpie":
                rows = groups = requests = step.rows
            case "from-documents":
                rows = groups = requests = rows * step.questions
            case "evolve":
                requests = rows * step.rounds
                rows = groups = rows * (1 + step.rounds)
            case "answer" | "distill":
                requests = rows * step.samples
                rows, groups = requests, rows
            case "judge":
                of_group = rows // max(1, groups)
                pairs = (of_group if of_group > 2 else 1) * 2 if step.swap and of_group > 1 else of_group
                requests = groups * pairs * step.votes
            case "pairs" | "best":
                rows = groups
        counts.append((step.kind, requests))
    return counts
