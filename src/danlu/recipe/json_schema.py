"""A JSON schema of the recipe for editors, which admits the short forms as well as the full ones."""

from __future__ import annotations

from typing import Any

from danlu.recipe import sections
from danlu.recipe.chain import CHAIN_KEYS, FROM, NAME, STAGES
from danlu.recipe.field_docs import field_docs
from danlu.recipe.other_stages import other_stages
from danlu.recipe.sections import Recipe, Section, curating, quantizing, synthesis
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.recipe.type_hints import entry_type, field_types, variants_of

_SECTIONS = (sections, curating, quantizing, synthesis)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file, also of one whose stage does not train (`stage: quantize`), or of a
    chain where the file has `stages`.
    """
    recipe_schema, definitions = _schema_of(Recipe)
    others, more = dict[str, dict[str, Any]](), dict[str, Any]()
    for other in other_stages():
        others[other.stage], own = _schema_of(other.root)
        more |= own
    properties = recipe_schema["properties"]
    properties["stage"]["enum"] += sorted(OBJECTIVE_NAMES)
    of_file = recipe_schema
    for stage, other_schema in others.items():
        of_file = {"if": _is_stage(stage), "then": other_schema, "else": of_file}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "danlu recipe",
        "if": {"required": [STAGES]},
        "then": _chain_schema(properties, definitions, others["quantize"]["properties"], _is_stage("quantize")),
        "else": of_file,
        "$defs": {**more, **definitions},
    }


def _is_stage(stage: str) -> dict[str, Any]:
    """The schema that recipes of a stage fulfil."""
    return {"properties": {"stage": {"const": stage}}, "required": ["stage"]}


def _schema_of(recipe: type[Section]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a recipe with its short forms, and those of its sections by name."""
    recipe_schema = recipe.model_json_schema()
    definitions: dict[str, Any] = recipe_schema.pop("$defs")
    _describe(recipe, recipe_schema["properties"])
    for name, definition in list(definitions.items()):
        section = next(getattr(module, name) for module in _SECTIONS if hasattr(module, name))
        _describe(section, definition["properties"])
        for old, present in section.old_names.items():
            definition["properties"][old] = {**definition["properties"][present], "deprecated": True}
        definition["properties"] = _admit_short_values(section, definition["properties"])
        definitions[name] = _admit_short_form(section, definition)
    recipe_schema["properties"] = _admit_short_values(recipe, recipe_schema["properties"])
    return recipe_schema, definitions


def _describe(section: type[Section], properties: dict[str, Any]) -> None:
    """Puts the documentation of each field into its schema."""
    for name, doc in field_docs(section).items():
        if doc:
            properties[name]["description"] = doc


def _chain_schema(
    properties: dict[str, Any], definitions: dict[str, Any], quantize: dict[str, Any], is_quantize: dict[str, Any]
) -> dict[str, Any]:
    """The schema of a chain: the keys of a recipe next to its stages, and in each of them; together they make a whole
    recipe. A stage that quantizes has the keys `quantize`.
    """
    rows_elsewhere = {key: value for key, value in definitions["Data"]["anyOf"][0].items() if key != "required"}
    shared = {**properties, "data": {"anyOf": [properties["data"], rows_elsewhere]}}
    about = {key: {"type": "string", "description": CHAIN_KEYS[f"{STAGES}.{key}"]} for key in (NAME, FROM)}

    def stage_with(keys: dict[str, Any], *required: str) -> dict[str, Any]:
        own = {key: value for key, value in {**keys, **about}.items() if key != "output"}
        return {"type": "object", "properties": own, "required": list(required), "additionalProperties": False}

    stage = {"if": is_quantize, "then": stage_with(quantize, "quantization"), "else": stage_with(shared)}
    stages = {"type": "array", "minItems": 1, "items": stage, "description": CHAIN_KEYS[STAGES]}
    return {
        "type": "object",
        "properties": {**shared, STAGES: stages},
        "required": [STAGES, "output"],
        "additionalProperties": False,
    }


def _admit_short_values(section: type[Section], properties: dict[str, Any]) -> dict[str, Any]:
    """Admits the short form of a section's fields: a `kind` alone, a bare value for a list of one."""
    admitted = dict(properties)
    for key, hint in field_types(section).items():
        entry_hint = entry_type(hint)
        if variants_of(hint):
            admitted[key] = _admit_kind_alone(properties[key], sorted(variants_of(hint)))
        elif entry_hint is not None and variants_of(entry_hint):
            kinds = sorted(variants_of(entry_hint))
            admitted[key] = _admit_single_entry(_with_entries(properties[key], kinds))
        else:
            admitted[key] = _admit_single_entry(properties[key])
    return admitted


def _with_entries(entry: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Admits a `kind` alone as an entry of a list of variants."""
    if "items" in entry:
        return {**entry, "items": _admit_kind_alone(entry["items"], kinds)}
    if "anyOf" in entry:
        return {**entry, "anyOf": [_with_entries(option, kinds) for option in entry["anyOf"]]}
    return entry


def _admit_single_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Admits a bare value, which is a list of one, where a list is taken."""
    if entry.get("type") == "array" and "items" in entry:
        about: dict[str, Any] = {key: entry[key] for key in ("title", "description", "default") if key in entry}
        bare = {key: value for key, value in entry.items() if key not in about}
        return {**about, "anyOf": [bare, entry["items"]]}
    if "anyOf" in entry:
        lists = [option for option in entry["anyOf"] if option.get("type") == "array" and "items" in option]
        return {**entry, "anyOf": [*entry["anyOf"], *(option["items"] for option in lists)]}
    return entry


def _admit_short_form(section: type[Section], definition: dict[str, Any]) -> dict[str, Any]:
    """Admits a section's short form, the value of its main field alone."""
    if section.short is None:
        return definition
    field = definition["properties"][section.short]
    short = {key: value for key, value in field.items() if key not in ("title", "default")}
    options = [definition, short]
    if section.switch is not None:
        options.append({"type": "boolean"})
    return {"title": definition["title"], "description": definition.get("description", ""), "anyOf": options}


def _admit_kind_alone(entry: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Admits each of a section's variants as a mapping, or its name alone.

    The variants' own short forms are not used here: as a bare value only a `kind` is taken.
    """
    about: dict[str, Any] = {key: entry[key] for key in ("description", "default") if key in entry}
    options = entry.get("anyOf", [entry])  # with a null next to them where the section may be left out
    variants = [variant for option in options for variant in option.get("oneOf", [option])]
    return {**about, "anyOf": [*variants, {"enum": names}]}
