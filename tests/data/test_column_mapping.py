"""Columns under other names: `data.columns` of a recipe, and LLaMA-Factory's dataset_info.json next to a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import DataError
from danlu.data import sources
from danlu.data.column_mapping import LOOKED_THROUGH, ColumnMapping
from danlu.data.preference_rows import Pair, first_row_type, parse_answers
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.rows import Completion, Conversation, Text, detect_format, parse_row
from danlu.data.sources import column_lines, column_mappings, read_rows
from danlu.recipe.sections import Source


def write(path: Path, *rows: Any) -> Source:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return Source(path=str(path))


def first(source: Source, columns: dict[str, str | None] | None = None) -> dict[str, Any]:
    row = pickle.loads(pickle.dumps(next(iter(read_rows(source, columns)))))  # noqa: S301 as another process gets it
    assert isinstance(row.value, dict), row.value
    return dict(row.value)


def said(row: Any) -> list[tuple[str, str]]:
    assert isinstance(row, Conversation)
    return [(message.role, message.content) for message in row.messages]


def outcome(row: dict[str, Any]) -> Any:
    """The messages of a row, the row as it is parsed, or why it is none."""
    try:
        parsed = parse_row(row, "auto", "row")
    except DataError as error:
        return str(error)
    return said(parsed) if isinstance(parsed, Conversation) else parsed


TURNS = [{"who": "customer", "said": "Hi"}, {"who": "agent", "said": "Hello"}]
TAGS = {"role_tag": "who", "content_tag": "said", "user_tag": "customer", "assistant_tag": "agent"}
GOT = [("user", "Hi"), ("assistant", "Hello")]
FORMS: list[tuple[dict[str, Any], dict[str, str | None], Any]] = [
    ({"ques": "1 +", "resp": " 1"}, {"prompt": "ques", "completion": "resp"}, Completion("1 +", " 1")),
    ({"ques": "Hi", "resp": "Hello"}, {"question": "ques", "answer": "resp"}, GOT),
    ({"ques": "Hi", "resp": "Hello"}, {"instruction": "ques", "output": "resp"}, GOT),
    ({"a": "H", "b": "i", "resp": "Hello"}, {"query": "{a}{b}", "response": "resp"}, GOT),
    ({"title": "A", "body": "b", "n": 3}, {"text": "{title}\n{body} {n} {{}}"}, Text("A\nb 3 {}")),
    ({"title": "A", "text": "b"}, {"text": "{title}\n{text}"}, Text("A\nb")),
    ({"prompt": "1", "completion": "+"}, {"prompt": "completion", "completion": "prompt"}, Completion("+", "1")),
    ({"dialog": TURNS}, {"messages": "dialog", **TAGS}, GOT),
    ({"dialog": json.dumps(TURNS)}, {"conversations": "dialog", **TAGS}, GOT),
    ({"messages": TURNS}, TAGS, GOT),
    # Columns of another format, and another prompt, that are not named.
    ({"body": "b", "messages": [], "chosen": "x", "rejected": "y"}, {"text": "body"}, Text("b")),
    ({"ques": "Hi", "question": "No", "resp": "Hello"}, {"query": "ques", "response": "resp"}, GOT),
    ({"question": "Hi", "answer": "Hello", "label": 1}, {"label": None}, GOT),
    # Columns keep their names where `columns` does not mention them.
    (
        {"ques": "Hi", "resp": "Hello", "system": "S"},
        {"question": "ques", "answer": "resp"},
        [("system", "S"), *GOT],
    ),
]


@pytest.mark.parametrize(("given", "columns", "meant"), FORMS)
def test_every_row_form_is_read_from_other_columns(given: Any, columns: Any, meant: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", given)
    own = source.model_copy(update={"columns": columns})
    assert outcome(first(source, columns)) == outcome(first(own, {"text": "other"})) == meant
    assert outcome(first(source, {})) != meant


def test_pairs_and_judged_answers(tmp_path: Path) -> None:
    pair = {"ques": "1 +", "good": " 1", "bad": " 2", "messages": [], "prompt": "other"}
    columns: dict[str, str | None] = {"prompt": "ques", "chosen": "good", "rejected": "bad"}
    source = write(tmp_path / "pairs.jsonl", pair)
    row = parse_answers(first(source, columns), "auto", "preference", "row")
    assert row == Pair(Completion("1 +", " 1"), Completion("1 +", " 2"))
    assert first_row_type(source, columns) == "preference"
    judged = write(tmp_path / "judged.jsonl", {"question": "Hi", "answer": "Hello", "fine": True})
    assert first_row_type(judged) is None and first_row_type(judged, {"label": "fine"}) == "unpaired"


def test_rewards_see_a_row_under_both_names() -> None:
    mapping = ColumnMapping.of({"prompt": "ques", "answer": "gold"}, "data.columns")
    row = RawRow(0, "r:1", {"ques": "2 + 3", "gold": "5", "prompt": "x"}, mapping)
    assert row.columns == {"ques": "2 + 3", "gold": "5", "prompt": "2 + 3", "answer": "5"}


BROKEN: list[tuple[dict[str, str | None], list[Any], str]] = [
    (
        {"prompt": "quess", "completion": "resp"},
        [{"ques": "a", "resp": "b"}],
        "rows.jsonl: data.columns: prompt: there is no column 'quess' in its rows, of which the first have 'ques', "
        "'resp'. Did you mean 'ques'?",
    ),
    ({"text": "{titel} {text}"}, [{"title": "a", "text": "b"}], "text: there is no column 'titel' .* mean 'title'"),
    ({"question": "q", "answer": "a", "system": "sys"}, [{"q": "a", "a": "b"}], "system: there is no column 'sys'"),
]


@pytest.mark.parametrize(("columns", "rows", "message"), BROKEN)
def test_columns_that_no_row_has(columns: Any, rows: list[Any], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError, match=message):
        next(iter(read_rows(source, columns)))


LATE: list[tuple[dict[str, str | None], dict[str, Any], dict[str, Any]]] = [
    ({"question": "q", "answer": "a", "system": "sys"}, {"q": "Hi", "a": "Hello"}, {"sys": "S"}),
    (
        {"question": "q", "answer": "a", "system": 'the "système"/é'},
        {"q": "Hi", "a": "Hello"},
        {'the "système"/é': "S"},
    ),
    ({"prompt": "q", "completion": "a"}, {"q": "Hi"}, {"a": "Hello"}),
]


@pytest.mark.parametrize(("columns", "row", "more"), LATE)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_column_may_come_first_behind_the_rows_that_are_looked_through(
    columns: Any, row: Any, more: Any, escaped: bool, tmp_path: Path
) -> None:
    lines = [json.dumps(each, ensure_ascii=escaped) for each in [row] * (LOOKED_THROUGH + 2) + [row | more]]
    file = tmp_path / "rows.jsonl"
    ((column, text),) = more.items()
    file.write_text("\n".join(line.replace("/", "\\/") if escaped else line for line in lines), encoding="utf-8")
    name = next(name for name, given in columns.items() if given == column)
    *without, last = (each.value for each in read_rows(Source(path=str(file)), columns))
    assert len(without) == LOOKED_THROUGH + 2
    assert all(isinstance(value, dict) and name not in value for value in without)
    assert isinstance(last, dict) and last[name] == text
    # Rows that are not taken do not count.
    with pytest.raises(DataError, match=f"{name}: there is no column .* in its rows, of which the first have '"):
        next(iter(read_rows(Source(path=f"{file}#{LOOKED_THROUGH + 2}"), columns)))


def test_rows_that_cannot_be_read_without_a_column_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "rows.jsonl", *[{"body": "a"}] * LOOKED_THROUGH, {"bodi": "b"})

    def read_on(*_: Any) -> dict[str, str]:
        raise AssertionError("the rows behind the first are read")

    monkeypatch.setattr(sources, "_absent_throughout", read_on)
    refused: list[dict[str, str | None]] = [{"text": "bodi"}, {"text": "{body} {bodi}"}]
    for columns in refused:
        with pytest.raises(DataError, match=r"text: there is no column 'bodi' in its rows, .* Did you mean 'body'\?"):
            next(iter(read_rows(source, columns)))
    with pytest.raises(AssertionError):  # these have another text
        next(iter(read_rows(source, {"text": "body", "system": "bodi"})))


def test_a_row_without_a_column_that_others_have_is_a_bad_row(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", {"title": "a", "body": "b"}, {"body": "c"}, {"title": None, "body": "d"})
    good, lacking, null = read_rows(source, {"text": "{title}\n{body}"})
    assert good.value == {"text": "a\nb"}
    assert isinstance(lacking.value, BadRow) and isinstance(null.value, BadRow)
    assert lacking.value.message.startswith("rows.jsonl:2: data.columns: text: the template names the column 'title'")
    assert null.value.message.startswith("rows.jsonl:3: data.columns: text: the column 'title' of the template holds")
    optional = write(tmp_path / "more.jsonl", {"q": "a", "a": "b", "sys": "S"}, {"q": "c", "a": "d"})
    with_system, without = read_rows(optional, {"question": "q", "answer": "a", "system": "sys"})
    assert "system" in dict(with_system.value) and without.value == {"question": "c", "answer": "d"}  # type: ignore[arg-type]


def test_the_error_for_unknown_columns_shows_the_line_to_write() -> None:
    cases: list[tuple[Any, str]] = [
        ({"ques": "a", "resp": "b"}, r"data.columns: {question: ques, answer: resp} for a conversation"),
        ({"my answer": "b", "q": "a"}, r'{prompt: q, completion: "my answer"} for texts as they stand'),
        ({"body": "a"}, r"Or name it in the recipe: data.columns: {text: body}"),
        ({"dialog": TURNS, "id": "x"}, r"Or name them in the recipe: data.columns: {messages: dialog}"),
    ]
    for row, line in cases:
        with pytest.raises(DataError) as error:
            detect_format(row)
        assert line in str(error.value)
    with pytest.raises(DataError, match=r"Or name them: data.columns: {role_tag: who, content_tag: said}"):
        parse_row({"messages": TURNS}, "auto", "row")


# -- dataset_info.json -------------------------------------------------------------------------------------------------

# Entries in the form of the README in LLaMA-Factory's data folder (hiyouga/LLaMA-Factory, data/README.md).
ENTRIES: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    (
        "alpaca",
        {"columns": {"prompt": "ques", "query": "more", "response": "resp", "system": "sys"}},
        {"ques": "H", "more": "i", "resp": "Hello", "sys": "S", "history": [["a", "b"]]},
        [("system", "S"), ("user", "H\ni"), ("assistant", "Hello")],
    ),
    ("documents", {"columns": {"prompt": "content"}}, {"content": "Once", "instruction": "x"}, Text("Once")),
    (
        "sharegpt",
        {"formatting": "sharegpt", "columns": {"messages": "dialog"}, "tags": {**TAGS, "system_tag": "boss"}},
        {"dialog": [{"who": "boss", "said": "S"}, *TURNS], "system": "other"},
        [("system", "S"), *GOT],
    ),
    (
        "openai messages",
        {
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        },
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        GOT,
    ),
    ("tags alone", {"formatting": "sharegpt", "tags": TAGS}, {"conversations": TURNS}, GOT),
]


@pytest.mark.parametrize(("name", "entry", "given", "meant"), ENTRIES)
def test_a_dataset_info_next_to_a_file_is_read(name: str, entry: Any, given: Any, meant: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", given)
    others = {"other": {"file_name": "other.jsonl"}, "hub": {"hf_hub_url": "a/b"}}
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps({**others, name: {"file_name": "rows.jsonl", **entry}}), encoding="utf-8")
    assert outcome(first(source)) == meant
    (line,) = column_lines([source])
    assert line.startswith(f"data: columns as {info}: {name} has them: ")
    folder = Source(path=str(tmp_path))  # the description is no file of rows
    assert len(list(read_rows(folder))) == 1 and first(folder) == first(source)
    assert column_mappings(source, {}) == [] and column_lines([source], {}) == []
    assert first(source, {}) == given


def test_a_pair_by_dataset_info(tmp_path: Path) -> None:
    prompt = [{"who": "customer", "said": "Hi"}]
    good, bad = ({"who": "agent", "said": text} for text in ("Hello", "No"))
    source = write(tmp_path / "pairs.jsonl", {"dialog": prompt, "win": good, "lose": bad})
    columns = {"messages": "dialog", "chosen": "win", "rejected": "lose"}
    entry = {"file_name": "pairs.jsonl", "ranking": True, "formatting": "sharegpt", "columns": columns, "tags": TAGS}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"pairs": entry}), encoding="utf-8")
    pair = parse_answers(first(source), "auto", "preference", "row")
    assert isinstance(pair, Pair) and said(pair.chosen) == GOT and said(pair.rejected)[-1] == ("assistant", "No")


def test_a_dataset_info_without_columns_or_of_another_tool_changes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", {"instruction": "Hi", "output": "Hello", "system": "S"})
    info = tmp_path / "dataset_info.json"
    for entries in (
        {"mine": {"file_name": "rows.jsonl"}},
        {"mine": {"file_name": "rows.jsonl", "formatting": "alpaca"}},
        {"builder_name": "json", "features": {"text": {"dtype": "string"}}, "splits": {"train": {"name": "train"}}},
    ):
        info.write_text(json.dumps(entries), encoding="utf-8")
        assert column_mappings(source) == [] and first(source)["system"] == "S"


BROKEN_INFOS: list[tuple[str, str]] = [
    (
        '{"mine": ',
        "dataset_info.json:1:10: broken JSON: Expecting value. Correct it; or say data.columns in the recipe",
    ),
    ("[]", "expected an object with an entry for each data set"),
    ('{"mine": {"file_name": "rows.jsonl", "formatting": "chat"}}', "mine: formatting 'chat' is none of alpaca"),
    ('{"mine": {"file_name": "rows.jsonl", "columns": ["a"]}}', "mine: columns: expected an object of texts"),
    ('{"mine": {"file_name": "rows.jsonl", "columns": {"promt": "ques"}}}', "mine: 'promt' is the name of no column"),
    ('{"mine": {"file_name": "rows.jsonl", "columns": {"prompt": "gone"}}}', "mine: text: there is no column 'gone'"),
    (
        '{"a": {"file_name": "rows.jsonl", "columns": {"prompt": "ques"}}, "b": {"file_name": "rows.jsonl"}}',
        "a and b name other columns of rows.jsonl. Say which in data.columns",
    ),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_INFOS)
def test_a_broken_dataset_info(text: str, message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", {"ques": "a", "resp": "b"})
    (tmp_path / "dataset_info.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        first(source)
    assert message in str(error.value)
    assert first(source, {}) == {"ques": "a", "resp": "b"}  # as the message says
