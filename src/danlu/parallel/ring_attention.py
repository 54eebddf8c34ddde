"""Ring attention: keys travel around the ranks of a group while each computes with those it has (arXiv:2310.01889).

The values that are stored of each token travel (`Keys.stored`): for multi-head latent attention these are the latents,
which every rank expands again. In the backward pass they travel again, and behind them the gradients, to which each
rank adds its part, until they are home. So no rank ever holds keys of more than two others.

T query rows · S key rows of one rank · H query heads · K key/value heads · C head width · W width of a value
R ranks of the ring
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.layer_types import Expand, Keys
from danlu.core.types import Run
from danlu.models.attention_kernels import Kernels, TileKernel
from danlu.models.tiled_attention import (
    InputGradients,
    OutputGradient,
    Tile,
    TilePlan,
    TileSettings,
    add_gradients,
    add_tiles,
    finished,
    nothing_attended,
    plan_tiles,
    tile_kernel_for,
    tiles_between,
)
from danlu.parallel.comm import Group


class RankRows:
    """The tokens in the rows of each rank of a group; every rank has this for all ranks.

    runs: the runs of each rank, laid end to end in its rows.
    """

    def __init__(self, group: Group, runs: Sequence[Sequence[Run]]) -> None:
        assert len(runs) == group.size, f"runs of {len(runs)} ranks in a group of {group.size}"
        self.group = group
        self.runs = tuple(map(as_rows, runs))
        self.counts = tuple(sum(run.tokens for run in own) for own in self.runs)
        self._plans: dict[tuple[Any, ...], TilePlan] = {}  # see `plan`
        self._positions: dict[int, Tensor] = {}

    def tiles(self, source: int, window: int | None) -> tuple[Tile, ...]:
        """Returns the tiles in which this rank's queries see the keys of rank `source`."""
        return tiles_between(self.runs[self.group.index], self.runs[source], window)

    def plan(self, source: int, window: int | None, kernel: TileKernel | None, dtype: torch.dtype) -> TilePlan:
        """Returns the plan that computes these tiles in this dtype; made once for all layers that are alike."""
        key = source, window, kernel, dtype
        if key not in self._plans:
            self._plans[key] = plan_tiles(self.tiles(source, window), window, kernel, dtype)
        return self._plans[key]

    def positions(self, source: int, device: torch.device) -> Tensor:
        """[S] int64: where the tokens of rank `source` stand in their documents."""
        if source not in self._positions or self._positions[source].device != device:
            ranges = [torch.arange(run.position, run.position + run.tokens) for run in self.runs[source]]
            self._positions[source] = copy_to(torch.cat([torch.arange(0), *ranges]), device)
        return self._positions[source]


def as_rows(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs laid end to end: `start` and `stop` are rows."""
    laid, row = [], 0
    for run in runs:
        laid.append(run._replace(start=row, stop=row + run.tokens))
        row += run.tokens
    return tuple(laid)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Keys,
    sinks: Tensor | None,
    ranks: RankRows,
    settings: TileSettings,
    kernels: Kernels | None = None,
) -> Tensor:
    """Computes attention of this rank's queries [T, H, C] over the keys of all ranks -> [T, H, W].

    k [T, K, C], v [T, K, W]: the keys and values of this rank's own tokens. keys: the values stored of them, and the
    function that makes keys and values of these; its `expand` depends on the stored values, positions and parameters
    alone. kernels: the kernels that may be used; by default all that the device has.
    """
    kernel = tile_kernel_for(q, v, settings.softcap, kernels)
    passes = _Passes(ranks, settings, keys.expand, len(keys.stored), kernel)
    attended: Tensor = _RingAttention.apply(passes, q, k, v, sinks, *keys.stored, *passes.parameters(keys.stored))
    return attended


@dataclass
class _Passes:
    """The way of keys and gradients around the ring, in one layer."""

    ranks: RankRows
    settings: TileSettings
    expand: Expand | None
    tensors: int  # of what is stored
    kernel: TileKernel | None

    @property
    def size(self) -> int:
        return self.ranks.group.size

    def source(self, hop: int) -> int:
        """Returns the rank that owns the keys here after `hop` hops."""
        return (self.ranks.group.index - hop) % self.size

    def plan(self, hop: int, q: Tensor) -> TilePlan:
        """Returns the plan that computes the tiles of the keys here after `hop` hops."""
        return self.ranks.plan(self.source(hop), self.settings.window, self.kernel, q.dtype)

    def pass_on(self, tensors: Sequence[Tensor], hop: int) -> Callable[[], Sequence[Tensor]]:
        """Starts to send tensors to the next rank, and to receive those that are here after `hop` hops; a function that
        waits for these."""
        group = self.ranks.group
        rows = self.ranks.counts[self.source(hop)]
        arriving = [x.new_empty(rows, *x.shape[1:]) for x in tensors]
        following, preceding = (group.index + 1) % group.size, (group.index - 1) % group.size
        leaving = [x.contiguous() for x in tensors]
        wait = group.start_exchange([(x, following) for x in leaving], [(x, preceding) for x in arriving])

        def arrived() -> Sequence[Tensor]:
            wait()
            return arriving

        return arrived

    def expanded(self, stored: Sequence[Tensor], source: int) -> tuple[Tensor, Tensor]:
        """Keys [S, K, C] and values [S, K, W] of the tokens of a rank."""
        if self.expand is None:
            k, v = stored
            return k, v
        return self.expand(stored, self.ranks.positions(source, stored[0].device))

    def parameters(self, stored: Sequence[Tensor]) -> list[Tensor]:
        """Returns the trained parameters that expand keys, in an order that is the same each time."""
        if self.expand is None or not torch.is_grad_enabled():
            return []
        leaves = [x.new_zeros(1, *x.shape[1:]).requires_grad_() for x in stored]
        return _leaves_of(self.expand(leaves, torch.zeros(1, dtype=torch.int64, device=stored[0].device)), leaves)

    def add_gradients(
        self, total: InputGradients, q: Tensor, output: OutputGradient, stored: Sequence[Tensor], hop: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Adds to `total.q` the gradients that come from the keys here after `hop` hops.

        Returns the gradients of their stored values, and of `parameters`.
        """
        plan = self.plan(hop, q)
        if plan.is_empty:
            return [x.new_zeros(x.shape, dtype=total.q.dtype) for x in stored], ()
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in stored]
            outputs = self.expanded(leaves, self.source(hop))
        k, v = (x.detach() for x in outputs)
        of_keys = InputGradients(total.q, *(x.new_zeros(x.shape, dtype=total.q.dtype) for x in (k, v)))
        add_gradients(of_keys, q, k, v, output, plan, self.settings)
        if self.expand is None:
            return of_keys[1:], ()
        parameters = _leaves_of(outputs, leaves)
        gradients = torch.autograd.grad(outputs, (*leaves, *parameters), [of_keys.k.to(k.dtype), of_keys.v.to(v.dtype)])
        wide = [x.to(total.q.dtype) for x in gradients]
        return wide[: len(leaves)], wide[len(leaves) :]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        passes: _Passes,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *stored_and_parameters: Tensor,
    ) -> Tensor:
        stored: Sequence[Tensor] = stored_and_parameters[: passes.tensors]
        ctx.passes, ctx.parameters = passes, stored_and_parameters[passes.tensors :]
        settings = passes.settings
        total = nothing_attended(q, v.shape[2])
        arriving = passes.pass_on(stored, 1)
        add_tiles(total, q, k, v, passes.plan(0, q), settings)
        received = stored
        for hop in range(1, passes.size):
            received = arriving()
            if hop + 1 < passes.size:
                arriving = passes.pass_on(received, hop + 1)
            plan = passes.plan(hop, q)
            if not plan.is_empty:
                add_tiles(total, q, *passes.expanded(received, passes.source(hop)), plan, settings)
        out, lse = finished(total, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *stored)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        passes: _Passes = ctx.passes
        q, k, v, sinks, out, lse, *stored = ctx.saved_tensors
        output = OutputGradient(out, lse, grad)
        arriving = passes.pass_on(stored, 1)
        total = InputGradients.zeros(q, k, v)
        add_gradients(total, q, k, v, output, passes.plan(0, q), passes.settings)
        of_parameters = [torch.zeros_like(x, dtype=total.q.dtype) for x in ctx.parameters]
        travelling = None
        for hop in range(1, passes.size):
            received = arriving()
            if hop + 1 < passes.size:
                arriving = passes.pass_on(received, hop + 1)
            of_stored, more = passes.add_gradients(total, q, output, received, hop)
            for x, y in zip(of_parameters, more, strict=bool(more)):
                x += y
            if travelling is not None:  # the sums of ranks before this one for the gradients of the same keys
                for x, y in zip(of_stored, travelling(), strict=True):
                    x += y
            travelling = passes.pass_on(of_stored, hop + 1)
        assert travelling is not None, "a ring has two ranks or more"
        of_inputs = [x.to(y.dtype) for x, y in zip(total, (q, k, v), strict=True)]
        home = [x.to(y.dtype) for x, y in zip(travelling(), stored, strict=True)]
        of_sinks = None if sinks is None else output.of_sinks(sinks)
        return (
            None,
            *of_inputs,
            of_sinks,
            *home,
            *(x.to(y.dtype) for x, y in zip(of_parameters, ctx.parameters, strict=True)),
        )


def _leaves_of(outputs: Sequence[Tensor], but: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a graph ends at, in the order of a walk through it, without those of `but`."""
    left_out = set(map(id, but))
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting = [x.grad_fn for x in reversed(outputs)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in left_out:
            leaves.append(leaf)
        waiting += [following for following, _ in reversed(node.next_functions)]
    return leaves
