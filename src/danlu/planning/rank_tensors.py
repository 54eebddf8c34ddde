"""The parts of a model's tensors that one process has, from shapes alone. Imports no torch.

The cuts are those of the code that makes them: pipeline stages (`parallel.pipeline_split`), ranks with other experts
(`parallel.expert`), tensor ranks (`parallel.tensor`), data and context ranks (`parallel.data`, which shards as
`fully_shard` does).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from danlu.core.shard_box import ShardBox
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.models.tensor_cut import TensorPart, tensor_parts
from danlu.parallel.layout import Layout, expert_shard_dim
from danlu.planning.model_tensors import ModelTensor
from danlu.planning.packed_shapes import packed_shape


class RankTensor(NamedTuple):
    """The part of a model's tensor that a process has."""

    whole: ModelTensor
    cut: tuple[int, ...]
    """The shape before data ranks shard it; of a packed matrix that of its numbers, not of its codes."""
    shape: tuple[int, ...]
    """The shape that this process has; of a packed matrix that of its codes."""
    constants: int = 0
    """Bytes of the scales of a packed matrix."""
    gathered: tuple[int, ...] | None = None
    """The shape that data ranks gather: `cut`, or that of the codes; None: they do not share it."""

    @property
    def name(self) -> str:
        """The name in the model."""
        return self.whole.name

    @property
    def bytes(self) -> int:
        """Bytes that the process stores."""
        if self.whole.packed is not None:
            return math.prod(self.shape) + self.constants
        return math.prod(self.shape) * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Bytes of a stored number; of a packed matrix of one code."""
        return 1 if self.whole.packed is not None else self.whole.bytes // max(1, self.whole.elements)


class _Shapes(NamedTuple):
    """The shapes of a `RankTensor`, and the bytes of its scales."""

    cut: tuple[int, ...]
    shape: tuple[int, ...]
    constants: int = 0
    gathered: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RankPlace:
    """A process's place in a layout, as far as shapes depend on it: that of the largest shards of its stage."""

    layout: Layout
    chunks: Chunks
    tensor_rank: int = 0
    sharded: bool = False
    """Whether data ranks share the tensors (`parallel.shard`)."""

    def tensors(self, tensors: Iterable[ModelTensor], config: ModelConfig) -> Iterator[RankTensor]:
        """Yields the parts of some tensors of a model with this config.

        A tied embedding is on the first and on the last stage, and what adapters of all layers share on each.
        """
        layers = frozenset(self.chunks.local_layers) if self.layout.pipeline > 1 else None
        parts = _parts(config, self.layout.tensor, self.tensor_rank) if self.layout.tensor > 1 else {}
        is_tied = config.task == "causal-lm" and config.tie_word_embeddings
        known: dict[Hashable, _Shapes] = {}
        for each in tensors:
            if layers is None or (
                self._is_here(each.name, is_tied=is_tied) if each.layer is None else each.layer in layers
            ):
                own, linear = parts.get(each.name), parts.get(each.linear)
                # Layers of one kind have the same parts (`tensor_parts`), the objects themselves.
                kind = each.packed, each.axes, each.is_parameter, each.is_whole, each.of_experts
                key = id(own), id(linear), each.shape, kind
                if key not in known:
                    known[key] = self._shapes(each, own, linear)
                yield RankTensor(each, *known[key])

    def _is_here(self, name: str, *, is_tied: bool) -> bool:
        """Whether a tensor that belongs to no layer is on this stage."""
        if ".projection." in name:
            return True
        if name == "embed_tokens.weight" and self.chunks.has_last and is_tied:
            return True
        return self.chunks.of_parameter(name) in self.chunks.local

    def _shapes(self, tensor: ModelTensor, own: TensorPart | None, linear: TensorPart | None) -> _Shapes:
        """The shapes of a tensor's part. own, linear: what tensor ranks leave of it, and of the layer it adapts."""
        box = self._cut(tensor, own, linear)
        if tensor.packed is None:
            shape = gathered = box.sizes
            constants = 0
        else:
            shape, constants = packed_shape(tensor.shape, tensor.packed, box)
            gathered = shape
        shards = self.shards_of(tensor)
        if shards is None:
            return _Shapes(box.sizes, shape, constants)
        sharded = list(shape)
        if sharded:
            dim = expert_shard_dim(shape, shards) if tensor.of_experts else 0
            sharded[dim] = -(-sharded[dim] // shards)
        return _Shapes(box.sizes, tuple(sharded), constants, gathered)

    def shards_of(self, tensor: ModelTensor) -> int | None:
        """The number of data ranks that share a tensor; None where each has all of it."""
        layout = self.layout
        if not self.sharded or layout.replicate * layout.shard * layout.context == 1:
            return None
        if tensor.is_whole or not tensor.is_parameter:
            return None
        if tensor.of_experts and layout.expert > 1:
            shards = layout.expert_sizes[2]
            return None if shards == 1 else shards
        return layout.shard * layout.context

    def _cut(self, tensor: ModelTensor, own: TensorPart | None, linear: TensorPart | None) -> ShardBox:
        """The box of a tensor that tensor ranks and ranks with other experts leave; arguments as `_shapes` has them."""
        box = ShardBox.full(tensor.shape)
        if tensor.of_experts and self.layout.expert > 1 and tensor.is_parameter:
            box = box.narrow(0, 0, tensor.shape[0] // self.layout.expert)
        if own is not None:
            return _within(own.box, box)
        if linear is None or not tensor.axes:
            return box
        for dim, axis in enumerate(tensor.axes):
            # A weight is [.., O, I].
            side = -2 if axis == "outputs" else -1
            if axis is not None and linear.box.sizes[side] != linear.box.global_shape[side]:
                box = box.narrow(dim, linear.box.offsets[side], linear.box.sizes[side])
        return box


@lru_cache(maxsize=64)
def _parts(config: ModelConfig, degree: int, rank: int) -> Mapping[str, TensorPart]:
    # The boxes are alike with sequence parallelism; only the groups of their gradients differ.
    parts = tensor_parts(config, degree, rank, sequence=False)
    if "lm_head.weight" not in parts:
        parts["lm_head.weight"] = parts["embed_tokens.weight"]
    return parts


def _within(cut: ShardBox, of_rank: ShardBox) -> ShardBox:
    """The box of a cut along one dimension within a box along another."""
    for dim, (start, size, whole) in enumerate(zip(cut.offsets, cut.sizes, cut.global_shape, strict=True)):
        if size != whole:
            of_rank = of_rank.narrow(dim, start, size)
    return of_rank
