"""Measuring this machine, at few small sizes and with next to no time: that every table comes, not how fast it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from danlu.planning.machine_profile import Device, MachineProfile, machine_here
from danlu.planning.measure_links import measure_machine
from danlu.planning.measure_machine import SIZES, Sizes, affordable_axes

SMALL = Sizes(
    precisions=("fp32", "bf16"),
    products=((1, 4), (16,), (16, 32)),
    gradients=((4,), (16,), (16, 32)),
    streamed_bytes=(1 << 14, 1 << 15),
    attention=((8, 16), (2,), (16,)),
    long_attention=(24,),
    grouped=((2,), (4,)),
    elements=(1 << 10,),
    message_bytes=(1 << 8, 1 << 12),
    pool_bytes=1 << 20,
)


def check(found: MachineProfile, device: Device) -> None:
    assert found.machine.device == device
    assert found.product_seconds(4, 32, 16, "bf16", "input_gradient") > 0
    assert found.product_seconds(16, 32, 4, "bf16", "weight_gradient") > 0
    assert found.product_seconds(4, 16, 32, "bf16") > 0 and found.grouped_seconds(2, 4, 512, 512, "fp32") > 0
    assert found.attention_seconds(16, 2, 16, "fp32", backward=True) > 0
    for kind in ("copy", "new", "add", "activation", "activation_backward", "norm", "norm_backward"):
        assert found.bytes_seconds(1 << 15, kind, "bf16") > 0  # type: ignore[arg-type]
    assert min(found.update_seconds(1 << 10), found.dequantize_seconds(1 << 10), found.call_seconds()) > 0
    assert found.call_seconds(trained=True) > 0
    assert found.tables["attention_backward_long bf16"].axes == ((24,), (2,), (16,))


def test_one_process_measures_every_table_and_leaves_its_settings_alone(tmp_path: Path) -> None:
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    found = measure_machine(machine_here("cpu", threads=2), point_s=1e-4, sizes=SMALL)
    assert torch.get_num_threads() == threads and torch.equal(numbers, torch.get_rng_state())
    check(found, "cpu")
    assert found.link() is None
    assert MachineProfile.read(found.write(tmp_path)) == found


@pytest.mark.gpu
def test_a_gpu_measures_every_table() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check(measure_machine(machine_here("cuda"), point_s=1e-3, sizes=SMALL), "cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operands_fit_into_the_pool(device: Device) -> None:
    sizes = SIZES[device]
    rows, outputs, inputs = (axis[-1] for axis in sizes.products)
    assert max(rows * inputs, outputs * inputs, sizes.elements[-1]) * 4 <= sizes.pool_bytes
    assert all(axis[-1] == whole[-1] for axis, whole in zip(sizes.gradients, sizes.products, strict=True))
    assert sizes.streamed_bytes[-1] <= sizes.pool_bytes
    length, heads, width = (axis[-1] for axis in sizes.attention)
    assert 3 * length * heads * width * 4 <= sizes.pool_bytes


def test_sizes_that_take_too_long_are_left_out() -> None:
    """Pretended seconds: a product at 1 GFLOP/s, attention that grows with the square of its length."""
    products = ((1, 8, 64, 512, 2048), (64, 256, 1024, 4096), (64, 256, 1024, 4096))
    tried: list[float] = []

    def seconds(size: tuple[int, ...], rate: float) -> float:
        tried.append(2 * math.prod(size) / rate)
        return tried[-1]

    axes = affordable_axes(products, (), lambda size: seconds(size, 1e9), ceiling_s=1.5)
    assert max(tried) <= 1.5 and all(len(axis) >= 2 for axis in axes)
    assert all(own == axis[: len(own)] for own, axis in zip(axes, products, strict=True))
    assert 2 * math.prod(axis[-1] for axis in axes) / 1e9 > 1.5 / 8  # one size more of any axis would be too long
    assert affordable_axes(products, (), lambda size: seconds(size, 65e9), ceiling_s=1.5) == list(products)
    lengths = ((64, 256, 1024, 2048), (2, 8))
    by_square = affordable_axes(lengths, (2, 1), lambda size: size[0] ** 2 * size[1] * 1e-7, ceiling_s=1.0)
    assert by_square == [(64, 256, 1024), (2, 8)]
    assert affordable_axes(((1,),), (), lambda size: 9.0, ceiling_s=1.5) == [(1,)]
