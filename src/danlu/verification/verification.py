"""`danlu verify`: a recipe with a shrunken model, trained in its layout and in one process, compared, diagnosed."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from danlu.core.errors import RecipeError
from danlu.core.types import Item, Pack
from danlu.parallel.collective_traffic import Row, table
from danlu.parallel.layout import Layout, divisors, layout_of
from danlu.planning.product_peak import fastest, product_speeds
from danlu.recipe import Recipe, sections
from danlu.report.verification import Verification
from danlu.verification import classifier_proxy, decoder_proxy
from danlu.verification.comparison import TOLERANCES, compare, has_blockwise_state, sign_flip_distance
from danlu.verification.diagnosis import Case, diagnose
from danlu.verification.fault import faults_of_module
from danlu.verification.proxy import Proxy
from danlu.verification.proxy_recipe import CLIPPING
from danlu.verification.routes import LEAST_MARGIN
from danlu.verification.workers import Task, fake_world_traffic, run_task, with_clear_routes

MAX_DATA_RANKS = 4  # that a verification starts unless --processes asks for more
_STAGES_WITH_FORMULAS = ("pretrain", "sft", "classify")  # of `plan.traffic`: one model, and its cross-entropy
_MAX_SEEDS = 4  # that are tried
_MAX_TRACED_NUMBERS = 100_000_000  # of the gradients of single items


@dataclass(frozen=True)
class Options:
    """Options of a verification on the command line."""

    processes: int | None = None  # None: the fewest that the recipe's layout needs
    full: bool = False  # the user's own sizes and weights
    steps: int = 3
    precision: Literal["fp32", "recipe"] = "fp32"
    traffic: bool = False
    fault: str | None = None  # MODULE:NAME, see `fault.Fault`
    timeout_s: float = 300.0


def verify(name: str, recipe: Recipe, options: Options) -> tuple[Verification, list[Row]]:
    """Verifies that a recipe's layout computes the same as one process; returns also rows of its traffic, where
    requested.

    Raises RecipeError for a layout or model that does not fit, TrainingError for processes that fail or hang.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as folder:
        task, about = _task_with_clear_routes(recipe, options, Path(folder))
        traces = run_task(task)
    comparison = compare(
        traces, TOLERANCES[task.recipe.precision_name], flip_distance=sign_flip_distance(task.recipe.optimizer)
    )
    verification = Verification(
        recipe=name,
        layout=_named(recipe, task.layout),
        processes=task.layout.world,
        about=about,
        checks=comparison.checks(),
        modules=comparison.modules(),
        finding=diagnose(comparison, Case(task, traces)),
        seconds=time.perf_counter() - started,
    )
    traffic = traces.traffic
    return verification, [] if traffic is None else table(traffic.counted, traffic.predicted)


def predict_traffic(recipe: Recipe, world: int, options: Options) -> tuple[Layout, list[Row]]:
    """Predicts the traffic of rank 0 of `world` processes in a step of the shrunken model, without starting the others.

    Raises RecipeError where that depends on the tokens of the others.
    """
    if recipe.parallel.expert > 1:
        raise RecipeError(
            f"--pretend: with parallel.expert: {recipe.parallel.expert} what is sent depends on where the tokens of "
            "processes go that are not there. Use --traffic --processes N"
        )
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as folder:
        task, _ = _task(recipe, replace(options, processes=world, steps=1, traffic=True), Path(folder))
        item = task.steps[0][0]
        # Two micro-batches for each data rank; which item they hold changes the number of tokens alone.
        task = replace(task, steps=[[item] * (2 * task.layout.data)], micro=1)
        traffic = fake_world_traffic(task)
    return task.layout, table(traffic.counted, traffic.predicted)


def _task_with_clear_routes(recipe: Recipe, options: Options, folder: Path) -> tuple[Task, tuple[str, ...]]:
    """`_task`, of a model with experts with items in which rounding changes no token's route (`clear_routes`).

    Raises as `_task`, and RecipeError where with no seed of `_MAX_SEEDS` there are enough of them.
    """
    for seed in range(recipe.seed, recipe.seed + _MAX_SEEDS):
        of_seed = folder / str(seed)
        of_seed.mkdir()
        task, about = _task(recipe.model_copy(update={"seed": seed}), options, of_seed)
        if not task.proxy.has_experts:
            return task, about
        clear = with_clear_routes(task)
        if clear is not None and clear[1] >= LEAST_MARGIN / 2:  # chosen one by one: rounding is another in a batch
            task, margin = clear
            return task, (
                *about,
                f"items with clear routes: the scores of no two experts of a token are nearer than {margin:.1e}",
                *([f"seed {seed}, with which there are enough of them"] if seed != recipe.seed else []),
            )
    raise RecipeError(
        f"seed: with each of {recipe.seed} to {recipe.seed + _MAX_SEEDS - 1} too few {task.item_name} are without a "
        "token that has two experts of almost one score, between which rounding would decide. Use fewer --steps"
        + (", or leave out --full" if options.full else "")
    )


def _task(recipe: Recipe, options: Options, folder: Path) -> tuple[Task, tuple[str, ...]]:
    """Makes the task, and the report's lines on model, data and changes. folder: for models and adapters to start from.

    Raises RecipeError for a recipe with requested traffic and no formula for it.
    """
    if options.traffic and recipe.stage not in _STAGES_WITH_FORMULAS:
        raise RecipeError(
            f"--traffic: there are no formulas for stage {recipe.stage}: models next to the policy, log-probabilities "
            "over a cut vocabulary or a score head send more. There are some for "
            f"{', '.join(_STAGES_WITH_FORMULAS)}. Leave --traffic out: what the layout computes is verified without it"
        )
    if options.fault is not None:
        faults_of_module(options.fault)  # a reference that is wrong is refused before the data is read
    about: list[str] = []
    recipe, layout = _layout(recipe, options, about)
    recipe = _comparable(recipe, layout, options, about)
    if has_blockwise_state(recipe.optimizer):
        about.append("8-bit optimizer state is resumed at the layout that saved it: its blocks cannot be resharded")
    is_pipedream = recipe.parallel.pipeline.updates_each_micro_batch  # its step is one micro-batch
    each = 2 * layout.data * (1 if is_pipedream else layout.pipeline)
    per_step = each + 1  # not a multiple: data ranks have unequal numbers of items
    held_out = layout.data + 2
    count = per_step * (options.steps + 1) + held_out
    module = classifier_proxy if recipe.stage == "classify" else decoder_proxy
    prepared = module.prepare_proxy(recipe, layout, count, folder, full=options.full)
    if options.fault is not None:
        _check_fault(options.fault, prepared.recipe, layout, prepared.proxy)
    candidates, items = prepared.items, prepared.items[:count]
    steps = [items[start : start + per_step] for start in range(0, len(items) - held_out, per_step)]
    if prepared.stages:
        steps = [_of_stage(step, number, prepared.stages) for number, step in enumerate(steps)]
    # Two micro-batches for each stage and more go through a pipeline.
    largest = 2 if layout.pipeline == 1 else 1
    micro = largest if prepared.recipe.batch.micro == "auto" else min(largest, prepared.recipe.batch.micro)
    if is_pipedream:
        micro = -(-per_step // layout.data)
    task = Task(
        recipe=prepared.recipe,
        proxy=prepared.proxy,
        layout=layout,
        steps=steps,
        held_out=items[-held_out:],
        micro=micro,
        device=_device(recipe, layout),
        candidates=candidates if prepared.proxy.has_experts else (),
        trace_items=per_step * prepared.parameters <= _MAX_TRACED_NUMBERS,
        measure_traffic=options.traffic,
        reshards=not has_blockwise_state(prepared.recipe.optimizer),
        fault=options.fault,
        item_name=prepared.item_name,
        timeout_s=options.timeout_s,
    )
    of_turn = ", updated while others are in flight, which one process replays" if is_pipedream else ""
    shares = (
        f"{options.steps} steps of {per_step} {prepared.item_name} for {layout.data} data ranks, micro-batches of "
        f"{micro}{of_turn}, and one step more after a checkpoint of either side was loaded by the other"
    )
    return task, (
        f"model: {prepared.model_summary}; {prepared.parameters:,} parameters",
        f"data: {prepared.data_summary}; {shares}",
        *about,
        *prepared.notes,
    )


def _of_stage(items: Sequence[Item], step: int, stages: Sequence[int]) -> list[Item]:
    """The packs of a step as of its stage of lengths: each step is of the next stage, later ones of the last."""
    key = stages[min(step, len(stages) - 1)]
    return [replace(item, stage_length=key) for item in items if isinstance(item, Pack)]


def _comparable(recipe: Recipe, layout: Layout, options: Options, about: list[str]) -> Recipe:
    """The recipe in float32, uncompiled, unless it was asked for as it is."""
    changes: dict[str, object] = {"compile": False, "threads": None}
    if recipe.compile:
        about.append("without torch.compile")
    if not options.full and recipe.gradient_clipping is not None and recipe.gradient_clipping > CLIPPING:
        changes["gradient_clipping"] = CLIPPING
        about.append(f"gradient_clipping {CLIPPING:g}, so that gradients of a small model are clipped")
    if options.precision == "fp32":
        changes["precision"] = "fp32"
        changes["parallel"] = recipe.parallel.model_copy(update={"reduce": "fp32"})
        if recipe.precision_name != "fp32" or recipe.parallel.reduce != "fp32":
            name = recipe.precision_name
            about.append(f"float32 instead of {name}, to tell mistakes from rounding (--precision recipe)")
    else:
        if recipe.activations == "auto":
            recipe = recipe.model_copy(update={"precision": fastest(product_speeds(_device(recipe, layout)))})
            about.append(f"precision: auto is {recipe.activations} on this machine")
        about.append(f"in {recipe.precision_name}, which hides differences below {TOLERANCES[recipe.precision_name]:g}")
    return recipe.model_copy(update=changes)


def _layout(recipe: Recipe, options: Options, about: list[str]) -> tuple[Recipe, Layout]:
    """Returns the recipe at its layout on --processes processes, or on the fewest that show the layout's effects.

    Raises RecipeError for a layout of one process.
    """
    section = recipe.parallel
    if section.workers == "threads":
        raise RecipeError("parallel.workers: threads are one process, which verify compares with. Use processes")
    if section.device_map is not None:
        raise RecipeError("parallel.device_map: it divides one process, which verify compares with. Leave it out")
    if options.processes is not None:
        section = section.model_copy(update={"data": "auto"})
        world = options.processes
    else:
        min_data = section.replicate if section.shard == "none" else 2 * section.replicate
        is_alone = section.tensor == section.context.size == section.pipeline.stages == 1
        data = max(min_data, 2) if is_alone else min_data
        if section.data != "auto":
            data = section.data
            if section.data > max(MAX_DATA_RANKS, min_data):
                data = max(min_data, 2)
                about.append(f"{data} data ranks instead of {section.data} (--processes)")
        data, expert = _data_ranks_of_experts(section, data, about)
        section = section.model_copy(update={"data": data, "expert": expert})
        world = data * section.tensor * section.context.size * section.pipeline.stages
    layout = layout_of(section, world)
    if layout.world == 1:
        raise RecipeError(
            "parallel: this is one process, and there is nothing to compare it with. Name a layout, for example "
            "parallel=zero3, or --processes 2"
        )
    return recipe.model_copy(update={"parallel": section}), layout


def _data_ranks_of_experts(section: sections.Parallel, data: int, about: list[str]) -> tuple[int, int]:
    """Returns (data ranks, ranks that experts are distributed among within them and their context ranks): the fewest,
    at least `data`, that show both.

    With shards two ranks have the same experts, so that these are sharded too.
    """
    if section.expert == 1:
        return data, 1
    copies, expert = (1 if section.shard == "none" else section.replicate), section.expert
    context = section.context.size
    if copies * expert > MAX_DATA_RANKS * context and section.data == "auto":
        expert = next(degree for degree in divisors(expert) if degree > 1)
        about.append(f"experts are distributed among {expert} ranks instead of {section.expert} (--processes)")
    unit = copies * expert // math.gcd(expert, context)
    if section.shard != "none" and section.data == "auto" and 2 * copies * expert <= MAX_DATA_RANKS * context:
        data = max(data, -(-2 * copies * expert // context))
    return -(-data // unit) * unit, expert


def _device(recipe: Recipe, layout: Layout) -> str:
    """The GPUs present, where there is one for each process."""
    wanted = recipe.device != "cpu" and torch.cuda.is_available()
    return "cuda" if wanted and torch.cuda.device_count() >= layout.world else "cpu"


def _check_fault(chosen: str, recipe: Recipe, layout: Layout, proxy: Proxy) -> None:
    """Raises RecipeError for a fault, MODULE:NAME, that the layout cannot have."""
    faults, module = faults_of_module(chosen), chosen.partition(":")[0]
    possible = [f"{module}:{name}" for name, fault in faults.items() if fault.is_possible(recipe, layout, proxy)]
    if chosen not in possible:
        raise RecipeError(
            f"--inject {chosen}: not a mistake that this layout can make. It can make {', '.join(possible) or 'none'}"
        )


def _named(recipe: Recipe, layout: Layout) -> str:
    """The layout in words: `zero3, tensor 2, sequence, recompute selective`."""
    section, memory = recipe.parallel, recipe.memory
    parts = [str(layout) if section.shard == "none" or layout.data == 1 else f"{section.shard}, {layout}"]
    parts += ["sequence"] if section.sequence else []
    if section.pipeline.updates_each_micro_batch:
        parts += ["pipedream"] + (["vertical sync"] if section.pipeline.vertical_sync else [])
    parts += [f"recompute {memory.recompute.kind}"] if memory.recompute.kind != "none" else []
    parts += [f"offload {' and '.join(memory.offload)}"] if memory.offload else []
    parts += [recipe.adapter.kind] if recipe.adapter is not None else []
    parts += [recipe.quantization.kind] if recipe.quantization is not None else []
    return ", ".join(parts)
