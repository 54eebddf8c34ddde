"""`Completion.routes`: the experts that tokens went to, whatever the engine does with prompts and blocks meanwhile."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builders.tiny_adapters import adapter_set

from danlu.core.types import Pack, Sample
from danlu.data.batch import collate
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.engine_state import completion_state
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.models.router_replay import recording
from danlu.numerics.batch_invariant import batch_invariant
from danlu.recipe import sections

EXACT = EngineOptions(exact=True, routes=True, block=8, batch_tokens=32)
SAMPLED = SamplingOptions(seed=3)
PREFIX = tuple(range(11, 40))
PROMPTS = ((3, 9, 4), (*PREFIX, 7), (*PREFIX, 8, 9, 10), (11, 12, 13, 14, 15, 16, 17))
ANSWER = 12


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with batch_invariant():
        yield


@pytest.fixture
def model(small_decoder: Any) -> Decoder:
    return small_decoder("experts", vocab_size=61).requires_grad_(False)


def requests(count: int = ANSWER, samples: int = 3) -> list[Request]:
    return [Request(number, prompt, SAMPLED, count, samples) for number, prompt in enumerate(PROMPTS)]


def chosen(model: Decoder, prompt: Sequence[int], answer: Sequence[int], virtual: Sequence[int] = ()) -> np.ndarray:
    """What the routers choose for a text that goes through the model whole, as training lays it out."""
    tokens = np.int32([*prompt, *answer][:-1])
    batch = collate([Pack((Sample(tokens, np.zeros(len(tokens), np.float32), "row"),))], virtual_token_ids=virtual)
    with recording(model) as recorded, torch.no_grad():
        model(batch.tokens, batch.positions, attend_for(batch, exact=True))
    return recorded.stacked(batch.positions)[len(virtual) :].numpy()


def check(model: Decoder, completions: Sequence[Completion], prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    for completion in completions:
        assert completion.routes is not None and completion.routes.dtype == np.int16
        np.testing.assert_array_equal(completion.routes, chosen(model, prompts[completion.number], completion.tokens))


def test_they_are_those_of_a_pass_over_the_whole_text(model: Decoder) -> None:
    """Prompts in chunks, of which two begin alike and are read once; three answers to each."""
    engine = EmbeddedEngine(model, EXACT)
    completions = engine.generate(requests())
    check(model, completions)
    assert engine.statistics.prompt_tokens_reused > len(PREFIX)
    first, other = completions[0].routes, completions[3].routes
    assert first is not None and other is not None
    assert (first[:3] != other[:3]).any()  # the control: another prompt's are others
    again = engine.generate([dataclasses.replace(request, number=request.number) for request in requests()])
    check(model, again)  # all prompts are in the prefix cache now


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_blocks_that_move_take_them_along(model: Decoder, preempt: Any) -> None:
    size = EmbeddedEngine(model, EXACT)._runner.block_bytes
    cramped = dataclasses.replace(EXACT, cache_gib=9 * size / 2**30, swap_gib=1.0, preempt=preempt)
    engine = EmbeddedEngine(model, cramped)
    check(model, engine.generate(requests(samples=2)))
    assert engine.statistics.preemptions > 0
    assert (engine.statistics.swaps > 0) == (preempt == "swap")


def test_drafts_that_are_not_taken_leave_none(model: Decoder) -> None:
    options = dataclasses.replace(EXACT, draft=DraftOptions("ngram", 3, longest=1))
    engine = EmbeddedEngine(model, options)
    prompts = [(5, 6, 5, 6, 5, 6, 5), *PROMPTS[1:]]
    asked = [Request(number, prompt, SAMPLED, 40, 2) for number, prompt in enumerate(prompts)]
    check(model, engine.generate(asked), prompts)
    statistics = engine.statistics
    assert 0 < statistics.drafts_accepted < statistics.drafts_proposed


def test_answers_of_one_token_that_never_had_a_place_have_their_prompts(model: Decoder) -> None:
    engine = EmbeddedEngine(model, dataclasses.replace(EXACT, sequences=2))
    check(model, engine.generate(requests(count=1, samples=6)))


def test_virtual_tokens_are_left_out(model: Decoder) -> None:
    adapters = adapter_set(model)
    adapters.add("one", sections.Prompt(tokens=3))
    virtual = tuple(adapters.virtual_token_ids)
    (completion,) = EmbeddedEngine(model, EXACT, virtual_token_ids=virtual).generate(requests(samples=1)[1:2])
    np.testing.assert_array_equal(completion.routes, chosen(model, PROMPTS[1], completion.tokens, virtual))


def test_with_new_weights_they_are_those_of_the_last_reading(model: Decoder) -> None:
    """An answer that goes on under new weights is read again with them: so its keys are, and its routes."""
    engine = EmbeddedEngine(model, EXACT)
    for request in requests():
        engine.submit(request)
    done = [completion for _ in range(8) for completion in engine.step()]
    assert not done
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(-1)
    engine.update(1)
    completions: list[Completion] = []
    while engine.unfinished:
        completions += engine.step()
    assert all(set(completion.versions) == {0, 1} for completion in completions)
    check(model, completions)


def test_answers_are_taken_up_with_theirs(model: Decoder) -> None:
    engine = EmbeddedEngine(model, EXACT)
    for request in requests():
        engine.submit(request)
    for _ in range(8):
        engine.step()
    other = EmbeddedEngine(model, EXACT)
    other.restore(json.loads(json.dumps(engine.state())))
    completions: list[Completion] = []
    while other.unfinished:
        completions += other.step()
    check(model, completions)
    for request, completion in zip(requests(samples=1), completions[::3], strict=True):  # complete ones keep theirs
        state = {"requests": [{"request": engine_request(request), "answers": [completion_state(completion)]}]}
        last = EmbeddedEngine(model, EXACT)
        last.restore(json.loads(json.dumps(state)))
        (taken,) = last.step()
        np.testing.assert_array_equal(taken.routes, completion.routes)


def engine_request(request: Request) -> dict[str, Any]:
    from danlu.inference.engine_state import request_to_json

    return request_to_json(request)


def test_an_interruption_between_the_end_and_the_reading_loses_none(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = EmbeddedEngine(model, EXACT).generate(requests(count=6))
    engine = EmbeddedEngine(model, EXACT)
    for request in requests(count=6):
        engine.submit(request)
    real, left = EmbeddedEngine._collect, [6]

    def interrupted(self: EmbeddedEngine, answers: Any) -> None:
        answers = list(answers)
        if any(answer.finish is not None for answer in answers) and left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        real(self, answers)

    monkeypatch.setattr(EmbeddedEngine, "_collect", interrupted)
    completions: list[Completion] = []
    while engine.unfinished:
        try:
            completions += engine.step()
        except KeyboardInterrupt:
            continue
    assert left == [0]
    assert sorted(completions, key=lambda each: (each.number, each.sample)) == want
    check(model, completions)


def test_what_was_aborted_has_those_of_what_was_read(model: Decoder) -> None:
    engine = EmbeddedEngine(model, dataclasses.replace(EXACT, batch_tokens=12))
    engine.submit(Request(1, PROMPTS[1], SAMPLED, ANSWER))
    engine.step()
    engine.abort(1)
    (completion,) = engine.step()
    assert completion.routes is not None and len(completion.routes) == len(PROMPTS[1]) - 1
    np.testing.assert_array_equal(completion.routes[:12], chosen(model, PROMPTS[1], [0])[:12])
    assert (completion.routes[12:] == -1).all()


def test_nothing_is_recorded_unless_it_is_asked_for_and_there_are_experts(model: Decoder, small_decoder: Any) -> None:
    assert EmbeddedEngine(model, dataclasses.replace(EXACT, routes=False)).generate(requests())[0].routes is None
    dense = small_decoder().requires_grad_(False)
    assert EmbeddedEngine(dense, EXACT).generate(requests(samples=1))[0].routes is None
    plain, recorded = (
        EmbeddedEngine(model, dataclasses.replace(EXACT, routes=routes))._runner.block_bytes for routes in (False, True)
    )
    assert recorded - plain == EXACT.block * 3 * 4 * 2  # 3 layers, 4 experts of a token, int16
