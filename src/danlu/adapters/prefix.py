"""Prefix tuning: trained keys and values before every document, in every layer (arXiv:2101.00190).

They replace the keys and values that the layers compute of virtual tokens. These tokens pass through the model as
zeros, and nothing else depends on their hidden states. Positions of real tokens continue after the prefix, as in PEFT,
which passes the same keys and values as a cache.

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

from danlu.adapters.adapter import ShardableModule, embedding_of, module_of_type, new_parameter
from danlu.adapters.peft_values import ModuleValues, PeftContent, PeftReader
from danlu.adapters.prompt import VirtualTokenPositions, VirtualTokens
from danlu.adapters.shapes import layer_prefix, prefix_projection, prefix_slots
from danlu.core import device_moves
from danlu.core.layer_types import LinearShard, Site
from danlu.recipe import sections

GeneratorFor = Callable[[str], torch.Generator]
"""A function from the name of a parameter to the generator of its first values."""
_KEY = "prompt_embeddings"
_HARMLESS: dict[str, tuple[Any, ...]] = {"num_transformer_submodules": (1, None)}


class PrefixTokens(VirtualTokens):
    """Sits in the embedding's slot, and notes for the layers where the virtual tokens are in the present pass."""

    def __init__(self, first_id: int, count: int, width: int) -> None:
        super().__init__(first_id, count)
        self.width = width
        self._positions: VirtualTokenPositions | None = None  # set by the embedding, where each pass begins
        self._copies: dict[torch.device, VirtualTokenPositions] = {}

    def positions_on(self, device: torch.device) -> VirtualTokenPositions:
        """Returns the positions of the virtual tokens in the present pass, on the device of a layer."""
        positions = self._positions
        assert positions is not None, "a pass begins at the embedding"
        if positions.rows.device == device:
            return positions
        if device not in self._copies:
            rows, indices = (device_moves.move(each, device) for each in (positions.rows, positions.indices))
            self._copies[device] = VirtualTokenPositions(rows, indices)
        return self._copies[device]

    def begin_pass(self, tokens: Tensor) -> None:
        self._positions, self._copies = self.positions(tokens), {}

    def embeddings(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        self._positions, self._copies = positions, {}
        return torch.zeros(len(positions.rows), self.width, dtype=dtype, device=positions.rows.device)


class Projection(nn.Module):
    """tanh of a linear layer over trained vectors [P, D]; every layer computes keys and values from it (4.3)."""

    def __init__(self, count: int, width: int, hidden: int, *, device: torch.device | str) -> None:
        super().__init__()
        tensors = prefix_projection(count, width, hidden)
        self.embedding = embedding_of(tensors["embedding.weight"], device)
        self.weight = new_parameter(tensors["weight"], device)
        self.bias = new_parameter(tensors["bias"], device)

    def reset_parameters(self, generator_for: GeneratorFor) -> None:
        _normal(self.embedding.weight, generator_for("embedding.weight"))
        _uniform(self, self.weight.shape[1], generator_for)

    def forward(self) -> Tensor:  # [P, H]
        return F.linear(self.embedding.weight, self.weight, self.bias).tanh()


class LayerPrefix(ShardableModule):
    """Keys and values of one layer. Sits in the slot `prefix` of its attention.

    Parameters: embedding.weight [P, 2 D], or with a projection weight [2 D, H] and bias [2 D]. Either way the first D
    features are the keys, the others the values, head after head.

    Where tensor parallelism cuts the heads, these parameters stay whole (the keys and values of some heads are not one
    block of them), and each rank takes the features of its heads.
    """

    def __init__(
        self, tokens: PrefixTokens, width: int, projection: Projection | None, *, device: torch.device | str
    ) -> None:
        super().__init__()
        self._tokens = (tokens,)  # in a tuple, so that it is no part of this module
        self.width = width
        self.projection = projection
        self.features = slice(0, width)
        """This rank's features of the keys, and of the values."""
        tensors = layer_prefix(len(tokens.ids), width, None if projection is None else len(projection.bias))
        if projection is None:
            self.embedding = embedding_of(tensors["embedding.weight"], device)
        else:
            self.weight = new_parameter(tensors["weight"], device)
            self.bias = new_parameter(tensors["bias"], device)

    def reset_parameters(self, generator_for: GeneratorFor) -> None:
        """Draws first values as PEFT does: N(0, 1), or with a projection those of torch's linear layers."""
        if self.projection is None:
            _normal(self.embedding.weight, generator_for("embedding.weight"))
        else:
            _uniform(self, self.weight.shape[1], generator_for)

    def narrow(self, shard: LinearShard) -> None:
        """shard: of the `k_proj` of the attention."""
        self.features = shard.outputs

    def keys_and_values(self) -> Tensor:
        """[P, 2 D] float32, of all heads; through the projection where there is one."""
        if self.projection is None:
            return self.embedding.weight
        return F.linear(device_moves.move_beside(self.projection(), self.weight), self.weight, self.bias)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, K local, C] of a pass, with those of the prefix in the rows of its virtual tokens."""
        positions = self._tokens[0].positions_on(k.device)
        if not len(positions.rows):  # cached decoding: the prefix is in the cache
            return k, v
        rows = self.keys_and_values()[positions.indices].to(k.dtype)  # [N, 2 D]
        keys, values = rows.unflatten(1, (2, -1))[..., self.features].unflatten(2, k.shape[1:]).unbind(1)  # [N, K, C]
        return k.index_copy(0, positions.rows, keys), v.index_copy(0, positions.rows, values)


@torch.no_grad()
def _normal(parameter: Tensor, generator: torch.Generator) -> None:
    parameter.copy_(torch.empty(parameter.shape).normal_(generator=generator))


@torch.no_grad()
def _uniform(module: Projection | LayerPrefix, inputs: int, generator_for: GeneratorFor) -> None:
    bound = 1 / math.sqrt(inputs)
    for name, parameter in (("weight", module.weight), ("bias", module.bias)):
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator_for(name)))


# ── PEFT's format ──


def to_peft(section: sections.Prefix, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by their slot; sites: all of the model's.

    The number of heads is left out: PEFT reads it from the model's config.
    """
    with torch.no_grad():
        layers = [module_of_type(modules[slot], LayerPrefix) for slot in prefix_slots(sites)]
        tables = [layer.keys_and_values().cpu() for layer in layers]  # they may lie on several devices
    values = {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": section.tokens,
        "num_transformer_submodules": 1,
        "num_layers": len(tables),
        "prefix_projection": False,  # already applied to the table
    }
    return values, {_KEY: torch.cat(tables, 1)}


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Prefix, ModuleValues]:
    """The section, and the values of each module by the slot it sits in.

    The file holds the keys and values themselves: PEFT applies a projection before it writes. Raises ModelError for
    tensors that do not fit the model.
    """
    reader.check_supported(_HARMLESS)
    widths = prefix_slots(sites)
    count = reader.positive_int("num_virtual_tokens")
    table = reader.tensor(_KEY, (count, sum(2 * width for width in widths.values())))
    tables = table.split([2 * width for width in widths.values()], 1)
    by_slot = {slot: {"embedding.weight": layer_table} for slot, layer_table in zip(widths, tables, strict=True)}
    return sections.Prefix(tokens=count), by_slot
