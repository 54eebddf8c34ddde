"""The share of a batch that a context rank has: each target once, positions and lengths of whole documents."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from danlu.adapters.dropout import DropoutState
from danlu.core.types import ROTARY_LENGTH, ROUTES, Batch, Branch, Pack, Sample
from danlu.data.batch import collate, pad_to_bucket
from danlu.data.context_sharding import on_device, rows_of, share_of_batch, shares
from danlu.stages.roles import recorded_lengths

LENGTHS = (30, 3, 1, 41, 7)


def batch_of(lengths: tuple[int, ...] = LENGTHS) -> Batch:
    random = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        weights = random.choice([0.0, 0.5, 1.0], length).astype(np.float32)
        weights[0] = 0
        tokens = random.integers(0, 99, length).astype(np.int32)
        columns = {"value": random.random(length).astype(np.float32)}
        samples.append(Sample(tokens, weights, f"rows:{number}", f"file {number % 2}", columns=columns))
    return collate([Pack(tuple(samples[:3])), Pack(tuple(samples[3:]))], source_names=("file 0", "file 1"))


def cut(batch: Batch, ranks: int) -> list[Batch]:
    dealt = shares(batch.boundaries, ranks, token_cost=0)
    return [share_of_batch(batch, dealt, rank, torch.clone) for rank in range(ranks)]


def targets_of(batch: Batch) -> list[tuple[float, ...]]:
    """(position that it is predicted at, token there, target, weight, value, source) of each target, sorted."""
    places = batch.logits_indices
    assert batch.target_sources is not None
    columns = [
        batch.positions[places], batch.tokens[places], batch.targets, batch.weights, batch.columns["value"],
        batch.target_sources.indices,
    ]  # fmt: skip
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_target_is_on_the_rank_that_predicts_it(ranks: int) -> None:
    batch = batch_of()
    parts = cut(batch, ranks)
    assert sorted(target for part in parts for target in targets_of(part)) == targets_of(batch)
    assert sum(part.weight for part in parts) == pytest.approx(batch.weight, rel=1e-12)
    by_source = [part.target_sources.weights for part in parts if part.target_sources is not None]
    assert batch.target_sources is not None
    assert np.sum(by_source, axis=0) == pytest.approx(batch.target_sources.weights, rel=1e-12)
    lost = [targets_of(part)[1:] for part in parts]  # control
    assert sorted(target for part in lost for target in part) != targets_of(batch)


def test_tokens_know_their_whole_document() -> None:
    batch, lengths = batch_of(), torch.tensor(LENGTHS)
    for part, share in zip(cut(batch, 2), shares(batch.boundaries, 2, token_cost=0), strict=True):
        rows = rows_of(share)
        assert torch.equal(part.tokens, batch.tokens[rows]) and torch.equal(part.positions, batch.positions[rows])
        assert part.document_lengths is not None
        assert torch.equal(part.document_lengths, lengths.repeat_interleave(lengths)[rows])
        assert part.boundaries[-1] == len(rows) and len(part.rows) == len(part.boundaries) - 1
        assert any(part.positions[start] > 0 for start in part.boundaries[:-1])  # something is cut


def test_a_rank_without_tokens_has_one_that_fills_up() -> None:
    parts = cut(batch_of((3,)), 4)
    empty = next(part for part in parts if not len(part.tokens))
    filled = pad_to_bucket(empty, 2)
    assert len(filled.tokens) == 2 and not filled.real.any() and filled.weight == 0
    assert filled.document_lengths is not None and filled.document_lengths.tolist() == [1, 1]


def test_dropout_follows_the_place_in_the_pack() -> None:
    batch, state = batch_of(), DropoutState(1)
    packs = [(4, 34), (7, 48)]
    state.begin(3, packs)
    whole = state.token_keys(torch.zeros(82, 1))
    for share in shares(batch.boundaries, 3, token_cost=0):
        rows = rows_of(share)
        state.begin(3, packs, rows)
        assert torch.equal(state.token_keys(torch.zeros(len(rows) + 2, 1))[:-2], whole[rows])
    assert not torch.equal(whole[:48], whole[34:])  # control


def trees() -> Batch:
    """A pair whose answers are long, then a chain of two steps."""
    random = np.random.default_rng(1)
    branches = (Branch(-1, 0, 40), Branch(0, 40, 100), Branch(0, 100, 130)), (Branch(-1, 0, 5), Branch(0, 5, 9))
    samples = []
    for number, own in enumerate(branches):
        length = own[-1].stop
        weights = (np.arange(length) >= own[0].stop).astype(np.float32)
        tokens = random.integers(0, 99, length).astype(np.int32)
        facts = {"label": np.arange(len(own), dtype=np.float32), ROTARY_LENGTH: np.full(len(own), 70.0, np.float32)}
        routes = random.integers(0, 8, (length, 2, 1)).astype(np.int16)
        samples.append(Sample(tokens, weights, f"rows:{number}", branches=own, columns={ROUTES: routes}, facts=facts))
    samples[0].facts[ROTARY_LENGTH][0] = np.nan  # of a stem; the other tree has another length
    samples[1].facts[ROTARY_LENGTH][:] = np.nan
    return collate([Pack(tuple(samples))])


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_knows_all_branches(ranks: int) -> None:
    batch = trees()
    dealt = shares(batch.boundaries, ranks, trees=batch.trees, token_cost=0)
    parts = [share_of_batch(batch, dealt, rank, torch.clone) for rank in range(ranks)]
    shared = [part.shared_branches for part in parts if part.shared_branches is not None]
    numbers = torch.cat([each.target_numbers for each in shared])
    assert numbers.sort().values.equal(torch.arange(len(batch.targets))) and batch.branch is not None
    assert torch.cat([part.branch for part in parts]).equal(batch.branch[numbers])
    assert torch.cat([part.targets for part in parts]).equal(batch.targets[numbers])
    assert [each.are_counted for each in shared] == [True] + [False] * (ranks - 1)
    of_last = torch.stack([each.last_tokens for each in shared])  # [ranks, M]
    assert (of_last >= 0).sum(0).eq(1).all()
    for part, each, share in zip(parts, shared, dealt, strict=True):
        rows = rows_of(share)
        assert part.trees == batch.trees and part.facts is batch.facts
        assert part.routes is not None and batch.routes is not None and part.routes.equal(batch.routes[rows])
        starts = torch.tensor([branch.start for branch in batch.trees])
        assert each.branch_of_token.equal(torch.searchsorted(starts, rows, right=True) - 1)
        stops = torch.tensor([branch.stop for branch in batch.trees])
        own = each.last_tokens >= 0
        assert rows[each.last_tokens[own]].equal(stops[own] - 1)
        assert part.document_lengths is not None
        assert part.document_lengths.equal(torch.tensor([100, 9])[(rows >= 130).long()])  # of the longest paths
        filled = pad_to_bucket(part, 4)
        assert filled.trees == batch.trees and len(filled.tokens) % 4 == 0
        recorded = recorded_lengths(filled)
        assert recorded[: len(rows)].equal(torch.tensor([70, 9])[(rows >= 130).long()])
        assert recorded[len(rows) :].eq(1).all()


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    values = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_every_tensor_of_a_share_goes_to_its_device() -> None:
    batch = trees()
    share = share_of_batch(batch, shares(batch.boundaries, 2, trees=batch.trees, token_cost=0), 1, torch.clone)
    here, moved = tensors_of(share), tensors_of(on_device(share, torch.device("meta")))
    assert here.keys() == moved.keys() >= {"tokens", "targets", "branch", "routes", "document_lengths"}
    assert {name: value.shape for name, value in moved.items()} == {name: value.shape for name, value in here.items()}
    assert [name for name, value in moved.items() if not value.is_meta] == []
    plain = replace(share, branch=None, routes=None, document_lengths=None)
    assert tensors_of(on_device(plain, torch.device("cpu"))).keys() == tensors_of(plain).keys()


def test_documents_have_facts_too() -> None:
    """As answers of the model itself have, which stage distill learns from: the length that they were drawn by."""
    samples = [
        Sample(np.arange(length, dtype=np.int32), np.zeros(length, np.float32), "row", facts={ROTARY_LENGTH: recorded})
        for length, recorded in ((60, np.array([80.0])), (10, np.array([np.nan])))
    ]
    batch = collate([Pack(tuple(samples))])
    dealt = shares(batch.boundaries, 2, token_cost=0)
    for rank, share in enumerate(dealt):
        part = share_of_batch(batch, dealt, rank, torch.clone)
        assert recorded_lengths(part).equal(torch.tensor([80, 10])[(rows_of(share) >= 60).long()])
