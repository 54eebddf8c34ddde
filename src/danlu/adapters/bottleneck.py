"""Bottleneck adapters: small MLPs after attention and MLP (arXiv:1902.00751), or after the MLP alone (2005.00247).

T tokens · D model width · w width of the bottleneck
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftContent, PeftReader
from danlu.adapters.shapes import BRANCHES, branch_slots, through_layer
from danlu.adapters.shapes import bottleneck as shapes_of
from danlu.core.layer_types import Site
from danlu.recipe import sections

Activation = Literal["gelu", "relu", "silu"]
KIND = "DANLU_BOTTLENECK"
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class Bottleneck(nn.Module):
    """x + up(activation(down(x))). Parameters: down_weight [w, D], down_bias [w], up_weight [D, w], up_bias [D].

    The up-projection is zero at first, so that training starts at the base; the paper's is nearly zero.
    """

    def __init__(self, width: int, bottleneck: int, activation: Activation, *, device: torch.device | str = "cpu"):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        shapes = {name: tensor.shape for name, tensor in shapes_of(width, bottleneck).items()}
        self.down_weight = nn.Parameter(torch.empty(shapes["down_weight"], device=device))
        self.down_bias = nn.Parameter(torch.zeros(shapes["down_bias"], device=device))
        self.up_weight = nn.Parameter(torch.zeros(shapes["up_weight"], device=device))
        self.up_bias = nn.Parameter(torch.zeros(shapes["up_bias"], device=device))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws the down-projection as LoRA's A, U(-1, 1) / sqrt(D), on the CPU; the others stay zero."""
        bound = 1 / math.sqrt(self.down_weight.shape[1])
        self.down_weight.copy_(torch.empty(self.down_weight.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        inner = self.activation(F.linear(x, self.down_weight.to(x.dtype), self.down_bias.to(x.dtype)))  # [T, w]
        return x + F.linear(inner, self.up_weight.to(x.dtype), self.up_bias.to(x.dtype))


def slot_keys(sites: Sequence[Site], placement: str) -> dict[str, str]:
    """Returns the prefix of keys on disk by the name of each slot that a placement (houlsby, pfeiffer) fills."""
    # From the name of each layer (`layers.0`) to its name in Hugging Face folders (`model.layers.0`).
    layers = {
        through_layer(site.name, site.layer): through_layer(site.hf_name, site.layer)
        for site in sites
        if site.layer is not None
    }
    keys: dict[str, str] = {}
    for slot in branch_slots(sites, placement):
        layer, _, end = slot.rpartition(".")
        keys[slot] = f"{PREFIX}{layers[layer]}.{end}.bottleneck"
    return keys


# ── a format like PEFT's, which has no bottleneck adapters ──


def to_peft(section: sections.Bottleneck, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by their slot; sites: all of the model's."""
    tensors = {
        f"{key}.{name}": parameter.detach()
        for slot, key in slot_keys(sites, section.placement).items()
        for name, parameter in modules[slot].named_parameters()
    }
    values = {
        "peft_type": KIND,
        "description": "Bottleneck adapters (arXiv:1902.00751), written by danlu; PEFT has no such kind",
        "placement": section.placement,
        "width": section.width,
        "activation": section.activation,
    }
    return values, tensors


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Bottleneck, ModuleValues]:
    """The section, and the values of each module by the slot it sits in.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    section = sections.Bottleneck(
        placement=reader.choice("placement", BRANCHES),
        width=reader.positive_int("width"),
        activation=reader.choice("activation", ACTIVATIONS),
    )
    width = next(site.shape[1] for site in sites if site.group == "embedding")
    tensors = shapes_of(width, section.width)
    by_slot = {
        slot: {name: reader.tensor(f"{key}.{name}", tensor.shape) for name, tensor in tensors.items()}
        for slot, key in slot_keys(sites, section.placement).items()
    }
    return section, by_slot
