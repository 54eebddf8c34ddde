"""The decoder: layers of attention and a feed-forward network, gated MLP or experts, over packed tokens.

It is single-device code that knows nothing of packing, caches or ranks: `forward` takes an `Attend` that computes
attention, products go through `Linear` (where adapters and quantized weights take over), and modules declare the parts
that may be cut over processes or recomputed (`tensor_cut`, `recompute_points`).

T packed tokens · D model width · R rotated features of a head · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.layer_types import Attend, VocabShard, WeightRounding
from danlu.models import ops
from danlu.models.attention import Attention, leave_attention_uncompiled
from danlu.models.chunks import Chunks, DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Experts, Feed, Mixer
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.modules import (
    MLP,
    AttentionSublayer,
    BoundaryOp,
    Embedding,
    FeedForwardSublayer,
    LayerScalar,
    Linear,
    RecomputePoints,
    RMSNorm,
    Sublayer,
    identity,
    norm_of,
)
from danlu.models.rope import Rotation, rotary_tables
from danlu.models.rope_config import Rope

BIAS_COLUMNS = 8
"""Columns that a head's bias takes in `Decoder.head_weight`: products of other widths are slow on a GPU."""


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms may also stand behind each half, or there alone.

    With a parallel residual it is x + attention(norm(x)) + mlp(norm(x)), of two norms or of one for both. The whole may
    be multiplied by a number of the layer.

    The slots `after_attention` and `after_mlp` take a module [T, D] -> [T, D] right behind each half. Attention and MLP
    may be cut over processes, between `enter` and `leave`. Under sequence parallelism (arXiv:2205.05198) all tokens are
    there only between these; the rest of the layer has local ones, [T/tp, D].
    """

    sublayer_names: ClassVar = ("attention", "mlp")
    recompute_points: ClassVar[RecomputePoints] = {
        "elementwise": ("attention_norm.forward", "mlp_norm.forward"),
        "selective": ("attention_norm.forward", "mlp_norm.forward"),
    }
    """Recomputation without norms behind a sublayer: no product saves their outputs."""

    attention: AttentionSublayer
    mlp: FeedForwardSublayer
    after_attention: nn.Module | None
    after_mlp: nn.Module | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        spec = config.layers[layer]
        before, behind = spec.normed_before, spec.normed_behind
        self.attention_norm = norm_of(config, spec.norm_kind) if "attention" in before else None
        self.attention = mixer_of(config, spec.mixer, layer)
        self.post_attention_norm = norm_of(config, spec.norm_kind) if behind else None
        self.mlp_norm = norm_of(config, spec.norm_kind) if "mlp" in before else None
        self.mlp = feed_forward_of(config, spec.feed)
        self.post_mlp_norm = norm_of(config, spec.norm_kind) if behind else None
        self.layer_scalar = LayerScalar() if spec.scalar else None
        self.parallel, self.shares_norm = spec.parallel, spec.norms == "shared"
        self.multiplier = config.residual_multiplier
        self.register_module("after_attention", None)
        self.register_module("after_mlp", None)
        self.enter: BoundaryOp = identity
        self.leave: BoundaryOp = identity

    @property
    def sublayers(self) -> dict[str, Sublayer]:
        """Attention and feed-forward network by name, in the order of the forward pass."""
        return {name: getattr(self, name) for name in self.sublayer_names}

    def forward(self, x: Tensor, rotations: Sequence[Rotation], attend: Attend) -> Tensor:
        normed = x if self.attention_norm is None else self.attention_norm(x)
        joined = self._halves(x, normed, self.attention(self.enter(normed), rotations, attend))
        return joined if self.layer_scalar is None else self.layer_scalar(joined)

    def _halves(self, x: Tensor, normed: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream behind both halves, from the layer's input, which also stands normed before attention,
        and attention's output.
        """
        branch = self.leave(mixed)
        branch = branch if self.after_attention is None else self.after_attention(branch)
        joined = self._join(x, branch if self.post_attention_norm is None else self.post_attention_norm(branch))
        if not self.shares_norm:
            source = x if self.parallel else joined
            normed = source if self.mlp_norm is None else self.mlp_norm(source)
        branch = self.leave(self.mlp(self.enter(normed)))
        branch = branch if self.after_mlp is None else self.after_mlp(branch)
        return self._join(joined, branch if self.post_mlp_norm is None else self.post_mlp_norm(branch))

    def _join(self, x: Tensor, branch: Tensor) -> Tensor:
        """The residual stream behind a half."""
        return x + branch if self.multiplier == 1.0 else x + branch * self.multiplier


def feed_forward_of(config: ModelConfig, spec: Feed) -> FeedForwardSublayer:
    """A layer's gated MLP, or its experts."""
    if not isinstance(spec, Experts):
        return MLP(config, spec)
    from danlu.models.experts import MoE

    return MoE(config, spec)


def layer_of(config: ModelConfig, layer: int) -> Layer:
    """A layer, by its number."""
    if not config.layers[layer].carries_values:
        return Layer(config, layer)
    from danlu.models.carried import CarryingLayer

    return CarryingLayer(config, layer)


def mixer_of(config: ModelConfig, spec: Mixer, layer: int) -> AttentionSublayer:
    """Returns the module that mixes a layer's tokens."""
    match spec:
        case Heads(sharing=None):
            return Attention(config, spec, layer)
        case Heads():
            from danlu.models.shared_keys import sharing_attention

            return sharing_attention(config, spec, layer)
        case Latent():
            from danlu.models.latent_attention import LatentAttention

            return LatentAttention(config, spec, layer)
        case Factorized():
            from danlu.models.factorized_attention import FactorizedAttention

            return FactorizedAttention(config, spec, layer)
        case Delta():
            from danlu.models.gated_delta_net import GatedDeltaNet

            return GatedDeltaNet(config, spec, layer)


class Decoder(nn.Module):
    """Tokens to hidden states to logits. Parameters are uninitialised: see `loading.load` and `initialize`.

    With a tied head there is one parameter, `embed_tokens.weight`, and `lm_head` is None. So it is where the task is to
    classify: such a decoder ends with its hidden states.

    The slot `segments` may hold callables, each of which runs a few layers in a row, in place of the layers one by one:
    those of each chunk, by its number.
    """

    segments: Mapping[int, Sequence[Callable[..., Tensor]]]
    recomputed_attention: frozenset[int]
    """Layers that recompute attention probabilities in the backward pass, where a kernel keeps them."""
    staged_ropes: Mapping[int, tuple[Rope, ...]]
    """The rotary embeddings that replace `config.ropes`, by the length of a stage of training."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config)
        if config.per_layer_width:
            columns, width = config.per_layer_columns, config.per_layer_width
            self.embed_tokens_per_layer = Embedding(config, width=columns, multiplier=width**0.5)
            self.per_layer_model_projection = Linear(config.hidden_size, columns, bias=False)
            self.per_layer_projection_norm = RMSNorm(width, config)
        # Keyed by layer number, not a list: names stay what they are when a pipeline stage keeps only some layers.
        self.layers = nn.ModuleDict({str(index): layer_of(config, index) for index in range(len(config.layers))})
        self.chunks = Chunks.whole(len(config.layers))
        self.segments = {}
        self.recomputed_attention = frozenset()
        self.staged_ropes = {}
        self.norm = norm_of(config, config.norm_kind)
        own = config.has_own_head
        self.lm_head = Linear(config.hidden_size, config.vocab_rows, bias=config.head_bias) if own else None
        self.enter_chunk: BoundaryOp = identity
        """Applied to the input of a chunk that is not the first."""
        self.begin_pass: Callable[[Tensor], None] | None = None
        """Called with the tokens [T] of a pass through a chunk that is not the first, for adapters that need them."""
        self.enter_head: BoundaryOp = identity
        self.vocab_shard: VocabShard | None = None
        """The part of the vocabulary that this process has, where it is cut over processes; None otherwise."""
        self.rounding: WeightRounding | None = None
        """Rounds the weights of linear layers to the format that they are trained for; None: they are as they are."""
        self.real_rows: Callable[[int], AbstractContextManager[None]] | None = None
        """Makes the context in which products leave the tokens behind the first so many out of their scales; None: none
        has a scale of all tokens."""
        self.device_map: DeviceMap | None = None
        """The devices of the model's parts, where they are on several devices of one process; None otherwise."""

    def keep_chunks(self, chunks: Chunks) -> None:
        """Drops the modules of other processes' chunks; the others keep their names.

        A tied embedding stays with the first chunk and with the last, which uses it as its head.
        """
        assert not self.config.carries_values or chunks.has_first, "split_problems refuses such a model"
        self.chunks = chunks
        kept = {str(layer) for layer in chunks.local_layers}
        for name in self.layers.keys() - kept:
            del self.layers[name]
        if not chunks.has_first and chunks.has_last and self.has_tied_head:
            self.embed_tokens.adapter = None  # it changes the embeddings of tokens only
        elif not chunks.has_first:
            del self.embed_tokens
        if not chunks.has_last:
            del self.norm
            self.lm_head = None

    def layers_of(self, chunk: int) -> list[nn.Module]:
        """The layers of a chunk of this process, in the order of the forward pass."""
        return [self.layers[str(layer)] for layer in self.chunks.layers[chunk]]

    def compiled(self) -> Callable[..., Tensor]:
        """`forward` under torch.compile, except attention and experts: documents and routes of each pack differ."""
        from danlu.models.experts import leave_experts_uncompiled
        from danlu.models.factorized_attention import FactorizedAttention
        from danlu.models.gated_delta_net import leave_recurrence_uncompiled
        from danlu.models.latent_attention import LatentAttention

        leave_attention_uncompiled(Attention, LatentAttention, FactorizedAttention)
        if self.config.shares_keys:
            from danlu.models.shared_keys import GivingAttention, ReadingAttention

            leave_attention_uncompiled(GivingAttention, ReadingAttention)
        leave_recurrence_uncompiled()
        leave_experts_uncompiled()
        return torch.compile(self, dynamic=True)

    @property
    def input_device(self) -> torch.device:
        """The device of input tokens and positions and of output hidden states; with a device map the head's."""
        if self.device_map is not None:
            return torch.device(self.device_map.head)
        return next(self.parameters()).device

    @property
    def has_tied_head(self) -> bool:
        """Whether the embedding is the head over the vocabulary too."""
        return self.config.task == "causal-lm" and self.config.tie_word_embeddings

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the head's own, with its adapter, or the embedding's where they are tied.

        Where the vocabulary is cut, the rows that are here; without those that no token has. A bias is a column more,
        which `head_input` multiplies by 1, and zeros up to `BIAS_COLUMNS`: [V, D + BIAS_COLUMNS].
        """
        assert self.config.task == "causal-lm", "a model that classifies has no head over the vocabulary"
        if self.lm_head is None:
            return self._of_tokens(self.embed_tokens.weight, dim=0)
        adapter, bias = self.lm_head.adapter, self.lm_head.bias
        weight = self.lm_head.stored_weight if adapter is None else adapter.effective(self.lm_head)
        if bias is not None:
            column = bias.to(weight.dtype).unsqueeze(1)
            weight = torch.cat((weight, F.pad(column, (0, BIAS_COLUMNS - 1))), 1)
        return self._of_tokens(weight, dim=0)

    def head_input(self, hidden: Tensor) -> Tensor:
        """hidden [.., D] -> the states that `head_weight` multiplies: themselves, or with a 1 for its bias."""
        if not self.config.head_bias or self.config.task != "causal-lm":
            return hidden
        ones = hidden.new_ones(*hidden.shape[:-1], 1)
        return torch.cat((hidden, F.pad(ones, (0, BIAS_COLUMNS - 1))), -1)

    @property
    def trains_head(self) -> bool:
        """Whether some of the head's weights, or of its adapters', are trained."""
        return any(weight.requires_grad for weight in self.head_parameters())

    def head_parameters(self) -> list[Tensor]:
        """The parameters of the head over the vocabulary, with those of its adapter."""
        return [self.embed_tokens.weight] if self.lm_head is None else [*self.lm_head.parameters()]

    def _of_tokens(self, rows: Tensor, dim: int) -> Tensor:
        """Rows of the vocabulary that are here, along a dimension -> those of tokens: itself without padding rows."""
        if not self.config.vocab_padding:
            return rows
        start = 0 if self.vocab_shard is None else self.vocab_shard.start
        return rows.narrow(dim, 0, min(rows.shape[dim], self.config.vocab_size - start))

    def head_as_linear(self) -> Linear:
        """The head as a Linear; of a tied head, one that is made here and shares the embedding's weight.

        Raises ModelError for a model that classifies.
        """
        if self.config.task != "causal-lm":
            raise ModelError("a model that classifies has no lm_head to adapt or train: leave it out of `adapter`")
        if self.lm_head is None:
            with torch.device("meta"):
                self.lm_head = Linear(self.config.hidden_size, self.config.vocab_rows, bias=False)
            self.lm_head.tie(self.embed_tokens)
        return self.lm_head

    def rotations(
        self, positions: Tensor, dtype: torch.dtype, lengths: Tensor | None = None, stage_length: int | None = None
    ) -> tuple[Rotation, ...]:
        """Returns the tables of each rotary embedding of `config.ropes`, in `dtype`; arguments as in `forward`."""
        ropes = self.config.ropes if stage_length is None else self.staged_ropes[stage_length]
        return tuple(rotary_tables(rope, positions, lengths).to(dtype) for rope in ropes)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        dtype: torch.dtype = torch.float32,
        lengths: Tensor | None = None,
        stage_length: int | None = None,
        chunk: int = 0,
        x: Tensor | None = None,
    ) -> Tensor:
        """Returns hidden states behind a chunk; behind the last one after the final norm. A whole model is one chunk.

        Args:   tokens [T] int64, documents end to end; positions [T] int64, restarting at 0 in each;
                attend: computes attention over the pack; dtype: type of activations, whatever the type of stored
                    parameters;
                lengths [T] int64: the length by which each token's document is rotated, where that is not its own
                length, or only a part of the document is given here; stage_length: key of `staged_ropes`, None for the
                model's own;
                chunk: its number, of those that are here; x [T, D]: the output of the chunk before for these tokens,
                    None for the first.
        Returns [T, D] in `dtype`; under sequence parallelism [T/tp, D], as `x` is, but behind the last chunk.
        """
        if x is not None and self.begin_pass is not None:
            self.begin_pass(tokens)
        rotations = self.rotations(positions, dtype, lengths, stage_length)
        hidden: Tensor = self.embed_tokens(tokens, dtype) if x is None else self.enter_chunk(x)  # [T, D]
        parts = self.segments.get(chunk) or self.layers_of(chunk)
        if self.config.carries_values:
            from danlu.models.carried import carried_by, run_parts

            hidden, _ = run_parts(parts, hidden, rotations, attend, carried_by(self, tokens, hidden))
        else:
            for part in parts:
                hidden = part(hidden, rotations, attend)
        if chunk < self.chunks.last:
            return hidden
        hidden = self.norm(hidden)
        if self.config.task == "causal-lm" and self.config.logits_divisor != 1.0:
            hidden = hidden / self.config.logits_divisor
        return self.enter_head(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [.., D] -> [.., V] float32, with the family's softcap; all of V, also where it is sharded."""
        assert self.config.task == "causal-lm", "a model that classifies has no head over the vocabulary"
        head = ops.linear(hidden, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(hidden)
        logits: Tensor = self._of_tokens(head, dim=-1).float()
        cap = self.config.final_softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits if self.vocab_shard is None else self.vocab_shard.gather(logits)
