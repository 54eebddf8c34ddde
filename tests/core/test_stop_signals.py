from __future__ import annotations

import os
import signal
import threading

import pytest

from danlu.core.errors import Stopped
from danlu.core.stop_signals import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (signal.SIGINT, "stopping after this step; press Ctrl-C again to stop at once"),
        (signal.SIGTERM, "stopping after this step; send SIGTERM again to stop at once"),
    ],
)
def test_the_first_signal_asks_and_the_second_stops(number: signal.Signals, line: str) -> None:
    said: list[str] = []
    with StopRequest(said.append) as stop:
        assert not stop.requested
        assert stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal == number
        assert stop.exit_code == 128 + number
        assert said == [line]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert said == [line]


@pytest.mark.parametrize("at_once", [False, True])
def test_signals_that_come_together_are_one_request(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [100.0]
    monkeypatch.setattr("danlu.core.stop_signals.time.monotonic", lambda: now[0])
    with StopRequest(said.append, together_s=1.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)  # from a scheduler
        now[0] += 0.9
        os.kill(os.getpid(), signal.SIGTERM)  # handed on by the launcher, which got it too
        assert stop.requested and stop.exit_code == 143
        stop.at_once = at_once
        now[0] += 0 if at_once else 0.2
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
    assert said == ["stopping after this step; send SIGTERM again to stop at once"]


def test_a_warning_and_a_closed_terminal_ask_and_never_insist() -> None:
    said: list[str] = []
    with StopRequest(said.append) as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM):
            assert signal.getsignal(number) == stop._handle
            try:
                os.kill(os.getpid(), number)  # the SIGTERM is the first: the run goes on saving
            except Stopped:
                pytest.fail(f"{number} insisted")
            assert stop.requested and stop.exit_code == 128 + number
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
    assert said == ["SIGUSR1: stopping after this step; press Ctrl-C twice to stop at once"]
    with StopRequest() as stop:
        stop.at_once = True  # there is nothing to save
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGUSR2)


def test_under_nohup_a_closed_terminal_says_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_announcement_that_nobody_reads_ends_nothing() -> None:
    reading, writing = os.pipe()
    kept = os.dup(2)
    os.close(reading)
    os.dup2(writing, 2)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writing)


def test_at_once_the_first_signal_stops_and_says_its_exit_code() -> None:
    said: list[str] = []
    with StopRequest(said.append) as stop:
        stop.at_once = True
        with pytest.raises(Stopped, match="stopped at once") as caught:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.exit_code == stop.exit_code == 143
    assert isinstance(caught.value, KeyboardInterrupt)  # what handles ordinary errors lets it pass
    assert said == []


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_the_line_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "\nstopping after this step; press Ctrl-C again to stop at once\n"


def test_in_another_thread_signals_stay_the_programs() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    inside: list[list[object]] = []

    def enter() -> None:
        with StopRequest() as stop:
            inside.append([signal.getsignal(number) for number in STOP_SIGNALS])
            assert not stop.requested and stop.exit_code == 0

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]
    enter()  # control: in the main thread they are handled
    assert inside[1] != before and [signal.getsignal(number) for number in STOP_SIGNALS] == before
