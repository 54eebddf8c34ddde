"""LongRoPE's factors for the model of a recipe: candidates judged by its perplexity on held-out documents.

Each judged candidate is a line of longrope_search.jsonl in the run folder, after a first line that describes the search
and its inputs. A search that was interrupted reads them and goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.adapter_training import merged_model
from danlu.assembly.base_model import weight_layouts
from danlu.assembly.frozen_base import load_frozen
from danlu.assembly.recipe_adapters import (
    base_config,
    base_identity,
    dataset_spec,
    model_folder,
    open_named,
    recipe_base,
)
from danlu.core.errors import DataError
from danlu.core.line_log import LineLog
from danlu.core.run_files import LONGROPE_SEARCH
from danlu.core.types import Pack, Sample
from danlu.data.packed_dataset import cut
from danlu.data.samples import Samples
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.loading import load
from danlu.models.long_context import original_length, with_long_context
from danlu.models.longrope_search import Candidate, count, search
from danlu.numerics.dtypes import DTYPES
from danlu.recipe import Recipe
from danlu.stages.learner import DecoderLearner
from danlu.stages.reader import prepared_data
from danlu.training.evaluation import evaluate
from danlu.training.progress import RowProgress


def searched_factors(recipe: Recipe, folder: Path, device: torch.device, stream: TextIO) -> list[float]:
    """The best `long_factor` that `long_context.search` finds for the recipe's model and its longest length.

    Raises DataError without held-out documents that are longer than the model was trained at.
    """
    section = recipe.long_context
    assert section is not None and section.search is not None, "asked for where there is something to search"
    length, unscaled = recipe.data.max_length, base_config(recipe.model)
    original = section.original_length or original_length(unscaled, "longrope")
    config = with_long_context(unscaled, section, length)
    documents = _documents(recipe, original, section.search.documents, stream)
    model = _model(recipe, config, device)
    learner = DecoderLearner(model, model, device, DTYPES[recipe.activations], micro=1)
    packs = [Pack((document,), stage_length=length) for document in documents]
    identity, base_quantization = base_identity(recipe.model), recipe.base_quantization
    made_from = {
        "search": section.search.model_dump(mode="json"),
        "base": [identity["model"]["fingerprint"], *identity["adapters"].values()],
        "documents": [document.row for document in documents],
        "lengths": [original, length],
        "short_factor": section.short_factor,
        "seed": recipe.seed,
        "precision": recipe.activations,
        "quantization": None if base_quantization is None else base_quantization.of_base(),
    }
    with (
        closing(_Judged(folder / LONGROPE_SEARCH, made_from)) as judged,
        closing(RowProgress(stream, doing="searching LongRoPE's factors", units="candidates")) as progress,
    ):
        total = count(section.search)

        def judge(generation: int, candidate: Candidate) -> float:
            loss = judged.loss_of(candidate)
            if loss is None:
                with_factors = section.model_copy(update={"long_factor": list(candidate)})
                loss = _loss_of(with_long_context(unscaled, with_factors, length), learner, packs, length)
                judged.add(generation, candidate, loss)
            progress(len(judged), total)
            return loss

        rope = next(rope for rope in config.ropes if rope.has_one_switch)
        return list(search(rope, original, length, section.search, recipe.seed, judge))


def summary(folder: Path) -> str:
    """The result of a finished search, as a line for the console."""
    lines = [json.loads(line) for line in (folder / LONGROPE_SEARCH).read_text().splitlines()[1:]]
    best, linear = min(lines, key=lambda line: line["loss"]), lines[0]
    return (
        f"long_context.search: {len(lines):,} candidates; the best has perplexity {best['perplexity']:.4g} at the "
        f"longest length, linear scaling {linear['perplexity']:.4g}"
    )


def _model(recipe: Recipe, config: ModelConfig, device: torch.device) -> Decoder:
    """The model that is trained, as it is before the first step: quantized, and upon other adapters, as in the run."""
    section = recipe.model
    assert section.path is not None, "the recipe's rules ask for a trained model"
    if recipe.adapter is None:
        if section.adapters:
            return merged_model(section, device=device, config=config)
        folder = model_folder(section)
        return load(folder, device=device, config=config, layouts=weight_layouts(folder))
    base = recipe_base(section)
    adapted = load_frozen(
        base.folder,
        dtype=DTYPES[recipe.activations],
        device=device,
        quantization=recipe.base_quantization,
        config=config,
        keep_blocks=True,
    )
    stacks = AdapterStacks(adapted.adapters)
    stacks.use(stacks.add(open_named(section.adapters, base)))
    return adapted.model


def _loss_of(config: ModelConfig, learner: DecoderLearner, packs: Sequence[Pack], length: int) -> float:
    """The mean loss of a learner's model over packs of this stage length, rotated as in `config`."""
    learner.model.staged_ropes = {length: config.ropes}
    scores = evaluate(learner, packs)
    assert scores is not None, "documents have targets"
    return scores.loss if math.isfinite(scores.loss) else math.inf


class _Judged:
    """The losses of judged candidates, in a file that is emptied for another search."""

    def __init__(self, path: Path, made_from: dict[str, Any]) -> None:
        self._log = LineLog(path)
        self._losses: dict[Candidate, float] = {}
        header = json.dumps({"longrope_search": made_from}, sort_keys=True)
        lines = path.read_text().splitlines()
        if lines[:1] != [header]:
            self._log.truncate(0)
            self._log.append(header)
            return
        for line in map(json.loads, lines[1:]):
            self._losses[tuple(line["factors"])] = float(line["loss"])

    def __len__(self) -> int:
        return len(self._losses)

    def loss_of(self, candidate: Candidate) -> float | None:
        return self._losses.get(candidate)

    def add(self, generation: int, candidate: Candidate, loss: float) -> None:
        self._losses[candidate] = loss
        perplexity = math.exp(min(loss, 700.0))
        values = {"generation": generation, "loss": loss, "perplexity": perplexity, "factors": candidate}
        self._log.append(json.dumps(values))

    def close(self) -> None:
        self._log.sync()
        self._log.close()


def _documents(recipe: Recipe, original: int, wanted: int, stream: TextIO) -> list[Sample]:
    """The longest held-out documents that are longer than `original`, each cut to data.max_length tokens."""
    held_out: Samples | None = prepared_data(dataset_spec(recipe), stream).eval
    assert held_out is not None, "the recipe's rules ask for held-out rows"
    order = np.argsort(-held_out.lengths.astype(np.int64), kind="stable")[:wanted]
    # Of documents that packs cut (concatenate) the samples are whole ones.
    documents = [cut(held_out.sample(int(number)), 0, recipe.data.max_length) for number in order]
    longer = [document for document in documents if len(document.tokens) > original and document.weights.any()]
    if not longer:
        longest = int(held_out.lengths.max())
        raise DataError(
            f"long_context.search: the longest held-out document has {longest:,} tokens, and the model was trained at "
            f"{original:,}: nothing longer is there to judge candidates by. Give longer documents in data.eval"
        )
    return longer
