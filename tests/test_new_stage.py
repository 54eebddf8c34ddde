"""A stage that danlu does not know is a file and a row: it trains the same in every layout, and goes on anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from builders.classifier_worker import recipe_of
from builders.digits import digits_folder
from builders.pair_stage import PAIRS, PairObjective, PairReader, Pairs, train, trained_tensors
from builders.process_group import run_group
from builders.tiny_run import tiny_model
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error
from torch import Tensor, nn

from danlu.core.errors import RecipeError
from danlu.core.types import Role
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.recipe import load
from danlu.run import train as run
from danlu.stages.learner import DecoderLearner
from danlu.stages.protocols import Stage, StageData, policy_alone
from danlu.stages.roles import FrozenDecoder, RoleOutputs
from danlu.stages.table import STAGES
from danlu.training.step import accumulate

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"shard": "zero3"}),
    "tensor": (2, {"tensor": 2}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "zero2+tensor": (4, {"shard": "zero2", "tensor": 2}),
}
CLOSE = 2e-5  # relative, in the 2-norm of each tensor, after the steps of a run


def recipe(world: World, folder: Path, name: str, parallel: Mapping[str, Any] | None = None, **changes: Any) -> str:
    values: dict[str, Any] = {
        "steps": 4,
        "batch": {"sequences": 6, "micro": 2},
        "data": {"eval": 5},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
        "gradient_clipping": 0.5,
        **changes,
    }
    return str(world.recipe(folder / name, folder / f"{name}.yaml", parallel=dict(parallel or {}), **values))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [
        value for line in lines(folder) for name, value in line.items() if name in ("loss", "eval_loss", "accuracy")
    ]


@pytest.fixture(scope="module")
def alone(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert train([recipe(tiny_world, folder, "run")]) == [0]
    return folder / "run"


def test_it_trains_what_is_its_own_beside_the_model(alone: Path) -> None:
    tensors = trained_tensors(alone)
    assert tensors["objective.reward.weight"].shape == (1, 32)
    assert tensors["objective.pairs_seen"].item() == 6
    first = trained_tensors_of_first_checkpoint(alone)
    assert not torch.equal(first["objective.reward.weight"], tensors["objective.reward.weight"])
    assert not any("reference" in name for name in tensors)
    step, evaluation = lines(alone)[0], next(line for line in lines(alone) if "eval_loss" in line)
    assert 0 <= step["accuracy"] <= 1 and "perplexity" not in evaluation


def trained_tensors_of_first_checkpoint(run_folder: Path) -> dict[str, torch.Tensor]:
    from danlu.training.checkpoints.loading import read_group

    return read_group(min((run_folder / "checkpoints").glob("step-*")), "model")


def test_it_goes_on_where_it_stopped(tiny_world: World, tmp_path: Path, alone: Path) -> None:
    shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "run" / "model")
    assert train([recipe(tiny_world, tmp_path, "run")]) == [0]
    resumed, uninterrupted = trained_tensors(tmp_path / "run"), trained_tensors(alone)
    assert resumed.keys() == uninterrupted.keys()
    assert [name for name, tensor in uninterrupted.items() if not torch.equal(tensor, resumed[name])] == []


def test_its_own_parameters_may_have_a_learning_rate_of_their_own(tiny_world: World, tmp_path: Path) -> None:
    plain = {
        "optimizer": {"kind": "sgd", "learning_rate": 1e-2},
        "schedule": {"warmup": 0},
        "steps": 1,
        "evaluation": {},
    }
    plain |= {"data": {}, "checkpoint": {"every": 1}}
    for name, rate in (("still", 1e-6), ("same", 1.0), ("double", 2.0)):
        assert train([recipe(tiny_world, tmp_path, name, **plain)], objective_rate=rate) == [0]
    still, same, double = (trained_tensors(tmp_path / name) for name in ("still", "same", "double"))
    own = "objective.reward.weight"
    torch.testing.assert_close(double[own] - still[own], 2 * (same[own] - still[own]), rtol=1e-3, atol=1e-6)
    assert not torch.equal(same[own], double[own])
    assert [name for name in same if not torch.equal(same[name], double[name])] == [own]


def test_micro_batches_change_nothing_and_a_mean_over_them_is_seen(
    tiny_world: World, tmp_path: Path, alone: Path
) -> None:
    files = {
        name: recipe(tiny_world, tmp_path, name, batch={"sequences": 6, "micro": 1}) for name in ("right", "wrong")
    }
    assert train([files["right"]]) == [0] and train([files["wrong"]], wrong=True) == [0]
    assert losses(tmp_path / "right") == pytest.approx(losses(alone), rel=1e-5)
    assert worst_relative_error(trained_tensors(tmp_path / "right"), trained_tensors(alone)) < CLOSE
    assert losses(tmp_path / "wrong") != pytest.approx(losses(alone), rel=1e-3)


def test_what_a_model_does_not_say_is_told_before_training(tiny_world: World, tmp_path: Path) -> None:
    class Scored(PairObjective):
        needs = frozenset({"scores"})

    class NeverRead(PairReader):
        def read(self, stream: TextIO) -> StageData:
            pytest.fail("rows are read after what can be wrong without them")

    stage = Stage(NeverRead, PAIRS.builder, Scored, PAIRS.models)
    with pytest.raises(RecipeError, match="its objective needs scores, which a decoder does not say"):
        run.train(load(Path(recipe(tiny_world, tmp_path, "run"))), log=lambda line: None, stage=stage)


@pytest.mark.parametrize(
    ("objective", "models", "message"),
    [
        (PairObjective, policy_alone, "needs hidden, which a classifier of images does not say"),
        (lambda recipe: CrossEntropy(), PAIRS.models, "trains alone, without frozen models"),
        (lambda recipe: WithParameter(), policy_alone, "or parameters in its objective"),
    ],
)
def test_a_classifier_refuses_what_it_has_no_place_for(
    tmp_path: Path, objective: Any, models: Any, message: str
) -> None:
    classify = STAGES["classify"]
    recipe = recipe_of(str(digits_folder(tmp_path / "set")), "none")
    classify.builder(recipe, classify).check(None)  # control: its own stage is let through
    stage = Stage(classify.reader, classify.builder, objective, models)
    with pytest.raises(RecipeError, match=message):
        stage.builder(recipe, stage).check(None)


class WithParameter(nn.Linear):
    needs = frozenset({"logprobs"})

    def __init__(self) -> None:
        super().__init__(1, 1)


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_a_loss_scale_reaches_what_is_the_objectives_own(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16's scale is in every gradient before the division, and in none after it."""

    def gradients(loss_scale: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, objective = tiny_model(), PairObjective(None)  # type: ignore[arg-type]
        learner = DecoderLearner(model, model, torch.device("cpu"), torch.float32, 2, objective, objective, roles=roles)
        parameters = {**dict(model.named_parameters()), **dict(objective.named_parameters())}
        accumulate(learner, items, step=1, clip=None, loss_scale=loss_scale, holders=list(parameters.values()))
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    reference = tiny_model(seed=1).requires_grad_(False)
    roles: dict[Role, RoleOutputs] = {"reference": FrozenDecoder(reference, reference, torch.float32)}
    items = [Pairs().at(number) for number in range(4)]
    want, got = gradients(1.0), gradients(scale)
    assert "reward.weight" in want and got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient.to_dense() if gradient.is_sparse else gradient)
    # Control: without the scale in the gradient, the division by it is seen, in the objective's own parameters too.
    monkeypatch.setattr("danlu.stages.learner.scale_gradient", lambda x, scale: x)
    assert torch.equal(gradients(scale)["reward.weight"], want["reward.weight"]) == (scale == 1)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_trains_what_one_process_does(tiny_world: World, tmp_path: Path, alone: Path, size: int) -> None:
    layouts = {name: parallel for name, (processes, parallel) in LAYOUTS.items() if processes == size}
    files = [recipe(tiny_world, tmp_path, name, parallel) for name, parallel in layouts.items()]
    assert run_group(train, size, files) == [[0] * len(files)] * size
    for name in layouts:
        assert losses(tmp_path / name) == pytest.approx(losses(alone), rel=1e-4), name
        tensors, wanted = trained_tensors(tmp_path / name), trained_tensors(alone)
        assert tensors.keys() == wanted.keys(), name
        assert worst_relative_error(tensors, wanted) < CLOSE, name
        assert tensors["objective.pairs_seen"].item() == 6
