"""Shell completion for bash, zsh and fish: verbs, options, keys of a recipe and their values.

A shell's script passes the line up to the cursor and gets one candidate a line, with its meaning after a tab.
Nothing heavy is imported: torch would make each Tab take seconds.

typer's own completion does not replace this. Its script for bash splits `optimizer.kind=adam` at the equals sign and
then offers nothing, puts a space after `optimizer.`, and has no files for arguments; its classes are private.
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

from danlu.core.errors import ResourceError
from danlu.recipe.library import shipped
from danlu.recipe.messages import first_sentence
from danlu.recipe.type_hints import (
    entry_type,
    fields_at,
    fields_below,
    literal_values,
    section_types,
    union_members,
    variants_of,
)
from danlu.registry import VERBS

LINE = "_DANLU_LINE"
"""The environment variable with the line up to the cursor."""

MAX_PATHS = 200

# Values that options take, by the option's name; options that are not listed take paths.
CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "fp32", "bf16", "fp16"),
    "install-completion": ("bash", "zsh", "fish"),
    "quantization": ("nf4", "fp4", "int8", "int4", "int3", "int2", "fp8", "mxfp8", "mxfp4", "nvfp4", "none"),
    "resume": ("auto", "never"),
    "show-completion": ("bash", "zsh", "fish"),
}
# The names of arguments that are keys of a recipe with values (`steps=100`), or keys alone.
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
    """A text that the word under the cursor could become, and its meaning."""

    text: str
    about: str = ""


def script(shell: str) -> str:
    """The script that a shell sources. Raises typer.BadParameter for a shell that there is none for."""
    if shell not in SCRIPTS:
        raise typer.BadParameter(f"{shell!r}: there are scripts for {', '.join(SCRIPTS)}")
    return SCRIPTS[shell]


def install(shell: str) -> str:
    """Writes the script below the home folder and has the shell read it. Returns advice on the next step.

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
    sourced = f", which {startup} reads" if startup is not None else ""
    return f"{file} written{sourced}: open a new {shell}, type `danlu ` and press Tab"


def answer(environ: Mapping[str, str]) -> str:
    """One candidate a line, as the script of the shell that asks reads it."""
    shell, line = environ.get("_DANLU_COMPLETE", ""), environ.get(LINE, "")
    arguments = split(line)
    current = arguments[-1] if arguments else ""
    matches = list(candidates(arguments[1:]))
    if shell == "bash":
        # bash replaces only what follows the last of its word breaks.
        start = max(current.rfind("="), current.rfind(":")) + 1
        return "".join(f"{_quoted(candidate.text[start:])}\n" for candidate in matches)
    return "".join(f"{candidate.text}\t{candidate.about}\n" for candidate in matches)


def split(line: str) -> list[str]:
    """The arguments of a line, the last one up to the cursor: empty after a space. A quote that is open ends there."""
    for end in ("", "'", '"'):
        try:
            arguments = shlex.split(line + end)
        except ValueError:
            continue
        return [*arguments, ""] if not end and (not line or line[-1].isspace()) else arguments
    return line.split()


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[\w@%+=:,./~-]*", text) else shlex.quote(text)


def candidates(arguments: Sequence[str]) -> Iterator[Candidate]:
    """Yields completions of the last of these arguments, which follow `danlu`."""
    *previous, current = arguments or [""]
    for candidate in _candidates(previous, current):
        if candidate.text.startswith(current):
            yield candidate


def _candidates(previous: Sequence[str], current: str) -> Iterable[Candidate]:
    """Returns candidates that can follow the previous arguments; `current` only decides between options, keys and
    paths."""
    from danlu.cli.main import command, group

    if not previous:
        options = _options(group()) if current.startswith("-") else ()
        return (*(Candidate(name, verb.about) for name, verb in VERBS.items()), *options)
    verb, *rest = previous
    if verb.startswith("-"):
        return (Candidate(choice) for choice in CHOICES.get(verb.lstrip("-"), ()))
    if verb not in VERBS:
        return ()
    node, path = command(verb, VERBS[verb].target), verb
    while subcommands := getattr(node, "commands", None):
        if not rest:
            return (Candidate(name, first_sentence(subcommand.help)) for name, subcommand in subcommands.items())
        name = rest.pop(0)
        if name not in subcommands:
            return ()
        node, path = subcommands[name], f"{path} {name}"
    return _of_command(node, path, rest, current)


def _of_command(command: Any, path: str, previous: Sequence[str], current: str) -> Iterable[Candidate]:
    """Candidates for the options and arguments of a click command; `path` is its name with those above it."""
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    with_value = {name for option in options if not option.is_flag for name in option.opts}
    if previous and previous[-1] in with_value:
        return _values_of_option(previous[-1].lstrip("-"), current)
    if current.startswith("-"):
        return _options(command)
    index, skip = 0, False  # of the positional argument under the cursor; whether the next word is an option's value
    for word in previous:
        if skip or word in with_value:
            skip = not skip
        elif not word.startswith("-"):
            index += 1
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    if not arguments:
        return ()
    argument = arguments[min(index, len(arguments) - 1)]
    if index >= len(arguments) and argument.nargs == 1:
        return ()
    if argument.name == OVERRIDES:
        return _overrides(current, only="data." if path == "eval" else "")
    if argument.name == KEY:
        return (Candidate(candidate.text.rstrip("="), candidate.about) for candidate in _keys(current))
    if path == "recipes copy" and index == 0:
        return (Candidate(name, about) for name, about in shipped().items())
    return _paths(current, (".yaml", ".yml") if argument.name == "recipe" else None)


def _values_of_option(name: str, current: str) -> Iterable[Candidate]:
    if name == "vary":
        return _overrides(current, only="")
    if name in CHOICES:
        return (Candidate(choice) for choice in CHOICES[name])
    if name == "on":
        return (*_clusters(current), *_paths(current, (".yaml", ".yml")))
    return _paths(current, (".yaml", ".yml") if name == "recipe" else None)


def _clusters(current: str) -> Iterator[Candidate]:
    """Kinds of cards behind the numbers of nodes and cards that are typed."""
    from danlu.planning.cards import CARDS  # here: no other completion needs it

    numbers = re.match(r"(\d+x)*", current)
    assert numbers is not None, "no number matches too"
    yield from (Candidate(f"{numbers[0]}{card.name}") for card in CARDS)


def _options(command: Any) -> Iterator[Candidate]:
    """The options of a click command, by their long names."""
    for parameter in command.params:
        if parameter.param_type_name == "option":
            yield Candidate(max(parameter.opts, key=len), first_sentence(parameter.help))
    yield Candidate("--help", "Show this verb's arguments and options")


def _overrides(current: str, *, only: str) -> Iterator[Candidate]:
    """Keys followed by an equals sign or a full stop; after an equals sign, the values of the key."""
    key, equals, _ = current.partition("=")
    if equals:
        yield from (Candidate(f"{key}={value}") for value in _values(key))
        return
    yield from (each for each in _keys(current) if each.text.startswith(only) or only.startswith(each.text))


def _keys(current: str) -> Iterator[Candidate]:
    """Keys at the level of the one under the cursor; a section also with the full stop that leads into it."""
    seen: dict[str, Candidate] = {}
    for field in fields_below(current.rpartition(".")[0], through_lists=False):
        seen.setdefault(f"{field.key}=", Candidate(f"{field.key}=", first_sentence(field.about)))
        if section_types(field.hint) and entry_type(field.hint) is None:
            seen.setdefault(f"{field.key}.", Candidate(f"{field.key}.", f"the keys of {field.key}"))
    yield from seen.values()


def _values(key: str) -> Iterator[str]:
    """The values that a key takes, of those that can be listed: kinds, literals, true, false, null."""
    values: dict[str, None] = {}
    for field in fields_at(key, through_lists=False):
        members = [member for member, _ in union_members(field.hint)]
        texts = [value for value in literal_values(field.hint) if isinstance(value, str)]
        values |= dict.fromkeys([*sorted(variants_of(field.hint)), *texts])
        values |= dict.fromkeys(["true", "false"] if bool in members else [])
        values |= dict.fromkeys(["null"] if type(None) in members else [])
    yield from values


def _paths(current: str, suffixes: tuple[str, ...] | None) -> Iterator[Candidate]:
    """Yields folders, and files (with one of these suffixes), that begin with the typed text; hidden ones only after a
    dot."""
    folder, _, start = current.rpartition("/")
    parent = f"{folder}/" if "/" in current else ""
    try:
        with os.scandir(os.path.expanduser(parent) or ".") as entries:
            matches = [entry for entry in entries if entry.name.startswith(start) and entry.name.isprintable()]
    except OSError:
        return
    paths = (
        f"{parent}{entry.name}/" if entry.is_dir() else f"{parent}{entry.name}"
        for entry in sorted(matches, key=lambda entry: entry.name)
        if (start or not entry.name.startswith("."))
        and (entry.is_dir() or suffixes is None or entry.name.endswith(suffixes))
    )
    yield from map(Candidate, islice(paths, MAX_PATHS))
