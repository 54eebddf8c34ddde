"""Decoders of every kind whose steps are compared with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from builders.family_values import GEMMA4_E2B
from builders.tiny_adapters import adapter_set, perturb
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.dropout import DropoutState
from danlu.memory import recomputed_function
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.modules import Linear
from danlu.models.presets import from_scratch
from danlu.numerics.four_bit_weight import QuantizedWeightModule
from danlu.recipe import sections

LAYERS = 5
BOUNDARIES = (0, 20, 45, 64)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "cohere2": {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 2, "attention_bias": True},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "rotary_pct": 0.5},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma4-e2b": {
        **GEMMA4_E2B,
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "tie_word_embeddings": False,
    },
}
ADAPTERS: dict[str, Any] = {
    "lora-dropout": sections.Lora(rank=4, dropout=0.7),
    "dora-dropout": sections.Dora(rank=4, dropout=0.7),
    "vera": sections.Vera(),
    "mora": sections.Mora(rank=4),
    "ia3": sections.Ia3(),
    "bottleneck": sections.Bottleneck(),
    "prefix": sections.Prefix(tokens=3),
    "prefix-projection": sections.Prefix(tokens=3, projection=6),
    "prompt": sections.Prompt(tokens=3),
}


@dataclass(frozen=True)
class RecomputeCase:
    """A model, what of it is trained, its dropout, and tokens that stand before each document."""

    model: Decoder
    trained: dict[str, Tensor]
    dropout_state: DropoutState
    virtual_token_ids: tuple[int, ...] = ()
    adapters: AdapterSet | None = None


def decoder(**changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    model = build(from_scratch(sections.Model(config=values | changes, tokenizer="none"), 64, 1, 2))
    initialize(model, 0)
    return model


def full(family: str = "llama", **changes: Any) -> RecomputeCase:
    model = decoder(**{**FAMILIES[family], **changes})
    return RecomputeCase(model, dict(model.named_parameters()), DropoutState(0))


def adapted(
    kind: str, quantize: Callable[[Tensor], QuantizedWeightModule] | None = None, **changes: Any
) -> RecomputeCase:
    """With an adapter that has been trained for a while; `quantize` makes it QLoRA."""
    dropout_state = DropoutState(0)
    model = decoder(**changes)
    adapters = adapter_set(model, dropout_state=dropout_state)
    adapters.add("one", ADAPTERS[kind])
    if quantize is not None:
        for layer in model.layers.modules():
            if isinstance(layer, Linear) and layer.weight is not None:
                layer.store(quantize(layer.weight.data))
    perturb(adapters, "one", size=0.1)
    adapters.train_only("one")
    trained = {name: parameter for name, parameter in adapters.tensors("one").items() if parameter.requires_grad}
    return RecomputeCase(model, trained, dropout_state, adapters.virtual_token_ids, adapters)


@dataclass(frozen=True)
class Step:
    loss: float
    gradients: dict[str, Tensor]
    kept_bytes: int  # by autograd between forward and backward, beside weights; each storage once


def step(case: RecomputeCase, dtype: torch.dtype = torch.float32, number: int = 1, seed: int = 1) -> Step:
    """One forward and one backward pass over three packed documents."""
    tokens = torch.randint(0, 64, (BOUNDARIES[-1],), generator=torch.Generator().manual_seed(seed))
    front = torch.tensor(case.virtual_token_ids, dtype=torch.int64)
    documents = [torch.cat((front, tokens[start:end])) for start, end in pairwise(BOUNDARIES)]
    boundaries = tuple(end + len(front) * index for index, end in enumerate(BOUNDARIES))
    positions = torch.cat([torch.arange(len(piece)) for piece in documents])
    case.dropout_state.begin(number, [(0, boundaries[-1])])
    with kept_bytes(case.model) as kept:
        device = case.model.embed_tokens.weight.device
        inputs = torch.cat(documents).to(device), positions.to(device)
        hidden = case.model(
            *inputs, PackedAttention(boundaries, recomputed_layers=case.model.recomputed_attention), dtype
        )
    loss = (hidden.float().square() + hidden.float()).sum()
    loss.backward()
    case.dropout_state.end()
    gradients = {name: tensor.grad.clone() for name, tensor in case.trained.items() if tensor.grad is not None}
    case.model.zero_grad()
    return Step(loss.item(), gradients, sum(kept.values()))


@contextmanager
def kept_bytes(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd keeps in it, weights and buffers left out."""
    tensors = (*model.parameters(), *model.buffers())
    weights = {
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
        for tensor in tensors
    }
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(count, lambda tensor: tensor):
        yield kept


def same(first: Step, second: Step) -> bool:
    """Bit for bit."""
    assert first.gradients.keys() == second.gradients.keys() and first.gradients
    return first.loss == second.loss and all(
        torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients
    )


@contextmanager
def made_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The places whose frames run once more within it, in order."""
    places: list[str] = []
    remake = recomputed_function._Frame._recompute

    def counted(frame: recomputed_function._Frame) -> None:
        places.append(frame._where)
        remake(frame)

    with monkeypatch.context() as patch:
        patch.setattr(recomputed_function._Frame, "_recompute", counted)
        yield places
