"""Sections of a recipe as rewards; what is wrong with them is told before anything begins."""

from __future__ import annotations

import pytest

from danlu.core.errors import DataError, RecipeError, ResourceError
from danlu.recipe import sections
from danlu.rewards import build
from danlu.rewards.build import build_rewards, build_runner, check_columns
from danlu.rewards.code import Code
from danlu.rewards.function import UserFunction
from danlu.rewards.judge import Judge
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.text import Exact, Length, Mathematical, Numeric, Pattern

FUNCTIONS = """
def short(completion, **row):
    return -len(completion)

def graded(completion, answer, *, level, bonus=1, **rest):
    return bonus

def batched(prompts, completions, finish, target):
    return [1.0] * len(completions)

other = short
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def judge(**settings):
    given = {"url": "http://localhost:1/v1", "model": "m", "prompt": "{prompt} {completion} {worked}"}
    return sections.JudgeReward(**{**given, **settings})


def test_every_section_is_a_reward(file, monkeypatch):
    monkeypatch.setattr(build, "find_sandbox", lambda wanted: wanted)
    parts = build_rewards(
        [
            sections.ExactReward(column="a", ignore_case=True),
            sections.NumericReward(column="b", tolerance=0.1, weight=2.0),
            sections.MathReward(column="c", name="mathematics"),
            sections.FormatReward(pattern="####", whole=True),
            sections.LengthReward(fewest=1, most=5, slack=2),
            sections.CodeReward(column="d", timeout_s=1.0, memory_mib=64, processes=3, sandbox="none"),
            sections.FunctionReward(path=f"{file}:short"),
            judge(bounds=(0.0, 10.0), connections=2, timeout_s=3.0, retries=1, max_new_tokens=7, temperature=0.5),
            sections.ModelReward(path="somewhere", weight=0.5),
        ],
        reward_model=lambda section: section.path,
    )
    assert [(part.name, part.weight) for part in parts] == [
        *(("exact", 1), ("numeric", 2), ("mathematics", 1), ("format", 1), ("length", 1), ("code", 1), ("short", 1)),
        *(("judge", 1), ("model", 0.5)),
    ]
    rewards = [part.reward for part in parts]
    assert rewards[:6] == [
        Exact("a", True),
        Numeric("b", 0.1),
        Mathematical("c"),
        Pattern("####", True),
        Length(1, 5, 2),
        Code("d", 1.0, 64, 3, "none"),
    ]
    assert rewards[6] == UserFunction.read(f"{file}:short")
    judging = rewards[7]
    assert isinstance(judging, Judge) and judging.template.columns == ("prompt", "completion", "worked")
    assert (judging.url, judging.model, judging.bounds) == ("http://localhost:1/v1", "m", (0.0, 10.0))
    assert (judging.connections, judging.timeout_s, judging.retries) == (2, 3.0, 1)
    assert (judging.max_new_tokens, judging.temperature, judging.pattern) == (7, 0.5, judge().pattern)
    assert rewards[8] == "somewhere"


def test_all_problems_are_told_at_once(file, monkeypatch):
    def no_namespaces(wanted):
        raise ResourceError("rewards of kind code: this system has no namespaces")

    monkeypatch.setattr(build, "find_sandbox", no_namespaces)
    with pytest.raises(RecipeError) as error:
        build_rewards(
            [
                sections.FormatReward(pattern="("),
                sections.MathReward(column="a"),
                sections.CodeReward(column="d"),
                sections.FunctionReward(path="nowhere.py:f"),
                judge(prompt="{"),
                judge(pattern="["),
                judge(api_key_variable="NO_SUCH_KEY"),
                judge(url="localhost"),
            ]
        )
    messages = {0: "'(' is no regular", 2: "no namespaces", 3: "no file nowhere.py", 4: "a '{' without its partner"}
    messages |= {5: "'[' is no regular", 6: "environment has no NO_SUCH_KEY", 7: "url of a server looks like"}
    assert len(error.value.problems) == len(messages)
    for line, (number, message) in zip(error.value.problems, messages.items(), strict=True):
        assert line.startswith(f"rewards.{number}: ") and message in line


def test_columns_that_a_row_lacks_are_named(file):
    parts = build_rewards(
        [
            sections.MathReward(column="answr"),
            judge(),
            *(sections.FunctionReward(path=f"{file}:{name}") for name in ("short", "graded", "batched", "other")),
        ]
    )
    with pytest.raises(DataError) as error:
        check_columns(parts, {"answer": "4", "question": "2 + 2"}, "rows.jsonl:3")
    assert str(error.value).splitlines() == [
        "rows.jsonl:3: reward math reads the column 'answr'; the row has 'answer', 'question'. Did you mean 'answer'?",
        "rows.jsonl:3: reward judge reads the column 'worked'; the row has 'answer', 'question'.",
        "rows.jsonl:3: reward graded reads the column 'level'; the row has 'answer', 'question'.",
        "rows.jsonl:3: reward batched reads the column 'target'; the row has 'answer', 'question'.",
    ]
    check_columns(parts, dict.fromkeys(("answr", "worked", "answer", "level", "target")), "rows.jsonl:4")


def test_a_runner_within_the_limits_of_a_recipe(file):
    parts = build_rewards([sections.FunctionReward(path=f"{file}:short")])
    with build_runner(parts, sections.RewardLimits(timeout_s=7.0, workers=3)) as runner:
        assert runner.score([JudgedAnswer("abc", {})]).values.tolist() == [[-3]]
        assert (runner.timeout_s, runner.workers) == (7, 3)
    with build_runner(parts, sections.RewardLimits()) as runner:
        assert runner.timeout_s == 60 and 1 <= runner.workers <= 8
