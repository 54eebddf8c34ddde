"""Bytes of a training step in closed form: activations, parameters, and the micro-batch that fits. Imports no torch.

The counts of activations follow the tensors that the decoder's operations keep for the backward pass; tests compare
them with the tensors that autograd really keeps, and with the measured peak of a step.

T tokens of a micro-batch · D model width · Q all query heads · K all key/value heads · F inner width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from danlu.models.config import ModelConfig
from danlu.models.layer_spec import LayerSpec, Mixer
from danlu.models.mixer_spec import Delta
from danlu.planning.flops import attention_pairs
from danlu.recipe import Recipe
from danlu.recipe.sections.model import Int4, Int8, QuantizationSection

KeepsScores = Callable[[int, Mixer], bool]
"""Maps (tokens of a document, attention) to whether it keeps its probabilities for the backward pass."""

_IN_FLIGHT = 10
"""Tensors of an offloaded forward pass that are on the device at a time: being copied out, and prefetched back."""
_BASE_WIDTHS = 3
"""The number of [T, D] tensors outside of layers: the embedding's output, the final norm's, and the gradient that runs
backwards."""
_BLOCK_ROWS = 128
"""The number of queries with probabilities in memory at a time where attention computes them again
(`models.block_attention`)."""
_COMPUTES_SCORES_AGAIN = ("elementwise", "selective")
"""Kinds of recomputation in which layers keep no probabilities, and have only a block's in the backward pass."""
_SLACK_CPU = 1.3
"""The factor on kept activations on CPU: blocks of attention reach over the diagonal, and the backward pass of a layer
has temporaries of its own. A GPU keeps no scores, and the count was 1.06 to 1.09 of the peak there already (LoRA and
QLoRA on 8B, nothing recomputed)."""


@dataclass(frozen=True)
class ActivationPlan:
    """The settings that decide which activations are kept, in addition to the model's config."""

    recompute: Sequence[tuple[str, int | None]] = ()
    """Kind of recomputation of each layer (none, elementwise, selective, full), and the number of the segment of which
    only the first input is kept, if the layer is in one; empty: none in all layers."""
    keeps_scores: KeepsScores = lambda length, mixer: True
    offload: bool = False
    """Whether activations are kept elsewhere than on the device."""
    in_flight: bool = True
    """Whether offloaded tensors take the device's memory while they travel; not so where they lie in mapped files."""
    tensor: int = 1
    """Tensor-parallel degree, by which heads and inner width are cut."""
    slack: float = _SLACK_CPU
    """The factor on activations that are kept from the forward pass on."""
    sequence: bool = False
    """Whether tokens are cut among the tensor ranks outside of attention and MLP (sequence parallelism)."""


KEEPS_ALL = ActivationPlan()


def slack_of(device_type: str) -> float:
    """`ActivationPlan.slack` on a kind of device, "cpu" or "cuda"."""
    return _SLACK_CPU if device_type == "cpu" else 1.0


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes of a micro-batch's activations, by the time when they are in memory."""

    kept: int
    """Bytes from the forward pass on, while the loss is computed too."""
    recomputed: int = 0
    """Bytes in addition to `kept`, while one layer is in its backward pass: activations that it recomputes, or fetches
    back from the offload. The workspace of the loss is free by then, so the two never coincide."""

    def peak(self, loss_workspace: int) -> int:
        """The most bytes at a time; loss_workspace: bytes that the loss takes in addition to its inputs (its slices of
        logits)."""
        return self.kept + max(self.recomputed, loss_workspace)


def activation_bytes(
    config: ModelConfig, lengths: Sequence[int], element_bytes: int, plan: ActivationPlan = KEEPS_ALL
) -> ActivationBytes:
    """Activations of a micro-batch of documents of `lengths` tokens, each element of `element_bytes`.

    Without recomputation each layer keeps its input, two normed copies, q, k, v and their mixture, gate, up and their
    product; attention keeps a probability for each pair it looks at, where its kernel does not make them again. With
    recomputation layers keep less (`memory.recompute` has the table), and while one of them is in its backward pass all
    that it makes is there once. Offloaded activations come back one operation after the other.
    """
    tokens = sum(lengths)
    layers = plan.recompute or (("none", None),) * len(config.layers)
    of_kind = {kind: _layer(config.hidden_size, kind, lengths, plan) for kind in config.kinds}
    by_layer = [of_kind[layer] for layer in config.layers]
    kept: float = 0.0
    inputs_kept: float = 0.0  # apart, because these tensors are counted exactly
    segments: dict[int, int] = {}  # number -> its layers
    for (kind, segment), sizes in zip(layers, by_layer, strict=True):
        if segment is not None:
            inputs_kept += 0.0 if segment in segments else sizes["full"]
            segments[segment] = segments.get(segment, 0) + 1
        elif kind == "full":
            inputs_kept += sizes["full"]
        else:
            kept += sizes[kind]
    widest = tokens * max(kind.widest for kind in config.kinds) / plan.tensor
    recomputes = any(kind != "none" for kind, _ in layers)
    recomputed: float = 0.0
    # Of probabilities that are computed again in the backward pass only those of a block are there at a time.
    again = [kind in _COMPUTES_SCORES_AGAIN for kind, _ in layers]
    if recomputes or plan.offload:
        # Nothing is freed meanwhile for the gradients of gate and up, and of attention's probabilities.
        scores = (sizes["block" if blocks else "scores"] for sizes, blocks in zip(by_layer, again, strict=True))
        recomputed = 2 * widest + max(scores)
    if recomputes:
        kind, segment = layers[-1]
        # The layer in its backward pass keeps nothing but all that it makes.
        own = by_layer[-1][kind] if segment is None and not plan.offload else 0.0
        elements = (
            sizes["none"] - (sizes["scores"] if blocks else 0.0) for sizes, blocks in zip(by_layer, again, strict=True)
        )
        recomputed += max(0.0, max(elements) - own)
        recomputed += max(segments.values(), default=0) * by_layer[0]["full"]  # the inputs of a segment's layers
    if plan.offload:
        kept = min(kept + inputs_kept, _IN_FLIGHT * widest) if plan.in_flight else 0.0
        inputs_kept = 0.0
        recomputed += widest  # what was fetched back for the operation
    beside_layers = tokens * _BASE_WIDTHS * config.hidden_size
    return ActivationBytes(
        kept=int(plan.slack * element_bytes * (kept + beside_layers) + element_bytes * inputs_kept),
        recomputed=int(element_bytes * recomputed),
    )


def _layer(hidden_size: int, layer: LayerSpec, lengths: Sequence[int], plan: ActivationPlan) -> Mapping[str, float]:
    """Elements that one layer keeps, by kind of recomputation (`none` is all that it makes), those of attention's
    probabilities alone (`scores`), and of a block of them and its gradients (`block`)."""
    tokens = sum(lengths)
    width = hidden_size / (plan.tensor if plan.sequence else 1)
    mixer, feed = layer.mixer.kept(plan.tensor), layer.feed.kept(hidden_size, plan.tensor)
    documents = [length for length in lengths if plan.keeps_scores(length, layer.mixer)]
    heads = 0 if isinstance(layer.mixer, Delta) else layer.mixer.heads
    scores = heads / plan.tensor * attention_pairs(documents, layer.mixer.window)
    seen = max((min(length, (layer.mixer.window or length) + _BLOCK_ROWS) for length in documents), default=0)
    # Halves of a parallel layer read one input, and of those that share a norm one normed copy of it.
    inputs = width if layer.parallel else 2 * width
    normed = width if layer.norms == "shared" else 2 * width
    return {
        "none": tokens * (inputs + normed + mixer["none"] + feed["none"]) + scores,
        "elementwise": tokens * (inputs + mixer["elementwise"] + feed["elementwise"]),
        "selective": tokens * (inputs + mixer["selective"] + feed["selective"]),
        "full": tokens * width,
        "scores": scores,
        "block": min(scores, 2 * heads / plan.tensor * _BLOCK_ROWS * seen),
    }


_NESTED_BLOCK = 256
"""Blocks of four-bit numbers that share one float32 for their scales under double quantization."""


def least_weight_bytes(recipe: Recipe, config: ModelConfig, processes: int) -> float:
    """Bytes that the weights alone take on one process, at the least: 4 of a trained one, 2 or half a byte of a frozen
    one; divided where `parallel.shard`, `tensor` or `expert` shares them among the processes."""
    frozen = 0.5 if recipe.quantization is not None else 2.0 if recipe.precision != "fp32" else 4.0
    total = config.parameter_count() * (frozen if recipe.adapter is not None else 4.0)
    parallel = recipe.parallel
    is_shared = parallel.shard != "none" or parallel.tensor > 1 or parallel.expert > 1
    return total / processes if is_shared else total


def packed_bytes(shape: Sequence[int], section: QuantizationSection) -> int:
    """Bytes of a matrix [O, I], or of several [E, O, I], that a section of the recipe packs: codes, and the scales of
    blocks or groups."""
    *stacked, outputs, inputs = shape
    return math.prod(stacked) * _matrix_bytes(outputs, inputs, section)


def _matrix_bytes(outputs: int, inputs: int, section: QuantizationSection) -> int:
    if isinstance(section, Int8 | Int4):
        codes = inputs if section.kind == "int8" else -(-inputs // 2)
        return outputs * (codes + 4 * -(-inputs // section.group))
    count = outputs * inputs
    blocks = -(-count // section.block)
    # Double quantization keeps a byte for each block, a float32 for each 256 of those, and one float32 offset
    # (arXiv:2305.14314, section 3).
    scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 if section.double else 4 * blocks
    return -(-count // 2) + scales


def gathered_bytes(layers: Sequence[int], rest: int, *, shard: str, prefetch: int) -> int:
    """The most bytes of whole parameters at a time that a process gathers from shards.

    layers: bytes of each layer's sharded parameters in the type in which they are gathered; rest: of the sharded
    parameters outside of layers. shard, prefetch: as `parallel.shard` and `parallel.prefetch` say.
    """
    match shard:
        case "none":
            return 0
        case "zero3":  # what lies outside of layers is resharded only after the backward pass
            return rest + sum(sorted(layers, reverse=True)[: 1 + prefetch])
        case _:
            return rest + sum(layers)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a training step takes on one process, by how they grow with its micro-batch."""

    fixed: int
    """Bytes that do not depend on the micro-batch: weights, gradients, optimizer state, gathered parameters."""
    activations: ActivationBytes
    """Activations of one packed sequence, with the recomputation, offload and tensor degree of the recipe."""
    loss_workspace: int
    """Bytes of the loss in addition to its inputs, for one packed sequence."""
    max_loss_workspace: int
    """The same, however many packed sequences there are: the loss takes its logits slice by slice."""
    smallest: int = 1
    """Packed sequences of the smallest micro-batch: a row with two answers is never cut in two."""

    @property
    def of_smallest(self) -> int:
        """The most bytes of a step with the smallest possible micro-batches."""
        count, each = self.smallest, self.activations
        activations = ActivationBytes(count * each.kept, count * each.recomputed)
        return self.fixed + activations.peak(min(count * self.loss_workspace, self.max_loss_workspace))

    def largest_micro_batch(self, available_bytes: float, at_most: int, *, share: float = 1.0) -> int:
        """The most packed sequences in a micro-batch with a step that fits into the available bytes; at least 1,
        whatever it takes.

        available_bytes: for all of the step. share: the share that may be taken of the bytes which the fixed part
        leaves.
        """
        each, free = self.activations, available_bytes - self.fixed
        # The two peaks of a step: at the loss, and in the backward pass of a layer that recomputes.
        at_loss = share * (free - self.max_loss_workspace) // each.kept
        in_backward = share * free // (each.kept + each.recomputed)
        return max(1, min(at_most, int(at_loss), int(in_backward)))
