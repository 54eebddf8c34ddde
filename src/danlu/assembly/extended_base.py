"""A base with rows for new tokens: a folder of the cache with another embedding and head, and links to all else.

A file that holds the old ones too is copied without them, since vLLM and SGLang take every tensor of each file.

A new row is the mean of the rows of its description's tokens, or of all tokens of the base. So are rows up to a
multiple of 8 that no token has; config.json says how many these are. Everything that reads a model's folder reads this
one, while adapters belong to the base that it is made of. No torch here until a folder is written.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.assembly.base_model import Base
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError, ResourceError
from danlu.core.safetensors_format import copy_without
from danlu.models.config import ModelConfig
from danlu.models.hf_config import PADDING_KEY
from danlu.models.hf_folder import CONFIG, INDEX, SINGLE_FILE, fingerprint, read_config, read_json, read_tensors
from danlu.models.hf_layout import EMBEDDING, HEAD, HEAD_BIAS, hf_name, own_name
from danlu.models.multimodal import TEXT_CONFIG

if TYPE_CHECKING:
    from torch import Tensor

MODELS = "~/.cache/danlu/models"
"""The folder of the cache for bases with rows for new tokens."""
MULTIPLE = 8
"""The number of rows becomes a multiple of this, for which the matrix products of GPUs are made."""
_SHARD = "vocabulary.safetensors"
_SINGLE_FILE_COPY = "base.safetensors"
_LAYOUT = 2
"""Counts the ways in which such folders were laid out, so that those of older releases are not taken."""


def extended_base(base: Base, tokens: Sequence[AddedToken]) -> Base:
    """Returns the same base with its folder replaced by one that has rows for new tokens.

    Raises ModelError for a base that cannot be read, and ResourceError where the disk is full.
    """
    key = (_LAYOUT, str(base.folder.resolve()), fingerprint(base.folder), tokens)
    digest = blake2b(repr(key).encode(), digest_size=16)
    digest.update((base.folder / CONFIG).read_bytes())
    target = Path(MODELS).expanduser() / digest.hexdigest()
    if not (target / CONFIG).is_file():
        target = _write_whole(target, base.folder.resolve(), tokens)
    return replace(base, folder=target, tokens=tuple(tokens))


def extended_config(config: ModelConfig, tokens: Sequence[AddedToken]) -> ModelConfig:
    """The config of a base with rows for new tokens; the same where it has them, as many bases have some to spare."""
    needed = max(token.id for token in tokens) + 1
    rows = config.vocab_rows
    if needed > rows and config.per_layer_width:
        raise ModelError(
            f"model.tokens: {needed - rows} tokens more than the {rows} rows of this model, and its layers have "
            "embeddings of their own of each token, to which transformers adds no rows. Use tokens that it has: "
            "reserved ones, as <unused0>"
        )
    if needed > rows:
        rows = -(-needed // MULTIPLE) * MULTIPLE
    padding = rows - needed if rows > config.vocab_rows or config.vocab_padding else 0
    return replace(config, vocab_size=rows - padding, vocab_padding=padding)


def _write_whole(target: Path, folder: Path, tokens: Sequence[AddedToken]) -> Path:
    """Writes the folder next to `target` and moves it there; into a temporary one where the cache cannot be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent))
    except OSError:  # a home that cannot be written
        fresh = target = Path(tempfile.mkdtemp(prefix="danlu-model-"))
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    try:
        _write(fresh, folder, tokens)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError):
            message = f"{target}: the base with rows for model.tokens cannot be written: {error.strerror}"
            raise ResourceError(message) from None
        raise
    if fresh != target:
        try:
            fresh.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _write(fresh: Path, folder: Path, tokens: Sequence[AddedToken]) -> None:
    from danlu.models.saving import write_index, write_json

    config, stored = read_config(folder), read_tensors(folder)
    wider = extended_config(config, tokens)
    named = {own_name(name, config): name for name in stored}
    embedding, head, bias = (hf_name(name, config) for name in (EMBEDDING, HEAD, HEAD_BIAS))
    matrices = [named.get(embedding) or named.get(head)]  # some tools keep a tied matrix as the head
    if config.has_own_head:
        matrices += [named.get(head), *([named.get(bias)] if config.head_bias else ())]
    widened = {named[name] for name in (embedding, head, bias) if name in named}
    changed = {location.file for name, location in stored.items() if name in widened}
    shards: dict[str, str] = {}  # by tensor
    for name, location in stored.items():
        if name in widened:
            continue
        shards[name] = _SINGLE_FILE_COPY if location.file.name == SINGLE_FILE else location.file.name
        if not (shard := fresh / shards[name]).exists():
            if location.file in changed:
                copy_without(location.file, shard, widened)
            else:
                shard.symlink_to(location.file.resolve())
    total = sum(stored[name].bytes for name in shards)
    written = _write_matrices(fresh / _SHARD, folder, matrices, wider, tokens)
    write_index(fresh, shards | dict.fromkeys(written, _SHARD), total + sum(written.values()))
    for entry in folder.iterdir():
        if entry.is_file() and entry.suffix != ".safetensors" and entry.name not in (CONFIG, INDEX):
            (fresh / entry.name).symlink_to(entry.resolve())
    write_json(fresh / CONFIG, _config_values(read_json(folder / CONFIG), wider))


def _write_matrices(
    file: Path, folder: Path, names: Sequence[str | None], config: ModelConfig, tokens: Sequence[AddedToken]
) -> dict[str, int]:
    """Writes embedding and head, by their names in the folder; returns their bytes."""
    from danlu.models.safetensors_io import TensorStream

    written: dict[str, int] = {}
    with TensorStream(file, [name for name in names if name is not None]) as stream:
        for name in names:
            if name is None:
                names = f"{hf_name(EMBEDDING, config)}, or no {hf_name(HEAD, config)}"
                raise ModelError(f"{folder}: holds no {names}, to add rows to")
            rows = _rows(folder, name, config.vocab_rows, tokens)
            stream.add(name, rows)
            written[name] = rows.nbytes
    return written


def _config_values(values: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The content of config.json with another number of rows, in its language part where it has several."""
    changed = {"vocab_size": config.vocab_rows, PADDING_KEY: config.vocab_padding}
    if config.multimodal is None:
        return values | changed
    outer = {"vocab_size": config.vocab_rows} if "vocab_size" in values else {}
    return values | outer | {TEXT_CONFIG: {**(values.get(TEXT_CONFIG) or {}), **changed}}


def _rows(folder: Path, name: str, count: int, tokens: Sequence[AddedToken]) -> Tensor:
    """The rows of embedding or head [count, D], or of the head's bias [count]: as they are stored, with means for
    those of new tokens and of none.

    Tokens of the base have the rows before the first new one.
    """
    import torch

    from danlu.models.loading import read_tensor

    rows = read_tensor(folder, name)
    of_base = rows[: min(token.id for token in tokens)]

    def mean(of: Tensor) -> Tensor:
        return of.mean(0, dtype=torch.float64).to(rows.dtype)

    starts = {token.id: mean(of_base if token.of is None else of_base[list(token.of)]) for token in tokens}
    if count > len(rows):
        rows = torch.cat([rows, mean(of_base).expand(count - len(rows), *rows.shape[1:])])
    for token, start in starts.items():
        rows[token] = start
    return rows
