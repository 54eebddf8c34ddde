"""Conversations: what is cached between turns changes the cost of an answer and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders.generation import generate

from danlu.core.errors import DataError
from danlu.inference.chat import ChatFormat, Conversation
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import SamplingOptions
from danlu.models.rope_config import DynamicScaling

GREEDY = SamplingOptions(temperature=0)
USER, ASSISTANT, SYSTEM = 58, 59, 60
STOPS = frozenset([USER, ASSISTANT, SYSTEM])


def render(messages):
    """A template over letters: role token, content, and the assistant's mark at the end."""
    roles = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM}
    tokens = [token for m in messages for token in (roles[m["role"]], *(ord(c) - 64 for c in m["content"]))]
    return [*tokens, ASSISTANT]


def decode(tokens):
    return "".join(chr(token + 64) for token in tokens if token < USER)


class Talk(Conversation):
    """A conversation that tells how many tokens of its last prompt were computed; blocks have one token each."""

    def __init__(
        self, model, options=GREEDY, *, max_new_tokens=9, block=1, virtual_token_ids=(), adapters=None, system=None
    ):
        self.model = model
        self.engine = EmbeddedEngine(
            model,
            EngineOptions(block=block),
            adapters=adapters,
            virtual_token_ids=() if adapters else virtual_token_ids,
        )
        context = model.config.context_length
        chat_format = ChatFormat(render, decode, max_new_tokens, context, STOPS, virtual_tokens=len(virtual_token_ids))
        super().__init__(self.engine, chat_format, options, system=system)
        self.computed = 0

    def ask(self, text, on_text=None):
        before = self.engine.statistics.prompt_tokens_computed
        try:
            return super().ask(text, on_text)
        finally:
            self.computed = self.engine.statistics.prompt_tokens_computed - before


@pytest.fixture
def talk(small_decoder):
    def build(options=GREEDY, context=512, **more):
        return Talk(small_decoder("window", context=context), options, **more)

    return build


def fresh(small_decoder, messages, max_new_tokens=9):
    """The same turn by an engine that has seen none of the earlier ones."""
    model = small_decoder("window")
    return generate(model, [render(messages)], GREEDY, max_new_tokens, STOPS, decode=decode)[0]


def test_every_turn_equals_one_without_history_in_the_cache(talk, small_decoder):
    chat, messages = talk(system="BE"), [{"role": "system", "content": "BE"}]
    for text in ("HELLO", "AND", "WHY"):
        messages.append({"role": "user", "content": text})
        shown = []
        got = chat.ask(text, shown.append)
        expected = fresh(small_decoder, messages)
        assert got.tokens == expected.tokens and got.text == expected.text == "".join(shown) != ""
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        messages.append({"role": "assistant", "content": got.text})
    assert chat.messages == messages[1:]


def test_frequencies_that_go_by_the_length_are_those_of_the_conversation_so_far(small_decoder):
    model = small_decoder(context=16, rope_scaling=DynamicScaling(8.0))
    chat, messages = Talk(model, max_new_tokens=5), []
    for text in ("HELLO", "AND", "UNDO", "WHYNOT", "SO"):  # the first fits into 16 tokens, the others do not
        if text == "UNDO":  # back to a conversation that fits, after one that does not
            chat.undo()
            messages = messages[:-2]
            continue
        messages.append({"role": "user", "content": text})
        got = chat.ask(text)
        (expected,) = generate(model, [render(messages)], GREEDY, 5, STOPS, decode=decode)
        assert got.tokens == expected.tokens
        assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        messages.append({"role": "assistant", "content": got.text})
    assert chat.computed == len(render(messages[:-1])), "nothing of a shorter conversation is kept"


class SoftPrompts:
    """An `EngineAdapters` whose adapters differ in their virtual tokens alone."""

    names = ("soft",)

    def use(self, name):
        pass

    def virtual_token_ids(self, name):
        return () if name == "none" else (56, 57)


def test_tokens_before_a_conversation_are_read_once_and_may_change_with_the_adapter(talk, small_decoder):
    def expected(messages, virtual_token_ids):
        model = small_decoder("window")
        return generate(model, [render(messages)], GREEDY, 9, STOPS, virtual_token_ids=virtual_token_ids)[0]

    chat = talk(virtual_token_ids=(56, 57), adapters=SoftPrompts())
    first, second = ({"role": "user", "content": text} for text in ("HELLO", "AND"))
    got = chat.ask("HELLO")
    assert got.tokens == expected([first], (56, 57)).tokens != expected([first], ()).tokens
    assert chat.computed == 2 + len("HELLO") + 2
    history = [*chat.messages, second]
    assert chat.ask("AND").tokens == expected(history, (56, 57)).tokens
    assert chat.computed == 1 + 1 + len("AND") + 1  # as without them
    chat.undo()
    soft = chat._format
    chat.adapter_changed(replace(soft, adapter="none", virtual_tokens=0))
    assert chat.ask("AND").tokens == expected(history, ()).tokens
    assert chat.computed == len(render(history)), "nothing of another adapter's is used"
    chat.undo()
    chat.adapter_changed(soft)
    assert chat.ask("AND").tokens == expected(history, (56, 57)).tokens
    assert chat.computed == 1, "what it had cached itself is still there"


@pytest.mark.parametrize("block", [1, 4])
def test_only_new_tokens_are_read(talk, block):
    chat = talk(block=block)
    first = chat.ask("HELLO")
    assert chat.computed == len("HELLO") + 2
    assert first.finish == "length"
    known = len("HELLO") + 2 + len(first.tokens) - 1  # the answer's last token was never run through the model
    chat.ask("AND")
    whole = known // block * block  # blocks that are not full are read again
    assert chat.computed == known - whole + 1 + 1 + len("AND") + 1  # then user mark, question, assistant mark
    chat.reset()
    chat.ask("HELP")
    assert chat.computed == len("P") + 1  # the first four tokens (mark, H, E, L) are still right


def test_changed_history_is_read_again_from_where_it_differs(talk, small_decoder):
    chat = talk()
    chat.ask("HELLO")
    chat.messages[0]["content"] = "HALLO"
    got = chat.ask("AND")
    assert chat.computed == len(render([*chat.messages[:2], {"role": "user", "content": "AND"}])) - 2
    assert got.tokens == fresh(small_decoder, [*chat.messages[:2], {"role": "user", "content": "AND"}]).tokens


def test_undo_reset_and_system(talk, small_decoder):
    chat = talk()
    assert not chat.undo()
    first = chat.ask("HELLO")
    chat.ask("AND")
    assert chat.undo() and [m["content"] for m in chat.messages] == ["HELLO", first.text]
    assert chat.undo() and chat.messages == [] and not chat.undo()
    assert chat.ask("HELLO").tokens == first.tokens
    chat.reset()
    chat.system = "BE"
    expected = fresh(small_decoder, [{"role": "system", "content": "BE"}, {"role": "user", "content": "HELLO"}])
    assert chat.ask("HELLO").tokens == expected.tokens != first.tokens


@pytest.mark.parametrize("when", [1, 4])
def test_an_interrupted_answer_stays_as_far_as_it_was_said(talk, small_decoder, when):
    chat, pieces = talk(), []

    def on_text(piece):
        pieces.append(piece)
        if len(pieces) == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("HELLO", on_text)
    assert chat.messages == [{"role": "user", "content": "HELLO"}, {"role": "assistant", "content": "".join(pieces)}]
    expected = fresh(small_decoder, [*chat.messages, {"role": "user", "content": "AND"}])
    got = chat.ask("AND")
    assert got.tokens == expected.tokens
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_interrupted_before_the_first_word_leaves_no_turn(talk, small_decoder, monkeypatch):
    chat = talk()
    first = chat.ask("HELLO")
    model, forward = chat.model, chat.model.layers["2"].forward

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.layers["2"], "forward", interrupted)  # midway: two layers have written to the cache
    with pytest.raises(KeyboardInterrupt):
        chat.ask("AND")
    monkeypatch.setattr(model.layers["2"], "forward", forward)
    assert [m["content"] for m in chat.messages] == ["HELLO", first.text]
    expected = fresh(small_decoder, [*chat.messages, {"role": "user", "content": "WHY"}])
    assert chat.ask("WHY").tokens == expected.tokens


def test_asking_again_draws_again(talk):
    chat = talk(SamplingOptions(seed=3))
    first = chat.ask("HELLO").tokens
    chat.undo()
    assert chat.ask("HELLO").tokens != first
    assert talk(SamplingOptions(seed=3)).ask("HELLO").tokens == first


def test_full_context(talk):
    chat = talk(context=20)
    assert chat.ask("HELLO").finish == "length"
    with pytest.raises(DataError, match=r"the conversation now takes 2[0-9] tokens, and the model sees 20 at most"):
        chat.ask("AND")
    assert len(chat.messages) == 2  # nothing lost
    chat.reset()
    assert chat.ask("ABCDEFGHIJKLM").finish == "context"
    soft = talk(context=20, virtual_token_ids=(56, 57))
    with pytest.raises(DataError, match=r"the conversation now takes 20 tokens, and the model sees 20 at most"):
        soft.ask("A" * 16)
    assert soft.ask("A" * 15).finish == "context"
