"""Advice for a flag that a verb does not have: a key of the recipe, or the name that another tool has for one."""

from __future__ import annotations

from collections.abc import Sequence

from danlu.recipe import other_tools
from danlu.recipe.explanation import keys


def advice(name: str, command: str, *, takes_overrides: bool, arguments: Sequence[str] = ()) -> str | None:
    """A sentence, without its full stop, on what to type in the place of `--name`; None where nothing is known of it.

    Args:
        command: the command that was typed, such as `danlu train`.
        takes_overrides: whether the command takes `section.key=value`.
        arguments: the names of what the command takes without a flag.
    """
    key = name.replace("-", "_")
    if key in arguments:
        return f"It is given without a flag: {command} {key.upper()}"
    if key in keys():
        return f"It is a key of the recipe: write {key}=VALUE, without dashes" if takes_overrides else None
    rows = other_tools.find(key)
    flags = [row for row in rows if row.is_command and row.target.startswith(f"{command} -")]
    if flags:
        return f"The flag is called {flags[0].target.removeprefix(f'{command} ')} here"
    if not takes_overrides or not rows:
        return None
    written = [row for row in rows if row.is_key]
    if len(written) == 1 and not written[0].parts[0]:
        return f"danlu's key for it is {written[0].target}: write {written[0].target}=VALUE, without dashes"
    return other_tools.advice(key)
