"""Rows as prompts: what is taken, and where a mistake is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World

from danlu.core.errors import DataError
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.load_model import load_chat_tokenizer
from danlu.inference.prompt_rows import MAX_SHOWN_PROBLEMS, encode_rows, read_prompt_rows
from danlu.inference.prompts import has_rows
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_config

HELLO = {"role": "user", "content": "Hello"}
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def chat_tokenizer(tiny_world: World) -> ChatTokenizer:
    return load_chat_tokenizer(tiny_world.base)


@pytest.fixture(scope="module")
def config(tiny_world: World) -> ModelConfig:
    return read_config(tiny_world.base)


def written(folder: Path, *rows: Any) -> Path:
    """A file of rows; a string is a line as it stands."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "rows.jsonl"


def test_texts_and_conversations(tmp_path: Path, chat_tokenizer: ChatTokenizer, config: ModelConfig) -> None:
    file = written(
        tmp_path,
        {"prompt": "Tom has", "id": 7},
        {"messages": [BRIEF, HELLO]},
        {"messages": [HELLO], "system": "Be brief."},
        {"prompt": [BRIEF, HELLO]},
        {"messages": [{"from": "human", "value": "Hello"}]},
    )
    rows = read_prompt_rows(file)
    assert [row.index for row in rows] == [0, 1, 2, 3, 4]
    assert [row.where for row in rows] == [f"rows.jsonl:{number}" for number in range(1, 6)]
    assert rows[0].given == {"prompt": "Tom has"} and rows[2].given == {"messages": [HELLO]}
    tokens = encode_rows(rows, chat_tokenizer, config)
    assert tokens[0] == tuple(chat_tokenizer.encode_prompt("Tom has"))
    assert tokens[1] == tokens[2] == tokens[3] == tuple(chat_tokenizer.encode_chat([BRIEF, HELLO]))
    assert tokens[4] == tuple(chat_tokenizer.encode_chat([HELLO])) != tokens[1]
    asked = encode_rows(rows, chat_tokenizer, config, as_turn=True)
    assert asked[0] == tuple(chat_tokenizer.encode_chat_prompt("Tom has")) != tokens[0]
    assert asked[1:] == tokens[1:], "a conversation is one either way"


def test_a_json_file_may_be_an_array(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1), encoding="utf-8")
    assert [row.text for row in read_prompt_rows(file)] == ["a", "b"]
    names = ("x.json", "x.jsonl", "x.JSONL", "x.jsonl.gz", "x.json.txt", "x.txt", "x")
    assert [name for name in names if has_rows(Path(name))] == ["x.json", "x.jsonl", "x.JSONL", "x.jsonl.gz"]


WRONG: dict[str, tuple[Any, str]] = {
    "key": (
        {"id": 3, "promt": "Tom"},
        "rows.jsonl:2:11: no 'prompt' and no 'messages', one of which a row must have; the keys are id, promt. "
        "'promt': Did you mean 'prompt'?",
    ),
    "other keys": ({"text": "Tom"}, "rows.jsonl:2: no 'prompt' and no 'messages', one of which a row must have; the k"),
    "json": ('{"prompt": "Tom",}', "rows.jsonl:2:18: broken JSON: "),
    "no object": ("[1, 2]", "rows.jsonl:2: a row must be an object with named columns, this is of type list"),
    "both": ({"prompt": "Tom", "messages": [HELLO]}, "rows.jsonl:2: both 'prompt' and 'messages'; keep the one"),
    "type": ({"prompt": 3}, "rows.jsonl:2:2: 'prompt' must be a text or a list of messages, not an int"),
    "messages": ({"messages": "Tom"}, "rows.jsonl:2:2: 'messages' must be a list of messages, not a str"),
    "no messages": ({"messages": []}, "rows.jsonl:2:2: 'messages' is an empty list; there is nothing to answer"),
    "role": (
        {"messages": [{"role": "usr", "content": "Hello"}]},
        "rows.jsonl:2 message 1: unknown role 'usr'. Known roles: system, developer, user,",
    ),
    "key of a message": (
        {"messages": [{"role": "user", "contnet": "Hello"}]},
        "rows.jsonl:2:32: unknown key 'contnet' of a message. Did you mean 'content'?",
    ),
    "order": ({"messages": [HELLO, BRIEF]}, "rows.jsonl:2 message 2: a system message must come first"),
    "answered": (
        {"messages": [HELLO, {"role": "assistant", "content": "Hi"}]},
        "rows.jsonl:2: the conversation ends with the assistant's turn, so there is nothing to answer; remove it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_no_prompts(tmp_path: Path, what: str) -> None:
    row, message = WRONG[what]
    with pytest.raises(DataError) as error:
        read_prompt_rows(written(tmp_path, {"prompt": "fine"}, row))
    assert str(error.value).startswith(message)
    assert len(read_prompt_rows(written(tmp_path, {"prompt": "fine"}))) == 1  # control


def test_the_role_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="function_call. Did you mean 'user'\\?$"):
        read_prompt_rows(written(tmp_path, {"messages": [{"role": "usr", "content": "Hello"}]}))
    with pytest.raises(DataError, match="function_call$"):
        read_prompt_rows(written(tmp_path, {"messages": [{"role": "xyz", "content": "Hello"}]}))


def test_prompts_that_the_model_cannot_continue(
    tmp_path: Path, chat_tokenizer: ChatTokenizer, config: ModelConfig
) -> None:
    rows = read_prompt_rows(written(tmp_path, {"prompt": ""}, {"prompt": "Tom"}, {"prompt": "zq" * 400}))
    with pytest.raises(DataError) as error:
        encode_rows(rows, chat_tokenizer, config)
    empty, long = str(error.value).split("\n  ")
    assert empty.startswith("rows.jsonl:1: ") and "the prompt is empty, and this tokenizer has no beginning" in empty
    assert long.startswith("rows.jsonl:3: the prompt has ") and f"sees {config.context_length} tokens" in long
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has \d+ tokens and the adapter 127"):
        encode_rows(rows[1:2], chat_tokenizer, config, virtual_tokens=127)
    assert len(encode_rows(rows[1:2], chat_tokenizer, config)) == 1  # control


def test_all_problems_are_told_at_once_but_not_thousands(tmp_path: Path) -> None:
    count = MAX_SHOWN_PROBLEMS + 3
    with pytest.raises(DataError) as error:
        read_prompt_rows(written(tmp_path, *[{"promt": "x"}] * count, {"prompt": "fine"}))
    lines = str(error.value).split("\n  ")
    assert [line.partition(":2: ")[0] for line in lines[:-1]] == [
        f"rows.jsonl:{number}" for number in range(1, MAX_SHOWN_PROBLEMS + 1)
    ]
    assert lines[-1] == "and 3 rows more"


def test_files_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty.jsonl: the file is empty"):
        read_prompt_rows(tmp_path / "empty.jsonl")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="blank.jsonl: there are no rows in it"):
        read_prompt_rows(tmp_path / "blank.jsonl")
    with pytest.raises(DataError, match="none.jsonl: .*No such file"):
        read_prompt_rows(tmp_path / "none.jsonl")
