"""PipeDream's stages end each turn with the weights that its formula has, replayed in one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders.equal_traces import approx, distance
from builders.parallel_steps import recipe_file
from builders.pipedream_steps import STEPS, TURN, Turns, replays, see_turns, weights_of
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World

from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save

pytestmark = pytest.mark.distributed

PACKS = 3  # of a step: two data ranks have unequal numbers of them
FOUR = {**CONFIG, "num_hidden_layers": 4}
SGD = {"optimizer": {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}}
LORA = {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}}


def layout(stages: int, **changes: Any) -> dict[str, Any]:
    sync = changes.pop("vertical_sync", False)
    return {"pipeline": {"stages": stages, "schedule": "pipedream", "vertical_sync": sync}, **changes}


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two stages": (2, layout(2), {}),
    "vertical sync": (2, layout(2, vertical_sync=True), {}),
    "momentum": (2, layout(2), SGD),
    "lora": (2, layout(2), LORA),
    "dora, vertical sync": (2, layout(2, vertical_sync=True), {"adapter": {"kind": "dora", "rank": 4}}),
    "vera": (2, layout(2), {"adapter": {"kind": "vera", "rank": 4, "dropout": 0.1}}),
    "full": (2, layout(2), {"memory": {"recompute": "full"}}),
    "selective, lora": (2, layout(2), {"memory": {"recompute": "selective"}, **LORA}),
    "every, vertical sync": (
        2,
        layout(2, vertical_sync=True),
        {"memory": {"recompute": {"kind": "every", "layers": 2}}},
    ),
    "bf16, full": (2, layout(2), {"precision": "bf16", "memory": {"recompute": "full"}}),
    "four stages": (4, layout(4), {}),
    "four stages, vertical sync": (4, layout(4, vertical_sync=True), {"memory": {"recompute": "full"}}),
    "x data": (4, layout(2), SGD),
    "x tensor, sequence": (4, layout(2, tensor=2, sequence=True), SGD),
    "x context": (4, layout(2, context=2), {**SGD, **LORA}),
}
MISTAKES = ["two stages", "momentum", "lora", "full"]
"""Cases in which backward passes with the newest weights must show."""


@pytest.fixture(scope="module")
def files(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pipedream")
    base = build(read_config_values({**FOUR, "vocab_size": 400, "tie_word_embeddings": False}))
    initialize(base, 0)
    save(base, folder / "base", tokenizer_from=tiny_world.tokenizer)
    of_base = {"model": {"path": str(folder / "base"), "config": None, "tokenizer": None}}

    def file(name: str, layout: dict[str, Any], changes: dict[str, Any]) -> str:
        model = of_base if "adapter" in changes else {"model": {"config": FOUR}}
        values = {**model, "batch": {"sequences": PACKS, "micro": "auto"}, "gradient_clipping": 0.5, **changes}
        return recipe_file(tiny_world, folder, name, parallel=layout, **values)

    return {name: file(name, *case[1:]) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def seen(files: dict[str, str]) -> dict[str, list[Turns]]:
    """Of each case what its processes saw."""
    found = {}
    for size in (2, 4):
        names = [name for name, case in CASES.items() if case[0] == size]
        by_rank = run_group(see_turns, size, [files[name] for name in names], PACKS)
        found |= {name: [rank[files[name]] for rank in by_rank] for name in names}
    return found


@pytest.fixture(scope="module")
def oracle(files: dict[str, str]) -> dict[str, Turns]:
    kinds = {name: json.dumps([case[1]["pipeline"], case[2]]) for name, case in CASES.items()}
    of_kind = {kind: files[name] for name, kind in kinds.items()}  # recipes that differ in what no number hangs on
    (found,) = run_group(replays, 1, [*of_kind.values()], PACKS)
    return {name: found[of_kind[kind]] for name, kind in kinds.items()}


@pytest.mark.parametrize("name", CASES)
def test_turns_are_the_formula(seen: dict[str, list[Turns]], oracle: dict[str, Turns], name: str) -> None:
    """To the bit, where one process adds up a step's gradient as the others do."""
    by_rank, wanted = seen[name], oracle[name]
    world, parallel, _ = CASES[name]
    error, worst = distance(weights_of(by_rank), weights_of([wanted]))
    assert error == 0 or (world > parallel["pipeline"]["stages"] and error < 1e-6), f"{worst} is {error:.1e} off"
    for process in by_rank:
        assert process.losses == approx(wanted.losses) and process.norms == approx(wanted.norms)
        assert len(process.losses) == STEPS
        assert process.lines == [approx(line) for line in wanted.lines]


@pytest.mark.parametrize("name", ["two stages", "four stages", "four stages, vertical sync"])
def test_no_more_versions_are_kept_than_micro_batches_in_flight_use(seen: dict[str, list[Turns]], name: str) -> None:
    stages, sync = CASES[name][0], "vertical" in name
    for rank, process in enumerate(seen[name]):
        assert max(process.versions) == min(TURN, stages - (0 if sync else rank))


def test_backward_passes_with_the_newest_weights_show(files: dict[str, str], oracle: dict[str, Turns]) -> None:
    """The control: the very mistake that stashing is against, with which autograd finds nothing wrong."""
    by_rank = run_group(see_turns, 2, [files[name] for name in MISTAKES], PACKS, True)
    for name in MISTAKES:
        mistaken = weights_of([rank[files[name]] for rank in by_rank])
        assert distance(mistaken, weights_of([oracle[name]]))[0] > 1e-4, name


def test_the_two_formulas_differ_from_each_other_and_from_steps_in_order(oracle: dict[str, Turns]) -> None:
    stashed, synced = weights_of([oracle["two stages"]]), weights_of([oracle["vertical sync"]])
    assert distance(stashed, synced)[0] > 1e-4
