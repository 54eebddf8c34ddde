"""Rows token by token, packs and counts: what a preview gathers is what a run trains on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chat_tokenizers import make_tokenizer
from builders.inline_workers import InlineWorkers
from builders.tiny_world import World, write_rows

from danlu.core.errors import DataError, RecipeError
from danlu.data.dataset_summary import summarize_dataset, summarize_refused
from danlu.data.message_spans import Reason
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, prepare
from danlu.data.preview import PreviewRow, preview_rows, render_examples, token_texts
from danlu.data.samples import Selection
from danlu.data.sources import read_rows
from danlu.data.stream import StreamingDataset
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizing import TokenizeSettings
from danlu.recipe.sections import Data, Packing, Source

HELLO = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
UNTRAINED = {"messages": [HELLO["messages"][0], {**HELLO["messages"][1], "train": False}]}
TWO_QUESTIONS = {"messages": [HELLO["messages"][0], HELLO["messages"][0]]}


@pytest.fixture(scope="module")
def tokenizer(tiny_world: World) -> Tokenizer:
    return load_tokenizer(str(tiny_world.tokenizer))


@pytest.fixture(scope="module")
def of(tiny_world: World) -> Callable[..., DatasetSpec]:
    """What a recipe over some files gives, chat rows of the tiny world by default."""

    def of(*paths: Path, stage: Any = "sft", **data: Any) -> DatasetSpec:
        train = [Source(path=str(path)) for path in paths or (tiny_world.chat,)]
        cache = {"cache": str(tiny_world.cache), "max_length": 64, "workers": 1}
        return DatasetSpec(Data(**{"train": train, **cache, **data}), stage, str(tiny_world.tokenizer), None, seed=0)

    return of


def shown_here(tokenizer: Tokenizer, path: Path, **data: Any) -> list[PreviewRow]:
    """What `look` gives of a file, without a process of its own."""
    section = Data(**{"train": [Source(path=str(path))], "max_length": 64, **data})
    return preview_rows(
        tokenizer,
        (0, TokenizeSettings.of(section, "auto"), list(read_rows(section.train[0]))),
    )


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("preview", "dataset_summary", "prepare", "stream"):
        monkeypatch.setattr(f"danlu.data.{module}.WorkerPool", InlineWorkers)


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ([b"a", b" b"], ["a", " b"]),
        (["龘".encode()[:1], "龘".encode()[1:2], "龘".encode()[2:]], ["龘", "", ""]),
        (["好龘".encode()[:4], "龘".encode()[1:] + b"!"], ["好龘", "!"]),
        (["😀".encode()[:3], "😀".encode()[3:] + "é".encode()[:1], "é".encode()[1:]], ["😀", "é", ""]),
        ([b"\x98x"], ["‹98›x"]),
        ([b"x\xe9", b"\xbe"], ["x‹E9›", "‹BE›"]),
        ([b"\xe9", b"<|im_end|>", b"\xbe\x98"], ["‹E9›", "<|im_end|>", "‹BE›‹98›"]),
        ([b"", b"a"], ["‹›", "a"]),
        ([], []),
    ],
)
def test_a_character_belongs_to_the_token_it_begins_in(tokens: list[bytes], texts: list[str]) -> None:
    assert token_texts(tokens) == texts


TEXT = "Hello  wörld, 龘靐 😀\n\tcafé <0x0A> </s>"


@pytest.mark.parametrize("kind", ["byte", "byte-nfc", "prepend", "metaspace"])
def test_the_bytes_of_all_tokens_are_the_text(tmp_path: Path, kind: Any) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path, None, kind)))
    ids = tokenizer.encode(TEXT)
    parts = tokenizer.token_bytes(ids)
    start = " " if kind == "prepend" else ""
    assert b"".join(parts).decode() == start + TEXT
    assert len(parts) == len(ids) > len("".join(TEXT.split()))  # 龘 is no token of its own here
    assert "".join(token_texts(parts)) == start + TEXT and token_texts(parts).count("") >= 2
    special = tokenizer.encode("</s>")[-1]
    assert special in tokenizer.special_ids and not set(tokenizer.encode("Hello")) & tokenizer.special_ids
    assert tokenizer.token_bytes([tokenizer.vocab_size + 5]) == [b""]


@pytest.mark.parametrize("name", ["minimind", "phi3-mini", "gpt2"])
def test_the_bytes_of_real_tokenizers(shared_data: Path, name: str) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / name))
    text = "Describe a process.\n 识别并解释龘 😀"
    parts = tokenizer.token_bytes(tokenizer.encode(text))
    assert b"".join(parts).decode().strip() == text
    assert all(len(tokenizer.token_bytes([token])) == 1 for token in range(0, tokenizer.vocab_size, 97))


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_shown_are_rows_trained(of: Callable[..., DatasetSpec], tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "texts.jsonl", [{"text": "The fox is red. " * n} for n in (1, 40)] + [{"text": "狐狸"}]
    )
    for ingredients in (of(), of(path, stage="pretrain", overlong="split")):
        shown = render_examples(ingredients, rows=3)
        overview = summarize_dataset(ingredients, packs=1, shown=shown)
        assert overview.changed == () and len(shown) == 3
        prepared = prepare_as_run(ingredients)
        stored = [
            sample
            for sample in Selection.all_of(prepared.stores, prepared.sources)
            if sample.row in {row.where for row in shown}
        ]
        ours = [sample for row in shown for sample in row.samples]
        assert [one.tokens.tolist() for one in ours] == [sample.tokens.tolist() for sample in stored]
        assert [one.weights.tolist() for one in ours] == [sample.weights.tolist() for sample in stored]
    assert [len(row.samples) > 1 for row in shown] == [False, True, False]
    assert [row.shortened for row in shown] == ["", "split", ""]


def prepare_as_run(of: DatasetSpec) -> Selection:
    prepared = prepare(of)
    assert prepared.train is not None
    return prepared.train


def test_a_cache_that_holds_other_tokens_is_named(of: Callable[..., DatasetSpec]) -> None:
    shown = render_examples(of(), rows=2)
    (sample,) = shown[1].samples
    weights = sample.weights.copy()
    weights[-1] += 1
    other = [shown[0], replace(shown[1], samples=(replace(sample, weights=weights),))]
    assert summarize_dataset(of(), packs=0, shown=other).changed == ("chat.jsonl:2",)
    fewer = [replace(shown[0], samples=()), shown[1]]
    assert summarize_dataset(of(), packs=0, shown=fewer).changed == ("chat.jsonl:1",)


def test_rows_that_are_not_trained_on_are_shown_with_their_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "long " * 90}, HELLO["messages"][1]]}
    path = write_rows(tmp_path / "rows.jsonl", [HELLO, UNTRAINED, TWO_QUESTIONS, "{broken", long])
    good, untrained, questions, broken, overlong = shown_here(tokenizer, path)
    assert (good.bad, good.dropped, good.lost_tokens) == ("", "", 0)
    assert good.samples[0].weights.sum() > 0
    assert untrained.dropped == "no token would be trained"
    assert untrained.samples[0].tokens.tolist() == good.samples[0].tokens.tolist()
    assert untrained.samples[0].weights.sum() == 0 and untrained.lost_tokens == len(untrained.samples[0].tokens)
    assert "two user turns in a row" in questions.bad and json.loads(questions.columns) == TWO_QUESTIONS
    assert broken.bad.startswith("rows.jsonl:4:2: broken JSON") and broken.columns == "" and not broken.samples
    assert overlong.dropped == "longer than max_length, with no trained token in what was left"
    assert len(overlong.samples[0].tokens) > 64 and overlong.shortened == "truncated"


def test_every_token_has_its_text_reason_and_kind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "龘?"}, {"role": "assistant", "content": "yes", "weight": 0.5}]}
    (shown,) = shown_here(tokenizer, write_rows(tmp_path / "rows.jsonl", [row]))
    (sample,) = shown.samples
    assert len(sample.texts) == len(sample.tokens) == len(sample.weights) == len(sample.reasons) == len(sample.special)
    assert "".join(sample.texts) == "<|im_start|>user\n龘?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    end = len(sample.texts) - 2
    assert (sample.texts[end], sample.special[end], sample.reasons[end]) == ("<|im_end|>", True, Reason.TERMINATOR)
    assert set(sample.weights.tolist()) == {0.0, 0.5}


def test_rows_are_found_by_the_places_that_messages_name(of: Callable[..., DatasetSpec], tmp_path: Path) -> None:
    more = write_rows(tmp_path / "more.jsonl", [HELLO, TWO_QUESTIONS, *[HELLO] * 20])
    ingredients = of(more, eval=[Source(path=str(tmp_path / "more.jsonl"), rows=3)])
    places = ("more.jsonl:12", "data/more.jsonl:2 message 2", "more.jsonl:1:7")
    found = [(row.source, row.where) for row in render_examples(ingredients, rows=9, places=places)]
    assert found == [(0, f"more.jsonl:{n}") for n in (1, 2, 12)] + [(1, f"more.jsonl:{n}") for n in (1, 2)]
    assert [row.where for row in render_examples(of(more), rows=0, places=("3",))] == ["more.jsonl:3"]
    with pytest.raises(RecipeError, match=r"--row more.jsonl:99: there is no such row in .*more.jsonl") as error:
        render_examples(of(more), rows=0, places=("more.jsonl:99", "3", "ore.jsonl:2"))
    assert len(error.value.problems) == 2


def test_a_tokenizer_that_cannot_render_is_an_error_at_once(tmp_path: Path, of: Callable[..., DatasetSpec]) -> None:
    plain = replace(of(), tokenizer_path=str(make_tokenizer(tmp_path / "plain", None)))
    with pytest.raises(DataError, match="this tokenizer has no chat template"):
        render_examples(plain, rows=1)


# -- packs and counts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["best-fit", "none"])
def test_the_packs_are_those_of_a_run(of: Callable[..., DatasetSpec], kind: Any) -> None:
    ingredients = of(packing=Packing(kind=kind))
    packed = summarize_dataset(ingredients, packs=3).train.packed
    assert packed is not None
    packs = PackedDataset(prepare_as_run(ingredients), ingredients.data.packing, 64, seed=0)
    assert (packed.packs, packed.tokens, packed.efficiency) == (
        packs.packs_per_epoch,
        packs.tokens_per_epoch,
        packs.efficiency,
    )
    ours = [[sample.tokens.tolist() for sample in pack.samples] for pack in packed.first]
    assert ours == [[sample.tokens.tolist() for sample in packs.at(n).samples] for n in range(3)]
    assert ours != [[sample.tokens.tolist() for sample in packs.at(n).samples] for n in range(1, 4)]
    assert packed.samples == len(prepare_as_run(ingredients))


def test_rows_set_aside_are_counted(of: Callable[..., DatasetSpec], tmp_path: Path, tiny_world: World) -> None:
    overview = summarize_dataset(of(eval=0.2), packs=1)
    assert overview.eval is not None and overview.eval.packed is not None and overview.train.packed is not None
    whole, held_out = overview.train.statistics, overview.eval.statistics
    assert (whole.rows, held_out.rows) == (100, 20)
    assert overview.train.packed.tokens + held_out.tokens == whole.tokens
    assert held_out.tokens == held_out.reasons.total() == overview.eval.lengths.sum()
    assert 0 < held_out.trained_tokens < held_out.tokens
    assert overview.eval.packed.samples == held_out.samples == len(overview.eval.lengths)
    assert len(overview.train.lengths) == whole.samples

    own = summarize_dataset(of(eval=[Source(path=str(write_rows(tmp_path / "eval.jsonl", [HELLO] * 3)))]), packs=1)
    assert own.eval is not None and own.eval.statistics.rows == 3 and own.train.statistics.rows == 100
    assert summarize_dataset(of(), packs=0).eval is None


@pytest.mark.parametrize("kind", ["best-fit", "concatenate"])
def test_of_a_stream_the_first_block_is_counted(of: Callable[..., DatasetSpec], tiny_world: World, kind: Any) -> None:
    ingredients = of(
        tiny_world.text, stage="pretrain", streaming=True, shuffle_buffer=30, packing=Packing(kind=kind), max_length=100
    )
    overview = summarize_dataset(ingredients, packs=2)
    train = overview.train
    assert overview.block and train.packed is not None
    assert train.statistics.rows == 30 and train.packed.tokens == train.statistics.tokens == train.lengths.sum()
    with StreamingDataset(ingredients) as stream:
        packs = [stream.at(number) for number in range(train.packed.packs)]
        assert stream.statistics.rows == 30
        assert [pack.tokens for pack in train.packed.first] == [pack.tokens for pack in packs[:2]]
        stream.at(train.packed.packs)
        assert stream.statistics.rows == 60  # that was all of the first block


def test_data_that_a_run_refuses_is_counted_all_the_same(of: Callable[..., DatasetSpec], tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [HELLO, TWO_QUESTIONS, UNTRAINED, "{broken"])
    with pytest.raises(DataError, match="rows.jsonl:2 message 2: two user turns in a row"):
        summarize_dataset(of(path), packs=1)
    seen: list[int] = []
    counted = summarize_refused(of(path), progress=lambda done, total: seen.append(done))
    found = counted.train.statistics
    assert (found.rows, found.bad_rows, found.samples, found.dropped.total()) == (4, 2, 1, 1)
    assert [message.partition(" ")[0] for message in found.bad_examples] == ["rows.jsonl:2", "rows.jsonl:4:2:"]
    assert counted.train.packed is None and counted.eval is None and seen == [4]
    assert counted.train.lengths.tolist() == [found.tokens]


def test_a_survey_of_good_data_counts_what_a_run_does(of: Callable[..., DatasetSpec], tmp_path: Path) -> None:
    ingredients = of(eval=[Source(path=str(write_rows(tmp_path / "eval.jsonl", [HELLO] * 3)))])
    whole, counted = summarize_dataset(ingredients, packs=0), summarize_refused(ingredients)
    for ours, theirs in ((counted.train, whole.train), (counted.eval, whole.eval)):
        assert ours is not None and theirs is not None
        assert ours.statistics == theirs.statistics
        assert np.array_equal(ours.lengths, theirs.lengths)


PREVIEW = """
import json, sys
from danlu.data.prepare import DatasetSpec
from danlu.data.dataset_summary import summarize_dataset
from danlu.data.prepare import DatasetSpec
from danlu.data.preview import render_examples
from danlu.recipe.sections import Data, Source
path, tokenizer, cache = sys.argv[1:]
of = DatasetSpec(Data(train=[Source(path=path)], cache=cache, max_length=64, workers=1), "sft", tokenizer, None, 0)
done = []
shown = render_examples(of, rows=1)
summarize_dataset(of, packs=1, shown=shown, progress=lambda rows, total: done.append(rows))
heavy = {"transformers", "tokenizers", "torch", "datasets"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([len(shown), done, sorted(heavy)]))
"""


def test_nothing_is_tokenised_twice_and_nothing_heavy_loaded(of: Callable[..., DatasetSpec], tiny_world: World) -> None:
    prepare_as_run(of())  # so that the cache has it
    command = [sys.executable, "-c", PREVIEW, *map(str, (tiny_world.chat, tiny_world.tokenizer, tiny_world.cache))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == [1, [], []]
