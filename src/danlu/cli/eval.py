"""`danlu eval`: how well a model predicts a file."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.cli.generate import (
    Base,
    CacheGib,
    ChatTemplate,
    Device,
    Draft,
    Dtype,
    MaxNewTokens,
    ModelArgument,
    Quantization,
    Seed,
    check_flags,
    engine_flags,
    print_notes,
    quantization_section,
)
from danlu.errors import DataError, ModelError, RecipeError
from danlu.recipe.from_arguments import recipe_from_arguments
from danlu.recipe.rules import language_stage
from danlu.terminal import echo, print_status, print_status_early

if TYPE_CHECKING:
    from danlu.data.prepare import PreparedData
    from danlu.data.samples import Selection
    from danlu.recipe import Recipe
    from danlu.recipe.sections import QuantizationSection
    from danlu.rollout.chat_tokenizer import ChatTokenizer
    from danlu.rollout.engine import EngineOptions
    from danlu.rollout.generation_config import Precision
    from danlu.rollout.load_model import LoadedModel
    from danlu.rollout.resolve_model import ResolvedModel
    from danlu.train.evaluation import Scores

DEFAULT_MAX_LENGTH = 2048  # tokens of a sample, where neither the user nor the model's context asks for fewer
MICRO_BATCH_TOKENS = 4096  # tokens per forward pass
KEYS = (
    "data.max_length", "data.overlong", "data.train_on", "data.system", "data.append_eos",
    "data.on_bad_row", "data.bad_row_limit", "data.workers", "data.cache",
)  # fmt: skip


def eval(
    model: ModelArgument,
    data: Annotated[str, typer.Option(help="File, folder or data set in any row format; path#N takes N rows.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="data.KEY=VALUE",
            help="How rows are read, as in a recipe: data.max_length=512 data.train_on=last data.on_bad_row=skip ...",
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(help="With a reward model: a new file for the scores of each row, a line of JSON each."),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Have the rows answered, and compare with the rows' own answers.")
    ] = False,
    pattern: Annotated[
        str | None,
        typer.Option(help="--generate: compare only what this regular expression finds last, such as '####\\s*(.+)'."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="--generate: answers to each row.")] = 1,
    temperature: Annotated[float, typer.Option(help="--generate: 0 takes the likeliest token each time.")] = 0.0,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = 0,
    answers: Annotated[
        Path | None, typer.Option(help="--generate: a new file for the answers, a line of JSON each.")
    ] = None,
    cache_gib: CacheGib = None,
    draft: Draft = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    chat_template: ChatTemplate = None,
    base: Base = None,
    quantization: Quantization = None,
) -> None:
    """Loss, perplexity and token accuracy of a model on a file; of plain text also bits per byte.

    Of a classifier of images: loss and accuracy on the test files of a folder, or on a file of images.

    Of a reward model: how often the chosen answer of a pair has the higher score, or a judged step is told right.

    With --generate: the share of answers that are exactly the rows' own, white space aside.

    Of text every token is scored, of conversations the assistant's, of prompts with completions the completions.

    Rows longer than the model's context (or 2048 tokens) are cut into pieces, so that nothing is left out.

    Unlike in training, the end-of-text token after a document or completion counts only with data.append_eos=true.
    """
    precision = check_flags({"temperature": temperature}, seed, dtype, device, [], quantization)
    settings: dict[str, Any] = {
        "samples": samples,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    settings |= {"pattern": pattern, "target": answers}
    if not generate and (pattern is not None or samples != 1 or temperature != 0.0 or answers is not None):
        raise RecipeError("--pattern, --samples, --temperature and --answers are of answers: add --generate")
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.models.hf_folder import LENET, model_type

    if model_type(model) == LENET:
        from danlu.cli.eval_images import evaluate_images

        flags: dict[str, object] = {"--chat-template": chat_template, "--base": base, "--quantization": quantization}
        flags |= {"--scores": scores, "--generate": generate}
        evaluate_images(
            model,
            data,
            [*(overrides or []), *(name for name, given in flags.items() if given)],
            as_json=as_json,
            precision=precision,
            device=device,
        )
        return
    from danlu.models.hf_validation import check_headers
    from danlu.rollout.resolve_model import resolve_model

    resolved = resolve_model(model, base, may_classify=True)
    print_status_early(f"reading {resolved.given_path} and {data}")
    config = resolved.config
    check_headers(resolved.folder, config, quantized=True)  # before rows are tokenised
    context = config.context_length - resolved.virtual_tokens_per_prompt
    section = quantization_section(quantization, resolved)
    request = Request(resolved, data, overrides or [], chat_template, section, precision, device, context, as_json)
    if config.task != "causal-lm":
        if generate:
            raise RecipeError(f"--generate: {resolved.given_path} is a reward model, which scores answers")
        _evaluate_rewards(request, target=scores)
        return
    if scores is not None:
        raise RecipeError(f"--scores: {resolved.given_path} is a language model; scores are of reward models")
    if generate:
        _evaluate_answers(request, settings, engine_flags(resolved, cache_gib, draft))
    else:
        _evaluate_text(request)


@dataclass(frozen=True)
class Request:
    """A decoder, the rows it is judged on, and how both are read and the result is shown."""

    resolved: ResolvedModel
    data: str
    overrides: list[str]
    chat_template: Path | None
    quantization: QuantizationSection | None
    precision: Precision
    device: str
    context: int  # tokens of a row that the model sees
    as_json: bool

    def tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, with the chat template that was asked for."""
        from danlu.rollout.load_model import load_chat_tokenizer

        resolved = self.resolved
        return load_chat_tokenizer(resolved.tokenizer_folder, self.chat_template, model=resolved.folder)

    def load(self, tokenizer: ChatTokenizer | None = None, *, merged: bool = False) -> LoadedModel:
        """The model with its tokenizer, having told what is worth knowing of it. merged: as in `load_model`."""
        from danlu.rollout.load_model import load_model

        loaded = load_model(
            self.resolved,
            tokenizer or self.tokenizer(),
            precision=self.precision,
            device=self.device,
            quantization=self.quantization,
            merged=merged,
        )
        print_notes(loaded)
        return loaded


def _evaluate_rewards(request: Request, *, target: Path | None) -> None:
    """The scores of a reward model, and what they amount to; written to `target`, if that is given."""
    from danlu.cli.eval_rewards import evaluate_rewards, prepared_rows, rewards_spec

    resolved, length = request.resolved, min(request.context, DEFAULT_MAX_LENGTH)
    spec = rewards_spec(resolved, request.data, request.overrides, request.chat_template, max_length=length, keys=KEYS)
    rows = prepared_rows(spec)
    evaluate_rewards(
        request.load(),
        spec,
        rows,
        given_path=resolved.given_path,
        data=request.data,
        as_json=request.as_json,
        target=target,
    )


def _evaluate_answers(request: Request, settings: Mapping[str, Any], options: EngineOptions) -> None:
    """How many of a language model's answers are the rows' own."""
    from danlu.cli.eval_answers import AnswerSettings, Questions, evaluate_answers

    if request.overrides:
        raise RecipeError(f"{request.overrides[0]}: --generate asks the rows as they are, and reads no data.KEY")
    answer_settings = AnswerSettings(**settings)
    match, tokenizer = answer_settings.match(), request.tokenizer()
    questions = Questions.read(request.data, match, request.resolved, tokenizer)
    evaluate_answers(
        request.load(tokenizer, merged=True),
        questions,
        answer_settings,
        match,
        options,
        model=request.resolved.given_path,
        data=request.data,
        as_json=request.as_json,
    )


def _evaluate_text(request: Request) -> None:
    """How likely the rows are under a language model."""
    resolved = request.resolved
    recipe = evaluation_recipe(resolved.folder, request.data, request.overrides, request.context)
    prepared = tokenised(recipe, resolved.tokenizer_folder, request.chat_template)
    loaded = request.load()
    samples = prepared.train
    assert samples is not None, "only a streaming data section has no samples"
    means = score(loaded, samples, recipe)
    statistics = prepared.statistics
    row: dict[str, Any] = {
        "model": str(resolved.given_path),
        "data": request.data,
        "loss": means.loss,
        "perplexity": means.perplexity,
        "accuracy": means.accuracy,
        "bits_per_byte": bits_per_byte(means, samples, loaded),
        "scored_tokens": means.trained_tokens,
        "tokens": means.tokens,
        "rows": statistics.rows,
        "bad_rows": statistics.bad_rows,
        "shortened": dict(statistics.shortened),
        "dropped": dict(statistics.dropped),
        "lost_tokens": statistics.lost_tokens,
        "max_length": recipe.data.max_length,
    }
    if prepared.date is not None:
        row["chat_template_date"] = prepared.date
    if request.as_json:
        # A model that is nothing like its data has an infinite perplexity, which JSON has no number for.
        finite = {name: None if value == math.inf else value for name, value in row.items()}
        echo(json.dumps(finite, ensure_ascii=False))
    else:
        show(row, statistics.bad_examples, request.context)


def evaluation_recipe(folder: Path, data: str, overrides: list[str], context: int) -> Recipe:
    """A recipe that reads the rows of an evaluation. context: tokens that the model has for a row.

    Raises RecipeError for settings that an evaluation has no use for.
    """
    values = {
        "stage": "sft",
        "model": str(folder),
        "data": {
            "train": data,
            "max_length": min(context, DEFAULT_MAX_LENGTH),
            "packing": "best-fit",
            "overlong": "split",
            "append_eos": False,
        },
        "output": ".",
    }
    recipe = recipe_from_arguments(values, overrides, verb="danlu eval", open_keys=KEYS)
    if recipe.data.max_length > context:
        raise RecipeError(
            f"data.max_length: {recipe.data.max_length} is more than the {context} tokens that {folder} can see"
        )
    if recipe.data.max_length < 2:
        raise RecipeError("data.max_length: at least 2, as the first token of a piece has nothing before it")
    return recipe


def tokenised(recipe: Recipe, folder: Path, chat_template: Path | None) -> PreparedData:
    """The rows of `recipe.data` as samples. Raises DataError when none of their tokens is to be scored."""
    from danlu.data.prepare import DatasetSpec, prepare
    from danlu.train.progress import RowProgress

    template = None if chat_template is None else str(chat_template)
    try:
        with closing(RowProgress(sys.stderr)) as progress:
            spec = DatasetSpec(recipe.data, language_stage(recipe, "this evaluation"), str(folder), template, seed=0)
            return prepare(spec, progress=progress, require_ends=False)
    except DataError as error:  # its advice is for a recipe; here the template is a flag
        raise DataError(str(error).replace("model.chat_template", "--chat-template")) from None


def score(loaded: LoadedModel, samples: Selection, recipe: Recipe) -> Scores:
    """Scores over every sample, once."""
    from danlu.data.packed_dataset import PackedDataset
    from danlu.language.learner import DecoderLearner
    from danlu.train.evaluation import evaluate
    from danlu.train.progress import RowProgress

    length = recipe.data.max_length
    packs = PackedDataset(samples, recipe.data.packing, length, seed=0, shuffle=False)
    learner = DecoderLearner(
        model=loaded.model,
        forward=loaded.model,
        device=loaded.model.embed_tokens.weight.device,
        dtype=loaded.dtype,
        micro=max(1, MICRO_BATCH_TOKENS // length),
        adapters=None if loaded.stacks is None else loaded.stacks.adapters,
    )
    with closing(RowProgress(sys.stderr, doing="scoring", units="packed sequences")) as progress:
        scores = evaluate(
            learner, packs.epoch(), progress=progress if sys.stderr.isatty() else lambda done, count: None
        )
    assert scores is not None, "prepare refuses data without a token to score"
    if math.isnan(scores.loss):
        raise ModelError(
            f"{loaded.folder}: the loss is not a number: the model's numbers leave the range of "
            f"{str(loaded.dtype).removeprefix('torch.')}; try --dtype fp32"
        )
    return scores


def bits_per_byte(scores: Scores, samples: Selection, loaded: LoadedModel) -> float | None:
    """The loss per byte of text in bits, by which models with different tokenizers can be compared.

    None unless the rows are plain text.
    """
    from danlu.data.bits_per_byte import is_plain_text, weighted_bytes

    if not is_plain_text(samples):
        return None
    weight, text_bytes = weighted_bytes(samples, loaded.chat_tokenizer.tokenizer)
    return scores.loss * weight / (math.log(2) * text_bytes) if text_bytes else None


def show(row: dict[str, Any], bad_examples: list[str], context: int) -> None:
    """Prints the scores, and on stderr what became of rows that could not be used as they are.

    context: the most tokens that the model can see of a row.
    """
    echo(f"loss           {row['loss']:.4f} nats per token")
    echo(f"perplexity     {row['perplexity']:.4g}")
    echo(f"accuracy       {row['accuracy']:.2%} of tokens are the likeliest one")
    if row["bits_per_byte"] is not None:
        echo(f"bits per byte  {row['bits_per_byte']:.4f}")
    echo(f"scored         {row['scored_tokens']:,} of {row['tokens']:,} tokens in {row['rows']:,} rows")
    limit = ", all that the model sees" if row["max_length"] == context else ""
    for what, count in (*row["shortened"].items(), *row["dropped"].items()):
        print_status(f"note: {count:,} rows {what} (data.max_length {row['max_length']}{limit})")
    if row["bad_rows"]:
        first = f"; the first: {bad_examples[0]}" if bad_examples else ""
        print_status(f"note: {row['bad_rows']:,} rows could not be read and were skipped{first}")
