"""The grid of a study: `--vary KEY=VALUE,VALUE` and `--seeds 0,1` parsed into combinations of recipe overrides."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from danlu.core.errors import RecipeError

SEED = "seed"
"""The key with values that repeat the same experiment: results are averaged over it."""
MAX_VALUE_CHARACTERS = 40  # of a value in a folder's name

_OPENING, _CLOSING = "([{", ")]}"
_EXAMPLE = "--vary adapter.rank=4,8,16"


@dataclass(frozen=True)
class VariedKey:
    """One key and the values it takes in turn, as they were written."""

    argument: str  # the option on the command line, for messages: "--vary 'adapter.rank=4,8'"
    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One run of a study: a value for each key that varies, and the name of its folder."""

    name: str
    values: Mapping[str, str]

    @property
    def overrides(self) -> list[str]:
        """The values as overrides of a recipe: `adapter.rank=4`."""
        return [f"{key}={value}" for key, value in self.values.items()]


def parse_vary_options(vary: Sequence[str], seeds: str | None) -> list[VariedKey]:
    """The keys and values of `--vary KEY=VALUE,VALUE` (any number of them) and `--seeds 0,1,2`.

    Commas inside brackets and quotes belong to a value. Raises RecipeError with a line for each wrong argument.
    """
    arguments = [(f"--vary {text!r}", text) for text in vary]
    arguments += [] if seeds is None else [(f"--seeds {seeds!r}", f"{SEED}={seeds}")]
    if not arguments:
        raise RecipeError(f"nothing varies: say what does, for example {_EXAMPLE}, or --seeds 0,1,2")
    problems, varied = [], []
    for argument, text in arguments:
        key, equals, written = (part.strip() for part in text.partition("="))
        values = tuple(_split_at_commas(written))
        varied.append(VariedKey(argument, key, values))
        if not key or not equals or not all(values):
            problems.append(f"{argument}: write a key and its values, for example {_EXAMPLE}")
        elif key == "output":
            problems.append(f"{argument}: every run has a folder of its own in the recipe's output already")
        problems += [f"{argument}: {value} is given twice" for value, count in Counter(values).items() if count > 1]
    for key, count in Counter(entry.key for entry in varied).items():
        if count > 1:
            clashing = " and ".join(entry.argument for entry in varied if entry.key == key)
            problems.append(f"{clashing}: both vary {key}. Give its values in one")
    if problems:
        raise RecipeError(problems)
    return varied


def _split_at_commas(text: str) -> Iterator[str]:
    """The parts between commas that no bracket and no quotes enclose, without white space around them."""
    depth, quote, start = 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def parameter_grid(varied: Sequence[VariedKey]) -> list[Combination]:
    """Every combination of the values; the last key changes fastest."""
    keys = [entry.key for entry in varied]
    combinations = []
    for values in product(*(entry.values for entry in varied)):
        parts = [f"{key}-{_folder_part(value)}" for key, value in zip(short_keys(keys), values, strict=True)]
        combinations.append(Combination("_".join(parts), dict(zip(keys, values, strict=True))))
    return combinations


def short_keys(keys: Sequence[str]) -> list[str]:
    """The last part of each key (`rank` for `adapter.rank`), or all of it where two keys end alike."""
    names = Counter(key.rpartition(".")[2] for key in keys)
    return [key if names[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys]


def _folder_part(value: str) -> str:
    """Returns a value as part of a folder's name; one that had to be changed for it is distinguished by a hash."""
    plain = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-")
    plain = plain[-MAX_VALUE_CHARACTERS:]  # the end of a path says most
    return plain if plain == value else f"{plain}-{hashlib.sha256(value.encode()).hexdigest()[:6]}".strip("-")
