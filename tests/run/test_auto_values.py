"""What a run decides when it begins, and a resumed one keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danlu.recipe import Loaded, load, load_resolved, resolved_yaml
from danlu.recipe.sections import Kl
from danlu.run.auto_values import with_former_defaults

RECIPE = "model: base\ndata: rows.json\nrewards: [{kind: exact, column: a}]\noutput: runs/x\nsteps: 40\n"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    Path("rows.json").write_text("[]")

    def read(stage: str, kl: str) -> Loaded:
        Path("recipe.yaml").write_text(f"stage: {stage}\nobjective: {{kl: {kl}}}\n{RECIPE}")
        return load("recipe.yaml")

    return read


@pytest.mark.parametrize(
    ("stage", "kl", "before", "now", "kept"),
    [
        ("grpo", "{in: reward}", {"in": "reward", "estimator": "k3"}, {"estimator": "k1"}, {"estimator": "k3"}),
        ("grpo", "{in: reward, estimator: k1}", {"in": "reward", "estimator": "k3"}, {"estimator": "k1"}, {}),
        ("ppo", "0.02", {"in": "loss", "estimator": "k3"}, {"estimator": "k1"}, {"in": "loss", "estimator": "k3"}),
        ("ppo", "0.02", {"in": "reward", "estimator": "k1"}, {"estimator": "k1"}, {}),
        ("grpo", "0.02", {"in": "loss", "estimator": "k3"}, {"estimator": "k3"}, {}),
    ],
)
def test_a_resumed_run_keeps_the_kl_that_it_began_with(
    read: Any,
    stage: str,
    kl: str,
    before: dict[str, str],
    now: dict[str, str],
    kept: dict[str, str],
) -> None:
    loaded, said = read(stage, kl), list[str]()
    saved = read(stage, str({"coefficient": 0.02, **before}).replace("'", "")).recipe
    Path("saved.yaml").write_text(resolved_yaml(saved))
    recipe = with_former_defaults(loaded, load_resolved("saved.yaml"), said.append)
    (own,), (resumed,) = loaded.recipe.objective, recipe.objective
    assert {name: getattr(own.kl, name) for name in now} == now
    assert resumed.kl == Kl(**{**dict(own.kl), **kept})
    assert [line.partition(": as when")[0] for line in said] == [
        ", ".join(f"objective.0.kl.{name}: {value}" for name, value in kept.items())
    ] * bool(kept)
