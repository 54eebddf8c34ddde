"""Routes of a completion's tokens as JSON has them, and how those of several turns become one array. No torch here."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

NO_ROUTE = -1
"""The value in place of the experts of a token with an unknown route; as `models.router_replay.NO_ROUTE`."""


def routes_to_json(routes: np.ndarray | None) -> dict[str, Any] | None:
    """Routes [tokens, layers, experts of a token] int16, to the last bit."""
    if routes is None:
        return None
    return {"shape": list(routes.shape), "int16": base64.b64encode(routes.astype("<i2").tobytes()).decode()}


def routes_from_json(value: dict[str, Any] | None) -> np.ndarray | None:
    """The routes that `routes_to_json` was given."""
    if value is None:
        return None
    flat = np.frombuffer(base64.b64decode(value["int16"]), dtype="<i2").astype(np.int16)
    return flat.reshape(value["shape"])


def with_length(routes: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens, layers, experts of a token]: the first of these routes, and `NO_ROUTE` behind them where they are
    fewer."""
    missing = max(0, tokens - len(routes))
    return np.pad(routes[:tokens], ((0, missing), (0, 0), (0, 0)), constant_values=NO_ROUTE)


def end_to_end(routes: Sequence[np.ndarray | None], tokens: Sequence[int]) -> np.ndarray | None:
    """The routes of several sequences, of these numbers of tokens, one after the other; None where none has any."""
    known = next((each for each in routes if each is not None), None)
    if known is None:
        return None
    nothing = known[:0]
    return np.concatenate(
        [with_length(nothing if each is None else each, count) for each, count in zip(routes, tokens, strict=True)]
    )
