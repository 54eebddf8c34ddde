"""Environments in processes of their own: replies, what is none, and what becomes of others when one hangs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from danlu.core.errors import RecipeError
from danlu.rewards import call_pool
from danlu.rewards.environments.protocol import EpisodeCall, Reply, TurnText
from danlu.rewards.environments.user_class import UserEnvironment
from danlu.rewards.environments.workers import EnvironmentWorkers

ENVIRONMENT = """
import os, random, time
from danlu.environment import Done, Turn

class Count:
    def __init__(self, goal=3):
        self.goal = goal

    def close(self):
        if os.path.isdir(self.name):
            open(os.path.join(self.name, "closed"), "w").close()

    def reset(self, row, seed):
        self.count, self.name, self.drawn = 0, row["name"], random.Random(seed).random()
        return f"hello {self.name}"

    async def step(self, answer):
        self.count += 1
        match answer:
            case "raise":
                raise ValueError("no such door")
            case "hang":
                time.sleep(60)
            case "wait":
                while not os.path.exists(self.name):
                    time.sleep(0.01)
            case "die":
                os._exit(7)
            case "text":
                return "a text"
            case "nan":
                return Done(float("nan"))
            case "two":
                return [Turn("one", "tool", name="f"), Turn("two", "tool", reward=2)]
            case "process":
                return Turn(str(os.getpid()))
            case "drawn":
                return Turn(str(self.drawn))
        return Done(1.0) if self.count == self.goal else Turn(f"{self.name} {self.count}", reward=0.25)

class NoStep:
    def reset(self, row):
        pass
"""


@pytest.fixture
def workers(tmp_path: Path):
    opened = []

    def open_(name: str = "Count", *, timeout_s: float = 20.0, count: int = 1, **arguments: object):
        file = tmp_path / "env.py"
        file.write_text(ENVIRONMENT)
        source = UserEnvironment.read(f"{file}:{name}", arguments)
        opened.append(EnvironmentWorkers(source, count=count, timeout_s=timeout_s))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


class Played:
    """An episode as the trainer keeps it."""

    def __init__(self, number: int = 0, sample: int = 0, name: str = "ann") -> None:
        self.key, self.row = (number, sample), {"name": name}
        self.answers: tuple[str, ...] = ()
        self.replies: tuple[Reply, ...] = ()

    def call(self, answer: str | None = None) -> EpisodeCall:
        self.answers += () if answer is None else (answer,)
        return EpisodeCall(self.key, self.row, 5, self.answers, self.replies)

    def take(self, reply: Reply) -> Reply:
        self.replies += (reply,)
        return reply


def play(workers: EnvironmentWorkers, episode: Played, *answers: str) -> list[Reply]:
    return [
        episode.take(workers.replies([episode.call(answer)])[0]) for answer in ((None,) if not episode.replies else ())
    ] + [episode.take(workers.replies([episode.call(answer)])[0]) for answer in answers]


def test_an_episode_is_played_turn_by_turn(workers):
    said = play(workers(), Played(), "a", "two", "b")
    assert said == [
        Reply((TurnText("hello ann"),)),
        Reply((TurnText("ann 1"),), 0.25),
        Reply((TurnText("one", "tool", "f"), TurnText("two", "tool")), 2.0),
        Reply((), 1.0, done=True),
    ]
    assert play(workers(goal=1), Played(), "a")[-1].done  # control: its arguments reach it


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", r"ValueError: no such door \(env.py:21\)"),
        ("die", "its process ended with exit code 7"),
        ("hang", "no answer within 2 s"),
        ("text", "step returns a Turn, several of them or Done, and gave str"),
        ("nan", "its reward is nan"),
    ],
)
def test_what_fails_costs_no_other_episode(workers, answer, reason):
    pool, fails, goes_on = workers(timeout_s=2.0 if answer == "hang" else 20.0), Played(0), Played(1, name="bob")
    for episode in (fails, goes_on):
        play(pool, episode, "a")
    failed, reply = pool.replies([fails.call(answer), goes_on.call("b")])
    assert failed.failure is not None and re.search(reason, failed.failure)
    assert reply == Reply((TurnText("bob 2"),), 0.25)  # its process may be another, in which it was repeated


def test_what_does_not_repeat_itself_is_told(workers):
    pool, hangs, other = workers(timeout_s=2.0), Played(0), Played(1)
    play(pool, hangs)
    play(pool, other, "process")  # what it says hangs on its process
    _, reply = pool.replies([hangs.call("hang"), other.call("b")])
    assert reply.failure is not None and "repeated it says something else" in reply.failure


def test_after_many_that_hang_the_others_are_not_called(workers, monkeypatch):
    monkeypatch.setattr(call_pool, "MOST_TIMEOUTS", 2)
    pool = workers(timeout_s=1.0)
    episodes = [Played(number) for number in range(6)]
    for episode, reply in zip(episodes, pool.replies([each.call() for each in episodes]), strict=True):
        episode.take(reply)
    failures = [reply.failure or "" for reply in pool.replies([each.call("hang") for each in episodes])]
    assert sum("it was not called: the 2 calls before" in failure for failure in failures) == 4


def test_the_seed_of_a_prompt_is_its_own(workers):
    pool = workers()
    first, again, other = Played(0), Played(1), Played(2)
    texts = [play(pool, episode, "drawn")[-1].turns[0].text for episode in (first, again)]
    play(pool, other)
    reply = pool.replies([EpisodeCall((3, 0), {"name": "ann"}, 6, ("drawn",), (Reply((TurnText("hello ann"),)),))])[0]
    assert texts[0] == texts[1] != reply.turns[0].text


def test_what_cannot_be_run_is_told_before_the_first_episode(workers):
    with pytest.raises(RecipeError, match=r"environment.arguments: Count: got an unexpected keyword argument 'goals'"):
        workers(goals=3).start()
    with pytest.raises(RecipeError, match=r"environment: .*env.py has no function 'Cout'; it has Count, NoStep"):
        workers("Cout")
    (reply,) = workers("NoStep").replies([Played().call()])
    assert reply.failure is not None and "NoStep has no step" in reply.failure


def test_one_that_takes_long_holds_up_none_in_another_process(workers, tmp_path):
    pool, slow, others = workers(count=2), Played(0, name=str(tmp_path / "go")), [Played(1), Played(2)]
    for episode in (slow, others[0]):
        play(pool, episode)
    pool.ask(slow.call("wait"))
    pool.ask(others[0].call("a"))
    pool.ask(others[1].call())  # of two processes with one each it takes the first: behind the one that waits
    replies = dict(received(pool, 1))
    assert replies == {(1, 0): Reply((TurnText("ann 1"),), 0.25)}
    (tmp_path / "go").touch()
    assert dict(received(pool, 2)).keys() == {(0, 0), (2, 0)}


def received(pool: EnvironmentWorkers, count: int) -> list[tuple[tuple[int, int], Reply]]:
    replies: list[tuple[tuple[int, int], Reply]] = []
    while len(replies) < count:
        replies += pool.receive()
    return replies


def test_the_environment_of_an_episode_that_is_over_is_closed(workers, tmp_path):
    pool, over, other = workers(), Played(0, name=str(tmp_path)), Played(1)
    for episode in (over, other):
        play(pool, episode, "a")
    pool.end_episode(over.key)
    assert play(pool, other, "b") == [Reply((TurnText("ann 2"),), 0.25)]  # it is called after the other is closed
    assert (tmp_path / "closed").exists()
