"""Routing replay: the experts that tokens went to in one pass of a decoder, recorded, and used again in another.

A router may choose another expert when its scores differ by rounding alone, and a token's log-probability then jumps.
Tokens of a rollout therefore go to the same experts in training as in the rollout (R3, arXiv:2510.11370). Only the
choice is replayed: the weights of the experts are recomputed from the present scores, so the router is trained.

T tokens of a pass, flat · L layers with experts · k experts of a token, the most of any layer · E experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from danlu.models.decoder import Decoder, Layer
from danlu.models.experts import MoE, Router
from danlu.models.layer_spec import Experts

NO_ROUTE = -1
"""The index of an expert that stands for an unknown route: the router chooses itself."""


def routers_of(model: Decoder) -> dict[int, Router]:
    """The routers of a decoder by the place of their layer among all that have experts; of a pipeline those that are
    here."""
    numbers = [number for number, spec in enumerate(model.config.layers) if isinstance(spec.feed, Experts)]
    here = {place: str(number) for place, number in enumerate(numbers) if str(number) in model.layers}
    return {place: cast(MoE, cast(Layer, model.layers[name]).mlp).router for place, name in here.items()}


class RecordedRoutes:
    """The experts that the routers of a decoder chose in one pass, through all of its layers or those of a pipeline's
    stage.
    """

    def __init__(self, shape: tuple[int, int], places: Iterable[int]) -> None:
        self._shape = shape
        self._by_layer: dict[int, Tensor | None] = dict.fromkeys(places)

    def take(self, place: int, experts: Tensor) -> Tensor:
        """Records the choice [T, k] of the router at a place, and lets it pass."""
        self._by_layer[place] = experts
        return experts

    def stacked(self, positions: Tensor) -> Tensor:
        """[T, L, k] int16 of tokens at `positions` [T]; `NO_ROUTE` for layers that are not here, and behind the experts
        of those that have fewer of a token."""
        routes = positions.new_full((len(positions), *self._shape), NO_ROUTE, dtype=torch.int16)
        for place, experts in self._by_layer.items():
            assert experts is not None, "a pass goes through every layer"
            routes[:, place, : experts.shape[1]] = experts
        return routes


@contextmanager
def recording(model: Decoder) -> Iterator[RecordedRoutes]:
    """A context in which one pass of the decoder is recorded."""
    routers, shape = routers_of(model), model.config.route_shape
    assert shape is not None, "the decoder has experts"
    recorded = RecordedRoutes(shape, routers)
    with _replays(routers, {place: partial(recorded.take, place) for place in routers}):
        yield recorded


@contextmanager
def replaying(model: Decoder, routes: Tensor) -> Iterator[None]:
    """A context in which the tokens of a pass go to the experts of `routes` [T, L, k], integers on the model's device;
    those with `NO_ROUTE` go where their routers send them."""
    routers = routers_of(model)
    with _replays(routers, {place: partial(_replayed, routes[:, place]) for place in routers}):
        yield


def _replayed(recorded: Tensor, own: Tensor) -> Tensor:
    """The experts [T, k] int64: the recorded ones where these are known, else the router's own."""
    recorded = recorded[:, : own.shape[1]]
    return torch.where(recorded == NO_ROUTE, own, recorded.to(own.dtype))


@contextmanager
def _replays(routers: Mapping[int, Router], replays: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """The slots `replay` of the routers filled; contexts may lie within each other."""
    before = {place: router.replay for place, router in routers.items()}
    for place, router in routers.items():
        router.replay = replays[place]
    try:
        yield
    finally:
        for place, router in routers.items():
            router.replay = before[place]
