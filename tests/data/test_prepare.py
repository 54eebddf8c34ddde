from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.inline_workers import InlineWorkers

from danlu.core.errors import DataError
from danlu.data.demo_data import conversations, pretraining_documents
from danlu.data.prepare import DatasetSpec, PreparedData, prepare
from danlu.data.samples import Selection
from danlu.data.tokenizer_training import train_tokenizer
from danlu.data.worker_pool import WorkerPool
from danlu.recipe.sections import Data, Packing, Source

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

NOT_STORES = ("locks", "files")  # what else is in a cache


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(pretraining_documents(0, 300), 500, folder)
    return folder


@pytest.fixture
def worker_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are tokenised in processes of their own, as in a run."""
    monkeypatch.setattr("danlu.data.prepare.WorkerPool", WorkerPool)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "chat.jsonl", conversations(0, 60))


def ready(
    tokenizer: Path,
    cache: Path,
    *paths: Path,
    stage: Any = "sft",
    weights: Any = None,
    seed: int = 0,
    progress: Any = None,
    **data: Any,
) -> PreparedData:
    sources = [
        Source(path=str(path), weight=weight)
        for path, weight in zip(paths, weights or [None] * len(paths), strict=True)
    ]
    settings = Data(**{"train": sources, "cache": str(cache), "workers": 1, **data})
    return prepare(DatasetSpec(settings, stage, str(tokenizer), chat_template=None, seed=seed), progress=progress)


def contents(samples: Selection) -> list[tuple[list[int], list[float], str]]:
    return [(sample.tokens.tolist(), sample.weights.tolist(), sample.row) for sample in samples]


def rows_of(samples: Selection) -> list[str]:
    return [sample.row for sample in samples]


@pytest.mark.usefixtures("worker_processes")
def test_the_output_does_not_depend_on_the_number_of_workers_and_progress_is_reported(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danlu.data.tokenizing.CHUNK_ROWS", 32)
    path = write(tmp_path / "chat.jsonl", conversations(0, 330))  # more chunks than one process is given at first
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("danlu.data.prepare.WorkerPool", InlineWorkers)
        one = ready(tokenizer, tmp_path / "one", path, workers=1)
    two = ready(tokenizer, tmp_path / "two", path, workers=2, progress=lambda done, total: seen.append(done))
    assert one.train is not None and two.train is not None and seen[-1] == 330
    assert contents(one.train) == contents(two.train)
    assert rows_of(one.train)[:2] == ["chat.jsonl:1", "chat.jsonl:2"]
    assert one.statistics == two.statistics
    (folder,), (other,) = (
        [path for path in (tmp_path / name).iterdir() if path.name not in NOT_STORES] for name in ("one", "two")
    )
    files = sorted(folder.glob("*.bin"))
    assert files
    for file in files:
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def test_statistics_count_what_is_there(tokenizer: Path, cache: Path, chat: Path) -> None:
    prepared = ready(tokenizer, cache, chat)
    assert prepared.train is not None and prepared.tokenizer is not None
    samples = list(prepared.train)
    statistics = prepared.statistics
    assert (statistics.rows, statistics.samples) == (60, len(samples))
    assert statistics.tokens == sum(len(sample.tokens) for sample in samples) == sum(statistics.reasons.values())
    assert statistics.trained_tokens == sum(int((sample.weights > 0).sum()) for sample in samples)
    assert 0 < statistics.trained_share < 1
    assert statistics.longest == max(len(sample.tokens) for sample in samples)
    assert (
        prepared.max_token == max(int(sample.tokens.max()) for sample in samples) < prepared.tokenizer.vocab_size == 500
    )


PREPARED_TWICE = """
import json, sys
from danlu.data.prepare import DatasetSpec, prepare
from danlu.recipe.sections import Data, Source
path, tokenizer, cache = sys.argv[1:]
data = Data(train=[Source(path=path)], cache=cache)
for _ in range(2):
    prepared = prepare(DatasetSpec(data, "sft", tokenizer, chat_template=None, seed=0))
    loaded = {name.partition(".")[0] for name in sys.modules}
    heavy = {"transformers", "tokenizers", "torch", "datasets", "pyarrow"} & loaded
    print(json.dumps([len(prepared.train), sorted(heavy)]))
"""


def test_no_tokenizer_library_in_this_process(tokenizer: Path, chat: Path, tmp_path: Path) -> None:
    """Neither where rows are tokenised nor where they are in the cache."""
    command = [sys.executable, "-c", PREPARED_TWICE, str(chat), str(tokenizer), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=None)
    assert [json.loads(line) for line in ran.stdout.splitlines()] == [[60, []], [60, []]]


def test_a_changed_setting_or_file_is_tokenised_anew(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", conversations(0, 20))
    first = ready(tokenizer, tmp_path / "cache", path)
    shorter = ready(tokenizer, tmp_path / "cache", path, max_length=40)
    assert first.train is not None and shorter.train is not None
    assert shorter.statistics.longest <= 40 and shorter.statistics.shortened.total() > 0
    write(path, conversations(1, 20))
    changed = ready(tokenizer, tmp_path / "cache", path)
    assert changed.train is not None
    assert contents(changed.train) != contents(first.train)
    assert len([entry for entry in (tmp_path / "cache").iterdir() if entry.name not in NOT_STORES]) == 3


def test_another_format_of_the_same_file_is_tokenised_anew(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{**row, "text": "Once upon a time."} for row in conversations(0, 3)]
    path = write(tmp_path / "both.jsonl", rows)

    def as_format(format: Any) -> list[tuple[list[int], list[float], str]]:
        data = Data(train=[Source(path=str(path), format=format)], cache=str(tmp_path / "cache"), workers=1)
        found = prepare(DatasetSpec(data, "sft", str(tokenizer), chat_template=None, seed=0))
        assert found.train is not None
        return contents(found.train)

    messages = as_format("messages")
    text = as_format("text")
    assert messages != text and len({tuple(tokens) for tokens, _, _ in text}) == 1
    assert as_format("auto") == messages and as_format("text") == text


def test_held_out_rows_are_never_trained_on(tokenizer: Path, cache: Path, chat: Path) -> None:
    for wanted, expected in ((0.2, 12), (7, 7)):
        prepared = ready(tokenizer, cache, chat, eval=wanted)
        assert prepared.train is not None and prepared.eval is not None
        train, held_out = set(rows_of(prepared.train)), set(rows_of(prepared.eval))
        assert len(held_out) == expected and len(train) == 60 - expected
        assert not train & held_out


def test_all_pieces_of_a_split_row_are_on_one_side(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    texts = [{"text": " ".join(pretraining_documents(seed, 12))} for seed in range(30)]
    path = write(tmp_path / "texts.jsonl", texts)
    prepared = ready(tokenizer, cache, path, stage="pretrain", max_length=64, overlong="split", eval=0.3)
    assert prepared.train is not None and prepared.eval is not None
    assert prepared.statistics.samples > 60
    rows = [np.unique(samples.row_numbers).tolist() for samples in (prepared.train, prepared.eval)]
    assert sorted(rows[0] + rows[1]) == list(range(30)) and len(rows[1]) == 9
    assert len(prepared.train) + len(prepared.eval) == prepared.statistics.samples  # none of them is left out


def test_evaluation_sources_of_their_own(tokenizer: Path, cache: Path, chat: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "eval.jsonl", conversations(9, 8))
    prepared = ready(tokenizer, cache, chat, eval=[Source(path=str(path))])
    assert prepared.train is not None and prepared.eval is not None and prepared.eval_statistics is not None
    assert (len(prepared.train), len(prepared.eval), prepared.eval_statistics.rows) == (60, 8, 8)


def test_an_evaluation_source_that_gives_no_sample_is_named(
    tokenizer: Path, cache: Path, chat: Path, tmp_path: Path
) -> None:
    untrained = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "train": False}]
    path = write(tmp_path / "untrained.jsonl", [{"messages": untrained}])
    with pytest.raises(DataError, match=r"untrained\.jsonl: no row is left to evaluate on"):
        ready(tokenizer, cache, chat, eval=[Source(path=str(chat)), Source(path=str(path))])


def test_sources_are_mixed_by_weight(tokenizer: Path, cache: Path, chat: Path, tmp_path: Path) -> None:
    small = write(tmp_path / "small.jsonl", conversations(5, 10))
    prepared = ready(tokenizer, cache, chat, small, weights=[2.0, 1.0])
    assert prepared.train is not None
    names = [row.partition(":")[0] for row in rows_of(prepared.train)]
    assert (names.count("chat.jsonl"), names.count("small.jsonl")) == (60, 30)
    assert [sample.source for sample in prepared.train] == names


def test_a_cached_source_has_the_name_of_the_recipe_that_reads_it(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    """The name is no part of what is cached: the same rows elsewhere are not tokenised again."""
    for folder in ("new", "old"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "some.jsonl", conversations(7, 12))
    new, old = tmp_path / "new/some.jsonl", tmp_path / "old/some.jsonl"
    alone = ready(tokenizer, cache, new, eval=[Source(path=str(old))])
    beside = ready(tokenizer, cache, new, old, eval=4)
    assert alone.train is not None and alone.eval is not None and beside.train is not None and beside.eval is not None
    assert {sample.source for sample in alone.train} == {sample.source for sample in alone.eval} == {"some.jsonl"}
    assert [sample.source for sample in beside.train] == sorted(sample.source for sample in beside.train)
    assert {sample.source for sample in beside.train} == {"new/some.jsonl", "old/some.jsonl"}
    assert {sample.source for sample in beside.eval} <= {"new/some.jsonl", "old/some.jsonl"}
    assert beside.train.digest() != alone.train.digest() == ready(tokenizer, cache, old).train.digest()  # type: ignore[union-attr]


@pytest.mark.parametrize("weights", [None, [1.0, 1.0]])
def test_a_small_source_keeps_a_row_beside_those_held_out(
    tokenizer: Path, cache: Path, chat: Path, tmp_path: Path, weights: Any
) -> None:
    small = write(tmp_path / "small.jsonl", conversations(5, 1))
    for seed in range(4):  # of 61 rows 50 are held out: without care, most likely the only row of small.jsonl
        prepared = ready(tokenizer, cache, chat, small, weights=weights, eval=50, seed=seed)
        assert prepared.train is not None and prepared.eval is not None and len(prepared.eval) == 50
        assert rows_of(prepared.train).count("small.jsonl:1") == (1 if weights is None else 10)
        assert "small.jsonl:1" not in rows_of(prepared.eval)
    with pytest.raises(DataError, match=r"data\.eval: 60 holds out 60 of 61 rows.*data\.train\.1 is the smallest"):
        ready(tokenizer, cache, chat, small, weights=weights, eval=60)


def test_concatenated_documents_are_kept_whole(tokenizer: Path, cache: Path, chat: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "texts.jsonl", [{"text": " ".join(pretraining_documents(0, 50))}])
    prepared = ready(tokenizer, cache, path, stage="pretrain", max_length=32, packing=Packing(kind="concatenate"))
    assert prepared.statistics.longest > 500 and not prepared.statistics.shortened
    with pytest.raises(DataError, match=r"data\.packing: concatenate joins plain text.*chat\.jsonl.* are messages"):
        ready(tokenizer, cache, chat, packing=Packing(kind="concatenate"))


BROKEN = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n{"messages": [\n'
)


def test_a_bad_row_stops_with_its_place_or_is_counted(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(BROKEN + '{"text": "another format"}\n' + BROKEN.splitlines()[0])
    with pytest.raises(DataError, match=r"broken\.jsonl:2:.*broken JSON.*\n.*on_bad_row: skip"):
        ready(tokenizer, cache, path)
    prepared = ready(tokenizer, cache, path, on_bad_row="skip")
    assert prepared.train is not None
    assert (prepared.statistics.rows, prepared.statistics.bad_rows) == (4, 2)
    assert rows_of(prepared.train) == ["broken.jsonl:1", "broken.jsonl:4"]
    assert "broken.jsonl:3" in prepared.statistics.bad_examples[1]
    with pytest.raises(DataError, match=r"more than 1 bad rows \(data.bad_row_limit\); the last one: broken\.jsonl:3"):
        ready(tokenizer, cache, path, on_bad_row="skip", bad_row_limit=1)


@pytest.mark.parametrize("count", [1, 3])
def test_where_every_row_is_bad_the_advice_is_not_to_skip(
    tokenizer: Path, cache: Path, tmp_path: Path, count: int
) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text('{"text": ""}\n' * count)
    with pytest.raises(DataError, match=r"all\.jsonl:1: 'text' is empty") as caught:
        ready(tokenizer, cache, path)
    assert "skip" not in str(caught.value)
    assert f"So is {'the only row' if count == 1 else 'all of the first 3 rows'}: mend them" in str(caught.value)
    with pytest.raises(
        DataError, match=rf"all\.jsonl: none of {count} rows can be used; the first: all\.jsonl:1: 'text'"
    ):
        ready(tokenizer, cache, path, on_bad_row="skip")
    path.write_text('{"text": ""}\n' * count + '{"text": "Once"}\n')  # control: one that can be used
    with pytest.raises(DataError, match=r"Set data\.on_bad_row: skip to leave such rows out"):
        ready(tokenizer, cache, path)


def test_rows_whose_text_no_encoding_takes_are_counted(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    [row] = conversations(0, 1)
    odd = {"messages": [{**row["messages"][0], "\udc80": 1}, *row["messages"][1:]]}
    path = write(tmp_path / "halves.jsonl", [])
    path.write_text("\n".join(map(json.dumps, [row, {"\ud800": 1}, odd])))
    prepared = ready(tokenizer, cache, path, on_bad_row="skip")
    again = ready(tokenizer, cache, path, on_bad_row="skip")
    assert prepared.statistics == again.statistics and prepared.statistics.bad_rows == 1
    assert again.statistics.unread == {"\udc80": 1}
    assert again.statistics.unread_lines()[0].encode().startswith(rb"not read: '\udc80' in 1 row")


@pytest.mark.usefixtures("worker_processes")
def test_rows_too_deep_for_another_process_are_bad_rows(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    [row] = conversations(0, 1)
    good = json.dumps(row)
    deep = f'{good[:-1]}, "meta": {"[" * 600}{"]" * 600}}}'
    texts = {"deep.jsonl": f"{deep}\n{good}", "deep.json": f"[{deep},\n{good}]"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    prepared = ready(tokenizer, cache, *(tmp_path / name for name in texts), on_bad_row="skip")
    assert prepared.train is not None and sorted(rows_of(prepared.train)) == ["deep.json:2", "deep.jsonl:2"]
    wrong = "unreadable JSON: brackets are nested too deeply, more than 100 lists or objects one in the other"
    assert prepared.statistics.bad_examples == [f"{name}:1: {wrong}" for name in texts]


def test_packed_files_are_rows_like_others(tokenizer: Path, cache: Path, chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress(chat.read_bytes()))
    plain, unpacked = ready(tokenizer, cache, chat).train, ready(tokenizer, cache, path).train
    assert plain is not None and unpacked is not None
    assert [one[:2] for one in contents(plain)] == [one[:2] for one in contents(unpacked)]
    assert rows_of(unpacked)[0] == "chat.jsonl.gz:1"


def test_rows_without_known_columns_in_front_are_bad_rows_like_others(
    tokenizer: Path, cache: Path, tmp_path: Path
) -> None:
    strange: list[Any] = [{"title": "a table of contents"}] * 2
    path = write(tmp_path / "front.jsonl", [*strange, *conversations(0, 5)])
    with pytest.raises(DataError, match=r"front\.jsonl:1: no known row format has the columns title"):
        ready(tokenizer, cache, path)
    prepared = ready(tokenizer, cache, path, on_bad_row="skip")
    assert (prepared.statistics.bad_rows, prepared.statistics.samples) == (2, 5)
    with pytest.raises(DataError, match=r"front\.jsonl:2: no known row format has the columns title"):
        ready(tokenizer, cache, path, on_bad_row="skip", bad_row_limit=1)


def test_unpaired_preferences_are_refused(tokenizer: Path, cache: Path, tmp_path: Path, shared_data: Path) -> None:
    with pytest.raises(DataError, match=r"kto_en_demo\.json:2: 'label' \(True\) judges .* a stage kto"):
        ready(tokenizer, cache, shared_data / "preference" / "kto_en_demo.json")
    rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(conversations(0, 6))]
    path = write(tmp_path / "kto.jsonl", rows)
    for skip in ({}, {"on_bad_row": "skip", "bad_row_limit": 2}):
        with pytest.raises(DataError, match=r"kto\.jsonl:\d: 'label' .* unpaired preferences are rows for a stage kto"):
            ready(tokenizer, cache, path, **skip)


def test_a_weight_of_a_message_is_the_weight_of_its_tokens(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    [row] = conversations(0, 1)
    assert [turn["role"] for turn in row["messages"][-2:]] == ["user", "assistant"]
    named = {"loss_weight": 0.25, "loss_scale": 3, "id": 7}
    weighted = {"messages": [*row["messages"][:-1], {**row["messages"][-1], **named}]}
    prepared = ready(tokenizer, cache, write(tmp_path / "weighted.jsonl", [weighted, row]))
    assert prepared.train is not None
    first, second = prepared.train
    assert set(first.weights.tolist()) == {0.0, 0.25} and set(second.weights.tolist()) == {0.0, 1.0}
    assert ((first.weights > 0) == (second.weights > 0)).all()
    assert prepared.statistics.unread == {"id": 1, "loss_scale": 1}
    [line] = prepared.statistics.unread_lines()
    assert line.startswith("not read: 'id' in 1 row, 'loss_scale' in 1 row. The keys of a message that are read: role,")
    assert "loss_weight" in line and ready(tokenizer, cache, tmp_path / "weighted.jsonl").statistics.unread_lines()


def test_given_tokens_in_a_csv_file(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text('input_ids,labels,attention_mask\n"[0, 5, 6, 7]","[-100, -100, 6, 7]","[0, 1, 1, 1]"\n')
    prepared = ready(tokenizer, cache, path, stage="pretrain")
    assert prepared.train is not None
    assert contents(prepared.train) == [([5, 6, 7], [0.0, 1.0, 1.0], "tokens.csv:2")]


def test_a_run_that_would_train_nothing_is_refused(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "train": False}]
    path = write(tmp_path / "untrained.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match=r"untrained\.jsonl.*trained.*data\.train_on"):
        ready(tokenizer, cache, path)


def test_answers_that_never_end_are_refused(tokenizer: Path, cache: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.jsonl", [{"prompt": "Two and two is", "completion": " four."}])
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: .*not the token that ends them.*Set data\.append_eos: true"):
        ready(tokenizer, cache, path, append_eos=False)
    assert ready(tokenizer, cache, path).statistics.endless_answers == 0


def test_the_cache_is_not_shared_by_other_columns(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": f"Say {n}", "answer": f"{n}", "other": "no"} for n in range(9)])
    stores = [
        ready(tokenizer, tmp_path / "cache", path, columns=columns).train
        for columns in (None, {"answer": "other"}, {"answer": "{other}!"}, {"question": "{question}"}, None)
    ]
    tokens = [contents(samples) for samples in stores if samples is not None]
    assert tokens[0] == tokens[3] == tokens[4]
    assert len({str(each) for each in tokens}) == 3
    assert len([store for store in (tmp_path / "cache").iterdir() if store.name not in NOT_STORES]) == 4
    info = {"mine": {"file_name": "rows.jsonl", "columns": {"prompt": "question", "response": "other"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    told = ready(tokenizer, tmp_path / "cache", path)
    assert told.train is not None and contents(told.train) == tokens[1] and "output = other" in told.column_lines[0]
