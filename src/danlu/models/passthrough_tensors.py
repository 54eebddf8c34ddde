"""Tensors and files of a model folder that danlu does not train, copied into the folder of a result byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import TensorLocation
from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES
from danlu.models.hf_folder import CONFIG, read_json, read_tensors
from danlu.models.hf_layout import may_have_untouched, own_name
from danlu.models.multimodal import TEXT_CONFIG, with_text_values
from danlu.models.safetensors_io import BUFFER_BYTES, ranges

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is copied as it is stored."""

    name: str
    location: TensorLocation

    @property
    def dtype(self) -> str:
        """The dtype as safetensors names it."""
        return self.location.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk."""
        return self.location.shape

    def copy_to(self, handle: BufferedWriter) -> None:
        """Writes its bytes, a buffer at a time. Raises ModelError where its file has fewer by now."""
        with self.location.file.open("rb") as source:
            source.seek(self.location.offset)
            for start, end in ranges(self.location.bytes, BUFFER_BYTES):
                content = source.read(end - start)
                if len(content) < end - start:
                    raise ModelError(f"{self.location.file}: tensor {self.name}: the file ended while it was copied")
                handle.write(content)


def check_untouched(origin: Path, config: ModelConfig) -> None:
    """Raises ModelError where the model's folder, from which a result copies tensors, can no longer be read.

    Called for runs that resume, which read their own weights from a checkpoint.
    """
    if not may_have_untouched(config):
        return
    try:
        read_tensors(origin)
    except ModelError as error:
        raise ModelError(
            f"{error}. The result takes the tensors that are not trained over from this folder: put it back"
        ) from None


@dataclass(frozen=True)
class Kept:
    """The tensors and files that are copied from the folder that a model comes from."""

    origin: Path
    config: ModelConfig
    names: Mapping[str, str]
    """Tensors of `hf_tensors` -> their names in the folder, of those that are there."""
    tensors: tuple[KeptTensor, ...]

    @classmethod
    def of(cls, origin: Path, config: ModelConfig) -> Self | None:
        """Returns None where the folder holds nothing besides the tensors that danlu trains.

        Most families' folders cannot: they are not read, and need not be there any more. Raises ModelError as
        `read_tensors`.
        """
        if not may_have_untouched(config):
            return None
        stored = read_tensors(origin)
        named = {name: own_name(name, config) for name in stored}
        tensors = tuple(KeptTensor(name, stored[name]) for name, own in named.items() if own is None)
        if config.multimodal is None and not tensors:
            return None
        return cls(origin, config, {own: name for name, own in named.items() if own is not None}, tensors)

    def config_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of the result's config.json. values: the config of the trained part, as a model of its
        own.
        """
        return with_untouched_values(self.origin, self.config, values)

    def copy_processor(self, folder: Path) -> None:
        """Copies the files of the image and audio processor."""
        for name in _PROCESSOR_FILES:
            if (self.origin / name).is_file():
                shutil.copyfile(self.origin / name, folder / name)


def with_untouched_values(origin: Path, config: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json with the other parts' keys from the folder `origin`.

    config: that of the language part. values: the content of a config.json of it alone.
    """
    original = read_json(origin / CONFIG)
    is_whole = config.multimodal is None
    language = original if is_whole else original[TEXT_CONFIG]
    keys = FAMILIES[config.family].mtp_keys
    values = {**values, **{key: language[key] for key in keys if key in language}}
    return values if is_whole else with_text_values(original, values)
