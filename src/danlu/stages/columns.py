"""Columns of the rows, asked of a model once before training, and added to the samples by their numbers.

The model is placed like the policy and gone before the policy is there, so a run never holds both.

S tokens of a sample · T tokens of a block of samples · N targets of a micro-batch
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from danlu.adapters.adapter_config import CONFIG, WEIGHTS
from danlu.assembly.recipe_adapters import model_folder, named_stack
from danlu.core.types import Batch, Outputs, Pack, Role, Sample
from danlu.data.column_store import ColumnStore, SamplesWithColumns
from danlu.data.samples import Samples
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_tensors
from danlu.parallel.batch_sharding import shard_by_tokens
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.stages.learner import DecoderLearner
from danlu.stages.no_grad_pass import no_grad_pass
from danlu.stages.protocols import ColumnSpec, StoredRows
from danlu.training.progress import RowProgress

_TOKENS_AT_ONCE = {"cpu": 4096, "cuda": 16384}
"""Tokens in a micro-batch of a pass without gradients, unless the recipe's own are larger."""

_PLACE = "place"
"""A column that says which token of the stored sample each one is."""


def add_columns(
    rows: StoredRows,
    spec: ColumnSpec,
    config: ModelConfig,
    place_model: Callable[[], DecoderLearner],
    recipe: Recipe,
    ranks: Ranks,
    device: torch.device,
    stream: TextIO,
) -> tuple[Samples, Samples | None]:
    """Returns (training, held-out samples) with the columns of `spec`; every process calls it.

    Columns that are not in the cache are computed by the model, dealt by tokens over the data ranks, and written a
    block at a time. A run that is stopped meanwhile goes on with the next block.

    config: that of the model that computes them. place_model: makes a learner with that model as its policy; called
    only where something has to be computed.
    """
    key = ranks.world.from_first(lambda: _key(recipe, spec, config, device))
    sides = [samples for samples in (rows.train, rows.held_out) if samples is not None]
    cache = Path(recipe.data.cache).expanduser()
    stores = [
        ColumnStore(cache, spec.name, samples.lengths, spec.types, {**key, "samples": samples.digest()})
        for samples in sides
    ]
    missing = ranks.world.from_first(lambda: [store.missing() for store in stores])
    if any(missing):
        total = sum(len(store.blocks[number]) for store, lost in zip(stores, missing, strict=True) for number in lost)
        with closing(RowProgress(stream, doing=spec.name)) as progress:
            asking = _Asking(place_model(), rows, spec, recipe, lambda done: progress(done, total))
            for samples, store, lost in zip(sides, stores, missing, strict=True):
                for number in lost:
                    asking.compute(samples, store, number)
        ranks.world.from_first(lambda: None)  # all blocks are written
    train, *held_out = map(SamplesWithColumns, sides, stores)
    return train, held_out[0] if held_out else None


@dataclass
class _Asking:
    """The passes without gradients over blocks of samples."""

    learner: DecoderLearner
    rows: StoredRows
    spec: ColumnSpec
    recipe: Recipe
    progress: Callable[[int], None]
    done: int = 0

    def compute(self, samples: Samples, store: ColumnStore, number: int) -> None:
        """One block; the first process writes it."""
        block = store.blocks[number]
        asked = [self.rows.laid_out(all_answers(samples.sample(sample))) for sample in block]
        starts = np.cumsum([0, *samples.lengths[block.start : block.stop]]).tolist()
        values = {
            name: torch.zeros(starts[-1], *of.shape, dtype=torch.from_numpy(np.empty(0, of.dtype)).dtype)
            for name, of in self.spec.types.items()
        }
        parallel, device, micro = self.learner.parallel, self.learner.device, self.recipe.batch.micro
        own = self.recipe.data.max_length * (micro if isinstance(micro, int) else 1)
        capacity = max(own, _TOKENS_AT_ONCE.get(device.type, 0))
        packs, data = [Pack((sample,)) for sample in asked], parallel.ranks.data
        least = parallel.least_micro_batches(len(packs))
        dealt = shard_by_tokens([pack.tokens for pack in packs], data.index, data.size, capacity, least=least)
        # Every rank asks, for ranks that share a model wait for each other.
        for numbers, computed in no_grad_pass(self.learner.judged_by, packs, dealt, self._columns):
            places = [starts[place] + asked[place].columns[_PLACE][asked[place].weights != 0] for place in numbers]
            at = torch.from_numpy(np.concatenate(places) if places else np.empty(0, np.int64))
            for name, of_targets in computed.items():
                values[name][at] = of_targets[: len(at)]
        if not parallel.alone:
            values = {name: data.sum(column.to(device)) for name, column in values.items()}
            if parallel.pipeline is not None:
                values = {name: parallel.pipeline.from_last_to_first(column) for name, column in values.items()}
            values = {name: column.cpu() for name, column in values.items()}
        if parallel.ranks.leads:
            store.write(number, {name: column.numpy() for name, column in values.items()})
        self.done += len(block)
        self.progress(self.done)

    def _columns(self, outputs: Mapping[Role, Outputs], batch: Batch) -> dict[str, Tensor]:
        """[N, ...] of each column, on the host: a block has more of them than a device might hold."""
        types = {name: torch.from_numpy(np.empty(0, of.dtype)).dtype for name, of in self.spec.types.items()}
        computed = self.spec.compute(outputs["policy"], batch)
        return {name: of_targets.to("cpu", types[name]) for name, of_targets in computed.items()}


def all_answers(sample: Sample) -> Sample:
    """The sample with weight 1 at each token that is asked about: see `stage_protocols.ColumnSpec`."""
    weights = (sample.weights != 0).astype(np.float32)
    for branch in sample.branches:
        if branch.parent >= 0:
            weights[branch.start : branch.stop] = 1
    return replace(sample, weights=weights, columns={_PLACE: np.arange(len(weights))})


def _key(recipe: Recipe, spec: ColumnSpec, config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """The cache key of columns apart from the samples: weights, and how numbers are rounded."""
    section = recipe.model if spec.model is None else spec.model.section
    quantization = recipe.base_quantization if spec.model is None else spec.model.quantization
    adapter = None if spec.model is not None or recipe.adapter is None else recipe.adapter.model_dump(mode="json")
    tensors = {} if section.path is None else read_tensors(model_folder(section))
    weights = sorted({entry.file for entry in tensors.values()})
    is_drawn = section.path is None or adapter is not None  # from the seed
    return {
        "identity": dict(spec.identity),
        "config": json.loads(json.dumps(asdict(config), default=str)),
        "weights": [[file.name, _file_hash(file)] for file in weights],
        "below": [
            [_file_hash(folder.path / name) for name in (CONFIG, WEIGHTS)] for folder in named_stack(section.adapters)
        ],
        "adapter": adapter,
        "seed": recipe.seed if is_drawn else None,
        "quantization": None if quantization is None else quantization.of_base(),
        "precision": recipe.activations if recipe.fp8 is None else recipe.fp8.model_dump(),
        "compile": recipe.compile,
        "device": device.type,
        **({} if recipe.numerics == "fast" else {"numerics": recipe.numerics}),
    }


def _file_hash(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(2**24):
            digest.update(part)
    return digest.hexdigest()
