"""The storage of a base's linear layers, by its config.json and the headers of its weight files. No torch."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from danlu.assembly.base_model import has_weights, holds_codes, layouts_of
from danlu.core.errors import ModelError
from danlu.core.safetensors_format import TensorLocation
from danlu.models.block_scaled import (
    CODED_METHODS,
    CodedLocation,
    ScaledLocation,
    fp8_block,
    keepable,
    quantization_method,
    scaled_method,
)
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import (
    CONFIG,
    FOUR_BIT,
    config_folder,
    expected_tensors,
    read_json,
    stored_tensors,
)
from danlu.models.hf_layout import hf_name
from danlu.models.sites import sites_of
from danlu.numerics.bitsandbytes_config import read_config
from danlu.planning.model_tensors import UNSTORED, StoredBase
from danlu.planning.packed_shapes import StoredCodes
from danlu.recipe import sections

if TYPE_CHECKING:
    from danlu.numerics.weight_layout_config import FolderLayouts, WeightLayout


def stored_base(model: sections.Model, config: ModelConfig) -> StoredBase:
    """How the folder of `model.path` stores linear layers in few bits that a frozen base keeps, by parameter.

    Where there are no weights yet, these are all that config.json does not except. Raises ModelError as
    `stored_quantization`, and for files of weights that cannot be read.
    """
    if model.path is None:
        return UNSTORED
    folder = config_folder(model.path)
    values = read_json(folder / CONFIG)
    is_there = has_weights(folder)
    if (layouts := layouts_of(values, folder)) is not None:
        return _codes_of(folder, config, layouts) if is_there else _expected_codes(layouts, config, values)
    if (method := scaled_method(values)) is not None:
        return _codes_of(folder, config, None) if is_there else _expected_blocks(method, config, values, folder)
    section = _section(values, folder)
    if section is None:
        return UNSTORED
    if not is_there:
        read = read_config(values, str(folder / CONFIG))
        return StoredBase(dict.fromkeys(_packed_linears(config, () if read is None else read.skip), section))
    stored, _ = stored_tensors(folder, config, None)
    tensors = (tensor for tensor in expected_tensors(config, stored) if tensor.name in stored)
    four_bit = (tensor for tensor in tensors if stored[tensor.name].dtype == FOUR_BIT)
    return StoredBase({name: section for tensor in four_bit for name in tensor.parameters})


def _codes_of(folder: Path, config: ModelConfig, layouts: FolderLayouts | None) -> StoredBase:
    """The weights of a folder that keep their codes as a frozen base."""
    stored, _ = stored_tensors(folder, config, layouts)
    tensors = expected_tensors(config, stored)
    located = [(tensor, stored[tensor.name]) for tensor in tensors if tensor.name in stored]
    linears = {f"{site.name}.weight" for site in sites_of(config) if site.layer is not None}
    kept = keepable(located) & linears
    return StoredBase(
        {
            name: _codes(location) if isinstance(location, CodedLocation) else _blocks(location)
            for tensor, location in located
            if not isinstance(location, TensorLocation)
            for name in tensor.parameters
            if name in kept
        }
    )


def _codes(location: CodedLocation) -> StoredCodes:
    """The bytes of a weight that keeps its codes in memory: scales as they are stored, a byte for each zero."""
    layout = cast("WeightLayout", location.layout)
    scales = location.tensors[layout.scales]
    groups = next((location.tensors[end] for end in ("g_idx", "weight_g_idx") if end in location.tensors), None)
    is_ordered = groups is not None and layout.group > 0 and not _is_in_order(groups, layout.group)
    return StoredCodes(
        layout.layout,
        layout.bits,
        layout.block_of(scales.shape),
        scales.bytes // math.prod(scales.shape),
        zero_bytes=int(layout.has_zeros),
        has_tensor_scale=layout.layout == "nvfp4",
        ordered_groups=(scales.shape[0] if layout.layout == "gptq" else scales.shape[-1]) if is_ordered else 0,
    )


def _blocks(location: ScaledLocation) -> StoredCodes:
    if location.is_mxfp4:
        return StoredCodes("mxfp4", 4, location.block, 1)
    return StoredCodes("fp8", 8, location.block, location.scales.bytes // math.prod(location.scales.shape))


def _expected_blocks(method: str, config: ModelConfig, values: Mapping[str, Any], folder: Path) -> StoredBase:
    """The blocks that a folder will have by its config.json alone: MXFP4 is of experts, FP8 has float32 scales."""
    if method == "mxfp4":
        names = (f"{site.name}.weight" for site in sites_of(config) if site.experts is not None)
        return StoredBase(dict.fromkeys(names, StoredCodes("mxfp4", 4, (1, 32), 1)))
    skip = values["quantization_config"].get("modules_to_not_convert") or ()
    codes = StoredCodes("fp8", 8, fp8_block(values, str(folder / CONFIG)), 4)
    return StoredBase(dict.fromkeys(_packed_linears(config, [str(name) for name in skip]), codes))


def _is_in_order(groups: TensorLocation, group: int) -> bool:
    """Whether neighbouring inputs share a group, by the group of each, int32."""
    numbers = array("i")
    with groups.file.open("rb") as file:
        file.seek(groups.offset)
        numbers.frombytes(file.read(groups.bytes))
    return all(number == index // group for index, number in enumerate(numbers))


def _expected_codes(layouts: FolderLayouts, config: ModelConfig, values: Mapping[str, Any]) -> StoredBase:
    """The codes that a folder will have by its config.json alone: scales of two bytes, inputs in their order."""
    settings = values["quantization_config"]
    skip = [str(name) for key in ("ignore", "modules_to_not_convert") for name in settings.get(key) or ()]
    expressions = [name.removeprefix("re:") for name in skip if name.startswith("re:")]
    codes = {}
    for name in _packed_linears(config, [each for each in skip if not each.startswith("re:")]):
        module = hf_name(name, config).removesuffix(".weight")
        layout = layouts.of(module)
        if layout is not None and not any(re.match(expression, module) for expression in expressions):
            scale_bytes = 1 if layout.layout in ("mxfp8", "mxfp4", "nvfp4") else 2
            is_nv = layout.layout == "nvfp4"
            codes[name] = StoredCodes(
                layout.layout, layout.bits, layout.block_of(None), scale_bytes, int(layout.has_zeros), is_nv
            )
    return StoredBase(codes)


def _packed_linears(config: ModelConfig, skip: Collection[str]) -> Iterator[str]:
    """The weights of linear layers but for the modules in `skip`, as bitsandbytes packs a model."""
    for site in sites_of(config):
        module = hf_name(f"{site.name}.weight", config).removesuffix(".weight")
        if site.layer is not None and not any(f".{module}.".find(f".{name}.") >= 0 for name in skip):
            yield f"{site.name}.weight"


def stored_quantization(folder: Path) -> sections.QuantizationSection | None:
    """The section that would quantize a model as its folder stores it, or nearly so; None of weights that are not
    quantized, or are always dequantised while they are read.

    Raises ModelError for weights that are quantized in a way that danlu does not read.
    """
    values = read_json(folder / CONFIG)
    layouts = layouts_of(values, folder)
    if layouts is None:
        return _section(values, folder)
    layout = layouts.layouts[0] if layouts.layouts else None
    if layout is None or not holds_codes(folder):
        return None
    if layout.is_float:
        kinds = {"mxfp8": sections.Mxfp8, "mxfp4": sections.Mxfp4, "nvfp4": sections.Nvfp4}
        return kinds.get(layout.layout, sections.Fp8)()
    integers = {8: sections.Int8, 4: sections.Int4, 3: sections.Int3, 2: sections.Int2}
    return integers.get(layout.bits, sections.Int8)()


def _section(values: Mapping[str, Any], folder: Path) -> sections.Nf4 | sections.Fp4 | None:
    if scaled_method(values) is not None or quantization_method(values) in CODED_METHODS:
        return None
    stored = read_config(values, str(folder / CONFIG))
    return None if stored is None else (sections.Nf4 if stored.kind == "nf4" else sections.Fp4)(double=stored.double)


def refuse_quantized(folder: Path, advice: str) -> None:
    """Raises ModelError for a folder with weights that are quantized already; advice: the message's last sentence."""
    stored = stored_quantization(folder)
    if stored is not None:
        method = quantization_method(read_json(folder / CONFIG))
        kind = method if method in CODED_METHODS else stored.kind
        raise ModelError(f"{folder}: is quantized already ({kind}); quantizing it again would round twice. {advice}")
