"""The decoder: pre-norm blocks of attention and a gated MLP over packed tokens.

It is single-device code that knows nothing of packing, caches or ranks: attention is asked of an `Attend` given to
`forward`, products go through `Linear` (the seam where adapters and quantised weights take over), and what may be
sharded how is declared in `tensor_roles`.

T packed tokens · D model width · H query heads · K key/value heads · C head width · R rotated features · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.rope import rotary_tables
from danlu.types import Attend, EmbeddingAdapter, KeyValuePrefix, LinearAdapter, QuantizedWeight, Recomputed, VocabShard

Role = Literal["column", "grouped", "row", "vocabulary"]
"""How a matrix may be cut over processes: by its outputs (grouped: where there are fewer heads than processes, several
hold the same head), by its inputs, or by rows of the vocabulary."""

Border = Callable[[Tensor], Tensor]
"""What happens where activations enter or leave the part of a model that is cut over processes."""


def identity(x: Tensor) -> Tensor:
    return x


class Linear(nn.Module):
    """x [T, in] -> [T, out] in x's dtype. Parameters are uninitialised: load or `initialize` them.

    Two slots are filled from outside: `quantized` holds a frozen weight in few bits, in place of `weight`; `adapter`
    takes over the whole product. Cut over processes it is a smaller layer, and `shape` is what is here.
    """

    quantized: QuantizedWeight | None
    adapter: LinearAdapter | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.shape = (out_features, in_features)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.register_module("quantized", None)
        self.register_module("adapter", None)
        self.adds_bias = True
        """False where the outputs are a part of a sum over processes, to which another one adds the bias."""

    @property
    def added_bias(self) -> Tensor | None:
        """[out]: zeros where another process adds it, which still lead back to the bias: all have a gradient."""
        return self.bias if self.bias is None or self.adds_bias else self.bias * 0

    def store(self, quantized: QuantizedWeight) -> None:
        """Holds the weight in few bits from now on."""
        self.weight = None
        self.quantized = quantized

    def tie(self, embedding: Embedding) -> None:
        """Shares an embedding's weight."""
        self.register_parameter("weight", embedding.get_parameter("weight"))

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the weight itself where it is stored in that type, else a new tensor."""
        if self.weight is not None:
            return self.weight.to(dtype)
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        return self.quantized.dense(dtype)

    @contextmanager
    def weight_in_workspace(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """[out, in] to be read until the block ends: a packed weight is made dense in memory that all share."""
        if self.weight is not None:
            yield self.weight.to(dtype)
            return
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        with self.quantized.in_workspace(dtype) as weight:
            yield weight

    def scaled_rows(self, matrix: Tensor, factors: Tensor) -> Tensor:
        """What `weight_in_workspace` gives, each row times a factor [out]; in place if that is a copy."""
        column = factors.to(matrix.dtype).unsqueeze(1)
        return matrix.mul_(column) if self.weight is None else matrix * column

    def base(self, x: Tensor) -> Tensor:
        """The product without any adapter."""
        if self.weight is not None:
            return ops.linear(x, self.weight, self.added_bias)
        assert self.quantized is not None, "a linear layer has a weight or a quantized one"
        y, bias = self.quantized.product(x), self.added_bias
        return y if bias is None else y + bias.to(y.dtype)

    def forward(self, x: Tensor, recomputed: Recomputed | None = None) -> Tensor:
        return self.base(x) if self.adapter is None else self.adapter(x, self, recomputed)

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]}"


def forward_shared(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Several linear layers over one x; an adapter on any of them may share work among them."""
    adapter = next((linear.adapter for linear in linears if linear.adapter is not None), None)
    return tuple(linear(x) for linear in linears) if adapter is None else adapter.forward_shared(x, linears)


class RMSNorm(nn.Module):
    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = config.rms_norm_eps
        self.offset = config.norm_offset

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, offset=self.offset)


class Embedding(nn.Module):
    """tokens [T] -> [T, D]. The slot `adapter` takes over the look-up, also of tokens past the vocabulary.

    Where the vocabulary is cut over processes, words that are elsewhere give zeros, and `leave` adds up.
    """

    adapter: EmbeddingAdapter | None
    weight: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_module("adapter", None)
        self.multiplier = config.embedding_multiplier
        self.vocab_size = config.vocab_size
        self.vocab_start = 0
        """That `weight` has a row for."""
        self.leave: Border = identity
        self.sparse_gradient = False
        """Whether the weight's gradient holds only the rows of words that occur: see `ops.embedding`."""

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        x = self.base(tokens, dtype) if self.adapter is None else self.adapter(tokens, dtype, self)  # [T, D]
        x = self.leave(x)
        if self.multiplier == 1.0:
            return x
        # Gemma was trained with the multiplier rounded to the type of activations: in bfloat16 sqrt(3072) is 55.5.
        return x * torch.tensor(self.multiplier, dtype=dtype, device=x.device)

    def base(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows themselves, before any multiplier."""
        rows, elsewhere = self.local_rows(tokens)
        x = ops.embedding(rows, self.weight, dtype, sparse_gradient=self.sparse_gradient)
        return x if elsewhere is None else x.masked_fill(elsewhere.unsqueeze(1), 0)

    def local_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """For tokens [T] the rows of `weight`, and which words have theirs elsewhere (None: all are here).

        A token outside of the vocabulary stays outside on the process with the nearest row: an error of the look-up.
        """
        end = self.vocab_start + self.weight.shape[0]
        elsewhere = None
        if self.vocab_start > 0:
            elsewhere = tokens < self.vocab_start
        if end < self.vocab_size:
            elsewhere = tokens >= end if elsewhere is None else elsewhere | (tokens >= end)
        if elsewhere is None:
            return tokens, None
        return (tokens - self.vocab_start).masked_fill(elsewhere, 0), elsewhere


class Attention(nn.Module):
    """Multi-head (K = H), grouped-query or multi-query (K = 1) attention.

    The slot `prefix` may put other keys and values in the place of those of some tokens. Cut over processes, each has
    some of the heads.
    """

    prefix: KeyValuePrefix | None

    tensor_roles: ClassVar[Mapping[str, Role]] = {
        "q_proj": "column",
        "k_proj": "grouped",
        "v_proj": "grouped",
        "o_proj": "row",
    }

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_dim
        self.q_proj = Linear(width, config.heads * head, bias=config.qkv_bias)
        self.k_proj = Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.v_proj = Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.q_norm = RMSNorm(head, config) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config) if config.qk_norm else None
        self.o_proj = Linear(config.heads * head, width, bias=config.o_bias)
        self.register_module("prefix", None)
        self.layer = layer
        self.head_dim = head
        self.scale = config.attention_scale
        self.window = config.windows[layer]
        self.softcap = config.attention_softcap

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """x [T, D]; cos, sin [T, R] in x's dtype -> [T, D]."""
        q, k, v = forward_shared(x, self.q_proj, self.k_proj, self.v_proj)  # [T, H*C], [T, K*C], [T, K*C]
        out: Tensor = self.o_proj(self.attend_heads(q, k, v, cos, sin, attend))
        return out

    def attend_heads(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """What lies between the products: norms, rotation, attention. q [T, H*C]; k, v [T, K*C] -> [T, H*C]."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [T, H, C], [T, K, C], [T, K, C]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.apply_rope(q, k, cos, sin)
        if self.prefix is not None:
            k, v = self.prefix(k, v)
        return self._mix(attend, q, k, v).flatten(1)

    def _mix(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [T, H, C]
        return attend(self.layer, q, k, v, scale=self.scale, window=self.window, softcap=self.softcap)


class MLP(nn.Module):
    tensor_roles: ClassVar[Mapping[str, Role]] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, mlp = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(width, mlp, bias=config.mlp_bias)
        self.up_proj = Linear(width, mlp, bias=config.mlp_bias)
        self.down_proj = Linear(mlp, width, bias=config.mlp_bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = forward_shared(x, self.gate_proj, self.up_proj)
        out: Tensor = self.down_proj(self.gated_activation(gate, up), Recomputed(self.gated_activation, (gate, up)))
        return out

    def gated_activation(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gated_mlp_activation(gate, up, self.activation)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); Gemma-2 also norms what joins the residual stream.

    The slots `after_attention` and `after_mlp` take a module [T, D] -> [T, D] right behind each half. Attention and MLP
    may be cut over processes, between `enter` and `leave`. Under sequence parallelism (arXiv:2205.05198) all tokens are
    there only between these; the rest of the layer has local ones, [T/tp, D].
    """

    after_attention: nn.Module | None
    after_mlp: nn.Module | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(config, layer)
        self.post_attention_norm = RMSNorm(config.hidden_size, config) if config.sandwich_norms else None
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config)
        self.post_mlp_norm = RMSNorm(config.hidden_size, config) if config.sandwich_norms else None
        self.register_module("after_attention", None)
        self.register_module("after_mlp", None)
        self.enter: Border = identity
        self.leave: Border = identity

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        branch = self.leave(self.attention(self.enter(self.attention_norm(x)), cos, sin, attend))
        branch = branch if self.after_attention is None else self.after_attention(branch)
        x = x + (branch if self.post_attention_norm is None else self.post_attention_norm(branch))
        branch = self.leave(self.mlp(self.enter(self.mlp_norm(x))))
        branch = branch if self.after_mlp is None else self.after_mlp(branch)
        out: Tensor = x + (branch if self.post_mlp_norm is None else self.post_mlp_norm(branch))
        return out


class Decoder(nn.Module):
    """Tokens to hidden states to logits. Parameters are uninitialised: see `loading.load` and `initialize`.

    With a tied head there is one parameter, `embed_tokens.weight`, and `lm_head` is None.

    The slot `segments` may hold callables, each of which runs a few layers in a row, in place of the layers one by one.
    """

    segments: Sequence[Callable[..., Tensor]]

    tensor_roles: ClassVar[Mapping[str, Role]] = {"embed_tokens": "vocabulary", "lm_head": "vocabulary"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config)
        # Keyed by layer number, not a list: names stay what they are when a pipeline stage keeps only some layers.
        self.layers = nn.ModuleDict({str(index): Layer(config, index) for index in range(config.layers)})
        self.segments = ()
        self.norm = RMSNorm(config.hidden_size, config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.enter_head: Border = identity
        self.vocab_shard: VocabShard | None = None
        """Where the vocabulary is cut over processes: what is here of it."""

    def compiled(self) -> Callable[..., Tensor]:
        """`forward` under torch.compile, all but attention, which goes by the documents of each pack."""
        _leave_attention_uncompiled()
        return torch.compile(self, dynamic=True)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the head's own, with its adapter, or the embedding's where they are tied.

        Where the vocabulary is cut, the rows that are here.
        """
        if self.lm_head is None:
            return self.embed_tokens.weight
        assert self.lm_head.weight is not None, "the head is never packed"
        return self.lm_head.weight if self.lm_head.adapter is None else self.lm_head.adapter.effective(self.lm_head)

    def head_as_linear(self) -> Linear:
        """The head as a layer of its own; where it is tied, one that shares the embedding's weight."""
        if self.lm_head is None:
            with torch.device("meta"):
                self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
            self.lm_head.tie(self.embed_tokens)
        return self.lm_head

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype = torch.float32,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:   tokens [T] int64, documents end to end; positions [T] int64, restarting at 0 in each;
                attend: who sees whom; dtype: type of activations, whatever the parameters are stored in;
                lengths [T] int64: of each token's document, where only a part of that is given here.
        Returns [T, D] in `dtype`.
        """
        cos, sin = (table.to(dtype) for table in rotary_tables(self.config, positions, lengths))  # [T, R]
        x = self.embed_tokens(tokens, dtype)  # [T, D]
        for part in self.segments or self.layers.values():
            x = part(x, cos, sin, attend)
        return self.enter_head(self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [.., D] -> [.., V] float32, with the family's softcap; all words, also where they are cut."""
        head = ops.linear(hidden, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)
        logits: Tensor = head.float()
        cap = self.config.final_softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits if self.vocab_shard is None else self.vocab_shard.gather(logits)


@cache
def _leave_attention_uncompiled() -> None:
    """torch.compile makes constants of what it reads: with document lengths among them it would compile for every pack,
    and with the number of the layer for every layer, from the ninth on (torch's limit) not at all."""
    # No decorator of `_mix`: it would import torch._dynamo, a second that only a process which compiles should wait.
    Attention._mix = torch.compiler.disable(Attention._mix)  # type: ignore[method-assign]
