"""The choice of a model's layers for an adapter, and whether its kind fits them. No torch here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from danlu.adapters.hf_layers import hf_layers
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Site
from danlu.recipe import sections

Form = Literal["rotation", "sharing"]
"""How MoRA maps inputs to its square: see `mora`."""

GROUPS = {
    "all-linear": ("attention", "mlp", "per_layer"),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "experts": ("experts",),
}
EXPERTS = "experts"
"""The part of a target that reaches the stacked matrices of experts."""
ROW_GROUPS = ("embedding", "head")
"""The groups of sites with a row for each token."""
_Value = TypeVar("_Value")


def choose(sites: Sequence[Site], section: Any, *, check_ranks: bool = True) -> list[Site]:
    """Returns the sites of a model that an adapter's section selects.

    check_ranks: False for the section of an existing adapter, as PEFT may have cut its ranks.
    Raises RecipeError for names that match no layer, for ranks that no layer has, and for layers that an adapter of
    this kind does not fit.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        if unused := unmatched(sites, getattr(section, key, {})):
            raise RecipeError(f"adapter.{key}: {unused[0]!r} matches no layer of this model")
    chosen = select(sites, targets_of(section))
    if isinstance(section, sections.Prefix) and any(site.name.endswith(".attention.a_proj") for site in sites):
        raise RecipeError(
            "adapter.kind: prefix stands in the place of keys and values of tokens, which this model's linear "
            "attention do not keep. Use another kind"
        )
    if isinstance(section, sections.Prompt | sections.Prefix) and any(site.group == "per_layer" for site in sites):
        raise RecipeError(
            f"adapter.kind: {section.kind} has virtual tokens, and the layers of this model have embeddings of their "
            "own of each token, which virtual ones lack. Use lora"
        )
    if isinstance(section, sections.Prefix):
        _check_keys_of_heads(sites)
    for site in chosen:
        _check_kind(site, section)
        if isinstance(section, sections.LowRank) and check_ranks:
            check_rank(site, section)
        if isinstance(section, sections.Mora):
            _check_square(site, section)
        if isinstance(section, sections.QaLora):
            _check_groups(site, section)
    if isinstance(section, sections.Ia3):
        _check_feedforward(chosen, section, sites)
    return chosen


def check_rows(
    sites: Sequence[Site], chosen: Sequence[Site], section: Any, token_ids: Sequence[int], *, tied: bool
) -> None:
    """Raises RecipeError as `sites_of_rows` does, for an adapter that trains the rows of these tokens."""
    sites_of_rows(sites, chosen, section, dict.fromkeys(ROW_GROUPS, token_ids), tied=tied)


def sites_of_rows(
    sites: Sequence[Site],
    chosen: Sequence[Site],
    section: Any,
    token_ids: Mapping[str, Sequence[int]],
    *,
    tied: bool,
) -> list[Site]:
    """The embedding and the head, of those in which an adapter trains rows of single tokens.

    Not those that it trains in full. chosen: the sites that it sits on; tied: whether the head is the embedding.
    Raises RecipeError where it cannot have rows: PEFT has them next to LoRA, on a layer that has no other adapter.
    """
    saved: list[str] = getattr(section, "modules_to_save", [])
    in_full = {site.group for site in sites if any(f".{site.hf_name}".endswith(f".{name}") for name in saved)}
    if tied and "embedding" in in_full:
        in_full.add("head")
    with_rows = [site for site in sites if token_ids.get(site.group) and site.group not in in_full]
    if with_rows and not isinstance(section, sections.LowRank):
        raise RecipeError(
            f"adapter.kind: {section.kind} trains no rows of single tokens (model.tokens), which adapter folders have "
            "with LoRA alone. Use kind: lora, or train all rows (adapter.modules_to_save: [embed_tokens, lm_head])"
        )
    if taken := [site for site in with_rows if site.name in {each.name for each in chosen}]:
        raise RecipeError(
            f"adapter.targets: {taken[0].hf_name} has rows of its own for single tokens (model.tokens), and no other "
            "adapter with them. Leave it out of adapter.targets, or train all of it (adapter.modules_to_save)"
        )
    return with_rows


def targets_of(section: Any) -> list[str]:
    """The targets of a section; prompts and prefixes sit on the embedding, bottleneck adapters on no site."""
    match section:
        case sections.Prompt() | sections.Prefix():
            return ["embed_tokens"]
        case sections.Bottleneck():
            return []
    targets: list[str] = section.targets
    return targets


def select(sites: Sequence[Site], targets: Iterable[str], *, key: str = "adapter.targets") -> list[Site]:
    """The sites that targets name, in the model's order.

    A target is a group (all-linear, attention, mlp, experts), the end of a module's name (`q_proj`,
    `self_attn.q_proj`, `layers.0.self_attn.q_proj`), here or as Hugging Face folders have it, or a regular expression
    that a whole name matches. The stacked matrices of experts are reached by targets that say `experts` alone
    (`experts`, `experts.down_proj`): PEFT's `target_modules` and its all-linear do not reach them either. Raises
    RecipeError for a target that matches nothing, with the names that are near.
    """
    chosen: set[str] = set()
    for target in targets:
        matching = [site.name for site in sites if matches(site, target)]
        if not matching:
            raise RecipeError(f"{key}: {_no_match(sites, target)}")
        chosen.update(matching)
    return [site for site in sites if site.name in chosen]


def matches(site: Site, target: str) -> bool:
    """Whether a target names a site; see `select`."""
    if target in GROUPS:
        # An adapter of the one output of a gate would be larger than the gate.
        return site.group in GROUPS[target] and min(site.shape) > 1
    if site.experts is not None and EXPERTS not in target:
        return False
    names = (site.name, site.hf_name)
    return any(f".{name}".endswith(f".{target}") or _matches_whole(target, name) for name in names)


def _matches_whole(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise RecipeError(f"adapter.targets: {pattern!r} is no regular expression: {error}") from None


def _no_match(sites: Sequence[Site], target: str) -> str:
    """The message for a target that no site matches, with the names that are near."""
    names = sorted({_end(name) for site in sites for name in (site.name, site.hf_name)})
    end = target.rpartition(".")[2]
    of_experts = [name for name in names if name.endswith(f".{end}")]
    near = of_experts or get_close_matches(end, [*names, *GROUPS], n=3, cutoff=0.5)
    hint = f" Near: {', '.join(near)}." if near else ""
    return f"{target!r} matches no layer of this model.{hint} There are {', '.join([*GROUPS, *names])}"


def _end(name: str) -> str:
    """The end of a site's name that a target needs at least."""
    owner, _, end = name.rpartition(".")
    return f"{EXPERTS}.{end}" if owner.endswith(f".{EXPERTS}") else end


def by_pattern(site: Site, patterns: Mapping[str, _Value], default: _Value) -> _Value:
    """The value of the first pattern that matches a site's name in Hugging Face folders, or its own."""
    return value_by_pattern((site.hf_name, site.name), patterns, default)


def value_by_pattern(names: Sequence[str], patterns: Mapping[str, _Value], default: _Value) -> _Value:
    """The value of the first pattern that one of a module's names ends with, as PEFT matches its rank_pattern."""
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return value
    return default


def unmatched(sites: Sequence[Site], patterns: Mapping[str, object]) -> list[str]:
    """Patterns that no site matches: most likely misspelt."""
    return [pattern for pattern in patterns if not any(by_pattern(site, {pattern: True}, False) for site in sites)]


def check_rank(site: Site, section: sections.LowRank) -> None:
    """Raises RecipeError for a LoRA rank above the smaller side of the site's matrix."""
    rank = by_pattern(site, section.rank_pattern, section.rank)
    if rank > min(site.shape):
        raise RecipeError(
            f"adapter.rank: {rank} is above {min(site.shape)}, the smaller side of {site.hf_name} "
            f"[{site.shape[0]}, {site.shape[1]}]: no matrix has a higher rank. Use at most {min(site.shape)}"
        )


def square_width(shape: tuple[int, int], rank: int, form: Form) -> int:
    """MoRA's w = sqrt(r (I + O)) rounded to the nearest integer; for rotation then down to an even one."""
    width = int(math.sqrt(sum(shape) * rank) + 0.5)
    return width // 2 * 2 if form == "rotation" else width


def _check_kind(site: Site, section: Any) -> None:
    """Raises RecipeError for an adapter other than plain LoRA on an embedding or experts, and for dropout on the head
    or experts."""
    if isinstance(section, sections.Prompt | sections.Prefix):
        return
    if site.experts is not None:
        _check_on_experts(site, section)
    if site.group == "embedding":
        low_rank = isinstance(section, sections.LowRank)
        if not low_rank or section.kind == "dora" or section.init not in ("default", "gaussian"):
            what = f"init: {section.init}" if low_rank and section.kind != "dora" else section.kind
            raise RecipeError(f"adapter.targets: {what} cannot sit on an embedding ({site.hf_name}). Use kind: lora")
    if site.group == "head" and getattr(section, "dropout", 0.0) > 0:
        raise RecipeError(
            "adapter.dropout: the head is multiplied together with its loss and has no dropout. "
            "Leave lm_head out of adapter.targets (adapter.modules_to_save trains it in full), or set dropout: 0"
        )


def _check_on_experts(site: Site, section: Any) -> None:
    """Raises RecipeError for settings that experts cannot have: an adapter other than plain LoRA, and dropout."""
    low_rank = isinstance(section, sections.LowRank)
    if not low_rank or section.kind == "dora" or section.init not in ("default", "gaussian"):
        what = f"init: {section.init}" if low_rank and section.kind != "dora" else section.kind
        raise RecipeError(
            f"adapter.targets: {what} cannot sit on the stacked matrices of experts ({site.hf_name}), for which PEFT "
            "has plain LoRA alone. Use kind: lora, or leave experts out of adapter.targets"
        )
    if section.dropout > 0:
        raise RecipeError(
            f"adapter.dropout: {section.dropout} cannot be applied to the inputs of experts ({site.hf_name}): masks go "
            "by token, and rows reach the experts without their tokens' places. Set dropout: 0, or leave experts out "
            "of adapter.targets"
        )


def _check_keys_of_heads(sites: Sequence[Site]) -> None:
    """Raises RecipeError for a prefix on a model of latent or factorized attention."""
    names = {site.name.rpartition(".")[2] for site in sites if site.group == "attention"}
    if in_steps := sorted(names & {"q_a_proj", "kv_a_proj"}):
        raise RecipeError(
            "adapter.kind: a prefix takes the place of keys and values of heads, which this model's latent or "
            f"factorized attention has not ({', '.join(in_steps)}). Use kind: prompt, or lora"
        )
    with_queries, with_keys = (
        {site.layer or 0 for site in sites if site.name.endswith(f".attention.{name}")} for name in ("q_proj", "k_proj")
    )
    if without := sorted(with_queries - with_keys):
        raise RecipeError(
            f"adapter.kind: a prefix takes the place of keys and values, and layer {without[0]} has none: it reads "
            "those of an earlier layer. Use kind: lora"
        )


def _check_square(site: Site, section: sections.Mora) -> None:
    """Raises RecipeError for a MoRA square that is wider than a layer has inputs."""
    inputs = site.shape[1]
    width = square_width(site.shape, section.rank, section.form)
    if not 1 <= width <= inputs:
        raise RecipeError(
            f"adapter.rank: {section.rank} makes a square of width {width} of {site.hf_name} "
            f"[{site.shape[0]}, {inputs}], which has {inputs} inputs. Use at most {inputs**2 // sum(site.shape)}"
        )


def _check_groups(site: Site, section: sections.QaLora) -> None:
    """Raises RecipeError for a site without groups of inputs that QA-LoRA could average."""
    if site.experts is not None or site.group == "embedding":
        raise RecipeError(
            f"adapter.targets: {site.hf_name} is no linear layer of its own, as qa-lora sits on. Leave it out"
        )
    if site.shape[1] % section.group:
        raise RecipeError(
            f"adapter.group: {section.group} does not divide the {site.shape[1]} inputs of {site.hf_name}. Use a "
            "divisor of all inputs that quantization.group divides"
        )


def _check_feedforward(chosen: Sequence[Site], section: sections.Ia3, sites: Sequence[Site]) -> None:
    """Raises RecipeError where (IA)^3 would rescale the inputs of some parts of a fused layer, but not of others."""
    names = {site.name for site in chosen}
    of_inputs = {site.name for site in select(sites, section.feedforward, key="adapter.feedforward")}
    for layer in hf_layers(sites):
        scaling_inputs = [site for site in layer.parts if site.name in names & of_inputs]
        if scaling_inputs and len(scaling_inputs) < len(layer.parts):
            raise RecipeError(
                f"adapter.feedforward: {layer.name} is one layer in Hugging Face folders, so its parts have the same "
                f"inputs: name {' and '.join(site.name for site in layer.parts)} in adapter.targets and in "
                "adapter.feedforward, or none of them in adapter.feedforward"
            )
