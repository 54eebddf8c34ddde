"""`danlu plan`: from a recipe to what is printed, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu

from danlu.planning.lengths import read_lengths


@pytest.fixture
def recipe(tiny_world: World, tmp_path: Path) -> Path:
    cache = {"cache": str(tmp_path / "cache")}
    return tiny_world.recipe(tmp_path / "run", model={"config": None, "path": str(tiny_world.base)}, data=cache)


def planned(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert danlu("plan", *arguments, "--json") == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def test_a_recipe_is_planned_on_a_cluster(recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = planned(capsys, recipe, "--on", "2x2xA100-80G", "parallel.shard=zero3", "batch.micro=1")
    assert values["layout"]["processes"] == 4 and values["batch"] == {
        "micro": 1, "micro_batches": 1, "max_length": 64, "tokens": 256
    }  # fmt: skip
    assert values["fits"] and values["training"]["steps"] == 12 and values["training"]["price"] is None
    assert values["seconds"]["total"] > 0 and values["documents"]["source"] == "full packs"
    memory = values["memory"]
    assert sum(memory["parts"].values()) + memory["communication"] + memory["kv_cache"] == memory["allocated"]
    assert danlu("plan", recipe, "--on", "2x2xA100-80G", "parallel.shard=zero3", "batch.micro=1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run.yaml on 2 nodes of 2 x A100-80G (79.2 GiB each): 4 processes (data 4)"
    assert lines[1] == "a step: 1 micro-batch of 1 x 64 tokens in each data rank, 256 tokens in all"

    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n64\n")
    file = tmp_path / "cluster.yaml"
    file.write_text("cards: {kind: A100-80G, each: 4, price: 2}")
    values = planned(capsys, recipe, "--on", file, "--lengths", lengths)
    assert values["documents"] == {"source": "file", "rows": 2, "tokens": 74, "longest": 64}
    assert values["training"]["price"] == pytest.approx(values["training"]["hours"] * 4 * 2)


def test_changes_make_it_fit(recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    card = "cards: {kind: small, memory: %s, bandwidth: 100, peak: {fp32: 1}}"
    cluster.write_text(card % "1GB")
    whole = planned(capsys, recipe, "--on", cluster)
    assert whole["fits"] and "changes" not in whole
    cluster.write_text(card % f"{whole['memory']['allocated'] / 1000 - 1:.3f}KB")
    values = planned(capsys, recipe, "--on", cluster)
    assert not values["fits"]
    first, *_ = changes = values["changes"]
    assert first["fits"] and first["taken"] < whole["memory"]["allocated"] and first["note"] == ""
    assert {"batch.micro=1", "memory.recompute=full"} <= {change["change"] for change in changes}
    again = planned(capsys, recipe, "--on", cluster, first["change"])  # the change keeps its promise
    assert (again["fits"], again["memory"]["allocated"]) == (True, first["taken"])
    assert danlu("plan", recipe, "--on", cluster) == 0
    assert "== each of these changes alone makes it fit" in capsys.readouterr().out


def test_neighbours_are_planned(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--on", "4xA100-80G", "batch.micro=1"]
    values = planned(capsys, recipe, *on, "parallel.tensor=2", "--neighbours")
    layouts = {layout["change"]: layout for layout in values["neighbours"]}
    assert {"parallel.tensor=1", "parallel.tensor=4", "parallel.pipeline=2", "parallel.shard=zero3"} <= layouts.keys()
    assert "parallel.expert=2" not in layouts  # the model has no experts
    one = planned(capsys, recipe, *on, "parallel.tensor=1")
    assert layouts["parallel.tensor=1"]["taken"] == one["memory"]["allocated"] != values["memory"]["allocated"]
    assert layouts["parallel.tensor=1"]["seconds"] == one["seconds"]["total"] != values["seconds"]["total"]


def test_the_fastest_layouts_are_found(recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best, on = tmp_path / "best.yaml", ["--on", "2xA100-80G"]
    first, second = planned(capsys, recipe, *on, "--search", 2, "--write", best)["layouts"]
    assert first["plan"]["seconds"]["total"] <= second["plan"]["seconds"]["total"]
    assert planned(capsys, recipe, *on, *first["settings"])["seconds"] == first["plan"]["seconds"]
    assert planned(capsys, best, *on)["seconds"] == first["plan"]["seconds"] != second["plan"]["seconds"]
    assert danlu("plan", recipe, *on, "--search", 1, "--write", best) != 0
    assert f"--write {best}: exists already" in capsys.readouterr().err
    assert danlu("plan", recipe, *on, "--write", tmp_path / "other.yaml") != 0
    assert "Add --search 1" in capsys.readouterr().err


def test_the_largest_that_fit(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def taken(*overrides: str) -> int:
        return int(planned(capsys, recipe, "--on", "A100-80G", *overrides)["memory"]["allocated"])

    of_one, of_two, longer = (
        taken("batch.micro=1"),
        taken("batch.micro=2"),
        taken("batch.micro=1", "data.max_length=128"),
    )
    assert of_one < of_two and of_one < longer  # controls: neither fits where one just does
    values = planned(capsys, recipe, "--fits", f"{of_one / 1000:.3f}KB")
    assert (values["memory_bytes"], values["per_step"], values["model"]) == (of_one, 4, None)
    assert values["micro"] == {"value": 1, "taken": of_one} and values["max_length"] == {"value": 64, "taken": of_one}
    values = planned(capsys, recipe, "--fits", f"{max(of_two, longer) / 1000:.3f}KB")
    assert values["micro"] == {"value": 2, "taken": of_two} and values["max_length"] == {"value": 128, "taken": longer}
    assert planned(capsys, recipe, "--fits", "24GB")["model"]["parameters"] > 5e8
    assert danlu("plan", recipe, "--fits", "24") != 0
    assert "--fits: '24' is no size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "8xH100-80G", "parallel.tensor=3"], "parallel.tensor: 3 does not divide the 8 processes of this run"),
        (
            ["--on", "8xH100-80G", "parallel.tensor=8"],
            "tensor: 8 does not divide the model's 4 attention heads",
        ),
        (["--on", "0xH100-80G"], "--on '0xH100-80G': 0 nodes or cards, and a run needs 1 at least"),
        (["--on", "8xH100-80"], "no card 'H100-80' is known. Did you mean 'H100-80G'?"),
        (["batch.mirco=1"], "override 'batch.mirco=1' batch.mirco: unknown key in BatchSize. Did you mean 'micro'?"),
        (["--lengths", "missing.txt"], "--lengths missing.txt: cannot be read: No such file or directory"),
        (["--on", "1xH100-80G", "--search", "0"], "'--search': Input should be greater than or equal to 1"),
        (["--fits", "24"], "--fits: '24' is no size. Write a number above 0 with its unit, as 80GB or 79.2GiB"),
        (["--fits", "24GB", "--lengths", "none", "--neighbours"], "--lengths, --neighbours: not with --fits"),
        (["--search", "1", "--neighbours"], "--neighbours: not with --search, which plans all layouts"),
        (["--search", "1", "--write", "nowhere/best.yaml"], "--write nowhere/best.yaml: there is no folder "),
    ],
)
def test_what_cannot_be_planned_is_said(
    recipe: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("plan", recipe, *arguments) != 0
    assert message in " ".join(capsys.readouterr().err.split())


CLUSTERS = {
    "cards: {kind: H100-80G, nodes: 0}": ":1:32 cards.nodes: 0 is no whole number from 1",
    "cards: {kind: X, memory: 80GB, bandwidth: -3, peak: 3}": "cards.bandwidth: -3 is no number above 0: GB/s",
    "cards: {kind: X, memory: 80 bananas, bandwidth: 3, peak: 3}": "cards.memory: '80 bananas' is no size",
    "cards: {kind: H200-80G}": "cards.kind: no card 'H200-80G' is known. Did you mean",
    "cards: {kind: H100-80G, each: 8}\nlinks: [{ranks: 3, gb_s: 9, us: 1}, {ranks: 8, gb_s: 9, us: 1}]": (
        " links: groups of 8 ranks cut groups of 3: take a multiple"
    ),
    "- cards": ":1:1: no mapping. It has the keys cards, links",
}


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_senseless_cluster_is_refused_with_its_line(
    recipe: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert danlu("plan", recipe, "--on", file) == 2
    said = capsys.readouterr().err
    assert CLUSTERS[text] in said and "cluster.yaml:" in said


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
def test_a_config_without_a_field_is_refused_with_the_file_and_the_field(
    tiny_world: World, recipe: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((tiny_world.base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in values.items() if key != name}))
    assert danlu("plan", recipe, f"model.path={tmp_path}", f"model.tokenizer={tiny_world.tokenizer}") == 4
    assert f"{tmp_path}/config.json: {name}: missing" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["parallel.tensor=3", "parallel.pipeline=2", "parallel.context=4"])
def test_degrees_that_divide_nothing_are_refused_as_a_run_refuses_them(
    recipe: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for command in (["plan", recipe, "--on", "1xH100-80G"], ["train", recipe]):
        assert danlu(*command, change) == 2
        said.append([line for line in capsys.readouterr().err.splitlines() if "parallel." in line])
    assert said[0] == said[1] != []
    assert danlu("plan", recipe, "--on", "12xH100-80G", change) in (0, 2)  # control: other processes, another message
    assert [line for line in capsys.readouterr().err.splitlines() if "parallel." in line] != said[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no run with a plan (plan.json) is in this folder"),
        ("[]", "no JSON object"),
        ('{"format": 99}', "its format is 99, and this danlu reads 1"),
        ('{"format": 1, "mem', "plan.json: not the plan of a run, or torn"),
        ("{}", "without 'format'"),
    ],
)
def test_a_folder_without_a_plan_that_can_be_read(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    assert danlu("plan", tmp_path) != 0
    assert message in capsys.readouterr().err


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    rows = [7, {"tokens": 5}, {"length": 6}, {"tokens": [1, 2, 3]}, {"answers": [{"tokens": 9}, {"tokens": 8}]}]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_lengths(file).documents == (7, 5, 6, 3, 9, 8) and read_lengths(file).source == "file"
    for line, message in (
        ("abc", ":1: 'abc' is neither a number"),
        ("0", ":1: 0 is no number"),
        ("7\n" + "9" * 30, ":2: 9+ is no number of tokens"),
        ("", "no lengths"),
    ):
        file.write_text(line)
        with pytest.raises(Exception, match=message):
            read_lengths(file)


def test_answers_are_as_long_as_a_file_has_them(
    tiny_world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = {"config": None, "path": str(tiny_world.base)}
    recipe = tiny_world.recipe(
        tmp_path / "rl",
        stage="grpo",
        model=model,
        batch={"prompts": 4, "sequences": None},
        rewards=[{"kind": "exact", "column": "answer"}],
        rollout={"samples": 2, "max_new_tokens": 32},
        objective=None,
    )
    longest = planned(capsys, recipe, "--on", "A100-80G")
    assert [*longest["rollout"]["phases"]] == ["hand_over_s", "rollout_s", "reward_s", "update_s"]
    assert longest["tokens_per_second"] is None is longest["mfu"]
    assert not any("packed sequence" in sentence for sentence in longest["assumptions"])
    assert any("rollout.max_new_tokens (32)" in sentence for sentence in longest["assumptions"])
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"prompt_tokens": 5, "answer_tokens": [4, 8]}')
    shorter = planned(capsys, recipe, "--on", "A100-80G", "--lengths", lengths)
    assert shorter["rollout"]["total"] < 0.5 * longest["rollout"]["total"]
    steps, hours = longest["training"]["steps"], longest["training"]["hours"]
    assert hours == pytest.approx(steps * longest["rollout"]["total"] / 3600)
    lengths.write_text("12\n[]")
    assert danlu("plan", recipe, "--on", "A100-80G", "--lengths", lengths) == 3
    assert "lengths.jsonl:2: not a mapping" in capsys.readouterr().err


LOADED = """
import sys
from danlu.cli.main import main
code = main(sys.argv[1:])
print(code, *sorted({"numpy", "torch", "transformers"} & set(sys.modules)))
"""


def test_numpy_is_imported_where_there_are_lengths_alone(recipe: Path, tmp_path: Path) -> None:
    def loaded(*arguments: Any) -> str:
        command = [sys.executable, "-c", LOADED, "plan", *map(str, (recipe, "--on", "2xA100-80G", *arguments))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]

    lengths = tmp_path / "lengths.txt"
    lengths.write_text("10\n64\n")
    assert loaded() == "0"
    assert loaded("--lengths", lengths) == "0 numpy"  # control
