from __future__ import annotations

import resource
import signal
from datetime import date
from typing import Any

import pytest
from builders import chat_tokenizers
from builders.chat_templates import (
    CHATML,
    GEMMA,
    LLAMA3,
    MISTRAL,
    NO_TERMINATOR,
    PHI3,
    QWEN3,
    RAISES,
    STYLES,
    TERMINATORS,
)
from builders.chat_tokenizers import tokenizer_and_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import resource_limits
from danlu.data.chat_template import ChatTemplate
from danlu.data.messages import Conversation, turn_of
from danlu.data.rows import parse_row

MARKS = ("<|im_start|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<end_of_turn>", "</s>")
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def template(source: str, name: str = "tokenizer") -> ChatTemplate:
    return ChatTemplate(source, SPECIALS, MARKS, name)


# -- rendering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_texts_are_those_of_transformers(style: str, data: st.DataObject) -> None:
    row = parse_row(data.draw(chat_tokenizers.rows(tools=style == "qwen3")), "auto", "row")
    assert isinstance(row, Conversation)
    turns = [turn_of(message) for message in row.messages]
    tokenizer, oracle = tokenizer_and_oracle(style)
    for prompt in (False, True):

        def expected(prompt: bool = prompt) -> Any:
            return oracle.apply_chat_template(turns, row.tools, tokenize=False, add_generation_prompt=prompt)

        if style == "gemma" and turns[0]["role"] == "system":
            with pytest.raises(DataError, match="System role not supported"):
                tokenizer.template(bool(row.tools)).render(turns, row.tools, prompt)
        else:
            assert tokenizer.template(bool(row.tools)).render(turns, row.tools, prompt) == expected()


LANGUAGE = {
    "json": "{{ messages | tojson }}{{ {'b': '<é>', 'a': 1} | tojson(indent=2, sort_keys=true) }}",
    "separators": "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "namespace of a dict": "{% set ns = namespace({'self': 1}, b=2) %}{{ ns.self + ns.b }}",
    "white space": "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}",
    "nothing given": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}\n{% endgeneration %}{% endfor %}",
    "unknown names": "{{ enable_thinking is defined }}{{ something }}{{ dict(a=1).a }}",
}


@pytest.mark.parametrize("what", LANGUAGE)
def test_the_language_is_that_of_transformers(what: str) -> None:
    _, oracle = tokenizer_and_oracle("chatml")
    expected = oracle.apply_chat_template(TURNS, chat_template=LANGUAGE[what], tokenize=False)
    specials = oracle.special_tokens_map
    assert ChatTemplate(LANGUAGE[what], specials, MARKS, "tokenizer").render(TURNS) == expected


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "SecurityError: a namespace has no attribute _x"),
        ("{% set ns = namespace(__x=1) %}", "SecurityError"),
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "TypeError"),
        ("{{ ['a', 'b'] | random }}", "TemplateError: it draws at random"),
        ("{{ lipsum(1) }}", "TemplateError: it draws at random"),
    ],
)
def test_a_template_that_fails_or_reaches_out(source: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^the chat template refuses this conversation: {problem}"):
        template(source).render(TURNS)


def test_the_date_is_the_one_given() -> None:
    dated = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", SPECIALS, MARKS, "tokenizer", date(2024, 7, 26))
    assert dated.render(TURNS) == "26 Jul 2024 00:00"
    now = template("{{ strftime_now('%Y') }}")
    assert int(now.render(TURNS)) >= 2026


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "line 1: Expected an expression, got 'end of statement block'"),
        ("ok\n{% for m in messages %}", "line 2: Unexpected end of template.*'endfor'"),
        ("{{ messages | nonsense }}", "line 1: No filter named 'nonsense'"),
        ("{% generation %}", "line 1: .*endgeneration"),
    ],
)
def test_a_template_that_does_not_compile(source: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^chat\.jinja: the chat template does not compile: {problem}.*model\.chat_"):
        template(source, "chat.jinja")


MANY = "range(99999)"
ENDLESS = {
    "loops": (f"{{% for i in {MANY} %}}" * 3 + "{% endfor %}" * 3, "it goes through its loops without end"),
    "filtered loops": (
        f"{{% for i in {MANY} if false %}}{{% endfor %}}" * 99,
        "it goes through its loops without end",
    ),
    "a macro": ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "it calls itself without end"),
    "output": (
        f"{{% for i in {MANY} %}}{{{{ 'word' * 100 }}}}{{% endfor %}}",
        "it writes more than 8,388,928 characters",
    ),
    "a long text": ("{{ 'word' * 10 ** 9 }}", "it makes something of 4,000,000,000 characters"),
    "a long list": ("{{ (messages * 10 ** 9) | length }}", "it makes something of 2,000,000,000 characters"),
    "a large number": ("{{ 9 ** (9 ** 9) }}", "it makes something of .* characters"),
    "a text that doubles": (
        "{% set held = namespace(text='word') %}{% for i in range(60) %}{% set held.text = held.text ~ held.text %}"
        "{% endfor %}{{ held.text | length }}",
        "it needs more than 0.0625 GiB of memory",
    ),
    "a filter": ("{{ 'word' | center(10 ** 10) }}", "it needs more than 0.0625 GiB of memory"),
    "lists": (f"{{% for i in {MANY} %}}{{{{ ({MANY} | list) == 1 }}}}{{% endfor %}}", "it works for more than 0.2 s"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_template_without_end(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, problem = ENDLESS[what]
    monkeypatch.setattr(resource_limits, "MEMORY_BYTES", 2**26)
    if what == "lists":
        monkeypatch.setattr(resource_limits, "SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getitimer(signal.ITIMER_VIRTUAL)
    said = (
        rf"^the chat template does not come to an end with this conversation: {problem}\. Correct it, or name another"
    )
    with pytest.raises(DataError, match=said):
        template(source).render(TURNS)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getitimer(signal.ITIMER_VIRTUAL)) == before
    assert template("{{ messages[0].content }}").render(TURNS) == "Hi", "the next one has limits of its own"


def test_what_is_long_but_comes_to_an_end() -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 500
    each = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}" * 3
    assert template(each).render(turns) == "", "3 million passes, for 1,000 messages"
    long = [{"role": "user", "content": "word" * 3_000_000}]
    assert len(template("{{ messages[0].content }}" * 3).render(long)) == 36_000_000
    assert template("{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 7 * 6 }}{{ 2 ** 10 }}{{ 2 ** 0.5 > 1 }}").render(TURNS) == (
        "ababab[1, 1]421024True"
    )


def test_a_template_that_is_too_large_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="chat.jinja: the chat template does not compile: it is nested too deeply"):
        template("{{ " + "(" * 5000 + ")" * 5000 + " }}", "chat.jinja")


# -- what a template can express ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_terminators(style: str) -> None:
    found = tokenizer_and_oracle(style)[0].template().terminators
    end = TERMINATORS.get(style)
    assert found == (("<|end|>", "</s>") if style == "phi3" else (end,) if end else ())


NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + CHATML


def test_terminators_of_a_template_that_needs_a_system_message() -> None:
    assert template(NEEDS_SYSTEM).terminators == ("<|im_end|>",)


def test_a_template_that_takes_nothing_says_so() -> None:
    problem = r"^a/tokenizer: not even a question and its answer can be rendered: .*this template takes nothing"
    with pytest.raises(DataError, match=problem):
        _ = template(RAISES, "a/tokenizer").terminators


@pytest.mark.parametrize(
    ("source", "system", "tools", "calls"),
    [
        (CHATML, True, False, False),
        (GEMMA, False, False, False),
        (LLAMA3, True, False, False),
        (MISTRAL, False, False, False),  # it shows one only while no answer follows the question
        (NO_TERMINATOR, True, False, False),
        (QWEN3, True, True, True),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", False, False, False),
    ],
)
def test_what_it_has_a_place_for(source: str, system: bool, tools: bool, calls: bool) -> None:
    one = template(source)
    assert (one.takes_system, one.takes_tools, one.takes_calls) == (system, tools, calls)


@pytest.mark.parametrize(
    ("text", "closes"),
    [("", True), ("<|im_end|>\n", True), (" \n", True), ("<|im_end|> x", False), ("<|im_start|>", False)],
)
def test_closing_text(text: str, closes: bool) -> None:
    assert bool(template(CHATML).closing.fullmatch(text)) == closes


def each(inner: str) -> str:
    return f"{{% for message in messages %}}{inner}{{{{ message.content }}}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("source", "transparent"),
    [
        *((source, True) for source in STYLES.values()),
        (each("{% if messages | length > 2 %}{% endif %}"), True),
        (each("{% if '<x>' in message.content %}{% endif %}"), True),
        (each("{% if message.content.startswith('<x>') %}{% endif %}"), True),
        (each("{{ message.content.split('</think>')[-1] }}"), True),
        (each("{% if message.content is string %}{% endif %}"), True),
        (each("{% if message.content | length > 9 %}{% endif %}"), False),
        (each("{% if message.content.isdigit() %}{% endif %}"), False),
        (each("{% if message.content is upper %}{% endif %}"), False),
        (each("{{ message.content[0] }}"), False),
        (each("{{ message.content[:5] }}"), False),
        (each("{{ message.content | upper }}"), False),
        (each("{{ message.content.split(' ') | join }}"), False),
        (each("{{ message.content.split() | join }}"), False),
        (each("{{ message.content.replace('\n', '') }}"), False),
        (each("{{ strftime_now('%d %b') }}"), False),
    ],
)
def test_templates_that_tell_contents_apart_by_more_than_constants_are_known(source: str, transparent: bool) -> None:
    assert template(source).is_transparent is transparent


def test_the_constants_it_looks_for() -> None:
    equal, searched = template(
        each("{% if message.content == 'go' and '<x>' in message.content %}{% endif %}")
    ).looks_for
    assert "go" in equal and "<x>" in searched and "<x>" not in equal


# -- common beginnings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [
        ("", "", 0),
        ("abc", "abc", 3),
        ("abc", "abd", 2),
        ("abc", "ab", 2),
        ("a<|im_end|>", "a<|im_start|>", 1),  # <|im_ is common, but is part of either mark
        ("a<|im_end|>b", "a<|im_end|>c", 11),
        ("a</s>", "a<b", 1),
        ("a<b", "a<c", 2),
    ],
)
def test_common_cuts_no_mark(one: str, other: str, length: int) -> None:
    assert template(PHI3).common_prefix_length(one, other) == template(PHI3).common_prefix_length(other, one) == length


@given(st.lists(st.sampled_from(["a", "b", "<", *MARKS])), st.lists(st.sampled_from(["a", "b", "<", *MARKS])))
def test_common_is_the_longest_that_cuts_no_mark(one: list[str], other: list[str]) -> None:
    common = template(CHATML).common_prefix_length("".join(one), "".join(other))
    # The slow way: piece by piece.
    expected = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        expected += len(a)
    assert common == expected
