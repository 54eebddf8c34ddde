"""The demo: from nothing to a model that answers, on data that danlu makes itself.

It works as a user would by hand. It writes a tokenizer, data files and four recipes (`demo_recipes.py`) into a folder
and trains the recipes one after the other: a model that reads, then answers, then sees sums and answers, then learns
from trying sums of its own (GRPO). It asks each model and the one before it the same questions. Everything stays there
to be read, edited and trained again; doing it again goes on where it stopped.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from danlu import __version__, recipe
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import ResourceError
from danlu.core.output_folder import refuse_foreign_files
from danlu.data.demo_data import (
    LONGEST_STEPS,
    Message,
    Question,
    answered_sums,
    conversations,
    every_question,
    held_out_sums,
    preferences,
    pretraining_documents,
    questions,
    sums_to_answer,
)
from danlu.data.tokenizer_training import train_tokenizer
from danlu.demo.demo_recipes import LONGEST_ANSWER, Place, Size, grpo_recipe, pretrain_recipe, sft_recipe, sums_recipe
from danlu.inference.load_engine import engine_of
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.request import Request, SamplingOptions
from danlu.inference.resolve_model import resolve_model
from danlu.report.run_page import PAGE, page
from danlu.report.run_report import report_of
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.text import Numeric
from danlu.run.train import train

MARK = "demo.json"
"""Written first; it tells a folder of the demo from any other."""

PREFERENCES = 1_000
"""Rows of data/preferences.jsonl, which the demo itself does not train on; recipe `chain` does."""

Log = Callable[[str], None]


@dataclass(frozen=True)
class Answered:
    """A question, and the answers before instruction tuning and after it."""

    question: Question
    before: str
    after: str

    @property
    def is_right(self) -> bool:
        """Whether the answer after instruction tuning is the right one."""
        return self.after == self.question.answer


@dataclass(frozen=True)
class AnsweredSum:
    """A sum, and the answers before reinforcement learning and after it."""

    question: str
    answer: str
    before: str
    after: str

    @property
    def was_right(self) -> bool:
        """Whether the reward of recipe `grpo` finds the right result in the answer before."""
        return self._is_right(self.before)

    @property
    def is_right(self) -> bool:
        """Whether the answer after the stage has the right result."""
        return self._is_right(self.after)

    def _is_right(self, text: str) -> bool:
        return Numeric("answer")([JudgedAnswer(text, {"answer": self.answer})]) == [1.0]


@dataclass(frozen=True)
class Tally:
    """The number of questions of a kind, and of right answers before a stage and after it."""

    of: int
    before: int
    after: int


@dataclass(frozen=True)
class Result:
    """The results of the demo. After a signal (exit_code is not 0) there are no answers yet."""

    place: Place
    exit_code: int
    shown: tuple[Answered, ...] = ()
    asked: Tally = Tally(0, 0, 0)  # questions of the kind, and about the facts, that the conversations have
    held_out: Tally = Tally(0, 0, 0)  # about facts that only the documents tell
    shown_sums: tuple[AnsweredSum, ...] = ()
    sums: Tally = Tally(0, 0, 0)  # held out of both stages; before and after reinforcement learning


def demo(
    folder: Path, *, size: Size | None = None, log: Log, stream: TextIO | None = None, data_only: bool = False
) -> Result:
    """Makes all missing files, trains the untrained recipes, and asks the models the same questions.

    Args:
        folder: the demo's folder; made when missing.
        size: of a new folder; one that was begun keeps its own.
        log: takes the lines for the console.
        stream: where training shows its progress; stderr by default.
        data_only: write tokenizer, data and recipes, and train nothing.

    Raises ResourceError for a folder that holds other things or cannot be written, and the errors of `run.train`, since
    the recipes may have been edited.
    """
    place = Place(folder)
    size = _begin(place, size or Size())
    log(f"1. Data, a tokenizer and four recipes, all in {folder}")
    _write_missing(place, size)
    if data_only:
        return Result(place, 0)
    for number, stage, what in (
        (2, "pretrain", "Pretraining: a model from scratch reads the documents"),
        (3, "sft", "Instruction tuning: the same model learns to answer from conversations"),
        (4, "sums", "Instruction tuning once more: it sees sums, some of them worked out"),
        (5, "grpo", "Reinforcement learning: it tries other sums, and a reward checks the results"),
    ):
        log(f"{number}. {what} ({place.recipe(stage)})")
        outcome = train(recipe.load(place.recipe(stage)), log=log, stream=stream)
        if outcome.exit_code:
            log(outcome.stopped)
            return Result(place, outcome.exit_code)
        if outcome.already:
            log(f"finished already, after step {outcome.steps}")
    log("6. The same questions for the models before and after")
    result = _compare(place)
    PAGE.write(place.report, page(report_of(place.run("grpo"), "finished")))
    write_atomically(place.answers, _as_json(result).encode())
    return result


# -- the folder -------------------------------------------------------------------------------------------------------


def _begin(place: Place, size: Size) -> Size:
    """Marks the folder as the demo's. Returns the size; of a folder that is marked already, the one it has."""
    mark = place.folder / MARK
    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            return Size(**json.loads(mark.read_text(encoding="utf-8"))["size"])
        advice = "Name an empty or new one with --output."
        refuse_foreign_files(place.folder, lambda name: False, holds="the folder holds other things", advice=advice)
        write_atomically(mark, json.dumps({"danlu": __version__, "size": asdict(size)}, indent=2).encode())
    except OSError as error:
        raise ResourceError(
            f"{place.folder}: cannot be written: {error.strerror}. Name another folder with --output."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{mark}: not what the demo wrote ({error}). Name another folder with --output, or delete this one."
        ) from error
    return size


def _write_missing(place: Place, size: Size) -> None:
    """Writes the missing files; those that are there stay as they are: the user may have edited them."""
    files: list[tuple[Path, Callable[[], str]]] = [
        (place.documents, lambda: _lines({"text": text} for text in _documents(size.documents))),
        (place.conversations, lambda: _lines(conversations(0, size.conversations))),
        (place.preferences, lambda: _lines(preferences(0, PREFERENCES))),
        (place.answered_sums, lambda: _lines(answered_sums(0, size.worked_sums, size.bare_sums))),
        (place.sums, lambda: _lines(sums_to_answer(0, size.grpo_steps * size.prompts))),
        (place.held_out_sums, lambda: _lines(held_out_sums(size.held_out_sums))),
        (place.recipe("pretrain"), lambda: pretrain_recipe(place, size)),
        (place.recipe("sft"), lambda: sft_recipe(place, size)),
        (place.recipe("sums"), lambda: sums_recipe(place, size)),
        (place.recipe("grpo"), lambda: grpo_recipe(place, size)),
    ]
    try:
        for path, content in files:
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, content().encode())
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror}. Free some space and try again.") from error
    # The template is written last of the three files, so it says that the other two are there.
    if not (place.tokenizer / "chat_template.jinja").exists():
        train_tokenizer(_texts(size), size.vocabulary, place.tokenizer)


def _lines(rows: Iterable[object]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _documents(count: int) -> Iterator[str]:
    """Pages of three to five passages: attention costs less in one text of 100 tokens than in four of 25."""
    passages = pretraining_documents(0, 5 * count)
    for number in range(count):
        yield "\n".join(islice(passages, random.Random(f"page {number}").choice((3, 4, 5))))


def _texts(size: Size) -> Iterator[str]:
    yield from _documents(min(size.documents, 2000))
    for row in conversations(0, min(size.conversations, 2000)):
        yield from (message["content"] for message in row["messages"])


# -- asking -----------------------------------------------------------------------------------------------------------


def _compare(place: Place) -> Result:
    asked = {"shown": questions(), "asked": every_question(held_out=False), "held_out": every_question(held_out=True)}
    every = [question for group in asked.values() for question in group]
    before, after = (
        _answers(place.run(stage), [question.messages for question in every], LONGEST_ANSWER)
        for stage in ("pretrain", "sft")
    )
    answered = [Answered(*answers) for answers in zip(every, before, after, strict=True)]
    first = len(asked["shown"])
    second = first + len(asked["asked"])
    sums = _compare_sums(place)
    return Result(
        place,
        0,
        tuple(answered[:first]),
        asked=_tally(answered[first:second]),
        held_out=_tally(answered[second:]),
        shown_sums=_chosen_sums(sums),
        sums=Tally(len(sums), sum(each.was_right for each in sums), sum(each.is_right for each in sums)),
    )


def _compare_sums(place: Place) -> list[AnsweredSum]:
    """The sums that neither stage has seen, with the answers of the model that was shown sums and of the last one."""
    rows = [json.loads(line) for line in place.held_out_sums.read_text(encoding="utf-8").splitlines()]
    asked = [({"role": "user", "content": row["question"]},) for row in rows]
    answers = (_answers(place.run(stage), asked, LONGEST_STEPS) for stage in ("sums", "grpo"))
    return [
        AnsweredSum(row["question"], row["answer"], before, after)
        for row, before, after in zip(rows, *answers, strict=True)
    ]


def _chosen_sums(sums: list[AnsweredSum]) -> tuple[AnsweredSum, ...]:
    """The first sums of each kind that there is: right only after, wrong after, right both times."""
    kinds = ([], [], [])  # type: tuple[list[AnsweredSum], ...]
    for each in sums:
        kinds[1 if not each.is_right else 2 if each.was_right else 0].append(each)
    return tuple([*kinds[0][:2], *kinds[1][:1], *kinds[2]][:4])


def _answers(run_folder: Path, asked: Sequence[tuple[Message, ...]], longest: int) -> list[str]:
    """The likeliest answer to each conversation, by the tokenizer's chat template, of at most `longest` tokens."""
    resolved = resolve_model(str(run_folder))
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder)
    loaded = load_model(resolved, tokenizer)
    greedy = SamplingOptions(temperature=0.0)
    requests = [
        Request(number, tuple(tokenizer.encode_chat(messages)), greedy, longest, stop_ids=loaded.stop_ids)
        for number, messages in enumerate(asked)
    ]
    return [completion.text.strip() for completion in engine_of(loaded).generate(requests)]


def _tally(answered: list[Answered]) -> Tally:
    return Tally(
        len(answered),
        sum(each.before == each.question.answer for each in answered),
        sum(each.is_right for each in answered),
    )


def _as_json(result: Result) -> str:
    shown = [
        {**asdict(each.question), "before": each.before, "after": each.after, "right": each.is_right}
        for each in result.shown
    ]
    sums = [{**asdict(each), "right": each.is_right} for each in result.shown_sums]
    tallies = {"asked": result.asked, "held_out": result.held_out, "sums": result.sums}
    content = {"right": {name: asdict(tally) for name, tally in tallies.items()}, "shown": shown, "sums": sums}
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"
