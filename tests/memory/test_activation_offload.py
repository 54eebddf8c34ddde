"""Activations elsewhere: the bits of a step that keeps them, and nothing of them in memory meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from builders.covering import fast
from builders.recompute import LAYERS, RecomputeCase, Step, adapted, full, same, step
from builders.recompute_worker import resident_bytes
from torch import Tensor

from danlu.core.errors import ResourceError
from danlu.memory import activation_offload
from danlu.memory.activation_offload import ActivationOffload, offload_for, unused_notes
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.memory.recompute import wrap
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe.sections import Memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS: tuple[Kind | None, ...] = (None, "selective", "full")


def offloaded_step(made: RecomputeCase, away: ActivationOffload, dtype: torch.dtype = torch.float32) -> Step:
    """The step, with the forward pass under `away`."""
    forward = made.model.forward

    def under(*arguments: object) -> Tensor:
        with away.active():
            return forward(*arguments)  # type: ignore[arg-type]

    made.model.forward = under  # type: ignore[method-assign]
    try:
        return step(made, dtype)
    finally:
        del made.model.forward


def to_files(folder: Path) -> ActivationOffload:
    found = offload_for(CPU, folder, min_bytes=0)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("base", "kind"),
    fast(
        itertools.product(["full", "dora-dropout", "prefix", "qlora"], KINDS),
        *zip(["full", "dora-dropout", "prefix", "qlora"], itertools.cycle(KINDS), strict=False),
        ("full", KINDS[-1]),
    ),
)
def test_the_bits_are_those_of_activations_that_stay(tmp_path: Path, base: str, kind: Kind | None) -> None:
    quantize = FourBitWeight.quantize if base == "qlora" else None
    made = full() if base == "full" else adapted("lora-dropout" if base == "qlora" else base, quantize)
    expected = step(made), step(made, torch.bfloat16)
    if kind is not None:
        wrap(made.model, [LayerPlan(layer, kind) for layer in range(LAYERS)])
    kept = expected[0].kept_bytes if kind is None else step(made).kept_bytes
    away = to_files(tmp_path)
    found = offloaded_step(made, away)
    assert same(found, expected[0])
    # All that was kept went, each storage once, and not the weights.
    assert away.offloaded_bytes == kept and found.kept_bytes == 0
    assert same(offloaded_step(made, away, torch.bfloat16), expected[1])
    assert list(tmp_path.iterdir()) == [] and str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_what_went_is_what_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: numbers that are changed in the file change the gradients."""
    made = full()
    expected = step(made)
    send = activation_offload._MappedCopy.__init__

    def changed(self: activation_offload._MappedCopy, tensor: Tensor, folder: Path) -> None:
        send(self, tensor * 2 if tensor.is_floating_point() else tensor, folder)

    monkeypatch.setattr(activation_offload._MappedCopy, "__init__", changed)
    assert not same(offloaded_step(made, to_files(tmp_path)), expected)


def test_nothing_is_in_memory_between_forward_and_backward(tmp_path: Path) -> None:
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    away = to_files(tmp_path)
    with away.active():
        y = x * 1.0
        for _ in range(6):
            y = y.exp().tanh()
    assert away.offloaded_bytes == 12 * x.nbytes
    assert resident_bytes(tmp_path) == 0
    seen: list[int] = []
    node = y.grad_fn
    assert node is not None
    node.next_functions[0][0].next_functions[0][0].register_hook(  # type: ignore[union-attr]
        lambda *_: seen.append(resident_bytes(tmp_path))
    )
    y.sum().backward()
    assert 0 < seen[0] < 5 * x.nbytes  # those in use and those called back
    del y, node
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_small_tensors_and_weights_stay(tmp_path: Path) -> None:
    made = full()
    away = offload_for(CPU, tmp_path)
    assert away is not None
    before = step(made)
    found = offloaded_step(made, away)
    assert same(found, before) and away.offloaded_bytes == 0 and found.kept_bytes == 0
    weight = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    away = to_files(tmp_path)
    with away.active():
        torch.nn.functional.linear(x, weight)
    assert away.offloaded_bytes == x.nbytes


def test_views_of_one_storage_go_once_and_changed_ones_twice(tmp_path: Path) -> None:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(8, 8, requires_grad=True)

    def products(away: ActivationOffload | None) -> Tensor:
        x = base.clone()
        if away is None:
            y = x[1:] @ weight + (x.clone()[:5] * 2) @ weight
            return torch.autograd.grad(y.square().sum(), weight)[0]
        with away.active():
            y = x[1:] @ weight
            y = y + (x[:5].mul(2)) @ weight
        return torch.autograd.grad(y.square().sum(), weight)[0]

    away = to_files(tmp_path)
    assert torch.equal(products(away), products(None))
    assert away.offloaded_bytes == base.nbytes + 5 * 8 * 4
    with away.active():
        x = base.clone()
        y = x[1:] @ weight + x[:5] @ weight  # two views
        x.mul_(2)
        y = y + x[1:] @ weight
    assert away.offloaded_bytes == 2 * base.nbytes
    expected = (base[1:] + base[:5] + 2 * base[1:]).t() @ torch.ones(5, 8)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), weight)[0], expected)


def test_where_activations_go_and_what_is_said_of_it(tmp_path: Path) -> None:
    assert offload_for(CPU, None) is None

    def notes(device: torch.device, folder: Path | None) -> list[str]:
        return unused_notes(Memory(offload=["activations"], folder=None if folder is None else str(folder)), device)

    (said,) = notes(CPU, None)
    assert "in the host's memory already" in said and "memory.folder" in said
    assert not notes(CPU, tmp_path) and not notes(CUDA, None)
    assert len(notes(CUDA, tmp_path)) == 1
    offloaded_step(full(), to_files(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    away = to_files(tmp_path / "file" / "in")
    with pytest.raises(ResourceError, match=r"memory\.folder: .*/file/in cannot hold .* of activations: Not a direct"):
        offloaded_step(full(), away)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_bits_are_those_of_activations_that_stay(kind: Kind | None) -> None:
    made = full(hidden_size=256, intermediate_size=512)
    model = made.model.to("cuda")
    made = RecomputeCase(model, dict(model.named_parameters()), made.dropout_state)
    if kind is not None:
        wrap(model, [LayerPlan(layer, kind) for layer in range(LAYERS)])
    expected = step(made)
    away = offload_for(CUDA, None, min_bytes=0)
    assert away is not None
    for _ in range(20):  # a race would not show each time
        assert same(offloaded_step(made, away), expected)
    assert away.offloaded_bytes == expected.kept_bytes
