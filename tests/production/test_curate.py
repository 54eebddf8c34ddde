"""Stage curate: the rows and accounts of steps in memory, the same bytes whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from builders.curated_sets import STEPS, bytes_of, careless_engine, curated, settings_of, write_rows, write_sources

from danlu.core.errors import DataError, ResourceError
from danlu.curation.near_duplicates import NearDuplicates
from danlu.curation.quality.gopher import GopherRules
from danlu.curation.rows import Row
from danlu.curation.run_steps import run_steps
from danlu.curation.steps import Marks
from danlu.data.sources import read_rows
from danlu.production import work_files
from danlu.production.data_set import DataSetWriter
from danlu.production.ledger import Decision, read_ledger
from danlu.production.shards import RowColumns, read_shard, split_into_shards
from danlu.recipe.sections import Source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    return write_sources(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def expected(sources: list[Source], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected") / "out"
    curated(settings_of(sources, folder))
    return bytes_of(folder)


def rows_of(sources: Sequence[Source], folder: Path) -> list[Row]:
    work = work_files.WorkFolder(folder)
    shards = [(shard, read_shard(shard, work)) for shard in split_into_shards(sources, work)]
    columns = [content.read(number) for shard, content in shards for number in range(shard.rows)]
    return [each.row for each in columns if isinstance(each, RowColumns)]


def test_it_is_what_steps_in_memory_give(sources: list[Source], expected: dict[str, bytes], tmp_path: Path) -> None:
    result = run_steps([rows_of(sources, tmp_path / "work")], STEPS)
    (tmp_path / "ledger.jsonl.zst").write_bytes(expected["ledger.jsonl.zst"])
    lines = list(read_ledger(tmp_path / "ledger.jsonl.zst"))
    assert [(line.id, line.outcome, list(line.decisions)) for line in lines] == [
        (account.id, account.outcome, [Decision.of(step, verdict) for step, verdict in account.decisions])
        for account in result.accounts
    ]
    fates = {(line.decisive.step, line.outcome) for line in lines if line.decisive}
    assert {step for step, _ in fates} == {step.name for step in STEPS}  # each has something to do
    written = tmp_path / "rows.jsonl"
    written.write_bytes(expected["rows/00000.jsonl"])
    texts = [[part.text for part in row.parts] for row in result.rows]
    texts_there = [
        [value["text"]] if "text" in value else [turn["content"] for turn in value["messages"]] if "messages" in value
        else [value["question"], value["answer"]]
        for value in map(json.loads, written.read_text(encoding="utf-8").splitlines())
    ]  # fmt: skip
    assert texts_there == texts


def test_a_row_that_stays_stands_as_it_came(sources: list[Source], expected: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl.zst").write_bytes(expected["ledger.jsonl.zst"])
    files = [Path(source.path).read_bytes().splitlines() for source in sources]
    lines = [line for line in read_ledger(tmp_path / "ledger.jsonl.zst") if line.outcome != "dropped"]
    written = expected["rows/00000.jsonl"].splitlines()
    assert len(written) == len(lines)
    for line, row in zip(lines, written, strict=True):
        assert (row == files[line.source][line.row]) == (line.outcome == "kept")
        assert json.loads(row).keys() == json.loads(files[line.source][line.row]).keys()


def test_the_folder_is_a_source(sources: list[Source], tmp_path: Path) -> None:
    result = curated(settings_of(sources, tmp_path / "out"))
    assert len(list(read_rows(Source(path=str(tmp_path / "out"))))) == result.remaining
    assert len(list(read_rows(Source(path=str(tmp_path))))) == result.remaining  # also from a folder above it


def test_the_size_of_shards_changes_no_row(sources: list[Source], expected: dict[str, bytes], tmp_path: Path) -> None:
    curated(settings_of(sources, tmp_path / "out", shard_rows=30, shard_bytes=1500))
    assert bytes_of(tmp_path / "out")["rows/00000.jsonl"] == expected["rows/00000.jsonl"]


def test_an_engine_that_shuffles_repeats_and_loses_tasks(
    sources: list[Source], expected: dict[str, bytes], tmp_path: Path
) -> None:
    settings = settings_of(sources, tmp_path / "out")
    curated(settings, run_tasks=careless_engine(settings, seed=3))
    assert bytes_of(tmp_path / "out") == expected


def test_it_would_be_seen_if_the_order_decided(
    sources: list[Source], expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: a summary that keeps what comes first gives other bytes."""
    monkeypatch.setattr(NearDuplicates, "merge", lambda step, summaries: summaries[0])
    settings = settings_of(sources, tmp_path / "out")
    curated(settings, run_tasks=careless_engine(settings, seed=3))
    assert bytes_of(tmp_path / "out") != expected


class Killed(BaseException):
    pass


def test_killed_at_any_write_it_goes_on(
    sources: list[Source], expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, count = work_files.WorkFolder.write, [0]

    def dies_often(folder: work_files.WorkFolder, name: str, content: bytes) -> None:
        count[0] += 1
        if count[0] % 40 == 0:
            (folder.folder / name).write_bytes(content[: len(content) // 2])  # torn, as by a power cut
            raise Killed
        write(folder, name, content)

    monkeypatch.setattr(work_files.WorkFolder, "write", dies_often)
    kills = 0
    while True:
        try:
            curated(settings_of(sources, tmp_path / "out"))
            break
        except Killed:
            kills += 1
            assert not (tmp_path / "out" / "data-card.json").exists()
    assert kills > 3
    assert bytes_of(tmp_path / "out") == expected


def test_killed_before_the_end_it_goes_on_by_other_settings(
    sources: list[Source], expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(writer: DataSetWriter, card: object) -> None:
        raise Killed

    steps = [dataclasses.replace(step, words=(9, 1000)) if isinstance(step, GopherRules) else step for step in STEPS]
    with monkeypatch.context() as patch:
        patch.setattr(DataSetWriter, "finish", dies)
        with pytest.raises(Killed):
            curated(settings_of(sources, tmp_path / "out", steps))
    curated(settings_of(sources, tmp_path / "out"))
    assert bytes_of(tmp_path / "out") == expected


def test_another_threshold_measures_nothing_again(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = dict[str, int]()
    for kind in {type(step) for step in STEPS}:

        def counted(step, rows, measure=kind.measure) -> Marks:  # type: ignore[no-untyped-def]
            measured[step.name] = measured.get(step.name, 0) + len(rows)
            return measure(step, rows)

        monkeypatch.setattr(kind, "measure", counted)
    folder = tmp_path / "out"
    assert curated(settings_of(sources, folder)).was_there is False
    assert curated(settings_of(sources, folder)).was_there is True
    first = dict(measured)
    stricter = [
        dataclasses.replace(step, at_least=0.8) if isinstance(step, NearDuplicates)
        else dataclasses.replace(step, words=(9, 1000)) if isinstance(step, GopherRules) else step
        for step in STEPS
    ]  # fmt: skip
    with pytest.raises(ResourceError, match="by other steps or settings. Choose another"):
        curated(settings_of(sources, folder, stricter))
    again = curated(settings_of(sources, folder, stricter, overwrite=True))
    assert {name: count for name, count in measured.items() if count != first[name]}.keys() <= {
        "deduplicate.minhash",  # rows that it had not come to before, because another row of theirs is gone
        "deduplicate.paragraph",
        "personal",
    }
    assert measured["deduplicate.minhash"] < 1.3 * first["deduplicate.minhash"]
    curated(settings_of(sources, tmp_path / "fresh", stricter))
    assert bytes_of(tmp_path / "fresh") == bytes_of(folder) | {
        "README.md": bytes_of(tmp_path / "fresh")["README.md"]  # has the name of the folder
    }
    assert again.remaining


def test_no_row_is_left(sources: list[Source], tmp_path: Path) -> None:
    steps = [GopherRules(words=(500, 1000), stop_words=0)]
    with pytest.raises(DataError, match=r"no row is left of \d+: quality.gopher dropped \d+\. Nothing was written"):
        curated(settings_of(sources, tmp_path / "out", steps))
    assert not (tmp_path / "out" / "data-card.json").exists()


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]}
    file = write_rows(tmp_path / "rows.jsonl", [good, {"messages": []}, good])
    settings = settings_of([Source(path=str(file))], tmp_path / "out", STEPS[:1])
    with pytest.raises(DataError, match=r"^rows.jsonl:2: no assistant message"):
        curated(settings)
    result = curated(dataclasses.replace(settings, skip_bad=True))
    assert (result.outcomes["kept"], result.decisions) == (2, [["read", "drop", "cannot be read", 1]])
    bad = list(read_ledger(tmp_path / "out" / "ledger.jsonl.zst"))[1]
    assert "no assistant message" in bad.decisions[0].reason and bad.where == "rows.jsonl:2"


def test_borders_of_a_document_in_parts(tmp_path: Path) -> None:
    """A part without its neighbour begins or ends where the text does."""
    parts = [
        {"text": f"part {part} of the text\n", **({"document_begins": False} if part else {}),
         **({"document_ends": False} if part < 3 else {})}
        for part in (0, 1, 2, 3)
    ]  # fmt: skip
    parts[1]["text"] = "one"  # too short: dropped
    file = write_rows(tmp_path / "rows.jsonl", parts)
    steps = [GopherRules(words=(2, 1000), mean_length=(0, 99), stop_words=0, alphabetic=0)]
    curated(settings_of([Source(path=str(file))], tmp_path / "out", steps, shard_rows=1))
    rows = [json.loads(line) for line in (tmp_path / "out/rows/00000.jsonl").read_text().splitlines()]
    borders = [(row.get("document_begins", True), row.get("document_ends", True)) for row in rows]
    assert borders == [(True, True), (True, False), (False, True)]
