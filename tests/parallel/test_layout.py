"""Layouts from a recipe and a number of processes: what fits, and what is proposed where it does not."""

from __future__ import annotations

import pytest
from builders.family_values import GEMMA4_E2B
from builders.small_config import small_config
from builders.small_experts import QWEN2_MOE, experts_config
from builders.tiny_run import tiny_config

from danlu.core.errors import RecipeError
from danlu.models.config import ModelConfig
from danlu.parallel.layout import AXES, Layout, layout_of, problems
from danlu.planning.device_map import device_map_problems
from danlu.planning.pipeline_split import split_problems
from danlu.recipe.sections import Context, Parallel, Pipeline


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
        (Parallel(pipeline=Pipeline(stages=2), shard="zero3"), 4, Layout(pipeline=2, shard=2)),
        (Parallel(pipeline=Pipeline(stages=2), tensor=2, data=2), 8, Layout(pipeline=2, replicate=2, tensor=2)),
        (Parallel(shard="zero3", expert=4, tensor=2), 16, Layout(shard=8, tensor=2, expert=4)),
        (Parallel(shard="zero3", replicate=2, expert=2), 8, Layout(replicate=2, shard=4, expert=2)),
        (Parallel(context=Context(size=4, ulysses=2)), 8, Layout(replicate=2, context=4, ulysses=2)),
        (
            Parallel(shard="zero3", context=Context(size=2, method="ulysses"), tensor=2),
            8,
            Layout(shard=2, context=2, tensor=2, ulysses=2),
        ),
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
        (
            Parallel(pipeline=Pipeline(stages=4)),
            6,
            "4 stages do not divide the 6 processes of this run. Use pipeline: 3",
        ),
        (
            Parallel(pipeline=Pipeline(stages=2), tensor=4),
            4,
            "does not divide the 2 processes of each of the 2 pipeline stages. Use tensor: 2, or start danlu with "
            "--processes 8",
        ),
        (
            Parallel(context=Context(size=4)),
            6,
            "parallel.context: 4 .* does not divide the 6 processes of this run",
        ),
        (
            Parallel(data=2, context=Context(size=2), tensor=2),
            4,
            "asks for 8 processes, not for the 4 processes of this run. Use data: 1, or start danlu with --processes 8",
        ),
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


@pytest.mark.parametrize("carried", ["keys and values", "embeddings"])
def test_layouts_that_hand_on_the_residual_stream_alone_are_refused_where_layers_read_more(carried: str) -> None:
    sizes = {"num_attention_heads": 8, "num_hidden_layers": 8}
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny_config().vocab_size}
    own = {"num_kv_shared_layers": 0, **own} if carried == "embeddings" else {"hidden_size_per_layer_input": 0}

    def refusals(config: ModelConfig) -> list[str]:
        cuts = [*split_problems(Pipeline(stages=2), config), *device_map_problems("auto", config)]
        return [*cuts, *problems(Parallel(context=Context(size=2)), config)]

    found = refusals(tiny_config(**GEMMA4_E2B | sizes | own))
    assert [message.partition(":")[0] for message in found] == [
        "parallel.pipeline",
        "parallel.device_map",
        *(["parallel.context"] if carried == "keys and values" else []),
    ]
    assert all(carried.split()[0] in message and "parallel.shard: zero3" in message for message in found)
    plain = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    assert not refusals(tiny_config(**GEMMA4_E2B | sizes | plain))  # control


def test_linear_attention_is_cut_by_ulysses_alone() -> None:
    linear = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
    config = tiny_config(model_type="qwen3_5_text", num_attention_heads=8, num_key_value_heads=2, **linear, **sizes)
    (message,) = problems(Parallel(context=Context(size=2)), config)
    assert message.startswith("parallel.context.method: ring, but linear attention goes through a document in order")
    assert not list(problems(Parallel(context=Context(size=2, method="ulysses")), config))
    # Of attention a key may be on several ranks, of a state not.
    assert list(problems(Parallel(context=Context(size=4, method="ulysses")), config)) == [
        "parallel.context.size: 4 ranks cannot share out the 8 value heads and 2 key heads. Use 2"
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            Parallel(context=Context(size=3, method="ulysses")),
            "parallel.context.size: 3 ranks cannot share out the 32 query heads and 8 key/value heads. Use 2 or 4",
        ),
        (
            Parallel(context=Context(size=64, ulysses=16), tensor=4),
            "parallel.context.ulysses: 16 ranks cannot share out the 8 query heads and 2 key/value heads of each "
            "tensor rank. Use 8",
        ),
    ],
)
def test_heads_that_context_ranks_cannot_share_out_are_told(section: Parallel, message: str) -> None:
    assert list(problems(section, LARGE)) == [message]
    assert not list(problems(Parallel(context=Context(size=64, ulysses=8)), LARGE))  # of more ranks than kv heads too
    assert not list(problems(Parallel(context=Context(size=32, method="ulysses")), LARGE))


def test_context_ranks_are_a_grid_of_rings_and_ulysses_groups() -> None:
    layout = Layout(shard=2, context=4, tensor=2, ulysses=2)
    # Context rank c of data rank d and tensor rank t is rank 8 d + 2 c + t.
    assert layout.ulysses_ranks(3) == [1, 3] and layout.ulysses_ranks(12) == [12, 14]
    assert layout.ring_ranks(3) == [3, 7] and layout.ring_ranks(8) == [8, 12]
    assert layout.gradient_ranks(1) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert layout.gradient_sizes == (1, 1, 8, 2) and str(layout) == "data 2 x context 4 x tensor 2"


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
    assert layout.expert_sizes == (1, 1, 2, 2, 2)
    assert str(layout) == "data 4 x expert 2 x tensor 2"
    assert Layout(replicate=6, expert=3).expert_data_ranks(4) == [1, 4]
    assert Layout(replicate=2, shard=2, expert=2).expert_data_ranks(0) == [0, 2]


def test_experts_are_distributed_among_data_and_context_ranks() -> None:
    layout = Layout(shard=2, context=2, tensor=2, expert=2)
    # Context rank c of data rank d and tensor rank t is rank 4 d + 2 c + t, and has the experts of index c.
    assert layout.expert_ranks(1) == [1, 3] and layout.expert_data_ranks(1) == [1, 5]
    assert layout.expert_sizes == (1, 1, 2, 2, 2)
    # Whole copies on four data ranks: two of these with their context ranks have all experts.
    whole = Layout(replicate=4, context=2, expert=4)
    assert whole.expert_ranks(5) == [4, 5, 6, 7] and whole.expert_data_ranks(5) == [1, 5]
    assert whole.expert_sizes == (1, 2, 1, 4, 1)
