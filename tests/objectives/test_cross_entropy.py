"""The objective of likelihood: what it reports, and the losses of sources beside the loss of all."""

from __future__ import annotations

from dataclasses import replace

import torch
from builders.tiny_run import SyntheticPacks, tiny_model

from danlu.core.types import Loss, Pack, Totals
from danlu.data.batch import collate, pad_to_bucket
from danlu.models.attend import attend_for
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.stages.outputs import DecoderOutputs

NAMES = ("a", "b", "c")


def packs() -> list[Pack]:
    """Documents of a and b in turns, and some of neither."""
    samples = [sample for n in range(12) for sample in SyntheticPacks().at(n).samples]
    return [Pack(tuple(replace(sample, source=("a", "b", "z")[n % 3]) for n, sample in enumerate(samples)))]


def loss_of(items: list[Pack], names: tuple[str, ...] = NAMES, objective: CrossEntropy | None = None) -> Loss:
    model, batch = tiny_model(), collate(items, source_names=names)
    filled = pad_to_bucket(batch)
    hidden = model(filled.tokens, filled.positions, attend_for(filled), torch.float32)
    outputs = DecoderOutputs(model, hidden, filled, len(batch.tokens), len(batch.targets))
    return (objective or CrossEntropy())({"policy": outputs}, batch, Totals.of(items))


def test_the_loss_of_a_source_is_that_of_its_rows_alone() -> None:
    together = loss_of(packs())
    assert together.metrics.keys() == {"accuracy", "loss/a", "loss/b", "loss/c"}
    for name in ("a", "b"):
        alone = [Pack(tuple(sample for pack in packs() for sample in pack.samples if sample.source == name))]
        want, metric = loss_of(alone, ()), together.metrics[f"loss/{name}"]
        torch.testing.assert_close(metric.sum, want.total.detach())
        assert metric.weight == Totals.of(alone).weight
    assert together.metrics["loss/c"].sum == together.metrics["loss/c"].weight == 0
    # Control: a and b differ, so taking one for the other is seen; and there are rows of neither.
    assert not torch.allclose(together.metrics["loss/a"].sum, together.metrics["loss/b"].sum)
    assert together.metrics["loss/a"].weight + together.metrics["loss/b"].weight < Totals.of(packs()).weight


def test_they_leave_the_extras_out_and_change_no_gradient() -> None:
    plain, extra = loss_of(packs()), loss_of(packs(), objective=CrossEntropy(0.2, 1e-2, reports_nll=True))
    torch.testing.assert_close(extra.metrics["loss/a"].sum, plain.metrics["loss/a"].sum)
    torch.testing.assert_close(extra.metrics["nll"].sum, plain.total.detach())
    assert not torch.allclose(extra.total, plain.total)
    assert torch.equal(loss_of(packs(), ()).total, plain.total)
    assert not any(metric.sum.requires_grad for metric in extra.metrics.values())
