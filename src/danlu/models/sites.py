"""The places of a decoder where adapters may sit, told from its config alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from danlu.core.layer_types import Site
from danlu.models.config import ModelConfig, is_stacked, parameter_shapes
from danlu.models.families import FAMILIES
from danlu.models.families.family import Stored
from danlu.models.hf_layout import entry_of, hf_name, modules_of, prefix_of


def sites_of(config: ModelConfig) -> list[Site]:
    """The places of a decoder where adapters may sit, in the order of its forward pass, without its modules: every
    linear layer, the stacked ones of experts, the embedding and the head over the vocabulary, where it has one. The
    table of layers' own embeddings is none.
    """
    shape = (config.vocab_rows, config.hidden_size)
    sites = [Site("embed_tokens", hf_name("embed_tokens", config), "embedding", None, shape, None)]
    if config.per_layer_width:
        name, of_product = "per_layer_model_projection", (config.per_layer_columns, config.hidden_size)
        sites.append(Site(name, hf_name(name, config), "per_layer", None, of_product, None))
    for parameter, sides in parameter_shapes(config).items():
        name, _, kind = parameter.rpartition(".")
        first, *rest = name.split(".")
        is_linear = kind == "weight" and len(sides) == 2 and not name.endswith(".router")
        if is_stacked(parameter) and kind == "weight":
            sites.append(_experts_site(name, sides, config))
        elif first == "layers" and is_linear:
            stored = entry_of(rest[1:], modules_of(config, rest[0], stacked=False))[0]
            turns = 1 if isinstance(stored, str) else stored.turns(config.layers[int(rest[0])])
            index, outputs_inputs = int(rest[0]), (sides[0], sides[1])
            sites.append(Site(name, hf_name(name, config), rest[1], index, outputs_inputs, None, turns))
    if config.task != "causal-lm":
        return sites
    return [*sites, Site("lm_head", "lm_head", "head", None, shape, None)]


def adapter_name(name: str, config: ModelConfig) -> str:
    """The name by which adapters' folders know a module or parameter: transformers' classes call the head lm_head in
    every family, whatever its folders call it.
    """
    return name if name.startswith("lm_head") else hf_name(name, config)


def _experts_site(name: str, sides: Sequence[int], config: ModelConfig) -> Site:
    """The site of one matrix of all experts of a layer.

    transformers' classes (5.0 and later) keep the experts of every family stacked in one module, gate and up in one
    parameter `gate_up_proj`, however their folders have them; adapters go by these names.
    """
    _, index, *_, matrix = name.split(".")
    entry = entry_of([*name.split(".")[2:], "weight"], modules_of(config, index, stacked=False))[0]
    experts, outputs, inputs = sides
    turns = outputs if isinstance(entry, Stored) and entry.alternates and matrix != "down_proj" else 1
    parameter = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    stored = f"{prefix_of(config)}.layers.{index}.{FAMILIES[config.family].experts_module}.{parameter}"
    return Site(name, stored, "experts", int(index), (outputs, inputs), None, turns, experts)
