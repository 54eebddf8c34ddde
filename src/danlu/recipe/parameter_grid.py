"""The grid of a study: `--vary KEY=VALUE,VALUE` and `--seeds 0,1` parsed into combinations of recipe overrides."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from danlu.errors import RecipeError

SEED = "seed"
"""The key whose values repeat the same experiment: results are averaged over it."""
MAX_CHARACTERS = 40  # of a value in a folder's name

_OPENING, _CLOSING = "([{", ")]}"
_EXAMPLE = "--vary adapter.rank=4,8,16"


@dataclass(frozen=True)
class VariedKey:
    """One key and the values it takes in turn, as they were written."""

    argument: str  # --vary 'adapter.rank=4,8'
    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One run of a study: a value for each key that varies, and the name of its folder."""

    name: str
    values: Mapping[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


def parse_vary_options(vary: Sequence[str], seeds: str | None) -> list[VariedKey]:
    """What `--vary KEY=VALUE,VALUE` (any number of them) and `--seeds 0,1,2` say; commas in brackets do not split.

    Raises RecipeError with a line for each argument that cannot be meant.
    """
    given = [(f"--vary {text!r}", text) for text in vary]
    given += [] if seeds is None else [(f"--seeds {seeds!r}", f"{SEED}={seeds}")]
    if not given:
        raise RecipeError(f"nothing varies: say what does, for example {_EXAMPLE}, or --seeds 0,1,2")
    problems, found = [], []
    for argument, text in given:
        key, equals, values = (part.strip() for part in text.partition("="))
        one = VariedKey(argument, key, tuple(_split(values)))
        found.append(one)
        if not key or not equals or not all(one.values):
            problems.append(f"{argument}: write a key and its values, for example {_EXAMPLE}")
        elif key == "output":
            problems.append(f"{argument}: every run has a folder of its own in the recipe's output already")
        problems += [f"{argument}: {value} is given twice" for value, n in Counter(one.values).items() if n > 1]
    for key, n in Counter(one.key for one in found).items():
        if n > 1:
            arguments = " and ".join(one.argument for one in found if one.key == key)
            problems.append(f"{arguments}: both vary {key}. Give its values in one")
    if problems:
        raise RecipeError(problems)
    return found


def _split(text: str) -> Iterator[str]:
    """At commas that no bracket and no quotes enclose."""
    depth, quote, start = 0, "", 0
    for index, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
        elif sign == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


def parameter_grid(varied: Sequence[VariedKey]) -> list[Combination]:
    """Every combination of the values; the last key changes fastest."""
    words = short_keys([one.key for one in varied])
    made = []
    for values in product(*(one.values for one in varied)):
        name = "_".join(f"{word}-{_in_a_name(value)}" for word, value in zip(words, values, strict=True))
        made.append(Combination(name, dict(zip((one.key for one in varied), values, strict=True))))
    return made


def short_keys(keys: Sequence[str]) -> list[str]:
    """`rank` for `adapter.rank`, where no other of the keys ends so."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return [key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys]


def _in_a_name(value: str) -> str:
    """A value as part of a folder's name; one that had to be changed for it is told apart by a hash."""
    plain = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-")
    plain = plain[-MAX_CHARACTERS:]  # of a path the end says most
    return plain if plain == value else f"{plain}-{hashlib.sha256(value.encode()).hexdigest()[:6]}".strip("-")
