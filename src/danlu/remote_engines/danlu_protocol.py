"""Messages between a trainer and `danlu serve --rollouts`, as JSON: requests, and answers to the last bit.

Python writes the shortest text that reads as the same float, so log-probabilities arrive as they were computed.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from danlu.core.safetensors_format import raw_bytes
from danlu.inference.engine_adapters import BASE
from danlu.inference.engine_state import request_to_json
from danlu.inference.recorded_routes import routes_from_json, routes_to_json
from danlu.inference.request import Completion
from danlu.inference.support import Support
from danlu.remote_engines.server_interface import Continuation, ServerAnswer

if TYPE_CHECKING:
    from torch import Tensor

PROTOCOL = 4
"""Counts changes after which one side no longer understands the other."""
PREFIX = "/rollouts"
"""The prefix of the paths of all endpoints."""


def continuation_to_json(continuation: Continuation, *, routes: bool = False) -> dict[str, Any]:
    """Makes the request to a server; `serving.rollout_endpoints.AnswerBody` reads it. routes: whether it requests
    them."""
    request = continuation.request
    asked = dataclasses.replace(
        request,
        prompt=continuation.tokens,
        max_new_tokens=continuation.max_new_tokens,
        min_new_tokens=continuation.min_new_tokens,
        answer_tokens=0 if request.grammar is None else len(continuation.tokens) - len(request.prompt),
        samples=1,
        first_sample=continuation.sample,
        adapter=BASE if continuation.adapter is None else continuation.adapter,
        draw_number=request.random_number,  # the server numbers requests by itself
        rotary_length=request.text_length,  # of the whole text, whatever part of it is there
    )
    return {"request_id": continuation.request_id, "request": request_to_json(asked), "routes": routes}


def completion_to_json(completion: Completion, label_of: Callable[[int], str], *, routes: bool) -> dict[str, Any]:
    """An answer; label_of: from the engine's versions to the trainer's; routes: whether they were asked for."""
    return {
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "drawn": completion.drawn,
        "labels": [label_of(version) for version in completion.versions],
        "finish": completion.finish,
        "support": None if completion.support is None else [_support_to_json(each) for each in completion.support],
        "top": completion.top,
        "routes": routes_to_json(completion.routes) if routes else None,
    }


def answer_from_json(answer: Mapping[str, Any]) -> ServerAnswer:
    """The answer that `completion_to_json` wrote."""
    finish = answer["finish"]
    support, top = answer["support"], answer["top"]
    return ServerAnswer(
        tokens=answer["tokens"],
        logprobs=answer["logprobs"],
        drawn=answer["drawn"],
        version_labels=answer["labels"],
        finish="stop" if finish == "stop_string" else "length" if finish == "context" else finish,
        support=None if support is None else [_support_from_json(each) for each in support],
        top=None if top is None else [tuple((token, value) for token, value in entry) for entry in top],
        routes=routes_from_json(answer["routes"]),
    )


def float_digest(value: Tensor) -> str:
    """SHA-256 of a tensor's values in float32."""
    return hashlib.sha256(raw_bytes(value.detach().to("cpu").float().contiguous())).hexdigest()


def _support_to_json(support: Support) -> dict[str, Any]:
    if support.sorted_ids is not None:
        return {"vocab_size": support.vocab_size, "ids": support.sorted_ids.tolist()}
    assert support.bitmask is not None, "a support is ids or a bitmask"
    return {"vocab_size": support.vocab_size, "bits": base64.b64encode(support.bitmask.tobytes()).decode()}


def _support_from_json(support: Mapping[str, Any]) -> Support:
    if "ids" in support:
        return Support(support["vocab_size"], sorted_ids=np.array(support["ids"], dtype=np.int32))
    bits = np.frombuffer(base64.b64decode(support["bits"]), dtype=np.uint8)
    return Support(support["vocab_size"], bitmask=bits)
