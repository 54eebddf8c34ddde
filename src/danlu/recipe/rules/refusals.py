"""What a layout cannot be combined with, as problems of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from danlu.recipe.yaml_tree import Problem


def refusals(reasons: Iterable[tuple[str, str, str]], otherwise: str, reads: str) -> Iterator[Problem]:
    """A problem for each (key, why not, what to do instead). otherwise: what else helps; reads: the deciding key."""
    for key, reason, instead in reasons:
        yield Problem(key, f"{reason}. {instead}, or {otherwise}", reads=(reads,))
