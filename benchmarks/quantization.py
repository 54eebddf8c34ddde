"""Packing matrices to 4 bits, unpacking them, and products with them, beside bitsandbytes in the same process.

    python benchmarks/quantization.py
    python benchmarks/quantization.py --threads 1 --rounds 21 --kind fp4

Prints milliseconds, medians over rounds in which all take turns. `pack` makes codes and 8-bit magnitudes. `unpack`
gives a new matrix: `plain torch` is the definition in danlu.numerics.four_bit, `danlu` calls bitsandbytes' library
directly, `in place` does so into memory that is there already, as products do. `product` is the forward and the
backward pass of a frozen layer over 1024 tokens, `dense` the same with a matrix that was never packed. `row` is the
product of one token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import bitsandbytes
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.numerics import bitsandbytes_kernels, four_bit
from danlu.numerics.four_bit import KINDS, Kind
from danlu.numerics.four_bit_weight import FourBitWeight

SHAPES = [(512, 512), (1536, 512), (4096, 4096)]
TOKENS = 1024


def medians(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each; one round is left out, and then they take turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn:
                times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(taken) for name, taken in times.items()}


def forward_and_backward(product: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(product(x), x, grad)


def measure(matrix: Tensor, kind: Kind, rounds: int) -> dict[str, dict[str, float]]:
    functional = bitsandbytes.functional
    weight = FourBitWeight.quantize(matrix, kind=kind)
    codes, state = functional.quantize_4bit(matrix, quant_type=kind, compress_statistics=True)
    assert torch.equal(codes, weight.codes) and torch.equal(functional.dequantize_4bit(codes, state), weight.dense())
    nested, out = weight.packed().absmax, torch.empty_like(matrix)
    assert isinstance(nested, four_bit.Nested)

    def plain() -> None:
        fresh = torch.empty_like(matrix)
        four_bit.dequantize_into(fresh, weight.codes, four_bit.dequantize_absmax(nested), kind, weight.block)

    outputs, inputs = matrix.shape
    layer = bitsandbytes.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=matrix.dtype, quant_type=kind)
    layer.load_state_dict({"weight": matrix})
    layer = layer.to("cpu")
    x = torch.randn(TOKENS, inputs, dtype=matrix.dtype, requires_grad=True)
    row = torch.randn(1, inputs, dtype=matrix.dtype)
    grad = torch.randn(TOKENS, outputs, dtype=matrix.dtype)
    return {
        "pack": medians(
            {
                "danlu": lambda: FourBitWeight.quantize(matrix, kind=kind),
                "bitsandbytes": lambda: functional.quantize_4bit(matrix, quant_type=kind, compress_statistics=True),
            },
            rounds,
        ),
        "unpack": medians(
            {
                "plain torch": plain,
                "danlu": weight.dense,
                "in place": lambda: weight.write(out),
                "bitsandbytes": lambda: functional.dequantize_4bit(codes, state),
            },
            rounds,
        ),
        "product": medians(
            {
                "danlu": forward_and_backward(weight.product, x, grad),
                "bitsandbytes": forward_and_backward(layer, x, grad),
                "dense": forward_and_backward(lambda x: F.linear(x, matrix), x, grad),
            },
            rounds,
        ),
        "row": medians(
            {
                "danlu": lambda: weight.product(row),
                "bitsandbytes": lambda: layer(row),
                "dense": lambda: F.linear(row, matrix),
            },
            rounds,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--kind", choices=KINDS, default="nf4")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, bitsandbytes {bitsandbytes.__version__}, {torch.get_num_threads()} threads")
    print(bitsandbytes_kernels.library()[1])
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            times_by_work = measure((torch.randn(shape) * 0.02).to(dtype), arguments.kind, arguments.rounds)
            for work, times in times_by_work.items():
                listed = "   ".join(f"{name} {taken:8.3f}" for name, taken in times.items())
                case = f"{arguments.kind} {shape[0]} x {shape[1]} {str(dtype).removeprefix('torch.')}"
                print(f"{case:24s} {work:8s} {listed}")


if __name__ == "__main__":
    main()
