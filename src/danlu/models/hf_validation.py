"""Checks that the weights of a folder fit its config, by index and headers alone: no weight is read. No torch.

It takes milliseconds, so it comes before rows are tokenised, which may take hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import FLOAT_DTYPES, TensorLocation
from danlu.models.block_scaled import ScaledLocation, fp8_block, with_scaled
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import CONFIG, read_json, read_tensors
from danlu.models.hf_layout import (
    EMBEDDING,
    HEAD,
    IGNORED,
    SCORE,
    SCORE_BIAS,
    hf_name,
    hf_tensors,
    holds_stacked_experts,
    own_name,
)
from danlu.models.hf_parts import HFTensor

FOUR_BIT = "U8"  # dtype of a weight in 4 bits: its codes, two a byte; its constants are `<name>.absmax`, ...
_MAX_SHOWN = 10


def own_tensors(folder: Path, config: ModelConfig) -> dict[str, TensorLocation]:
    """Returns the locations of the tensors that danlu trains, by name among `hf_tensors`. Raises ModelError as
    `read_tensors`.
    """
    named = ((own_name(name, config), location) for name, location in read_tensors(folder).items())
    return {name: location for name, location in named if name is not None}


def untouched_tensors(folder: Path, config: ModelConfig) -> dict[str, TensorLocation]:
    """The other tensors of a folder, by their names there: parts of a multimodal model, layers that predict further."""
    stored = read_tensors(folder)
    return {name: location for name, location in stored.items() if own_name(name, config) is None}


def expected_tensors(config: ModelConfig, stored: Mapping[str, TensorLocation | ScaledLocation]) -> list[HFTensor]:
    """The tensors that a folder is to hold, as they lie in it: experts one by one or stacked, as it has them; of
    MXFP4's numbers the inputs, which share scales, last.

    stored: the folder's tensors by name among `hf_tensors`, with their scales.
    """
    tensors = hf_tensors(config, stacked=holds_stacked_experts(stored, config))
    return [as_stored(tensor, stored.get(tensor.name)) for tensor in tensors]


def as_stored(tensor: HFTensor, location: TensorLocation | ScaledLocation | None) -> HFTensor:
    """A tensor as it lies in a folder: MXFP4's numbers have the inputs last, which share scales."""
    return tensor.transposed if isinstance(location, ScaledLocation) and location.is_mxfp4 else tensor


def check_headers(folder: Path, config: ModelConfig, *, quantized: bool) -> dict[str, TensorLocation | ScaledLocation]:
    """Checks that index, headers and file sizes fit the config, and returns the location of each tensor that danlu
    trains, with its scales if it has any.

    quantized: weights may be in 4 bits. Raises one ModelError with all problems of the tensors: missing, unknown, of
    another shape or dtype; and those of `hf_folder.read_tensors`.
    """
    values = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    stored, problems = with_scaled(own_tensors(folder, config), fp8_block(values, str(folder / CONFIG)))
    expected = expected_tensors(config, stored)
    embedding = hf_name(EMBEDDING, config)
    four_bit = {tensor.name for tensor in expected if tensor.name in stored and stored[tensor.name].dtype == FOUR_BIT}
    if four_bit and not quantized:
        raise ModelError(f"{folder}: its weights are stored in 4 bits; here the original weights are needed")
    expected = [tensor for tensor in expected if tensor.name not in four_bit]
    names = {tensor.name for tensor in expected}
    for tensor in expected:
        location = stored.get(tensor.name)
        if location is None and config.tie_word_embeddings and tensor.name == embedding:
            location = stored.get(HEAD)  # some tools keep a tied matrix under its other name
        if location is None:
            problems.append(f"{tensor.name}: missing; expected shape {list(tensor.shape)}")
        elif location.shape != tensor.shape:
            shapes = f"expected shape {list(tensor.shape)}, found {list(location.shape)}"
            problems.append(f"{tensor.name} in {location.file.name}: {shapes}")
        elif location.dtype not in FLOAT_DTYPES:
            problems.append(f"{tensor.name} in {location.file.name}: expected floating point, found {location.dtype}")
    may_hold = names | ({HEAD} if config.tie_word_embeddings else set())
    if config.task != "causal-lm":  # its own head is read by `models.score_head`
        may_hold |= {HEAD, SCORE, SCORE_BIAS}
    for name, location in stored.items():
        is_constant = any(name == weight or name.startswith(f"{weight}.") for weight in four_bit)
        if name not in may_hold and not is_constant and not IGNORED.search(name):
            problems.append(f"{name} in {location.file.name}: not a tensor of this {config.family} model")
    if not problems:
        return stored
    if len(problems) == 1 and problems[0].startswith(f"{HEAD}: missing"):
        problems.append('if its head is the embedding, set "tie_word_embeddings": true in config.json')
    more = [f"... and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
    raise ModelError("\n  ".join([f"{folder}: the weights do not fit config.json:", *problems[:_MAX_SHOWN], *more]))
