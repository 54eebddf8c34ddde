"""Several models in one run: which gradients are clipped together, and which are dropped."""

from __future__ import annotations

import math

import pytest
import torch

from danlu.assembly.parameters import role_of
from danlu.optim.gradients import clip_grad_norm, clip_grad_norms
from danlu.training.trained_roles import TrainedRoles


def parameter(*gradient: float) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def test_a_held_model_has_no_gradient_until_its_steps_are_over() -> None:
    roles = TrainedRoles(role_of, {"policy": 2})
    named = {
        "norm.weight": parameter(1.0),
        "value.norm.weight": parameter(2.0),
        "objective.score.weight": parameter(3.0),
    }
    for step, held in ((1, True), (2, True), (3, False)):
        gradients = roles.gradients(named.items(), step)
        assert list(gradients.updated) == (["value"] if held else ["policy", "value"])
        assert [id(holder) for holder in gradients.updated["value"]] == [
            id(named[name]) for name in ("value.norm.weight", "objective.score.weight")
        ]
        gradients.drop_frozen()
        assert (named["norm.weight"].grad is None) == held
        named["norm.weight"].grad = torch.tensor([1.0])


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("layers.0.attention.v_proj.weight", "policy"),
        ("layers.0.attention.v_proj.adapter.default.lora_A", "policy"),
        ("layers.0.attention.v_proj.adapter.value.lora_A", "value"),
        ("layers.3.after_mlp.value.down.weight", "value"),
        ("value.layers.0.attention.v_proj.weight", "value"),
        ("objective.score.weight", "value"),
        ("objective.projection.weight", "policy"),
    ],
)
def test_whose_a_parameter_is(name: str, role: str) -> None:
    assert role_of(name) == role


def test_the_gradient_of_each_model_has_a_norm_and_a_bound_of_its_own() -> None:
    policy, value = [parameter(3.0, 0.0), parameter(4.0)], [parameter(0.3, 0.4)]
    norms = clip_grad_norms({"policy": policy, "value": value}, 1.0)
    assert norms == {"policy": pytest.approx(5), "value": pytest.approx(0.5)}
    clipped = [each.grad for each in (*policy, *value) if each.grad is not None]
    torch.testing.assert_close(clipped, [torch.tensor([0.6, 0.0]), torch.tensor([0.8]), torch.tensor([0.3, 0.4])])
    together = [parameter(3.0, 0.0), parameter(4.0), parameter(0.3, 0.4)]
    assert clip_grad_norm(together, 1.0) == pytest.approx(math.hypot(5, 0.5))
    assert together[2].grad is not None and together[2].grad[0] < 0.1  # control: a small model under a large one


def test_no_gradient_is_changed_where_that_of_any_model_is_not_finite() -> None:
    policy, value = [parameter(30.0)], [parameter(math.inf)]
    norms = clip_grad_norms({"policy": policy, "value": value}, 1.0, 0.5)
    assert norms["policy"] == 15 and not math.isfinite(norms["value"])
    assert policy[0].grad is not None and policy[0].grad.item() == 30
