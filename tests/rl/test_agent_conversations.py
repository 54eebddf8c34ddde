"""Which ids an agent's question goes on from: those that were drawn, or a branch, by the messages that it repeats."""

from __future__ import annotations

import pytest
from builders.chat_templates import QWEN3
from builders.tiny_world import tiny_world

from danlu.data.tokenizer import load_tokenizer
from danlu.inference.request import Completion
from danlu.rl.agent_conversations import AgentConversations, message_key
from danlu.rl.turn_rendering import TurnRenderer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(tiny_world().tokenizer))


def conversations_with(tokenizer):
    end = frozenset(tokenizer.end_of_turn_ids)
    return AgentConversations(TurnRenderer(tokenizer, end, silent_ids=end))


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def drawn_ids(tokenizer, text):
    """Letter by letter, which no tokenizer writes a text as, and the end token."""
    return [token for letter in text for token in tokenizer.encode(letter)] + [tokenizer.end_of_turn_ids[0]]


def ask(conversations, messages, text, tools=(), reply=None):
    """Asks, and has it answered with a text. Returns the question and what was drawn."""
    question = conversations.ask(messages, tools)
    prompt = question.prompt
    tokens = drawn_ids(conversations.renderer.tokenizer, text)
    values = [-1.0] * len(tokens)
    completion = Completion(0, 0, tokens, values, values, None, [0] * len(tokens), text, "stop")
    conversations.answer(question, completion, reply or said(text))
    return prompt, tokens


FIRST = [user("Which door?")]
SECOND = [*FIRST, said("the left"), user("closed")]


def test_a_history_that_is_repeated_goes_on_from_the_ids_that_were_drawn(tokenizer):
    conversations = conversations_with(tokenizer)
    prompt, tokens = ask(conversations, FIRST, "the left")
    assert tokenizer.encode("the left") != tokens[:-1]  # else nothing would be shown
    second, _ = ask(conversations, SECOND, "right")
    assert second[: len(prompt) + len(tokens)] == (*prompt, *tokens)
    added = tokenizer.decode(second[len(prompt) + len(tokens) :])
    assert added == "\n<|im_start|>user\nclosed<|im_end|>\n<|im_start|>assistant\n"
    (segment,), completions = conversations.segments()
    assert segment.prompt == prompt and len(completions) == 2
    trained = [token for token, drawn in zip(segment.tokens, segment.drawn, strict=True) if drawn]
    assert trained == [token for completion in completions for token in completion.tokens]


@pytest.mark.parametrize(
    "changed",
    [
        [user("Which window?"), said("the left"), user("closed")],
        [*FIRST, said("the right"), user("closed")],
        [*FIRST, said("the  left"), user("closed")],
        [{"role": "system", "content": "Be brief."}, *SECOND],
        [*FIRST, user("closed")],
    ],
)
def test_a_changed_message_begins_a_branch(tokenizer, changed):
    conversations = conversations_with(tokenizer)
    prompt, tokens = ask(conversations, FIRST, "the left")
    second, _ = ask(conversations, changed, "right")
    assert second[: len(prompt) + len(tokens)] != (*prompt, *tokens)
    assert list(second) == tokenizer.encode(tokenizer.template().render(changed, prompt=True))
    first, other = conversations.segments()[0]
    assert (first.prompt, other.prompt) == (prompt, second)
    assert first.tokens == tuple(tokens) and all(other.drawn)


def test_clients_may_trim_answers_and_add_keys(tokenizer):
    conversations = conversations_with(tokenizer)
    ask(conversations, FIRST, " the left ")
    changed = [*FIRST, said("the left", refusal=None, annotations=[]), user("closed")]
    ask(conversations, changed, "right")
    assert len(conversations.segments()[0]) == 1


def test_a_question_that_is_asked_twice_begins_a_branch_from_the_drawn_ids(tokenizer):
    conversations = conversations_with(tokenizer)
    prompt, tokens = ask(conversations, FIRST, "the left")
    ask(conversations, SECOND, "right")
    again, _ = ask(conversations, [*SECOND[:2], user("locked")], "none")
    segments, completions = conversations.segments()
    assert [segment.prompt for segment in segments] == [prompt, again]
    assert again[: len(prompt) + len(tokens)] == (*prompt, *tokens)  # in the branch they are not trained once more
    assert sum(sum(segment.drawn) for segment in segments) == sum(len(each.tokens) for each in completions)
    ask(conversations, SECOND, "right")
    assert len(conversations.segments()[0]) == 3


def test_several_conversations_of_an_agent_are_told_apart(tokenizer):
    conversations = conversations_with(tokenizer)
    other = [user("Summarise.")]
    ask(conversations, FIRST, "the left")
    ask(conversations, other, "short")
    ask(conversations, SECOND, "right")
    ask(conversations, [*other, said("short"), user("shorter")], "s")
    segments, completions = conversations.segments()
    assert [sum(segment.drawn) for segment in segments] == [
        len(completions[0].tokens) + len(completions[1].tokens),
        len(completions[2].tokens) + len(completions[3].tokens),
    ]
    assert [completion.text for completion in completions] == ["the left", "right", "short", "s"]


def test_a_template_that_rewrites_history_begins_a_branch(tokenizer, tmp_path):
    file = tmp_path / "qwen3.jinja"
    file.write_text(QWEN3)
    rewriting = load_tokenizer(str(tiny_world().tokenizer), str(file))
    thought = "<think>\nhm\n</think>\n\nleft"
    for template, branches in ((rewriting, 2), (tokenizer, 1)):  # the second is a control
        conversations = conversations_with(template)
        ask(conversations, FIRST, thought)
        second, _ = ask(conversations, [*FIRST, said(thought), user("closed")], "right")
        assert len(conversations.segments()[0]) == branches
        assert ("hm" in template.decode(second)) == (branches == 1)


def test_calls_of_tools_are_known_again(tokenizer, tmp_path):
    file = tmp_path / "qwen3.jinja"
    file.write_text(QWEN3)
    conversations = conversations_with(load_tokenizer(str(tiny_world().tokenizer), str(file)))
    tools = ({"type": "function", "function": {"name": "door"}},)
    call = {"id": "abc", "type": "function", "function": {"name": "door", "arguments": {"n": 1}}}
    text = '<tool_call>\n{"name": "door", "arguments": {"n":  1}}\n</tool_call>'
    prompt, tokens = ask(conversations, FIRST, text, tools, said("", tool_calls=[call]))
    result = {"role": "tool", "content": "closed", "tool_call_id": "abc"}
    second, _ = ask(conversations, [*FIRST, said("", tool_calls=[{**call, "id": "other"}]), result], "right", tools)
    assert second[: len(prompt) + len(tokens)] == (*prompt, *tokens)
    wrong = {**call, "function": {"name": "door", "arguments": {"n": 2}}}
    third, _ = ask(conversations, [*FIRST, said("", tool_calls=[wrong]), result], "right", tools)  # control
    assert third[: len(prompt) + len(tokens)] != (*prompt, *tokens)


def test_draws_follow_from_what_is_asked_and_how_often(tokenizer):
    row_prompt = tuple(tokenizer.encode(tokenizer.template().render(FIRST, prompt=True)))

    def numbers(*asked):
        conversations = conversations_with(tokenizer)
        return [conversations.ask(messages, ()).draw_number(7, row_prompt) for messages in asked]

    window = [user("Which window?")]
    assert numbers(FIRST)[0] == 7  # as without an agent
    first, again, other = numbers(FIRST, FIRST, window)
    assert len({first, again, other}) == 3 and all(0 <= number < 2**63 for number in (first, again, other))
    assert len(set(numbers(window, window, window))) == 3
    assert numbers(window, FIRST, FIRST) == [other, first, again]  # in whatever order
    conversations = conversations_with(tokenizer)
    conversations.take_back(conversations.ask(FIRST, ()))
    assert conversations.ask(FIRST, ()).draw_number(7, row_prompt) == 7


def test_messages_of_others_are_known_by_all_that_they_say():
    assert message_key(user("a")) != message_key({**user("a"), "name": "Bo"}) != message_key(user("b"))
    assert message_key(said("a ")) == message_key(said("a", tool_calls=[])) != message_key(said("b"))
