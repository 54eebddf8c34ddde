"""Stage rl in the stages of a pipeline, from end to end: schedules with several chunks, adapters, and resumption."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World
from builders.train_worker import train
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file
from test_rl_runs import go_back, recipe_file, run, steps

pytestmark = pytest.mark.distributed

LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}
KL = {"kl": {"coefficient": 0.1}}
IN_REWARD = {"kl": {"in": "reward", "estimator": "k1", "coefficient": 0.05}}
RUNS: dict[str, dict[str, Any]] = {
    "kl, adapter-off": {"objective": KL, "adapter": LORA, "batch": {"prompts": 4, "micro": 2, "updates": 2}},
    "values of their own": {
        "stage": "ppo",
        "objective": IN_REWARD,
        "value": {"share": "none", "warmup": 1, "save": True},
        "batch": {"prompts": 4, "micro": 2, "updates": 2},
        "seed": 1,  # with 0 one draw lies on the border between two tokens, where fused decoding decides
    },
}
PIPELINES: dict[str, dict[str, Any]] = {
    "kl, adapter-off": {"stages": 2, "schedule": "interleaved", "chunks": 2},
    "values of their own": {"stages": 2, "schedule": "zbv"},
}
SHORT: dict[str, Any] = {
    "steps": 4,
    "evaluation": {"every": 2},
    "checkpoint": {"every": 1, "keep": 9},
    "optimizer": {"kind": "sgd", "learning_rate": 0.5},
    "rollout": {"samples": 4, "max_new_tokens": 6, "draft": "ngram", "block": 4},
}
KEYS = {
    "kl, adapter-off": ("loss", "grad_norm", "reward", "entropy", "kl/k3"),
    "values of their own": ("loss", "grad_norm/value", "reward", "entropy", "kl_in_reward", "value_loss"),
}
RESULTS = {"kl, adapter-off": ("adapter",), "values of their own": ("model", "model-value")}


@pytest.fixture(scope="module", autouse=True)
def tokenised_here(module_tokenises_here: None) -> None:
    """All tests here are whole runs over few rows."""


def model(world: World, name: str) -> dict[str, Any]:
    """Four layers; of a policy that trains an adapter a folder."""
    if RUNS[name].get("adapter") is None:
        config = {**CONFIG, "num_hidden_layers": 4}
        return {"model": {"path": None, "config": config, "tokenizer": str(world.tokenizer)}}
    folder = world.folder / "base-of-four-layers"
    if not folder.is_dir():
        from danlu.models.hf_config import read_config_values
        from danlu.models.initialize import initialize
        from danlu.models.loading import build
        from danlu.models.saving import save

        config = {**CONFIG, "num_hidden_layers": 4, "vocab_size": 400, "tie_word_embeddings": False}
        decoder = build(read_config_values(config))
        initialize(decoder, 0)
        save(decoder, folder, tokenizer_from=world.tokenizer)
    return {"model": {"path": str(folder)}}


def halved(run_folder: Path, copy: Path, name: str) -> None:
    """A run as it was in the middle of its first rollout."""
    shutil.copytree(run_folder, copy)
    first, *others = RESULTS[name]
    go_back(copy, 1, first)
    for result in others:
        shutil.rmtree(copy / result)


def weights(folder: Path, name: str) -> dict[str, Any]:
    return {
        f"{file.parent.name}/{key}": tensor
        for result in RESULTS[name]
        for file in sorted((folder / result).glob("*.safetensors"))
        for key, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_stages_learn_what_one_process_does_and_either_goes_on_where_the_other_was(
    tiny_world: World, tmp_path: Path, name: str
) -> None:
    more = {**RUNS[name], **SHORT, **model(tiny_world, name)}
    staged = {**more, "parallel": {"pipeline": PIPELINES[name]}}
    one, folders = tmp_path / "one", [tmp_path / each for each in ("stages", "stages-from-one", "one-from-stages")]
    lines = run(tiny_world, one, **more)
    halved(one, folders[1], name)
    files = [str(recipe_file(tiny_world, folder, **staged)) for folder in folders[:2]]
    assert run_group(train, 2, files) == [[(4, 0), (4, 0)]] * 2
    halved(folders[0], folders[2], name)
    run(tiny_world, folders[2], **more)
    want = weights(one, name)
    assert len(want) > 8
    for folder in folders:
        assert (folder / "rollouts.jsonl").read_text() == (one / "rollouts.jsonl").read_text(), folder.name
        for line, other in zip(lines, steps(folder), strict=True):
            assert line.keys() == other.keys()
            for key in KEYS[name]:
                assert other[key] == pytest.approx(line[key], rel=2e-4, abs=2e-6), (folder.name, key)
        assert worst_relative_error(weights(folder, name), want) < 2e-5, folder.name
    assert lines[1]["loss"] != pytest.approx(lines[3]["loss"], rel=2e-4)  # control
