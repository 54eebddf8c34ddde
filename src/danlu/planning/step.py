"""The plan of a step: each stage's memory, seconds and traffic, from one walk over the actions that it runs. No torch.

Seconds of operations are those of `chunk_costs`, which a pipeline's schedule puts in their places; collectives that a
rank waits for are added to them, and those that computation hides are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from danlu.core.memory_parts import MemoryParts
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.parallel.layout import Layout
from danlu.parallel.schedules import Action, schedule, unsplit
from danlu.parallel.schedules.schedule import order_of_rank
from danlu.planning.chunk_costs import LayerTimes, mean_batch, model_seconds
from danlu.planning.flops import DecoderFlops
from danlu.planning.host_memory import host_bytes
from danlu.planning.pipeline_split import num_chunks
from danlu.planning.plan_cache import PlanCache, StageStates
from danlu.planning.primitives import PassSeconds
from danlu.planning.rank_memory import RankStates, micro_batches_in_flight
from danlu.planning.rollout_lengths import draws_answers
from danlu.planning.stage_collectives import SILENT, StageCollectives, stage_collectives
from danlu.planning.step_plan import HostBytes, RankMemory, RlSeconds, StagePlan, StepPlan, StepSeconds
from danlu.planning.step_walk import ChunkCost, RankCost, WalkBytes, peak_bytes
from danlu.planning.target import Target
from danlu.planning.workload import Workload


def plan_step(
    workload: Workload, layout: Layout, target: Target, times: LayerTimes | None = None, *, micro: int | None = None
) -> StepPlan:
    """The plan of a step.

    times: known seconds of layers; None: those at the target's speeds. micro: packed sequences of a micro-batch in
    place of the recipe's. Raises RecipeError where links are needed and not known.
    """
    return StepPlanner(workload, layout, target, PlanCache(workload, target, times), micro).plan()


def micro_batch(workload: Workload, layout: Layout, target: Target, cache: PlanCache | None = None) -> int:
    """Packed sequences of a micro-batch: as the recipe says, or the most with a step that fits on every stage; at least
    the smallest one.

    Raises RecipeError where `batch.memory` does not hold the smallest one.
    """
    recipe = workload.recipe
    per_step = -(-recipe.batch.packs(recipe.data.max_length) // layout.data)
    if recipe.batch.micro != "auto":
        return workload.micro_batches(recipe.batch.micro, layout.data)[0]
    from danlu.planning.automatic_micro_batch import automatic_micro_batch

    cache = cache or PlanCache(workload, target)

    def memory(micro: int) -> list[StageBytes]:
        return StepPlanner(workload, layout, target, cache, micro).stage_memory()

    return automatic_micro_batch(workload, layout, target, per_step, memory)


class StageBytes(NamedTuple):
    """The memory of a stage's process, or of one device of a device map, in bytes."""

    fixed: int
    """Bytes that its micro-batches do not change: weights, gradients, optimizer state."""
    peak: int
    """The most at once in a step."""
    room: int
    """Bytes that it may take; 0 where that is not known."""
    device: str = ""


def stage_memory(workload: Workload, layout: Layout, target: Target, micro: int) -> list[StageBytes]:
    """The memory of each stage at the peak of a step with micro-batches of so many packed sequences, without that of
    rollouts."""
    return StepPlanner(workload, layout, target, PlanCache(workload, target), micro).stage_memory()


class StepPlanner:
    """The parts of a step's plan, each computed when it is asked for first."""

    def __init__(
        self, workload: Workload, layout: Layout, target: Target, cache: PlanCache, micro: int | None = None
    ) -> None:
        self.micro = micro or micro_batch(workload, layout, target, cache)
        workload = workload.dealt_to(layout.data)
        if workload.recipe.memory.recompute.kind == "planned":
            from danlu.planning.planned_kinds import planned_kinds

            workload = replace(workload, planned_kinds=planned_kinds(workload, target.kernels, target.speeds))
        self.workload, self.layout, self.target, self._cache = workload, layout, target, cache
        self.micro_batches = workload.micro_batches(self.micro, layout.data)[1]
        self._memory: dict[int, RankMemory] = {}

    def plan(self) -> StepPlan:
        """Returns the whole plan."""
        layout, seconds = self.layout, self._step_seconds()
        total = None if seconds is None else seconds.total
        return StepPlan(
            layout,
            self.micro,
            self.micro_batches,
            self._stage_plans(),
            seconds,
            tokens=self._tokens(),
            flops=self._flops(self.micro) * self.micro_batches * layout.data,
            rollout=self._rollout(total),
            assumptions=tuple(self._assumptions()),
        )

    def _rollout(self, step_s: float | None) -> RlSeconds | None:
        """The seconds from one rollout to the next; step_s: of a step, where speeds are known."""
        if not draws_answers(self.workload.recipe):
            return None
        from danlu.planning.rl_phases import planned_rollout  # here: most recipes draw no answers

        return planned_rollout(self.workload, self.layout, self.target, self.micro, step_s)

    def _stage_plans(self) -> tuple[StagePlan, ...]:
        if self.workload.recipe.parallel.device_map is not None:  # one process, with memory on each of its devices
            return tuple(StagePlan(each, ()) for each in self._device_memory[1])
        return tuple(
            StagePlan(replace(self.memory(stage), host=self._host_bytes(stage)), own.traffic)
            for stage, own in enumerate(self._collectives)
        )

    def stage_memory(self) -> list[StageBytes]:
        """The memory of each stage at the peak of the step, without that of rollouts."""
        if self.workload.recipe.parallel.device_map is not None:
            fixed, memory = self._device_memory
        else:
            fixed = [own.states.parts for own in self._stages]
            memory = [self._memory_of_step(stage) for stage in range(self.layout.pipeline)]
        return [
            StageBytes(parts.total, own.allocated, self.target.room_bytes(own.device), own.device)
            for parts, own in zip(fixed, memory, strict=True)
        ]

    @cached_property
    def seconds(self) -> float:
        """The seconds of the step. Only where speeds are known."""
        section, updates = self.workload.recipe.parallel.pipeline, self._updates
        if section.stages == 1:
            (cost,) = self._costs
            return self.micro_batches * (cost.forward + cost.input + cost.weight) + updates[0]
        from danlu.planning.pipeline_seconds import pipeline_seconds  # which one stage does not need

        per_stage = num_chunks(section) // section.stages
        return pipeline_seconds(section.schedule, section.stages, per_stage, self.micro_batches, self._costs, updates)

    @property
    def least_seconds(self) -> float:
        """A lower bound of `seconds`, in less time (`pipeline_bounds`)."""
        section = self.workload.recipe.parallel.pipeline
        if section.stages == 1:
            return self.seconds
        from danlu.planning.pipeline_bounds import lower_bound

        per_stage = num_chunks(section) // section.stages
        update = min(self._updates)
        return lower_bound(section.schedule, section.stages, per_stage, self.micro_batches, self._costs, update)

    def memory(self, stage: int) -> RankMemory:
        """The memory of a stage's process at the peak of a step, or of a rollout, in which it answers itself; without
        that of the host."""
        if stage not in self._memory:
            states, of_step = self._stages[stage].states, self._memory_of_step(stage)
            peaks = [of_step, *self._while_answering(states)]
            self._memory[stage] = max(peaks, key=lambda memory: memory.allocated)
        return self._memory[stage]

    def _while_answering(self, states: RankStates) -> Iterator[RankMemory]:
        """The memory at the peak of a rollout, where the process of these states has one."""
        if draws_answers(self.workload.recipe):
            from danlu.planning.rollout_memory import memory_while_answering  # here: as `_rollout`

            answering = memory_while_answering(self.workload, states, self.layout, self.target.device_type)
            if answering is not None:
                yield answering

    def _memory_of_step(self, stage: int) -> RankMemory:
        states, costs = self._stages[stage].states, [self._bytes] * self._fewest
        return _memory(states, peak_bytes(self._lists[stage], costs, self._rank_cost(states)))

    def _host_bytes(self, stage: int) -> HostBytes:
        states, workload = self._stages[stage], self.workload
        own = host_bytes(workload, states.states, self.layout, self.target.device_type)
        if not self._copies_activations:
            return own
        copied = sum(self._cache.copied_of(workload, states, self._largest))
        in_flight = min(self.micro_batches, micro_batches_in_flight(workload.recipe.parallel.pipeline, stage))
        return replace(own, step=own.step + math.ceil(in_flight * copied))

    @cached_property
    def _device_memory(self) -> tuple[list[MemoryParts], list[RankMemory]]:
        """The bytes of each device of a device map that micro-batches do not change, and its memory at its peak."""
        from danlu.planning.device_memory import device_memory

        return device_memory(self.workload, self._stages[0].states, self.target, self._largest, self._fewest)

    def may_fit(self, most_bytes: int) -> bool:
        """Whether the first and the last stage might take no more than so many bytes, were there no messages: in less
        time."""
        stages = self.layout.pipeline
        if stages == 1 or not self._fits_host:
            return self.fits(most_bytes)
        return all(self._without_messages(stage).allocated <= most_bytes for stage in (0, stages - 1))

    def _without_messages(self, stage: int) -> RankMemory:
        """The memory of a stage's process at the peak of a step, at the least."""
        section, states = (
            self.workload.recipe.parallel.pipeline,
            self._cache.stage_of(self.workload, self.layout, stage),
        )
        per_stage = num_chunks(section) // section.stages
        costs = self._cache.costs_of(self.workload, self.layout, states, self._largest)
        local = self.workload.chunks(stage).local
        own = {
            chunk: replace(cost, frozen_message=0, message=cost.message if chunk + 1 in local else 0)
            for chunk, cost in zip(local, costs, strict=True)
        }
        every = [own.get(chunk, ChunkCost()) for chunk in range(num_chunks(section))]
        order = order_of_rank(section.schedule, section.stages, per_stage, self._fewest, stage)
        return _memory(states.states, peak_bytes(order, [every] * self._fewest, self._rank_cost(states.states)))

    def fits(self, most_bytes: int) -> bool:
        """Whether no stage takes more than so many bytes, and what is offloaded no more than the host has."""
        first = (0, self.layout.pipeline - 1)  # which have the embedding, most in flight, and the head
        stages = dict.fromkeys((*first, *range(self.layout.pipeline)))
        return self._fits_host and all(self.memory(stage).allocated <= most_bytes for stage in stages)

    @cached_property
    def _fits_host(self) -> bool:
        if not self.workload.recipe.memory.offload or self.target.device_type == "cpu":
            return True
        most = max(self._host_bytes(stage).step for stage in range(self.layout.pipeline))
        return most <= self.target.host_room_bytes

    @cached_property
    def _stages(self) -> list[StageStates]:
        return [self._cache.stage_of(self.workload, self.layout, stage) for stage in range(self.layout.pipeline)]

    @cached_property
    def _chunk_seconds(self) -> list[PassSeconds] | None:
        if self._cache.times is None:
            return None
        seconds = model_seconds(self.workload, self.micro, self.target, self._cache.times)
        return [seconds.of(span) for span in self.workload.chunks(0).layers]

    @property
    def _copies_activations(self) -> bool:
        """Whether activations of a card wait in the host's memory."""
        return "activations" in self.workload.recipe.memory.offload and self.target.device_type != "cpu"

    @cached_property
    def _copying_seconds(self) -> list[PassSeconds] | None:
        """The same with what waits for activations to be copied to the host and back."""
        seconds, workload = self._chunk_seconds, self.workload
        if seconds is None or not self._copies_activations:
            return seconds
        from danlu.planning.offload_seconds import pass_seconds  # here: few recipes offload

        copying = [*seconds]
        for stage, states in enumerate(self._stages):
            copied = self._cache.copied_of(workload, states, self.micro)
            for chunk, count in zip(workload.chunks(stage).local, copied, strict=True):
                copying[chunk] = pass_seconds(seconds[chunk], count, self.target.cluster.card)
        return copying

    @cached_property
    def _collectives(self) -> list[StageCollectives]:
        """The collectives of each stage; without seconds of layers their bytes alone."""
        alike: dict[int, StageCollectives] = {}
        collectives = []
        for stage, states in enumerate(self._stages):
            if id(states) not in alike:
                alike[id(states)] = self._collectives_of(stage)
            collectives.append(alike[id(states)])
        return collectives

    def _collectives_of(self, stage: int) -> StageCollectives:
        seconds, local = self._chunk_seconds, self.workload.chunks(stage).local
        return stage_collectives(
            self.workload,
            self.layout,
            stage,
            self.micro,
            self.micro_batches,
            None if seconds is None else [seconds[chunk] for chunk in local],
            self.target.known_links,
        )

    @cached_property
    def _largest(self) -> int:
        """Packed sequences that are as long as the longest micro-batch."""
        if self.workload.recipe.stage == "rl":  # prompts have trees of all their answers, longer than a sequence
            from danlu.planning.answer_trees import largest_micro_batch  # here: as `_rollout`

            return largest_micro_batch(self.workload, self.micro, self.layout.data)
        return self.micro

    @cached_property
    def _bytes(self) -> list[ChunkCost]:
        """The cost of each chunk of the model in bytes alone."""
        costs = dict[int, ChunkCost]()
        for stage, states in enumerate(self._stages):
            local = self.workload.chunks(stage).local
            costs |= zip(local, self._cache.costs_of(self.workload, self.layout, states, self._largest), strict=True)
        return [costs[chunk] for chunk in sorted(costs)]

    @cached_property
    def _costs(self) -> list[ChunkCost]:
        """The cost of each chunk of the model, with its seconds."""
        if (seconds := self._copying_seconds) is None:
            return self._bytes
        costs = list(self._bytes)
        for stage, collectives in enumerate(self._collectives):
            for chunk in self.workload.chunks(stage).local:
                costs[chunk] = timed(costs[chunk], seconds[chunk], collectives)
        return costs

    def _rank_cost(self, states: RankStates) -> RankCost:
        """Whether parameters stay gathered through a step, and the versions of weights that micro-batches in flight use
        (PipeDream)."""
        trained = FLOAT32_BYTES * sum(map(math.prod, states.trained.values()))
        return RankCost(
            keeps_gathered=self.workload.recipe.parallel.shard in ("zero1", "zero2"),
            trained=trained,
            weight_delay=states.parts.stash // max(1, trained),
        )

    @property
    def _updates(self) -> list[float]:
        """Seconds of each stage's update, with the collectives in front of it that nothing hides."""
        updates = [
            own.update.forward + of_stage.at_end for own, of_stage in zip(self._stages, self._collectives, strict=True)
        ]
        return [seconds + self._shards_seconds(stage) for stage, seconds in enumerate(updates)]

    def _shards_seconds(self, stage: int) -> float:
        """Seconds by which a step is longer for shards of parameters that lie in the host's memory."""
        seconds, workload = self._chunk_seconds, self.workload
        if seconds is None or "parameters" not in workload.recipe.memory.offload:
            return 0.0
        from danlu.planning.offload_seconds import shards_seconds

        chunks = [seconds[chunk] for chunk in workload.chunks(stage).local]
        states, card = self._stages[stage].states, self.target.cluster.card
        return shards_seconds(workload, self.layout, states, self.micro_batches, card, chunks)

    @property
    def _fewest(self) -> int:
        """The fewest micro-batches of a step with the same peak of memory on every stage."""
        section = self.workload.recipe.parallel.pipeline
        if section.stages == 1:  # the second one finds the gradients of the first
            return min(self.micro_batches, 2)
        from danlu.planning.pipeline_bounds import representative

        return representative(section.schedule, section.stages, self.micro_batches)

    @cached_property
    def _lists(self) -> Sequence[Sequence[Action]]:
        section = self.workload.recipe.parallel.pipeline
        if section.stages == 1:
            return (unsplit(self._fewest),)
        return schedule(section.schedule, section.stages, num_chunks(section) // section.stages, self._fewest)

    def _step_seconds(self) -> StepSeconds | None:
        """The seconds of the step, with the operations of the stage that computes longest."""
        seconds, micro_batches = self._copying_seconds, self.micro_batches
        if seconds is None:
            return None
        by_stage = []
        for stage, own in enumerate(self._stages):
            kinds: dict[str, float] = defaultdict(float)
            for chunk in self.workload.chunks(stage).local:
                for kind, of_kind in seconds[chunk].by_kind.items():
                    kinds[kind] += micro_batches * of_kind
                kinds["accumulation"] += (micro_batches - 1) * seconds[chunk].accumulation
            for kind, of_kind in own.update.by_kind.items():
                kinds[kind] += of_kind
            if shards := self._shards_seconds(stage):
                kinds["offload"] += shards
            by_stage.append(dict(kinds))
        waiting = self._collectives
        busy = [sum(kinds.values()) + waited.exposed for kinds, waited in zip(by_stage, waiting, strict=True)]
        busiest = max(range(len(busy)), key=busy.__getitem__)
        return StepSeconds(
            compute=by_stage[busiest],
            communication=waiting[busiest].by_axis,
            exposed=waiting[busiest].exposed,
            bubble=max(0.0, self.seconds - busy[busiest]),
            total=self.seconds,
            extrapolated=any(each.extrapolated for each in seconds) or any(each.extrapolated for each in waiting),
        )

    def _flops(self, micro: int) -> int:
        """Operations of one micro-batch over the ranks that share its tokens."""
        recipe, batch = self.workload.recipe, mean_batch(self.workload, micro, self.target)
        context = recipe.parallel.context.size
        lengths = [context * run.tokens for document in batch.documents for run in document]
        targets = sum(lengths) if batch.targets is None else context * batch.targets
        if self.workload.config.task != "causal-lm":
            targets = 0
        return DecoderFlops(self.workload.config).training(lengths, targets, frozen=recipe.adapter is not None)

    def _tokens(self) -> int:
        """Tokens of a step over all processes: of full packs, or of the mean rows."""
        recipe, data = self.workload.recipe, self.layout.data
        if (rows := self.workload.row_batches) is not None:
            return rows.step_tokens
        return -(-recipe.batch.packs(recipe.data.max_length) // data) * data * recipe.data.max_length

    def _assumptions(self) -> list[str]:
        said = []
        if self.workload.lengths.documents is None and self.workload.recipe.stage != "rl":
            length = self.workload.recipe.data.max_length
            said.append(f"every packed sequence is one document of data.max_length ({length}) tokens")
        if self.workload.lengths.assumption:
            said.append(self.workload.lengths.assumption)
        if self.workload.recipe.fp8 is not None:
            said.append("products in 8 bits take as long as those in the type of activations")
        if kinds := self.workload.planned_kinds:
            counts = ", ".join(f"{kind} of {count}" for kind, count in Counter(kinds).items())
            said.append(f"memory.recompute: planned chooses by expected seconds ({counts} layers); a run measures them")
        return said


def timed(cost: ChunkCost, seconds: PassSeconds, collectives: StageCollectives = SILENT) -> ChunkCost:
    """A chunk's cost with its seconds. Sums of gradients are taken as if every micro-batch had them.

    collectives: those of its stage; half of the waiting is in the forward pass, half in the backward pass.
    """
    return replace(
        cost,
        forward=seconds.forward + collectives.of_pass / 2,
        input=seconds.recompute + seconds.backward_input + collectives.of_pass / 2,
        weight=seconds.backward_weight + seconds.accumulation,
        send=collectives.of_message,
    )


def _memory(states: RankStates, walked: WalkBytes) -> RankMemory:
    """The memory of a stage's process at the peak of its step."""
    parts = replace(
        states.parts,
        activations=walked.activations + walked.queue,
        logits=walked.logits,
        gathered=walked.gathered,
        gradients=walked.gradients,
        stash=walked.stash,
    )
    return RankMemory(
        parts,
        states.by_role,
        communication=walked.messages,
    )
