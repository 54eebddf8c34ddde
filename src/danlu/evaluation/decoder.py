"""An evaluation of a decoder: the loss of its predictions, its answers, or the scores of a reward model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DanluError, DataError, RecipeError, ResourceError
from danlu.core.terminal import print_status

if TYPE_CHECKING:
    from danlu.data.prepare import DatasetSpec, PreparedData
    from danlu.data.statistics import Statistics
    from danlu.inference import request as requests
    from danlu.inference.chat_tokenizer import ChatTokenizer
    from danlu.inference.engine import EngineOptions
    from danlu.inference.generation_config import Precision
    from danlu.inference.load_model import LoadedModel
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.recipe import Recipe

DEFAULT_MAX_LENGTH = 2048  # tokens of a sample, where neither the user nor the model's context asks for fewer
KEYS = (
    "data.columns", "data.max_length", "data.overlong", "data.train_on", "data.system", "data.append_eos",
    "data.on_bad_row", "data.bad_row_limit", "data.workers", "data.cache",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A decoder, the rows it is judged on, and how both are read and the result is shown.

    Attributes:
        tokenizer: reads the model's tokenizer, with the chat template that was asked for.
        load: reads the model with that tokenizer, and prints its notes; `merged` as in `load_model`.
    """

    resolved: ResolvedModel
    data: str
    overrides: list[str]
    chat_template: str | None
    template_kwargs: Mapping[str, Any]
    precision: Precision
    device: str
    as_json: bool
    tokenizer: Callable[[], ChatTokenizer]
    load: Callable[..., LoadedModel]

    @property
    def context(self) -> int:
        """The most tokens of a row that the model sees."""
        return self.resolved.config.context_length - self.resolved.virtual_tokens_per_prompt

    def recipe(self, **data: Any) -> Recipe:
        """A recipe that reads the rows; `data` has values of its data section.

        Raises RecipeError for settings that an evaluation has no use for.
        """
        from danlu.recipe.from_arguments import recipe_from_arguments

        section = {"train": self.data, "max_length": min(self.context, DEFAULT_MAX_LENGTH), **data}
        values = {"stage": "sft", "model": str(self.resolved.folder), "data": section, "output": "."}
        return recipe_from_arguments(values, self.overrides, verb="danlu eval", open_keys=KEYS)


@dataclass(frozen=True)
class AnswerSettings:
    """Settings by which the answers are drawn and compared."""

    samples: int = 1
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    pattern: str | None = None
    target: Path | None = None
    """A new file for the answers, a line of JSON each."""


def evaluate_decoder(
    request: Request,
    scores: Path | None,
    answering: AnswerSettings | None,
    engine_options: Callable[[ResolvedModel], EngineOptions],
    reference: str | None,
    request_of: Callable[[str], Request],
) -> None:
    """Evaluates a language model's predictions of the rows, its answers to them, or its preferences where rows are
    pairs; or a reward model's scores.

    scores: a new file for these. answering: where the rows are to be answered. reference: of pairs, the model to
    compare with. request_of: the request for that one.
    """
    resolved = request.resolved
    if resolved.config.task != "causal-lm":
        if answering is not None:
            raise RecipeError(f"--generate: {resolved.given_path} is a reward model, which scores answers")
        from danlu.evaluation.reward_model import evaluate_rewards

        evaluate_rewards(request, scores)
        return
    if scores is not None:
        raise RecipeError(f"--scores: {resolved.given_path} is a language model; scores are of reward models")
    if answering is not None:
        from danlu.evaluation.answers import evaluate_answers

        evaluate_answers(request, answering, engine_options(resolved))
    elif _has_pairs(request):
        from danlu.evaluation.preferences import evaluate_preferences

        evaluate_preferences(request, reference, request_of)
    elif reference is not None:
        raise RecipeError("--reference: only pairs of answers (chosen, rejected) are compared with another model's")
    else:
        from danlu.evaluation.text import evaluate_text

        evaluate_text(request)


def _has_pairs(request: Request) -> bool:
    """Whether the rows are pairs of a chosen and a rejected answer."""
    from danlu.data.preference_rows import first_row_type

    try:
        section = request.recipe(packing="none").data
        return first_row_type(section.train[0], section.columns) == "preference"
    except DanluError:  # of a key, or of the rows: the evaluation that takes them raises it, with its own advice
        return False


def prepared_rows(spec: DatasetSpec) -> PreparedData:
    """The rows as samples, with progress on stderr. Raises DataError."""
    from danlu.data.prepare import prepare
    from danlu.training.progress import RowProgress

    try:
        with closing(RowProgress(sys.stderr)) as progress:
            return prepare(spec, progress=progress, require_ends=False)
    except DataError as error:  # its advice is for a recipe; here the template is a flag
        raise DataError(str(error).replace("model.chat_template", "--chat-template")) from None


def print_notes(statistics: Statistics, limit: str) -> None:
    """Prints how many rows were not used as they are. limit: the tokens that a row may have, and why."""
    for what, count in (*statistics.shortened.items(), *statistics.dropped.items()):
        print_status(f"note: {count:,} rows {what} (data.max_length {limit})")
    if statistics.bad_rows:
        first = f"; the first: {statistics.bad_examples[0]}" if statistics.bad_examples else ""
        print_status(f"note: {statistics.bad_rows:,} rows could not be read and were skipped{first}")


def answered(
    loaded: LoadedModel, asked: Sequence[requests.Request], options: EngineOptions
) -> Iterator[requests.Completion]:
    """The model's answers as they are completed, with progress on stderr."""
    from danlu.inference.load_engine import engine_of, with_room_for
    from danlu.training.progress import RowProgress

    engine = engine_of(loaded, with_room_for(loaded, asked, options))
    for each in asked:
        engine.submit(each)
    done, total = 0, engine.unfinished
    with closing(RowProgress(sys.stderr, doing="answering", units="answers")) as progress:
        while engine.unfinished:
            completions = engine.step()
            yield from completions
            done += len(completions)
            progress(done, total)


def opened_new(target: Path, flag: str) -> Any:
    """A new file for lines of text. Raises RecipeError, or ResourceError, with the flag that names it."""
    try:
        return target.expanduser().open("x", encoding="utf-8")
    except FileExistsError:
        raise RecipeError(f"{flag}: {target} is there already. Name a new file, or remove it") from None
    except OSError as error:
        raise ResourceError(f"{flag}: {target}: {error.strerror}") from None
