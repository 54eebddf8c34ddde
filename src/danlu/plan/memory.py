"""Memory of a training step by part, in closed form. Imports no torch.

The counts follow what the decoder's operations keep for the backward pass; a test compares them with the tensors that
autograd really holds.

T tokens of a micro-batch · D model width · Q all query heads · K all key/value heads · F inner width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from danlu.plan.flops import Shape, attention_pairs
from danlu.recipe import Recipe

KeepsScores = Callable[[int, int | None], bool]
"""(tokens of a document, sliding window) -> whether attention keeps its probabilities for the backward pass."""

# Tensors of an offloaded forward pass that are on the device at a time: on their way out, and called back.
_IN_FLIGHT = 10


@dataclass(frozen=True)
class ActivationPlan:
    """What decides which activations are kept, beside the model's shape."""

    recompute: Sequence[tuple[str, int | None]] = ()
    """Kind of recomputation of each layer (none, elementwise, selective, full), and the number of the segment that
    keeps its first input alone, if any; empty: none in all layers."""
    keeps_scores: KeepsScores = lambda length, window: True
    offload: bool = False
    """Kept elsewhere than on the device."""
    in_flight: bool = True
    """Offloaded tensors are on the device while they travel; not so where they lie in mapped files."""
    tensor: int = 1
    """Ranks among which heads and inner width are cut."""
    sequence: bool = False
    """Tokens are cut among the same ranks outside of attention and MLP."""


KEEPS_ALL = ActivationPlan()


def activation_bytes(shape: Shape, lengths: Sequence[int], element_bytes: int, plan: ActivationPlan = KEEPS_ALL) -> int:
    """The most that a micro-batch of documents of `lengths` tokens holds between forward and backward.

    Without recomputation each layer keeps its input, two normed copies, q, k, v and their mixture, gate, up and their
    product; attention keeps a probability for each pair it looks at, where its kernel does not make them again. With
    recomputation layers keep less (`memory.recompute` has the table), and while one of them is in its backward pass all
    that it makes is there once.
    """
    tokens = sum(lengths)
    layers = plan.recompute or (("none", None),) * shape.layers
    windows = shape.windows or (None,) * shape.layers
    by_layer = [_layer(shape, lengths, window, plan) for window in windows]
    kept: float = 0.0
    segments: dict[int, int] = {}
    for (kind, segment), sizes in zip(layers, by_layer, strict=True):
        if segment is None:
            kept += sizes[kind]
            continue
        if segment not in segments:
            kept += sizes["full"]
        segments[segment] = segments.get(segment, 0) + 1
    if any(kind != "none" for kind, _ in layers) or plan.offload:
        whole = max(sizes["none"] for sizes in by_layer)
        inputs = max(segments.values(), default=1) * by_layer[0]["full"]
        if plan.offload:
            widest = tokens * max(shape.intermediate_size, shape.heads * shape.head_dim) / plan.tensor
            kept = min(kept, _IN_FLIGHT * widest) if plan.in_flight else 0.0
        # The layer in its backward pass keeps nothing beside all that it makes.
        last = layers[-1]
        kept += max(0.0, whole - (by_layer[-1][last[0]] if last[1] is None and not plan.offload else 0.0))
        kept += inputs if segments else 0.0
    # 1.3: blocks of attention reach over the diagonal, and one layer's backward has temporaries of its own.
    return int(1.3 * element_bytes * (kept + tokens * 3 * shape.hidden_size))


def _layer(shape: Shape, lengths: Sequence[int], window: int | None, plan: ActivationPlan) -> Mapping[str, float]:
    """Numbers that one layer keeps, by kind of recomputation; `none` is all that it makes."""
    tokens = sum(lengths)
    width = shape.hidden_size / (plan.tensor if plan.sequence else 1)
    heads = shape.heads * shape.head_dim / plan.tensor
    grouped = shape.kv_heads * shape.head_dim / min(plan.tensor, shape.kv_heads)
    inner = shape.intermediate_size / plan.tensor
    documents = [length for length in lengths if plan.keeps_scores(length, window)]
    scores = shape.heads / plan.tensor * attention_pairs(documents, window)
    return {
        "none": tokens * (4 * width + 2 * heads + 2 * grouped + 3 * inner) + scores,
        "elementwise": tokens * (2 * width + 2 * heads + 2 * grouped + 2 * inner) + scores,
        "selective": tokens * (2 * width + heads + 2 * grouped + 2 * inner),
        "full": tokens * width,
    }


def largest_micro(each_bytes: int, budget_bytes: float, most: int) -> int:
    """The most packs, each with activations of `each_bytes`, that fit into the budget; at least 1."""
    return max(1, min(most, int(budget_bytes // each_bytes)))


def gathered_bytes(layers: Sequence[int], rest: int, *, shard: str, prefetch: int) -> int:
    """Whole parameters that a process gathers from the shards of all, at most at a time.

    layers: bytes of each layer's sharded parameters in the type in which they are gathered; rest: of what lies outside.
    """
    match shard:
        case "none":
            return 0
        case "zero3":  # what lies outside of layers stays whole from the forward to the backward pass
            return rest + sum(sorted(layers, reverse=True)[: 1 + prefetch])
        case _:
            return rest + sum(layers)


def ways_to_save(recipe: Recipe, parts: Mapping[str, int], *, device_type: str, micro: int) -> list[str]:
    """What of a recipe would make a step hold less, what saves most first; each as one would write it.

    parts: bytes of a step by part, as `MemoryParts` names them.
    """
    held = sum(parts.get(name, 0) for name in ("weights", "gradients", "optimizer", "average", "gathered"))
    kept = parts.get("activations", 0) + parts.get("logits", 0)
    of_packs = list(_of_packs(recipe, micro, device_type))
    of_weights = list(_of_weights(recipe, parts, device_type))
    return [*of_packs[:2], *of_weights[:1]] if kept >= held else [*of_weights[:2], *of_packs[:1]]


def _of_packs(recipe: Recipe, micro: int, device_type: str) -> list[str]:
    found = []
    if micro > 1:
        found.append(f"batch.micro: {micro // 2} (is {micro}; the result is the same)")
    match recipe.memory.recompute.kind:
        case "none":
            found.append("memory: {recompute: selective}, or full, which keeps least (the result is the same)")
        case "selective" | "planned":
            found.append("memory: {recompute: full} (the result is the same)")
        case "full":
            found.append("memory: {recompute: every} (the result is the same)")
    if "activations" not in recipe.memory.offload and device_type != "cpu":
        found.append("memory: {offload: [activations]}")
    if recipe.stage != "classify":
        found.append(f"data.max_length: {max(1, recipe.data.max_length // 2)} (is {recipe.data.max_length})")
    return found


def _of_weights(recipe: Recipe, parts: Mapping[str, int], device_type: str) -> list[str]:
    found: list[str] = []
    if recipe.stage == "classify":
        return found
    if recipe.adapter is None and recipe.model.path is not None:
        found.append("adapter: lora, which trains few weights")
    if recipe.adapter is not None and recipe.quantization is None:
        found.append("quantization: nf4, which keeps the base in four bits")
    if recipe.optimizer.kind == "adamw" and parts.get("optimizer", 0) > parts.get("weights", 0) // 2:
        found.append("optimizer: adamw8bit, or paged-adamw")
    if recipe.parallel.shard == "none":
        found.append("parallel: zero3 on several processes (--processes), which share the model")
    if device_type != "cpu" and "optimizer" not in recipe.memory.offload and recipe.optimizer.kind == "adamw":
        found.append("memory: {offload: [optimizer]}")
    return found
