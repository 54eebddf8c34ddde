"""`danlu eval` with a reward model: how it scores the rows of a file, and how often that is right."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError, RecipeError, ResourceError
from danlu.core.terminal import echo, print_status
from danlu.data.preference_rows import first_row_type
from danlu.data.prepare import DatasetSpec, prepare
from danlu.inference.load_model import LoadedModel
from danlu.inference.resolve_model import ResolvedModel
from danlu.recipe.from_arguments import recipe_from_arguments
from danlu.stages.scoring import ScoreSummary, row_values, scored_rows, scoring_learner
from danlu.training.progress import RowProgress

if TYPE_CHECKING:
    from danlu.data.prepare import PreparedData


def rewards_spec(
    resolved: ResolvedModel, data: str, overrides: list[str], chat_template: Path | None, *, max_length: int, keys: Any
) -> DatasetSpec:
    """Makes the spec by which rows of a file become samples: pairs and steps are trees, other rows one answer each.

    Rows longer than `max_length` tokens lose the beginning of their prompts (trees), or are left out.
    Raises RecipeError for settings that scoring has no use for, DataError for rows that this model cannot judge.
    """
    values = {
        "stage": "sft",
        "model": str(resolved.folder),
        "data": {"train": data, "max_length": max_length, "packing": "none"},
        "output": ".",
    }
    recipe = recipe_from_arguments(values, overrides, verb="danlu eval", open_keys=keys)
    row_type = first_row_type(recipe.data.train[0])
    process = resolved.config.task == "token-classification"
    if row_type is not None and (row_type == "stepwise") != process:
        what = "steps, and these rows are whole answers" if process else "whole answers, and these rows are steps"
        raise DataError(f"{data}: {resolved.given_path} scores {what}")
    section = recipe.data
    if row_type is None:  # cut answers would be scored at places where nobody looks
        section = section.model_copy(update={"overlong": "drop"})
    template = None if chat_template is None else str(chat_template)
    tokenizer = str(resolved.tokenizer_folder)
    return DatasetSpec(section, "sft" if row_type is None else "reward", tokenizer, template, 0, row_type=row_type)


def prepared_rows(spec: DatasetSpec) -> PreparedData:
    """The rows as samples, with progress on stderr. Raises DataError."""
    try:
        with closing(RowProgress(sys.stderr)) as progress:
            return prepare(spec, progress=progress, require_ends=False)
    except DataError as error:  # its advice is for a recipe; here the template is a flag
        raise DataError(str(error).replace("model.chat_template", "--chat-template")) from None


def evaluate_rewards(
    loaded: LoadedModel,
    spec: DatasetSpec,
    prepared: PreparedData,
    *,
    given_path: Path,
    data: str,
    as_json: bool,
    target: Path | None,
) -> None:
    """Prints a summary of the scores; with `target`, writes a line of JSON for each row into that file.

    Raises ModelError for scores that are not finite, ResourceError for a file that cannot be written.
    """
    assert prepared.train is not None, "only a streaming data section has no samples"
    rows = spec.packed(prepared.train, shuffle=False)
    packs = [rows.at(number) for number in range(rows.packs_per_epoch)]
    steps = loaded.model.config.task == "token-classification"
    summary = ScoreSummary(steps)
    with ExitStack() as closing_:
        file = None if target is None else closing_.enter_context(opened_new(target, "--scores"))
        progress = closing_.enter_context(closing(RowProgress(sys.stderr, doing="scoring", units="rows")))
        shown = progress if sys.stderr.isatty() else lambda done, count: None
        for row in scored_rows(scoring_learner(loaded), packs, shown):
            summary.add(row)
            if file is not None:
                file.write(json.dumps(row_values(row, steps=steps), ensure_ascii=False) + "\n")
    values, statistics = summary.values(), prepared.statistics
    if as_json:
        facts = {"bad_rows": statistics.bad_rows, "shortened": dict(statistics.shortened)}
        named = {"model": str(given_path), "data": data, **values, **facts, "dropped": dict(statistics.dropped)}
        echo(json.dumps(named, ensure_ascii=False))
        return
    _show(values)
    for what, count in (*statistics.shortened.items(), *statistics.dropped.items()):
        print_status(f"note: {count:,} rows {what} (data.max_length {spec.data.max_length})")
    if statistics.bad_rows:
        first = f"; the first: {statistics.bad_examples[0]}" if statistics.bad_examples else ""
        print_status(f"note: {statistics.bad_rows:,} rows could not be read and were skipped{first}")
    if target is not None:
        print_status(f"scores of {summary.rows:,} rows: {target}")


def _show(values: dict[str, float]) -> None:
    if "pairs" in values:
        pairs = int(values["pairs"])
        echo(f"accuracy  {values['accuracy']:.2%} of {pairs:,} pairs: the chosen answer has the higher score")
        echo(f"margin    {values['margin']:.4f} between them on average")
        echo(f"scores    {values['chosen_score']:.4f} chosen, {values['rejected_score']:.4f} rejected, on average")
        echo(f"loss      {values['loss']:.4f} nats per pair")
    if "steps" in values:
        echo(f"accuracy  {values['accuracy']:.2%} of {int(values['steps']):,} judged steps")
        echo(f"right     {values['right_steps']:.2%} of them are labelled right")
        echo(f"loss      {values['loss']:.4f} nats per step")
    if "score" in values:
        echo(f"score     {values['score']:.4f} on average, standard deviation {values['score_std']:.4f}")
    if not values.keys() - {"rows"}:
        echo(f"rows      {int(values['rows']):,}, none of whose steps is judged")


def opened_new(target: Path, flag: str) -> Any:
    """A new file for lines of text. Raises RecipeError, or ResourceError, with the flag that names it."""
    try:
        return target.expanduser().open("x", encoding="utf-8")
    except FileExistsError:
        raise RecipeError(f"{flag}: {target} is there already. Name a new file, or remove it") from None
    except OSError as error:
        raise ResourceError(f"{flag}: {target}: {error.strerror}") from None
