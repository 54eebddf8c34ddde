"""AdamW's moments in bfloat16, as DeepSeek-V3 keeps them (arXiv:2412.19437, section 3.3.3): half of float32's memory.

An update is AdamW's in float32; the new moments are rounded to nearest, ties to even. So betas are bounded: a moment
whose gradient has become zero has to shrink by half a step of bfloat16 at least, or it would stay as it is for ever.
The recipe's rules refuse larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from danlu.optim.adamw import State, TensorSpecs, fused_adamw, specs_of
from danlu.optim.state_shapes import bfloat16_moments

# Elements that are widened, updated and rounded together: two float32 buffers of this size serve all parameters.
_CHUNK_CPU = 1 << 20
_CHUNK_CUDA = 1 << 22  # a launch costs more than the memory until here
_NAMES = ("exp_avg", "exp_avg_sq")


class Bfloat16Moments:
    """`step` (float32, shape []), `exp_avg` and `exp_avg_sq` (bfloat16, of the parameter's shape)."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}  # [2, chunk] float32

    def specs(self, shape: torch.Size) -> TensorSpecs:
        return specs_of(bfloat16_moments(tuple(shape)))

    def update(
        self, group: Mapping[str, Any], weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[State]
    ) -> None:
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            assert weight.is_contiguous(), "chunks run along a parameter's memory"
            own = weight.detach().view(-1)
            chunk = _CHUNK_CUDA if own.is_cuda else _CHUNK_CPU
            # Gradients are laid out as their parameters unless somebody assigned them: then this is a copy.
            of_chunks = (x.split(chunk) for x in (own, gradient.contiguous().view(-1)))
            of_moments = (state[name].view(-1).split(chunk) for name in _NAMES)
            for own_weights, own_gradients, *moments in zip(*of_chunks, *of_moments, strict=True):
                step = state["step"].clone()  # the kernel counts it up, and every chunk is of the same step
                wide = self._widened(moments)
                fused_adamw(group, [own_weights], [own_gradients], [wide[0]], [wide[1]], [step])
                for moment, values in zip(moments, wide, strict=True):
                    moment.copy_(values)
            state["step"].add_(1)

    def by_row(self, state: State, rows: int) -> State | None:
        return {name: state[name] for name in _NAMES}

    def _widened(self, moments: Sequence[Tensor]) -> list[Tensor]:
        device, count = moments[0].device, len(moments[0])
        buffers = self._buffers.get(device)
        if buffers is None or buffers.shape[1] < count:
            buffers = self._buffers[device] = torch.empty(2, count, device=device)
        return [buffer[:count].copy_(moment) for buffer, moment in zip(buffers, moments, strict=True)]
