"""PPO with a model of values of its own ends in every layout where one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.process_group import run_group
from builders.tiny_world import World
from builders.train_worker import train
from safetensors.torch import load_file
from test_critic_runs import ppo
from test_rl_runs import recipe_file, run, steps

LAYOUTS = {
    "ddp": (2, "base", {}),
    "zero3": (2, "base", {"shard": "zero3"}),
    "tensor": (2, "none", {"tensor": 2, "sequence": True}),
    "zero2": (2, "none", {"shard": "zero2"}),
    "context": (2, "base", {"context": 2}),
    "pipeline": (2, "base", {"pipeline": 2}),
    "zb-h1": (2, "none", {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "pipeline, zero3": (4, "none", {"pipeline": 2, "shard": "zero3"}),
    "pipeline, tensor": (4, "base", {"pipeline": 2, "tensor": 2, "sequence": True}),
    "ulysses, zero3": (2, "none", {"context": {"size": 2, "method": "ulysses"}, "shard": "zero3"}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(tiny_world: World, tmp_path: Path, layout: str) -> None:
    size, critic, parallel = LAYOUTS[layout]
    more = {**ppo(critic, warmup=1, learning_rate=1e-2, save=True), "batch": {"prompts": 4, "micro": 1, "updates": 2}}
    one = run(tiny_world, tmp_path / "one", **more)
    file = recipe_file(tiny_world, tmp_path / "several", **more, parallel=parallel)
    assert all(ended == [(4, 0)] for ended in run_group(train, size, [str(file)]))
    for line, other in zip(one, steps(tmp_path / "several"), strict=True):
        assert line.keys() == other.keys()
        for name in (
            "loss",
            "value_loss",
            "grad_norm/value",
            "reward",
            *(["grad_norm/policy"] if line["step"] > 1 else []),
        ):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert one[1]["value_loss"] != pytest.approx(one[3]["value_loss"], rel=2e-4)  # control
    name = "model-value/model" if critic == "none" else "adapter-value/adapter_model"
    kept, others = (load_file(tmp_path / run_ / f"{name}.safetensors") for run_ in ("one", "several"))
    assert kept.keys() == others.keys() and any(key.endswith("score.weight") for key in kept)
    assert max(float((tensor - others[key]).abs().max()) for key, tensor in kept.items()) < 1e-3
    assert min(float(tensor.abs().max()) for tensor in kept.values()) > 1e-2  # control: one that is lost is seen
