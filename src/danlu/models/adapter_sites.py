"""The places of a decoder where adapters may sit, with the names that Hugging Face folders give them."""

from __future__ import annotations

from dataclasses import replace

from danlu.core.layer_types import Site
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import config_sites
from danlu.models.modules import GroupedLinear, Linear


def adapter_sites(model: Decoder) -> list[Site]:
    """Returns the places of adapters: every linear layer, those of experts, the embedding and the head, in the order of
    the forward pass.

    The site of a tied head has no module yet: `Decoder.head_as_linear` makes it.
    """
    sites = []
    for site in config_sites(model.config):
        if site.layer is None:
            module = model.lm_head if site.group == "head" else model.embed_tokens
            sites.append(replace(site, module=module))
        else:
            linear = model.get_submodule(site.name)
            assert isinstance(linear, Linear | GroupedLinear)
            sites.append(replace(site, shape=linear.shape, module=linear))
    return sites
