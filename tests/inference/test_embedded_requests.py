"""The life of requests: other weights meanwhile, pauses, sleep, interruptions, another process, several adapters."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from builders.rollout_requests import GREEDY, SAMPLED, cache_of, check_same, requests, slowly
from builders.tiny_adapters import adapter_set, perturb

from danlu.core.errors import DataError, ModelError
from danlu.inference.blocks import BlockPool
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.recipe import sections

DRAWN = SamplingOptions(seed=3)


def decode(tokens):
    return "".join(f"{token}," for token in tokens)


def submitted(engine, asked, on_token=None):
    for request in asked:
        engine.submit(request, on_token)
    return engine


def finish(engine):
    """The rest of what was asked for, in order."""
    done = []
    while engine.unfinished:
        done += engine.step()
    return sorted(done, key=lambda one: (one.number, one.sample))


def test_an_update_midway_goes_on_with_the_new_weights(small_decoder):
    model, other = small_decoder(), small_decoder(seed=1)
    engine = submitted(EmbeddedEngine(model), requests(count=10))
    for _ in range(4):
        assert engine.step() == []
    engine.update(7, other.named_parameters())
    for request, completion in zip(requests(count=10), finish(engine), strict=True):
        assert completion.versions == [0] * 4 + [7] * 6
        begun = slowly(small_decoder(), requests(count=4)[request.number], guess=completion.tokens)[0]
        later = Request(0, (*request.prompt, *begun), GREEDY, 6)
        assert completion.tokens == begun + slowly(other, later, guess=completion.tokens[4:])[0]
    assert engine.version == 7 and engine.statistics.recomputed_tokens > 0


def test_weights_that_do_not_belong_to_the_model(small_decoder):
    engine = EmbeddedEngine(small_decoder())
    with pytest.raises(
        ModelError, match=r"no parameter 'layers.0.attention.q_prj.weight'\. Did you mean 'layers.0.att"
    ):
        engine.update(1, [("layers.0.attention.q_prj.weight", torch.zeros(2))])
    with pytest.raises(ModelError, match=r"norm.weight has the shape \[32\] in the model, and \[2\] in the update"):
        engine.update(1, [("norm.weight", torch.zeros(2))])
    assert engine.version == 0


def test_a_number_that_is_in_use_and_one_that_is_free_again(small_decoder):
    engine = submitted(EmbeddedEngine(small_decoder()), requests(count=2))
    with pytest.raises(DataError, match="prompt 2: a request with this number is unfinished"):
        engine.submit(requests()[2])
    with pytest.raises(DataError, match="prompt 5: two requests have this number"):
        engine.generate([Request(5, (1,)), Request(6, (1,)), Request(5, (2,))])
    finish(engine)
    assert len(engine.generate(requests(count=2))) == 4


def test_generate_beside_other_requests_returns_its_own(small_decoder):
    model = small_decoder()
    engine = submitted(EmbeddedEngine(model), requests(count=3))
    own = [Request(number, (9, 8), DRAWN, 12) for number in (11, 10)]
    check_same(engine.generate(own), EmbeddedEngine(model).generate(own))
    assert engine.unfinished == 4  # finished meanwhile, and returned by the next step
    check_same(engine.step(), EmbeddedEngine(model).generate(requests(count=3)))


def test_tokens_are_told_as_they_are_drawn(small_decoder):
    told = []
    engine = EmbeddedEngine(small_decoder(), decode=decode)
    submitted(engine, requests(DRAWN, 6, samples=2, top_logprobs=2), told.append)
    for completion in finish(engine):
        own = [new for new in told if (new.number, new.sample) == (completion.number, completion.sample)]
        assert [new.token for new in own] == completion.tokens and [new.logprob for new in own] == completion.logprobs
        assert "".join(new.text for new in own) == completion.text == decode(completion.tokens)
        assert [new.top for new in own] == completion.top and len(own[0].top) == 2
        assert [new.finish for new in own] == [None] * 5 + ["length"]


def test_pause_and_resume(small_decoder):
    model = small_decoder()
    expected = EmbeddedEngine(model).generate(requests(count=6))
    engine = submitted(EmbeddedEngine(model), requests(count=6))
    engine.step()
    assert engine.pause("keep") == engine.step() == [] and engine.unfinished == 4
    with pytest.raises(AssertionError, match="paused"):
        engine.generate([Request(9, (1,))])
    engine.resume()
    check_same(finish(engine), expected)
    submitted(engine, requests(count=6))
    engine.step()
    aborted = engine.pause("abort")
    assert [(one.tokens, one.finish) for one in aborted] == [(one.tokens[:1], "abort") for one in expected]
    engine.resume()
    assert engine.step() == [] and engine.unfinished == 0


def test_sleep_gives_memory_back_and_loses_nothing(small_decoder):
    model = small_decoder()
    engine = submitted(EmbeddedEngine(model), requests(DRAWN, 8))
    engine.step()
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.step()
    engine.update(3)
    engine.wake()
    done = finish(engine)
    expected = EmbeddedEngine(model).generate(requests(DRAWN, 8))
    assert [one.tokens for one in done] == [one.tokens for one in expected]
    assert done[0].versions == [0] + [3] * 7
    engine.close()
    assert engine.unfinished == 0


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_another_process_goes_on_where_this_one_was_killed(small_decoder, steps):
    model, asked = small_decoder(), requests(SAMPLED, 12, samples=2, top_logprobs=1)
    expected = EmbeddedEngine(model, decode=decode).generate(asked)
    engine = submitted(EmbeddedEngine(model, decode=decode), asked)
    returned = [completion for _ in range(steps) for completion in engine.step()]
    engine.abort(3)  # ended, but not yet returned: is not lost either
    state = json.loads(json.dumps(engine.state()))
    other = EmbeddedEngine(model, cache_of(model, 12, block=4), decode=decode)
    other.restore(state)
    assert other.unfinished == 8 - len(returned)
    done = finish(other)
    check_same(done[:6], expected[:6])
    assert [(one.tokens, one.finish) for one in done[6:]] == [(one.tokens[:steps], "abort") for one in expected[6:]]
    with pytest.raises(DataError, match="prompt 0: a request with this number is unfinished"):
        submitted(other, asked[:1]).restore(state)


class Interrupted(BaseException):
    """As Ctrl-C is."""


@pytest.mark.parametrize("stride", [pytest.param(61, marks=pytest.mark.slow), 211])
def test_interrupted_anywhere_nothing_is_lost_or_told_twice(small_decoder, stride):
    """The n-th line that runs within steps is interrupted, for n over a whole generation."""
    model, asked = small_decoder(), requests(SAMPLED, 4, prompts=[[3, 9, 4], [7]], samples=2)
    expected = EmbeddedEngine(model, decode=decode).generate(asked)

    def interrupt_at(place):
        engine, told, countdown = EmbeddedEngine(model, EngineOptions(block=2), decode=decode), [], [place]
        submitted(engine, asked, lambda new: told.append((new.number, new.sample, new.token)))

        def trace(frame, event, argument):
            code = frame.f_code  # Python handles no signal while `_take_done` and `step` return, but traces their lines
            if "/danlu/inference/" not in code.co_filename or code.co_name in ("_take_done", "step"):
                return None
            if event == "line":
                countdown[0] -= 1
                if countdown[0] == 0:
                    sys.settrace(None)
                    raise Interrupted
            return trace

        done = []
        while engine.unfinished:
            sys.settrace(trace if countdown[0] > 0 else None)
            try:
                done += engine.step()
            except Interrupted:
                pass
            finally:
                sys.settrace(None)
        check_same(sorted(done, key=lambda one: (one.number, one.sample)), expected)
        assert len(told) <= 16
        return countdown[0] <= 0

    place, count = 1, 0
    while interrupt_at(place):
        place, count = place + stride, count + 1
    assert count > 15, "the steps were interrupted at many places"


class SwitchedAdapters:
    """The adapters of a set, the first of which is active at first."""

    def __init__(self, adapters):
        self.adapters, self.names, self.uses = adapters, ("first", "second"), []

    def use(self, name):
        self.uses.append(name)
        self.adapters.activate(*self._stack(name))

    def virtual_token_ids(self, name):
        return self.adapters.virtual_token_ids_of(self._stack(name))

    def _stack(self, name):
        return {None: ("first",), "none": ()}.get(name, (name,))


def adapted(model, *kinds):
    adapters = adapter_set(model)
    for name, section, seed in zip(("first", "second"), kinds, (1, 2), strict=True):
        adapters.activate()
        adapters.add(name, section)
        perturb(adapters, name, seed)
    adapters.activate("first")
    return SwitchedAdapters(adapters)


LONG = [5 + number for number in range(20)]


LORAS = sections.Lora(rank=2), sections.Lora(rank=3)
SOFT_PROMPTS = sections.Prompt(tokens=4), sections.Prompt(tokens=4)
MIXED = sections.Prompt(tokens=3), sections.Prefix(tokens=5)


@pytest.mark.parametrize("kinds", [LORAS, MIXED], ids=["lora", "virtual-tokens"])
def test_several_adapters_at_once_are_each_alone(small_decoder, kinds):
    model = small_decoder()
    switched = adapted(model, *kinds)
    names = ["second", None, "none", "first", "second", "none"]
    asked = [Request(number, tuple(LONG), DRAWN, 8, adapter=name) for number, name in enumerate(names)]
    together = EmbeddedEngine(model, EngineOptions(block=4), adapters=switched).generate(asked)
    assert switched.adapters.active == ("first",)
    for request, completion in zip(asked, together, strict=True):
        switched.use(request.adapter)
        virtual = switched.virtual_token_ids(request.adapter)
        assert completion.tokens == slowly(model, request, 0, virtual, guess=completion.tokens)[0]
    # Control: each of them writes something else.
    same_draws = [Request(0, tuple(LONG), DRAWN, 8, adapter=name) for name in ("first", "second", "none")]
    engine = EmbeddedEngine(model, EngineOptions(block=4), adapters=switched)
    assert len({tuple(engine.generate([request])[0].tokens) for request in same_draws}) == 3
    with pytest.raises(DataError, match="prompt 0: no adapter 'third'; there are first, second, none"):
        engine.generate([Request(0, (1,), adapter="third")])


def test_the_active_adapter_is_back_after_an_error(small_decoder):
    model = small_decoder()
    switched = adapted(model, *LORAS)
    engine = EmbeddedEngine(model, adapters=switched)
    model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        engine.generate([Request(0, (1,), adapter="second")])
    assert switched.adapters.active == ("first",)


def test_virtual_tokens_are_part_of_what_is_cached(small_decoder):
    model, asked = small_decoder(), requests(count=6, prompts=[LONG])
    for virtual in ((), (5, 6)):
        engine = EmbeddedEngine(model, EngineOptions(block=4), virtual_token_ids=virtual)
        for _ in range(2):
            assert engine.generate(asked)[0].tokens == slowly(model, asked[0], virtual_token_ids=virtual)[0]
        assert engine.statistics.prompt_tokens_reused == (len(virtual) + 19) // 4 * 4


def answers_after_another_adapter(model, kinds):
    """Of the second adapter, to a prompt that the first one has answered."""
    switched = adapted(model, *kinds)
    engine = EmbeddedEngine(model, EngineOptions(block=4), adapters=switched)
    engine.generate([Request(0, tuple(LONG), DRAWN, 8, adapter="first")])
    request = Request(1, tuple(LONG), DRAWN, 8, adapter="second")
    completion = engine.generate([request])[0]
    switched.use("second")
    return completion, slowly(model, request, virtual_token_ids=switched.virtual_token_ids("second"))


def test_nothing_of_another_adapter_is_reused(small_decoder):
    completion, (tokens, logprobs) = answers_after_another_adapter(small_decoder(), LORAS)
    assert completion.tokens == tokens and completion.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_control_a_prefix_cache_that_adapters_share_is_noticed(small_decoder, monkeypatch):
    monkeypatch.setattr("danlu.inference.embedded.root_digest", lambda adapter, version: b"root")
    completion, (tokens, logprobs) = answers_after_another_adapter(small_decoder(), LORAS)
    assert completion.tokens != tokens or completion.logprobs != pytest.approx(logprobs, abs=1e-4)


def test_nothing_of_other_virtual_tokens_is_reused_even_where_the_root_is_the_same(small_decoder, monkeypatch):
    monkeypatch.setattr("danlu.inference.embedded.root_digest", lambda adapter, version: b"root")
    completion, (tokens, logprobs) = answers_after_another_adapter(small_decoder(), SOFT_PROMPTS)
    assert completion.tokens == tokens and completion.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_control_virtual_tokens_that_are_not_in_the_key_are_noticed(small_decoder, monkeypatch):
    monkeypatch.setattr("danlu.inference.embedded.root_digest", lambda adapter, version: b"root")
    monkeypatch.setattr("danlu.inference.sequence_state.chain_hash", lambda parent, tokens: parent + b"x")
    monkeypatch.setattr(BlockPool, "find", lambda pool, digest, tokens: pool._by_digest.get(digest, (None,))[0])
    completion, (tokens, logprobs) = answers_after_another_adapter(small_decoder(), SOFT_PROMPTS)
    assert completion.tokens != tokens or completion.logprobs != pytest.approx(logprobs, abs=1e-4)
