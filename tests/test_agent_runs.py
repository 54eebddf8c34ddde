"""Runs whose answers come about by agents: they learn, go on to the same bits, and say what fails."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu
from test_rl_runs import FILTERED, assert_goes_on, recipe_file, run, run_layouts, steps

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

TURNS = {"data": {"max_length": 96}, "rollout": {"samples": 4, "max_new_tokens": 12, "stop_strings": ["a", "t"]}}
AGENT = """
import json, os, sys, time, urllib.error, urllib.request

def ask(base_url, api_key, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def once(messages, base_url, api_key):
    return float(ask(base_url, api_key, messages).count("e"))

def several(messages, base_url, api_key, turns=3):
    messages, earned = list(messages), 0.0
    for _ in range(turns):
        text = ask(base_url, api_key, messages)
        earned += text.count("e")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    return earned

def forgets(messages, base_url, api_key):
    earned, first = 0.0, messages[0]
    for turn in range(3):
        text = ask(base_url, api_key, [first, {"role": "user", "content": "turn %d" % turn}])
        earned += text.count("e")
    return earned

def crashes(messages, base_url, api_key, seed):
    ask(base_url, api_key, messages)
    raise ValueError("no such door")

def silent(row):
    return 1.0

if __name__ == "__main__":
    given = json.load(sys.stdin)
    assert given["base_url"] == os.environ["OPENAI_BASE_URL"] and given["model"] == os.environ["OPENAI_MODEL"]
    print("looking at", given["row"]["question"])
    print(json.dumps({"reward": once(given["messages"], given["base_url"], os.environ["OPENAI_API_KEY"])}))
"""


def agent(world: World, name: str = "several", **more: Any) -> dict[str, Any]:
    file = world.folder / "agent.py"
    file.write_text(AGENT)
    return {"environment": {"kind": "agent", "path": f"{file}:{name}", **more}, "rewards": None}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_all_questions_of_an_agent_are_trained_on(tiny_world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first, second = run(tiny_world, folder, **agent(tiny_world), steps=2, **TURNS)
    assert first["turns_mean"] == 3 and first["environment_failures"] == first["history_rewritten"] == 0
    assert first["ratio"] == second["ratio"] == 1 and first["grad_norm"] > 0
    for line in lines_of(folder):
        for answer in line["answers"]:
            roles = [turn["role"] for turn in answer["turns"]]
            assert roles == ["user", "assistant"] * 3
            said = [turn["content"] for turn in answer["turns"] if turn["role"] == "assistant"]
            earned = sum(re.split("[at]", text)[0].count("e") for text in said)
            assert answer["rewards"] == {"environment": float(earned)}


def test_ppo_is_trained_on_episodes_with_a_rewritten_history(tiny_world: World, tmp_path: Path) -> None:
    """Each question is a text of its own; what the trainer says of its tokens is what the rollout said of them."""
    more = {"stage": "ppo", "steps": 2, "numerics": "exact", **agent(tiny_world, "forgets"), **TURNS}
    more["batch"] = {"prompts": 4, "micro": 2, "updates": 2}
    lines = run(tiny_world, tmp_path / "run", **more)
    assert lines[0]["history_rewritten"] == 1 and lines[0]["turns_mean"] == 3
    assert lines[0]["gap"] == 0 and lines[0]["ratio"] == 1
    assert lines[1]["ratio"] != 1  # the control: of the second update the weights are others
    assert all(line["grad_norm"] > 0 for line in lines)


def test_an_agent_that_asks_once_is_a_reward(tiny_world: World, tmp_path: Path) -> None:
    """The same answers, losses and gradients as with a function of the answer."""
    names = ("loss", "grad_norm", "reward")
    plain = run(tiny_world, tmp_path / "plain", steps=2)
    played = run(tiny_world, tmp_path / "played", **agent(tiny_world, "once"), steps=2)
    assert [[line[name] for name in names] for line in plain] == [[line[name] for name in names] for line in played]
    tokens = [
        [answer["tokens"] for line in lines_of(tmp_path / name) for answer in line["answers"]]
        for name in ("plain", "played")
    ]
    assert tokens[0] == tokens[1]
    other = run(tiny_world, tmp_path / "other", **agent(tiny_world), **TURNS, steps=2)  # control
    assert [line["loss"] for line in other] != [line["loss"] for line in played]


@pytest.mark.slow
def test_a_command_is_an_agent(tiny_world: World, tmp_path: Path) -> None:
    own = agent(tiny_world, "once")
    command = {"kind": "agent", "command": f"{sys.executable} {tiny_world.folder / 'agent.py'}", "workers": 3}
    function = run(tiny_world, tmp_path / "function", **own, steps=2)
    called = run(tiny_world, tmp_path / "command", **own | {"environment": command}, steps=2)
    assert [line["loss"] for line in called] == [line["loss"] for line in function]


def test_a_run_stopped_in_a_rollout_goes_on(tiny_world: World, tmp_path: Path) -> None:
    more = {"batch": {"prompts": 4, "micro": 1, "updates": 2}, "checkpoint": {"every": 1, "keep": 20}, "steps": 4}
    rollout = {**FILTERED, "max_new_tokens": 12, "stop_strings": ["a", "t"]}
    more |= {"rollout": rollout, "numerics": "exact", "data": TURNS["data"], **agent(tiny_world, workers=3)}
    lines = run(tiny_world, tmp_path / "whole", **more)
    assert [line["gap"] for line in lines[0::2]] == [0.0, 0.0]
    assert_goes_on(tiny_world, tmp_path / "whole", 1, **more)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"zero3": (2, {"shard": "zero3"}), "pipeline": (2, {"pipeline": 2})}


@pytest.fixture(scope="module")
def layouts(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run_layouts(tiny_world, folder, LAYOUTS, **agent(tiny_world) | TURNS | {"steps": 2})
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_of_a_trainer_have_the_same_answers(layouts: Path, layout: str) -> None:
    for line, other in zip(steps(layouts / "one"), steps(layouts / layout), strict=True):
        for name in ("loss", "grad_norm", "reward", "turns_mean"):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert (layouts / "one" / "rollouts.jsonl").read_text() == (layouts / layout / "rollouts.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("crashes", "environment: ValueError: no such door (agent.py:"),
        ("silent", "environment: it ended without an answer of the policy"),
    ],
)
def test_agents_that_fail_end_the_run(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert danlu("train", recipe_file(tiny_world, tmp_path / name, **agent(tiny_world, name), steps=2)) != 0
    err = " ".join(capsys.readouterr().err.split())
    assert "of the answers to prompts 0 to 3 have no reward" in err and said in err


def test_agents_past_their_answers_are_cut_off(tiny_world: World, tmp_path: Path) -> None:
    """They crash where they are refused, which is not held against them."""
    line, *_ = run(tiny_world, tmp_path / "turns", **agent(tiny_world, max_turns=2), **TURNS, steps=2)
    assert line["out_of_turns"] > 0 == line["environment_failures"] and line["turns_mean"] <= 2
    finishes = {
        answer["finish"]: answer["rewards"] for each in lines_of(tmp_path / "turns") for answer in each["answers"]
    }
    assert finishes["turns"] == {"environment": 0.0}


def test_code_that_cannot_be_loaded_is_told(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = agent(tiny_world, arguments={"trns": 3}) | TURNS | {"steps": 2}
    assert danlu("train", recipe_file(tiny_world, tmp_path / "arguments", **more)) != 0
    assert "environment: several: got an unexpected keyword argument 'trns'" in " ".join(
        capsys.readouterr().err.split()
    )
    section = {"kind": "agent", "command": "true", "path": "a.py:b", "host": "0.0.0.0"}
    both = {"environment": section, "rewards": None, "rollout": {"staleness": 1}}
    assert danlu("train", recipe_file(tiny_world, tmp_path / "both", **both)) != 0
    err = " ".join(capsys.readouterr().err.split())
    assert "both path and command are given" in err and "no address that agents can be told" in err
    assert "agents ask the policy of the trainer, which answers all of them together. Use 0" in err
