"""The parameters that each tensor rank has of a model, as plain data. Imports no torch.

The specs of mixers and feed-forward networks declare how their matrices are cut (`TensorCut`). `parallel.tensor` cuts
modules so; `tensor_parts` lists the shapes that this leaves, without a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from danlu.core.layer_types import Axis
from danlu.core.shard_box import ShardBox

if TYPE_CHECKING:
    from danlu.models.config import ModelConfig
    from danlu.models.layer_spec import Feed, Mixer

Role = Literal["column", "grouped", "row", "whole"]
"""How a matrix may be cut over processes: by its outputs (grouped: where there are fewer heads than processes, several
hold the same head), by its inputs, or not at all: its gradient is then a sum over processes.
"""
OF_VOCABULARY = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
"""The modules of a decoder that are cut by rows of the vocabulary."""
OF_EACH_LAYER = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""The modules outside of layers that make each layer's own embeddings, in models that have such."""


@dataclass(frozen=True)
class TensorCut:
    """How the parameters of a sublayer, attention or feed-forward network, are cut over processes.

    Those that are named nowhere here are held whole by every process, and their gradients are sums over processes.
    """

    roles: Mapping[str, Role]
    """The linear layers, and grouped ones, by name ("experts.gate_proj"), in the order of the forward pass."""
    units: Mapping[str, int] = field(default_factory=dict)
    """Linear layer -> features of its cut dimension that stay together, those of a head; 1 where it is not named."""
    slots: Mapping[str, str] = field(default_factory=dict)
    """Slot of an adapter, parameter [H], or convolution -> the linear layer with which it is cut, by its outputs or
    heads.
    """
    norms: Mapping[str, str] = field(default_factory=dict)
    """Norm over all outputs of a linear layer -> that layer, with which it is cut."""

    def unit(self, part: str) -> int:
        """Features of a linear layer's cut dimension that stay together."""
        return self.units.get(part, 1)

    def local(self, name: str, shapes: Mapping[str, tuple[int, ...]], degree: int, rank: int) -> TensorPart:
        """The part of the sublayer's parameter `name` that tensor rank `rank` of `degree` has.

        shapes: of all parameters of the sublayer, as its spec's `parameter_shapes` gives them.
        """
        whole = ShardBox.full(shapes[name])
        owner, _, attribute = name.rpartition(".")
        is_head_slot = name in self.slots  # a parameter [H]
        source = self.slots.get(name) or self.slots.get(owner) or self.norms.get(owner) or owner
        role = self.roles.get(source, "whole")
        if role == "whole" or (role == "row" and attribute == "bias"):
            return TensorPart(replace(whole, replicas=degree, is_writer=rank == 0), degree)
        weight = shapes[f"{source}.weight"]
        part = share(weight[-1 if role == "row" else -2], self.unit(source), role, degree, rank)
        assert part is not None, f"{source} cannot be cut over {degree} processes: `uncuttable` says so before"
        if is_head_slot:
            unit = self.unit(source)
            box = whole.narrow(0, part.start // unit, part.length // unit)
        elif source != owner:  # a convolution, or a norm
            box = whole.narrow(0, part.start, part.length)
        else:
            features = len(whole.sizes) - (2 if attribute == "weight" and role != "row" else 1)
            box = whole.narrow(features, part.start, part.length)
        is_writer = rank % part.replicas == 0
        return TensorPart(replace(box, replicas=part.replicas, is_writer=is_writer), part.replicas)


class Share(NamedTuple):
    """The features of a matrix that a process has."""

    start: int
    length: int
    replicas: int
    """The processes that have these same features, which follow each other."""


class TensorPart(NamedTuple):
    """The part of a parameter that a tensor rank has."""

    box: ShardBox
    """`replicas` and `is_writer` are among the tensor ranks alone."""
    gradient_ranks: int
    """The number of tensor ranks over which its gradient is summed behind the backward pass; 1: it is complete."""


def share(features: int, unit: int, role: Role, degree: int, rank: int) -> Share | None:
    """The features that tensor rank `rank` of `degree` has, in multiples of `unit`; None: they cannot be cut so."""
    count = features // unit
    if count % degree == 0:
        length = features // degree
        return Share(length * rank, length, 1)
    if role == "grouped" and degree % count == 0:
        return Share(rank * count // degree * unit, unit, degree // count)
    return None


class LinearCut(NamedTuple):
    """How a linear layer, or a stack of them, is divided among the tensor ranks."""

    name: str
    axis: Axis | None
    """The cut dimension; None: each rank has the whole matrix, and a term of its gradient."""
    features: int
    """Features of that dimension on all ranks together."""
    local_features: int
    """Features of it on this rank."""
    replicas: int
    """Ranks with the same part, each of which has a term of its gradient."""


def linear_cuts(config: ModelConfig, degree: int) -> Iterator[LinearCut]:
    """Yields the cuts of the linear layers of attention, feed-forward networks and experts among `degree` tensor ranks,
    of the first layer of each kind; but for those that cannot be cut so (`LayerSpec.uncuttable`).
    """
    for kind in config.kinds:
        layer = config.layers.index(kind)
        for half, spec in (("attention", kind.mixer), ("mlp", kind.feed)):
            shapes, cut = spec.parameter_shapes(config.hidden_size), spec.tensor_cut
            for part, role in cut.roles.items():
                name = f"layers.{layer}.{half}.{part}"
                if role == "whole":
                    yield LinearCut(name, None, 0, 0, degree)
                    continue
                features = shapes[f"{part}.weight"][-1 if role == "row" else -2]
                own = share(features, cut.unit(part), role, degree, 0)
                if own is not None:
                    axis: Axis = "inputs" if role == "row" else "outputs"
                    yield LinearCut(name, axis, features, own.length, own.replicas)


def vocabulary_bounds(vocab_size: int, degree: int) -> list[int]:
    """The first token of each tensor rank, and the end of the vocabulary."""
    return [vocab_size * rank // degree for rank in range(degree + 1)]


def vocabulary_rows(config: ModelConfig, degree: int, rank: int) -> slice:
    """The rows of embedding and head that a tensor rank has; the last one has those that no token has, too."""
    bounds = vocabulary_bounds(config.vocab_size, degree)
    return slice(bounds[rank], config.vocab_rows if rank == degree - 1 else bounds[rank + 1])


def tensor_parts(config: ModelConfig, degree: int, rank: int, *, sequence: bool) -> dict[str, TensorPart]:
    """The part of every parameter of the decoder that tensor rank `rank` of `degree` has, by name.

    sequence: whether sequence parallelism shares out the tokens outside of the sublayers, so that gradients of what is
    whole there are sums, too. The sizes must be such that they can be cut (`LayerSpec.uncuttable`).
    """
    from danlu.models.config import parameter_shapes

    by_kind = {kind: _of_halves(kind.mixer, kind.feed, config.hidden_size, degree, rank) for kind in config.kinds}
    parts: dict[str, TensorPart] = {}
    for name, shape in parameter_shapes(config).items():
        module, _, rest = name.partition(".")
        if module == "layers":
            number, _, rest = rest.partition(".")
            local = by_kind[config.layers[int(number)]].get(rest)
            if local is not None:
                parts[name] = local
                continue
        whole = ShardBox.full(shape)
        if module in OF_VOCABULARY:
            rows = vocabulary_rows(config, degree, rank)
            parts[name] = TensorPart(whole.narrow(0, rows.start, rows.stop - rows.start), 1)
        else:
            box = replace(whole, replicas=degree, is_writer=rank == 0)
            parts[name] = TensorPart(box, degree if sequence else 1)
    return parts


def _of_halves(mixer: Mixer, feed: Feed, width: int, degree: int, rank: int) -> dict[str, TensorPart]:
    """The local parts of the parameters of a layer's two sublayers, by their names in the layer."""
    parts: dict[str, TensorPart] = {}
    for half, spec in (("attention", mixer), ("mlp", feed)):
        shapes = spec.parameter_shapes(width)
        cut = spec.tensor_cut
        parts |= {f"{half}.{name}": cut.local(name, shapes, degree, rank) for name in shapes}
    return parts
