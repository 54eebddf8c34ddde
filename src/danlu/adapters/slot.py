"""The slots of a model's layers, each holding several adapters by name, of which some are active.

T tokens · O, I outputs and inputs of a layer · K key/value heads · C head width · D model width
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, Dense, EmbeddingAdapter
from danlu.adapters.lora import LowRank
from danlu.adapters.low_rank import Branch, products
from danlu.adapters.prefix import LayerPrefix
from danlu.adapters.virtual_tokens import VirtualTokens
from danlu.types import EmbeddingLayer, LinearLayer, Recomputed


class Slot(nn.ModuleDict):
    """Adapters of one place by name; the active ones lie one upon the other, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.active: tuple[str, ...] = ()
        self.merged = False
        """Whether all of it is part of the weights for the time being."""

    def stack(self) -> list[nn.Module]:
        """The active adapters that are here, lowest first; below them starts that others have taken out of the base."""
        if self.merged:
            return []
        asleep = [adapter for adapter in self.values() if isinstance(adapter, LowRank) and adapter.asleep]
        return [*asleep, *(self[name] for name in self.active if name in self)]


class LinearSlot(Slot):
    """Sits in `adapter` of a linear layer."""

    def forward(self, x: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """[T, I] -> [T, O]: the base, then each active adapter upon it."""
        steps = []  # each adapter and what it takes; made from the highest down, gone through from the lowest up
        for adapter in reversed(self.stack()):
            assert isinstance(adapter, Adapter)
            steps.append((adapter, x, recomputed))
            below = adapter.below(x, recomputed)
            x, recomputed = below, recomputed if below is x else None
        if steps and isinstance(lowest := steps[-1][0], LowRank):
            (y,) = products(x, [lowest.branch(linear)], lowest.dropout, recomputed)
            steps.pop()
        else:
            y = linear.base(x)
        for adapter, taken, how in reversed(steps):
            y = adapter.add(taken, y, linear, how)
        return y

    def forward_shared(self, x: Tensor, linears: Sequence[LinearLayer]) -> tuple[Tensor, ...]:
        """The same for several layers over one x; where low-rank adapters lie alone, they share the work on x."""
        stacks = [linear.adapter.stack() if isinstance(linear.adapter, LinearSlot) else [] for linear in linears]
        alone = [stack[0] if stack else None for stack in stacks]
        low_rank = [adapter for adapter in alone if isinstance(adapter, LowRank)]
        shared = len({adapter.share for adapter in low_rank}) == 1
        if not shared or any(len(stack) > 1 or not isinstance(stack[0], LowRank) for stack in stacks if stack):
            return tuple(linear.base(x) if linear.adapter is None else linear.adapter(x, linear) for linear in linears)
        branches = [
            Branch(linear, adapter.factors() if isinstance(adapter, LowRank) else None)
            for linear, adapter in zip(linears, alone, strict=True)
        ]
        return products(x, branches, low_rank[0].dropout)

    def effective(self, linear: LinearLayer) -> Tensor:
        """W [O, I] with the active adapters in it, in float32 or wider as they are; differentiable."""
        stack = self.stack()
        own = next(stack[0].parameters()).dtype if stack else torch.float32
        weight = linear.dense_weight(torch.promote_types(own, torch.float32))
        return self.applied(Dense(weight, None)).weight

    def applied(self, dense: Dense) -> Dense:
        """The layer with the active adapters in it."""
        for adapter in self.stack():
            assert isinstance(adapter, Adapter)
            dense = adapter.applied(dense)
        return dense


@cache
def leave_slots_uncompiled() -> None:
    """Before torch.compile of a model with a packed base, whose kernels it cannot follow; with torch 2.11, of any."""
    # No decorators: they would import torch._dynamo, a second that only a process which compiles should wait.
    LinearSlot.forward = torch.compiler.disable(LinearSlot.forward)  # type: ignore[method-assign]
    LinearSlot.forward_shared = torch.compiler.disable(LinearSlot.forward_shared)  # type: ignore[method-assign]


class EmbeddingSlot(Slot):
    """Sits in `adapter` of an embedding."""

    def forward(self, tokens: Tensor, dtype: torch.dtype, embedding: EmbeddingLayer) -> Tensor:
        """[T] -> [T, D]: the base, then each active adapter upon it, and vectors of their own for virtual tokens.

        A token past the vocabulary that no active adapter knows is an error of the look-up.
        """
        stack = self.stack()
        virtual = [(adapter, adapter.find(tokens)) for adapter in stack if isinstance(adapter, VirtualTokens)]
        for _, places in virtual:
            tokens = tokens.index_fill(0, places.rows, 0)  # any word: its vector is replaced below
        y = embedding.base(tokens, dtype)
        for adapter in stack:
            if isinstance(adapter, EmbeddingAdapter):
                y = adapter.add(tokens, y, embedding)
        for adapter, places in virtual:
            y = y.index_copy(0, places.rows, adapter.added(places, dtype))
        return y

    def applied(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] with the active adapters in it."""
        for adapter in self.stack():
            assert isinstance(adapter, EmbeddingAdapter)
            weight = adapter.applied(weight)
        return weight


class PrefixSlot(Slot):
    """Sits in `prefix` of an attention; each prefix has tokens of its own, so their order is none."""

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, K, C] with those of the active prefixes in the places of their tokens."""
        for prefix in self.stack():
            assert isinstance(prefix, LayerPrefix)
            k, v = prefix(k, v)
        return k, v


class BranchSlot(Slot):
    """Sits in `after_attention` or `after_mlp` of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D] through each active adapter in turn."""
        for adapter in self.stack():
            x = adapter(x)
        return x


def new_slot(attribute: str, *, embedding: bool = False) -> Slot:
    """An empty slot for an attribute of the decoder's modules."""
    match attribute:
        case "adapter":
            return EmbeddingSlot() if embedding else LinearSlot()
        case "prefix":
            return PrefixSlot()
        case "after_attention" | "after_mlp":
            return BranchSlot()
    raise AssertionError(f"no slot is called {attribute}")
