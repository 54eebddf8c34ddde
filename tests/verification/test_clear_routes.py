"""Which items a verification of a model with experts takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from danlu.verification.clear_routes import ClearItems
from danlu.verification.routes import LEAST_MARGIN


def test_items_with_a_route_that_is_not_clear_are_passed_over() -> None:
    margins = {"a": 1.0, "b": LEAST_MARGIN / 2, "c": LEAST_MARGIN, "d": 0.0, "e": 1.0}
    asked: list[tuple[str, str]] = []

    def margin_of(before: list[Any], item: Any) -> float:
        asked.append(("".join(before), item))
        return margins[item]

    run: Any = SimpleNamespace(data_loader=SimpleNamespace())
    candidates: Any = list(margins)
    items = ClearItems(SimpleNamespace(), run, candidates)  # type: ignore[arg-type]
    assert items._clear(2, margin_of) == [0, 2]
    assert asked == [("", "a"), ("a", "b"), ("a", "c")]
    assert items._clear(1, margin_of) == [4]
    assert items._clear(1, margin_of) is None
