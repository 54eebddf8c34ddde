"""Protocols of the slots of layers and of the layers that have them. Importing this does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# T packed tokens · S cached tokens · V vocabulary · D model width · H query heads · K key/value heads · C head width
# W width of a value
# I, O inputs and outputs of a linear layer


class Expand(Protocol):
    """Makes keys and values of stored values, token by token."""

    def __call__(
        self,
        stored: Sequence[Tensor],  # [S, *lead, width] each
        positions: Tensor | None = None,  # [S] int64, of each token in its sequence; None: those of the forward pass
    ) -> tuple[Tensor, Tensor]: ...  # [S, K, C], [S, K, W]


class Absorb(Protocol):
    """Attention over stored values, not over keys and values made of them.

    They are then one tensor with one head, [S, 1, L]. It serves all query heads as their key, and its first
    `value_width` features as their value, once queries have been multiplied with the matrix that would have made the
    keys; the output is multiplied with the one that would have made the values (DeepSeek-V2, arXiv:2405.04434, section
    2.1.2).
    """

    @property
    def value_width(self) -> int: ...

    @property
    def fewest_expanded(self) -> int: ...  # queries of a sequence from which on it takes less to expand its keys

    @property
    def merges_adapter(self) -> bool: ...  # whether the matrices have an adapter merged into them, without its dropout

    # exact: by products that give a token the same bits whatever the other tokens are.
    def queries(self, q: Tensor, *, exact: bool = False) -> Tensor: ...  # [T, H, C] -> [T, H, L]

    def outputs(self, out: Tensor, *, exact: bool = False) -> Tensor: ...  # [T, H, value_width] -> [T, H, W]


@dataclass(frozen=True)
class Keys:
    """Keys and values of T tokens for a layer's queries: the stored values, and the function that makes keys and values
    of them.
    """

    stored: tuple[Tensor, ...]
    """The values that a cache keeps of each token, [T, *lead, width] each.

    They are keys [T, K, C] and values [T, K, W], or the values from which both are made.
    """
    expand: Expand | None = None
    """None: keys and values are stored."""
    absorb: Absorb | None = None
    layer: int | None = None
    """The layer before this one that has made them, with its cache; None: they are the layer's own."""

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Keys [T, K, C] and values [T, K, W] of the tokens of the forward pass."""
        if self.expand is not None:
            return self.expand(self.stored)
        k, v = self.stored
        return k, v


class Attend(Protocol):
    """Attention over flat tokens, given to the decoder from outside: packed documents, paged cache, ring, reference."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C] rotated
        keys: Keys,
        *,
        scale: float,
        window: int | None,  # a query sees itself and window - 1 tokens before it; None = all
        softcap: float | None,  # Gemma-2: softcap * tanh(score / softcap)
        sinks: Tensor | None = None,  # [H]: scores of one more key each, with a value of zero (gpt-oss)
    ) -> Tensor: ...  # [T, H, W]

    @property
    def runs(self) -> Any: ...  # `models.recurrent_order.RecurrentRuns`, of the same tokens: for layers with a state


@dataclass(frozen=True)
class LayerCache:
    """The shapes of the values that attention keeps of each token for later ones, as the rows of a cache."""

    shapes: tuple[tuple[int, ...], ...]  # of each tensor, without the tokens: keys (K, C) and values (K, C)
    window: int | None  # tokens further back are not looked at again; None: all are
    states: tuple[tuple[int, ...], ...] = ()
    """The shape of each tensor that is kept of a sequence as a whole and changes with its tokens. The last one is
    float32.
    """


class QuantizedWeight(Protocol):
    """A frozen matrix [O, I] held in few bits a number; the slot `quantized` of a linear layer."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self, dtype: torch.dtype | None = None) -> Tensor: ...  # [O, I], a new tensor in each call

    def in_workspace(self, dtype: torch.dtype) -> AbstractContextManager[Tensor]: ...  # same, not to keep

    def shard(self, rows: slice, columns: slice) -> QuantizedWeight: ...  # some of its rows and columns

    def product(self, x: Tensor) -> Tensor: ...  # [T, I] -> [T, O] in x's dtype, differentiable in x

    def few_row_product(
        self, *below: QuantizedWeight, is_one: bool = False
    ) -> FewRowProduct | None: ...  # with this and others below it, by a kernel that reads codes; None: there is none


class FewRowProduct(Protocol):
    """The product of few rows with frozen matrices [O, I] as they are stored, one below the other."""

    @property
    def copied_bytes(self) -> int: ...  # memory besides the matrices'

    @property
    def multiply(self) -> Callable[[Tensor], Tensor]: ...  # [M, I] -> [M, O of all], bfloat16, without a gradient


class StackedQuantizedWeight(Protocol):
    """Frozen matrices [E, O, I], each held in few bits a number; the slot `quantized` of grouped linear layers."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (O, I) of each

    @property
    def count(self) -> int: ...  # E

    def dense(self, dtype: torch.dtype | None = None) -> Tensor: ...  # [E, O, I], a new tensor in each call

    def in_workspace(self, dtype: torch.dtype) -> AbstractContextManager[Tensor]: ...  # same, not to keep

    def matrix_in_workspace(
        self, index: int, dtype: torch.dtype
    ) -> AbstractContextManager[Tensor]: ...  # one of them, [O, I], not to keep

    def rounded_product(
        self, x: Tensor, counts: Tensor
    ) -> Tensor | None: ...  # [N, I], [E] -> [N, O] where x is rounded, without a gradient; None: it is not

    def few_row_product(self, index: int, *, is_one: bool = False) -> FewRowProduct | None: ...  # that of one of them

    def part(self, start: int, count: int) -> StackedQuantizedWeight: ...  # so many of them

    def shard(self, rows: slice, columns: slice) -> StackedQuantizedWeight: ...  # some rows and columns of each


class LinearArithmetic(Protocol):
    """How the matrix products of linear layers are computed, forward and backward, where that is not in the type of
    activations; the slot `arithmetic` of a linear layer and of the stacked ones of experts.

    Tensors that the backward pass needs of an input are handed over as a tuple, so that recomputation, offload and the
    queue of weight gradients see each of them.
    """

    def forward(
        self, x: Tensor, weights: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]: ...  # [T, I], [O, I] each -> [T, O] of each, in x's dtype; kept

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor: ...  # [T, O], [O, I] -> [T, I] in grad's dtype

    def weight_gradient(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor: ...  # [T, O] -> [O, I] float32

    def grouped_forward(
        self, x: Tensor, weights: Sequence[Tensor], counts: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]: ...  # [N, I], [G, O, I] each, [G] -> [N, O] of each; kept

    def grouped_input_gradient(
        self, grad: Tensor, weight: Tensor, counts: Tensor
    ) -> Tensor: ...  # [N, O], [G, O, I], [G] -> [N, I]

    def grouped_weight_gradient(
        self, grad: Tensor, kept: Sequence[Tensor], counts: Tensor
    ) -> Tensor: ...  # [N, O], [G] -> [G, O, I] float32

    def rows_of_tokens(self, tokens: Tensor) -> AbstractContextManager[None]: ...  # in which x [N, I] are those of [N]

    @property
    def keeps_codes(self) -> bool: ...  # whether inputs are kept in few bits

    def keep(self, x: Tensor) -> tuple[Tensor, ...]: ...  # what the backward pass is left of a tensor [T, I]

    def kept_values(self, kept: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...  # the numbers that were kept of it

    @property
    def row_codes(self) -> RowCodes | None: ...  # how rows travel between processes, if not in the type of activations

    @property
    def rounding(self) -> WeightRounding | None: ...  # of weights that rollouts multiply with too; None: there is none


class RowCodes(Protocol):
    """An arithmetic of which rows, and gradients of outputs, travel between processes as the codes that are kept of
    them: these are the factors of the products there."""

    def keep(self, x: Tensor) -> tuple[Tensor, ...]: ...  # rows [N, I] -> their codes and scales

    def kept_values(self, kept: Sequence[Tensor], dtype: torch.dtype) -> Tensor: ...  # the numbers [N, I] of these

    def to_bytes(self, kept: Sequence[Tensor]) -> Tensor: ...  # what was kept of rows [N, I] -> [N, B] uint8

    def from_bytes(self, row_bytes: Tensor, features: int) -> tuple[Tensor, ...]: ...  # and back, without rounding

    def grouped_forward_of_kept(
        self, kept: Sequence[Tensor], weights: Sequence[Tensor], counts: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]: ...  # `LinearArithmetic.grouped_forward` of such rows -> [N, O] of each, in `dtype`


class LowRankSum(NamedTuple):
    """The product scale B A that is added to a weight before it is rounded."""

    a: Tensor  # [r, I]
    b: Tensor  # [O, r]
    scale: float


class WeightRounding(Protocol):
    """Rounds the weights of linear layers to a format of few bits (quantization-aware training)."""

    def numbers(
        self, weight: Tensor, dtype: torch.dtype, added: LowRankSum | None = None
    ) -> Tensor: ...  # [.., O, I]: of weight, or of its sum with a product [O, I], a new tensor without gradient

    def in_workspace(
        self, weight: Tensor, dtype: torch.dtype, added: LowRankSum | None = None
    ) -> AbstractContextManager[Tensor]: ...  # same, not to keep

    def weights_changed(self) -> None: ...  # called after an update


class Recomputed(NamedTuple):
    """How the input of a linear layer is computed again in the backward pass, which then need not save it."""

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # of `function`; what made the layer's input saves them for backward in any case


class LinearLayer(Protocol):
    """A linear layer as adapters see it: they do not ask how its weight is stored."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (O, I)

    @property
    def bias(self) -> Tensor | None: ...  # [O]

    @property
    def added_bias(self) -> Tensor | None: ...  # [O]: what this process adds of it

    @property
    def adapter(self) -> LinearAdapter | None: ...

    @property
    def own_arithmetic(self) -> LinearArithmetic | None: ...  # of its products; None: that of activations

    @property
    def stored_weight(self) -> Tensor: ...  # [O, I]: the weight itself, of a layer that is not quantized

    def dense_weight(self, dtype: torch.dtype) -> Tensor: ...  # [O, I]; the weight itself where it has that type

    def weight_in_workspace(self, dtype: torch.dtype) -> AbstractContextManager[Tensor]: ...  # same, not to keep

    def scaled_rows(self, matrix: Tensor, factors: Tensor) -> Tensor: ...  # [O, I] times [O]; in place if only lent

    def base(self, x: Tensor) -> Tensor: ...  # [T, I] -> [T, O] without any adapter

    def multiplies_codes(self, x: Tensor) -> bool: ...  # whether `base` multiplies x with codes as they are stored


class LinearAdapter(Protocol):
    """A module that takes over the product of a linear layer; its slot `adapter`."""

    def __call__(self, x: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor: ...

    def forward_shared(self, x: Tensor, linears: Sequence[LinearLayer]) -> tuple[Tensor, ...]: ...  # all share x

    def effective(self, linear: LinearLayer) -> Tensor: ...  # [O, I], differentiable: the weight with its adapter


class GroupedLayer(Protocol):
    """Linear layers of one shape as adapters see them, those of experts: rows of each lie together."""

    @property
    def shape(self) -> tuple[int, int]: ...  # (O, I) of each

    def base(self, x: Tensor, counts: Tensor) -> Tensor: ...  # [N, I], counts [E] -> [N, O], without any adapter

    def product(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor: ...  # [N, I] by rows, [E, O, I] -> [N, O]


class GroupedAdapter(Protocol):
    """A module that takes over the product of grouped linear layers."""

    def __call__(self, x: Tensor, counts: Tensor, linear: GroupedLayer) -> Tensor: ...  # [N, I], [E] -> [N, O]


class EmbeddingLayer(Protocol):
    """An embedding as adapters see it."""

    @property
    def weight(self) -> Tensor: ...  # [V, D]

    def local_rows(
        self, tokens: Tensor
    ) -> tuple[Tensor, Tensor | None]: ...  # [T] row of each; [T] bool, True: elsewhere

    def base(self, tokens: Tensor, dtype: torch.dtype) -> Tensor: ...  # [T] -> [T, D]


class EmbeddingAdapter(Protocol):
    """A module that takes over the look-up of an embedding."""

    def __call__(self, tokens: Tensor, dtype: torch.dtype, embedding: EmbeddingLayer) -> Tensor: ...  # [T, D]


class KeyValuePrefix(Protocol):
    """Replaces keys and values [T, K, C] of some tokens, after rotation."""

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class DispatchedRows(NamedTuple):
    """Rows that have come to the process of their experts."""

    rows: Tensor  # [R, D] by expert, in the type of activations; where they came as codes NaN, for gradients alone
    counts: Tensor  # [E here] int64, rows of each expert
    kept: tuple[Tensor, ...] = ()  # where they came as codes, what `RowCodes.keep` returned of them


class ExpertExchange(Protocol):
    """Takes rows to the processes that have their experts, and back; the slot `exchange` of a layer's experts.

    codes: of the products that take the rows, or the gradients of their outputs, if these travel in few bits.
    """

    def dispatch(
        self, rows: Tensor, counts: Tensor, codes: RowCodes | None = None
    ) -> DispatchedRows: ...  # rows [N, D] by expert, counts [E] int64 -> those of the experts that are here

    def combine(
        self, rows: Tensor, codes: RowCodes | None = None
    ) -> Tensor: ...  # the experts' outputs -> [N, D], in the order of `dispatch`; codes: of their gradients


class ReduceGroup(Protocol):
    """A process group that can sum, take maxima and gather; the group of a single process returns its arguments."""

    @property
    def size(self) -> int: ...  # of processes

    def sum(self, x: Tensor) -> Tensor: ...  # in place

    def max(self, x: Tensor) -> Tensor: ...  # in place

    def all_gather(self, x: Tensor) -> Tensor: ...  # all members' x, stacked by rows in the group's order


Axis = Literal["outputs", "inputs"]


@dataclass(frozen=True)
class LinearShard:
    """The shard that one tensor rank has of a linear layer [O, I], or of an embedding, where rows count as outputs.

    A layer cut by outputs (column parallel) computes a part of the outputs; one cut by inputs (row parallel) a term of
    a sum over `group`, which is added up behind the layer. So a parameter of the layer that is not cut along `axis`
    gets only a part of its gradient on each rank.
    """

    axis: Axis  # along which it is cut
    outputs: slice  # of the whole layer's
    inputs: slice
    group: ReduceGroup
    first: bool  # whether this process adds what must be added once


@dataclass(frozen=True)
class NormShard:
    """The features that one tensor rank has of rows that are normed over the features of all."""

    group: ReduceGroup
    width: int  # features of a whole row
    copies: int  # ranks that have the same ones


@dataclass(frozen=True)
class VocabShard:
    """The rows of embedding and head that one tensor rank has, where the vocabulary is cut among several."""

    start: int  # id of the first token that has its row here
    group: ReduceGroup
    gather: Callable[[Tensor], Tensor]  # [.., rows] -> [.., V], differentiable


TRAINED = "default"
"""The name of the adapter that a run trains, as in PEFT."""
LANGUAGE_PART = "model.language_model"
"""How the names of modules begin in transformers' classes of multimodal models, of those that make a decoder."""


@dataclass(frozen=True)
class Site:
    """A place of a model where an adapter may sit."""

    name: str  # of the module: "layers.0.attention.q_proj"
    hf_name: str  # in Hugging Face folders: "model.layers.0.self_attn.q_proj"; parts of a fused tensor share one
    group: str  # "attention", "mlp", "per_layer", "experts", "embedding" or "head"
    layer: int | None
    shape: tuple[int, int]  # (O, I); (V, D) of an embedding
    module: Any
    turns: int = 1  # how often the parts of a fused tensor take turns, each time with an equal number of their outputs
    experts: int | None = None  # how many layers of this shape it is, stacked, each a part of an expert

    @property
    def is_linear(self) -> bool:
        """Whether the site is one linear layer of a decoder's layers: not embedding, head, or the stacked ones of
        experts.
        """
        return self.layer is not None and self.experts is None
