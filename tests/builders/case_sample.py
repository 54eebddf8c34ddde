"""The cases of a parametrized test that `make test` runs: a third, in which every value of each parameter occurs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from zlib import crc32

SHARE = 3
"""One case of so many is in a sample."""


def sample(ids: Sequence[str]) -> set[str]:
    """A third of the ids, and as many as it takes that every word of them occurs.

    Pytest joins the values of parameters with "-": a word is such a value, or a part of the name of a case. So each
    value of each parameter is in the sample, and what is left out are some of their products. Chosen is, one after the
    other, the id with most words that none so far has; where several have as many, their checksum decides.
    """
    rest = sorted(ids, key=lambda each: crc32(each.encode()))
    missing = set().union(*map(_words, ids))
    chosen: set[str] = set()
    while rest and (missing or len(chosen) < math.ceil(len(ids) / SHARE)):
        best = max(rest, key=lambda each: len(_words(each) & missing))
        rest.remove(best)
        chosen.add(best)
        missing -= _words(best)
    return chosen


def _words(case_id: str) -> set[str]:
    return set(re.split(r"[-, ]+", case_id))
