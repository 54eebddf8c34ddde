"""The most bytes of a layer's passes, against the peak that torch's allocator counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.peak_memory import peak_in
from builders.small_layers import recomputed, small_decoder
from torch import Tensor

from danlu.memory.layer_plan import Kind
from danlu.models.attend import PackedAttention
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.objectives.loss_memory import workspace_bytes
from danlu.planning.batch_shape import BatchShape
from danlu.planning.layer_graph import TRAINED, LayerGraph
from danlu.planning.layer_memory import LayerMemory

LENGTHS = (256, 256, 256, 256)


class Ones(torch.autograd.Function):
    """A loss that holds nothing of its input, with a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


def peaks(mixer: str | None, feed: str | None, recompute: Kind, dtype: torch.dtype) -> tuple[int, int]:
    """(measured, predicted) bytes of one layer's passes, besides its input, where weights have gradients already."""
    model = recomputed(small_decoder(mixer, feed, layers=1), recompute)
    layer, tokens = model.layers["0"], sum(LENGTHS)
    boundaries = tuple(sum(LENGTHS[:count]) for count in range(len(LENGTHS) + 1))
    attend = PackedAttention(boundaries, recomputed_layers=model.recomputed_attention)
    rotations = model.rotations(torch.cat([torch.arange(length) for length in LENGTHS]), dtype)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()

    def step() -> None:
        loss: Tensor = Ones.apply(layer(x, rotations, attend))
        loss.backward()  # type: ignore[no-untyped-call]

    step()
    x.grad = None
    measured = peak_in(step)
    batch = BatchShape.of_lengths(LENGTHS, dtype.itemsize)
    memory = LayerMemory(LayerGraph(model.config.layers[0], 128, batch, TRAINED, recompute))
    return measured, max(memory.forward, memory.backward - memory.graph.bytes_of("x"))


ROWS: list[tuple[str | None, str | None, Kind, str, float]] = [
    (None, None, "none", "float32", 0.01),
    (None, None, "none", "bfloat16", 0.01),
    (None, None, "selective", "float32", 0.03),
    (None, None, "full", "bfloat16", 0.01),
    ("latent", None, "none", "float32", 0.01),
    ("latent", None, "selective", "bfloat16", 0.05),
    ("sinks and gates", None, "none", "float32", 0.02),
    ("a softcap, a window", None, "full", "float32", 0.02),
    ("key reuse", None, "none", "bfloat16", 0.02),
    ("delta rule", None, "none", "float32", 0.08),
    (None, "experts", "none", "float32", 0.01),
    (None, "experts", "full", "bfloat16", 0.05),
]


@pytest.mark.parametrize(("mixer", "feed", "recompute", "dtype", "tolerance"), ROWS)
def test_the_peak_of_a_layer_is_predicted(
    mixer: str | None, feed: str | None, recompute: Kind, dtype: str, tolerance: float
) -> None:
    measured, predicted = peaks(mixer, feed, recompute, getattr(torch, dtype))
    assert abs(predicted / measured - 1) <= tolerance, f"{predicted / measured:.3f}"


def test_an_offload_brings_back_what_one_operation_needs() -> None:
    graph = LayerGraph(small_decoder(None, None, 1).config.layers[0], 128, BatchShape.of_lengths(LENGTHS, 4))
    memory = LayerMemory(graph)
    assert memory.offloaded_backward < memory.backward < memory.offloaded_backward + memory.kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(("targets", "width", "vocabulary"), [(1022, 128, 400), (600, 64, 9000)])
def test_the_workspace_of_the_loss(targets: int, width: int, vocabulary: int, frozen: bool, dtype: torch.dtype) -> None:
    hidden = torch.randn(targets, width).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, width)
    head = head.to(dtype) if frozen else head.requires_grad_()
    ids, weights = torch.arange(targets) % vocabulary, torch.ones(targets)
    losses: list[Any] = []

    def loss() -> None:
        losses.append(linear_cross_entropy(hidden, head, ids, weights))

    loss()
    losses.clear()
    measured = peak_in(loss) - (0 if frozen else vocabulary * width * 4)  # without the head's gradient
    sizes: dict[str, Any] = {"element_bytes": dtype.itemsize, "device_type": "cpu"}
    predicted = workspace_bytes(targets, width, vocabulary, frozen=frozen, **sizes)
    assert abs(predicted / measured - 1) <= 0.02, f"{predicted / measured:.3f}"
    of_the_other = workspace_bytes(targets, width, vocabulary, frozen=not frozen, **sizes)
    assert abs(of_the_other / measured - 1) > 0.05  # control
