"""Runs of stored trees against the trees that a step lays out, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from danlu.core.types import Branch, Sample
from danlu.data.mismatched import MismatchedAnswers, with_own_prompt
from danlu.data.packed_dataset import PackedDataset, rows_in_order
from danlu.data.samples import SampleBlock, Selection, TreeTable
from danlu.data.tree_runs import TreeRuns, tree_runs
from danlu.data.trees import longest_path, path_lengths, repeat_stem
from danlu.recipe.sections import Packing

PAIR, JUDGED, CHAIN, APART, DEEP = [-1, 0, 0], [-1, 0], [-1, 0, 1, 2], [-1, -1], [-1, 0, 1, 1, 0]
LONGEST = 40


def selection(parents: list[list[int]], seed: int = 0) -> Selection:
    """Rows of trees with branches of random lengths, from two sources, the first row twice."""
    generator = np.random.default_rng(seed)
    blocks = [_block(parents[:2], generator), _block(parents[2:], generator)]
    numbers = [np.array([0, 1, 0]), np.arange(len(parents) - 2)[::-1]]
    return Selection.some_of(blocks, ("one", "two"), numbers)


def _block(parents: list[list[int]], generator: np.random.Generator) -> SampleBlock:
    sizes = [generator.integers(1, 20, len(own)) for own in parents]
    stops = [np.cumsum(own).tolist() for own in sizes]
    trees = [tuple(map(Branch, own, [0, *ends[:-1]], ends)) for own, ends in zip(parents, stops, strict=True)]
    tokens = [np.arange(ends[-1], dtype=np.int32) for ends in stops]
    zeros = [np.zeros(len(own), np.float32) for own in tokens]
    facts = [{"label": np.zeros(len(own), np.float32)} for own in parents]
    numbers, rows = list(range(len(parents))), ["row"] * len(parents)
    return SampleBlock.of(tokens, zeros, zeros, numbers, rows, TreeTable.of(trees, facts))


def runs_of(sample: Sample) -> list[list[int]]:
    """[tokens, tokens before] of each branch."""
    paths = path_lengths(sample.branches)
    return [
        [stop - start, path - (stop - start)] for (_, start, stop), path in zip(sample.branches, paths, strict=True)
    ]


def by_row(runs: TreeRuns) -> list[list[list[int]]]:
    return [part.tolist() for part in np.split(runs.runs, runs.offsets[1:-1])]


@pytest.mark.parametrize("longest_shared", [None, 25, 0])
def test_runs_are_those_of_the_trees_that_a_step_lays_out(longest_shared: int | None) -> None:
    chosen = selection([PAIR, APART, CHAIN, DEEP, PAIR, JUDGED])
    runs = tree_runs(chosen, longest_shared=longest_shared)
    assert runs is not None
    laid_out = [
        sample if longest_shared is None or longest_path(sample) <= longest_shared else repeat_stem(sample)
        for sample in chosen
    ]
    assert by_row(runs) == [runs_of(sample) for sample in laid_out]
    if longest_shared is not None:  # control
        assert by_row(runs) != [runs_of(sample) for sample in chosen]
    answers = [sum(stop - start for parent, start, stop in each.branches if parent >= 0) for each in chosen]
    assert [own or len(each.tokens) for own, each in zip(answers, chosen, strict=True)] == runs.targets.tolist()


@pytest.mark.parametrize("longest_shared", [None, 20])
def test_judged_answers_have_that_of_the_next_row(longest_shared: int | None) -> None:
    chosen = selection([JUDGED] * 5)
    runs = tree_runs(chosen, mismatched_to=LONGEST // 2, longest_shared=longest_shared)
    assert runs is not None
    compared = MismatchedAnswers(chosen, LONGEST // 2)
    samples = [compared.sample(number) for number in range(len(compared))]
    laid_out = [
        sample if longest_shared is None or longest_path(sample) <= longest_shared else with_own_prompt(sample)
        for sample in samples
    ]
    assert by_row(runs) == [runs_of(sample) for sample in laid_out]
    assert by_row(runs) != by_row(tree_runs(chosen, mismatched_to=LONGEST) or runs)  # control: answers that are cut
    assert runs.targets.tolist() == [sample.branches[1].stop - sample.branches[1].start for sample in chosen]


def test_rows_are_in_the_order_of_training() -> None:
    chosen = selection([PAIR] * 9)
    dataset = PackedDataset(chosen, Packing(kind="none"), 100, seed=3)
    order = rows_in_order(len(chosen), 3)
    trained = [dataset.at(number).samples[0] for number in range(len(chosen))]
    runs = tree_runs(chosen)
    assert runs is not None
    assert by_row(runs.taken(order)) == [runs_of(sample) for sample in trained]
    assert by_row(runs) != by_row(runs.taken(order))  # control


def test_rows_that_are_no_trees_have_no_runs() -> None:
    tokens = [np.arange(3, dtype=np.int32)]
    block = SampleBlock.of(tokens, [np.ones(3, np.float32)], [np.zeros(3, np.uint8)], [0], ["row"])
    assert tree_runs(Selection.all_of([block], ["one"])) is None
