from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.nn import Parameter

from danlu.optim.groups import parameter_groups, role

SHAPES = {
    "model.norm.weight": (4,),
    "model.embed_tokens.weight": (8, 4),
    "lm_head.weight": (8, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "model.layers.0.mlp.experts.up_proj": (2, 4, 4),
}


def parameters(order: list[str] | None = None) -> list[tuple[str, Parameter]]:
    return [(name, Parameter(torch.zeros(SHAPES[name]))) for name in order or SHAPES]


def names_of(group: dict[str, Any], named: list[tuple[str, Parameter]]) -> list[str]:
    return [next(name for name, parameter in named if parameter is member) for member in group["params"]]


def test_roles_follow_dimensions_and_module_names() -> None:
    assert {name: role(name, parameter.ndim) for name, parameter in parameters()} == {
        "model.norm.weight": "vector",
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.layers.0.self_attn.q_proj.weight": "matrix",
        "model.layers.0.self_attn.q_proj.bias": "vector",
        "model.layers.0.mlp.experts.up_proj": "matrix",
    }


def test_matrices_leaves_norms_biases_and_embeddings_without_decay() -> None:
    named = parameters()
    decayed, rest = parameter_groups(named, "matrices", 0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert names_of(decayed, named) == [
        "lm_head.weight",
        "model.layers.0.mlp.experts.up_proj",
        "model.layers.0.self_attn.q_proj.weight",
    ]
    assert names_of(rest, named) == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.norm.weight",
    ]


def test_all_is_one_group() -> None:
    named = parameters()
    (group,) = parameter_groups(named, "all", 0.1)
    assert names_of(group, named) == sorted(SHAPES) and group["weight_decay"] == 0.1


def test_order_does_not_depend_on_the_model_and_frozen_parameters_are_left_out() -> None:
    named = parameters(sorted(SHAPES, reverse=True))
    dict(named)["lm_head.weight"].requires_grad_(False)
    decayed, rest = parameter_groups(named, "matrices", 0.1)
    assert names_of(decayed, named) == ["model.layers.0.mlp.experts.up_proj", "model.layers.0.self_attn.q_proj.weight"]
    assert names_of(rest, named) == sorted(names_of(rest, named)) and len(rest["params"]) == 3


def test_groups_are_split_by_learning_rate_too() -> None:
    def ratio(name: str) -> float:
        return 4.0 if "norm" in name or "q_proj" in name else 1.0

    named = parameters()
    groups = parameter_groups(named, "matrices", 0.1, ratio)
    rates = [(group["weight_decay"], group["ratio"]) for group in groups]
    assert rates == [(0.1, 1.0), (0.1, 4.0), (0.0, 1.0), (0.0, 4.0)]
    assert [names_of(group, named) for group in groups] == [
        ["lm_head.weight", "model.layers.0.mlp.experts.up_proj"],
        ["model.layers.0.self_attn.q_proj.weight"],
        ["model.embed_tokens.weight"],
        ["model.layers.0.self_attn.q_proj.bias", "model.norm.weight"],
    ]
    with pytest.raises(AssertionError, match="no ratio of learning rates"):
        parameter_groups(parameters(), "matrices", 0.1, lambda name: 0.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)


def test_lora_plus_has_the_rates_and_decay_of_peft() -> None:
    config = LoraConfig(r=2, target_modules=["up_proj", "down_proj"], bias="all", use_dora=True)
    model = get_peft_model(Net(), config)
    oracle = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1
    )
    theirs = {
        parameter: (group["lr"], group["weight_decay"])
        for group in oracle.param_groups
        for parameter in group["params"]
    }

    def rates(faster: tuple[str, ...]) -> dict[Parameter, tuple[float, float]]:
        def ratio(name: str) -> float:
            return 16.0 if any(part in name for part in faster) else 1.0

        groups = parameter_groups(model.named_parameters(), "matrices", 0.1, ratio)
        return {
            parameter: (1e-3 * group["ratio"], group["weight_decay"])
            for group in groups
            for parameter in group["params"]
        }

    # PEFT counts everything with one dimension among the fast ones: biases, norms and DoRA's magnitudes.
    ours = rates(("lora_B", "bias", "magnitude", "norm"))
    magnitudes = {parameter for name, parameter in model.named_parameters() if "magnitude" in name}
    assert ours.keys() == theirs.keys() and len(magnitudes) == 2
    for parameter in theirs.keys() - magnitudes:
        assert ours[parameter] == theirs[parameter]
    for parameter in magnitudes:  # which PEFT decays: danlu decays no vector
        assert ours[parameter] == (theirs[parameter][0], 0.0)
    assert any(rates(("lora_A",))[parameter] != theirs[parameter] for parameter in theirs)
