"""Stage distill from a recipe: the same in every layout and after a stop, and what it refuses before rows are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.distillation_worker import recipe, teacher_folder, train
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.tiny_world import CONFIG, World, write_rows
from builders.worst_errors import worst_relative_error
from tokenizers import Tokenizer

from danlu.core.errors import DanluError
from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer
from danlu.recipe import load
from danlu.recipe.roles import ModelSpec
from danlu.run import train as run
from danlu.stages.distillation import DistillationBuilder, check_teachers, teacher_models
from danlu.stages.table import STAGES

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

CLOSE = 2e-5  # relative, in the 2-norm of each tensor, after the steps of a run
TOP_K = {"objective": {"kind": "reverse", "temperature": 1.5}}
HIDDEN = {
    "objective": [{"kind": "jensen-shannon", "beta": 0.3, "cross_entropy": 0.5}, {"kind": "hidden", "weight": 0.1}]
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[float]:
    names = ("loss", "divergence", "hidden", "nll", "eval_loss", "eval_divergence")
    return [value for line in lines(folder) for name, value in line.items() if name in names]


@pytest.fixture(scope="module")
def alone(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two teachers, one with all it says and one with its likeliest tokens, and a map of hidden states."""
    folder = tmp_path_factory.mktemp("alone")
    assert train([recipe(tiny_world, folder / "run", **two_teachers(tiny_world))]) == [0]
    return folder / "run"


def two_teachers(world: World) -> dict[str, Any]:
    second = teacher_folder(world, "second-teacher", seed=8, hidden_size=32)
    divergence = {"kind": "jensen-shannon", "beta": 0.3, "cross_entropy": 0.5}
    return {
        "teacher": [teacher_folder(world), {"model": second, "top_k": 20, "weight": 0.5}],
        "objective": [divergence, {"kind": "hidden", "weight": 0.1}],
    }


def test_it_says_what_it_consists_of_and_writes_only_the_policy(alone: Path) -> None:
    step, evaluation = lines(alone)[0], next(line for line in lines(alone) if "eval_loss" in line)
    parts = 0.5 * step["nll"] + 0.5 * step["divergence"] + 0.1 * step["hidden"]
    assert step["loss"] == pytest.approx(parts, rel=1e-6)
    assert {"eval_divergence", "eval_hidden", "eval_perplexity", "eval_accuracy"} <= evaluation.keys()
    tensors = trained_tensors(alone)
    assert tensors["objective.projections.teacher.weight"].shape == (48, 32)
    assert tensors["objective.projections.teacher_1.weight"].shape == (32, 32)
    assert json.loads((alone / "model" / "config.json").read_text())["hidden_size"] == 32


TOP_K_OBJECTIVE = {"kind": "jensen-shannon", "temperature": 2.0, "cross_entropy": 0.2}


def test_a_cached_teacher_teaches_what_a_live_one_does_over_twenty_steps(tiny_world: World, tmp_path: Path) -> None:
    folder = teacher_folder(tiny_world)
    shared = {"steps": 20, "objective": TOP_K_OBJECTIVE, "evaluation": {"every": 10}, "checkpoint": {"every": 20}}

    def trained(name: str, **teacher: Any) -> Path:
        assert train([recipe(tiny_world, tmp_path / name, teacher={"model": folder, **teacher}, **shared)]) == [0]
        return tmp_path / name

    live, cached = trained("live", top_k=12), trained("cached", top_k=12, cache=True)
    assert numbers(cached) == pytest.approx(numbers(live), rel=1e-6)
    assert worst_relative_error(trained_tensors(cached), trained_tensors(live)) < CLOSE
    other = trained("other", top_k=11)  # negative control: a token less is seen
    assert numbers(other) != pytest.approx(numbers(live), rel=1e-6)


def test_the_cache_follows_from_temperature_top_k_and_teacher(tiny_world: World, tmp_path: Path) -> None:
    folder, second = teacher_folder(tiny_world), teacher_folder(tiny_world, "second-teacher", seed=8, hidden_size=32)
    cached = {"model": folder, "top_k": 12, "cache": True}

    def folders(name: str, teacher: dict[str, Any], temperature: float = 2.0) -> set[str]:
        changes = {"objective": {"kind": "forward", "temperature": temperature}, "data": {"eval": 5, "cache": cache}}
        assert train([recipe(tiny_world, tmp_path / name, teacher=teacher, **changes)]) == [0]
        return {entry.name for entry in Path(cache).iterdir() if entry.name.startswith("teacher-")}

    cache = str(tmp_path / "cache")
    first = folders("first", cached)
    assert len(first) == 2  # of training rows, and of held-out ones
    assert folders("same", cached) == first
    counts = [
        len(folders("warmer", cached, 3.0)),
        len(folders("fewer", {**cached, "top_k": 11})),
        len(folders("quantized", {**cached, "quantization": "int8"})),
        len(folders("another", {**cached, "model": second})),
    ]
    assert counts == [4, 6, 8, 10]


def test_it_goes_on_where_it_stopped(tiny_world: World, tmp_path: Path, alone: Path) -> None:
    shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "run" / "model")
    assert train([recipe(tiny_world, tmp_path / "run", **two_teachers(tiny_world))]) == [0]
    resumed, uninterrupted = trained_tensors(tmp_path / "run"), trained_tensors(alone)
    assert resumed.keys() == uninterrupted.keys()
    assert [name for name, tensor in uninterrupted.items() if not tensor.equal(resumed[name])] == []


@pytest.mark.distributed
def test_every_layout_trains_what_one_process_does(tiny_world: World, tmp_path: Path, alone: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"shard": "zero3"}, "tensor": {"tensor": 2}}
    layouts |= {"sequence": {"tensor": 2, "sequence": True}, "context": {"context": 2}, "pipeline": {"pipeline": 2}}
    files = [
        recipe(tiny_world, tmp_path / name, layout, **two_teachers(tiny_world)) for name, layout in layouts.items()
    ]
    cached = {"teacher": {"model": teacher_folder(tiny_world), "top_k": 12, "cache": True}, "objective": "reverse"}
    assert train([recipe(tiny_world, tmp_path / "cached-alone", **cached)]) == [0]
    for name in ("zero3", "tensor", "context", "pipeline"):  # each asks the teacher itself
        changes = {**cached, "data": {"eval": 5, "cache": str(tmp_path / f"cache-{name}")}}
        files.append(recipe(tiny_world, tmp_path / f"cached-{name}", layouts[name], **changes))
    wrong = two_teachers(tiny_world)
    wrong["teacher"][1]["weight"] = 0.4  # negative control: the comparison sees another share
    files.append(recipe(tiny_world, tmp_path / "wrong", **wrong))
    assert run_group(train, 2, files) == [[0] * len(files)] * 2
    for name in layouts:
        assert numbers(tmp_path / name) == pytest.approx(numbers(alone), rel=1e-4), name
        assert worst_relative_error(trained_tensors(tmp_path / name), trained_tensors(alone)) < CLOSE, name
    for name in ("zero3", "tensor", "context", "pipeline"):
        got, want = tmp_path / f"cached-{name}", tmp_path / "cached-alone"
        assert numbers(got) == pytest.approx(numbers(want), rel=1e-4), name
        assert worst_relative_error(trained_tensors(got), trained_tensors(want)) < CLOSE, name
    assert numbers(tmp_path / "wrong") != pytest.approx(numbers(alone), rel=1e-3)
    assert worst_relative_error(trained_tensors(tmp_path / "wrong"), trained_tensors(alone)) > 100 * CLOSE


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": "lora", "quantization": "nf4", "teacher_quantization": "nf4"},
        {"precision": "fp16"},
        {"data": {"packing": "concatenate"}, "rows": "text"},
    ],
)
def test_it_trains_adapters_fp16_and_plain_text(tiny_world: World, tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    quantization, rows = changes.pop("teacher_quantization", None), changes.pop("rows", "chat")
    changes["teacher"] = {"model": teacher_folder(tiny_world), "quantization": quantization}
    if "adapter" in changes:
        changes["model"] = str(tiny_world.base)
    if rows == "text":
        changes["data"] = {**changes["data"], "train": str(tiny_world.text)}
    assert train([recipe(tiny_world, tmp_path / "run", steps=8, evaluation={}, **changes)]) == [0]
    divergences = [line["divergence"] for line in lines(tmp_path / "run") if "divergence" in line]
    assert min(divergences[-2:]) < divergences[0]


def test_a_teacher_may_be_an_adapter(tiny_world: World, tmp_path: Path) -> None:
    sft = recipe(
        tiny_world,
        tmp_path / "sft",
        stage="sft",
        model=str(tiny_world.base),
        adapter="lora",
        teacher=None,
        objective=None,
    )
    assert train([sft]) == [0]
    loaded = load(Path(recipe(tiny_world, tmp_path / "run", teacher=str(tmp_path / "sft")))).recipe
    spec = teacher_models(loaded)["teacher"]
    assert isinstance(spec, ModelSpec) and spec.section.path == str(tiny_world.base.resolve())
    assert spec.section.adapters == [str(tmp_path / "sft" / "adapter")]
    check_teachers(loaded)


def other_tokenizer(world: World) -> Path:
    """The world's with one token written otherwise."""
    folder = world.folder / "other-tokenizer"
    if not folder.is_dir():
        shutil.copytree(world.tokenizer, folder)
        file = folder / "tokenizer.json"
        values = json.loads(file.read_text())
        vocabulary = values["model"]["vocab"]
        last = max(vocabulary, key=lambda text: vocabulary[text])
        vocabulary[f"{last}x"] = vocabulary.pop(last)
        values["model"]["merges"] = [m for m in values["model"]["merges"] if "".join(m).replace(" ", "") != last]
        file.write_text(json.dumps(values))
        Tokenizer.from_file(str(file))
    return folder


def test_another_tokenizer_is_refused_by_its_first_token_that_differs(tiny_world: World, tmp_path: Path) -> None:
    other = teacher_folder(tiny_world, "foreign", tokenizer=other_tokenizer(tiny_world))
    message = r"teacher\.0\.model: \S+foreign has another vocabulary: its token \d+ is '(.+)x', the policy's is '\1'"
    broken = write_rows(tmp_path / "broken.jsonl", ["{"])  # rows are read after what can be wrong without them
    with pytest.raises(DanluError, match=message):
        train([recipe(tiny_world, tmp_path / "run", teacher=other, data={"train": str(broken), "eval": 1})])
    cached = {"model": other, "top_k": 4, "cache": True}
    with pytest.raises(DanluError, match=message):
        train([recipe(tiny_world, tmp_path / "cached", teacher=cached, data={"train": str(broken), "eval": 1})])
    with pytest.raises(DanluError, match=r"broken\.jsonl"):  # control
        train([recipe(tiny_world, tmp_path / "control", data={"train": str(broken), "eval": 1})])


def test_a_smaller_vocabulary_is_refused_and_a_padded_one_told(tiny_world: World, tmp_path: Path) -> None:
    train_tokenizer(list(pretraining_documents(0, 400)), 300, tmp_path / "small")
    small = teacher_folder(tiny_world, "small-teacher", tokenizer=tmp_path / "small", vocab_size=300)
    with pytest.raises(DanluError, match=r"has another vocabulary: its token \d+ is"):
        train([recipe(tiny_world, tmp_path / "run", teacher=small)])
    padded = teacher_folder(tiny_world, "padded", vocab_size=416)
    loaded = load(Path(recipe(tiny_world, tmp_path / "padded", teacher=padded)))
    check_teachers(loaded.recipe)
    cut = load(Path(recipe(tiny_world, tmp_path / "cut", {"tensor": 2}, teacher=padded)))
    with pytest.raises(DanluError, match=r"parallel\.tensor cuts the rows .* has 416 and the policy's 400"):
        check_teachers(cut.recipe)
    said: list[str] = []
    run.train(loaded, log=said.append)
    assert any("its embedding has 416 rows and the policy's 400" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "teacher: missing: stage distill learns from one"),
        ({"stage": "sft", "objective": None}, "teacher: only stages distill and rl have a teacher; this is sft"),
        ({"teacher": {"model": "x/y", "cache": True}}, r"teacher\.0\.cache: .* top_k does not say how many"),
        (
            {"objective": ["forward", "reverse"]},
            r"objective\.1\.kind: reverse next to forward: there is one divergence",
        ),
        ({"objective": "hidden"}, r"hidden is a term next to a divergence"),
        ({"objective": ["forward", "hidden", "hidden"]}, "hidden is there already"),
        ({"objective": "sigmoid"}, r"sigmoid is an objective of stage preference, not of stage distill"),
        (
            {"objective": ["forward", "hidden"], "teacher": {"model": "x/y", "cache": True, "top_k": 4}},
            "hidden states are not cached",
        ),
        ({"adapter": "prefix", "model": "x/y"}, "virtual tokens before every document, which a teacher in memory"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tiny_world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DanluError, match=message):
        load(Path(recipe(tiny_world, tmp_path / "run", **changes)))
    load(Path(recipe(tiny_world, tmp_path / "control")))


def test_a_top_k_that_leaves_no_others_is_refused(tiny_world: World, tmp_path: Path) -> None:
    everything = {"model": teacher_folder(tiny_world), "top_k": 400}
    with pytest.raises(DanluError, match=r"teacher\.0\.top_k: 400 of 400 tokens leave no others"):
        check_teachers(load(Path(recipe(tiny_world, tmp_path / "run", teacher=everything))).recipe)
    check_teachers(load(Path(recipe(tiny_world, tmp_path / "control", teacher={**everything, "top_k": 399}))).recipe)


def test_a_teacher_that_cannot_be_split_as_the_policy_is_is_refused(tiny_world: World, tmp_path: Path) -> None:
    def check(name: str, layers: int) -> None:
        model = {"tokenizer": str(tiny_world.tokenizer), "config": {**CONFIG, "num_hidden_layers": 4}}
        teacher = teacher_folder(tiny_world, f"teacher-of-{layers}", num_hidden_layers=layers)
        interleaved = {"pipeline": {"stages": 2, "schedule": "interleaved"}}
        file = recipe(tiny_world, tmp_path / name, interleaved, model=model, teacher=teacher)
        DistillationBuilder(load(Path(file)).recipe, STAGES["distill"]).check(None)

    with pytest.raises(DanluError, match=r"teacher\.0\.model: .*teacher-of-3: parallel.pipeline: .* has 3 layers"):
        check("run", 3)
    check("control", 5)


def test_pairs_are_no_rows_of_distillation(tiny_world: World, tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    rows = write_rows(tmp_path / "pairs.jsonl", [pair] * 3)
    with pytest.raises(DanluError, match="preference"):
        train([recipe(tiny_world, tmp_path / "run", data={"train": str(rows), "eval": None}, evaluation=None)])


def test_the_map_of_hidden_states_may_have_a_learning_rate_of_its_own(tiny_world: World, tmp_path: Path) -> None:
    def rate(**hidden: float) -> float:
        objective = [{"kind": "forward"}, {"kind": "hidden", **hidden}]
        chosen = load(Path(recipe(tiny_world, tmp_path / "run", objective=objective))).recipe
        return STAGES["distill"].objective_rate(chosen)

    assert rate(rate_ratio=5.0, weight=0.5) == 5 and rate() == 1
