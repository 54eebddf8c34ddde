"""Forms of answers, one of each kind, and whether a text has one: of the grammars' own tests and those of servers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from danlu.inference.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

pytest.importorskip("llguidance")  # tests that import this are skipped without it

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "hen"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json": json_grammar(SCHEMA),
    "regex": regex_grammar("(ab|cd){3}/[0-9]"),
    "choice": choice_grammar(["yes", 'n"o}\n']),
    "rules": lark_grammar('start[capture="x"]: "<" /[a-z]/ ">"'),
}
"""Grammars by kind."""


def has_form(form: str, text: str) -> bool:
    """Whether a text follows a grammar, as an independent reading of it says."""
    if form == "json":
        value = json.loads(text)
        return set(value) == {"kind", "age"} and value["kind"] in ("fox", "hen") and 0 <= value["age"] <= 20
    patterns = {"regex": "(ab|cd){3}/[0-9]", "choice": 'yes|n"o}\n', "rules": "<[a-z]>"}
    return re.fullmatch(patterns[form], text) is not None
