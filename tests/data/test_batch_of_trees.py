"""Trees in a micro-batch: positions, what each target is predicted from, branches, columns and facts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from danlu.core.types import ROUTES, Batch, Branch, Pack, Sample
from danlu.data.batch import collate, empty_like, pad_to_bucket
from danlu.data.trees import repeat_stem

NAN = float("nan")


def tree(seed: int, *sizes: tuple[int, int], trained_stem: bool = False) -> Sample:
    """A sample of branches (parent, tokens) with random tokens and weights; the first branch of a tree has none."""
    random = np.random.default_rng(seed)
    ends = np.cumsum([0, *(tokens for _, tokens in sizes)]).tolist()
    branches = tuple(Branch(parent, ends[n], ends[n + 1]) for n, (parent, _) in enumerate(sizes))
    weights = random.choice([0.0, 1.0, 0.25], ends[-1]).astype(np.float32)
    for parent, start, stop in branches:
        if parent < 0:
            weights[start : start + 1 if trained_stem else stop] = 0
        else:
            weights[start] = 0.5
    facts = {"label": np.array([NAN if parent < 0 else n for n, (parent, _) in enumerate(sizes)], np.float32)}
    tokens = random.integers(0, 1000, ends[-1]).astype(np.int32)
    columns = {"reference": random.standard_normal(ends[-1]), "top": random.standard_normal((ends[-1], 3))}
    return Sample(tokens, weights, f"pairs.jsonl:{seed}", "ab"[seed % 2], branches, columns, facts)


PAIR = Sample(
    np.array([5, 6, 7, 8, 9], np.int32),
    np.array([0, 0, 1, 0.5, 2], np.float32),
    "pairs.jsonl:1",
    "a",
    (Branch(-1, 0, 2), Branch(0, 2, 4), Branch(0, 4, 5)),
    {"reference": np.array([0, 0, -1, -2, -3], np.float32)},
    {"label": np.array([NAN, 1, 0], np.float32)},
)


def test_a_pair_by_hand() -> None:
    batch = collate([Pack((PAIR,)), Pack((replace(PAIR, row="pairs.jsonl:2", source="b"),))], source_names=("a", "b"))
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9] * 2
    assert batch.positions.tolist() == [0, 1, 2, 3, 2] * 2
    assert batch.boundaries == (0, 5, 10)
    assert batch.targets.tolist() == [7, 8, 9] * 2
    assert batch.logits_indices.tolist() == [1, 2, 1, 6, 7, 6]  # both answers go on from the stem's last token
    assert batch.trees[3:] == (Branch(-1, 5, 7), Branch(3, 7, 9), Branch(3, 9, 10))
    assert batch.branch is not None and batch.branch.tolist() == [1, 1, 2, 4, 4, 5]
    assert batch.columns["reference"].tolist() == [-1, -2, -3] * 2
    assert batch.facts["label"].nan_to_num(7).tolist() == [7, 1, 0] * 2 and batch.facts["label"].dtype == torch.float32
    assert batch.rows == ("pairs.jsonl:1", "pairs.jsonl:2") and batch.weight == 7
    assert batch.target_sources is not None and batch.target_sources.indices.tolist() == [0, 0, 0, 1, 1, 1]


def test_tokens_before_every_root_by_hand() -> None:
    batch = collate([Pack((PAIR, repeat_stem(PAIR)))], virtual_token_ids=(90, 91))
    assert batch.tokens.tolist() == [90, 91, 5, 6, 7, 8, 9, 90, 91, 5, 6, 7, 8, 90, 91, 5, 6, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, *range(6), *range(5)]
    assert batch.boundaries == (0, 7, 13, 18)
    assert batch.trees == (Branch(-1, 0, 4), Branch(0, 4, 6), Branch(0, 6, 7), Branch(-1, 7, 13), Branch(-1, 13, 18))
    assert batch.logits_indices.tolist() == [3, 4, 3, 10, 11, 16]
    assert batch.branch is not None and batch.branch.tolist() == [1, 1, 2, 3, 3, 4]
    assert batch.columns["reference"].tolist() == [-1, -2, -3] * 2
    assert batch.rows == ("pairs.jsonl:1",) * 3  # one for each document


SAMPLES = [
    tree(0, (-1, 3), (0, 2), (0, 4)),
    tree(1, (-1, 1), (-1, 4), (1, 1), (2, 3), (2, 1), (1, 5), (-1, 2), (6, 2)),
    tree(2, (-1, 6), trained_stem=True),
    replace(tree(3, (-1, 4), trained_stem=True), branches=()),
    tree(4, (-1, 2), (0, 2), (1, 3), (2, 1)),
]


def paths(sample: Sample) -> list[list[int]]:
    """Of each branch, the tokens from its root to its end."""
    by_branch: list[list[int]] = []
    for parent, start, stop in sample.branches or (Branch(-1, 0, len(sample.tokens)),):
        by_branch.append([*(by_branch[parent] if parent >= 0 else []), *range(start, stop)])
    return by_branch


def slow_targets(samples: list[Sample], sources: tuple[str, ...]) -> list[tuple[object, ...]]:
    """(tokens before it on its path, target, weight, position, branch, source, columns), one target at a time."""
    rows: list[tuple[object, ...]] = []
    branch = -1
    for sample in samples:
        for path, (_, start, stop) in zip(
            paths(sample), sample.branches or (Branch(-1, 0, len(sample.tokens)),), strict=True
        ):
            branch += 1
            for token in range(start, stop):
                if sample.weights[token]:
                    at = path.index(token)
                    columns = sample.columns["reference"][token], sample.columns["top"][token].tolist()
                    row = sample.tokens[path[at - 1]], sample.tokens[token], sample.weights[token], at, branch
                    rows.append((*row, sources.index(sample.source), *columns))
    return rows


def targets_of(batch: Batch, virtual: int) -> list[tuple[object, ...]]:
    assert batch.branch is not None and batch.target_sources is not None
    columns = (
        batch.tokens[batch.logits_indices],
        batch.targets,
        batch.weights,
        batch.positions[batch.logits_indices] + 1 - virtual,
        batch.branch,
        batch.target_sources.indices,
        batch.columns["reference"],
        batch.columns["top"],
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("virtual", [(), (90, 91)])
def test_targets_equal_the_obvious_version(virtual: tuple[int, ...]) -> None:
    def batch_of(samples: list[Sample]) -> Batch:
        packs = [Pack(tuple(samples[:2])), Pack(tuple(samples[2:]))]
        return collate(packs, virtual_token_ids=virtual, source_names=("a", "b"))

    batch = batch_of(SAMPLES)
    assert targets_of(batch, len(virtual)) == slow_targets(SAMPLES, ("a", "b")) != []
    assert [branch.stop - branch.start - len(virtual) * (branch.parent < 0) for branch in batch.trees] == [
        stop - start for sample in SAMPLES for _, start, stop in sample.branches or (Branch(-1, 0, 4),)
    ]
    documents = sum(sample.documents for sample in SAMPLES)
    assert len(batch.boundaries) - 1 == len(batch.rows) == documents
    # Negative control: an answer that goes on from the one beside it.
    chain = replace(SAMPLES[0], branches=(*SAMPLES[0].branches[:2], Branch(1, 5, 9)))
    assert targets_of(batch_of([chain, *SAMPLES[1:]]), len(virtual)) != slow_targets(SAMPLES, ("a", "b"))


def test_the_first_token_of_every_root_is_no_target() -> None:
    two = replace(PAIR, branches=(Branch(-1, 0, 2), Branch(-1, 2, 5)))
    with pytest.raises(ValueError, match=r"pairs\.jsonl:1: the first token of a sample carries weight"):
        collate([Pack((two,))])


def test_an_item_without_targets_has_what_the_stages_items_have() -> None:
    empty = empty_like(SAMPLES[0])
    alone, beside = collate([empty]), collate([Pack((SAMPLES[0],)), empty])
    assert len(alone.targets) == 0 and len(beside.targets) > 0
    assert alone.columns["top"].shape == (0, 3) and alone.columns["reference"].dtype == torch.float64
    assert alone.facts["label"].isnan().tolist() == [True] and len(beside.facts["label"]) == len(beside.trees) == 4
    assert empty_like(replace(PAIR, branches=(), columns={}, facts={})).samples[0].branches == ()


def test_filling_up_adds_a_root() -> None:
    sample = tree(6, (-1, 100), (0, 99))
    batch = collate([Pack((sample,))])
    filled = pad_to_bucket(batch)
    assert filled.trees == (*batch.trees, Branch(-1, 199, 200)) and filled.boundaries == (0, 199, 200)
    assert pad_to_bucket(collate([Pack((tree(7, (-1, 64), (0, 64)),))])).trees[-1].parent == 0


@pytest.mark.gpu
def test_trees_on_the_gpu_equal_those_on_the_cpu() -> None:
    here, there = (collate([Pack(tuple(SAMPLES))], device, source_names=("a", "b")) for device in ("cpu", "cuda"))
    assert here.branch is not None and there.branch is not None
    for name in ("tokens", "positions", "logits_indices", "targets", "weights", "branch"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
    assert all(torch.equal(here.columns[name], there.columns[name].cpu()) for name in here.columns)
    assert there.facts["label"].device.type == "cpu"


def test_routes_are_of_all_tokens_and_none_of_what_is_added() -> None:
    """Virtual tokens, and what fills a batch up, go where routers send them; so does a process's empty pack."""
    sample = Sample(
        np.arange(40, dtype=np.int32),
        np.float32([0] * 20 + [1] * 20),
        "row",
        branches=(Branch(-1, 0, 20), Branch(0, 20, 33), Branch(0, 33, 40)),
        columns={ROUTES: np.arange(240, dtype=np.int16).reshape(40, 3, 2), "old": np.zeros(40, np.float32)},
    )
    batch = collate([Pack((sample,)), Pack((sample,))], virtual_token_ids=(1, 2))
    assert batch.routes is not None and set(batch.columns) == {"old"}
    assert batch.routes[:, 0, 0].tolist() == [-1, -1, *range(0, 240, 6)] * 2
    filled = pad_to_bucket(batch, 64)
    assert filled.routes is not None and len(filled.routes) == len(filled.tokens) > len(batch.tokens)
    assert filled.routes[: len(batch.routes)].equal(batch.routes)
    assert (filled.routes[len(batch.routes) :] == -1).all()
    (empty,) = empty_like(sample).samples
    assert empty.columns[ROUTES].shape == (2, 3, 2) and (empty.columns[ROUTES] == -1).all()
