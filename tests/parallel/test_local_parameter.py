"""Each parameter has groups of its own: dense ones all data ranks, experts those ranks that have the same ones."""

from __future__ import annotations

import pytest
from builders import expert_groups_worker
from builders.expert_groups_worker import Case, Seen
from builders.process_group import run_group

from danlu.core.shard_box import find_gap, find_overlap
from danlu.parallel.layout import Layout
from danlu.recipe.sections import Parallel

pytestmark = pytest.mark.distributed

EXPERT = "layers.1.experts.weight"
CASES: dict[str, Case] = {
    "none": (Parallel(), Layout(replicate=4, expert=2), 4, ""),
    "zero1": (Parallel(shard="zero1"), Layout(shard=4, expert=2), 4, ""),
    "zero3": (Parallel(shard="zero3"), Layout(shard=4, expert=2), 4, ""),
    "zero3, one expert each": (Parallel(shard="zero3"), Layout(shard=4, expert=4), 4, ""),
    "none, one expert each": (Parallel(), Layout(replicate=4, expert=4), 4, ""),
    "hybrid": (Parallel(shard="zero3", replicate=2), Layout(replicate=2, shard=2, expert=2), 4, ""),
    "zero3, fewer experts than shards": (Parallel(shard="zero3"), Layout(shard=4, expert=2), 2, ""),
    "zero3, experts everywhere": (Parallel(shard="zero3"), Layout(shard=4), 4, ""),
}
WRONG: dict[str, Case] = {
    "zero3": (Parallel(shard="zero3"), Layout(shard=4, expert=2), 4, "all data ranks"),
    "none": (Parallel(), Layout(replicate=4, expert=2), 4, "copies"),
}


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Seen]]:
    by_rank = run_group(expert_groups_worker.see, 4, list(CASES.values()))
    return {name: [found[number] for found in by_rank] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_over_the_ranks_that_have_the_parameter(seen: dict[str, list[Seen]], name: str) -> None:
    for one in seen[name]:
        assert len(one.errors) == 6
        assert max(one.errors.values()) < 1e-6, one.errors
        assert one.norms[0] == pytest.approx(one.norms[1], rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_boxes_say_who_has_what(seen: dict[str, list[Seen]], name: str) -> None:
    for parameter in seen[name][0].boxes:
        boxes = [one.boxes[parameter] for one in seen[name]]
        writers = [box for box in boxes if box.is_writer]
        assert find_gap(boxes[0].global_shape, writers) is None and find_overlap(writers) is None
        assert all(box.replicas == sum(box.same_elements(other) for other in boxes) for box in boxes)


def test_experts_that_fewer_ranks_have_are_sharded_among_those(seen: dict[str, list[Seen]]) -> None:
    def sizes(name: str) -> list[tuple[int, ...]]:
        return [one.boxes[EXPERT].sizes for one in seen[name]]

    assert sizes("zero3") == [(1, 8, 4)] * 4
    assert sizes("hybrid") == [(2, 8, 4)] * 4
    assert sizes("zero3, fewer experts than shards") == [(1, 4, 4)] * 4
    assert sizes("zero3, one expert each") == [(1, 8, 4)] * 4
    assert sizes("zero3, experts everywhere") == [(1, 8, 4)] * 4


@pytest.mark.parametrize("name", WRONG)
def test_groups_of_all_data_ranks_are_noticed(name: str) -> None:
    """Negative control."""
    (one, *_) = (found[0] for found in run_group(expert_groups_worker.see, 4, [WRONG[name]]))
    gradients_differ = max(one.errors.values()) > 1e-3
    norm_differs = one.norms[0] != pytest.approx(one.norms[1], rel=1e-3)
    assert gradients_differ if WRONG[name][3] == "all data ranks" else norm_differs
