from __future__ import annotations

import builtins
import bz2
import csv
import gzip
import json
import lzma
import os
import re
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import file_formats, sources
from danlu.data.raw_rows import BadRow, RawRow
from danlu.data.sources import fingerprint, read_rows, source_files, source_names
from danlu.recipe.sections import Source

ROWS = [
    {"instruction": 'Say "hi", please', "output": "你好\nthere"},
    {"instruction": "Two", "output": "2, or é"},
    {"instruction": "Three", "output": "3" * 200_000},  # longer than csv takes by itself
]


def read(path: Path | str, **options: Any) -> list[RawRow]:
    return list(read_rows(Source(path=str(path), **options)))


def values(path: Path | str, **options: Any) -> list[Any]:
    return [row.value for row in read(path, **options)]


def bad(path: Path | str) -> list[str]:
    return [row.value.message for row in read(path) if isinstance(row.value, BadRow)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["instruction", "output"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)


def write_arrow(path: Path, new: str = "new_file") -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with getattr(pyarrow.ipc, new)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_text(text: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    return lambda path: path.write_bytes(text.encode(encoding)) and None


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.json": write_text(json.dumps(ROWS)),
    "indented.json": write_text(json.dumps(ROWS, indent=2, ensure_ascii=False)),
    "marked.json": write_text(json.dumps(ROWS), "utf-8-sig"),
    "lines.json": write_text(lines(ROWS)),
    "a.jsonl": write_text(lines(ROWS)),
    "a.ndjson": write_text(lines(ROWS)),
    "A.JSONL": write_text(lines(ROWS)),
    "marked.jsonl": write_text(lines(ROWS), "utf-8-sig"),
    "gaps.jsonl": write_text("\n" + lines(ROWS).replace("\n", "\r\n\r\n")),
    "a.csv": write_csv,
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "stream.arrow": lambda path: write_arrow(path, "new_stream"),
}


def packed(name: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Writes what WRITERS writes to `name`, packed."""

    def write(path: Path) -> None:
        WRITERS[name](path)
        path.write_bytes(pack(path.read_bytes()))

    return write


def zstandard(data: bytes) -> bytes:
    import pyarrow

    half = len(data) // 2
    codec = pyarrow.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (data[:half], data[half:]))  # two frames


WRITERS |= {
    "a.jsonl.gz": packed("a.jsonl", gzip.compress),
    "A.JSON.GZ": packed("indented.json", gzip.compress),
    "a.csv.bz2": packed("a.csv", bz2.compress),
    "marked.jsonl.xz": packed("marked.jsonl", lzma.compress),
    "a.ndjson.zst": packed("a.jsonl", zstandard),
    "a.tsv.gz": packed("a.tsv", lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:])),  # two members
    "array.jsonl": write_text(json.dumps(ROWS)),
    "indented.jsonl": write_text("\n" + json.dumps(ROWS, indent=2)),
    "array.jsonl.gz": packed("a.json", gzip.compress),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    rows = read(tmp_path / name)
    assert [row.value for row in rows] == ROWS
    assert [row.index for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.json", ["a.json:1", "a.json:1", "a.json:1"]),
        ("indented.json", ["indented.json:2", "indented.json:6", "indented.json:10"]),
        ("a.jsonl", ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]),
        ("gaps.jsonl", ["gaps.jsonl:2", "gaps.jsonl:4", "gaps.jsonl:6"]),
        ("a.csv", ["a.csv:2", "a.csv:4", "a.csv:5"]),  # the first row has a line break in a field
        ("a.parquet", ["a.parquet row 1", "a.parquet row 2", "a.parquet row 3"]),
        ("a.arrow", ["a.arrow row 1", "a.arrow row 2", "a.arrow row 3"]),
    ],
)
def test_a_row_says_where_it_stands(name: str, places: list[str], tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert [row.where for row in read(tmp_path / name)] == places


def test_one_object_is_one_row(tmp_path: Path) -> None:
    for number, text in enumerate((json.dumps(ROWS[1]), json.dumps(ROWS[1], indent=2))):
        (tmp_path / f"{number}.json").write_text(text)
        assert values(tmp_path / f"{number}.json") == [ROWS[1]]


def test_names_of_files_that_are_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    file = Path(os.fsdecode(os.fsencode(folder) + b"/r\xff.jsonl"))
    file.write_text('{"text": "one"}\n{"text": \n')
    for path, name in ((folder, r"caf\xe9/r\xff.jsonl"), (file, r"r\xff.jsonl")):
        rows = list(read_rows(Source.model_construct(path=str(path), rows=None)))
        assert [row.where for row in rows] == [f"{name}:1", f"{name}:2"]
        [message] = [row.value.message for row in rows if isinstance(row.value, BadRow)]
        assert message.encode() and message.startswith(f"{name}:2:")
        assert len(fingerprint(Source.model_construct(path=str(path), rows=None))) == 32
    for path in ("a\0b.jsonl", "x" * 5000 + ".jsonl", "~nobody-here/a.jsonl"):
        with pytest.raises(DataError, match=r"\.jsonl: no such file"):
            read(path)


def test_only_as_much_is_read_as_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    path = tmp_path / "a.jsonl"
    assert values(f"{path}#2") == values(path, rows=2) == values(f"{path}#2", rows=3) == values(f"{path}#3", rows=2)
    assert values(f"{path}#2") == ROWS[:2]
    assert len(values(f"{path}#99")) == 3
    (tmp_path / "b.jsonl").write_text(lines(ROWS) + "broken")
    assert [row.value for row in islice(read_rows(Source(path=str(tmp_path / "b.jsonl"))), 3)] == ROWS
    (tmp_path / "odd#3").mkdir()
    (tmp_path / "odd#3/a.jsonl").write_text(lines(ROWS))
    assert len(values(tmp_path / "odd#3")) == 3  # a folder of that name, not the first 3 rows of another


def test_a_folder_is_read_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "part").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "b.jsonl").write_text(lines(ROWS[:1]))
    (folder / "part/a.json").write_text(json.dumps(ROWS[1:]))
    (folder / "README.md").write_text("about it")
    (folder / ".cache/notes.json").write_text("{}")
    rows = read(folder)
    assert [row.value for row in rows] == ROWS
    assert [row.where for row in rows] == ["set/b.jsonl:1", "set/part/a.json:1", "set/part/a.json:1"]
    assert [row.index for row in rows] == [0, 1, 2]


def test_a_folder_of_the_datasets_library(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    rows = read(tmp_path / "saved")
    assert [row.value for row in rows] == ROWS
    assert rows[0].where == "saved/data-00000-of-00001.arrow row 1"


# -- plain text --------------------------------------------------------------------------------------------------------


def documents(rows: list[Any]) -> list[str]:
    """Rows put together again."""
    found = []
    for row in rows:
        if row.get("document_begins", True):
            found.append("")
        found[-1] += row["text"]
    assert all(row.get("document_ends", True) for row in rows[-1:])
    return found


def test_a_text_file_is_one_document_or_several(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("A line.\n\nAnother.\n")
    assert values(tmp_path / "one.txt") == [{"text": "A line.\n\nAnother.\n"}]
    (tmp_path / "three.txt").write_bytes(
        b"\xef\xbb\xbfOne\r\n<|endoftext|>\nTwo <|endoftext|> two\n<|endoftext|>\r\nThree"
    )
    rows = read(tmp_path / "three.txt")
    assert [row.value for row in rows] == [{"text": "One\n"}, {"text": "Two <|endoftext|> two\n"}, {"text": "Three"}]
    assert [row.where for row in rows] == ["three.txt:1", "three.txt:3", "three.txt:5"]


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(file_formats, "TEXT_ROW_BYTES", 32)
    return 32


WORDS = st.sampled_from(["word", "longer word", "x" * 40, "é" * 20, "你好", "\n", "\n\n", " ", "\r\n", "😀" * 9, "-"])
ENDS = st.just("\n<|endoftext|>\n")


@settings(deadline=None)
@given(pieces=st.lists(st.one_of(WORDS, WORDS, WORDS, ENDS), max_size=30))
def test_the_rows_of_a_text_joined_are_the_text(pieces: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    text = "".join(pieces)
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    expected = [""]
    for line in text.replace("\r\n", "\n").splitlines(keepends=True):
        if line.rstrip("\n") == "<|endoftext|>":
            expected.append("")
        else:
            expected[-1] += line
    expected = [document for document in expected if document.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_formats, "TEXT_ROW_BYTES", 32)
        if not expected:
            with pytest.raises(DataError, match="a.txt: "):
                values(path)
            return
        rows = values(path)
    assert documents(rows) == expected
    assert all(len(row["text"].encode()) <= 6 * 32 for row in rows)


def test_long_documents_are_cut_at_blank_lines_lines_and_words(tmp_path: Path, small_rows: int) -> None:
    (tmp_path / "a.txt").write_text("one two three four\n" * 2 + "\nfive six\n\n" + "seven eight\n" * 9)
    texts = [row["text"] for row in values(tmp_path / "a.txt")]
    assert texts[0].endswith("three four\n\n") and texts[1].startswith("five six")
    assert all(text.endswith("\n") for text in texts)
    (tmp_path / "line.txt").write_text(" ".join(["word"] * 50))
    texts = [row["text"] for row in values(tmp_path / "line.txt")]
    assert len(texts) > 2 and all(text.startswith(" word") for text in texts[1:])
    (tmp_path / "zh.txt").write_text("你好" * 50)
    assert "".join(row["text"] for row in values(tmp_path / "zh.txt")) == "你好" * 50


def test_a_long_document_says_in_which_lines_its_rows_are(tmp_path: Path, small_rows: int) -> None:
    (tmp_path / "a.txt").write_text("a line of words\n" * 6 + "x" * 100 + "\nend\n")
    rows = read(tmp_path / "a.txt")
    assert [row.where for row in rows] == ["a.txt:1", "a.txt:5", "a.txt:7"]


# -- the hub -----------------------------------------------------------------------------------------------------------


def test_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: asked.append((path, name, split)) or made)
    rows = read("somebody/some-set#2", split="validation")
    assert [row.value for row in rows] == ROWS[:2]
    assert [row.where for row in rows] == ["somebody/some-set row 1", "somebody/some-set row 2"]
    assert asked == [("somebody/some-set", None, "validation")]
    assert fingerprint(Source(path="somebody/some-set")) == fingerprint(Source(path="somebody/some-set"))
    assert fingerprint(Source(path="somebody/some-set")) != fingerprint(Source(path="somebody/some-set#2"))


def test_a_hub_id_when_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "alpaca.jsonl").write_text(lines(ROWS))
    for name, hint in (("nobody/nothing-here", ""), ("alpaca-jsonl", r" \(did you mean alpaca\.jsonl\?\)")):
        problem = (
            rf"^{name}: no such file{hint}.*, and the hub data set '{name}' \(split 'train'\) cannot be loaded: "
            r"\w+: .*Without network, only sets that were loaded before are there"
        )
        for ask in (read, lambda path: fingerprint(Source(path=path))):
            with pytest.raises(DataError, match=problem):
                ask(name)


def test_a_set_without_the_split_names_those_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    def load(path: str, name: None, split: str) -> None:
        raise ValueError(f"Unknown split \"{split}\". Should be one of ['test', 'val-1'].")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = r"a/b: there is no split 'train'; it has test, val-1. Say which in the recipe: {path: a/b, split: test}"
    with pytest.raises(DataError, match=re.escape(told)):
        read("a/b")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"test": rows, "dev": rows.select([1])}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match="both: there is no split 'train'; it has test, dev. Say which in the recipe"):
        read(tmp_path / "both")
    assert [row.value for row in read(tmp_path / "both", split="dev")] == ROWS[1:2]
    assert [row.value for row in read(f"{tmp_path / 'both'}#1", split="test")] == ROWS[:1]
    prints = {fingerprint(Source(path=str(tmp_path / "both"), split=split)) for split in ("test", "dev")}
    assert len(prints) == 2
    (tmp_path / "both" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match="dataset_dict.json: the names of its splits cannot be read"):
        read(tmp_path / "both", split="dev")


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "alpaca_en.jsonl").write_text(lines(ROWS))
    with pytest.raises(
        DataError, match=rf"^{tmp_path}/alpaca_em\.jsonl: no such file \(did you mean .*/alpaca_en\.jsonl"
    ):
        read(tmp_path / "alpaca_em.jsonl")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^other\.parquet: no such file in {tmp_path}$"):
        read("other.parquet")
    with pytest.raises(DataError, match=rf"^data/a\.jsonl: no such file \(there is no folder data in {tmp_path}\)$"):
        read("data/a.jsonl")
    with pytest.raises(DataError, match=r"^gone\.csv: no such file"):
        read("gone.csv#5")
    with pytest.raises(DataError, match=r"^gone\.csv: no such file"):
        fingerprint(Source(path="gone.csv"))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_an_empty_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"{name}: the file is empty$"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "[]"), ("b.json", "[ \n ]"), ("a.jsonl", "\n \n"), ("a.csv", "a,b\n"), ("a.txt", "\n")],
)
def test_a_file_without_rows(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name}: there are no rows in it$"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "text", ["[1, 2]\n", "[]\n", "[{}, 3]\n", '[\x80{"a": 1}]\n'.encode("latin-1").decode("latin-1")]
)
def test_a_first_line_of_jsonl_in_brackets_may_be_a_bad_row(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(text + '{"text": "two"}\n', encoding="latin-1")
    assert [isinstance(row.value, BadRow) for row in read(tmp_path / "a.jsonl")] == [True, False]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst"])
@pytest.mark.parametrize("harm", ["torn", "other"])
def test_a_damaged_packed_file(name: str, harm: str, tmp_path: Path) -> None:
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard}[Path(name).suffix]
    data = pack(lines(ROWS * 50).encode())  # type: ignore[operator]
    (tmp_path / name).write_bytes(data[: len(data) // 2 - 3] if harm == "torn" else b"no such thing")
    kind = name.rpartition(".")[2]
    with pytest.raises(DataError, match=rf"^{re.escape(name)}: damaged, or no {kind} file: ."):
        read(tmp_path / name)


def test_a_line_that_fills_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "MAX_LINE_BYTES", 2**20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n' + b" " * 2**21))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: a line longer than 1 MiB, the most that a row may have"):
        read(tmp_path / "a.jsonl.gz")


def test_a_kind_of_file_that_cannot_be_read(tmp_path: Path) -> None:
    kinds = "arrow, csv, json, jsonl, ndjson, parquet, tsv, txt; json, lines and text also as bz2, gz, xz, zst"
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(DataError, match=rf"a\.xlsx: cannot read a '\.xlsx' file; the kinds are {kinds}$"):
        read(tmp_path / "a.xlsx")
    (tmp_path / "a").write_text("x")
    with pytest.raises(DataError, match=rf"a: cannot read a '' file; the kinds are {kinds}$"):
        read(tmp_path / "a")
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(DataError, match=rf"a\.parquet\.gz: cannot read a '\.parquet\.gz' file; the kinds are {kinds}$"):
        read(tmp_path / "a.parquet.gz")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl: rows cannot be read from it: it is a named pipe, not a file$"):
        read(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"empty: no data files in this folder; the kinds are {kinds}$"):
        read(tmp_path / "empty")


def test_no_rows_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=r"a\.jsonl#0: takes no rows at all; give at least #1$"):
        read(f"{tmp_path}/a.jsonl#0")
    assert read(f"{tmp_path}/a.jsonl#{'9' * 5000}") == read(tmp_path / "a.jsonl")
    assert len(list(sources.read_rows(Source(path=str(tmp_path / "a.jsonl"), rows=10**30)))) == len(ROWS)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("a\nb\n")

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read anything
    with pytest.raises(DataError, match=r"a\.csv: cannot be read: Permission denied$"):
        read(tmp_path / "a.csv")


LINES: list[tuple[str, str]] = [
    ('{"text": "x"', r"a\.jsonl:2:13: broken JSON: Expecting ',' delimiter; each line must be one whole JSON object"),
    ("[1, 2]", r"a\.jsonl:2: a row must be an object with named columns, this is of type list"),
    ('"x"', r"a\.jsonl:2: a row must be an object with named columns, this is of type str"),
    ("null", r"a\.jsonl:2: a row must be an object with named columns, this is of type NoneType"),
    ("text", r"a\.jsonl:2:1: broken JSON: Expecting value"),
    ('{"n": ' + "9" * 5000 + "}", r"a\.jsonl:2: unreadable JSON: a number has too many digits"),
    ('{"n": ' + "[" * 100_000, r"a\.jsonl:2: unreadable JSON: brackets are nested too deeply"),
    (
        '{"n": ' + "[" * 100 + "]" * 100 + "}",
        r"a\.jsonl:2: unreadable JSON: brackets are nested too deeply, more than 100",
    ),
]


@pytest.mark.parametrize(("line", "problem"), LINES)
def test_a_bad_line_of_jsonl_spares_the_others(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "one"}}\n{line}\n{{"text": "three"}}\n')
    rows = read(tmp_path / "a.jsonl")
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[0].value == {"text": "one"} and rows[2].value == {"text": "three"} and rows[2].where == "a.jsonl:3"
    (message,) = bad(tmp_path / "a.jsonl")
    assert re.match(problem, message), message


ARRAYS: list[tuple[str, str]] = [
    ('[{"a": 1},\n{"a": }]', r"a\.json:2:7: broken JSON: Expecting value"),
    ('[{"a": 1},\n{"a": 2}', r"a\.json:2:9: broken JSON: expecting ',' or '\]' after a row"),
    ('[{"a": 1}\n{"a": 2}]', r"a\.json:2:1: broken JSON: expecting ',' or '\]' after a row"),
    ('[{"a": 1},\n]', r"a\.json:2:1: broken JSON: a comma before the end of the array"),
    ('[{"a": 1}]\nx', r"a\.json:2:1: broken JSON: more text after the end"),
    ('{\n"a": 1', r"a\.json:2:7: broken JSON: Expecting ',' delimiter"),
    ('[{"a": 1},\n{"a": ' + "9" * 5000 + "}]", r"a\.json:2: unreadable JSON in the row that begins here: a number has"),
    ('[{"a": 1},\n{"a": ' + "[" * 100_000, r"a\.json:2: unreadable JSON in the row that begins here: brackets are nes"),
]


@pytest.mark.parametrize(("text", "problem"), ARRAYS)
def test_a_broken_array_of_json(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=f"^{problem}"):
        read(tmp_path / "a.json")


def test_a_value_in_an_array_that_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1},\n"x", {"a": 2}]')
    assert bad(tmp_path / "a.json") == ["a.json:2: a row must be an object with named columns, this is of type str"]
    assert [row.value for row in read(tmp_path / "a.json")][::2] == [{"a": 1}, {"a": 2}]


TABLES: list[tuple[str, str]] = [
    ("a,a\n1,2\n", r"a\.csv:1: the first line must name the columns, each once; it is \['a', 'a'\]"),
    ("a,\n1,2\n", r"a\.csv:1: the first line must name the columns, each once"),
    ('a,b\n1,"2\n', r"a\.csv:2: broken CSV: unexpected end of data"),
    ('a,b\n1,"2"x\n', r"a\.csv:2: broken CSV: "),
]


@pytest.mark.parametrize(("text", "problem"), TABLES)
def test_a_broken_table(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=f"^{problem}"):
        read(tmp_path / "a.csv")


def test_a_row_of_a_table_with_other_fields(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n\n4,5,6\n7,8\n")
    assert bad(tmp_path / "a.csv") == [
        "a.csv:3: 1 fields, but the first line names 2 columns",
        "a.csv:5: 3 fields, but the first line names 2 columns",
    ]
    assert [row.where for row in read(tmp_path / "a.csv")] == ["a.csv:2", "a.csv:3", "a.csv:5", "a.csv:6"]


@pytest.mark.parametrize("name", ["a.json", "lines.json", "a.csv", "a.txt"])
def test_text_that_is_not_utf8(name: str, tmp_path: Path) -> None:
    good = {"a.json": '[{"text": "x"},\n', "lines.json": '{"text": "x"}\n', "a.csv": "text\nx\n", "a.txt": "x\n"}[name]
    filler = {"a.json": '{"text": "x"},\n', "lines.json": '{"text": "x"}\n'}.get(name, "a line\n") * 3000
    broken = {"a.json": b'{"text": "caf\xe9"}]', "lines.json": b'{"text": "caf\xe9"}\n'}.get(name, b"caf\xe9\n")
    (tmp_path / name).write_bytes((good + filler).encode() + broken)
    line = (good + filler).count("\n") + 1  # far behind what a reader decodes at once
    problem = f"{name}:{line}: byte 0xe9 is not UTF-8 text; save the file as UTF-8"
    if name == "lines.json":
        assert bad(tmp_path / name) == [problem]
    else:
        with pytest.raises(DataError, match=f"^{re.escape(problem)}$"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "stream.arrow"])
@pytest.mark.parametrize("harm", ["torn", "other"])
def test_a_damaged_columnar_file(name: str, harm: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2 - 3] if harm == "torn" else b"ARROW1 is not what this is")
    kind = name.rpartition(".")[2]
    with pytest.raises(DataError, match=rf"^{name}: not a readable {kind} file: \S"):
        read(tmp_path / name)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(ROWS))
    first = fingerprint(Source(path=str(path)))
    os.utime(path, (0, 0))
    assert fingerprint(Source(path=str(path), weight=2.0)) == first
    seen = {first, fingerprint(Source(path=f"{path}#2")), fingerprint(Source(path=f"{path}#1"))}
    path.write_text(lines(ROWS[:2]))
    seen.add(fingerprint(Source(path=str(path))))
    assert len(seen) == 4
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(ROWS[:2]))
    seen.add(fingerprint(Source(path=str(folder))))
    (folder / "b.jsonl").write_text(lines(ROWS[2:]))
    seen.add(fingerprint(Source(path=str(folder))))
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    seen.add(fingerprint(Source(path=str(folder))))
    assert len(seen) == 7


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written now are old enough to be remembered."""
    real = time.time_ns
    monkeypatch.setattr(sources.time, "time_ns", lambda: real() + 10_000_000_000)


@pytest.mark.usefixtures("later")
def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "a.jsonl", tmp_path / "memory"
    path.write_text(lines(ROWS))
    source = Source(path=str(path))
    first = fingerprint(source, memory)
    assert first == fingerprint(source)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "open_decompressed", lambda file: pytest.fail("read again"))
        assert fingerprint(source, memory) == first
    # As long as before, and made to look as old: the time of the last status change still tells.
    before = path.stat()
    path.write_text(lines(ROWS).replace("Two", "Ten"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert fingerprint(source, memory) == fingerprint(source) != first


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    path, memory = tmp_path / "a.jsonl", tmp_path / "memory"
    path.write_text(lines(ROWS))
    fingerprint(Source(path=str(path)), memory)
    assert not memory.exists()


@pytest.mark.usefixtures("later")
def test_a_memory_that_is_damaged_or_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory = tmp_path / "a.jsonl", tmp_path / "memory"
    path.write_text(lines(ROWS))
    expected = fingerprint(Source(path=str(path)), memory)
    (entry,) = memory.iterdir()
    for damage in ("", "{", "[]", '{"state": 1}'):
        entry.write_text(damage)
        assert fingerprint(Source(path=str(path)), memory) == expected
    (tmp_path / "file").write_text("no folder")
    assert fingerprint(Source(path=str(path)), tmp_path / "file/memory") == expected


def test_nothing_heavy_is_loaded_for_rows_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def watched(name: str, *arguments: Any, **options: Any) -> Any:
        assert name.partition(".")[0] not in ("pyarrow", "datasets", "transformers", "torch"), f"{name} is loaded"
        return real(name, *arguments, **options)

    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    monkeypatch.setattr(builtins, "__import__", watched)
    read(tmp_path / "a.jsonl")
    fingerprint(Source(path=str(tmp_path / "a.jsonl")))


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/home/me/data/chat.jsonl"], ["chat.jsonl"]),
        (["~/chat.jsonl#500", "docs/", "tatsu-lab/alpaca"], ["chat.jsonl", "docs", "alpaca"]),
        (["data/en/chat.jsonl", "data/zh/chat.jsonl", "more.txt"], ["en/chat.jsonl", "zh/chat.jsonl", "more.txt"]),
        (["chat.jsonl", "old/chat.jsonl"], ["chat.jsonl", "old/chat.jsonl"]),
        (["a.jsonl#10", "b.jsonl", "a.jsonl"], ["a.jsonl (1)", "b.jsonl", "a.jsonl (2)"]),
        (["/a", "/", "."], ["a", "/", "."]),
        (["\udc80.jsonl"], ["\\udc80.jsonl"]),
    ],
)
def test_sources_are_called_by_as_much_of_their_paths_as_tells_them_apart(paths: list[str], names: list[str]) -> None:
    assert source_names([Source.model_construct(path=path) for path in paths]) == names


# -- subsets -----------------------------------------------------------------------------------------------------------

README = """---
configs:
- config_name: de
  data_files: de/train.jsonl
- config_name: fr-1.0
  data_files:
  - split: train
    path: fr/train.jsonl
  - split: test
    path: fr/test.jsonl
---
"""


@pytest.fixture
def with_subsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the layout of a hub data set that has two configurations."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "greetings"
    for name, text in (("de/train", "hallo"), ("fr/train", "salut"), ("fr/test", "adieu")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(lines([{"text": text}]))
    (folder / "README.md").write_text(README)
    return folder


def test_the_subset_of_a_folder_with_the_layout_of_the_hub(with_subsets: Path) -> None:
    """As `datasets` reads the `configs` of its README.md."""
    asked = {"de": [("de/train", "train")], "fr-1.0": [("fr/train", "train"), ("fr/test", "test")]}
    prints = set()
    for subset, parts in asked.items():
        for name, split in parts:
            (row,) = read(with_subsets, subset=subset, split=split)
            assert [row.value] == [json.loads((with_subsets / f"{name}.jsonl").read_text())]
            assert row.where == f"{with_subsets} row 1"
            prints.add(fingerprint(Source(path=str(with_subsets), subset=subset, split=split)))
    assert len(prints) == 3
    assert source_files(Source(path=str(with_subsets), subset="de")) is None
    # Without one, a folder's files are rows one after the other.
    assert len(read(with_subsets)) == 3


def test_the_subsets_that_there_are_are_named(with_subsets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = re.escape(f"it has de, fr-1.0. Say which in the recipe: {{path: {with_subsets}, subset: de}}")
    with pytest.raises(DataError, match=f"greetings: there is no subset 'nl'; {known}"):
        read(with_subsets, subset="nl")
    with pytest.raises(DataError, match=r"no split 'dev'; it has train\. Say .* subset: de, split: train\}"):
        read(with_subsets, subset="de", split="dev")
    file = with_subsets / "de" / "train.jsonl"
    with pytest.raises(
        DataError, match=r"train.jsonl: subset 'de' is given, and only hub data sets, and folders whose"
    ):
        read(file, subset="de")
    # A set of the hub that has several: `datasets` itself says so, of the folder in its place.
    import datasets

    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: load(str(with_subsets), name, split=split))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    told = "a/b: it has several subsets: de, fr-1.0. Say which in the recipe: {path: a/b, subset: de}"
    with pytest.raises(DataError, match=re.escape(told)):
        read("a/b")
    assert [row.value for row in read("a/b", subset="fr-1.0", split="test")] == [{"text": "adieu"}]


@pytest.mark.parametrize(
    "said",
    [
        "Couldn't find cache for b for config 'nl'\nAvailable configs in the cache: ['de', 'fr-1.0']",
        "There are multiple 'b' configurations in the cache: de, fr-1.0\nPlease specify which configuration to reload",
    ],
)
def test_the_subsets_of_the_local_cache_are_named(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are those of datasets/packaged_modules/cache/cache.py."""

    def load(path: str, name: str, split: str) -> None:
        raise ValueError(said)

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"it has de, fr-1\.0\. Say which in the recipe: \{path: a/b, subset: de\}"):
        read("a/b", subset="nl")


def test_sources_are_named_by_their_subsets() -> None:
    both = [Source(path="org/set", subset=subset) for subset in ("de", "fr")]
    assert source_names(both) == ["de", "fr"]
    assert source_names([*both, Source(path="org/other", subset="de")]) == ["set/de", "fr", "other/de"]
