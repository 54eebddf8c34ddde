"""The slots of a model's modules. Each holds adapters by name, of which some are active.

T tokens · N rows of experts' tokens · O, I outputs and inputs of a layer · K key/value heads · C head width
D model width
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, DenseLinear, EmbeddingAdapter, GroupedLinearAdapter
from danlu.adapters.lora import LowRank
from danlu.adapters.low_rank import Branch, low_rank_linears
from danlu.adapters.prefix import LayerPrefix
from danlu.adapters.prompt import VirtualTokens
from danlu.adapters.rounded_sum import RoundedSum, rounded_sums
from danlu.adapters.token_rows import TokenRows
from danlu.core.layer_types import (
    EmbeddingLayer,
    GroupedLayer,
    LinearLayer,
    LowRankSum,
    Recomputed,
    Site,
    WeightRounding,
)


class Slot(nn.ModuleDict):
    """The adapters of one module by name; the active ones are stacked in the order of `active`."""

    def __init__(self) -> None:
        super().__init__()
        self.active: tuple[str, ...] = ()

    def stack(self) -> list[nn.Module]:
        """The active adapters that this slot holds, lowest first; below them inactive ones that restore the base."""
        restoring = [adapter for adapter in self.values() if isinstance(adapter, LowRank) and adapter.restores_base]
        return [*restoring, *(self[name] for name in self.active if name in self)]


class LinearSlot(Slot):
    """Sits in `adapter` of a linear layer."""

    def forward(self, x: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """[T, I] -> [T, O]: the base, then each active adapter on top of it; their sum where weights are rounded
        (quantization-aware training)."""
        if (rounded := self._rounded_sum(linear)) is not None:
            (y,) = rounded_sums(x, [rounded], recomputed)
            return y
        steps = []  # of each adapter its input: inputs pass from the highest adapter down, outputs from the lowest up
        for adapter in reversed(self.stack()):
            assert isinstance(adapter, Adapter)
            steps.append((adapter, x, recomputed))
            adapted = adapter.adapt_input(x, recomputed)
            x, recomputed = adapted, recomputed if adapted is x else None
        if steps and isinstance(lowest := steps[-1][0], LowRank):
            (y,) = low_rank_linears(x, [Branch(linear, lowest.factors())], lowest.dropout, recomputed)
            steps.pop()
        else:
            y = linear.base(x)
        for adapter, adapter_input, recomputed in reversed(steps):
            y = adapter.adapt_output(adapter_input, y, linear, recomputed)
        return y

    def forward_shared(self, x: Tensor, linears: Sequence[LinearLayer]) -> tuple[Tensor, ...]:
        """`forward` of several layers over one x; low-rank adapters that are alone in their slots share work on x."""
        stacks = [linear.adapter.stack() if isinstance(linear.adapter, LinearSlot) else [] for linear in linears]
        lowest = [stack[0] if stack else None for stack in stacks]
        low_rank = [adapter for adapter in lowest if isinstance(adapter, LowRank)]
        if any(_rounding_of(linear) is not None for linear in linears):
            return _rounded_products(x, linears)
        # One dropout mask serves all of them, so their dropout must be the same.
        same_dropout = len({adapter.dropout_p for adapter in low_rank}) == 1
        if not same_dropout or any(len(stack) > 1 or not isinstance(stack[0], LowRank) for stack in stacks if stack):
            return tuple(linear.base(x) if linear.adapter is None else linear.adapter(x, linear) for linear in linears)
        branches = [
            Branch(linear, adapter.factors() if isinstance(adapter, LowRank) else None)
            for linear, adapter in zip(linears, lowest, strict=True)
        ]
        return low_rank_linears(x, branches, low_rank[0].dropout)

    def effective(self, linear: LinearLayer) -> Tensor:
        """W [O, I] with the active adapters merged into it, in float32 or the wider type of theirs; differentiable, but
        where weights are rounded.
        """
        if (rounded := self._rounded_sum(linear)) is not None:
            return rounded.numbers(torch.float32)
        stack = self.stack()
        if all(isinstance(adapter, TokenRows) for adapter in self.values()):  # no sum that would be rounded
            return self.merged_into(DenseLinear(linear.stored_weight, None)).weight
        dtype = next(stack[0].parameters()).dtype if stack else torch.float32
        weight = linear.dense_weight(torch.promote_types(dtype, torch.float32))
        return self.merged_into(DenseLinear(weight, None)).weight

    def _rounded_sum(self, linear: LinearLayer) -> RoundedSum | None:
        """The rounded sum of a layer's weight and the active adapter; None where weights are not rounded, and where no
        adapter is active."""
        rounding, stack = _rounding_of(linear), self.stack()
        if rounding is None or not stack:
            return None
        (adapter,) = stack
        assert isinstance(adapter, LowRank) and not adapter.restores_base, "the recipe's rules refuse other adapters"
        assert adapter.lora_magnitude_vector is None and adapter.dropout_p == 0, "and DoRA and dropout"
        return RoundedSum(linear, rounding, LowRankSum(adapter.lora_A, adapter.lora_B, adapter.scale))

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        """The layer with the active adapters merged into its weight and bias."""
        for adapter in self.stack():
            assert isinstance(adapter, Adapter)
            dense = adapter.merged_into(dense)
        return dense


def _rounding_of(linear: LinearLayer) -> WeightRounding | None:
    """The rounding of a layer's weight, of layers that have one now."""
    arithmetic = linear.own_arithmetic
    return None if arithmetic is None else arithmetic.rounding


def _rounded_products(x: Tensor, linears: Sequence[LinearLayer]) -> tuple[Tensor, ...]:
    """The outputs of layers with rounded weights that share x, those with an adapter and those without."""
    sums = [
        linear.adapter._rounded_sum(linear) if isinstance(linear.adapter, LinearSlot) else None for linear in linears
    ]
    outputs = iter(rounded_sums(x, [each for each in sums if each is not None]))
    return tuple(linear.base(x) if own is None else next(outputs) for linear, own in zip(linears, sums, strict=True))


@cache
def leave_slots_uncompiled() -> None:
    """Excludes the slots of linear layers from torch.compile, which cannot trace the kernels of a quantized base.

    With torch 2.11 that is needed for bases of every kind. Call it before compiling.
    """
    # No decorators: they would import torch._dynamo, a second that only a process which compiles should wait.
    LinearSlot.forward = torch.compiler.disable(LinearSlot.forward)  # type: ignore[method-assign]
    LinearSlot.forward_shared = torch.compiler.disable(LinearSlot.forward_shared)  # type: ignore[method-assign]


class GroupedSlot(Slot):
    """Sits in `adapter` of the stacked linear layers of experts."""

    def forward(self, x: Tensor, counts: Tensor, linear: GroupedLayer) -> Tensor:
        """[N, I] -> [N, O]: the base, then each active adapter on top of it. counts: rows of each expert."""
        y = linear.base(x, counts)
        for adapter in self.stack():
            assert isinstance(adapter, GroupedLinearAdapter)
            y = adapter.adapt_output(x, y, counts, linear)
        return y

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        """The layers with the active adapters merged into their weights."""
        for adapter in self.stack():
            assert isinstance(adapter, GroupedLinearAdapter)
            dense = adapter.merged_into(dense)
        return dense


class EmbeddingSlot(Slot):
    """Sits in `adapter` of an embedding."""

    def forward(self, tokens: Tensor, dtype: torch.dtype, embedding: EmbeddingLayer) -> Tensor:
        """[T] -> [T, D]: the base, each active adapter on top of it, and the adapters' own vectors for virtual tokens.

        Raises IndexError for an id past the vocabulary that is no virtual token of an active adapter.
        """
        stack = self.stack()
        virtual = [(adapter, adapter.positions(tokens)) for adapter in stack if isinstance(adapter, VirtualTokens)]
        for _, positions in virtual:
            tokens = tokens.index_fill(0, positions.rows, 0)  # any token: its vector is replaced below
        y = embedding.base(tokens, dtype)
        for adapter in stack:
            if isinstance(adapter, EmbeddingAdapter):
                y = adapter.adapt_output(tokens, y, embedding)
        for adapter, positions in virtual:
            y = y.index_copy(0, positions.rows, adapter.summand(positions, dtype))
        return y

    def merged_into(self, weight: Tensor) -> Tensor:
        """The embedding [V, D] with the active adapters merged into it."""
        for adapter in self.stack():
            assert isinstance(adapter, EmbeddingAdapter)
            weight = adapter.merged_into(weight)
        return weight


class PrefixSlot(Slot):
    """Sits in `prefix` of an attention; each prefix has tokens of its own, so their order does not matter."""

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, K, C] with those of the active prefixes in the rows of their virtual tokens."""
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


def new_slot(attribute: str, site: Site | None) -> Slot:
    """An empty slot for an attribute of the decoder's modules. site: of the module, where it is one."""
    match attribute:
        case "adapter":
            assert site is not None, "adapters sit on sites"
            if site.experts is not None:
                return GroupedSlot()
            return EmbeddingSlot() if site.group == "embedding" else LinearSlot()
        case "prefix":
            return PrefixSlot()
        case "after_attention" | "after_mlp":
            return BranchSlot()
    raise AssertionError(f"no slot is called {attribute}")
