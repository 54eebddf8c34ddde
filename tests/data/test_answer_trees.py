"""Rows of judged answers as trees: the tokens of each path, the stem, the facts, on the disk and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.tiny_world import InThisProcess, World, write_rows

from danlu.core.errors import DataError
from danlu.core.types import Branch
from danlu.data.answer_trees import render_answers
from danlu.data.mismatched import MismatchedAnswers, with_own_prompt
from danlu.data.preference_rows import answers_of, parse_answers
from danlu.data.prepare import DatasetSpec, PreparedData, prepare
from danlu.data.render import RenderedSample, RenderSettings, render_rows
from danlu.data.samples import Selection
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.trees import longest_path
from danlu.recipe.sections import Data
from danlu.recipe.sections.base import RowType

ASK, TELL = {"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "A small fox."}
WORSE = {"role": "assistant", "content": "A small dog, I think."}
PAIR = {"prompt": [ASK], "chosen": [TELL], "rejected": [WORSE]}


@pytest.fixture(scope="module")
def tokenizer(tiny_world: World) -> Tokenizer:
    return load_tokenizer(str(tiny_world.tokenizer))


def tree_of(tokenizer: Tokenizer, value: dict[str, Any], row_type: RowType = "preference") -> RenderedSample:
    row = parse_answers(value, "auto", row_type, "rows.jsonl:1")
    (tree,) = render_answers([row], ["rows.jsonl:1"], tokenizer, RenderSettings())
    assert isinstance(tree, RenderedSample)
    return tree


def paths(tree: RenderedSample, column: str = "tokens") -> list[np.ndarray]:
    """The tokens from the root to the end of each branch, or their weights or reasons."""
    result: list[np.ndarray] = []
    for parent, start, stop in tree.branches:
        own = getattr(tree, column)[start:stop]
        result.append(np.concatenate([result[parent], own]) if parent >= 0 else own)
    return result


@pytest.mark.parametrize(
    "value",
    [PAIR, {"prompt": "Once upon a", "chosen": " time", "rejected": " day"}],
    ids=["messages", "strings"],
)
def test_a_path_has_the_tokens_of_its_text_as_a_whole(tokenizer: Tokenizer, value: dict[str, Any]) -> None:
    row = parse_answers(value, "auto", "preference", "row")
    whole = render_rows(answers_of(row), ["row", "row"], tokenizer, RenderSettings())
    tree = tree_of(tokenizer, value)
    stem, chosen, rejected = tree.branches
    assert (stem.parent, chosen.parent, rejected.parent) == (-1, 0, 0) and stem.stop > 1
    for column in ("tokens", "weights", "reasons"):
        for path, (expected,) in zip(paths(tree, column)[1:], whole, strict=True):  # type: ignore[misc]
            assert path.tolist() == getattr(expected, column).tolist()
    assert not tree.weights[: stem.stop].any() and tree.weights[stem.stop] == tree.weights[rejected.start] == 1
    assert [math.isnan(tree.facts["label"][0]), *tree.facts["label"][1:]] == [True, 1, 0]
    assert np.isnan(tree.facts["margin"]).all()
    assert tree_of(tokenizer, {**value, "margin": 0.5}).facts["margin"].tolist()[1:] == [0.5, 0.5]


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.data.prepare.WorkerPool", InThisProcess)


def ready(world: World, file: Path, row_type: RowType, **data: Any) -> PreparedData:
    section = Data(train=[{"path": str(file)}], cache=str(file.parent / "cache"), workers=1, **data)  # type: ignore[list-item]
    return prepare(DatasetSpec(section, "preference", str(world.tokenizer), None, 0, row_type=row_type))


def pack_trees(trees: Selection, max_length: int) -> None:
    section = Data(train=[{"path": "pairs.jsonl"}], max_length=max_length)  # type: ignore[list-item]
    DatasetSpec(section, "preference", "tokenizer", None, 0, row_type="preference").packed(trees)


def test_trees_come_back_from_the_disk(tiny_world: World, tokenizer: Tokenizer, tmp_path: Path) -> None:
    margins = [{**PAIR, "margin": 0.25 * number} for number in range(3)]
    file = write_rows(tmp_path / "pairs.jsonl", margins)
    prepared = ready(tiny_world, file, "preference")
    assert prepared.train is not None
    for number, sample in enumerate(prepared.train):
        tree = tree_of(tokenizer, margins[number])
        assert sample.tokens.tolist() == tree.tokens.tolist() and sample.weights.tolist() == tree.weights.tolist()
        assert sample.branches == tree.branches and isinstance(sample.branches[0], Branch)
        for name, values in tree.facts.items():
            np.testing.assert_array_equal(sample.facts[name], values)
    changed = write_rows(tmp_path / "others.jsonl", [{**PAIR, "margin": 0.5}, *margins[1:]])
    again, other = ready(tiny_world, file, "preference"), ready(tiny_world, changed, "preference")
    assert again.train is not None and other.train is not None
    assert prepared.train.digest() == again.train.digest() != other.train.digest()
    pack_trees(prepared.train, (int(prepared.train.lengths[0]) + 1) // 2)
    with pytest.raises(DataError, match="does not fit a packed sequence"):  # control: one token less for each path
        pack_trees(prepared.train, (int(prepared.train.lengths[0]) - 1) // 2)


def test_a_common_text_that_ends_inside_a_token_is_no_stem(tokenizer: Tokenizer) -> None:
    """The prompt ends inside a word, which one answer makes a single token of; control: its own tokens are no stem."""
    tree = tree_of(tokenizer, {"prompt": "Look, T", "chosen": "he fox", "rejected": "op"})
    prompt, chosen, rejected = (tokenizer.encode_many([text]).ids.tolist() for text in PARTED)
    stem = tree.branches[0].stop
    assert [path.tolist() for path in paths(tree)[1:]] == [[*chosen, tokenizer.eos_id], [*rejected, tokenizer.eos_id]]
    assert 0 < stem < len(prompt) and chosen[: len(prompt)] != prompt == rejected[: len(prompt)]
    # What the rejected answer has of the prompt in its own branch is context.
    own = len(prompt) - stem
    weights = tree.weights[tree.branches[2].start :]
    assert not weights[:own].any() and weights[own:].all() and tree.weights[tree.branches[1].start] == 1


PARTED = ("Look, T", "Look, The fox", "Look, Top")


def test_answers_without_a_common_token_are_roots_beside_each_other(tokenizer: Tokenizer) -> None:
    tree = tree_of(tokenizer, {"prompt": "T", "chosen": "he fox", "rejected": "op is it"})
    assert [branch.parent for branch in tree.branches] == [-1, -1]
    assert tree.facts["label"].tolist() == [1, 0]
    assert [tree.weights[branch.start] for branch in tree.branches] == [0, 0] and tree.weights.sum() > 1


@pytest.mark.parametrize("prompt", ["2 + 3 + 4?", [ASK]])
def test_steps_are_a_chain_that_adds_up_to_the_text(tokenizer: Tokenizer, prompt: Any) -> None:
    value = {"prompt": prompt, "completions": ["2 + 3 = 5", "5 + 4 = 10", "So 10"], "labels": [True, False, None]}
    row = parse_answers(value, "auto", "stepwise", "row")
    ((whole,),) = render_rows(answers_of(row), ["row"], tokenizer, RenderSettings())  # type: ignore[misc]
    tree = tree_of(tokenizer, value, "stepwise")
    assert tree.tokens.tolist() == whole.tokens.tolist() and tree.weights.tolist() == whole.weights.tolist()
    assert [branch.parent for branch in tree.branches] == [-1, 0, 1, 2]
    np.testing.assert_array_equal(tree.facts["label"], [math.nan, 1, 0, math.nan])
    texts = [tokenizer.decode(tree.tokens[branch.start : branch.stop].tolist()) for branch in tree.branches]
    for text, step in zip(texts[1:], value["completions"], strict=True):
        assert step.split()[-1] in text
    assert "5 + 4" not in texts[1] and "5 + 4" in texts[2]


@pytest.mark.parametrize("as_chat", [False, True])
def test_steps_that_the_prompt_quotes_are_those_of_the_answer(tokenizer: Tokenizer, as_chat: bool) -> None:
    steps = ["2 + 3 = 5", "5 + 4 = 9"]
    question = f"Is this right?\n{steps[0]}\n{steps[1]}\nSay it again.\n"
    prompt = [{"role": "user", "content": question}] if as_chat else question
    tree = tree_of(tokenizer, {"prompt": prompt, "completions": steps, "labels": [True, False]}, "stepwise")
    texts = [tokenizer.decode(tree.tokens[branch.start : branch.stop].tolist()) for branch in tree.branches]
    assert "Say it again" in texts[0] and "Log" not in texts[1] + texts[2]
    assert steps[0] in texts[1] and steps[1] not in texts[1] and steps[1] in texts[2]


def test_a_judged_answer_and_the_next_rows_behind_its_prompt(tiny_world: World, tmp_path: Path) -> None:
    rows = [{"messages": [ASK, answer], "label": answer is TELL} for answer in (TELL, WORSE, TELL)]
    rows[2]["messages"] = [{"role": "user", "content": "And now?"}, TELL]
    prepared = ready(tiny_world, write_rows(tmp_path / "judged.jsonl", rows), "unpaired", max_length=32)
    assert prepared.train is not None and prepared.statistics.judgements == {"desirable": 2, "undesirable": 1}
    samples = MismatchedAnswers(prepared.train, 32)
    assert len(samples) == 3 and samples.digest() != prepared.train.digest()
    for number in range(3):
        own, other, mixed = (
            source.sample(place) for source, place in (
                (prepared.train, number), (prepared.train, (number + 1) % 3), (samples, number)
            )
        )  # fmt: skip
        stem, answer, added = mixed.branches
        assert mixed.branches[:2] == own.branches and added.parent == 0 and answer.stop == added.start
        expected = other.tokens[other.branches[1].start :][: 32 - stem.stop]
        assert mixed.tokens[added.start :].tolist() == expected.tolist()
        assert not mixed.weights[added.start :].any() and mixed.weights[: answer.stop].tolist() == own.weights.tolist()
        assert mixed.facts["mismatched"].tolist() == [0, 0, 1] and math.isnan(mixed.facts["label"][2])
        assert samples.lengths[number] == len(mixed.tokens) == len(samples.reasons(number))
        apart = with_own_prompt(mixed)
        assert [branch.parent for branch in apart.branches] == [-1, 0, -1, 2]
        assert apart.tokens[answer.stop :].tolist() == [*mixed.tokens[: stem.stop], *expected]
        assert apart.facts["mismatched"].tolist() == [0, 0, 0, 1]
    with pytest.raises(DataError, match="two rows or more"):
        MismatchedAnswers(prepared.train.some_of(prepared.train.stores, ("x",), [np.array([0])]), 32)


def test_what_is_wrong_with_all_rows_together(tiny_world: World, tmp_path: Path) -> None:
    good = [{"messages": [ASK, TELL], "kto_tag": True}] * 2
    with pytest.raises(DataError, match=r"good\.jsonl: all 2 answers are desirable"):
        ready(tiny_world, write_rows(tmp_path / "good.jsonl", good), "unpaired")
    ready(tiny_world, write_rows(tmp_path / "both.jsonl", [*good, {**good[0], "kto_tag": False}]), "unpaired")
    some = [{**PAIR, "margin": 1}, {**PAIR, "margin": None}, PAIR]
    with pytest.raises(DataError, match=r"some\.jsonl:2: no 'margin', which 1 of 3 rows have"):
        ready(tiny_world, write_rows(tmp_path / "some.jsonl", some), "preference")


def test_answers_of_equal_tokens_are_refused(tokenizer: Tokenizer) -> None:
    spaces = {"prompt": [ASK], "chosen": "A small fox.", "rejected": "A small fox.\n"}  # the template trims
    rows = [parse_answers(value, "auto", "preference", "rows.jsonl:1") for value in (spaces, PAIR)]
    alike, pair = render_answers(rows, ["rows.jsonl:1"] * 2, tokenizer, RenderSettings())
    if isinstance(alike, RenderedSample):  # a template that does not trim
        assert len(alike.branches) == 3
    else:
        assert "chosen and rejected are the same" in str(alike)
    assert isinstance(pair, RenderedSample)


# file, type of its rows, rows used, bad rows, prompts shortened and answers cut at 512 tokens
REAL: list[tuple[str, RowType, int, int, int, int]] = [
    ("dpo_en_demo.json", "preference", 210, 0, 39, 126),
    ("dpo_zh_demo.json", "preference", 150, 0, 33, 45),
    ("hh_rlhf_harmless_slice.jsonl", "preference", 416, 4, 8, 1),
    ("kto_en_demo.json", "unpaired", 210, 0, 41, 83),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "row_type", "used", "bad", "shortened", "cut"), REAL)
def test_real_rows(
    shared_data: Path, tmp_path: Path, name: str, row_type: RowType, used: int, bad: int, shortened: int, cut: int
) -> None:
    file = shared_data / "preference" / name
    section = Data(
        train=[{"path": str(file)}],  # type: ignore[list-item]
        cache=str(tmp_path),
        workers=1,
        max_length=512,
        on_bad_row="skip",
    )
    tokenizer = shared_data / "tokenizers" / "minimind"
    prepared = prepare(DatasetSpec(section, "preference", str(tokenizer), None, 0, row_type=row_type))
    assert prepared.train is not None
    assert (len(prepared.train), prepared.statistics.bad_rows) == (used, bad)
    assert prepared.statistics.shortened == {"prompt shortened": shortened, "answer cut": cut}
    for sample in prepared.train:
        assert longest_path(sample) <= 512
        stem = sample.branches[0]
        assert stem.parent == -1 and stem.stop > 0 and not sample.weights[: stem.stop].any()
        for branch in sample.branches[1:]:
            assert branch.parent == 0 and sample.weights[branch.start : branch.stop].any()
