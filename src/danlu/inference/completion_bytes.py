"""Completions as bytes, for a way from process to process: JSON for texts, arrays as numpy stores them, no pickles."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from danlu.inference.episode import Episode
from danlu.inference.request import Completion
from danlu.inference.support import Support


def to_bytes(completions: Sequence[Completion]) -> bytes:
    """The completions as they are, to the last bit; nothing of none."""
    if not completions:
        return b""
    heads: list[dict[str, Any]] = []
    supports: list[Support] = []
    for each in completions:
        heads.append(
            {
                "number": each.number,
                "sample": each.sample,
                "tokens": len(each.tokens),
                "text": each.text,
                "finish": each.finish,
                "supports": None if each.support is None else [support.sorted_ids is None for support in each.support],
                "vocab_size": each.support[0].vocab_size if each.support else 0,
                "top": each.top,
                "prompt_logprobs": each.prompt_logprobs,
                "prompt_top": each.prompt_top,
                "routes": None if each.routes is None else each.routes.shape,
                "episode": each.own_fields() if isinstance(each, Episode) else None,
            }
        )
        supports += each.support or []
    ids = [each.sorted_ids for each in supports if each.sorted_ids is not None]
    masks = [each.bitmask for each in supports if each.bitmask is not None]
    routes = [each.routes.reshape(-1) for each in completions if each.routes is not None]
    out = io.BytesIO()
    np.savez(
        out,
        heads=np.frombuffer(json.dumps(heads).encode(), dtype=np.uint8),
        tokens=np.array([token for each in completions for token in each.tokens], dtype=np.int64),
        versions=np.array([version for each in completions for version in each.versions], dtype=np.int64),
        logprobs=np.array([value for each in completions for value in each.logprobs], dtype=np.float64),
        drawn=np.array([value for each in completions for value in each.drawn], dtype=np.float64),
        id_counts=np.array([len(each) for each in ids], dtype=np.int64),
        ids=np.concatenate([np.empty(0, dtype=np.int32), *ids]),
        mask_bytes=np.array([len(each) for each in masks], dtype=np.int64),
        masks=np.concatenate([np.empty(0, dtype=np.uint8), *masks]),
        routes=np.concatenate([np.empty(0, dtype=np.int16), *routes]),
    )
    return out.getvalue()


def from_bytes(payload: bytes) -> list[Completion]:
    """The completions that `to_bytes` made a payload of."""
    if not payload:
        return []
    with np.load(io.BytesIO(payload), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    columns = {name: _Cursor(arrays[name]) for name in ("tokens", "versions", "logprobs", "drawn", "routes")}
    ids = iter(np.split(arrays["ids"], np.cumsum(arrays["id_counts"])[:-1]))
    masks = iter(np.split(arrays["masks"], np.cumsum(arrays["mask_bytes"])[:-1]))
    completions = []
    for head in json.loads(arrays["heads"].tobytes()):
        count, vocab_size, shape = head["tokens"], head["vocab_size"], head["routes"]
        supports = head["supports"]
        completion = Completion(
            number=head["number"],
            sample=head["sample"],
            tokens=columns["tokens"].take(count).tolist(),
            logprobs=columns["logprobs"].take(count).tolist(),
            drawn=columns["drawn"].take(count).tolist(),
            support=None
            if supports is None
            else [
                Support(vocab_size, bitmask=next(masks)) if is_mask else Support(vocab_size, sorted_ids=next(ids))
                for is_mask in supports
            ],
            versions=columns["versions"].take(count).tolist(),
            text=head["text"],
            finish=head["finish"],
            top=_top(head["top"]),
            prompt_logprobs=head["prompt_logprobs"],
            prompt_top=_top(head["prompt_top"]),
            routes=None if shape is None else columns["routes"].take(int(np.prod(shape))).reshape(shape),
        )
        own = head["episode"]
        completions.append(completion if own is None else Episode.of(completion, own))
    return completions


def _top(value: list[list[list[Any]]] | None) -> list[tuple[tuple[int, float], ...]] | None:
    if value is None:
        return None
    return [tuple((token, logprob) for token, logprob in likeliest) for likeliest in value]


class _Cursor:
    """An array that is taken piece by piece."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.start = values, 0

    def take(self, count: int) -> np.ndarray:
        self.start += count
        return self.values[self.start - count : self.start]
