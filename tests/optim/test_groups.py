from __future__ import annotations

import torch
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


def test_roles_follow_dimensions_and_module_names() -> None:
    assert {name: role(name, parameter) for name, parameter in parameters()} == {
        "model.norm.weight": "vector",
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.layers.0.self_attn.q_proj.weight": "matrix",
        "model.layers.0.self_attn.q_proj.bias": "vector",
        "model.layers.0.mlp.experts.up_proj": "matrix",
    }


def test_matrices_leaves_norms_biases_and_embeddings_without_decay() -> None:
    decayed, rest = parameter_groups(parameters(), "matrices", 0.1)
    assert (decayed.weight_decay, rest.weight_decay) == (0.1, 0.0)
    assert decayed.names == (
        "lm_head.weight",
        "model.layers.0.mlp.experts.up_proj",
        "model.layers.0.self_attn.q_proj.weight",
    )
    assert rest.names == ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight")


def test_all_is_one_group() -> None:
    (group,) = parameter_groups(parameters(), "all", 0.1)
    assert group.names == tuple(sorted(SHAPES)) and group.weight_decay == 0.1


def test_order_does_not_depend_on_the_model_and_frozen_parameters_are_left_out() -> None:
    named = parameters(sorted(SHAPES, reverse=True))
    dict(named)["lm_head.weight"].requires_grad_(False)
    decayed, rest = parameter_groups(named, "matrices", 0.1)
    assert decayed.names == ("model.layers.0.mlp.experts.up_proj", "model.layers.0.self_attn.q_proj.weight")
    assert rest.names == tuple(sorted(rest.names))
    assert all(parameter is dict(named)[name] for name, parameter in zip(rest.names, rest.parameters, strict=True))
