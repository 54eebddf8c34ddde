"""What is traded for memory changes nothing in any layout; plans of recomputation measure what a step does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.equal_shards import assemble_equal
from builders.parallel_steps import recipe_file, see
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu.assembly.parallelize import place, subject_of
from danlu.core.errors import RecipeError
from danlu.memory import recompute_planner
from danlu.models.hf_config import read_config_values
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe, load
from danlu.verification.trace import Trace

CPU = torch.device("cpu")
# Rows that two processes cannot share evenly, in layers large enough to go to a file.
WIDE = {"model": {"config": {**CONFIG, "hidden_size": 64, "intermediate_size": 101}}}
EVEN = {"model": {"config": {**CONFIG, "hidden_size": 64, "intermediate_size": 102}}}
ODD = {"data": {"max_length": 63}, "batch": {"sequences": 4, "micro": 1}}
ALL = ["parameters", "gradients", "optimizer", "activations"]
PLANNED = {"recompute": {"kind": "planned", "budget": 0.01}}

Changes = dict[str, Any]
CASES: dict[str, tuple[Changes, Changes]] = {
    # Both sides; the layout's alone, where FOLDER stands for one.
    "all on a disk, zero3": (WIDE, {"parallel": "zero3", "memory": {"offload": ALL, "folder": "FOLDER"}}),
    "all on a disk, zero1, selective": (
        WIDE,
        {"parallel": "zero1", "memory": {"offload": ALL, "folder": "FOLDER", "recompute": "selective"}},
    ),
    "all on a disk, sequence": (
        EVEN,
        {"parallel": {"tensor": 2, "sequence": True}, "memory": {"offload": ALL, "folder": "FOLDER"}},
    ),
    "planned, an odd number of tokens": (
        EVEN | ODD,
        {"parallel": {"tensor": 2, "sequence": True}, "memory": PLANNED},
    ),
}


def recipes(world: World, folder: Path, name: str) -> tuple[str, str]:
    """Files of a case: in one process, and in its layout."""
    both, only = CASES[name]
    # With a large eps rounding stays rounding, where Adam would make a gradient's sign of it.
    both = {"optimizer": {"kind": "adamw", "learning_rate": 1e-3, "eps": 1e-3}, **both}
    (folder / "files").mkdir(exist_ok=True)
    memory = {key: str(folder / "files") if value == "FOLDER" else value for key, value in only["memory"].items()}
    plain = recipe_file(world, folder, f"{name}, one", **both)
    return plain, recipe_file(world, folder, f"{name}, two", **{**both, **only, "memory": memory})


@pytest.fixture(scope="module")
def seen(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Trace, list[Trace]]]:
    """Of each case: what one process sees, and what each of two does."""
    folder = tmp_path_factory.mktemp("memory")
    files = {name: recipes(tiny_world, folder, name) for name in CASES}
    many = run_group(see, 2, [two for _, two in files.values()], 5, 2)
    one = see([alone for alone, _ in files.values()], 5, 2, 1)
    return {name: (one[alone], [found[two] for found in many]) for name, (alone, two) in files.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_a_layout_that_saves_memory_is_one_process(seen: Mapping[str, tuple[Trace, list[Trace]]], name: str) -> None:
    one, many = seen[name]
    for step, wanted in enumerate(one.steps):
        found = [each.steps[step] for each in many]
        for parts in ("gradients", "weights"):
            ours, theirs = (
                assemble_equal([getattr(each, parts) for each in found]),
                assemble_equal([getattr(wanted, parts)]),
            )
            assert worst_relative_error(ours, theirs) < 1e-6
    first, second = (assemble_equal([one.steps[step].gradients]) for step in (0, 1))
    assert worst_relative_error(first, second) > 1e-3, "negative control: the second step is another one"


def planned(world: World, folder: Path, **changes: Any) -> Recipe:
    base = {"path": str(world.base), "config": None, "tokenizer": None}
    values = {"model": base, "memory": PLANNED, "batch": {"sequences": 4, "micro": 2}, **changes}
    return load(Path(recipe_file(world, folder, "planned", **values))).recipe


@pytest.mark.parametrize(("length", "virtual", "tokens"), [(64, 0, 128), (64, 5, 140), (67, 0, 136)])
def test_plans_are_measured_on_all_tokens_that_a_step_has(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, virtual: int, tokens: int
) -> None:
    """Two packs, with their virtual tokens, filled up to a multiple of 4."""
    adapter = {"kind": "prompt", "tokens": virtual} if virtual else {"kind": "lora", "dropout": 0.1}
    recipe = planned(tiny_world, tmp_path, adapter=adapter, data={"max_length": length})
    measured: list[tuple[int, bool]] = []
    measure = recompute_planner.measure_layers
    subject = subject_of(recipe, read_config_values({**CONFIG, "vocab_size": 400}), CPU)
    assert subject.adapters is not None
    dropout_state = subject.adapters.build_context.dropout_state

    def noted(model: Any, ids: Tensor, *args: Any, **options: Any) -> Any:
        measured.append((len(ids), dropout_state.active))
        return measure(model, ids, *args, **options)

    monkeypatch.setattr(recompute_planner, "measure_layers", noted)
    place(subject, recipe, Ranks(), CPU)
    assert measured == [(tokens, True)] and not dropout_state.active


@pytest.mark.parametrize("memory", [{"recompute": "selective"}, {"offload": ["activations"], "folder": "/nowhere"}])
def test_replicas_in_threads_make_nothing_again(tiny_world: World, tmp_path: Path, memory: Changes) -> None:
    file = recipe_file(tiny_world, tmp_path, "threads", parallel={"workers": "threads"}, memory=memory)
    with pytest.raises(RecipeError, match=r"threads run copies of the model at the same time"):
        load(Path(file))
