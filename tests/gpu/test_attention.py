"""Attention over packed documents in half precision on the device, forward and backward, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.reference_attention import BOUNDARIES, SIBLINGS, TREES, ReferenceAttention
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Branch
from danlu.models.attend import PackedAttention

LENGTHS = [(1,), (1, 2, 3), (17, 64, 129), (300, 1, 211), (1000, 24, 3072)]
VARIANTS = {
    "plain": {},
    "groups of one": {"kv_heads": 8},
    "window": {"window": 64},
    "window of one": {"window": 1},
    "softcap": {"softcap": 20.0},
    "softcap in a window": {"softcap": 20.0, "window": 100},
}
HEADS, WIDTH = 8, 64


def run(attend: Any, inputs: list[Tensor], grad: Tensor, settings: dict[str, Any]) -> list[Tensor]:
    """Output and gradients of q, k and v, on the CPU in float64."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    out = attend(0, leaves[0], Keys(tuple(leaves[1:])), **settings)
    out.backward(grad.to(out.dtype))
    return [one.detach().cpu().double() for one in (out, *(leaf.grad for leaf in leaves))]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, infinite for what is not finite."""
    return float((found - wanted).norm() / wanted.norm()) if bool(found.isfinite().all()) else float("inf")


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_is_as_near_to_float64_as_its_numbers_allow(
    device: torch.device, lengths: tuple[int, ...], variant: str
) -> None:
    if device.type == "cpu" and sum(lengths) > 1024:
        pytest.skip("a size for a GPU")
    changes = dict(VARIANTS[variant])
    kv_heads = int(changes.pop("kv_heads", 2))
    settings = {"scale": WIDTH**-0.5, "window": None, "softcap": None, **changes}
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    shapes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, WIDTH))
    # Scores of some size, so that a softcap bends them.
    inputs = [(torch.randn(total, *shape, generator=generator) * 1.5).to(device, torch.bfloat16) for shape in shapes]
    grad = torch.randn(total, HEADS, WIDTH, generator=generator).to(device, torch.bfloat16)
    boundaries = tuple(torch.tensor((0, *lengths)).cumsum(0).tolist())
    packed = run(PackedAttention(boundaries), inputs, grad, settings)
    exact = run(ReferenceAttention(boundaries), [one.double() for one in inputs], grad, settings)
    for name, found, wanted in zip(("out", "q", "k", "v"), packed, exact, strict=True):
        if float(wanted.norm()) < 1e-9:  # documents of one token: nothing depends on q and k
            assert float(found.norm()) < 1e-2, name
            continue
        assert distance(found, wanted) < 0.02, (name, distance(found, wanted))
        assert distance(2 * found, wanted) > 0.5, name  # control


@pytest.mark.parametrize(
    ("variant", "scale_of_lengths"),
    [("plain", 1), ("softcap in a window", 1), *((variant, 40) for variant in VARIANTS)],
)  # in a single block of a mask, and in many
def test_branches_see_their_ancestors_alone(device: torch.device, variant: str, scale_of_lengths: int) -> None:
    if device.type == "cpu" and scale_of_lengths > 1:
        pytest.skip("a size for a GPU")
    changes = dict(VARIANTS[variant])
    kv_heads = int(changes.pop("kv_heads", 2))
    settings = {"scale": WIDTH**-0.5, "window": None, "softcap": None, **changes}
    boundaries = tuple(scale_of_lengths * place for place in BOUNDARIES)
    trees, siblings = (
        tuple(Branch(parent, scale_of_lengths * start, scale_of_lengths * stop) for parent, start, stop in branches)
        for branches in (TREES, SIBLINGS)
    )
    generator = torch.Generator().manual_seed(7)
    shapes = ((HEADS, WIDTH), (kv_heads, WIDTH), (kv_heads, WIDTH))
    total = boundaries[-1]
    inputs = [(torch.randn(total, *shape, generator=generator) * 1.5).to(device, torch.bfloat16) for shape in shapes]
    grad = torch.randn(total, HEADS, WIDTH, generator=generator).to(device, torch.bfloat16)
    got = run(PackedAttention(boundaries, trees), inputs, grad, settings)
    exact, wrong = (
        run(ReferenceAttention(boundaries, branches), [tensor.double() for tensor in inputs], grad, settings)
        for branches in (trees, siblings)
    )
    for name, found, wanted in zip(("out", "q", "k", "v"), got, exact, strict=True):
        if float(wanted.norm()) < 1e-9:  # a window of one: nothing depends on q and k
            assert float(found.norm()) < 1e-2, name
            continue
        assert distance(found, wanted) < 0.02, (name, distance(found, wanted))
    if settings["window"] != 1:  # control: an answer that sees the other one
        assert distance(got[0], wrong[0]) > 0.02


def test_documents_do_not_see_each_other(device: torch.device) -> None:
    q, k, v = (torch.randn(96, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    settings: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": None}
    first = PackedAttention((0, 40, 96))(0, q, Keys((k, v)), **settings)
    k, v = k.clone(), v.clone()
    k[:40], v[:40] = torch.nan, torch.nan
    second = PackedAttention((0, 40, 96))(0, q, Keys((k, v)), **settings)
    assert torch.equal(first[40:], second[40:])
    assert not torch.equal(first[:40], second[:40])  # control
