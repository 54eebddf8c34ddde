"""Rules about `parallel.device_map`: its entries, and features that one process with several devices does not have."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.device_map import ByHand, device_named, entry_problems
from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import Recipe
from danlu.recipe.yaml_tree import Problem

KEY = "parallel.device_map"


def device_map_is_supported(device_map: str | ByHand, recipe: Recipe) -> Iterator[Problem]:
    """The map names parts and devices that there are, and nothing asks for more processes than one."""
    if not isinstance(device_map, str):
        wrong = [*entry_problems(device_map)]
        yield from (Problem(KEY, message) for message in wrong)
        gpus = [key for key, value in device_map.items() if device_named(value) not in (None, "cpu")]
        if recipe.device == "cpu" and gpus and not wrong:
            message = f"cpu, and parallel.device_map has {gpus[0]!r} on a GPU. Use device: auto"
            yield Problem("device", message, reads=(KEY,))
    yield from refusals(_not_of_one_process(recipe), "leave out parallel.device_map", KEY)


def _not_of_one_process(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that take several processes, or a model on one device."""
    parallel = recipe.parallel
    degrees = {name: getattr(parallel, name) for name in ("data", "replicate", "tensor", "expert")}
    degrees |= {"context": parallel.context.size, "pipeline": parallel.pipeline.stages}
    for name in (name for name, degree in degrees.items() if degree not in (1, "auto")):
        reason = "a device map divides the layers within one process, and this asks for several"
        yield f"parallel.{name}", reason, "Use 1"
    if parallel.shard != "none":
        yield "parallel.shard", "a model is sharded among processes, and a device map is of one", "Use none"
    if parallel.workers == "threads":
        yield "parallel.workers", "threads each have a copy of the model on one device", "Use processes"
    if recipe.stage == "classify":
        yield "stage", "lenet5 is one small model, which nothing divides", "Train it on one device"
    elif recipe.stage == "rl":
        reason = "rewards, values and routes of answers are those of a model on one device"
        yield "stage", reason, "Use tensor and shard"
    if recipe.on_policy and recipe.rollout.engine != "embedded":
        yield "rollout.engine", "a server is given the weights of a model on one device", "Use embedded"
    if recipe.numerics == "exact":
        yield "numerics", "whether bits are those of a rollout is checked on one device", "Use numerics: fast"
    if recipe.compile:
        yield "compile", "what is compiled is the forward pass on one device", "Leave it out"
    if recipe.memory.recompute.kind == "planned":
        yield "memory.recompute.kind", "a plan is measured on one device", "Use full, every or selective"
    for part in ("parameters", "activations"):
        if part in recipe.memory.offload:
            yield "memory.offload", f"{part} are offloaded from one device", f"Leave out {part}"
