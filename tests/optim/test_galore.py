"""GaLore against the paper's algorithm in float64, and against what it promises about gradients and left-out steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from builders.worst_errors import worst_absolute_error
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import ModelError, RecipeError
from danlu.optim.build import Optimizers, build
from danlu.optim.galore import GaLore
from danlu.optim.gradients import clip_grad_norm
from danlu.recipe import sections
from danlu.recipe.rules.training import optimizer_is_consistent

TALL, WIDE, NORM = "layers.0.up_proj.weight", "layers.0.down_proj.weight", "norm.weight"
SHAPES = {TALL: (20, 12), WIDE: (12, 20), NORM: (12,)}
SECTION = sections.GaLore(rank=4, update_every=2, scale=0.5, learning_rate=0.1, weight_decay=0.1)
Steps = Sequence[Sequence[int]]  # of each step, the seeds of its micro-batches
STEPS: Steps = ((1, 2), (3,), (4, 5, 6), (7,), (8, 9))


def make() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def loss(parameters: dict[str, Tensor], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 12, generator=generator).to(parameters[NORM].dtype)
    hidden = torch.tanh((x * parameters[NORM]) @ parameters[TALL].T)
    return (hidden @ parameters[WIDE].T - x.flip(0)).square().sum()


def train(
    steps: Steps, section: sections.GaLore = SECTION, clip: float | None = 5.0, parameters: dict | None = None
) -> tuple[dict[str, Parameter], Optimizers, list[float]]:
    parameters = make() if parameters is None else parameters
    optimizer = build(parameters.items(), section)
    return parameters, optimizer, go_on(parameters, optimizer, steps, clip)


def go_on(
    parameters: dict[str, Parameter],
    optimizer: Optimizers,
    steps: Steps,
    clip: float | None = 5.0,
    spoil: Callable[[int], float] = lambda seed: 1.0,
) -> list[float]:
    """Norms of the steps; one that is not finite is left out, as the loop does. `spoil` multiplies a micro-batch."""
    norms = []
    for micro_batches in steps:
        for seed in micro_batches:
            (loss(dict(parameters), seed) * spoil(seed)).backward()
        norms.append(clip_grad_norm(optimizer.gradient_holders(), clip, scale=1 / len(micro_batches)))
        if math.isfinite(norms[-1]):
            optimizer.step(free_gradients=True)
        optimizer.zero_grad()
    return norms


def by_the_paper(steps: Steps, section: sections.GaLore = SECTION, clip: float = 5.0) -> dict[str, Tensor]:
    """Algorithm 2 with AdamW's decay, in float64; singular vectors of float32, as their signs are anyone's choice."""
    weights = {name: parameter.detach().double() for name, parameter in make().items()}
    projectors: dict[str, Tensor] = {}
    first = {name: torch.zeros(()) for name in SHAPES}
    second = {name: torch.zeros(()) for name in SHAPES}
    for number, micro_batches in enumerate(steps):
        by_micro = []
        for seed in micro_batches:
            leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
            loss(leaves, seed).backward()
            by_micro.append({name: leaf.grad for name, leaf in leaves.items()})
        low = {name: sum(micro[name] for micro in by_micro) / len(by_micro) for name in SHAPES}
        for name in (TALL, WIDE):
            if number % section.update_every == 0:
                u, _, vh = torch.linalg.svd(by_micro[0][name].float(), full_matrices=False)
                projectors[name] = (vh[: section.rank] if name == TALL else u[:, : section.rank]).double()
            low[name] = low[name] @ projectors[name].T if name == TALL else projectors[name].T @ low[name]
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in low.values()))
        for name, gradient in low.items():
            gradient = gradient * min(1.0, clip / norm)
            (b1, b2), t = section.betas, number + 1
            first[name] = b1 * first[name] + (1 - b1) * gradient
            second[name] = b2 * second[name] + (1 - b2) * gradient**2
            direction = (first[name] / (1 - b1**t)) / ((second[name] / (1 - b2**t)).sqrt() + section.eps)
            if name == NORM:
                weights[name] = weights[name] - section.learning_rate * direction
                continue
            back = direction @ projectors[name] if name == TALL else projectors[name] @ direction
            weights[name] = weights[name] - section.learning_rate * section.scale * back
            weights[name] = weights[name] * (1 - section.learning_rate * section.weight_decay)
    return weights


def largest_difference(parameters: dict[str, Parameter], weights: dict[str, Tensor]) -> float:
    return worst_absolute_error({name: parameters[name].detach() for name in SHAPES}, weights)


def test_training_equals_the_paper_in_float64() -> None:
    parameters, _, _ = train(STEPS)
    assert largest_difference(parameters, by_the_paper(STEPS)) < 2e-5
    for change in ({"update_every": 3}, {"scale": 0.49}, {"rank": 3}, {"weight_decay": 0.0}):
        assert largest_difference(parameters, by_the_paper(STEPS, SECTION.model_copy(update=change))) > 1e-3
    assert largest_difference(parameters, by_the_paper(STEPS, clip=math.inf)) > 1e-3
    assert largest_difference(parameters, by_the_paper(STEPS[:-1])) > 1e-3


def test_the_projector_is_of_the_first_singular_vectors() -> None:
    gradients = {name: parameter.grad.double() for name, parameter in make_with_gradient(seed=1).items()}
    _, optimizer, _ = train([[1, 2]])
    for name in (TALL, WIDE):
        u, _, vh = torch.linalg.svd(gradients[name], full_matrices=False)
        found = optimizer.state_tensors()[f"projector.{name}"].double()
        products = (vh @ found.T if name == TALL else u.T @ found).abs()  # [singular vectors, R]
        expected = torch.eye(len(products), SECTION.rank, dtype=torch.float64)
        torch.testing.assert_close(products, expected, rtol=0, atol=1e-4)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(products.flip(0), expected, rtol=0, atol=1e-4)


def make_with_gradient(seed: int) -> dict[str, Parameter]:
    parameters = make()
    loss(dict(parameters), seed).backward()
    return parameters


def test_micro_batches_change_nothing_once_there_is_a_projector() -> None:
    def second_step(micro_batches: list[list[int]]) -> dict[str, Parameter]:
        parameters, optimizer, _ = train([[1]], SECTION.model_copy(update={"update_every": 99}))
        for group in micro_batches:
            sum(loss(dict(parameters), seed) for seed in group).backward()
        clip_grad_norm(optimizer.gradient_holders(), 5.0, scale=1 / 4)
        optimizer.step(free_gradients=True)
        return parameters

    together = second_step([[2, 3, 4, 5]])
    apart = second_step([[2], [3, 4], [5]])
    less = second_step([[2], [3, 4]])
    for name in SHAPES:
        torch.testing.assert_close(apart[name], together[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(less[name], together[name], rtol=1e-5, atol=1e-6)


def test_one_gradient_at_a_time_is_whole() -> None:
    def most_at_once(section: sections.Optimizer) -> int:
        generator = torch.Generator().manual_seed(0)
        matrices = [Parameter(torch.randn(16, 16, generator=generator) / 4) for _ in range(6)]
        named = [(f"layers.{number}.up_proj.weight", matrix) for number, matrix in enumerate(matrices)]
        optimizer = build(named, section)
        counts = []
        for matrix in matrices:  # called as each gradient is ready, before it is put in its place
            matrix.register_hook(lambda grad: counts.append(1 + sum(p.grad is not None for p in matrices)))
        for _ in range(2):
            hidden = torch.randn(4, 16, generator=generator)
            for matrix in matrices:
                hidden = torch.tanh(hidden @ matrix.T)
            hidden.square().sum().backward()
        assert len(counts) == 12
        held = sum(holder.grad.nbytes for holder in optimizer.gradient_holders() if holder.grad is not None)
        assert held + (max(counts) == 1) * matrices[0].nbytes == optimizer.gradient_bytes()
        return max(counts)

    assert most_at_once(SECTION) == 1
    assert most_at_once(sections.AdamW()) == 7  # negative control: the second micro-batch comes beside all of them


@pytest.mark.parametrize("bad", [10, 11], ids=["first micro-batch", "second"])
@pytest.mark.parametrize("done", [0, 2, 3], ids=["nothing done", "projector due", "not due"])
def test_a_step_that_is_left_out_leaves_nothing_behind(bad: int, done: int) -> None:
    parameters, optimizer, _ = train(STEPS[:done])
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    (norm,) = go_on(parameters, optimizer, [[10, 11]], spoil=lambda seed: math.nan if seed == bad else 1.0)
    assert math.isnan(norm)
    state = optimizer.state_tensors()
    assert state.keys() == before.keys() and all(torch.equal(state[name], before[name]) for name in before)
    go_on(parameters, optimizer, STEPS[done:])
    whole, _, _ = train(STEPS)
    assert all(torch.equal(parameters[name], whole[name]) for name in SHAPES)
    other, _, _ = train([*STEPS[:done], [10, 11], *STEPS[done:]])
    assert not torch.equal(other[TALL], whole[TALL])


def test_a_gradient_that_is_not_finite_is_named() -> None:
    parameters, optimizer, _ = train(STEPS[:1])
    loss(dict(parameters), 3).backward()
    named = dict(optimizer.named_gradients())
    assert named.keys() == SHAPES.keys()
    assert {name: tuple(tensor.shape) for name, tensor in named.items() if tensor is not None} == {
        TALL: (20, 4),
        WIDE: (4, 20),
        NORM: (12,),
    }
    assert all(parameters[name].grad is None for name in (TALL, WIDE))


@pytest.mark.parametrize("states", ["adamw", "adamw8bit"])
def test_resumed_equals_uninterrupted_across_a_new_projector(states: str) -> None:
    shapes = {"layers.0.up_proj.weight": (700, 8)}  # 4200 low-rank elements, so that 8 bits take them

    def run(resume_after: int | None, altered: float = 1.0) -> Parameter:
        section = sections.GaLore(rank=6, update_every=3, states=states)  # type: ignore[arg-type]
        named = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
        optimizer = build(named.items(), section)
        for step in range(7):
            generator = torch.Generator().manual_seed(step)
            for parameter in named.values():
                (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
            optimizer.step(free_gradients=True)
            if step == resume_after:
                saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
                assert saved["exp_avg.layers.0.up_proj.weight"].dtype == (
                    torch.uint8 if states == "adamw8bit" else torch.float32
                )
                assert optimizer.state_bytes() == sum(tensor.nbytes for tensor in saved.values())
                saved["projector.layers.0.up_proj.weight"] *= altered
                named = {name: Parameter(parameter.detach().clone()) for name, parameter in named.items()}
                scalars, optimizer = optimizer.state_scalars(), build(named.items(), section)
                optimizer.load_state(saved, scalars)
        return next(iter(named.values()))

    whole = run(None)
    for after in range(6):
        assert torch.equal(run(after), whole)
    assert not torch.equal(run(1, altered=1.5), whole)


def test_the_norm_is_of_what_is_applied() -> None:
    _, optimizer, (norm,) = train([[1]], clip=None)
    gradients = {name: parameter.grad for name, parameter in make_with_gradient(1).items()}
    state = optimizer.state_tensors()
    low = [
        gradients[TALL] @ state[f"projector.{TALL}"].T,
        state[f"projector.{WIDE}"].T @ gradients[WIDE],
        gradients[NORM],
    ]
    assert norm == pytest.approx(math.sqrt(sum(part.square().sum().item() for part in low)), rel=1e-5)
    whole = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    assert norm < 0.999 * whole


def test_gradients_that_were_assigned_are_projected_in_the_step() -> None:
    after_backward, assigned = make(), make()
    one, other = (build(parameters.items(), SECTION) for parameters in (after_backward, assigned))
    for _ in range(3):
        loss(dict(after_backward), 1).backward()
        for name, parameter in make_with_gradient_of(after_backward, 1).items():
            assigned[name].grad = parameter.grad
        one.step(free_gradients=True)
        other.step(free_gradients=False)
        assert all(parameter.grad is not None for parameter in assigned.values())
        other.zero_grad()
        assert all(torch.equal(after_backward[name], assigned[name]) for name in SHAPES)
    assert not torch.equal(assigned[TALL], make()[TALL])


def make_with_gradient_of(parameters: dict[str, Parameter], seed: int) -> dict[str, Parameter]:
    copies = {name: Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    loss(dict(copies), seed).backward()
    return copies


def test_an_optimizer_that_is_gone_leaves_gradients_alone() -> None:
    parameters, optimizer, _ = train([[1]])
    loss(dict(parameters), 2).backward()
    assert parameters[TALL].grad is None
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    loss(dict(parameters), 2).backward()
    assert parameters[TALL].grad is not None
    assert not parameters[TALL]._post_accumulate_grad_hooks


def test_hidden_matrices_are_projected_and_the_rest_is_adamw() -> None:
    named = {
        "embed_tokens.weight": (30, 8),
        "lm_head.weight": (30, 8),
        "layers.0.mlp.experts.up_proj": (2, 8, 8),
        "layers.0.q_proj.weight": (8, 8),
        "norm.weight": (8,),
    }
    parameters = {name: Parameter(torch.zeros(shape)) for name, shape in named.items()}
    first, second = build(parameters.items(), SECTION).optimizers
    assert isinstance(first, GaLore) and list(first.gradients) == [parameters["layers.0.q_proj.weight"]]
    assert sum(len(group["params"]) for group in second.param_groups) == 4


def test_a_rank_above_a_dimension_and_nothing_to_project() -> None:
    with pytest.raises(
        RecipeError, match=r"optimizer.rank: 13 is above 12, the smaller dimension of layers.0.\w+.weight"
    ):
        build(make().items(), sections.GaLore(rank=13))
    build(make().items(), sections.GaLore(rank=12))
    with pytest.raises(ModelError, match="no trainable hidden matrix"):
        build([("norm.weight", Parameter(torch.zeros(4)))], sections.GaLore())


def test_with_an_adapter_it_is_refused() -> None:
    def wrong(**keys: object) -> list[str]:
        given = {"stage": "sft", "model": {"path": "m"}, "data": {"train": [{"path": "d"}]}, "output": "o", **keys}
        recipe = sections.Recipe.model_validate(given)
        return [problem.key for problem in optimizer_is_consistent(recipe.optimizer, recipe.adapter)]

    assert wrong(optimizer={"kind": "galore"}, adapter={"kind": "lora"}) == ["optimizer.kind"]
    assert wrong(optimizer={"kind": "galore"}) == wrong(adapter={"kind": "lora"}) == []


@pytest.mark.gpu
def test_on_a_gpu_it_is_within_rounding_of_the_cpu() -> None:
    # One step: singular vectors of the GPU may have the other sign, which moments of several projectors feel.
    here, _, _ = train([[1, 2]])
    there = {name: Parameter(parameter.detach().to("cuda")) for name, parameter in make().items()}
    optimizer = build(there.items(), SECTION)
    for seed in (1, 2):
        for name, parameter in make_with_gradient(seed).items():
            (there[name] * parameter.grad.to("cuda")).sum().backward()
    clip_grad_norm(optimizer.gradient_holders(), 5.0, scale=1 / 2)
    optimizer.step(free_gradients=True)
    for name in SHAPES:
        torch.testing.assert_close(there[name].cpu(), here[name], rtol=1e-3, atol=1e-3)
