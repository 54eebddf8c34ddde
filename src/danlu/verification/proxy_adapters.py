"""Adapters for a shrunken base: the section of the one that is trained, and the folders of those below it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from danlu.adapters.adapter_config import AdapterFolder, adapter_stack, open_adapter, resolve_adapter
from danlu.adapters.peft_folder import section_of, write_adapter
from danlu.adapters.targets import ROW_GROUPS, by_pattern, select, unmatched
from danlu.adapters.token_rows import KEY as ROWS
from danlu.assembly.base_model import Base, find_base
from danlu.assembly.frozen_base import adapters_of
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Site
from danlu.models.config import ModelConfig
from danlu.models.initialize import named_generator
from danlu.models.loading import load, meta_decoder
from danlu.models.sites import sites_of
from danlu.recipe import sections

RANK = 4  # of low-rank adapters
GROUP = 16  # numbers, of weights that are quantized in groups of any size, and inputs of QA-LoRA's groups
WIDTH = 8  # of bottlenecks and projections
TOKENS = 3  # virtual ones
_PERTURBATION = 0.1  # standard deviation that is put on every number, of which many begin as zero
_NAME = "made"  # of each adapter while it is written; a part of the names that seed its numbers
_LAYER = re.compile(r"\blayers\.(\d+)\b")


def proxy_section(section: Any, config: ModelConfig, small: ModelConfig, rows: Sequence[str] = ()) -> Any:
    """An adapter's section for the small model of a config: small sizes, and layers that it has.

    rows: names of tokens of the small model with rows that a new adapter trains.
    Its scale (alpha / rank) stays. Raises RecipeError for targets that no layer of the large model has.
    """
    section = _on_layers(section, config, small)
    match section:
        case sections.QaLora() if section.group > GROUP:
            return proxy_section(section.model_copy(update={"group": GROUP}), config, small, rows)
        case sections.LowRank():
            rank = min(section.rank, RANK)
            ratio = rank / section.rank if section.scaling == "standard" else (rank / section.rank) ** 0.5
            return section.model_copy(
                update={
                    "rank": rank,
                    "trainable_tokens": list(rows),
                    "alpha": section.alpha * ratio,
                    "rank_pattern": {name: min(rank, RANK + 2) for name, rank in section.rank_pattern.items()},
                    "alpha_pattern": {name: alpha * ratio for name, alpha in section.alpha_pattern.items()},
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


def proxy_adapter_folders(
    paths: Sequence[str], config: ModelConfig, base: Path, folder: Path, *, seed: int
) -> tuple[list[str], str]:
    """Writes small adapters in place of those that `model.adapters` names and of all that these were trained upon.

    They are of the same kinds on the same layers and stacked alike; their numbers are random.

    Args:
        config: of the large base; the small one is the model folder `base`.
        folder: where they are written.

    Returns (paths in place of `paths`, the kinds of all adapters in words).
    Raises ModelError and RecipeError for adapters that do not fit the large base.
    """
    large, small_base = adapters_of(meta_decoder(config)), find_base(base)
    written: dict[Path, Path] = {}  # by the path of the adapter that it stands for
    kinds: list[str] = []
    for adapter in (adapter for path in paths for adapter in adapter_stack(path)):
        if adapter.path.resolve() not in written:
            section = section_of(large, open_adapter(adapter.path))
            small = load(base).config
            token_ids = row_tokens(small) if adapter.values.get(ROWS) else []
            below = [str(written[resolve_adapter(path).resolve()]) for path in adapter.below]
            target = folder / f"{len(written)}-{_named(adapter)}"
            _write(proxy_section(section, config, small), small_base, target, below, seed, token_ids)
            written[adapter.path.resolve()] = target
            kinds.append(section.kind)
    return [str(written[resolve_adapter(path).resolve()]) for path in paths], " and ".join(kinds)


def row_tokens(config: ModelConfig) -> list[int]:
    """The tokens of a small model with rows of their own: one at each end of the vocabulary and one between, so that
    processes which cut it have different ones."""
    return sorted({1, config.vocab_size // 2, config.vocab_size - 1})


def write_numbers_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Writes a tokenizer with the tokens "0", "1", ..., by which a recipe names rows; returns its folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True)
    numbers = {str(token): token for token in range(vocab_size)}
    Tokenizer(WordLevel(numbers, unk_token="0")).save(str(folder / "tokenizer.json"))
    return folder


def _named(folder: AdapterFolder) -> str:
    """The name of a folder in messages."""
    return folder.path.parent.name if folder.path.name == "adapter" else folder.path.resolve().name


@torch.no_grad()
def _write(section: Any, base: Base, target: Path, below: Sequence[str], seed: int, token_ids: Sequence[int]) -> None:
    """Writes an adapter of a small base, with random numbers as after training; it is initialized alone on the base."""
    adapters = adapters_of(load(base.folder), seed=seed)
    adapters.add(_NAME, section, token_ids=dict.fromkeys(ROW_GROUPS, token_ids), check_ranks=False)
    adapters.train_only(_NAME)
    for name, parameter in adapters.tensors(_NAME).items():
        if parameter.requires_grad:
            generator = named_generator(seed, f"{name} of {target.name}")
            parameter.add_(torch.empty_like(parameter).normal_(std=_PERTURBATION, generator=generator))
    target.mkdir(parents=True)
    write_adapter(adapters, _NAME, target, base=base.named, base_fingerprint=base.fingerprint, below=below)


def _on_layers(section: Any, config: ModelConfig, small: ModelConfig) -> Any:
    """Names of single layers become those of the layers that stand for them: the first half of 28 is the first of 2."""
    small_sites, large_sites = sites_of(small), sites_of(config)
    single = {name for site in large_sites for name in (site.name, site.hf_name) if site.layer is not None}

    def moved(name: str) -> str:
        return _LAYER.sub(lambda match: f"layers.{int(match[1]) * len(small.layers) // len(config.layers)}", name)

    def target(given: str) -> list[str]:
        if given not in single and _selects(small_sites, given):
            return [given]
        return [moved(site.name) for site in select(large_sites, [given])]

    def pattern(given: str) -> list[str]:
        if given not in single and not unmatched(small_sites, {given: True}):
            return [given]
        return [moved(site.name) for site in large_sites if by_pattern(site, {given: True}, False)]

    changes: dict[str, Any] = {}
    for key, names in (("targets", target), ("feedforward", target), ("modules_to_save", lambda name: [moved(name)])):
        if (given := getattr(section, key, None)) is not None:
            changes[key] = list(dict.fromkeys(name for target_name in given for name in names(target_name)))
    for key in ("rank_pattern", "alpha_pattern"):
        if (given := getattr(section, key, None)) is not None:
            changes[key] = {name: value for key, value in given.items() for name in pattern(key)}
    return section.model_copy(update=changes)


def _selects(sites: Sequence[Site], target: str) -> bool:
    try:
        return bool(select(sites, [target]))
    except RecipeError:
        return False
