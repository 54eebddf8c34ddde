"""A model opened for answering: weights, words, what ends its answers, and how its makers sample from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from danlu.data.tokenizer import load_tokenizer
from danlu.errors import ResourceError
from danlu.models.decoder import Decoder
from danlu.models.folder import check_vocabulary, read_config, read_tensors
from danlu.models.loading import load
from danlu.models.tensor_bytes import DTYPES
from danlu.rollout.request import DEVICES, Precision, generation_stops
from danlu.rollout.wording import Wording

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def open_wording(folder: Path, chat_template: Path | None = None) -> Wording:
    """The tokenizer of a model folder. Raises DataError, or ModelError if it has more tokens than the model."""
    tokenizer = load_tokenizer(str(folder), None if chat_template is None else str(chat_template))
    check_vocabulary(read_config(folder), tokenizer.size)
    return Wording(tokenizer)


def open_model(folder: Path, wording: Wording, *, precision: Precision = "auto", device: str = "auto") -> OpenModel:
    """Loads the weights that go with the words. Raises ModelError, or ResourceError for a device that is not there.

    precision: auto keeps the type the weights are stored in, except float16 on CPU, whose products are slow there.
    """
    assert device in DEVICES, f"device {device!r}"
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device cuda: torch sees no CUDA device here. Use auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _stored_dtype(folder, device) if precision == "auto" else _DTYPES[precision]
    model = load(folder, dtype=dtype, device=device).requires_grad_(False).eval()
    stop_ids = frozenset((*wording.stop_ids, *model.config.eos_token_ids, *generation_stops(folder)))
    return OpenModel(folder, model, wording, stop_ids)


def _stored_dtype(folder: Path, device: str) -> torch.dtype:
    largest = max(read_tensors(folder).values(), key=lambda tensor: math.prod(tensor.shape), default=None)
    dtype = torch.float32 if largest is None else DTYPES.get(largest.dtype, torch.float32)
    slow = dtype == torch.float64 or (dtype == torch.float16 and device == "cpu")
    return torch.float32 if slow else dtype
