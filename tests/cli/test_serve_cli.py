"""`danlu serve`: what it says before it serves, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from builders.adapter_folders import adapter_folder
from builders.served import PATIENCE_S, wait_until
from builders.tiny_world import World, start

from danlu.cli.main import main
from danlu.inference import load_model
from danlu.recipe import sections


@contextmanager
def serving(log: Path, *arguments: Any) -> Iterator[tuple[Any, str]]:
    """A process that serves, and the address it says."""
    log.touch()
    process = start(["serve", *arguments, "--port", "0"], log)
    try:
        wait_until(lambda: "(Ctrl-C ends)" in log.read_text() or not process.is_alive())
        address = re.search(r"^(http://127\.0\.0\.1:\d+/v1) answers with ", log.read_text(), re.MULTILINE)
        assert address is not None, log.read_text()
        yield process, address[1]
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_signal_ends_it_and_closes_streams(endless: Path, tmp_path: Path, number: int, code: int) -> None:
    with serving(tmp_path / "log", endless, "--cache-gib", "0.1") as (process, url):
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)
        reasons: list[Any] = []

        def read() -> None:
            for chunk in client.completions.create(model="endless", prompt="a", max_tokens=10_000, stream=True):
                reasons.append(chunk.choices[0].finish_reason)

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        wait_until(lambda: len(reasons) > 2)
        os.kill(process.pid, number)
        process.join(PATIENCE_S)
        assert process.exitcode == code, (tmp_path / "log").read_text()
        reading.join(PATIENCE_S)
        assert reasons[-1] == "abort" and set(reasons[:-1]) == {None}
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_ctrl_c_again_and_again_prints_no_traceback(endless: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", endless) as (process, _):
        while process.is_alive():
            os.kill(process.pid, signal.SIGINT)
            process.join(0.005)
        assert process.exitcode == 130
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["interrupted"]


@contextmanager
def unread_stream(url: str) -> Iterator[None]:
    """A client that does not read its stream, once the server can send no more of it."""
    body = json.dumps({"prompt": "a", "max_tokens": 10_000, "n": 128, "logprobs": 20, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].removesuffix("/v1")))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

        def generated_tokens() -> int:
            with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=PATIENCE_S) as response:
                return int(re.search(rb"^danlu_tokens_generated_total (\d+)", response.read(), re.MULTILINE)[1])

        wait_until(lambda: generated_tokens() > 8000)  # of 1.7 kB each, and a socket holds 4 MiB at the most
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "why"),
    [
        ([signal.SIGINT, signal.SIGINT], "Ctrl-C came again"),
        ([signal.SIGTERM, signal.SIGINT], "Ctrl-C came again"),
        ([signal.SIGINT], "their answers were not read within 5 s"),
    ],
)
def test_a_client_that_does_not_read_is_cut_off_in_the_end(
    endless: Path, tmp_path: Path, signals: list[int], why: str
) -> None:
    log = tmp_path / "log"
    with serving(log, endless, "--cache-gib", "0.3") as (process, url), unread_stream(url):
        for number in signals:
            os.kill(process.pid, number)
            process.join(1)  # the end of what is read
        process.join(PATIENCE_S)
        assert process.exitcode == 130
    lines = log.read_text().splitlines()
    assert lines[1] == f"requests cut off: 1 ({why})"
    assert lines[2].startswith("POST  /v1/completions  cut off  endless  1 + ") and lines[3:] == ["interrupted"]


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading weights fails the test."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(load_model, "load_model", refuse)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_port_that_is_taken(tiny_world: World, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny_world.base), "--port", str(port)]) == 6
    assert capsys.readouterr().err == (
        f"error: 127.0.0.1, port {port}: another program listens there. End it, or take another port with --port (0: "
        "any that is free)\n"
    )


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--host", "no.such.host.invalid"], 6, "error: --host no.such.host.invalid: no address of this machine"),
        (["--host", "192.0.2.1", "--port", "0"], 6, "error: 192.0.2.1, port 0: no address of this machine. 127.0.0.1 "),
        (["--port", "65536"], 2, "error: Invalid value for '--port'"),
        (["--cache-gib", "0"], 2, "error: Invalid value for '--cache-gib'"),
        (["--api-key", ""], 2, "error: --api-key: an empty key would let everybody in"),
        (["--weights-root", "."], 2, "error: --weights-root .: weights are read with --rollouts only; leave it out"),
        (["--rollouts", "--weights-root", "nowhere"], 2, "error: --weights-root nowhere: there is no such folder"),
        (["--seed", "-1"], 2, "error: --seed: -1 is out of range"),
        (["--adapter", "nowhere"], 4, "error: nowhere: "),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    tiny_world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["serve", str(tiny_world.base), *arguments]) == code
    assert capsys.readouterr().err.startswith(message)


def test_a_server_that_anyone_can_reach_without_a_key_is_warned_of(
    tiny_world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from danlu.serving import server

    monkeypatch.setattr(server.Server, "listen", lambda self: None)
    monkeypatch.delenv("DANLU_API_KEY", raising=False)

    def said(*arguments: str) -> str:
        assert main(["serve", str(tiny_world.base), "--port", "0", "--cache-gib", "0.01", *arguments]) == 0
        return capsys.readouterr().err

    warning = "warning: anyone who can reach 0.0.0.0 can use this server: --api-key says who may\n"
    assert said("--host", "0.0.0.0") == warning
    assert said("--host", "0.0.0.0", "--api-key", "x") == said() == said("--host", "localhost") == ""
    monkeypatch.setenv("DANLU_API_KEY", "x")
    assert said("--host", "0.0.0.0") == ""


def test_a_server_of_rollouts_without_a_key_makes_one(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from danlu.serving import server

    options: list[server.ServerOptions] = []
    monkeypatch.setattr(server.Server, "listen", lambda self: options.append(self._options))
    monkeypatch.delenv("DANLU_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str) -> str:
        flags = ["--port", "0", "--cache-gib", "0.01", "--rollouts", *arguments]
        assert main(["serve", str(tiny_world.base), *flags]) == 0
        return capsys.readouterr().err

    for host in ("127.0.0.1", "0.0.0.0"):
        text = said("--host", host)
        (file,) = (tmp_path / "cache" / "danlu" / "server-keys").iterdir()
        key = file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600 and len(key) >= 40
        assert text.count(key) == 1 and str(file) in text.replace("\n", " ") and "warning" not in text
        assert options[-1].api_key == key and options[-1].leaves_key and options[-1].weights_root == tmp_path
        file.unlink()
    assert options[0].api_key != options[1].api_key
    assert said("--api-key", "mine", "--weights-root", "cache") == ""  # control
    assert options[-1].api_key == "mine" and not options[-1].leaves_key
    assert options[-1].weights_root == Path("cache")
    assert not any((tmp_path / "cache" / "danlu" / "server-keys").iterdir())


def test_an_adapter_as_the_model_comes_first(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from danlu.serving import server

    names: list[Any] = []
    monkeypatch.setattr(server.Server, "listen", lambda self: names.append(self._models.names))
    folders = [adapter_folder(tiny_world.base, tmp_path / name, sections.Lora()) for name in ("a", "base")]
    arguments = ["serve", str(folders[0]), "--adapter", str(folders[1]), "--port", "0", "--cache-gib", "0.01"]
    assert main(arguments) == 0
    assert names == [("a", "base-base", "base")]
    assert main([*arguments, "--name", "a"]) == 2
    assert capsys.readouterr().err == "error: --name: a is the name of an adapter already\n"


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(tiny_world: World, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; from danlu.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(tiny_world.base)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 6
    assert done.stderr == (
        f"error: danlu serve needs the package {package}, which is not installed: pip install 'danlu[serve]'\n"
    )
