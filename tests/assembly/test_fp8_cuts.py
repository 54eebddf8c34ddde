"""Layers that tensor ranks share and products in 8 bits do not go together with."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.assembly.arithmetic import check_cuts
from danlu.core.errors import RecipeError
from danlu.models.modules import Linear
from danlu.parallel.tensor import LinearCut
from danlu.recipe.sections import Fp8Products

COLUMN = LinearCut("layers.0.attention.q_proj", "outputs", 128, 64, 1)
REFUSED: list[tuple[Any, LinearCut, str]] = [
    ("tile", COLUMN._replace(replicas=2), "2 ranks share a key/value head, and its output's gradient is a sum"),
    ("tile", COLUMN._replace(axis=None), "every rank has it whole, and its output's gradient is a sum"),
    ("mxfp8", COLUMN._replace(local_features=48), "48 of the 128 features of layers.0.attention.q_proj, and mxfp8"),
]


@pytest.mark.parametrize(("recipe", "cut", "text"), REFUSED)
def test_cuts_that_round_other_numbers_are_refused(recipe: Any, cut: LinearCut, text: str) -> None:
    """The controls: what is whole on one rank or cut between blocks, and a gate, which is not in 8 bits."""
    linear, section = Linear(8, 8, bias=False), Fp8Products(recipe=recipe)
    with pytest.raises(RecipeError, match=text):
        check_cuts(section, [(linear, COLUMN), (linear, cut)])
    check_cuts(section, [(linear, COLUMN), (linear, cut._replace(name="layers.0.attention.a_proj"))])


def test_tiles_may_be_cut_anywhere() -> None:
    check_cuts(Fp8Products(recipe="tile"), [(Linear(8, 8, bias=False), COLUMN._replace(local_features=48))])
