"""Measures the operations of a step on this machine, one process of it: the tables of a `MachineProfile`.

Each number is the median of as many calls as fit into its share of the time, after a call that does not count. There
are two rounds, of which the faster one counts: a burst of other work may last longer than a share. Matrices take turns
in memory that caches do not hold, as the layers of a model do; and so do the tensors that passes over memory make: in
a step an operation's output is not written to where the one before was, as it would be in calls one behind the other.
The cost of a call is measured behind products too: they take the caches from the instructions and objects of Python,
autograd and torch's dispatcher, and a small call takes five to twenty times as long then.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.models.attend import PackedAttention
from danlu.models.grouped_mm import grouped_mm
from danlu.models.kernel_limits import SHORT_DOCUMENT
from danlu.models.ops import gated_mlp_activation, rms_norm
from danlu.numerics.dtypes import DTYPES
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.optim.adamw import fused_adamw
from danlu.planning.machine_profile import GROUPED, PRODUCT_BEFORE, Device
from danlu.planning.measured_table import Table

Axis = tuple[int, ...]
Call = Callable[[int], object]
"""An operation, called with the number of its turn."""
POINT_S = 0.03
"""Seconds for each size of each table: the 350 of a CPU take some 25 s, as one call of the largest takes longer."""
CEILING_S = 1.5
"""Seconds of the longest call that is measured."""
_MOST_COPIES = 16  # of a matrix that takes turns
_MOST_RESULTS = 64  # that are kept
_WIDTH = 1024  # of the rows of norms and activations
_FEWEST_TURNS = 15  # of calls behind products, each of which takes longer than the call


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured."""

    precisions: tuple[str, ...]
    products: tuple[Axis, Axis, Axis]  # rows, outputs, inputs
    gradients: tuple[Axis, Axis, Axis]  # the same, of the products of a backward pass
    streamed_bytes: Axis
    attention: tuple[Axis, Axis, Axis]  # length, heads, width of a head
    long_attention: Axis  # lengths of documents that another kernel takes; empty where one kernel takes all
    grouped: tuple[Axis, Axis]  # groups, rows of each
    elements: Axis  # of optimizers and quantized matrices
    message_bytes: Axis
    pool_bytes: int
    """The memory with random numbers that operands are views of: more than caches hold, and than one call reads."""


SIZES: dict[Device, Sizes] = {
    "cpu": Sizes(
        precisions=("fp32", "bf16"),
        products=((1, 8, 64, 512, 2048), (64, 256, 1024, 4096), (64, 256, 1024, 4096)),
        gradients=((64, 512, 2048), (64, 256, 1024, 4096), (64, 256, 1024, 4096)),
        # New memory beyond some MiB costs page faults in every call, so there are more sizes than caches.
        streamed_bytes=(1 << 16, 1 << 19, 1 << 22, 1 << 24, 1 << 26, 1 << 27),
        attention=((64, 256, SHORT_DOCUMENT), (2, 8), (64, 128)),
        long_attention=(1024, 2048),
        grouped=((4, 16), (8, 64, 256)),
        elements=(1 << 14, 1 << 18, 1 << 21, 1 << 24),
        message_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 24),
        pool_bytes=1 << 28,
    ),
    "cuda": Sizes(
        precisions=("fp32", "bf16", "fp16"),
        products=((1, 16, 256, 2048, 8192), (256, 1024, 4096, 8192), (256, 1024, 4096, 8192)),
        gradients=((256, 2048, 8192), (256, 1024, 4096, 8192), (256, 1024, 4096, 8192)),
        streamed_bytes=(1 << 16, 1 << 20, 1 << 24, 1 << 28, 1 << 30),
        attention=((256, 1024, 4096, 8192), (8, 32), (64, 128)),
        long_attention=(),
        grouped=((8, 64), (16, 128, 1024)),
        elements=(1 << 16, 1 << 20, 1 << 24, 1 << 27),
        message_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 28),
        pool_bytes=1 << 31,
    ),
}


def measure_tables(
    device: Device,
    sizes: Sizes,
    point_s: float = POINT_S,
    agreed: Callable[[list[Axis]], list[Axis]] = lambda axes: axes,
) -> dict[str, Table]:
    """Measures all tables but those of links, on the current device and with the present number of threads.

    All are measured twice, one time after the other, since what else the machine does may last longer than a table.

    agreed: the axes of a table that all of several processes measure, of those that each one chose.
    """
    affordable: dict[str, list[Axis]] = {}
    first, second = (_measured_once(device, sizes, point_s / 2, affordable, agreed) for _ in range(2))
    return {name: table.fastest(second[name]) for name, table in first.items()}


def _measured_once(
    device: Device,
    sizes: Sizes,
    point_s: float,
    affordable: dict[str, list[Axis]],
    agreed: Callable[[list[Axis]], list[Axis]],
) -> dict[str, Table]:
    """Measures all tables. affordable: the axes of each table, which the first round chooses."""
    clock = _Clock(torch.device(device), point_s, sizes.pool_bytes)
    tables: dict[str, Table] = {}

    def measure(
        name: str,
        axes: Sequence[Axis],
        make: Callable[..., Call],
        dtype: torch.dtype,
        powers: Sequence[int] = (),
        *,
        behind_products: bool = False,
    ) -> None:
        if name not in affordable:
            own = affordable_axes(axes, powers, lambda size: clock.seconds_of_one(make(*size, dtype)))
            affordable[name] = agreed(own)
        tables[name] = clock.table(affordable[name], make, dtype, powers, behind_products=behind_products)

    with torch.no_grad():
        for precision in sizes.precisions:
            dtype = DTYPES[precision]
            measure(f"product {precision}", sizes.products, clock.product, dtype)
            measure(f"input_gradient {precision}", sizes.gradients, clock.input_gradient, dtype)
            measure(f"weight_gradient {precision}", sizes.gradients, clock.weight_gradient, dtype)
            measure(f"grouped {precision}", sizes.grouped, clock.grouped, dtype)
            for name, streamed in _STREAMED.items():
                measure(f"{name} {precision}", (sizes.streamed_bytes,), partial(streamed, clock), dtype)
            for name, make in (("attention", clock.attention), ("attention_backward", clock.attention_backward)):
                measure(f"{name} {precision}", sizes.attention, make, dtype, powers=(2, 1, 1))
                if sizes.long_attention:
                    axes = (sizes.long_attention, *sizes.attention[1:])
                    measure(f"{name}_long {precision}", axes, make, dtype, powers=(2, 1, 1))
        measure("adamw", (sizes.elements,), clock.adamw, torch.float32)
        measure("dequantize_nf4", (sizes.elements,), clock.dequantize, torch.float32, behind_products=True)
        measure("call", ((1,),), clock.call, torch.float32)
        measure("call_behind_products", ((1,),), clock.call, torch.float32, behind_products=True)
        measure("call_trained", ((1,),), clock.call_trained, torch.float32, behind_products=True)
    return tables


def affordable_axes(
    axes: Sequence[Axis],
    powers: Sequence[int],
    seconds: Callable[[tuple[int, ...]], float],
    ceiling_s: float = CEILING_S,
) -> list[Axis]:
    """Returns the axes of a table without the sizes of which a call takes more than `ceiling_s`.

    A processor without units for half precision takes a minute for a product that it makes in a second in float32.
    Beyond the axes a table extrapolates, and says so. The first size of each axis stays.

    powers: the power of each size that the operation's work grows by; 1 where there are none. seconds: of one call at a
    size.
    """
    kept = [list(axis[:1]) for axis in axes]
    growth = list(powers) or [1] * len(axes)
    expected = seconds(tuple(axis[-1] for axis in kept))
    while True:
        steps = [
            ((axis[len(own)] / own[-1]) ** power, number)
            for number, (axis, own, power) in enumerate(zip(axes, kept, growth, strict=True))
            if len(own) < len(axis)
        ]
        if not steps:
            return [tuple(axis) for axis in kept]
        factor, number = min(steps)
        if expected * factor > ceiling_s:
            return [tuple(axis) for axis in kept]
        kept[number].append(axes[number][len(kept[number])])
        expected = seconds(tuple(axis[-1] for axis in kept))


class _Clock:
    """Times operations on a device, and gives them operands: views of random numbers, which they only read."""

    def __init__(self, device: torch.device, point_s: float, pool_bytes: int) -> None:
        self.device, self.point_s, self.pool_bytes = device, point_s, pool_bytes
        # The process's random numbers stay as they are.
        self.generator = torch.Generator(device).manual_seed(0)
        self._pool = torch.empty(0, device=device)
        self._start = 0  # of the next view

    def table(
        self,
        axes: Sequence[Axis],
        make: Callable[..., Call],
        dtype: torch.dtype,
        powers: Sequence[int] = (),
        *,
        behind_products: bool = False,
    ) -> Table:
        """The table of an operation: `make` gives the call that is timed at each size.

        behind_products: whether each call comes behind a product, which takes the caches of a CPU.
        """
        seconds = [
            self.seconds(make(*size, dtype), behind_products=behind_products) for size in itertools.product(*axes)
        ]
        return Table.rising(axes, seconds, powers)

    def seconds(self, call: Call, *, behind_products: bool = False) -> float:
        """Seconds of a call, the median: where other work shares the machine the fastest is a third below most."""
        if self.device.type == "cuda":
            times = self._cuda_times(call)
        elif behind_products:
            times = self._cpu_times(call, self.product(*PRODUCT_BEFORE, torch.float32), _FEWEST_TURNS)
        else:
            times = self._cpu_times(call)
        return max(1e-9, statistics.median(times))

    def seconds_of_one(self, call: Call) -> float:
        """Seconds of the second of two calls."""
        for turn in range(2):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call(turn)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        return time.perf_counter() - started

    def _cpu_times(self, call: Call, before_each: Call | None = None, fewest: int = 1) -> list[float]:
        """Times of calls. before_each: a call that comes before each of them and is not timed."""
        call(0)
        times: list[float] = []
        started = time.perf_counter()
        for turn in itertools.count(1):
            if before_each is not None:
                before_each(turn)
            before = time.perf_counter()
            call(turn)
            after = time.perf_counter()
            times.append(after - before)
            if after - started > self.point_s and turn >= fewest:
                return times
        raise AssertionError("the loop has no end of its own")

    def _cuda_times(self, call: Call) -> list[float]:
        """Times by events: eight rounds of calls one behind the other, so that the launches are hidden where they are
        in training."""
        call(0)
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(1)
        torch.cuda.synchronize()
        calls = max(1, min(1000, int(self.point_s / 8 / max(1e-6, time.perf_counter() - started))))
        times = []
        for _ in range(8):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for turn in range(calls):
                call(turn)
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / 1000 / calls)
        return times

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Numbers between -1 and 1, to be read only; the next ones of the pool, and the first ones after its last."""
        elements = math.prod(shape)
        if self._pool.dtype != dtype or len(self._pool) < elements:
            size = max(elements, self.pool_bytes // dtype.itemsize)
            self._pool = torch.empty(0, device=self.device)  # frees the old one first
            self._pool = torch.empty(size, dtype=dtype, device=self.device).uniform_(-1, 1, generator=self.generator)
            self._start = 0
        if self._start + elements > len(self._pool):
            self._start = 0
        numbers = self._pool[self._start : self._start + elements].view(shape)
        self._start += -(-elements // 64) * 64  # aligned as new memory is
        return numbers

    def rotated(self, *shape: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns as many such tensors as take turns."""
        copies = max(1, min(_MOST_COPIES, self.pool_bytes // (math.prod(shape) * dtype.itemsize)))
        return [self.random(*shape, dtype=dtype) for _ in range(copies)]

    def with_new_results(self, call: Call, count: int) -> Call:
        """Returns the call with its last results kept, so that each gets memory that caches do not hold.

        count: bytes that a call reads and writes.
        """
        results: deque[object] = deque(maxlen=max(1, min(_MOST_RESULTS, self.pool_bytes // 4 // count)))
        return lambda turn: results.append(call(turn))

    def product(self, m: int, n: int, k: int, dtype: torch.dtype) -> Call:
        """The product of a linear layer, [m, k] x [n, k]."""
        x, weights = self.random(m, k, dtype=dtype), self.rotated(n, k, dtype=dtype)
        return self.with_new_results(lambda turn: F.linear(x, weights[turn % len(weights)]), 2 * m * n * dtype.itemsize)

    def input_gradient(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Call:
        """The gradient of a linear layer's input, [rows, outputs] x [outputs, inputs]."""
        gradient, weights = self.random(rows, outputs, dtype=dtype), self.rotated(outputs, inputs, dtype=dtype)
        count = 2 * rows * inputs * dtype.itemsize
        return self.with_new_results(lambda turn: gradient @ weights[turn % len(weights)], count)

    def weight_gradient(self, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Call:
        """The gradient of a linear layer's weight, the transpose of [rows, outputs] x [rows, inputs]."""
        gradient, xs = self.random(rows, outputs, dtype=dtype), self.rotated(rows, inputs, dtype=dtype)
        count = 2 * outputs * inputs * dtype.itemsize
        return self.with_new_results(lambda turn: gradient.t() @ xs[turn % len(xs)], count)

    def grouped(self, groups: int, rows: int, dtype: torch.dtype) -> Call:
        """The products of experts with as many rows each."""
        x = self.random(groups * rows, GROUPED, dtype=dtype)
        matrices = self.random(groups, GROUPED, GROUPED, dtype=dtype)
        counts = torch.full((groups,), rows, device=self.device)
        return lambda turn: grouped_mm(x, matrices, counts)

    def attention(self, length: int, heads: int, width: int, dtype: torch.dtype) -> Call:
        """Causal attention in one document."""
        attend, q, k, v = self._attention_operands(length, heads, width, dtype)
        return lambda turn: attend(0, q, Keys((k, v)), scale=width**-0.5, window=None, softcap=None)

    def attention_backward(self, length: int, heads: int, width: int, dtype: torch.dtype) -> Call:
        """The backward pass of `attention`."""
        attend, *operands = self._attention_operands(length, heads, width, dtype)
        q, k, v = (operand.requires_grad_() for operand in operands)
        with torch.enable_grad():
            y = attend(0, q, Keys((k, v)), scale=width**-0.5, window=None, softcap=None)
        gradient = self.random(*y.shape, dtype=dtype)
        return lambda turn: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True)

    def _attention_operands(
        self, length: int, heads: int, width: int, dtype: torch.dtype
    ) -> tuple[PackedAttention, Tensor, Tensor, Tensor]:
        # Documents are hardly ever as long as blocks of rows, and filling these up takes up to 40 % of a short one.
        if self.device.type == "cpu":
            length -= 3
        q, k, v = (self.random(length, heads, width, dtype=dtype) for _ in range(3))
        return PackedAttention((0, length)), q, k, v

    def adamw(self, elements: int, dtype: torch.dtype) -> Call:
        """AdamW's update of one tensor."""
        weight, gradient, first, second = (self.random(elements, dtype=dtype).abs() for _ in range(4))
        step = torch.ones((), dtype=torch.float32, device=self.device)
        group = {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        return lambda turn: fused_adamw(group, [weight], [gradient], [first], [second], [step])

    def dequantize(self, elements: int, dtype: torch.dtype) -> Call:
        """An NF4 matrix made dense, as each product with it does."""
        matrix = self.random(elements // 64, 64, dtype=dtype)
        weight = FourBitWeight.quantize(matrix)

        def call(turn: int) -> None:
            with weight.in_workspace(dtype):
                pass

        return call

    def call(self, size: int, dtype: torch.dtype) -> Call:
        """An operation on next to nothing."""
        x = self.random(size, dtype=dtype)
        return lambda turn: x + x

    def call_trained(self, size: int, dtype: torch.dtype) -> Call:
        """An operation on next to nothing, and its backward pass."""
        x = self.random(size, dtype=dtype).requires_grad_()

        def call(turn: int) -> None:
            with torch.enable_grad():
                (x * x).backward(gradient)

        gradient = torch.ones_like(x)
        return call


def _rows(clock: _Clock, count: int, tensors: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Matrices [R, _WIDTH] that have about `count` bytes together."""
    rows = max(1, count // (tensors * _WIDTH * dtype.itemsize))
    return (clock.random(rows, _WIDTH, dtype=dtype) for _ in range(tensors))


def _copy(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    x, like = _rows(clock, count, 2, dtype)
    y = torch.zeros_like(like)
    return lambda turn: y.copy_(x)


def _new(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    x, _ = _rows(clock, count, 2, dtype)
    return clock.with_new_results(lambda turn: x * x, count)


def _add(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    x, y, _ = _rows(clock, count, 3, dtype)
    return clock.with_new_results(lambda turn: x + y, count)


def _activation(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    gate, up, _ = _rows(clock, count, 3, dtype)
    return clock.with_new_results(lambda turn: gated_mlp_activation(gate, up, "silu"), count)


def _activation_backward(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    gate, up, gradient, *_ = _rows(clock, count, 5, dtype)
    with torch.enable_grad():
        y = gated_mlp_activation(gate.requires_grad_(), up.requires_grad_(), "silu")
    return clock.with_new_results(lambda turn: torch.autograd.grad(y, (gate, up), gradient, retain_graph=True), count)


def _norm(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    x, _ = _rows(clock, count, 2, dtype)
    weight = clock.random(_WIDTH, dtype=dtype)
    return clock.with_new_results(lambda turn: rms_norm(x, weight, 1e-6), count)


def _norm_backward(clock: _Clock, count: int, dtype: torch.dtype) -> Call:
    x, gradient, _ = _rows(clock, count, 3, dtype)
    weight = clock.random(_WIDTH, dtype=dtype).requires_grad_()
    with torch.enable_grad():
        y = rms_norm(x.requires_grad_(), weight, 1e-6)
    return clock.with_new_results(lambda turn: torch.autograd.grad(y, (x, weight), gradient, retain_graph=True), count)


_STREAMED: dict[str, Callable[..., Call]] = {
    "copy": _copy,
    "new": _new,
    "add": _add,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "norm": _norm,
    "norm_backward": _norm_backward,
}
