"""Bounds of a search for layouts: the seconds and bytes that a choice takes at the least. Imports no torch.

The quantity that a layer of each kind adds is measured on the model with few layers (`thin_workload`), once for the
settings that it depends on; a bound of a choice is then a few sums.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from danlu.models.chunks import Chunks
from danlu.optim.state_shapes import average_bytes, optimizer_bytes
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.schedules import placement
from danlu.parallel.schedules.compute_order import micro_batches_per_round
from danlu.planning.activation_memory import ActivationBytes
from danlu.planning.choice import Choice, Shard
from danlu.planning.chunk_costs import ModelSeconds, model_seconds
from danlu.planning.collective_seconds import Work, each_collective_seconds
from danlu.planning.offload_seconds import LOCKED
from danlu.planning.pipeline_bounds import lower_bound
from danlu.planning.pipeline_simulation import in_flight_formula
from danlu.planning.plan_cache import PlanCache
from danlu.planning.primitives import PassSeconds
from danlu.planning.rank_memory import RankStates, chunks_step, gathered_bytes_of, rank_states
from danlu.planning.stage_collectives import StageCollectives, stage_collectives
from danlu.planning.step import timed
from danlu.planning.step_traffic import RankModel, data_weights
from danlu.planning.step_walk import ChunkCost
from danlu.planning.target import Target
from danlu.planning.thin_workload import PerLayer, ThinWorkloads
from danlu.planning.traffic import Weight, data_traffic
from danlu.planning.workload import Workload

_ALONE: tuple[tuple[int, ...], ...] = ((0,),)
_ROUNDING = 1e-10
"""The share by which sums may differ that are added in another order."""


@dataclass(frozen=True)
class Division:
    """The layers of a pipeline's chunks and stages, by their kinds."""

    spans: tuple[range, ...]
    """The layers of each chunk of the model."""
    local: tuple[tuple[int, ...], ...]
    """The chunks of each stage."""
    of_chunk: tuple[tuple[int, ...], ...]
    """The number of layers of each kind in each chunk."""

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """The number of layers of each kind in a stage."""
        return tuple(map(sum, zip(*(self.of_chunk[chunk] for chunk in self.local[stage]), strict=True)))

    @property
    def fewest(self) -> tuple[int, ...]:
        """The fewest layers of each kind in any stage."""
        return tuple(map(min, zip(*map(self.of_stage, range(len(self.local))), strict=True)))


class _Shared(NamedTuple):
    """A quantity of a process in which nothing is sharded: what each data rank has, and what data ranks would share."""

    whole: PerLayer
    dense: PerLayer
    experts: PerLayer

    def of(self, counts: Sequence[int], shards: int, expert_shards: int) -> float:
        """That of some layers at the least, where data ranks share it. counts: of each kind."""
        return self.whole.of(counts) + self.dense.of(counts) / shards + self.experts.of(counts) / expert_shards

    def outside(self, shards: int, expert_shards: int) -> float:
        """The same of what is outside of layers."""
        return self.whole.outside + self.dense.outside / shards + self.experts.outside / expert_shards


class _States(NamedTuple):
    """Bytes of a process that do not depend on its micro-batches."""

    others: _Shared
    """Weights, the state of the optimizer, the average."""
    gradients: _Shared
    first_stage: _Shared
    """The same of the first stage of several, of which what is outside of layers counts."""


def _state_bytes(workload: Workload, states: RankStates) -> tuple[float, ...]:
    """Bytes of weights, optimizer and average that each data rank has, and of those that data ranks would share, of
    experts apart; then the same of gradients.
    """
    section, parts = workload.recipe.optimizer, states.parts
    others = parts.weights + parts.adapter + parts.optimizer + parts.average
    # Of state in pages that of the largest parameter counts, which is smaller where that is sharded.
    is_paged = parts.optimizer < optimizer_bytes(section, states.trained, paged=False).state
    others -= parts.optimizer * is_paged
    shared, gradients = [0, 0], [0, 0]
    for each in states.tensors if others else ():  # nothing is left of what lies in the host's memory
        if each.whole.is_whole or not each.whole.is_parameter:
            continue
        shared[each.whole.of_experts] += each.bytes
        if each.whole.trained:
            own = optimizer_bytes(section, {each.name: each.shape}, paged=False)
            average = average_bytes([each.shape]) if parts.average else 0
            shared[each.whole.of_experts] += average + (0 if is_paged else own.state)
            gradients[each.whole.of_experts] += own.gradients
    return others - sum(shared), *shared, parts.gradients - sum(gradients), *gradients


def _in_flight(choice: Choice, kept: Sequence[float], micro_batches: int) -> list[int]:
    """The number of passes of each chunk of the first stage that it keeps activations of at once, at the least.

    kept: bytes of each chunk, of which the smallest counts where it is not known which are in flight.
    """
    if choice.stages == 1:
        return [1]
    per_stage = len(kept)
    _, count = in_flight_formula(choice.schedule, 0, choice.stages, per_stage, micro_batches)
    if choice.schedule != "interleaved":
        smallest = min(range(per_stage), key=kept.__getitem__)
        return [count * (chunk == smallest) for chunk in range(per_stage)]
    each = micro_batches_per_round(choice.stages, micro_batches)  # forward passes of a chunk in turn
    rounds, rest = divmod(count, each * per_stage)
    return [rounds * each + min(each, max(0, rest - chunk * each)) for chunk in range(per_stage)]


def _in_one_stage(choice: Choice) -> Choice:
    return choice._replace(stages=1, schedule="1f1b", chunks=None)


class Bounds:
    """Seconds and bytes that a step of a choice takes at the least; never more than its plan says."""

    def __init__(self, workload: Workload, target: Target, cache: PlanCache) -> None:
        assert cache.times is not None, "a search knows speeds"
        self.workload, self.target, self._times = workload, target, cache.times
        self._kinds = cache.kinds.of_policy
        self._thin = ThinWorkloads(workload, self._kinds)
        self._ranks = target.cluster.ranks
        self._packs = workload.recipe.batch.packs(workload.recipe.data.max_length)
        self._layers: dict[Hashable, ModelSeconds] = {}
        self._waits: dict[Hashable, PerLayer] = {}
        self._states: dict[Hashable, _States] = {}
        self._gathered: dict[Hashable, tuple[int, ...]] = {}
        self._kept: dict[Hashable, tuple[PerLayer, float]] = {}
        self._weights: dict[Hashable, list[Weight]] = {}
        self._divisions: dict[Hashable, Division] = {}
        self._in_flight: dict[Hashable, tuple[list[int], float]] = {}
        self._copies: dict[Hashable, tuple[list[int], list[float]]] = {}
        self._most_work: dict[Hashable, dict[Work | None, float]] = {}

    def quick(self, choice: Choice) -> float:
        """Seconds of the operations of all layers, shared evenly among the stages."""
        micro, micro_batches = self._micro_batches(choice)
        seconds = self._of_layers(choice, micro).total
        return micro_batches * (seconds.total + seconds.accumulation) / choice.stages * (1 - _ROUNDING)

    def waiting(self, choice: Choice) -> float:
        """The same with the seconds that layers wait for tensor ranks and for ranks with other experts."""
        micro, micro_batches = self._micro_batches(choice)
        waiting = self._waiting(choice, micro).of(self._counts(range(len(self._kinds))))
        return self.quick(choice) + micro_batches * waiting / choice.stages * (1 - _ROUNDING)

    def close(self, choice: Choice) -> float:
        """The same as the longest of some paths through the schedule of a pipeline."""
        if choice.stages == 1:
            return self.waiting(choice)
        micro, micro_batches = self._micro_batches(choice)
        seconds, waiting = self._of_layers(choice, micro), self._waiting(choice, micro)
        division = self._division(choice)
        known: dict[Hashable, ChunkCost] = {}
        costs = []
        for chunk, (span, counts) in enumerate(zip(division.spans, division.of_chunk, strict=True)):
            key = self._kinds[span.start : span.stop], chunk == 0, chunk == len(division.spans) - 1
            if key not in known:
                known[key] = timed(ChunkCost(), seconds.of(span), StageCollectives(of_pass=waiting.of(counts)))
            costs.append(known[key])
        per_stage = len(costs) // choice.stages
        return lower_bound(choice.schedule, choice.stages, per_stage, micro_batches, costs)

    def of_data_ranks(self, choice: Choice) -> float:
        """Seconds of collectives of data ranks that nothing hides, of the stage with the fewest layers.

        They come behind all other work of a step.
        """
        links = self.target.known_links
        if choice.data_ranks(self._ranks) * choice.context == 1 or links is None:
            return 0.0
        micro, micro_batches = self._micro_batches(choice)
        layout = self._layout(choice)
        section = choice.recipe(self.workload.recipe).parallel
        traffic = data_traffic(self._weights_of(choice, layout), layout, section, micro_batches=micro_batches)
        most = self._most_work_of(choice, micro, micro_batches)
        seconds = each_collective_seconds(tuple(traffic), links)
        return sum(max(0.0, each.seconds - most.get(each.hidden_by, 0.0)) for each in seconds) * (1 - _ROUNDING)

    def bytes(self, choice: Choice) -> float:
        """Bytes of the first stage: states, and what its micro-batches in flight keep."""
        _, micro_batches = self._micro_batches(choice)
        division = self._division(choice)
        states, layers, shards = self._states_of(choice), division.of_stage(0), self._shards(choice)
        outside = states.others if choice.stages == 1 else states.first_stage
        in_flight, activations = self._activations(choice)
        total = activations + states.others.of(layers, *shards) + outside.outside(*shards)
        gathered = [self._gathered_of(choice, division.of_chunk[chunk]) for chunk in division.local[0]]
        if choice.shard in ("zero1", "zero2"):  # of each chunk from its first forward to its last backward pass
            total += max(min(gathered), sum(own for count, own in zip(in_flight, gathered, strict=True) if count))
        else:
            total += min(gathered)
        # Gradients are there once a backward pass has run; later as many micro-batches are in flight as before it.
        if micro_batches < 2 * choice.stages:
            return total
        reduced = choice.recipe(self.workload.recipe).parallel.reduces_each_micro_batch
        return total + states.gradients.of(layers, *(shards if reduced else (1, 1)))

    def host_bytes(self, choice: Choice) -> float:
        """Bytes of activations of the first stage that a choice keeps in the host's memory."""
        if "activations" not in choice.offload:
            return 0.0
        counts, each = self._copied(choice)
        return sum(counts) * min(each)

    def copies(self, choice: Choice) -> float:
        """Seconds in which the first stage's activations are copied to the host and back."""
        if "activations" not in choice.offload:
            return 0.0
        micro_batches = self._micro_batches(choice)[1]
        rate = LOCKED * self.target.cluster.card.pcie
        return 2 * micro_batches * sum(self._copied(choice)[1]) / rate * (1 - _ROUNDING)

    def _copied(self, choice: Choice) -> tuple[list[int], list[float]]:
        """The number of passes of each chunk of the first stage in flight, and the bytes that each keeps."""
        key = choice._replace(expert=1, shard="none", replicate=1, offload=())
        if key not in self._copies:
            micro, micro_batches = self._micro_batches(key)
            division, kept = self._division(key), self._kept_of(key, micro)[0]
            each = [kept.of(division.of_chunk[chunk]) for chunk in division.local[0]]
            self._copies[key] = _in_flight(key, each, micro_batches), each
        return self._copies[key]

    def _activations(self, choice: Choice) -> tuple[list[int], float]:
        """The number of passes of each chunk of the first stage in flight, and the bytes that they keep, with those of
        a backward pass."""
        key = choice._replace(expert=1, shard="none", replicate=1, offload=())  # on which it does not depend
        if "activations" in self._offloaded(choice):  # next to nothing is known to stay
            key = key._replace(offload=("activations",))
        if key not in self._in_flight:
            micro, micro_batches = self._micro_batches(choice)
            division = self._division(choice)
            kept, transient = self._kept_of(choice, micro)
            if key.offload:
                kept, transient = PerLayer((0.0,) * len(kept.layers), 0.0), 0.0
            each = [kept.of(division.of_chunk[chunk]) for chunk in division.local[0]]
            counts = _in_flight(choice, each, micro_batches)
            self._in_flight[key] = counts, transient + sum(map(operator.mul, counts, each))
        return self._in_flight[key]

    def _offloaded(self, choice: Choice) -> set[str]:
        return {*self.workload.recipe.memory.offload, *choice.offload}

    def _shards(self, choice: Choice) -> tuple[int, int]:
        """The data and context ranks that share a parameter, and those that share experts."""
        if choice.shard == "none":
            return 1, 1
        shards = choice.data_ranks(self._ranks) // choice.replicate * choice.context
        return shards, max(1, shards // choice.expert)

    def _gathered_of(self, choice: Choice, counts: Sequence[int]) -> float:
        """Bytes of whole parameters of a chunk in its backward pass. counts: its layers of each kind."""
        if choice.shard == "none":
            return 0.0
        layers = self._gathered_layers(choice)
        if choice.shard == "zero3":
            own = [each for each, count in zip(layers, counts, strict=True) if count]
            return min(own, default=0) * min(sum(counts), 1 + self.workload.recipe.parallel.prefetch)
        return sum(count * each for count, each in zip(counts, layers, strict=True))

    def _gathered_layers(self, choice: Choice) -> tuple[int, ...]:
        """Bytes of a whole layer of each kind that is gathered from shards."""
        key = choice.tensor, choice.expert, self._shards(choice)[1] == 1
        if key not in self._gathered:
            alone = _in_one_stage(choice)
            own = replace(self._thin.base, recipe=alone.recipe(self.workload.recipe))
            layout = replace(self._layout(choice), pipeline=1)
            tensors = rank_states(own, layout, device_type=self.target.device_type).tensors
            by_layer = [[each for each in tensors if each.whole.layer == kind] for kind in range(max(self._kinds) + 1)]
            self._gathered[key] = tuple(gathered_bytes_of(own, each)[0] for each in by_layer)
        return self._gathered[key]

    def _micro_batches(self, choice: Choice) -> tuple[int, int]:
        """(packed sequences of a micro-batch, micro-batches of a rank in a step)."""
        data = choice.data_ranks(self._ranks)
        if self.workload.lengths.trees is not None:
            return replace(self.workload, recipe=choice.recipe(self.workload.recipe)).micro_batches(choice.micro, data)
        per_step = -(-self._packs // data)
        micro = min(choice.micro, per_step)
        return micro, -(-per_step // micro)

    def _layout(self, choice: Choice) -> Layout:
        return layout_of(choice.recipe(self.workload.recipe).parallel, self._ranks)

    def _counts(self, span: range) -> tuple[int, ...]:
        """The number of layers of each kind in a span."""
        counts = Counter(self._kinds[span.start : span.stop])
        return tuple(counts[kind] for kind in range(max(self._kinds) + 1))

    def _division(self, choice: Choice) -> Division:
        key = choice.stages, choice.schedule, choice.chunks
        if key not in self._divisions:
            spans, local = Chunks.whole(len(self._kinds)).layers, _ALONE
            if choice.stages > 1:
                spans = replace(self.workload, recipe=choice.recipe(self.workload.recipe)).chunks(0).layers
                local = placement(choice.schedule, choice.stages, len(spans) // choice.stages)
            self._divisions[key] = Division(spans, local, tuple(map(self._counts, spans)))
        return self._divisions[key]

    def _alone(self, choice: Choice, micro: int) -> Choice:
        """The choice without stages and copies, on which the work of layers does not depend; of `shard` it depends on
        whether states are sharded: weights that are gathered come in half precision, so there are fewer conversions.

        Rows with several answers are dealt out to as many data ranks as there are, and to micro-batches by stages.
        """
        shard: Shard = "none" if choice.shard == "none" else "zero1"
        choice = choice._replace(shard=shard, replicate=1, micro=micro, offload=())
        return choice if self.workload.lengths.trees is not None else _in_one_stage(choice)

    def _of(self, workload: Workload, alone: Choice, choice: Choice) -> Workload:
        """A workload in a choice, with its rows dealt out."""
        own = replace(workload, recipe=alone.recipe(workload.recipe))
        return own.dealt_to(choice.data_ranks(self._ranks))

    def _of_layers(self, choice: Choice, micro: int) -> ModelSeconds:
        """Seconds of a micro-batch through each layer on the ranks that share its tokens."""
        alone = self._alone(choice, micro)
        if alone not in self._layers:
            own = self._of(self.workload, alone, choice)
            self._layers[alone] = model_seconds(own, micro, self.target, self._times)
        return self._layers[alone]

    def _waiting(self, choice: Choice, micro: int) -> PerLayer:
        """Seconds that layers of a micro-batch wait for tensor ranks and for ranks with other experts.

        Without what recomputation sends again.
        """
        alone = _in_one_stage(self._alone(choice, micro))._replace(recompute="none", shard="none")
        if choice.context > 1 or (choice.tensor == 1 and choice.expert == 1):
            return PerLayer((0.0,) * (max(self._kinds) + 1), 0.0)
        if alone not in self._waits:
            layout = self._layout(alone)

            def of_pass(thin: Workload) -> tuple[float, ...]:
                own = self._of(thin, alone, choice)
                # Sums that are there once a step are shared out among as many micro-batches as there can be.
                waits = stage_collectives(own, layout, 0, micro, self._packs, [PassSeconds()], self.target.known_links)
                return (waits.of_pass,)

            (self._waits[alone],) = self._thin.measure(of_pass)
        return self._waits[alone]

    def _states_of(self, choice: Choice) -> _States:
        is_shared = choice.data_ranks(self._ranks) * choice.context > 1
        key = choice.tensor, choice.expert, is_shared, choice.offload
        if key not in self._states:
            alone = _in_one_stage(choice)._replace(shard="none", replicate=1)
            layout = replace(self._layout(choice._replace(shard="none", replicate=1)), pipeline=1)

            def sums(thin: Workload, stages: int = 1) -> tuple[float, ...]:
                of_stages = alone._replace(stages=stages)
                own = replace(thin, recipe=of_stages.recipe(thin.recipe))
                stage = replace(layout, pipeline=stages)
                return _state_bytes(own, rank_states(own, stage, device_type=self.target.device_type))

            measured = self._thin.measure(sums)
            others, gradients = _Shared(*measured[:3]), _Shared(*measured[3:])
            kind = self._kinds[0]
            first = [
                PerLayer(own.layers, whole - own.layers[kind])
                for own, whole in zip(others, sums(self._thin.first_twice, stages=2), strict=False)
            ]
            self._states[key] = _States(others, gradients, _Shared(*first))
        return self._states[key]

    def _kept_of(self, choice: Choice, micro: int) -> tuple[PerLayer, float]:
        """(bytes that layers keep of a micro-batch, bytes of the backward pass of the cheapest layer)."""
        alone = self._alone(choice, micro)._replace(expert=1, shard="none")  # on which it does not depend
        if alone not in self._kept:

            def activations(thin: Workload, chunks: Chunks) -> ActivationBytes:
                own = self._of(thin, alone, choice)
                return chunks_step(own, chunks, self.target.device_type, self.target.kernels, micro).activations

            def kept(thin: Workload) -> tuple[float, ...]:
                return (activations(thin, Chunks.whole(len(thin.config.layers))).kept,)

            (measured,) = self._thin.measure(kept)
            alike = zip(measured.layers, self._thin.trained_alike, strict=True)
            layers = PerLayer(tuple(each if is_alike else 0.0 for each, is_alike in alike), 0.0)
            each = tuple(range(kind, kind + 1) for kind in range(len(layers.layers)))
            transient = min(activations(self._thin.base, Chunks(each, (kind,))).recomputed for kind in range(len(each)))
            self._kept[alone] = layers, transient if all(self._thin.trained_alike) else 0.0
        return self._kept[alone]

    def _weights_of(self, choice: Choice, layout: Layout) -> list[Weight]:
        """The weights of a stage that has the fewest layers of each kind, and nothing outside of them."""
        counts = self._division(choice).fewest
        shards = layout.expert_sizes[2] if layout.expert > 1 else 0
        key = counts, layout.tensor, layout.expert, choice.shard == "none", shards == 1, choice.sequence
        if key not in self._weights:
            alone = _in_one_stage(choice)
            own = replace(self._thin.base, recipe=alone.recipe(self.workload.recipe))
            weights = data_weights(RankModel.of(own, replace(layout, pipeline=1), 0))
            numbers = [kind for kind, count in enumerate(counts) for _ in range(count)]
            self._weights[key] = [
                replace(weight, layer=number)
                for number, kind in enumerate(numbers)
                for weight in weights
                if weight.layer == kind
            ]
        return self._weights[key]

    def _most_work_of(self, choice: Choice, micro: int, micro_batches: int) -> dict[Work | None, float]:
        """The most seconds of each work that hides collectives, of any stage."""
        division = self._division(choice)
        key = self._alone(choice, micro), choice.stages, choice.schedule, choice.chunks
        if key not in self._most_work:
            seconds = self._of_layers(choice, micro)
            chunks = [seconds.of(span) for span in division.spans]
            total = max(sum(chunks[each].total for each in local) for local in division.local)
            backward = max(sum(chunks[each].backward for each in local) for local in division.local)
            self._most_work[key] = {
                "passes": micro_batches * total,
                "backward passes": micro_batches * backward,
                "last backward pass": backward,
            }
        return self._most_work[key]
