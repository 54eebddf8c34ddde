"""What `danlu plan` expects of a step that a benchmark measures on this device: bytes and tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOO_MUCH = {"bytes": 0.10, "tokens_per_second": 0.20}
"""The largest error of a plan that is meant to be used."""


def planned_figures(recipe: Any, config: Any, device: Any) -> dict[str, Any]:
    """The planned figures of a recipe's step on one device, as fields of a measurement.

    `predicted`: bytes by part; `predicted_bytes`: all of them; `predicted_tokens_per_second`: None where nothing is
    known of the speed of the device, as of a card that is not in the table.
    """
    import torch

    from danlu.parallel.layout import Layout
    from danlu.planning.cards import Card, card_of_device
    from danlu.planning.cluster import Cluster
    from danlu.planning.step import plan_step
    from danlu.planning.target import CPU, Target
    from danlu.run.read_workload import read_workload

    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        card = card_of_device(name) or Card(name, memory, None, {})
    else:
        card = Card(CPU, 1 << 50, None, {})
    plan = plan_step(read_workload(recipe, config, judges=True), Layout(), Target(Cluster(card, 1, 1, ())))
    memory = plan.worst.memory
    return {
        "predicted_bytes": memory.allocated,
        "predicted_tokens_per_second": plan.tokens_per_s,
        "predicted": {name: count for name, count in vars(memory.parts).items() if count},
    }


def figures_of_plan(plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The planned figures of a run, out of its plan.json; none where it has no plan."""
    if plan is None:
        return {}
    return {
        "predicted_bytes": plan["memory"]["allocated"],
        "predicted_tokens_per_second": plan["tokens_per_second"],
    }


def comparison(measurement: Mapping[str, Any]) -> str | None:
    """One line with the expected and the measured figures of a measurement, and the errors; None where it has none.

    An error beyond 10 % of the bytes, or 20 % of the speed, is marked.
    """
    cells = []
    for name, measured_as, unit, scale in (
        ("bytes", ("peak_bytes", "memory_bytes"), "GiB", 2**30),
        ("tokens_per_second", ("tokens_per_second",), "tokens/s", 1.0),
    ):
        predicted = measurement.get(f"predicted_{name}")
        measured = next((measurement[key] for key in measured_as if measurement.get(key)), None)
        if predicted is None or measured is None:
            continue
        error = predicted / measured - 1
        mark = " (!)" if abs(error) > _TOO_MUCH[name] else ""
        cells.append(f"{predicted / scale:,.4g} {unit} expected, {measured / scale:,.4g} measured: {error:+.1%}{mark}")
    return "; ".join(cells) or None
