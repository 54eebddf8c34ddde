"""The choices of a search for layouts, and the space of all that it looks at. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from danlu.models.config import ModelConfig
from danlu.parallel.layout import divisors
from danlu.parallel.schedules import chunks_per_rank, schedule_problems
from danlu.planning.layout_problems import models_problems
from danlu.planning.pipeline_split import split_problems
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe
from danlu.recipe.sections import Parallel, Pipeline, Recompute

_LONG = 32_768
"""Tokens of a packed sequence from which on context ranks are tried."""
_CHUNKS = (2, 3, 4, 5, 6, 8)
"""Chunks of a stage that are tried with the interleaved schedule."""
Shard = Literal["none", "zero1", "zero2", "zero3"]
Method = Literal["ring", "gather", "ulysses"]
Kind = Literal["none", "elementwise", "selective", "full"]
Offload = tuple[Literal["parameters", "optimizer", "activations"], ...]
_OFFLOADS: tuple[Offload, ...] = (
    *((), ("optimizer",), ("activations",), ("optimizer", "activations")),
    *(("parameters",), ("parameters", "activations")),  # whose optimizer state lies with them
)


class Choice(NamedTuple):
    """A layout with the settings that decide its memory and time; smaller ones come first where plans are equal."""

    tensor: int = 1
    sequence: bool = False
    context: int = 1
    method: Method = "ring"
    """The exchange of context ranks."""
    expert: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    """Chunks of a stage; None: the schedule's default."""
    shard: Shard = "none"
    replicate: int = 1
    micro: int = 1
    recompute: Kind = "none"
    offload: Offload = ()
    """Parts that are offloaded in addition to those of the recipe."""

    def data_ranks(self, ranks: int) -> int:
        """The data ranks of so many processes."""
        return ranks // (self.tensor * self.context * self.stages)

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings; its other keys stay."""
        parallel = recipe.parallel.model_copy(update=self.parallel(recipe.parallel))
        kept = {"recompute": Recompute(kind=self.recompute), "offload": [*recipe.memory.offload, *self.offload]}
        memory = recipe.memory.model_copy(update=kept)
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
            "context": section.context.model_copy(update={"size": self.context, "method": self.method, "ulysses": 1}),
            "pipeline": pipeline if self.stages > 1 else Pipeline(),
        }

    def overrides(self) -> list[str]:
        """The settings as key=value of a command, without those that are defaults."""
        pairs = {
            "parallel.tensor": (self.tensor, 1),
            "parallel.sequence": (str(self.sequence).lower(), "false"),
            "parallel.context.size": (self.context, 1),
            "parallel.context.method": (self.method, "ring"),
            "parallel.expert": (self.expert, 1),
            "parallel.pipeline.stages": (self.stages, 1),
            "parallel.pipeline.schedule": (self.schedule, self.schedule if self.stages == 1 else None),
            "parallel.pipeline.chunks": (self.chunks, None),
            "parallel.shard": (self.shard, "none"),
            "parallel.replicate": (self.replicate, 1),
            "batch.micro": (self.micro, None),
            "memory.recompute": (self.recompute, "none"),
            "memory.offload": (f"[{','.join(self.offload)}]", "[]"),
        }
        return [f"{key}={value}" for key, (value, default) in pairs.items() if value != default]


@dataclass(frozen=True)
class Space:
    """The values that a search tries for each setting; those that do not go together are left out."""

    tensor: tuple[int, ...]
    sequence: tuple[bool, ...] = (True, False)
    """Whether tensor ranks share out the tokens outside of sublayers."""
    context: tuple[int, ...] = (1,)
    methods: tuple[Method, ...] = ("ring",)
    expert: tuple[int, ...] = (1,)
    stages: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int | None], ...] = (("1f1b", None),)
    """Schedules of a pipeline with their chunks of a stage."""
    shards: tuple[Shard, ...] = ("none", "zero1", "zero2", "zero3")
    replicates: tuple[int, ...] | None = None
    """Replicas of a sharded model (hybrid sharding); None: every divisor of the data ranks."""
    micro: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[Kind, ...] = ("none", "selective", "full")
    offloads: tuple[Offload, ...] = ((),)
    """Parts that are offloaded where nothing fits without, none of them first. Of those of one choice the ones count
    that no smaller one makes unneeded: it fits as well, in no more seconds."""

    @classmethod
    def of(cls, workload: Workload, target: Target) -> Space:
        """All degrees that divide the ranks; tensor ranks within a node, context ranks for long documents alone.

        Left out are other kinds of recomputation, the methods of context ranks but the ring, and the schedules that
        others beat (naive, gpipe, dualpipev) or that train something else (pipedream). A recipe that offloads something
        says all that is offloaded.
        """
        cluster, config = target.cluster, workload.config
        degrees = tuple(divisors(cluster.ranks))
        layers = len(config.layers)
        is_long = workload.recipe.data.max_length >= _LONG
        interleaved = tuple(("interleaved", chunks) for chunks in _CHUNKS if chunks * 2 <= layers)
        return cls(
            tensor=tuple(degree for degree in degrees if degree <= cluster.cards_per_node),
            context=degrees if is_long else (1,),
            expert=tuple(degree for degree in degrees if degree == 1 or config.has_experts),
            stages=tuple(degree for degree in degrees if degree <= layers),
            schedules=(("1f1b", None), *interleaved, ("zb-h1", None), ("zbv", None)),
            offloads=_OFFLOADS if target.device_type != "cpu" and not workload.recipe.memory.offload else ((),),
        )

    def choices(self, workload: Workload, ranks: int) -> Iterator[Choice]:
        """Yields the choices that divide the ranks, each once."""
        for cut in self.cuts(workload, ranks):
            for micro_batch in self.micro_batches(workload, cut, ranks):
                for recompute in self.recompute:
                    for scheduled in self.scheduled(workload, micro_batch._replace(recompute=recompute), ranks):
                        for shared in self.sharings(workload, scheduled, ranks):
                            yield from (shared._replace(offload=offload) for offload in self.offloads)

    def cuts(self, workload: Workload, ranks: int) -> Iterator[Choice]:
        """Yields the ways to divide the model and its tokens among the ranks that have one copy.

        Their states are sharded where the space has that, which computes least; `sharings` sets it.
        """
        shard = next((each for each in self.shards if each != "none"), self.shards[0])
        degrees = self.tensor, self.sequence, self.context, self.methods, self.expert, self.stages
        for tensor, sequence, context, method, expert, stages in itertools.product(*degrees):
            if (tensor == 1 and sequence != self.sequence[0]) or (context == 1 and method != self.methods[0]):
                continue  # which are not read
            data, rest = divmod(ranks, tensor * context * stages)
            cut = Choice(tensor, sequence and tensor > 1, context, method if context > 1 else "ring", expert, stages)
            cut = cut._replace(shard=shard)
            if not rest and (data * context) % expert == 0 and not _misfit(workload, cut):
                yield cut

    def micro_batches(self, workload: Workload, cut: Choice, ranks: int) -> Iterator[Choice]:
        """Yields a cut with each size of micro-batches up to the sequences of a rank."""
        packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        per_step = -(-packs // cut.data_ranks(ranks))
        for micro in self.micro:
            if micro <= per_step or micro == min(self.micro):
                yield cut._replace(micro=micro)

    def scheduled(self, workload: Workload, choice: Choice, ranks: int) -> Iterator[Choice]:
        """Yields a choice with each schedule that it can have."""
        if choice.stages == 1:
            yield choice
            return
        packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        count = -(-packs // choice.data_ranks(ranks) // choice.micro)
        for schedule, chunks in self.schedules:
            per_stage = chunks or chunks_per_rank(schedule)
            is_possible = next(schedule_problems(schedule, choice.stages, per_stage, count), None) is None
            if is_possible and not _unsplit(workload.config, choice.stages, schedule, chunks):
                yield choice._replace(schedule=schedule, chunks=chunks)

    def sharings(self, workload: Workload, choice: Choice, ranks: int) -> Iterator[Choice]:
        """Yields a choice with each way to shard states among data and context ranks.

        No two are the same: one rank has whole states, and zero2 is zero1 where both reduce gradients as often.
        """
        if choice.data_ranks(ranks) * choice.context == 1:
            yield choice._replace(shard=min(self.shards), replicate=1)
            return
        for shard in self.shards:
            if shard == "none":
                yield choice._replace(shard=shard, replicate=1)
            elif shard != "zero2" or "zero1" not in self.shards or not _is_zero1(workload, choice):
                for replicate in self._replicas(choice, ranks):
                    yield choice._replace(shard=shard, replicate=replicate)

    def smaller_offloads(self, choice: Choice) -> Iterator[Choice]:
        """Yields a choice with each part of what it offloads that is in the space."""
        for offload in self.offloads:
            if set(offload) < set(choice.offload):
                yield choice._replace(offload=offload)

    def fewest_states(self, choice: Choice, ranks: int) -> Iterator[Choice]:
        """Yields those of `sharings` of which one has the fewest bytes by `Bounds.bytes`.

        Whole states have nothing gathered. Of sharded ones the last kind has no more of anything than those before it,
        and more ranks have less of each, but for experts of one rank alone, which nobody gathers: those of the most
        replicas.
        """
        if "none" in self.shards:
            yield choice._replace(shard="none", replicate=1)
        if (most := max(self.shards)) == "none":
            return
        replicas = list(self._replicas(choice, ranks))
        for replicate in dict.fromkeys(replicas[:1] if choice.expert == 1 else [*replicas[:1], *replicas[-1:]]):
            yield choice._replace(shard=most, replicate=replicate)

    def _replicas(self, choice: Choice, ranks: int) -> Iterator[int]:
        """Yields the numbers of replicas that leave each of them several ranks, rising."""
        data = choice.data_ranks(ranks)
        for replicate in divisors(data) if self.replicates is None else sorted(self.replicates):
            shards, rest = divmod(data, replicate)
            if not rest and shards * choice.context > 1 and shards * choice.context % choice.expert == 0:
                yield replicate


def _is_zero1(workload: Workload, choice: Choice) -> bool:
    """Whether zero2 does what zero1 does: both leave gradients whole between micro-batches, or neither does."""
    kinds: tuple[Shard, ...] = ("zero1", "zero2")
    both = [choice._replace(shard=shard).recipe(workload.recipe).parallel for shard in kinds]
    return both[0].reduces_each_micro_batch == both[1].reduces_each_micro_batch


def _misfit(workload: Workload, cut: Choice) -> bool:
    """Whether models of the workload cannot be cut so, in any schedule."""
    own = replace(workload, recipe=cut.recipe(workload.recipe))
    return next(models_problems(own), None) is not None


def _unsplit(config: ModelConfig, stages: int, schedule: str, chunks: int | None) -> bool:
    """Whether the layers cannot be split among the chunks."""
    section = Pipeline(stages=stages, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    return next(split_problems(section, config), None) is not None
