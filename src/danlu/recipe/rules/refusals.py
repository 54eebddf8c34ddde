"""Settings that cannot be combined with a layout, as problems of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from danlu.recipe.yaml_tree import Problem


def refusals(reasons: Iterable[tuple[str, str, str]], otherwise: str, reads: str) -> Iterator[Problem]:
    """Yields a problem for each (key, reason, remedy). otherwise: another remedy; reads: the deciding key."""
    for key, reason, instead in reasons:
        yield Problem(key, f"{reason}. {instead}, or {otherwise}", reads=(reads,))
