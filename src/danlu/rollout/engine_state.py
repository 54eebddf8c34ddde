"""Requests as JSON has them, for the state of an engine that is to be taken up by another process. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from danlu.rollout.episode import Episode
from danlu.rollout.recorded_routes import routes_from_json, routes_to_json
from danlu.rollout.request import Completion, Request, SamplingOptions
from danlu.rollout.support import Support


def request_to_json(request: Request) -> dict[str, Any]:
    """The fields of a request, of the types that JSON has; without `source`."""
    names = [field.name for field in dataclasses.fields(request) if field.name != "source"]
    fields = {name: getattr(request, name) for name in names}
    return {
        **fields,
        "prompt": list(request.prompt),
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": sorted(request.stop_ids),
        "stop_strings": list(request.stop_strings),
    }


def request_with_source(request: Request) -> dict[str, Any]:
    """As `request_to_json`, with `source` as it is: for a pickle."""
    return {**request_to_json(request), "source": request.source}


def request_from_json(fields: dict[str, Any]) -> Request:
    """The request that `request_to_json` or `request_with_source` was given, from what JSON or a pickle gave back."""
    sampling = dict(fields["sampling"])
    if sampling["allowed_ids"] is not None:
        sampling["allowed_ids"] = tuple(sampling["allowed_ids"])
    return Request(
        **{
            **fields,
            "prompt": tuple(fields["prompt"]),
            "sampling": SamplingOptions(**sampling),
            "stop_ids": frozenset(fields["stop_ids"]),
            "stop_strings": tuple(fields["stop_strings"]),
        }
    )


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
