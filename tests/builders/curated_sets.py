"""Small sets to curate with steps of every kind, the bytes of what is written, and what must not change them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from danlu.curation.duplicates import ExactDuplicates, RepeatedParagraphs
from danlu.curation.near_duplicates import NearDuplicates
from danlu.curation.personal.step import Personal
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.repair import Repair
from danlu.curation.steps import Step
from danlu.production.curate import Curated, CurateSettings, curate
from danlu.production.shard_work import CurateJob, Report, Task
from danlu.production.work_files import WorkFolder
from danlu.recipe.sections import Source

STEPS: tuple[Step, ...] = (
    Repair(),
    GopherRules(words=(4, 1000), stop_words=0, alphabetic=0.5),
    ExactDuplicates(),
    RepeatedParagraphs(words=6),
    NearDuplicates(words=3, at_least=0.6),
    Personal(),
)
_WORDS = re.findall(
    r"\w+", "The old house by the river was empty for a long time, and nobody knew why its door stood open"
)


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(row, separators=(',', ':'))}\n" for row in rows), encoding="utf-8")
    return file


def texts_of(count: int, seed: int = 0) -> list[str]:
    """Texts of which many are copies of an earlier one: whole, with other words, with one of its lines."""
    draw, texts = random.Random(seed), list[str]()
    while len(texts) < count:
        kind = draw.random()
        if not texts or kind < 0.5:
            lines = [" ".join(draw.choices(_WORDS, k=draw.randint(3, 14))) for _ in range(draw.randint(1, 4))]
            text = "\n".join(lines)
        elif kind < 0.6:
            text = draw.choice(texts)
        elif kind < 0.75:
            text = draw.choice(texts).split("\n")[0] + "\n" + " ".join(draw.choices(_WORDS, k=9))
        else:
            text = " ".join(
                draw.choice(_WORDS) if draw.random() < 0.06 else word for word in draw.choice(texts).split()
            )
        texts.append(text + draw.choice(["", "", "", "\u200b", " mail ann@example.org", "\nShare this"]))
    return texts


def write_sources(folder: Path, count: int = 72) -> list[Source]:
    """A source of documents, one of conversations, and one of questions and answers."""
    texts = texts_of(count)
    third = count // 3
    turns = [
        [{"role": "user", "content": ask}, {"role": "assistant", "content": reply}]
        for ask, reply in zip(texts[::2], texts[1::2], strict=True)
    ][:third]
    files = [
        write_rows(folder / "documents.jsonl", ({"text": text, "url": n} for n, text in enumerate(texts))),
        write_rows(folder / "chats.jsonl", ({"messages": each, "tag": "x"} for each in turns)),
        write_rows(folder / "questions.jsonl", ({"question": a, "answer": b} for a, b in zip(texts, texts[5:third]))),  # noqa: B905
    ]
    return [Source(path=str(file)) for file in files]


def settings_of(
    sources: Sequence[Source], folder: Path, steps: Sequence[Step] = STEPS, **changes: Any
) -> CurateSettings:
    return CurateSettings(sources, steps, folder, recipe={"stage": "curate"}, **{"shard_rows": 16, **changes})


def curated(settings: CurateSettings, **options: Any) -> Curated:
    return curate(settings, **options)


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The files of a data set by name, without the work and the lock."""
    files = (file for file in folder.rglob("*") if file.is_file())
    names = {file.relative_to(folder).as_posix(): file for file in files}
    return {name: file.read_bytes() for name, file in names.items() if not name.startswith((".work", ".lock"))}


def careless_engine(settings: CurateSettings, seed: int) -> Callable[[Iterable[Task]], Iterator[Report]]:
    """Runs tasks as an engine over machines may: in any order, some more than once, some lost at first and run again
    behind all others, each by a worker that knows nothing from before."""
    draw = random.Random(seed)
    job = CurateJob(tuple(settings.steps), WorkFolder(settings.folder / ".work"), settings.skip_bad)

    def run(tasks: Iterable[Task]) -> Iterator[Report]:
        waiting = list(tasks)
        waiting += [draw.choice(waiting) for _ in range(len(waiting) // 3)]
        draw.shuffle(waiting)
        while waiting:
            task = waiting.pop()
            if draw.random() < 0.2:  # its report is lost
                job.start()(task)
                waiting.insert(0, task)
            else:
                yield job.start()(task)

    return run
