"""Self-instruct (arXiv:2212.10560): new tasks after examples of tasks, kept where they are unlike all that are there.

Of the paper this leaves out the classification of tasks and the instances of a task: `answer` writes answers. Its
filter of instructions that begin with "Write a program" is left out too; what texts cannot hold (images, maps, ...) is
refused by the paper's list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from danlu.curation.rows import Part
from danlu.curation.steps import Verdict
from danlu.production.synthesis.candidates import Candidate, Taken, drop, unusable
from danlu.production.synthesis.novelty import Novelty, rouge_words
from danlu.production.synthesis.requests import Answered, Draw, Message, Request

FEWEST_WORDS, MOST_WORDS = 3, 150
"""Words of a task: fewer say nothing, more are seldom one task. The bounds are the paper's."""
BEYOND_TEXT = (
    *("image", "images", "graph", "graphs", "picture", "pictures", "file", "files", "map", "maps", "draw", "plot"),
    *("video", "audio", "music", "flowchart", "diagram"),
)
"""Words of tasks that a model of texts cannot do, as the paper lists them."""
_ITEM = re.compile(r"^[ \t]*(?:#+[ \t]*)?(?:\*\*)?(?:Task[ \t]*)?(\d{1,3})[ \t]*[.):][ \t]*(?:\*\*)?[ \t]*", re.M)


@dataclass(frozen=True)
class TaskType:
    """A kind of task, and its share of the requests.

    Attributes:
        about: what such tasks are, as the model reads it.
    """

    name: str
    about: str
    share: float = 1.0


@dataclass(frozen=True)
class SelfInstruct:
    """A generator for slots: rows without texts, one for each request.

    Attributes:
        seeds, accepted: tasks to show, read and made; `accepted` holds those of earlier rounds.
        shots: how many of each are shown; fewer where there are not so many.
        per_request: new tasks that are asked for at a time.
        request: with the temperature and the bound of tokens.
    """

    seeds: Sequence[Candidate]
    accepted: Sequence[Candidate]
    shots: tuple[int, int]
    per_request: int
    request: Request
    types: Sequence[TaskType] = ()

    def requests(self, row: Candidate, draw: Draw) -> list[Request]:
        """One request, with shots and a type that the draw decides."""
        shown = draw.sample(self.seeds, self.shots[0]) + draw.sample(self.accepted, self.shots[1])
        shown = draw.sample(shown, len(shown))
        columns: Mapping[str, Any] = {}
        about = ""
        if self.types:
            kind = draw.weighted(self.types, [each.share for each in self.types])
            columns, about = {"type": kind.name}, f"All of them are of this kind: {kind.about}\n"
        listed = "\n".join(f"{number}. {each.instruction.strip()}" for number, each in enumerate(shown, 1))
        text = (
            f"Here are tasks that people give to an assistant:\n\n{listed}\n\n"
            f"Write {self.per_request} further tasks. {about}Each differs from those above and from the others in its "
            "subject, its wording and the form of answer that it asks for, can be done by writing alone, and can be "
            "understood by itself: texts and numbers that it needs stand in it. Number them from 1 as above, and write "
            "nothing else."
        )
        parents = tuple(each.row.id for each in shown)
        return [
            replace(self.request, key=draw.key, messages=(Message("user", text),), parents=parents, columns=columns)
        ]

    def take(self, row: Candidate, answered: Sequence[Answered]) -> list[Taken]:
        """A row for each task in the list. Of an answer that was cut off the last task is dropped."""
        taken = list[Taken]()
        for each in answered:
            problem, request = unusable(each, "self-instruct"), each.request
            is_cut = each.completion.finish == "length"
            tasks = [] if problem is not None and not is_cut else listed_tasks(each.completion.text)
            if not tasks:
                text = each.completion.text
                verdict = problem or drop("self-instruct.form", 0, 1)
                taken.append(Taken((Part("user", text),), verdict, request.parents, request.columns))
            for number, task in enumerate(tasks, 1):
                is_torn = is_cut and number == len(tasks)
                taken.append(_task(task, problem if is_torn else task_problem(task), request))
        return taken


def _task(text: str, verdict: Verdict | None, request: Request) -> Taken:
    taken = Taken((Part("user", text),), parents=request.parents, columns=request.columns)
    return taken if verdict is None else replace(taken, verdict=verdict)


def listed_tasks(text: str) -> list[str]:
    """The entries of a numbered list, each up to the next number that is one higher; none where there is no 1."""
    entries, expected, start = list[str](), 1, None
    for item in _ITEM.finditer(text):
        if int(item[1]) != expected:
            continue  # a numbered line within a task
        if start is not None:
            entries.append(text[start : item.start()].strip())
        start, expected = item.end(), expected + 1
    if start is not None:
        entries.append(text[start:].strip())
    return [entry for entry in entries if entry]


def task_problem(task: str) -> Verdict | None:
    """The verdict on a task that is none by its form; None for a sound one."""
    split = rouge_words(task)
    if len(split) <= FEWEST_WORDS:
        return drop("self-instruct.short", len(split), FEWEST_WORDS)
    if len(split) > MOST_WORDS:
        return drop("self-instruct.long", len(split), MOST_WORDS)
    beyond = sum(word in BEYOND_TEXT for word in split)
    if beyond:
        return drop("self-instruct.beyond-text", beyond, 0)
    if not task[0].isalnum() and task[0] not in "\"'“‘「『《¿¡([{<":
        return drop("self-instruct.mark", 1, 0)
    return None


def keep_novel(taken: Sequence[Taken], novelty: Novelty, threshold: float, rows: int) -> list[Taken]:
    """The same, in order, with verdicts on those that are like an earlier task; the others are added to `novelty`.

    rows: how many may stay; those behind are dropped.
    """
    judged, kept = list[Taken](), 0
    for each in taken:
        if each.verdict.outcome == "keep":
            nearest = novelty.nearest(each.parts[0].text)
            if nearest.number >= 0:
                reason = "copy" if nearest.similarity == 1 else "novelty"
                each = replace(each, verdict=drop(f"self-instruct.{reason}", nearest.similarity, threshold))
            elif kept == rows:
                each = replace(each, verdict=drop("self-instruct.rows", kept + 1, rows))
            else:
                novelty.add(each.parts[0].text)
                kept += 1
        judged.append(each)
    return judged
