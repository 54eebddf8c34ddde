"""danlu's own figures on GPUs (RESULTS.md), beside what its roofline expects of them.

The defaults of `danlu.planning.speeds.Efficiency` were set by these figures, so that their errors say how well five
constants describe them, not how well they foretell others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from danlu.models.layer_spec import Dense, LayerSpec
from danlu.models.mixer_spec import Heads
from danlu.models.rope_config import Rope
from danlu.planning.batch_shape import BatchShape
from danlu.planning.cards import Card, find_card
from danlu.planning.layer_graph import TRAINED, LayerGraph, LayerTraining, LowRankAdapter, Recompute
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.primitives import PassSeconds, sum_of
from danlu.planning.speeds import COMPILED_PASSES, CardSpeeds, Efficiency
from danlu.planning.step_work import clip_work, embedding_work, loss_work, norm_work, update_work
from danlu.recipe import sections


@dataclass(frozen=True)
class Model:
    """A Llama."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int

    @property
    def layer(self) -> LayerSpec:
        rope = Rope(5e5, self.head_width, 8192)
        return LayerSpec(Heads(self.heads, self.kv_heads, self.head_width, rope), Dense(self.inner))

    @property
    def parameters(self) -> int:
        shapes = self.layer.parameter_shapes(self.width).values()
        of_layer = sum(int(np.prod(shape)) for shape in shapes)
        return self.layers * of_layer + 2 * self.vocabulary * self.width + self.width


@dataclass(frozen=True)
class Figure:
    """A step with its published tokens/s."""

    name: str
    card: str
    tokens_per_s: float
    model: Model
    lengths: tuple[int, ...]
    training: LayerTraining = TRAINED
    recompute: Recompute = "none"
    compiled: bool = False

    def expected(self, efficiency: Efficiency | None = None) -> float:
        """Tokens/s by the roofline; efficiency: in place of the default."""
        card, efficiency = find_card(self.card), efficiency or Efficiency()
        assert isinstance(card, Card), card
        if self.compiled:
            efficiency = replace(efficiency, passes=COMPILED_PASSES)
        speeds, model, tokens = CardSpeeds(card, efficiency), self.model, sum(self.lengths)
        is_full = self.training.weights
        batch = BatchShape.of_lengths(self.lengths, 2, "flash")
        graph = LayerGraph(model.layer, model.width, batch, self.training, self.recompute)
        trained = model.parameters if is_full else 42_000_000
        device: dict[str, Any] = {"device": "cuda"}
        ends = (
            embedding_work(tokens, model.width, model.vocabulary, 2, trained=is_full),
            norm_work(tokens, model.width, 2),
            loss_work(tokens, model.width, model.vocabulary, 2, frozen=not is_full, **device),
            clip_work(trained),
            update_work(sections.AdamW(), {"weights": (trained,)}, **device),
        )
        layers = [layer_seconds(graph, speeds)] * model.layers
        return tokens / sum_of([*layers, PassSeconds.of(ends, speeds)]).total


_8B = Model(4096, 32, 32, 8, 128, 14336, 128256)
_ADAPTED = (*(f"attention.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
_LORA = LayerTraining(weights=False, adapters=tuple((name, LowRankAdapter(16)) for name in _ADAPTED))


def figures() -> Iterator[Figure]:
    """The figures of full training, of adapters on 8B and of `danlu train`; H100: GPU (2026-11-27), H200: C and E."""
    four = replace(_8B, layers=4)
    for card, eager, compiled in (("H100-80G", 37_469, 40_893), ("H200-141G", 41_316, 45_497)):
        yield Figure("four layers of 8B", card, eager, four, (4096, 4096))
        yield Figure("four layers of 8B, compiled", card, compiled, four, (4096, 4096), compiled=True)
    for card, quantized, speeds in (
        ("H100-80G", False, (9_553, 8_380, 6_445)),
        ("H100-80G", True, (9_319, 8_078, 6_591)),
        ("H200-141G", False, (10_851, 9_654, 7_899)),
        ("H200-141G", True, (10_141, 8_864, 7_462)),
    ):
        kinds: tuple[Recompute, ...] = ("none", "selective", "full")
        for kind, speed in zip(kinds, speeds, strict=True):
            name = f"{'nf4' if quantized else 'LoRA'} of 8B, recompute {kind}"
            yield Figure(name, card, speed, _8B, (4096,), replace(_LORA, quantized=quantized), kind)
    small, middle = Model(512, 8, 8, 4, 64, 1536, 32000), Model(1536, 20, 24, 4, 64, 4096, 32000)
    large = Model(2048, 24, 32, 4, 64, 6144, 64000)
    documents = _documents()
    for card, speeds in (
        ("H100-80G", (248_883, 74_942, 100_019, 52_992)),
        ("H200-141G", (286_129, 81_528, 93_282, 56_669)),
    ):
        yield Figure("58M", card, speeds[0], small, documents)
        yield Figure("0.6B", card, speeds[1], middle, documents)
        yield Figure("0.6B, compiled", card, speeds[2], middle, documents, compiled=True)
        yield Figure("1.5B, compiled", card, speeds[3], large, documents, compiled=True)


def _documents() -> tuple[int, ...]:
    """Eight packs of 2,048 tokens of documents as throughput.py draws them."""
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(32), np.log(1024), 55)).astype(int)
    return tuple(int(length) for length in drawn)


def errors(own: Sequence[Figure]) -> list[float]:
    """Relative errors of what is expected."""
    return [figure.expected() / figure.tokens_per_s - 1 for figure in own]


_WAITS_FOR_HOST = "58M"
"""The model with steps that wait for the host: next to them nothing else decides how long an operator takes."""


def host_seconds() -> float:
    """Seconds of a host for one operator with which the median error of the figures of `_WAITS_FOR_HOST` is 0."""
    waiting = [figure for figure in figures() if figure.name == _WAITS_FOR_HOST]

    def too_fast(call_s: float) -> bool:
        efficiency = replace(Efficiency(), call_s=call_s)
        return statistics.median(each.expected(efficiency) / each.tokens_per_s for each in waiting) > 1

    low, high = 1e-6, 1e-3
    assert too_fast(low) and not too_fast(high), "a host takes microseconds"
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if too_fast(middle) else (low, middle)
    return high
