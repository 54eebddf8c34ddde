"""Calls of answers in the published form of each family, whole and as they come."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.core.types import MalformedCall, ToolCall
from danlu.data.chat_template import ChatTemplate
from danlu.data.tool_calls import (
    ANY_FORM,
    FORMS,
    AnswerReader,
    form_of,
    opens_thought,
    unknown_form_line,
)

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "wind": {"type": ["number", "null"]},
    "exact": {"type": "boolean"},
    "hours": {"type": "array", "items": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("get_weather", "now")
]
BREST = ToolCall("get_weather", {"city": "Brest", "days": 3})
NOW = ToolCall("now", {})
TYPED = ToolCall("get_weather", {"city": "3", "days": 3, "wind": 2.5, "exact": True, "hours": [1, 2]})
CALL = '{"name": "get_weather", "arguments": {"city": "Brest", "days": 3}}'
ARGUMENTS = '{"city": "Brest", "days": 3}'
SEP, CALL_BEGIN, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

# By family: an answer, its text, its calls. The sources of the forms:
# hermes: chat_template of Qwen/Qwen2.5-7B-Instruct; vllm/tool_parsers/hermes_tool_parser.py
# qwen3-coder: vllm/tool_parsers/qwen3coder_tool_parser.py, chat_template of Qwen/Qwen3-Coder-30B-A3B-Instruct
# glm-4.5: vllm/tool_parsers/glm4_moe_tool_parser.py; without line breaks (GLM-4.7): glm47_moe_tool_parser.py
# glm-4: chat_template of THUDM/glm-4-9b-chat (`<|assistant|>{{ metadata }}\n{{ content }}`)
# minimax-m2: vllm/tool_parsers/minimax_m2_tool_parser.py
# deepseek: vllm/tool_parsers/deepseekv3_tool_parser.py (V3, R1) and deepseekv31_tool_parser.py (V3.1)
# mistral: vllm/tool_parsers/mistral_tool_parser.py, mistral-common (`[CALL_ID]`, `[ARGS]`)
# gpt-oss: openai/gpt-oss-20b chat_template.jinja; sglang srt/function_call/gpt_oss_detector.py
# gemma-4: google/gemma-4-31B-it chat_template.jinja (`format_argument`); tokenizer_config.json (`response_schema`)
# llama-3: vllm/tool_parsers/llama_tool_parser.py; Meta's prompt format of Llama 3.1 (`NAME.call(..)`)
ANSWERS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"I look.\n<tool_call>\n{CALL}\n</tool_call>", "I look.\n", [BREST]),
    (
        "hermes",
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        "\n",
        [BREST, NOW],
    ),
    ("hermes", f"<tool_call>{CALL}", "", [BREST]),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "</tool_call> \\" <tool_call>"}}</tool_call> Done.',
        " Done.",
        [ToolCall("now", {"a": '</tool_call> " <tool_call>'})],
    ),
    (
        "qwen3-coder",
        "Well.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBrest\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "Well.\n",
        [BREST],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n3\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=wind>\n2.5\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=hours>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "",
        [TYPED],
    ),
    ("qwen3-coder", "<function=now>\n</function>", "", [NOW]),
    (
        "qwen3-coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\na </parameter> b\n</tool_call>\nc\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [ToolCall("get_weather", {"city": "a </parameter> b\n</tool_call>\nc"})],
    ),
    (
        "glm-4.5",
        "Well.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Brest</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "Well.",
        [BREST],
    ),
    (
        "glm-4.5",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>3</arg_value><arg_key>days</arg_key><arg_value>3"
        "</arg_value><arg_key>wind</arg_key><arg_value>2.5</arg_value><arg_key>exact</arg_key><arg_value>true</arg_value>"
        "<arg_key>hours</arg_key><arg_value>[1, 2]</arg_value></tool_call><tool_call>now\n</tool_call>",
        "",
        [TYPED, NOW],
    ),
    (
        "glm-4.5",
        "<tool_call>other\n<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "",
        [ToolCall("other", {"a": [1]})],
    ),
    ("glm-4", f"\nget_weather\n{ARGUMENTS}", "", [BREST]),
    (
        "gemma-4",
        'Well.<|tool_call>call:get_weather{city:<|"|>Brest<|"|>,days:3}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Well.",
        [BREST, NOW],
    ),
    (
        "gemma-4",
        '<|tool_call>call:get_weather{city:<|"|>3<|"|>,days:3,exact:true,hours:[1,2],wind:2.5}<tool_call|>',
        "",
        [TYPED],
    ),
    (
        "gemma-4",
        '<|tool_call>call:other{a:{<|"|>b<|"|>:[<|"|>x, {y}: <tool_call|> "<|"|>,{c:false},[]]}, d:None}<tool_call|>',
        "",
        [ToolCall("other", {"a": {"b": ['x, {y}: <tool_call|> "', {"c": False}, []]}, "d": None})],
    ),
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Brest</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [BREST, NOW],
    ),
    (
        "deepseek",
        f"Well.<｜tool▁calls▁begin｜>{CALL_BEGIN}function{SEP}get_weather\n```json\n{ARGUMENTS}\n```{CALL_END}\n"
        f"{CALL_BEGIN}function{SEP}now\n```json\n{{}}\n```{CALL_END}<｜tool▁calls▁end｜>",
        "Well.",
        [BREST, NOW],
    ),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜>{CALL_BEGIN}get_weather{SEP}{ARGUMENTS}{CALL_END}{CALL_BEGIN}now{SEP}{{}}{CALL_END}"
        "<｜tool▁calls▁end｜>",
        "",
        [BREST, NOW],
    ),
    ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [BREST, BREST]),
    ("mistral", 'Well.[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "123456789"}]', "Well.", [NOW]),
    ("mistral", f"Well.[TOOL_CALLS]get_weather{ARGUMENTS}[TOOL_CALLS]now{{}}", "Well.", [BREST, NOW]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{{}}", "", [BREST, NOW]),
    ("mistral", f"[{CALL}]", "", [BREST]),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>to=functions.now? I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "",
        [BREST],
    ),
    ("gpt-oss", f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}", "", [BREST]),
    (
        "gpt-oss",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "I look.",
        [NOW],
    ),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is.<|return|>",
        "It is.",
        [],
    ),
    ("llama-3", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Brest", "days": 3}}', "", [BREST]),
    (
        "llama-3",
        '{"name": "get_weather", "parameters": {"city": "Brest", "days": 3}}; {"name": "now", "parameters": {}}',
        "",
        [BREST, NOW],
    ),
    (
        "llama-3",
        '<|python_tag|>now.call(city="Brest", days=3)<|eom_id|>',
        "",
        [ToolCall("now", {"city": "Brest", "days": 3})],
    ),
]


def read(answer: str, form: Any, size: int, in_thought: bool = False) -> tuple[str, list[Any]]:
    """What a reader gives of an answer that comes in pieces of a size."""
    reader = AnswerReader(form, TOOLS, in_thought=in_thought)
    parts = [part for at in range(0, len(answer), size) for part in reader.feed(answer[at : at + size])]
    parts += reader.finish()
    return "".join(part for part in parts if isinstance(part, str)), [p for p in parts if not isinstance(p, str)]


@pytest.mark.parametrize(("family", "answer", "text", "calls"), ANSWERS)
def test_the_form_of_a_family(family: str, answer: str, text: str, calls: list[Any]) -> None:
    form = FORMS[family]
    assert AnswerReader.whole(answer, form, TOOLS) == (text if family != "glm-4" else "", calls)
    for size in (1, 2, 7, len(answer)):
        got_text, got = read(answer, form, size)
        assert got == calls and got_text.strip() == text.strip(), size
    if family != "glm-4" and not answer.startswith(" to="):  # which only the template can tell
        assert AnswerReader.whole(answer, ANY_FORM, TOOLS)[1] == calls


@pytest.mark.parametrize(("family", "answer", "text", "calls"), ANSWERS)
def test_a_call_in_a_thought_is_none(family: str, answer: str, text: str, calls: list[Any]) -> None:
    if family == "gpt-oss":
        return  # its thoughts are of a channel of their own
    form, thought = FORMS[family], f"<think>\nPerhaps\n{answer}\n</think>\n\n"
    assert AnswerReader.whole(f"{thought}It is calm.", form, TOOLS) == (f"{thought}It is calm.", [])
    unopened = f"{thought.removeprefix('<think>')}{answer}"
    assert AnswerReader.whole(f"{thought}{answer}", form, TOOLS)[1] == calls
    assert AnswerReader.whole(unopened, form, TOOLS)[1] == calls == read(unopened, form, 1, in_thought=True)[1]
    assert AnswerReader.whole(thought.removesuffix("\n</think>\n\n"), form, TOOLS)[1] == [], "cut in its thought"


@pytest.mark.parametrize(
    "answer",
    [
        "It is calm.",
        "",
        "{",
        "[",
        "[]",
        "{}",
        '{"name": "Anne"}',
        '{"name": "Anne", "age": 3}',
        '[{"name": "Anne"}]',
        '{"name": "Anne", "arguments": {}, "age": 3}',
        '{"name": 3, "arguments": {}}',
        '[1, {"name": "a", "arguments": {}}]',
        f"Say {CALL}",
        f"{CALL} is what I would call.",
        "a < b",
        "<tool",
        "get_weather is a tool",
        "[TOOL",
        "<|chan",
    ],
)
@pytest.mark.parametrize("family", [*FORMS, "any"])
def test_text_is_no_call(family: str, answer: str) -> None:
    form = FORMS.get(family, ANY_FORM)
    for size in (1, len(answer) or 1):
        assert read(answer, form, size) == (answer, [])


@pytest.mark.parametrize(
    ("family", "answer", "problem"),
    [
        ("hermes", "<tool_call>now()</tool_call>", "the call is no JSON: Expecting value"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b</tool_call>', "the call is no JSON: Unterminated"),
        ("hermes", "<tool_call>[1]</tool_call>", 'a call is {"name"'),
        (
            "hermes",
            '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
            "the arguments of now are no JSON object",
        ),
        ("hermes", f"<tool_call>{CALL}}}</tool_call>", "the call is no JSON: text stands behind"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "the call is no JSON"),
        ("qwen3-coder", "<tool_call>\nnow\n</tool_call>", "a call is <function=NAME>"),
        ("minimax-m2", "<minimax:tool_call>now</minimax:tool_call>", "a call is <invoke name=NAME>"),
        ("deepseek", f"<｜tool▁calls▁begin｜>{CALL_BEGIN}now{SEP}{{]{CALL_END}", "the call is no JSON"),
        ("mistral", "[TOOL_CALLS]now", "a call is NAME[ARGS]"),
        ("mistral", "[TOOL_CALLS][]", "the list of calls is empty"),
        ("mistral", "[TOOL_CALLS]now[ARGS]{a}", "the call is no JSON"),
        ("gemma-4", "<|tool_call>now<tool_call|>", "a call is call:NAME{KEY:VALUE}"),
        ("gemma-4", "<|tool_call>call:now{a:1", "the call of now is no {KEY:VALUE}: it has no end"),
        (
            "gemma-4",
            "<|tool_call>call:now{a:[1;2]}<tool_call|>",
            "the call of now is no {KEY:VALUE}: '1;2' is no value",
        ),
        ("gemma-4", "<|tool_call>call:now{a}<tool_call|>", "the call of now is no {KEY:VALUE}: 'a}<tool_call|>' is no"),
        ("gemma-4", "<|tool_call>call:now{} now<tool_call|>", "a call ends in <tool_call|>"),
        (
            "gemma-4",
            f"<|tool_call>call:now{{a:{'[' * 100_000}<tool_call|>",
            "the call of now is no {KEY:VALUE}: bracke",
        ),
        ("llama-3", "<|python_tag|>import os", "behind <|python_tag|> stands neither"),
        ("llama-3", '{"name": "now", "parameters": [1]}', "the arguments of now are no JSON object"),
        (
            "gpt-oss",
            "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{a}<|call|>",
            "the call is no JSON",
        ),
    ],
)
def test_what_was_meant_as_a_call_is_said_to_be_none(family: str, answer: str, problem: str) -> None:
    for size in (1, len(answer)) if len(answer) < 1000 else (len(answer),):
        (call,) = read(answer, FORMS[family], size)[1]
        assert isinstance(call, MalformedCall) and call.problem.startswith(problem)


NUMBERS: dict[str, str] = {
    "hermes": '<tool_call>{"name": "now", "arguments": {"wind": %s}}</tool_call>',
    "deepseek": f'<｜tool▁calls▁begin｜>{CALL_BEGIN}now{SEP}{{"wind": %s}}{CALL_END}<｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS]now[ARGS]{"wind": %s}',
    "llama-3": '<|python_tag|>{"name": "now", "parameters": {"wind": %s}}',
    "gpt-oss": '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"wind": %s}<|call|>',
    "gemma-4": "<|tool_call>call:now{wind:%s}<tool_call|>",
    "glm-4": 'now\n{"wind": %s}',
}


@pytest.mark.parametrize("family", NUMBERS)
def test_numbers_and_faults_are_read_alike_wherever_a_piece_ends(family: str) -> None:
    for number in ("2.5", "-0.25", "1e5", "-3.0E-7", "12"):
        answer = NUMBERS[family] % number
        expected = [ToolCall("now", {"wind": float(number)})]
        for size in range(1, len(answer) + 1):
            assert read(answer, FORMS[family], size) == ("", expected), (number, size)
    for number in ("1.", "2,5", "1 2", "NaN", "-Infinity", "tru", "'a'"):
        answer = NUMBERS[family] % number
        whole = read(answer, FORMS[family], len(answer))
        assert [type(call) for call in whole[1]] == [MalformedCall]
        for size in range(1, len(answer)):
            assert read(answer, FORMS[family], size) == whole, (number, size)


def test_a_number_in_a_call_without_a_mark_may_end_a_piece() -> None:
    """No mark says that a call has begun, so an answer that seems to be no JSON half way would come as text."""
    for number in ("2.5", "-0.25", "1e5", "-3.0E-7", "12"):
        answer = f'{{"name": "now", "parameters": {{"wind": {number}}}}}'
        for size in range(1, len(answer) + 1):
            assert read(answer, FORMS["llama-3"], size) == ("", [ToolCall("now", {"wind": float(number)})]), (
                number,
                size,
            )


def test_text_that_is_no_number_of_json_stays_text() -> None:
    inside = "<arg_key>wind</arg_key><arg_value>nan</arg_value><arg_key>x</arg_key><arg_value>NaN</arg_value>"
    read_calls = AnswerReader.whole(f"<tool_call>get_weather{inside}</tool_call>", FORMS["glm-4.5"], TOOLS)[1]
    assert read_calls == [ToolCall("get_weather", {"wind": "nan", "x": "NaN"})]


def test_text_comes_as_soon_as_it_is_certain() -> None:
    reader = AnswerReader(FORMS["hermes"], TOOLS)
    assert reader.feed("I look <to") == ["I look "]
    assert reader.feed("ol> or <tool_ca") == ["<tool> or "]
    assert reader.feed(f"ll>{CALL[:20]}") == [] and reader.feed(f"{CALL[20:]}</tool_c") == []
    assert reader.feed("all>And") == [BREST, "And"] and reader.finish() == []


# -- templates ---------------------------------------------------------------------------------------------------------

WRITES = {
    "hermes": "{{ '<tool_call>\n' + (f | tojson) + '\n</tool_call>' }}",
    "qwen3-coder": "{{ '<tool_call>\n<function=' + f.name + '>\n' }}{% for k, v in f.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}",
    "glm-4.5": "{{ '<tool_call>' + f.name }}{% for k, v in f.arguments | items %}"
    "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v | string + '</arg_value>' }}{% endfor %}"
    "{{ '\n</tool_call>' }}",
    "minimax-m2": """{{ '<minimax:tool_call>\n<invoke name="' + f.name + '">' }}{% for k, v in f.arguments | items %}"""
    """{{ '<parameter name="' + k + '">' + v | string + '</parameter>' }}{% endfor %}"""
    "{{ '</invoke>\n</minimax:tool_call>' }}",
    "gemma-4": "{{ '<|tool_call>call:' + f.name + '{' }}{% for k, v in f.arguments | dictsort %}"
    """{{ ',' if not loop.first }}{{ k }}:{{ '<|"|>' + v + '<|"|>' if v is string else v }}"""
    "{% endfor %}{{ '}<tool_call|>' }}",
    "deepseek": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\n```json\n'"
    " + f.arguments + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
    "mistral": "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}",
    "gpt-oss": "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' + (f.arguments | tojson)"
    " + '<|call|>' }}",
    "llama-3": """{{ '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}""",
    "glm-4": "{{ f.name + '\n' + (f.arguments | tojson) }}",
}


def compiled(writes: str, prompt: str = "") -> ChatTemplate:
    source = (
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.tool_calls %}"
        "{%- for call in message.tool_calls %}{%- set f = call.function %}" + writes + "{%- endfor %}"
        "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n" + prompt + "' }}{%- endif %}"
    )
    return ChatTemplate(source, {}, ("<|im_start|>", "<|im_end|>"), "t")


@pytest.mark.parametrize("family", FORMS)
def test_a_template_tells_the_form(family: str) -> None:
    template = compiled(WRITES[family])
    assert form_of(template) is FORMS[family] and unknown_form_line(template) is None


def test_a_form_that_is_not_known_is_told() -> None:
    for writes in ("{{ '[' + f.name + '(at=1)]' }}", "{{ '<|tool_call_begin|>functions.' + f.name + ':0' }}", ""):
        assert form_of(compiled(writes)) is None
        line = unknown_form_line(compiled(writes))
        assert line is not None and "a form that is not known (known are those of hermes, qwen3-coder, glm-4.5" in line


def test_a_generation_prompt_that_opens_a_thought() -> None:
    assert opens_thought(compiled("", "<think>\n")) and not opens_thought(compiled(""))
    assert not opens_thought(compiled("", "<think>\n\n</think>\n\n"))


def test_schemas_in_all_their_forms() -> None:
    schema = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    tools = [
        {"name": "now", "parameters": {"properties": {"a": schema, "b": {}, "c": {"type": "string"}}}},
        {"name": "n"},
    ]
    for value, expected in (("3", 3), ("null", None), ("x", "x")):
        written = {"a": value, "b": "1", "c": "null"}
        inside = "".join(f"<parameter={key}>{text}</parameter>" for key, text in written.items())
        answer = f"<function=now>{inside}</function>"
        assert AnswerReader.whole(answer, ANY_FORM, tools)[1] == [
            ToolCall("now", {"a": expected, "b": "1", "c": "null"})
        ]
