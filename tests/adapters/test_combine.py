"""Combining changes of weights, against PEFT's functions on the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.utils import merge_utils
from torch import Tensor

from danlu.adapters.combine import MAJORITIES, METHODS, Combination, Majority, drop_and_rescale, trim

WEIGHTS = (0.7, -0.3, 1.1)


def changes(count: int = 3, shape: tuple[int, int] = (40, 30)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) * (n + 1) for n in range(count)]
    made[0][:5] = 0  # a part of the weight that one of the adapters leaves alone
    return made


def never(number: int) -> torch.Generator:
    raise AssertionError("nothing is drawn here")


def drawn(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@pytest.mark.parametrize("method", ["linear", "cat"])
def test_linear_is_the_weighted_sum(method: Any) -> None:
    found = Combination(WEIGHTS, method).of(changes(), never)
    torch.testing.assert_close(found, merge_utils.task_arithmetic(changes(), torch.tensor(WEIGHTS)))
    assert not torch.allclose(found, merge_utils.task_arithmetic(changes(), torch.tensor(WEIGHTS[::-1])))


@pytest.mark.filterwarnings("ignore:The density 1.0")
@pytest.mark.parametrize("majority", MAJORITIES)
@pytest.mark.parametrize("density", [0.0005, 0.2, 0.5, 1.0])
def test_ties_is_pefts(density: float, majority: Majority) -> None:
    found = Combination(WEIGHTS, "ties", density, majority).of(changes(), never)
    expected = merge_utils.ties(changes(), torch.tensor(WEIGHTS), density, majority)
    torch.testing.assert_close(found, expected)
    if density > 0.01:  # else nothing is kept
        for other in (Combination(WEIGHTS, "ties", density / 2, majority), Combination(WEIGHTS, "linear")):
            assert not torch.allclose(other.of(changes(), never), expected)
    else:
        assert not expected.any()


@pytest.mark.parametrize("stacks", [1, 2])
def test_each_expert_is_trimmed_by_itself(stacks: int) -> None:
    """Two stacks one behind the other are the two matrices of each expert that lie in one tensor."""
    experts, ties = 4, Combination(WEIGHTS, "ties", 0.3)
    sizes = torch.arange(1.0, experts + 1).repeat(stacks).view(-1, 1, 1)  # experts whose changes are of unlike sizes
    whole = [change.view(stacks * experts, -1, 10) * sizes for change in changes(shape=(stacks * 8, 30))]
    by_expert = ties.of(whole, never, experts=experts)
    for expert in range(experts):
        alone = ties.of([change[expert::experts].flatten(0, 1) for change in whole], never)
        assert torch.equal(by_expert[expert::experts].flatten(0, 1), alone)
    assert not torch.equal(ties.of(whole, never), by_expert)  # the negative control


def test_the_two_ways_to_elect_a_sign_differ() -> None:
    found = [Combination(WEIGHTS, "ties", 0.5, majority).of(changes(), never) for majority in MAJORITIES]
    assert not torch.allclose(*found)


@pytest.mark.parametrize("method", ["dare-linear", "dare-ties"])
def test_dare_is_pefts_on_the_numbers_that_are_kept(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """PEFT draws its own numbers: here it is given ours."""
    kept = [torch.rand(40, 30, generator=drawn(number)) < 0.3 for number in range(3)]
    masks = iter(kept)
    monkeypatch.setattr(merge_utils.torch, "bernoulli", lambda input: next(masks).to(input.dtype))
    function = merge_utils.dare_linear if method == "dare-linear" else merge_utils.dare_ties
    expected = function(changes(), torch.tensor(WEIGHTS), 0.3)
    torch.testing.assert_close(Combination(WEIGHTS, method, 0.3).of(changes(), drawn), expected)
    other = Combination(WEIGHTS, method, 0.3).of(changes(), lambda number: drawn(number + 1))
    assert not torch.allclose(other, expected)


def test_what_is_trimmed_is_the_smallest() -> None:
    change = changes()[1]
    kept = trim(change, 0.25)
    assert int((kept != 0).sum()) == 300
    assert kept[kept != 0].abs().min() >= change[kept == 0].abs().max()
    assert torch.equal(kept[kept != 0], change[kept != 0])
    assert not trim(change, 1e-9).any() and torch.equal(trim(change, 1.0), change)


def test_what_is_thinned_keeps_its_mean() -> None:
    change = torch.ones(300, 300)
    kept = drop_and_rescale(change, 0.1, drawn(0))
    assert set(kept.unique().tolist()) == {0.0, 10.0}
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.05)
    assert float((kept != 0).float().mean()) == pytest.approx(0.1, abs=0.005)
    assert torch.equal(drop_and_rescale(change, 0.1, drawn(0)), kept) and not torch.equal(
        drop_and_rescale(change, 0.1, drawn(1)), kept
    )
    assert torch.equal(change, torch.ones(300, 300))
    assert drop_and_rescale(change, 1.0, drawn(0)) is change


@pytest.mark.parametrize("method", METHODS)
def test_nothing_that_is_given_changes(method: Any) -> None:
    given = changes()
    Combination(WEIGHTS, method, 0.5).of(given, drawn)
    assert all(torch.equal(one, other) for one, other in zip(given, changes(), strict=True))
