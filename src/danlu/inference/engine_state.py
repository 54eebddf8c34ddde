"""Requests as JSON has them, for the state of an engine that is to be taken up by another process. No torch here."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from danlu.core.errors import DataError
from danlu.inference.episode import Episode
from danlu.inference.recorded_routes import routes_from_json, routes_to_json
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.support import Support

# By the dataclasses' own fields, so that none is left out that is added to them. `source` has no type that JSON has.
_HINTS: dict[type, dict[str, Any]] = {
    Request: typing.get_type_hints(Request, localns={"Prompt": object}),
    SamplingOptions: typing.get_type_hints(SamplingOptions),
}
del _HINTS[Request]["source"]


def request_to_json(request: Request) -> dict[str, Any]:
    """The fields of a request, of the types that JSON has; without `source`."""
    return _fields_to_json(request)


def request_with_source(request: Request) -> dict[str, Any]:
    """Converts a request as `request_to_json`, with `source` as it is: for a pickle."""
    return {**request_to_json(request), "source": request.source}


def request_from_json(fields: Mapping[str, Any], *, complete: bool = False) -> Request:
    """Restores the request from the fields of `request_to_json` or `request_with_source`, after JSON or a pickle.

    complete: whether every field has to be there; else a missing one has its default, as in the state of a release that
    had no such field.

    Raises DataError for a field that a request does not have, lacks, or has with another type, and RecipeError for
    sampling options that make no sense.
    """
    own = {name: value for name, value in fields.items() if name != "source"}
    request: Request = _dataclass_from_json(Request, own, "request", complete=complete)
    return dataclasses.replace(request, source=fields["source"]) if "source" in fields else request


def _fields_to_json(value: Any) -> dict[str, Any]:
    return {name: _to_json(getattr(value, name)) for name in _HINTS[type(value)]}


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields_to_json(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _dataclass_from_json(kind: type, fields: Any, where: str, *, complete: bool) -> Any:
    hints = _HINTS[kind]
    if not isinstance(fields, Mapping):
        raise DataError(f"{where}: expected a mapping of its fields")
    if unknown := [name for name in fields if name not in hints]:
        raise DataError(f"{where}: there is no field {unknown[0]!r}: both sides need the same release of danlu")
    if missing := [name for name in hints if name not in fields] if complete else []:
        raise DataError(f"{where}: the field {missing[0]!r} is missing: both sides need the same release of danlu")
    return kind(
        **{name: _from_json(hints[name], value, f"{where}.{name}", complete=complete) for name, value in fields.items()}
    )


def _from_json(hint: Any, value: Any, where: str, *, complete: bool) -> Any:
    """A value of the type that a field's annotation names. Raises DataError for another one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):  # with None; there are no other unions
        if value is None:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _from_json(hint, value, where, complete=complete)
    if origin in (tuple, frozenset):
        if isinstance(value, list | tuple | frozenset) and all(type(item) is arguments[0] for item in value):
            return origin(value)
    elif hint in _HINTS:
        return _dataclass_from_json(hint, value, where, complete=complete)
    elif type(value) is hint or (hint is float and type(value) is int):
        return value
    raise DataError(f"{where}: {value!r:.100} is not of the type {hint if origin else hint.__name__}")


def fresh_answer_state(sample: int) -> dict[str, Any]:
    """The state of an answer that has no token, or of an episode that has no turn."""
    return {"sample": sample, "reported": 0, "aborted": False, "prompt_scores": [], "drawn": []}


def completion_state(completion: Completion) -> dict[str, Any]:
    """A complete answer as the state of an unfinished one has it: an engine that restores it completes it again.

    Of an episode, which its tokens do not tell all of, the rest is `episode`.
    """
    supports = [None] * len(completion.tokens) if completion.support is None else completion.support
    tops = completion.top if completion.top is not None else [()] * len(completion.tokens)
    prompt_scores: list[Any] = []
    if completion.prompt_logprobs is not None:
        prompt_tops = completion.prompt_top or [()] * len(completion.prompt_logprobs)
        prompt_scores = [list(score) for score in zip(completion.prompt_logprobs, prompt_tops, strict=True)]
    columns = zip(
        completion.tokens, completion.logprobs, completion.drawn, supports, completion.versions, tops, strict=True
    )
    state: dict[str, Any] = {
        "sample": completion.sample,
        "reported": len(completion.tokens),
        "aborted": completion.finish == "abort",
        "prompt_scores": prompt_scores,
        "drawn": [
            [token, logprob, drawn, None if support is None else support.ids.tolist(), version, list(top)]
            for token, logprob, drawn, support, version, top in columns
        ],
        **({} if completion.routes is None else {"routes": routes_to_json(completion.routes)}),
    }
    if isinstance(completion, Episode):
        own = completion.own_fields() | {"text": completion.text, "finish": completion.finish}
        state["episode"] = own | {"vocab_size": completion.support[0].vocab_size if completion.support else 0}
    return state


def episode_from_state(number: int, state: dict[str, Any]) -> Episode:
    """The episode that `completion_state` was given. number: of its request."""
    columns = [list(column) for column in zip(*state["drawn"], strict=True)] or [[] for _ in range(6)]
    tokens, logprobs, drawn, ids, versions, _ = columns
    own = dict(state["episode"])
    text, finish, vocab_size = own.pop("text"), own.pop("finish"), own.pop("vocab_size")
    supports = [Support.of(np.array(each, np.int64), vocab_size) for each in ids if each is not None]
    completion = Completion(
        number,
        state["sample"],
        tokens,
        logprobs,
        drawn,
        supports or None,
        versions,
        text,
        finish,
        routes=routes_from_json(state.get("routes")),
    )
    return Episode.of(completion, own)
