"""The search finds the layouts that planning every one of them finds, and says what lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.expert_folder import EXPERTS
from builders.tiny_world import CONFIG, World

from danlu.core.errors import RecipeError
from danlu.models.hf_config import read_config_values
from danlu.parallel.collective_traffic import BUCKET_BYTES
from danlu.parallel.layout import Layout
from danlu.planning.choice import Choice, Offload, Space
from danlu.planning.cluster import Cluster
from danlu.planning.plan_cache import PlanCache, _reduce_buffer
from danlu.planning.search import Candidate, evaluate, planner_of, refusals, search
from danlu.planning.search_bounds import Bounds
from danlu.planning.stage_kinds import StageKinds
from danlu.planning.target import Target
from danlu.planning.thin_workload import ThinWorkloads
from danlu.planning.workload import OtherModel, Workload
from danlu.recipe import load
from danlu.recipe.sections import Parallel
from danlu.run.read_workload import read_workload

DENSE = {**CONFIG, "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 5000}
MIXTURE = {**EXPERTS, "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 256, "vocab_size": 5000}
WHOLE_SPACE = Space(
    tensor=(1, 2),
    context=(1, 2),
    expert=(1, 2),
    stages=(1, 2, 4),
    schedules=(("1f1b", None), ("interleaved", 2), ("zbv", None)),
    micro=(1, 4),
    recompute=("none", "full"),
)
SPACE = replace(
    WHOLE_SPACE, context=(1,), stages=(1, 2), schedules=(("1f1b", None), ("zbv", None)), micro=(2,), recompute=("none",)
)

SMALL_SPACE = replace(SPACE, sequence=(True,), shards=("zero1", "zero3"), replicates=(1, 2))


def workload_of(
    world: World, folder: Path, config: dict[str, Any], precision: str = "bf16", **changes: Any
) -> Workload:
    changes |= {"batch": {"sequences": 64}, "data": {"max_length": 1024}, "model": {"config": config}}
    recipe = load(world.recipe(folder / "run", precision=precision, **changes)).recipe
    return read_workload(recipe, read_config_values(config), judges=False)


def target_of(on: str, memory_bytes: int) -> Target:
    cluster = Cluster.of(on)
    return Target(replace(cluster, card=replace(cluster.card, memory_bytes=memory_bytes)))


def every_one(workload: Workload, space: Space, target: Target) -> list[Candidate]:
    cache = PlanCache(workload, target)
    choices = space.choices(workload, target.cluster.ranks)
    planned = (evaluate(workload, choice, target, cache) for choice in choices)
    return sorted(each for each in planned if each is not None)


MODELS = pytest.mark.parametrize(
    ("config", "on", "memory_bytes"), [(DENSE, "8xH100-80G", 400 << 20), (MIXTURE, "2x8xA100-80G", 160 << 20)]
)


@MODELS
def test_the_search_finds_what_planning_every_choice_finds(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], on: str,
    memory_bytes: int,
) -> None:  # fmt: skip
    check_search(workload_of(tiny_world, tmp_path, config), SPACE, target_of(on, memory_bytes), monkeypatch)


@pytest.mark.slow
@MODELS
def test_the_search_of_a_larger_space_finds_what_planning_every_choice_finds(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], on: str,
    memory_bytes: int,
) -> None:  # fmt: skip
    check_search(workload_of(tiny_world, tmp_path, config), WHOLE_SPACE, target_of(on, memory_bytes), monkeypatch)


def check_search(workload: Workload, space: Space, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ranks = every_one(workload, space, target), target.cluster.ranks
    choices = list(space.choices(workload, ranks))
    assert len(set(choices)) == len(choices) > len(expected) > 5, "some do not fit"
    assert search(workload, space, target, top=5) == expected[:5]
    cache = PlanCache(workload, target)
    bounds = Bounds(workload, target, cache)
    for candidate in expected:
        choice, seconds = candidate.choice, candidate.seconds
        whole = bounds.close(choice) + bounds.of_data_ranks(choice)
        assert bounds.quick(choice) <= bounds.waiting(choice) <= bounds.close(choice) * (1 + 1e-9)
        assert whole <= seconds * (1 + 1e-9), choice
        assert min(map(bounds.bytes, space.fewest_states(choice, ranks))) <= bounds.bytes(choice), choice
        assert bounds.bytes(choice) <= candidate.bytes, choice
        planner = planner_of(workload, choice, target, cache)
        assert planner is not None and planner.least_seconds <= seconds * (1 + 1e-9)
        assert planner.may_fit(candidate.bytes), choice
        # Control: without messages, of which tiny models have many bytes, it is not far below.
        assert not planner.may_fit(candidate.bytes // 2), choice
    # Controls: bounds that are too high, of seconds or of bytes, lose the fastest layout.
    fastest, of_bytes = expected[0].choice, Bounds.bytes
    with monkeypatch.context() as patch:
        patch.setattr(Bounds, "of_data_ranks", lambda own, choice: 9e9 * (choice == fastest))
        assert search(workload, space, target, top=5) != expected[:5]
    with monkeypatch.context() as patch:
        patch.setattr(Bounds, "bytes", lambda own, choice: of_bytes(own, choice) + 9e9 * (choice == fastest))
        assert search(workload, space, target, top=5) != expected[:5]


def test_the_space_has_each_way_to_share_states_once(tiny_world: World, tmp_path: Path) -> None:
    workload, target = workload_of(tiny_world, tmp_path, DENSE), target_of("8xH100-80G", 1 << 40)
    cache, space = PlanCache(workload, target), Space.of(workload, target)

    def sharings(choice: Choice) -> list[tuple[str, int]]:
        return [(each.shard, each.replicate) for each in space.sharings(workload, choice, 8)]

    two_stages = Choice(stages=2)
    sharded = [(shard, replicate) for shard in ("zero1", "zero2", "zero3") for replicate in (1, 2)]
    assert sharings(two_stages) == [("none", 1), *sharded], "four replicas would not be sharded"
    assert sharings(Choice(context=8)) == [("none", 1), *((shard, 1) for shard in ("zero1", "zero2", "zero3"))]
    assert sharings(Choice(tensor=8, sequence=True)) == [("none", 1)]
    assert [cut.sequence for cut in space.cuts(workload, 8) if (cut.tensor, cut.stages) == (2, 1)] == [True, False]
    # With gradients that are put off, zero2 keeps them whole as zero1 does: a control with others differs.
    assert {shard for shard, _ in sharings(two_stages._replace(schedule="zbv"))} == {"none", "zero1", "zero3"}
    for schedule, is_same in (("zbv", True), ("1f1b", False)):
        plans = [
            evaluate(workload, two_stages._replace(schedule=schedule, shard=shard), target, cache)
            for shard in ("zero1", "zero2")
        ]
        assert plans[0] is not None and plans[1] is not None
        assert (plans[0].plan == plans[1].plan) == is_same


def test_few_ranks_that_have_all_of_their_experts_may_have_the_fewest_bytes(tiny_world: World, tmp_path: Path) -> None:
    """Experts of one rank alone are not gathered: two replicas of two ranks have less than four ranks that gather."""
    plain_sgd = {"kind": "sgd", "momentum": 0.0}
    workload = workload_of(tiny_world, tmp_path, MIXTURE, "fp32", optimizer=plain_sgd)
    target = target_of("2x8xA100-80G", 1 << 40)
    bounds, space = Bounds(workload, target, PlanCache(workload, target)), Space.of(workload, target)
    choice = Choice(expert=2, stages=4, micro=8)  # a layer of each stage, and too few micro-batches for gradients
    least = min(space.sharings(workload, choice, 16), key=bounds.bytes)
    assert least.replicate == 2
    assert min(map(bounds.bytes, space.fewest_states(choice, 16))) == bounds.bytes(least)


def test_bounds_of_sharded_models_are_below_their_plans(tiny_world: World, tmp_path: Path) -> None:
    """One rank computes a layer's passes with narrow weights in less time, and has them of all chunks under zero1."""
    workload, target = workload_of(tiny_world, tmp_path, DENSE), target_of("8xH100-80G", 1 << 40)
    cache = PlanCache(workload, target)
    bounds = Bounds(workload, target, cache)
    sharded = Choice(stages=2, schedule="interleaved", chunks=2, shard="zero1")
    whole = sharded._replace(shard="none")
    by_layer = Choice(shard="zero3", recompute="full")  # two of eight layers at a time
    others = sharded._replace(shard="zero2"), sharded._replace(schedule="zbv", chunks=None), by_layer
    for choice in (sharded, *others, whole):
        candidate = evaluate(workload, choice, target, cache)
        assert candidate is not None
        assert bounds.close(choice) <= candidate.seconds
        assert bounds.bytes(choice) <= candidate.bytes
    assert bounds.close(sharded) < bounds.close(whole), "fewer conversions"
    assert all(cut.shard != "none" for cut in SPACE.cuts(workload, 8)), "sharded states compute least"
    gathered = bounds.bytes(sharded) - bounds.bytes(sharded._replace(shard="zero3"))
    assert gathered > 0, "zero3 has one layer at a time"


def test_products_in_8_bits_have_no_more_tensor_ranks_than_key_heads(tiny_world: World, tmp_path: Path) -> None:
    for precision, degrees in (("fp8", {1, 2}), ("bf16", {1, 2, 4})):
        workload = workload_of(tiny_world, tmp_path / precision, DENSE, precision)
        space = Space.of(workload, target_of("4xH100-80G", 1 << 40))
        assert {cut.tensor for cut in space.cuts(workload, 4)} == degrees, "two key heads"
        target = target_of("4xH100-80G", 1 << 40)
        candidate = evaluate(workload, Choice(), target, PlanCache(workload, target))
        assert candidate is not None
        said = any("products in 8 bits take as long" in line for line in candidate.plan.assumptions)
        assert said == (precision == "fp8")


OFFLOADS: tuple[Offload, ...] = ((), ("optimizer",), ("activations",), ("optimizer", "activations"), ("parameters",))


@pytest.mark.parametrize(
    ("config", "on", "space"),
    [
        (DENSE, "8xH100-80G", SMALL_SPACE),
        pytest.param(MIXTURE, "2x8xA100-80G", SMALL_SPACE, marks=pytest.mark.slow),
        pytest.param(DENSE, "8xH100-80G", WHOLE_SPACE, marks=pytest.mark.slow),
    ],
)
def test_where_nothing_fits_the_search_finds_what_planning_every_offload_finds(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], on: str, space: Space
) -> None:
    workload, enough = workload_of(tiny_world, tmp_path, config), target_of(on, 1 << 40)
    least = min(each.bytes for each in every_one(workload, space, enough))
    target = target_of(on, round(0.95 * least))
    offloading = replace(space, offloads=OFFLOADS)
    assert not every_one(workload, space, target)
    fitting = every_one(workload, offloading, target)
    choices = {each.choice for each in fitting}
    expected = [each for each in fitting if not choices.intersection(offloading.smaller_offloads(each.choice))]
    assert len(fitting) > len(expected) > 5 and len({each.choice.offload for each in expected}) > 1
    assert search(workload, offloading, target, top=5) == expected[:5]
    assert search(workload, offloading, target, top=len(fitting)) == expected, "none that offloads more than it needs"
    bounds = Bounds(workload, target, PlanCache(workload, target))
    for each in fitting:
        whole = max(bounds.close(each.choice) + bounds.of_data_ranks(each.choice), bounds.copies(each.choice))
        assert whole <= each.seconds * (1 + 1e-9) and bounds.bytes(each.choice) <= each.bytes, each.choice
        host = max(stage.memory.host.step for stage in each.plan.stages)
        assert bounds.host_bytes(each.choice) <= host <= target.host_room_bytes
    # Controls: without bounds of the host's memory nothing changes, and with room without end other choices count.
    with monkeypatch.context() as patch:
        patch.setattr(Bounds, "host_bytes", lambda own, choice: 0.0)
        assert search(workload, offloading, target, top=5) == expected[:5]
    with monkeypatch.context() as patch:
        patch.setattr(Bounds, "bytes", lambda own, choice: 9e99)
        with pytest.raises(RecipeError, match="no layout"):
            search(workload, offloading, target)


def without_rules(*_: Any) -> Iterator[str]:
    """Stands in for the rules by which a run refuses a layout."""
    return iter(())


@pytest.mark.parametrize("kind", ["rounded weights", "a teacher", "offloaded parameters", "galore"])
def test_what_a_run_refuses_is_not_proposed(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Control: without the rules the search proposes what they refuse."""
    changes: dict[str, dict[str, Any]] = {
        "rounded weights": {"quantization": {"kind": "int4", "group": 256, "trained": True}},
        "a teacher": {},
        "offloaded parameters": {"memory": {"offload": ["parameters"]}},
        "galore": {"optimizer": {"kind": "galore"}},
    }
    workload, target = workload_of(tiny_world, tmp_path, DENSE, **changes[kind]), target_of("8xH100-80G", 1 << 34)
    if kind == "a teacher":  # with another number of rows, and fewer layers than stages
        config = read_config_values({**DENSE, "num_hidden_layers": 3, "vocab_size": 6000})
        workload = replace(workload, others=(OtherModel("teacher.0.model", "teacher", config),))
    space = replace(SPACE, tensor=(1, 4), sequence=(True,), stages=(1, 4), schedules=(("1f1b", None),), replicates=(1,))

    def refused(candidates: list[Candidate]) -> list[bool]:
        own = (replace(workload, recipe=each.choice.recipe(workload.recipe)) for each in candidates)
        return [bool(refusals(each, target)) for each in own]

    with monkeypatch.context() as patch:
        patch.setattr("danlu.planning.choice.models_problems", without_rules)
        patch.setattr("danlu.planning.search.layout_problems", without_rules)
        proposed = search(workload, space, target, top=1000)
    if kind == "galore":
        with pytest.raises(RecipeError, match=r"can train it\n(.*\n)*optimizer.kind: galore projects"):
            search(workload, space, target)
    else:
        allowed = search(workload, space, target, top=1000)
        assert not any(refused(allowed))
        assert allowed == [each for each, is_refused in zip(proposed, refused(proposed), strict=True) if not is_refused]
    assert any(refused(proposed))


def test_nothing_that_fits_and_no_speeds_are_said(tiny_world: World, tmp_path: Path) -> None:
    workload = workload_of(tiny_world, tmp_path, DENSE)
    with pytest.raises(RecipeError, match="no layout of 8 x H100-80G holds this recipe"):
        search(workload, SPACE, target_of("8xH100-80G", 1 << 20))
    with pytest.raises(RecipeError, match="danlu bench machine"):
        search(workload, SPACE, Target(Cluster.here(None, 1)))


def test_overrides_give_the_recipe_of_a_choice(tiny_world: World, tmp_path: Path) -> None:
    workload, target = workload_of(tiny_world, tmp_path, DENSE), target_of("8xH100-80G", 1 << 34)
    for candidate in search(workload, SPACE, target, top=12):
        recipe = load(tmp_path / "run.yaml", candidate.choice.overrides()).recipe
        planned = candidate.choice.recipe(workload.recipe)
        assert (recipe.parallel, recipe.memory.recompute) == (planned.parallel, planned.memory.recompute)
        assert recipe.batch.micro == candidate.plan.micro


def test_a_layer_of_a_kind_has_what_one_more_of_it_adds(tiny_world: World, tmp_path: Path) -> None:
    workload = workload_of(tiny_world, tmp_path, {**MIXTURE, "first_k_dense_replace": 1})
    kinds = StageKinds(workload).of_policy
    assert len(set(kinds)) == 2

    def elements(thin: Workload) -> tuple[float, ...]:
        return (sum(math.prod(each.shape) for each in thin.policy.tensors),)

    (measured,) = ThinWorkloads(workload, kinds).measure(elements)
    counts = [kinds.count(kind) for kind in range(2)]
    assert measured.outside + measured.of(counts) == elements(workload)[0]
    assert measured.layers[0] != measured.layers[1] and min(*measured.layers, measured.outside) > 0


def test_sums_of_gradients_go_in_buckets() -> None:
    shared, large = Layout(replicate=2), 3 * BUCKET_BYTES
    assert _reduce_buffer(Parallel(), shared, large) == BUCKET_BYTES and _reduce_buffer(Parallel(), shared, 64) == 64
    assert _reduce_buffer(Parallel(), Layout(), large) == 0
    assert _reduce_buffer(Parallel(reduce="bf16"), shared, large) == large // 2
