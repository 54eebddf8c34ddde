"""`danlu eval` with a reward model: how it scores the rows of a file, and how often that is right."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from danlu.core.errors import DataError
from danlu.core.terminal import echo, print_status
from danlu.data.preference_rows import first_row_type
from danlu.data.prepare import DatasetSpec, Stage
from danlu.evaluation.decoder import Request, opened_new, prepared_rows, print_notes
from danlu.stages.scoring import ScoreSummary, row_values, scored_rows, scoring_learner
from danlu.training.progress import RowProgress


def evaluate_rewards(request: Request, target: Path | None) -> None:
    """Prints a summary of a reward model's scores; with `target`, writes a line of JSON for each row into that file.

    Raises ModelError for scores that are not finite, ResourceError for a file that cannot be written, and as
    `rewards_spec` does.
    """
    spec = rewards_spec(request)
    prepared = prepared_rows(spec)
    loaded = request.load(request.tokenizer())
    assert prepared.train is not None, "only a streaming data section has no samples"
    packs = list(spec.packed(prepared.train, shuffle=False).epoch())
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
    if request.as_json:
        facts = {"bad_rows": statistics.bad_rows, "shortened": dict(statistics.shortened)}
        names = {"model": str(request.resolved.given_path), "data": request.data}
        named = {**names, **values, **facts, "dropped": dict(statistics.dropped)}
        echo(json.dumps(named, ensure_ascii=False))
        return
    _show(values)
    print_notes(statistics, str(spec.data.max_length))
    if target is not None:
        print_status(f"scores of {summary.rows:,} rows: {target}")


def rewards_spec(request: Request) -> DatasetSpec:
    """Makes the spec by which rows of a file become samples: pairs and steps are trees, other rows one answer each.

    Rows longer than data.max_length tokens lose the beginning of their prompts (trees), or are left out.
    Raises RecipeError for settings that scoring has no use for, DataError for rows that this model cannot judge.
    """
    resolved, section = request.resolved, request.recipe(packing="none").data
    row_type = first_row_type(section.train[0], section.columns)
    process = resolved.config.task == "token-classification"
    if row_type is not None and (row_type == "stepwise") != process:
        what = "steps, and these rows are whole answers" if process else "whole answers, and these rows are steps"
        raise DataError(f"{request.data}: {resolved.given_path} scores {what}")
    if row_type is None:  # cut answers would be scored at places where nobody looks
        section = section.model_copy(update={"overlong": "drop"})
    tokenizer, template = str(resolved.tokenizer_folder), request.chat_template
    stage: Stage = "sft" if row_type is None else "reward"
    kwargs = request.template_kwargs
    return DatasetSpec(section, stage, tokenizer, template, 0, row_type=row_type, template_kwargs=kwargs)


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
        echo(f"rows      {int(values['rows']):,}, none of them with a judged step")
