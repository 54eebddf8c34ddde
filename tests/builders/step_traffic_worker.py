"""What a process of a group sends in a step of several recipes, and what the formulas say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from builders.parallel_steps import config_of, steps_of
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.recipe import load
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.step_traffic import StepTraffic, measure_step_traffic


def sendings(files: Mapping[str, str]) -> dict[str, StepTraffic]:
    """What this process sends in a step of each recipe, counted and predicted."""
    torch.set_num_threads(1)
    ranks: dict[Layout, Ranks] = {}
    traffic = {}
    for name, file in files.items():
        recipe = load(Path(file)).recipe
        layout = layout_of(recipe.parallel, dist.get_world_size())
        if layout not in ranks:
            ranks[layout] = ranks_of(layout, "cpu")
        proxy = Proxy(config_of(recipe))
        training = ProxyTraining(recipe, proxy, ranks[layout], torch.device("cpu"), micro=2)
        traffic[name] = measure_step_traffic(training, steps_of(1, 5)[0])
    return traffic
