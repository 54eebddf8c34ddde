"""A layout against one process: every number both have traced, in the order in which a step computes them.

How much may two right computations differ? Sums are rounded in another order, and an optimizer that divides by the size
of gradients (Adam) or takes their sign (Lion) makes much of little where one is almost zero. So the reference, one
process, runs a second time with initial weights that differ by rounding (`workers.PERTURBATION`), and the layout may be
a few times as far from the first run as this second one is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.numerics.relative_error import relative_error, worst_error
from danlu.optim.state_shapes import eight_bits
from danlu.recipe.sections import Optimizer
from danlu.report.verification import EXACT, Check, Module
from danlu.verification.proxy_recipe import EPS
from danlu.verification.trace import AverageTrace, LocalShards, SpoiledStep, StepTrace, assemble
from danlu.verification.workers import Traces

TOLERANCES = {"fp32": 1e-6, "bf16": 1e-1, "fp16": 3e-2, "fp8": 5e-1}
"""Relative, of each parameter's gradient; those of narrow types allow for the few digits that float32 does not lack."""
_ROUNDING_FACTOR = 8.0  # how many times the effect of rounding is allowed
_FLIPPED_PER_TENSOR = 8  # numbers of a tensor with an update that may change its sign by rounding in a step
_FEW_LAYERS = 4  # a model with more of them is shown with all layers together
_LEAST_METRIC = 0.1  # below which errors of a metric are relative to this
_JUMP = 1e-3  # a difference by rounding from which a metric is taken for one that counts
_LAYER = re.compile(r"^(layers)\.(\d+)\.([a-z_]+)")


@dataclass(frozen=True)
class ComparedTensor:
    """One tensor, or one number as a tensor, of the layout and of the reference."""

    stage: str  # "gradients of step 1"
    kind: str  # "gradients", "weights", "loss", ...
    name: str | None  # of the parameter
    error: float  # relative
    allowed: float  # relative
    layout_value: Tensor  # of a number: one for each rank
    reference: Tensor
    previous: Tensor | None = None
    """The reference's weights before the update, for weights after it."""
    ranks: tuple[int, int] | None = None
    """Two processes that hold the same part of it with different numbers."""

    @property
    def holds(self) -> bool:
        """Never of numbers that are not finite, whatever is allowed: nothing is known of their error."""
        return self.ranks is None and math.isfinite(self.error) and self.error <= self.allowed


@dataclass
class Comparison:
    """Everything that was compared, in the order of computation."""

    compared: list[ComparedTensor] = field(default_factory=list)

    def first_failure(self) -> ComparedTensor | None:
        return next((tensor for tensor in self.compared if not tensor.holds), None)

    def of(self, stage: str) -> list[ComparedTensor]:
        return [tensor for tensor in self.compared if tensor.stage == stage]

    def checks(self) -> tuple[Check, ...]:
        """The worst of each kind."""
        kinds = dict.fromkeys(tensor.kind for tensor in self.compared)
        return tuple(_worst(kind, [tensor for tensor in self.compared if tensor.kind == kind]) for kind in kinds)

    def modules(self) -> tuple[Module, ...]:
        """The worst of each part of the model, in the order of the forward pass."""
        names = dict.fromkeys(tensor.name for tensor in self.compared if tensor.kind == "weights")
        layers = {match[2] for name in names if name is not None and (match := _LAYER.match(name))}
        names_by_module: dict[str, list[str]] = {}
        for name in names:
            if name is not None:
                module = module_of(name, all_layers=len(layers) > _FEW_LAYERS)
                names_by_module.setdefault(module, []).append(name)
        return tuple(self._module(module, set(names)) for module, names in names_by_module.items())

    def _module(self, module: str, names: set[str]) -> Module:
        own = [tensor for tensor in self.compared if tensor.name in names]
        sizes = {tensor.name: tensor.reference.numel() for tensor in own if tensor.kind == "weights"}
        return Module(
            module,
            sum(sizes.values()),
            _worst("gradients", [tensor for tensor in own if tensor.kind == "gradients"]),
            _worst("weights", [tensor for tensor in own if tensor.kind == "weights"]),
        )


def module_of(name: str, *, all_layers: bool = False) -> str:
    """`layers.0.attention` for a parameter of it; of many layers `layers.*.attention`."""
    match = _LAYER.match(name)
    if match is None:
        return name.partition(".")[0]
    return f"layers.{'*' if all_layers else match[2]}.{match[3]}"


def _worst(kind: str, compared: Sequence[ComparedTensor]) -> Check:
    if not compared:
        return Check(kind, 0.0, 1.0)
    worst = max(compared, key=lambda tensor: (not tensor.holds, tensor.error / tensor.allowed))
    where = worst.stage if worst.name is None else f"{worst.name}, {worst.stage.rpartition(' of ')[2]}"
    return Check(kind, worst.error, worst.allowed, where, worst.ranks is not None)


def compare(traces: Traces, tolerance: float, *, flip_distance: float = 0.0) -> Comparison:
    """Compares all traced tensors and numbers.

    Args:
        tolerance: relative; the error that a parameter's gradient may always have.
        flip_distance: the distance of a weight from its right value where rounding changes the sign of its update
            (`sign_flip_distance`); 0 for an optimizer with updates as small as the gradients.
    """
    return Comparison(list(_compared(traces, _Rounding(tolerance, flip_distance))))


def has_blockwise_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state is quantized in blocks, which a checkpoint cannot cut into the shards of another
    layout."""
    return eight_bits(optimizer) is not None


def sign_flip_distance(optimizer: Optimizer) -> float:
    """`flip_distance` of `compare`: twice the learning rate where small gradients move weights as far as large ones."""
    eps = getattr(optimizer, "eps", None)
    can_flip = optimizer.kind == "lion" or has_blockwise_state(optimizer) or (eps is not None and eps < EPS)
    return 2 * optimizer.learning_rate if can_flip else 0.0


def _compared(traces: Traces, rounding: _Rounding) -> Iterator[ComparedTensor]:
    by_rank, reference, perturbed = traces.by_rank, traces.reference, traces.perturbed
    metrics = _Metrics(rounding)
    initial = assemble([reference.initial_weights])[0]
    yield from _tensors("first weights", "first weights", [trace.initial_weights for trace in by_rank], initial)
    previous = initial
    for number, (step, perturbed_step) in enumerate(zip(reference.steps, perturbed.steps, strict=True), 1):
        if number > len(by_rank[0].steps):  # the layout met numbers that are not finite here
            yield _number(f"loss of step {number}", "loss", [math.nan], step.loss, 0.0)
            return
        steps = [trace.steps[number - 1] for trace in by_rank]
        yield from _step(f"step {number}", steps, step, perturbed_step, previous, rounding)
        yield from metrics.compared(
            f"step {number}", [each.metrics for each in steps], step.metrics, perturbed_step.metrics
        )
        previous = assemble([step.weights])[0]
    if reference.evaluation is not None and perturbed.evaluation is not None:
        allowed = rounding.number(perturbed.evaluation, reference.evaluation)
        losses = [math.nan if trace.evaluation is None else trace.evaluation for trace in by_rank]
        yield _number("evaluation", "evaluation", losses, reference.evaluation, allowed)
        own = [trace.evaluation_metrics for trace in by_rank]
        yield from metrics.compared("evaluation", own, reference.evaluation_metrics, perturbed.evaluation_metrics)
    if not by_rank[0].hit_non_finite:
        averages = [trace.average for trace in by_rank]
        label, kind = "average of the last step", "moving average"
        yield from _averages(label, kind, averages, [reference.average], perturbed.average, rounding)
        counters = [trace.counters for trace in by_rank]
        yield from _counters("after the last step", "counters", counters, reference.counters)
    for doing in ("saving", "exporting"):
        if any(doing in trace.problems for trace in by_rank):
            yield _number(doing, doing, [math.nan] * len(by_rank), 0.0, 0.0)
            return
    if not by_rank[0].hit_non_finite or by_rank[0].loaded_weights:
        yield from _resumed(traces, rounding)
    if (spoiled := [trace.spoiled for trace in by_rank if trace.spoiled is not None]) and len(spoiled) == len(by_rank):
        yield from _spoiled(spoiled)


class _Rounding:
    """The allowed errors, learnt from a run that differs by rounding alone; they grow from step to step.

    Numbers of that run that are not finite allow nothing: as errors they would allow everything from there on.
    """

    def __init__(self, tolerance: float, flip_distance: float) -> None:
        self.tolerance = tolerance
        # 2-norm of the error of a tensor of which a few updates had the other sign.
        self._flipped_norm = _FLIPPED_PER_TENSOR**0.5 * flip_distance
        self._worst_number = 0.0  # relative error of any number until now
        self._flipped_sum = 0.0  # `_flipped_norm` over all steps until now
        self._flipped_error = 0.0  # relative error of the weights by it, after the steps until now

    def number(self, perturbed: float, reference: float) -> float:
        """Relative, for a number (a loss, a norm): from the most that any number has been off until now."""
        self._worst_number = max(self._worst_number, *_finite([_relative(perturbed, reference)]))
        return max(self.tolerance, _ROUNDING_FACTOR * self._worst_number, _ROUNDING_FACTOR * self._flipped_error)

    def gradients(
        self, perturbed: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, is_first_step: bool
    ) -> dict[str, float]:
        """Relative, by parameter; after the first step weights differ too, and then the worst of all errors counts."""
        errors = {name: relative_error(perturbed[name], value) for name, value in reference.items()}
        worst = max(worst_error(_finite(errors.values())), self._flipped_error)
        return {
            name: max(self.tolerance, _ROUNDING_FACTOR * (error if is_first_step and math.isfinite(error) else worst))
            for name, error in errors.items()
        }

    def weights(self, perturbed: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative, by parameter. A gradient that is zero but for rounding moves one number of any tensor by one
        learning rate, so absolute distances count, whichever tensor they were seen in."""
        farthest = worst_error(_finite((perturbed[name] - value).norm().item() for name, value in reference.items()))
        norms = {name: max(value.norm().item(), EXACT) for name, value in reference.items()}
        self._flipped_error += worst_error(_finite(self._flipped_norm / norm for norm in norms.values()))
        self._flipped_sum += self._flipped_norm
        distance = _ROUNDING_FACTOR * farthest + self._flipped_sum
        return {name: self.tolerance + distance / norm for name, norm in norms.items()}


class _Metrics:
    """Metrics of steps and evaluations, and their allowed errors: some are zero but for rounding, others count."""

    def __init__(self, rounding: _Rounding) -> None:
        self._rounding = rounding
        self._worst: dict[str, float] = {}  # of each, by rounding alone, until now
        self._usual = 0.0  # the worst of all, without those that jump as a count does

    def compared(
        self,
        label: str,
        by_rank: Sequence[Mapping[str, float]],
        reference: Mapping[str, float],
        perturbed: Mapping[str, float],
    ) -> Iterator[ComparedTensor]:
        for name, value in reference.items():
            errors = _finite([_metric_error(perturbed.get(name, math.nan), value)])
            self._worst[name] = max(self._worst.get(name, 0.0), *errors)
            self._usual = max(self._usual, *(error for error in errors if error < _JUMP))
        flipped = self._rounding.number(1.0, 1.0)
        for name, value in reference.items():
            allowed = max(flipped, _ROUNDING_FACTOR * max(self._usual, self._worst[name]))
            values = [metrics.get(name, math.nan) for metrics in by_rank]
            number = _number(f"{name} of {label}", "metrics", values, value, allowed)
            yield replace(number, error=max(_metric_error(each, value) for each in values))


def _metric_error(value: float, reference: float) -> float:
    """The error relative to a least size, since a metric that is zero but for rounding says no more."""
    if _is_same(value, reference):
        return 0.0
    error = abs(value - reference) / max(abs(reference), _LEAST_METRIC)
    return error if math.isfinite(error) else math.inf


def _averages(
    label: str,
    kind: str,
    by_rank: Sequence[AverageTrace | None],
    reference: Sequence[AverageTrace | None],
    perturbed: AverageTrace | None,
    rounding: _Rounding,
) -> Iterator[ComparedTensor]:
    """Compares the moving average of the weights, where there is one.

    reference: of the processes that have all of it together. perturbed: as the run has it that differs by rounding;
    None: the average is compared exactly.
    """
    own, expected = ([average for average in averages if average is not None] for averages in (by_rank, reference))
    if not expected:
        return
    updates = [float(average.updates) for average in own] or [math.nan]
    yield _number(f"updates of the {label}", kind, updates, float(expected[0].updates), 0.0)
    values = assemble([average.weights for average in expected])[0]
    allowed = {} if perturbed is None else rounding.weights(assemble([perturbed.weights])[0], values)
    yield from _tensors(label, kind, [average.weights for average in own], values, allowed)


def _counters(
    label: str, kind: str, by_rank: Sequence[Mapping[str, float]], reference: Mapping[str, float]
) -> Iterator[ComparedTensor]:
    """Compares the counters of the run, exactly."""
    for name, count in reference.items():
        yield _number(f"{name} {label}", kind, [counters.get(name, math.nan) for counters in by_rank], count, 0.0)


def _spoiled(by_rank: Sequence[SpoiledStep]) -> Iterator[ComparedTensor]:
    """Whether every process ended with an error that names a gradient which was not finite on one of them."""
    name = next((step.parameter for step in by_rank if step.parameter), None)
    if name is not None:
        named = [float(step.error is not None and name in step.error) for step in by_rank]
        number = _number("a gradient that is not finite", "gradient not finite", named, 1.0, 0.0)
        yield replace(number, name=name, ranks=None)


def _finite(errors: Iterable[float]) -> list[float]:
    """The errors that an allowance may be learnt from; always 0 among them."""
    return [0.0, *filter(math.isfinite, errors)]


def _step(
    label: str,
    by_rank: Sequence[StepTrace],
    reference: StepTrace,
    perturbed: StepTrace,
    previous: Mapping[str, Tensor],
    rounding: _Rounding,
) -> Iterator[ComparedTensor]:
    loss = rounding.number(perturbed.loss, reference.loss)
    targets = [step.trained_tokens for step in by_rank]
    yield _number(f"targets of {label}", "targets", targets, reference.trained_tokens, 0)
    yield _number(f"loss of {label}", "loss", [step.loss for step in by_rank], reference.loss, loss)
    for name, counts in reference.expert_counts.items():
        yield _counts(f"expert counts of {label}", name, [step.expert_counts[name] for step in by_rank], counts)
    gradients = assemble([reference.gradients])[0]
    allowed = rounding.gradients(assemble([perturbed.gradients])[0], gradients, is_first_step=label == "step 1")
    yield from _tensors(f"gradients of {label}", "gradients", [step.gradients for step in by_rank], gradients, allowed)
    norm = max([rounding.number(perturbed.grad_norm, reference.grad_norm), *allowed.values()])
    norms, clipped = [step.grad_norm for step in by_rank], [step.clipped_norm for step in by_rank]
    yield _number(f"norm of {label}", "gradient norm", norms, reference.grad_norm, norm)
    yield _number(f"clipped norm of {label}", "clipped norm", clipped, reference.clipped_norm, norm)
    weights = assemble([reference.weights])[0]
    allowed = rounding.weights(assemble([perturbed.weights])[0], weights)
    yield from _tensors(
        f"weights of {label}", "weights", [step.weights for step in by_rank], weights, allowed, previous
    )


def _resumed(traces: Traces, rounding: _Rounding) -> Iterator[ComparedTensor]:
    """Each side's checkpoint, loaded by the other side (or by the side itself, where it cannot be resharded).

    Compares the weights as they were loaded, exactly, and those after the next step, with the reference's step from the
    state in memory.
    """
    by_rank, reference = traces.by_rank, traces.reference
    assert reference.next_step is not None and traces.perturbed.next_step is not None
    after = assemble([reference.next_step.weights])[0]
    allowed = rounding.weights(assemble([traces.perturbed.next_step.weights])[0], after)
    of_reference = "one process's", assemble([reference.steps[-1].weights])[0], [reference]
    of_layout = "the layout's", assemble([trace.steps[-1].weights for trace in by_rank])[0], by_rank
    in_layout, in_reference = (of_reference, of_layout) if traces.reshards else (of_layout, of_reference)
    layout_steps = [trace.resumed_step.weights for trace in by_rank if trace.resumed_step is not None]
    reference_steps = [] if reference.resumed_step is None else [reference.resumed_step.weights]
    for (whose, saved, saved_by), where, loaded, stepped in (
        (in_layout, "in the layout", [trace.loaded_weights for trace in by_rank], layout_steps),
        (in_reference, "in one process", [reference.loaded_weights], reference_steps),
    ):
        label = f"{whose} checkpoint {where}"
        traced = by_rank if where == "in the layout" else [reference]
        if any(trace.problems.get("loading") for trace in traced):
            yield _number(f"loading {label}", "loading", [math.nan] * len(traced), 0.0, 0.0)
            return
        yield from _tensors(f"weights of {label}", "saved weights, loaded", loaded, saved)
        averages = [trace.loaded_average for trace in traced]
        was = [trace.average for trace in saved_by]
        yield from _averages(f"average of {label}", "saved average, loaded", averages, was, None, rounding)
        counters = [trace.loaded_counters for trace in traced]
        yield from _counters(f"of {label}", "saved counters, loaded", counters, reference.counters)
        kind = "a step after resuming"
        if not stepped:
            yield _number(f"a step of {label}", kind, [math.nan], reference.next_step.loss, 0.0)
            return
        yield from _tensors(f"a step of {label}", kind, stepped, after, allowed, saved)
        label, averages = f"average after a step of {label}", [trace.resumed_average for trace in traced]
        next_average, by_rounding = [reference.next_average], traces.perturbed.next_average
        yield from _averages(label, "moving average", averages, next_average, by_rounding, rounding)
    yield from _exported(traces)


def _exported(traces: Traces) -> Iterator[ComparedTensor]:
    """The files of the result: written by the layout, and by one process from the layout's checkpoint; exactly."""
    own, reference = traces.by_rank[0].exported, traces.reference.exported
    if own is None or reference is None:  # the error of the one that could not is reported elsewhere
        return
    stage = kind = "exported result"
    for name in dict.fromkeys((*reference, *own)):
        value, written = reference.get(name), own.get(name)
        if value is None or written is None or written.shape != value.shape:
            there = next(tensor for tensor in (value, written) if tensor is not None)
            yield ComparedTensor(stage, kind, name, math.inf, EXACT, torch.zeros_like(there), there)
        else:
            yield _tensor(stage, kind, name, [{name: (ShardBox.full(value.shape), written)}], value, 0.0)


def _tensors(
    stage: str,
    kind: str,
    shards_by_rank: Sequence[LocalShards],
    reference: Mapping[str, Tensor],
    allowed: Mapping[str, float] | None = None,
    previous: Mapping[str, Tensor] | None = None,
) -> Iterator[ComparedTensor]:
    """Compares each tensor of the reference; exactly, unless errors are allowed."""
    for name, value in reference.items():
        own_allowed = allowed[name] if allowed else 0.0
        before = None if previous is None else previous.get(name)
        yield _tensor(stage, kind, name, shards_by_rank, value, own_allowed, before)


def _tensor(
    stage: str,
    kind: str,
    name: str,
    shards_by_rank: Sequence[LocalShards],
    reference: Tensor,
    allowed: float,
    previous: Tensor | None = None,
) -> ComparedTensor:
    allowed = max(allowed, EXACT)
    own = [{name: shards[name]} if name in shards else {} for shards in shards_by_rank]
    if not any(own):
        return ComparedTensor(stage, kind, name, math.inf, allowed, torch.zeros_like(reference), reference)
    try:
        tensors, differing = assemble(own)
    except ValueError:  # a part of it is on no process
        return ComparedTensor(stage, kind, name, math.inf, allowed, torch.full_like(reference, math.nan), reference)
    # Two processes with one box must agree bit for bit: what they do with it from then on would drift apart.
    ranks, value = differing.get(name), tensors[name]
    error = relative_error(value, reference)
    return ComparedTensor(stage, kind, name, error, allowed, value, reference, previous, ranks)


def _counts(stage: str, name: str, by_rank: Sequence[Tensor], reference: Tensor) -> ComparedTensor:
    """Rows of each expert, which all processes know of all of them: exactly."""
    error = relative_error(by_rank[0], reference)
    differing = [(0, rank) for rank, counts in enumerate(by_rank) if not torch.equal(counts, by_rank[0])]
    ranks = differing[0] if differing else None
    return ComparedTensor(stage, "expert counts", name, error, EXACT, by_rank[0], reference, ranks=ranks)


def _number(stage: str, kind: str, by_rank: Sequence[float], reference: float, allowed: float) -> ComparedTensor:
    values = torch.tensor(by_rank, dtype=torch.float64)
    error = _relative(max(by_rank, key=lambda value: _relative(value, reference)), reference)
    unequal = next((rank for rank, value in enumerate(by_rank) if not _is_same(value, by_rank[0])), None)
    ranks = None if unequal is None else (0, unequal)
    value = torch.tensor(reference).double()
    return ComparedTensor(stage, kind, None, error, max(allowed, EXACT), values, value, ranks=ranks)


def _is_same(value: float, reference: float) -> bool:
    return value == reference or (math.isnan(value) and math.isnan(reference))


def _relative(value: float, reference: float) -> float:
    if not math.isfinite(value) or not math.isfinite(reference):
        return math.inf
    return abs(value - reference) / abs(reference) if reference else (0.0 if value == reference else math.inf)
