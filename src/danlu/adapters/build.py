"""From an adapter's section of the recipe to its modules, at sites that `targets.choose` found to fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from danlu.adapters import bottleneck, prefix, prompt
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.hf_layers import HFLayer, hf_layers
from danlu.adapters.ia3 import Ia3
from danlu.adapters.lora import EmbeddingLowRank, LowRank
from danlu.adapters.mora import Mora
from danlu.adapters.targets import by_pattern, select, square_width
from danlu.adapters.vera import Projection, Vera, widest
from danlu.errors import RecipeError
from danlu.recipe import sections
from danlu.types import Site


@dataclass(frozen=True)
class BuildContext:
    """What building an adapter's modules takes beside its section."""

    generator: Callable[[str], torch.Generator]  # a CPU generator for a name: first values depend on (seed, name) alone
    dropout_state: DropoutState
    device: torch.device
    encode: Callable[[str], Sequence[int]] | None = None  # text to tokens, where there is a tokenizer


def build_modules(
    chosen: Sequence[Site],
    section: Any,
    name: str,
    build_context: BuildContext,
    *,
    every: Sequence[Site],
    first_virtual: int,
) -> dict[str, nn.Module]:
    """The modules of an adapter with their first values: by site, or by slot (`layers.0.after_mlp`) where it is none.

    Args:
        chosen: the sites that the section's targets name; `every` one of the model.
        first_virtual: the first id that no other adapter's virtual tokens have.

    Raises RecipeError for settings that do not fit a layer.
    """
    match section:
        case sections.LowRank():
            return {site.name: low_rank(site, section, name, build_context) for site in chosen}
        case sections.Vera():
            return vera(_chosen_layers(chosen, every), section, name, build_context)
        case sections.Mora():
            return {
                site.name: mora(site, section, name, build_context)
                for layer, parts in _chosen_layers(chosen, every)
                for site in parts
            }
        case sections.Ia3():
            of_inputs = {site.name for site in select(every, section.feedforward, key="adapter.feedforward")}
            return ia3(_chosen_layers(chosen, every), of_inputs, build_context)
        case sections.Bottleneck():
            return bottlenecks(section, name, build_context, every)
        case sections.Prompt():
            return {site.name: soft_prompt(site, section, name, build_context, first_virtual) for site in chosen}
        case sections.Prefix():
            return prefixes(chosen[0], section, name, build_context, every, first_virtual)
    raise AssertionError(f"no adapter is known for {type(section).__name__}")


def low_rank(site: Site, section: sections.LowRank, name: str, build_context: BuildContext) -> nn.Module:
    """LoRA or DoRA for one site, with its first values drawn."""
    rank = by_pattern(site, section.rank_pattern, section.rank)
    scale = scale_of(site, section, rank)
    generator = build_context.generator(f"{site.name}.{name}.lora_A")
    dora = section.kind == "dora"
    if site.group == "embedding":
        embedding = EmbeddingLowRank(site.shape, rank, scale, device=build_context.device)
        embedding.draw(generator)
        return embedding
    module = LowRank(
        site.shape,
        rank,
        scale,
        Dropout(section.dropout, f"{site.name}.{name}", build_context.dropout_state),
        magnitude=dora,
        exact_norm=isinstance(section, sections.Dora) and section.exact_norm,
        freeze_a=section.freeze_a,
        device=build_context.device,
    )
    module.draw(generator, gaussian=section.init == "gaussian")
    return module


def scale_of(site: Site, section: sections.LowRank, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
    alpha = by_pattern(site, section.alpha_pattern, section.alpha)
    return alpha / (rank if section.scaling == "standard" else math.sqrt(rank))


ChosenLayers = list[tuple[HFLayer, list[Site]]]
"""Layers as Hugging Face folders have them, each with those of its parts that are chosen."""


def _chosen_layers(chosen: Sequence[Site], every: Sequence[Site]) -> ChosenLayers:
    """The layers of chosen sites."""
    names = {site.name for site in chosen}
    layers = [(layer, [site for site in layer.parts if site.name in names]) for layer in hf_layers(every)]
    return [(layer, parts) for layer, parts in layers if parts]


def vera(layers: ChosenLayers, section: sections.Vera, name: str, build_context: BuildContext) -> dict[str, nn.Module]:
    """VeRA for all its sites, which share their matrices."""
    shape = widest([layer for layer, _ in layers])
    projection = Projection(section.rank, shape, seed=section.projection_seed, device=build_context.device)
    modules: dict[str, nn.Module] = {}
    for layer, parts in layers:
        lambda_d: nn.Parameter | None = None
        for site, rows in layer.rows():
            if site not in parts:
                continue
            dropout = Dropout(section.dropout, f"{site.name}.{name}", build_context.dropout_state)
            module = Vera(projection, rows, site.shape[1], dropout, initial_d=section.initial_d, lambda_d=lambda_d)
            modules[site.name], lambda_d = module, module.vera_lambda_d
    return modules


def mora(site: Site, section: sections.Mora, name: str, build_context: BuildContext) -> nn.Module:
    """MoRA for one site."""
    width = square_width(site.shape, section.rank, section.form)
    dropout = Dropout(section.dropout, f"{site.name}.{name}", build_context.dropout_state)
    return Mora(site.shape, width, section.form, dropout, device=build_context.device)


def ia3(layers: ChosenLayers, of_inputs: set[str], build_context: BuildContext) -> dict[str, nn.Module]:
    """(IA)^3 for all its sites; those of `of_inputs` rescale what goes into a layer."""
    modules: dict[str, nn.Module] = {}
    for layer, parts in layers:
        inside = [site for site in parts if site.name in of_inputs]
        assert not inside or len(inside) == len(layer.parts), "`targets.choose` has looked"
        vector: nn.Parameter | None = None
        for site in parts:
            module = Ia3(site.shape, of_inputs=bool(inside), vector=vector, device=build_context.device)
            modules[site.name], vector = module, module.ia3_l if inside else None
    return modules


def bottlenecks(
    section: sections.Bottleneck, name: str, build_context: BuildContext, every: Sequence[Site]
) -> dict[str, nn.Module]:
    """Bottleneck adapters by the slots they sit in."""
    width = _embedding(every).shape[1]
    modules: dict[str, nn.Module] = {}
    for place in bottleneck.places(every, section.placement):
        module = bottleneck.Bottleneck(width, section.width, section.activation, device=build_context.device)
        module.draw(build_context.generator(f"{place}.{name}.down_weight"))
        modules[place] = module
    return modules


def soft_prompt(site: Site, section: sections.Prompt, name: str, build_context: BuildContext, first: int) -> nn.Module:
    """A soft prompt, which waits for the weights to start from."""
    words, width = site.shape
    if section.text is None:
        chosen: Sequence[int] = prompt.random_words(
            build_context.generator(f"{site.name}.{name}"), words, section.tokens
        )
    elif build_context.encode is None:
        raise RecipeError("adapter.text: this run has no tokenizer to read it with. Leave adapter.text out")
    elif not (chosen := build_context.encode(section.text)):
        raise RecipeError(f"adapter.text: {section.text!r} is not a single token. Give text, or leave it out")
    return prompt.Prompt(first, section.tokens, width, site.module.multiplier, chosen, build_context.device)


def prefixes(
    site: Site, section: sections.Prefix, name: str, build_context: BuildContext, every: Sequence[Site], first: int
) -> dict[str, nn.Module]:
    """A prefix: what the embedding notes, and keys and values by the slots they sit in."""
    tokens = prefix.PrefixTokens(first, section.tokens, site.shape[1])
    slots = prefix.slots(every)
    projection = None
    if section.projection is not None:
        widest_layer = max(slots.values())
        projection = prefix.Projection(section.tokens, widest_layer, section.projection, device=build_context.device)
        projection.draw(_named(build_context, f"projection.{name}"))
    modules: dict[str, nn.Module] = {site.name: tokens}
    for slot, width in slots.items():
        layer = prefix.LayerPrefix(tokens, width, projection, device=build_context.device)
        layer.draw(_named(build_context, f"{slot}.{name}"))
        modules[slot] = layer
    return modules


def _named(build_context: BuildContext, place: str) -> Callable[[str], torch.Generator]:
    return lambda parameter: build_context.generator(f"{place}.{parameter}")


def _embedding(every: Sequence[Site]) -> Site:
    return next(site for site in every if site.group == "embedding")
