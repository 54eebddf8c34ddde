"""Adapters made small, as their base is: the section of the one that is trained, and the folders of those below it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from danlu.adapters.adapter_config import AdapterFolder, adapter_stack, open_adapter, resolve_adapter
from danlu.adapters.peft_folder import section_of, write_adapter
from danlu.adapters.targets import by_pattern, select, unmatched
from danlu.assembly.base_model import Base, find_base
from danlu.assembly.frozen_base import adapters_of
from danlu.errors import RecipeError
from danlu.models.adapter_sites import adapter_sites
from danlu.models.config import ModelConfig
from danlu.models.initialize import named_generator
from danlu.models.loading import load, meta_decoder
from danlu.recipe import sections
from danlu.types import Site

RANK = 4
WIDTH = 8
TOKENS = 3
_PERTURBATION = 0.1  # standard deviation that is put on every number, of which many begin as zero
_LAYER = re.compile(r"\blayers\.(\d+)\b")


def small_section(section: Any, config: ModelConfig, small: ModelConfig) -> Any:
    """An adapter's section for the small model of a config: small sizes, and layers that are there.

    Its scale (alpha / rank) stays. Raises RecipeError for targets that no layer of the large model has.
    """
    section = _on_layers(section, config, small)
    match section:
        case sections.LowRank():
            rank = min(section.rank, RANK)
            ratio = rank / section.rank if section.scaling == "standard" else (rank / section.rank) ** 0.5
            return section.model_copy(
                update={
                    "rank": rank,
                    "alpha": section.alpha * ratio,
                    "rank_pattern": {name: min(one, RANK + 2) for name, one in section.rank_pattern.items()},
                    "alpha_pattern": {name: one * ratio for name, one in section.alpha_pattern.items()},
                }
            )
        case sections.Vera() | sections.Mora():
            return section.model_copy(update={"rank": min(section.rank, RANK)})
        case sections.Bottleneck():
            return section.model_copy(update={"width": min(section.width, WIDTH)})
        case sections.Prefix():
            projection = None if section.projection is None else min(section.projection, WIDTH)
            return section.model_copy(update={"tokens": min(section.tokens, TOKENS), "projection": projection})
        case sections.Prompt():
            return section.model_copy(update={"tokens": min(section.tokens, TOKENS)})
    return section


def small_stack(
    paths: Sequence[str], config: ModelConfig, base: Path, folder: Path, *, seed: int
) -> tuple[list[str], str]:
    """Small adapters in place of those that `model.adapters` names, with all that these were trained upon.

    They are of the same kinds on the same layers, with numbers of their own; what lies below what stays.

    Args:
        config: of the large base; the small one is the model folder `base`.
        folder: where theirs are made.

    Returns (their paths, what they are in words). Raises ModelError and RecipeError for those that do not fit the large
    base.
    """
    large, found = adapters_of(meta_decoder(config)), find_base(base)
    made: dict[Path, Path] = {}
    kinds: list[str] = []
    for one in (one for path in paths for one in adapter_stack(path)):
        if one.path.resolve() not in made:
            section = section_of(large, open_adapter(one.path))
            below = [str(made[resolve_adapter(path).resolve()]) for path in one.below]
            target = folder / f"{len(made)}-{_named(one)}"
            _write(small_section(section, config, load(base).config), found, target, below, seed)
            made[one.path.resolve()] = target
            kinds.append(section.kind)
    return [str(made[resolve_adapter(path).resolve()]) for path in paths], " and ".join(kinds)


def _named(folder: AdapterFolder) -> str:
    """What a folder is called, for messages."""
    return folder.path.parent.name if folder.path.name == "adapter" else folder.path.resolve().name


@torch.no_grad()
def _write(section: Any, base: Base, target: Path, below: Sequence[str], seed: int) -> None:
    """An adapter of a small base as after training, alone on it."""
    adapters = adapters_of(load(base.folder), seed=seed)
    adapters.add("made", section, check_ranks=False)
    adapters.train_only("made")
    for name, parameter in adapters.tensors("made").items():
        if parameter.requires_grad:
            generator = named_generator(seed, f"{name} of {target.name}")
            parameter.add_(torch.empty_like(parameter).normal_(std=_PERTURBATION, generator=generator))
    target.mkdir(parents=True)
    write_adapter(adapters, "made", target, base=base.named, base_fingerprint=base.fingerprint, below=below)


def _on_layers(section: Any, config: ModelConfig, small: ModelConfig) -> Any:
    """Names of single layers become those of the layers that stand for them: the first half of 28 is the first of 2."""
    here, there = adapter_sites(meta_decoder(small)), adapter_sites(meta_decoder(config))
    single = {name for site in there for name in (site.name, site.hf_name) if site.layer is not None}

    def moved(name: str) -> str:
        return _LAYER.sub(lambda match: f"layers.{int(match[1]) * small.layers // config.layers}", name)

    def target(given: str) -> list[str]:
        if given not in single and _selects(here, given):
            return [given]
        return [moved(site.name) for site in select(there, [given])]

    def pattern(given: str) -> list[str]:
        if given not in single and not unmatched(here, {given: True}):
            return [given]
        return [moved(site.name) for site in there if by_pattern(site, {given: True}, False)]

    changes: dict[str, Any] = {}
    for key, names in (("targets", target), ("feedforward", target), ("modules_to_save", lambda one: [moved(one)])):
        if (given := getattr(section, key, None)) is not None:
            changes[key] = list(dict.fromkeys(name for one in given for name in names(one)))
    for key in ("rank_pattern", "alpha_pattern"):
        if (given := getattr(section, key, None)) is not None:
            changes[key] = {name: value for one, value in given.items() for name in pattern(one)}
    return section.model_copy(update=changes)


def _selects(sites: Sequence[Site], target: str) -> bool:
    try:
        return bool(select(sites, [target]))
    except RecipeError:
        return False
