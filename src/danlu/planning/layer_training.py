"""The parts of each layer that a recipe trains, as far as they decide what is kept. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.planning.layer_graph import LayerTraining, LowRankAdapter
from danlu.recipe import Recipe, sections


def layers_training(recipe: Recipe, config: ModelConfig) -> list[LayerTraining]:
    """The training of each layer of a config, from its first layer on.

    Adapters without low-rank factors on products count as if they kept the inputs of all products: bottlenecks,
    prefixes, prompts, and adapters that are continued from files.
    """
    section, fp8 = recipe.adapter, None if recipe.fp8 is None else recipe.fp8.recipe
    rounded: Literal["kept", "encoded"] | None = None
    if recipe.trained_quantization is not None:
        from danlu.planning.rounded_weights import keeps_codes

        rounded = "kept" if keeps_codes(recipe) else "encoded"
    if section is None:
        return [LayerTraining(fp8=fp8, rounded=rounded)] * len(config.layers)
    # A run without an adapter loads neither.
    from danlu.adapters.targets import by_pattern, choose
    from danlu.models.sites import sites_of

    adapters: dict[int, dict[str, LowRankAdapter]] = {layer: {} for layer in range(len(config.layers))}
    chosen = choose(sites_of(config), section, check_ranks=False) if _has_targets(section) else []
    for site in chosen:
        if site.layer is not None:
            rank = by_pattern(site, getattr(section, "rank_pattern", {}), getattr(section, "rank", 1))
            name = site.name.partition(".")[2].partition(".")[2]
            adapters[site.layer][name] = LowRankAdapter(
                rank,
                isinstance(section, sections.Dora),
                not getattr(section, "freeze_a", False),
                drops_out=recipe.drops_out and getattr(section, "dropout", 0.0) > 0,
            )
    training, with_gradient = [], not _has_targets(section)
    for own in adapters.values():
        training.append(
            LayerTraining(
                weights=not _has_targets(section),
                adapters=tuple(own.items()),
                quantized=recipe.base_quantization is not None,
                rounded=rounded,
                fp8=fp8,
                input_needs_gradient=with_gradient,
                adapts_embeddings=any(site.group == "per_layer" and site.layer is None for site in chosen),
            )
        )
        with_gradient = with_gradient or bool(own)
    return training


def training_of_chunks(
    training: Sequence[LayerTraining], chunks: Chunks, local: Sequence[int]
) -> tuple[LayerTraining, ...]:
    """The parts of the layers of some chunks, out of those of all layers: what comes from another chunk has a gradient.

    local: the numbers of the chunks.
    """
    return tuple(
        replace(training[layer], input_needs_gradient=True) if chunk else training[layer]
        for chunk in local
        for layer in chunks.layers[chunk]
    )


def _has_targets(section: object) -> bool:
    return hasattr(section, "targets")
