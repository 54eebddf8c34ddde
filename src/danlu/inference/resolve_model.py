"""Resolves a path or id on the command line to folders: of a model, or of adapters and their base model. No torch here.

torch takes a second to import. A mistyped folder, or a base that is not there, is reported without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from danlu.adapters.adapter_config import CONFIG, AdapterFolder, adapter_stack, is_adapter
from danlu.assembly.base_model import (
    Base,
    base_of,
    check_base,
    check_same_rotation,
    config_with_adapters,
    find_base,
    with_rows_of,
)
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.data.tokenizer_folder import resolve_tokenizer_folder
from danlu.inference.generation_config import find_model
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import CONFIG as MODEL_CONFIG
from danlu.models.hf_folder import read_config

Stack = tuple[AdapterFolder, ...]
"""An adapter, last, after those that it was trained on top of, lowest first."""


@dataclass(frozen=True)
class ResolvedModel:
    """The folders that a model is loaded from."""

    given_path: Path
    """The folder that the path or id stands for: of a model, or of an adapter."""
    folder: Path
    """The folder of the weights: the model's, or the base's."""
    tokenizer_folder: Path
    """The folder of the tokenizer: that of the first stack, where an adapter of it has one."""
    stacks: tuple[Stack, ...] = ()
    """Adapters to switch between, of which the first is active at the start."""
    base: Base | None = None
    """The model under adapters, as these name it: the folder may be a copy with rows for new tokens."""

    @property
    def config(self) -> ModelConfig:
        """The config of the model with its first stack, which may make a reward model of a language model."""
        return config_with_adapters(self.folder, self.stacks[0] if self.stacks else ())

    @property
    def virtual_tokens_per_prompt(self) -> int:
        """The number of tokens of the model's context that the first stack puts before every prompt."""
        numbers = [adapter.values.get("num_virtual_tokens") for adapter in self.stacks[0]] if self.stacks else []
        return sum(number for number in numbers if isinstance(number, int))


def resolve_model(
    path_or_id: str, base: str | None = None, adapters: Sequence[str] = (), *, may_classify: bool = False
) -> ResolvedModel:
    """The folders of a model: of a model folder, an adapter folder, a run that ended with either, or a hub id.

    base: where the model of an adapter is, if not where the adapter says. adapters: further ones, to switch to.
    may_classify: a reward model will do, which says nothing of the next token.

    Raises ModelError if there is none, if an adapter's base is missing or another one, and DataError if there is no
    tokenizer.
    """
    resolved = _resolve(path_or_id, base, adapters)
    if not may_classify and (task := resolved.config.task) != "causal-lm":
        raise ModelError(
            f"{resolved.given_path}: a reward model (for {task}): it scores answers, and has no head over the "
            "vocabulary to write any with. `danlu eval MODEL --data FILE` scores a file with it"
        )
    return resolved


def _resolve(path_or_id: str, base: str | None, adapters: Sequence[str]) -> ResolvedModel:
    path = Path(path_or_id).expanduser()
    others = [tuple(adapter_stack(adapter)) for adapter in adapters]
    further = [adapter for stack in others for adapter in stack]
    if _is_only_adapter(path):
        stack = tuple(adapter_stack(path))
        below = base_of(stack, base, "--base", further)
        read_config(below.folder)
        named, folder, stacks = stack[-1].path, below.folder, [stack]
    else:
        if base is not None:
            raise RecipeError(f"--base: {path_or_id} is a whole model; only an adapter needs a base")
        named = folder = find_model(path_or_id)
        if not adapters:
            return ResolvedModel(named, folder, folder)
        below, stacks = with_rows_of(find_base(folder), further), []
        folder = below.folder
    stacks += others
    for adapter in (adapter for stack in stacks for adapter in stack):
        check_base(adapter, below)
    check_same_rotation(read_config(below.folder), stacks)
    return ResolvedModel(named, folder, adapter_tokenizer_folder(stacks[0], folder), tuple(stacks), below)


def adapter_tokenizer_folder(stack: Stack, base: Path) -> Path:
    """The folder of a stack's tokenizer: of the topmost adapter that has one, or the base's. Raises DataError."""
    for folder in (*(adapter.path for adapter in reversed(stack)), base):
        try:
            resolve_tokenizer_folder(str(folder))
        except DataError:
            continue
        return folder
    raise DataError(
        f"{base}: neither this model folder nor its adapter has a tokenizer, so no text can be given to the model. "
        "Copy its tokenizer's files (tokenizer.json, tokenizer_config.json) into the folder"
    )


def adapter_names(stacks: Sequence[Stack]) -> list[str]:
    """A name for each stack: of its last adapter's run, or folder, with a number where another has it already."""
    names: list[str] = []
    for stack in stacks:
        path = stack[-1].path.resolve()
        in_run = (path.parent / "recipe.yaml").is_file() and path.name.startswith("adapter")
        name = (path.parent.name + path.name.removeprefix("adapter") if in_run else path.name).replace(" ", "-")
        candidates = chain((name,), (f"{name}-{number}" for number in count(2)))
        names.append(next(candidate for candidate in candidates if candidate not in (*names, "none")))
    return names


def _is_only_adapter(path: Path) -> bool:
    """Whether a path is an adapter without a model. A run that has both was merged, so it is taken for the model."""
    whole = any((folder / MODEL_CONFIG).is_file() for folder in (path, path / "model"))
    return (path / CONFIG).is_file() or (is_adapter(path) and not whole)
