"""Layouts from a recipe and a number of processes: what fits, and what is proposed where it does not."""

from __future__ import annotations

import pytest
from builders.small_config import small_config
from builders.small_experts import QWEN2_MOE, experts_config

from danlu.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.parallel.layout import AXES, Layout, layout_of, problems
from danlu.recipe.sections import Parallel


def config_of(heads: int, kv_heads: int, intermediate_size: int, vocab_size: int) -> ModelConfig:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64, "hidden_size": 64 * heads}
    return small_config(**sizes, intermediate_size=intermediate_size, vocab_size=vocab_size)


LARGE = config_of(32, 8, 14336, 128256)


@pytest.mark.parametrize(
    ("section", "world", "layout"),
    [
        (Parallel(), 1, Layout()),
        (Parallel(), 6, Layout(replicate=6)),
        (Parallel(shard="zero3"), 4, Layout(shard=4)),
        (Parallel(shard="zero3", replicate=2), 8, Layout(replicate=2, shard=4)),
        (Parallel(shard="zero2", tensor=2, replicate=2), 16, Layout(replicate=2, shard=4, tensor=2)),
        (Parallel(tensor=4, data=2), 8, Layout(replicate=2, tensor=4)),
        (Parallel(workers="threads", data=4), 1, Layout()),
        (Parallel(expert=2), 4, Layout(replicate=4, expert=2)),
        (Parallel(shard="zero3", expert=4, tensor=2), 16, Layout(shard=8, tensor=2, expert=4)),
        (Parallel(shard="zero3", replicate=2, expert=2), 8, Layout(replicate=2, shard=4, expert=2)),
    ],
)
def test_degrees_multiply_to_the_processes(section: Parallel, world: int, layout: Layout) -> None:
    found = layout_of(section, world)
    assert found == layout
    assert found.world == world


@pytest.mark.parametrize(
    ("section", "world", "message"),
    [
        (
            Parallel(tensor=2),
            1,
            "does not divide the one process of this run. Use tensor: 1, or start danlu with --proc",
        ),
        (
            Parallel(tensor=3),
            8,
            "parallel.tensor: 3 does not divide the 8 processes of this run. Use tensor: 2, tensor: 4",
        ),
        (
            Parallel(data=4),
            2,
            "asks for 4 processes, not for the 2 processes of this run. Use data: 2, or start danlu with",
        ),
        (Parallel(shard="zero3", replicate=3), 8, "parallel.replicate: 3 does not divide the 8 data ranks. Use 2 or 4"),
        (Parallel(expert=4, tensor=2), 12, "parallel.expert: 4 does not divide the 6 data ranks. Use 3 or 6"),
        (
            Parallel(shard="zero3", replicate=2, expert=4),
            4,
            "parallel.expert: 4 does not divide the 2 data ranks of each replica. Use 2",
        ),
        (Parallel(pipeline=2), 2, "parallel.pipeline: 2, but only 1 works so far"),
        (Parallel(context=2), 2, "parallel.context: 2, but only 1 works so far"),
        (Parallel(workers="threads"), 2, "threads trains in one process, and there are 2"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(section: Parallel, world: int, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        layout_of(section, world)


@pytest.mark.parametrize(
    ("degree", "config", "message"),
    [
        (5, LARGE, "5 does not divide the model's 32 attention heads. Use 4 or 8"),
        (
            16,
            config_of(48, 6, 4096, 1000),
            "16 neither divides the model's 6 key/value heads nor is a multiple of them",
        ),
        (8, config_of(32, 8, 1004, 1000), "8 does not divide the MLP's width of 1004. Use 4"),
        (8, config_of(32, 8, 1024, 4), "8 is more than the 4 tokens of the vocabulary. Use 4 or 16"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_told_with_what_it_can(degree: int, config: ModelConfig, message: str) -> None:
    (found,) = problems(Parallel(tensor=degree), config)
    assert message in found


@pytest.mark.parametrize(
    ("degree", "config", "message"),
    [
        (2, LARGE, "parallel.expert: 2, and the model has no experts to distribute. Leave it out"),
        (4, experts_config(QWEN2_MOE), "parallel.expert: 4 does not divide the model's 6 experts. Use 3 or 6"),
    ],
)
def test_experts_that_cannot_be_distributed_so_are_told(degree: int, config: ModelConfig, message: str) -> None:
    assert list(problems(Parallel(expert=degree), config)) == [message]
    assert not list(problems(Parallel(expert=3), experts_config(QWEN2_MOE)))


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32])
def test_a_model_that_can_be_cut_has_no_problem(degree: int) -> None:
    assert not list(problems(Parallel(tensor=degree), LARGE))


def test_neighbouring_ranks_are_neighbours_along_tensor() -> None:
    layout = Layout(replicate=2, shard=3, tensor=4)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    assert [place["tensor"] for place in places[:5]] == [0, 1, 2, 3, 0]
    assert len({tuple(place[axis] for axis in AXES) for place in places}) == layout.world
    assert all(place["pipeline"] == place["context"] == 0 for place in places)
    assert str(layout) == "data 6 x shards 3 x tensor 4"


def test_neighbouring_data_ranks_have_other_experts() -> None:
    layout = Layout(shard=4, tensor=2, expert=2)
    # Data rank d, of tensor ranks 2d and 2d + 1, has the experts of index d % 2.
    assert [layout.expert_data_ranks(rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.expert_sizes == (1, 1, 2, 2, 1, 2)
    assert str(layout) == "data 4 x expert 2 x tensor 2"
    assert Layout(replicate=6, expert=3).expert_data_ranks(4) == [1, 4]
    assert Layout(replicate=2, shard=2, expert=2).expert_data_ranks(0) == [0, 2]
