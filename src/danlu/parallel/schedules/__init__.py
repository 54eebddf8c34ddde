"""Pipeline schedules as lists of actions: each rank's actions in a step, in order. Pure data, no torch.

The executor carries out one rank's list, the simulation (`planning/pipeline_simulation.py`) gives the same lists times,
and tests read them without starting a process.
"""

from danlu.parallel.schedules.action import Action, forwards_only, peak_in_flight
from danlu.parallel.schedules.placement import placement
from danlu.parallel.schedules.schedule import (
    KINDS,
    chunks_per_rank,
    evaluation_actions,
    schedule,
    schedule_problems,
    unsplit,
)

__all__ = [
    "KINDS",
    "Action",
    "chunks_per_rank",
    "evaluation_actions",
    "forwards_only",
    "peak_in_flight",
    "placement",
    "schedule",
    "schedule_problems",
    "unsplit",
]
