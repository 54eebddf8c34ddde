"""Requests as JSON has them, for the state of an engine that is to be taken up by another process. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Any

from danlu.rollout.request import Completion, Request, SamplingOptions


def request_to_json(request: Request) -> dict[str, Any]:
    """The fields of a request, of the types that JSON has."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return {
        **fields,
        "prompt": list(request.prompt),
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": sorted(request.stop_ids),
        "stop_strings": list(request.stop_strings),
    }


def request_from_json(fields: dict[str, Any]) -> Request:
    """The request that `request_to_json` was given, from what JSON gave back."""
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
    """The state of an answer that has no token."""
    return {"sample": sample, "reported": 0, "aborted": False, "prompt_scores": [], "drawn": []}


def completion_state(completion: Completion) -> dict[str, Any]:
    """A complete answer as the state of an unfinished one has it: an engine that restores it completes it again."""
    supports = [None] * len(completion.tokens) if completion.support is None else completion.support
    tops = completion.top if completion.top is not None else [()] * len(completion.tokens)
    prompt_scores: list[Any] = []
    if completion.prompt_logprobs is not None:
        prompt_tops = completion.prompt_top or [()] * len(completion.prompt_logprobs)
        prompt_scores = [list(score) for score in zip(completion.prompt_logprobs, prompt_tops, strict=True)]
    columns = zip(
        completion.tokens, completion.logprobs, completion.drawn, supports, completion.versions, tops, strict=True
    )
    return {
        "sample": completion.sample,
        "reported": len(completion.tokens),
        "aborted": completion.finish == "abort",
        "prompt_scores": prompt_scores,
        "drawn": [
            [token, logprob, drawn, None if support is None else support.ids.tolist(), version, list(top)]
            for token, logprob, drawn, support, version, top in columns
        ],
    }
