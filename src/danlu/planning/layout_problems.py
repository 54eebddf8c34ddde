"""Why the models of a recipe cannot be divided among processes as it says, before one of them is read. No torch.

A run, a plan and a search for layouts ask the same rules, and so refuse the same degrees in the same words. What the
recipe alone shows is refused earlier (`recipe.rules`), and degrees that do not divide the processes by
`parallel.layout.layout_of`.
"""

from __future__ import annotations

from collections.abc import Iterator

from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout, placing_problems, problems
from danlu.parallel.schedules import schedule_problems
from danlu.planning.device_map import device_map_problems
from danlu.planning.pipeline_split import num_chunks, pipedream_problems, split_problems
from danlu.planning.workload import OtherModel, Workload
from danlu.recipe import Recipe


def layout_problems(workload: Workload, layout: Layout, device_type: str) -> Iterator[str]:
    """Everything against the layout of a workload's recipe. device_type: "cpu" or "cuda"."""
    yield from placing_problems(workload.recipe, layout, device_type)
    yield from micro_batch_problems(workload.recipe, layout)
    yield from models_problems(workload)


def models_problems(workload: Workload) -> Iterator[str]:
    """Why models of a workload cannot be divided as its recipe says, on however many data ranks."""
    recipe, rows = workload.recipe, workload.config.vocab_size
    yield from policy_problems(recipe, workload.config)
    for other in workload.others:
        yield from other_problems(recipe, other)
        if other.key.startswith("teacher."):
            yield from teacher_problems(recipe, other, rows)


def micro_batch_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Why the schedule of a pipeline cannot do the micro-batches of a recipe that says their size.

    Of rows with several answers a step has as many as its schedule can do.
    """
    section, batch = recipe.parallel.pipeline, recipe.batch
    if section.stages == 1 or batch.micro == "auto" or batch.rows is not None or section.updates_each_micro_batch:
        return
    share = -(-batch.packs(recipe.data.max_length) // layout.data)
    count = -(-share // batch.micro)
    chunks = num_chunks(section) // section.stages
    for argument, message in schedule_problems(section.schedule, section.stages, chunks, count):
        if argument == "micro_batches":  # of the others `split_problems` tells
            yield f"parallel.pipeline: micro-batches of a step: {message}"


def policy_problems(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Why a policy of this config cannot be divided, or not be trained as the recipe says. Imports little for a recipe
    that asks for little."""
    yield from _cut_problems(recipe, config)
    yield from pipedream_problems(recipe, config)
    if recipe.trained_quantization is not None:
        from danlu.planning.rounded_weights import rounding_problems

        yield from rounding_problems(recipe, config)
    if recipe.memory.recompute.kind == "planned" and config.carries_values:
        yield (
            "memory.recompute: planned measures layers one by one, and layers of this model read "
            f"{config.carried}. Use selective, or full"
        )


def other_problems(recipe: Recipe, other: OtherModel) -> Iterator[str]:
    """Why a model of another role cannot be divided as the policy is."""
    if not other.config.has_experts:  # on ranks with other experts each a dense model is whole
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"expert": 1})})
    for problem in _cut_problems(recipe, other.config):
        yield f"{other.key}: {other.path}: {problem}"


def teacher_problems(recipe: Recipe, teacher: OtherModel, rows: int) -> Iterator[str]:
    """Why a policy cannot learn from a teacher on tensor ranks. rows: of the policy's embedding."""
    if recipe.parallel.tensor > 1 and (own := teacher.config.vocab_size) != rows:
        yield (
            f"{teacher.key}: parallel.tensor cuts the rows of all embeddings alike, but that of {teacher.path} has "
            f"{own} and the policy's {rows}. Use a teacher with as many, or parallel.tensor: 1"
        )


def _cut_problems(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Why a model cannot be divided among tensor, context and expert ranks, stages, or the devices of one process."""
    parallel = recipe.parallel
    yield from problems(parallel, config)
    if recipe.fp8 is not None:
        from danlu.parallel.fp8_cuts import fp8_problems

        yield from fp8_problems(recipe.fp8, config, parallel.tensor, parallel.context.size)
    yield from split_problems(parallel.pipeline, config)
    yield from device_map_problems(parallel.device_map, config)
