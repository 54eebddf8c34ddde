"""The places of a decoder where adapters may sit, with the names that Hugging Face folders give them."""

from __future__ import annotations

from typing import Literal

from danlu.models.decoder import MLP, Attention, Decoder, Linear
from danlu.models.families import FAMILIES
from danlu.models.layout import disk_name
from danlu.types import Site


def adapter_sites(model: Decoder) -> list[Site]:
    """Every linear layer, the embedding and the head, in the order of the forward pass.

    The site of a tied head has no module yet: `Decoder.open_head` makes it.
    """
    modules = FAMILIES[model.config.family].modules
    shape = (model.config.vocab_size, model.config.hidden_size)
    sites = [Site("embed_tokens", "model.embed_tokens", "embedding", None, shape, model.embed_tokens)]
    halves: tuple[tuple[Literal["attention", "mlp"], type[Attention] | type[MLP]], ...]
    halves = (("attention", Attention), ("mlp", MLP))
    for index, layer in model.layers.items():
        for group, half in halves:
            for part in half.tensor_roles:
                linear = layer.get_submodule(f"{group}.{part}")
                assert isinstance(linear, Linear)
                name = f"layers.{index}.{group}.{part}"
                sites.append(Site(name, disk_name(name, modules), group, int(index), linear.shape, linear))
    return [*sites, Site("lm_head", "lm_head", "head", None, shape, model.lm_head)]
