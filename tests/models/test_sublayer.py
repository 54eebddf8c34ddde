"""Sublayers are placed by what they declare, so one that danlu does not know is a class and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.modules import Linear, RecomputePoints
from danlu.models.tensor_cut import TensorCut


class TwoExperts(nn.Module):
    """A feed-forward network of two experts behind a router that every process holds whole."""

    tensor_cut = TensorCut({"router": "column", "experts.0": "column", "experts.1": "column", "down": "row"})
    recompute_points: ClassVar[RecomputePoints] = {"elementwise": ("mixed",), "selective": ("mixed",)}

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = Linear(2 * width, width, bias=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.mixed(self.router(x), *(expert(x) for expert in self.experts)))
        return out

    def mixed(self, scores: Tensor, first: Tensor, second: Tensor) -> Tensor:
        self.calls += 1
        share = scores.softmax(-1)
        return share[:, :1] * first.relu() + share[:, 1:] * second.tanh()


@pytest.mark.parametrize("case", ["llama-2", "gemma2", "qwen3"])
def test_declarations_name_what_is_there(case: str, tiny_model: Callable[..., Decoder]) -> None:
    for layer in tiny_model(case).layers.values():
        for sublayer in layer.sublayers.values():
            linears = {name for name, module in sublayer.named_modules() if isinstance(module, Linear)}
            assert linears == set(sublayer.tensor_cut.roles)
            assert set(sublayer.tensor_cut.slots.values()) <= linears
            for path in (path for paths in sublayer.recompute_points.values() for path in paths):
                assert hasattr(sublayer, path.split(".")[0])


@pytest.mark.parametrize("kind", ["elementwise", "selective", "full"])
def test_an_unknown_feed_forward_network_is_recomputed(kind: str, tiny_model: Callable[..., Decoder]) -> None:
    from danlu.memory.layer_plan import LayerPlan
    from danlu.memory.recompute import wrap

    model = tiny_model("llama-2")
    torch.manual_seed(0)
    for layer in model.layers.values():
        layer.mlp = TwoExperts(model.config.hidden_size)
        for parameter in layer.mlp.parameters():
            nn.init.normal_(parameter, std=0.1)
    tokens = torch.arange(10) % model.config.vocab_size
    gradients, calls = [], []
    for plan in ([], [LayerPlan(int(name), kind) for name in model.layers]):  # type: ignore[arg-type]
        wrap(model, plan)
        model.zero_grad(set_to_none=True)
        first = model.layers["0"].mlp
        first.calls = 0
        model(tokens, torch.arange(10), PackedAttention([0, 10])).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        calls.append(first.calls)
    assert calls == [1, 2]  # computed again in the backward pass
    assert all(torch.equal(kept, recomputed) for kept, recomputed in zip(*gradients, strict=True))
