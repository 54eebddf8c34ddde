"""Quantized weights in the tensors of other tools' files: read into `Scaled` by the same codes, and written.

O, I outputs and inputs · G groups of inputs · b bits
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.format import MXFP4, MXFP8, NVFP4, Format, Scaled, ScaleKind
from danlu.numerics.packing import (
    pack,
    pack_awq,
    pack_gptq_zeros,
    pack_int32,
    unpack,
    unpack_awq,
    unpack_gptq_zeros,
    unpack_int32,
)
from danlu.numerics.weight_layout_config import Export, WeightLayout, export_problem

EXPORTS: tuple[Export, ...] = get_args(Export)
WRITTEN_SUFFIXES = (
    *("weight", "weight_scale_inv", "weight_packed", "weight_scale", "weight_global_scale", "weight_shape"),
    *("weight_zero_point", "qweight", "qzeros", "scales", "g_idx"),
)
"""The ends of the names that `write_weight` gives."""
_SCALES: dict[torch.dtype, ScaleKind] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def read_weight(layout: WeightLayout, tensors: Mapping[str, Tensor], where: str) -> Scaled:
    """A weight [O, I] of a folder.

    tensors: by the ends of their names ("weight_packed", "qweight", ...). where: file and name, for messages.
    Raises ModelError for parts that are missing, or do not fit together.
    """
    try:
        match layout.layout:
            case "awq" | "gptq":
                scaled = _read_gptq(layout, tensors)
            case "mxfp4" | "nvfp4":
                scaled = _read_float4(layout, tensors)
            case "mxfp8":
                form = MXFP8
                scaled = Scaled(tensors["weight"], tensors["weight_scale"].view(torch.uint8), form)
            case _:
                scaled = _read_compressed(layout, tensors)
    except KeyError as error:
        raise ModelError(f"{where}: its tensor {error.args[0]} is missing") from None
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{where}: its tensors do not fit together ({error})") from None
    blocks = scaled.format.blocks(*scaled.shape[-2:])
    groups = (blocks[0], scaled.scales.shape[-1] if scaled.groups is not None else blocks[1])
    for name, values in (("scales", scaled.scales), ("zeros", scaled.zeros)):
        if values is not None and tuple(values.shape) != groups:
            shape = list(scaled.shape)
            raise ModelError(f"{where}: {name} of shape {list(values.shape)}, not {list(groups)}, for {shape}")
    order = scaled.groups
    if order is not None and (int(order.min()) < 0 or int(order.max()) >= groups[1]):
        raise ModelError(f"{where}: its inputs are of groups {int(order.min())} to {int(order.max())}, of {groups[1]}")
    if not bool(scaled.wide_scales().isfinite().all()):
        raise ModelError(f"{where}: its scales are not finite; the weights are spoilt")
    return scaled


def _read_compressed(layout: WeightLayout, tensors: Mapping[str, Tensor]) -> Scaled:
    """pack-quantized: codes [O, ceil(I b / 32)] int32 and zeros [ceil(O b / 32), G]; else a code in each element."""
    bits, half = layout.bits, 1 << (layout.bits - 1)
    zeros = tensors["weight_zero_point"] if layout.has_zeros else None
    if layout.layout == "packed":
        outputs, inputs = tensors["weight_shape"].tolist()
        codes = unpack_int32(tensors["weight_packed"], bits, inputs)
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack_int32(zeros.t().contiguous(), bits, outputs).t().contiguous()
        elif zeros is not None:
            zeros = (zeros.to(torch.int16) + half).to(torch.uint8)
        if zeros is None:
            codes = (codes.to(torch.int16) - half).to(torch.int8)
    else:
        codes = tensors["weight"]
        outputs, inputs = codes.shape
        if zeros is not None:
            codes, zeros = ((each.to(torch.int16) + half).to(torch.uint8) for each in (codes, zeros))
    scales = tensors["weight_scale"]
    block = layout.block_of(scales.shape)
    if block == (0, 0):
        scales = scales.reshape(1, 1)
        zeros = None if zeros is None else zeros.reshape(1, 1)
    elif scales.ndim == 1:
        scales = scales.unsqueeze(1)
    element = "e4m3" if codes.dtype == torch.float8_e4m3fn else f"int{bits}"
    form = Format(element, block, _SCALES[scales.dtype], "none" if zeros is None else "integer")  # type: ignore[arg-type]
    groups = _order(tensors.get("weight_g_idx"), layout.group)
    return Scaled(codes, scales, form, zeros, groups=groups)


def _read_float4(layout: WeightLayout, tensors: Mapping[str, Tensor]) -> Scaled:
    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    codes = unpack(packed.view(torch.uint8), 4, 2 * packed.shape[1])
    if layout.layout == "mxfp4":
        return Scaled(codes, scales.view(torch.uint8), MXFP4)
    tensor_scale = tensors["weight_global_scale"].float().reciprocal().reshape(1, 1)
    return Scaled(codes, scales, NVFP4, tensor_scale=tensor_scale)


def _read_gptq(layout: WeightLayout, tensors: Mapping[str, Tensor]) -> Scaled:
    """AWQ: codes [I, O b / 32]; GPTQ: [I b / 32, O]; both: zeros [G, O b / 32] and scales [G, O]."""
    bits, scales = layout.bits, tensors["scales"].t().contiguous()
    outputs = len(scales)
    groups = None
    if layout.layout == "awq":
        codes, zeros = (unpack_awq(tensors[name]).t().contiguous() for name in ("qweight", "qzeros"))
    else:
        rows = tensors["qweight"].t().contiguous()
        inputs = len(tensors["g_idx"]) if "g_idx" in tensors else rows.shape[1] * 32 // bits
        codes = unpack_int32(rows, bits, inputs)
        zeros = unpack_gptq_zeros(tensors["qzeros"], bits, outputs, minus_one=layout.minus_one).t().contiguous()
        groups = _order(tensors.get("g_idx"), layout.group)
    form = Format(f"int{bits}", (1, layout.group), _SCALES[scales.dtype], "integer")  # type: ignore[arg-type]
    return Scaled(codes, scales, form, zeros, groups=groups)


def _order(g_idx: Tensor | None, group: int) -> Tensor | None:
    """The group of each input, where those of a group are not neighbours."""
    if g_idx is None or not group or torch.equal(g_idx.long(), torch.arange(len(g_idx)) // group):
        return None
    return g_idx.to(torch.int32)


def write_weight(
    name: str, weight: Scaled, export: Export, *, dtype: torch.dtype, rounds_activations: bool = False
) -> dict[str, Tensor]:
    """The tensors of a weight in a safetensors file, by their names.

    name: "model.layers.0.self_attn.q_proj.weight". dtype: of the model's other weights, and of products.
    rounds_activations: as `weight_layout_config.config_values` has it; codes are then bytes that products take.
    Raises ModelError for a weight that `export_problem` refuses.
    """
    outputs, inputs = weight.shape
    if problem := export_problem(weight.format, export, (outputs, inputs)):
        raise ModelError(f"{name} cannot be stored as {export}: {problem}")
    if not bool(weight.wide_scales().isfinite().all()):
        raise ModelError(f"{name} cannot be stored as {export}: its scales are not finite")
    if weight.groups is not None and export != "gptq":
        raise ModelError(f"{name} cannot be stored as {export}: its groups of inputs are no neighbours (act_order)")
    module = name.removesuffix(".weight")
    match export:
        case "fp8":
            tensors = {"weight": weight.codes, "weight_scale_inv": weight.scales}
        case "awq" | "gptq":
            tensors = _written_gptq(weight, export)
        case _ if rounds_activations:
            tensors = {"weight": weight.codes, "weight_scale": weight.scales}
        case _:
            tensors = _written_compressed(weight)
    return {f"{module}.{key}": tensor.contiguous() for key, tensor in tensors.items()}


def _written_compressed(weight: Scaled) -> dict[str, Tensor]:
    form = weight.format
    if form.element == "e2m1":
        tensors = {"weight_packed": pack(weight.codes, 4), "weight_scale": weight.scales}
        if weight.tensor_scale is not None:
            tensors["weight_global_scale"] = weight.tensor_scale.reciprocal().reshape(1)
        return tensors
    if form.of_element.is_float:
        # mxfp8 likewise: the exponents are bytes.
        scales = weight.scales.reshape(1) if form.block == (0, 0) else weight.scales
        return {"weight": weight.codes, "weight_scale": scales}
    tensors = {
        "weight_packed": pack_int32(_unsigned(weight), form.bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_int32(weight.zeros.t().contiguous(), form.bits).t()
    return tensors


def _written_gptq(weight: Scaled, export: Export) -> dict[str, Tensor]:
    bits, codes = weight.format.bits, _unsigned(weight)
    zeros = torch.full_like(weight.scales, 1 << (bits - 1), dtype=torch.uint8) if weight.zeros is None else weight.zeros
    scales, zeros = weight.scales.t(), zeros.t().contiguous()
    if export == "awq":
        return {"qweight": pack_awq(codes.t().contiguous()), "qzeros": pack_awq(zeros), "scales": scales}
    group = weight.format.block_of(*weight.shape)[1]
    groups = torch.arange(len(codes.t()), dtype=torch.int32) // group if weight.groups is None else weight.groups
    return {
        "qweight": pack_int32(codes, bits).t(),
        "qzeros": pack_gptq_zeros(zeros, bits, minus_one=weight.zeros is None),
        "scales": scales,
        "g_idx": groups,
    }


def _unsigned(weight: Scaled) -> Tensor:
    """The codes [O, I] from 0 on."""
    if weight.zeros is not None:
        return weight.codes
    return (weight.codes.to(torch.int16) + (1 << (weight.format.bits - 1))).to(torch.uint8)
