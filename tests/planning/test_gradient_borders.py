"""The borders of tensor parallelism that gradients cross, against those that a backward pass really crosses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.recompute import decoder

from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.planning.gradient_borders import TrainedNames, first_half_with_gradient, halves_with_gradients

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None},
    "cohere2": {"model_type": "cohere2", "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8},
}
TRAINED = [
    ("embed_tokens",),
    ("layers.1.attention.q_proj",),
    ("layers.1.mlp.down_proj",),
    ("layers.1.attention.o_proj", "layers.1.mlp.up_proj"),
    ("layers.0.attention_norm",),
    ("layers.2.mlp_norm", "layers.2.post_mlp_norm", "layers.4.mlp.up_proj"),
    ("norm",),
]


def crossed(model: Decoder) -> tuple[set[int], set[int]]:
    """The halves with inputs, and with outputs, that require gradients."""
    entrances, exits, entered, left = set(), set(), 0, 0
    for layer in model.layers.values():

        def enter(x: torch.Tensor) -> torch.Tensor:
            nonlocal entered
            entrances.update({entered} if x.requires_grad else ())
            entered += 1
            return x

        def leave(x: torch.Tensor) -> torch.Tensor:
            nonlocal left
            exits.update({left} if x.requires_grad else ())
            left += 1
            return x

        layer.enter, layer.leave = enter, leave  # type: ignore[assignment]
    model(torch.arange(9), torch.arange(9), PackedAttention((0, 9)))
    return entrances, exits


@pytest.mark.parametrize("trained", TRAINED, ids=lambda names: names[0])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_cross_these_borders(name: str, trained: tuple[str, ...]) -> None:
    model = decoder(**MODELS[name]).requires_grad_(False)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter_name.startswith(tuple(f"{each}." for each in trained)))
    names = TrainedNames(tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad))
    found = halves_with_gradients(names, model.chunks, model.config)
    assert found == crossed(model)
    first, between = first_half_with_gradient(names, model.chunks)
    in_a_row = set(range(first, 10)), set(range(max(first - 1 + between, 0), 10))
    if not model.config.layers[0].parallel:
        assert found == in_a_row
    elif trained == ("layers.1.attention.q_proj",):
        assert found != in_a_row  # the control: its MLP does not read what attention says
