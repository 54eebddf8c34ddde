"""The model that adapters sit on: finding it, and telling it from another. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from danlu.adapters.adapter_config import AdapterFolder
from danlu.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import fingerprint, read_config, read_json, resolve_folder

ORIGIN = "danlu.json"
"""File of a folder that danlu quantized: which model it was made from."""
ORIGIN_KEY = "quantized_from"
_SNAPSHOTS = "snapshots"


@dataclass(frozen=True)
class Base:
    """The model that adapters are trained on: what the recipe calls it, its folder, and its fingerprint."""

    named: str
    folder: Path
    fingerprint: str
    quantized_from: str | None = None
    """Fingerprint of the model that this one is in fewer bits: adapters of that one fit."""

    @property
    def revision(self) -> str | None:
        """The commit of a hub id, by which its snapshots are named; None of a folder that is no snapshot."""
        return self.folder.name if self.folder.parent.name == _SNAPSHOTS else None


def find_base(path: str | Path) -> Base:
    """Resolves the base that a recipe's `model.path` names; a local folder is named by its absolute path."""
    folder = resolve_folder(path)
    named = str(folder.resolve()) if Path(path).expanduser().is_dir() else str(path)
    origin = read_json(folder / ORIGIN).get(ORIGIN_KEY) if (folder / ORIGIN).is_file() else None
    return Base(named, folder, fingerprint(folder), origin)


def base_of(stack: Sequence[AdapterFolder], given: str | Path | None, option: str) -> Base:
    """Resolves the base of a stack of adapters: `given`, or else the one that the top adapter names.

    option: what the command line calls the given one, for messages.
    Raises ModelError where it is not there.
    """
    adapter = stack[-1]
    if given is not None:
        return find_base(given)
    if not adapter.base:
        raise ModelError(f"{adapter.path}: does not say which model it was trained on. Name it with {option} FOLDER")
    try:
        return find_base(adapter.base)
    except ModelError as error:
        raise ModelError(
            f"{adapter.path}: the model it was trained on cannot be had. {error}. Say where it is with {option} FOLDER"
        ) from None


def check_base(adapter: AdapterFolder, base: Base) -> None:
    """Raises ModelError for an adapter that is known to have been trained on another base."""
    trained_on = adapter.danlu.get("base_fingerprint")
    if trained_on is not None and trained_on not in (base.fingerprint, base.quantized_from):
        raise ModelError(
            f"{adapter.path}: was trained on another base ({adapter.base}) than {base.folder}: shapes may fit, weights "
            "do not. Use the base it was trained on"
        )


def config_with_adapters(folder: Path, adapters: Sequence[AdapterFolder]) -> ModelConfig:
    """The config of a model folder with adapters on it, lowest first: for the task of the topmost one that classifies.

    Raises ModelError as `read_config` does.
    """
    config = read_config(folder)
    tasks = [adapter.task for adapter in adapters if adapter.task != "causal-lm"]
    return replace(config, task=tasks[-1] if tasks else config.task)
