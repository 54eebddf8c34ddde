"""Small decoders with a mixer and a feed-forward network of any kind in all layers, and what a pass of them saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from builders.tiny_run import tiny_model
from danlu.adapters.dropout import DropoutState, SiteNumbers
from danlu.memory.layer_plan import Kind, LayerPlan
from danlu.memory.recompute import wrap
from danlu.models.attend import PackedAttention
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.layer_spec import Dense, Experts, Feed, LayerSpec, Mixer, Router
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.rope_config import Rope
from danlu.models.router_replay import routers_of

ROPE = Rope(1e4, 16, 1024)
MIXERS: dict[str, Mixer] = {
    "grouped": Heads(8, 4, 16, ROPE),
    "latent": Latent(8, 64, 16, 24, ROPE, q_lora_rank=48),
    "latent without one of queries": Latent(8, 64, 16, 24, ROPE),
    "factorized": Factorized(8, 32, ROPE, query_rank=32),
    "key reuse": Factorized(8, 32, ROPE, query_rank=48, key_reuse=True, query_norm=True),
    "sinks and gates": Heads(8, 4, 16, ROPE, sinks=True, output_gate=True),
    "normed heads": Heads(8, 4, 16, ROPE, qk_norm="head"),
    "normed rows, a window": Heads(8, 4, 16, ROPE, qk_norm="full", window=100),
    "normed behind the rotation": Heads(8, 2, 16, ROPE, qk_norm="head", norm_behind_rope=True),
    "a softcap, a window": Heads(8, 4, 16, ROPE, softcap=20.0, window=64),
    "normed values": Heads(8, 8, 16, ROPE, value_norm=True),
    "normed values that are keys": Heads(8, 8, 16, ROPE, qk_norm="head", value_norm=True, values_are_keys=True),
    "no rotation": Heads(8, 4, 16, None),
    "a rotated half": Heads(4, 4, 32, ROPE, interleaved=True),
    "delta rule": Delta(8, 4, 16, 32),
}
FEEDS: dict[str, Feed] = {
    "gelu": Dense(192, "gelu"),
    "no gate": Dense(192, "gelu", bias=True, gated=False),
    "experts": Experts(8, 2, 192, router=Router(normalise=True), shared=Dense(64), shared_gate=True),
    "experts that are normed apart": Experts(
        8,
        2,
        192,
        router=Router(normalise=True, input_norm=True, expert_scales=True),
        shared=Dense(64),
        branch_norms=True,
    ),
    "experts that are drawn": Experts(8, 2, 192, router=Router("sparse-mixer", jitter=0.3, input_jitter=0.1)),
    "biased experts": Experts(8, 3, 96, bias=True, router=Router(score="sigmoid", scale=2.0, bias=True)),
}


def small_decoder(mixer: str | None, feed: str | None, layers: int = 3, **changes: Any) -> Decoder:
    """A decoder of width 128; None: grouped queries, a gated network."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    config = tiny_model(**sizes, max_position_embeddings=1024).config
    own_mixer = MIXERS[mixer or "grouped"]
    config = config.with_layers(
        lambda layer: replace(layer, mixer=own_mixer, feed=FEEDS[feed] if feed else layer.feed, **changes)
    )
    model = Decoder(config)
    initialize(model, 0)
    return model


def sharing_decoder(**changes: Any) -> Decoder:
    """A decoder of width 128 with two layers that give keys, and three that read them, of both kinds."""
    heads = Heads(8, 4, 16, ROPE, qk_norm="head", value_norm=True, scale=1.0, **changes)
    feed, wide = Dense(192, "gelu_tanh"), Dense(384, "gelu_tanh")
    plain = LayerSpec(heads, feed, norms="sandwich", scalar=True, per_layer_width=24)

    def shared(window: int | None, sharing: Any) -> LayerSpec:
        return replace(plain, mixer=replace(heads, window=window, sharing=sharing), feed=wide if sharing else feed)

    kinds = [(64, None), (64, "gives"), (None, "gives"), (64, "reads"), (None, "reads"), (64, "reads")]
    config = tiny_model(hidden_size=128, max_position_embeddings=1024).config
    model = Decoder(replace(config, family="gemma4_text", layers=tuple(shared(*kind) for kind in kinds)))
    initialize(model, 0)
    return model


def with_draws(model: Decoder, lengths: Sequence[int]) -> None:
    """Lets routers draw experts, as they do in training steps."""
    state = DropoutState(0)
    state.begin(1, list(enumerate(lengths)))
    for place, router in routers_of(model).items():
        router.draws = SiteNumbers(f"router {place}", state)


def recomputed(model: Decoder, recompute: Kind) -> Decoder:
    """The same model with layers that recompute what a kind says."""
    wrap(model, [LayerPlan(layer, recompute) for layer in range(len(model.layers))])
    return model


def saved_bytes(model: Decoder, lengths: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the distinct storages that autograd keeps of a forward pass, parameters and buffers left out."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # holding the storages keeps their addresses from being used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    boundaries = [0]
    for length in lengths:
        boundaries.append(boundaries[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend = PackedAttention(tuple(boundaries), recomputed_layers=model.recomputed_attention)
        model(torch.zeros(boundaries[-1], dtype=torch.long), positions, attend, dtype)
    return sum(storage.nbytes() for storage in kept.values())


def _without(config: ModelConfig) -> ModelConfig:
    """The same model without embeddings of each layer."""
    return config.with_layers(lambda layer: replace(layer, per_layer_width=0))


def bytes_outside_layers(
    config: ModelConfig, tokens: int, element_bytes: int, *, rotated: bool, ids: bool = True, own: bool = True
) -> int:
    """Bytes that a forward pass keeps outside of layers: the final norm's input and statistics, token ids, and the
    tables of rotations.

    ids: whether the embedding is trained. own: whether there are gradients of layers' own embeddings.
    """
    statistics = 1 if config.norm_kind == "rms" else 2
    if columns := config.per_layer_columns:  # the embeddings, the product that is normed with its statistics, and the
        each = columns * element_bytes + own * (columns * element_bytes + 4 * len(config.layers))  # table's multiplier
        more = bytes_outside_layers(_without(config), tokens, element_bytes, rotated=rotated, ids=ids)
        return tokens * each + element_bytes * ids + more
    tables = sum(2 * rope.dim for rope in config.ropes) if rotated else 0
    return tokens * ((config.hidden_size + tables) * element_bytes + 4 * statistics + 8 * ids)
