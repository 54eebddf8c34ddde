"""The journal of a run: every answer that has arrived, so that nothing is asked twice.

A line is written, and is on the disk, before anything is made of its answer. A line that a kill has torn is dropped,
and its request is asked again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from danlu.core.errors import CheckpointError
from danlu.core.line_log import LineLog
from danlu.production.synthesis.requests import Completion, Request


@dataclass(frozen=True)
class Spent:
    """The cost of answers.

    Attributes:
        tokens: of prompts and answers.
        cost: in the currency of the price.
    """

    answers: int = 0
    tokens: int = 0
    cost: float = 0.0

    def plus(self, completion: Completion) -> Spent:
        return replace(
            self,
            answers=self.answers + 1,
            tokens=self.tokens + completion.tokens,
            cost=self.cost + completion.cost,
        )


class Journal:
    """The answers of a run by the keys of their requests, in a file that grows.

    An answer counts for a request of the same key and the same question: where the recipe has changed the question, it
    is asked again, and the later line counts.

    Attributes:
        spent: by all lines of the file.
        answering: names of the models that have answered.

    Raises CheckpointError for a line that is no answer, ResourceError for a file that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = LineLog(path)
        self._answers = dict[str, tuple[str, Completion]]()
        self.spent = Spent()
        self.answering = set[str]()
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    value = json.loads(line)
                    completion = Completion.from_json(value["completion"])
                    self._take(value["key"], value["question"], value["model"], completion)
                except (ValueError, KeyError, TypeError):
                    raise CheckpointError(
                        f"{path}:{number}: this line is no answer: the file was changed, or its disk is at fault. "
                        "Delete the line, and its request is asked again"
                    ) from None

    def get(self, request: Request, model: str) -> Completion | None:
        """The answer of a model of this name to a request; None where there is none."""
        question, completion = self._answers.get(str(request.key), ("", None))
        return completion if completion is not None and question == request.digest(model) else None

    def append(self, request: Request, model: str, completion: Completion) -> None:
        """Adds an answer, and returns when it is on the disk."""
        key, question = str(request.key), request.digest(model)
        value = {"key": key, "question": question, "model": model, "completion": completion.as_json()}
        self._log.append(json.dumps(value, ensure_ascii=True))
        self._log.sync()
        self._take(key, question, model, completion)

    def close(self) -> None:
        self._log.close()

    def _take(self, key: str, question: str, model: str, completion: Completion) -> None:
        self._answers[key] = (question, completion)
        self.spent = self.spent.plus(completion)
        if completion.finish in ("stop", "length"):
            self.answering.add(model)
