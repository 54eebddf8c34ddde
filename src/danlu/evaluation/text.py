"""`danlu eval` with a language model: how likely the tokens of a file are."""

from __future__ import annotations

import json
import math
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from danlu.core.errors import ModelError, RecipeError
from danlu.core.terminal import echo
from danlu.data.message_spans import Reason
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec
from danlu.data.samples import Samples, Selection
from danlu.data.tokenizer import Tokenizer
from danlu.evaluation.decoder import Request, prepared_rows, print_notes
from danlu.recipe.rules import language_stage

if TYPE_CHECKING:
    from danlu.inference.load_model import LoadedModel
    from danlu.training.evaluation import Scores

MICRO_BATCH_TOKENS = 4096  # tokens per forward pass


def evaluate_text(request: Request) -> None:
    """Evaluates the likelihood of the rows under a language model."""
    resolved, context = request.resolved, request.context
    recipe = request.recipe(packing="best-fit", overlong="split", append_eos=False)
    section, length = recipe.data, recipe.data.max_length
    if length > context:
        raise RecipeError(f"data.max_length: {length} is more than the {context} tokens that {resolved.folder} can see")
    if length < 2:
        raise RecipeError("data.max_length: at least 2, as the first token of a piece has nothing before it")
    stage, tokenizer = language_stage(recipe, "this evaluation"), str(resolved.tokenizer_folder)
    spec = DatasetSpec(
        section, stage, tokenizer, request.chat_template, seed=0, template_kwargs=request.template_kwargs
    )
    prepared = prepared_rows(spec)
    loaded = request.load(request.tokenizer())
    samples, statistics = prepared.train, prepared.statistics
    assert samples is not None, "only a streaming data section has no samples"
    means = score(loaded, spec.packed(samples, shuffle=False), length)
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
        "max_length": length,
    }
    if prepared.date is not None:
        row["chat_template_date"] = prepared.date
    if request.as_json:
        # A model that is nothing like its data has an infinite perplexity, which JSON has no number for.
        finite = {name: None if value == math.inf else value for name, value in row.items()}
        echo(json.dumps(finite, ensure_ascii=False))
        return
    echo(f"loss           {row['loss']:.4f} nats per token")
    echo(f"perplexity     {row['perplexity']:.4g}")
    echo(f"accuracy       {row['accuracy']:.2%} of tokens are the likeliest one")
    if row["bits_per_byte"] is not None:
        echo(f"bits per byte  {row['bits_per_byte']:.4f}")
    echo(f"scored         {row['scored_tokens']:,} of {row['tokens']:,} tokens in {row['rows']:,} rows")
    print_notes(statistics, f"{length}{', all that the model sees' if length == context else ''}")


def score(loaded: LoadedModel, packs: PackedDataset, length: int) -> Scores:
    """Scores over every sample, once. length: tokens of a pack."""
    from danlu.stages.learner import DecoderLearner
    from danlu.training.evaluation import evaluate
    from danlu.training.progress import RowProgress

    learner = DecoderLearner(
        model=loaded.model,
        model_forward=loaded.model,
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
    if not is_plain_text(samples):
        return None
    weight, text_bytes = weighted_bytes(samples, loaded.chat_tokenizer.tokenizer)
    return scores.loss * weight / (math.log(2) * text_bytes) if text_bytes else None


def is_plain_text(samples: Samples) -> bool:
    """Whether the samples are text (or tokens given as such) alone: no prompts, no conversations."""
    plain = (Reason.TEXT, Reason.BOS, Reason.EOS)
    return all(np.isin(samples.reasons(number), plain).all() for number in range(len(samples)))


def weighted_bytes(samples: Samples, tokenizer: Tokenizer) -> tuple[float, float]:
    """The weight of all tokens, and the UTF-8 bytes of text they stand for, each byte with the weight of its token.

    A character spread over several tokens is counted byte by byte, tokens that begin or end a document not at all, nor
    the space that some tokenizers put before a document. A text that the tokenizer normalises counts as it is then.
    """
    token_texts = tokenizer.token_bytes(range(tokenizer.vocab_size))
    lengths = np.array([len(text) for text in token_texts], np.int64)
    begins_with_space = np.array([text.startswith(b" ") for text in token_texts], bool)
    adds_space = b"".join(token_texts[token] for token in tokenizer.encode("a")) == b" a"
    weight = total = 0.0
    for number in range(len(samples)):
        sample, reasons = samples.sample(number), samples.reasons(number)
        counted = np.where(reasons == Reason.TEXT, lengths[sample.tokens], 0)  # [S]
        if adds_space and reasons[0] == Reason.BOS:
            counted[1:2] -= begins_with_space[sample.tokens[1:2]]
        weight += float(sample.weights.sum(dtype=np.float64))
        total += float(sample.weights.astype(np.float64) @ counted)
    return weight, total
