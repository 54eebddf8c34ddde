"""Runs of stage `distill` on a tiny world: their teachers, and training in this process or in one of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from builders import train_worker
from builders.tiny_world import CONFIG, World
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save


def teacher_folder(
    world: World, name: str = "teacher", seed: int = 7, tokenizer: Path | None = None, **changes: Any
) -> str:
    """A model folder with the world's tokenizer, wider than the policy and sharper in what it says."""
    folder = world.folder / name
    if not folder.is_dir():
        shape = {**CONFIG, "hidden_size": 48, "vocab_size": 400, "tie_word_embeddings": False, **changes}
        model = build(read_config_values(shape))
        initialize(model, seed)
        assert model.lm_head is not None and model.lm_head.weight is not None
        with torch.no_grad():
            model.lm_head.weight.mul_(30)
        save(model, folder, tokenizer_from=tokenizer or world.tokenizer)
    return str(folder)


def recipe(world: World, output: Path, parallel: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """The file of a recipe of stage distill: four steps of six packs, evaluated and saved every second one."""
    values: dict[str, Any] = {
        "stage": "distill",
        "teacher": teacher_folder(world),
        "objective": {"kind": "forward", "temperature": 2.0, "cross_entropy": 0.3},
        "steps": 4,
        "batch": {"sequences": 6, "micro": 2},
        "data": {"eval": 5},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        "gradient_clipping": 0.5,
        **changes,
    }
    return str(world.recipe(output, parallel=dict(parallel or {}), **values))


def train(files: Sequence[str]) -> list[int]:
    """Trains each recipe; the exit code of each."""
    torch.set_num_threads(1)
    return [exit_code for _, exit_code in train_worker.train(files)]
