"""Stage quantize in a chain: between stages that train, taken up where it was killed, refused where it has no place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.tiny_world import CONFIG, World, danlu, metrics

import danlu as library
from danlu.adapters.adapter_config import read_adapter_config
from danlu.assembly.layerwise_quantizing import LayerwiseQuantizer
from danlu.core.errors import RecipeError
from danlu.recipe import Chain, QuantizeStage, load_recipe_or_chain
from danlu.run import chained_quantize


def values(
    world: World, output: Path, changes: dict[str, Any] | None = None, more: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """A model from scratch, quantized (with `changes`), and an adapter on its codes; `more` follows."""
    shared = world.values(output, stage=None, model=None, steps=2, schedule=None, checkpoint={"every": 1})
    shared["data"].pop("train")
    scratch = {"tokenizer": str(world.tokenizer), "config": CONFIG}
    rounding = {
        "stage": "quantize",
        "calibration": {"data": str(world.chat), "tokens": 300, "max_length": 128},
        "quantization": [{"kind": "gptq", "group": 16}],
        "export": "compressed-tensors",
    }
    stages = [
        {"stage": "pretrain", "model": scratch, "data": str(world.text)},
        {key: value for key, value in {**rounding, **(changes or {})}.items() if value is not None},
        {"stage": "sft", "data": str(world.chat), "adapter": {"kind": "lora", "rank": 2}},
    ]
    return {**shared, "stages": [*stages, *more]}


def write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def problems(file: Path, *overrides: str) -> Sequence[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe_or_chain(file, overrides)
    return caught.value.problems


def weights_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_chain_quantizes_between_stages_that_train(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tokenising_here: None,
) -> None:  # fmt: skip
    """A chain that is killed behind the first quantized layer ends with the bytes of one that is not."""
    whole, killed = (write(tmp_path / f"{name}.yaml", values(tiny_world, tmp_path / name)) for name in ("a", "b"))
    run = library.train(whole)
    assert [(each.folder.name, each.steps) for each in run.stages] == [("pretrain", 2), ("quantize", 0), ("sft", 2)]
    codes = run.stages[1].result
    assert codes == tmp_path / "a" / "quantize" and run.result == tmp_path / "a" / "sft" / "adapter"
    assert (
        json.loads((codes / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    assert str(read_adapter_config(run.result).base) == str(codes)

    keep = LayerwiseQuantizer._keep

    def keep_and_die(layers: LayerwiseQuantizer, number: int, result: Any) -> None:
        keep(layers, number, result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayerwiseQuantizer, "_keep", keep_and_die)
        assert danlu("train", killed) == 130
    layers = CONFIG["num_hidden_layers"]
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert f"stopped at once; 1 of {layers} layers are quantized, and the same command goes on from there" in said
    assert not (tmp_path / "b" / "quantize").exists() and (tmp_path / "b" / ".quantize.quantizing").is_dir()
    changed = "quantize.quantization.0.bits=3"
    assert danlu("train", killed, changed) != 0
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert "quantize: this stage was begun with another quantization (" in said and "to quantize it again" in said
    assert danlu("train", killed) == 0
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert "1 layers were done by an earlier run of this chain" in said
    assert said[said.rindex("stage  ") :].splitlines()[2].split()[:4] == ["quantize", "-", "gptq:", "int4"]
    assert weights_of(tmp_path / "b" / "quantize") == weights_of(codes)
    assert metrics(tmp_path / "b" / "sft") == metrics(tmp_path / "a" / "sft")

    assert danlu("train", killed) == 0
    assert "was quantized already" in capsys.readouterr().err
    assert danlu("train", killed, changed) != 0
    assert danlu("train", killed, "--resume", "never") != 0
    begun_with = json.loads((tmp_path / "b" / "chain.json").read_text())
    assert begun_with["quantize"].keys() == {"pretrain"} and begun_with["sft"].keys() == {"quantize"}
    begun_with["quantize"]["pretrain"] = "another"
    (tmp_path / "b" / "chain.json").write_text(json.dumps(begun_with))
    assert danlu("train", killed) != 0
    assert "begun with another result of pretrain" in capsys.readouterr().err.replace("\n  ", " ")


def test_a_dry_run_reads_the_rows(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenising_here: None
) -> None:
    content = values(tiny_world, tmp_path / "run", {"model": str(tiny_world.base)})
    content["stages"] = [content["stages"][1], content["stages"][2]]
    file = write(tmp_path / "chain.yaml", content)
    assert danlu("train", file, "--dry-run") == 0
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert f"dry run: all is ready to quantize {tiny_world.base}, calibrated with" in said
    assert "the recipe of sft is sound; the rest can be tried when quantize is trained" in said
    assert not (tmp_path / "run").exists()
    assert danlu("train", file, "--dry-run", "quantize.quantization.0.group=24") == 2
    assert "quantization.0.group: 24 does not divide" in capsys.readouterr().err


def test_what_a_stage_that_quantizes_shares_with_others(tiny_world: World, tmp_path: Path) -> None:
    file = write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run"))
    chain = load_recipe_or_chain(file, ["seed=7", "steps=1", "quantize.calibration.tokens=50"])
    assert isinstance(chain, Chain)
    pretrain, stage, sft = chain.stages
    assert isinstance(stage, QuantizeStage) and chain.trained == (pretrain, sft)
    recipe = stage.loaded.recipe
    assert (recipe.model, recipe.output, stage.inputs) == (
        *(str(tmp_path / "run" / n) for n in ("pretrain", "quantize")),
        ("pretrain",),
    )
    assert recipe.calibration is not None and recipe.calibration.cache == str(tiny_world.cache)
    assert (recipe.seed, recipe.calibration.tokens, recipe.threads) == (7, 50, 1)
    assert sft.inputs == ("quantize",) and sft.loaded.recipe.model.path == recipe.output
    assert danlu("explain", "quantize.quantization.bits", "--recipe", file) == 0


def test_other_processes_wait_for_the_folder_of_the_first(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = load_recipe_or_chain(write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run")))
    assert isinstance(chain, Chain)
    stage = chain.stages[1]
    assert isinstance(stage, QuantizeStage)
    looks = list[float]()

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            (tmp_path / "run" / "quantize").mkdir(parents=True)
            (tmp_path / "run" / "quantize" / "config.json").write_text("{}")

    monkeypatch.setattr(chained_quantize.time, "sleep", sleep)
    monkeypatch.setattr(chained_quantize, "quantize", lambda *arguments, **options: 1 / 0)  # not by this process

    def run(*, dry_run: bool) -> None:
        chained_quantize.quantize_stage(stage, resume="auto", stream=None, dry_run=dry_run, leads=False)

    run(dry_run=True)
    assert not looks
    run(dry_run=False)
    assert len(looks) == 3


REFUSED: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    ({"from": "sft"}, [], "quantize.from: stage 'sft' comes later"),
    ({"model": "stages.pretrian"}, [], "quantize.model: no stage 'pretrian'. Did you mean 'pretrain'?"),
    ({"model": "stages.pretrain", "from": "pretrain"}, [], "quantize.from: the model is named already"),
    ({"output": "elsewhere"}, [], "quantize.output: a stage runs in its folder of the chain's output"),
    ({"calibration": {"data": "./no.json"}}, [], "quantize.calibration.data.0.path: no file or folder './no.json'"),
    ({"calibration": None}, [], "quantize.quantization: gptq looks at rows"),
    ({"quantisation": "nearest"}, [], "quantize.quantisation: unknown key. Did you mean 'quantization'?"),
    ({}, [{"name": "again", "from": "quantize"}], "again.from: stage 'quantize' has rounded its weights already"),
    ({}, [{"name": "again"}], "again.from: stage 'sft' trains an adapter, and a whole model is quantized"),
    (
        {},
        [{"stage": "sft", "name": "more", "from": "quantize", "adapter": "lora", "quantization": "nf4"}],
        "more.quantization: stage 'quantize' writes codes (export: compressed-tensors), which stay as they are",
    ),
    (
        {},
        [{"stage": "sft", "name": "more", "from": "quantize", "adapter": {"kind": "qa-lora", "group": 8}}],
        "more.adapter.group: 8 inputs share a column of A, and stage 'quantize' has groups of 16. Use a multiple of 16",
    ),
]  # fmt: skip


def test_what_cannot_follow_is_refused_before_anything_runs(tiny_world: World, tmp_path: Path) -> None:
    rounding = {"stage": "quantize", "quantization": [{"kind": "nearest", "group": 16}]}
    file = tmp_path / "chain.yaml"
    for changes, more, message in REFUSED:
        added = [each | {"data": str(tiny_world.chat)} if "stage" in each else rounding | each for each in more]
        content = values(tiny_world, tmp_path / "run", changes, added)
        assert any(message in each for each in problems(write(file, content))), message
    content = values(tiny_world, tmp_path / "run")
    assert "neither a stage nor a key" in problems(write(file, content), "exprot=awq")[0]
    assert "is a key of stage quantize alone. Name the stage: NAME.export=value" in problems(file, "export=awq")[0]
    content["stages"] = [{**content["stages"][1], "model": str(tiny_world.base)}]
    assert "stages: none of them trains" in problems(write(file, content))[0]
