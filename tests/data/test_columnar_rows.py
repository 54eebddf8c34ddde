"""Nested columns of Parquet, Arrow and hub data sets: rows are those that were written, without filled-in nulls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from builders.chat_tokenizers import tokenizer_and_oracle
from builders.rendering import render

from danlu.data.preference_rows import parse_answers
from danlu.data.prompt_formats import parse_prompt
from danlu.data.raw_rows import BadRow
from danlu.data.render import RenderSettings
from danlu.data.rows import parse_row
from danlu.data.sources import read_rows
from danlu.recipe.sections import Source


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


def row(name: str, arguments: dict[str, Any], **properties: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "And the sea?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "calm", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is calm."},
        ],
        "tools": [tool(name, **properties)],
    }


# As no two rows of tool use are alike: other tools with other arguments. Keys have the order of their column.
ROWS = [
    row("sail", {"crew": [{"name": "Anne"}], "port": "Brest"}, port={"type": "string", "enum": ["Brest", "Lorient"]}),
    row(
        "fuel",
        {"crew": [{"age": 30}, {"name": "Yann", "age": 8}], "litres": 3},
        litres={"type": "number", "minimum": 1},
    ),
]


Table = datasets.Dataset
"""What rows are written from; it takes the options that a test gives."""


def write_parquet(table: Table, path: Path) -> str:
    table.to_parquet(path / "a.parquet")
    return str(path / "a.parquet")


def write_arrow(table: Table, path: Path) -> str:
    with pyarrow.ipc.new_file(str(path / "a.arrow"), table.data.schema) as writer:
        writer.write_table(table.data.table)
    return str(path / "a.arrow")


def write_folder(table: Table, path: Path) -> str:
    table.save_to_disk(str(path / "saved"))
    return str(path / "saved")


@pytest.fixture(params=[write_parquet, write_arrow, write_folder, "hub"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Writes rows in a columnar form, and reads them."""

    def written_and_read(rows: list[dict[str, Any]], **options: Any) -> list[Any]:
        table, path = datasets.Dataset.from_list(rows, **options), "somebody/some-set"
        if request.param == "hub":
            monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: table)
        else:
            path = request.param(table, tmp_path)
        return [raw.value for raw in read_rows(Source(path=path))]

    return written_and_read


def test_nested_columns_hold_what_was_written(read: Callable[..., list[Any]]) -> None:
    filled = pyarrow.Table.from_pylist(ROWS).to_pylist()
    assert filled[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["litres"] is None, "what is to be mended"
    assert read(ROWS) == ROWS


def test_rows_of_every_stage_are_those_of_a_jsonl(read: Callable[..., list[Any]]) -> None:
    tokenizer, _ = tokenizer_and_oracle("qwen3")
    for value, original in zip(read(ROWS), ROWS, strict=True):
        of_columns, of_lines = (parse_row(each, "auto", "row") for each in (value, original))
        assert of_columns == of_lines and parse_prompt(value, None, "auto", "row") == parse_prompt(
            original, None, "auto", "row"
        )
        texts = [
            tokenizer.decode(render(each, "row", tokenizer, RenderSettings())[0].tokens.tolist())
            for each in (of_columns, of_lines)
        ]
        assert texts[0] == texts[1] and "null" not in texts[0]


def test_pairs_too(read: Callable[..., list[Any]]) -> None:
    pairs = []
    for number, original in enumerate(ROWS):
        answer = [{"role": "assistant", "content": f"No {number}."}]
        prompt = original["messages"][:1]
        pairs.append(
            {"prompt": prompt, "chosen": original["messages"][1:2], "rejected": answer, "tools": original["tools"]}
        )
    for value, original in zip(read(pairs), pairs, strict=True):
        parsed = [parse_answers(each, "auto", "preference", "row") for each in (value, original)]
        assert parsed[0] == parsed[1]


def test_nulls_in_lists_and_of_columns_stay(read: Callable[..., list[Any]]) -> None:
    rows = [{"labels": [True, None], "of": [{"a": 1}, None], "text": None}, {"labels": [], "of": None, "text": "b"}]
    assert read(rows) == rows


JSON_ROWS: list[dict[str, Any]] = [
    {**copy.deepcopy(ROWS[0]), "facts": {"port": "Brest", "depth": None}, "text": "[1]"},
    {**copy.deepcopy(ROWS[1]), "facts": "a text", "text": "2"},
]


def test_json_columns_are_read_as_objects(read: Callable[..., list[Any]]) -> None:
    """`datasets.Json`, of datasets 5 (features/features.py): the Arrow type `arrow.json`, also within lists."""
    features = str(datasets.Dataset.from_list(JSON_ROWS, on_mixed_types="use_json").features)
    assert "Json" in features
    assert read(JSON_ROWS, on_mixed_types="use_json") == JSON_ROWS, "a null of JSON is what the row says"


def test_json_that_is_none_is_a_bad_row(tmp_path: Path) -> None:
    texts = ['{"a": 1}', '{"a": ', "[" * 101 + "]" * 101, "[" * 100_000]
    column = pyarrow.array(texts, pyarrow.json_())
    pyarrow.parquet.write_table(pyarrow.table({"facts": column}), tmp_path / "a.parquet")
    first, *others = [raw.value for raw in read_rows(Source(path=str(tmp_path / "a.parquet")))]
    assert first == {"facts": {"a": 1}} and all(isinstance(other, BadRow) for other in others)
    assert others[0].message.startswith("a.parquet row 2: unreadable JSON in column 'facts': ")
    assert "nested too deeply" in others[1].message and "nested too deeply" in others[2].message


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.struct({"a": pyarrow.int64(), "b": pyarrow.int64()}))
    column = pyarrow.array([[("x", {"a": 1}), ("y", None)], []], kind)
    pyarrow.parquet.write_table(pyarrow.table({"facts": column}), tmp_path / "a.parquet")
    values = [raw.value for raw in read_rows(Source(path=str(tmp_path / "a.parquet")))]
    assert values == [{"facts": {"x": {"a": 1}, "y": None}}, {"facts": {}}]
