"""QA-LoRA: LoRA on the means of groups of inputs, which merges into the zeros of a base that is quantized by groups.

y = W x + s B A p(x), where p(x) [I / g] has the sum of each group of g inputs times (I / g) / g: the mean of a group
times the number of groups, as PEFT computes it (`use_qalora`, PEFT 0.21; the paper, arXiv:2309.14717, takes the sum).
So all weights of a group and an output change by one number, and (code - zero) scale + change is (code - zero') scale.

O, I outputs and inputs · r rank · g inputs of a group
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from danlu.adapters import shapes
from danlu.adapters.adapter import TensorAxes, new_parameter
from danlu.adapters.dropout import Dropout
from danlu.adapters.lora import LowRank
from danlu.adapters.low_rank import LowRankFactors
from danlu.core.layer_types import Axis, LinearShard


class QaLora(LowRank):
    """LoRA with one column of A for each group of inputs: lora_A [r, I / g], lora_B [O, r].

    Args:
        shape: (O, I) of the layer; group, g, divides I.
        rank: r.
        scale: s.
        dropout: the dropout of x before groups are summed.
        freeze_a: keep lora_A at its initial values.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        scale: float,
        dropout: Dropout,
        *,
        group: int,
        freeze_a: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(shape, rank, scale, dropout, freeze_a=freeze_a, device=device)
        self.lora_A: nn.Parameter
        tensors = shapes.grouped_inputs(shape, rank, group, freeze_a=freeze_a)
        self.lora_A = new_parameter(tensors["lora_A"], device)
        self.group = group
        self.inputs = slice(0, shape[1])
        """The inputs of the layer that this process has."""

    @property
    def tensor_axes(self) -> TensorAxes:
        outputs: tuple[Axis | None, ...] = ("outputs", None)
        return {"lora_B": outputs}

    def narrow(self, shard: LinearShard) -> None:
        super().narrow(shard)
        self.inputs = shard.inputs

    def factors(self) -> LowRankFactors:
        """LoRA's factors of the same product: A with the column of its group for each input [r, I], times (I / g) / g.

        Differentiable in lora_A.
        """
        groups = torch.arange(self.inputs.start, self.inputs.stop, device=self.lora_A.device) // self.group
        of_inputs: Tensor = self.lora_A.index_select(1, groups) * (self.lora_A.shape[1] / self.group)
        return replace(super().factors(), a=of_inputs)
