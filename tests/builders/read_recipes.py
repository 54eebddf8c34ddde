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
from danlu.planning.device_map import device_map_problems
from danlu.recipe import load
from danlu.recipe.roles import ModelSpec, frozen_roles
from danlu.recipe.value import value_share
from danlu.run.preview_model import planned_config, tensors_of
from danlu.stages.role_configs import frozen_config, own_config, own_reward_bytes, shared_rewards


def read(file: str, *overrides: str) -> dict[str, Any]:
    """The facts of one recipe."""
    recipe = load(Path(file), overrides).recipe
    config = planned_config(recipe)
    lengths = document_lengths(recipe)
    frozen = [spec.section for spec in frozen_roles(recipe).values() if isinstance(spec, ModelSpec)]
    return {
        "tensors": {
            each.name: [list(each.shape), each.bytes, each.trained] for each in tensors_of(recipe, config).tensors
        },
        "problems": list(device_map_problems(recipe.parallel.device_map, config)),
        "frozen": [frozen_config(section, config.vocab_size).parameter_count() for section in frozen],
        "critic": own_config(recipe, config.vocab_size).parameter_count() if value_share(recipe) == "none" else 0,
        "rewards": [own_reward_bytes(recipe, ()), shared_rewards(recipe)],
        "lengths": [lengths.source, list(lengths.documents or ())],
    }


if __name__ == "__main__":
    print(json.dumps([read(*each) for each in json.loads(sys.argv[1])]))
