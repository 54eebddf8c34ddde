"""Completions on their way between processes: what comes out is what went in, to the last bit."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.inference.completion_bytes import from_bytes, to_bytes
from danlu.inference.request import Completion
from danlu.inference.support import Support

VOCAB_SIZE = 300
FLOATS = st.floats(-50, 0, width=32)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    count = draw(st.integers(0, 5))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=count, max_size=count))

    ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=VOCAB_SIZE, unique=True)
    return Completion(
        number=draw(st.integers(0, 2**40)),
        sample=draw(st.integers(0, 9)),
        tokens=column(st.integers(0, VOCAB_SIZE - 1)),
        logprobs=column(FLOATS),
        drawn=column(FLOATS),
        support=draw(st.none() | st.just([Support.of(np.array(sorted(each)), VOCAB_SIZE) for each in column(ids)])),
        versions=column(st.integers(0, 9)),
        text=draw(st.text(max_size=9)),
        finish=draw(st.sampled_from(["stop", "length"])),
        top=draw(st.none() | st.just([((each, -0.5), (1, -1.0)) for each in column(st.integers(0, 9))])),
        prompt_logprobs=draw(st.none() | st.lists(FLOATS, max_size=3)),
        prompt_top=draw(st.none() | st.just([((5, -0.5), (1, -1.0)), ()])),
        routes=draw(st.none() | st.just(np.arange(count * 6, dtype=np.int16).reshape(count, 3, 2))),
    )


def plain(completion: Completion) -> object:
    """Arrays as what compares by value, with their types."""
    fields = {field.name: getattr(completion, field.name) for field in dataclasses.fields(completion)}
    support = fields.pop("support")
    routes = fields.pop("routes")
    sets = None if support is None else [(each.bitmask is None, each.vocab_size, each.ids.tolist()) for each in support]
    return fields, sets, None if routes is None else (routes.dtype, routes.tolist())


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(completions(), max_size=4))
def test_what_comes_out_is_what_went_in(sent: list[Completion]) -> None:
    received = from_bytes(to_bytes(sent))
    assert [plain(each) for each in received] == [plain(each) for each in sent]
    for before, after in zip(sent, received, strict=True):
        for one, other in zip(before.support or (), after.support or (), strict=True):
            assert one.nbytes == other.nbytes


def test_nothing_takes_no_bytes() -> None:
    assert to_bytes([]) == b"" and from_bytes(b"") == []
