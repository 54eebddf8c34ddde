"""Prefix tuning: trained keys and values before every document, in every layer (arXiv:2101.00190).

They stand in the place of the keys and values that the layers make of virtual tokens; these tokens pass through the
model as zeros, and nobody else sees what becomes of them. Positions of real tokens go on behind the prefix, as they do
in PEFT, which hands the same keys and values over as a cache.

T tokens · N virtual tokens of a pass · P of the adapter · K key/value heads · C head width · D = K C · L layers
H width of the projection
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import TensorAxes
from danlu.adapters.peft_values import check_supported, positive_int, take_tensor
from danlu.adapters.virtual_tokens import Places, VirtualTokens
from danlu.recipe import sections
from danlu.types import LinearShard, Site

Draw = Callable[[str], torch.Generator]
"""A generator for the name of a parameter."""
_KEY = "prompt_embeddings"
_HARMLESS: dict[str, tuple[Any, ...]] = {"num_transformer_submodules": (1, None)}


class PrefixTokens(VirtualTokens):
    """Sits in the embedding's slot, and notes where the tokens of the prefix are for the layers that follow."""

    def __init__(self, first: int, count: int, width: int) -> None:
        super().__init__(first, count)
        self.width = width
        self.present: Places | None = None  # in the pass that is under way: each begins at the embedding

    def vectors(self, places: Places, dtype: torch.dtype) -> Tensor:
        self.present = places
        return torch.zeros(len(places.rows), self.width, dtype=dtype, device=places.rows.device)


class Projection(nn.Module):
    """tanh of a linear layer over trained vectors [P, D]: all layers' keys and values are made of it (section 4.3)."""

    def __init__(self, count: int, width: int, hidden: int, *, device: torch.device | str) -> None:
        super().__init__()
        self.embedding = _table(count, width, device)
        self.weight = nn.Parameter(torch.empty(hidden, width, device=device))
        self.bias = nn.Parameter(torch.empty(hidden, device=device))

    def draw(self, draw: Draw) -> None:
        _normal(self.embedding.weight, draw("embedding.weight"))
        _uniform(self, self.weight.shape[1], draw)

    def forward(self) -> Tensor:  # [P, H]
        return F.linear(self.embedding.weight, self.weight, self.bias).tanh()


class LayerPrefix(nn.Module):
    """Keys and values of one layer: embedding.weight [P, 2 D], or with a projection weight [2 D, H] and bias [2 D].

    Either gives the keys, then the values, each head by head. Sits in a layer's slot `prefix`.

    Where heads are cut over processes, these parameters stay whole (keys and values of some heads are no one box of
    them), and each takes what its heads need.
    """

    def __init__(
        self,
        tokens: PrefixTokens,
        width: int,
        projection: Projection | None,
        *,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._tokens = (tokens,)  # in a tuple, so that it is no part of this module
        self.width = width
        self.projection = projection
        self.features = slice(0, width)
        """Those of keys (and of values) that are here."""
        if projection is None:
            self.embedding = _table(len(tokens.ids), 2 * width, device)
        else:
            self.weight = nn.Parameter(torch.empty(2 * width, len(projection.bias), device=device))
            self.bias = nn.Parameter(torch.empty(2 * width, device=device))

    def draw(self, draw: Draw) -> None:
        """First values as PEFT has them: N(0, 1), or those of torch's linear layers."""
        if self.projection is None:
            _normal(self.embedding.weight, draw("embedding.weight"))
        else:
            _uniform(self, self.weight.shape[1], draw)

    @property
    def tensor_axes(self) -> TensorAxes:
        return {}

    def narrow(self, share: LinearShard) -> None:
        """share: of the layer that makes the keys."""
        self.features = share.outputs

    def table(self) -> Tensor:
        """[P, 2 D] float32, with any projection folded in."""
        if self.projection is None:
            return self.embedding.weight
        return F.linear(self.projection(), self.weight, self.bias)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [T, K, C] with those of the prefix in the places of its tokens."""
        present = self._tokens[0].present
        assert present is not None, "a pass begins at the embedding"
        if not len(present.rows):  # cached decoding: the prefix is in the cache
            return k, v
        rows = self.table()[present.which].to(k.dtype)  # [N, 2 D]
        keys, values = rows.unflatten(1, (2, -1))[..., self.features].unflatten(2, k.shape[1:]).unbind(1)  # [N, K, C]
        return k.index_copy(0, present.rows, keys), v.index_copy(0, present.rows, values)


def _table(count: int, width: int, device: torch.device | str) -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.empty(count, width, device=device), freeze=False)


@torch.no_grad()
def _normal(parameter: Tensor, generator: torch.Generator) -> None:
    parameter.copy_(torch.empty(parameter.shape).normal_(generator=generator))


@torch.no_grad()
def _uniform(module: Projection | LayerPrefix, inputs: int, draw: Draw) -> None:
    bound = 1 / math.sqrt(inputs)
    for name, parameter in (("weight", module.weight), ("bias", module.bias)):
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=draw(name)))


def slots(sites: Sequence[Site]) -> dict[str, int]:
    """The slot of every layer's attention, and its width D: that of what `k_proj` gives."""
    return {
        f"{site.name.removesuffix('k_proj')}prefix": site.shape[0] for site in sites if site.name.endswith(".k_proj")
    }


# ── in PEFT's words ──


def to_peft(
    section: sections.Prefix, modules: Mapping[str, nn.Module], sites: Sequence[Site]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of an adapter: `modules` by the slot they sit in, `sites` all of the model's.

    How many heads there are is left to PEFT, which reads it off the model.
    """
    with torch.no_grad():
        tables = [_layer(modules[slot]).table() for slot in slots(sites)]
    values = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": section.tokens,
        "num_transformer_submodules": 1,
        "num_layers": len(tables),
        "prefix_projection": False,  # folded away
    }
    return values, {_KEY: torch.cat(tables, 1)}


def from_peft(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], sites: Sequence[Site], where: str
) -> tuple[sections.Prefix, dict[str, dict[str, Tensor]], set[str]]:
    """The section, the values of each module by the slot it sits in, and the keys of `tensors` that they came from.

    A projection is folded away in the file, whatever its config says. Raises ModelError for tensors that do not fit
    the model.
    """
    check_supported(values, _HARMLESS, where)
    widths = slots(sites)
    count = positive_int(values, "num_virtual_tokens", where)
    table = take_tensor(tensors, _KEY, (count, sum(2 * width for width in widths.values())), where)
    tables = table.split([2 * width for width in widths.values()], 1)
    by_place = {slot: {"embedding.weight": one} for slot, one in zip(widths, tables, strict=True)}
    return sections.Prefix(tokens=count), by_place, {_KEY}


def _layer(module: nn.Module) -> LayerPrefix:
    assert isinstance(module, LayerPrefix)
    return module
