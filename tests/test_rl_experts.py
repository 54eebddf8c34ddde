"""Stage rl with experts: what is trained on a rollout goes to the experts that it went to in the rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from builders.expert_folder import expert_folder
from builders.process_group import run_group
from builders.tiny_world import World, danlu
from builders.train_worker import train
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file
from test_rl_runs import assert_goes_on, recipe_file, run, steps

from danlu.models.experts import Router
from danlu.run.replay import replay

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

UPDATES = {"prompts": 4, "micro": 2, "updates": 2}
"""Two steps on each rollout: in the first one the ratio is to what tokens were drawn from."""
RECOMPUTED = {"recompute": "full"}


def expert_model(world: World) -> dict[str, Any]:
    """What a recipe says of it."""
    return {"path": str(expert_folder(world))}


@contextmanager
def other_choices_in_training() -> Iterator[None]:
    """A trainer whose routers would choose other experts than the engine's, as they do where both round otherwise."""
    chosen = Router.chosen

    def rolled(self: Router, scores: torch.Tensor) -> torch.Tensor:
        shift = 0 if torch.is_inference_mode_enabled() else 3
        return (chosen(self, scores) + shift) % self.num_experts

    with mock.patch.object(Router, "chosen", rolled):
        yield


@pytest.fixture
def other_choice_in_training() -> Iterator[None]:
    with other_choices_in_training():
        yield


@pytest.mark.usefixtures("other_choice_in_training")
@pytest.mark.parametrize("replays", [True, False], ids=["", "control"])
def test_the_ratio_is_to_the_policy_that_drew(tiny_world: World, tmp_path: Path, replays: bool) -> None:
    rollout = {} if replays else {"routing_replay": False}
    more = {"numerics": "exact", "precision": "bf16", "batch": UPDATES, "steps": 4, "router": "bias"}
    lines = run(
        tiny_world, tmp_path / "run", model=expert_model(tiny_world), rollout=rollout, memory=RECOMPUTED, **more
    )
    fresh = lines[0::2]
    if replays:
        assert [line["ratio"] for line in fresh] == [1.0] * 2 and [line["gap"] for line in fresh] == [0.0] * 2
        assert all(line["ratio"] != 1 for line in lines[1::2])  # the policy has moved
    else:
        assert all(abs(line["ratio"] - 1) > 1e-6 and line["gap"] > 1e-3 for line in fresh)
    assert all(line["router/0/load"] >= 1 for line in lines)


@pytest.mark.slow
@pytest.mark.usefixtures("other_choice_in_training")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_gap_is_bounded_in_fast_numerics(tiny_world: World, tmp_path: Path, precision: str) -> None:
    bound = {"fp32": 2e-6, "bf16": 2e-2}[precision]
    model, more = expert_model(tiny_world), {"precision": precision, "batch": UPDATES, "steps": 4}
    lines = run(tiny_world, tmp_path / "replayed", model=model, **more)
    assert all(line["gap"] < bound for line in lines[0::2])
    lines = run(tiny_world, tmp_path / "control", model=model, rollout={"routing_replay": False}, **more)
    assert all(line["gap"] > 2 * bound for line in lines[0::2])


@pytest.mark.slow
@pytest.mark.usefixtures("other_choice_in_training")
def test_it_goes_on_within_a_rollout_with_its_routes(tiny_world: World, tmp_path: Path) -> None:
    more = {"model": expert_model(tiny_world), "batch": UPDATES, "steps": 6, "checkpoint": {"every": 1, "keep": 9}}
    more |= {"router": "bias", "precision": "bf16"}
    assert danlu("train", recipe_file(tiny_world, tmp_path / "whole", **more)) == 0
    assert_goes_on(tiny_world, tmp_path / "whole", 3, **more)
    run(tiny_world, tmp_path / "control", **{**more, "router": {"balance": "bias", "rate": 0.1}})
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "control")]
    assert not all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_lora_on_experts_goes_on_within_a_rollout(tiny_world: World, tmp_path: Path) -> None:
    more: dict[str, Any] = {"model": expert_model(tiny_world), "batch": UPDATES, "steps": 4}
    more |= {"checkpoint": {"every": 1, "keep": 9}, "evaluation": None}
    more["adapter"] = {"kind": "lora", "rank": 4, "targets": ["attention", "experts"]}
    result = "adapter/adapter_model.safetensors"
    assert danlu("train", recipe_file(tiny_world, tmp_path / "whole", **more)) == 0
    assert_goes_on(tiny_world, tmp_path / "whole", 1, result=result, **more)
    run(tiny_world, tmp_path / "control", **{**more, "steps": 3})
    weights = [load_file(tmp_path / name / result) for name in ("whole", "control")]
    of_experts = [name for name in weights[0] if "experts" in name]
    assert of_experts and not any(weights[0][name].equal(weights[1][name]) for name in of_experts)


@pytest.fixture
def other_choice_with_gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes routers choose experts that lie so many places behind, in passes with gradients: the reference's do not."""
    chosen = Router.chosen

    def shift(places: int) -> None:
        def rolled(self: Router, scores: torch.Tensor) -> torch.Tensor:
            return (chosen(self, scores) + (places if torch.is_grad_enabled() else 0)) % self.num_experts

        monkeypatch.setattr(Router, "chosen", rolled)

    return shift


def test_pairs_replay_where_the_recipe_asks_for_it(
    tiny_world: World, tmp_path: Path, other_choice_with_gradients: Callable[[int], None]
) -> None:
    """Which experts the trainer's routers would choose then makes no difference, and without it, it does."""
    weights = {}
    for replays in (True, False):
        for places in (0, 3):
            other_choice_with_gradients(places)
            folder = tmp_path / f"{replays}-{places}"
            rollout = {"samples": 4, "max_new_tokens": 6, **({"routing_replay": True} if replays else {})}
            more: dict[str, Any] = {"stage": "online-dpo", "model": expert_model(tiny_world), "rollout": rollout}
            more |= {"steps": 2, "evaluation": None, "optimizer": {"kind": "sgd", "learning_rate": 1.0}}
            run(tiny_world, folder, **more)
            weights[replays, places] = load_file(folder / "model" / "model.safetensors")
    assert worst_relative_error(weights[True, 3], weights[True, 0]) < 1e-6
    assert worst_relative_error(weights[False, 3], weights[False, 0]) > 1e-4  # control


@pytest.mark.slow
@pytest.mark.usefixtures("other_choice_in_training")
def test_asynchronous_rollouts_bring_theirs(tiny_world: World, tmp_path: Path) -> None:
    """The first rollout is drawn with the weights that it is trained with; later ones began with older weights.

    Replayed, a rollout has the same tokens, of which the steps before it depend on routes.
    """
    more: dict[str, Any] = {"numerics": "exact", "precision": "bf16", "steps": 6, "router": "bias"}
    more |= {"checkpoint": {"every": 3}}
    rollout = {"staleness": 1, "samples": 4, "max_new_tokens": 6}
    lines = run(tiny_world, tmp_path / "run", model=expert_model(tiny_world), rollout=rollout, **more)
    assert lines[0]["gap"] == 0 and lines[0]["staleness"] == 0
    assert max(line["staleness_max"] for line in lines) == 1
    assert all(line["gap"] > 0 for line in lines if line["staleness"] > 0)  # control
    assert replay(tmp_path / "run", 5, log=lambda line: None).difference is None


@pytest.mark.distributed
def test_distributed_experts_learn_the_same(tiny_world: World, tmp_path: Path) -> None:
    """Sums over processes are added in another order: everything else is equal, the answers to the last bit."""
    more: dict[str, Any] = {"model": expert_model(tiny_world), "numerics": "exact", "batch": UPDATES, "steps": 4}
    more |= {"router": "bias", "optimizer": {"kind": "sgd", "learning_rate": 1.0}}
    one = run(tiny_world, tmp_path / "one", **more)
    layouts = {"expert": {"expert": 2}, "zero2": {"expert": 2, "shard": "zero2"}}
    files = [recipe_file(tiny_world, tmp_path / name, **more, parallel=of) for name, of in layouts.items()]
    assert all(ended == [(4, 0)] * len(files) for ended in run_group(train, 2, list(map(str, files))))
    weights = load_file(tmp_path / "one" / "model" / "model.safetensors")
    start = load_file(Path(more["model"]["path"]) / "model.safetensors")
    assert worst_relative_error(weights, start) > 1e-4  # control
    for name in layouts:
        answers = [(tmp_path / each / "rollouts.jsonl").read_text() for each in ("one", name)]
        assert answers[0] == answers[1]
        for line, other in zip(one, steps(tmp_path / name), strict=True):
            for key in ("loss", "grad_norm", "reward", "entropy", "router/0/load", "router/1/load"):
                assert other[key] == pytest.approx(line[key], rel=1e-6, abs=1e-6), (name, key)
        assert worst_relative_error(load_file(tmp_path / name / "model" / "model.safetensors"), weights) < 1e-6


@pytest.mark.distributed
def test_stages_of_a_pipeline_replay_the_routes_of_all_layers(tiny_world: World, tmp_path: Path) -> None:
    """The trainer's routers would choose other experts; without the routes of both stages the run learns otherwise."""
    more: dict[str, Any] = {"model": expert_model(tiny_world), "batch": UPDATES, "steps": 4, "router": "bias"}
    with other_choices_in_training():
        one = run(tiny_world, tmp_path / "one", **more)
        control = run(tiny_world, tmp_path / "control", **more, rollout={"routing_replay": False})
    file = recipe_file(tiny_world, tmp_path / "stages", **more, parallel={"pipeline": 2})
    assert run_group(train_with_other_choices, 2, [str(file)]) == [[(4, 0)]] * 2
    assert (tmp_path / "one" / "rollouts.jsonl").read_text() == (tmp_path / "stages" / "rollouts.jsonl").read_text()
    keys = ("loss", "grad_norm", "reward", "entropy", "router/0/load", "router/1/load")
    for line, other in zip(one, steps(tmp_path / "stages"), strict=True):
        for key in keys:
            assert other[key] == pytest.approx(line[key], rel=2e-4, abs=2e-6), key
    assert abs(control[0]["grad_norm"] - one[0]["grad_norm"]) > 1e-3 * one[0]["grad_norm"]


def train_with_other_choices(files: list[str]) -> Any:
    """`train` on each process of a group, with the routers of `other_choices_in_training`."""
    with other_choices_in_training():
        return train(files)
