"""Losses of reward models beside TRL's and transformers', whose vectors builders/trl_reward_vectors.py has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.reward_rows import NAN, chain, pair
from builders.worst_errors import worst_relative_error
from safetensors import safe_open
from torch import Tensor, nn

from danlu.core.types import Pack
from danlu.data.batch import empty_like
from danlu.models.hf_config import read_config_values
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import build
from danlu.objectives.reward import BradleyTerry, Stepwise
from danlu.stages.learner import DecoderLearner
from danlu.stages.outputs import DecoderOutputs
from danlu.training.step import accumulate

VECTORS = Path(__file__).with_name("data") / "reward.safetensors"
CLOSE = 1e-5  # relative, of gradients in the 2-norm of each tensor


class Vectors:
    """What the peer was given, and what it said, under a name."""

    def __init__(self, name: str) -> None:
        with safe_open(VECTORS, "pt") as file:
            self.facts: dict[str, Any] = json.loads(file.metadata()["facts"])
            keys = [key for key in file.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 - no mapping
            self.tensors = {key.removeprefix(f"{name}."): file.get_tensor(key) for key in keys}

    def learner(self, objective: nn.Module, micro: int = 1) -> DecoderLearner:
        config = read_config_values(self.facts["config"] | {"architectures": ["LlamaForSequenceClassification"]})
        model = build(config)
        with torch.no_grad():
            for tensor in hf_tensors(config):
                model.get_parameter(tensor.parameters[0]).copy_(self.tensors[f"weights.{tensor.name}"])
            for name, parameter in objective.named_parameters():
                parameter.copy_(self.tensors[f"weights.{name}"])
        cpu = torch.device("cpu")
        return DecoderLearner(
            model, model, cpu, torch.float32, micro, objective, objective, score_head=objective.score_head
        )

    def worst_error(self, learner: DecoderLearner) -> float:
        """Of all gradients that `accumulate` left."""
        config = learner.model.config
        got = {tensor.name: learner.model.get_parameter(tensor.parameters[0]).grad for tensor in hf_tensors(config)}
        got |= {name: parameter.grad for name, parameter in learner.objective.named_parameters()}
        dense = {name: gradient.to_dense() for name, gradient in got.items() if gradient is not None}
        want = {key.removeprefix("gradients."): value for key, value in self.tensors.items() if "gradients." in key}
        return worst_relative_error(dense, want)


def pairs(facts: dict[str, Any]) -> list[Pack]:
    columns = (facts[name] for name in ("prompts", "chosen", "rejected", "margins"))
    return [pair(*row) for row in zip(*columns, strict=True)]


def chains(facts: dict[str, Any]) -> list[Pack]:
    return [chain(*row) for row in zip(facts["prompts"], facts["steps"], facts["step_labels"], strict=True)]


def bradley_terry(centring: float = 0.0) -> BradleyTerry:
    return BradleyTerry(nn.Linear(16, 1, bias=False), centring)


def step(learner: DecoderLearner, items: Sequence[Pack], loss_scale: float = 1.0) -> Any:
    parameters = [*learner.model.parameters(), *learner.objective.parameters()]
    for parameter in parameters:
        parameter.grad = None
    return accumulate(learner, items, step=1, clip=None, loss_scale=loss_scale, holders=parameters)


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_loss_and_every_gradient_are_those_of_trls_reward_trainer(micro: int) -> None:
    vectors = Vectors("outcome")
    learner = vectors.learner(bradley_terry(vectors.facts["centring"]), micro)
    items = pairs(vectors.facts)
    gradients = step(learner, items)
    assert gradients.loss == pytest.approx(vectors.tensors["loss"].item(), rel=CLOSE)
    assert vectors.worst_error(learner) < CLOSE
    chosen, rejected = vectors.tensors["scores"].squeeze(1).chunk(2)
    assert gradients.metrics == pytest.approx(
        {
            "accuracy": (chosen > rejected).float().mean().item(),
            "margin": (chosen - rejected).mean().item(),
            "chosen_score": chosen.mean().item(),
            "rejected_score": rejected.mean().item(),
        },
        rel=CLOSE,
    )
    # Control: without the rows' margins, or without the centring, it is another loss.
    without = [
        replace(item.samples[0], facts={**item.samples[0].facts, "margin": item.samples[0].facts["label"] * NAN})
        for item in items
    ]
    step(learner, [Pack((sample,)) for sample in without])
    assert vectors.worst_error(learner) > 1e-2
    assert step(vectors.learner(bradley_terry(), micro), items).loss != pytest.approx(gradients.loss, rel=1e-2)


@pytest.mark.parametrize("micro", [1, 3])
def test_stepwise_loss_and_every_gradient_are_those_of_transformers_token_classification(micro: int) -> None:
    vectors = Vectors("process")
    learner, items = vectors.learner(Stepwise(nn.Linear(16, 2)), micro), chains(vectors.facts)
    gradients = step(learner, items)
    assert gradients.loss == pytest.approx(vectors.tensors["loss"].item(), rel=CLOSE)
    assert vectors.worst_error(learner) < CLOSE
    assert gradients.metrics["right_steps"] == pytest.approx(4 / 6)
    # Control: a step without its label counts in neither sum nor mean.
    step(learner, [*items[:2], chain(vectors.facts["prompts"][2], vectors.facts["steps"][2], [1, NAN, 0])])
    assert vectors.worst_error(learner) > 1e-2


def test_the_score_is_that_of_the_last_token_of_each_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = Vectors("outcome")
    learner = vectors.learner(bradley_terry())
    batch = learner.collate(pairs(vectors.facts))

    def scores() -> Tensor:
        said = learner.outputs(batch, 1.0)["policy"].scores()
        assert said.shape == (9,) and said.dtype == torch.float32
        return torch.cat((said[1::3], said[2::3]))  # chosen, then rejected

    torch.testing.assert_close(scores(), vectors.tensors["scores"].squeeze(1), rtol=CLOSE, atol=CLOSE)
    head_at = DecoderOutputs._head_at
    monkeypatch.setattr(DecoderOutputs, "_head_at", lambda self, places: head_at(self, places - 1))  # one token earlier
    assert (scores() - vectors.tensors["scores"].squeeze(1)).abs().max() > 1e-2


def test_documents_without_trees_are_scored_at_their_ends_and_values_where_targets_are_predicted() -> None:
    vectors = Vectors("outcome")
    learner = vectors.learner(bradley_terry())
    rows = [
        pair(prompt, answer, [3]).samples[0]
        for prompt, answer in zip(vectors.facts["prompts"], vectors.facts["chosen"], strict=True)
    ]
    alone = [
        Pack((replace(row, tokens=row.tokens[:-1], weights=row.weights[:-1], branches=(), facts={}),)) for row in rows
    ]
    batch = learner.collate(alone)
    said = learner.outputs(batch, 1.0)["policy"]
    torch.testing.assert_close(said.scores(), vectors.tensors["scores"][:3, 0], rtol=CLOSE, atol=CLOSE)
    every = learner.score_head(said.hidden()).squeeze(1)
    # Not to the bit: a CPU may round a product of fewer rows otherwise.
    torch.testing.assert_close(said.values(), every[batch.logits_indices], rtol=CLOSE, atol=CLOSE)
    assert (said.values() - every[batch.logits_indices + 1]).abs().max() > 1e-2  # control


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    vectors = Vectors("outcome")
    items = [*pairs(vectors.facts), pair([1, 2, 3], [4], [5, 6])]  # of which the last has no margin
    learner = vectors.learner(bradley_terry(0.1), 2)
    step(learner, items)
    parameters = [*learner.model.parameters(), *learner.objective.parameters()]
    directions = [torch.randn_like(parameter) for parameter in parameters]
    slope = sum(float((p.grad.to_dense() * d).sum()) for p, d in zip(parameters, directions, strict=True))

    def moved(by: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=by)
        return float(step(learner, items).loss)

    h = 1e-3
    above = moved(h)
    below = moved(-2 * h)
    assert (above - below) / (2 * h) == pytest.approx(slope, rel=2e-3)


def test_micro_batches_and_fp16s_scale_change_nothing() -> None:
    vectors = Vectors("outcome")
    items = pairs(vectors.facts) * 3
    results = []
    for micro, scale in ((1, 1.0), (8, 1.0), (2, 2.0**12)):
        learner = vectors.learner(bradley_terry(0.1), micro)
        said = step(learner, items, scale)
        head = learner.objective.score.weight.grad
        results.append((said.loss, said.norm, said.metrics, head))
    for loss, norm, metrics, head in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6) and norm == pytest.approx(results[0][1], rel=1e-6)
        assert metrics == pytest.approx(results[0][2], rel=1e-6)
        torch.testing.assert_close(head, results[0][3], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("objective", [bradley_terry(0.1), Stepwise(nn.Linear(16, 2))])
def test_a_micro_batch_without_rows_adds_nothing(objective: nn.Module) -> None:
    vectors = Vectors("outcome" if isinstance(objective, BradleyTerry) else "process")
    items = (pairs if isinstance(objective, BradleyTerry) else chains)(vectors.facts)
    learner = replace(vectors.learner(objective), empty=empty_like(items[0].samples[0]))
    loss = learner.losses(learner.collate([]), learner.totals(items))
    loss.total.backward()
    assert loss.total.item() == 0 and all(metric.weight == 0 for metric in loss.metrics.values())
    assert all(not parameter.grad.to_dense().any() for parameter in learner.model.parameters())
    assert not objective.score.weight.grad.any()
