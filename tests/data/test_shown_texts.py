"""Text that a row holds and a chat template leaves out: an error, or told where the template means it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.chat_templates import CHATML, OPEN_THOUGHT
from builders.chat_tokenizers import make_tokenizer, tokenizer_and_oracle
from builders.rendering import render

from danlu.core.errors import DataError
from danlu.data.chat_template import ChatTemplate
from danlu.data.messages import Conversation, turn_of
from danlu.data.prompts import PromptSettings, render_prompts
from danlu.data.raw_rows import RawRow
from danlu.data.render import RenderSettings
from danlu.data.rows import parse_row
from danlu.data.shown_texts import LeftOut, texts_left_out
from danlu.data.statistics import Statistics
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizing import TokenizeSettings, tokenise

# As DeepSeek-R1-Distill publishes it: `content.split('</think>')[-1]` of every answer, the last included
# (deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B, tokenizer_config.json).
CUTS_THOUGHTS = """\
{%- for message in messages %}{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
# As multimodal templates take contents: a text is a list of characters to them, and none has a type.
PARTS_ONLY = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' }}
{%- for part in message['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] }}{%- endif %}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# The first call alone, and what tools return as JSON, as Llama 3.1's template writes it.
FIRST_CALL = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.tool_calls %}{{- message.tool_calls[0].function | tojson }}
{%- elif message.role == 'tool' %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
SILENT_LAST_USER = """\
{%- for message in messages %}{%- if message.role == 'assistant' or not loop.last %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), "t")


def chat(*turns: tuple[str, str], **last: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[-1] |= last
    return {"messages": messages}


def left_out(source: str, row: dict[str, Any]) -> tuple[LeftOut, ...]:
    """What the whole conversation does not show."""
    parsed = parse_row(row, "messages", "row")
    assert isinstance(parsed, Conversation)
    turns, template = [turn_of(message) for message in parsed.messages], compiled(source)
    return texts_left_out(turns, parsed.tools, template, template.render(turns, parsed.tools))


USER = ("user", "How do I greet somebody?")


@pytest.mark.parametrize(
    ("source", "row", "problem"),
    [
        (CHATML, chat(USER, ("assistant", "Say hello."), reasoning_content="A greeting is asked for."),
         r"^message 2: the chat template leaves out text of its reasoning_content, 'A greeting is asked for\.', which "
         r"would be lost\. Name a template that shows thoughts in model\.chat_template, write the thought"),
        # A short thought also stands in the answer.
        (CHATML, chat(USER, ("assistant", "hello it is"), reasoning_content="hello"), "its reasoning_content, 'hello'"),
        # A long one that the answer quotes.
        (CHATML, chat(USER, ("assistant", "So a greeting is asked for"), reasoning_content="a greeting is asked for"),
         "its reasoning_content, 'a greeting is asked for'"),
        (CHATML, chat(USER, ("assistant", "Say hello."), thinking="A greeting is asked for."), "its reasoning_content"),
        (CUTS_THOUGHTS, chat(USER, ("assistant", "<think>\nA greeting.\n</think>\n\nSay hello.")),
         r"^message 2: the chat template leaves out text of its content, 'A greeting\.'.* Name a template that"),
        (CUTS_THOUGHTS, chat(USER, ("assistant", "a greeting</think>B</think>Say hello.")), "content, 'a greeting'"),
        (CUTS_THOUGHTS, chat(USER, ("assistant", "<think>\nhello\n</think>\n\nhello it is")), "its content, 'hello'"),
        (PARTS_ONLY, chat(USER, ("assistant", "Say hello.")), "^message 1: .*content, 'How do I greet somebody"),
        (PARTS_ONLY, chat(("user", "user"), ("assistant", "assistant")), "^message 1: .*content, 'user'"),
    ],
)  # fmt: skip
def test_text_that_a_template_never_shows_is_an_error(source: str, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        left_out(source, row)


def calls(*cities: str) -> list[dict[str, Any]]:
    return [{"function": {"name": "weather", "arguments": {"where": [{"city": city}]}}} for city in cities]


def test_a_call_that_is_left_out_is_an_error() -> None:
    result = {"role": "tool", "content": 'It says\n"sunny\t23°" there.'}
    row = {
        "messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "tool_calls": calls("Brest")}, result]
    }
    assert left_out(FIRST_CALL, row) == (), "what is written as JSON is there"
    row["messages"][1]["tool_calls"] = calls("Brest", "Lorient")
    with pytest.raises(DataError, match="^message 2: .*of its tool_calls, 'Lorient', which"):
        left_out(FIRST_CALL, row)
    row["messages"][1] |= {"tool_calls": calls("Brest"), "content": "I look it up."}
    with pytest.raises(DataError, match="^message 2: .*of its content, 'I look it up"):
        left_out(FIRST_CALL, row)


@pytest.mark.parametrize(
    "row",
    [
        chat(USER, ("assistant", "  Say hello.\n")),
        chat(USER, ("assistant", "<think>A greeting.</think>Say hello.")),
        chat(USER, ("assistant", "Say hello."), reasoning_content="\nhello\n"),
        chat(("system", "user"), ("user", "user"), ("assistant", "user")),
    ],
)
def test_text_that_is_trimmed_or_spaced_otherwise_is_there(row: dict[str, Any]) -> None:
    tokenizer, _ = tokenizer_and_oracle("qwen3")
    assert render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings())[0].remarks.left_out == ()


def test_text_whose_lines_a_template_joins_is_there() -> None:
    joins = CHATML.replace("message['content']", "message['content'] | replace('\n', ' ')")
    joins = joins.replace("message.content", "message.content | replace('\n', ' ')")
    assert joins != CHATML and left_out(joins, chat(USER, ("assistant", "Say hello\n\nor good day."))) == ()
    with pytest.raises(DataError, match="message 2"):
        left_out(joins.replace("'\n', ' '", "'hello', ''"), chat(USER, ("assistant", "Say hello\n\nor good day.")))


THOUGHTS = chat(
    ("user", "A"), ("assistant", "<think>\nThe letter.\n</think>\n\nAlpha"), ("user", "B"), ("assistant", "Beta")
)


def test_what_is_shown_while_a_turn_is_the_last_is_left_out_on_purpose() -> None:
    assert left_out(OPEN_THOUGHT, THOUGHTS) == (LeftOut(1, "content", "The letter."),)
    assert left_out(OPEN_THOUGHT, chat(*[("user", "A"), ("assistant", "The letter.</think>Alpha")])) == ()
    with pytest.raises(DataError, match="message 2"):
        left_out(CUTS_THOUGHTS, THOUGHTS)


# As Qwen3 publishes it (Qwen/Qwen3-8B, tokenizer_config.json): results of tools that stand in a user's message are no
# question, and the thoughts behind the last question are shown.
LAST_QUESTION = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' and not (message.content.startswith('<tool_response>')
    and message.content.endswith('</tool_response>')) %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- message.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def test_a_template_that_looks_at_contents_sees_them() -> None:
    turns = chat(USER, ("assistant", "I look."), reasoning_content="Hm.")["messages"]
    turns += chat(("user", "<tool_response>\nhello\n</tool_response>"), ("assistant", "Say hello."))["messages"]
    assert left_out(LAST_QUESTION, {"messages": turns}) == ()
    turns[2]["content"] = "Is that so?"
    assert left_out(LAST_QUESTION, {"messages": turns}) == (LeftOut(1, "reasoning_content", "Hm."),)


def counted(style: str, *rows: dict[str, Any]) -> Statistics:
    raw = [RawRow(number, f"rows.jsonl:{number + 1}", row) for number, row in enumerate(rows)]
    chunk = tokenise(tokenizer_and_oracle(style)[0], (TokenizeSettings("auto", RenderSettings(), None, "drop"), raw))
    assert chunk.bad == ()
    return chunk.statistics


def test_what_is_left_out_on_purpose_is_counted_and_told() -> None:
    kept, *earlier = chat(USER, ("assistant", "Hello"), reasoning_content="Hm, a greeting."), THOUGHTS
    earlier += [{"messages": [*kept["messages"], *chat(("user", "B"), ("assistant", "Beta"))["messages"]]}] * 2
    found = counted("qwen3", kept, *earlier)
    assert found.left_out == {"reasoning_content": 2, "content": 1} and found.left_out_example == "rows.jsonl:2"
    [line] = found.left_out_lines()
    assert line.startswith(
        "the chat template shows text of a turn only while it is the last, and not before later turns"
    )
    assert "reasoning_content in 2 and content in 1 of 4 rows, the first rows.jsonl:2. A turn that is trained" in line
    assert line in found.template_lines() and counted("qwen3", kept).left_out_lines() == []


def test_a_template_that_leaves_out_a_plain_message_is_not_filled_in(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path, SILENT_LAST_USER)))
    row = chat(USER, ("assistant", "Say hello."), ("user", "And then?"))
    with pytest.raises(DataError, match=r"^row: message 3: .* leaves out text of its content, 'And then\?'"):
        render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings())
    row["messages"].pop()
    assert render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings())


def test_the_end_of_an_answer_is_not_trained_alone() -> None:
    tokenizer, _ = tokenizer_and_oracle("phi3")
    row = chat(USER, ("assistant", "<|end|>"))
    with pytest.raises(
        DataError, match="^row: message 2: of this answer the chat template writes no more than what ends"
    ):
        render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings())
    row["messages"][1]["content"] = "Hi<|end|>"
    assert render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings())
    row["messages"] += [*chat(USER, ("assistant", "Hello"))["messages"]]
    row["messages"][1] |= {"content": "<|end|>", "train": False}
    assert render(parse_row(row, "auto", "row"), "row", tokenizer, RenderSettings()), "it is not trained"


def test_prompts_lose_no_text_either(tmp_path: Path) -> None:
    settings = PromptSettings(None, "auto", None, 10_000, "drop")
    turns = [*THOUGHTS["messages"][:3]]

    def prompts(tokenizer: Any, row: dict[str, Any]) -> tuple[tuple[str, ...], Statistics]:
        chunk = render_prompts(tokenizer, (settings, [RawRow(0, "rows.jsonl:1", row)]))
        return chunk.bad, chunk.statistics

    bad, found = prompts(tokenizer_and_oracle("qwen3")[0], {"prompt": turns})
    assert bad == () and found.left_out == {"content": 1} and "the first rows.jsonl:1" in found.left_out_lines()[0]
    bad, found = prompts(load_tokenizer(str(make_tokenizer(tmp_path / "cuts", CUTS_THOUGHTS))), {"prompt": turns})
    assert bad[0].startswith("rows.jsonl:1: message 2: the chat template leaves out text of its content, 'The letter.'")
    bad, found = prompts(load_tokenizer(str(make_tokenizer(tmp_path / "parts", PARTS_ONLY))), {"prompt": "Say hello"})
    assert bad[0].startswith("rows.jsonl:1: message 1: the chat template leaves out text of its content, 'Say hello'")
