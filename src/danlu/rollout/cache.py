"""The KV cache: keys and values of the tokens so far, so that each new token costs the work of one row.

The cache hands the decoder an attend strategy for each forward pass (`KVCache.extend`), and the decoder does not know
that earlier tokens are not computed again. Everything is flat: a pass brings `counts[b]` new tokens of sequence b, laid
end to end, a whole prompt or one token each.

B sequences · T new tokens, flat · S tokens of one · H query heads · K key/value heads · G = H / K · C head width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.models.attend import PackedAttention, visible
from danlu.models.block_attention import attention_scores

# Buffers grow to a multiple of this many tokens, and by at least half: copying stays a small, constant share of the
# work however long the text gets.
CAPACITY_STEP = 256


class KVCache:
    """One contiguous buffer [B, K, capacity, C] of keys and one of values for each layer, in the type of activations.

    Buffers are allocated when a layer is first used, so the cache needs no model config, and they grow when full.
    """

    def __init__(self, sequences: int = 1) -> None:
        self.lengths = [0] * sequences  # tokens of each sequence
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, counts: Sequence[int]) -> CachedAttention:
        """The attend strategy of one forward pass that brings counts[b] new tokens of sequence b.

        `lengths` counts these tokens from now on. Where the pass is interrupted, undo that with `truncate`.
        """
        assert len(counts) == len(self.lengths), f"{len(counts)} counts for {len(self.lengths)} sequences"
        past = tuple(self.lengths)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        longest = max(self.lengths)
        if longest > self._capacity:
            self._capacity = -(-max(longest, self._capacity * 3 // 2) // CAPACITY_STEP) * CAPACITY_STEP
        return CachedAttention(self, past, tuple(counts))

    def truncate(self, sequence: int, length: int) -> None:
        """Removes the tokens of one sequence from `length` on."""
        assert 0 <= length <= self.lengths[sequence], f"cannot cut {self.lengths[sequence]} tokens to {length}"
        self.lengths[sequence] = length

    def fork(self, rows: Sequence[int]) -> KVCache:
        """A cache whose sequence j is a copy of this one's rows[j]; a row may be taken several times.

        It is this cache itself where nothing would change (every row once, in order).
        """
        if list(rows) == list(range(len(self.lengths))):
            return self
        forked = KVCache(len(rows))
        forked.lengths = [self.lengths[row] for row in rows]
        forked._capacity = self._capacity
        for layer, (keys, values) in self._layers.items():
            index = torch.tensor(rows, device=keys.device)
            forked._layers[layer] = (keys.index_select(0, index), values.index_select(0, index))
        return forked

    def drop(self, rows: Sequence[int]) -> list[int]:
        """Removes sequences by moving the last ones into their rows, so that few rows are copied.

        Returns the former row of each row that remains.
        """
        dropped = set(rows)
        count = len(self.lengths) - len(dropped)
        movers = (row for row in range(count, len(self.lengths)) if row not in dropped)
        order = [next(movers) if row in dropped else row for row in range(count)]
        moves = [(row, mover) for row, mover in enumerate(order) if row != mover]
        for layer, (keys, values) in self._layers.items():
            for row, mover in moves:
                keys[row, :, : self.lengths[mover]] = keys[mover, :, : self.lengths[mover]]
                values[row, :, : self.lengths[mover]] = values[mover, :, : self.lengths[mover]]
            self._layers[layer] = (keys[:count], values[:count])
        self.lengths = [self.lengths[row] for row in order]
        return order

    def buffers(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, capacity, C] of a layer, with room for every token that `extend` counted.

        like: keys [T, K, C] of a pass, for the number of heads, their width, type and device.
        """
        buffers = self._layers.get(layer)
        if buffers is not None and buffers[0].shape[2] >= self._capacity:
            return buffers
        shape = (len(self.lengths), like.shape[1], self._capacity, like.shape[2])
        # Zeros, not empty: masked positions get probability 0, and 0 times a stray NaN would still be NaN.
        grown = (like.new_zeros(shape), like.new_zeros(shape))
        if buffers is not None:
            for new, old in zip(grown, buffers, strict=True):
                new[:, :, : old.shape[2]] = old
        self._layers[layer] = grown
        return grown


class CachedAttention:
    """Attention of new tokens to themselves and to everything cached before them: a `layer_types.Attend`."""

    def __init__(self, cache: KVCache, past: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self.cache = cache
        self.past = past  # tokens of each sequence before this pass
        self.counts = counts  # new tokens of each sequence
        self._is_decoding = all(count == 1 for count in counts)
        self._same_lengths = self._is_decoding and len(set(past)) == 1  # then no masks are needed
        self._masks: dict[int | None, Tensor] = {}
        self._prompts: dict[int, PackedAttention] = {}  # by length: its masks are computed once for all layers

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        k: Tensor,  # [T, K, C]
        v: Tensor,  # [T, K, C]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [T, H, C]
        keys, values = self.cache.buffers(layer, k)
        if self._is_decoding:
            return self._decode_together(q, k, v, keys, values, scale, window, softcap)
        outputs, start = [], 0
        for row, (past, count) in enumerate(zip(self.past, self.counts, strict=True)):
            if count == 0:
                continue
            end, total = start + count, past + count
            keys[row, :, past:total] = k[start:end].transpose(0, 1)
            values[row, :, past:total] = v[start:end].transpose(0, 1)
            if past == 0:  # nothing is cached: a document of its own, as in training
                attend = self._prompts.setdefault(count, PackedAttention((0, count)))
                qkv = q[start:end], k[start:end], v[start:end]
                outputs.append(attend(layer, *qkv, scale=scale, window=window, softcap=softcap))
            else:
                first = 0 if window is None else max(0, past - window + 1)
                kv = keys[row, :, first:total], values[row, :, first:total]
                outputs.append(_attend_to_past(q[start:end], *kv, scale=scale, window=window, softcap=softcap))
            start = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode_together(
        self,
        q: Tensor,  # [B, H, C]
        k: Tensor,  # [B, K, C]
        v: Tensor,
        keys: Tensor,  # [B, K, capacity, C]
        values: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [B, H, C]
        """One new token of each sequence, in one call over as many keys as the longest has."""
        sequences, kv_heads, width = k.shape
        first, longest = 0, max(self.past) + 1
        if self._same_lengths:
            keys.select(2, longest - 1).copy_(k)
            values.select(2, longest - 1).copy_(v)
            first = 0 if window is None else max(0, longest - window)
        else:
            rows = torch.arange(sequences, device=q.device)
            columns = torch.tensor(self.past, device=q.device)
            keys[rows, :, columns], values[rows, :, columns] = k, v
        out = _grouped_attention(
            q.view(sequences, kv_heads, -1, width),
            keys.narrow(2, first, longest - first),
            values.narrow(2, first, longest - first),
            None if self._same_lengths else self._decode_mask(window, q),
            scale=scale,
            softcap=softcap,
        )
        return out.reshape(sequences, -1, width)

    def _decode_mask(self, window: int | None, q: Tensor) -> Tensor:
        """[B, 1, 1, S] of 0 and -inf in q's dtype; computed once for all layers with the same window."""
        if window not in self._masks:
            columns = torch.arange(max(self.past) + 1, device=q.device)
            last = torch.tensor(self.past, device=q.device).unsqueeze(1)  # [B, 1]
            hidden = columns > last  # [B, S]
            if window is not None:
                hidden |= columns <= last - window
            self._masks[window] = q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :]
        return self._masks[window]


def _attend_to_past(
    q: Tensor,  # [T, H, C], the last T tokens of the sequence
    keys: Tensor,  # [K, S, C], T <= S
    values: Tensor,  # [K, S, C]
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:  # [T, H, C]
    """New tokens of one sequence over cached ones. The G queries of a key/value head are G*T rows over its keys."""
    new, heads, width = q.shape
    kv_heads, total = keys.shape[:2]
    groups = heads // kv_heads
    folded = q.view(new, kv_heads, groups, width).permute(1, 2, 0, 3).reshape(1, kv_heads, groups * new, width)
    mask = None
    if new > 1:  # a single last token sees every key it was given
        hidden = ~visible(new, total, window, q.device)  # [T, S]
        mask = q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).repeat(groups, 1)  # [G*T, S]
    out = _grouped_attention(folded, keys.unsqueeze(0), values.unsqueeze(0), mask, scale=scale, softcap=softcap)
    return out.view(kv_heads, groups, new, width).permute(2, 0, 1, 3).reshape(new, heads, width)


def _grouped_attention(
    q: Tensor,  # [B, K, Q, C], Q rows that share a key/value head
    keys: Tensor,  # [B, K, S, C]
    values: Tensor,  # [B, K, S, C]
    mask: Tensor | None,  # broadcasts to [B, K, Q, S]: 0 or -inf
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:  # [B, K, Q, C]
    if softcap is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    # No fused kernel of torch has Gemma-2's softcap. Scores in float32, as in training.
    scores = attention_scores(q.flatten(0, 1), keys.flatten(0, 1), scale).unflatten(0, q.shape[:2])
    scores = scores.div_(softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores + mask
    return scores.softmax(dim=-1).to(values.dtype) @ values
