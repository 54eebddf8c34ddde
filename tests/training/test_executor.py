"""One process's list of actions, carried out: what comes out, in which state of the model, and what is kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from danlu.core.types import Loss, Totals
from danlu.models.ops import linear
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.schedules import Action, forwards_only, schedule
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import Activation, MicroStep, StepItems

WIDTH, CHUNKS, MICRO_BATCHES = 4, 3, 4


class Rows(Tensor):
    """A batch: a tensor [N, WIDTH] that has targets and can be referred to weakly."""

    @property
    def targets(self) -> Tensor:
        return self[:, 0]


@dataclass
class ChunkedLearner:
    """Three layers, each a chunk; the last one's output is summed up, with a factor for each item's number."""

    model: nn.Sequential
    parallel: ParallelContext = field(default_factory=ParallelContext)
    activations: None = None
    trained_activations: int = 1
    seen: list[str] = field(default_factory=list)
    present: int | None = None  # the number of the item whose state the model has
    batches: list[weakref.ref[Any]] = field(default_factory=list)

    def collate(self, items: Sequence[Tensor]) -> Any:
        batch = torch.stack(list(items)).as_subclass(Rows)
        self.batches.append(weakref.ref(batch))
        return batch

    @contextmanager
    def at(self, micro_step: MicroStep[Any]) -> Iterator[None]:
        (self.present, _), *_ = micro_step.items
        yield
        self.present = None

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        assert self.present == micro_step.items[0][0]
        self.seen.append(f"forward {chunk} {self.present}")
        hidden = micro_step.batch.as_subclass(Tensor) if x is None else x[0]
        y: Tensor = self.model[chunk](hidden).tanh()
        if y.requires_grad:
            y.register_hook(lambda _: self.seen.append(f"backward {chunk} {self.present}"))
        if chunk < CHUNKS - 1:
            return (y,)
        return Loss((y.sum() * (1 + micro_step.items[0][0])) * micro_step.gradient_scale, {})


def learner() -> ChunkedLearner:
    torch.manual_seed(0)
    return ChunkedLearner(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(CHUNKS))))


def step_items(step: int | None = 1, scale: float = 1.0) -> StepItems:
    items = list(torch.randn(MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(1)))
    totals = Totals(1.0, MICRO_BATCHES, MICRO_BATCHES, (1,) * MICRO_BATCHES)
    return StepItems(cast(Any, items), [[number] for number in range(MICRO_BATCHES)], totals, step, scale)


def executed(actions: Sequence[Action], chunked: ChunkedLearner, items: StepItems) -> tuple[list[float], list[Tensor]]:
    losses: list[float] = []
    executor = Executor(cast(AnyLearner, chunked), items, lambda loss: losses.append(loss.total.item()))
    executor.run(actions)
    assert not any(batch() for batch in chunked.batches)  # nothing is kept
    return losses, [parameter.grad for parameter in chunked.model.parameters() if parameter.grad is not None]


def of_whole(items: StepItems) -> tuple[list[float], list[Tensor]]:
    """The same without chunks or actions."""
    model = learner().model
    losses = []
    for number, item in enumerate(items.items):
        y = cast(Tensor, item).unsqueeze(0)
        for layer in model:
            y = layer(y).tanh()
        loss = y.sum() * (1 + number) * items.gradient_scale
        loss.backward()
        losses.append(loss.item())
    return losses, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def actions_of(text: str) -> list[Action]:
    """`F00 B00`: forward, backward, input and weight passes, each with its chunk and its micro-batch."""
    kinds = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    return [Action(cast(Any, kinds[kind]), int(chunk), int(micro)) for kind, chunk, micro in text.split()]


def through(micro: int, kind: str = "FB") -> str:
    """All chunks of a micro-batch, forwards and backwards."""
    forward = [f"F{chunk}{micro}" for chunk in range(CHUNKS)]
    backward = [f"B{chunk}{micro}" for chunk in reversed(range(CHUNKS))]
    return " ".join([*(forward if "F" in kind else []), *(backward if "B" in kind else [])])


ORDERS = {
    "one after the other": " ".join(through(micro) for micro in range(MICRO_BATCHES)),
    "gpipe": " ".join(through(micro, kind) for kind in "FB" for micro in range(MICRO_BATCHES)),
    "interleaved": f"{through(0, 'F')} F01 F11 B20 F21 B10 B21 {through(2, 'F')} B00 B11 B22 F03 B01 F13 B12 F23 B02 "
    f"{through(3, 'B')}",
}


@pytest.mark.parametrize("order", ORDERS)
def test_chunks_in_any_order_have_the_loss_and_gradient_of_the_whole(order: str) -> None:
    items = step_items(scale=0.5)
    losses, gradients = executed(actions_of(ORDERS[order]), learner(), items)
    wanted_losses, wanted = of_whole(items)
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    for gradient, whole in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-7)
    _, without_last = executed(actions_of(ORDERS[order])[:-1], learner(), items)  # control: a backward pass is missing
    assert len(without_last) == len(gradients)
    assert not torch.allclose(without_last[0], wanted[0], rtol=1e-3)


@pytest.mark.parametrize("order", ORDERS)
def test_passes_are_made_in_order_and_in_the_state_of_their_micro_batch(order: str) -> None:
    chunked = learner()
    executed(actions_of(ORDERS[order]), chunked, step_items())
    assert chunked.seen == [f"{action.kind} {action.chunk} {action.micro}" for action in actions_of(ORDERS[order])]


def test_a_batch_is_made_for_its_first_action_and_dropped_after_its_last() -> None:
    chunked, alive = learner(), []

    def count(micro: int) -> None:
        alive.append([number for number, batch in enumerate(chunked.batches) if batch() is not None])

    executor = Executor(cast(AnyLearner, chunked), step_items(), on_backward=count)
    executor.run(actions_of(ORDERS["one after the other"]))
    assert alive == [[micro] for micro in range(MICRO_BATCHES) for _ in range(CHUNKS)]


def test_the_last_backward_pass_is_told_to_reduce_and_gradients_are_completed_after_it() -> None:
    told: list[tuple[bool, int]] = []
    chunked = learner()
    chunked.parallel = replace(chunked.parallel, prepare_backward=lambda *of_pass: told.append(of_pass))
    executed(actions_of(ORDERS["gpipe"]), chunked, step_items())
    last = MICRO_BATCHES - 1  # of each chunk
    assert told == [(micro == last, chunk) for micro in range(MICRO_BATCHES) for chunk in reversed(range(CHUNKS))]


def test_an_evaluation_keeps_nothing() -> None:
    chunked = learner()
    executor_actions = forwards_only(actions_of(ORDERS["interleaved"]))
    losses, gradients = executed(executor_actions, chunked, step_items(step=None))
    assert losses == pytest.approx(of_whole(step_items())[0], rel=1e-6) and not gradients


def test_one_process_goes_forward_and_back_micro_batch_by_micro_batch() -> None:
    actions = ParallelContext().actions(3)
    assert [f"{action.kind} {action.micro}" for action in actions] == [
        *(f"{kind} {micro}" for micro in range(3) for kind in ("forward", "backward")),
        "reduce None",
        "update None",
    ]


@dataclass(frozen=True)
class EndsEarly:
    """Micro-batches of which those from `end` on are not there."""

    items: StepItems
    end: int
    asked: list[int] = field(default_factory=list)

    def micro_step(self, learner: AnyLearner, micro: int) -> MicroStep[Any] | None:
        self.asked.append(micro)
        return self.items.micro_step(learner, micro) if micro < self.end else None


def updating_actions() -> list[Action]:
    """All chunks of a micro-batch forwards and backwards, then its own sum and update; the next one goes before."""
    actions = [Action("forward", chunk, 0) for chunk in range(CHUNKS)]
    for micro in range(MICRO_BATCHES):
        actions += [Action("forward", chunk, micro + 1) for chunk in range(CHUNKS) if micro + 1 < MICRO_BATCHES]
        actions += [Action("backward", chunk, micro) for chunk in reversed(range(CHUNKS))]
        actions += [Action("reduce", 0, micro), Action("update", micro=micro)]
    return actions


@pytest.mark.parametrize("end", [MICRO_BATCHES, 2, 0])
def test_each_micro_batch_may_have_an_update_and_the_list_may_end_before_one(end: int) -> None:
    chunked, told, gradients = learner(), list[tuple[bool, int]](), dict[int, list[Tensor]]()
    chunked.parallel = replace(chunked.parallel, prepare_backward=lambda *of_pass: told.append(of_pass))
    within: list[int] = []

    def update(micro: int) -> None:
        gradients[micro] = [cast(Tensor, parameter.grad) for parameter in chunked.model.parameters()]
        chunked.model.zero_grad()

    @contextmanager
    def weights(micro: int) -> Iterator[None]:
        within.append(micro)
        yield

    source = EndsEarly(step_items(), end)
    Executor(cast(AnyLearner, chunked), source, on_update=update, weights=weights).run(updating_actions())
    assert list(gradients) == list(range(end)) and source.asked == list(range(min(end + 1, MICRO_BATCHES)))
    assert told == [(True, chunk) for _ in range(end) for chunk in reversed(range(CHUNKS))]
    assert sorted(within) == [micro for micro in range(end) for _ in range(2 * CHUNKS)]
    assert not any(batch() for batch in chunked.batches)
    for micro, found in gradients.items():
        other = learner()
        alone = actions_of(through(micro))
        for got, want in zip(found, executed(alone, other, step_items())[1], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_no_process_of_the_layout_can_do_is_told() -> None:
    with pytest.raises(AssertionError, match="no process of this layout is to forward of micro-batch None"):
        executed([Action("forward")], learner(), step_items())


SPLIT = (
    "F00 F10 F20 I20 F01 I10 I00 F11 W20 F21 I21 W10 W00 I11 I01 W21 W11 W01 F02 F12 F22 B22 B12 B02 F03 F13 F23 "
    "I23 I13 I03 W23 W13 W03"
)
"""Weight gradients that run behind, and one micro-batch whose backward pass is not split."""


@dataclass
class DeferringLearner(ChunkedLearner):
    """With layers that can put the gradients of their weights off."""

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        layer = cast(nn.Linear, self.model[chunk])
        with mock.patch.object(layer, "forward", lambda x: linear(x, layer.weight, layer.bias)):
            return super().forward(chunk, micro_step, x)


def deferring_learner() -> DeferringLearner:
    return DeferringLearner(learner().model)


def test_input_and_weight_passes_have_the_gradient_of_whole_backward_passes() -> None:
    items = step_items(scale=0.5)
    losses, gradients = executed(actions_of(SPLIT), deferring_learner(), items)
    wanted_losses, wanted = of_whole(items)
    assert losses == pytest.approx(wanted_losses, rel=1e-6)
    for gradient, whole in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-7)
    _, without_last = executed(actions_of(SPLIT)[:-1], deferring_learner(), items)  # control: a weight pass is missing
    assert not torch.allclose(without_last[0], wanted[0], rtol=1e-3) and torch.equal(without_last[1], gradients[1])


def test_weights_have_no_gradient_before_their_weight_pass() -> None:
    chunked = deferring_learner()
    executed(actions_of("F00 F10 F20 I20 I10 I00"), chunked, step_items())
    with_gradient = {name for name, parameter in chunked.model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {f"{chunk}.bias" for chunk in range(CHUNKS)}


def test_gradients_are_reduced_after_the_last_pass_that_makes_any() -> None:
    heard: list[str] = []
    chunked = deferring_learner()
    chunked.parallel = replace(
        chunked.parallel,
        prepare_backward=lambda is_last, chunk: heard.append(f"backward {is_last}"),
        finish_weight_pass=lambda is_last, chunk: heard.append(f"weight {is_last}"),
    )
    executed(actions_of(SPLIT), chunked, step_items())
    assert len(heard) == SPLIT.count("I") + SPLIT.count("B") + SPLIT.count("W")
    assert heard[-CHUNKS:] == ["weight True"] * CHUNKS  # of each chunk the last one
    assert not any(said.endswith("True") for said in heard[:-CHUNKS])


def test_one_process_can_take_the_list_of_a_schedule_that_splits() -> None:
    (actions,) = schedule("zb-h1", 1, 1, MICRO_BATCHES)
    assert {action.kind for action in actions} == {"forward", "input", "weight", "reduce", "update"}
    chunked = deferring_learner()
    whole = nn.Sequential(*chunked.model)
    chunked.model = whole

    def forward(chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Loss:
        assert chunk == 0 and x is None
        y = cast(Tensor, micro_step.batch).as_subclass(Tensor)
        for layer in whole:
            y = linear(y, layer.weight, layer.bias).tanh()
        return Loss(y.sum() * (1 + micro_step.items[0][0]) * micro_step.gradient_scale, {})

    with mock.patch.object(chunked, "forward", forward):
        _, gradients = executed(actions, chunked, step_items())
    for gradient, wanted in zip(gradients, of_whole(step_items())[1], strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


@dataclass
class TwoModels(ChunkedLearner):
    """With a second model that is trained, and a frozen third, whose loss depends on the hidden states of all."""

    def forward(self, chunk: int, micro_step: MicroStep[Any], x: Activation | None) -> Activation | Loss:
        batch = micro_step.batch.as_subclass(Tensor)
        first, second, frozen = (batch, batch, batch) if x is None else x
        policy, values = self.model[chunk], self.model[CHUNKS + chunk]
        hidden = policy(first).tanh(), values(second).tanh(), (2 * frozen).tanh()
        if chunk < CHUNKS - 1:
            return hidden
        y, z, weight = hidden
        return Loss((y.sum() * z.square().sum() * (1 + weight.sum())) * micro_step.gradient_scale, {})


def test_gradients_of_several_models_that_are_trained_come_back() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * CHUNKS)]
    items = step_items()

    def gradients(trained: int) -> list[Tensor | None]:
        models = nn.Sequential(*layers)
        models.zero_grad()
        executor = Executor(cast(AnyLearner, TwoModels(models, trained_activations=trained)), items)
        executor.run(actions_of(ORDERS["interleaved"]))
        return [parameter.grad for parameter in models.parameters()]

    found, one_alone = gradients(2), gradients(1)
    for layer in layers:
        layer.zero_grad()
    for item in items.items:
        y = z = weight = cast(Tensor, item).unsqueeze(0)
        for chunk in range(CHUNKS):
            y, z = layers[chunk](y).tanh(), layers[CHUNKS + chunk](z).tanh()
            weight = (2 * weight).tanh()
        (y.sum() * z.square().sum() * (1 + weight.sum())).backward()
    wanted = [parameter.grad for layer in layers for parameter in layer.parameters()]
    for gradient, whole in zip(found, wanted, strict=True):
        assert gradient is not None and whole is not None
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-7)
    # Control: of a second model whose gradient does not come back, only the last chunk has any.
    assert [gradient is None for gradient in one_alone[2 * CHUNKS :]] == [True] * 4 + [False] * 2
