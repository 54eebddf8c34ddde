"""Names of the package are the field's: coined ones do not come back.

A name that only its author can read (`one`, `held`, `told`) costs each reader a search. Those that were replaced are
listed with what the field says instead; a legitimate use is listed with its reason.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "danlu"

WHOLE_NAMES = {
    "one": "what it holds: parameter, row, tensor, ...",
    "many": "what it holds: by_rank, items, ...",
    "few": "what it holds: the first rows, samples, ...",
    "found": "what was found: matches, resolved_model, config, ...",
    "told": "what was said: message, notes, warned, ...",
    "words": "vocab_size, tokenizer_folder, message, text",
    "first_word": "vocab_start",
    "held": "local_parameter, local_rows, shard",
    "piece": "shard, shard_box, chunk, fragment",
    "pieces": "shards, shard_boxes, chunks, fragments",
    "across": "the process group it is: tensor_group, data_group",
    "away": "offloaded, prefetched",
    "remade": "recomputed",
    "sent": "traffic, bytes_sent",
    "mine": "local, own",
    "theirs": "reference, other_config, ...",
    "spread": "data_parallel, parallel_context, process_group",
    "made": "what was made: adapters, batch, ...",
    "likeness": "proxy",
    "feeding": "data",
    "wording": "chat_tokenizer, template",
    "voices": "adapters",
    "meeting": "rendezvous",
    "joining": "process_group, init_process_group",
    "endings": "exit_reports",
    "hangs": "watchdog",
    "say": "log",
    "doubts": "warnings",
    "dealing": "batch_sharding",
    "material": "stage_data",
    "strangers": "other files",
}
"""Identifiers in whole, without underscores at their ends and in any case: what to call them instead."""

PARTS = {
    "likeness": "proxy",
    "remade": "recomputed",
    "stirred": "perturbed",
    "voices": "adapters",
    "wording": "chat_tokenizer, template",
    "told": "message, notified, warned",
}
"""Words within identifiers (`remade_before`, `NoLikeness`)."""

_OF_TEXTS = "the words of a text, which are what is counted"
ALLOWED = {
    ("curation/decontaminate.py", "words"): _OF_TEXTS,
    ("curation/duplicates.py", "words"): _OF_TEXTS,
    ("curation/near_duplicates.py", "words"): _OF_TEXTS,
    ("curation/quality/gopher.py", "words"): _OF_TEXTS,
    ("curation/quality/c4.py", "words"): _OF_TEXTS,
    ("curation/quality/repetition.py", "words"): _OF_TEXTS,
    ("curation/word_hashes.py", "words"): _OF_TEXTS,
    ("production/synthesis/steps.py", "made"): "a key of users' recipes: the tasks that were made, next to seeds",
    ("recipe/sections/synthesis.py", "made"): "a key of users' recipes: the tasks that were made, next to seeds",
    ("recipe/curate_recipe.py", "words"): _OF_TEXTS,
    ("recipe/sections/curating.py", "words"): _OF_TEXTS,
    ("data/tokenizer_conversion.py", "piece"): "SentencePiece's word for an entry of its vocabulary",
    ("data/tokenizer_conversion.py", "pieces"): "SentencePiece's field of them",
}
"""(file, identifier): the reason."""

FILE_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common", "stuff"}


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that a file gives or uses, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.keyword(arg=str(name)):
                yield name, node.value.lineno


def words(identifier: str) -> set[str]:
    """`NoLikeness` and `no_likeness` have the words no and likeness."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return set(spaced.lower().split("_"))


@functools.cache
def better_name(identifier: str) -> str | None:
    """What to say instead of a coined identifier."""
    of_parts = (PARTS[word] for word in sorted(words(identifier) & PARTS.keys()))
    return WHOLE_NAMES.get(identifier.strip("_").lower()) or next(of_parts, None)


def coined(source: str, file: str = "") -> list[str]:
    """A line for each coined identifier of a file."""
    lines = {}
    for name, line in identifiers(ast.parse(source)):
        instead = better_name(name)
        if instead is not None and (file, name) not in ALLOWED:
            lines.setdefault(name, f"{file}:{line}: {name}: say what it is ({instead})")
    return list(lines.values())


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_no_coined_names(room: str) -> None:
    paths = sorted((SOURCE / room).rglob("*.py")) or [SOURCE / room]
    wrong = [line for path in paths for line in coined(path.read_text(), str(path.relative_to(SOURCE)))]
    assert not wrong, "\n".join(wrong)


def test_no_file_is_named_after_nothing() -> None:
    assert not [path for path in SOURCE.rglob("*.py") if path.stem in FILE_NAMES]


def test_reasons_are_given_for_names_that_are_there() -> None:
    for (file, name), reason in ALLOWED.items():
        assert reason and name in {name for name, _ in identifiers(ast.parse((SOURCE / file).read_text()))}


def test_coined_names_are_found_wherever_they_stand() -> None:
    source = """
class NoLikeness:
    def told(self, one, *, held_out, _held=None):
        self.remade_before = call(found=1)
        oneself = stones = 1
"""
    assert {line.split(": ")[1] for line in coined(source)} == {
        "NoLikeness", "told", "one", "_held", "remade_before", "found"
    }  # fmt: skip
