"""The largest micro-batch of rows with two answers, against all steps dealt out one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from danlu.core.errors import DataError
from danlu.parallel.batch_sharding import shard_by_tokens
from danlu.planning.batch_shape import DocumentRun
from danlu.planning.lengths import read_row_lengths
from danlu.planning.row_batches import RowBatches, RowTrees

ROWS = [(int(prompt), [int(a), int(b)]) for prompt, a, b in np.random.default_rng(0).integers(1, 40, (200, 3))]


def batches(ranks: int = 1, *, least: int = 1, steps: int | None = None) -> RowBatches:
    return RowBatches(RowTrees.of(ROWS, shared=True), 16, steps, ranks, 128, least)


@pytest.mark.parametrize("sequences", [1, 3, 100])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_largest_micro_batch_is_that_of_all_steps(sequences: int, ranks: int) -> None:
    own = batches(ranks)
    tokens = own.trees.tokens
    most = 0
    for first in range(0, len(ROWS) - 15, 16):
        step = tokens[first : first + 16].tolist()
        for rank in range(ranks):
            dealt = shard_by_tokens(step, rank, ranks, sequences * 128)
            most = max([most, *(sum(step[number] for number in numbers) for numbers in dealt)])
    largest = own.largest(sequences)
    real = [run.tokens for document in largest.documents for run in document if len(document) > 1]
    assert sum(real) == most
    padded = sum(run.tokens for document in largest.documents for run in document)
    assert most <= padded <= most * 33 / 32
    assert largest.targets >= sum(run.tokens for document in largest.documents for run in document if run.before)
    first_step = batches(ranks, steps=1).largest(sequences)  # control: of fewer steps it is another one
    assert first_step != largest or sequences == 1


def test_a_step_has_the_micro_batches_that_its_tokens_need() -> None:
    own = batches()
    assert own.step_tokens == round(16 * sum(prompt + a + b for prompt, (a, b) in ROWS) / len(ROWS))
    assert own.micro_batches(1) == -(-own.step_tokens // 128)
    assert own.micro_batches(100) == 1 and batches(least=4).micro_batches(100) == 4
    assert batches(ranks=8, least=4).micro_batches(100) == 2  # of two rows each
    mean = own.mean(100)
    assert len(mean.documents) == 16
    assert sum(run.tokens for document in mean.documents for run in document) == pytest.approx(own.step_tokens, rel=0.1)


def test_answers_share_their_prompt_or_have_copies_of_it() -> None:
    assert RowTrees.of([(5, [2, 3])], shared=True).documents([0]) == (
        (DocumentRun(5), DocumentRun(2, 5), DocumentRun(3, 5)),
    )
    assert RowTrees.of([(5, [2, 3])], shared=False).documents([0]) == ((DocumentRun(7),), (DocumentRun(8),))
    assert RowTrees.of([(0, [2, 3])], shared=True).documents([0]) == ((DocumentRun(2),), (DocumentRun(3),))


def test_lengths_of_rows_are_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [{"prompt_tokens": 5, "answer_tokens": [2, 3]}, {"answer_tokens": 4}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lengths = read_row_lengths(file, shared=True)
    assert lengths.documents == (10, 4) and lengths.source == "file" and not lengths.assumption
    file.write_text("9\n")
    of_number = read_row_lengths(file, shared=True)
    assert of_number.trees is not None and of_number.documents == (9,)
    assert of_number.trees.documents([0]) == ((DocumentRun(3), DocumentRun(3, 3), DocumentRun(3, 3)),)
    assert of_number.assumption.startswith("of 1 rows with a number of tokens alone")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no lengths. A line has"),
        ('{"tokens": 3}', "lengths.jsonl:1: a row has the form"),
        ('{"answer_tokens": []}', "lengths.jsonl:1: answer_tokens has no answer"),
        ('3\n{"answer_tokens": [0]}', "lengths.jsonl:2: 0 is no number of tokens"),
        ("x", "lengths.jsonl:1: 'x' is neither a number of tokens nor JSON"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message.replace("[", r"\[").replace("{", r"\{")):
        read_row_lengths(file, shared=True)
