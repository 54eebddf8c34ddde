"""One step: packed equals one by one, micro-batches change nothing, and numbers that are not finite are explained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.recompute import LAYERS, adapted
from builders.tiny_run import SyntheticPacks, tiny_model
from torch import Tensor

from danlu.core.errors import TrainingError
from danlu.core.types import Batch, Pack
from danlu.data.batch import pad_to_bucket
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.memory.recompute import wrap
from danlu.models import block_attention
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.stages.learner import DecoderLearner
from danlu.training.step import StepGradients, accumulate

PACKS = [SyntheticPacks().at(n) for n in range(5)]


def compute(model: Decoder, micro: int, dtype: torch.dtype = torch.float32) -> DecoderLearner:
    return DecoderLearner(model, model, torch.device("cpu"), dtype, micro)


def gradients_of(
    micro: int, packs: list[Pack] = PACKS, clip: float | None = None, dtype: torch.dtype = torch.float32
) -> tuple[StepGradients, dict[str, Tensor]]:
    model = tiny_model()
    result = accumulate(compute(model, micro, dtype), packs, step=1, clip=clip)
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [2, 3, 5, 100])
def test_micro_batches_change_neither_loss_nor_gradient(micro: int) -> None:
    want, want_gradients = gradients_of(1)
    got, got_gradients = gradients_of(micro)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert got.totals == want.totals
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=2e-5, atol=1e-7)


def test_packed_equals_one_document_at_a_time() -> None:
    want, want_gradients = gradients_of(100)
    alone = [Pack((sample,)) for pack in PACKS for sample in pack.samples]
    got, got_gradients = gradients_of(1, alone)
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=2e-5, atol=1e-7)


def test_filling_up_to_few_sizes_changes_neither_loss_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [SyntheticPacks().at(n) for n in range(40)]
    got, got_gradients = gradients_of(100, packs)
    monkeypatch.setattr("danlu.stages.learner.pad_to_bucket", lambda batch, multiple: batch)
    want, want_gradients = gradients_of(100, packs)
    assert got.totals.tokens % 16  # there was something to fill up
    assert got.totals == want.totals
    assert (got.loss, got.metrics) == (pytest.approx(want.loss, rel=1e-6), pytest.approx(want.metrics, rel=1e-6))
    for name, gradient in want_gradients.items():
        torch.testing.assert_close(got_gradients[name], gradient, rtol=2e-5, atol=1e-7)

    def with_weight(batch: Batch, multiple: int) -> Batch:
        filled = pad_to_bucket(batch, multiple)
        return replace(filled, weights=filled.weights + 1e-3)

    monkeypatch.setattr("danlu.stages.learner.pad_to_bucket", with_weight)
    assert gradients_of(100, packs)[0].loss != pytest.approx(want.loss, rel=1e-6)


@pytest.mark.parametrize("kind", ["lora-dropout", "dora-dropout"])
def test_layers_that_are_recomputed_draw_the_dropout_of_their_forward_pass(kind: str) -> None:
    """Through `accumulate`, which ends a micro-batch's dropout only behind its backward pass; several micro-batches."""

    def step(recompute: Kind, number: int = 3) -> dict[str, Tensor]:
        made = adapted(kind)
        wrap(made.model, [LayerPlan(layer, recompute) for layer in range(LAYERS)])
        learner = replace(compute(made.model, 2), adapters=made.adapters)
        accumulate(learner, PACKS, step=number, clip=None)
        assert not made.dropout_state.active
        return {name: one.grad.clone() for name, one in made.trained.items() if one.grad is not None}

    want = step("none")
    assert want and not all(torch.equal(gradient, want[name]) for name, gradient in step("none", 4).items())
    for recompute in ("elementwise", "selective", "full"):
        got = step(recompute)
        assert got.keys() == want.keys()
        assert [name for name, gradient in want.items() if not torch.equal(got[name], gradient)] == [], recompute


def test_dropout_is_told_the_step_and_the_packs_of_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, told = adapted("lora-dropout"), []
    begin = made.dropout_state.begin

    def recorded(step: int, packs: list[tuple[int, int]], rows: Tensor | None = None) -> None:
        told.append((step, list(packs)))
        begin(step, packs, rows)

    monkeypatch.setattr(made.dropout_state, "begin", recorded)
    accumulate(replace(compute(made.model, 2), adapters=made.adapters), PACKS, step=7, clip=None)
    sizes = [(number, pack.tokens) for number, pack in enumerate(PACKS)]
    forward_and_backward = [[packs, packs] for packs in (sizes[:2], sizes[2:4], sizes[4:])]
    assert told == [(7, packs) for both in forward_and_backward for packs in both]


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_a_loss_scale_is_taken_out_of_gradients_and_norm(clip: float | None) -> None:
    def step(scale: float) -> tuple[StepGradients, dict[str, Tensor]]:
        model = tiny_model()
        found = accumulate(compute(model, 2), PACKS, step=1, clip=clip, loss_scale=scale)
        return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    (want, gradients), (got, scaled) = step(1.0), step(2.0**12)
    assert got == replace(want, norm=got.norm) and got.norm == pytest.approx(want.norm, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(scaled[name], gradient, rtol=1e-5, atol=1e-9)


def test_attention_that_crosses_documents_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    want, want_gradients = gradients_of(100)
    monkeypatch.setattr(
        "danlu.models.attend.PackedAttention", lambda boundaries, trees, **options: PackedAttention((0, boundaries[-1]))
    )  # negative control: one document over the whole pack
    got, got_gradients = gradients_of(100)
    assert got.loss != pytest.approx(want.loss, rel=1e-4)
    assert not torch.allclose(got_gradients["norm.weight"], want_gradients["norm.weight"], rtol=1e-3)


def test_layers_that_recompute_probabilities_of_attention_make_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    inner = block_attention._weights_of

    def counted(*arguments: Any) -> Any:
        made[-1] += 1
        return inner(*arguments)

    monkeypatch.setattr(block_attention, "_weights_of", counted)
    kinds: tuple[Kind, ...] = ("none", "elementwise")
    for kind in kinds:
        made.append(0)
        model = tiny_model()
        wrap(model, [LayerPlan(layer, kind) for layer in range(len(model.layers))])
        accumulate(compute(model, 2), PACKS, step=1, clip=None)
    assert made[1] == 2 * made[0] > 0


def test_the_gradient_is_that_of_the_mean_and_is_clipped_to_the_norm() -> None:
    free, gradients = gradients_of(2)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert free.norm == pytest.approx(norm, rel=1e-5)
    clipped, small = gradients_of(2, clip=free.norm / 10)
    assert clipped.norm == pytest.approx(free.norm, rel=1e-6)
    for name in gradients:
        torch.testing.assert_close(small[name], gradients[name] / 10, rtol=1e-4, atol=1e-8)


def test_bfloat16_activations_leave_float32_gradients_close_to_the_exact_ones() -> None:
    want, want_gradients = gradients_of(2)
    got, got_gradients = gradients_of(2, dtype=torch.bfloat16)
    assert got.loss == pytest.approx(want.loss, rel=1e-2)
    for name, gradient in want_gradients.items():
        assert got_gradients[name].dtype == torch.float32
        assert (got_gradients[name] - gradient).norm() / gradient.norm() < 0.1, name


def test_a_nan_weight_is_named() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.layers["1"].mlp.up_proj.weight[3, 2] = math.nan
    with pytest.raises(TrainingError, match=r"step 7: .* a weight is not: layers\.1\.mlp\.up_proj\.weight"):
        accumulate(compute(model, 2), PACKS, step=7, clip=None)


def test_the_module_and_the_row_that_overflow_are_named() -> None:
    model = tiny_model()
    pack = PACKS[3]
    assert len(pack.samples) > 1
    culprit = pack.samples[-1]

    def overflow(module: object, inputs: object, output: Tensor) -> Tensor:
        return torch.cat((output[:-2], output[-2:] * math.inf))  # the state that predicts the last token

    model.layers["1"].mlp.up_proj.register_forward_hook(overflow)
    with pytest.raises(TrainingError) as error:
        accumulate(compute(model, 1), [pack], step=2, clip=None)
    assert "step 2: the loss is not finite, first in the output of layers.1.mlp.up_proj" in str(error.value)
    assert f"for {culprit.row}." in str(error.value)
