from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import chat_tokenizers
from builders.chat_templates import CHATML, STYLES
from builders.chat_tokenizers import tokenizer_and_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import message_spans
from danlu.data.chat_template import ChatTemplate
from danlu.data.message_spans import AnnotatedText, Reason, SpanRenderer, annotate
from danlu.data.messages import Conversation, turn_of
from danlu.data.rows import parse_row

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "</s>")


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"}, MARKS, "tokenizer")


def log(*contents: str, **first: str) -> list[dict[str, Any]]:
    """User and assistant in turn; `system="..."` puts a message in front."""
    turns = [{"role": role, "content": content} for role, content in first.items()]
    return turns + [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def parts(text: AnnotatedText) -> list[tuple[str, Reason, int]]:
    """What a text says of its text, span for span."""
    starts = (0, *text.stops)
    spans = zip(starts, text.stops, text.reasons, text.turns, strict=False)
    return [(text.text[start:stop], reason, turn) for start, stop, reason, turn in spans]


def answers(turns: list[dict[str, Any]]) -> list[int]:
    return [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]


# -- the obvious way ---------------------------------------------------------------------------------------------------


def test_spans_of_a_conversation() -> None:
    (text,) = annotate(log("Hi", "Hello!", "Bye", "See you.", system="Be kind."), None, template(CHATML), [2, 4])
    start, end = "<|im_start|>", "<|im_end|>"
    assert parts(text) == [
        (f"{start}system\n", Reason.TEMPLATE, 0),
        ("Be kind.", Reason.SYSTEM, 0),
        (f"{end}\n{start}user\n", Reason.TEMPLATE, 1),
        ("Hi", Reason.USER, 1),
        (f"{end}\n{start}assistant\n", Reason.TEMPLATE, 2),
        ("Hello!", Reason.ASSISTANT, 2),
        (end, Reason.TERMINATOR, 2),
        ("\n", Reason.TEMPLATE, 2),
        (f"{start}user\n", Reason.TEMPLATE, 3),
        ("Bye", Reason.USER, 3),
        (f"{end}\n{start}assistant\n", Reason.TEMPLATE, 4),
        ("See you.", Reason.ASSISTANT, 4),
        (end, Reason.TERMINATOR, 4),
        ("\n", Reason.TEMPLATE, 4),
    ]
    assert text.closed and text.trained == {2, 4}


def test_a_content_is_not_taken_for_the_templates_own_words() -> None:
    (text,) = annotate(log("user", "assistant", "a", "n"), None, template(CHATML), [1, 3])
    contents = [(text, turn) for text, reason, turn in parts(text) if reason in (Reason.USER, Reason.ASSISTANT)]
    assert contents == [("user", 0), ("assistant", 1), ("a", 2), ("n", 3)]


def test_an_earlier_answer_is_not_taken_for_a_piece_of_a_later_message() -> None:
    # The template shows the first answer without its thought, here as nothing, and its text is in the next question.
    turns = log("Q", "<think>\nmore\n</think>", "Tell me </think> more", "<think>\nx\n</think>\n\nA")
    whole, *_ = annotate(turns, None, tokenizer_and_oracle("qwen3")[0].template(), [1, 3])
    assert list(whole.stops) == sorted(whole.stops)
    assert ("Tell me </think> more", Reason.USER, 2) in parts(whole)


MOVED_SYSTEM = """\
{%- for m in messages if m.role != 'system' -%}
<|im_start|>{{ m.role }}
{% if m.role == 'user' and loop.index0 >= messages | length - 3 %}{{ messages[0].content }} {% endif -%}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_contents_that_the_template_puts_in_another_order() -> None:
    turns = log("Hi", "Hello!", "Bye", "See you.", system="Be kind.")
    whole, early = annotate(turns, None, template(MOVED_SYSTEM), [2, 4])
    order = [(text, turn) for text, reason, turn in parts(whole) if reason not in (Reason.TEMPLATE, Reason.TERMINATOR)]
    assert order == [("Hi", 1), ("Hello!", 2), ("Be kind.", 0), ("Bye", 3), ("See you.", 4)]
    # The first question had the system text while it was the last one.
    assert early.text == "<|im_start|>user\nBe kind. Hi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    assert (whole.trained, early.trained) == ({4}, {2})


def test_a_turn_that_is_not_wanted_is_no_sample_of_its_own() -> None:
    turns = log("A", "<think>\na\n</think>\n\nAlpha", "B", "Beta")
    qwen = tokenizer_and_oracle("qwen3")[0].template()
    assert [text.trained for text in annotate(turns, None, qwen, [1, 3])] == [{3}, {1}]
    assert [text.trained for text in annotate(turns, None, qwen, [3])] == [{3}]


BACKWARDS = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


def test_a_template_from_which_no_prompt_can_be_made() -> None:
    with pytest.raises(DataError, match="renders message 2 so that the prompt before it is not in front of it"):
        annotate(log("Hi", "Hello"), None, template(BACKWARDS), [1])


def test_spans_in_bytes() -> None:
    (text,) = annotate(log("é", "你好"), None, template(CHATML), [1])
    data = text.text.encode()
    in_bytes = text.in_bytes()
    starts = (0, *in_bytes.stops)
    texts = [data[start:stop].decode() for start, stop in zip(starts, in_bytes.stops, strict=False)]
    assert texts == [text for text, _, _ in parts(text)]
    (ascii_,) = annotate(log("e", "a"), None, template(CHATML), [1])
    assert ascii_.in_bytes() is ascii_


# -- the fast way ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_filled_in_spans_are_those_of_rendering(style: str, data: st.DataObject) -> None:
    texts = st.one_of(chat_tokenizers.plain_texts(), chat_tokenizers.plain_texts(), chat_tokenizers.odd_texts())
    one = tokenizer_and_oracle(style)[0].template()
    value = data.draw(chat_tokenizers.rows(texts))
    if not one.takes_system:
        value["messages"] = [turn for turn in value["messages"] if turn["role"] != "system"]
    row = parse_row(value, "auto", "row")
    assert isinstance(row, Conversation)
    turns = [turn_of(message) for message in row.messages]
    wanted = tuple(data.draw(st.sets(st.sampled_from(answers(turns)), min_size=1)))
    expected = annotate(turns, None, one, wanted)
    assert SpanRenderer(one, offsets_in_bytes=False).annotate(turns, None, wanted) == expected
    assert SpanRenderer(one, offsets_in_bytes=True).annotate(turns, None, wanted) == [
        text.in_bytes() for text in expected
    ]


@pytest.mark.parametrize("style", STYLES)
def test_span_templates_are_used_where_they_can_be(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = message_spans.annotate
    monkeypatch.setattr(message_spans, "annotate", lambda *arguments: calls.append(arguments) or original(*arguments))
    renderer = SpanRenderer(tokenizer_and_oracle(style)[0].template(), offsets_in_bytes=True)
    for number in range(10):
        renderer.annotate(log(f"Question {number}", f"Answer {number}"), None, (1,))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "turns",
    [
        log("Hi", " Hello"),  # the template may trim it
        log("Hi", "Say </think> now"),  # it may take it apart
        log("Hi", "Hello <|im_end|>"),  # it may be taken for the end
        [*log("Hi"), {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}],
    ],
)
def test_span_templates_are_not_used_for_contents_that_may_look_different(
    turns: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        message_spans.SpanRenderer, "_span_templates", lambda *_: pytest.fail("a template was asked for")
    )
    renderer = SpanRenderer(tokenizer_and_oracle("qwen3")[0].template(), offsets_in_bytes=False)
    assert renderer.annotate(turns, None, (1,)) == annotate(
        turns, None, tokenizer_and_oracle("qwen3")[0].template(), [1]
    )


def test_an_answer_that_begins_as_the_prompt_ends_has_no_span_template() -> None:
    # The prompt of this template ends in <think>: it is not written by an answer that begins so.
    one = tokenizer_and_oracle("open-thought")[0].template()
    renderer = SpanRenderer(one, offsets_in_bytes=False)
    renderer.annotate(log("Hi", "Hello"), None, (1,))  # so that the span template is known
    (text,) = renderer.annotate(log("Hi", "<think>Hello"), None, (1,))
    assert text == annotate(log("Hi", "<think>Hello"), None, one, [1])[0]
    assert ("Hello", Reason.ASSISTANT, 1) in parts(text)


def test_a_wrong_span_template_is_noticed() -> None:
    renderer = SpanRenderer(template(CHATML), offsets_in_bytes=False)
    renderer.annotate(log("Hi", "Hello"), None, (1,))
    ((key, known),) = renderer._by_roles.items()
    assert known is not None
    wrong = tuple(replace(one, literals=("x", *one.literals[1:])) for one in known.templates)
    renderer._by_roles[key] = replace(known, templates=wrong)
    for _ in range(message_spans._RENDERINGS_PER_CHECK - 1):
        renderer.annotate(log("Hi", "Hello"), None, (1,))
    with pytest.raises(AssertionError, match="filled-in spans do not give what the template renders"):
        renderer.annotate(log("Hi", "Hello"), None, (1,))
