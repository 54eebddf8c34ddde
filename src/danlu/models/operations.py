"""The operations of a layer as plain data, in the order of its forward pass. Imports no torch.

A `LayerSpec` lists them (`LayerSpec.operations`), the modules compute them. Whoever counts a layer reads this list: the
products are its FLOPs, the values that backward passes read are its activations, and the cuts are its traffic.

T packed tokens · D model width
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Per = Literal["token", "row", "chunk", "layer"]
"""The number of times that a value is there: once for each token, for each row of a token's experts, for each chunk of
a document that a recurrence goes through, or once in the layer.
"""
Type = Literal["activation", "float32", "int64", "bool", "narrow", "codes"]
"""`codes` are numbers in 8 bits, with scales. `narrow` is a copy of a float32 parameter in the type of activations,
where that is another one."""
Kind = Literal["product", "grouped", "attention", "scan", "norm", "elementwise", "gather", "add"]


Weights = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of parameters."""


@dataclass(frozen=True)
class Value:
    """A tensor that a layer makes."""

    name: str
    width: int
    """Elements each time that it is there."""
    per: Per = "token"
    type: Type = "activation"
    parts: int = 1
    """The most tensor ranks that share its width: 1 if each rank has all of it."""
    is_local: bool = False
    """Whether a tensor rank has its own tokens alone under sequence parallelism (arXiv:2205.05198)."""


@dataclass(frozen=True)
class Operation:
    """A step of a layer's forward pass.

    Its backward pass is computed from `saves`. A product of one matrix needs its input for the gradient of its weight
    alone, so it saves that only if its weight is trained or carries an adapter. The further tensors that attention
    saves depend on its kernel.
    """

    name: str
    """The module and its function: "attention.q_proj"."""
    kind: Kind
    reads: tuple[str, ...]
    """Names of the values that it is computed from, of which `x` is the layer's input."""
    makes: tuple[Value, ...]
    saves: tuple[str, ...] = ()
    """Names of values, read or made, that its backward pass needs."""
    factors: tuple[tuple[str, str], ...] = ()
    """Further values that it saves, each for the gradient of another one, which it is multiplied with."""
    weights: Weights = ()
    """Names, in the layer, and shapes of the parameters that it uses."""
    elementwise: str | None = None
    """The recomputed function that it is a part of under `memory: {recompute: elementwise}`."""
    selective: str | None = None
    """The same with `selective`."""
    parts: int = 1
    """The most tensor ranks that share its work."""
    in_float32: bool = False
    """Whether a product is computed in float32, whatever the type of activations."""

    @property
    def is_product(self) -> bool:
        """Whether it multiplies its input with a weight."""
        return self.kind in ("product", "grouped")


ROTATION = "rotation"
"""The value of the tables that rotate queries and keys, cos and sin; all layers with one rotary embedding share it."""
KEYS, VALUES = "keys_of_another_layer", "values_of_another_layer"
"""The values of a layer without keys of its own: those of the layer that gives them, which counts them."""
EMBEDDINGS = "embeddings_of_layer"
"""The value of a layer's own embeddings of the tokens, a part of one tensor that all layers share."""
OF_OTHERS = frozenset({ROTATION, KEYS, VALUES, EMBEDDINGS})
"""The values that a layer reads and does not count among its own."""


def made_by(operations: Iterable[Operation]) -> dict[str, Value]:
    """Name -> value, of all values that some operations make."""
    return {value.name: value for operation in operations for value in operation.makes}


_GATES = ("shared_gate", "a_proj", "b_proj")


def is_gate(name: str) -> bool:
    """Whether a linear layer is a gate: it makes a number for each token or head, which others are multiplied with.

    Where products are in 8 bits its own stay in the type of activations, as a router's do.
    """
    return name.rpartition(".")[2] in _GATES
