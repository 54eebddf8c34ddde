"""Problems that several rules find: settings that a layout does not have, names of functions, addresses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from danlu.recipe.yaml_tree import Problem


def refusals(reasons: Iterable[tuple[str, str, str]], otherwise: str, reads: str) -> Iterator[Problem]:
    """Yields a problem for each (key, reason, remedy). otherwise: another remedy; reads: the deciding key."""
    for key, reason, instead in reasons:
        yield Problem(key, f"{reason}. {instead}, or {otherwise}", reads=(reads,))


def path_problem(path: str, kind: str, example: str) -> str | None:
    """The message for the path of a function or a class that names no file of Python, or nothing in it."""
    file, _, name = path.rpartition(":")
    if file.endswith(".py") and name.isidentifier():
        return None
    return f"{path!r} names no {kind}: write its file and its name, as in {example}"


def address_problem(url: str) -> str | None:
    """The message for a URL that is none of HTTP."""
    if url.startswith(("http://", "https://")):
        return None
    return f"{url!r} is no address of a server: it begins with http:// or https://"
