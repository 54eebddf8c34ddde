"""The result of a run as a verification compares it: every tensor of its files, without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from danlu.assembly.parameters import role_of
from danlu.core.shard_box import BoxValue
from danlu.recipe.value import VALUE
from danlu.run.export import export_result
from danlu.training.state import Run
from danlu.verification.proxy import ProxyTraining
from danlu.verification.trace import trained_names

_BESIDE = "beside.pt"  # parameters that neither a model folder nor an adapter folder has


def exported_tensors(training: ProxyTraining, run: Run, folder: Path) -> Mapping[str, Tensor] | None:
    """Writes the result, and its average where there is one, as a run ends with it; all processes call this together.

    Returns on the first process the tensors by their file's folder and their name in it; None on the others.
    """
    recipe = training.recipe
    kept = recipe.checkpoint.model_copy(update={"keep_best": False})  # the present state, not that of the best step
    written = export_result(
        run, _Weights(training), recipe.model_copy(update={"checkpoint": kept}), folder, lambda line: None
    )
    if not training.ranks.leads:
        return None
    tensors: dict[str, Tensor] = {}
    for target in written:
        for file in sorted(target.rglob("*.safetensors")):
            place = file.parent.relative_to(folder)
            tensors |= {f"{place}/{name}": tensor for name, tensor in load_file(file).items()}
        beside = torch.load(target / _BESIDE, weights_only=True)
        tensors |= {f"{target.name}/{name}": tensor for name, tensor in beside.items()}
    return tensors


@dataclass(frozen=True)
class _Weights:
    """Writes the weights of a result as a run writes them."""

    training: ProxyTraining

    def write(self, target: Path, value: BoxValue | None, *, writes: bool) -> None:
        """Writes as `Exporter.write` does."""
        placed, proxy = self.training.placed, self.training.proxy
        if proxy.has_files:
            proxy.write(placed, target, value, writes=writes)
        elif writes:
            target.mkdir(parents=True)
        own = {name: parameter.detach() for name, parameter in placed.parameters()}
        names = sorted(trained_names(self.training))
        if proxy.has_files:
            names = [name for name in names if name.startswith("objective.") or role_of(name) == VALUE]
        beside = {name: own[name].clone() if value is None else value(name) for name in names}
        if writes:
            torch.save(beside, target / _BESIDE)
