"""Comparing, on made numbers: what is alike passes, what is not is found where it is, and rounding is allowed for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from danlu.recipe import sections
from danlu.shard_box import ShardBox
from danlu.verify.comparison import Comparison, compare, module_of, turns_of
from danlu.verify.trace import Parts, StepTrace, Trace, joined
from danlu.verify.workers import Observed

NAMES = ("embed_tokens.weight", "layers.0.attention.q_proj.weight", "layers.0.mlp_norm.weight", "lm_head.weight")
SHAPES = ((6, 4), (4, 4), (4,), (6, 4))


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in zip(NAMES, SHAPES, strict=True)}


def whole_parts(values: dict[str, Tensor]) -> Parts:
    return {name: (ShardBox.full(value.shape), value.clone()) for name, value in values.items()}


def shard(values: dict[str, Tensor], rank: int) -> dict[str, tuple[ShardBox, Tensor]]:
    """Rows cut in two for matrices, 1-D tensors on both."""
    found = {}
    for name, value in values.items():
        if value.ndim == 1:
            found[name] = ShardBox.full(value.shape, replicas=2, is_writer=rank == 0), value.clone()
            continue
        half = value.shape[0] // 2
        start = (rank * half, 0)
        box = ShardBox(tuple(value.shape), start, (half, value.shape[1]))
        found[name] = box, box.view_of(value).clone()
    return found


def step(number: int, values: dict[str, Tensor] | None = None, rank: int | None = None) -> StepTrace:
    gradients, weights = tensors(10 * number), values or tensors(10 * number + 1)
    cut = whole_parts if rank is None else lambda of: shard(of, rank)
    return StepTrace(2.5 / number, 1.5, 1.0, 100, cut(gradients), cut(weights))


def seen(rank: int | None = None) -> Trace:
    made = Trace([step(1, rank=rank), step(2, rank=rank)], evaluation=2.0)
    cut = whole_parts if rank is None else lambda of: shard(of, rank)
    made.first_weights = cut(tensors(0))
    made.next = made.resumed = step(3, rank=rank)
    made.loaded = cut(tensors(21))
    return made


def observed() -> Observed:
    return Observed([seen(0), seen(1)], seen(), seen())


def wrong(comparison: Comparison) -> list[tuple[str, str | None]]:
    return [(one.stage, one.name) for one in comparison.found if not one.holds]


def test_what_is_the_same_passes() -> None:
    comparison = compare(observed(), 1e-6)
    assert comparison.first_wrong() is None
    assert [check.what for check in comparison.checks()] == [
        "first weights",
        "targets",
        "loss",
        "gradients",
        "gradient norm",
        "clipped norm",
        "weights",
        "evaluation",
        "saved weights, loaded",
        "a step after resuming",
    ]
    assert [module.name for module in comparison.modules()] == [
        "embed_tokens",
        "layers.0.attention",
        "layers.0.mlp_norm",
        "lm_head",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_one_number_that_is_off_is_found_where_it_is(name: str, what: str) -> None:
    found = observed()
    _, value = getattr(found.many[0].steps[1], what)[name]
    value.view(-1)[0] += 1e-3
    comparison = compare(found, 1e-6)
    first = comparison.first_wrong()
    assert first is not None and (first.stage, first.name) == (f"{what} of step 2", name)
    assert [one for one in wrong(comparison) if "checkpoint" not in one[0]] == [(f"{what} of step 2", name)]
    (module,) = [module for module in comparison.modules() if not module.holds]
    assert module.name == module_of(name)


def test_copies_of_a_part_have_to_be_the_same_to_the_last_bit() -> None:
    found = observed()
    name = "layers.0.mlp_norm.weight"
    _, value = found.many[1].steps[0].weights[name]
    value[0] = torch.nextafter(value[0], torch.tensor(9.0))
    comparison = compare(found, 1e-6)
    first = comparison.first_wrong()
    assert first is not None and first.ranks == (0, 1) and first.error < 1e-6
    (check,) = [one for one in comparison.checks() if one.what == "weights"]
    assert not check.holds and check.error_text == "copies differ"
    assert wrong(comparison) == [("weights of step 1", name)]


@pytest.mark.parametrize("number", ["loss", "norm", "clipped"])
def test_numbers_are_compared_on_every_rank(number: str) -> None:
    found = observed()
    setattr(found.many[1].steps[0], number, getattr(found.many[1].steps[0], number) * 1.001)
    stages = [stage for stage, _ in wrong(compare(found, 1e-6))]
    assert stages == [{"loss": "loss", "norm": "norm", "clipped": "clipped norm"}[number] + " of step 1"]


def test_numbers_have_to_be_the_same_to_the_last_bit_on_every_rank() -> None:
    found = observed()
    found.many[1].steps[0].loss *= 1 + 1e-12
    first = compare(found, 1e-6).first_wrong()
    assert first is not None and (first.stage, first.ranks) == ("loss of step 1", (0, 1))
    assert first.error < 1e-6


def test_a_target_more_is_found() -> None:
    found = observed()
    for one in found.many:
        one.steps[1].trained_tokens += 1
    assert wrong(compare(found, 1e-6)) == [("targets of step 2", None)]


def test_a_rank_without_a_gradient_is_found() -> None:
    found = observed()
    for one in found.many:
        one.steps[0] = replace(
            one.steps[0], gradients={k: v for k, v in one.steps[0].gradients.items() if k != NAMES[1]}
        )
    assert wrong(compare(found, 1e-6)) == [("gradients of step 1", NAMES[1])]


def test_weights_that_are_loaded_are_those_that_were_saved() -> None:
    found = observed()
    found.many[0].loaded[NAMES[0]][1][0, 0] += 1e-7
    assert wrong(compare(found, 1e-6)) == [("weights of one process's checkpoint in the layout", NAMES[0])]


def test_a_layout_that_ends_with_numbers_that_are_not_finite_is_wrong_there() -> None:
    found = observed()
    for one in found.many:
        one.steps, one.ended, one.evaluation, one.loaded = one.steps[:1], True, None, {}
    first = compare(found, 1e-6).first_wrong()
    assert first is not None and (first.stage, first.ranks) == ("loss of step 2", None)
    assert wrong(compare(found, 1e-6)) == [("loss of step 2", None)]


@pytest.mark.parametrize("side", ["many", "one"])
def test_a_checkpoint_that_cannot_be_gone_on_from_is_wrong_there(side: str) -> None:
    found = observed()
    for one in found.many if side == "many" else [found.one]:
        one.resumed, one.ended = None, True
    whose = {"many": "one process's checkpoint in the layout", "one": "the layout's checkpoint in one process"}[side]
    assert wrong(compare(found, 1e-6)) == [(f"a step of {whose}", None)]


def test_copies_that_are_not_finite_alike_do_not_differ() -> None:
    found = observed()
    for one in found.many:
        one.steps[0].gradients["layers.0.mlp_norm.weight"][1][0] = float("nan")
    first = compare(found, 1e-6).first_wrong()
    assert first is not None and first.ranks is None and first.error == float("inf")


NAN = float("nan")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights"])
def test_a_number_that_is_not_finite_is_wrong_on_whichever_sides_it_is(name: str, what: str) -> None:
    """On all sides too: a layout that is as broken as one process has proved nothing."""
    for sides in ((True, False, False), (False, True, True), (True, True, True)):
        found = observed()
        for broken, side in zip(sides, (found.many, [found.one], [found.perturbed]), strict=True):
            for one in side if broken else []:
                if name in (parts := getattr(one.steps[0], what)):
                    parts[name][1].view(-1)[-1] = NAN
        comparison = compare(found, 1e-6, turns=1e-2)
        assert (f"{what} of step 1", name) in wrong(comparison)
        assert not all(check.holds for check in comparison.checks())


@pytest.mark.parametrize("number", ["loss", "norm", "clipped"])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_number_that_is_not_finite_on_all_sides_is_wrong(number: str, bad: float) -> None:
    found = observed()
    for one in (*found.many, found.one, found.perturbed):
        setattr(one.steps[0], number, bad)
    stage = {"loss": "loss", "norm": "norm", "clipped": "clipped norm"}[number]
    assert (f"{stage} of step 1", None) in wrong(compare(found, 1e-6))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["gradients", "weights", "loss"])
def test_rounding_that_is_not_finite_allows_nothing(name: str, what: str) -> None:
    """Of the second run by one process: it neither hides a mistake nor makes one of what is right."""
    found = observed()
    first = found.perturbed.steps[0]
    if what == "loss":
        first.loss = NAN
    else:
        getattr(first, what)[name][1].view(-1)[0] = NAN
    assert wrong(compare(found, 1e-6)) == []
    for one in found.many:
        for parts in (one.steps[0].weights, one.steps[1].gradients):
            if name in parts:
                parts[name][1].mul_(1.01)
    assert wrong(compare(found, 1e-6))[0] == ("weights of step 1", name)
    assert ("gradients of step 2", name) in wrong(compare(found, 1e-6))


def test_as_much_as_rounding_does_is_allowed() -> None:
    found = observed()
    for parts, share in ((found.perturbed.steps[0].gradients, 1e-4), (found.many[0].steps[0].gradients, 4e-4)):
        parts[NAMES[1]][1].mul_(1 + share)
    assert compare(found, 1e-6).first_wrong() is None
    found.many[0].steps[0].gradients[NAMES[1]][1].mul_(1.01)
    assert wrong(compare(found, 1e-6)) == [("gradients of step 1", NAMES[1])]


def test_a_turned_update_is_allowed_where_rounding_turns_it() -> None:
    found = observed()
    found.many[0].steps[0].weights[NAMES[1]][1][0, 0] += 2e-2
    assert wrong(compare(found, 1e-6)) == [("weights of step 1", NAMES[1])]
    assert compare(found, 1e-6, turns=2e-2).first_wrong() is None
    found.many[0].steps[0].weights[NAMES[1]][1].add_(0.1)
    assert ("weights of step 1", NAMES[1]) in wrong(compare(found, 1e-6, turns=2e-2))


def test_only_some_optimizers_turn() -> None:
    assert turns_of(sections.Lion(learning_rate=1e-3)) == 2e-3
    assert turns_of(sections.AdamW(learning_rate=1e-3)) == 2e-3
    assert turns_of(sections.AdamW(learning_rate=1e-3, eps=1e-4)) == 0
    assert turns_of(sections.SGD(learning_rate=1e-3)) == 0


def test_pieces_are_joined_and_what_nobody_holds_is_told() -> None:
    values = tensors(5)
    made, differing = joined([shard(values, 0), shard(values, 1)])
    assert not differing and all(torch.equal(made[name], values[name]) for name in NAMES)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: no process holds all of it"):
        joined([shard(values, 0)])


def test_modules_of_many_layers_are_shown_together() -> None:
    assert module_of("layers.7.attention.q_proj.adapter.default.lora_A") == "layers.7.attention"
    assert module_of("layers.7.attention.q_proj.weight", all_layers=True) == "layers.*.attention"
