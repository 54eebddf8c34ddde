"""`danlu eval`: how well a model predicts a file."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from danlu.cli.generate import ChatTemplate, Device, Dtype, ModelArgument, check_flags
from danlu.errors import DataError, RecipeError
from danlu.recipe.sections import Data, Packing, Source

if TYPE_CHECKING:
    from danlu.data.prepare import Prepared
    from danlu.rollout.opening import OpenModel
    from danlu.train.evaluation import Scores

DEFAULT_LENGTH = 2048
MICRO_BATCH_TOKENS = 4096  # what goes through the model at once


def eval(
    model: ModelArgument,
    data: Annotated[str, typer.Option(help="File, folder or data set in any row format; path#N takes N rows.")],
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Longer rows are cut into pieces. Default: the model's context, at most 2048."),
    ] = None,
    train_on: Annotated[
        str, typer.Option(help="Messages of a conversation that are scored: all, assistant or last.")
    ] = "assistant",
    append_eos: Annotated[
        bool,
        typer.Option("--append-eos", help="Also score the end-of-text token after each document, as training does."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
) -> None:
    """Loss, perplexity and token accuracy of a model on a file.

    Of plain text every token is scored but the first of each row or piece, of conversations the assistant's tokens.
    """
    check_flags({}, 0, dtype, device, [])
    kinds = get_args(Data.model_fields["train_on"].annotation)
    if train_on not in kinds:
        raise RecipeError(f"--train-on: {train_on!r} is unknown; use {', '.join(kinds)}")
    # torch takes a second to import, which `danlu eval --help` should not.
    from danlu.data.prepare import prepare
    from danlu.models.folder import read_config
    from danlu.rollout.generate import context_length
    from danlu.rollout.opening import find_model, open_model, open_wording

    folder = find_model(model)
    context = context_length(read_config(folder))
    if max_length is not None and max_length > context:
        raise RecipeError(f"--max-length: {max_length} is more than the {context} tokens that {folder} can see")
    section = Data(
        train=[Source(path=data)],
        max_length=max_length or min(context, DEFAULT_LENGTH),
        packing=Packing(kind="best-fit"),
        overlong="split",
        train_on=train_on,  # type: ignore[arg-type]  # checked above
        append_eos=append_eos,
    )
    template = None if chat_template is None else str(chat_template)
    wording = open_wording(folder, chat_template)  # first: whether model and tokenizer fit is known in a moment
    prepared = prepare(section, stage="sft", tokenizer_path=str(folder), chat_template=template, seed=0)
    opened = open_model(folder, wording, precision=dtype, device=device)
    scores = score(opened, prepared, section)
    row: dict[str, Any] = {
        "model": str(folder),
        "data": data,
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "accuracy": scores.accuracy,
        "scored_tokens": scores.trained_tokens,
        "tokens": scores.tokens,
        "rows": prepared.statistics.rows,
        "max_length": section.max_length,
    }
    if as_json:
        print(json.dumps(row, ensure_ascii=False))
    else:
        show(row, prepared)


def score(opened: OpenModel, prepared: Prepared, section: Data) -> Scores:
    """Scores over every prepared sample, once. Raises DataError when none of its tokens is to be scored."""
    from danlu.data.packs import Packs
    from danlu.recipe.sections import LossOptions
    from danlu.train.evaluation import evaluate
    from danlu.train.step import Compute

    assert prepared.train is not None, "only a streaming data section has no samples"
    packs = Packs(prepared.train, section.packing, section.max_length, seed=0, shuffle=False)
    compute = Compute(
        model=opened.model,
        forward=opened.model,
        device=opened.model.embed_tokens.weight.device,
        dtype=opened.dtype,
        micro=max(1, MICRO_BATCH_TOKENS // section.max_length),
        loss=LossOptions(),
    )
    scores = evaluate(compute, (packs.at(number) for number in range(packs.packs_per_epoch)))
    if scores is None:
        raise DataError("no token of the data is to be scored: check --train-on and --max-length")
    return scores


def show(row: dict[str, Any], prepared: Prepared) -> None:
    """The scores for people, and what became of rows that could not be used as they are."""
    print(f"loss        {row['loss']:.4f} nats per token")
    print(f"perplexity  {row['perplexity']:.4g}")
    print(f"accuracy    {row['accuracy']:.2%} of tokens are the likeliest one")
    print(f"scored      {row['scored_tokens']} of {row['tokens']} tokens in {row['rows']} rows")
    for what, count in (*prepared.statistics.shortened.items(), *prepared.statistics.dropped.items()):
        print(f"note: {count} rows {what} (max_length {row['max_length']})", file=sys.stderr)
