"""LoRA on the stacked linear layers of experts: each expert has factors of its own.

N rows, those of each expert together · E experts · O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import DenseLinear, GroupedLinearAdapter, TensorAxes
from danlu.core.layer_types import GroupedLayer


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
        outputs, inputs = shape
        self.scale = scale
        self.lora_A = nn.Parameter(torch.empty(experts, rank, inputs, device=device), requires_grad=not freeze_a)
        self.lora_B = nn.Parameter(torch.empty(experts, outputs, rank, device=device))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator, *, gaussian: bool = False) -> None:
        """Draws A at random and sets B to zero, so that training starts at the base.

        A is drawn as `LowRank` draws it for one layer: U(-1, 1) / sqrt(I), or N(0, 1) / r with `gaussian`, as in PEFT.
        It is drawn on the CPU, so that the values do not depend on the device.
        """
        values = torch.empty(self.lora_A.shape)
        _, rank, inputs = values.shape
        if gaussian:
            values.normal_(std=1 / rank, generator=generator)
        else:
            values.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=generator)
        self.lora_A.copy_(values)
        self.lora_B.zero_()

    @property
    def tensor_axes(self) -> TensorAxes:
        return {"lora_A": (None, None, "inputs"), "lora_B": (None, "outputs", None)}

    def adapt_output(self, x: Tensor, y: Tensor, counts: Tensor, linear: GroupedLayer) -> Tensor:
        low = linear.product(x, self.lora_A, counts)  # [N, r]
        return y + linear.product(low, self.lora_B * self.scale, counts)

    def merged_into(self, dense: DenseLinear) -> DenseLinear:
        a, b = self.lora_A.to(dense.weight.dtype), self.lora_B.to(dense.weight.dtype)
        return DenseLinear(dense.weight.baddbmm(b, a, alpha=self.scale), dense.bias)
