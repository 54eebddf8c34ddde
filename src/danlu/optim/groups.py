"""The role of a parameter, and whether it is decayed: the only place where names are read. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.nn import Parameter

Role = Literal["matrix", "embedding", "head", "vector"]

# Modules with a weight that is looked up by token or position, in the names of the families we read.
_EMBEDDINGS = frozenset({"embed_tokens", "embed_tokens_per_layer", "embed_positions", "embedding", "wte", "wpe"})
_HEADS = frozenset({"lm_head"})


def role(name: str, dimensions: int) -> Role:
    """Returns the optimizer's role of a parameter of so many dimensions: vector, embedding, head or matrix.

    vector: norms, biases (stacked ones too), anything with fewer than two dimensions. embedding: a table that is looked
    up (a head tied to it is the same parameter, hence an embedding too). head: an untied output projection. matrix:
    every other weight, stacked expert weights [E, out, in] included.
    """
    if dimensions < 2 or name.endswith(".bias"):
        return "vector"
    modules = set(name.split(".")[:-1])
    if modules & _EMBEDDINGS:
        return "embedding"
    return "head" if modules & _HEADS else "matrix"


def trainable(named_parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """The parameters that require a gradient, in rising order of name, whatever order the model lists them in."""
    return sorted((pair for pair in named_parameters if pair[1].requires_grad), key=lambda pair: pair[0])


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    decay: Literal["matrices", "all"],
    weight_decay: float,
    rate_of: Callable[[str], float] | None = None,
) -> list[dict[str, Any]]:
    """Splits trainable parameters into decayed and not decayed, and both by learning rate; no group is empty.

    Groups are as torch's optimizers take them: "params" in rising order of name, "weight_decay", and "ratio", which is
    that of the group's learning rate to the optimizer's own.

    `matrices` decays weights of matrix products (the untied head and the matrices of adapters among them) and leaves
    norms, biases and embeddings alone; `all` decays everything. `rate_of` gives a parameter, by name, the ratio of its
    learning rate to the optimizer's own, as LoRA+ does for B (arXiv:2402.12354); by default all have the same.
    """
    params_of: dict[tuple[bool, float], list[Parameter]] = {}
    for name, parameter in trainable(named_parameters):
        decayed = decay == "all" or role(name, parameter.ndim) in ("matrix", "head")
        ratio = 1.0 if rate_of is None else rate_of(name)
        assert 0 < ratio < math.inf, f"{name}: {ratio} is no ratio of learning rates"
        params_of.setdefault((not decayed, ratio), []).append(parameter)
    return [
        {"params": params, "weight_decay": 0.0 if undecayed else weight_decay, "ratio": ratio}
        for (undecayed, ratio), params in sorted(params_of.items(), key=lambda item: item[0])
    ]
