"""Which layers of a model an adapter is put on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

from danlu.errors import RecipeError
from danlu.types import Site

GROUPS = {"all-linear": ("attention", "mlp"), "attention": ("attention",), "mlp": ("mlp",)}
_Value = TypeVar("_Value")


def select(sites: Sequence[Site], targets: Iterable[str], *, key: str = "adapter.targets") -> list[Site]:
    """The sites that targets name, in the model's order.

    A target is a group (all-linear, attention, mlp), the end of a module's name (`q_proj`, `self_attn.q_proj`,
    `layers.0.self_attn.q_proj`), here or as Hugging Face folders have it, or a regular expression that a whole name
    matches. Raises RecipeError for a target that matches nothing, with the names that are near.
    """
    chosen: set[str] = set()
    for target in targets:
        found = [site.name for site in sites if _matches(site, target)]
        if not found:
            raise RecipeError(f"{key}: {_nothing(sites, target)}")
        chosen.update(found)
    return [site for site in sites if site.name in chosen]


def _matches(site: Site, target: str) -> bool:
    if target in GROUPS:
        return site.group in GROUPS[target]
    return any(_ends_with(name, target) or _is_whole(target, name) for name in (site.name, site.disk_name))


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _is_whole(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise RecipeError(f"adapter.targets: {pattern!r} is no regular expression: {error}") from None


def _nothing(sites: Sequence[Site], target: str) -> str:
    names = sorted(
        {site.name.rpartition(".")[2] for site in sites} | {site.disk_name.rpartition(".")[2] for site in sites}
    )
    near = get_close_matches(target.rpartition(".")[2], [*names, *GROUPS], n=3, cutoff=0.5)
    hint = f" Near: {', '.join(near)}." if near else ""
    return f"{target!r} matches no layer of this model.{hint} There are {', '.join([*GROUPS, *names])}"


def by_pattern(site: Site, patterns: Mapping[str, _Value], default: _Value) -> _Value:
    """The value of the first pattern that a site's name on disk or here ends with or matches; PEFT's rank_pattern."""
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (site.disk_name, site.name)):
            return value
    return default


def unmatched(sites: Sequence[Site], patterns: Mapping[str, object]) -> list[str]:
    """Patterns that no site matches: most likely misspelt."""
    return [one for one in patterns if not any(by_pattern(site, {one: True}, False) for site in sites)]
