from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from builders import chat_tokenizers
from hypothesis import given
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data.messages import ROLES, Conversation, Message, check_turn_order
from danlu.data.rows import Completion, Text, Tokenized, detect_format, parse_row, unread_keys

Q, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def conversation(*turns: dict[str, Any], **columns: Any) -> Conversation:
    row = parse_row({"messages": list(turns), **columns}, "auto", "chat.jsonl:3")
    assert isinstance(row, Conversation)
    return row


def said(row: Any) -> list[tuple[str, str]]:
    assert isinstance(row, Conversation)
    return [(message.role, message.content) for message in row.messages]


# -- every format ------------------------------------------------------------------------------------------------------

FORMATS: list[tuple[str, dict[str, Any], Any]] = [
    ("text", {"text": "Once"}, Text("Once")),
    ("text", {"text": "Once", "url": "x", "meta": {}}, Text("Once")),
    ("text", {"text": "Once", "document_ends": False}, Text("Once", True, False)),
    ("alpaca", {"instruction": "Add.", "input": "1, 2", "output": "3"}, [("user", "Add.\n1, 2"), ("assistant", "3")]),
    ("alpaca", {"instruction": "Add.", "input": "", "output": "3"}, [("user", "Add."), ("assistant", "3")]),
    ("alpaca", {"instruction": "Add.", "input": None, "output": "3"}, [("user", "Add."), ("assistant", "3")]),
    (
        "alpaca",
        {"instruction": "C", "output": "c", "system": "S", "history": [["A", "a"], ["B", "b"]]},
        [("system", "S"), ("user", "A"), ("assistant", "a"), ("user", "B"), ("assistant", "b"), ("user", "C"),
         ("assistant", "c")],
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "S"},
        [("system", "S"), ("user", "Hi"), ("assistant", "Hello")],
    ),
    ("sharegpt", {"conversations": [Q, A]}, [("user", "Hi"), ("assistant", "Hello")]),
    ("messages", {"messages": [Q, A]}, [("user", "Hi"), ("assistant", "Hello")]),
    ("messages", {"messages": [Q, A], "prompt": "Hi", "id": 7}, [("user", "Hi"), ("assistant", "Hello")]),
    ("messages", {"messages": [Q, A], "label": "greeting"}, [("user", "Hi"), ("assistant", "Hello")]),
    ("text", {"text": "Once", "label": 1}, Text("Once")),
    ("prompt-completion", {"prompt": "1 +", "completion": " 1"}, Completion("1 +", " 1")),
    ("prompt-completion", {"prompt": "", "completion": "1"}, Completion("", "1")),
    ("prompt-completion", {"prompt": "[1, 2] +", "completion": "[3]"}, Completion("[1, 2] +", "[3]")),
    ("prompt-completion", {"prompt": "[1, 2]", "completion": "[3]"}, Completion("[1, 2]", "[3]")),
    ("prompt-completion", {"prompt": [Q], "completion": [A]}, [("user", "Hi"), ("assistant", "Hello")]),
    ("prompt-completion", {"query": "Hi", "response": "Hello"}, [("user", "Hi"), ("assistant", "Hello")]),
    ("prompt-completion", {"question": "Hi", "answer": "Hello"}, [("user", "Hi"), ("assistant", "Hello")]),
    (
        "prompt-completion",
        {"instruction": "Sum up.", "context": "Long text.", "response": "Short.", "category": "x"},
        [("user", "Sum up.\nLong text."), ("assistant", "Short.")],
    ),
    (
        "prompt-completion",
        {"query": "B", "response": "b", "history": [["A", "a"]], "system": "S"},
        [("system", "S"), ("user", "A"), ("assistant", "a"), ("user", "B"), ("assistant", "b")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("format", "value", "meant"), FORMATS)
def test_formats_are_recognised_and_read(format: str, value: dict[str, Any], meant: Any) -> None:
    assert detect_format(value.keys()) == format
    row = parse_row(value, "auto", "row")
    assert (said(row) if isinstance(meant, list) else row) == meant
    assert parse_row(value, format, "row") == row  # type: ignore[arg-type]


def test_a_call_behind_a_text_is_the_call_of_its_message() -> None:
    """ShareGPT rows of agents: the assistant says something and then calls, each as a turn."""
    call = {"from": "function_call", "value": '{"name": "look", "arguments": {"at": 1}}'}
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "I look."}, call,
             {"from": "observation", "value": "here"}, {"from": "gpt", "value": "Here."}]  # fmt: skip
    row = parse_row({"conversations": turns}, "auto", "row")
    assert said(row) == [("user", "Hi"), ("assistant", "I look."), ("tool", "here"), ("assistant", "Here.")]
    assert isinstance(row, Conversation) and row.messages[1].tool_calls is not None
    assert row.messages[1].tool_calls[0]["function"] == {"name": "look", "arguments": {"at": 1}}
    alone = parse_row({"conversations": [turns[0], *turns[2:]]}, "auto", "row")
    assert isinstance(alone, Conversation) and alone.messages[1].content == ""
    with pytest.raises(DataError, match="two assistant turns in a row"):  # of two texts nobody knows which is meant
        parse_row({"conversations": [*turns[:2], turns[1]]}, "auto", "row")
    with pytest.raises(DataError, match="two assistant turns in a row"):
        parse_row({"conversations": [turns[0], {**turns[1], "weight": 0}, {**call, "weight": 1}]}, "auto", "row")


def test_given_tokens() -> None:
    for columns, weights in [
        ({}, [1, 1, 1]),
        ({"labels": [-100, 6, 7]}, [0, 1, 1]),
        ({"completion_mask": [0, 1, 1]}, [0, 1, 1]),
        ({"assistant_masks": [0, 0, 1]}, [0, 0, 1]),
        ({"labels": [-100, 6, 7], "loss_mask": [1, 0, 1]}, [0, 0, 1]),
        ({"labels": None}, [1, 1, 1]),
    ]:
        row = parse_row({"input_ids": [5, 6, 7], **columns}, "auto", "row")
        assert isinstance(row, Tokenized) and row.tokens.tolist() == [5, 6, 7] and row.tokens.dtype == np.int32
        assert row.weights.tolist() == weights
    cells = {"input_ids": "[0, 5, 6]", "labels": "[-100, 5, 6]", "attention_mask": "[0, 1, 1]"}  # of a csv file
    given = parse_row(cells, "auto", "row")
    assert isinstance(given, Tokenized) and given.tokens.tolist() == [5, 6] and given.weights.tolist() == [1, 1]
    padded = parse_row({"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]}, "auto", "row")
    assert isinstance(padded, Tokenized) and padded.tokens.tolist() == [5, 6] and padded.weights.tolist() == [1, 1]


@given(chat_tokenizers.rows(tools=True))
def test_the_same_conversation_in_every_form(row: dict[str, Any]) -> None:
    """Messages, sharegpt, and either as the JSON text that a csv cell holds."""
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    turns = [
        {"from": names[turn["role"]], "value": turn["content"], **{k: v for k, v in turn.items() if k not in Q}}
        for turn in row["messages"]
    ]
    expected = parse_row(row, "auto", "row")
    assert parse_row({**row, "messages": json.dumps(row["messages"])}, "auto", "row") == expected
    rest = {name: json.dumps(value) for name, value in row.items() if name != "messages"}
    assert parse_row({"conversations": turns, **rest}, "auto", "row") == expected
    # A columnar file gives every message every key.
    keys = {key for turn in row["messages"] for key in turn} | {"from", "value", "weight", "name"}
    wide = [{key: turn.get(key) for key in keys} for turn in row["messages"]]
    assert parse_row({**row, "messages": wide}, "auto", "row") == expected


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, role in ROLES.items() if role in ("user", "assistant", "system")])
def test_role_names(name: str) -> None:
    role = ROLES[name]
    turns = {"user": [{**Q, "role": name}, A], "assistant": [Q, {**A, "role": name}]}
    assert any(one.role == role for one in conversation(*turns.get(role, [{**Q, "role": name}, Q, A])).messages)


@pytest.mark.parametrize(
    ("columns", "weight"),
    [({}, None), ({"train": False}, 0.0), ({"train": True}, 1.0), ({"weight": 0.5}, 0.5), ({"weight": 0}, 0.0),
     ({"training": 1}, 1.0), ({"loss": False}, 0.0), ({"weight": None, "train": False}, 0.0),
     ({"loss_weight": 0.0}, 0.0), ({"loss_weight": 2}, 2.0), ({"loss_weight": 1.0, "train": True}, 1.0)],
)  # fmt: skip
def test_weights_of_messages(columns: dict[str, Any], weight: float | None) -> None:
    assert conversation(Q, {**A, **columns}).messages[1].weight == weight


def test_keys_of_messages_that_are_not_read_are_listed() -> None:
    assert conversation(Q, {**A, "loss_weight": 0, "weight": None, "name": "x"}).unread == ()
    row = conversation({**Q, "id": 3, "loss_scale": None}, {**A, "loss_scale": 0.5})
    assert row.unread == ("id", "loss_scale")
    assert row == conversation(Q, A)
    value = {"messages": [Q, {**A, "loss_scale": 0.5}], "loss_weight": 0, "source": "x", "train": None}
    assert unread_keys(value, [conversation(*value["messages"])]) == ["loss_weight (a column)", "loss_scale"]
    text = {"text": "Once", "weight": 2.0, "url": "x"}
    assert unread_keys(text, []) == ["weight (a column)"]


def test_content_in_parts_and_no_content() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"text": "lo"}]
    assert conversation(Q, {**A, "content": parts}).messages[1].content == "Hello"
    call = {"function": {"name": "look", "arguments": {}}}
    row = conversation(Q, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert row.messages[1].content == "" and row.messages[1].tool_calls == ({"type": "function", **call},)


def test_typed_parts_in_the_form_of_llama_factory() -> None:
    call = json.dumps({"name": "look", "arguments": {"at": 1}})
    turns = [
        {"role": "system", "content": [{"type": "text", "value": "Be kind."}], "loss_weight": 0.0},
        {"role": "user", "content": [{"type": "text", "value": "What is "}, {"type": "text", "value": "there?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "reasoning", "value": "I should look."},
                {"type": "text", "value": "Let me see."},
                {"type": "tool_call", "value": call},
                {"type": "tool_call", "value": call},
            ],
            "loss_weight": 1.0,
        },
        {"role": "tool", "content": [{"type": "text", "value": "a door"}]},
        {"role": "assistant", "content": [{"type": "text", "value": "A door.", "text": None, "reasoning": None}]},
    ]
    row = conversation(*turns)
    assert said(row) == [
        ("system", "Be kind."), ("user", "What is there?"), ("assistant", "Let me see."), ("tool", "a door"),
        ("assistant", "A door."),
    ]  # fmt: skip
    assert row.messages[2].tool_calls == (CALL, CALL) and row.messages[2].reasoning_content == "I should look."
    assert [message.weight for message in row.messages] == [0.0, None, 1.0, None, None]
    # The same in the form of keys.
    keys = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL], "reasoning": "I should look."}
    assert conversation(*turns[:2], {**keys, "weight": 1}, *turns[3:]) == row


def test_a_thought_and_a_call_may_be_all_of_a_message() -> None:
    row = conversation(Q, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, TOOL_CALL]})
    assert row.messages[1] == Message("assistant", "", (CALL,), "Hm.")
    row = conversation(Q, {"role": "assistant", "content": None, "function_call": CALL["function"]})
    assert row.messages[1] == Message("assistant", "", (CALL,))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts(key: str) -> None:
    assert conversation(Q, {**A, key: "Hm."}).messages[1].reasoning_content == "Hm."


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
TOOL_CALL = {"type": "tool_call", "value": '{"name": "look", "arguments": {"at": 1}}'}


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"name": "look", "arguments": {"at": 1}}],
        [{"function": {"name": "look", "arguments": '{"at": 1}'}}],
        json.dumps([CALL]),
        {"name": "look", "arguments": '{"at": 1}'},
    ],
)
def test_tool_calls_in_every_form(calls: Any) -> None:
    row = conversation(Q, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "a door"}, A)
    assert row.messages[1].tool_calls == (CALL,)
    as_turn = {"from": "function_call", "value": calls if isinstance(calls, str) else json.dumps(calls)}
    turns = [{"from": "human", "value": "Hi"}, as_turn, {"from": "observation", "value": "a door"}]
    row = parse_row({"conversations": [*turns, {"from": "gpt", "value": "Hello"}]}, "auto", "row")
    assert isinstance(row, Conversation) and row.messages[1] == Message("assistant", "", (CALL,))


def test_ids_and_names_of_calls_are_kept() -> None:
    turns = [
        Q,
        {"role": "assistant", "tool_calls": [{**CALL, "id": "c1"}]},
        {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "look"},
        A,
    ]
    _, call, result, _ = conversation(*turns).messages
    assert call.tool_calls == ({"id": "c1", **CALL},)
    assert (result.tool_call_id, result.name) == ("c1", "look")


@pytest.mark.parametrize("given_tools", [[], None, "", "[]"])
def test_no_tools(given_tools: Any) -> None:
    assert conversation(Q, A, tools=given_tools).tools is None


def test_tools_in_every_form() -> None:
    inner = {"name": "look", "description": "Look.", "parameters": {}}
    wrapped = {"type": "function", "function": inner}
    for tools in ([inner], [wrapped], json.dumps([inner]), json.dumps([wrapped])):
        assert conversation(Q, A, tools=tools).tools == (wrapped,)


def test_messages_of_a_prompt_are_context() -> None:
    row = parse_row({"prompt": [Q, A, Q], "completion": [A]}, "auto", "row")
    assert isinstance(row, Conversation)
    assert [message.is_context for message in row.messages] == [True, True, True, False]


# -- bad input ---------------------------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "S"}
TOOL = {"role": "tool", "content": "a door"}
CALLS = {"role": "assistant", "tool_calls": [CALL]}

BAD_ORDER: list[tuple[list[dict[str, Any]], str]] = [
    (
        [A, Q],
        r" message 1: the conversation starts with the assistant; add the user's turn before it or remove this one",
    ),
    ([SYSTEM, A], r" message 2: the conversation starts with the assistant"),
    ([Q, Q, A], r" message 2: two user turns in a row; join them into one, or add the assistant's answer between them"),
    ([Q, A, A], r" message 3: two assistant turns in a row; join them into one, or add the user's turn"),
    ([Q, {**A, "content": ""}], r" message 2: the assistant's answer is empty; remove the row or fill the answer in"),
    ([Q, {**A, "content": " \n"}], r" message 2: the assistant's answer is empty"),
    ([Q, {"role": "assistant", "content": None}], r" message 2: the assistant's answer is empty"),
    ([Q, SYSTEM, A], r" message 2: a system message must come first; move it to the front"),
    ([Q, TOOL, A], r" message 2: a tool result must follow the assistant's call, not user; add the call or remove"),
    ([TOOL, A], r" message 1: a tool result must follow the assistant's call, not nothing"),
    ([Q, CALLS, TOOL, Q], r" message 4: a tool result must be followed by the assistant, not by the user"),
    ([Q], r": no assistant message, so there is nothing to train on; remove the row"),
    ([], r": no assistant message"),
]


@pytest.mark.parametrize(("turns", "problem"), BAD_ORDER)
def test_conversations_in_an_order_that_makes_no_sense(turns: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(DataError, match=rf"^chat\.jsonl:3{problem}"):
        conversation(*turns)


@pytest.mark.parametrize(
    "turns",
    [
        [Q, A],
        [SYSTEM, SYSTEM, Q, A],
        [Q, A, Q],
        [Q, CALLS, TOOL, TOOL, A],
        [Q, CALLS, CALLS, TOOL, TOOL, A],
        [Q, CALLS, TOOL, CALLS, TOOL, A, Q, A],
        [Q, A, TOOL, A],
        [Q, CALLS],
        [{**Q, "content": ""}, A],
    ],
)
def test_conversations_in_an_order_that_makes_sense(turns: list[dict[str, Any]]) -> None:
    assert len(conversation(*turns).messages) == len(turns)


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=7))
def test_an_order_is_read_or_refused_with_a_place(roles: list[str]) -> None:
    messages = [Message(role, "x") for role in roles]
    problem = ""
    try:
        assert check_turn_order(messages, "here") == tuple(messages)
    except DataError as error:
        problem = str(error)
    spoken = [role for role in roles if role != "system"]
    makes_sense = "assistant" in spoken and spoken[0] == "user" and ("user", "user") not in pairwise(spoken)
    assert makes_sense if not problem else problem.startswith("here")


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    (
        {"title": "x", "body": "y"},
        r"no known row format has the columns body, title\. Known: text · instruction, output",
    ),
    ({}, r"no known row format has the columns \(none\)"),
    ({"chosen": "x", "rejected": "y", "prompt": "z"}, r"these are preference pairs.*keep one answer for each prompt"),
    ({"chosen": "x", "rejected": "y", "prompt": "z"}, r"rows for a stage dpo; stages pretrain and sft do not train"),
    ({"prompt": "x", "completion": "y", "label": True}, r"'label' \(True\) judges the answer: unpaired.* a stage kto"),
    ({"messages": [Q, A], "label": False}, r"'label' \(False\) judges .*stages pretrain and sft would train the bad"),
    ({"conversations": [Q, A], "kto_tag": "false"}, r"'kto_tag' \('false'\) judges the answer"),
    ({"instruction": "x", "output": "y", "label": 1}, r"'label' \(1\) judges .*Keep the rows with good answers and"),
    ({"text": 5}, r"'text' must be a string, not an int"),
    ({"text": None}, r"'text' must be a string, not nothing"),
    ({"text": " \n"}, r"'text' is empty; remove the row"),
    ({"instruction": "x", "output": None}, r"'output' must be a string, not nothing"),
    ({"instruction": "x", "output": ""}, r"message 2: the assistant's answer is empty"),
    ({"instruction": ["x"], "output": "y"}, r"'instruction' must be a string, not a list"),
    ({"instruction": "x", "input": 5, "output": "y"}, r"'input' must be a string, not an int"),
    ({"instruction": "x", "output": "y", "system": 1}, r"'system' must be a string, not an int"),
    ({"instruction": "x", "output": "y", "history": ["ab"]}, r"'history' must be a list of \[question, answer\].*'ab'"),
    ({"instruction": "x", "output": "y", "history": [["a"]]}, r"'history' must be a list of \[question, answer\]"),
    ({"instruction": "x", "output": "y", "history": [["a", None]]}, r"'history' must be a list of"),
    ({"messages": None}, r"a conversation must be a list of messages \(objects\), not nothing"),
    ({"messages": "Hi"}, r"a conversation must be a list of messages \(objects\), not a str"),
    ({"messages": ["Hi", "Hello"]}, r"a conversation must be a list of messages \(objects\), not a list"),
    ({"messages": [Q, {"content": "x"}]}, r"message 2: a message needs role and content.*it has content"),
    ({"messages": [Q, {}]}, r"message 2: a message needs role and content.*it has nothing"),
    ({"messages": [Q, {**A, "role": "narrator"}]}, r"message 2: unknown role 'narrator'\. Known roles: system, dev"),
    ({"messages": [Q, {**A, "role": ["assistant"]}]}, r"message 2: unknown role \['assistant'\]"),
    (
        {"messages": [Q, {**A, "content": 5}]},
        r"message 2: content must be a string or a list of text parts, not an int",
    ),
    (
        {"messages": [{**Q, "content": [{"type": "image", "image": "x"}]}, A]},
        r"message 1: content of type 'image' cannot be trained on; the types are text, reasoning, thinking, tool_call",
    ),
    ({"messages": [{**Q, "content": [{"type": "text"}]}, A]}, r"message 1: a content part of type text needs a string"),
    ({"messages": [{**Q, "content": [{"type": ["text"]}]}, A]}, r"message 1: content of type \['text'\] cannot be tr"),
    (
        {"messages": [Q, {**A, "content": [{"type": "reasoning", "value": {"a": 1}}]}]},
        r"message 2: a content part of type reasoning needs a string as reasoning or value or text; it is a dict",
    ),
    (
        {"messages": [{**Q, "content": [{"type": "reasoning", "value": "x"}]}, A]},
        r"message 1: reasoning and tool_call parts are the assistant's, not of role 'user'",
    ),
    (
        {"messages": [Q, {**A, "content": [TOOL_CALL, {"type": "text", "value": "x"}]}]},
        r"message 2: a text part behind a tool_call part: chat templates write reasoning, text and tool calls in this",
    ),
    (
        {"messages": [Q, {**A, "content": [TOOL_CALL], "tool_calls": [CALL]}]},
        r"message 2: tool calls both as a part of the content and as a key of the message; keep one",
    ),
    (
        {"messages": [Q, {**A, "content": [{"type": "tool_call", "value": "look()"}]}]},
        r"message 2: a tool call must be JSON: .* of 'look\(\)'",
    ),
    ({"messages": [Q, {**A, "reasoning": ["a"]}]}, r"message 2: 'reasoning' must be a string, not a list"),
    ({"messages": [Q, {**A, "name": 5}]}, r"message 2: 'name' must be a string, not an int"),
    ({"messages": [Q, {**A, "weight": 10**400}]}, r"message 2: 'weight' must be true, false or a number from 0 up"),
    ({"messages": [Q, {**A, "weight": 1e39}]}, r"message 2: 'weight' must be .* a number from 0 up, not 1e\+39"),
    (
        {"messages": [Q, {**A, "loss_weight": 1.0, "train": False}]},
        r"message 2: 'train' 0 and 'loss_weight' 1 say different things about the loss of one message; keep one",
    ),
    ({"messages": [Q, {**A, "weight": -1}]}, r"message 2: 'weight' must be true, false or a number from 0 up, not -1"),
    ({"messages": [Q, {**A, "weight": float("nan")}]}, r"message 2: 'weight' must be .*, not nan"),
    (
        {"messages": [Q, {**A, "train": "no"}]},
        r"message 2: 'train' must be true, false or a number from 0 up, not 'no'",
    ),
    ({"messages": [Q, {**A, "tool_calls": "look()"}]}, r"message 2: a tool call must be JSON: .* of 'look\(\)'"),
    ({"messages": [Q, {**A, "tool_calls": [{"arguments": {}}]}]}, r"message 2: a tool call needs a name and arguments"),
    (
        {"messages": [Q, {**A, "tool_calls": ["look"]}]},
        r"message 2: a tool call needs a name and arguments, not 'look'",
    ),
    (
        {"messages": [Q, {**A, "tool_calls": [{"name": "look", "arguments": "{at"}]}]},
        r"message 2: the arguments of a tool call must be JSON: .* at character 1 of '\{at'",
    ),
    (
        {"messages": [Q, {**A, "tool_calls": "[" * 100_000}]},
        r"message 2: a tool call cannot be read: brackets are nested too deeply, more than 100 lists or objects",
    ),
    (
        {"messages": [Q, A], "tools": '[{"name": "x", "parameters": ' + "[" * 100 + "]" * 100 + "}]"},
        r"'tools' cannot be read: brackets are nested too deeply",
    ),
    ({"messages": [Q, A], "tools": "nonsense"}, r"'tools' must be JSON"),
    ({"messages": [Q, A], "tools": {"name": "look"}}, r"'tools' must be a list of objects, not a dict"),
    ({"prompt": "x", "completion": ""}, r"'completion' is empty, so there is nothing to train on; remove the row"),
    ({"prompt": "x", "completion": [A]}, r"'prompt' and 'completion' must both be strings or both be lists of mess"),
    ({"prompt": None, "completion": "x"}, r"must both be strings or both be lists of messages, not nothing and a str"),
    ({"prompt": [Q], "completion": [Q]}, r"message 2: two user turns in a row"),
    ({"question": "x", "answer": 5}, r"'answer' must be a string, not an int"),
    ({"input_ids": []}, r"'input_ids' is empty; remove the row"),
    ({"input_ids": [1, 2], "attention_mask": [0, 0]}, r"'input_ids' is empty"),
    ({"input_ids": [1.5, 2]}, r"'input_ids' must be a list of integers"),
    ({"input_ids": "1 2"}, r"'input_ids' must be a list of integers"),
    ({"input_ids": [[1, 2]]}, r"'input_ids' must be a list of integers"),
    ({"input_ids": [[1], [2, 3]]}, r"'input_ids' must be a list of integers"),
    ({"input_ids": [1, 2**40]}, r"'input_ids' has 1099511627776, which is no token id"),
    ({"input_ids": [1, 2**70]}, r"'input_ids' must be a list of integers"),
    ({"input_ids": [1, 2], "labels": [1]}, r"'labels' has 1 values, 'input_ids' has 2; they must be as long"),
    ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, r"'labels' differs from 'input_ids' at 0.*must not be shifted"),
]


@pytest.mark.parametrize(("value", "problem"), BAD_ROWS)
def test_bad_rows(value: dict[str, Any], problem: str) -> None:
    place = "x.jsonl:9 " if problem.startswith("message") else "x.jsonl:9: "
    with pytest.raises(DataError, match=f"^{re.escape(place)}.*{problem}"):
        parse_row(value, "auto", "x.jsonl:9")


def test_a_row_of_another_format_than_the_rest_of_its_file() -> None:
    with pytest.raises(
        DataError,
        match=r"^x\.jsonl:2: no column 'messages', which rows of format messages have; the columns are text\. "
        "This row looks like text: put rows of different formats in files of their own",
    ):
        parse_row({"text": "x"}, "messages", "x.jsonl:2")
    with pytest.raises(DataError, match=r"^x\.jsonl:2: no column 'output', .*the columns are instruction$"):
        parse_row({"instruction": "x"}, "alpaca", "x.jsonl:2")
    with pytest.raises(DataError, match=r"no column 'completion'.*the columns are prompt$"):
        parse_row({"prompt": "x"}, "prompt-completion", "x.jsonl:2")
