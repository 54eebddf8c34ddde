"""Models of recipes as a run places them, for tests that need no data."""

from __future__ import annotations

from pathlib import Path

import torch

from danlu.assembly.parallelize import place, subject_of
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import read_config
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.stages.builder import placed_decoder
from danlu.stages.placed import PlacedDecoder
from danlu.stages.table import STAGES

CPU = torch.device("cpu")


def config_of(recipe: Recipe) -> ModelConfig:
    """The model of a recipe that names a configuration, with a vocabulary of 400."""
    assert isinstance(recipe.model.config, dict)
    return read_config_values({"vocab_size": 400, **recipe.model.config})


def placed_of(recipe: Recipe, config: ModelConfig | None = None, *, ranks: Ranks | None = None) -> PlacedDecoder:
    """The model of a recipe as a process on the CPU places it, without rows. ranks: None is a process alone."""
    ranks = ranks or Ranks()
    if config is None and recipe.model.path is not None:
        config = read_config(Path(recipe.model.path))
    elif config is None:
        config = config_of(recipe)
    placed = place(subject_of(recipe, config, CPU, ranks=ranks), recipe, ranks, CPU)
    return placed_decoder(recipe, STAGES[recipe.stage], placed, config, CPU)
