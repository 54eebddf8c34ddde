"""Feed-forward networks that all tokens go through, as plain data. Imports no torch.

D model width · F inner width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from danlu.models.spec_shapes import Kept, Shapes, check_sizes, linear_shapes


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' gated activation: (u + 1) g sigmoid(alpha g) of g = min(gate, limit) and up within limit, u."""

    alpha: float = 1.702
    limit: float = 7.0


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU


@dataclass(frozen=True)
class Dense:
    """A gated feed-forward network: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(vars(self))

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        shapes = linear_shapes("gate_proj", self.intermediate_size, width, self.bias)
        shapes |= linear_shapes("up_proj", self.intermediate_size, width, self.bias)
        return shapes | linear_shapes("down_proj", width, self.intermediate_size, self.bias)

    def product_weights(self, width: int) -> int:
        """Weights that one token is multiplied with."""
        return 3 * self.intermediate_size * width

    def kept(self, width: int, tensor: int) -> Kept:
        """The values that the backward pass keeps of each token, on one of `tensor` tensor ranks, besides its input."""
        inner = self.intermediate_size / tensor
        return {"none": 3 * inner, "elementwise": 2 * inner, "selective": 2 * inner}

    @property
    def widest(self) -> int:
        """Features of its widest tensor between two products."""
        return self.intermediate_size

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.intermediate_size % degree:
            return f"{degree} does not divide the MLP's width of {self.intermediate_size}"
        return None
