"""Adapters on a tiny decoder, for the tests of the room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.build import BuildContext
from danlu.adapters.dropout import DropoutState
from danlu.assembly.frozen_base import adapter_sites
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import hf_name
from danlu.models.initialize import named_generator

DOCUMENTS = (0, 5, 12, 16)


def adapter_set(model: Decoder, *, seed: int = 0, dropout_state: DropoutState | None = None, **more: Any) -> AdapterSet:
    return AdapterSet(
        model,
        adapter_sites(model),
        lambda name: hf_name(name, model.config),
        BuildContext(
            lambda name: named_generator(seed, name), dropout_state or DropoutState(seed), torch.device("cpu")
        ),
        head_as_linear=model.head_as_linear,
        **more,
    )


def perturb(adapters: AdapterSet, name: str, seed: int = 1, size: float = 0.3) -> None:
    """Values as after training: every trained number of one adapter is moved."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.tensors(name).values():
        if parameter.requires_grad:
            parameter.data += size * torch.empty_like(parameter).normal_(generator=generator)


def widen(adapters: AdapterSet) -> None:
    """Everything that belongs to adapters in float64, where sums in another order make no difference to see."""
    for name, added in adapters.added.items():
        for parameter in adapters.tensors(name).values():
            parameter.data = parameter.data.double()
        for module in added.modules.values():
            module.double()


def logits(
    model: Decoder,
    tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    virtual_token_ids: Sequence[int] = (),
) -> Tensor:
    """[T, V] of a few packed documents, each with `virtual_token_ids` in front; T counts the others alone."""
    with torch.no_grad():
        return model.logits(hidden_states(model, tokens, dtype, virtual_token_ids))


def wide_logits(model: Decoder) -> Tensor:
    """The same in float64, of a model that is in it."""
    return logits(model, dtype=torch.float64)


def hidden_states(
    model: Decoder,
    tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    virtual_token_ids: Sequence[int] = (),
) -> Tensor:
    """[T, D], likewise."""
    if tokens is None:
        tokens = torch.randint(0, model.config.vocab_size, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))
    front, more = torch.tensor(virtual_token_ids, dtype=torch.int64), len(virtual_token_ids)
    documents = [torch.cat((front, tokens[start:end])) for start, end in itertools.pairwise(DOCUMENTS)]
    boundaries = tuple(end + more * document for document, end in enumerate(DOCUMENTS))
    positions = torch.cat([torch.arange(len(document_tokens)) for document_tokens in documents])
    hidden: Tensor = model(torch.cat(documents), positions, PackedAttention(boundaries), dtype)
    return hidden[positions >= more]
