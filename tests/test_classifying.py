"""A classifier of images trains through the loop of language models: alone, on many processes, interrupted and not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from builders.classifier_worker import STEPS, Seen, recipe_of, see, train
from builders.digits import digits_folder
from builders.process_group import run_group
from builders.tiny_world import danlu, metrics
from builders.worst_errors import worst_relative_error
from torch import Tensor

from danlu import recipe as recipes
from danlu.core.errors import RecipeError, TrainingError
from danlu.models import lenet
from danlu.parallel.ranks import Ranks
from danlu.stages.table import STAGES
from danlu.training.checkpoints.loading import read_group

SHARDS = ("none", "zero1", "zero2", "zero3")
CLOSE = 1e-6  # relative, in the 2-norm of each tensor


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(digits_folder(tmp_path_factory.mktemp("digits") / "set"))


@pytest.fixture(scope="module")
def one(images: str) -> Seen:
    return see(images, ["none"])["none"]


@pytest.fixture(scope="module", params=[2, 4])
def many(images: str, request: pytest.FixtureRequest) -> dict[str, list[Seen]]:
    """By kind of sharding, what each process saw."""
    found = run_group(see, request.param, images, SHARDS)
    return {shard: [seen[shard] for seen in found] for shard in SHARDS}


def whole(parts: list[Mapping[str, object]]) -> dict[str, Tensor]:
    """Tensors out of the boxes of all processes."""
    found: dict[str, Tensor] = {}
    for held in parts:
        for name, (piece, tensor) in held.items():
            piece.view_of(found.setdefault(name, torch.full(piece.global_shape, torch.nan))).copy_(tensor)
    return found


def differs(seen: list[Seen], one: Seen, step: int) -> float:
    """The worst relative difference of a gradient; infinite where one is missing."""
    return worst_relative_error(whole([each.gradients[step] for each in seen]), whole([one.gradients[step]]))


# -- many processes ---------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize("shard", SHARDS)
def test_many_processes_compute_what_one_does(shard: str, many: dict[str, list[Seen]], one: Seen) -> None:
    seen = many[shard]
    for step in range(len(STEPS)):
        assert differs(seen, one, step) < CLOSE
        for each in seen:
            assert each.losses[step] == pytest.approx(one.losses[step], rel=CLOSE)
            assert each.norms[step] == pytest.approx(one.norms[step], rel=CLOSE)
    trained, wanted = whole([each.weights for each in seen]), whole([one.weights])
    for name in wanted:
        torch.testing.assert_close(trained[name], wanted[name], rtol=0, atol=1e-5)
    for each in seen:
        assert each.evaluation == pytest.approx(one.evaluation, rel=1e-5)
    assert one.evaluation["trained"] == 64
    rows = {len(tensor) for each in seen for piece, tensor in [each.weights["c3.weight"]]}
    assert (max(rows) == 16) == (shard == "none")  # only then does each hold all of it


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("shard", "fault"), [("none", "no sum"), ("none", "repeated rows"), ("zero3", "repeated rows")]
)
def test_a_mistake_would_be_seen(shard: str, fault: str, images: str, one: Seen) -> None:
    seen = [found[shard] for found in run_group(see, 2, images, [shard], fault)]
    assert differs(seen, one, 0) > 1000 * CLOSE


@pytest.mark.distributed
def test_a_run_of_many_processes_leaves_one_model(images: str, tmp_path: Path) -> None:
    def weights(name: str) -> dict[str, Tensor]:
        return dict(lenet.load(tmp_path / name / "model").named_parameters())

    files = {
        name: str(written(images, tmp_path, name, parallel=shard)) for name, shard in (("ddp", "none"), ("z", "zero3"))
    }
    alone = written(images, tmp_path, "alone")
    train(str(alone))
    for name, file in files.items():
        said, silent = run_group(train, 2, file)
        assert not silent and any("LeNet-5 with" in line for line in said)
        for key, tensor in weights(name).items():
            torch.testing.assert_close(tensor, weights("alone")[key], rtol=0, atol=1e-4)
        ours, theirs = ([line["loss"] for line in metrics(tmp_path / run) if "loss" in line] for run in (name, "alone"))
        # The loss of a sure image is a difference of float32 numbers near 1, each with an error of up to 6e-8.
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    first = lenet.LeNet5()
    lenet.initialize(first, 0)
    assert (first.f6.weight - weights("alone")["f6.weight"]).abs().max() > 1e-2  # it did learn


# -- runs -------------------------------------------------------------------------------------------------------------


def written(images: str, folder: Path, name: str, **changes: object) -> Path:
    values: dict[str, object] = {
        "stage": "classify",
        "model": {"preset": "lenet5"},
        "data": {"train": images, "eval": [{"path": images, "split": "test"}]},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "batch": {"sequences": 32},
        "epochs": 2,
        "precision": "fp32",
        "evaluation": 16,
        "checkpoint": 8,
        "log": {"tensorboard": False},
        "output": str(folder / name),
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values | changes))
    return file


def test_a_run_learns_and_its_result_is_judged_alike(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    assert danlu("train", written(images, tmp_path, "run")) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("precision: ")]
    assert said[:2] == ["data: 512 images", "evaluation data: 64 images"]
    assert said[2] == (
        "LeNet-5 with 61,706 parameters, all trained, on cpu, fp32; 32 steps of 32 images (micro-batches of 32), "
        "1,024 images"
    )
    assert said[-2] == f"  model in {output}/model: try `danlu eval {output}/model --data FOLDER_OF_IMAGES`"
    lines = metrics(output)
    assert [line["tokens"] for line in lines if "loss" in line] == [32] * 32
    scores = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in scores] == [16, 32]
    assert scores[-1]["eval_accuracy"] > 0.95 > 0.5 > lines[0]["accuracy"]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["parameters"] == 61_706 and summary["evaluation"]["last"] == scores[-1]["eval_loss"]
    assert summary["memory"]["weights"] == summary["memory"]["gradients"] == 4 * 61_706
    assert danlu("eval", output, "--data", images, "--json") == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["accuracy"] == scores[-1]["eval_accuracy"] and judged["images"] == 64
    assert judged["loss"] == pytest.approx(scores[-1]["eval_loss"], rel=1e-5)
    again = written(images, tmp_path, "again", model={"path": str(output)})
    assert danlu("train", again, "steps=1") == 0
    assert metrics(tmp_path / "again")[0]["loss"] < 0.3 < lines[0]["loss"]


def test_a_resumed_run_equals_an_uninterrupted_one(images: str, tmp_path: Path) -> None:
    assert danlu("train", written(images, tmp_path, "whole", ema=0.9)) == 0
    part = written(images, tmp_path, "part", ema=0.9)
    assert danlu("train", part, "--resume", tmp_path / "whole" / "checkpoints" / "step-00000024") == 0
    ours, theirs = (
        read_group(tmp_path / name / "checkpoints" / "step-00000032", "model") for name in ("part", "whole")
    )
    before = read_group(tmp_path / "whole" / "checkpoints" / "step-00000024", "model")
    for name in theirs:
        assert torch.equal(ours[name], theirs[name])
        assert not torch.equal(before[name], theirs[name])
    exported = tmp_path / "exported"
    assert danlu("checkpoint", "export", tmp_path / "whole", exported, "--average") == 0
    for name, tensor in lenet.load(tmp_path / "whole" / "model-ema").named_parameters():
        assert torch.equal(lenet.load(exported).get_parameter(name), tensor)
        assert not torch.equal(theirs[name], tensor)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_activations_learn_too(precision: str, images: str, tmp_path: Path) -> None:
    assert danlu("train", written(images, tmp_path, "run", precision=precision, evaluation=8)) == 0
    scores = [line["eval_accuracy"] for line in metrics(tmp_path / "run") if "eval_loss" in line]
    assert scores[-1] > 0.9


def test_a_loss_that_is_not_finite_names_its_cause(images: str) -> None:
    recipe = recipe_of(images, "none")
    stage = STAGES["classify"]
    stage_data = stage.reader(recipe).read(None)  # type: ignore[arg-type]
    placed = stage.builder(recipe, stage).place(Ranks(), torch.device("cpu"), None, stage_data).policy
    learner = placed.learner(2)
    batch = learner.collate([stage_data.source.at(0), stage_data.source.at(1)])
    with torch.no_grad():
        placed.model.output.weight.mul_(1e38)
    error = learner.explain(batch, 3)
    assert isinstance(error, TrainingError)
    assert str(error).startswith(f"step 3: the loss is not finite, for {images}/train-images-idx3-ubyte.gz image ")
    with torch.no_grad():
        placed.model.f6.bias[0] = torch.nan
    assert "because a weight is not: f6.bias" in str(learner.explain(batch, 3))


# -- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.max_length=512", "data.max_length: not read with stage classify, which has no tokens"),
        ("data.packing=none", "data.packing: not read with stage classify"),
        ("adapter=lora", "adapter: not read with stage classify"),
        ("batch={tokens: 1024}", "batch.tokens: not read .* counted in images: give batch.sequences"),
        ("parallel.tensor=2", "parallel.tensor: not read with stage classify"),
        ("memory=full", "memory.recompute: not read with stage classify"),
        ("compile=true", "compile: not read with stage classify"),
        ("evaluation.samples=Once", "evaluation.samples: not read with stage classify"),
        ("model.preset=tiny", "model.preset: tiny is a language model; stage classify trains lenet5"),
        ("stage=sft", "model.preset: lenet5 classifies images: it needs stage classify"),
        ("data.train.0.weight=2", "data.train.0.weight: not read with stage classify"),
        ("data.train.0.path=mnits", "data.train.0.path: no file or folder 'mnits'"),
    ],
)
def test_what_is_about_words_is_refused(override: str, said: str, images: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        recipes.load(written(images, tmp_path, "run"), [override])


def test_two_splits_of_a_folder_are_not_the_same_rows(images: str, tmp_path: Path) -> None:
    assert recipes.load(written(images, tmp_path, "run")).notes == ()
    same = written(images, tmp_path, "same", data={"train": images, "eval": [{"path": images}]})
    (note,) = recipes.load(same).notes
    assert note.startswith(f"data.eval: {images} is also trained on")


def test_a_verb_for_tokens_says_so(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("preview", written(images, tmp_path, "run")) == 2
    assert "stage: classify has no tokens, and danlu preview is for language models" in capsys.readouterr().err


def test_flags_for_words_are_refused(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = lenet.LeNet5()
    lenet.initialize(model, 0)
    lenet.save(model, tmp_path / "model")
    assert danlu("eval", tmp_path / "model", "--data", images, "data.max_length=9", "--quantization", "nf4") == 2
    assert "data.max_length=9, --quantization: of no use for a classifier of images" in capsys.readouterr().err
