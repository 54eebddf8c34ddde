"""A model loaded for generation: weights, adapters, tokenizer, and the tokens that end its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from danlu.assembly.score_head import required_score_head
from danlu.assembly.stored_base import stored_quantization
from danlu.core.errors import ResourceError
from danlu.data.tokenizer import load_tokenizer
from danlu.inference.chat_tokenizer import ChatTokenizer
from danlu.inference.engine_adapters import StackedAdapters
from danlu.inference.generation_config import DEVICES, Precision, end_tokens
from danlu.inference.resolve_model import ResolvedModel, adapter_names
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import check_vocabulary, ignored_settings, read_config
from danlu.models.loading import load, stored_dtype
from danlu.numerics.four_bit_weight import unpack_kernels

if TYPE_CHECKING:
    from danlu.assembly.adapter_stacks import AdapterStacks

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, ready to generate."""

    folder: Path
    model: Decoder
    chat_tokenizer: ChatTokenizer
    stop_ids: frozenset[int]
    """Tokens that end an answer: those of the tokenizer, of config.json and of generation_config.json."""
    dtype: torch.dtype
    """The type of activations and of weights that are not packed: decoding reads every weight once per token."""
    stacks: AdapterStacks | None = None
    """The adapters, where they are not merged into the weights."""
    adapter_names: tuple[str, ...] = ()
    """The name of each of these stacks."""
    score_head: nn.Linear | None = None
    """[labels, D] float32 of a reward model, which has no head over the vocabulary."""

    @property
    def notes(self) -> list[str]:
        """Remarks for the console: settings of config.json that are ignored, and why 4-bit weights are not unpacked by
        the fastest kernels, where they are not."""
        unpacked = [kernel.note for kernel in unpack_kernels(self.model, self.dtype) if kernel.kind == "torch"]
        return [*ignored_settings(self.folder), *unpacked]

    @property
    def engine_adapters(self) -> StackedAdapters | None:
        """The adapters as an engine switches between them; None where there are none, or they are merged."""
        return None if self.stacks is None else StackedAdapters(self.stacks, self.adapter_names)

    @property
    def virtual_token_ids(self) -> tuple[int, ...]:
        """The virtual tokens of the active adapters, which every prompt has to begin with."""
        return () if self.stacks is None else self.stacks.adapters.virtual_token_ids


def load_chat_tokenizer(
    folder: Path,
    chat_template: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    model: Path | None = None,
) -> ChatTokenizer:
    """The tokenizer of a folder, with the chat template of a Jinja file in place of its own where one is given.

    template_kwargs: further variables of the template. model: the model's folder, where it is another one.
    Raises DataError, or ModelError for a tokenizer with more tokens than the model.
    """
    template = None if chat_template is None else str(chat_template)
    tokenizer = load_tokenizer(str(folder), template, template_kwargs=template_kwargs)
    check_vocabulary(read_config(model or folder), tokenizer.vocab_size)
    return ChatTokenizer(tokenizer)


def load_model(
    resolved: ResolvedModel,
    chat_tokenizer: ChatTokenizer,
    *,
    precision: Precision = "auto",
    device: str = "auto",
    quantization: Any = None,
    merged: bool = False,
) -> LoadedModel:
    """Loads the weights of a resolved model. Raises ModelError, or ResourceError for a device that is not there.

    Args:
        precision: auto keeps the type the weights are stored in, except float16 on CPU, where its products are slow.
        quantization: section of a recipe, by which linear layers are packed; None keeps them as they are stored.
        merged: merge the adapters into the weights where that is possible: tokens are generated faster, but each weight
            is rounded once more.
    """
    assert device in DEVICES, f"device {device!r}"
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device cuda: torch sees no CUDA device here. Use auto or cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _stored_dtype(resolved.folder, device) if precision == "auto" else _DTYPES[precision]
    stacks: AdapterStacks | None = None
    if resolved.stacks or quantization is not None or is_quantized(resolved.folder):
        # Here: it brings the recipe's sections and with them pydantic, half a second that a plain model need not wait.
        from danlu.inference.load_adapted import load_adapted_model

        model, stacks = load_adapted_model(
            resolved, dtype=dtype, device=device, quantization=quantization, merged=merged
        )
    else:
        model = load(resolved.folder, dtype=dtype, device=device, config=resolved.config)
    model.requires_grad_(False).eval()
    stop_ids = end_tokens(chat_tokenizer.tokenizer, model.config, resolved.folder, resolved.tokenizer_folder)
    head = None
    if model.config.task != "causal-lm":
        head = required_score_head(resolved.folder, resolved.stacks[0] if resolved.stacks else ())
        head.to(device).requires_grad_(False)
    names = () if stacks is None else tuple(adapter_names(resolved.stacks))
    return LoadedModel(resolved.folder, model, chat_tokenizer, stop_ids, dtype, stacks, names, head)


def is_quantized(folder: Path) -> bool:
    """Whether a model folder's weights are in 4 bits. Raises ModelError if they are in bits that danlu cannot read."""
    return stored_quantization(folder) is not None


def _stored_dtype(folder: Path, device: str) -> torch.dtype:
    """The type that weights are stored in; float32 in place of one with slow products on the device."""
    dtype = stored_dtype(folder)
    slow = dtype == torch.float64 or (dtype == torch.float16 and device == "cpu")
    return torch.float32 if slow else dtype
