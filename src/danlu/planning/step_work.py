"""The primitives of what a step computes outside of layers: embedding, head and loss, clipping, the update. No torch.

T tokens · N targets · D model width · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from danlu.objectives.loss_memory import slice_bytes
from danlu.optim.state_shapes import eight_bits, has_bfloat16_moments, is_hidden, low_rank_shape
from danlu.planning.machine_profile import Result
from danlu.planning.primitives import Moved, OperationWork, Primitive, Product, Updated
from danlu.recipe import sections

_FLOAT32 = 4
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Elements of a parameter that Lion and AdamW with 8-bit moments update at a time."""
_CODES_BYTES = 180
"""Bytes of an element that decoding and encoding both 8-bit moments read and write (`optim.eight_bit`). An update takes
seven times as long with them on a CPU, and eight times on an H200 (benchmarks/RESULTS.md)."""
_BFLOAT16_BYTES = 24
"""Bytes of an element that widening and rounding both bfloat16 moments read and write (`optim.bfloat16_moments`)."""
_SVD_PRODUCTS = 20
"""Products of a matrix with itself that take as long as its singular vectors."""


def embedding_work(
    tokens: int, width: int, rows: int, element_bytes: int, *, trained: bool = True, sparse: bool = False
) -> OperationWork:
    """The rows of tokens, [T, D], and the gradient of the table [rows, D] of this rank.

    sparse: whether the gradient has the rows of tokens alone, as on a CPU where nothing else needs the table's.
    """
    looked_up = tokens * width * (2 * _FLOAT32 + (_FLOAT32 + element_bytes if element_bytes < _FLOAT32 else 0))
    gradients: tuple[Primitive, ...] = ()
    sums: tuple[Primitive, ...] = ()
    if trained:
        gradients = (Moved(tokens * width * (element_bytes + 3 * _FLOAT32), "new"),)
        if not sparse:
            gradients += (Moved(rows * width * _FLOAT32, "new"),)
            sums = (Moved(3 * rows * width * _FLOAT32, "add"),)
    return OperationWork("embed_tokens", "embedding", (Moved(looked_up, "new"),), (), gradients, sums)


def own_embeddings_work(
    tokens: int, width: int, columns: int, element_bytes: int, *, trained: bool = True
) -> OperationWork:
    """The product of embeddings [T, D] that is normed for layers' own embeddings [T, columns], and their sum with the
    rows of a table.
    """
    precision, count = "bf16" if element_bytes < _FLOAT32 else "fp32", tokens * columns * element_bytes
    sums = (Moved(2 * count, "norm", precision), Moved(3 * count, "add", precision))
    forward = (Product(tokens, columns, width, precision), *sums)
    if not trained:
        return OperationWork("per_layer_model_projection", "product", forward)
    to_input = Product(tokens, width, columns, precision, result="input_gradient")
    backward = (Moved(3 * count, "norm_backward", precision), to_input)
    of_weight = (Product(columns, width, tokens, precision, result="weight_gradient"),)
    accumulation = (Moved(3 * columns * width * _FLOAT32, "add"),)
    return OperationWork("per_layer_model_projection", "product", forward, backward, of_weight, accumulation)


def norm_work(tokens: int, width: int, element_bytes: int) -> OperationWork:
    """The norm behind the last layer."""
    precision, count = "bf16" if element_bytes < _FLOAT32 else "fp32", tokens * width * element_bytes
    backward = (Moved(3 * count, "norm_backward", precision),)
    return OperationWork("norm", "norm", (Moved(2 * count, "norm", precision),), backward)


def loss_work(
    targets: int,
    width: int,
    vocabulary: int,
    element_bytes: int,
    *,
    frozen: bool = False,
    gradients: bool = True,
    device: str = "cpu",
    precision: str | None = None,
) -> OperationWork:
    """The head and its cross-entropy (`objectives.linear_cross_entropy`), which computes gradients in the forward pass.

    With a trained head the logits are made twice, for the softmax's denominator and for the gradient, which two more
    products take to the hidden states and to the head. A frozen head has its logits made once. vocabulary: rows of the
    head on this rank.
    """
    is_half = element_bytes < _FLOAT32
    precision = precision or ("bf16" if is_half else "fp32")
    logits = Product(targets, vocabulary, width, precision)
    to_hidden = Product(targets, width, vocabulary, precision, result="input_gradient")
    to_head = Product(vocabulary, width, targets, precision, result="weight_gradient")
    again = logits._replace(is_model=False)
    widened = _FLOAT32 + element_bytes if is_half else 0
    # Passes over logits in float32: their largest, differences, exponentials, sums; then the gradient in their place.
    statistics, gradient = 24 + widened, 24 + 2 * widened
    if device != "cpu":  # kernels that go over narrow logits once
        statistics, gradient = element_bytes, 2 * element_bytes
    casts = Moved(vocabulary * width * (_FLOAT32 + element_bytes)) if is_half else None
    if not gradients:
        work: list[Primitive | None] = [logits, casts, _in_slices(targets * vocabulary * statistics, device)]
    elif frozen:
        work = [logits, to_hidden, _in_slices(targets * vocabulary * (statistics + gradient - 8), device)]
    else:
        slices = max(1.0, 2 * targets * vocabulary * _FLOAT32 / slice_bytes(device))
        work = [casts, logits, _in_slices(targets * vocabulary * statistics, device)]
        work += [casts, again, _in_slices(targets * vocabulary * gradient, device)]
        work += [to_hidden, Moved(targets * width * (2 * _FLOAT32 + element_bytes), passes=slices)]
        work += [to_head, Moved(vocabulary * width * (_FLOAT32 + element_bytes))]
    sums = () if frozen or not gradients else (Moved(3 * vocabulary * width * _FLOAT32, "add"),)
    forward = tuple(each for each in work if each is not None)
    return OperationWork("lm_head", "loss", forward, accumulation=sums)


def _in_slices(count: float, device: str) -> Moved:
    """Passes over so many bytes, one slice of logits after the other."""
    at_once = min(count, slice_bytes(device))
    return Moved(at_once, passes=count / at_once if at_once else 0)


def clip_work(elements: int) -> OperationWork:
    """The norm of all gradients of a rank, and their scaling."""
    forward = (Moved(elements * _FLOAT32), Moved(2 * elements * _FLOAT32))
    return OperationWork("clip", "clip", forward)


def update_work(
    section: sections.Optimizer, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu"
) -> OperationWork:
    """An optimizer's step over the parameters of a rank, by the names and shapes of their local parts.

    Pages that a paged optimizer reads from a disk are no part of it.
    """
    work = [each for name, shape in shapes.items() for each in _parameter_update(section, name, shape, device)]
    return OperationWork("optimizer", "update", tuple(work))


def _parameter_update(
    section: sections.Optimizer, name: str, shape: tuple[int, ...], device: str
) -> Iterator[Primitive]:
    count = math.prod(shape)
    match section:
        case sections.SGD():  # weight decay, momentum, its sum with the gradient, the weight
            yield Moved((32 if section.momentum else 20) * count)
        case sections.Adafactor():  # squares and their means by rows and columns, the scaled gradient, its size
            yield Moved(96 * count)
        case sections.Lion():
            at_once = min(count, _CHUNK[device])
            yield Moved(12 * at_once, passes=52 / 12 * count / at_once)
        case sections.Muon() if is_hidden(name, len(shape)):
            yield from _orthogonalised(section, shape)
        case sections.GaLore() if is_hidden(name, len(shape)):
            rank, (rows, columns) = section.rank, shape
            yield Product(rows, rank, columns, "fp32", is_model=False)
            yield Product(rows, columns, rank, "fp32", is_model=False)
            yield Moved(20 * count)
            square = Product(min(shape), min(shape), max(shape), "fp32", _SVD_PRODUCTS / section.update_every, False)
            yield square
            yield from _moments(section, low_rank_shape(shape, rank), device)
        case _:
            yield from _moments(section, shape, device)


def _moments(section: sections.Optimizer, shape: tuple[int, ...], device: str) -> Iterator[Primitive]:
    count, bits = math.prod(shape), eight_bits(section)
    yield Updated(count)
    if has_bfloat16_moments(section):
        at_once = min(count, _CHUNK[device])
        yield Moved(8 * at_once, passes=_BFLOAT16_BYTES / 8 * count / at_once)
    if bits is not None and count >= bits.smallest:
        at_once = min(count, _CHUNK[device])
        yield Moved(8 * at_once, passes=_CODES_BYTES / 8 * count / at_once)


def _orthogonalised(section: sections.Muon, shape: tuple[int, ...]) -> Iterator[Primitive]:
    """Muon's step: momentum, a Newton-Schulz iteration in bfloat16, and the update of the weight."""
    count, short, long = math.prod(shape), min(shape), max(shape)
    steps = section.newton_schulz_steps
    yield Moved(12 * count, passes=4)
    # The Gram matrix X X^T, its square, and that times X, where X is a transposed view of a matrix with more rows.
    is_tall = shape[0] > shape[1]
    gram: Result = "weight_gradient" if is_tall else "output"
    last: Result = "output" if is_tall else "input_gradient"
    yield Product(short, short, long, "bf16", steps, False, gram)
    yield Product(short, short, short, "bf16", steps, False, "input_gradient")
    yield Product(short, long, short, "bf16", steps, False, last)
    yield Moved(4 * count, precision="bf16", passes=steps)
