"""The maxima that ranks take in a step with `precision: {kind: fp8, recipe: tensor}`. Imports no torch.

A factor of a product has one scale, by its largest magnitude. Of a layer that is cut by its outputs ranks have parts of
the weight and of the output's gradient, of one that is cut by its inputs parts of the weight and of the input. Each
time such a factor is encoded they take the maximum of one number, of stacked weights of one each. Context ranks have
parts of all inputs and gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from danlu.models.layer_spec import Dense, Experts
from danlu.models.operations import is_gate
from danlu.planning.gradient_borders import HALVES, gives_inputs, halves_with_gradients

if TYPE_CHECKING:
    from danlu.planning.step_traffic import RankModel


def shared_maxima(model: RankModel) -> list[int]:
    """The numbers of each maximum that a tensor rank takes in a micro-batch."""
    entrances, _ = halves_with_gradients(model.trained, model.chunks, model.config)
    maxima: list[int] = []
    for place, (entry, gives_input) in enumerate(zip(model.plan, gives_inputs(model.plan), strict=True)):
        runs = 1 + (entry.kind == "full") + gives_input
        spec = model.config.layers[entry.layer]
        for number, (half, part) in enumerate(zip(HALVES, (spec.mixer, spec.feed), strict=True), 2 * place):
            for name, role in part.tensor_cut.roles.items():
                if is_gate(name) or role == "whole":
                    continue
                stacked = part.num_experts if isinstance(part, Experts) and name.startswith("experts.") else 1
                linear = _Linear(model, f"layers.{entry.layer}.{half}", name, stacked, number in entrances)
                by_outputs = role != "row"
                maxima += [*(linear.forward_by_outputs() if by_outputs else linear.forward_by_inputs(part))] * runs
                maxima += linear.backward_by_outputs() if by_outputs else linear.backward_by_inputs(part)
    return maxima


def context_maxima(model: RankModel) -> int:
    """Counts the maxima, of one number each, that a context rank takes in a micro-batch.

    Layers that share an input encode it once, but for those with adapters.
    """
    entrances, _ = halves_with_gradients(model.trained, model.chunks, model.config)
    count = 0
    for place, (entry, gives_input) in enumerate(zip(model.plan, gives_inputs(model.plan), strict=True)):
        runs = 1 + (entry.kind == "full") + gives_input
        spec = model.config.layers[entry.layer]
        for number, (half, part) in enumerate(zip(HALVES, (spec.mixer, spec.feed), strict=True), 2 * place):
            sharing: dict[str, list[_Linear]] = {}  # by what the input is of
            for name, role in part.tensor_cut.roles.items():
                if is_gate(name):
                    continue
                linear = _Linear(model, f"layers.{entry.layer}.{half}", name, 1, number in entrances)
                sharing.setdefault(name if role == "row" else name.rpartition(".")[0] + ".", []).append(linear)
                count += linear.of_tokens(part, runs, is_row=role == "row")
            for linears in sharing.values():
                count += runs * (len(linears) if any(each.has_adapter for each in linears) else 1)
    return count


class _Linear:
    """A layer that ranks have parts of, and what its backward pass makes."""

    def __init__(self, model: RankModel, sublayer: str, name: str, stacked: int, enters: bool) -> None:
        self.stacked, self.is_grouped = stacked, name.startswith("experts.")
        self.trains_weight = f"{sublayer}.{name}.weight" in model.trained.names
        self.has_adapter = any(each.startswith(f"{sublayer}.{name}.adapter.") for each in model.by_name)
        self.at_entrance = enters
        branch = name.rpartition(".")[0]
        self.behind_trained = enters or any(
            each.startswith(branch) and not each.startswith(f"{name}.") for each in model.trained.of(sublayer)
        )
        self.name = name

    def keeps_gate(self, part: object) -> bool:
        """Whether its input is computed again from gate and up, which are kept in few bits."""
        is_gated = isinstance(part, Experts) or (isinstance(part, Dense) and part.gated)
        return is_gated and self.name.endswith("down_proj") and not self.has_adapter

    def of_tokens(self, part: object, runs: int, *, is_row: bool) -> int:
        """The maxima of its gradients, and of its inputs but for that in the forward pass."""
        keeps_gate = is_row and self.keeps_gate(part)
        gives = self.behind_trained or (keeps_gate and self.trains_weight) if is_row else self.at_entrance
        return 2 * keeps_gate * runs + gives + self.trains_weight * (1 + keeps_gate + self.is_grouped)

    def forward_by_outputs(self) -> Iterator[int]:
        yield self.stacked

    def backward_by_outputs(self) -> Iterator[int]:
        if self.at_entrance:
            yield from (1, self.stacked)
        if self.trains_weight:
            yield 1

    def forward_by_inputs(self, part: object) -> Iterator[int]:
        yield from (1, self.stacked)
        if self.keeps_gate(part):
            yield from (1, 1)

    def backward_by_inputs(self, part: object) -> Iterator[int]:
        keeps_gate = self.keeps_gate(part)
        if self.behind_trained or (keeps_gate and self.trains_weight):
            yield self.stacked
        if self.trains_weight:
            yield from [1] * (keeps_gate + self.is_grouped)
