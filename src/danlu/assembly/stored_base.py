"""The storage of a base's linear layers, by its config.json and the headers of its weight files. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from danlu.core.errors import ModelError
from danlu.models.block_scaled import scaled_method
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import (
    CONFIG,
    FOUR_BIT,
    INDEX,
    SINGLE_FILE,
    config_folder,
    expected_tensors,
    own_tensors,
    read_json,
)
from danlu.models.hf_layout import hf_name
from danlu.models.sites import sites_of
from danlu.numerics.bitsandbytes_config import read_config
from danlu.planning.model_tensors import UNSTORED, StoredBase
from danlu.recipe import sections


def stored_base(model: sections.Model, config: ModelConfig) -> StoredBase:
    """The quantization in which the folder of `model.path` stores linear layers, if in 4 bits, and which of them.

    Where there are no weights yet, these are all that config.json does not except. Raises ModelError as
    `stored_quantization`, and for files of weights that cannot be read.
    """
    if model.path is None:
        return UNSTORED
    folder = config_folder(model.path)
    values = read_json(folder / CONFIG)
    section = _section(values, folder)
    if section is None:
        return UNSTORED
    if not any((folder / name).is_file() for name in (SINGLE_FILE, INDEX)):
        read = read_config(values, str(folder / CONFIG))
        return StoredBase(section, set(_packed_linears(config, () if read is None else read.skip)))
    stored = own_tensors(folder, config)
    tensors = (tensor for tensor in expected_tensors(config, stored) if tensor.name in stored)
    return StoredBase(
        section, {name for tensor in tensors if stored[tensor.name].dtype == FOUR_BIT for name in tensor.parameters}
    )


def _packed_linears(config: ModelConfig, skip: Collection[str]) -> Iterator[str]:
    """The weights of linear layers but for the modules in `skip`, as bitsandbytes packs a model."""
    for site in sites_of(config):
        module = hf_name(f"{site.name}.weight", config).removesuffix(".weight")
        if site.layer is not None and not any(f".{module}.".find(f".{name}.") >= 0 for name in skip):
            yield f"{site.name}.weight"


def stored_quantization(folder: Path) -> sections.Nf4 | sections.Fp4 | None:
    """The section that would quantize a model as its folder stores it; None of weights that are not quantized, or are
    dequantised while they are read.

    Raises ModelError for weights that are quantized in a way that danlu does not read.
    """
    return _section(read_json(folder / CONFIG), folder)


def _section(values: Mapping[str, Any], folder: Path) -> sections.Nf4 | sections.Fp4 | None:
    if scaled_method(values) is not None:
        return None
    stored = read_config(values, str(folder / CONFIG))
    return None if stored is None else (sections.Nf4 if stored.kind == "nf4" else sections.Fp4)(double=stored.double)


def refuse_quantized(folder: Path, advice: str) -> None:
    """Raises ModelError for a folder with weights that are quantized already; advice: the message's last sentence."""
    stored = stored_quantization(folder)
    if stored is not None:
        raise ModelError(
            f"{folder}: is quantized already ({stored.kind}); quantizing it again would round twice. {advice}"
        )
