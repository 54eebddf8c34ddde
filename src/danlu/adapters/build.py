"""Building an adapter's modules from its section of the recipe, on sites that `targets.choose` found to fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from danlu.adapters import bottleneck, prefix, prompt
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.hf_layers import TargetLayers, target_layers
from danlu.adapters.ia3 import Ia3
from danlu.adapters.lora import EmbeddingLowRank, GroupedLowRank, LowRank
from danlu.adapters.mora import Mora
from danlu.adapters.qa_lora import QaLora
from danlu.adapters.shapes import branch_slots, largest_shape, prefix_slots
from danlu.adapters.targets import by_pattern, select, square_width
from danlu.adapters.vera import Projection, Vera
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Site
from danlu.recipe import sections


@dataclass(frozen=True)
class BuildContext:
    """The arguments for building an adapter's modules, besides its section."""

    generator: Callable[[str], torch.Generator]
    """Returns a CPU generator for the name of a parameter: first values depend on the seed and this name alone."""
    dropout_state: DropoutState
    device: torch.device
    encode: Callable[[str], Sequence[int]] | None = None
    """Text to tokens, where there is a tokenizer."""

    def dropout(self, p: float, name: str) -> Dropout:
        """Dropout with probability p for the adapter module of this name."""
        return Dropout(p, name, self.dropout_state)


def build_modules(
    targets: Sequence[Site],
    section: Any,
    name: str,
    context: BuildContext,
    all_sites: Sequence[Site],
    first_virtual_id: int,
) -> dict[str, nn.Module]:
    """The modules of the adapter `name` with their first values.

    They are keyed by the name of their site, or of their slot (`layers.0.after_mlp`) where that is no site.

    Args:
        targets: the sites that the section's targets select, of `all_sites` of the model.
        first_virtual_id: the first id past the vocabulary that no other adapter's virtual tokens have.

    Raises RecipeError for settings that do not fit a layer.
    """
    match section:
        case sections.LowRank():
            return {site.name: low_rank(site, section, name, context) for site in targets}
        case sections.Vera():
            return vera(target_layers(targets, all_sites), section, name, context)
        case sections.Mora():
            return {site.name: mora(site, section, name, context) for site in targets}
        case sections.Ia3():
            feedforward = {site.name for site in select(all_sites, section.feedforward, key="adapter.feedforward")}
            return ia3(target_layers(targets, all_sites), feedforward, context)
        case sections.Bottleneck():
            return bottlenecks(section, name, context, all_sites)
        case sections.Prompt():
            return {site.name: soft_prompt(site, section, name, context, first_virtual_id) for site in targets}
        case sections.Prefix():
            return prefixes(targets[0], section, name, context, all_sites, first_virtual_id)
    raise AssertionError(f"no adapter is known for {type(section).__name__}")


def low_rank(site: Site, section: sections.LowRank, name: str, context: BuildContext) -> nn.Module:
    """LoRA or DoRA on one site, or LoRA on each of its experts, with its first values drawn."""
    rank = by_pattern(site, section.rank_pattern, section.rank)
    scale = lora_scale(site, section, rank)
    generator = context.generator(f"{site.name}.{name}.lora_A")
    if site.group == "embedding":
        embedding = EmbeddingLowRank(site.shape, rank, scale, device=context.device)
        embedding.reset_parameters(generator)
        return embedding
    if site.experts is not None:
        grouped = GroupedLowRank(
            site.experts, site.shape, rank, scale, freeze_a=section.freeze_a, device=context.device
        )
        grouped.reset_parameters(generator, gaussian=section.init == "gaussian")
        return grouped
    if isinstance(section, sections.QaLora):
        grouped_inputs = QaLora(
            site.shape,
            rank,
            scale,
            context.dropout(section.dropout, f"{site.name}.{name}"),
            group=section.group,
            freeze_a=section.freeze_a,
            device=context.device,
        )
        grouped_inputs.reset_parameters(generator, gaussian=section.init == "gaussian")
        return grouped_inputs
    module = LowRank(
        site.shape,
        rank,
        scale,
        context.dropout(section.dropout, f"{site.name}.{name}"),
        magnitude=section.kind == "dora",
        exact_norm=isinstance(section, sections.Dora) and section.exact_norm,
        freeze_a=section.freeze_a,
        device=context.device,
    )
    module.reset_parameters(generator, gaussian=section.init == "gaussian")
    return module


def lora_scale(site: Site, section: sections.LowRank, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""
    alpha = by_pattern(site, section.alpha_pattern, section.alpha)
    return alpha / (rank if section.scaling == "standard" else math.sqrt(rank))


def vera(layers: TargetLayers, section: sections.Vera, name: str, context: BuildContext) -> dict[str, nn.Module]:
    """VeRA on all its sites, which share one pair of random matrices."""
    shape = largest_shape([layer for layer, _ in layers])
    projection = Projection(section.rank, shape, seed=section.projection_seed, device=context.device)
    modules: dict[str, nn.Module] = {}
    for layer, parts in layers:
        lambda_d: nn.Parameter | None = None
        for site, rows in layer.rows():
            if site not in parts:
                continue
            dropout = context.dropout(section.dropout, f"{site.name}.{name}")
            module = Vera(projection, rows, site.shape[1], dropout, initial_d=section.initial_d, lambda_d=lambda_d)
            modules[site.name], lambda_d = module, module.vera_lambda_d
    return modules


def mora(site: Site, section: sections.Mora, name: str, context: BuildContext) -> nn.Module:
    """MoRA on one site."""
    width = square_width(site.shape, section.rank, section.form)
    dropout = context.dropout(section.dropout, f"{site.name}.{name}")
    return Mora(site.shape, width, section.form, dropout, device=context.device)


def ia3(layers: TargetLayers, feedforward: set[str], context: BuildContext) -> dict[str, nn.Module]:
    """Builds (IA)^3 on all its sites; those named in `feedforward` rescale the inputs of their layer."""
    modules: dict[str, nn.Module] = {}
    for layer, parts in layers:
        scaling_inputs = [site for site in parts if site.name in feedforward]
        assert not scaling_inputs or len(scaling_inputs) == len(layer.parts), "`targets.choose` refuses a mixture"
        vector: nn.Parameter | None = None
        for site in parts:
            module = Ia3(site.shape, of_inputs=bool(scaling_inputs), vector=vector, device=context.device)
            modules[site.name], vector = module, module.ia3_l if scaling_inputs else None
    return modules


def bottlenecks(
    section: sections.Bottleneck, name: str, context: BuildContext, all_sites: Sequence[Site]
) -> dict[str, nn.Module]:
    """Bottleneck adapters by the slots they sit in."""
    width = next(site for site in all_sites if site.group == "embedding").shape[1]
    modules: dict[str, nn.Module] = {}
    for slot in branch_slots(all_sites, section.placement):
        module = bottleneck.Bottleneck(width, section.width, section.activation, device=context.device)
        module.reset_parameters(context.generator(f"{slot}.{name}.down_weight"))
        modules[slot] = module
    return modules


def soft_prompt(site: Site, section: sections.Prompt, name: str, context: BuildContext, first_id: int) -> nn.Module:
    """A soft prompt on the embedding, uninitialised until the model has its weights."""
    vocab_size, width = site.shape
    if section.text is None:
        generator = context.generator(f"{site.name}.{name}")
        initial_ids: Sequence[int] = prompt.random_token_ids(generator, vocab_size, section.tokens)
    elif context.encode is None:
        raise RecipeError("adapter.text: this run has no tokenizer to read it with. Leave adapter.text out")
    elif not (initial_ids := context.encode(section.text)):
        raise RecipeError(f"adapter.text: {section.text!r} is not a single token. Give text, or leave it out")
    return prompt.Prompt(first_id, section.tokens, width, site.module.multiplier, initial_ids, context.device)


def prefixes(
    site: Site, section: sections.Prefix, name: str, context: BuildContext, all_sites: Sequence[Site], first_id: int
) -> dict[str, nn.Module]:
    """A prefix: its virtual tokens on the embedding, and its keys and values by the slots they sit in."""
    tokens = prefix.PrefixTokens(first_id, section.tokens, site.shape[1])
    widths = prefix_slots(all_sites)
    projection = None
    if section.projection is not None:
        projection = prefix.Projection(section.tokens, max(widths.values()), section.projection, device=context.device)
        projection.reset_parameters(_generator_for(context, f"projection.{name}"))
    modules: dict[str, nn.Module] = {site.name: tokens}
    for slot, width in widths.items():
        layer = prefix.LayerPrefix(tokens, width, projection, device=context.device)
        layer.reset_parameters(_generator_for(context, f"{slot}.{name}"))
        modules[slot] = layer
    return modules


def _generator_for(context: BuildContext, module: str) -> prefix.GeneratorFor:
    return lambda parameter: context.generator(f"{module}.{parameter}")
