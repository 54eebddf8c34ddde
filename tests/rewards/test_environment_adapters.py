"""Environments of other packages, over stand-ins with the very names that the adapters use of them."""

from __future__ import annotations

import sys
import textwrap

import pytest

from danlu.core.errors import RecipeError, ResourceError
from danlu.recipe.sections import OpenEnv, Verifiers
from danlu.rewards.environments import build
from danlu.rewards.environments.agents import AgentCall, AgentFailed, play
from danlu.rewards.environments.openenv import OpenEnvServer, action_of, observation_text
from danlu.rewards.environments.protocol import EpisodeCall
from danlu.rewards.environments.verifiers_agent import VerifiersEnvironment
from danlu.rewards.environments.worker import Episodes

OPENENV = """
from types import SimpleNamespace

class GenericEnvClient:
    def __init__(self, base_url, connect_timeout_s=10.0, message_timeout_s=60.0):
        self.left, self.base_url = 2, base_url

    def sync(self):
        return self

    def reset(self, **given):
        return SimpleNamespace(observation={"result": {"text": f"say {given}"}}, reward=None, done=False)

    def step(self, action):
        self.left -= 1
        reward = float(action["message"].count("e"))
        return SimpleNamespace(observation={"result": {"text": "again"}}, reward=reward, done=not self.left)

    def close(self):
        closed.append(self.base_url)

closed = []
"""
VERIFIERS = """
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str

@dataclass
class ModelContext:
    model: str
    client: object

class Taskset:
    bounded = True

    def __iter__(self):
        return iter([0.5, 2.0, None])

class Environment:
    def __init__(self, config):
        if config["taskset"]["id"] != "letters":
            raise ModuleNotFoundError("taskset not found")
        self.taskset, self.config, self.serves = Taskset(), config, False

    @asynccontextmanager
    async def serving(self):
        self.serves = True
        yield

    async def run_episode(self, task, context):
        import os
        assert self.serves and os.environ[context.client.api_key_var] == "key" and context.client.base_url == "http://here"
        if task is None:
            return SimpleNamespace(traces=[], errors=[SimpleNamespace(type="HarnessError", message="no box")])
        traces = [(task, True), (1.0, True), (100.0, False)]
        return SimpleNamespace(errors=[], traces=[
            SimpleNamespace(reward=reward, errors=[], agent=SimpleNamespace(trainable=trainable))
            for reward, trainable in traces
        ])

def resolve_env_config(config):
    return config

load_environment = Environment
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Both packages, as far as they are asked."""
    files = {
        "openenv/__init__.py": "",
        "openenv/core/__init__.py": OPENENV,
        "verifiers/__init__.py": "",
        "verifiers/v1/__init__.py": "",
        "verifiers/v1/clients.py": VERIFIERS,
        "verifiers/v1/utils/__init__.py": "",
        "verifiers/v1/utils/loaders.py": "from verifiers.v1.clients import load_environment, resolve_env_config",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("openenv", "verifiers")]:
        del sys.modules[name]


def test_a_session_of_a_server_is_an_episode(packages):
    section = OpenEnv(url="http://there", observation="result.text", reset={"word": "question"})
    build.check_environment(section)
    episodes = Episodes(build.environment_source(section).load())
    row = {"question": "two", "answer": 2}
    first = episodes.reply(EpisodeCall((0, 0), row, (1 << 31) + 5))
    assert [turn.text for turn in first.turns] == ["say {'seed': 5, 'word': 'two'}"]
    second = episodes.reply(EpisodeCall((0, 0), row, 5, ("eel",), (first,)))
    assert ([turn.text for turn in second.turns], second.reward, second.done) == (["again"], 2.0, False)
    third = episodes.reply(EpisodeCall((0, 0), row, 5, ("eel", "e"), (first, second)))
    assert (third.reward, third.done) == (1.0, True)
    episodes.close()
    assert sys.modules["openenv.core"].closed == ["http://there"]
    lacking = episodes.reply(EpisodeCall((1, 0), {"answer": 2}, 5))
    assert "the row has no column 'question'; it has answer" in (lacking.failure or "")


def test_an_answer_may_be_the_action(packages):
    episode = OpenEnvServer("http://there", None, "result.text").load()()
    assert "an action is a JSON object" in episode.step("go left").text and episode.errors == 1
    assert episode.step('{"message": "eel"}').reward == 2.0 and episode.errors == 0


@pytest.mark.parametrize(
    ("template", "action"),
    [
        ({"message": "{answer}"}, {"message": 'say "e"'}),
        ({"a": ["x {answer}", 1], "b": {"c": "{answer}"}}, {"a": ['x say "e"', 1], "b": {"c": 'say "e"'}}),
    ],
)
def test_actions_are_filled_with_the_answer(template, action):
    assert action_of('say "e"', template) == action


def test_an_observation_is_text_by_its_key():
    observation = {"result": {"text": "a", "board": [1, 2]}, "done": None}
    assert observation_text(observation, "result.text") == "a"
    assert observation_text(observation, "result.board") == "[1, 2]" and observation_text(observation, "done") == ""
    assert observation_text({"n": 1}, None) == '{"n": 1}'
    with pytest.raises(KeyError, match=r"'result.texts' is not in what the server observed, which has text, board"):
        observation_text(observation, "result.texts")


def call(row):
    return AgentCall((0, 0), row, [], 1, "http://here", "key")


def test_an_episode_of_verifiers_is_the_mean_of_its_trained_agents(packages):
    section = Verifiers(environment="letters", arguments={"taskset": {"split": "train"}}, column="number")
    build.check_environment(section)
    solve = build.agent_source(section).load()
    assert [play(solve, call({"number": number})).reward for number in (0, 1)] == [0.75, 1.5]
    for row, said in [
        ({"number": 2}, "HarnessError: no box"),
        ({"number": 3}, "the taskset has 3 tasks, and none of number 3"),
        ({"number": "1"}, "column 'number' of the row is '1'"),
        ({}, "column 'number' of the row is None"),
    ]:
        with pytest.raises(AgentFailed, match=said):
            play(solve, call(row))


def test_an_environment_that_is_not_there_is_told(packages):
    with pytest.raises(RecipeError, match="environment: words: ModuleNotFoundError: taskset not found"):
        VerifiersEnvironment("words").load()


def test_a_version_with_another_interface_is_told(tmp_path, monkeypatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="pip install -U verifiers"):
        VerifiersEnvironment("words").load()
    del sys.modules["verifiers"]


@pytest.mark.parametrize(
    ("section", "command"),
    [
        (OpenEnv(url="http://there"), "pip install 'openenv-core'"),
        (Verifiers(environment="letters"), "pip install 'verifiers'"),
    ],
)
def test_a_missing_package_is_told_with_what_installs_it(section, command, monkeypatch):
    there = build.find_spec
    monkeypatch.setattr(build, "find_spec", lambda name: None if name in ("openenv", "verifiers") else there(name))
    with pytest.raises(ResourceError, match=command):
        build.check_environment(section)
