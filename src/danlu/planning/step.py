"""The plan of a step: each stage's memory, seconds and traffic, from one walk over the actions that it runs. No torch.

Seconds of operations are those of `chunk_costs`, which a pipeline's schedule puts in their places; collectives that a
rank waits for are added to them, and those that computation hides are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from danlu.models.chunks import Chunks
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.parallel.collective_traffic import BUCKET_BYTES
from danlu.parallel.layout import Layout
from danlu.parallel.schedules import Action, schedule, unsplit
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.answer_trees import largest_micro_batch
from danlu.planning.chunk_costs import LayerTimes, chunk_bytes, mean_batch, model_seconds
from danlu.planning.flops import DecoderFlops
from danlu.planning.host_memory import host_bytes
from danlu.planning.pipeline_bounds import representative
from danlu.planning.pipeline_split import num_chunks
from danlu.planning.primitives import PassSeconds
from danlu.planning.rank_memory import RankStates, rank_states
from danlu.planning.rl_phases import planned_rollout
from danlu.planning.rollout_memory import memory_while_answering
from danlu.planning.stage_collectives import SILENT, StageCollectives, stage_collectives
from danlu.planning.step_plan import RankMemory, StagePlan, StepPlan, StepSeconds
from danlu.planning.step_walk import ChunkCost, RankCost, StageWalk, step_events, walk
from danlu.planning.step_work import clip_work, update_work
from danlu.planning.target import Target
from danlu.planning.workload import Workload


def plan_step(
    workload: Workload, layout: Layout, target: Target, times: LayerTimes | None = None, *, micro: int | None = None
) -> StepPlan:
    """The plan of a step.

    times: known seconds of layers, which a search shares. micro: packed sequences of a micro-batch in place of the
    recipe's. Raises RecipeError where links are needed and not known.
    """
    plan = _Planner(workload, layout, target, times, micro).plan()
    assert plan is not None, "it has no bound"
    return plan


def plan_within(
    workload: Workload, layout: Layout, target: Target, times: LayerTimes, most_bytes: int
) -> StepPlan | None:
    """The plan of a step; None where a stage takes more than so many bytes, which is found before its seconds are."""
    return _Planner(workload, layout, target, times, None, most_bytes).plan()


def micro_batch(workload: Workload, layout: Layout, target: Target) -> int:
    """Packed sequences of a micro-batch: as the recipe says, or the most with a step that fits on every stage; at least
    the smallest one.

    Raises RecipeError where `batch.memory` does not hold the smallest one.
    """
    recipe = workload.recipe
    per_step = -(-recipe.batch.packs(recipe.data.max_length) // layout.data)
    if recipe.batch.micro != "auto":
        return workload.micro_batches(recipe.batch.micro, layout.data)[0]
    from danlu.planning.automatic_micro_batch import automatic_micro_batch

    return automatic_micro_batch(workload, layout, target, per_step, _Planner(workload, layout, target).stage_memory)


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
    return _Planner(workload, layout, target).stage_memory(micro)


@dataclass
class _Planner:
    workload: Workload
    layout: Layout
    target: Target
    times: LayerTimes | None = None
    micro: int | None = None
    most_bytes: int | None = None

    def __post_init__(self) -> None:
        self.workload = self.workload.dealt_to(self.layout.data)
        if self.workload.recipe.memory.recompute.kind == "planned":
            from danlu.planning.planned_kinds import planned_kinds

            kinds = planned_kinds(self.workload, self.target.kernels, self.target.speeds)
            self.workload = replace(self.workload, planned_kinds=kinds)

    def plan(self) -> StepPlan | None:
        workload, layout, recipe = self.workload, self.layout, self.workload.recipe
        speeds = self.target.training_speeds(compiled=recipe.compile)
        if self.times is None and speeds is not None:
            self.times = LayerTimes(speeds)
        micro = self.micro or micro_batch(workload, layout, self.target)
        micro_batches = workload.micro_batches(micro, layout.data)[1]
        states = self.states
        seconds = self._chunk_seconds(micro)
        collectives = self._collectives(seconds, micro, micro_batches)
        costs = self._costs(states, seconds, collectives, self._largest_sequences(micro))
        ends = [
            self._rank_cost(own, self._update(own).forward + of_stage.at_end)
            for own, of_stage in zip(states, collectives, strict=True)
        ]
        fewest = self._representative(micro_batches)
        walks = walk(self._lists(fewest), costs, ends)
        memory = [self._largest(state, own) for state, own in zip(states, walks, strict=True)]
        if recipe.parallel.device_map is not None:
            from danlu.planning.device_memory import device_memory

            _, memory = device_memory(workload, states[0], self.target, self._largest_sequences(micro), fewest)
        if self.most_bytes is not None and max(each.allocated for each in memory) > self.most_bytes:
            return None
        events = [list(own.events) for own in walks]
        if fewest < micro_batches:
            events = step_events(self._lists(micro_batches), costs, ends)
        of_step = self._seconds(seconds, collectives, events, states, micro_batches)
        return StepPlan(
            layout,
            micro,
            micro_batches,
            self._stage_plans(memory, events, collectives),
            of_step,
            tokens=self._tokens(),
            flops=self._flops(micro) * micro_batches * layout.data,
            rollout=planned_rollout(workload, layout, self.target, micro, None if of_step is None else of_step.total),
            assumptions=tuple(self._assumptions()),
        )

    def _stage_plans(
        self,
        memory: Sequence[RankMemory],
        events: Sequence[Sequence[TimelineEvent]],
        collectives: Sequence[StageCollectives],
    ) -> tuple[StagePlan, ...]:
        if self.workload.recipe.parallel.device_map is not None:  # one process, with memory on each of its devices
            return tuple(StagePlan(each, tuple(events[0]), ()) for each in memory)
        return tuple(
            StagePlan(of_rank, tuple(own), of_stage.traffic)
            for of_rank, own, of_stage in zip(memory, events, collectives, strict=True)
        )

    @cached_property
    def states(self) -> list[RankStates]:
        """The bytes of each stage that its micro-batches do not change."""
        stages, device_type = range(self.layout.pipeline), self.target.device_type
        return [rank_states(self.workload, self.layout, stage=stage, device_type=device_type) for stage in stages]

    def stage_memory(self, micro: int) -> list[StageBytes]:
        """The memory of each stage at the peak of a step with micro-batches of so many packed sequences."""
        workload, recipe, layout = self.workload, self.workload.recipe, self.layout
        micro_batches = workload.micro_batches(micro, layout.data)[1]
        largest, fewest = self._largest_sequences(micro), self._representative(micro_batches)
        if recipe.parallel.device_map is not None:
            from danlu.planning.device_memory import device_memory

            fixed, memory = device_memory(workload, self.states[0], self.target, largest, fewest)
        else:
            costs = self._costs(self.states, None, (), largest)
            walks = walk(self._lists(fewest), costs, [self._rank_cost(own, 0.0) for own in self.states])
            fixed = [own.parts for own in self.states]
            memory = [_memory(own, walked) for own, walked in zip(self.states, walks, strict=True)]
        return [
            StageBytes(parts.total, own.allocated, self.target.room_bytes(own.device), own.device)
            for parts, own in zip(fixed, memory, strict=True)
        ]

    def _largest_sequences(self, micro: int) -> int:
        """The packed sequences that have as many tokens as the largest micro-batch."""
        if self.workload.recipe.stage != "rl":
            return micro
        # Prompts have trees of all their answers, which are longer than a sequence.
        return largest_micro_batch(self.workload, micro, self.layout.data)

    def _largest(self, states: RankStates, own: StageWalk) -> RankMemory:
        """The memory at the peak of a step, or of a rollout, in which the process answers itself."""
        of_step, host = _memory(states, own), host_bytes(self.workload, states, self.layout, self.target.device_type)
        answering = memory_while_answering(self.workload, states, self.layout, self.target.device_type)
        fuller = of_step if answering is None or answering.allocated <= of_step.allocated else answering
        return replace(fuller, host=host)

    def _chunk_seconds(self, micro: int) -> list[PassSeconds] | None:
        if self.times is None:
            return None
        seconds = model_seconds(self.workload, micro, self.target, self.times)
        return [seconds.of(span) for span in self.workload.chunks(0).layers]

    def _collectives(
        self, seconds: Sequence[PassSeconds] | None, micro: int, micro_batches: int
    ) -> list[StageCollectives]:
        """The collectives of each stage; without seconds of layers their bytes alone."""
        return [
            stage_collectives(
                self.workload,
                self.layout,
                stage,
                micro,
                micro_batches,
                None if seconds is None else [seconds[chunk] for chunk in self.workload.chunks(stage).local],
                self.target.known_links,
            )
            for stage in range(self.layout.pipeline)
        ]

    def _costs(
        self,
        states: Sequence[RankStates],
        seconds: Sequence[PassSeconds] | None,
        collectives: Sequence[StageCollectives],
        micro: int,
    ) -> list[ChunkCost]:
        costs: dict[int, ChunkCost] = {}
        for stage, state in enumerate(states):
            chunks = self.workload.chunks(stage)
            for chunk in chunks.local:
                own = [each for each in state.tensors if _chunk_of(each.name, chunks) == chunk]
                cost = chunk_bytes(self.workload, chunks, chunk, micro, self.target, own)
                cost = replace(cost, reduce_buffer=self._reduce_buffer(cost.gradients))
                costs[chunk] = cost if seconds is None else timed(cost, seconds[chunk], collectives[stage])
        return [costs[chunk] for chunk in sorted(costs)]

    def _rank_cost(self, states: RankStates, update: float) -> RankCost:
        """The update's seconds, whether parameters stay gathered through a step, and the versions of weights that
        micro-batches in flight use (PipeDream)."""
        trained = FLOAT32_BYTES * sum(map(math.prod, states.trained.values()))
        return RankCost(
            update=update,
            keeps_gathered=self.workload.recipe.parallel.shard in ("zero1", "zero2"),
            trained=trained,
            weight_delay=states.parts.stash // max(1, trained),
        )

    def _reduce_buffer(self, gradients: int) -> int:
        """Bytes that the sum of a chunk's gradients over data ranks copies them to (`parallel.gradient_buckets`): one
        bucket at a time, or all of them in half precision."""
        section, layout = self.workload.recipe.parallel, self.layout
        if section.shard != "none" or layout.data * layout.context == 1:
            return 0
        return gradients // 2 if section.reduce == "bf16" else min(gradients, BUCKET_BYTES)

    def _representative(self, micro_batches: int) -> int:
        """The fewest micro-batches of a step with the same peak of memory on every stage."""
        section = self.workload.recipe.parallel.pipeline
        if section.stages == 1:  # the second one finds the gradients of the first
            return min(micro_batches, 2)
        return representative(section.schedule, section.stages, micro_batches)

    def _lists(self, micro_batches: int) -> Sequence[Sequence[Action]]:
        section = self.workload.recipe.parallel.pipeline
        if section.stages == 1:
            return (unsplit(micro_batches),)
        return schedule(section.schedule, section.stages, num_chunks(section) // section.stages, micro_batches)

    def _update(self, states: RankStates) -> PassSeconds:
        """The seconds of clipping and of the optimizer's step."""
        if self.times is None:
            return PassSeconds()
        shapes = states.trained
        recipe, device = self.workload.recipe, self.target.device_type
        work = [update_work(recipe.optimizer, shapes, device)]
        if recipe.gradient_clipping is not None:
            work.append(clip_work(sum(map(math.prod, shapes.values()))))
        return PassSeconds.of(work, self.times.speeds)

    def _seconds(
        self,
        seconds: Sequence[PassSeconds] | None,
        collectives: Sequence[StageCollectives],
        events: Sequence[Sequence[TimelineEvent]],
        states: Sequence[RankStates],
        micro_batches: int,
    ) -> StepSeconds | None:
        """The seconds of the step, with the operations of the stage that computes longest."""
        if seconds is None:
            return None
        by_stage = []
        for stage, state in enumerate(states):
            kinds: dict[str, float] = defaultdict(float)
            for chunk in self.workload.chunks(stage).local:
                for kind, of_kind in seconds[chunk].by_kind.items():
                    kinds[kind] += micro_batches * of_kind
                kinds["accumulation"] += (micro_batches - 1) * seconds[chunk].accumulation
            for kind, of_kind in self._update(state).by_kind.items():
                kinds[kind] += of_kind
            by_stage.append(dict(kinds))
        busy = [sum(kinds.values()) + waited.exposed for kinds, waited in zip(by_stage, collectives, strict=True)]
        busiest = max(range(len(busy)), key=busy.__getitem__)
        total = max(event.end_s for own in events for event in own)
        return StepSeconds(
            compute=by_stage[busiest],
            communication=collectives[busiest].by_axis,
            exposed=collectives[busiest].exposed,
            bubble=max(0.0, total - busy[busiest]),
            total=total,
            extrapolated=any(each.extrapolated for each in seconds) or any(each.extrapolated for each in collectives),
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
        if kinds := self.workload.planned_kinds:
            counts = ", ".join(f"{kind} of {count}" for kind, count in Counter(kinds).items())
            said.append(f"memory.recompute: planned chooses by expected seconds ({counts} layers); a run measures them")
        return said


def _chunk_of(name: str, chunks: Chunks) -> int:
    """The chunk of a stage that a parameter is counted with; of one that its chunks share the first."""
    chunk = chunks.of_parameter(name)
    return chunk if chunk in chunks.local else chunks.local[0]


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


def _memory(states: RankStates, own: StageWalk) -> RankMemory:
    """The memory of a stage's process at the peak of its step."""
    walked = own.parts
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
