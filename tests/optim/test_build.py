"""Every optimizer against its formula in float64, and resumed against uninterrupted."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from builders.worst_errors import worst_absolute_error
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import CheckpointError, ModelError
from danlu.memory.pages import paged_state
from danlu.optim.build import Optimizers
from danlu.optim.build import build as build_optimizer
from danlu.recipe.sections import SGD, Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer, PagedAdamW

build = partial(build_optimizer, paged_state=paged_state)
MATRIX, VECTOR, EMBEDDING = "layers.0.q_proj.weight", "norm.weight", "embed_tokens.weight"
SHAPES = {MATRIX: (6, 10), VECTOR: (10,), EMBEDDING: (12, 10)}
SECTIONS: list[Optimizer] = [
    AdamW(learning_rate=0.01),
    SGD(learning_rate=0.01, weight_decay=0.1),
    SGD(learning_rate=0.01, momentum=0.0),
    SGD(learning_rate=0.01, nesterov=True),
    Adafactor(learning_rate=0.05, weight_decay=0.1),
    Lion(learning_rate=0.01),
    Muon(learning_rate=0.02),
    AdamW8bit(learning_rate=0.01),  # everything here is small enough to keep float32 moments
    PagedAdamW(learning_rate=0.01),
]
# Their formulas are in test_eight_bit.py, test_bfloat16_moments.py and test_galore.py.
OTHERS: list[Optimizer] = [
    AdamW8bit(learning_rate=0.01, block=16, smallest=16),
    PagedAdamW(learning_rate=0.01, bits=8),
    AdamW(learning_rate=0.01, moments="bf16"),
    AdamW(learning_rate=0.01, moments="8bit"),
    GaLore(learning_rate=0.1, rank=3, update_every=2),
]
each = pytest.mark.parametrize("section", SECTIONS + OTHERS, ids=lambda section: section.kind)


def model(seed: int = 0) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take_steps(parameters: dict[str, Parameter], optimizer: Optimizers, steps: range, free: bool = False) -> None:
    for step in steps:
        for name, grad in gradients(step).items():
            parameters[name].grad = grad
        optimizer.set_learning_rate(1 / step)
        optimizer.step(free_gradients=free)
        optimizer.zero_grad()


def trained(section: Optimizer, steps: int, free: bool = False) -> tuple[dict[str, Parameter], Optimizers]:
    parameters = model()
    optimizer = build(parameters.items(), section)
    take_steps(parameters, optimizer, range(1, steps + 1), free)
    return parameters, optimizer


# Slow formulas: (weight, gradient, state, step, rate, decay, section) -> weight, all float64.


def adamw_formula(w: Tensor, g: Tensor, s: dict[str, Any], t: int, rate: float, decay: float, o: AdamW) -> Tensor:
    first, second = o.betas
    s["m"] = first * s.get("m", 0) + (1 - first) * g
    s["v"] = second * s.get("v", 0) + (1 - second) * g * g
    m, v = s["m"] / (1 - first**t), s["v"] / (1 - second**t)
    return w - rate * decay * w - rate * m / (v.sqrt() + o.eps)


def sgd_formula(w: Tensor, g: Tensor, s: dict[str, Any], t: int, rate: float, decay: float, o: SGD) -> Tensor:
    g = g + decay * w
    s["b"] = o.momentum * s.get("b", 0) + g
    return w - rate * (g + o.momentum * s["b"] if o.nesterov else s["b"])


def lion_formula(w: Tensor, g: Tensor, s: dict[str, Any], t: int, rate: float, decay: float, o: Lion) -> Tensor:
    m = s.get("m", torch.zeros_like(g))
    s["m"] = o.betas[1] * m + (1 - o.betas[1]) * g
    return w - rate * (torch.sign(o.betas[0] * m + (1 - o.betas[0]) * g) + decay * w)


def adafactor_formula(w: Tensor, g: Tensor, s: dict[str, Any], t: int, rate: float, decay: float, o: Any) -> Tensor:
    tiny = torch.finfo(torch.float32).eps
    share = t**o.beta2_decay
    size = max(1e-3, w.square().mean().sqrt().item()) * min(rate, 1 / math.sqrt(t))
    if g.ndim == 2:
        s["r"] = s.get("r", 0) + share * (g.square().mean(1) - s.get("r", 0))
        s["c"] = s.get("c", 0) + share * (g.square().mean(0) - s.get("c", 0))
        variance = torch.outer(s["r"], s["c"]) / s["r"].mean()
    else:
        variance = s["v"] = s.get("v", 0) + share * (g.square() - s.get("v", 0))
    update = g / variance.clamp(min=tiny**2).sqrt()
    return (1 - rate * decay) * w - size / max(1, update.square().mean().sqrt().item() / o.clip_threshold) * update


def muon_formula(w: Tensor, g: Tensor, s: dict[str, Any], t: int, rate: float, decay: float, o: Muon) -> Tensor:
    if w.ndim != 2 or len(w) == SHAPES[EMBEDDING][0]:
        adamw = AdamW(learning_rate=o.adamw_learning_rate, betas=o.adamw_betas)
        return adamw_formula(w, g, s, t, o.adamw_learning_rate / t, decay, adamw)
    s["b"] = o.momentum * s.get("b", 0) + (1 - o.momentum) * g
    update = (1 - o.momentum) * g + o.momentum * s["b"]
    x = update / update.norm()  # 6 x 10: wide already, so no transpose
    for _ in range(o.newton_schulz_steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (1 - rate * decay) * w - rate * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "adamw": adamw_formula,
    "adamw8bit": adamw_formula,
    "paged-adamw": adamw_formula,
    "sgd": sgd_formula,
    "lion": lion_formula,
    "adafactor": adafactor_formula,
    "muon": muon_formula,
}


def by_formula(section: Optimizer, steps: int, decay_everything: bool = False) -> dict[str, Tensor]:
    weights = {name: parameter.detach().double() for name, parameter in model().items()}
    states: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for step in range(1, steps + 1):
        for name, grad in gradients(step).items():
            decay = section.weight_decay if name == MATRIX or decay_everything else 0.0
            args = (weights[name], grad.double(), states[name], step, section.learning_rate / step, decay, section)
            weights[name] = FORMULAS[section.kind](*args)
    return weights


def largest_difference(parameters: dict[str, Parameter], weights: dict[str, Tensor]) -> float:
    return worst_absolute_error({name: parameter.detach() for name, parameter in parameters.items()}, weights)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.kind)
def test_five_steps_equal_the_formula_in_float64(section: Optimizer) -> None:
    parameters, _ = trained(section, 5)
    # torch's Muon iterates in bfloat16: 8 bits of mantissa on entries of about 0.3, times the rates.
    tolerance = 1e-3 if section.kind == "muon" else 2e-6
    assert largest_difference(parameters, by_formula(section, 5)) < tolerance
    assert largest_difference(parameters, by_formula(section, 4)) > 1e-3 * section.learning_rate
    if section.weight_decay and section.kind != "muon":
        assert largest_difference(parameters, by_formula(section, 5, decay_everything=True)) > 100 * tolerance


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    parameters, optimizer = trained(Muon(), 1)
    assert [type(part).__name__ for part in optimizer.optimizers] == ["Muon", "AdamW"]
    muon_only = optimizer.optimizers[0].param_groups[0]["params"]
    assert len(muon_only) == 1 and muon_only[0] is parameters[MATRIX]
    assert optimizer.optimizers[1].param_groups[0]["lr"] == Muon().adamw_learning_rate
    matrix = {MATRIX: Parameter(torch.randn(4, 4))}
    assert [type(part).__name__ for part in build(matrix.items(), Muon()).optimizers] == ["Muon"]


@each
def test_freeing_gradients_changes_no_bit(section: Optimizer) -> None:
    together, _ = trained(section, 3)
    freed, _ = trained(section, 3, free=True)
    assert all(torch.equal(together[name], freed[name]) for name in SHAPES)
    parameters = model()
    optimizer = build(parameters.items(), section)
    for name, grad in gradients(1).items():
        parameters[name].grad = grad
    optimizer.step()
    assert all(parameter.grad is not None for parameter in parameters.values())
    optimizer.step(free_gradients=True)
    assert all(parameter.grad is None for parameter in parameters.values())


@each
def test_resumed_equals_uninterrupted_bit_for_bit(section: Optimizer) -> None:
    whole, _ = trained(section, 6)
    half, optimizer = trained(section, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    # Another order of parameters, as another version of the model might list them.
    weights = {name: half[name].detach().clone() for name in reversed(SHAPES)}

    def resumed(tensors: dict[str, Tensor]) -> dict[str, Parameter]:
        parameters = {name: Parameter(weight.clone()) for name, weight in weights.items()}
        fresh = build(parameters.items(), section)
        fresh.load_state({name: tensor.clone() for name, tensor in tensors.items()}, optimizer.state_scalars())
        take_steps(parameters, fresh, range(4, 7))
        return parameters

    after = resumed(saved)
    assert all(torch.equal(after[name], whole[name]) for name in SHAPES)
    if saved:
        altered = resumed({name: (tensor * 1.5).to(tensor.dtype) for name, tensor in saved.items()})
        assert not all(torch.equal(altered[name], whole[name]) for name in SHAPES)


@each
def test_state_is_named_flat_and_of_the_predicted_types_and_sizes(section: Optimizer) -> None:
    parameters = model()
    optimizer = build(parameters.items(), section)
    predicted = optimizer.state_bytes()
    assert optimizer.state_tensors() == {}
    moments = getattr(section, "moments", "float32")
    kept = {} if moments == "float32" else {"moments": moments}
    assert optimizer.state_scalars() == {"kind": section.kind, "unstepped": sorted(SHAPES), **kept}
    take_steps(parameters, optimizer, range(1, 2))
    state = optimizer.state_tensors()
    narrow = {name.partition(".")[0] for name, tensor in state.items() if tensor.dtype != torch.float32}
    assert narrow == ({"exp_avg", "exp_avg_sq"} if section == OTHERS[0] or moments == "bf16" else set())
    tensors = optimizer.empty_state(optimizer.state_scalars())
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()
    }
    assert sum(tensor.nbytes for tensor in state.values()) == predicted
    assert {name.partition(".")[2] for name in state} <= set(SHAPES)


def test_state_of_a_parameter_without_gradient_so_far() -> None:
    def run(section: Optimizer, resume_after: int | None) -> dict[str, Parameter]:
        parameters = model()
        optimizer = build(parameters.items(), section)
        for step in range(1, 5):
            for name, grad in gradients(step).items():
                parameters[name].grad = None if name == VECTOR and step < 3 else grad
            optimizer.step()
            optimizer.zero_grad()
            if step == resume_after:
                assert optimizer.state_scalars()["unstepped"] == [VECTOR]
                fresh = build(parameters.items(), section)
                fresh.load_state(optimizer.state_tensors(), optimizer.state_scalars())
                optimizer = fresh
        return parameters

    for section in (AdamW(), SGD(), Lion(), Adafactor()):
        whole, resumed = run(section, None), run(section, 2)
        assert all(torch.equal(whole[name], resumed[name]) for name in SHAPES)


def test_learning_rate_is_the_base_times_the_multiplier_also_after_a_resume() -> None:
    parameters, optimizer = trained(Muon(learning_rate=0.02, adamw_learning_rate=0.001), 2)
    fresh = build(parameters.items(), Muon(learning_rate=0.02, adamw_learning_rate=0.001))
    fresh.load_state(optimizer.state_tensors(), optimizer.state_scalars())
    fresh.set_learning_rate(0.25)
    assert fresh.learning_rate == 0.005
    assert {group["lr"] for part in fresh.optimizers for group in part.param_groups} == {0.005, 0.00025}


def test_a_ratio_of_learning_rates_by_name() -> None:
    def rates(optimizer: Optimizers) -> dict[str, float]:
        names = {parameter: name for name, parameter in optimizer.parameters.items()}
        return {
            names[parameter]: group["lr"]
            for part in optimizer.optimizers
            for group in part.param_groups
            for parameter in group["params"]
        }

    def of(name: str) -> float:
        return 16.0 if name == MATRIX else 1.0

    for section in SECTIONS + OTHERS:
        optimizer = build(model().items(), section, rate_of=of)
        plain = rates(build(model().items(), section))
        for multiplier in (1.0, 0.25, 0.5):
            optimizer.set_learning_rate(multiplier)
            assert optimizer.learning_rate == section.learning_rate * multiplier
            assert rates(optimizer) == {name: of(name) * rate * multiplier for name, rate in plain.items()}
    faster, sixteenfold, slower = model(), model(), model()
    for parameters, section, ratio in (
        (faster, AdamW(learning_rate=0.01), of),
        (sixteenfold, AdamW(learning_rate=0.16), None),
        (slower, AdamW(learning_rate=0.01), None),
    ):
        take_steps(parameters, build(parameters.items(), section, rate_of=ratio), range(1, 4))
    assert torch.equal(faster[MATRIX], sixteenfold[MATRIX]) and torch.equal(faster[VECTOR], slower[VECTOR])
    assert not torch.equal(faster[MATRIX], slower[MATRIX])


def test_frozen_parameters_may_be_of_any_type() -> None:
    parameters = model()
    parameters["layers.0.q_proj.base"] = Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    parameters["layers.0.k_proj.base"] = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)
    assert build(parameters.items(), AdamW()).parameters.keys() == SHAPES.keys()


def altered_state(change: Callable[[dict[str, Tensor]], Any]) -> str:
    _, optimizer = trained(AdamW(), 1)
    tensors = optimizer.state_tensors()
    change(tensors)
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state(tensors, optimizer.state_scalars())
    assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.state_tensors().items())
    return str(caught.value)


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    message = altered_state(lambda tensors: tensors.pop("exp_avg.norm.weight"))
    assert "1 tensors are missing, the first is exp_avg.norm.weight" in message
    message = altered_state(lambda tensors: tensors.update({"exp_avg.ghost": torch.zeros(1)}))
    assert "1 tensors belong to no trained parameter, the first is exp_avg.ghost" in message
    message = altered_state(lambda tensors: tensors.update({"exp_avg.norm.weight": torch.zeros(3)}))
    assert "exp_avg.norm.weight is torch.float32 [3], expected torch.float32 [10]" in message
    message = altered_state(lambda tensors: tensors.update({"step.norm.weight": torch.zeros((), dtype=torch.int64)}))
    assert "step.norm.weight is torch.int64 [], expected torch.float32 []" in message


def test_the_state_of_another_kind_is_refused() -> None:
    _, lion = trained(Lion(), 1)
    _, adamw = trained(AdamW(), 1)
    with pytest.raises(CheckpointError, match="holds the state of optimizer 'lion', the recipe asks for 'adamw'"):
        adamw.load_state(lion.state_tensors(), lion.state_scalars())
    with pytest.raises(CheckpointError, match="holds the state of optimizer 'lion', the recipe asks for 'adamw'"):
        adamw.empty_state(lion.state_scalars())


def test_a_state_of_other_bits_or_blocks_is_refused() -> None:
    _, float32 = trained(AdamW8bit(), 1)
    _, eight_bit = trained(AdamW8bit(smallest=16, block=16), 1)
    _, other_blocks = trained(AdamW8bit(smallest=16, block=20), 1)
    with pytest.raises(CheckpointError, match="tensors are missing, the first is exp_avg_absmax.embed_tokens.weight"):
        eight_bit.load_state(float32.state_tensors(), float32.state_scalars())
    with pytest.raises(CheckpointError, match=r"expected torch.float32 \[8\]"):
        eight_bit.load_state(other_blocks.state_tensors(), other_blocks.state_scalars())
    scalars = eight_bit.state_scalars()
    tensors = {name: tensor.float() for name, tensor in eight_bit.state_tensors().items()}
    with pytest.raises(CheckpointError, match=r"exp_avg.embed_tokens.weight is torch.float32 .*, expected torch.uint8"):
        eight_bit.load_state(tensors, scalars)


def test_nothing_to_train_and_low_precision_parameters_are_refused() -> None:
    frozen = {name: parameter.requires_grad_(False) for name, parameter in model().items()}
    with pytest.raises(ModelError, match="no trainable parameter"):
        build(frozen.items(), AdamW())
    with pytest.raises(ModelError, match=r"parameter w is torch\.bfloat16, but trained parameters are float32"):
        build([("w", Parameter(torch.zeros(2, dtype=torch.bfloat16)))], AdamW())


@pytest.mark.parametrize(("saved", "asked"), [("float32", "bf16"), ("bf16", "float32"), ("bf16", "8bit")])
def test_moments_that_are_kept_in_another_way_are_refused_by_name(saved: Any, asked: Any) -> None:
    _, optimizer = trained(AdamW(moments=saved), 1)
    other = build(model().items(), AdamW(moments=asked))
    with pytest.raises(CheckpointError, match=rf"optimizer\.moments: the checkpoint holds {saved}, .* for {asked}"):
        other.empty_state(optimizer.state_scalars())
    build(model().items(), AdamW(moments=saved)).empty_state(optimizer.state_scalars())
