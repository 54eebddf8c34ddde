"""A model opened for answering: weights, words, what ends its answers, and how its makers sample from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from danlu.data.tokenizer import load_tokenizer
from danlu.errors import ModelError, ResourceError
from danlu.models.decoder import Decoder
from danlu.models.folder import (
    GENERATION_CONFIG,
    check_vocabulary,
    read_config,
    read_json,
    read_tensors,
    resolve_folder,
)
from danlu.models.loading import load
from danlu.models.tensor_bytes import DTYPES
from danlu.rollout.wording import Wording

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class OpenModel:
    """A model and its words, ready to answer."""

    folder: Path
    model: Decoder
    wording: Wording
    stop_ids: frozenset[int]
    """Tokens that end an answer: those of the wording, of config.json and of generation_config.json."""

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations alike: decoding one sequence reads every weight once a token, so no casts."""
        return self.model.embed_tokens.weight.dtype


def find_model(path_or_id: str) -> Path:
    """The model folder behind a folder, a run folder or a hub id.

    Raises ModelError if there is none; for a run that has not written its model yet it says what to do.
    """
    path = Path(path_or_id).expanduser()
    if (path / "recipe.yaml").is_file() and not (path / "model" / "config.json").is_file():
        raise ModelError(
            f"{path}: this run has not written its model yet (no model/ folder). Finish it with "
            f"`danlu train {path / 'recipe.yaml'}`, which goes on from its last checkpoint and exports at the end"
        )
    return resolve_folder(path_or_id)


def open_wording(folder: Path, chat_template: Path | None = None) -> Wording:
    """The tokenizer of a model folder. Raises DataError, or ModelError if it has more tokens than the model."""
    tokenizer = load_tokenizer(str(folder), None if chat_template is None else str(chat_template))
    check_vocabulary(read_config(folder), tokenizer.size)
    return Wording(tokenizer)


def open_model(folder: Path, wording: Wording, *, precision: str = "auto", device: str = "auto") -> OpenModel:
    """Loads the weights that go with the words. Raises ModelError, or ResourceError for a device that is not there.

    precision: auto keeps the type the weights are stored in, except float16 on CPU, whose products are slow there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ResourceError(f"device {device!r}: use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device cuda: torch sees no CUDA device here. Use auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _stored_dtype(folder, device) if precision == "auto" else PRECISIONS[precision]
    model = load(folder, dtype=dtype, device=device).requires_grad_(False).eval()
    stop_ids = frozenset((*wording.stop_ids, *model.config.eos_token_ids, *_generation_eos(folder)))
    return OpenModel(folder, model, wording, stop_ids)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What the model's makers put into generation_config.json, where that asks for sampling at all."""
    values = _generation_config(folder)
    if not values.get("do_sample"):
        return {}
    return {name: values[name] for name in SAMPLING_FIELDS if values.get(name) is not None}


def _stored_dtype(folder: Path, device: str) -> torch.dtype:
    largest = max(read_tensors(folder).values(), key=lambda tensor: math.prod(tensor.shape), default=None)
    dtype = torch.float32 if largest is None else DTYPES.get(largest.dtype, torch.float32)
    slow = dtype == torch.float64 or (dtype == torch.float16 and device == "cpu")
    return torch.float32 if slow else dtype


def _generation_config(folder: Path) -> dict[str, Any]:
    file = folder / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def _generation_eos(folder: Path) -> tuple[int, ...]:
    eos = _generation_config(folder).get("eos_token_id")
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(one, int) for one in ids):
        raise ModelError(
            f"{folder / GENERATION_CONFIG}: eos_token_id: expected an integer or a list of them, found {eos!r}"
        )
    return tuple(ids)
