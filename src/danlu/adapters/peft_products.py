"""PEFT's AdaLoRA, LoHa and LoKr, read as LoRA: their changes of weights are products of two factors, too.

AdaLoRA is B (E A), with singular values E (arXiv:2303.10512). The Hadamard product of LoHa (arXiv:2108.06098) has the
columns of both left factors multiplied pairwise, and the rows of both right ones: rank r^2. The Kronecker product of
LoKr (arXiv:2212.10650) of low-rank factors is that of the left ones times that of the right ones; of whole factors it
is itself times 1. So an adapter that is read computes the same, and is written as LoRA.

O, I outputs and inputs of a layer · r rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from danlu.adapters import peft_lora
from danlu.adapters.peft_lora import Factors, peft_of_factors
from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftReader
from danlu.adapters.targets import value_by_pattern
from danlu.core.errors import ModelError
from danlu.core.layer_types import Site
from danlu.recipe import sections

Parts = Mapping[str, Tensor]
"""The tensors of one module by the ends of their names."""
_KEPT = ("bias", "modules_to_save", "peft_type")


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.LowRank, ModuleValues]:
    """The section of a LoRA, and the values of each site's module.

    Raises ModelError for settings that danlu does not compute, and for tensors that do not fit the model.
    """
    kind = str(reader.values["peft_type"])
    make, ends = _KINDS[kind]
    if kind == "ADALORA":
        reader.check_supported({**peft_lora.HARMLESS, "use_dora": (False, None), "use_rslora": (False, None)})
    by_module: dict[str, Factors] = {}
    for name, parts in _by_module(reader, ends).items():
        try:
            by_module[name] = make(reader, name, parts)
        except (KeyError, RuntimeError) as error:  # a tensor that is missing, or of a shape that fits no other
            raise ModelError(f"{reader.where}: the tensors of {name} make no {kind}: {error}") from None
    values, tensors = peft_of_factors(by_module)
    kept = {key: reader.values[key] for key in _KEPT if key in reader.values}
    return peft_lora.from_peft(PeftReader({**values, **kept}, tensors, reader.where), sites)


def _by_module(reader: PeftReader, ends: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in reader.tensors.items():
        name, _, end = key.removeprefix(PREFIX).rpartition(".")
        if end in ends:
            reader.used.add(key)
            parts.setdefault(name, {})[end] = tensor.float()
    if not parts:
        raise ModelError(f"{reader.where}: holds no tensor of an adapter")
    return parts


def _ada_lora(reader: PeftReader, name: str, parts: Parts) -> Factors:
    alpha, rank = reader.finite_number("lora_alpha", 8.0), reader.positive_int("init_r", 12)
    # PEFT divides by the rank that it began with, and by a little more, so that it may be 0.
    scale = (alpha if alpha > 0 else float(rank)) / (rank + 1e-5)
    return Factors(parts["lora_A"] * parts["lora_E"], parts["lora_B"], scale)


def _loha(reader: PeftReader, name: str, parts: Parts) -> Factors:
    left, right = (parts["hada_w1_a"], parts["hada_w2_a"]), (parts["hada_w1_b"], parts["hada_w2_b"])
    b = (left[0].unsqueeze(2) * left[1].unsqueeze(1)).flatten(1)  # [O, r^2]
    a = (right[0].unsqueeze(1) * right[1].unsqueeze(0)).flatten(0, 1)  # [r^2, I]
    return Factors(a, b, _scale(reader, name))


def _lokr(reader: PeftReader, name: str, parts: Parts) -> Factors:
    left = _factors(parts, "lokr_w1")
    right = _factors(parts, "lokr_w2")
    b, a = torch.kron(left[0], right[0]), torch.kron(left[1], right[1])
    if b.shape[1] > min(b.shape[0], a.shape[1]):  # of whole factors: W times 1 is as exact, and smaller
        b = b @ a
        a = torch.eye(b.shape[1])
        if b.shape[0] < b.shape[1]:
            b, a = torch.eye(b.shape[0]), b
    return Factors(a, b, _scale(reader, name))


def _factors(parts: Parts, name: str) -> tuple[Tensor, Tensor]:
    """The factors of one side of a Kronecker product; of a whole one itself and 1."""
    if (whole := parts.get(name)) is not None:
        return whole, torch.eye(whole.shape[1])
    return parts[f"{name}_a"], parts[f"{name}_b"]


def _scale(reader: PeftReader, name: str) -> float:
    values = reader.values
    alpha = value_by_pattern((name,), values.get("alpha_pattern") or {}, reader.finite_number("alpha", 8.0))
    rank = value_by_pattern((name,), values.get("rank_pattern") or {}, reader.positive_int("r", 8))
    return float(alpha) / float(rank)


_KINDS: dict[str, tuple[Callable[[PeftReader, str, Parts], Factors], tuple[str, ...]]] = {
    "ADALORA": (_ada_lora, ("lora_A", "lora_B", "lora_E")),
    "LOHA": (_loha, ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")),
    "LOKR": (_lokr, ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")),
}
