"""The expected memory of a published run: danlu's kept values on its shape, its states, and its engine's habits.

What layers keep and take in their passes comes from danlu's own tables (`danlu.planning.layer_memory`, `chunk_memory`),
in flight by danlu's schedules. What an engine does in another way than danlu is a habit in engines.yaml with its
source: types of states, bytes of a logit, buffers, what eager modules keep besides. No number here is fitted.

T tokens of a micro-batch · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from danlu.models.config import ModelConfig
from danlu.parallel.schedules import peak_in_flight, schedule
from danlu.planning.activation_memory import ActivationPlan, LayerPass, layer_memory
from danlu.planning.batch_shape import BatchShape, RankShare
from danlu.planning.chunk_memory import ChunkGradients, chunk_memory
from danlu.planning.layer_graph import LayerGraph
from danlu.planning.layer_memory import LayerMemory
from danlu.planning.packed_shapes import packed_bytes
from danlu.recipe.sections.model import Int4, Int8, Nf4, QuantizationSection
from planner.baselines import trained_parameters
from planner.engines import Engine
from planner.layers import layer_of, training_of
from planner.rows import PublishedRun

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, None: 4}
"""Bytes of a number; of a type that is not stated those of float32."""
_CONTEXT_BYTES = 1343 * 2**20
"""Bytes of CUDA and its kernels on a device, as nvidia-smi shows them behind the first tensor
(huggingface/transformers docs/source/en/model_memory_anatomy.md@7d5e65fe)."""
_SUB_GROUP = 10**9
"""Elements that ZeRO-3 updates at a time (DeepSpeed's default `sub_group_size`)."""
_BASES: Mapping[str, QuantizationSection] = {
    "nf4": Nf4(double=False),
    "nf4-dq": Nf4(double=True),
    "int4-gptq": Int4(group=128),
    "int8": Int8(),
}


@dataclass(frozen=True)
class ExpectedMemory:
    """Bytes of the GPU that needs most, by part, at the moment when they are the most together."""

    moment: str
    """loss, backward (of the last layer), end (the backward pass of the first layer), or update."""
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


def expected_memory(run: PublishedRun, engine: Engine) -> ExpectedMemory:
    """The memory of a run, of its first or of its last pipeline rank."""
    stages = (0, run.layout.pipeline - 1) if run.layout.pipeline > 1 else (0,)
    return max((_Rank(run, engine, stage).expected() for stage in stages), key=lambda memory: memory.bytes)


def facts(run: PublishedRun, engine: Engine) -> Iterator[str]:
    """The facts of a run by which an engine does one thing or another: the keys of a habit with several values."""
    if "202412" in run.source:
        yield "2024"
    if run.layout.tensor > 1:
        yield "split"
    if run.chunked_loss:
        yield "chunked"
    if engine.has_deepspeed(run.method.kind, run.gpus):
        yield "deepspeed"
    if run.layout.fsdp > 1:
        yield "sharded"
    if run.gpus == 1:
        yield "single"
    if run.method.base is not None:
        yield "quantized"
    if run.architecture.gated:
        yield "gated"
    yield "compiled" if run.compiled else "eager"


def habit(run: PublishedRun, engine: Engine, key: str, default: Any) -> Any:
    """A habit's value: of one with several the first whose facts, joined by spaces, all hold."""
    value = engine.value(key, default)
    if not isinstance(value, Mapping):
        return value
    true = {*facts(run, engine), "otherwise"}
    return next((own for names, own in value.items() if true.issuperset(str(names).split())), default)


@dataclass(frozen=True)
class _Rank:
    """One GPU of a run."""

    run: PublishedRun
    engine: Engine
    stage: int
    """Its pipeline rank."""

    def expected(self) -> ExpectedMemory:
        moments = [ExpectedMemory(moment, self.states() | parts) for moment, parts in self._moments()]
        return max(moments, key=lambda memory: memory.bytes)

    def states(self) -> dict[str, float]:
        """Bytes of weights, optimizer and buffers, and of what comes to them where not only tensors are counted."""
        run = self.run
        trained = self.trained / self._optimizer_ranks
        has_master = self.engine.has_deepspeed(run.method.kind, run.gpus)
        kind = run.memory.kind if run.memory is not None else "unstated"
        parts = {
            "weights": self._model_bytes() / self._weight_ranks,
            "adapter": self._bytes("weights") * self.trained / self._weight_ranks if run.method.kind != "full" else 0.0,
            "optimizer": (2 * self._bytes("states") + 4 * has_master) * trained,
            "gathered": self._gathered(),
            "buffers": float(habit(run, self.engine, "buffer_bytes", 0)),
            "context": float(_CONTEXT_BYTES if kind in ("device", "unstated") else 0),
        }
        if kind == "reserved":  # a stream's blocks serve no other stream
            parts["pools"] = self._own_streams()
        return parts

    @property
    def trained(self) -> float:
        """Parameters of this rank that the optimizer updates, before data ranks share them."""
        if self.run.method.kind != "full":
            return trained_parameters(self.run)
        return self._parameters

    @property
    def _parameters(self) -> float:
        """All parameters of this rank."""
        shape, layout = self.run.architecture, self.run.layout
        ends = shape.embedding_parameters * self._is_first + (shape.head_parameters + shape.width) * self._is_last
        return (self._layers * shape.layer_parameters + ends) / layout.tensor

    def _model_bytes(self) -> float:
        """Bytes of the model, before ranks share it; some engines keep the embedding over a quantized base wider
        (`quantized_embedding`)."""
        run, shape = self.run, self.run.architecture
        if run.method.base is None:
            return self._bytes("weights") * self._parameters
        products = shape.products.values()
        packed = sum(packed_bytes((outputs, inputs), _BASES[run.method.base]) for inputs, outputs in products)
        others = self._parameters - self._layers * sum(inputs * outputs for inputs, outputs in products)
        wider = _BYTES[self.engine.value("quantized_embedding", "bf16")] - _BYTES["bf16"]
        return self._layers * packed + self._bytes("weights") * others + wider * shape.embedding_parameters

    def _gathered(self) -> float:
        """Bytes of whole weights: those outside of layers and two layers, or without resharding all of them."""
        if self._weight_ranks == 1:
            return 0.0
        return _BYTES["bf16"] * (self._parameters if self._keeps_gathered else self._outer_unit + 2 * self._layer)

    def _own_streams(self) -> float:
        """Bytes in the blocks of streams that communicate (`reserved_streams`): the largest unit that is gathered, and
        under a pipeline the sharded gradients, next to the whole ones. `_has_gradients_before` counts them elsewhere.
        """
        streams, count = self.engine.value("reserved_streams", ()), 0.0
        if self._weight_ranks > 1 and "gathers" in streams:
            count += _BYTES["bf16"] * max(self._outer_unit, self._layer)
        if self._weight_ranks > 1 and "gradients" in streams and self._keeps_whole_gradients:
            count += self._bytes("gradients") * self.trained / self._optimizer_ranks
        return count

    @property
    def _keeps_whole_gradients(self) -> bool:
        """Whether gradients stay whole and float32 until a pipeline's last micro-batch."""
        return self.engine.value("whole_gradients") == "float32" and self.run.layout.pipeline > 1

    @property
    def _outer_unit(self) -> float:
        """Parameters of the unit with the head: the embedding is in it, or in one of its own (`outer_units`)."""
        if habit(self.run, self.engine, "outer_units", 1) == 1:
            return self._ends
        return self._ends - self.run.architecture.embedding_parameters * self._is_first / self.run.layout.tensor

    def _moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the moments that can be the fullest, with the bytes of what comes and goes."""
        run, layer, chunk = self.run, self._layer_memory, self._chunk
        more = self._kept_more
        in_flight, keeps = self._in_flight, run.recompute != "full"
        kept = 0.0 if "activations" in run.offload else in_flight * (chunk.kept + self._layers * more * keeps)
        gradients = self._gradients
        waiting = gradients if self._has_gradients_before else 0.0
        in_pass = layer.first_backward.activations + more
        if self._is_last:
            loss = chunk.loss + self._logits * habit(run, self.engine, "logit_bytes", 12.0)
            head = self._head_gradient * (2 if run.chunked_loss else 0)
            yield "loss", {"activations": kept, "loss": loss, "gradients": max(waiting, head)}
        at_first = kept - (layer.kept + more * keeps) * (kept > 0) + in_pass
        yield "backward", {"activations": at_first, "gradients": max(waiting, self._head_gradient)}
        yield "end", {"activations": in_pass, "gradients": gradients}
        update = habit(run, self.engine, "update_bytes", 0.0)
        updated = self.trained / self._optimizer_ranks
        yield "update", {"gradients": gradients, "update": update * min(updated, self._updated_at_a_time)}

    @property
    def _updated_at_a_time(self) -> float:
        return _SUB_GROUP if self._zero == 3 else float("inf")

    @property
    def _gradients(self) -> float:
        """Bytes of the gradients of a whole step."""
        run = self.run
        if run.optimizer_in_backward:  # those of one parameter, of a tied head for the whole backward pass
            return self._head_gradient
        if self._keeps_whole_gradients:
            return _BYTES["fp32"] * self._parameters
        if self.engine.value("whole_gradients") == "all" and self._weight_ranks > 1:
            return self._bytes("gradients") * self._parameters
        ranks = self._optimizer_ranks if self._zero is None or self._zero >= 2 else 1
        return self._bytes("gradients") * self.trained / ranks

    @property
    def _has_gradients_before(self) -> bool:
        """Whether gradients are there at the loss: of micro-batches before, or, where reserved memory is counted, in
        blocks of the stream that reduced those of the step before."""
        run = self.run
        is_reserved = run.memory is not None and run.memory.kind == "reserved" and self._weight_ranks > 1
        has_stream = is_reserved and "gradients" in self.engine.value("reserved_streams", ())
        return run.accumulation > 1 or has_stream or self.engine.value("whole_gradients") == "all"

    @property
    def _head_gradient(self) -> float:
        run = self.run
        is_trained = run.method.kind == "full" or "head" in run.method.trained
        if not (is_trained and self._is_last) or self._weight_ranks > 1:
            return 0.0
        return self._bytes("gradients") * run.architecture.embedding_parameters / run.layout.tensor

    @property
    def _logits(self) -> float:
        return self._batch.tokens * self.run.architecture.vocabulary / self.run.layout.tensor

    @property
    def _batch(self) -> BatchShape:
        run = self.run
        return BatchShape.of_lengths([run.length // run.layout.context] * run.micro_batch, 2, "flash")

    @property
    def _share(self) -> RankShare:
        is_sequence = bool(self.engine.value("sequence_parallel")) or self.run.layout.sequence_parallel
        return RankShare(self.run.layout.tensor, is_sequence and self.run.layout.tensor > 1)

    @property
    def _layer_memory(self) -> LayerMemory:
        run = self.run
        kind = "full" if run.recompute == "full" else "none"
        training = training_of(run)
        return layer_memory(layer_of(run), run.architecture.width, self._batch, training, kind, self._share)

    @property
    def _chunk(self) -> _Chunk:
        """The bytes that the layers of one chunk keep, and those at the loss besides logits."""
        run, shape = self.run, self.run.architecture
        config = ModelConfig(
            "llama", shape.vocabulary, shape.width, (layer_of(run),) * self._layers, 1e-5, run.length, shape.tied
        )
        passes = (LayerPass("full" if run.recompute == "full" else "none", training=training_of(run)),) * self._layers
        plan = ActivationPlan(passes, share=self._share, has_head=self._is_last)
        cost = chunk_memory(config, self._batch, plan, ChunkGradients(0), 0)
        if run.recompute == "selective":
            kept = cost.kept - self._layers * (self._layer_memory.kept - self._selective)
            return _Chunk(kept, cost.loss)
        return _Chunk(cost.kept, cost.loss)

    @property
    def _selective(self) -> float:
        """Bytes of a layer that keeps its input, attention, and every second product's output
        (`selective_recompute`); the last one's output is not needed, and compiled functions do not keep it."""
        graph: LayerGraph = self._layer_memory.graph
        products = [each.makes[0].name for each in graph.operations if each.kind == "product"][::2]
        if self.run.compiled:
            products = [name for name in products if name != "mlp.output"]
        return sum(map(graph.bytes_of, {"x", "attention.mixed", *products}))

    @property
    def _kept_more(self) -> float:
        """Bytes that a layer keeps of an engine besides danlu's, by `kept_more`."""
        run, shape = self.run, self.run.architecture
        widths = habit(run, self.engine, "kept_more", [])
        sizes = {
            "width": shape.width,
            "inner": shape.inner,
            "keys": shape.kv_heads * shape.head_width,
            "queries": shape.heads * shape.head_width,
        }
        count = sum(times * sizes[name] for times, name in widths)
        return count * self._batch.tokens * self._batch.element_bytes / run.layout.tensor

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.run.layout.pipeline - 1

    @property
    def _layers(self) -> int:
        return -(-self.run.architecture.layers // self.run.layout.pipeline)

    @property
    def _layer(self) -> float:
        return self.run.architecture.layer_parameters / self.run.layout.tensor

    @property
    def _ends(self) -> float:
        return self._parameters - self._layers * self._layer

    @property
    def _in_flight(self) -> float:
        """Micro-batches of which this rank keeps the activations of all of its layers."""
        layout = self.run.layout
        if layout.pipeline == 1:
            return 1.0
        chunks = 2 if layout.schedule == "interleaved-1F1B" else 1
        kind = "interleaved" if chunks > 1 else "1f1b"
        lists = schedule(kind, layout.pipeline, chunks, self.run.accumulation)
        return peak_in_flight(lists[self.stage]) / chunks

    @property
    def _zero(self) -> int | None:
        return self.run.layout.zero or (2 if self.engine.has_deepspeed(self.run.method.kind, self.run.gpus) else None)

    @property
    def _weight_ranks(self) -> int:
        layout = self.run.layout
        return self._fsdp_ranks * (layout.replicas if self._zero == 3 else 1)

    @property
    def _optimizer_ranks(self) -> int:
        layout = self.run.layout
        return self._fsdp_ranks * (layout.replicas if self._zero else 1)

    @property
    def _fsdp_ranks(self) -> int:
        """Context ranks share weights as data ranks do (`fsdp_over_context`)."""
        layout = self.run.layout
        return layout.fsdp * (layout.context if self.engine.value("fsdp_over_context", False) else 1)

    @property
    def _keeps_gathered(self) -> bool:
        return self.run.layout.pipeline > 1 and "none under a pipeline" in str(
            self.engine.value("reshard_after_forward")
        )

    def _bytes(self, what: str) -> int:
        """Bytes of a number: weights, gradients or states."""
        return _BYTES[getattr(self.run.precision, what)]


@dataclass(frozen=True)
class _Chunk:
    """Bytes of the layers of one rank."""

    kept: float
    loss: float
    """At the loss, in addition to what is kept and to logits."""
