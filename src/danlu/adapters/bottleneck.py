"""Bottleneck adapters: small MLPs after attention and MLP (arXiv:1902.00751), or after the MLP alone (2005.00247).

T tokens · D model width · w width of the bottleneck
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftContent, PeftReader
from danlu.recipe import sections
from danlu.types import Site

Activation = Literal["gelu", "relu", "silu"]
KIND = "DANLU_BOTTLENECK"
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
SLOTS = {"houlsby": ("after_attention", "after_mlp"), "pfeiffer": ("after_mlp",)}


class Bottleneck(nn.Module):
    """x + up(activation(down(x))). Parameters: down_weight [w, D], down_bias [w], up_weight [D, w], up_bias [D].

    The up-projection is zero at first, so that training starts at the base; the paper's is nearly zero.
    """

    def __init__(self, width: int, bottleneck: int, activation: Activation, *, device: torch.device | str = "cpu"):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.down_weight = nn.Parameter(torch.empty(bottleneck, width, device=device))
        self.down_bias = nn.Parameter(torch.zeros(bottleneck, device=device))
        self.up_weight = nn.Parameter(torch.zeros(width, bottleneck, device=device))
        self.up_bias = nn.Parameter(torch.zeros(width, device=device))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws the down-projection as LoRA's A, U(-1, 1) / sqrt(D), on the CPU; the others stay zero."""
        bound = 1 / math.sqrt(self.down_weight.shape[1])
        self.down_weight.copy_(torch.empty(self.down_weight.shape).uniform_(-bound, bound, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        inner = self.activation(F.linear(x, self.down_weight.to(x.dtype), self.down_bias.to(x.dtype)))  # [T, w]
        return x + F.linear(inner, self.up_weight.to(x.dtype), self.up_bias.to(x.dtype))


def slot_names(sites: Sequence[Site], placement: str) -> list[str]:
    """The names of the slots of every layer that a placement (houlsby, pfeiffer) fills."""
    return [f"{layer}.{slot}" for layer in _layers(sites) for slot in SLOTS[placement]]


def _layers(sites: Sequence[Site]) -> dict[str, str]:
    """From the name of each layer (`layers.0`) to its name in Hugging Face folders (`model.layers.0`)."""
    return {site.name.rsplit(".", 2)[0]: site.hf_name.rsplit(".", 2)[0] for site in sites if site.layer is not None}


# ── a format like PEFT's, which has no bottleneck adapters ──


def to_peft(section: sections.Bottleneck, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by their slot; sites: all of the model's."""
    tensors = {
        f"{key}.{name}": parameter.detach()
        for slot, key in _keys(sites, section.placement)
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
        placement=reader.choice("placement", SLOTS),
        width=reader.positive_int("width"),
        activation=reader.choice("activation", ACTIVATIONS),
    )
    width, inner = next(site.shape[1] for site in sites if site.group == "embedding"), section.width
    shapes = {"down_weight": (inner, width), "down_bias": (inner,), "up_weight": (width, inner), "up_bias": (width,)}
    by_slot = {
        slot: {name: reader.tensor(f"{key}.{name}", shape) for name, shape in shapes.items()}
        for slot, key in _keys(sites, section.placement)
    }
    return section, by_slot


def _keys(sites: Sequence[Site], placement: str) -> Iterator[tuple[str, str]]:
    """The name of each slot, and the prefix of its tensors' names in the adapter's file."""
    for layer, hf_layer in _layers(sites).items():
        for slot in SLOTS[placement]:
            yield f"{layer}.{slot}", f"{PREFIX}{hf_layer}.{slot}.bottleneck"
