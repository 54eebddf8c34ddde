"""A critic that takes turns with the policy on one base has the gradients that each has alone, recomputed or not."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from builders.policy_samples import random_items
from builders.policy_steps import COUNT
from builders.preference_samples import preference_learner
from builders.preference_steps import scaled_model
from builders.tiny_adapters import adapter_set, perturb
from builders.tiny_run import VOCABULARY, tiny_config
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.core.errors import TrainingError
from danlu.core.types import Totals
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import wrap
from danlu.models.decoder import Decoder
from danlu.models.score_head import new_score_head
from danlu.objectives.policy import PolicyGradient, PolicyGradientSettings
from danlu.objectives.value import PpoObjective
from danlu.recipe.sections import Lora
from danlu.stages import critic as critic_module
from danlu.stages.critic import Critic
from danlu.training.step import accumulate

GRADIENT = PolicyGradient(PolicyGradientSettings(), has_reference=False)
ITEMS = random_items(COUNT, VOCABULARY)


def made(*plan: LayerPlan) -> tuple[Decoder, AdapterSet, PpoObjective]:
    """A base in float64 with the adapters of policy and values as after training; the policy's is active."""
    model = scaled_model(1)
    adapters = adapter_set(model)
    for seed, (name, rank) in enumerate({"default": 4, "value": 3}.items()):
        adapters.activate()
        adapters.add(name, Lora(rank=rank))
        adapters.train_only(name)
        perturb(adapters, name, seed=seed)
    adapters.train_only("default", "value")
    adapters.activate("default")
    model.double()
    if plan:
        wrap(model, plan)
    head = new_score_head(tiny_config().hidden_size, 1, bias=False, seed=3, std=1.0).double()
    return model, adapters, PpoObjective(head, GRADIENT, value_weight=0.7, critic="value")


def gradients(*plan: LayerPlan, micro: int = 4) -> dict[str, Tensor]:
    """Of a step of PPO through the learner, by name."""
    model, adapters, objective = made(*plan)
    learner = preference_learner(model, None, objective, ITEMS, micro, dtype=torch.float64, adapters=adapters)
    critic = Critic(model, model, torch.float64, score_head=objective.score_head, adapters=adapters)
    learner = replace(learner, critic=critic, score_head=objective.score_head)
    named = {**adapters.tensors("default"), **adapters.tensors("value"), "score": objective.score.weight}
    accumulate(learner, ITEMS, step=1, clip=None, holders=list(named.values()))
    assert adapters.active == ("default",)
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def policy_alone() -> dict[str, Tensor]:
    model, adapters, _ = made()
    learner = preference_learner(model, None, GRADIENT, ITEMS, 4, dtype=torch.float64, adapters=adapters)
    named = adapters.tensors("default")
    accumulate(learner, ITEMS, step=1, clip=None, holders=list(named.values()))
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def values_alone() -> dict[str, Tensor]:
    """By the formula, with the adapter of values active all the time: half the greater of the two squared errors."""
    model, adapters, objective = made()
    adapters.activate("value")
    learner = preference_learner(model, None, GRADIENT, ITEMS, 4, dtype=torch.float64)
    batch = learner.collate(ITEMS)
    hidden = learner.outputs(batch, 1.0)["policy"].hidden()[batch.logits_indices]
    values = hidden @ objective.score.weight[0]
    old, returns = (batch.columns[name].double() for name in ("value_old", "return"))
    within = old + (values - old).clamp(-0.2, 0.2)
    errors = torch.maximum((values - returns) ** 2, (within - returns) ** 2) / 2
    (0.7 * errors.sum() / Totals.of(ITEMS).weight).backward()
    named = {**adapters.tensors("value"), "score": objective.score.weight}
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert expected
    return all(torch.allclose(found[name], value, rtol=1e-8, atol=1e-11) for name, value in expected.items())


def test_each_model_has_the_gradient_that_it_has_alone() -> None:
    found, policy, values = gradients(), policy_alone(), values_alone()
    assert found.keys() == policy.keys() | values.keys() and not policy.keys() & values.keys()
    assert close(found, policy) and close(found, values)
    assert all(gradient.abs().max() > 1e-6 for gradient in found.values())
    assert close(gradients(micro=2), found)
    other = {name: value * 1.001 for name, value in values.items()}
    assert not close(found, other)  # control


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_activations_are_recomputed_with_the_adapter_that_they_were_made_with(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [LayerPlan(layer, kind, 0 if kind == "full" else None) for layer in range(len(tiny_config().layers))]  # type: ignore[arg-type]
    assert close(gradients(*plan), gradients())

    if kind == "selective":
        return

    @contextmanager
    def only_now(surroundings):  # type: ignore[no-untyped-def]
        with surroundings():
            yield

    monkeypatch.setattr(critic_module, "recomputed_within", only_now)  # control: the backward pass has the policy's
    with pytest.raises(TrainingError, match="recomputed in the backward pass, it did not do what it did"):
        gradients(*plan)
