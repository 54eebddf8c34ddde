"""Counts where the keys of other tools' published recipes lead: a table by tool.

Run it with a folder of recipes, one folder a tool (`llama-factory`, `trl`, `axolotl`, `torchtune`):

    python docs/scripts/keys_of_recipes.py FOLDER            # the table of benchmarks/RESULTS.md
    python docs/scripts/keys_of_recipes.py FOLDER --by-hand  # the keys with values that no rule converts
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from danlu.recipe.other_tools import BY_ITSELF, NOT_THERE, TITLES, ForeignKey, of_tool
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.registry import STAGE_WORDS

TOOLS = ("llama-factory", "trl", "axolotl", "torchtune")
CONVERTED, BY_HAND, NOWHERE = "key or flag, value converted", "key, value by hand", "nowhere"
COLUMNS = (CONVERTED, BY_HAND, BY_ITSELF, NOT_THERE, NOWHERE)


class Use(NamedTuple):
    """A key with its value in one file, and where it leads."""

    tool: str
    file: str
    key: str
    value: Any
    row: ForeignKey | None
    leads: str  # one of COLUMNS


def uses(folder: Path) -> Iterator[Use]:
    """Every key of every file."""
    for tool in TOOLS:
        for file in sorted((folder / tool).iterdir()):
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
            stage = _stage(content)
            for key, value in leaves(content):
                row = of_tool(tool, key, stage) or (of_tool("accelerate", key) if tool == "trl" else None)
                yield Use(tool, file.name, key, value, row, _leads(row, value, content))


def _leads(row: ForeignKey | None, value: Any, content: dict[str, Any]) -> str:
    if row is None:
        return NOWHERE
    if row.target in (BY_ITSELF, NOT_THERE):
        return row.target
    return BY_HAND if row.convert(value, content) is None else CONVERTED


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a configuration with their values, sections included, without the indices of lists."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            for name, below in each.items():
                inner = f"{key}.{name}" if key else str(name)
                yield inner, below
                yield from leaves(below, inner)


def _stage(content: dict[str, Any]) -> str:
    """danlu's stage for a file that says its own; "" where it says none."""
    word = str(content.get("stage") or content.get("rl") or "")
    stage = STAGE_WORDS.get(word, ("", ""))[0]
    return OBJECTIVE_NAMES.get(stage, (stage, ""))[0]


def table(found: list[Use]) -> str:
    """Occurrences, and in brackets distinct keys, by tool and by where they lead."""
    lines = [f"| tool | files | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 2)}"]
    for tool in TOOLS:
        own = [use for use in found if use.tool == tool]
        cells = [
            (sum(use.leads == each for use in own), {use.key for use in own if use.leads == each}) for each in COLUMNS
        ]
        shown = [f"{count:,} ({len(names)})" if count else "0" for count, names in cells]
        lines.append(f"| {TITLES[tool]} | {len({use.file for use in own})} | {' | '.join(shown)} |")
    return "\n".join(lines)


def by_hand(found: list[Use]) -> str:
    """The keys that are to be written by hand, the most frequent first, each with one of its values."""
    own = [use for use in found if use.leads == BY_HAND]
    counts = Counter((use.tool, use.key) for use in own)
    values = {(use.tool, use.key): use.value for use in own}
    return "\n".join(
        f"{count:4} {tool}: {key} -> {of_tool(tool, key).target}, as {str(values[tool, key])[:60]!r}"  # type: ignore[union-attr]
        for (tool, key), count in counts.most_common()
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--by-hand", action="store_true")
    given = arguments.parse_args()
    found = list(uses(given.folder))
    sys.stdout.write(f"{by_hand(found) if given.by_hand else table(found)}\n")
