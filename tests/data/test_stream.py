from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import CheckpointError, DataError
from danlu.core.types import Pack
from danlu.data.demo_data import pretraining_documents
from danlu.data.prepare import DatasetSpec
from danlu.data.raw_rows import RawRow
from danlu.data.stream import InterleavedRows, StreamingDataset
from danlu.data.tokenizer_training import train_tokenizer
from danlu.data.worker_pool import WorkerPool
from danlu.recipe.sections import Data, Packing, Source
from danlu.training.data_loader import DataLoader

pytestmark = pytest.mark.usefixtures("module_tokenises_here")


def reader(name: str, count: int) -> Callable[[], Iterator[RawRow]]:
    return lambda: iter([RawRow(i, f"{name}{i}", {"text": name}) for i in range(count)])


def taken(rows: InterleavedRows, count: int) -> list[list[str]]:
    return [[row.where for row in part] for part in rows.take(count)]


def test_without_weights_sources_take_turns_and_a_pass_ends_together() -> None:
    rows = InterleavedRows([reader("a", 4), reader("b", 2)], [None, None])
    assert taken(rows, 3) == [["a0", "a1"], ["b0"]]
    assert taken(rows, 3) == [["a2", "a3"], ["b1"]]
    assert taken(rows, 100) == [["a0", "a1", "a2", "a3"], ["b0", "b1"]]
    assert taken(rows, 3) == [["a0", "a1"], ["b0"]]


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (0.2, 0.5)])
def test_weights_hold_at_every_point(weights: tuple[float, float]) -> None:
    rows = InterleavedRows([reader("a", 7), reader("b", 5)], weights)
    counts = [0, 0]
    for total in range(1, 200):
        for source, part in enumerate(rows.take(1)):
            counts[source] += len(part)
        assert sum(counts) == total
        assert abs(counts[0] - total * weights[0] / sum(weights)) <= 1


def test_the_source_with_the_larger_weight_comes_first() -> None:
    rows = InterleavedRows([reader("a", 7), reader("b", 5)], (1.0, 3.0))
    in_order = [where for _ in range(5) for part in taken(rows, 1) for where in part]
    assert in_order == ["b0", "b1", "a0", "b2", "b3"]


@pytest.mark.parametrize("weights", [(None, None), (3.0, 1.0)])
def test_a_position_continues_exactly(weights: tuple[float | None, float | None]) -> None:
    readers = [reader("a", 7), reader("b", 5)]
    straight, other = InterleavedRows(readers, weights), InterleavedRows(readers, weights)
    for _ in range(12):
        position = straight.position
        expected = taken(straight, 4)
        other.take(3)  # somewhere else
        other.position = position
        assert taken(other, 4) == expected


def test_a_source_without_rows_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.train\.1: no rows"):
        InterleavedRows([reader("a", 7), reader("b", 0)], [None, None]).take(5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(pretraining_documents(0, 300), 500, folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for seed, (path, count) in enumerate(zip(paths, (90, 40), strict=True)):
        lines = [json.dumps({"text": text}) for text in pretraining_documents(seed, count)]
        path.write_text("\n".join(lines), encoding="utf-8")
    return paths


def stream(
    tokenizer: Path, paths: list[Path], weights: Any = (None, None), seed: int = 1, **settings: Any
) -> StreamingDataset:
    train = [Source(path=str(path), weight=weight) for path, weight in zip(paths, weights, strict=False)]
    values = {"train": train, "max_length": 128, "streaming": True, "shuffle_buffer": 50, "workers": 1, **settings}
    return StreamingDataset(DatasetSpec(Data(**values), "pretrain", str(tokenizer), chat_template=None, seed=seed))


def content(pack: Pack) -> list[tuple[str, list[int]]]:
    return [(sample.row, sample.tokens.tolist()) for sample in pack.samples]


def next_rows(packs: StreamingDataset, count: int) -> list[str]:
    rows: list[str] = []
    while len(rows) < count:
        rows += [sample.row for sample in packs.at(packs.state()["pack"]).samples]
    return rows


def test_a_pass_gives_every_row_once_and_shuffled(
    tokenizer: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danlu.data.stream.WorkerPool", WorkerPool)  # in a process of its own, as in a run
    with stream(tokenizer, sources) as packs:
        rows, again = next_rows(packs, 130), next_rows(packs, 130)
    expected = [f"{name}.jsonl:{i + 1}" for name, count in (("a", 90), ("b", 40)) for i in range(count)]
    assert sorted(rows) == sorted(again) == sorted(expected)
    assert rows != expected and rows != again


def test_samples_name_their_source(tokenizer: Path, sources: list[Path]) -> None:
    with stream(tokenizer, sources) as packs:
        samples = [sample for number in range(20) for sample in packs.at(number).samples]
    assert {sample.source for sample in samples} == {"a.jsonl", "b.jsonl"}
    assert all(sample.row.startswith(sample.source) for sample in samples)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("best-fit", (1.0, 3.0)),
        ("concatenate", (None, None)),
        pytest.param("best-fit", (None, None), marks=pytest.mark.slow),
        pytest.param("concatenate", (1.0, 3.0), marks=pytest.mark.slow),
    ],
)
def test_a_restored_stream_continues_exactly(
    tokenizer: Path, sources: list[Path], weights: tuple[float | None, float | None], kind: Any
) -> None:
    settings: dict[str, Any] = {"weights": weights, "packing": Packing(kind=kind)}
    with stream(tokenizer, sources, **settings) as straight:
        states, packs = [], []
        for number in range(60):
            states.append(json.loads(json.dumps(straight.state())))
            packs.append(content(straight.at(number)))
    assert all(len(json.dumps(state)) < 300 for state in states)
    with stream(tokenizer, sources, **settings) as resumed:
        for start in (41, 0, 7, 17, 18, 19):
            resumed.restore(states[start])
            assert [content(resumed.at(number)) for number in range(start, start + 12)] == packs[start : start + 12]


def test_other_seeds_are_other_streams(tokenizer: Path, sources: list[Path]) -> None:
    """Negative control of the comparison above."""
    with stream(tokenizer, sources) as first, stream(tokenizer, sources, seed=2) as second:
        assert [content(first.at(i)) for i in range(5)] != [content(second.at(i)) for i in range(5)]


def test_the_state_of_a_pack_read_ahead_of(tokenizer: Path, sources: list[Path]) -> None:
    with stream(tokenizer, sources) as packs:
        states = []
        for number in range(30):
            states.append(packs.state())
            packs.at(number)
        assert [packs.state(number) for number in range(15, 30)] == states[15:]
        with pytest.raises(ValueError, match="pack 99 is not among those kept: the next is 30"):
            packs.state(99)


def test_a_step_of_many_blocks_is_given_back(tokenizer: Path, sources: list[Path]) -> None:
    """What an error in such a step does: the run is saved where the step began."""
    settings: dict[str, Any] = {"shuffle_buffer": 5, "packing": Packing(kind="none")}
    with stream(tokenizer, sources, **settings) as packs:
        feed = DataLoader(packs, per_step=60, total=None)
        feed.take()
        feed.state()  # a checkpoint before the step
        step = [content(pack) for pack in feed.take()]
        assert packs.state()["block"] - packs.state(60)["block"] > 4
        feed.give_back()
        state = feed.state()
    assert state["next"] == 60
    with stream(tokenizer, sources, **settings) as packs:
        feed = DataLoader(packs, per_step=60, total=None)
        feed.restore(state)
        assert [content(pack) for pack in feed.take()] == step
        assert [content(pack) for pack in feed.take()] != step


def test_packs_are_asked_for_in_order(tokenizer: Path, sources: list[Path]) -> None:
    with (
        stream(tokenizer, sources) as packs,
        pytest.raises(ValueError, match="come in order: asked for 3, the next is 0"),
    ):
        packs.at(3)


def test_a_state_of_other_sources_is_refused(tokenizer: Path, sources: list[Path]) -> None:
    with stream(tokenizer, sources) as both, stream(tokenizer, sources[:1]) as one:
        state = both.state()
        with pytest.raises(CheckpointError, match=r"made with 2 sources in data\.train, the recipe has 1"):
            one.restore(state)


def test_bad_rows_of_a_stream(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    with stream(tokenizer, [path]) as packs, pytest.raises(DataError, match=r"rows\.jsonl:2"):
        packs.at(0)
    with stream(tokenizer, [path], on_bad_row="skip") as packs:
        assert sorted(sample.row for sample in packs.at(0).samples) == ["rows.jsonl:1", "rows.jsonl:3"]
        assert packs.statistics.bad_rows == 1


def test_a_missing_source_is_an_error(tokenizer: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"),
        stream(tokenizer, [tmp_path / "nowhere.jsonl"]),
    ):
        pass
