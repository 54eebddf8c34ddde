"""The layouts in which a recipe trains fastest on a cluster: all of a space, by a rising lower bound. No torch.

Only choices with a bound below the seconds of the best ones so far are planned whole (branch and bound); so the result
is that of planning all of them. A choice that does not fit into the memory of its devices is left out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from danlu.core.errors import RecipeError
from danlu.core.types import MemoryParts
from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout, divisors, layout_of, problems
from danlu.parallel.schedules import chunks_per_rank
from danlu.planning.chunk_costs import LayerTimes, ModelSeconds, model_seconds
from danlu.planning.pipeline_bounds import lower_bound
from danlu.planning.pipeline_simulation import in_flight_formula
from danlu.planning.pipeline_split import split_problems
from danlu.planning.rank_memory import chunks_step, rank_states
from danlu.planning.stage_collectives import StageCollectives, stage_collectives
from danlu.planning.step import plan_within, timed
from danlu.planning.step_plan import StepPlan
from danlu.planning.step_walk import ChunkCost
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe
from danlu.recipe.rules import problems as recipe_problems
from danlu.recipe.sections import Context, Parallel, Pipeline, Recompute

Shard = Literal["none", "zero1", "zero2", "zero3"]
Kind = Literal["none", "elementwise", "selective", "full"]


class Choice(NamedTuple):
    """A layout with the settings that decide its memory and time; smaller ones come first where plans are equal."""

    tensor: int = 1
    sequence: bool = False
    context: int = 1
    expert: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    """Chunks of a stage; None: the schedule's default."""
    shard: Shard = "none"
    replicate: int = 1
    micro: int = 1
    recompute: Kind = "none"

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings; its other keys stay."""
        parallel = recipe.parallel.model_copy(update=self.parallel(recipe.parallel))
        memory = recipe.memory.model_copy(update={"recompute": Recompute(kind=self.recompute)})
        batch = recipe.batch.model_copy(update={"micro": self.micro})
        return recipe.model_copy(update={"parallel": parallel, "memory": memory, "batch": batch})

    def parallel(self, section: Parallel) -> dict[str, Any]:
        """The keys of `parallel` that the choice sets."""
        pipeline = section.pipeline.model_copy(
            update={"stages": self.stages, "schedule": self.schedule, "chunks": self.chunks, "split": "even"}
        )
        return {
            "data": "auto",
            "shard": self.shard,
            "replicate": self.replicate,
            "tensor": self.tensor,
            "sequence": self.sequence,
            "expert": self.expert,
            "context": section.context.model_copy(update={"size": self.context}),
            "pipeline": pipeline if self.stages > 1 else Pipeline(),
        }

    def overrides(self) -> list[str]:
        """The settings as key=value of a command, without those that are defaults."""
        pairs = {
            "parallel.tensor": (self.tensor, 1),
            "parallel.sequence": (str(self.sequence).lower(), "false"),
            "parallel.context.size": (self.context, 1),
            "parallel.expert": (self.expert, 1),
            "parallel.pipeline.stages": (self.stages, 1),
            "parallel.pipeline.schedule": (self.schedule, self.schedule if self.stages == 1 else None),
            "parallel.pipeline.chunks": (self.chunks, None),
            "parallel.shard": (self.shard, "none"),
            "parallel.replicate": (self.replicate, 1),
            "batch.micro": (self.micro, None),
            "memory.recompute": (self.recompute, "none"),
        }
        return [f"{key}={value}" for key, (value, default) in pairs.items() if value != default]


@dataclass(frozen=True)
class Space:
    """The values that a search tries for each setting; those that do not go together are left out."""

    tensor: tuple[int, ...]
    context: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int | None], ...] = (("1f1b", None),)
    """Schedules of a pipeline with their chunks of a stage."""
    shards: tuple[Shard, ...] = ("none", "zero1", "zero3")
    replicates: tuple[int, ...] | None = (1,)
    """Copies of sharded models; None: every divisor of the data ranks."""
    micro: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Kind, ...] = ("none", "selective", "full")

    @classmethod
    def of(cls, workload: Workload, target: Target) -> Space:
        """All degrees that divide the ranks; tensor ranks within a node, context ranks for long documents alone."""
        cluster, config = target.cluster, workload.config
        degrees = tuple(divisors(cluster.ranks))
        experts = tuple(degree for degree in degrees if degree == 1 or config.has_experts)
        layers = len(config.layers)
        is_long = workload.recipe.data.max_length >= 32_768
        interleaved = tuple(("interleaved", chunks) for chunks in (2, 3, 4, 5, 6, 8) if chunks * 2 <= layers)
        return cls(
            tensor=tuple(degree for degree in degrees if degree <= cluster.cards_per_node),
            context=degrees if is_long else (1,),
            expert=experts,
            stages=tuple(degree for degree in degrees if degree <= layers),
            schedules=(("1f1b", None), *interleaved, ("zb-h1", None), ("zbv", None)),
        )

    def choices(self, workload: Workload, ranks: int) -> Iterator[Choice]:
        """Yields the choices that divide the ranks, each once."""
        config = workload.config
        packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        for tensor, context, expert, stages in itertools.product(self.tensor, self.context, self.expert, self.stages):
            data, rest = divmod(ranks, tensor * context * stages)
            if rest or (data * context) % expert or _misfit(workload, tensor, context, expert):
                continue
            per_step = -(-packs // data)
            for schedule, chunks in self.schedules if stages > 1 else (("1f1b", None),):
                if stages > 1 and _unsplit(config, stages, schedule, chunks):
                    continue
                for shard, replicate in self._sharings(data, context, expert):
                    for micro, recompute in itertools.product(self.micro, self.recompute):
                        if micro <= per_step or micro == min(self.micro):
                            yield Choice(
                                tensor, tensor > 1, context, expert, stages, schedule, chunks, shard, replicate,
                                micro, recompute,
                            )  # fmt: skip

    def _sharings(self, data: int, context: int, expert: int) -> Iterator[tuple[Shard, int]]:
        for shard in self.shards:
            if shard == "none" or data * context == 1:
                if shard == "none" or "none" not in self.shards:
                    yield shard, 1
                continue
            for replicate in divisors(data) if self.replicates is None else self.replicates:
                if data % replicate == 0 and (data // replicate) * context % expert == 0 and replicate < data:
                    yield shard, replicate


def _misfit(workload: Workload, tensor: int, context: int, expert: int) -> bool:
    """Whether the model cannot be cut so."""
    section = Parallel(tensor=tensor, context=Context(size=context), expert=expert)
    return next(problems(section, workload.config), None) is not None


def _unsplit(config: ModelConfig, stages: int, schedule: str, chunks: int | None) -> bool:
    """Whether the layers cannot be split among the chunks."""
    section = Pipeline(stages=stages, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    return next(split_problems(section, config), None) is not None


@dataclass(frozen=True, order=True)
class Candidate:
    """A choice that fits, with its plan; ordered by seconds, then bytes, then the choice."""

    seconds: float
    bytes: int
    choice: Choice
    plan: StepPlan = field(compare=False)


def search(workload: Workload, space: Space, target: Target, top: int = 10) -> list[Candidate]:
    """The fastest choices of a space that fit into the target's memory, the fastest first.

    Raises RecipeError where no speeds are known, and where nothing fits.
    """
    speeds = target.training_speeds(compiled=workload.recipe.compile)
    if speeds is None:
        raise RecipeError(
            "a search compares seconds, and the speed of this machine is not known. Run danlu bench machine, or name a "
            "cluster with --on"
        )
    times = LayerTimes(speeds)
    bounds, memory = Bounds(workload, target, times), LeastMemory(workload, target)
    # A choice waits by its quick bound, then by the close one of its schedule, and is planned when it comes up again.
    waiting = [(bounds.quick(choice), choice, False) for choice in space.choices(workload, target.cluster.ranks)]
    heapq.heapify(waiting)
    best: list[Candidate] = []
    while waiting:
        least, choice, is_close = heapq.heappop(waiting)
        if len(best) == top and least > best[-1].seconds:
            break
        if not is_close:
            if memory.of(choice) <= target.cluster.card.memory_bytes:
                heapq.heappush(waiting, (max(least, bounds.close(choice)), choice, True))
            continue
        candidate = evaluate(workload, choice, target, times)
        if candidate is not None:
            best = sorted([*best, candidate])[:top]
    if not best:
        raise RecipeError(f"no layout of {target.cluster.ranks} x {target.cluster.card.name} holds this recipe")
    return best


def evaluate(workload: Workload, choice: Choice, target: Target, times: LayerTimes) -> Candidate | None:
    """The plan of a choice; None where it does not fit, or no recipe may say it."""
    own = replace(workload, recipe=choice.recipe(workload.recipe))
    try:
        layout = layout_of(own.recipe.parallel, target.cluster.ranks)
    except RecipeError:
        return None
    if _is_refused(own, layout):
        return None
    plan = plan_within(own, layout, target, times, target.cluster.card.memory_bytes)
    if plan is None or plan.seconds is None:
        return None
    allocated = plan.worst.memory.allocated
    return Candidate(plan.seconds.total, allocated, choice, plan)


def _is_refused(workload: Workload, layout: Layout) -> bool:
    return bool(recipe_problems(workload.recipe))


class Bounds:
    """Seconds that a step of a choice takes at the least; never more than its plan says."""

    def __init__(self, workload: Workload, target: Target, times: LayerTimes) -> None:
        self.workload, self.target, self.times = workload, target, times
        self.packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        self._layers: dict[Choice, ModelSeconds] = {}
        self._waits: dict[Choice, float] = {}

    def quick(self, choice: Choice) -> float:
        """The operations of all layers, shared evenly among the stages."""
        micro, micro_batches = self._micro_batches(choice)
        seconds, waiting = self._of_layers(choice, micro).total, self._waiting(choice, micro)
        return micro_batches * (seconds.total + seconds.accumulation + waiting) / choice.stages

    def close(self, choice: Choice) -> float:
        """The longest of some paths through the schedule of a pipeline."""
        if choice.stages == 1:
            return self.quick(choice)
        micro, micro_batches = self._micro_batches(choice)
        seconds = self._of_layers(choice, micro)
        own = replace(self.workload, recipe=choice.recipe(self.workload.recipe))
        chunks = own.chunks(0)
        of_layer = self._waiting(choice, micro) / len(self.workload.config.layers)
        costs = [
            timed(ChunkCost(), seconds.of(span), StageCollectives(of_pass=len(span) * of_layer))
            for span in chunks.layers
        ]
        per_stage = len(chunks.layers) // choice.stages
        return lower_bound(choice.schedule, choice.stages, per_stage, micro_batches, costs)

    def _waiting(self, choice: Choice, micro: int) -> float:
        """Seconds that the layers of a micro-batch wait for tensor ranks and for ranks with other experts.

        The borders of embedding and head, one more than a layer's, are left out: a stage may have neither.
        """
        if choice.context > 1 or (choice.tensor == 1 and choice.expert == 1):
            return 0.0
        alone = self._alone(choice, micro)
        if alone not in self._waits:
            own = replace(self.workload, recipe=alone.recipe(self.workload.recipe))
            layout = layout_of(own.recipe.parallel, self.target.cluster.ranks)
            seconds = [self._of_layers(choice, micro).total]
            collectives = stage_collectives(own, layout, 0, micro, 1, seconds, self.target.known_links)
            layers = len(self.workload.config.layers)
            self._waits[alone] = collectives.of_pass * layers / (layers + 1)
        return self._waits[alone]

    def _alone(self, choice: Choice, micro: int) -> Choice:
        """The same cut of layers without stages and shards."""
        return choice._replace(stages=1, schedule="1f1b", chunks=None, shard="none", replicate=1, micro=micro)

    def _micro_batches(self, choice: Choice) -> tuple[int, int]:
        """(packed sequences of a micro-batch, micro-batches of a step)."""
        return _micro_batches(self.workload, self.packs, choice, self.target)

    def _of_layers(self, choice: Choice, micro: int) -> ModelSeconds:
        """Seconds of a micro-batch through each layer on the ranks that share its tokens."""
        # Gathered weights come in half precision, so a layer of a sharded model has fewer conversions.
        alone = self._alone(choice, micro)._replace(shard="none" if choice.shard == "none" else "zero1")
        if self.workload.lengths.trees is not None:  # stages and data ranks decide how rows are dealt out
            alone = choice._replace(shard=alone.shard, replicate=1, micro=micro)
        if alone not in self._layers:
            own = replace(self.workload, recipe=alone.recipe(self.workload.recipe))
            own = own.dealt_to(_data_ranks(choice, self.target))
            self._layers[alone] = model_seconds(own, micro, self.target, self.times)
        return self._layers[alone]


class LeastMemory:
    """Bytes that the first stage of a choice takes at the least: states, and what its micro-batches in flight keep."""

    def __init__(self, workload: Workload, target: Target) -> None:
        self.workload, self.target = workload, target
        self.packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        self._states: dict[Choice, MemoryParts] = {}
        self._kept: dict[Choice, int] = {}

    def of(self, choice: Choice) -> int:
        """The bound of one choice; it is never above the bytes of its plan."""
        micro, micro_batches = _micro_batches(self.workload, self.packs, choice, self.target)
        states, kept = self._states_of(choice), self._kept_of(choice, micro)
        per_stage = choice.chunks or chunks_per_rank(choice.schedule)
        in_flight = 1
        if choice.stages > 1:
            _, in_flight = in_flight_formula(choice.schedule, 0, choice.stages, per_stage, micro_batches)
        # Gradients are there once a backward pass has run; later as many micro-batches are in flight as before it.
        gradients = states.gradients if micro_batches >= 2 * choice.stages else 0
        return states.weights + states.adapter + states.optimizer + states.average + gradients + in_flight * kept

    def _states_of(self, choice: Choice) -> MemoryParts:
        key = choice._replace(micro=1, recompute="none")
        if key not in self._states:
            own = replace(self.workload, recipe=key.recipe(self.workload.recipe))
            layout = layout_of(own.recipe.parallel, self.target.cluster.ranks)
            self._states[key] = rank_states(own, layout, device_type=self.target.device_type).parts
        return self._states[key]

    def _kept_of(self, choice: Choice, micro: int) -> int:
        """Bytes that the cheaper chunks of the first stage keep of a micro-batch."""
        key = choice._replace(micro=micro, shard="none", replicate=1)
        if key not in self._kept:
            own = replace(self.workload, recipe=key.recipe(self.workload.recipe))
            own, chunks = own.dealt_to(_data_ranks(choice, self.target)), own.chunks(0)
            self._kept[key] = min(
                chunks_step(
                    own, replace(chunks, local=(chunk,)), self.target.device_type, self.target.kernels, micro
                ).activations.kept
                for chunk in chunks.local
            )
        return self._kept[key]


def _data_ranks(choice: Choice, target: Target) -> int:
    return target.cluster.ranks // (choice.tensor * choice.context * choice.stages)


def _micro_batches(workload: Workload, packs: int, choice: Choice, target: Target) -> tuple[int, int]:
    """(packed sequences of a micro-batch, micro-batches of a rank in a step). packs: those of a step."""
    data = _data_ranks(choice, target)
    if workload.lengths.trees is not None:
        return replace(workload, recipe=choice.recipe(workload.recipe)).micro_batches(choice.micro, data)
    per_step = -(-packs // data)
    micro = min(choice.micro, per_step)
    return micro, -(-per_step // micro)
