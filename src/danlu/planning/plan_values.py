"""A step's plan as JSON: what `danlu plan --json` prints, and the plan.json of a run. Imports no torch."""

from __future__ import annotations

import math
from typing import Any

from danlu.optim.state_shapes import average_bytes, optimizer_bytes
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.planning.host_memory import result_bytes
from danlu.planning.lengths import Lengths
from danlu.planning.step_plan import RankMemory, RlSeconds, StepPlan, StepSeconds
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe

FORMAT = 1
"""The format of plan.json, as `report.plan_comparison` reads it; a change of a key's meaning raises it."""


def plan_values(plan: StepPlan, workload: Workload, target: Target) -> dict[str, Any]:
    """Returns the values of a plan, those of the worst stage first."""
    recipe, cluster, worst = workload.recipe, target.cluster, plan.worst
    stages = [_memory(stage.memory) for stage in plan.stages]
    card = cluster.card
    return {
        "format": FORMAT,
        "machine": {
            "card": card.name,
            "nodes": cluster.nodes,
            "cards_per_node": cluster.cards_per_node,
            "memory_bytes": card.memory_bytes,
            "available_bytes": target.room_bytes(worst.memory.device),
            "host_memory_bytes": cluster.host_memory_bytes,
        },
        "layout": {"processes": plan.layout.world, "degrees": str(plan.layout), **vars(plan.layout)},
        "batch": {
            "micro": plan.micro,
            "micro_batches": plan.micro_batches,
            "max_length": recipe.data.max_length,
            "tokens": plan.tokens,
        },
        "documents": _documents(workload.lengths),
        "memory": {"stage": plan.stages.index(worst), **_memory(worst.memory)},
        "stages": stages if len(stages) > 1 else [],
        "fits": fits(plan, target),
        "checkpoint_bytes": checkpoint_bytes(workload),
        "checkpoints_kept": recipe.checkpoint.keep,
        "result_bytes": result_bytes(workload),
        "seconds": None if plan.seconds is None else _seconds(plan.seconds),
        "traffic": [_traffic(each) for each in worst.traffic],
        "flops": plan.flops,
        # Between rollouts a step trains on answers, and not on sequences of full length.
        "tokens_per_second": plan.tokens_per_s if plan.rollout is None else None,
        "mfu": None if (peak := card.peaks.get(_precision(recipe))) is None or plan.rollout else plan.mfu(peak),
        "rollout": None if plan.rollout is None else _rollout(plan.rollout),
        "training": _training(plan, workload, cluster.price_per_card_hour),
        "assumptions": [*plan.assumptions, *_assumed(plan.rollout)],
    }


def taken_bytes(memory: RankMemory) -> int:
    """Bytes of the device that a process takes: those that its allocator holds, where these are known."""
    return memory.allocated if memory.reserved is None else memory.reserved


def fits(plan: StepPlan, target: Target) -> bool | None:
    """Whether every stage, or every device of a device map, takes no more than it may; None where that is unknown."""
    rooms = [target.room_bytes(stage.memory.device) for stage in plan.stages]
    if not all(rooms):
        return None
    return all(taken_bytes(stage.memory) <= room for stage, room in zip(plan.stages, rooms, strict=True))


def checkpoint_bytes(workload: Workload) -> int:
    """Bytes of a checkpoint's tensors, over all processes: what is trained, the optimizer's state, an average."""
    recipe, shapes = workload.recipe, dict(workload.policy.trained)
    shapes |= {f"value.{each.name}": each.shape for each in workload.critic_tensors}
    trained = sum(each.bytes for each in (*workload.policy.tensors, *workload.critic_tensors) if each.trained)
    average = average_bytes(shapes.values()) if recipe.ema is not None else 0
    return trained + optimizer_bytes(recipe.optimizer, shapes, paged=False).state + average


def _precision(recipe: Recipe) -> str:
    return "bf16" if recipe.activations == "auto" else recipe.activations


def _memory(memory: RankMemory) -> dict[str, Any]:
    return {
        "parts": vars(memory.parts),
        "by_role": dict(memory.by_role),
        "kv_cache": memory.kv_cache,
        "engine_copies": memory.engine_copies,
        "communication": memory.communication,
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "host": vars(memory.host),
        "device": memory.device,
    }


def _seconds(seconds: StepSeconds) -> dict[str, Any]:
    return {
        "compute": dict(seconds.compute),
        "communication": dict(seconds.communication),
        "exposed": seconds.exposed,
        "bubble": seconds.bubble,
        "total": seconds.total,
        "extrapolated": seconds.extrapolated,
    }


def _rollout(rollout: RlSeconds) -> dict[str, Any]:
    """The seconds from one rollout to the next, by the phases that metrics.jsonl has."""
    return {
        "steps": rollout.steps,
        "phases": {f"{phase.name}_s": phase.seconds for phase in rollout.phases},
        "total": rollout.total,
        "slower": rollout.slower,
    }


def _assumed(rollout: RlSeconds | None) -> list[str]:
    phases = () if rollout is None else rollout.phases
    return [f"{phase.name}: {phase.assumption}" for phase in phases if phase.assumption]


def _traffic(traffic: CollectiveTraffic) -> dict[str, Any]:
    return {"axis": traffic.axis, "kind": traffic.kind, "what": traffic.what, "bytes": round(traffic.bytes)}


def _documents(lengths: Lengths) -> dict[str, Any]:
    documents = lengths.documents
    if not documents:
        return {"source": lengths.source, "rows": None, "tokens": None, "longest": None}
    return {
        "source": lengths.source,
        "rows": len(documents),
        "tokens": sum(documents),
        "longest": max(documents),
    }


def _training(plan: StepPlan, workload: Workload, price: float | None) -> dict[str, Any]:
    """The whole training: steps, tokens, hours and price; None where nothing is known of it."""
    steps = _steps(plan, workload)
    step_s = None if plan.seconds is None else plan.seconds.total
    if plan.rollout is not None:
        step_s = plan.rollout.total / plan.rollout.steps
    hours = None if steps is None or step_s is None else steps * step_s / 3600
    return {
        "steps": steps,
        "tokens": None if steps is None else steps * plan.tokens,
        "hours": hours,
        "price": None if hours is None or price is None else hours * price * plan.layout.world,
        "hours_per_billion_tokens": plan.hours(10**9),
    }


def _steps(plan: StepPlan, workload: Workload) -> int | None:
    """Steps of the run; None where its epochs are of rows that are not counted yet."""
    recipe, documents = workload.recipe, workload.lengths.documents
    if recipe.steps is not None:
        return recipe.steps
    if documents is None or recipe.stage == "rl":
        return None
    # Rows without packing are items of a step themselves; packed ones fill sequences as far as they can.
    length = recipe.data.max_length
    items = len(documents) if recipe.data.packing.kind == "none" or recipe.row_type else sum(documents) / length
    return max(1, math.ceil((recipe.epochs or 1) * items / recipe.batch.packs(length)))
