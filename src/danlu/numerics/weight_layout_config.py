"""How a folder of another tool stores its quantized weights, by `quantization_config` in its config.json. No torch.

compressed-tensors (llm-compressor), AWQ (AutoAWQ's GEMM) and GPTQ (AutoGPTQ, GPTQModel) as their own code has them; the
other way round, what config.json says of weights that danlu writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from danlu.core.errors import ModelError

if TYPE_CHECKING:
    from danlu.numerics.format import Format

Layout = Literal["packed", "plain", "mxfp4", "nvfp4", "awq", "gptq"]
Export = Literal["compressed-tensors", "awq", "gptq", "fp8", "mxfp4", "nvfp4"]
METHODS = ("compressed-tensors", "awq", "gptq")
"""The `quant_method` values of these folders."""
_FORMATS: Mapping[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
_ADVICE = "Use the original weights"


@dataclass(frozen=True)
class WeightLayout:
    """How quantized weights lie in a folder."""

    layout: Layout
    bits: int
    group: int = 0
    """Inputs that share a scale; 0: those that the shape of the scales says."""
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    minus_one: bool = False
    """GPTQ's first format: zeros are stored less one."""
    targets: tuple[str, ...] = ("Linear",)

    def takes(self, module: str) -> bool:
        """Whether a module is among the targets of compressed-tensors: a class, a name, or "re:" and an expression."""
        return any(
            target == "Linear"
            or (re.match(target[3:], module) is not None if target.startswith("re:") else module.endswith(target))
            for target in self.targets
        )


def read_layouts(values: Mapping[str, Any], where: str) -> tuple[WeightLayout, ...]:
    """The layouts of a config.json's `quantization_config`, one for each group of compressed-tensors; none of a folder
    of another method.

    Raises ModelError for what danlu does not read.
    """
    settings = values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in METHODS:
        return ()
    assert isinstance(settings, Mapping)
    where = f"{where}: quantization_config"
    if method == "compressed-tensors":
        return _compressed_tensors(settings, where)
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    if not isinstance(bits, int) or not isinstance(group, int) or (group != -1 and group < 1):
        raise ModelError(f"{where}: bits {bits!r} in groups of {group!r} are none of {method}. {_ADVICE}")
    group = max(group, 0)
    if method == "awq":
        version = settings.get("version", "gemm")
        if bits != 4 or version != "gemm":
            raise ModelError(
                f"{where}: of AWQ danlu reads 4 bits in the layout gemm, not {bits} in {version!r}. {_ADVICE}"
            )
        return (WeightLayout("awq", bits, group, has_zeros=True),)
    form = settings.get("checkpoint_format", "gptq")
    if bits not in (2, 3, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{where}: of GPTQ danlu reads 2, 3, 4 and 8 bits in the formats gptq and gptq_v2, not {bits} in {form!r}. "
            f"{_ADVICE}"
        )
    return (WeightLayout("gptq", bits, group, has_zeros=True, minus_one=form == "gptq"),)


def _compressed_tensors(settings: Mapping[str, Any], where: str) -> tuple[WeightLayout, ...]:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{where}: config_groups is {groups!r}, not the schemes of modules. {_ADVICE}")
    layouts = []
    for name, scheme in groups.items():
        weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ModelError(f"{where}: config_groups.{name} says nothing of its weights. {_ADVICE}")
        form = scheme.get("format") or settings.get("format")
        bits, group = weights.get("num_bits", 8), weights.get("group_size") or 0
        is_float, block = weights.get("type", "int") == "float", weights.get("block_structure")
        if not isinstance(form, str) or form not in _FORMATS or (is_float and bits not in (4, 8)) or not 2 <= bits <= 8:
            raise ModelError(f"{where}: config_groups.{name} is in the format {form!r} of {bits} bits. {_ADVICE}")
        layouts.append(
            WeightLayout(
                _FORMATS[form],
                bits,
                max(group, 0),
                None if block is None else (int(block[0]), int(block[1])),
                has_zeros=not weights.get("symmetric", True),
                targets=tuple(scheme.get("targets") or ("Linear",)),
            )
        )
    return tuple(layouts)


def export_problem(form: Format, export: Export, shape: tuple[int, int] | None = None) -> str | None:
    """Says why a format, or a matrix [O, I] in it, cannot be stored so; None where it can."""
    columns = form.block[1]
    if form.zero == "float":
        return f"{export} holds integer zeros, and these are not: rounded, the weights would be others"
    if export == "fp8":
        is_fp8 = form.element == "e4m3" and form.scale in ("float32", "power-of-two") and min(form.block) > 0
        return None if is_fp8 else "fp8 is E4M3 with a float32 scale of each block, such as 128 x 128"
    if export in ("mxfp4", "nvfp4") or form.element == "e2m1":
        return _float4_problem(form, export, shape)
    if form.of_element.is_float:
        is_plain = export == "compressed-tensors" and form.element == "e4m3" and form.scale in _WIDE_SCALES
        return None if is_plain else f"{export} does not hold {form.element} with scales of {form.scale}"
    if form.scale not in _WIDE_SCALES or form.block[0] != 1:
        return f"{export} holds integers with a floating-point scale for each group of inputs of a row"
    if export in ("awq", "gptq") and form.scale != "float16":
        return f"{export} has float16 scales, not {form.scale}"
    if export == "awq" and (form.element != "int4" or form.zero != "integer"):
        return "awq is 4 bits with integer zeros"
    if export == "gptq" and form.bits not in (2, 3, 4, 8):
        return f"gptq has 2, 3, 4 or 8 bits, not {form.bits}"
    if shape is None:
        return None
    outputs, inputs = shape
    if columns and inputs % columns:
        return f"its {inputs} inputs are not in whole groups of {columns}, which {export} cannot say"
    if export == "awq" and outputs % 8:
        return f"its {outputs} outputs do not fill int32 of 8 codes"
    if export == "gptq" and (inputs % 32 or outputs % 32):
        return f"{outputs} x {inputs} is not of multiples of 32, which gptq's int32 need"
    return None


_WIDE_SCALES = ("float32", "float16", "bfloat16", "power-of-two")


def _float4_problem(form: Format, export: Export, shape: tuple[int, int] | None) -> str | None:
    kinds = {"e8m0": ("mxfp4", 32), "e4m3": ("nvfp4", 16)}
    name, group = kinds.get(form.scale, ("", 0))
    if form.element != "e2m1" or form.block != (1, group) or export not in ("compressed-tensors", name):
        return f"{export} does not hold {form.element} with scales of {form.scale} for {form.block}"
    if shape is not None and shape[1] % group:
        return f"its {shape[1]} inputs are not in whole groups of {group}, which {export} cannot say"
    return None


def config_values(export: Export, form: Format, *, skip: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a folder with weights in a format; skip: modules that stay as they are."""
    rows, columns = form.block
    match export:
        case "fp8":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [rows, columns],
                "modules_to_not_convert": list(skip),
            }
        case "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": columns or -1,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": list(skip),
            }
        case "gptq":
            # Readers of the first format differ on a zero of 0, which it stores as the largest code; 8 of 16 is safe.
            return {
                "quant_method": "gptq",
                "bits": form.bits,
                "group_size": columns or -1,
                "sym": form.zero == "none",
                "desc_act": False,
                "checkpoint_format": "gptq" if form.zero == "none" else "gptq_v2",
                "modules_in_block_to_quantize": None,
            }
    weights: dict[str, Any] = {"num_bits": form.bits, "type": "float" if form.of_element.is_float else "int"}
    weights |= {"symmetric": form.zero == "none", "dynamic": False}
    if form.element == "e2m1":
        is_nv = form.scale == "e4m3"
        weights |= {"strategy": "tensor_group" if is_nv else "group", "group_size": columns}
        weights["scale_dtype"] = "torch.float8_e4m3fn" if is_nv else "torch.uint8"
        name = "nvfp4-pack-quantized" if is_nv else "mxfp4-pack-quantized"
    elif form.of_element.is_float:
        weights["strategy"] = {(0, 0): "tensor", (1, 0): "channel"}.get(form.block, "block")
        if weights["strategy"] == "block":
            weights["block_structure"] = [rows, columns]
        name = "naive-quantized"  # float-quantized has quantized activations
    else:
        weights |= {"strategy": "group", "group_size": columns} if columns else {"strategy": "channel"}
        name = "pack-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": list(skip),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name}},
    }
