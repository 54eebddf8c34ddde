"""Chains: several stages in one file, checked as one, trained one after the other and taken up where they stopped."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.tiny_world import CONFIG, World, danlu, last_state, metrics, write_rows

from danlu.core.errors import RecipeError
from danlu.recipe import Chain, Loaded, load_recipe_or_chain
from danlu.run.chain import StageOutcome, train_chain
from danlu.run.train import Outcome
from danlu.training import loop


def values(world: World, output: Path, **changes: Any) -> dict[str, Any]:
    """Two stages of 3 steps: a model from scratch on texts, then on conversations."""
    shared = world.values(output, stage=None, model=None, steps=3, schedule=None, checkpoint={"every": 1})
    shared["data"].pop("train")
    stages = [
        {
            "name": "pretrain",
            "stage": "pretrain",
            "model": {"tokenizer": str(world.tokenizer), "config": CONFIG},
            "data": str(world.text),
        },
        {"stage": "sft", "data": str(world.chat), "optimizer": {"weight_decay": 0.5}},
    ]
    return {**shared, "stages": stages, **changes}


def write(file: Path, content: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


def chain_of(file: Path, *overrides: str) -> Chain:
    chain = load_recipe_or_chain(file, overrides)
    assert isinstance(chain, Chain)
    return chain


def problems(file: Path, *overrides: str) -> Sequence[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe_or_chain(file, overrides)
    return caught.value.problems


def test_stages_share_keys_and_start_from_each_other(tiny_world: World, tmp_path: Path) -> None:
    file = write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run"))
    chain = chain_of(file, "sft.steps=2", "seed=7", "sft.optimizer.betas=[0.8, 0.9]")
    pretrain, sft = (stage.loaded.recipe for stage in chain.stages)
    assert [stage.inputs for stage in chain.stages] == [(), ("pretrain",)]
    assert sft.model.path == pretrain.output == str(tmp_path / "run" / "pretrain")
    assert (pretrain.steps, sft.steps) == (3, 2) and (pretrain.seed, sft.seed) == (7, 7)
    assert pretrain.optimizer.learning_rate == sft.optimizer.learning_rate == 1e-2  # shared, beside the stage's own
    assert sft.optimizer.weight_decay == 0.5 != pretrain.optimizer.weight_decay
    assert sft.data.max_length == 64 and sft.data.train[0].path == str(tiny_world.chat)
    assert chain.stages[1].loaded.origin("optimizer.betas") == "override 'sft.optimizer.betas=[0.8, 0.9]'"
    other_kind = values(tiny_world, tmp_path / "run")
    other_kind["stages"][1]["optimizer"] = "lion"
    other_kind["stages"][1]["epochs"] = 1
    _, sft = (stage.loaded.recipe for stage in chain_of(write(file, other_kind)).stages)
    assert sft.optimizer.kind == "lion" and sft.optimizer.learning_rate != 1e-2  # another kind starts anew
    assert (sft.epochs, sft.steps) == (1, None)  # one takes the place of the other


def test_a_stage_starts_from_the_adapter_of_another(tiny_world: World, tmp_path: Path) -> None:
    content = values(tiny_world, tmp_path / "run")
    content["stages"][1]["adapter"] = "lora"
    content["stages"].append({"name": "more", "stage": "sft", "data": str(tiny_world.chat)})
    more = chain_of(write(tmp_path / "chain.yaml", content)).stages[-1]
    assert more.inputs == ("pretrain", "sft")
    assert more.loaded.recipe.model.path == str(tmp_path / "run" / "pretrain")
    assert more.loaded.recipe.model.adapters == [str(tmp_path / "run" / "sft")]
    # One that goes on with the adapter takes its place for those behind it; a new one is laid upon it.
    for adapter, upon in (("continue", []), ("lora", [str(tmp_path / "run" / "sft")])):
        content["stages"][2]["adapter"] = adapter
        last = {"name": "last", "stage": "sft", "data": str(tiny_world.chat)}
        stages = [*content["stages"][:3], last]
        stage = chain_of(write(tmp_path / "chain.yaml", {**content, "stages": stages})).stages[-1]
        assert stage.loaded.recipe.model.adapters == [*upon, str(tmp_path / "run" / "more")]


def test_everything_wrong_is_told_before_anything_runs(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chain.yaml"
    lines = f"""\
output: {tmp_path / "run"}
data: {{max_lenth: 64}}
steps: 2
stages:
  - {{name: pretrain, stage: pretrain, model: {tiny_world.base}, data: {tiny_world.text}}}
  - name: sft
    stage: sft
    data: missing.jsonl
    optimiser: adamw
  - {{name: dpo, stage: dpo, from: sfd, data: {tiny_world.chat}}}
  - {{name: kto, stage: kto, model: stages.late, data: {tiny_world.chat}, output: elsewhere}}
  - {{name: late, stage: sft, data: {tiny_world.chat}}}
"""
    file.write_text(lines)
    assert danlu("train", file) == 2
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert not (tmp_path / "run").exists()
    assert said.count("max_lenth: unknown key in Data. Did you mean 'max_length'?") == 1
    column = lines.splitlines()[9].index("sfd") + 1
    for expected in (
        f"{file}:9:5 sft.optimiser: unknown key. Did you mean 'optimizer'?",
        f"{file}:8:11 sft.data.train.0.path: no file or folder 'missing.jsonl'",
        f"{file}:10:{column} dpo.model.path: no stage 'sfd'. Did you mean 'sft'? Earlier ones: pretrain, sft",
        "kto.model.path: stage 'late' comes later. Put it before this one",
        f"kto.output: a stage runs in its folder of the chain's output, here {tmp_path}/run/kto. Leave it out",
    ):
        assert expected in said, expected


def test_names_and_overrides_that_lead_nowhere(tiny_world: World, tmp_path: Path) -> None:
    content = values(tiny_world, tmp_path / "run")
    file = write(tmp_path / "chain.yaml", content)
    assert problems(file, "stf.steps=1")[0].startswith("override 'stf.steps=1' stf.steps: neither a stage nor a key.")
    assert (
        "stages.1.steps: name the stage: NAME.key=value, as in pretrain.steps" in problems(file, "stages.1.steps=1")[0]
    )
    assert problems(file, "sft.stepz=1")[0].startswith("override 'sft.stepz=1' sft.stepz: unknown key. Did you mean")
    for name, message in (
        ("pretrain", "'pretrain' is the name of another stage too"),
        ("data", "'data' is a key of recipes"),
        ("a/b", "expected letters, digits, - and _"),
    ):
        content["stages"][1]["name"] = name
        assert message in problems(write(file, content))[0]
    for stages in ([], "sft", None):
        assert "expected a list of recipes" in problems(write(file, {**content, "stages": stages}))[0]
    shared_start = {**values(tiny_world, tmp_path / "run"), "model": str(tiny_world.base)}
    assert "model.path: a start is for one stage" in problems(write(file, shared_start))[0]
    assert isinstance(load_recipe_or_chain(tiny_world.recipe(tmp_path / "one")), Loaded)


def test_a_policy_does_not_start_from_a_reward_model(tiny_world: World, tmp_path: Path) -> None:
    content = values(tiny_world, tmp_path / "run")
    content["batch"] = {"micro": 2}
    rows = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    content["stages"][0]["batch"] = content["stages"][1]["batch"] = {"sequences": 4}
    content["stages"].append({"stage": "reward", "data": str(rows)})
    last: dict[str, Any] = {"stage": "ppo", "data": str(rows), "rewards": [{"kind": "model", "path": "stages.reward"}]}
    last["rollout"] = {"max_new_tokens": 8}
    content["stages"].append(last)
    file = write(tmp_path / "chain.yaml", content)
    assert "ppo.from: missing: the stage before, 'reward', trains a reward model" in problems(file)[0]
    last["from"] = "sft"
    ppo = chain_of(write(file, content)).stages[-1]
    assert ppo.inputs == ("sft", "reward")
    assert vars(ppo.loaded.recipe.rewards[0])["path"] == str(tmp_path / "run" / "reward")  # type: ignore[index]
    content["stages"][-1] = {"name": "again", "stage": "reward", "data": str(rows)}  # a reward model does
    assert chain_of(write(file, content)).stages[-1].inputs == ("reward",)


def test_a_chain_goes_on_where_it_stopped(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tokenising_here: None,
) -> None:  # fmt: skip
    whole, stopped = (write(tmp_path / f"{name}.yaml", values(tiny_world, tmp_path / name)) for name in ("a", "b"))
    assert danlu("train", whole) == 0
    said = capsys.readouterr().err
    table = said[said.rindex("stage  ") :].splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [["pretrain", "3", "loss"], ["sft", "3", "loss"]]

    take_step = loop.take_step

    def interrupted(run: Any) -> None:
        take_step(run)
        if run.metrics.path.parent.name == "sft" and run.state.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop, "take_step", interrupted)
    assert danlu("train", stopped) == 130
    monkeypatch.setattr(loop, "take_step", take_step)
    assert "stopped after step 2" in capsys.readouterr().err
    assert danlu("train", stopped) == 0
    said = capsys.readouterr().err
    assert "was finished already, after step 3" in said and "resuming" in said
    for name in ("pretrain", "sft"):
        one, other = (last_state(tmp_path / run / name)[1] for run in ("a", "b"))
        assert one == other and metrics(tmp_path / "a" / name) == metrics(tmp_path / "b" / name)
    assert last_state(tmp_path / "a" / "sft")[1] != last_state(tmp_path / "a" / "pretrain")[1]  # control

    inputs = json.loads((tmp_path / "b" / "chain.json").read_text())
    assert inputs["sft"].keys() == {"pretrain"}
    (tmp_path / "b" / "chain.json").write_text(json.dumps({"sft": {"pretrain": "another"}}))
    assert danlu("train", stopped) != 0
    assert "begun with another result of pretrain" in capsys.readouterr().err.replace("\n  ", " ")


def test_a_shared_value_that_does_not_fit_some_stages_is_told_with_their_names(
    tiny_world: World, tmp_path: Path
) -> None:
    content = values(tiny_world, tmp_path / "run")
    rows = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    content["stages"].append({"stage": "reward", "data": str(rows)})
    file = write(tmp_path / "chain.yaml", content)
    (problem,) = problems(file)
    assert "batch.sequences: " in problem and problem.endswith(" (in stage reward)")
    (problem,) = (each for each in problems(file, "data.max_length=0") if "data.max_length" in each)
    assert "(in stage" not in problem  # of all of them


def test_only_models_are_named_by_their_stage(tiny_world: World, tmp_path: Path) -> None:
    content = values(tiny_world, tmp_path / "run")
    content["stages"][1]["data"] = {"train": str(tiny_world.chat), "system": "stages.pretrain"}
    assert chain_of(write(tmp_path / "chain.yaml", content)).stages[1].loaded.recipe.data.system == "stages.pretrain"


@pytest.mark.parametrize(("stops_at", "begun"), [(None, 2), ("pretrain", 1)])
def test_no_stage_begins_after_a_signal(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: str | None, begun: int
) -> None:
    ended = list[str]()

    def train(loaded: Any, **options: Any) -> Outcome:
        folder = Path(loaded.recipe.output)
        return Outcome(folder, 1, 143 if folder.name == stops_at else 0, ())

    monkeypatch.setattr("danlu.run.chain.train", train)
    chain = chain_of(write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run")))
    outcome = train_chain(chain, log=lambda line: None, ended=lambda stage: ended.append(stage.stage.name))
    assert ended == ["pretrain", "sft"][:begun]
    assert outcome.exit_code == (143 if stops_at else 0) and len(outcome.stages) == begun


def test_a_stage_is_summed_up_by_the_last_value_of_its_metric(tiny_world: World, tmp_path: Path) -> None:
    chain = chain_of(write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run")))
    summed_up = StageOutcome(chain.stages[0], None)
    assert summed_up.metric == ""
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 2.5}]
    write_rows(summed_up.folder / "metrics.jsonl", lines)
    assert summed_up.metric == "loss 2.5000"
    evaluated = [{"step": step, "eval_loss": loss} for step, loss in ((2, 1.5), (3, 1.25))]
    write_rows(summed_up.folder / "metrics.jsonl", [*evaluated, *lines])
    assert summed_up.metric == "eval_loss 1.2500"


def test_a_dry_run_tries_what_can_be_tried(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenising_here: None
) -> None:
    file = write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run"))
    assert danlu("train", file, "--dry-run") == 0
    said = capsys.readouterr().err.replace("\n  ", " ")
    assert "dry run: all is ready for step 1" in said
    assert "dry run: the recipe of sft is sound; the rest can be tried when pretrain is trained" in said
    assert not (tmp_path / "run").exists()
    assert danlu("train", file, "--resume", "runs/x") == 2
    assert "a chain takes auto or never" in capsys.readouterr().err


def test_keys_of_a_chain_are_explained(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "chain.yaml", values(tiny_world, tmp_path / "run"))
    assert danlu("explain", "stages") == 0
    assert "recipes that are trained one after the other" in capsys.readouterr().out
    assert danlu("explain") == 0
    assert "stages" in capsys.readouterr().out
    assert danlu("explain", "sft.optimizer.weight_decay", "--recipe", file) == 0
    assert "0.5" in capsys.readouterr().out
    assert danlu("explain", "steps", "--recipe", file) == 2
    assert "in a chain say of which stage, as in pretrain.steps" in capsys.readouterr().err
