"""LoRA and DoRA on a linear layer, and LoRA on the stacked layers of experts and on an embedding.

T tokens · O, I outputs and inputs · r rank · V vocabulary · D model width · E experts · N rows, those of each expert
together"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters import shapes
from danlu.adapters.adapter import (
    Adapter,
    DenseLinear,
    EmbeddingAdapter,
    GroupedLinearAdapter,
    TensorAxes,
    new_parameter,
)
from danlu.adapters.dropout import Dropout
from danlu.adapters.low_rank import LowRankFactors
from danlu.core.layer_types import EmbeddingLayer, GroupedLayer, LinearLayer, LinearShard, Recomputed, ReduceGroup


class LowRank(Adapter):
    """W x + s B A x (LoRA, arXiv:2106.09685); with magnitudes m (V x) / |V|, V = W + s B A (DoRA, arXiv:2402.09353).

    Parameters: lora_A [r, I], lora_B [O, r], and for DoRA lora_magnitude_vector [O]; uninitialised until
    `reset_parameters` and `measure_base`.

    Where the initial factors A0, B0 were subtracted from the base (PiSSA, OLoRA, LoftQ), they are kept as the frozen
    parameters initial_A and initial_B: the original weight is the base's plus s B0 A0. While such an adapter is not
    active (`restores_base`), it adds s B0 A0 alone, so that the model computes the same as before.

    Args:
        shape: (O, I) of the layer.
        rank: r.
        scale: s.
        dropout: the dropout of x on its way into the low-rank path.
        magnitude: DoRA.
        exact_norm: whether DoRA's gradient goes through the norm |V| too.
        freeze_a: keep lora_A at its initial values (LoRA-FA, arXiv:2308.03303).
    """

    initial_A: nn.Parameter | None
    initial_B: nn.Parameter | None
    base_row_squares: Tensor | None  # [O] float32, with magnitudes: sum of squares of each row of the base's weight

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        scale: float,
        dropout: Dropout,
        *,
        magnitude: bool = False,
        exact_norm: bool = False,
        freeze_a: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.scale = scale
        self.restores_base = False
        self._dropout = dropout
        self.exact_norm = exact_norm
        factors = shapes.factors(shape, rank, freeze_a=freeze_a)
        self.lora_A = new_parameter(factors["lora_A"], device)
        self.lora_B = new_parameter(factors["lora_B"], device)
        vector = shapes.magnitudes(shape[0])["lora_magnitude_vector"]
        self.lora_magnitude_vector = new_parameter(vector, device) if magnitude else None
        self.register_parameter("initial_A", None)
        self.register_parameter("initial_B", None)
        self.register_buffer("base_row_squares", None, persistent=False)
        self.tensor_group: ReduceGroup | None = None
        """The tensor ranks among which the layer's inputs are cut, and with them the rows that DoRA takes norms of."""

    @property
    def rank(self) -> int:
        """The rank r of A and B."""
        return self.lora_A.shape[0]

    @property
    def dropout(self) -> Dropout | None:
        """The dropout of the low-rank path; None while the adapter only restores the base, which has none."""
        return None if self.restores_base else self._dropout

    @property
    def dropout_p(self) -> float:
        """Probability with which dropout zeroes an input."""
        return 0.0 if self.restores_base else self._dropout.p

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator, *, gaussian: bool = False) -> None:
        """Draws A as `draw_a` does and sets B to zero, so that training starts at the base."""
        self.lora_A.copy_(draw_a(self.lora_A.shape, generator, gaussian=gaussian))
        self.lora_B.zero_()

    @torch.no_grad()
    def set_initial_factors(self, a: Tensor, b: Tensor) -> None:
        """Starts from factors [r, I] and [O, r] that were subtracted from the base, and keeps a copy of them."""
        self.lora_A.copy_(a)
        self.lora_B.copy_(b)
        self.initial_A = nn.Parameter(self.lora_A.detach().clone(), requires_grad=False)
        self.initial_B = nn.Parameter(self.lora_B.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def measure_base(self, linear: LinearLayer) -> None:
        """Stores |W|^2 of each row of the base for DoRA, and sets the magnitudes m to |V|, to start at V x."""
        if self.lora_magnitude_vector is None:
            return
        dense = linear.dense_weight(torch.float32)
        self.base_row_squares = row_squares(dense)
        a, b = self.lora_A.double(), self.lora_B.double()
        if not b.any():
            self.lora_magnitude_vector.copy_(self.base_row_squares.sqrt())  # V is W: no second dense matrix
            return
        direction = dense.double().addmm_(b, a, alpha=self.scale)
        self.lora_magnitude_vector.copy_(torch.linalg.vector_norm(direction, dim=1))

    @property
    def tensor_axes(self) -> TensorAxes:
        return shapes.LOW_RANK_AXES

    def narrow(self, shard: LinearShard) -> None:
        self._dropout.first_feature = shard.inputs.start
        if shard.axis == "inputs":
            self.tensor_group = shard.group
        elif self.base_row_squares is not None:
            self.base_row_squares = self.base_row_squares[shard.outputs].clone()

    def factors(self) -> LowRankFactors:
        """Returns the factors that this adapter adds now: s B A, or s B0 A0 while it only restores the base."""
        if self.restores_base:
            assert self.initial_A is not None and self.initial_B is not None, "this adapter did not change the base"
            return LowRankFactors(self.initial_A, self.initial_B, self.scale)
        return LowRankFactors(
            self.lora_A,
            self.lora_B,
            self.scale,
            self.lora_magnitude_vector,
            self.base_row_squares,
            self.exact_norm,
            self.tensor_group,
        )

    def adapt_output(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """y + s B A x, for LoRA on top of another adapter. DoRA scales the weight itself, so it can only be lowest."""
        factors = self.factors()
        assert factors.magnitude is None, "DoRA is first in its slot"
        low = F.linear(x if self.dropout is None else self.dropout(x), factors.a.to(x.dtype))  # [T, r]
        return y + F.linear(low, (factors.b * factors.scale).to(x.dtype))

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        factors, dtype = self.factors(), dense.weight.dtype
        weight = dense.weight.addmm(factors.b.to(dtype), factors.a.to(dtype), alpha=factors.scale)
        if factors.magnitude is None:
            return DenseLinear(weight, dense.bias)
        assert self.tensor_group is None, "no process has whole rows to take the norms of"
        norm = torch.linalg.vector_norm(weight, dim=1)
        # Without `exact_norm` the norm is a constant for the gradient, as in the paper's section 4.3.
        gain = factors.magnitude / (norm if self.exact_norm else norm.detach())
        return DenseLinear(weight * gain.unsqueeze(1), dense.bias)


def draw_a(shape: torch.Size, generator: torch.Generator, *, gaussian: bool) -> Tensor:
    """A [.., r, I] of LoRA, drawn on the CPU, so that the values do not depend on the device.

    It is Kaiming-uniform with gain 1/sqrt(3), as in PEFT: U(-1, 1) / sqrt(I); gaussian: N(0, 1) / r.
    """
    rank, inputs = shape[-2:]
    if gaussian:
        return torch.empty(shape).normal_(std=1 / rank, generator=generator)
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def row_squares(weight: Tensor) -> Tensor:
    """[O, I] -> [O], the sum of squares of each row, in float32 or wider."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)).square()


class EmbeddingLowRank(EmbeddingAdapter):
    """E[token] + s B A[:, token]: LoRA on an embedding E [V, D].

    Parameters: lora_embedding_A [r, V], zero at first, and lora_embedding_B [D, r], drawn from N(0, 1), as in PEFT.
    """

    def __init__(self, shape: tuple[int, int], rank: int, scale: float, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.scale = scale
        factors = shapes.embedding_factors(shape, rank)
        self.lora_embedding_A = new_parameter(factors["lora_embedding_A"], device)
        self.lora_embedding_B = new_parameter(factors["lora_embedding_B"], device)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Sets A to zero and draws B on the CPU, so that the values do not depend on the device."""
        self.lora_embedding_A.zero_()
        self.lora_embedding_B.copy_(torch.empty(self.lora_embedding_B.shape).normal_(generator=generator))

    @property
    def tensor_axes(self) -> TensorAxes:
        return shapes.EMBEDDING_AXES

    def adapt_output(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        rows, elsewhere = embedding.local_rows(tokens)
        low = F.embedding(rows.clamp_max(self.lora_embedding_A.shape[1] - 1), self.lora_embedding_A.t())  # [T, r]
        low = low if elsewhere is None else low.masked_fill(elsewhere.unsqueeze(1), 0)
        return y + F.linear(low.to(y.dtype), (self.lora_embedding_B * self.scale).to(y.dtype))

    def merged_into(self, weight: Tensor) -> Tensor:
        a, b = self.lora_embedding_A.to(weight.dtype), self.lora_embedding_B.to(weight.dtype)
        return weight.addmm(a.t(), b.t(), alpha=self.scale)


class GroupedLowRank(GroupedLinearAdapter):
    """W_e x + s B_e A_e x for the rows x of expert e (LoRA, arXiv:2106.09685).

    Parameters: lora_A [E, r, I] and lora_B [E, O, r], uninitialised until `reset_parameters`. An expert without rows
    has gradients of zero, not none, as the experts themselves have.

    Args:
        experts: E.
        shape: (O, I) of each layer.
        rank: r.
        scale: s.
        freeze_a: keep lora_A at its initial values (LoRA-FA, arXiv:2308.03303).
    """

    def __init__(
        self,
        experts: int,
        shape: tuple[int, int],
        rank: int,
        scale: float,
        *,
        freeze_a: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.scale = scale
        factors = shapes.grouped_factors(experts, shape, rank, freeze_a=freeze_a)
        self.lora_A = new_parameter(factors["lora_A"], device)
        self.lora_B = new_parameter(factors["lora_B"], device)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator, *, gaussian: bool = False) -> None:
        """Draws A as `draw_a` does and sets B to zero, so that training starts at the base."""
        self.lora_A.copy_(draw_a(self.lora_A.shape, generator, gaussian=gaussian))
        self.lora_B.zero_()

    @property
    def tensor_axes(self) -> TensorAxes:
        return shapes.GROUPED_AXES

    def adapt_output(self, x: Tensor, y: Tensor, counts: Tensor, linear: GroupedLayer) -> Tensor:
        low = linear.product(x, self.lora_A, counts)  # [N, r]
        return y + linear.product(low, self.lora_B * self.scale, counts)

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        a, b = self.lora_A.to(dense.weight.dtype), self.lora_B.to(dense.weight.dtype)
        return DenseLinear(dense.weight.baddbmm(b, a, alpha=self.scale), dense.bias)
