"""Faults of the cut of families with parts of their own, for `Options.fault` of `verify`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from danlu.models.modules import Linear
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy


def _is_cut(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.tensor > 1


def _bias_on_every_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The bias of a layer with cut inputs has the role of one with cut outputs: each tensor rank adds it to its sum."""
    owner = next(each for each in Linear.__mro__ if "added_bias" in vars(each))
    return replaced(owner, "added_bias", property(lambda linear: linear.bias))


FAULTS = {"bias-on-every-rank": Fault(_is_cut, _bias_on_every_rank)}
