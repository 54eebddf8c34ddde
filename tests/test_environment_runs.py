"""Runs with an environment: they learn, are equal however they are computed, and say what fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import World, danlu
from test_rl_runs import FILTERED, assert_goes_on, recipe_file, run, run_layouts, steps

from danlu.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

TURNS = {"data": {"max_length": 96}, "rollout": {"samples": 8, "max_new_tokens": 12, "stop_strings": ["a", "t"]}}
ENVIRONMENT = """
from danlu.environment import Done, Turn

class Letters:
    def __init__(self, turns=3):
        self.turns = turns

    def reset(self, row):
        self.left = self.turns

    def step(self, answer):
        self.left -= 1
        earned = float(answer.count("e"))
        return Turn("more", reward=earned) if self.left else Done(earned)

class Fails(Letters):
    def step(self, answer):
        raise ValueError("no such door")

class Endless:
    def reset(self, row):
        pass

    def step(self, answer):
        return Turn("go on")
"""

LISTS_TOOLS = """\
{% if tools %}tools: {{ tools | map(attribute='function.name') | join(' ') }}
{% endif %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def environment(world: World, name: str = "Letters", **more: Any) -> dict[str, Any]:
    file = world.folder / "env.py"
    file.write_text(ENVIRONMENT)
    section = {"kind": "python", "path": f"{file}:{name}", "workers": 1, **more}
    return {"environment": section, "rewards": None}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_a_policy_learns_over_several_turns(tiny_world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lines = run(tiny_world, folder, **environment(tiny_world), steps=12, **TURNS, optimizer={"learning_rate": 3e-2})
    assert lines[-1]["reward"] > 3 * lines[0]["reward"] > 0, [line["reward"] for line in lines]
    assert lines[0]["turns_mean"] > 1.2 and lines[0]["environment_failures"] == 0
    assert all(line["ratio"] == 1 for line in lines)
    for line in lines_of(folder)[:8]:
        for answer in line["answers"]:
            said = [turn["content"] for turn in answer["turns"] if turn["role"] == "assistant"]
            # A stop string may end within a token, whose rest is drawn and trained, and not a part of the answer.
            earned = sum(re.split("[at]", text)[0].count("e") for text in said)
            assert answer["rewards"] == {"environment": float(earned)}


def test_an_environment_of_one_turn_is_a_reward(tiny_world: World, tmp_path: Path) -> None:
    """The same answers, advantages and weights as with a function; the rewards of an answer are its letters."""
    single = environment(tiny_world, arguments={"turns": 1})
    plain, played = (
        run(tiny_world, tmp_path / "plain", steps=4),
        run(tiny_world, tmp_path / "played", **single, steps=4),
    )
    for line, other in zip(plain, played, strict=True):
        assert [line[name] for name in ("loss", "grad_norm", "reward")] == [
            other[name] for name in ("loss", "grad_norm", "reward")
        ]
    folders = [tmp_path / "plain", tmp_path / "played"]
    tokens = [[answer["tokens"] for line in lines_of(folder) for answer in line["answers"]] for folder in folders]
    assert tokens[0] == tokens[1]
    other = run(tiny_world, tmp_path / "other", **environment(tiny_world), **TURNS, steps=4)  # control
    assert [line["loss"] for line in other] != [line["loss"] for line in played]


@pytest.mark.parametrize("after", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_stopped_in_a_rollout_goes_on(tiny_world: World, tmp_path: Path, after: int) -> None:
    more = {"batch": {"prompts": 4, "micro": 1, "updates": 2}, "checkpoint": {"every": 1, "keep": 20}, "steps": 4}
    rollout = {**FILTERED, "max_new_tokens": 12, "stop_strings": ["a", "t"]}
    more |= {"rollout": rollout, "numerics": "exact", "data": TURNS["data"], **environment(tiny_world)}
    lines = run(tiny_world, tmp_path / "whole", **more)
    assert [line["gap"] for line in lines[0::2]] == [0.0, 0.0]
    assert_goes_on(tiny_world, tmp_path / "whole", after, **more)


@pytest.mark.parametrize(
    "objective", ["ppo", pytest.param("remax", marks=pytest.mark.slow), pytest.param("gspo", marks=pytest.mark.slow)]
)
def test_objectives_take_episodes(tiny_world: World, tmp_path: Path, objective: str) -> None:
    more = environment(tiny_world) | TURNS | {"stage": objective, "steps": 2}
    lines = run(tiny_world, tmp_path / objective, **more)
    assert [line["ratio"] for line in lines] == [1.0, 1.0] and lines[0]["turns_mean"] > 1


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "zero3": (2, {"shard": "zero3"}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
}


@pytest.fixture(scope="module")
def layouts(tiny_world: World, tmp_path_factory: pytest.TempPathFactory, module_tokenises_here: None) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run_layouts(tiny_world, folder, LAYOUTS, **environment(tiny_world) | TURNS | {"steps": 2})
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_plays_the_same_episodes(layouts: Path, layout: str) -> None:
    for line, other in zip(steps(layouts / "one"), steps(layouts / layout), strict=True):
        for name in ("loss", "grad_norm", "reward", "turns_mean"):
            assert other[name] == pytest.approx(line[name], rel=2e-4, abs=2e-6), name
    assert (layouts / "one" / "rollouts.jsonl").read_text() == (layouts / layout / "rollouts.jsonl").read_text()


def test_an_environment_that_raises_ends_the_run(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = environment(tiny_world, "Fails") | {"steps": 2}
    assert danlu("train", recipe_file(tiny_world, tmp_path / "fails", **more)) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "of the answers to prompts 0 to 3 have no reward" in said
    assert "environment: ValueError: no such door (env.py:" in said


def test_an_environment_without_end_is_cut_off_and_said(tiny_world: World, tmp_path: Path) -> None:
    more = environment(tiny_world, "Endless", max_turns=2) | TURNS | {"steps": 2}
    line, _ = run(tiny_world, tmp_path / "endless", **more)
    assert line["out_of_turns"] > 0 and line["reward"] == 0 and line["no_signal"] == 1


def test_prompts_tell_of_tools_where_the_template_does(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools, template = tmp_path / "my_tools.py", tmp_path / "lists.jinja"
    tools.write_text(
        'def door(n: int) -> str:\n    """Opens.\n\n    Args:\n        n: which.\n    """\n    return "open"\n'
    )
    template.write_text(LISTS_TOOLS)
    more: dict[str, Any] = {"environment": {"kind": "tools", "tools": [f"{tools}:door"], "workers": 1}, "steps": 2}
    shown = {"model": {"chat_template": str(template)}}
    line, _ = run(tiny_world, tmp_path / "run", **more, **shown)
    assert (line["turns_mean"], line["tool_errors"]) == (1, 0)
    capsys.readouterr()
    assert danlu("preview", recipe_file(tiny_world, tmp_path / "preview", **more, **shown), "--json") == 0
    row, *_ = json.loads(capsys.readouterr().out)["rows"]
    text = load_tokenizer(str(tiny_world.tokenizer)).decode(row["samples"][0]["ids"])
    assert text.startswith("tools: door")
    assert danlu("train", recipe_file(tiny_world, tmp_path / "refused", **more)) != 0
    assert "environment.tools: the chat template does not show tools" in " ".join(capsys.readouterr().err.split())
