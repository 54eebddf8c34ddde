"""The model that adapters sit on: finding it, how it stores its weights, and telling it from another. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.models.block_scaled import CODED_METHODS, quantization_method
from danlu.models.config import ModelConfig, same_rotation, with_rotation_of
from danlu.models.hf_folder import (
    CONFIG,
    INDEX,
    SINGLE_FILE,
    fingerprint,
    read_config,
    read_json,
    read_tensors,
    resolve_folder,
)

if TYPE_CHECKING:
    from danlu.adapters.adapter_config import AdapterFolder
    from danlu.numerics.weight_layout_config import FolderLayouts

ORIGIN = "danlu.json"
"""File of a folder that danlu quantized: which model it was made from."""
ORIGIN_KEY = "quantized_from"
_SNAPSHOTS = "snapshots"


@dataclass(frozen=True)
class Base:
    """The model that adapters are trained on: its name in the recipe, its folder, and its fingerprint."""

    named: str
    folder: Path
    fingerprint: str
    quantized_from: str | None = None
    """Fingerprint of the model that this one is in fewer bits: adapters of that one fit."""
    tokens: tuple[AddedToken, ...] = ()
    """New tokens for which the folder has rows that the model of this name and fingerprint has not."""

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


def weight_layouts(folder: Path) -> FolderLayouts | None:
    """How a model folder stores its quantized weights, where its config.json names compressed-tensors, awq or gptq.

    Weights that a trainer hands over have no config.json, and are not quantized. Raises ModelError for settings that
    danlu does not read.
    """
    return layouts_of(read_json(folder / CONFIG), folder) if (folder / CONFIG).is_file() else None


def layouts_of(values: Mapping[str, Any], folder: Path) -> FolderLayouts | None:
    """Returns `weight_layouts` of a folder with a config.json of these values."""
    if quantization_method(values) not in CODED_METHODS:
        return None
    from danlu.numerics.weight_layout_config import read_layouts  # other folders do without

    return read_layouts(values, str(folder / CONFIG))


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, and not config.json alone."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX))


def holds_codes(folder: Path) -> bool:
    """Whether a folder has weights as codes, which its config.json may say of dense ones too; so where it has none."""
    return not has_weights(folder) or any(
        name.endswith((".qweight", ".weight_packed")) or each.dtype in ("I8", "F8_E4M3", "U8")
        for name, each in read_tensors(folder).items()
    )


def stored_method(folder: Path) -> str | None:
    """The method by which a folder's weights are quantized, as its config.json names it; None of dense weights."""
    values = read_json(folder / CONFIG)
    method = quantization_method(values)
    return None if method in CODED_METHODS and not holds_codes(folder) else method


def base_of(
    stack: Sequence[AdapterFolder], given: str | Path | None, option: str, also: Sequence[AdapterFolder] = ()
) -> Base:
    """Resolves the base of a stack of adapters: `given`, or else the one that the top adapter names; with rows for the
    new tokens that they were trained with.

    option: the command line's option for the given one, for messages.
    Raises ModelError where it is not there.
    """
    return with_rows_of(_named_base(stack[-1], given, option), [*stack, *also])


def _named_base(adapter: AdapterFolder, given: str | Path | None, option: str) -> Base:
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
        given = base.named if base.tokens else base.folder  # the folder with rows for new tokens is the cache's
        raise ModelError(
            f"{adapter.path}: was trained on another base ({adapter.base}) than {given}: shapes may fit, weights "
            "do not. Use the base it was trained on"
        )


def tokens_of(adapters: Sequence[AdapterFolder], rows: int) -> list[AddedToken]:
    """The new tokens that adapters, lowest first, of a base with so many rows were trained with.

    Raises ModelError for two with one id for different tokens, of which a base has only one row.
    """
    tokens: dict[int, tuple[AddedToken, Path]] = {}
    for adapter in adapters:
        for token in adapter.tokens(rows):
            other, path = tokens.setdefault(token.id, (token, adapter.path))
            if other.text != token.text:
                raise ModelError(
                    f"{path} and {adapter.path}: were trained with new tokens of the same id {token.id}: "
                    f"{other.text!r} and {token.text!r}. A base has one row for both: use one of the adapters alone"
                )
    return [token for token, _ in tokens.values()]


def with_rows_of(base: Base, adapters: Sequence[AdapterFolder]) -> Base:
    """The base with rows for the new tokens that adapters were trained with. Raises as `tokens_of`."""
    return with_rows_for(base, tokens_of(adapters, read_config(base.folder).vocab_rows)) if adapters else base


def with_rows_for(base: Base, tokens: Sequence[AddedToken]) -> Base:
    """The base with rows for new tokens; itself without any. Raises as `extended_base.extended_base`."""
    if not tokens:
        return base
    from danlu.assembly.extended_base import extended_base

    return extended_base(base, tokens)


def config_with_adapters(folder: Path, adapters: Sequence[AdapterFolder]) -> ModelConfig:
    """The config of a model folder with adapters on it, lowest first: for the task of the topmost one that classifies,
    and rotated as they need it.

    Raises ModelError as `read_config` and `rotated_by` do.
    """
    config = rotated_by(read_config(folder), adapters)
    tasks = [adapter.task for adapter in adapters if adapter.task != "causal-lm"]
    return replace(config, task=tasks[-1] if tasks else config.task)


def rotated_by(config: ModelConfig, adapters: Sequence[AdapterFolder]) -> ModelConfig:
    """The config of a base with the rotary embedding that adapters on it, lowest first, were trained with.

    An adapter that was trained with `long_context` has its own, which is that of all trained upon it. Raises ModelError
    for two that differ and of which neither was trained upon the other, and for a folder that lost its config.json.
    """
    base, last = config, None
    for adapter in adapters:
        if adapter.rotation_folder is None:
            continue
        rotated = with_rotation_of(base, read_config(adapter.rotation_folder))
        upon = {path.resolve() for path in adapter.below}
        if last is not None and last.path.resolve() not in upon and not same_rotation(config, rotated):
            raise ModelError(
                f"{last.path} and {adapter.path}: were trained with different rotary embeddings of the base "
                f"({CONFIG} of each), and a model has one. Merge one of them into the base first (danlu merge), or "
                "use one alone"
            )
        config, last = rotated, adapter
    return config


def check_same_rotation(config: ModelConfig, stacks: Sequence[Sequence[AdapterFolder]]) -> None:
    """Raises ModelError for stacks of adapters that could not share one base in memory, since it has one rotation."""
    first_config = None
    for stack in stacks:
        rotated = rotated_by(config, stack)
        if first_config is not None and not same_rotation(first_config, rotated):
            raise ModelError(
                f"{stacks[0][-1].path} and {stack[-1].path}: under one of them the base's rotary embedding is another "
                "(it was trained with long_context), and they would share one base. Load each alone"
            )
        first_config = first_config or rotated
