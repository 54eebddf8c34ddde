"""First weights of a model trained from scratch, by (seed, parameter name) and of experts by (seed, parameter name,
number of the expert): the same in any layout and any order.

Scheme, after "Spike No More" (arXiv:2312.16903), which asks for small sub-layers and a large shortcut so that gradients
stay bounded in depth. D = model width, N = layers:

=============================  =====================================================
matrices that read the stream  normal, std sqrt(2 / (5 D)): q, k, v, gate, up, router, untied head
matrices that read a latent    normal, std sqrt(2 / (5 x its width)): q_b, kv_b, key reuse
matrices that write to it      the same divided by sqrt(2 N): o_proj, down_proj
embedding, untied              normal, std 1 / embedding multiplier: the stream starts at 1
embedding, tied                normal, std sqrt(2 / (5 D)): it is the head too, and std 1
                               there would start with logits of std sqrt(D)
embeddings of each layer       normal, std 1 / sqrt(their width), by which they are multiplied
norms, scales of all kinds     one (Gemma stores zero, the difference from one)
norms of q and k, factor one   C^(-1/4): scores start as if divided by sqrt(C), where they are not (Gemma 4)
biases                         zero, and the gate of key reuse (arXiv:2412.19255)
convolutions over time         uniform, up to 1 / sqrt(tokens they see)
decay of linear attention      A uniform from 0 to 16; softplus(dt_bias) log-uniform from 0.001 to 0.1
=============================  =====================================================

The paper reaches the large shortcut by multiplying embeddings by sqrt(D); Llama-shaped models have no such multiplier,
so an untied embedding carries the scale itself. A tied one cannot, and keeps the paper's small shortcut. Linear
attention begins as in flash-linear-attention: its heads forget at rates of all magnitudes.
"""

from __future__ import annotations

import math
from hashlib import blake2b

import torch
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.models.config import ModelConfig, is_stacked
from danlu.models.decoder import Decoder
from danlu.models.mixer_spec import Heads

_WRITE_TO_STREAM = ("o_proj", "down_proj")
_READ_A_LATENT = ("q_b_proj", "kv_b_proj", "key_reuse")
_SCALES_OF_ROUTERS = ("scale", "expert_scales")
_START_AT_ZERO = ("bias", "correction", "key_reuse_gate")


def initialize(model: Decoder, seed: int) -> None:
    """Draws every parameter in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model.config, name, ShardBox.full(parameter.shape), seed))


def initial_value(config: ModelConfig, name: str, box: ShardBox, seed: int) -> Tensor:
    """A box of a parameter, drawn on the CPU in float32, so that no device, type or layout changes the values.

    A parameter is drawn whole, for its box depends on the elements before it; of stacked experts each by itself, so
    that no process draws experts of others.
    """
    module, kind = name.split(".")[-2:]
    if module.endswith("conv1d") or kind in ("A_log", "dt_bias"):
        uniform = torch.rand(box.global_shape, generator=named_generator(seed, name))
        return box.view_of(_of_linear_attention(kind, uniform))
    # None of these, nor the norm of what linear attention says, is a difference from the model's offset.
    if module in ("o_norm", "layer_scalar") or kind in _SCALES_OF_ROUTERS:
        return torch.ones(box.sizes)
    std = _initial_std(config, name, box.global_shape[-1])
    if std is None:
        is_norm = name.endswith("norm.weight")
        return torch.full(box.sizes, _norm_scale(config, name) - config.norm_offset if is_norm else 0.0)
    if not is_stacked(name):
        return box.view_of(torch.empty(box.global_shape).normal_(std=std, generator=named_generator(seed, name)))
    values = torch.empty(box.sizes)
    matrix = torch.empty(box.global_shape[1:])
    for index, expert in enumerate(range(box.offsets[0], box.ends[0])):
        matrix.normal_(std=std, generator=named_generator(seed, f"{name}[{expert}]"))
        values[index] = matrix[box.slices[1:]]
    return values


def _norm_scale(config: ModelConfig, name: str) -> float:
    """The first scale of a norm. Scores of normed queries and keys that nothing divides would leave all but the largest
    without a weight, and multiply what is rounded.
    """
    *_, number, _, norm, _ = ("", "", *name.split("."))
    mixer = config.layers[int(number)].mixer if norm in ("q_norm", "k_norm") else None
    return mixer.head_dim**-0.25 if isinstance(mixer, Heads) and mixer.scale == 1.0 else 1.0


def _of_linear_attention(kind: str, uniform: Tensor) -> Tensor:
    """Returns first values of a convolution [F, 1, W], or of a decay parameter [H], from numbers between 0 and 1."""
    if kind == "A_log":
        return (uniform * 16).clamp_(min=1e-2).log_()  # zero would have no logarithm
    if kind == "dt_bias":
        step = (uniform * math.log(100) + math.log(1e-3)).exp_()
        return step + torch.log(-torch.expm1(-step))  # softplus of which is the step
    return (2 * uniform - 1) / math.sqrt(uniform.shape[-1])


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, name) alone."""
    digest = blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little"))


def _initial_std(config: ModelConfig, name: str, inputs: int) -> float | None:
    """Returns the standard deviation of a matrix's initial values, where it reads `inputs` features; None for constant
    ones.
    """
    module, kind = name.split(".")[-2:]
    if kind in _START_AT_ZERO + _SCALES_OF_ROUTERS or module.endswith("norm") or module == "layer_scalar":
        return None
    if module in _READ_A_LATENT:
        return math.sqrt(2 / (5 * inputs))
    small = math.sqrt(2 / (5 * config.hidden_size))
    if module in _WRITE_TO_STREAM:
        return small / math.sqrt(2 * len(config.layers))
    if module == "embed_tokens_per_layer":
        return config.per_layer_width**-0.5
    if module == "embed_tokens" and not config.tie_word_embeddings:
        return 1 / config.embedding_multiplier
    return small
