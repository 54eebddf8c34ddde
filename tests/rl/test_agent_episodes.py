"""Rounds of agents: who is answered together, who is cut off, left out, or given up."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from builders.tiny_world import tiny_world

from danlu.data.prompts import Prompt
from danlu.data.tokenizer import load_tokenizer
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.parallel.comm import ALONE
from danlu.recipe.sections import Agent
from danlu.rewards.environments.agent_processes import AgentProcesses
from danlu.rewards.environments.agents import (
    AgentCall,
    AgentCommand,
    AgentFailed,
    AgentFunction,
    as_reward,
    reward_of_output,
)
from danlu.rl.agent_episodes import AgentEpisodes
from danlu.rl.turn_rendering import TurnRenderer
from danlu.serving.agent_endpoint import AgentEndpoint

AGENT = """
import asyncio, json, os, random, time, urllib.request
from danlu.environment import Done

def ask(base_url, api_key, messages):
    body = json.dumps({"messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def solve(row, messages, base_url, api_key, model, seed):
    do = row["do"]
    for turn in range(row.get("turns", 1)):
        text = ask(base_url, api_key, messages)
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    if do == "hang":
        time.sleep(1000)
    if do == "die":
        os._exit(3)
    if do == "draw":
        return random.random()
    return {"none": None, "done": Done(0.5), "wrong": "a lot", "nan": float("nan")}[do]
"""


@dataclass
class Engine:
    """Answers all that it is asked alike, and keeps it."""

    tokenizer: object
    asked: list = field(default_factory=list)

    def generate(self, requests):
        self.asked.append(list(requests))
        tokens = [*self.tokenizer.encode("left"), self.tokenizer.end_of_turn_ids[0]]
        values = [-1.0] * len(tokens)
        return [
            Completion(request.number, 0, tokens, values, values, None, [0] * len(tokens), "left", "stop")
            for request in requests
        ]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays an agent for each row, all by one process that begins them."""
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    tokenizer = load_tokenizer(str(tiny_world().tokenizer))
    agents = AgentProcesses(AgentFunction.read(f"{file}:solve", {}))
    endpoint = AgentEndpoint("127.0.0.1", 0, SamplingOptions(), tokenizer)
    end = frozenset(tokenizer.end_of_turn_ids)
    ids = tuple(tokenizer.encode(tokenizer.template().render([{"role": "user", "content": "Which?"}], prompt=True)))

    def play(*rows, samples=1, max_length=200, **section):
        engine = Engine(tokenizer)
        renderer = TurnRenderer(tokenizer, end, silent_ids=end)
        own = Agent(path="agent.py:solve", **section)
        episodes = AgentEpisodes(agents, endpoint, renderer, own, max_length, 0, ALONE)
        prompts = [Prompt(ids, row, "Which?", "rows.jsonl:1") for row in rows]
        requests = [Request(number, ids, max_new_tokens=50, samples=samples) for number in range(len(rows))]
        return episodes.answer(engine.generate, requests, prompts), engine

    yield play
    agents.close()
    endpoint.close()


def test_all_that_run_are_answered_together(play):
    """Also where others begin in the place of those that have ended."""
    rows = [{"do": "done", "turns": turns} for turns in (1, 3, 2, 1)]
    episodes, engine = play(*rows, workers=2)
    rounds = [sorted(request.number % (1 << 40) for request in asked) for asked in engine.asked]
    assert rounds == [[0, 1], [1, 2], [1, 2], [3]]
    assert [(episode.answers, episode.reward, episode.finish) for episode in episodes] == [
        (turns, 0.5, "stop") for turns in (1, 3, 2, 1)
    ]
    assert all(len(episode.segments) == 1 for episode in episodes)
    _, all_at_once = play(*rows)
    assert [len(asked) for asked in all_at_once.asked] == [4, 2, 1]
    assert len({request.number for request in all_at_once.asked[0]}) == 4


@pytest.mark.parametrize(
    ("row", "section", "finish", "reward", "failure"),
    [
        ({"do": "none"}, {}, "stop", None, None),
        ({"do": "die"}, {}, "abort", None, "its process ended with exit code 3"),
        (
            {"do": "wrong"},
            {},
            "abort",
            None,
            "TypeError: an agent returns a number, None or Done, and gave str: 'a lot'",
        ),
        ({"do": "nan"}, {}, "abort", None, "ValueError: its reward is nan"),
        ({"do": "done", "turns": 0}, {}, "abort", None, "it ended without an answer of the policy"),
        ({"do": "hang"}, {"timeout_s": 0.5}, "abort", None, "it neither asked nor ended within 0.5 s"),
        ({"do": "done", "turns": 3}, {"max_turns": 2}, "turns", 0.0, None),
        ({"do": "done", "turns": 9}, {"max_length": 40}, "length", 0.0, None),
    ],
)
def test_how_an_episode_ends(play, row, section, finish, reward, failure):
    (episode,), _ = play(row, **section)
    assert (episode.finish, episode.reward) == (finish, reward)
    assert (episode.failure or "").startswith(failure or "") and (episode.failure is None) == (failure is None)


def test_random_numbers_of_agents_are_those_of_their_samples(play):
    (first, second), _ = play({"do": "draw"}, samples=2)
    (again, _), _ = play({"do": "draw"}, samples=2)
    assert first.reward == again.reward != second.reward


def test_agents_end_with_the_process_that_began_them(tmp_path):
    """Which is ended here with no word to them, as the kernel would."""
    file = tmp_path / "agent.py"
    file.write_text(
        "import os, time\ndef solve(row):\n    open(row['file'], 'w').write(str(os.getpid()))\n    time.sleep(1000)\n"
    )
    agents = AgentProcesses(AgentFunction.read(f"{file}:solve", {}))
    pids = tmp_path / "0", tmp_path / "1"
    for sample, pid in enumerate(pids):
        agents.begin(AgentCall((0, sample), {"file": str(pid)}, [], 1, "http://here", "key"))
    processes = [int(until(lambda pid=pid: pid.exists() and pid.read_text())) for pid in pids]
    agents.end((0, 0))
    until(lambda: not is_running(processes[0]))
    assert is_running(processes[1])
    agents.close()
    until(lambda: not is_running(processes[1]))


def until(condition):
    while not (value := condition()):
        time.sleep(0.01)
    return value


def is_running(process):
    """Whether it is there, and more than what its parent has not looked at yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("output", "reward"),
    [(b"", None), (b"looking\n0.5\n", 0.5), (b'{"reward": 2, "steps": 3}\n\n', 2.0), (b"null", None)],
)
def test_the_last_line_of_a_command_is_its_reward(output, reward):
    assert reward_of_output(output) == reward


@pytest.mark.parametrize("output", [b"reward: 1", b"{}", b"NaN", b"1\nbye"])
def test_a_last_line_that_is_no_reward_is_told(output):
    with pytest.raises(AgentFailed, match="the last line of its output is no reward: "):
        reward_of_output(output)


def test_a_command_that_fails_says_what_it_said_last():
    call = AgentCall((0, 0), {"question": "2"}, [], 1, "http://here", "key")
    ok = AgentCommand("cat > /dev/null; echo $OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL >&2; echo 0.25")
    assert ok.load()(call) == 0.25
    with pytest.raises(AgentFailed, match="it ended with exit code 4: no door"):
        AgentCommand("echo no door >&2; exit 4").load()(call)


def test_rewards_are_finite_numbers():
    assert as_reward(True) == 1.0 and as_reward(None) is None
    with pytest.raises(ValueError, match="inf"):
        as_reward(math.inf)
