"""Linear attention by the gated delta rule, as plain data. Imports no torch.

D model width · H heads of values · J heads of keys · K width of a key · V width of a value
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from danlu.core.errors import ModelError
from danlu.models.spec_shapes import Kept, Shapes, check_sizes, linear_shapes


@dataclass(frozen=True)
class Delta:
    """Heads with a state in the place of keys and values of all tokens: the gated delta rule (arXiv:2412.06464)."""

    heads: int
    """The number of heads of values, each with a state."""
    key_heads: int
    """The number of heads of queries and keys, each of which serves heads / key_heads heads of values."""
    key_dim: int
    value_dim: int
    conv_width: int = 4
    """Tokens that the convolutions before the rule see: a token and those before it."""

    rope: ClassVar[None] = None
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_sizes(vars(self))
        if self.heads % self.key_heads:
            raise ModelError(
                f"{self.heads} value heads cannot share {self.key_heads} key heads evenly: the second must divide the "
                "first"
            )

    @property
    def key_width(self) -> int:
        """Features of all keys, J K."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of all values, H V."""
        return self.heads * self.value_dim

    @property
    def query_width(self) -> int:
        """Features of its widest tensor."""
        return max(self.key_width, self.value_width)

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of its modules."""
        keys, values = self.key_width, self.value_width
        shapes: Shapes = {"A_log": (self.heads,), "dt_bias": (self.heads,)}
        for name, outputs in (("q", keys), ("k", keys), ("v", values), ("gate", values), ("b", None), ("a", None)):
            shapes |= linear_shapes(f"{name}_proj", self.heads if outputs is None else outputs, width, False)
        for name, channels in (("q", keys), ("k", keys), ("v", values)):
            shapes[f"{name}_conv1d.weight"] = (channels, 1, self.conv_width)
        shapes["o_norm.weight"] = (self.value_dim,)
        return shapes | linear_shapes("o_proj", width, values, False)

    def pair_flops(self) -> int:
        """0: a query is not multiplied with the keys of other tokens."""
        return 0

    def token_flops(self) -> int:
        """Operations of one token on the states: reading them with its key, the correction, reading them with its
        query.
        """
        return 6 * self.heads * self.key_dim * self.value_dim

    def kept(self, tensor: int) -> Kept:
        """The values that the backward pass keeps of each token, on one of `tensor` tensor ranks; one state for 64
        tokens.
        """
        keys, values = self.key_width / tensor, self.value_width / tensor
        states = self.heads * self.key_dim * self.value_dim / 64 / tensor
        projected = 2 * keys + 2 * values
        return {
            "none": projected + 2 * keys + values + 3 * values + states,
            "elementwise": projected + 2 * values + states,
            "selective": projected,
        }

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share it; None: they can."""
        if self.key_heads % degree:
            return f"{degree} does not divide the model's {self.key_heads} key heads of linear attention"
        return None

    def __str__(self) -> str:
        return f"{self.heads} heads of linear attention ({self.key_heads} of keys)"
