"""PPO with a model of values of its own ends in every layout where one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.tiny_world import World
from safetensors.torch import load_file
from test_critic_runs import ppo
from test_rl_runs import run_layouts, steps

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


@pytest.fixture(scope="module")
def runs(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> dict[str, Path]:
    """Of each critic a folder with a run of one process, and of each layout with that critic."""
    folders = {critic: tmp_path_factory.mktemp(f"critic-{critic}") for critic in ("base", "none")}
    for critic, folder in folders.items():
        more = ppo(critic, warmup=1, learning_rate=1e-2, save=True)
        layouts = {name: (size, parallel) for name, (size, own, parallel) in LAYOUTS.items() if own == critic}
        run_layouts(tiny_world, folder, layouts, **more | {"batch": {"prompts": 4, "micro": 1, "updates": 2}})
    return folders


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(runs: dict[str, Path], layout: str) -> None:
    _, critic, _ = LAYOUTS[layout]
    folder = runs[critic]
    one = steps(folder / "one")
    for line, other in zip(one, steps(folder / layout), strict=True):
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
    kept, others = (load_file(folder / run / f"{name}.safetensors") for run in ("one", layout))
    assert kept.keys() == others.keys() and any(key.endswith("score.weight") for key in kept)
    assert max(float((tensor - others[key]).abs().max()) for key, tensor in kept.items()) < 1e-3
    assert min(float(tensor.abs().max()) for tensor in kept.values()) > 1e-2  # control: one that is lost is seen
