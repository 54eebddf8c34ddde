"""The records of a finished step: its line of metrics, a spike, and that there was nothing to train."""

from __future__ import annotations

import time
from collections.abc import Sequence

from danlu.core.types import Item, StepMetrics, Totals
from danlu.training.metrics import peak_memory_bytes
from danlu.training.state import Run
from danlu.training.step import StepGradients
from danlu.training.units import first_few


def log_step(run: Run, gradients: StepGradients, seconds: float) -> None:
    """Writes the line of metrics of the present step, which took `seconds`."""
    totals = gradients.totals
    of_stretch = run.data_loader.stretch_of(run.state.step).metrics
    extra: dict[str, float] = {**gradients.metrics, **of_stretch, "elapsed_s": time.perf_counter() - run.started}
    if run.data_loader.generated is not None:
        extra |= run.data_loader.generated.metrics()
    if run.scaler is not None:
        extra["loss_scale"] = run.scaler.scale
    if run.least_seconds is not None:
        extra["mfu"] = run.least_seconds(totals.document_lengths, totals.targets) / seconds
    metrics = StepMetrics(
        step=run.state.step,
        loss=gradients.loss,
        grad_norm=gradients.norm,
        learning_rate=run.optimizer.learning_rate,
        tokens=totals.tokens,
        trained_tokens=totals.targets,
        tokens_per_second=totals.tokens / seconds,
        memory_bytes=peak_memory_bytes(run.learner.device),
        extra=extra,
    )
    for recorder in run.recorders:
        recorder.step(metrics)


def pass_over(run: Run, items: Sequence[Item], totals: Totals) -> None:
    """Ends a step in which nothing is trained."""
    run.optimizer.zero_grad()
    run.state.step += 1
    run.state.tokens += totals.tokens
    run.record("no_targets", tokens=totals.tokens, rows=first_few([row for item in items for row in item.rows]))


def has_spiked(run: Run, gradients: StepGradients) -> bool:
    """Whether the watch's policy keeps the update of the present step from being made; tells of a spike in any case."""
    reason = run.watch.spike_reason(gradients.loss, gradients.norm)
    if not reason:
        return False
    policy = run.watch.section.policy
    run.record("spike", policy=policy, reason=reason)
    run.state.rewind_wanted = policy == "rewind"
    return policy != "warn"
