"""`danlu verify`: a recipe made small, run in its layout and in one process, compared, and explained."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from danlu.errors import RecipeError
from danlu.parallel.collective_traffic import Row, table
from danlu.parallel.layout import Layout, layout_of
from danlu.plan.precision import fastest, product_speeds
from danlu.recipe import Recipe
from danlu.report.verification import Verification
from danlu.verify import classifier_proxy, decoder_proxy
from danlu.verify.comparison import TOLERANCES, compare, turns_of
from danlu.verify.diagnosis import Case, finding
from danlu.verify.fault_injection import FAULTS
from danlu.verify.proxy import Proxy
from danlu.verify.workers import Task, observed, pretended_traffic

MOST_DATA_RANKS = 4  # that a verification starts by itself
_MOST_NUMBERS = 100_000_000  # of gradients by item that are kept


@dataclass(frozen=True)
class Options:
    """What the command line can ask for."""

    processes: int | None = None  # None: the fewest that the recipe's layout needs
    full: bool = False  # the user's own sizes and weights
    steps: int = 3
    precision: Literal["fp32", "recipe"] = "fp32"
    traffic: bool = False
    fault: str | None = None
    timeout_s: float = 300.0


def prove(name: str, recipe: Recipe, options: Options) -> tuple[Verification, list[Row]]:
    """Whether a recipe's layout computes what one process does; and what it sends, where asked for.

    Raises RecipeError for a layout or model that does not fit, TrainingError for processes that fail or hang.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as folder:
        task, about = _task(recipe, options, Path(folder))
        found = observed(task)
    comparison = compare(found, TOLERANCES[task.recipe.precision], turns=turns_of(task.recipe.optimizer))
    verification = Verification(
        recipe=name,
        layout=_named(recipe, task.layout),
        processes=task.layout.world,
        about=about,
        checks=comparison.checks(),
        modules=comparison.modules(),
        finding=finding(comparison, Case(task, found)),
        seconds=time.perf_counter() - started,
    )
    sending = found.sending
    return verification, [] if sending is None else table(sending.counted, sending.formula)


def pretend(recipe: Recipe, world: int, options: Options) -> tuple[Layout, list[Row]]:
    """What the first of so many processes would send in a step, with a small model and without the others."""
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as folder:
        task, _ = _task(recipe, replace(options, processes=world, steps=1), Path(folder))
        item = task.steps[0][0]
        # Two micro-batches for each data rank; what they hold decides tokens alone.
        task = replace(task, steps=[[item] * (2 * task.layout.data)], micro=1)
        sending = pretended_traffic(task)
    return task.layout, table(sending.counted, sending.formula)


def _task(recipe: Recipe, options: Options, folder: Path) -> tuple[Task, tuple[str, ...]]:
    about: list[str] = []
    recipe, layout = _layout(recipe, options, about)
    recipe = _comparable(recipe, layout, options, about)
    if _in_blocks(recipe):
        about.append("8-bit optimizer state is resumed at the layout that saved it: its blocks cannot be resharded")
    per_step = 2 * layout.data + 1  # so that data ranks have other numbers of items
    held_out = layout.data + 2
    count = per_step * (options.steps + 1) + held_out
    kind = classifier_proxy if recipe.stage == "classify" else decoder_proxy
    small = kind.prepared(recipe, layout, count, folder, full=options.full)
    items = small.items
    steps = [items[start : start + per_step] for start in range(0, len(items) - held_out, per_step)]
    micro = 2 if small.recipe.batch.micro == "auto" else min(2, small.recipe.batch.micro)
    task = Task(
        recipe=small.recipe,
        proxy=small.proxy,
        layout=layout,
        steps=steps,
        held_out=items[-held_out:],
        micro=micro,
        device=_device(recipe, layout),
        by_item=per_step * small.parameters <= _MOST_NUMBERS,
        traffic=options.traffic,
        reshards=not _in_blocks(small.recipe),
        fault=_fault(options.fault, small.recipe, layout, small.proxy),
        counted_in=small.counted_in,
        timeout_s=options.timeout_s,
    )
    shares = (
        f"{options.steps} steps of {per_step} {small.counted_in} for {layout.data} data ranks, micro-batches of "
        f"{micro}, and one step more after a checkpoint of either side was loaded by the other"
    )
    return task, (
        f"model: {small.model}; {small.parameters:,} parameters",
        f"data: {small.data}; {shares}",
        *about,
        *small.notes,
    )


def _comparable(recipe: Recipe, layout: Layout, options: Options, about: list[str]) -> Recipe:
    """The recipe in float32, uncompiled, unless it was asked for as it is."""
    changes: dict[str, object] = {"compile": False, "threads": None}
    if recipe.compile:
        about.append("without torch.compile")
    if options.precision == "fp32":
        changes["precision"] = "fp32"
        changes["parallel"] = recipe.parallel.model_copy(update={"reduce": "fp32"})
        if recipe.precision != "fp32" or recipe.parallel.reduce != "fp32":
            about.append(f"float32 instead of {recipe.precision}, to tell mistakes from rounding (--precision recipe)")
    else:
        if recipe.precision == "auto":
            recipe = recipe.model_copy(update={"precision": fastest(product_speeds(_device(recipe, layout)))})
            about.append(f"precision: auto is {recipe.precision} on this machine")
        about.append(f"in {recipe.precision}, which hides differences below {TOLERANCES[recipe.precision]:g}")
    return recipe.model_copy(update=changes)


def _layout(recipe: Recipe, options: Options, about: list[str]) -> tuple[Recipe, Layout]:
    """The layout on so many processes, or on the fewest that show what it does."""
    section = recipe.parallel
    if section.workers == "threads":
        raise RecipeError("parallel.workers: threads are one process, which verify compares with. Use processes")
    if options.processes is not None:
        section = section.model_copy(update={"data": "auto"})
        world = options.processes
    else:
        least = section.replicate if section.shard == "none" else 2 * section.replicate
        data = max(least, 2 if section.tensor == 1 else least)
        if section.data != "auto":
            if section.data > max(MOST_DATA_RANKS, least):
                about.append(f"{max(least, 2)} data ranks instead of {section.data} (--processes)")
            data = max(least, 2) if section.data > max(MOST_DATA_RANKS, least) else section.data
        section = section.model_copy(update={"data": data})
        world = data * section.tensor
    layout = layout_of(section, world)
    if layout.world == 1:
        raise RecipeError(
            "parallel: this is one process, and there is nothing to compare it with. Name a layout, for example "
            "parallel=zero3, or --processes 2"
        )
    return recipe.model_copy(update={"parallel": section}), layout


def _in_blocks(recipe: Recipe) -> bool:
    """Whether the optimizer's state is in blocks of numbers, which a checkpoint cannot cut into other boxes."""
    return recipe.optimizer.kind == "adamw8bit" or getattr(recipe.optimizer, "bits", 32) == 8


def _device(recipe: Recipe, layout: Layout) -> str:
    """The GPUs present, where there is one for each process."""
    wanted = recipe.device != "cpu" and torch.cuda.is_available()
    return "cuda" if wanted and torch.cuda.device_count() >= layout.world else "cpu"


def _fault(name: str | None, recipe: Recipe, layout: Layout, proxy: Proxy) -> str | None:
    if name is None:
        return None
    possible = [one for one, fault in FAULTS.items() if fault.possible(recipe, layout, proxy)]
    if name not in possible:
        raise RecipeError(
            f"--inject {name}: not a mistake that this layout can make. It can make {', '.join(possible)}"
        )
    return name


def _named(recipe: Recipe, layout: Layout) -> str:
    """`zero3, tensor 2 with sequence, recompute selective`."""
    section, memory = recipe.parallel, recipe.memory
    parts = [str(layout) if section.shard == "none" or layout.data == 1 else f"{section.shard}, {layout}"]
    parts += ["sequence"] if section.sequence else []
    parts += [f"recompute {memory.recompute.kind}"] if memory.recompute.kind != "none" else []
    parts += [f"offload {' and '.join(memory.offload)}"] if memory.offload else []
    parts += [recipe.adapter.kind] if recipe.adapter is not None else []
    parts += [recipe.quantization.kind] if recipe.quantization is not None else []
    return ", ".join(parts)
