"""A base with adapters, loaded for generation."""

from __future__ import annotations

from typing import Any

import torch

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.merge import UNMERGEABLE_KINDS, merge_and_unload, unties_head
from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.frozen_base import load_frozen
from danlu.inference.resolve_model import ResolvedModel
from danlu.models.decoder import Decoder


def load_adapted_model(
    resolved: ResolvedModel, *, dtype: torch.dtype, device: str, quantization: Any, merged: bool
) -> tuple[Decoder, AdapterStacks | None]:
    """The model with its stacks of adapters, of which the first is active; None for stacks that are merged, or empty.

    dtype, device, quantization, merged: as for `load_model.load_model`.
    """
    stacks = resolved.stacks
    adapted = load_frozen(
        resolved.folder, dtype=dtype, device=device, quantization=quantization, config=resolved.config, answers=True
    )
    if not stacks:
        return adapted.model, None
    opened = AdapterStacks(adapted.adapters)
    for stack in stacks:
        opened.add(stack)
    opened.use(0)
    if merged and _mergeable(adapted.adapters):
        merge_and_unload(adapted.adapters)
        return adapted.model, None
    return adapted.model, opened


def _mergeable(adapters: AdapterSet) -> bool:
    """Whether the active adapters can be merged into the weights as they are stored.

    Not where the base is packed, nor adapters that are no change of weights, nor those that make a tied head differ
    from its embedding.
    """
    kinds = [adapters.added[name].section.kind for name in adapters.active]
    packed = any(getattr(site.module, "quantized", None) is not None for site in adapters.sites)
    return not packed and not any(kind in UNMERGEABLE_KINDS for kind in kinds) and not unties_head(adapters)
