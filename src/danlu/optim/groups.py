"""What role a parameter plays, and which parameters are decayed: the only place where names are read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch.nn import Parameter

Role = Literal["matrix", "embedding", "head", "vector"]

# Modules whose weight is looked up by token or position, in the names of the families we read.
_EMBEDDINGS = frozenset({"embed_tokens", "embed_positions", "embedding", "wte", "wpe"})
_HEADS = frozenset({"lm_head"})


@dataclass(frozen=True)
class Group:
    """Parameters that share a weight decay, in rising order of name."""

    names: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    weight_decay: float


def role(name: str, parameter: Parameter) -> Role:
    """What a parameter is to an optimizer.

    vector: norms, biases, anything with fewer than two dimensions. embedding: a table that is looked up (a head tied to
    it is the same parameter, hence an embedding too). head: an untied output projection. matrix: every other weight,
    stacked expert weights [E, out, in] included.
    """
    if parameter.ndim < 2:
        return "vector"
    modules = set(name.split(".")[:-1])
    if modules & _EMBEDDINGS:
        return "embedding"
    return "head" if modules & _HEADS else "matrix"


def trainable(named_parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """The parameters that require a gradient, in rising order of name, whatever order the model lists them in."""
    return sorted((pair for pair in named_parameters if pair[1].requires_grad), key=lambda pair: pair[0])


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]], decay: Literal["matrices", "all"], weight_decay: float
) -> list[Group]:
    """Splits trainable parameters into decayed and not decayed; a group that would be empty is left out.

    `matrices` decays weights of matrix products (the untied head among them) and leaves norms, biases and embeddings
    alone; `all` decays everything.
    """
    decayed: list[tuple[str, Parameter]] = []
    rest: list[tuple[str, Parameter]] = []
    for name, parameter in trainable(named_parameters):
        chosen = decay == "all" or role(name, parameter) in ("matrix", "head")
        (decayed if chosen else rest).append((name, parameter))
    return [
        Group(tuple(name for name, _ in members), tuple(parameter for _, parameter in members), share)
        for members, share in ((decayed, weight_decay), (rest, 0.0))
        if members
    ]
