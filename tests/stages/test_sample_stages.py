"""Samples of runs whose model is in stages: the texts of one process, and a gap to training that is rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import train_worker
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World, metrics

pytestmark = pytest.mark.distributed

PROMPTS = ["What colour is the fox?", "Hi", "How many apples has Tom, and who else has some?"]
LORA = {"adapter": {"kind": "lora", "rank": 4, "init": "olora"}}
STAGES: dict[str, dict[str, Any]] = {"sft": {}, "pretrain": {}, "sft, lora": LORA}
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, {"pipeline": 2}),
    "zbv": (2, {"pipeline": {"stages": 2, "schedule": "zbv"}}),
    "pipedream": (2, {"pipeline": {"stages": 2, "schedule": "pipedream"}}),
    "interleaved, zero2": (4, {"shard": "zero2", "pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}),
    "tensor": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
}
CASES = [
    *(("sft", name) for name in PIPELINES),
    ("pretrain", "zbv"),
    ("pretrain", "interleaved, zero2"),
    ("sft, lora", "1f1b"),
    ("sft, lora", "tensor"),
]


def recipe(world: World, folder: Path, stage: str, pipeline: str, temperature: float) -> str:
    name = f"{stage}-{pipeline}-{temperature}".replace(", ", "-")
    values: dict[str, Any] = {
        "stage": stage.partition(",")[0],
        "model": {"config": {**CONFIG, "num_hidden_layers": 4}},
        "steps": 4,
        "schedule": "constant",
        "evaluation": {"every": 2, "samples": {"prompts": PROMPTS, "max_new_tokens": 8, "temperature": temperature}},
        **STAGES[stage],
    }
    if values["stage"] == "pretrain":
        values["data"] = {"train": str(world.text)}
    if stage == "sft, lora":
        values["model"] = {"path": str(world.base), "config": None, "tokenizer": None}
    if pipeline != "one":
        values["parallel"] = PIPELINES[pipeline][1]
    if pipeline == "pipedream":
        values["batch"] = {"sequences": 4, "micro": 4}
    return str(world.recipe(folder / name, folder / f"{name}.yaml", **values))


def samples(folder: Path, file: str) -> tuple[list[tuple[int, str, str]], list[float]]:
    """(step, prompt, text) of each sample, and the gaps of all evaluations."""
    lines = metrics(folder / Path(file).stem)
    texts = [(line["step"], line["prompt"], line["text"]) for line in lines if line.get("event") == "sample"]
    return texts, [line["rollout_gap_max"] for line in lines if line.get("event") == "samples"]


def test_samples_are_those_of_one_process(tiny_world: World, tmp_path: Path) -> None:
    alone = {
        (stage, temperature): recipe(tiny_world, tmp_path, stage, "one", temperature)
        for stage in STAGES
        for temperature in (0.0, 0.8)
    }
    assert train_worker.train([*alone.values()]) == [(4, 0)] * len(alone)
    files = {
        (*case, temperature): recipe(tiny_world, tmp_path, *case, temperature)
        for case in CASES
        for temperature in (0.0, 0.8)
    }
    for size in (2, 4):
        of_size = [file for (_, name, _), file in files.items() if PIPELINES[name][0] == size]
        assert run_group(train_worker.train, size, of_size) == [[(4, 0)] * len(of_size)] * size
    for (stage, pipeline, temperature), file in files.items():
        texts, gaps = samples(tmp_path, file)
        want, _ = samples(tmp_path, alone[stage, temperature])
        assert len(gaps) == 2 and all(0 <= gap < 1e-5 for gap in gaps), file
        if pipeline != "pipedream":  # which trains something else
            assert texts == want and [(step, prompt) for step, prompt, _ in texts] == [
                (step, prompt) for step in (2, 4) for prompt in PROMPTS
            ], file
    # Control: other weights, and another temperature, write other texts.
    for stage in STAGES:
        greedy, drawn = (samples(tmp_path, alone[stage, temperature])[0] for temperature in (0.0, 0.8))
        assert greedy != drawn and [text for *_, text in greedy[:3]] != [text for *_, text in greedy[3:]]
