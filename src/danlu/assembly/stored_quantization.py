"""Whether a model folder stores its weights in 4 bits already."""

from __future__ import annotations

from pathlib import Path

from danlu.core.errors import ModelError
from danlu.models.block_scaled import scaled_method
from danlu.models.hf_folder import CONFIG, read_json
from danlu.numerics.bitsandbytes_config import read_config
from danlu.recipe import sections


def stored_quantization(folder: Path) -> sections.Nf4 | sections.Fp4 | None:
    """The section that would quantize a model as its folder stores it; None of weights that are not quantized, or are
    dequantised while they are read.

    Raises ModelError for weights that are quantized in a way that danlu does not read.
    """
    values = read_json(folder / CONFIG)
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
