"""How a folder of another tool stores its quantized weights, by `quantization_config` in its config.json. No torch.

compressed-tensors (llm-compressor), AWQ (AutoAWQ's GEMM) and GPTQ (AutoGPTQ, GPTQModel) as their own code has them; the
other way round, what config.json says of weights that danlu writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from danlu.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.numerics.format import Format, Scaled

Layout = Literal["packed", "plain", "mxfp8", "mxfp4", "nvfp4", "awq", "gptq"]
Export = Literal["compressed-tensors", "awq", "gptq", "fp8", "mxfp8", "mxfp4", "nvfp4"]
METHODS = ("compressed-tensors", "awq", "gptq")
"""The `quant_method` values of these folders."""
_FORMATS: Mapping[str, Layout] = {
    "pack-quantized": "packed",
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "mxfp8-quantized": "mxfp8",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}
_FLOAT_GROUPS: Mapping[Layout, int] = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Inputs that share a scale, where the layout says it."""
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    "packed": ("weight_packed", "weight_scale", "weight_shape"),
    "plain": ("weight", "weight_scale"),
    "mxfp8": ("weight", "weight_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales"),
}
"""The ends of the names of a weight's tensors, its codes first."""
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
    element: Literal["int", "float"] = "int"
    rounds_activations: bool = False
    """Whether products take activations in 8 bits, rounded token by token: integers or E4M3, as the weight's codes."""

    def takes(self, module: str) -> bool:
        """Whether a module is among the targets of compressed-tensors: a class, a name, or "re:" and an expression."""
        return any(
            target == "Linear"
            or (re.match(target[3:], module) is not None if target.startswith("re:") else module == target)
            for target in self.targets
        )

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point numbers; of `plain` ones the tensors tell too."""
        return self.layout in _FLOAT_GROUPS or self.element == "float"

    @property
    def scales(self) -> str:
        """The end of the name of the scales."""
        return "scales" if self.layout in ("awq", "gptq") else "weight_scale"

    def block_of(self, shape: Sequence[int] | None) -> tuple[int, int]:
        """The rows and columns that share a scale, 0 being all of them. shape: of the scales, where it is known."""
        if self.layout in _FLOAT_GROUPS:
            return 1, _FLOAT_GROUPS[self.layout]
        if shape is not None and math.prod(shape) == 1 and self.layout in ("packed", "plain"):
            return 0, 0
        return self.block or (1, self.group)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], stored_shape: tuple[int, int] | None) -> tuple[int, int]:
        """The shape [O, I] of a weight with tensors of these shapes, by the ends of their names.

        stored_shape: the numbers in `weight_shape`, where there is one. Raises ModelError, with the tensor's name, for
        tensors that are missing or do not fit together.
        """
        missing = [end for end in (*_PARTS[self.layout], *self._zero_parts()) if end not in shapes]
        if missing:
            raise ModelError(f"its tensor {missing[0]} is missing")
        codes = _PARTS[self.layout][0]
        if len(shapes[codes]) != 2:
            raise ModelError(f"{codes} of shape {list(shapes[codes])} is no matrix")
        height, width = shapes[codes]
        match self.layout:
            case "packed":
                assert stored_shape is not None
                shape = stored_shape
                if (height, width) != (shape[0], -(-shape[1] * self.bits // 32)) or min(shape) < 1:
                    raise ModelError(
                        f"{codes} of shape {[height, width]} does not hold {list(shape)} in {self.bits} bits"
                    )
            case "plain" | "mxfp8":
                shape = height, width
            case "mxfp4" | "nvfp4":
                shape = height, 2 * width
            case "awq":
                shape = 32 // self.bits * width, height
            case "gptq":  # rows of int32 may end with bits of no input
                inputs, *_ = shapes.get("g_idx", (32 * height // self.bits,))
                fills = -(-inputs * self.bits // 32) == height
                shape = width, inputs if fills else 32 * height // self.bits
        self._check_scales(shapes, shape)
        return shape

    def _zero_parts(self) -> tuple[str, ...]:
        return ("weight_zero_point",) if self.has_zeros and self.layout in ("packed", "plain") else ()

    def _check_scales(self, shapes: Mapping[str, tuple[int, ...]], shape: tuple[int, int]) -> None:
        """Raises ModelError for scales and groups that do not fit a weight [O, I]."""
        outputs, inputs = shape
        blocks = outputs, -(-inputs // (_FLOAT_GROUPS.get(self.layout) or self.group or inputs))
        if self.block is not None:
            blocks = -(-outputs // self.block[0]), -(-inputs // self.block[1])
        name, allowed = self.scales, [blocks]
        if self.layout in ("awq", "gptq"):
            allowed = [(blocks[1], outputs)]
        elif self.layout in ("packed", "plain") and not self.group and self.block is None:
            allowed += [(outputs,), (1,), (1, 1), ()]  # type: ignore[list-item]
        if shapes[name] not in allowed:
            raise ModelError(f"{name} of shape {list(shapes[name])}, not {list(allowed[0])}, for {list(shape)}")
        for end in ("g_idx", "weight_g_idx"):
            if end in shapes and shapes[end] != (inputs,):
                raise ModelError(f"{end} of shape {list(shapes[end])}, not {[inputs]}")

    def read(self, tensors: Mapping[str, Tensor], where: str) -> Scaled:
        """The weight [O, I] of its tensors, by the ends of their names. Raises ModelError as
        `weight_layouts.read_weight`.
        """
        from danlu.numerics.weight_layouts import read_weight

        return read_weight(self, tensors, where)


@dataclass(frozen=True)
class FolderLayouts:
    """How a folder stores its quantized weights: which layout the weight of each module is in."""

    method: str
    layouts: tuple[WeightLayout, ...]
    """compressed-tensors: one for each group of modules, of which the first that takes a module holds."""
    overrides: tuple[tuple[str, Mapping[str, int] | None], ...] = field(default=(), compare=False)
    """GPTQModel's `dynamic`: expressions for names of modules, and the settings that such a module has of its own; None
    of one that is not quantized."""
    quantizes_activations: bool = False
    """Whether a kernel that serves the model is to quantize activations too."""

    @property
    def rounds_activations(self) -> bool:
        """Whether all modules are to be multiplied with activations in 8 bits, token by token (W8A8)."""
        return bool(self.layouts) and all(layout.rounds_activations for layout in self.layouts)

    def of(self, module: str) -> WeightLayout | None:
        """The layout of a module's weight, by the module's name in the folder; None of one that is not quantized."""
        for expression, settings in self.overrides:
            if re.match(expression, module):
                return None if settings is None else replace(self.layouts[0], **settings)  # type: ignore[arg-type]
        return next((layout for layout in self.layouts if layout.takes(module)), None)


def read_layouts(values: Mapping[str, Any], where: str) -> FolderLayouts | None:
    """The layouts of a config.json's `quantization_config`; None of a folder of another method.

    Settings for activations and caches of keys and values change no weight, and are passed over. Raises ModelError for
    what danlu does not read.
    """
    settings = values.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in METHODS:
        return None
    assert isinstance(settings, Mapping)
    where = f"{where}: quantization_config"
    if method == "compressed-tensors":
        layouts = _compressed_tensors(settings, where)
        schemes = settings["config_groups"].values()
        return FolderLayouts(
            method, layouts, quantizes_activations=any(each.get("input_activations") for each in schemes)
        )
    bits, group = settings.get("bits", 4), settings.get("group_size", 128)
    if not isinstance(bits, int) or not isinstance(group, int) or (group != -1 and group < 1):
        raise ModelError(f"{where}: bits {bits!r} in groups of {group!r} are none of {method}. {_ADVICE}")
    group = max(group, 0)
    if method == "awq":
        version = str(settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or settings.get("zero_point") is False:
            raise ModelError(
                f"{where}: of AWQ danlu reads 4 bits with zeros in the layout gemm, not {bits} in {version!r}"
                f"{' without zeros' if settings.get('zero_point') is False else ''}. {_ADVICE}"
            )
        return FolderLayouts(method, (WeightLayout("awq", bits, group, has_zeros=True),))
    return _gptq(settings, bits, group, where)


def _gptq(settings: Mapping[str, Any], bits: int, group: int, where: str) -> FolderLayouts:
    form = settings.get("checkpoint_format") or "gptq"
    form = "marlin" if settings.get("is_marlin_format") else form
    own = settings.get("dynamic") or {}
    if not isinstance(own, Mapping) or not all(isinstance(each, Mapping) for each in own.values()):
        raise ModelError(f"{where}: dynamic is {own!r}, not settings by names of modules. {_ADVICE}")
    overrides: list[tuple[str, Mapping[str, int] | None]] = []
    for expression, changed in own.items():
        keys = {"bits": "bits", "group_size": "group"}
        sizes = {keys[key]: max(0, value) for key, value in changed.items() if key in keys and isinstance(value, int)}
        overrides.append((expression.lstrip("+-:"), None if expression.startswith("-") else sizes))
    widths = {bits, *(sizes["bits"] for _, sizes in overrides if sizes and "bits" in sizes)}
    if not widths <= {2, 3, 4, 8} or form not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{where}: of GPTQ danlu reads 2, 3, 4 and 8 bits in the formats gptq and gptq_v2, not "
            f"{', '.join(map(str, sorted(widths)))} in {form!r}. {_ADVICE}"
        )
    layout = WeightLayout("gptq", bits, group, has_zeros=True, minus_one=form == "gptq")
    return FolderLayouts("gptq", (layout,), tuple(overrides))


def _compressed_tensors(settings: Mapping[str, Any], where: str) -> tuple[WeightLayout, ...]:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{where}: config_groups is {groups!r}, not the schemes of modules. {_ADVICE}")
    sparsity, transforms = settings.get("sparsity_config") or {}, settings.get("transform_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelError(
            f"{where}: the weights are stored sparse ({sparsity['format']!r}), which danlu does not read. {_ADVICE}"
        )
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ModelError(
            f"{where}: transform_config rotates activations of this model, which danlu does not compute. {_ADVICE}"
        )
    layouts = [
        layout
        for name, scheme in groups.items()
        if (layout := _scheme(name, scheme, settings.get("format"), where)) is not None
    ]
    # A module takes the scheme that names it before one that names its class.
    return tuple(sorted(layouts, key=lambda layout: "Linear" in layout.targets))


def _scheme(name: str, scheme: Any, format_of_all: Any, where: str) -> WeightLayout | None:
    """The layout of a group of modules; None where it quantizes activations alone."""
    weights = scheme.get("weights") if isinstance(scheme, Mapping) else None
    if isinstance(scheme, Mapping) and weights is None and scheme.get("input_activations") is not None:
        return None
    if not isinstance(weights, Mapping):
        raise ModelError(f"{where}: config_groups.{name} says nothing of its weights. {_ADVICE}")
    form = scheme.get("format") or format_of_all
    bits, group = weights.get("num_bits", 8), weights.get("group_size") or 0
    is_float, block = weights.get("type", "int") == "float", weights.get("block_structure")
    if not isinstance(form, str) or form not in _FORMATS or (is_float and bits not in (4, 8)) or not 2 <= bits <= 8:
        raise ModelError(f"{where}: config_groups.{name} is in the format {form!r} of {bits} bits. {_ADVICE}")
    layout = _FORMATS[form]
    if layout in _FLOAT_GROUPS and group not in (0, _FLOAT_GROUPS[layout]):
        raise ModelError(
            f"{where}: config_groups.{name} has groups of {group}, and {form} of {_FLOAT_GROUPS[layout]}. {_ADVICE}"
        )
    return WeightLayout(
        layout,
        bits,
        max(group, 0),
        None if block is None else (int(block[0]), int(block[1])),
        has_zeros=not weights.get("symmetric", True),
        targets=tuple(scheme.get("targets") or ("Linear",)),
        element="float" if is_float else "int",
        rounds_activations=bits == 8
        and not (group or block)
        and weights.get("symmetric", True)
        and _is_by_token(scheme.get("input_activations"), "float" if is_float else "int"),
    )


_BY_TOKEN: Mapping[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Activations as integers that are scaled token by token, as the schemes W8A8 of compressed-tensors have them."""


def _is_by_token(activations: Any, kind: Literal["int", "float"]) -> bool:
    """Whether activations are scaled token by token, to 8 bits of the type `kind`."""
    if not isinstance(activations, Mapping):
        return False
    defaults = {"num_bits": 8, "type": "int", "symmetric": True}
    settings, wanted = {**defaults, **activations}, {**_BY_TOKEN, "type": kind}
    return all(settings.get(key) == value for key, value in wanted.items())


def export_problem(form: Format, export: Export, shape: tuple[int, int] | None = None) -> str | None:
    """Says why a format, or a matrix [O, I] in it, cannot be stored so; None where it can."""
    columns = form.block[1]
    if form.zero == "float":
        return f"{export} holds integer zeros, and these are not: rounded, the weights would be others"
    if export == "fp8":
        is_fp8 = form.element == "e4m3" and form.scale in ("float32", "power-of-two") and min(form.block) > 0
        return None if is_fp8 else "fp8 is E4M3 with a float32 scale of each block, such as 128 x 128"
    if export in ("mxfp8", "mxfp4", "nvfp4") or form.element == "e2m1" or form.scale == "e8m0":
        return _small_float_problem(form, export, shape)
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


_SMALL_FLOATS: Mapping[tuple[str, str], tuple[Export, int]] = {
    ("e4m3", "e8m0"): ("mxfp8", 32),
    ("e2m1", "e8m0"): ("mxfp4", 32),
    ("e2m1", "e4m3"): ("nvfp4", 16),
}
"""(element, scale) -> the export, and the inputs that share a scale."""


def _small_float_problem(form: Format, export: Export, shape: tuple[int, int] | None) -> str | None:
    name, group = _SMALL_FLOATS.get((form.element, form.scale), ("", 0))
    if not name or form.block != (1, group) or export not in ("compressed-tensors", name):
        return f"{export} does not hold {form.element} with scales of {form.scale} for {form.block}"
    if shape is not None and shape[1] % group:
        return f"its {shape[1]} inputs are not in whole groups of {group}, which {export} cannot say"
    return None


def config_values(
    export: Export, form: Format, *, skip: Sequence[str], rounds_activations: bool = False
) -> dict[str, Any]:
    """The `quantization_config` of a folder with weights in a format.

    skip: modules that stay as they are. rounds_activations: products are to take activations as 8-bit integers, of
    weights in compressed-tensors' 8-bit integers by rows.
    """
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
    if (small := _SMALL_FLOATS.get((form.element, form.scale))) is not None:
        is_nv = small[0] == "nvfp4"
        weights |= {"strategy": "tensor_group" if is_nv else "group", "group_size": columns}
        weights["scale_dtype"] = "torch.float8_e4m3fn" if is_nv else "torch.uint8"
        name = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}.get(small[0], "mxfp8-quantized")
    elif form.of_element.is_float:
        weights["strategy"] = {(0, 0): "tensor", (1, 0): "channel"}.get(form.block, "block")
        if weights["strategy"] == "block":
            weights["block_structure"] = [rows, columns]
        name = "naive-quantized"  # float-quantized has quantized activations
    else:
        weights |= {"strategy": "group", "group_size": columns} if columns else {"strategy": "channel"}
        name = "int-quantized" if rounds_activations else "pack-quantized"
    activations = {"input_activations": dict(_BY_TOKEN)} if rounds_activations else {}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": list(skip),
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": name, **activations}},
    }
