"""Lines for the console on rows of tokens: those that new tokens get, and those that the base was never trained on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from danlu.assembly.recipe_adapters import model_folder, own_tokenizer, recipe_tokens, tokenizer_path, trained_tokens
from danlu.core.safetensors_format import TensorLocation
from danlu.core.shard_box import ShardBox
from danlu.data.tokenizer import load_tokenizer
from danlu.models.hf_folder import find_config, own_tensors, read_config
from danlu.models.hf_layout import EMBEDDING, HEAD, hf_name
from danlu.models.safetensors_io import DTYPES, TensorReader
from danlu.recipe import Recipe
from danlu.recipe.sections import Continue, Model

_COMPARED, _SAMPLED = 256, 64
"""Rows at each end of the embedding that others are compared with, where unused tokens lie; rows that say how far apart
trained ones are."""
_NEAR, _SMALL = 0.01, 1e-3
"""Shares of the usual distance of two rows, and of their usual norm, below which rows are alike, or zero."""
_FEWEST_ALIKE = 4
"""A row with so many others alike was never trained: all that it got was common to them."""


def new_token_lines(model: Model) -> list[str]:
    """The ids of new tokens, and the rows that they get; writes the base that has them, which may take a while."""
    tokens = recipe_tokens(model)
    if not tokens:
        return []
    named = ", ".join(f"{token.text} {token.id}" for token in tokens)
    if model.path is None:
        return [f"new tokens: {named}"]
    before, folder = find_config(model.path), model_folder(model)
    after = read_config(folder)
    if after.vocab_rows == before.vocab_rows:
        return [f"new tokens: {named}; they take rows that the base has to spare, of its {before.vocab_rows:,}"]
    line = f"new tokens: {named}; embedding and head have {after.vocab_rows:,} rows in place of {before.vocab_rows:,}"
    if after.vocab_padding:
        line += (
            f", a multiple of 8: the last {after.vocab_padding} have no token, and losses and sampling leave them out"
        )
    return [f"{line} (the base with them is in {folder})"]


def untrained_lines(recipe: Recipe, ends: Collection[int]) -> list[str]:
    """Warnings about tokens that answers end with, and that the base was never trained on.

    ends: their ids.
    """
    model, adapter = recipe.model, recipe.adapter
    if model.path is None or model.adapters:
        return []
    trained = trained_tokens(model, adapter)
    untrained = untrained_tokens(model_folder(model), [end for end in ends if end not in trained])
    if not untrained:
        return []
    texts = {number: text for text, number in load_tokenizer(tokenizer_path(model)).vocabulary.items()}
    named = [texts.get(token, str(token)) for token in untrained]
    line = f"{', '.join(named)}: the base was never trained on this end of answers; its row is that of unused tokens"
    saved = getattr(adapter, "modules_to_save", [])
    if adapter is None or isinstance(adapter, Continue) or {"embed_tokens", "lm_head"} & set(saved):
        return [line]
    return [
        f"{line}, and an adapter leaves it so: the model may not learn to stop. Add adapter.trainable_tokens: "
        f"{named}, which trains it"
    ]


@torch.no_grad()
def untrained_tokens(folder: Path, tokens: Sequence[int]) -> list[int]:
    """Those of some tokens that the model of a folder was never trained on, by their rows of the head, or of a tied
    embedding.

    A row that was never trained is zero, or like those of other tokens that never occurred. At most some hundred rows
    are read.
    """
    config = read_config(folder)
    stored = own_tensors(folder, config)
    name = hf_name(HEAD if config.has_own_head else EMBEDDING, config)
    location = stored.get(name)
    count = config.vocab_size
    tokens = [token for token in tokens if token < count]
    if not isinstance(location, TensorLocation) or location.dtype not in DTYPES or not tokens or count < _SAMPLED:
        return []
    sampled = sorted(set(range(0, count, count // _SAMPLED)))
    ends = sorted({*range(min(_COMPARED, count)), *range(max(0, count - _COMPARED), count)})
    rows = _read_rows(location, name, [*tokens, *sampled, *ends])
    own, between, others = rows.split([len(tokens), len(sampled), len(ends)])
    distances = torch.pdist(between)
    norm, distance = between.norm(dim=1).median(), distances.median()
    alike = (torch.cdist(own, others) < _NEAR * distance).sum(1)
    itself = torch.tensor([token in ends for token in tokens])
    is_untrained = (own.norm(dim=1) < _SMALL * norm) | (alike - itself.long() >= _FEWEST_ALIKE)
    return [token for token, is_one in zip(tokens, is_untrained.tolist(), strict=True) if is_one]


def _read_rows(location: TensorLocation, name: str, rows: Sequence[int]) -> Tensor:
    """Some rows of a matrix, float32."""
    width = location.shape[1]
    with TensorReader() as reader:
        boxes = (ShardBox(location.shape, (row, 0), (1, width)) for row in rows)
        return torch.cat([reader.read(location, box, name).float() for box in boxes])


def replaced_ids(model: Model) -> list[tuple[str, int, list[int]]]:
    """(text, id, the ids that the text had before) of each new token."""
    before = load_tokenizer(own_tokenizer(model))
    return [(token.text, token.id, before.encode(token.text)) for token in recipe_tokens(model)]
