"""The packs that a verification trains on: the first ones of the recipe where its data can be read, else synthetic.

Rows of judged answers are packs of a tree each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from danlu.assembly.recipe_adapters import dataset_spec, longest_shared_path
from danlu.core.errors import CheckpointError, DanluError
from danlu.core.types import Item, Pack, Sample
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, prepare
from danlu.data.samples import Samples
from danlu.recipe import Recipe
from danlu.recipe.rules import is_local
from danlu.stages.tree_reader import Trees
from danlu.verification.synthetic_rollouts import synthetic_rollouts
from danlu.verification.synthetic_trees import synthetic_trees

ROWS = 64  # read of each source
SYNTHETIC_VOCAB_SIZE = 200  # smaller than any tokenizer's vocabulary


class ItemList:
    """Packs or images by number, over and over; satisfies `train.position.ItemSource`."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items

    def at(self, number: int) -> Item:
        return self.items[number % len(self.items)]

    def state(self, number: int) -> dict[str, Any]:
        return {"items": len(self.items)}

    def restore(self, state: dict[str, Any]) -> None:
        if state != self.state(0):
            raise CheckpointError(f"a checkpoint over {state.get('items')} items, and here are {len(self.items)}")


@dataclass(frozen=True)
class ProxyData:
    """The data that a verification trains on."""

    packs: list[Pack]
    vocab_size: int | None  # of the recipe's tokenizer; None where none was loaded
    source: str  # for the report: "the recipe's own data", or why it is synthetic


def proxy_data(recipe: Recipe, count: int) -> ProxyData:
    """`count` packs: the recipe's first ones, or synthetic ones where its rows are remote or cannot be used."""
    if recipe.stage == "rl":
        items = synthetic_rollouts(recipe, count, max_length=recipe.data.max_length, vocab_size=SYNTHETIC_VOCAB_SIZE)
        return ProxyData(items, None, "synthetic data, for answers are drawn while training")
    if remote := [source.path for source in recipe.data.train if not is_local(source.path)]:
        reason = f"rows of {remote[0]} would have to be fetched"
    else:
        try:
            return _own_data(recipe, count)
        except DanluError as error:
            reason = f"the recipe's cannot be used ({str(error).splitlines()[0]})"
    if recipe.row_type is None:
        packs = synthetic_packs(recipe, count)
    else:
        packs = synthetic_trees(
            recipe.row_type,
            count,
            max_length=recipe.data.max_length,
            vocab_size=SYNTHETIC_VOCAB_SIZE,
            seed=recipe.seed,
            mismatched=recipe.needs_mismatched,
        )
    return ProxyData(packs, None, f"synthetic data, for {reason}")


def _own_data(recipe: Recipe, count: int) -> ProxyData:
    """Raises DanluError for rows or a tokenizer that cannot be used."""
    data = recipe.data
    sources = [source.model_copy(update={"rows": min(source.rows or ROWS, ROWS)}) for source in data.train]
    changes: dict[str, object] = {"train": sources, "eval": None, "streaming": False, "workers": 1}
    if data.overlong == "drop":
        changes["overlong"] = "truncate"  # with the short packs of a proxy nothing might be left
    recipe = recipe.model_copy(update={"data": data.model_copy(update=changes)})
    spec = dataset_spec(recipe)
    prepared = prepare(spec, require_ends=False)
    assert prepared.train is not None and prepared.tokenizer is not None, "it does not stream"
    rows = packed_rows(recipe, spec, prepared.train)
    return ProxyData(
        [rows.at(number) for number in range(count)], prepared.tokenizer.vocab_size, "the recipe's own data"
    )


def packed_rows(recipe: Recipe, spec: DatasetSpec, samples: Samples) -> PackedDataset | Trees:
    """The samples as the items of a run."""
    if recipe.row_type is None:
        return spec.packed(samples)
    longest_shared = longest_shared_path(recipe.data, recipe.model, recipe.adapter)
    return Trees(spec.packed(spec.samples(samples)), longest_shared)


def fold_tokens(packs: list[Pack], vocab_size: int) -> list[Pack]:
    """The same packs with each token id modulo `vocab_size`."""
    return [
        Pack(tuple(replace(sample, tokens=(sample.tokens % vocab_size).astype(np.int32)) for sample in pack.samples))
        for pack in packs
    ]


def synthetic_packs(recipe: Recipe, count: int) -> list[Pack]:
    """Packs as the recipe's stage and packing would make them, of documents of all lengths; a function of the seed."""
    return [_synthetic_pack(recipe, np.random.default_rng([recipe.seed, number])) for number in range(count)]


def _synthetic_pack(recipe: Recipe, random: np.random.Generator) -> Pack:
    samples: list[Sample] = []
    left = max(4, recipe.data.max_length)
    while left > 3 and (not samples or (recipe.data.packing.kind != "none" and len(samples) < 4)):
        length = int(random.integers(3, left + 1))
        tokens = random.integers(0, SYNTHETIC_VOCAB_SIZE, length).astype(np.int32)
        weights = np.ones(length, dtype=np.float32)
        weights[: 1 if recipe.stage == "pretrain" else int(random.integers(1, length))] = 0
        samples.append(Sample(tokens, weights, f"synthetic document {len(samples)}"))
        left -= length
    return Pack(tuple(samples))
