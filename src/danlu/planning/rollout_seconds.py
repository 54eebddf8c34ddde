"""Seconds of the rollout engine's forward passes, from the speeds of a machine. Imports no torch.

A pass is bound by reading weights where few answers grow, by arithmetic where a prompt is read, and by the price of
calls where the model is small. Answers that grow on a CPU go through `inference.fused_decoder` if the model is plain.

T tokens of a pass · D model width · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from danlu.models.config import ModelConfig
from danlu.models.layer_operations import layer_operations
from danlu.models.layer_spec import Experts, LayerSpec, Mixer
from danlu.models.mixer_spec import Delta, Heads
from danlu.models.operations import ROTATION, Operation
from danlu.planning.cache_memory import block_bytes, state_bytes
from danlu.planning.flops import attention_pairs
from danlu.planning.layer_graph import TRAINED, LayerTraining
from danlu.planning.rollout_passes import PassRun
from danlu.planning.speeds import Speeds

Precision = Literal["fp32", "bf16", "fp16"]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PACKED_ROWS = 512
"""Rows of a product that is bound by arithmetic alone."""
_LARGE_BYTES = 1 << 27
"""Bytes that no cache holds."""
_PASSES = {"norm": 4, "add": 1.5, "gather": 1}
"""Passes over what an operation makes, each of which reads and writes it."""
_ROTATION_PASSES = 6
_ELEMENTWISE_PASSES = 2
_DRAW_BYTES = 24
"""Bytes of a logit that a draw reads and writes: its maximum, difference, exponential and sum."""
_PADDING = 1.25
"""Keys of answers are kept next to each other as long as no more than this are read of those that are seen."""
_GATHERED_PASSES = 3
"""Passes over keys that are copied together first."""
_SLOWER = {"cpu": 4, "cuda": 1}
"""The time of products of a few queries with the keys of their sequence, over that of reading these: on a CPU they are
as many products of small matrices as there are sequences and heads. Measured at 96 tokens, 32 sequences and 4 heads of
width 32 (Zen 4, one thread, 2026-11-27); the figures at `inference.decode_buffers.DecodeRows.attend_rows` agree."""


class CallCounts(NamedTuple):
    """The price of an engine's own work, in operations on next to nothing (`Speeds.call`)."""

    of_pass: int
    of_layer: int
    of_answer: int
    """Calls for each answer that grows: its place in the plan, its draw and its text."""


CALLS: dict[str, CallCounts] = {
    # Fitted on decoders of 2 and 10 layers of width 64 with 1 and 32 answers (Zen 4, one thread, 2026-11-27).
    "fused": CallCounts(400, 140, 20),
    "cpu": CallCounts(400, 330, 20),
    # Fitted on 8 layers of 8B in fp32 and bf16, 1 and 16 answers (H200, benchmarks/RESULTS.md): a call there is a
    # kernel, which takes longer.
    "cuda": CallCounts(60, 25, 1),
}


_ADAPTER_CALLS = {"cpu": 30, "cuda": 4}
"""The same for a product with an adapter of low rank: both products, scaling, their sum with the base's."""


@dataclass(frozen=True)
class EngineModel:
    """A model as an engine computes its passes on one process."""

    config: ModelConfig
    precision: Precision
    """The type of activations and of the cache."""
    device: Literal["cpu", "cuda"] = "cpu"
    training: LayerTraining = TRAINED
    """Adapters that stay apart from the weights, and whether these are quantized."""
    exact: bool = False
    """Whether numerics are exact, for which no copies of weights are made."""
    ranks: int = 1
    """Tensor ranks that share the model."""

    @cached_property
    def packs(self) -> bool:
        """Whether products are made with copies of weights in the order in which a CPU multiplies fastest."""
        return self.device == "cpu" and not self.exact and not self.training.quantized

    @cached_property
    def is_fused(self) -> bool:
        """Whether answers that grow go through `inference.fused_decoder`."""
        copies_weights = self.device == "cpu" and not self.exact
        return copies_weights and not self.training.adapters and self.ranks == 1 and is_plain(self.config)

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return ELEMENT_BYTES[self.precision]


def is_plain(config: ModelConfig) -> bool:
    """Whether the fused decoder computes everything that a model of this config has."""
    if len(config.kinds) > 1 or config.rotates_by_length or config.residual_multiplier != 1:
        return False
    (kind,) = config.kinds
    mixer, feed = kind.mixer, kind.feed
    if config.logits_divisor != 1 or kind.norm_kind != "rms" or kind.norms != "pre" or kind.parallel or kind.scalar:
        return False
    if not isinstance(mixer, Heads) or isinstance(feed, Experts) or not feed.gated:
        return False
    if feed.activation not in ("silu", "gelu_tanh") or mixer.rope is None or mixer.rope.dim != mixer.head_dim:
        return False
    plain = mixer.qk_norm in (None, "head") and mixer.window is None and mixer.softcap is None
    others = (mixer.interleaved, mixer.norm_behind_rope, mixer.value_norm, mixer.values_are_keys, mixer.output_gate)
    return plain and mixer.rope.temperature is None and not any(others) and not mixer.sinks


@dataclass(frozen=True)
class EngineSeconds:
    """The seconds of an engine's passes over a model, with the speeds of its process."""

    model: EngineModel
    speeds: Speeds
    drafts: int = 0
    """Tokens that are proposed and checked with each answer that grows."""

    def of_passes(self, runs: Iterable[PassRun]) -> float:
        """Seconds of some passes, the copies of weights before the first of them included."""
        return self.copies + sum(self.of_run(run) for run in runs)

    def of_run(self, run: PassRun) -> float:
        """Seconds of passes in which the same answers grow."""
        middle = (run.passes - 1) / 2  # between the first and the last, each answer sees so many tokens more
        rows = run.growing * (1 + self.drafts)
        read = sum(stop - start for start, stop in run.chunks)
        draws = run.draws + run.growing * self.drafts
        seconds = self._layers(rows + read, bool(run.chunks)) + self._draws(draws, run.growing)
        if run.growing:
            seconds += self._growing(run.growing, run.keys + run.growing * middle, run.longest + middle)
        return run.passes * seconds + self._reading(run.chunks)

    @cached_property
    def copies(self) -> float:
        """Seconds in which the weights are copied for the products of a rollout."""
        if not self.model.packs:
            return 0.0
        config, moved = self.model.config, 4 + self.model.element_bytes
        elements = sum(config.layers.count(kind) * self._weights(kind) for kind in config.kinds)
        elements += config.vocab_rows * config.hidden_size
        return self._traffic(elements * moved)

    @cached_property
    def _layers(self) -> Callable[[int, bool], float]:
        """(tokens, whether texts are read) -> seconds of all layers but for attention over the cache, and of their
        calls."""

        @cache
        def seconds(tokens: int, reads: bool) -> float:
            config, model = self.model.config, self.model
            calls = CALLS["fused" if model.is_fused and not reads else model.device]
            of_layers = sum(config.layers.count(kind) * self._layer(kind, tokens) for kind in config.kinds)
            return of_layers + (calls.of_pass + calls.of_layer * len(config.layers)) * self.speeds.call()

        return seconds

    def _layer(self, spec: LayerSpec, tokens: int) -> float:
        operations = layer_operations(spec, self.model.config.hidden_size)
        seconds = 0.0
        for (kind, *_), several in groupby(operations, key=lambda each: (each.kind, each.reads, each.in_float32)):
            if kind == "product":
                seconds += sum(self._call(list(several), tokens))
                continue
            for operation in several:
                if kind == "grouped":
                    seconds += self._grouped(spec, operation, tokens)
                elif kind in ("norm", "elementwise", "add", "gather"):
                    width = sum(value.width // min(value.parts, self.model.ranks) for value in operation.makes)
                    passes = _PASSES.get(kind, _ELEMENTWISE_PASSES)
                    passes = _ROTATION_PASSES if ROTATION in operation.reads else passes
                    seconds += self._traffic(2 * passes * width * tokens * self.model.element_bytes)
        return seconds

    def _call(self, operations: list[Operation], tokens: int) -> Iterator[float]:
        """Seconds of products that share their input: packed ones are made as one."""
        shapes = [self._cut(operation) for operation in operations]
        precision = "fp32" if operations[0].in_float32 else self.model.precision
        if self.model.training.quantized and not operations[0].in_float32:
            yield sum(self.speeds.dequantize(outputs * inputs) for outputs, inputs in shapes)
        if self.model.packs and len(operations) > 1:
            yield self._product(tokens, sum(outputs for outputs, _ in shapes), shapes[0][1], precision)
        else:
            for outputs, inputs in shapes:
                yield self._product(tokens, outputs, inputs, precision)
        for operation, (outputs, inputs) in zip(operations, shapes, strict=True):
            if (adapter := self.model.training.adapter_of(operation.name)) is not None:
                yield self.speeds.product(tokens, adapter.rank, inputs, precision)
                yield self.speeds.product(tokens, outputs, adapter.rank, precision)
                yield _ADAPTER_CALLS[self.model.device] * self.speeds.call()

    def _cut(self, operation: Operation) -> tuple[int, int]:
        """(outputs, inputs) of a product on this rank."""
        outputs, inputs = operation.weights[0][1]
        is_cut = self.model.ranks > 1 and operation.parts > 1
        if is_cut and operation.makes[0].parts > 1:
            return outputs // self.model.ranks, inputs
        return outputs, inputs // self.model.ranks if is_cut else inputs

    def _product(self, rows: int, outputs: int, inputs: int, precision: str) -> float:
        seconds: float = self.speeds.product(rows, outputs, inputs, precision)
        if self.model.device == "cpu" and (not self.model.packs or rows < 2):
            return seconds
        # A GPU, and oneDNN with its own order of a weight, read it as fast as memory gives it, however few rows there
        # are. Then each row takes as long as the others: 51, 98 and 620 us of 1, 8 and 64 rows of oneDNN
        # (`models.packed_weights`).
        read = self._traffic((outputs * inputs + rows * (inputs + outputs)) * ELEMENT_BYTES[precision])
        arithmetic = rows / PACKED_ROWS * self.speeds.product(PACKED_ROWS, outputs, inputs, precision)
        return min(seconds, read + arithmetic)

    def _grouped(self, spec: LayerSpec, operation: Operation, tokens: int) -> float:
        assert isinstance(spec.feed, Experts), "grouped products are those of experts"
        experts, outputs, inputs = operation.weights[0][1]
        rows = tokens * spec.feed.top_k
        groups = max(1.0, experts * (1 - (1 - 1 / experts) ** rows))  # that some token goes to, if each is as likely
        share = self.model.ranks if operation.parts > 1 else 1
        if operation.makes[0].width == outputs and outputs == self.model.config.hidden_size:
            inputs //= share
        else:
            outputs //= share
        seconds: float = self.speeds.grouped(groups, rows / groups, outputs, inputs, self.model.precision)
        if self.model.training.quantized:
            seconds += self.speeds.dequantize(experts * outputs * inputs)
        return seconds

    def _growing(self, answers: int, keys: float, longest: float) -> float:
        """Seconds of attention over the cache, of answers that see so many tokens together."""
        padded = answers * longest
        is_even, seconds = padded <= _PADDING * keys, 0.0
        for count, mixer, of_token, of_sequence in self._mixers:
            if isinstance(mixer, Delta):
                seconds += count * self._traffic(2 * answers * of_sequence)
                continue
            seen, read = keys, padded if is_even else keys
            if mixer.window is not None:
                seen, read = min(seen, answers * mixer.window), min(read, answers * mixer.window)
            passes = (1 if is_even else _GATHERED_PASSES) * _SLOWER[self.model.device]
            scores = 3 * 4 * seen * (1 + self.drafts) * mixer.heads / self.model.ranks
            seconds += count * (self._traffic(passes * read * of_token) + self._traffic(scores))
        return seconds

    def _reading(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of attention within texts that are read."""
        return sum(self._within(start, stop) for start, stop in chunks)

    @cached_property
    def _within(self) -> Callable[[int, int], float]:
        """(start, stop) -> seconds of attention of these tokens of a text."""

        @cache
        def seconds(start: int, stop: int) -> float:
            total = 0.0
            for count, mixer, _, _ in self._mixers:
                if isinstance(mixer, Delta):
                    continue
                pairs = attention_pairs((stop,), mixer.window) - attention_pairs((start,), mixer.window)
                length = stop if mixer.window is None else min(stop, 2 * mixer.window)
                heads, width = mixer.heads / self.model.ranks, mixer.query_width // mixer.heads
                whole = self.speeds.attention(length, heads, width, self.model.precision)
                total += count * whole * pairs / (length * (length + 1) / 2)
            return total

        return seconds

    @cached_property
    def _mixers(self) -> list[tuple[int, Mixer, int, int]]:
        """Returns (layers, their mixer, cached bytes of a token, those of a sequence) of each kind of layer."""
        config, size = self.model.config, self.model.element_bytes
        of_kinds = [
            (config.layers.count(kind), kind.mixer, [kind.mixer.cache(self.model.ranks)]) for kind in config.kinds
        ]
        return [(count, mixer, block_bytes(own, 1, size), state_bytes(own, size)) for count, mixer, own in of_kinds]

    @cached_property
    def _draws(self) -> Callable[[int, int], float]:
        """(draws, answers that grow) -> seconds of the head over the rows that are drawn from, of the draws, and of the
        engine's work on answers."""
        config = self.model.config
        rows = config.vocab_rows // self.model.ranks

        @cache
        def seconds(draws: int, answers: int) -> float:
            of_head = self._product(draws, rows, config.hidden_size, self.model.precision) if draws else 0.0
            of_draws = self._traffic(_DRAW_BYTES * draws * config.vocab_rows)
            return of_head + of_draws + CALLS[self.model.device].of_answer * answers * self.speeds.call()

        return seconds

    def _weights(self, spec: LayerSpec) -> int:
        operations = layer_operations(spec, self.model.config.hidden_size)
        return sum(math.prod(each.weights[0][1]) for each in operations if each.is_product) // self.model.ranks

    def _traffic(self, count: float) -> float:
        """Seconds of reading and writing so many bytes: a pass over all weights leaves nothing else in the caches."""
        return count * self._byte_s

    @cached_property
    def _byte_s(self) -> float:
        return self.speeds.moved(_LARGE_BYTES) / _LARGE_BYTES
