"""The parts of a decoder layer as plain data: the mixer of its tokens, its feed-forward network, its norms.

A `LayerSpec` decides the layer's parameters, products, cache and cuts. `decoder.Layer` builds it; the plan, tensor
parallelism and the shrunken models of `danlu verify` read it. Its mixers are in `heads_spec.py`, `latent_spec.py`,
`factorized_spec.py` and `delta_spec.py`, its feed-forward networks in `mlp_spec.py` and `experts_spec.py`. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from danlu.models.delta_spec import Delta
from danlu.models.experts_spec import Experts
from danlu.models.factorized_spec import Factorized
from danlu.models.heads_spec import Heads
from danlu.models.latent_spec import Latent
from danlu.models.mlp_spec import Dense
from danlu.models.spec_shapes import MAXIMUMS, Shapes

Norms = Literal["pre", "post", "sandwich"]
Mixer = Heads | Latent | Factorized | Delta
Feed = Dense | Experts


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a decoder: attention, then a feed-forward network, each with norms around it."""

    mixer: Mixer
    feed: Feed
    norms: Norms = "pre"
    """The place of norms: before each half (`pre`), behind it, before it joins the residual stream (`post`), or both
    (`sandwich`).
    """

    def parameter_shapes(self, width: int) -> Shapes:
        """Its parameters in a model of that width, in the order of the forward pass."""
        before, behind = self.norms != "post", self.norms != "pre"
        shapes: Shapes = {}
        for name, half in (("attention", self.mixer), ("mlp", self.feed)):
            shapes |= {f"{name}_norm.weight": (width,)} if before else {}
            shapes |= {f"{name}.{part}": shape for part, shape in half.parameter_shapes(width).items()}
            shapes |= {f"post_{name}_norm.weight": (width,)} if behind else {}
        return shapes

    def product_weights(self, width: int) -> int:
        """Weights that one token is multiplied with."""
        mixer = sum(math.prod(shape) for shape in self.mixer.parameter_shapes(width).values() if len(shape) == 2)
        return mixer + self.feed.product_weights(width)

    @property
    def attention(self) -> Heads:
        """The mixer of a layer that mixes tokens with attention by heads."""
        assert isinstance(self.mixer, Heads), f"{self.mixer} is no attention by heads"
        return self.mixer

    def token_flops(self) -> int:
        """Operations of one token that are products with neither weights nor other tokens."""
        return self.mixer.token_flops() if isinstance(self.mixer, Delta) else 0

    @property
    def widest(self) -> int:
        """Features of its widest tensor between two products."""
        return max(self.mixer.query_width, self.feed.widest)

    def uncuttable(self, degree: int) -> str | None:
        """Why tensor ranks of that number cannot share the layer; None: they can."""
        return self.mixer.uncuttable(degree) or self.feed.uncuttable(degree)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Names and values of its sizes, for messages about a model that is too large."""
        for half in (self.mixer, self.feed):
            yield from ((name, size) for name in MAXIMUMS if (size := getattr(half, name, None)) is not None)

    def differences(self, other: LayerSpec) -> list[str]:
        """Names the fields in which this layer differs from another: `mixer.qk_norm`."""
        names: list[str] = []
        for half in ("mixer", "feed"):
            own, others = getattr(self, half), getattr(other, half)
            if type(own) is not type(others):
                names.append(half)
                continue
            values: dict[str, Any] = vars(own)
            names += [f"{half}.{name}" for name, value in values.items() if getattr(others, name) != value]
        return names + (["norms"] if self.norms != other.norms else [])
