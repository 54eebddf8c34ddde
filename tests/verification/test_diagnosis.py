"""From a wrong gradient to its cause: which packs count how much, which ratio, which sum was left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.tiny_world import tiny_world
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.core.types import Pack
from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import Layout
from danlu.recipe import load
from danlu.verification.comparison import compare
from danlu.verification.data import synthetic_packs
from danlu.verification.diagnosis import Case, diagnose
from danlu.verification.proxy import Proxy
from danlu.verification.trace import ItemGradient, StepTrace, Trace
from danlu.verification.workers import Task, Traces

NAMES = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight")
SHAPES = ((8, 8), (6, 8), (24,))
PACKS = 5  # for two data ranks: 0 and 1 to the first, the others to the second; two in a micro-batch
LAYOUT = Layout(replicate=2)
Change = Callable[[list[float]], list[float]]


def case(tmp_path: Path, shares: list[float] | None = None, layout: Layout = LAYOUT, tied: bool = False) -> Case:
    """A gradient in which packs count so much, in a layout; all else is right."""
    recipe = load(tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml")).recipe
    config = read_config_values(
        {**recipe.model.config, "vocab_size": 400, "tie_word_embeddings": tied}  # type: ignore[dict-item]
    )
    packs = synthetic_packs(recipe, PACKS)
    task = Task(recipe, Proxy(config), layout, [packs, packs], [], 2, "cpu")
    generator = torch.Generator().manual_seed(0)
    by_item = [{name: _normal(shape, generator) for name, shape in zip(NAMES, SHAPES, strict=True)} for _ in packs]
    reference = _trace(_summed(by_item, [1.0] * PACKS))
    reference.item_gradients = [
        ItemGradient(_weight(pack), _full_shards(parts)) for pack, parts in zip(packs, by_item, strict=True)
    ]
    by_rank = [_trace(_summed(by_item, shares or [1.0] * PACKS)) for _ in range(layout.world)]
    return Case(task, Traces(by_rank, reference, _trace(_summed(by_item, [1.0] * PACKS))))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _summed(by_item: list[dict[str, Tensor]], shares: list[float]) -> dict[str, Tensor]:
    pairs = list(zip(by_item, shares, strict=True))
    return {name: torch.stack([share * parts[name] for parts, share in pairs]).sum(0) for name in NAMES}


def _full_shards(values: dict[str, Tensor]) -> dict[str, tuple[ShardBox, Tensor]]:
    return {name: (ShardBox.full(value.shape), value.clone()) for name, value in values.items()}


def _trace(gradients: dict[str, Tensor]) -> Trace:
    def step() -> StepTrace:
        return StepTrace(
            2.0, 1.0, 1.0, 50, _full_shards(gradients), _full_shards({name: torch.ones(3, 3) for name in NAMES})
        )

    trace = Trace([step()], _full_shards({name: torch.full((3, 3), 0.9) for name in NAMES}), 2.0)
    trace.loaded_weights = _full_shards({name: torch.ones(3, 3) for name in NAMES})
    trace.next_step = trace.resumed_step = step()
    return trace


def diagnosed(of: Case) -> tuple[str, str | None, str, str]:
    found = diagnose(compare(of.traces, 1e-6), of)
    assert found is not None
    return found.stage, found.parameter, found.ratio, found.cause


def weights(of: Case) -> list[float]:
    return [item.weight for item in of.traces.reference.item_gradients]


def _weight(pack: Pack) -> float:
    return sum(float(sample.weights.sum()) for sample in pack.samples)


def test_nothing_wrong_is_nothing_found(tmp_path: Path) -> None:
    right = case(tmp_path)
    assert diagnose(compare(right.traces, 1e-6), right) is None


@pytest.mark.parametrize(
    ("share", "ratio", "cause"),
    [
        (2.0, "x2 (data, replicate, world, micro-batches)", "summed twice along an axis"),
        (0.5, "x0.5 (/data, /replicate, /world, /micro-batches)", "averaged over ranks"),
        (3.0, "x3", "too large by a constant"),
    ],
)
def test_a_constant_ratio_is_named(tmp_path: Path, share: float, ratio: str, cause: str) -> None:
    stage, parameter, found, why = diagnosed(case(tmp_path, [share] * PACKS))
    assert (stage, parameter, found) == ("gradients of step 1", "embed_tokens.weight", ratio)
    assert cause in why


def test_the_ratio_is_named_after_the_axis_of_that_size(tmp_path: Path) -> None:
    layout = Layout(shard=2, tensor=3)
    assert diagnosed(case(tmp_path, [3.0] * PACKS, layout))[2] == "x3 (tensor)"
    assert diagnosed(case(tmp_path, [6.0] * PACKS, layout))[2] == "x6 (world)"
    assert diagnosed(case(tmp_path, [1 / 3] * PACKS, layout))[2] == "x0.3333 (/tensor)"


def test_a_mean_of_means_is_told_from_other_weights(tmp_path: Path) -> None:
    w = weights(case(tmp_path))
    ranks = [[0, 1], [2, 3, 4]]
    shares = [0.0] * PACKS
    for own in ranks:
        for pack in own:
            shares[pack] = sum(w) / (2 * sum(w[one] for one in own))
    assert "mean over data ranks of their own means" in diagnosed(case(tmp_path, shares))[3]
    shares[0] *= 1.5
    assert "mean over data ranks" not in diagnosed(case(tmp_path, shares))[3]


def test_micro_batches_that_count_alike_are_told(tmp_path: Path) -> None:
    w = weights(case(tmp_path))
    shares = [0.0] * PACKS
    for own, micro in (([0, 1], [[0, 1]]), ([2, 3, 4], [[2, 3], [4]])):
        for group in micro:
            for pack in group:
                shares[pack] = sum(w[one] for one in own) / (len(micro) * sum(w[one] for one in group))
    assert "each micro-batch counts alike" in diagnosed(case(tmp_path, shares))[3]


def test_rows_that_count_twice_or_not_at_all_are_counted(tmp_path: Path) -> None:
    ratio, cause = diagnosed(case(tmp_path, [1, 2, 1, 1, 0]))[2:]
    assert ratio == "1 packed sequences are not counted, 1 more than once" and "repeats or drops rows" in cause


def test_ranks_whose_rows_are_not_summed_are_told(tmp_path: Path) -> None:
    ratio, cause = diagnosed(case(tmp_path, [1, 1, 0, 0, 0]))[2:]
    assert ratio == "3 packed sequences are not counted, 0 more than once" and "not summed over data ranks" in cause


def test_a_part_on_each_rank_that_would_add_up_is_a_sum_left_out(tmp_path: Path) -> None:
    of = case(tmp_path, layout=Layout(tensor=2))
    name = "norm.weight"
    for rank, seen in enumerate(of.traces.by_rank):
        box, value = seen.steps[0].gradients[name]
        seen.steps[0].gradients[name] = box, value * (0.3, 0.7)[rank]  # type: ignore[index]
    stage, parameter, ratio, cause = diagnosed(of)
    assert (stage, parameter) == ("gradients of step 1", name)
    assert ratio.startswith("/tensor, a part on each rank") and "over tensor ranks is missing" in cause
    of.traces.by_rank[1].steps[0].gradients[name][1].mul_(2)
    assert "was left out" not in diagnosed(of)[3]


def test_a_tied_embedding_alone_is_a_lost_tie(tmp_path: Path) -> None:
    for tied in (True, False):
        of = case(tmp_path, tied=tied)
        for seen in of.traces.by_rank:
            seen.steps[0].gradients["embed_tokens.weight"][1][0] += 1
        cause = diagnosed(of)[3]
        assert ("the tie of head and embedding is lost" in cause) is tied


def test_norms_that_differ_by_rank_are_local(tmp_path: Path) -> None:
    of = case(tmp_path)
    of.traces.by_rank[1].steps[0].grad_norm = 0.8
    stage, parameter, ratio, cause = diagnosed(of)
    assert (stage, parameter, ratio) == ("norm of step 1", None, "by rank 1, 0.8 instead of 1")
    assert "the norm of what it holds" in cause


def test_right_weights_and_a_wrong_loss_are_parameters_out_of_date(tmp_path: Path) -> None:
    of = case(tmp_path)
    for seen in (*of.traces.by_rank, of.traces.reference, of.traces.perturbed):
        seen.steps.append(replace(seen.steps[0]))
    for seen in of.traces.by_rank:
        seen.steps[1] = replace(seen.steps[1], loss=2.1)
    assert "out of date" in diagnosed(of)[3]


def test_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    of = case(tmp_path)
    for seen in (of.traces.reference, of.traces.perturbed):
        seen.steps.append(replace(seen.steps[0]))
    for seen in of.traces.by_rank:
        seen.hit_non_finite = True
    stage, parameter, ratio, cause = diagnosed(of)
    assert (stage, parameter, ratio) == ("loss of step 2", None, "not finite") and "never filled" in cause


def test_an_update_that_alone_is_wrong_is_the_optimizer(tmp_path: Path) -> None:
    of = case(tmp_path)
    for seen in of.traces.by_rank:
        seen.steps[0].weights["norm.weight"][1].add_(0.1)
    stage, parameter, ratio, cause = diagnosed(of)
    assert (stage, parameter) == ("weights of step 1", "norm.weight")
    assert ratio == "of the update: x2 (data, replicate, world, micro-batches)"
    assert "the gradients are right and the update is not" in cause


def test_a_step_that_is_wrong_after_loading_is_the_state(tmp_path: Path) -> None:
    of = case(tmp_path)
    for seen in of.traces.by_rank:
        assert seen.resumed_step is not None
        seen.resumed_step = replace(
            seen.resumed_step, weights=_full_shards({name: torch.full((3, 3), 1.1) for name in NAMES})
        )
    stage, _, _, cause = diagnosed(of)
    assert stage == "a step of one process's checkpoint in the layout" and "optimizer's state" in cause
