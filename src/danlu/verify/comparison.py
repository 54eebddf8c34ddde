"""Many processes against one: every number they have seen, in the order in which a step computes them.

How much may two right computations differ? Sums are rounded in another order, and an optimizer that divides by the size
of gradients (Adam) or takes their sign makes much of little where one is almost zero. So one process runs a second time
with first weights that differ by rounding (`workers.PERTURBATION`), and the layout may be as far from the first run as
a few times what this second one is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from danlu.numerics.relative_error import relative_error, worst_error
from danlu.recipe.sections import Optimizer
from danlu.report.verification import EXACT, Check, Module
from danlu.verify.proxy_model import EPS
from danlu.verify.trace import Parts, StepTrace, Trace, joined
from danlu.verify.workers import Observed

TOLERANCES = {"fp32": 1e-6, "bf16": 1e-1, "fp16": 3e-2}
"""Relative, of each parameter's gradient; other types are told apart from float32 by their digits."""
_TIMES = 8.0  # the effect of rounding
_TURNS = 8  # numbers of a tensor whose update rounding may turn round in a step
_FEW_LAYERS = 4  # more are shown together
_LAYER = re.compile(r"^(layers)\.(\d+)\.([a-z_]+)")


@dataclass(frozen=True)
class Compared:
    """One tensor or number, of many processes and of one."""

    stage: str  # "gradients of step 1"
    kind: str  # "gradients", "weights", "loss", ...
    name: str | None  # of the parameter
    error: float  # relative
    allowed: float
    many: Tensor
    one: Tensor
    before: Tensor | None = None
    """Of weights after an update: what they were."""
    ranks: tuple[int, int] | None = None
    """Two processes that hold the same part of it with different numbers."""

    @property
    def holds(self) -> bool:
        """Never of numbers that are not finite, whatever is allowed: nothing is known of their error."""
        return self.ranks is None and math.isfinite(self.error) and self.error <= self.allowed


@dataclass
class Comparison:
    """Everything that was compared, in the order of computation."""

    found: list[Compared] = field(default_factory=list)

    def first_wrong(self) -> Compared | None:
        return next((one for one in self.found if not one.holds), None)

    def of(self, stage: str) -> list[Compared]:
        return [one for one in self.found if one.stage == stage]

    def checks(self) -> tuple[Check, ...]:
        """The worst of each kind."""
        kinds = dict.fromkeys(one.kind for one in self.found)
        return tuple(_worst(kind, [one for one in self.found if one.kind == kind]) for kind in kinds)

    def modules(self) -> tuple[Module, ...]:
        """The worst of each part of the model, in the order of the forward pass."""
        names = list(dict.fromkeys(one.name for one in self.found if one.name is not None and one.kind == "weights"))
        layers = {match[2] for name in names if (match := _LAYER.match(name))}
        together: dict[str, list[str]] = {}
        for name in names:
            together.setdefault(module_of(name, all_layers=len(layers) > _FEW_LAYERS), []).append(name)
        return tuple(self._module(module, set(of)) for module, of in together.items())

    def _module(self, module: str, names: set[str]) -> Module:
        mine = [one for one in self.found if one.name in names]
        sizes = {one.name: one.one.numel() for one in mine}
        return Module(
            module,
            sum(sizes.values()),
            _worst("gradients", [one for one in mine if one.kind == "gradients"]),
            _worst("weights", [one for one in mine if one.kind == "weights"]),
        )


def module_of(name: str, *, all_layers: bool = False) -> str:
    """`layers.0.attention` for a parameter of it; of many layers `layers.*.attention`."""
    match = _LAYER.match(name)
    if match is None:
        return name.partition(".")[0]
    return f"layers.{'*' if all_layers else match[2]}.{match[3]}"


def _worst(kind: str, found: Sequence[Compared]) -> Check:
    if not found:
        return Check(kind, 0.0, 1.0)
    worst = max(found, key=lambda one: (not one.holds, one.error / one.allowed))
    where = worst.stage if worst.name is None else f"{worst.name}, {worst.stage.rpartition(' of ')[2]}"
    return Check(kind, worst.error, worst.allowed, where, worst.ranks is not None)


def compare(observed: Observed, tolerance: float, *, turns: float = 0.0) -> Comparison:
    """Compares all that was observed.

    tolerance: what a parameter's gradient may be off without any allowance. turns: by how much an update moves a weight
    the other way where rounding turns its sign; 0 for an optimizer that makes little of little.
    """
    comparison = Comparison()
    comparison.found += _compared(observed, _Rounding(tolerance, turns))
    return comparison


def turns_of(optimizer: Optimizer) -> float:
    """`turns` of `compare`: twice the learning rate where small gradients count as much as large ones."""
    eps = getattr(optimizer, "eps", None)
    in_few_bits = optimizer.kind == "adamw8bit" or getattr(optimizer, "bits", 32) == 8
    restless = optimizer.kind == "lion" or in_few_bits or (eps is not None and eps < EPS)
    return 2 * optimizer.learning_rate if restless else 0.0


def _compared(observed: Observed, rounding: _Rounding) -> Iterator[Compared]:
    many, one, perturbed = observed.many, observed.one, observed.perturbed
    lead = many[0]
    for name, value in joined([one.first_weights])[0].items():
        yield _tensor("first weights", "first weights", name, [seen.first_weights for seen in many], value, 0.0)
    before = joined([one.first_weights])[0]
    for number, (theirs, again) in enumerate(zip(one.steps, perturbed.steps, strict=True), 1):
        if number > len(lead.steps):
            yield _number(f"loss of step {number}", "loss", [math.nan], theirs.loss, 0.0)
            return
        yield from _step(f"step {number}", [seen.steps[number - 1] for seen in many], theirs, again, before, rounding)
        before = joined([theirs.weights])[0]
    if one.evaluation is not None and perturbed.evaluation is not None:
        allowed = rounding.number(perturbed.evaluation, one.evaluation)
        scores = [math.nan if seen.evaluation is None else seen.evaluation for seen in many]
        yield _number("evaluation", "evaluation", scores, one.evaluation, allowed)
    if not lead.ended or lead.loaded:
        yield from _resumed(many, one, perturbed, rounding, observed.reshards)


class _Rounding:
    """What is allowed, learnt from a run that differs by rounding alone; it grows from step to step.

    Numbers of that run that are not finite allow nothing: as errors they would allow everything from there on.
    """

    def __init__(self, tolerance: float, turns: float) -> None:
        self.tolerance = tolerance
        self._turned = _TURNS**0.5 * turns  # distance, of a tensor in which a few numbers went the other way
        self._number = 0.0
        self._turns = 0.0  # the same over all steps until now
        self._moved = 0.0  # relative, by turned numbers in the steps before

    def number(self, perturbed: float, one: float) -> float:
        """For a number: the most that any number has been off until now."""
        self._number = max(self._number, *_finite([_relative(perturbed, one)]))
        return max(self.tolerance, _TIMES * self._number, _TIMES * self._moved)

    def gradients(self, perturbed: Mapping[str, Tensor], one: Mapping[str, Tensor], *, first: bool) -> dict[str, float]:
        """Relative, by parameter; later than the first step weights differ too, and any of them anywhere counts."""
        errors = {name: relative_error(perturbed[name], one[name]) for name in one}
        worst = worst_error(_finite(errors.values()))
        return {
            name: max(self.tolerance, _TIMES * (error if first and math.isfinite(error) else max(worst, self._moved)))
            for name, error in errors.items()
        }

    def weights(self, perturbed: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative, by parameter. A gradient that is zero but for rounding moves one number of any tensor by one
        learning rate, so distances count, wherever they are."""
        farthest = worst_error(_finite((perturbed[name] - one[name]).norm().item() for name in one))
        lengths = {name: max(value.norm().item(), EXACT) for name, value in one.items()}
        self._moved += worst_error(_finite(self._turned / length for length in lengths.values()))
        self._turns += self._turned
        return {name: self.tolerance + (_TIMES * farthest + self._turns) / length for name, length in lengths.items()}


def _finite(errors: Iterable[float]) -> list[float]:
    """Of what a second run by one process is off, what an allowance may be learnt from; 0 in any case."""
    return [0.0, *filter(math.isfinite, errors)]


def _step(
    label: str,
    many: Sequence[StepTrace],
    one: StepTrace,
    perturbed: StepTrace,
    before: Mapping[str, Tensor],
    rounding: _Rounding,
) -> Iterator[Compared]:
    loss = rounding.number(perturbed.loss, one.loss)
    yield _number(f"targets of {label}", "targets", [s.trained_tokens for s in many], one.trained_tokens, 0)
    yield _number(f"loss of {label}", "loss", [seen.loss for seen in many], one.loss, loss)
    theirs, again = joined([one.gradients])[0], joined([perturbed.gradients])[0]
    allowed = rounding.gradients(again, theirs, first=label == "step 1")
    for name, value in theirs.items():
        yield _tensor(f"gradients of {label}", "gradients", name, [s.gradients for s in many], value, allowed[name])
    norm = max([rounding.number(perturbed.norm, one.norm), *allowed.values()])
    yield _number(f"norm of {label}", "gradient norm", [seen.norm for seen in many], one.norm, norm)
    yield _number(f"clipped norm of {label}", "clipped norm", [seen.clipped for seen in many], one.clipped, norm)
    theirs, again = joined([one.weights])[0], joined([perturbed.weights])[0]
    allowed = rounding.weights(again, theirs)
    for name, value in theirs.items():
        yield _tensor(
            f"weights of {label}", "weights", name, [s.weights for s in many], value, allowed[name], before.get(name)
        )


def _resumed(
    many: Sequence[Trace], one: Trace, perturbed: Trace, rounding: _Rounding, reshards: bool
) -> Iterator[Compared]:
    """Saved on one side and loaded on the other (or the same): weights at once, and after the step that follows."""
    assert one.next is not None and perturbed.next is not None
    weights = joined([one.steps[-1].weights])[0]
    after = joined([one.next.weights])[0]
    allowed = rounding.weights(joined([perturbed.next.weights])[0], after)
    saved_by_many = joined([seen.steps[-1].weights for seen in many])[0]
    of_one, of_many = ("one process's", weights), ("the layout's", saved_by_many)
    theirs, ours = (of_one, of_many) if reshards else (of_many, of_one)
    stepped = [seen.resumed.weights for seen in many if seen.resumed is not None]
    ways = (
        (theirs, "in the layout", [seen.loaded for seen in many], stepped),
        (ours, "in one process", [one.loaded], [] if one.resumed is None else [one.resumed.weights]),
    )
    for (whose, saved), where, loaded, then in ways:
        way = f"{whose} checkpoint {where}"
        for name, value in saved.items():
            yield _tensor(f"weights of {way}", "saved weights, loaded", name, loaded, value, 0.0)
        if not then:
            yield _number(f"a step of {way}", "a step after resuming", [math.nan], one.next.loss, 0.0)
            return
        for name, value in after.items():
            yield _tensor(f"a step of {way}", "a step after resuming", name, then, value, allowed[name], saved[name])


def _tensor(
    stage: str,
    kind: str,
    name: str,
    parts: Sequence[Parts],
    one: Tensor,
    allowed: float,
    before: Tensor | None = None,
) -> Compared:
    mine = [{name: part[name]} if name in part else {} for part in parts]
    if not any(mine):
        return Compared(stage, kind, name, math.inf, max(allowed, EXACT), torch.zeros_like(one), one)
    made, differing = joined(mine)
    # Two processes with one box must agree bit for bit: what they do with it from then on would drift apart.
    ranks = differing.get(name)
    return Compared(
        stage, kind, name, relative_error(made[name], one), max(allowed, EXACT), made[name], one, before, ranks
    )


def _number(stage: str, kind: str, many: Sequence[float], one: float, allowed: float) -> Compared:
    values = torch.tensor(many, dtype=torch.float64)
    worst = max(many, key=lambda value: _relative(value, one))
    other = next((rank for rank, value in enumerate(many) if not _same(value, many[0])), None)
    ranks = None if other is None else (0, other)
    error, whole = _relative(worst, one), torch.tensor(one).double()
    return Compared(stage, kind, None, error, max(allowed, EXACT), values, whole, ranks=ranks)


def _same(value: float, other: float) -> bool:
    return value == other or (math.isnan(value) and math.isnan(other))


def _relative(value: float, one: float) -> float:
    if not math.isfinite(value) or not math.isfinite(one):
        return math.inf
    return abs(value - one) / abs(one) if one else (0.0 if value == one else math.inf)
