"""Everything that a plan reads of a recipe, as JSON. Imports no torch; run as a program it blocks torch first."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    for library in ("torch", "transformers", "tokenizers", "datasets"):
        sys.modules[library] = None  # type: ignore[assignment]  # importing it fails

import json
from pathlib import Path
from typing import Any

from danlu.assembly.document_lengths import document_lengths
from danlu.planning.cluster import Cluster
from danlu.planning.target import Target
from danlu.recipe import load
from danlu.run.planned_step import planned_step
from danlu.run.preview_model import planned_config
from danlu.run.read_workload import read_workload


def read(file: str, *overrides: str) -> dict[str, Any]:
    """The facts of one recipe."""
    recipe = load(Path(file), overrides).recipe
    workload = read_workload(recipe, planned_config(recipe), document_lengths(recipe), judges=True)
    values = planned_step(recipe, Target(Cluster.parse("H100-80G"))).values
    return {
        "tensors": {each.name: [list(each.shape), each.bytes, each.trained] for each in workload.policy.tensors},
        "frozen": [model.config.parameter_count() for model in workload.frozen],
        "critic": 0 if workload.critic is None else workload.critic.parameter_count(),
        "rewards": workload.reward_bytes,
        "step": [values["memory"]["allocated"], values["seconds"]["total"], values["checkpoint_bytes"]],
        "lengths": [workload.lengths.source, list(workload.lengths.documents or ())],
    }


if __name__ == "__main__":
    print(json.dumps([read(*each) for each in json.loads(sys.argv[1])]))
