"""A decoder into a Hugging Face folder: written beside its place and renamed when whole, tensor by tensor.

Peak extra memory is one buffer: bytes are converted and written a piece at a time, fused tensors part after part.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.errors import ModelError, ResourceError
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.families import config_values
from danlu.models.hf_folder import CONFIG, GENERATION_CONFIG, INDEX, SINGLE_FILE
from danlu.models.hf_layout import HFTensor, hf_tensors
from danlu.models.tensor_bytes import BUFFER_BYTES, STORED_AS, is_finite, ranges, raw_bytes
from danlu.models.tensor_file import encode_header
from danlu.tokenizer_files import NAMED_TEMPLATES, TOKENIZER_FILES, VOCABULARY_FILES

_METADATA = {"format": "pt"}  # transformers refuses files without it


def save(
    model: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer_from: Path | None = None,
    generation_from: Path | None = None,
    chat_template: str | None = None,
    shard_bytes: int = 5_000_000_000,
    config: ModelConfig | None = None,
    value: Callable[[str], Tensor | None] | None = None,
    writes: bool = True,
) -> None:
    """Writes config, weights in `dtype`, generation config and, from `tokenizer_from`, the tokenizer byte for byte.

    generation_from: whose generation config is taken over, where the tokenizer's folder has none.
    chat_template: Jinja source that takes the place of the tokenizer's own.
    config, value: what is written, where it is not the model as it stands: parameter by parameter, as each is needed.
    writes: False on those of several processes that only help with `value`: they ask for the same parameters in the
    same order, leave aside what they get, and touch no file.

    The folder appears whole or not at all. One that is there already is replaced if it is a model folder or empty.
    Raises ModelError for a folder that holds something else, for a tokenizer folder without a tokenizer, and for
    weights that are not finite in `dtype`; ResourceError for a full disk or a folder that cannot be written.
    """
    shape = config or model.config
    tensors = hf_tensors(shape)
    value = value or model.get_parameter
    if not writes:
        for tensor in tensors:
            for part in tensor.parts:
                value(part)
        return
    folder = Path(os.path.abspath(folder))
    if tokenizer_from is not None:
        _files_to_copy(tokenizer_from)  # told before anything is written
    values = config_values(shape, torch_dtype=str(dtype).removeprefix("torch."))
    needed = sum(math.prod(tensor.shape) for tensor in tensors) * dtype.itemsize
    with fresh_folder(folder, needed, holds=CONFIG) as fresh:
        _write_json(fresh / CONFIG, values)
        _write_json(fresh / GENERATION_CONFIG, _generation_values(shape, values["eos_token_id"]))
        if generation_from is not None and (generation_from / GENERATION_CONFIG).is_file():
            shutil.copyfile(generation_from / GENERATION_CONFIG, fresh / GENERATION_CONFIG)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, fresh)
        if chat_template is not None:
            write_template(fresh, chat_template)
        _write_weights(fresh, value, _shards(tensors, dtype, shard_bytes), dtype)


def _check_replaceable(folder: Path, holds: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder}: a model folder cannot be written here, this is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / holds).is_file():
        raise ModelError(f"{folder}: not written: the folder holds something other than a model. Choose another")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer and the generation config of `source`, byte for byte. Raises ModelError if it has no tokenizer."""
    for file in _files_to_copy(source):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def write_template(folder: Path, source: str) -> None:
    """A chat template, Jinja source, in the place of all the tokenizer's own: the named ones were not used either."""
    shutil.rmtree(folder / NAMED_TEMPLATES, ignore_errors=True)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")


def _files_to_copy(source: Path) -> list[Path]:
    if not any((source / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError(f"{source}: no tokenizer here: none of {', '.join(VOCABULARY_FILES)}")
    found = {file for pattern in (*TOKENIZER_FILES, GENERATION_CONFIG) for file in source.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def _generation_values(config: ModelConfig, eos: Any) -> dict[str, Any]:
    values = {"bos_token_id": config.bos_token_id, "eos_token_id": eos, "pad_token_id": config.pad_token_id}
    return {name: value for name, value in values.items() if value is not None}


def _shards(tensors: list[HFTensor], dtype: torch.dtype, shard_bytes: int) -> dict[str, list[HFTensor]]:
    """File name -> tensors, in order, each file as full as it gets; a tensor above shard_bytes has one of its own."""
    shards: list[list[HFTensor]] = []
    room = 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * dtype.itemsize
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{index:05}-of-{len(shards):05}.safetensors": shard for index, shard in enumerate(shards, start=1)}


def _write_weights(
    folder: Path, value: Callable[[str], Tensor | None], shards: Mapping[str, list[HFTensor]], dtype: torch.dtype
) -> None:
    for name, shard in shards.items():
        header = encode_header(((one.name, STORED_AS[dtype], one.shape) for one in shard), _METADATA)
        with (folder / name).open("wb") as handle:
            handle.write(header)
            for tensor in shard:
                for part in tensor.parts:
                    parameter = value(part)
                    assert parameter is not None, f"{part}: no value on the process that writes"
                    for values in _pieces(parameter, dtype):
                        if not is_finite(values):
                            raise ModelError(f"{part}: not finite as {dtype}; the model is not written")
                        handle.write(raw_bytes(values))
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        total = sum(math.prod(tensor.shape) for shard in shards.values() for tensor in shard) * dtype.itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _pieces(parameter: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    flat = parameter.detach().reshape(-1)
    for start, end in ranges(flat.numel(), BUFFER_BYTES // dtype.itemsize):
        yield flat[start:end].to(device="cpu", dtype=dtype)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def fresh_folder(folder: Path, needed_bytes: int, *, holds: str) -> Iterator[Path]:
    """A temporary sibling that takes `folder`'s place when the block ends well, and is deleted when it does not.

    holds: the file that tells what may be replaced from what may not.
    """
    fresh, old = (folder.with_name(f".{folder.name}.{state}") for state in ("writing", "replaced"))
    try:
        _check_replaceable(folder, holds)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _tidy(folder, fresh, old)  # after a process that was killed
        free = shutil.disk_usage(folder.parent).free
        if free < needed_bytes:
            raise ResourceError(
                f"{folder}: the disk has {free / 1e9:.2f} GB free, the model takes {needed_bytes / 1e9:.2f} GB: "
                f"{(needed_bytes - free) / 1e9:.2f} GB are missing. Nothing was written"
            )
        fresh.mkdir()
        yield fresh
        _flush(fresh)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error
        raise ResourceError(f"{folder}: the model cannot be written: {reason}") from error
    finally:
        _tidy(folder, fresh, old)


def _tidy(folder: Path, fresh: Path, old: Path) -> None:
    """Removes what a save leaves beside its folder; a model that was moved away and never replaced comes back."""
    # os.path.exists says False where Path.exists raises, as in a folder that may not be entered.
    if os.path.exists(old) and not os.path.exists(folder):
        old.rename(folder)
    for left_over in (fresh, old):
        if os.path.exists(left_over):
            shutil.rmtree(left_over)


def _flush(folder: Path) -> None:
    """To the disk before the rename: else a power cut could leave the name without the content."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
