"""A 4-bit matrix as bitsandbytes and transformers lay it out in safetensors files.

In addition to the codes, under the weight's own name, there are tensors with longer names: `.absmax`, `.quant_map`,
with double quantization `.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or fp4):
settings that are no tensors, as JSON in bytes.

N numbers · B blocks
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit import BLOCKS, NESTED_BLOCK, FourBitMatrix, Nested, codebook

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
