"""Replicas in one process: the same numbers as one model, and gradients that come back to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_model
from torch import Tensor

from danlu.language.learner import DecoderLearner, ThreadedLearner
from danlu.models.decoder import Decoder
from danlu.parallel.step_parallel import StepParallel
from danlu.parallel.threads import Replicas, replica, shares_of
from danlu.train.evaluation import evaluate
from danlu.train.step import StepGradients, accumulate

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Decoder:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture
def threaded(model: Decoder) -> Iterator[ThreadedLearner]:
    replicas = Replicas(model, [CPU] * 3)
    yield ThreadedLearner(model, model, CPU, torch.float32, 4, parallel=StepParallel(), replicas=replicas)
    replicas.close()


def learnt(compute: DecoderLearner) -> tuple[StepGradients, dict[str, Tensor]]:
    found = accumulate(compute, [SyntheticPacks().at(n) for n in range(6)], step=1, clip=None)
    gradients = {name: parameter.grad for name, parameter in compute.model.named_parameters()}
    for parameter in compute.model.parameters():
        parameter.grad = None
    return found, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def test_replicas_learn_what_one_model_does(model: Decoder, threaded: ThreadedLearner) -> None:
    one, wanted = learnt(DecoderLearner(model, model, CPU, torch.float32, 4))
    many, found = learnt(threaded)
    assert (many.loss, many.norm) == pytest.approx((one.loss, one.norm), rel=1e-6)
    assert many.metrics == pytest.approx(one.metrics, rel=1e-6)
    assert many.totals == one.totals
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-8)


def test_a_replica_that_is_left_out_is_missed(
    model: Decoder, threaded: ThreadedLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, wanted = learnt(threaded)
    run = Replicas.run

    def cut_off(self: Replicas, work: object, shares: object) -> list[object]:
        first, *others = run(self, work, shares)  # type: ignore[arg-type]
        for other in others:
            other.total.detach_()
        return [first, *others]

    monkeypatch.setattr(Replicas, "run", cut_off)
    many, found = learnt(threaded)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert not torch.allclose(found["norm.weight"], wanted["norm.weight"], rtol=1e-3)


def test_evaluation_over_replicas_is_that_of_one_model(model: Decoder, threaded: ThreadedLearner) -> None:
    packs = [SyntheticPacks(seed=3).at(n) for n in range(5)]
    one = evaluate(DecoderLearner(model, model, CPU, torch.float32, 4), packs)
    many = evaluate(threaded, packs)
    assert one is not None
    assert many is not None
    assert many.values() == pytest.approx(one.values(), rel=1e-6)


def test_tied_weights_stay_one_in_a_replica(model: Decoder) -> None:
    made = replica(model, CPU)
    assert isinstance(made, Decoder)
    assert made.embed_tokens.weight is made.head_weight
    assert made.embed_tokens.weight.data_ptr() != model.embed_tokens.weight.data_ptr()
    assert made.embed_tokens.weight.grad_fn is not None


def test_rows_are_dealt_out_in_order() -> None:
    assert shares_of([0, 1, 2, 3, 4], 3) == [[0], [1, 2], [3, 4]]
    assert shares_of([0], 3) == [[], [], [0]]
