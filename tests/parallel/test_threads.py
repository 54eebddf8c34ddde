"""Replicas in one process: the same numbers as one model, and gradients that come back to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.preference_steps import OF_STEP, see
from builders.tiny_run import SyntheticPacks, tiny_model
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error
from torch import Tensor, nn

from danlu.core.errors import RecipeError
from danlu.core.types import Pack
from danlu.models.decoder import Decoder
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.threads import Replicas, replica, shares_of
from danlu.recipe import load
from danlu.stages.learner import DecoderLearner, ThreadedLearner
from danlu.stages.table import STAGES
from danlu.training.evaluation import evaluate
from danlu.training.step import StepGradients, accumulate

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Decoder:
    return tiny_model(tie_word_embeddings=True)


@pytest.fixture
def threaded(model: Decoder) -> Iterator[ThreadedLearner]:
    replicas = Replicas(model, [CPU] * 3)
    yield ThreadedLearner(model, model, CPU, torch.float32, 4, parallel=ParallelContext(), replicas=replicas)
    replicas.close()


def learnt(compute: DecoderLearner) -> tuple[StepGradients, dict[str, Tensor]]:
    found = accumulate(compute, [SyntheticPacks().at(n) for n in range(6)], step=1, clip=None)
    gradients = {name: parameter.grad for name, parameter in compute.model.named_parameters()}
    for parameter in compute.model.parameters():
        parameter.grad = None
    return found, {name: gradient for name, gradient in gradients.items() if gradient is not None}


def test_a_parameter_that_is_none_is_none_in_a_replica() -> None:
    linear = nn.Linear(2, 3, bias=False)  # registered as None, as sinks of attention are where a family has none
    twin = replica(linear, CPU)
    assert twin.bias is None and twin(torch.ones(1, 2)).equal(linear(torch.ones(1, 2)))
    with pytest.raises(AttributeError):
        twin.no_such_parameter  # noqa: B018 - control


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


class PerReplica(ThreadedLearner):
    """A mistake: what is to be known of the step is found out of each replica's share."""

    def prepare(
        self, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        shares = shares_of(items, 3)
        return [item for share in shares for item in ThreadedLearner.prepare(self, share, [range(len(share))], step)]


def replicated(kind: type[ThreadedLearner], **options: Any) -> ThreadedLearner:
    options["model"].embed_tokens.sparse_gradient = False
    return kind(**options, replicas=Replicas(options["model"], [CPU] * 3))


def test_objectives_that_see_the_whole_step_see_it_over_replicas() -> None:
    names = ["sigmoid", *OF_STEP]
    one = see(names, 8)
    many = see(names, 8, partial(replicated, ThreadedLearner))
    for name in names:
        assert many[name][0] == pytest.approx(one[name][0], rel=1e-6), name
        assert many[name][1] == pytest.approx(one[name][1], rel=1e-6, abs=1e-9), name
        assert worst_relative_error(many[name][2], one[name][2]) < 1e-6, name
    apart = see(OF_STEP, 8, partial(replicated, PerReplica))
    assert all(worst_relative_error(apart[name][2], one[name][2]) > 1e-4 for name in OF_STEP)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "score head": ({"stage": "reward"}, "not the parameters of an objective"),
    "projection": (
        {"stage": "distill", "objective": ["forward", {"kind": "hidden"}], "teacher": "BASE"},
        "not the parameters of an objective",
    ),
    "adapter-off": ({"stage": "dpo", "adapter": "lora"}, "Use workers: processes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_do_not_have_is_refused_before_rows_are_read(
    tiny_world: World, tmp_path: Path, name: str
) -> None:
    changes, message = REFUSED[name]
    changes = {key: str(tiny_world.base) if value == "BASE" else value for key, value in changes.items()}
    changes |= {"model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}

    def check(parallel: dict[str, Any]) -> None:
        batch = {} if changes["stage"] == "distill" else {"batch": {"sequences": None, "rows": 4, "micro": 1}}
        recipe = load(tiny_world.recipe(tmp_path / "run", parallel=parallel, **changes, **batch)).recipe
        stage = STAGES[recipe.stage]
        stage.builder(recipe, stage).check(None)

    with pytest.raises(RecipeError, match=message):
        check({"workers": "threads"})
    check({})  # control
