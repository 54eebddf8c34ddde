"""LoRA and DoRA on a linear layer, and LoRA on an embedding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.adapters.adapter import Adapter, Dense, EmbeddingAdapter, TensorAxes
from danlu.adapters.dropout import Dropout
from danlu.adapters.low_rank import Branch, LowRankFactors
from danlu.types import EmbeddingLayer, LinearLayer, LinearShard, Recomputed, ReduceGroup

# T tokens · O, I outputs and inputs · r rank · V vocabulary · D model width


class LowRank(Adapter):
    """W x + s B A x (LoRA, arXiv:2106.09685); with magnitudes m (V x) / |V|, V = W + s B A (DoRA, arXiv:2402.09353).

    Parameters: lora_A [r, I], lora_B [O, r], and for DoRA lora_magnitude_vector [O]; uninitialised until `draw` and
    `measure`. Where the start was taken out of the base (PiSSA, OLoRA, LoftQ), it stays as initial_A and initial_B:
    only with it the adapter can be told from the base again, and while the adapter is not active (`asleep`) it is the
    start alone, so that the model is what it was before.
    """

    initial_A: nn.Parameter | None
    initial_B: nn.Parameter | None
    weight_norm: Tensor | None

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
        outputs, inputs = shape
        self.scale = scale
        self.asleep = False
        self._dropout = dropout
        self.exact_norm = exact_norm
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=device), requires_grad=not freeze_a)
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=device))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(outputs, device=device)) if magnitude else None
        self.register_parameter("initial_A", None)
        self.register_parameter("initial_B", None)
        self.register_buffer("weight_norm", None, persistent=False)
        self.tensor_group: ReduceGroup | None = None
        """The processes among which the layer's inputs are cut, and with them the rows whose norms DoRA takes."""

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]

    @property
    def dropout(self) -> Dropout | None:
        return None if self.asleep else self._dropout

    @property
    def share(self) -> float:
        """Of inputs that dropout takes."""
        return 0.0 if self.asleep else self._dropout.share

    @property
    def takes_from_base(self) -> bool:
        """Whether the base is what it was only with this adapter's start."""
        return self.initial_A is not None

    @torch.no_grad()
    def draw(self, generator: torch.Generator, *, gaussian: bool = False) -> None:
        """A at random, B zero, so that training starts at the base. Drawn on the CPU: no device changes the values.

        A is Kaiming-uniform with gain 1/sqrt(3), as PEFT has it: U(-1, 1) / sqrt(I); gaussian: N(0, 1) / r.
        """
        values = torch.empty(self.lora_A.shape)
        if gaussian:
            values.normal_(std=1 / self.rank, generator=generator)
        else:
            bound = 1 / math.sqrt(values.shape[1])
            values.uniform_(-bound, bound, generator=generator)
        self.lora_A.copy_(values)
        self.lora_B.zero_()

    @torch.no_grad()
    def begin(self, a: Tensor, b: Tensor) -> None:
        """Starts from factors [r, I] and [O, r] that have been taken out of the base, and remembers them."""
        self.lora_A.copy_(a)
        self.lora_B.copy_(b)
        self.initial_A = nn.Parameter(self.lora_A.detach().clone(), requires_grad=False)
        self.initial_B = nn.Parameter(self.lora_B.detach().clone(), requires_grad=False)

    @torch.no_grad()
    def measure(self, linear: LinearLayer, *, start: bool) -> None:
        """Takes the norms of the base's rows, which DoRA needs; with `start` its magnitudes start as those of V."""
        if self.lora_magnitude_vector is None:
            return
        self.weight_norm = row_squares(linear.dense_weight(torch.float32))
        if start:
            a, b = self.lora_A.double(), self.lora_B.double()
            if not b.any():
                self.lora_magnitude_vector.copy_(self.weight_norm.sqrt())
                return
            dense = linear.dense_weight(torch.float32)
            direction = dense.double().addmm_(b, a, alpha=self.scale)
            self.lora_magnitude_vector.copy_(torch.linalg.vector_norm(direction, dim=1))

    @property
    def tensor_axes(self) -> TensorAxes:
        return {
            "lora_A": (None, "inputs"),
            "lora_B": ("outputs", None),
            "lora_magnitude_vector": ("outputs",),
            "initial_A": (None, "inputs"),
            "initial_B": ("outputs", None),
        }

    def narrow(self, share: LinearShard) -> None:
        self._dropout.first_feature = share.inputs.start
        if share.axis == "inputs":
            self.tensor_group = share.group
        elif self.weight_norm is not None:
            self.weight_norm = self.weight_norm[share.outputs].clone()

    def factors(self) -> LowRankFactors:
        if self.asleep:
            assert self.initial_A is not None and self.initial_B is not None, "only a start that was taken out sleeps"
            return LowRankFactors(self.initial_A, self.initial_B, self.scale)
        return LowRankFactors(
            self.lora_A,
            self.lora_B,
            self.scale,
            self.lora_magnitude_vector,
            self.weight_norm,
            self.exact_norm,
            self.tensor_group,
        )

    def branch(self, linear: LinearLayer) -> Branch:
        return Branch(linear, self.factors())

    def add(self, x: Tensor, y: Tensor, linear: LinearLayer, recomputed: Recomputed | None = None) -> Tensor:
        """For LoRA upon another adapter. DoRA scales the weight itself, so nothing may lie below it."""
        one = self.factors()
        assert one.magnitude is None, "DoRA is first in its slot"
        low = F.linear(x if self.dropout is None else self.dropout(x), one.a.to(x.dtype))
        return y + F.linear(low, (one.b * one.scale).to(x.dtype))

    def applied(self, dense: Dense) -> Dense:
        one = self.factors()
        weight = dense.weight.addmm(one.b.to(dense.weight.dtype), one.a.to(dense.weight.dtype), alpha=one.scale)
        if one.magnitude is None:
            return Dense(weight, dense.bias)
        assert self.tensor_group is None, "no process has whole rows to take the norms of"
        norm = torch.linalg.vector_norm(weight, dim=1)
        gain = one.magnitude / (norm if self.exact_norm else norm.detach())
        return Dense(weight * gain.unsqueeze(1), dense.bias)


def row_squares(weight: Tensor) -> Tensor:
    """[O] sum of squares of each row, in float32 or wider."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.promote_types(weight.dtype, torch.float32)).square()


class EmbeddingLowRank(EmbeddingAdapter):
    """E[token] + s B A[:, token]: LoRA on an embedding [V, D], with A [r, V] zero at first and B [D, r] normal."""

    def __init__(self, shape: tuple[int, int], rank: int, scale: float, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        words, width = shape
        self.scale = scale
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, words, device=device))
        self.lora_embedding_B = nn.Parameter(torch.empty(width, rank, device=device))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.lora_embedding_A.zero_()
        self.lora_embedding_B.copy_(torch.empty(self.lora_embedding_B.shape).normal_(generator=generator))

    @property
    def tensor_axes(self) -> TensorAxes:
        return {"lora_embedding_A": (None, "outputs")}

    def add(self, tokens: Tensor, y: Tensor, embedding: EmbeddingLayer) -> Tensor:
        rows, elsewhere = embedding.local_rows(tokens)
        low = F.embedding(rows.clamp_max(self.lora_embedding_A.shape[1] - 1), self.lora_embedding_A.t())  # [T, r]
        low = low if elsewhere is None else low.masked_fill(elsewhere.unsqueeze(1), 0)
        return y + F.linear(low.to(y.dtype), (self.lora_embedding_B * self.scale).to(y.dtype))

    def applied(self, weight: Tensor) -> Tensor:
        return weight.addmm(self.lora_embedding_A.t().to(weight.dtype), self.lora_embedding_B.t().to(weight.dtype),
                            alpha=self.scale)  # fmt: skip
