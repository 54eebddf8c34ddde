"""Values that travel between layers next to the residual stream: embeddings of each layer, shared keys and values.

Each layer is given those that it reads alone, and hands on those that it makes. A part of a forward pass that is
recomputed, a layer or a segment of several, therefore has them among its inputs and outputs as it has the residual
stream.

T packed tokens · D model width · L layers · P width of a layer's own embedding · K key/value heads · C head width
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor, nn

from danlu.core.layer_types import Attend, Recomputed
from danlu.models import ops
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder, Layer
from danlu.models.layer_spec import LayerSpec
from danlu.models.modules import Linear, RecomputePoints, norm_of
from danlu.models.rope import Rotation

GivenKeys = dict[int, tuple[Tensor, Tensor]]
"""Number of a layer -> the keys and values [T, K, C] that it gives to later layers."""


class Carried(NamedTuple):
    """The values that some layers read, apart from the residual stream."""

    embeddings: dict[int, Tensor]
    """Number of a layer -> its own embeddings of the tokens, [T, P]."""
    keys: GivenKeys

    def of(self, layers: Iterable[Any], given: Mapping[int, tuple[Tensor, Tensor]]) -> Carried:
        """The values that layers in a row read, with keys that layers before them have given."""
        layers = list(layers)
        numbers = {layer.number for layer in layers}
        sources = dict.fromkeys(layer.source for layer in layers if layer.source not in (None, *numbers))
        keys = {source: given[source] if source in given else self.keys[source] for source in sources}
        return Carried({number: self.embeddings[number] for number in numbers & self.embeddings.keys()}, keys)


class CarryingLayer(Layer):
    """A layer that reads or makes values of `Carried`, in its forward pass between other layers.

    Its own embedding of each token comes behind the two halves: x + norm(down(activation(gate(x)) * embedding)).
    """

    recompute_points: ClassVar[RecomputePoints] = {
        kind: (*paths, "per_layer.gated_activation") for kind, paths in Layer.recompute_points.items()
    }

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        spec = config.layers[layer]
        self.number = layer
        self.source = config.key_source(layer)
        """The layer with the keys and values that its queries read; None: they are its own."""
        self.gives_keys = spec.mixer.sharing == "gives"
        width = spec.per_layer_width
        self.per_layer = PerLayerNetwork(config, spec) if width else None
        self.post_per_layer_norm = norm_of(config, spec.norm_kind) if width else None

    def forward(  # type: ignore[override]
        self, x: Tensor, rotations: Sequence[Rotation], attend: Attend, carried: Carried
    ) -> tuple[Tensor, GivenKeys]:
        """Returns the residual stream behind the layer, and the keys and values that it gives."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        attention: Any = self.attention
        keys = () if self.source is None else (self.source, carried.keys[self.source])
        mixed = attention(self.enter(normed), rotations, attend, *keys)
        given: GivenKeys = {}
        if self.gives_keys:
            mixed, given[self.number] = mixed
        joined = self._halves(x, normed, mixed)
        if self.per_layer is not None:
            branch = self.per_layer(joined, carried.embeddings[self.number])
            joined = joined + cast(nn.Module, self.post_per_layer_norm)(branch)
        return joined if self.layer_scalar is None else self.layer_scalar(joined), given


class PerLayerNetwork(nn.Module):
    """x [T, D], a layer's own embeddings [T, P] -> down(activation(gate(x)) * embeddings) [T, D]."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, spec.per_layer_width, bias=False)
        self.down_proj = Linear(spec.per_layer_width, config.hidden_size, bias=False)
        self.activation = spec.feed.activation

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        inputs = (self.gate_proj(x), embeddings)
        out: Tensor = self.down_proj(self.gated_activation(*inputs), Recomputed(self.gated_activation, inputs))
        return out

    def gated_activation(self, gate: Tensor, embeddings: Tensor) -> Tensor:
        """The activation of gate [T, P] times embeddings [T, P]."""
        return ops.gated_mlp_activation(gate, embeddings, self.activation)


def carried_by(model: Decoder, tokens: Tensor, x: Tensor) -> Carried:
    """The values that layers read before any of them has made some: tokens [T]; x: the first layer's input [T, D].

    A layer's own embedding of a token is its part of a row of a table, and of a product with the token's embedding,
    which is normed: (norm(W x / sqrt(D)) + row) / sqrt(2).
    """
    config = model.config
    if not config.per_layer_width:
        return Carried({}, {})
    layers = (len(config.layers), config.per_layer_width)
    rows = model.embed_tokens_per_layer(tokens, x.dtype).unflatten(-1, layers)  # [T, L, P]
    product = model.per_layer_model_projection(x) * config.hidden_size**-0.5
    normed = model.per_layer_projection_norm(product.unflatten(-1, layers))
    return Carried(dict(enumerate(((normed + rows) * 2**-0.5).unbind(1))), {})


def run_parts(
    parts: Iterable[Callable[..., Any]],
    x: Tensor,
    rotations: Sequence[Rotation],
    attend: Attend,
    carried: Carried,
) -> tuple[Tensor, GivenKeys]:
    """Runs layers, or segments that have several in `layers`, one after the other: see `CarryingLayer.forward`."""
    given: GivenKeys = {}
    for part in parts:
        layers = getattr(part, "layers", (part,))
        x, own = part(x, rotations, attend, carried.of(layers, given))
        given |= own
    return x, given
