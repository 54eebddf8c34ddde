"""`quantization_config` of a folder with weights in 4 bits, as bitsandbytes and transformers write it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from danlu.core.errors import ModelError

Kind = Literal["nf4", "fp4"]
KINDS: tuple[Kind, ...] = ("nf4", "fp4")
COMPUTE_TYPES = ("float32", "bfloat16", "float16", "float64", "float", "half", "double")
"""Names of torch's types that products are computed in."""
_ADVICE = "danlu reads bitsandbytes' nf4 and fp4; use a model in one of them, or the one before quantization."


@dataclass(frozen=True)
class FourBitConfig:
    """The 4-bit settings of a folder's config.json. Those stored with each weight take precedence."""

    kind: Kind
    double: bool
    skip: tuple[str, ...] = ()
    """Modules that are not packed, as transformers names them: whole names, or their last parts."""


def config_values(kind: Kind, *, double: bool, compute_dtype: str, skip: Sequence[str] | None = None) -> dict[str, Any]:
    """The `quantization_config` of a folder with 4-bit weights, as transformers writes it.

    compute_dtype: the name of the type of a transformers model's products. skip: modules that are not packed.
    """
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": compute_dtype,
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
    if name not in COMPUTE_TYPES:
        raise ModelError(f"{where}: bnb_4bit_compute_dtype is {name!r}, not a type such as 'bfloat16'.")
    skip = values.get("llm_int8_skip_modules")
    if skip is not None and not (isinstance(skip, list) and all(isinstance(module, str) for module in skip)):
        raise ModelError(f"{where}: llm_int8_skip_modules is {skip!r}, not a list of names.")
    return FourBitConfig(kind, double, tuple(skip or ()))


def _flag(values: Mapping[str, Any], key: str, where: str) -> bool:
    flag = values.get(key, False)
    if not isinstance(flag, bool):
        raise ModelError(f"{where}: {key} is {flag!r}, not true or false.")
    return flag
