"""The bytes that a rank sends in a step of a recipe, from configs and the shapes of micro-batches. Imports no torch.

The formulas are those of `traffic` and `context_traffic`; here are the facts of a model that they take: the weights of
a rank, the borders that gradients cross, the sums of gradients that several ranks have parts of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from danlu.core.layer_types import TRAINED
from danlu.memory.layer_plan import LayerPlan
from danlu.models.chunks import Chunks
from danlu.models.config import ModelConfig
from danlu.models.layer_spec import Experts
from danlu.models.operations import is_gate
from danlu.models.tensor_cut import OF_EACH_LAYER, TensorPart, tensor_parts
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout, expert_shard_dim
from danlu.parallel.schedules import placement
from danlu.planning.batch_shape import ELEMENT_BYTES
from danlu.planning.gradient_borders import (
    HALVES,
    TrainedNames,
    first_half_with_gradient,
    gives_inputs,
    halves_with_gradients,
)
from danlu.planning.kept_in_few_bits import KEEPING, travelling_bytes
from danlu.planning.model_tensors import ModelTensor, ModelTensors
from danlu.planning.pipeline_split import num_chunks
from danlu.planning.rank_tensors import RankPlace, RankTensor
from danlu.planning.traffic import (
    RowExchange,
    TensorStep,
    Weight,
    data_number,
    data_traffic,
    decoder_regions,
    expert_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from danlu.planning.workload import Workload
from danlu.recipe import Recipe, sections

if TYPE_CHECKING:
    from danlu.planning.row_batches import RowBatch


class MicroBatch(NamedTuple):
    """The tokens of a micro-batch on one rank, as far as they decide what is sent."""

    tokens: int
    """Tokens that go through the model, padding included."""
    targets: int
    """Tokens with a loss, padding included."""
    cut_rows: tuple[int, ...] = ()
    """Tokens of documents that are cut, of each context rank."""
    documents: int = 0
    """Documents on all context ranks, padding included."""

    @classmethod
    def of_full_packs(cls, packs: int, length: int, context: int) -> MicroBatch:
        """Packs of one document each, cut evenly: a plan's assumption where documents are not known."""
        tokens = packs * length // context
        return cls(tokens, tokens, (tokens,) * context if context > 1 else (), packs)

    @classmethod
    def of_rows(cls, batch: RowBatch, context: int) -> MicroBatch:
        """Rows with judged answers, cut evenly over context ranks."""
        tokens = sum(run.tokens for document in batch.documents for run in document) // context
        cut = (tokens,) * context if context > 1 else ()
        return cls(tokens, batch.targets // context, cut, len(batch.documents))


class Rows(NamedTuple):
    """Rows of a layer's tokens in a step that travel to ranks with other experts."""

    leaving: int
    arriving: int


@dataclass(frozen=True)
class RankModel:
    """A rank's part of the policy, and how it is run."""

    recipe: Recipe
    config: ModelConfig
    policy: ModelTensors
    layout: Layout
    rank: int
    chunks: Chunks
    plan: Sequence[LayerPlan]
    sections: Mapping[str, Any] = field(default_factory=dict)
    """The sections of adapters that files describe, by name (`model_tensors.policy_tensors`)."""

    @classmethod
    def of(cls, workload: Workload, layout: Layout, rank: int) -> RankModel:
        """The policy of a workload. A plan of recomputation that is still to be made counts as none."""
        chunks = workload.chunks(layout.coordinates(rank)["pipeline"])
        plan = workload.recompute(chunks) or [LayerPlan(layer, "none") for layer in chunks.local_layers]
        return cls(workload.recipe, workload.config, workload.policy, layout, rank, chunks, plan)

    @property
    def stage(self) -> int:
        """The number of its stage in a pipeline."""
        return self.layout.coordinates(self.rank)["pipeline"]

    @property
    def sequence(self) -> bool:
        """Whether tensor ranks share out the tokens outside of sublayers."""
        return self.recipe.parallel.sequence

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation's number."""
        return ELEMENT_BYTES[self.recipe.activations]

    @cached_property
    def tensors(self) -> tuple[RankTensor, ...]:
        """Its parameters."""
        place = RankPlace(
            self.layout,
            self.chunks,
            self.layout.coordinates(self.rank)["tensor"],
            self.recipe.parallel.shard != "none",
        )
        return tuple(each for each in place.tensors(self.policy.tensors, self.config) if each.whole.is_parameter)

    @cached_property
    def trained(self) -> TrainedNames:
        """The names of those that are trained."""
        return TrainedNames(tuple(each.name for each in self.tensors if each.whole.trained))

    @cached_property
    def by_name(self) -> Mapping[str, RankTensor]:
        """Its parameters by name."""
        return {each.name: each for each in self.tensors}

    @cached_property
    def trained_on(self) -> Mapping[str, Sequence[ModelTensor]]:
        """The trained parameters of each linear layer and of the adapters on it, by the layer's name."""
        own: dict[str, list[ModelTensor]] = {}
        for each in self.tensors:
            if each.whole.trained:
                linear, _, rest = each.name.partition(".adapter.")
                own.setdefault(linear if rest else each.name.rpartition(".")[0], []).append(each.whole)
        return own

    def is_upon_another(self, linear: str) -> bool:
        """Whether a trained adapter of a linear layer lies upon another one."""
        return any(f"{linear}.adapter." in name for name in self._frozen_adapters)

    @cached_property
    def _frozen_adapters(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.tensors if each.whole.of_adapter and f".{TRAINED}." not in each.name)

    @cached_property
    def parts(self) -> Mapping[str, TensorPart]:
        """The cut of the policy's own parameters among tensor ranks, by name."""
        degree, rank = self.layout.tensor, self.layout.coordinates(self.rank)["tensor"]
        return _parts(self.config, degree, rank, self.sequence)

    def section_of(self, adapter: str) -> Any:
        """The section of an adapter by its name."""
        return self.sections.get(adapter, self.recipe.adapter if adapter == TRAINED else None)

    @property
    def has_bottlenecks(self) -> bool:
        """Whether an adapter has networks behind the sublayers."""
        return any(isinstance(each, sections.Bottleneck) for each in (self.recipe.adapter, *self.sections.values()))

    def is_sharded(self, tensor: RankTensor) -> bool:
        """Whether data ranks share a parameter out."""
        shards = self.layout.shard * self.layout.context
        return tensor.gathered is not None and not (tensor.whole.of_experts and shards == 1)

    def local_elements(self, tensor: RankTensor) -> int:
        """The numbers of a parameter that this rank has."""
        if tensor.gathered is None or not self.is_sharded(tensor):
            return math.prod(tensor.cut)
        number, shards = data_number(self.layout, self.rank), self.layout.shard * self.layout.context
        dim = 0
        if tensor.whole.of_experts:
            if self.layout.expert > 1:
                number, shards = number // self.layout.expert, self.layout.expert_sizes[2]
            dim = expert_shard_dim(tensor.gathered, shards)
        sizes = list(tensor.gathered) or [1]
        each = -(-sizes[dim] // shards)
        sizes[dim] = max(0, min(each, sizes[dim] - each * (number % shards)))
        return math.prod(sizes)

    def gradient_ranks(self, tensor: ModelTensor) -> int:
        """The number of tensor ranks over which a parameter's gradient is summed behind the backward pass."""
        if self.layout.tensor == 1:
            return 1
        if (own := self.parts.get(tensor.name)) is not None:
            return own.gradient_ranks
        first, *path = tensor.name.split(".")
        if first in OF_EACH_LAYER or (first == "layers" and path[1] not in HALVES):
            return self.layout.tensor if self.sequence else 1
        linear = self.parts.get(tensor.linear)
        if linear is not None:
            for axis in tensor.axes:
                side = -2 if axis == "outputs" else -1
                if axis is not None and linear.box.sizes[side] != linear.box.global_shape[side]:
                    return linear.gradient_ranks
        return self.layout.tensor


@lru_cache(maxsize=64)
def _parts(config: ModelConfig, degree: int, rank: int, sequence: bool) -> Mapping[str, TensorPart]:
    parts = tensor_parts(config, degree, rank, sequence=sequence)
    return {"lm_head.weight": parts["embed_tokens.weight"]} | parts


def step_traffic(
    model: RankModel, micro_batches: Sequence[MicroBatch], rows: Mapping[int, Rows] | None = None
) -> list[CollectiveTraffic]:
    """The bytes that a rank sends in a step, by axis, collective and purpose.

    rows: by layer, those that travel to ranks with other experts; None: as many to each expert.
    """
    layout, section = model.layout, model.recipe.parallel
    weights = data_weights(model)
    traffic = [*data_traffic(weights, layout, section, micro_batches=len(micro_batches), rank=model.rank)]
    if layout.tensor > 1:
        traffic += tensor_traffic(tensor_step(model, micro_batches), layout, section)
    if layout.expert > 1:
        traffic += expert_traffic([*row_exchanges(model, micro_batches, rows)], layout, rank=model.rank)
    if layout.context > 1:
        from danlu.planning.context_layers import context_ranks_traffic  # which few layouts need

        traffic += context_ranks_traffic(model, micro_batches)
    if layout.pipeline > 1:
        traffic += stages_traffic(model, micro_batches)
    return traffic


# ── data ranks ──


def data_weights(model: RankModel) -> list[Weight]:
    """The parameters of a rank as data ranks share them."""
    is_narrow = model.recipe.gathers_activation_type
    weights = []
    for tensor in model.tensors:
        first, _, rest = tensor.name.partition(".")
        in_layer = first == "layers"
        weights.append(
            Weight(
                tensor.gathered or tensor.cut,
                trained=tensor.whole.trained,
                sharded=model.is_sharded(tensor),
                of_experts=tensor.whole.of_experts,
                gathered_bytes=model.element_bytes if is_narrow else tensor.element_bytes,
                # The root's own are gathered once for each chunk and micro-batch: the backward pass begins with them.
                gathers=2 if in_layer else len(model.chunks.local),
                layer=int(rest.partition(".")[0]) if in_layer else None,
            )
        )
    return weights


# ── tensor ranks ──


def tensor_step(model: RankModel, micro_batches: Sequence[MicroBatch]) -> TensorStep:
    """The facts of a step that decide what tensor ranks send."""
    config, chunks, plan = model.config, model.chunks, model.plan
    tokens = sum(batch.tokens for batch in micro_batches)
    partial: Counter[int] = Counter()  # numbers of gradients that tensor ranks sum, by the size of the group
    for tensor in model.tensors:
        if tensor.whole.trained and (size := model.gradient_ranks(tensor.whole)) > 1:
            partial[size] += model.local_elements(tensor)
    first_with_gradient, trained_between = first_half_with_gradient(model.trained, chunks)
    # Recomputing a layer in full gathers its input anyway; elsewhere it is gathered again where a gradient takes it.
    borders = halves_with_gradients(model.trained, chunks, config)
    keeping = [half for place, entry in enumerate(plan) if entry.kind != "full" for half in (2 * place, 2 * place + 1)]
    regions = decoder_regions(
        [(entry.kind, entry.segment) for entry in plan],
        first_with_gradient=first_with_gradient,
        trained_between=trained_between,
        with_gradients=borders,
        gathered_again=[half for half in keeping if half in borders[0] and needs_input(model, half)],
        to_the_end=any(kind.normed_behind for kind in config.kinds) or model.has_bottlenecks,
        has_embedding=chunks.has_first,
        has_head=chunks.has_last,
    )
    return TensorStep(
        tokens=tokens,
        targets=sum(batch.targets for batch in micro_batches) if chunks.has_last else 0,
        hidden_size=config.hidden_size,
        element_bytes=model.element_bytes,
        regions=regions,
        partial=partial,
        row_norms=len(micro_batches) * _row_norms(model),
        head_norms=tokens * head_norms(config, plan, model.trained, first_with_gradient),
        micro_batches=len(micro_batches),
        own_embeddings=config.per_layer_columns,
        trains_own_embeddings=model.trained.within("embed_tokens_per_layer"),
        maxima=_maxima(model),
    )


def _maxima(model: RankModel) -> Sequence[int]:
    if model.recipe.fp8 is None or model.recipe.fp8.recipe != "tensor":
        return ()
    from danlu.planning.shared_scales import shared_maxima

    return shared_maxima(model)


def needs_input(model: RankModel, half: int) -> bool:
    """Whether a gradient of trained parameters in the first products of a half of a layer takes their input."""
    layer, name = model.chunks.local_layers[half // 2], HALVES[half % 2]
    spec, sublayer = model.config.layers[layer], f"layers.{layer}.{name}"
    part = spec.mixer if name == "attention" else spec.feed
    if isinstance(part, Experts):  # experts themselves take rows that were picked out of it
        router = part.router
        # The product of a router that draws keeps the input that it has jittered.
        is_jittered = router.score == "sparse-mixer" and model.recipe.drops_out and router.input_jitter > 0
        takers = ("shared_gate",) if is_jittered else ("router", "shared_gate")
        if any(model.trained.within(f"{sublayer}.{taker}") for taker in takers):
            return True
    # Experts' own layers take the rows that were picked out of it.
    entrance = (name for name, role in part.tensor_cut.roles.items() if role != "row" and "experts." not in name)
    return any(takes_input(model, f"{sublayer}.{linear}") for linear in entrance)


def takes_input(model: RankModel, linear: str) -> bool:
    """Whether a gradient of trained parameters of a linear layer, or of an adapter on it, takes its input."""
    fp8 = model.recipe.fp8
    keeps_codes = fp8 is not None and fp8.recipe in KEEPING and not is_gate(linear)
    for tensor in model.trained_on.get(linear, ()):
        if not tensor.of_adapter or tensor.name == f"{linear}.weight":
            if tensor.name.endswith(".weight") and not keeps_codes:
                return True
            continue
        section = model.section_of(_adapter_of(tensor.name))
        if isinstance(section, sections.LowRank) and section.dropout and model.is_upon_another(linear):
            continue  # upon another adapter it takes what dropout has left
        if isinstance(section, sections.QaLora) and tensor.name.endswith(".lora_A"):
            return True
        if "inputs" in tensor.axes or isinstance(section, sections.Mora):
            return True
    return False


def _adapter_of(name: str) -> str:
    """The name of the adapter in that of its tensor in a linear layer: "layers.0.mlp.up_proj.adapter.NAME.lora_A"."""
    return name.partition(".adapter.")[2].partition(".")[0]


def _row_norms(model: RankModel) -> int:
    """`traffic.TensorStep.row_norms` of a micro-batch."""
    runs = {
        entry.layer: 1 + (entry.kind == "full") + again
        for entry, again in zip(model.plan, gives_inputs(model.plan), strict=True)
    }
    numbers = 0
    for tensor in model.tensors:
        linear, _, rest = tensor.name.partition(".adapter.")
        if not rest.endswith(".lora_magnitude_vector") or not linear.startswith("layers."):
            continue
        _, layer, half, linear = linear.split(".", 3)
        spec = model.config.layers[int(layer)]
        if half not in HALVES:  # what is whole on every rank
            continue
        if (spec.mixer if half == "attention" else spec.feed).tensor_cut.roles.get(linear) != "row":
            continue
        adapter = rest.partition(".")[0]
        (outputs,), exact = tensor.cut, model.section_of(adapter).exact_norm
        rank = model.by_name[tensor.name.replace("lora_magnitude_vector", "lora_B")].cut[1]
        numbers += runs[int(layer)] * (rank * rank + (outputs * rank if exact else outputs))
        numbers += outputs if exact else 0  # in the backward pass
    return numbers


def head_norms(config: ModelConfig, plan: Sequence[LayerPlan], trained: TrainedNames, first_with_gradient: int) -> int:
    """`traffic.TensorStep.head_norms` of one token."""
    numbers = 0
    for place, (entry, gives_input) in enumerate(zip(plan, gives_inputs(plan), strict=True)):
        spec = config.layers[entry.layer]
        for half, (name, part) in enumerate(zip(HALVES, (spec.mixer, spec.feed), strict=True), 2 * place):
            cut = part.tensor_cut
            for source in cut.norms.values():
                if cut.roles[source] not in ("column", "grouped"):
                    continue
                is_trained = trained.within(f"layers.{entry.layer}.{name}.{source}")
                has_gradient = half >= first_with_gradient or is_trained
                numbers += 1 + gives_input + has_gradient + (has_gradient and entry.kind != "none")
    return numbers


# ── ranks with other experts ──


def row_exchanges(
    model: RankModel, micro_batches: Sequence[MicroBatch], rows: Mapping[int, Rows] | None
) -> Iterator[RowExchange]:
    """Yields the exchange of each layer with experts. rows: as `step_traffic` has them."""
    first_with_gradient, _ = first_half_with_gradient(model.trained, model.chunks)
    tokens, ranks = sum(batch.tokens for batch in micro_batches), model.layout.expert
    for place, (entry, gives_input) in enumerate(zip(model.plan, gives_inputs(model.plan), strict=True)):
        feed = model.config.layers[entry.layer].feed
        if not isinstance(feed, Experts):
            continue
        evenly = tokens * feed.top_k * (ranks - 1) // ranks
        own = Rows(evenly, evenly) if rows is None else rows[entry.layer]
        has_input_gradient = 2 * place + 1 >= first_with_gradient
        row_bytes = model.config.hidden_size * model.element_bytes
        experts = f"layers.{entry.layer}.mlp.experts"
        in_codes = sends_codes(model, experts, "gate_proj", "up_proj")
        gradients_in_codes = sends_codes(model, experts, "down_proj") and not feed.bias
        yield RowExchange(
            sent_rows=own.leaving,
            received_rows=own.arriving,
            num_experts=feed.num_experts,
            micro_batches=len(micro_batches),
            row_bytes=row_bytes,
            dispatched_bytes=travelling_bytes(model.config.hidden_size) if in_codes else row_bytes,
            gradient_bytes=travelling_bytes(model.config.hidden_size) if gradients_in_codes else row_bytes,
            runs=1 + (entry.kind == "full") + gives_input,
            output_gradients=has_input_gradient or model.trained.within(experts),
            input_gradients=has_input_gradient,
        )


def sends_codes(model: RankModel, experts: str, *linears: str) -> bool:
    """Whether the rows of some stacked layers, or the gradients of their outputs, travel in 8 bits."""
    fp8 = model.recipe.fp8
    if fp8 is None or fp8.recipe != "tile":
        return False
    return not any(name.startswith(f"{experts}.{linear}.adapter.") for name in model.by_name for linear in linears)


# ── stages of a pipeline ──


def stages_traffic(model: RankModel, micro_batches: Sequence[MicroBatch]) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of a rank to other stages."""
    section, layout = model.recipe.parallel.pipeline, model.layout
    shares = layout.tensor if model.sequence else 1
    row_bytes = model.config.hidden_size * model.element_bytes
    chunks_of = placement(section.schedule, section.stages, num_chunks(section) // section.stages)
    stage_of = {chunk: stage for stage, chunks in enumerate(chunks_of) for chunk in chunks}
    shared_bytes: Counter[int] = Counter()
    for tensor in model.tensors:
        if tensor.whole.trained:
            stages = {stage_of[chunk] for chunk in _chunks_with(model, tensor.name)}
            if len(stages) > 1:
                shared_bytes[len(stages)] += model.local_elements(tensor) * tensor.element_bytes
    return pipeline_traffic(
        chunks_of,
        model.stage,
        layout,
        activation_bytes=[batch.tokens // shares * row_bytes for batch in micro_batches],
        shared_bytes=shared_bytes,
    )


def _chunks_with(model: RankModel, name: str) -> set[int]:
    """The chunks of the whole model that have a trained parameter."""
    chunks, config = model.chunks, model.config
    is_tied = config.task == "causal-lm" and config.tie_word_embeddings
    if is_tied and (name == "embed_tokens.weight" or name.endswith(".token_rows")):
        return {0, chunks.last}
    if ".projection." in name:  # of an adapter, which layers share
        _, _, adapter = name.partition(".projection.")[0].rpartition(".")
        within = f".{adapter}."
        return {
            chunks.of_parameter(each.name) for each in model.policy.tensors if each.of_adapter and within in each.name
        }
    return {chunks.of_parameter(name)}
