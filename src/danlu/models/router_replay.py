"""Routing replay: the experts that tokens went to in one pass of a decoder, recorded, and used again in another.

A router whose scores differ by rounding alone may choose another expert, and a token's log-probability then jumps. What
is trained on a rollout therefore goes to the experts that it went to in the rollout (R3, arXiv:2510.11370). Only the
choice is replayed: the weights of the experts are made anew of the present scores, so the router is trained.

T tokens of a pass, flat · L layers with experts · k experts of a token, the most of any layer · E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models.decoder import Decoder, Layer
from danlu.models.experts import MoE
from danlu.models.router import Router

NO_ROUTE = -1
"""In the place of the experts of a token whose route is not known: its router chooses."""


def routers_of(model: Decoder) -> list[Router]:
    """The routers of a decoder, in the order of its layers."""
    layers = [layer for layer in model.layers.values() if isinstance(layer, Layer)]
    return [layer.mlp.router for layer in layers if isinstance(layer.mlp, MoE)]


def route_shape(model: Decoder) -> tuple[int, int] | None:
    """(L, k) of a token's routes; None for a decoder without experts."""
    routers = routers_of(model)
    return (len(routers), max(router.top_k for router in routers)) if routers else None


class RecordedRoutes:
    """What the routers of a decoder chose in one pass."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._most = max(router.top_k for router in routers)
        self._by_layer: list[Tensor | None] = [None] * len(routers)

    def take(self, number: int, experts: Tensor) -> Tensor:
        """Records the choice [T, k] of router `number`, and lets it pass."""
        self._by_layer[number] = experts
        return experts

    def stacked(self) -> Tensor:
        """[T, L, k] int16; `NO_ROUTE` behind the experts of layers that have fewer of a token."""
        chosen = [experts for experts in self._by_layer if experts is not None]
        assert len(chosen) == len(self._by_layer), "a pass goes through every layer"
        same = [F.pad(each, (0, self._most - each.shape[1]), value=NO_ROUTE).to(torch.int16) for each in chosen]
        return torch.stack(same, 1)


@contextmanager
def recording(model: Decoder) -> Iterator[RecordedRoutes]:
    """A context in which one pass of the decoder is recorded."""
    routers = routers_of(model)
    recorded = RecordedRoutes(routers)
    with _replays(routers, [partial(recorded.take, number) for number in range(len(routers))]):
        yield recorded


@contextmanager
def replaying(model: Decoder, routes: Tensor) -> Iterator[None]:
    """A context in which the tokens of a pass go to the experts of `routes` [T, L, k], integers on the model's device;
    those with `NO_ROUTE` go where their routers send them."""
    routers = routers_of(model)
    with _replays(routers, [partial(_replayed, routes[:, number]) for number in range(len(routers))]):
        yield


def _replayed(recorded: Tensor, own: Tensor) -> Tensor:
    """The experts [T, k] int64: the recorded ones where these are known, else the router's own."""
    recorded = recorded[:, : own.shape[1]]
    return torch.where(recorded == NO_ROUTE, own, recorded.to(own.dtype))


@contextmanager
def _replays(routers: Sequence[Router], replays: Sequence[Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """The slots `replay` of the routers filled; contexts may lie within each other."""
    before = [router.replay for router in routers]
    for router, replay in zip(routers, replays, strict=True):
        router.replay = replay
    try:
        yield
    finally:
        for router, replay_before in zip(routers, before, strict=True):
            router.replay = replay_before
