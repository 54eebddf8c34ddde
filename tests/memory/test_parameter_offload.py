"""Weights in a file: the bits of a run in memory, of which only a few layers are resident."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from builders.covering import fast
from builders.process_group import run_group
from builders.recompute import LAYERS, RecomputeCase, adapted, full, step
from builders.recompute_worker import resident_bytes, sharded_in_files
from builders.torch_process import TorchProcess
from torch import Tensor

from danlu.core.errors import RecipeError, ResourceError
from danlu.memory.layer_plan import LayerPlan
from danlu.memory.parameter_offload import MappedTensors, offload_parameters
from danlu.memory.recompute import wrap
from danlu.models.decoder import Decoder
from danlu.numerics.four_bit_weight import FourBitWeight

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def test_tensors_come_back_from_the_file_as_they_went(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(300, 70, generator=generator),
        "b": torch.randn(70, 300, generator=generator).t().to(torch.bfloat16),
        "none": torch.empty(0, 5),
        "large": torch.randn(1024, 1024, generator=generator),
        "c": torch.randint(0, 255, (5000,), dtype=torch.uint8, generator=generator),
    }
    mapped = MappedTensors(tensors, tmp_path, what="numbers")
    there = {name: mapped.move(name, tensor) for name, tensor in tensors.items()}
    assert list(tmp_path.iterdir()) == []
    assert resident_bytes(tmp_path) == 0
    mapped.prefetch(tensors)
    mapped.fetch(["a"])
    assert tensors["a"].nbytes <= resident_bytes(tmp_path) < tensors["large"].nbytes // 2
    assert all(
        torch.equal(there[name], tensor) and there[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    there["a"].add_(1.0)
    mapped.release(tensors)
    assert resident_bytes(tmp_path) == 0
    assert torch.equal(there["a"], tensors["a"] + 1.0) and not torch.equal(there["a"], tensors["a"])


def trained(made: RecomputeCase, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and what plain gradient descent makes of the weights."""
    losses = []
    for number in range(steps):
        one = step(made, number=number, seed=number)
        losses.append(one.loss)
        with torch.no_grad():
            for name, gradient in one.gradients.items():
                made.trained[name].sub_(gradient, alpha=1e-3)
    return losses, {name: tensor.detach().clone() for name, tensor in made.trained.items()}


@pytest.mark.parametrize(
    ("base", "recomputed"),
    fast(
        itertools.product(["full", "lora", "qlora"], ["nothing", "layers", "segments"]),
        ("full", "segments"),
        ("full", "nothing"),
        ("lora", "layers"),
        ("qlora", "nothing"),
    ),
)
def test_the_bits_are_those_of_weights_in_memory(tmp_path: Path, base: str, recomputed: str) -> None:
    def fresh() -> RecomputeCase:
        if base == "full":
            return full(**WIDE)
        return adapted("lora-dropout", FourBitWeight.quantize if base == "qlora" else None, **WIDE)

    expected = trained(fresh())
    made = fresh()
    offloaded = offload_parameters(made.model, tmp_path, prefetch_layers=2)
    if recomputed != "nothing":
        wrap(made.model, [LayerPlan(n, "full", n // 2 if recomputed == "segments" else None) for n in range(LAYERS)])
    assert offloaded.bytes > 0
    losses, weights = trained(made)
    assert losses == expected[0] and all(torch.equal(weights[name], expected[1][name]) for name in weights)
    assert len(set(losses)) == len(losses)  # negative control: each step saw what the one before it had changed


def test_only_layers_in_use_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = full(**WIDE)
    offloaded = offload_parameters(made.model, tmp_path, prefetch_layers=1)
    each = offloaded.bytes // LAYERS
    assert resident_bytes(tmp_path) == 0
    seen: list[tuple[str, int]] = []

    def look(when: str) -> None:
        seen.append((when, resident_bytes(tmp_path)))

    for layer in made.model.layers.values():
        layer.mlp.register_forward_hook(lambda *_: look("forward"))  # type: ignore[union-attr]
        layer.attention.register_full_backward_pre_hook(lambda *_: look("backward"))  # type: ignore[union-attr]
    step(made)
    assert [when for when, _ in seen] == ["forward"] * LAYERS + ["backward"] * LAYERS
    # Pages around those that are touched may be mapped along with them, if they are in the system's cache.
    assert all(each <= held < 3 * each for when, held in seen if when == "forward")
    assert all(held < 3 * each for when, held in seen if when == "backward")
    assert resident_bytes(tmp_path) < 3 * each
    for one in made.model.layers.parameters():
        one.sum()
    assert resident_bytes(tmp_path) > 0.9 * offloaded.bytes  # negative control: all of it, if nobody lets go
    offloaded.release()
    assert resident_bytes(tmp_path) == 0


def test_a_killed_process_leaves_nothing(torch_process: TorchProcess, tmp_path: Path) -> None:
    program = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})\n"
        "from pathlib import Path; from builders.recompute import full, step\n"
        "from danlu.memory.parameter_offload import offload_parameters\n"
        f"made = full(hidden_size=128); offload_parameters(made.model, Path({str(tmp_path)!r})); step(made)\n"
        "os.kill(os.getpid(), 9)"
    )
    torch_process.run(program, exit_code=-9)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    offload_parameters(full(**WIDE).model, tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"memory\.folder: .*/file/in cannot hold .* of weights: Not a directory"):
        offload_parameters(full(**WIDE).model, tmp_path / "file" / "in")


@pytest.mark.gpu
def test_layers_on_a_gpu_are_refused(tmp_path: Path) -> None:
    model: Decoder = full(**WIDE).model.to("cuda")
    with pytest.raises(RecipeError, match=r"the weights of the layers are on cuda"):
        offload_parameters(model, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("intermediate_size", [256, 255])
def test_shares_of_sharded_weights(tmp_path: Path, intermediate_size: int) -> None:
    """Of 255 rows the second process has one less, which FSDP2 fills up: in memory, for it would not see the file."""
    for rank, (plain, filed, other, resident, touched, size) in enumerate(
        run_group(sharded_in_files, 2, str(tmp_path), intermediate_size)
    ):
        assert plain.keys() == filed.keys() and plain
        assert all(torch.equal(plain[name], filed[name]) for name in plain), f"rank {rank}"
        assert not all(torch.equal(plain[name], other[name]) for name in plain)
        assert resident == 0 and touched > 0.9 * size > 0  # the shares are there still, after steps


@pytest.mark.distributed
def test_a_filled_up_share_in_a_file_would_never_be_trained(tmp_path: Path) -> None:
    """Negative control: what the optimizer changes is not what FSDP2 computes with."""
    found = run_group(partial(sharded_in_files, filled_up_too=True), 2, str(tmp_path), 255)
    assert not all(torch.equal(plain[name], filed[name]) for plain, filed, *_ in found for name in plain)
