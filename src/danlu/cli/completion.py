"""What could be typed next: verbs, options, keys of a recipe and their values, for bash, zsh and fish.

A shell's script hands over the line up to the cursor and gets one candidate a line, with what it means behind a tab.
Nothing heavy is imported: torch would make each Tab take seconds.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import typer

from danlu.errors import ResourceError
from danlu.recipe.explanation import first_sentence
from danlu.recipe.library import shipped
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.type_hints import (
    field_types,
    list_item_type,
    literal_values,
    section_types,
    union_members,
    variants_of,
)
from danlu.registry import VERBS

LINE = "_DANLU_LINE"
"""The environment variable with the line up to the cursor."""

MAX_PATHS = 200

# Values of options that are words, not paths, by the option's name.
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "install-completion": ("bash", "zsh", "fish"),
    "quantization": ("nf4", "fp4", "int8", "int4", "none"),
    "resume": ("auto", "never"),
    "show-completion": ("bash", "zsh", "fish"),
}
# Arguments whose words are keys of a recipe with values (`steps=100`), or keys alone.
OVERRIDES, KEY = "overrides", "key"

BASH = """\
_danlu_completion() {
    local candidate
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <(_DANLU_COMPLETE=bash _DANLU_LINE="${COMP_LINE:0:COMP_POINT}" "$1" 2>/dev/null)
    # A key goes on with its value, a folder with a file in it.
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=./] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _danlu_completion danlu
"""
ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_danlu() {
    local value about
    local -a going ending
    while IFS=$'\\t' read -r value about; do
        if [[ $value == *[=./] ]]; then
            going+=("${value//:/\\\\:}:$about")
        else
            ending+=("${value//:/\\\\:}:$about")
        fi
    done < <(_DANLU_COMPLETE=zsh _DANLU_LINE="${(j: :)words[1,CURRENT]}" ${words[1]} 2>/dev/null)
    (( $#going )) && _describe -t danlu danlu going -S ''
    (( $#ending )) && _describe -t danlu danlu ending
}
compdef _danlu danlu
"""
FISH = """\
function __danlu_complete
    set -lx _DANLU_COMPLETE fish
    set -lx _DANLU_LINE (commandline -cp | string collect)
    danlu 2>/dev/null
end
complete -c danlu -f -a '(__danlu_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class Candidate(NamedTuple):
    text: str
    about: str = ""


def script(shell: str) -> str:
    """What a shell sources. Raises typer.BadParameter for a shell that there is none for."""
    if shell not in SCRIPTS:
        raise typer.BadParameter(f"{shell!r}: there are scripts for {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def install(shell: str) -> str:
    """Writes the script below the home folder and has the shell read it. Returns what to do next.

    Raises typer.BadParameter for an unknown shell, ResourceError where nothing can be written.
    """
    text, home = script(shell), Path.home()
    if shell == "fish":  # reads this folder by itself
        file, startup = home / ".config" / "fish" / "completions" / "danlu.fish", None
    else:
        file, startup = home / ".local" / "share" / "danlu" / f"completion.{shell}", home / f".{shell}rc"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if startup is not None:
            quoted = shlex.quote(str(file))
            line = f"[ -f {quoted} ] && source {quoted}  # danlu's completion"
            present = startup.read_text(encoding="utf-8") if startup.is_file() else ""
            if line not in present.splitlines():
                with startup.open("a", encoding="utf-8") as appended:
                    appended.write(f"{'' if present.endswith(chr(10)) or not present else chr(10)}{line}\n")
    except OSError as error:
        raise ResourceError(f"{error.filename}: cannot be written: {error.strerror}") from None
    read = f", which {startup} reads" if startup is not None else ""
    return f"{file} written{read}: open a new {shell}, type `danlu ` and press Tab"


def answer(environ: Mapping[str, str]) -> str:
    """One candidate a line, as the script of the shell that asks reads it."""
    shell, line = environ.get("_DANLU_COMPLETE", ""), environ.get(LINE, "")
    words = split(line)
    current = words[-1] if words else ""
    found = list(candidates(words[1:]))
    if shell == "bash":
        # bash puts a candidate in the place of what stands behind the last of its word breaks.
        behind = max(current.rfind("="), current.rfind(":")) + 1
        return "".join(f"{_quoted(one.text[behind:])}\n" for one in found)
    return "".join(f"{one.text}\t{one.about}\n" for one in found)


def split(line: str) -> list[str]:
    """The words of a line, the last one up to the cursor: empty behind a space. An open quote ends where the line
    does."""
    for end in ("", "'", '"'):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not end and (not line or line[-1].isspace()) else words
    return line.split()


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w@%+=:,./~-]*", text) else shlex.quote(text)


def candidates(words: Sequence[str]) -> Iterator[Candidate]:
    """What the last of these words, which follow `danlu`, could become."""
    *before, current = words or [""]
    for one in _candidates(before, current):
        if one.text.startswith(current):
            yield one


def _candidates(before: Sequence[str], current: str) -> Iterable[Candidate]:
    from danlu.cli.main import command, group

    if not before:
        options = _options(group()) if current.startswith("-") else ()
        return (*(Candidate(name, verb.about) for name, verb in VERBS.items()), *options)
    if before[0].startswith("-"):
        return (Candidate(choice) for choice in CHOICES.get(before[0].lstrip("-"), ()))
    if before[0] not in VERBS:
        return ()
    found, rest, path = command(before[0], VERBS[before[0]].target), list(before[1:]), before[0]
    while below := getattr(found, "commands", None):
        if not rest:
            return (Candidate(name, _sentence(one.help)) for name, one in below.items())
        name = rest.pop(0)
        if name not in below:
            return ()
        found, path = below[name], f"{path} {name}"
    return _of_command(found, path, rest, current)


def _of_command(found: Any, path: str, before: Sequence[str], current: str) -> Iterable[Candidate]:
    """Of a verb's own options and arguments."""
    takes = {name: one for one in found.params for name in one.opts if one.param_type_name == "option"}
    valued = {name for name, one in takes.items() if not one.is_flag}
    if before and before[-1] in valued:
        return _values_of_option(before[-1].lstrip("-"), current)
    if current.startswith("-"):
        return _options(found)
    place, skip = 0, False
    for word in before:
        if skip or word in valued:
            skip = not skip
        elif not word.startswith("-"):
            place += 1
    arguments = [one for one in found.params if one.param_type_name == "argument"]
    if not arguments:
        return ()
    here = arguments[min(place, len(arguments) - 1)]
    if place >= len(arguments) and here.nargs == 1:
        return ()
    if here.name == OVERRIDES:
        return _overrides(current, only="data." if path == "eval" else "")
    if here.name == KEY:
        return (Candidate(one.text.rstrip("="), one.about) for one in _keys(current))
    if path == "recipes copy" and place == 0:
        return (Candidate(name, about) for name, about in shipped().items())
    return _paths(current, (".yaml", ".yml") if here.name == "recipe" else None)


def _values_of_option(name: str, current: str) -> Iterable[Candidate]:
    if name == "vary":
        return _overrides(current, only="")
    if name in CHOICES:
        return (Candidate(choice) for choice in CHOICES[name])
    return _paths(current, (".yaml", ".yml") if name == "recipe" else None)


def _options(found: Any) -> Iterator[Candidate]:
    for one in found.params:
        if one.param_type_name == "option":
            yield Candidate(max(one.opts, key=len), _sentence(one.help))
    yield Candidate("--help", "Show this verb's arguments and options")


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


def _overrides(current: str, *, only: str) -> Iterator[Candidate]:
    """Keys with an equals sign or a full stop behind; of a key that stands there, its values."""
    key, equals, _ = current.partition("=")
    if equals:
        yield from (Candidate(f"{key}={value}") for value in _values(key))
        return
    yield from (one for one in _keys(current) if one.text.startswith(only) or only.startswith(one.text))


def _keys(current: str) -> Iterator[Candidate]:
    """Keys at the level of what stands there; a section also with the full stop that leads into it."""
    above, _, _ = current.rpartition(".")
    seen: dict[str, Candidate] = {}
    for section in _sections(above):
        for name, hint in field_types(section).items():
            key = f"{above}.{name}" if above else name
            seen.setdefault(f"{key}=", Candidate(f"{key}=", first_sentence(section, name)))
            if section_types(hint) and list_item_type(hint) is None:
                seen.setdefault(f"{key}.", Candidate(f"{key}.", f"the keys of {key}"))
    yield from seen.values()


def _sections(above: str) -> list[type[Section]]:
    """The section classes at a dotted key: several where a `kind` chooses between them."""
    level: list[type[Section]] = [Recipe]
    for part in above.split(".") if above else ():
        level = [below for one in level if part in field_types(one) for below in section_types(field_types(one)[part])]
    return level


def _values(key: str) -> Iterator[str]:
    above, _, name = key.rpartition(".")
    found: dict[str, None] = {}
    for section in _sections(above):
        hint = field_types(section).get(name)
        if hint is not None:
            types = [branch for branch, _ in union_members(hint)]
            found |= dict.fromkeys(
                [*sorted(variants_of(hint)), *(one for one in literal_values(hint) if isinstance(one, str))]
            )
            found |= dict.fromkeys(["true", "false"] if bool in types else [])
            found |= dict.fromkeys(["null"] if type(None) in types else [])
    yield from found


def _paths(current: str, suffixes: tuple[str, ...] | None) -> Iterator[Candidate]:
    """Files (with one of these endings) and folders that what stands there could lead to."""
    folder, _, start = current.rpartition("/")
    above = f"{folder}/" if "/" in current else ""
    try:
        with os.scandir(os.path.expanduser(above) or ".") as entries:
            found = [one for one in entries if one.name.startswith(start) and one.name.isprintable()]
    except OSError:
        return
    wanted = (
        f"{above}{one.name}/" if one.is_dir() else f"{above}{one.name}"
        for one in sorted(found, key=lambda one: one.name)
        if (start or not one.name.startswith(".")) and (one.is_dir() or suffixes is None or one.name.endswith(suffixes))
    )
    yield from map(Candidate, islice(wanted, MAX_PATHS))
