"""Rules about paths: names that no file system takes, missing files, an output folder that holds inputs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from danlu.core.shipped_files import templates
from danlu.core.spelling import did_you_mean
from danlu.recipe.messages import format_value
from danlu.recipe.sections import Data, EnvironmentSection, FunctionReward, Recipe, Source
from danlu.recipe.yaml_tree import Problem

FILE_TYPES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".bz2", ".xz", ".zst")
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""The limits of Linux and its file systems."""
MAX_NAMES = 2000
"""How many entries of a folder are looked through for the nearest name."""
SHIPPED_NAMES = ("base-model", "teacher-model", "tokenizer")
"""Models and tokenizers in the recipes that come with danlu, for a user to replace: they are not on the hub."""


def paths_are_valid(recipe: Recipe) -> Iterator[Problem]:
    """No path is one that no file system takes: Python raises other errors for it at each use."""
    for key, path in _paths(recipe).items():
        if (reason := invalid_path(path)) is not None:
            yield Problem(key, reason)


def output_is_separate(recipe: Recipe) -> Iterator[Problem]:
    """No input is the output folder or lies in it, where the run writes."""
    if invalid_path(recipe.output) is not None:
        return
    output = _absolute(recipe.output)
    for key, path in _input_paths(recipe).items():
        if invalid_path(path) is not None:
            continue
        absolute = _absolute(path)
        if absolute == output or output in absolute.parents:
            relation = "is" if absolute == output else "lies in"
            message = f"{key} ({path}) {relation} the output folder, where the run writes. Choose another output"
            yield Problem("output", message, reads=(key,))


def missing_files(recipe: Recipe) -> list[Problem]:
    """Paths that cannot be hub ids and are not there, each with the nearest name in its folder."""
    template = recipe.model.chat_template
    paths = {"model.chat_template": "" if template is None or template in templates() else template}
    paths |= _input_paths(recipe)
    local_only = {"model.config", "model.chat_template"}
    functions = (index for index, reward in enumerate(recipe.rewards or ()) if isinstance(reward, FunctionReward))
    local_only |= {f"rewards.{index}.path" for index in functions}
    local_only |= _environment_files(recipe.environment).keys()
    local_only |= {key for key in ("model.path", "model.tokenizer") if paths.get(key) in SHIPPED_NAMES}
    if recipe.stage == "classify":
        local_only |= {key for key, _ in sources_of(recipe.data)}
    return [
        replace(each, message=each.message + _template_hint(str(template)))
        if each.key == "model.chat_template"
        else each
        for each in missing_paths(paths, local_only)
    ]


def missing_paths(paths: Mapping[str, str], local_only: Collection[str] = ()) -> Iterator[Problem]:
    """Yields a problem for each path that is not there, by key, but for those that may be hub ids.

    local_only: keys of paths that are no hub ids, whatever they look like.
    """
    for key, path in paths.items():
        is_file = bool(path) and (key in local_only or is_local(path))
        if is_file and invalid_path(path) is None and not _exists(_absolute(path)):
            yield Problem(key, _not_there(_absolute(path), path))


def _template_hint(name: str) -> str:
    """The advice for a chat template that is neither a file nor one that comes with danlu."""
    names = list(templates())
    return f" Nor does danlu have one of this name.{did_you_mean(name, names)} It has {', '.join(names)}"


def is_local(path: str) -> bool:
    """Whether a path cannot be a hub id, which is `name` or `owner/name` without a file's suffix."""
    return (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or path.endswith("/")
        or path.lower().endswith(FILE_TYPES)
        or "\\" in path
    )


def file_of(source: Source) -> str:
    """The path without the `#500` that takes the first 500 rows."""
    path, mark, rows = source.path.rpartition("#")
    return path if mark and rows.isdecimal() else source.path


def sources_of(data: Data) -> Iterator[tuple[str, Source]]:
    """Every source of rows with the dotted key of its path, training before evaluation."""
    for index, source in enumerate(data.train):
        yield f"data.train.{index}.path", source
    for index, source in enumerate(data.eval if isinstance(data.eval, list) else []):
        yield f"data.eval.{index}.path", source


def invalid_path(path: str) -> str | None:
    """Why no file system takes a path, or None for a path that may exist."""
    if "\0" in path:
        return f"{format_value(path)} holds a NUL character, which no file name can. Take it out"
    if not path.strip():
        return f"{format_value(path)} is an empty path. Name a file or a folder, or leave the key out"
    if path.startswith("~"):
        try:
            Path(path).expanduser()
        except RuntimeError:
            user = path.partition("/")[0].removeprefix("~")
            reason = f"there is no user {user!r}" if user else "this user has no home folder"
            return f"{format_value(path)}: {reason}. Write the path in full"
    name_bytes, path_bytes = max(len(os.fsencode(name)) for name in path.split("/")), len(os.fsencode(path))
    if name_bytes > MAX_NAME_BYTES or path_bytes > MAX_PATH_BYTES:
        return (
            f"{format_value(path)} is too long: a name may have {MAX_NAME_BYTES} bytes and a path "
            f"{MAX_PATH_BYTES:,}, not {name_bytes if name_bytes > MAX_NAME_BYTES else path_bytes:,}"
        )
    return None


def _paths(recipe: Recipe) -> dict[str, str]:
    """Every path of a recipe, read or written, by its key."""
    paths: dict[str, object] = {
        "model.chat_template": recipe.model.chat_template,
        "data.cache": recipe.data.cache,
        "memory.folder": recipe.memory.folder,
        "optimizer.folder": getattr(recipe.optimizer, "folder", None),
        "output": recipe.output,
        "rollout.server.exchange_folder": recipe.rollout.server.exchange_folder,
    }
    paths |= {f"model.adapters.{index}": path for index, path in enumerate(recipe.model.adapters)}
    return {**_input_paths(recipe), **{key: path for key, path in paths.items() if isinstance(path, str)}}


def _input_paths(recipe: Recipe) -> dict[str, str]:
    """The models, tokenizers and data that a recipe reads, by key; some may be hub ids."""
    model = recipe.model
    paths = {"model.path": model.path, "model.config": model.config, "model.tokenizer": model.tokenizer}
    paths["reference.model"] = getattr(recipe.reference, "model", None)
    paths["value.model"] = getattr(recipe.value, "model", None)
    paths["rollout.draft.model"] = getattr(recipe.rollout.draft, "model", None)
    for index, reward in enumerate(recipe.rewards or ()):
        path = reward.file if isinstance(reward, FunctionReward) else getattr(reward, "path", None)
        paths[f"rewards.{index}.path"] = path
    paths |= _environment_files(recipe.environment)
    paths |= {f"teacher.{index}.model": teacher.model for index, teacher in enumerate(recipe.teacher or ())}
    paths |= {key: file_of(source) for key, source in sources_of(recipe.data)}
    return {key: path for key, path in paths.items() if isinstance(path, str)}


def _environment_files(environment: EnvironmentSection | None) -> dict[str, str]:
    """The files of the user's environment, agent or tools, by key."""
    return {} if environment is None else {f"environment.{key}": file for key, file in environment.files.items()}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _exists(path: Path) -> bool:
    """Whether a path exists, as far as this user may see: a hidden one says so itself when it is opened."""
    try:
        return path.exists()
    except OSError:
        return True


def _not_there(path: Path, written: str) -> str:
    """The message for a missing path: `written` as the recipe has it, `path` absolute."""
    folder = path.parent
    if not folder.is_dir():
        return f"no file or folder {written!r}: there is no folder {str(folder)!r}"
    try:
        names = [entry.name for entry in islice(folder.iterdir(), MAX_NAMES)]
    except OSError:  # a folder that may be entered but not listed
        names = []
    nearby = {name.lower(): str(Path(written).parent / name) for name in names}
    return f"no file or folder {written!r} in {str(folder)!r}.{did_you_mean(path.name, nearby)}"
