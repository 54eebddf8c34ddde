"""Writes the tables of pages such as recipe.md, quantization.md, curation.md and synthesis.md from the recipe's types.

Run as `python docs/scripts/recipe_tables.py`. A table stands between `<!-- table: NAME -->` and `<!-- end -->`, where
NAME is a section of the recipe, `recipe` for the keys that are no section, `quantize` or another stage that does not
train for the keys of its recipes, `stages` for defaults that follow from the stage, or `harmless` for what may change
while a run goes on. The prose around it is left alone.
A test fails when a page and the types differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from danlu.recipe.diff import HARMLESS
from danlu.recipe.other_stages import other_stages
from danlu.recipe.sections import Recipe, Section, Source
from danlu.recipe.sections.curating import CurateRecipe, QualityStep
from danlu.recipe.stage_defaults import STAGE_DEFAULTS, STAGE_KEYS, stage_values
from danlu.recipe.type_hints import (
    RecipeField,
    entry_type,
    fields_at,
    fields_of,
    literal_values,
    subsection_types,
    variants_of,
    walk_fields,
)

DOCS = Path(__file__).resolve().parents[1]
PAGES = ("recipe.md", "checkpoints.md", "quantization.md", "curation.md", "synthesis.md")
TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The page with every table as the types have it now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{_tables(found['name'])}\n{found[3]}", page)


def _tables(name: str) -> str:
    if name == "harmless":
        return "\n".join(["| key | why |", "|---|---|", *(f"| `{key}` | {why} |" for key, why in HARMLESS.items()), ""])
    if name == "stages":
        return _stage_table()
    if name == "curate":
        return "\n".join(_curate_tables())
    if (other := next((each for each in other_stages() if each.stage == name), None)) is not None:
        return "\n".join(_tables_of_stage(other.root))
    if name == "recipe":
        simple = [field for field in fields_of(Recipe) if not subsection_types(field.hint)]
        return _table((field.key, _default(field), _about(field)) for field in simple)
    hint = fields_at(name)[0].hint
    hint = entry_type(hint) or hint
    variants = variants_of(hint)
    if variants:
        return "\n".join(_variants(name, variants))
    return _table(_rows(walk_fields(hint, name)))


def _stage_table() -> str:
    """Lists the defaults of each stage, with all weights trained and with an adapter."""
    lines = ["| stage | learning rate of AdamW | with an adapter | weight decay | schedule | warm-up | batch |"]
    lines.append("|---|---|---|---|---|---|---|")
    for stage, each in STAGE_DEFAULTS.items():
        decay = dict(stage_values(stage, has_adapter=False))["optimizer.weight_decay"]
        rates = f"`{each.rate:.0e}` | `{each.adapter_rate:.0e}`".replace("e-0", "e-")
        lines.append(
            f"| {stage} | {rates} | {decay} | {each.schedule} | {each.warmup} | {each.batch} {each.batch_unit} |"
        )
    return "\n".join([*lines, ""])


def _tables_of_stage(root: type[Section]) -> Iterator[str]:
    """The keys of a recipe whose stage does not train, then those of each of its steps; without those of sources, and
    of sections of a step that the recipe has too or that another page has."""
    steps = next(field for field in fields_of(root) if variants_of(entry_type(field.hint)))
    fields = list(walk_fields(root))
    sources = tuple(f"{field.key}." for field in fields if entry_type(field.hint) is Source)
    yield _table(_rows(field for field in fields if not field.key.startswith((f"{steps.key}.", *sources))))
    yield from _variants(
        steps.key, variants_of(entry_type(steps.hint)), (f"{steps.key}.model.", f"{steps.key}.rewards.")
    )


def _curate_tables() -> Iterator[str]:
    """The keys of a recipe of stage curate, then those of each step, and of each set of rules."""
    yield _table(_rows(field for field in walk_fields(CurateRecipe) if "." not in field.key))
    hint = next(field.hint for field in fields_of(CurateRecipe) if field.key == "steps")
    for kind, step in variants_of(entry_type(hint)).items():
        yield f"`{kind}`: {(step.__doc__ or '').strip()}\n"
        own = [field for field in fields_of(step) if field.key != "kind"]
        inner = [field for each in own if not entry_type(each.hint) for field in fields_of(each.hint, each.key)]
        yield _table(_rows([*own, *inner]))
    rules = next(field.hint for field in fields_of(QualityStep) if field.key == "rules")
    yield from _variants("rules", variants_of(entry_type(rules)))


def _variants(name: str, variants: Mapping[str, type[Section]], skipped: tuple[str, ...] = ()) -> Iterator[str]:
    """Each variant's table; one with the keys of an earlier one has only what differs from it. skipped: what keys begin
    with that are left out."""
    shown: dict[str, dict[str, tuple[str, str, str]]] = {}
    for kind, variant in variants.items():
        fields = (
            field
            for field in walk_fields(variant, name)
            if field.key != f"{name}.kind" and not field.key.startswith(skipped)
        )
        rows = {row[0]: row for row in _rows(fields)}
        alike = (other for other, theirs in shown.items() if rows.keys() >= theirs.keys() and len(theirs) > 3)
        like = next(alike, None)
        heading = f"`{kind}`: {(variant.__doc__ or '').strip()}"
        if not rows:
            yield f"{heading}\n"
        elif like is None:
            yield f"{heading}\n\n{_table(iter(rows.values()))}"
        else:
            different = [row for key, row in rows.items() if row != shown[like].get(key)]
            but = f", but:\n\n{_table(iter(different))}" if different else ".\n"
            yield f"{heading} Keys as for `{like}`{but}"
        shown[kind] = rows


def _rows(fields: Iterable[RecipeField]) -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning) of each field."""
    for field in fields:
        by_stage = " ([by stage](#defaults-by-stage))" if field.key in STAGE_KEYS else ""
        if not field.key.startswith("data.eval."):  # the same sources as those of data.train
            yield field.key, f"{_default(field)}{by_stage}".strip(), _about(field)


def _default(field: RecipeField) -> str:
    if field.info.is_required():
        return "required"
    default = field.info.default
    if isinstance(default, Section):
        return "see below"
    if default is None:
        return ""
    default = list(default) if isinstance(default, tuple) else default
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _about(field: RecipeField) -> str:
    text = field.about.replace("|", r"\|")
    words = [option for option in literal_values(field.hint) if isinstance(option, str)]
    if all(word in text for word in words):
        return text
    return f"{text} One of {', '.join(f'`{word}`' for word in words)}.".strip()


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"| `{key}` | {default} | {about} |" for key, default, about in rows]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *lines, ""])


if __name__ == "__main__":
    for name in PAGES:
        page = DOCS / name
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
