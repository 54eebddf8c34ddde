"""Stage rl with rollouts of `danlu serve`: equal to those of the trainer's own engine, whichever server is there."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders.served import Served, serving_rollouts, wait_until
from builders.tiny_world import World, start
from safetensors.torch import load_file
from test_rl_runs import recipe_file, run, without_times

from danlu.cli.main import main
from danlu.remote_engines.canary import FIRST_NUMBER
from danlu.remote_engines.danlu_server import DanluServer
from danlu.remote_engines.fleet import ServerFleet
from danlu.rl.rollout_processes import RolloutProcesses
from danlu.run.replay import replay

pytestmark = pytest.mark.usefixtures("module_tokenises_here")

FILTERED = {"samples": 4, "max_new_tokens": 6, "temperature": 0.7, "top_p": 0.9}
NO_FILTERS = {"temperature": 1.0, "top_p": 1.0}
EXACT: dict[str, Any] = {"numerics": "exact", "precision": "bf16", "steps": 4}


def http(*urls: str, **server: Any) -> dict[str, Any]:
    return {**FILTERED, "engine": "http", "urls": list(urls), "server": {"timeout_s": 20, **server}}


def same_run(one: Path, other: Path) -> bool:
    """Whether two runs drew the same answers and ended with the same weights, to the last bit."""
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, other)]
    answers = [(folder / "rollouts.jsonl").read_text() for folder in (one, other)]
    return answers[0] == answers[1] and all(weights[0][name].equal(weights[1][name]) for name in weights[0])


class Servers:
    """Servers in threads of this process, by name; each may end and come again at its port."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._folder, self._settings = folder, settings
        self._stacks: dict[str, ExitStack] = {}
        self._ports: dict[str, int] = {}

    def start(self, name: str) -> Served:
        stack = ExitStack()
        port = self._ports.get(name, 0)
        served = stack.enter_context(serving_rollouts(self._folder, port=port, **self._settings))
        self._ports[name], self._stacks[name] = int(served.root.rpartition(":")[2]), stack
        return served

    def end(self, name: str) -> None:
        self._stacks.pop(name).close()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"


@contextmanager
def servers(folder: Path, *names: str, **settings: Any) -> Iterator[Servers]:
    started = Servers(folder, **settings)
    try:
        for name in names:
            started.start(name)
        yield started
    finally:
        for name in list(started._stacks):
            started.end(name)


def at_answers(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], None]]) -> list[str]:
    """Has things done when so many answers to prompts of the run were asked for; the urls that were asked, in order."""
    real, asked, lock = DanluServer.answer, list[str](), threading.Lock()

    def answer(self: DanluServer, continuation: Any) -> Any:
        action = None
        if continuation.request.number < FIRST_NUMBER:
            with lock:
                asked.append(self.client.url)
                action = actions.get(len(asked))
        if action is not None:
            action()
        return real(self, continuation)

    monkeypatch.setattr(DanluServer, "answer", answer)
    return asked


def fleets(monkeypatch: pytest.MonkeyPatch) -> list[ServerFleet]:
    made: list[ServerFleet] = []
    real = ServerFleet.__init__

    def init(self: ServerFleet, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(ServerFleet, "__init__", init)
    return made


def test_two_servers_answer_as_the_trainer_would_to_the_last_bit(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = run(tiny_world, tmp_path / "own", rollout=FILTERED, **EXACT)
    asked = at_answers(monkeypatch, {})
    with servers(tiny_world.base, "one", "two", exact=True, dtype="bf16") as started:
        urls = [started.url("one"), started.url("two")]
        lines = run(tiny_world, tmp_path / "http", rollout=http(*urls, push=True, bucket_mib=1), **EXACT)
    assert [line["gap"] for line in lines] == [0.0] * 4 and all(line["ratio"] == 1 for line in lines)
    assert without_times(lines) == without_times(own) and same_run(tmp_path / "own", tmp_path / "http")
    assert all(asked.count(url) > 10 for url in urls)
    assert not (tmp_path / "http" / "hand-over" / "weights-4").exists()


def test_servers_answer_in_a_form_as_the_trainer_would(tiny_world: World, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    more = {**EXACT, "steps": 2}
    form: dict[str, Any] = {"samples": 4, "max_new_tokens": 12, "format": {"regex": "<[ae]{1,3}>"}}
    run(tiny_world, tmp_path / "own", rollout=form, **more)
    with servers(tiny_world.base, "one", exact=True, dtype="bf16") as started:
        lines = run(tiny_world, tmp_path / "http", rollout=http(started.url("one")) | form | NO_FILTERS, **more)
    assert same_run(tmp_path / "own", tmp_path / "http") and [line["gap"] for line in lines] == [0.0] * 2
    texts = [
        answer["text"]
        for line in (tmp_path / "http" / "rollouts.jsonl").read_text().splitlines()
        for answer in json.loads(line)["answers"]
    ]
    assert texts and all(re.fullmatch("<[ae]{1,3}>", text) for text in texts)


def test_a_run_goes_on_when_a_server_ends_and_when_it_comes_back(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tiny_world, tmp_path / "own", rollout=FILTERED, **EXACT)
    made = fleets(monkeypatch)
    with servers(tiny_world.base, "one", "two", exact=True, dtype="bf16") as started:
        urls = [started.url("one"), started.url("two")]

        def come_back() -> None:
            started.start("two")
            wait_until(lambda: len(made[0].usable) == 2)

        asked = at_answers(monkeypatch, {20: lambda: started.end("two"), 40: come_back})
        run(tiny_world, tmp_path / "http", rollout=http(*urls), **EXACT)
    assert same_run(tmp_path / "own", tmp_path / "http")
    assert set(asked[:20]) == set(urls) == set(asked[48:])
    said = capfd.readouterr().err
    assert "it is left out, and 1 rollout servers go on" in said
    assert f"{urls[1]} is there again with weights " in said


def test_no_server_is_left(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    with servers(tiny_world.base, "one", "two") as started:
        urls = [started.url("one"), started.url("two")]

        def end_both() -> None:
            started.end("one")
            started.end("two")

        at_answers(monkeypatch, {20: end_both})
        recipe = recipe_file(tiny_world, tmp_path / "run", rollout=http(*urls, reconnect_s=0.3), steps=4)
        assert main(["train", str(recipe)]) == 6
    assert "was not back within 0.3 s (reconnect_s)" in capfd.readouterr().err


def test_servers_that_round_otherwise_are_refused_where_numerics_are_exact(
    tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with servers(tiny_world.base, "one") as started:
        recipe = recipe_file(tiny_world, tmp_path / "run", rollout=http(started.url("one")), **EXACT)
        assert main(["train", str(recipe)]) == 4
    assert "--numerics fast in float32. Start it with --numerics exact --dtype bf16" in capfd.readouterr().err


@pytest.mark.distributed
def test_a_process_that_is_killed(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"numerics": "exact", "steps": 4}
    run(tiny_world, tmp_path / "own", rollout=FILTERED, **more)
    monkeypatch.setenv("SERVERS_KEY", "secret")
    flags = ["--rollouts", "--numerics", "exact", "--dtype", "fp32", "--cache-gib", "0.01", "--api-key", "secret"]
    flags += ["--weights-root", str(tmp_path)]
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    processes = []
    try:
        for log in logs:
            log.touch()
            processes.append(start(["serve", tiny_world.base, *flags, "--port", "0"], log))
        wait_until(lambda: all("(Ctrl-C ends)" in log.read_text() for log in logs))
        urls = [log.read_text().partition("/v1 answers")[0] for log in logs]
        asked = at_answers(monkeypatch, {20: processes[1].kill})
        run(tiny_world, tmp_path / "http", rollout=http(*urls, api_key_variable="SERVERS_KEY"), **more)
    finally:
        for process in processes:
            process.kill()
    assert same_run(tmp_path / "own", tmp_path / "http")
    assert set(asked[:20]) == set(urls) and set(asked[-16:]) == {urls[0]}  # of the last rollout


@pytest.mark.distributed
def test_answers_go_on_while_weights_are_pushed_and_one_server_ends(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asynchronous rollouts of servers: prompts once each, versions by token, and what one loses the other answers."""
    more: dict[str, Any] = {"numerics": "exact", "steps": 6, "checkpoint": {"every": 3, "keep": 9}}
    more |= {"objective": {"importance": {}}, "data": {"max_length": 96}}
    real = RolloutProcesses.update
    with servers(tiny_world.base, "one", "two", exact=True) as started:

        def update(self: RolloutProcesses, version: int, weights: Any) -> None:
            real(self, version, weights)
            if version == 3:
                started.end("two")

        monkeypatch.setattr(RolloutProcesses, "update", update)
        urls = [started.url("one"), started.url("two")]
        rollout = {**http(*urls, push=True, reconnect_s=20), "max_new_tokens": 40, "staleness": 2}
        lines = run(tiny_world, tmp_path / "run", rollout=rollout, **more)
    recorded = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [line["number"] for line in recorded] == list(range(24))
    assert lines[0]["gap"] == 0 and max(line["staleness_max"] for line in lines) <= 2
    versions = [version for line in recorded for answer in line["answers"] for version, _ in answer["versions"]]
    assert max(versions) > 2
    for line in recorded:
        for answer in line["answers"]:
            own = [version for version, _ in answer["versions"]]
            assert own == sorted(own) and line["step"] - 3 <= own[0] <= own[-1] <= line["step"] - 1
    assert f"warning: {urls[1]}" in (said := capfd.readouterr().err) and "it is left out, and 1 rollout servers" in said
    assert replay(tmp_path / "run", 6, log=lambda line: None).difference is None  # by the trainer's own engine
