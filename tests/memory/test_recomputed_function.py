"""Frames: gradients of the plain function, what is kept and for how long, and what cannot be made again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders.recompute import kept_bytes, made_again
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from danlu.core.errors import TrainingError
from danlu.memory import recomputed_function
from danlu.memory.recomputed_function import OutputDroppingFunction, RecomputedFunction
from danlu.models.forward_values import from_forward

ROWS, WIDTH = 6, 8


def gelu_twice(x: Tensor) -> Tensor:
    return F.gelu(F.gelu(x).exp())


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


def gradients(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*tensors).square().sum(), tensors)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def kept(function: Callable[..., Tensor], *tensors: Tensor) -> int:
    with kept_bytes(nn.Module()) as found:
        function(*tensors)
    return sum(found.values())


def test_gradients_and_kept_bytes_are_those_of_torchs_checkpoint() -> None:
    x, _ = inputs()

    def torchs(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(gelu_twice, x, use_reentrant=False)
        return out

    framed = RecomputedFunction(gelu_twice, "here")
    assert same(gradients(framed, x), gradients(gelu_twice, x)) and same(gradients(torchs, x), gradients(gelu_twice, x))
    assert not same(gradients(RecomputedFunction(F.gelu, "here"), x), gradients(gelu_twice, x))
    assert kept(framed, x) == kept(torchs, x) == x.nbytes < kept(gelu_twice, x)


def test_an_output_that_a_product_saves_is_dropped_with_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs()

    def layer(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def forward(x: Tensor, weight: Tensor) -> Tensor:
            y = activation(x)
            return y @ weight + y.t().reshape(ROWS, WIDTH).sin() @ weight  # saved itself, and a copy of it

        return forward

    def dropping(function: Callable[[Tensor], Tensor]) -> OutputDroppingFunction:
        framed = RecomputedFunction(function, "activation")
        framed.within = whole = OutputDroppingFunction(layer(framed))
        return whole

    plain = layer(gelu_twice)
    with made_again(monkeypatch) as places:
        assert same(gradients(dropping(gelu_twice), x, weight), gradients(plain, x, weight))
    assert places == ["activation"]
    assert not same(gradients(dropping(F.gelu), x, weight), gradients(plain, x, weight))
    # Of x, what exp gives, and the output only x is left, beside what comes behind and the weight.
    assert kept(plain, x, weight) - kept(dropping(gelu_twice), x, weight) == 2 * x.nbytes
    # Without a layer around that knows of it, the output is kept by the product.
    alone = layer(RecomputedFunction(gelu_twice, "activation"))
    assert kept(plain, x, weight) - kept(alone, x, weight) == x.nbytes


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y,
        lambda y: y[1:5].contiguous(),
        lambda y: y[1:5],
        lambda y: y.t().unflatten(0, (2, 4))[1].t(),
        lambda y: y.unsqueeze(0).expand(3, -1, -1).sum(0),
    ],
)
def test_views_of_outputs_and_inputs(view: Callable[[Tensor], Tensor]) -> None:
    base = torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def inside(x: Tensor) -> Tensor:
        return view(x).sin().sum() * x + view(x).exp().sum()

    framed = RecomputedFunction(inside, "inside")

    def forward(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(base: Tensor) -> Tensor:
            y = activation(base[ROWS:])  # an input that begins in the middle of its storage
            return view(y).square().sum() * view(y).cos()

        return run

    framed.within = whole = OutputDroppingFunction(forward(framed))
    assert same(gradients(whole, base), gradients(forward(inside), base))


def test_an_output_changed_in_place_is_kept_as_it_then_is() -> None:
    x, weight = inputs()

    def forward(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: activation(x).mul_(2.0) @ weight

    def scaled(x: Tensor) -> Tensor:
        return x * 3.0

    framed = RecomputedFunction(scaled, "scaled")
    framed.within = whole = OutputDroppingFunction(forward(framed))
    assert same(gradients(whole, x, weight), gradients(forward(scaled), x, weight))
    assert kept(whole, x, weight) == kept(forward(scaled), x, weight)


def test_memory_that_another_tensor_gets_is_not_taken_for_an_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that nobody saves is freed, and soon another tensor lies where it was."""
    x, _ = inputs()

    def mistaken() -> bool:
        whole = OutputDroppingFunction(lambda x: x)
        whole.outputs = outputs = recomputed_function._FrameOutputs()
        RecomputedFunction(torch.exp, "once", whole)(x)
        others = [torch.exp(x.detach()) for _ in range(100)]
        return any(isinstance(outputs.pack(other), recomputed_function._View) for other in others)

    assert not mistaken()
    # Negative control: by address alone.
    monkeypatch.setattr(recomputed_function, "StorageWeakRef", lambda storage: None)
    assert mistaken()


def test_what_is_made_again_goes_as_soon_as_it_was_used() -> None:
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    class Noted(torch.autograd.Function):
        """The identity, that saves a copy, and looks how many copies are left when its turn comes."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            copy = x.clone()
            made.append(StorageWeakRef(copy.untyped_storage()))
            ctx.save_for_backward(copy)
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            assert ctx.saved_tensors[0].nelement()
            alive.append(sum(not one.expired() for one in made))
            return grad

    def several(x: Tensor) -> Tensor:
        for _ in range(4):
            x = Noted.apply(x)
        return x

    x, _ = inputs()
    y = RecomputedFunction(several, "several")(x)
    assert len(made) == 4 and all(one.expired() for one in made)
    y.sum().backward()
    assert alive == [4, 3, 2, 1] and all(one.expired() for one in made)


def test_nothing_holds_itself() -> None:
    """Memory goes with the last reference, without the garbage collector, whether there was a backward pass or not."""
    x, weight = inputs()
    framed = RecomputedFunction(gelu_twice, "activation")
    framed.within = whole = OutputDroppingFunction(lambda x, weight: framed(x) @ weight)
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            middle = x * 1.0
            seen = StorageWeakRef(middle.untyped_storage())
            y = whole(middle, weight)
            del middle
            assert not seen.expired()  # negative control: it is kept as long as it is needed
            if backward:
                y.sum().backward()
            assert seen.expired() == backward and whole.outputs is None
            del y
            assert seen.expired()
    finally:
        gc.enable()


def test_a_second_backward_pass_makes_the_same_again() -> None:
    x, weight = inputs()
    framed = RecomputedFunction(gelu_twice, "activation")
    framed.within = whole = OutputDroppingFunction(lambda x, weight: framed(x) @ weight)
    y = whole(x, weight).square().sum()
    first = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert same(torch.autograd.grad(y, (x, weight)), first)


def test_hooks_around_have_the_say_over_what_is_kept() -> None:
    x, weight = inputs()
    framed = RecomputedFunction(gelu_twice, "activation")
    framed.within = whole = OutputDroppingFunction(lambda x, weight: framed(x) @ weight)
    outer = RecomputedFunction(lambda x, weight: whole(whole(x, weight), weight), "outer")

    def twice(x: Tensor, weight: Tensor) -> Tensor:
        return gelu_twice(gelu_twice(x) @ weight) @ weight

    expected = gradients(twice, x, weight)
    for function in (outer, lambda x, weight: whole(whole(x, weight), weight)):
        with save_on_cpu():
            assert same(gradients(function, x, weight), expected)
        with saved_tensors_hooks(lambda one: one * 1.5, lambda one: one):
            assert not same(gradients(function, x, weight), expected)  # negative control: they are asked
    assert kept(outer, x, weight) == x.nbytes + weight.nbytes


def test_without_gradients_there_is_no_frame() -> None:
    x, _ = inputs()
    with torch.no_grad():
        assert torch.equal(RecomputedFunction(gelu_twice, "here")(x), gelu_twice(x))
    framed = RecomputedFunction(gelu_twice, "here")
    assert kept(framed, x.detach()) == 0


def test_hidden_randomness_gives_other_gradients() -> None:
    """The reason why danlu's dropout is counted: a mask that is drawn is another one when it is drawn again."""
    x, _ = inputs()

    def drawn(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5).square()

    def gradient(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return gradients(function, x)

    assert same(gradient(drawn), gradient(drawn))
    assert not same(gradient(RecomputedFunction(drawn, "here")), gradient(drawn))


@pytest.mark.parametrize("change", ["more", "fewer", "other shape", "other output"])
def test_another_course_the_second_time_is_an_error(change: str) -> None:
    x, weight = inputs()
    calls = count()

    def fickle(x: Tensor) -> Tensor:
        first = next(calls) == 0
        if change == "more":
            return x.exp().sin() if first else x.exp().exp().sin().cos()
        if change == "fewer":
            return x.exp().sin().cos() if first else x * 2.0
        if change == "other shape":
            return (x if first else x[:3]).exp().sum() * x
        return x.exp() if first else x.t().contiguous().exp().t()

    framed = RecomputedFunction(fickle, "layers.3.mlp")
    framed.within = whole = OutputDroppingFunction(lambda x, weight: framed(x) @ weight)
    loss = whole(x, weight).sum()
    with pytest.raises(TrainingError, match=r"layers\.3\.mlp: recomputed .*recompute: none"):
        loss.backward()


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_made_in_the_forward_pass_is_not_made_again(is_kept: bool) -> None:
    """Two calls before their backward passes, each within a frame of a whole segment, get back what was theirs."""
    made: list[float] = []

    def factor() -> float:
        made.append(len(made) + 2.0)
        return made[-1]

    def twice(x: Tensor) -> Tensor:
        for _ in range(2):
            x = (x * (from_forward(factor) if is_kept else factor())).sin()
        return x

    def segment(x: Tensor) -> Tensor:
        return inner(inner(x)) * from_forward(factor)

    def gradient(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        made.clear()
        leaves = [each.detach().clone().requires_grad_() for each in inputs()]
        losses = [function(leaf).square().sum() for leaf in leaves]
        forward = len(made)
        sum(losses).backward()  # type: ignore[union-attr]
        assert (len(made) == forward) == (is_kept or function is plain)
        return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)

    def plain(x: Tensor) -> Tensor:
        return twice(twice(x)) * from_forward(factor)

    inner = RecomputedFunction(twice, "inner")
    # Control: factors that are made anew are others, and so are the gradients.
    assert same(gradient(RecomputedFunction(segment, "segment")), gradient(plain)) == is_kept
    assert from_forward(factor) != from_forward(factor)  # outside of them nothing is kept
