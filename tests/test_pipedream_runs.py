"""Whole runs of PipeDream on two processes: what they say and write down, and that they go on as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders.pipedream_runs import interrupted_runs, told
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World, differences, events, last_state, write_rows
from builders.train_worker import train

from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save

pytestmark = pytest.mark.distributed

STEPS = 10  # with flushes after 4, 6 (evaluation), 8 and 10
PIPEDREAM = {"pipeline": {"stages": 2, "schedule": "pipedream"}}
VALUES: dict[str, Any] = {
    "parallel": PIPEDREAM,
    "batch": {"sequences": 2, "micro": "auto"},
    "data": {"eval": 5},
    "evaluation": {"every": 6},
    "steps": STEPS,
    "gradient_clipping": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipedream")


def recipe(world: World, folder: Path, name: str, **changes: Any) -> str:
    return str(world.recipe(folder / name, folder / f"{name}.yaml", **{**VALUES, **changes}))


def without_targets(world: World, folder: Path) -> dict[str, Any]:
    """One long row of which only some of the end is trained: most steps are context only."""
    tokens = [number % 300 for number in range(20 * 64)]
    labels = [-100] * (len(tokens) - 90) + tokens[-90:]
    rows = write_rows(folder / "long.jsonl", [{"input_ids": tokens, "labels": labels}])
    data = {"train": str(rows), "packing": "concatenate", "max_length": 64, "cache": str(folder / "cache")}
    return {"stage": "pretrain", "data": data, "evaluation": {}, "checkpoint": {"every": 8}, "steps": 12}


def tied_base(folder: Path, world: World) -> Path:
    """A model whose head is its embedding, for an adapter."""
    model = build(read_config_values({**CONFIG, "vocab_size": 400, "tie_word_embeddings": True}))
    initialize(model, 0)
    save(model, folder / "tied base", tokenizer_from=world.tokenizer)
    return folder / "tied base"


@pytest.fixture(scope="module")
def said(tiny_world: World, folder: Path) -> dict[str, tuple[list[str], str]]:
    """What runs said, and the errors that they ended with, on the first process."""
    sgd = {"optimizer": {"kind": "sgd", "learning_rate": 1e38}, "gradient_clipping": None}
    values: dict[str, dict[str, Any]] = {
        "undisturbed": {},
        "lora": {
            "model": {"path": str(tiny_world.base), "config": None, "tokenizer": None},
            "adapter": {"kind": "lora", "dropout": 0.2},
            "log": {"every": 3},
        },
        "context only": without_targets(tiny_world, folder),
        "not finite": sgd,
        "too small": {"batch": {"sequences": 4, "micro": 1}},
        "tied": {"model": {"config": {**CONFIG, "tie_word_embeddings": True}}},
        "trained twice": {
            "model": {"path": str(tied_base(folder, tiny_world)), "config": None, "tokenizer": None},
            "adapter": {"kind": "lora", "modules_to_save": ["embed_tokens"]},
        },
    }
    names = {name: recipe(tiny_world, folder, name, **changes) for name, changes in values.items()}
    by_rank = run_group(told, 2, list(names.values()))
    assert [error for _, error in by_rank[0]] == [error for _, error in by_rank[1]]
    return dict(zip(names, by_rank[0], strict=True))


def lines(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_what_is_not_as_usual_and_writes_a_line_for_each_step(
    said: dict[str, tuple[list[str], str]], folder: Path
) -> None:
    told_lines, error = said["undisturbed"]
    assert not error
    assert any("not synchronous SGD; each stage clips its own gradient to a norm of 0.5" in line for line in told_lines)
    assert any(line.startswith("memory expected in each process of pipeline stage ") for line in told_lines)
    written = lines(folder / "undisturbed")
    assert [line["step"] for line in written if "loss" in line] == list(range(1, STEPS + 1))
    assert [line["step"] for line in written if "eval_loss" in line] == [6, 10]
    losses = [line["loss"] for line in written if "loss" in line]
    assert losses[-1] < losses[0] - 0.3
    rates = [line["learning_rate"] for line in written if "loss" in line]
    assert rates[:2] == [0.005, 0.01] and len({*rates}) > 6  # each step has its own


def test_adapters_train_and_lines_are_as_many_as_asked_for(
    said: dict[str, tuple[list[str], str]], folder: Path
) -> None:
    assert not said["lora"][1]
    assert [line["step"] for line in lines(folder / "lora") if "loss" in line] == [3, 6, 9, 10]
    assert (folder / "lora" / "adapter" / "adapter_model.safetensors").is_file()


def test_steps_without_targets_are_passed_over_in_order(
    tiny_world: World, said: dict[str, tuple[list[str], str]], folder: Path, tokenising_here: None
) -> None:
    assert not said["context only"][1]
    one = recipe(tiny_world, folder, "one process", **{**without_targets(tiny_world, folder), "parallel": {}})
    assert train([one]) == [(12, 0)]
    found, wanted = (events(folder / name) for name in ("context only", "one process"))
    assert found == wanted and {line["event"] for line in found} == {"no_targets"} and 6 <= len(found) < 12
    by_step = [
        [line.get("step") for line in lines(folder / name) if "loss" in line or "event" in line]
        for name in ("context only", "one process")
    ]
    assert by_step[0] == by_step[1] == list(range(1, 13))


def test_numbers_that_are_not_finite_end_a_run_and_are_not_saved(
    said: dict[str, tuple[list[str], str]], folder: Path
) -> None:
    error = said["not finite"][1]
    assert error.startswith("UnfinishedTurn: step 2: its loss")
    assert "have made different updates since step 0, which are not saved" in error
    assert not list((folder / "not finite" / "checkpoints").glob("step-*"))


def test_a_step_in_several_micro_batches_is_refused(said: dict[str, tuple[list[str], str]]) -> None:
    assert said["too small"][1] == (
        "RecipeError: batch: pipedream's step is one micro-batch, and 4 packed sequences for 1 data ranks are 4 of the "
        "1 that are asked for. Use batch.sequences: 1, or parallel.pipeline.schedule: 1f1b"
    )


def test_what_is_trained_on_two_stages_is_refused(said: dict[str, tuple[list[str], str]], folder: Path) -> None:
    assert "this model's embedding is its head too" in said["tied"][1]
    assert said["trained twice"][1].startswith(
        "RecipeError: parallel.pipeline.schedule: pipedream updates each stage by itself, and embed_tokens.weight is "
        "trained on several stages"
    )
    assert not (folder / "tied" / "checkpoints").exists()


def test_a_signal_ends_a_turn_on_all_processes_and_a_flush_that_comes_anyway_changes_no_bit(
    tiny_world: World, said: dict[str, tuple[list[str], str]], folder: Path
) -> None:
    in_turn = recipe(
        tiny_world, folder, "in a turn", checkpoint={"every": 40}, evaluation={}, data={"eval": None}, steps=40
    )
    at_flush = recipe(tiny_world, folder, "at a flush")
    by_rank = run_group(interrupted_runs, 2, in_turn, at_flush)
    assert by_rank[0] == by_rank[1]
    (steps, code), (flushed, flushed_code) = by_rank[0]
    # The wish of step 3 is counted when two more micro-batches have begun.
    assert 4 <= steps <= 7 and code == flushed_code == 130 and flushed == 6
    assert last_state(folder / "in a turn")[0].name == f"step-{steps:08}"
    again = recipe(
        tiny_world, folder, "in a turn", checkpoint={"every": 40}, evaluation={}, data={"eval": None}, steps=40
    )
    assert run_group(train, 2, [again, at_flush]) == [[(40, 0), (STEPS, 0)]] * 2
    assert [line["step"] for line in lines(folder / "in a turn") if "loss" in line] == list(range(1, 41))
    assert differences(folder / "at a flush", folder / "undisturbed") == []


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(
    tiny_world: World, said: dict[str, tuple[list[str], str]], folder: Path
) -> None:
    """As after a kill in the third turn, of which nothing is left."""
    place = folder / "killed"
    shutil.copytree(folder / "undisturbed", place)
    for name in ("model", "summary.json", "checkpoints/step-00000010"):
        path = place / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert last_state(place)[0].name == "step-00000008"
    run_group(train, 2, [recipe(tiny_world, folder, "killed")])
    assert differences(place, folder / "undisturbed") == []
