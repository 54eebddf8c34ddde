"""Rules of thumb that a prediction competes with: 16 bytes a parameter and 34sbh for memory, one MFU for speed.

Memory: 16 bytes of each trained parameter (bf16 weights and gradients, float32 weights and two states), 2 of each
frozen one (half a byte where it has 4 bits), over the GPUs that share them; and 34 bytes by length, batch and width of
each layer (Korthikanti et al., arXiv:2205.05198, without the scores that flash attention does not keep), of which full
recomputation keeps 2 and one whole layer.

Speed: model FLOPs a token over the card's peak and a constant utilization. FLOPs are those that llm-foundry computes
its MFU from: 6 a parameter (4 a frozen one) and 12 by layers, width and length.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from planner.architectures import adapter_parameters
from planner.published_cards import card
from planner.rows import PublishedRun


@dataclass(frozen=True)
class Prediction:
    """What a predictor says of one run: bytes and tokens/s of a GPU; None where it says nothing."""

    memory_bytes: float | None
    tokens_per_s: float | None


def trained_parameters(run: PublishedRun) -> int:
    """Parameters that the optimizer updates."""
    shape, method = run.architecture, run.method
    if method.kind == "full":
        return shape.parameters
    assert method.rank is not None and method.targets is not None, "rows without them are left out"
    whole = shape.embedding_parameters * ("embedding" in method.trained)
    whole += (shape.head_parameters or shape.embedding_parameters) * ("head" in method.trained)
    return adapter_parameters(shape, method.rank, method.targets) + whole


def rule_of_thumb(run: PublishedRun) -> Prediction:
    """Memory by 16 bytes a parameter and 34sbh; it says nothing of speed."""
    shape, layout = run.architecture, run.layout
    trained = trained_parameters(run)
    frozen = 0 if run.method.kind == "full" else shape.parameters
    model_ranks = layout.tensor * layout.pipeline
    shared = layout.fsdp * (layout.replicas if layout.zero == 3 else 1)
    states = (16 * trained + frozen * (0.5 if run.method.base else 2)) / model_ranks / shared
    row = run.length / layout.context * run.micro_batch * shape.width / layout.tensor
    layers = shape.layers / layout.pipeline
    kept = 34 * layers if run.recompute in ("none", "selective") else 2 * layers + 34
    in_flight = min(layout.pipeline, run.accumulation)
    return Prediction(states + kept * row * in_flight, None)


def flops_per_token(run: PublishedRun) -> float:
    """Model FLOPs of forward and backward, recomputation not counted."""
    shape, trained = run.architecture, trained_parameters(run)
    products = 6 * shape.parameters if run.method.kind == "full" else 4 * shape.parameters + 6 * trained
    return products + 12 * shape.layers * shape.heads * shape.head_width * run.length


def peak(run: PublishedRun) -> float:
    """FLOP/s of the run's card with the operands of its products; with bf16 where it has none of these."""
    assert run.card is not None, "rows without a card are left out for speed"
    peaks = card(run.card).peaks
    precision = {"float8": "fp8", "mxfp8": "fp8"}.get(run.precision.products, "bf16")
    return peaks.get(precision, peaks["bf16"])


def utilization(run: PublishedRun) -> float:
    """The MFU that the published speed is."""
    assert run.speed is not None, "rows without a speed are left out"
    return run.speed.tokens_per_s * flops_per_token(run) / peak(run)


def constant_mfu(
    runs: Sequence[PublishedRun], held_out: Callable[[PublishedRun], str], within: Callable[[PublishedRun], str]
) -> list[float | None]:
    """Tokens/s of each run by the median MFU of other runs; None where there are none.

    These are the runs with the same `within` and another `held_out`: of the same engine on another card, say.
    """
    by_group: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_group[within(run)][held_out(run)].append(utilization(run))
    predicted: list[float | None] = []
    for run in runs:
        others = [mfu for out, mfus in by_group[within(run)].items() if out != held_out(run) for mfu in mfus]
        predicted.append(statistics.median(others) * peak(run) / flops_per_token(run) if others else None)
    return predicted


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions: their size, and the median with its sign (positive: predicted too much)."""

    rows: int
    median: float
    ninetieth: float
    worst: float
    signed: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float | None, float]]) -> Errors | None:
        """Errors of (predicted, measured) pairs, without those that were not predicted; None of no pair."""
        errors = [predicted / measured - 1 for predicted, measured in pairs if predicted is not None]
        if not errors:
            return None
        sizes = sorted(abs(error) for error in errors)
        # The smallest size that at least nine tenths of the errors do not exceed.
        ninetieth = sizes[-(-9 * len(sizes) // 10) - 1]
        return cls(len(errors), statistics.median(sizes), ninetieth, sizes[-1], statistics.median(errors))
