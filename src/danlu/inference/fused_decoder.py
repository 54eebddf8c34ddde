"""One token of each growing sequence through the whole decoder, in as few calls of torch as it takes.

Decoding with a small model is bound not by arithmetic but by calls of a few microseconds each: for a token and six
layers the modules of `models/` make 391 of them, this makes 278, and leaves the overhead of modules out. Norms are four
calls, queries, keys and values are rotated together, the scale of attention is in the rotation, and the pool's entries
of all layers are written at once. It is the same arithmetic in another order, so it serves the engine's fast numerics
alone, and only decoders with modules as they were built: see `FusedDecoder.of`.

Q sequences, one token each · D model width · H query heads · K key/value heads · C head width · F MLP width · L layers
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.inference.decode_buffers import DecodeRows
from danlu.inference.pool import CachePool
from danlu.models.attention import Attention
from danlu.models.decoder import Decoder, Layer
from danlu.models.mixer_spec import Heads
from danlu.models.modules import MLP, Linear, RMSNorm, identity
from danlu.models.packed_weights import PackedWeights, Product, QuantizedProduct
from danlu.models.rope import inverse_frequencies, rotary_tables


@dataclass(frozen=True)
class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, statistics in float32."""

    scale: Tensor  # [width] float32: the weight times the root of the width
    least: Tensor  # [] float32: the root of width x eps, which joins the norm as another axis would

    @classmethod
    def of(cls, *norms: RMSNorm) -> _Norm:
        """Fuses one norm, or several, one for each head, which are applied together: weights [heads, width]."""
        width = norms[0].weight.shape[0]
        weights = [(norm.weight.detach().float() + norm.offset) * math.sqrt(width) for norm in norms]
        return cls(
            weights[0] if len(norms) == 1 else torch.stack(weights), torch.tensor(math.sqrt(width * norms[0].eps))
        )

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float32 else x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        y = wide.div(torch.hypot(length, self.least)).mul_(self.scale)
        return y if x.dtype == torch.float32 else y.to(x.dtype)


@dataclass(frozen=True)
class _FusedLayer:
    attention_norm: _Norm
    qkv: Product | QuantizedProduct  # [H*C + 2 K*C, D]
    head_norm: _Norm | None  # of queries and keys, [H + K, C]
    o: Product | QuantizedProduct
    mlp_norm: _Norm
    gate_up: Product | QuantizedProduct  # [2 F, D]
    down: Product | QuantizedProduct


class FusedDecoder:
    """A decoder's layers with copies of their weights: made by `of`, used as long as `is_current`."""

    def __init__(self, model: Decoder, dtype: torch.dtype, layers: list[_FusedLayer]) -> None:
        (spec,) = model.config.kinds
        mixer = spec.attention
        scale, rope = mixer.attention_scale, mixer.rope
        assert rope is not None, "`_is_plain` has looked"
        self._model, self._dtype, self._layers, self._rope = model, dtype, layers, rope
        self._sources = [*model.parameters(), *model.buffers()]  # codes of quantized weights are buffers
        self._versions = [source._version for source in self._sources]
        self._heads, self._kv_heads, self._width = mixer.heads, mixer.kv_heads, mixer.head_dim
        self._gelu = spec.feed.activation == "gelu_tanh"
        assert isinstance(model.norm, RMSNorm), "`_is_plain` has looked"
        self._norm = _Norm.of(model.norm)
        self._frequencies = inverse_frequencies(rope)
        # In float32 the scale is in the queries' rotation; a narrower type would round once more for it.
        scales_queries = dtype == torch.float32
        self._scale = 1.0 if scales_queries else scale
        of_queries = scale if scales_queries else 1.0
        kinds = [of_queries] * mixer.heads + [1.0] * mixer.kv_heads + [0.0] * mixer.kv_heads
        self._turned = torch.tensor(kinds).unsqueeze(1).to(dtype)  # [H + 2K, 1]: values are not
        self._unturned = torch.tensor([float(kind == 0) for kind in kinds]).unsqueeze(1).to(dtype)
        half = self._width // 2
        self._signs = torch.cat((-torch.ones(half), torch.ones(half)))  # [C]

    @classmethod
    def of(cls, model: Decoder, packed: PackedWeights, dtype: torch.dtype) -> FusedDecoder | None:
        """The decoder with its present weights, dense or in few bits; None for one that has adapters, windows, soft
        caps, sinks, gates, hooks, or parts that are on several processes, and where copies of dense weights have no
        room."""
        if not _is_plain(model):
            return None
        layers = []
        for layer in model.layers.values():
            assert isinstance(layer, Layer) and isinstance(layer.attention, Attention) and isinstance(layer.mlp, MLP)
            attention, mlp = layer.attention, layer.mlp
            values = attention.v_proj
            assert mlp.gate_proj is not None and values is not None, "`_is_plain` has looked"
            products = [
                _product(packed, dtype, *linears)
                for linears in (
                    (attention.q_proj, attention.k_proj, values),
                    (attention.o_proj,),
                    (mlp.gate_proj, mlp.up_proj),
                    (mlp.down_proj,),
                )
            ]
            if None in products:
                return None
            qkv, o, gate_up, down = (product for product in products if product is not None)
            head_norm = None
            if attention.q_norm is not None and attention.k_norm is not None:
                mixer = model.config.kinds[0].attention
                of_heads = [attention.q_norm] * mixer.heads + [attention.k_norm] * mixer.kv_heads
                head_norm = _Norm.of(*of_heads)
            norms = layer.attention_norm, layer.mlp_norm
            assert isinstance(norms[0], RMSNorm) and isinstance(norms[1], RMSNorm), "`_is_plain` has looked"
            attention_norm, mlp_norm = _Norm.of(norms[0]), _Norm.of(norms[1])
            layers.append(_FusedLayer(attention_norm, qkv, head_norm, o, mlp_norm, gate_up, down))
        return cls(model, dtype, layers)

    @property
    def is_current(self) -> bool:
        """Whether no weight was changed since, as far as torch counts changes."""
        return self._versions == [source._version for source in self._sources]

    def __call__(self, tokens: Tensor, positions: Tensor, rows: DecodeRows, pool: CachePool) -> Tensor:
        """Hidden states behind the final norm, [Q, D], of tokens [Q] int64 at positions [Q] int64.

        rows: of this pass; pool: keeps keys and values of the tokens afterwards.
        """
        if rows.of_rows is not None:
            tokens, positions = tokens.index_select(0, rows.of_rows), positions.index_select(0, rows.of_rows)
        # Half-split rotation is x cos + (-second half, first half) sin; values are multiplied by 1 and 0.
        tables = rotary_tables(self._rope, positions, frequencies=self._frequencies)
        cos, sin = (table.to(self._dtype).unsqueeze(1) for table in (tables.cos, tables.sin * self._signs))
        cos, sin = torch.addcmul(self._unturned, cos, self._turned), sin * self._turned  # [Q, H + 2K, C]
        x = self._model.embed_tokens(tokens, self._dtype)  # [Q, D]
        count, heads, kv_heads, width = len(x), self._heads, self._kv_heads, self._width
        new = []
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x)).view(count, -1, width)
            if layer.head_norm is not None:
                normed = heads + kv_heads
                qkv = torch.cat((layer.head_norm(qkv[:, :normed]), qkv[:, normed:]), dim=1)
            qkv = (qkv * cos).addcmul_(qkv.roll(width // 2, -1), sin)
            keys_values = qkv[:, heads:].unflatten(1, (2, kv_heads)).transpose(0, 1)  # [2, Q, K, C]
            if pool.is_encoded:
                keys_values = _written(number, keys_values, rows, pool)
            new.append(keys_values)
            mixed = rows.attend_rows(number, qkv[:, :heads], keys_values, pool.tensors(number), self._scale)
            x = layer.o.plus(mixed.view(count, -1), x)
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)  # [Q, F]
            gate = F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)
            x = layer.down.plus(gate.mul_(up), x)
        if rows.live is not None:
            x = x.index_select(0, rows.live)
        if not pool.is_encoded:
            kept = torch.stack(new)  # [L, 2, Q, K, C]
            pool.write_layers(kept if rows.live is None else kept.index_select(2, rows.live))
        return self._norm(x)


def _written(layer: int, entries: Tensor, rows: DecodeRows, pool: CachePool) -> Tensor:
    """Writes entries [2, rows, K, C] of a layer to a pool that encodes them, and returns them as they are read."""
    if rows.live is None:
        return torch.stack(pool.write(layer, *entries))
    pool.write(layer, *entries.index_select(1, rows.live))
    return torch.stack(pool.rounded(layer, *entries))


def _product(packed: PackedWeights, dtype: torch.dtype, *linears: Linear) -> Product | QuantizedProduct | None:
    """The product with layers that share their input; None where there is no room for a copy, and where they do not
    have biases, or quantized weights, alike."""
    biases = tuple(linear.bias for linear in linears)
    weights = [linear.weight for linear in linears if linear.weight is not None]
    if len(weights) == len(linears):
        return packed.product_of(weights, biases, dtype, packed.encoder_of(linears[0]))
    if weights:
        return None
    quantized = [linear.quantized for linear in linears if linear.quantized is not None]
    return packed.quantized_product_of(quantized, biases, dtype)


def _is_plain(model: Decoder) -> bool:
    """Whether `__call__` computes everything that takes part in a layer."""
    config = model.config
    if model.chunks.last > 0 or model.rounding is not None:
        return False
    if len(config.kinds) > 1 or config.rotates_by_length:
        return False
    if config.residual_multiplier != 1.0 or config.logits_divisor != 1.0:
        return False
    kind = config.kinds[0]
    if kind.norm_kind != "rms" or kind.parallel or kind.scalar:
        return False
    mixer = kind.mixer
    if (
        not isinstance(mixer, Heads)
        or mixer.rope is None
        or mixer.rope.dim != mixer.head_dim
        or mixer.rope.temperature is not None
        or mixer.interleaved
    ):
        return False
    if mixer.qk_norm == "full" or mixer.norm_behind_rope or mixer.value_norm or mixer.values_are_keys:
        return False
    if model.embed_tokens.weight.device.type != "cpu" or not isinstance(model.norm, RMSNorm):
        return False
    if model.enter_head is not identity or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    ):
        return False
    return all(isinstance(layer, Layer) and _is_plain_layer(layer) for layer in model.layers.values())


def _is_plain_layer(layer: Layer) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if not (type(layer) is Layer and type(attention) is Attention and type(mlp) is MLP):
        return False
    additions = (
        layer.post_attention_norm,
        layer.post_mlp_norm,
        layer.after_attention,
        layer.after_mlp,
        attention.prefix,
        attention.sinks,
        attention.gate_proj,
        attention.window,
        attention.softcap,
    )
    if any(addition is not None for addition in additions):
        return False
    if layer.attention_norm is None or layer.mlp_norm is None or mlp.gate_proj is None or mlp.activation == "gelu":
        return False
    if layer.enter is not identity or layer.leave is not identity:
        return False
    linears = [module for module in layer.modules() if isinstance(module, Linear)]
    return all(linear.adapter is None and linear.adds_bias and _has_own_weight(linear) for linear in linears)


def _has_own_weight(linear: Linear) -> bool:
    """Whether the weight of a layer is whole, dense or in few bits."""
    return type(linear.weight) is nn.Parameter or (linear.weight is None and linear.quantized is not None)
