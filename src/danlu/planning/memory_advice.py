"""Advice for messages: settings of a recipe by which a training step would take less memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from danlu.recipe import Recipe


def advice(recipe: Recipe, parts: Mapping[str, int], *, device_type: str, micro: int) -> str:
    """Returns advice such as `Set batch.micro: 2 (...); or memory: {recompute: full} (...)`: the settings that save
    most come first.

    parts: bytes of a step by part, as `MemoryParts` names them; empty where they are not known. micro: packed sequences
    in a micro-batch.
    """
    persistent = sum(
        parts.get(name, 0) for name in ("weights", "gradients", "optimizer", "average", "gathered", "stash")
    )
    by_tokens = parts.get("activations", 0) + parts.get("logits", 0)
    fewer_tokens = list(_less_by_tokens(recipe, micro, device_type))
    fewer_weights = list(_less_by_weights(recipe, parts, device_type))
    if by_tokens >= persistent:
        suggestions = [*fewer_tokens[:2], *fewer_weights[:1]]
    else:
        suggestions = [*fewer_weights[:2], *fewer_tokens[:1]]
    return f"Set {'; or '.join(suggestions)}"


def _less_by_tokens(recipe: Recipe, micro: int, device_type: str) -> Iterator[str]:
    """Yields settings that lessen activations and logits, cheapest first, each as one would write it."""
    if micro > 1:
        yield f"batch.micro: {micro // 2} (is {micro}; the result is the same)"
    match recipe.memory.recompute.kind:
        case "none" | "elementwise":
            yield "memory: {recompute: selective}, or full, which keeps least (the result is the same)"
        case "selective" | "planned":
            yield "memory: {recompute: full} (the result is the same)"
        case "full":
            yield "memory: {recompute: every} (the result is the same)"
    if "activations" not in recipe.memory.offload and device_type != "cpu":
        yield "memory: {offload: [activations]}"
    if recipe.stage != "classify":
        yield f"data.max_length: {max(1, recipe.data.max_length // 2)} (is {recipe.data.max_length})"


def _less_by_weights(recipe: Recipe, parts: Mapping[str, int], device_type: str) -> Iterator[str]:
    """Yields settings that lessen weights, gradients and optimizer state, each as one would write it."""
    if recipe.stage == "classify":
        return
    if recipe.adapter is None and recipe.model.path is not None:
        yield "adapter: lora, which trains few weights"
    if recipe.adapter is not None and recipe.quantization is None:
        yield "quantization: nf4, which keeps the base in four bits"
    if recipe.optimizer.kind == "adamw" and parts.get("optimizer", 0) > parts.get("weights", 0) // 2:
        yield "optimizer: adamw8bit, or paged-adamw"
    if recipe.parallel.shard == "none":
        yield "parallel: zero3 on several processes (--processes), which share the model"
    if device_type != "cpu" and "optimizer" not in recipe.memory.offload and recipe.optimizer.kind == "adamw":
        yield "memory: {offload: [optimizer]}"
