"""Stage rl with teachers beside the rewards: a divergence as a term of the loss, or in the advantages of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.distillation_worker import teacher_folder
from builders.process_group import run_group
from builders.tiny_world import World
from builders.train_worker import train
from test_rl_runs import recipe_file, run, steps
from torch import Tensor

from danlu.core.types import Pack, Sample
from danlu.models.attend import PackedAttention
from danlu.models.loading import load
from danlu.rl.estimators import GroupEstimator, Judged, TeacherAdvantages

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

SHARES, WEIGHT, TEMPERATURE = (0.75, 0.25), 0.5, 0.7


def teachers(world: World, **second: Any) -> dict[str, Any]:
    other = teacher_folder(world, "second-teacher", seed=8, hidden_size=32)
    named = [{"model": teacher_folder(world), "weight": 3.0}, {"model": other, **second}]
    return {"teacher": named, "rollout": {"samples": 4, "max_new_tokens": 6, "temperature": TEMPERATURE}}


def objective(**divergence: Any) -> list[dict[str, Any]]:
    return [{"kind": "grpo"}, {"kind": "reverse", "weight": WEIGHT, **divergence}]


UNREWARDED = {"kind": "length", "most": 100, "weight": 0.0}  # looked at, and nothing to be learnt from


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """The items of each rollout, with the advantages that they are trained with."""
    items: list[Sample] = []
    for estimator in (GroupEstimator, TeacherAdvantages):
        monkeypatch.setattr(estimator, "estimate", _recorded(estimator.estimate, items))
    return items


def _recorded(real: Any, items: list[Sample]) -> Any:
    def estimate(self: Any, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        made, said = real(self, judged)
        items[:] = [item.samples[0] for item in made]
        return made, said

    return estimate


def distributions(folder: str | Path, sample: Sample) -> Tensor:
    """[tokens of all answers, V] float64: log-probabilities at each drawn token, from whole logits, one by one."""
    model = load(folder).double()
    stem, *answers = sample.branches
    values = []
    for branch in answers:
        own = np.concatenate([sample.tokens[: stem.stop], sample.tokens[branch.start : branch.stop]])
        ids = torch.from_numpy(own).long()
        with torch.no_grad():
            hidden = model(ids, torch.arange(len(ids)), PackedAttention((0, len(ids))), torch.float64)
            values.append((model.logits(hidden)[stem.stop - 1 : -1] / TEMPERATURE).log_softmax(1))
    return torch.cat(values)


ONE_STEP: dict[str, Any] = {"steps": 1, "schedule": {"kind": "constant", "warmup": 0}, "evaluation": {"every": None}}
TWO_STEPS = {**ONE_STEP, "steps": 2}


def test_a_drawn_token_has_the_teachers_log_ratio_as_its_advantage(
    tiny_world: World, tmp_path: Path, drawn: list[Sample]
) -> None:
    more: dict[str, Any] = {**teachers(tiny_world), "objective": objective(policy_gradient=True), **ONE_STEP}
    lines = run(tiny_world, tmp_path / "run", **more, rewards=[UNREWARDED])
    folders = [str(tiny_world.base), *(each["model"] for each in more["teacher"])]
    ratios = []
    for sample in drawn:
        of_answers = sample.weights > 0
        tokens = torch.from_numpy(sample.tokens[of_answers]).long()[:, None]
        policy, first, second = (distributions(each, sample).gather(1, tokens)[:, 0].numpy() for each in folders)
        ratio = SHARES[0] * first + SHARES[1] * second - policy
        np.testing.assert_allclose(sample.columns["advantage"][of_answers], WEIGHT * ratio, rtol=1e-4, atol=1e-5)
        others = WEIGHT * (first - policy)  # control: of the first teacher alone
        assert not np.allclose(sample.columns["advantage"][of_answers], others, rtol=1e-2)
        assert not sample.columns["advantage"][~of_answers].any()
        ratios.append(ratio)
    assert len(ratios) == 4 and lines[0]["reverse_kl"] == pytest.approx(-np.concatenate(ratios).mean(), rel=1e-5)


def test_a_divergence_is_that_of_all_teachers_at_each_drawn_token(
    tiny_world: World, tmp_path: Path, drawn: list[Sample]
) -> None:
    terms = objective(temperature=TEMPERATURE)
    lines = run(tiny_world, tmp_path / "run", **teachers(tiny_world), objective=terms, **ONE_STEP)
    folders = [str(tiny_world.base), *(each["model"] for each in teachers(tiny_world)["teacher"])]
    kls = []
    for sample in drawn:
        policy, *said = (distributions(each, sample) for each in folders)
        kls.append(torch.stack([(policy.exp() * (policy - each)).sum(1) for each in said], 1) * TEMPERATURE**2)
    first, second = torch.cat(kls).mean(0).tolist()
    assert lines[0]["divergence"] == pytest.approx(SHARES[0] * first + SHARES[1] * second, rel=1e-5)
    assert lines[0]["divergence"] != pytest.approx(SHARES[1] * first + SHARES[0] * second, rel=1e-2)  # control
    assert lines[0]["ratio"] == 1 and "reward/letters" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("divergence", [{"policy_gradient": True}, {}, {"kind": "jensen-shannon"}])
def test_teachers_are_learnt_from_while_rewards_are_looked_at(
    tiny_world: World, tmp_path: Path, divergence: dict[str, Any]
) -> None:
    more = {**teachers(tiny_world), "objective": objective(**divergence), "rewards": [UNREWARDED]}
    more["rollout"] = {"samples": 8, "max_new_tokens": 6}
    lines = run(tiny_world, tmp_path / "run", **more, batch={"prompts": 8, "micro": 2, "updates": 2}, steps=60)
    values = [line.get("divergence", line.get("reverse_kl")) for line in lines]
    assert np.mean(values[-8:]) < 0.95 * np.mean(values[:8]), values


def numbers(folder: Path) -> list[Mapping[str, float]]:
    names = ("loss", "grad_norm", "reward", "divergence", "reverse_kl")
    return [{name: line[name] for name in names if name in line} for line in steps(folder)]


@pytest.mark.distributed
def test_every_layout_learns_the_same_from_teachers(tiny_world: World, tmp_path: Path) -> None:
    batch = {"prompts": 4, "micro": 1, "updates": 2}
    ways = {
        "term": {**teachers(tiny_world), "objective": objective()},
        "advantage": {**teachers(tiny_world), "objective": objective(policy_gradient=True)},
        "ppo": {**teachers(tiny_world), "stage": "ppo", "objective": [{"kind": "ppo"}, {"kind": "forward"}]},
    }
    layouts: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"shard": "zero3"}}
    layouts |= {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    files = []
    for way, more in ways.items():
        run(tiny_world, tmp_path / way, **more, batch=batch, **TWO_STEPS)
        for name, parallel in layouts.items():
            folder = tmp_path / f"{way}-{name}"
            files.append(str(recipe_file(tiny_world, folder, **more, batch=batch, **TWO_STEPS, parallel=parallel)))
    assert run_group(train, 2, files) == [[(2, 0)] * len(files)] * 2
    for way in ways:
        for name in layouts:
            for line, other in zip(numbers(tmp_path / way), numbers(tmp_path / f"{way}-{name}"), strict=True):
                assert other == pytest.approx(line, rel=2e-4, abs=2e-6), (way, name)
        assert numbers(tmp_path / way)[0] != pytest.approx(numbers(tmp_path / way)[1], rel=2e-4)  # control
