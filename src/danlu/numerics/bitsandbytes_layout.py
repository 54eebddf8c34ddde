"""A 4-bit matrix as bitsandbytes and transformers lay it out in safetensors files, and `quantization_config` of a
folder.

In addition to the codes, under the weight's own name, there are tensors with longer names: `.absmax`, `.quant_map`,
with double quantization `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or fp4):
settings that are no tensors, as JSON in bytes.

N numbers · B blocks
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.four_bit import BLOCKS, KINDS, NESTED_BLOCK, FourBitMatrix, Kind, Nested, codebook

STATE = ".quant_state.bitsandbytes__"
SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *(f"{STATE}{kind}" for kind in KINDS))
"""The suffixes of a packed weight's name in the names of its other tensors."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# bitsandbytes unpacks by codebooks of its own, whatever is in the file: older versions wrote fewer digits.
_CODEBOOK_TOLERANCE = 1e-3


def write(name: str, packed: FourBitMatrix) -> dict[str, Tensor]:
    """The tensors of the weight `name` by name. Shared constants are copied: safetensors shares no memory."""
    state: dict[str, Any] = {
        "quant_type": packed.kind,
        "blocksize": packed.block,
        "dtype": str(packed.dtype).removeprefix("torch."),
        "shape": packed.shape,
    }
    device = packed.codes.device
    tensors = {name: packed.codes, f"{name}.quant_map": codebook(packed.kind, device).clone()}
    if isinstance(packed.absmax, Tensor):
        tensors[f"{name}.absmax"] = packed.absmax
    else:
        nested = packed.absmax
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": nested.offset.item()}
        tensors[f"{name}.absmax"] = nested.codes
        tensors[f"{name}.nested_absmax"] = nested.absmax
        tensors[f"{name}.nested_quant_map"] = nested.values.clone()
    text = bytearray(json.dumps(state).encode())
    tensors[f"{name}{STATE}{packed.kind}"] = torch.frombuffer(text, dtype=torch.uint8)
    return tensors


def read(name: str, tensors: Mapping[str, Tensor], where: str) -> FourBitMatrix:
    """Reads the weight `name` out of `tensors`; see `FourBitWeight.from_tensors`.

    Of tensors on the meta device type and size are checked, which is all they have.
    """
    return _Reader(name, tensors, where).packed()


@dataclass(frozen=True)
class _Reader:
    """Takes a weight's tensors one by one and raises ModelError at the first that cannot be right."""

    name: str
    tensors: Mapping[str, Tensor]
    where: str  # the file, for messages

    def packed(self) -> FourBitMatrix:
        kind = self.kind()
        state = self.state(kind)
        block = self.one_of(state, "blocksize", BLOCKS)
        shape = self.matrix_shape(state)
        dtype = _DTYPES[self.one_of(state, "dtype", tuple(_DTYPES))]
        count = math.prod(shape)
        codes = self.codes(count)
        values = self.tensor(".quant_map", torch.float32, 16)
        if not torch.allclose(values, codebook(kind, values.device), rtol=0, atol=_CODEBOOK_TOLERANCE):
            self.fail(f"{self.name}.quant_map does not hold {kind}'s 16 values")
        blocks = -(-count // block)
        if "nested_offset" in state or f"{self.name}.nested_absmax" in self.tensors:
            absmax: Tensor | Nested = self.nested(state, blocks)
        else:
            absmax = self.tensor(".absmax", torch.float32, blocks)
        return FourBitMatrix(kind, block, shape, dtype, codes, absmax)

    def kind(self) -> Kind:
        kinds = [key.removeprefix(self.name + STATE) for key in self.tensors if key.startswith(self.name + STATE)]
        if not kinds:
            self.fail(f"{self.name}{STATE}nf4 (or fp4) is missing: what the codes of {self.name} mean")
        if len(kinds) > 1:
            self.fail(f"{self.name} has {len(kinds)} descriptions: {', '.join(sorted(kinds))}")
        if kinds[0] not in KINDS:
            raise ModelError(
                f"{self.where}: {self.name} is quantized as {kinds[0]!r}. danlu reads nf4 and fp4; use a model in one "
                "of them, or one that is not quantized."
            )
        return kinds[0]

    def state(self, kind: Kind) -> dict[str, Any]:
        key = f"{self.name}{STATE}{kind}"
        stored = self.tensors[key]
        if stored.dtype != torch.uint8:
            self.fail(f"{key} holds {_name(stored.dtype)}, not bytes")
        try:
            state = json.loads(stored.cpu().contiguous().numpy().tobytes())
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
            self.fail(f"{key} is no JSON ({error})")
        if not isinstance(state, dict):
            self.fail(f"{key} is no JSON object")
        if state.get("quant_type") != kind:
            self.fail(f"{key} says quant_type {state.get('quant_type')!r}")
        return state

    def matrix_shape(self, state: dict[str, Any]) -> tuple[int, int]:
        shape = state.get("shape")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(side) is int and side > 0 for side in shape)):
            self.fail(f"{self.name} is described with the shape {shape!r}, not [outputs, inputs]")
        return shape[0], shape[1]

    def codes(self, count: int) -> Tensor:
        if self.name not in self.tensors:
            self.fail(f"{self.name} is missing")
        # Some folders keep the bytes as numbers of another type (bnb_4bit_quant_storage), to be cut with other weights.
        codes = self.tensors[self.name].contiguous().view(-1).view(torch.uint8)
        if codes.numel() != (count + 1) // 2:
            self.fail(f"{self.name} takes {codes.numel()} bytes, but {count} numbers take {(count + 1) // 2}")
        return codes.unsqueeze(1)

    def nested(self, state: dict[str, Any], blocks: int) -> Nested:
        self.one_of(state, "nested_blocksize", (NESTED_BLOCK,))
        self.one_of(state, "nested_dtype", ("float32",))
        offset = state.get("nested_offset")
        if not (isinstance(offset, float) and abs(offset) <= torch.finfo(torch.float32).max):
            self.fail(f"{self.name} is described with the nested_offset {offset!r}, not a float32 number")
        codes = self.tensor(".absmax", torch.uint8, blocks)
        absmax = self.tensor(".nested_absmax", torch.float32, -(-blocks // NESTED_BLOCK))
        values = self.tensor(".nested_quant_map", torch.float32, 256)
        return Nested(codes, absmax, torch.tensor(offset, dtype=torch.float32, device=codes.device), values)

    def tensor(self, suffix: str, dtype: torch.dtype, size: int) -> Tensor:
        """[size], finite."""
        key = self.name + suffix
        if key not in self.tensors:
            self.fail(f"{key} is missing")
        values = self.tensors[key]
        if values.dtype != dtype:
            self.fail(f"{key} holds {_name(values.dtype)}, not {_name(dtype)}")
        if values.numel() != size:
            self.fail(f"{key} has {values.numel()} entries, not {size}")
        if dtype.is_floating_point and not values.is_meta and not bool(torch.isfinite(values).all()):
            self.fail(f"{key} holds NaN or infinite values")
        return values.contiguous().view(-1)

    def one_of(self, state: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
        value = state.get(key)
        if not isinstance(value, str | int) or value not in allowed:
            self.fail(f"{self.name} is described with the {key} {value!r}, not {_listed(allowed)}")
        return value

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.where}: {what}. The folder is incomplete or damaged: fetch or make it again.")


def _listed(values: tuple[Any, ...]) -> str:
    *first, last = (str(value) for value in values)
    return f"{', '.join(first)} or {last}" if first else last


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ADVICE = "danlu reads bitsandbytes' nf4 and fp4; use a model in one of them, or the one before quantization."


@dataclass(frozen=True)
class FourBitConfig:
    """The 4-bit settings of a folder's config.json. Those stored with each weight take precedence."""

    kind: Kind
    double: bool


def config_values(kind: Kind, *, double: bool, dtype: torch.dtype, skip: Sequence[str] | None = None) -> dict[str, Any]:
    """The `quantization_config` of a folder with 4-bit weights, as transformers writes it.

    dtype: of the products of a transformers model. skip: modules that are not packed.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None if skip is None else list(skip),
        # Settings of the 8-bit method that transformers writes into every such folder; they change nothing in 4 bits.
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": 6.0,
    }


def read_config(config: Mapping[str, Any], where: str) -> FourBitConfig | None:
    """The 4-bit settings in the values of a config.json; None if its weights are not quantized.

    Raises:
        ModelError: they are quantized in a way that danlu does not read, or the values make no sense.
    """
    values = config.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise ModelError(f"{where}: quantization_config is {values!r}, not an object.")
    four, eight = (_flag(values, f"load_in_{bits}bit", where) for bits in (4, 8))
    # Before it named its methods, transformers wrote bitsandbytes' settings alone.
    method = values.get("quant_method", "bitsandbytes" if four or eight else None)
    if method != "bitsandbytes":
        raise ModelError(f"{where}: the weights are quantized with {method!r}. {_ADVICE}")
    if eight:
        raise ModelError(f"{where}: the weights are quantized to 8 bits (LLM.int8). {_ADVICE}")
    if not four:
        raise ModelError(f"{where}: quantization_config asks for neither 4 nor 8 bits.")
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind not in KINDS:
        raise ModelError(f"{where}: bnb_4bit_quant_type is {kind!r}. {_ADVICE}")
    double = _flag(values, "bnb_4bit_use_double_quant", where)
    name = values.get("bnb_4bit_compute_dtype") or "float32"
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ModelError(f"{where}: bnb_4bit_compute_dtype is {name!r}, not a type such as 'bfloat16'.")
    skip = values.get("llm_int8_skip_modules")
    if skip is not None and not (isinstance(skip, list) and all(isinstance(module, str) for module in skip)):
        raise ModelError(f"{where}: llm_int8_skip_modules is {skip!r}, not a list of names.")
    return FourBitConfig(kind, double)


def _flag(values: Mapping[str, Any], key: str, where: str) -> bool:
    flag = values.get(key, False)
    if not isinstance(flag, bool):
        raise ModelError(f"{where}: {key} is {flag!r}, not true or false.")
    return flag
