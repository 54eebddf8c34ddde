"""LoRA on stacked parameters in PEFT's format (`target_parameters`): the names of its tensors, and their order.

PEFT wraps the module of the experts once for each of its parameters that is adapted, the first one innermost: with both
adapted, `experts.base_layer.lora_A` is of gate_up_proj and `experts.lora_A` of down_proj; with one alone,
`experts.lora_A` is of that one. Its factors are matrices: rows of A lie expert by expert, columns of B rank by rank.

E experts · O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from danlu.adapters.peft_values import PREFIX, PeftReader
from danlu.core.errors import ModelError

PARAMETERS = ("gate_up_proj", "down_proj")
"""The stacked matrices of experts in transformers' classes, in the order in which these define them."""
_WRAPPER = re.compile(r"(.*\bexperts)((?:\.base_layer)*)")


def stacked_tensors(factors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """PEFT's tensors by key, of A [E, r, I] and B [E, O, r] by the parameter's name in transformers' class."""
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in factors.items():
        module, _, parameter = name.rpartition(".")
        outer = [later for later in PARAMETERS[PARAMETERS.index(parameter) + 1 :] if f"{module}.{later}" in factors]
        wrapper = module + ".base_layer" * len(outer)
        tensors[f"{PREFIX}{wrapper}.lora_A.weight"] = a.flatten(0, 1)  # [E r, I]
        tensors[f"{PREFIX}{wrapper}.lora_B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()  # [O, r E]
    return tensors


def unstacked(name: str, a: Tensor, b: Tensor, rank: int, where: str) -> tuple[Tensor, Tensor]:
    """PEFT's factors of a stacked parameter, [E r, I] and [O, r E] -> A [E, r, I] and B [E, O, r].

    Raises ModelError for factors that are not of such a rank.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] % rank or b.shape[1] != a.shape[0]:
        raise ModelError(
            f"{where}: the factors of {name} are {list(a.shape)} and {list(b.shape)}, its config says rank {rank} (r "
            "and rank_pattern) for each expert: the two files are not of one adapter"
        )
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)


def wrapped_parameter(module: str, reader: PeftReader) -> str | None:
    """The name of the stacked parameter that the tensors of a module of PEFT are for; None where it wraps none.

    Raises ModelError where there are tensors for more parameters than `target_parameters` names.
    """
    match = _WRAPPER.fullmatch(module)
    if match is None:
        return None
    owner, depth = match[1], match[2].count(".base_layer")
    targets: list[str] = reader.values.get("target_parameters") or []
    ends = tuple(f".{target}" for target in targets)
    adapted = [parameter for parameter in PARAMETERS if f".{owner}.{parameter}".endswith(ends)]
    if depth >= len(adapted):
        raise ModelError(
            f"{reader.where}: {PREFIX}{module} has factors for {depth + 1} parameters of {owner}, and "
            f"target_parameters names {', '.join(adapted) or 'none'}: the two files are not of one adapter"
        )
    return f"{owner}.{adapted[-1 - depth]}"


def check_target_parameters(reader: PeftReader) -> None:
    """Raises ModelError for `target_parameters` that are no list of names of experts' matrices, or of linear layers'
    weights.

    Factors of the latter are as if the layer was in `target_modules`.
    """
    targets = reader.values.get("target_parameters") or []
    if not isinstance(targets, list) or any(not isinstance(target, str) for target in targets):
        raise ModelError(f"{reader.where}: target_parameters is {targets!r}; expected names of parameters")
    for target in targets:
        if target.rpartition(".")[2] not in (*PARAMETERS, "weight"):
            raise ModelError(
                f"{reader.where}: target_parameters has {target!r}; of stacked parameters danlu reads those of experts "
                f"alone: {', '.join(f'experts.{name}' for name in PARAMETERS)}"
            )
