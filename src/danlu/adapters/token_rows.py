"""Rows of single tokens in embedding and head, trained next to a low-rank adapter: PEFT's `trainable_token_indices`.

The rows take the place of the base's, and start as these. Where the base ties its head to the embedding, both have the
same rows.

T tokens · V vocabulary · D model width · N tokens with rows of their own
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, DenseLinear, EmbeddingAdapter, new_parameter
from danlu.adapters.peft_values import PREFIX, PeftReader
from danlu.adapters.shapes import row_tensors
from danlu.core.errors import ModelError
from danlu.core.layer_types import EmbeddingLayer, LinearLayer, LinearShard, Recomputed, Site

KEY = "trainable_token_indices"
"""PEFT's setting: ids, or lists of ids by the name of a layer."""
_DELTA = ".token_adapter.trainable_tokens_delta"
_BASE = ".token_adapter.base_layer.weight"
PARAMETER = "token_rows"
"""The name of the parameter [N, D], which every process has whole: the one that a row's place is on uses it."""


class TokenRows(nn.Module):
    """The rows [N, D] of tokens with rising ids, uninitialised until `initialize_from`; `rows` to share those."""

    token_rows: nn.Parameter
    token_ids: Tensor

    def __init__(
        self,
        ids: Sequence[int],
        width: int,
        rows: nn.Parameter | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        own = row_tensors(len(ids), width)["token_rows"]
        self.token_rows = new_parameter(own, device) if rows is None else rows
        self.register_buffer("token_ids", torch.tensor(sorted(ids), device=device), persistent=False)
        self.is_initialized = False
        self.local: slice | None = None
        """The rows of the layer that are here, where the vocabulary is cut over processes."""

    @torch.no_grad()
    def initialize_from(self, weight: Tensor) -> None:
        """Sets the rows to those of the base, [V, D]."""
        self.token_rows.copy_(weight[self.token_ids.to(weight.device)])
        self.is_initialized = True

    def narrow(self, shard: LinearShard) -> None:
        self.local = shard.outputs

    def _put_into(self, weight: Tensor) -> Tensor:
        """The rows of the layer that are here [V', D], or features of outputs [V', ..], with these in their places."""
        return weight.index_copy(0, self._places(), self._here(self.token_rows).to(weight.dtype))

    def _places(self) -> Tensor:
        return self.token_ids if self.local is None else self._here(self.token_ids) - self.local.start

    def _here(self, by_token: Tensor) -> Tensor:
        """Those [N', ..] of [N, ..] with a place on this process."""
        if self.local is None:
            return by_token
        return by_token[(self.token_ids >= self.local.start) & (self.token_ids < self.local.stop)]


class EmbeddingRows(TokenRows, EmbeddingAdapter):
    """Rows of an embedding; before Gemma's multiplier, as all of its rows."""

    def adapt_output(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        _, elsewhere = embedding.local_rows(tokens)
        index = torch.searchsorted(self.token_ids, tokens).clamp_max(len(self.token_ids) - 1)
        is_own = self.token_ids[index] == tokens
        is_own = is_own if elsewhere is None else is_own & ~elsewhere
        return torch.where(is_own.unsqueeze(1), F.embedding(index, self.token_rows).to(y.dtype), y)

    def merged_into(self, weight: Tensor) -> Tensor:
        return self._put_into(weight)


class HeadRows(TokenRows, Adapter):
    """Rows of a head, [N, D] -> N of its outputs."""

    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        return y.index_copy(-1, self._places(), F.linear(x, self._here(self.token_rows).to(x.dtype)))

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        return DenseLinear(self._put_into(dense.weight), dense.bias)


def build_rows(
    sites: Iterable[Site], ids: Mapping[str, Sequence[int]], *, tied: bool, device: torch.device | str
) -> dict[str, nn.Module]:
    """The modules by site. ids: of each site's group, "embedding" or "head"; tied: whether both are one matrix."""
    modules: dict[str, nn.Module] = {}
    shared: nn.Parameter | None = None
    for site in sites:
        if site.group == "embedding":
            embedding = EmbeddingRows(ids[site.group], site.shape[1], device=device)
            modules[site.name], shared = embedding, embedding.token_rows if tied else None
        else:
            modules[site.name] = HeadRows(ids[site.group], site.shape[1], shared, device=device)
    return modules


# ── PEFT's format ──


def to_peft(
    modules: Mapping[str, nn.Module], sites: Sequence[Site], *, tied: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The value of adapter_config.json and the tensors, by name, of an adapter's modules; of a tied head none."""
    values: dict[str, list[int]] = {}
    tensors: dict[str, Tensor] = {}
    for site in sites:
        module = modules.get(site.name)
        if isinstance(module, TokenRows) and not (tied and site.group == "head" and "embed_tokens" in modules):
            values[site.hf_name.rpartition(".")[2]] = module.token_ids.tolist()
            tensors[key_of(site)] = module.token_rows.detach()
    return ({KEY: values} if values else {}), tensors


def from_peft(
    reader: PeftReader, sites: Sequence[Site], *, tied: bool
) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """The ids by group of site, and the rows by site, in the order of rising ids.

    Raises ModelError for ids that are none, or that the model has no row for, and for rows that are missing.
    """
    given = reader.values.get(KEY)
    if given is None:
        return {}, {}
    ids: dict[str, list[int]] = {}
    rows: dict[str, Tensor] = {}
    places = {site.group: site for site in sites if site.group in ("embedding", "head")}
    by_name = given if isinstance(given, dict) else {places["embedding"].hf_name: given}
    for name, asked in by_name.items():
        site = next((site for site in places.values() if f".{site.hf_name}".endswith(f".{name}")), None)
        if site is None:
            raise ModelError(f"{reader.where}: {KEY} names {name}, and only rows of embedding and head can be trained")
        is_list = isinstance(asked, list) and asked and all(isinstance(each, int) and each >= 0 for each in asked)
        if not is_list or len(set(asked)) < len(asked):
            raise ModelError(f"{reader.where}: {KEY} of {name} is {asked!r}; expected different ids of tokens")
        if max(asked) >= site.shape[0]:
            raise ModelError(
                f"{reader.where}: {KEY} of {name} has {max(asked)}, and this base has {site.shape[0]} rows: it was "
                "trained on a base with more. Put its tokenizer.json, which names the tokens, into its folder"
            )
        ids[site.group] = sorted(asked)
        if tied and site.group == "head" and "embedding" in ids:
            if ids["head"] != ids["embedding"]:
                raise ModelError(f"{reader.where}: {KEY} has other ids of the head than of the embedding it is tied to")
            continue
        order = torch.tensor(asked).argsort()
        rows[site.name] = reader.tensor(key_of(site), (len(asked), site.shape[1]))[order]
    if tied and "embedding" in ids:
        ids["head"] = ids["embedding"]
    return ids, rows


def key_of(site: Site) -> str:
    """Returns the key of a site's rows in an adapter's file."""
    return f"{PREFIX}{site.hf_name}{_DELTA}"


def is_base_of_rows(key: str) -> bool:
    """Whether a tensor of an adapter's file is a base's matrix, which PEFT writes with rows where it was resized."""
    return key.endswith(_BASE)
