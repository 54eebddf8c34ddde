"""Many rewards of many answers: what fails costs nobody else's number, is told, and leaves nothing behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from danlu.core.errors import RecipeError, ResourceError
from danlu.rewards import call_pool
from danlu.rewards.code import Code
from danlu.rewards.function import UserFunction
from danlu.rewards.programs.sandbox import find_sandbox
from danlu.rewards.protocol import JudgedAnswer, StepRewards
from danlu.rewards.runner import RewardPart, RewardRunner
from danlu.rewards.text import Exact, Length, Pattern

FUNCTIONS = """
import math, os, subprocess, sys, time

def fickle(completion):
    match completion:
        case "raise":
            raise ValueError("no digits")
        case "exit":
            sys.exit(3)
        case "none":
            return None
        case "nan":
            return math.nan
        case "inf":
            return math.inf
        case "text":
            return "good"
        case "two\\nsteps":
            return [0.25, 0.5]
        case "a\\nbroken\\nstep":
            return [0.25, math.nan, 1.0]
        case "hang":
            time.sleep(60)
        case "hang in C":
            sum(range(10**12))
        case "die":
            os._exit(7)
        case "crash":
            os.kill(os.getpid(), 9)
        case "print":
            print("chatter")
            print("chatter", file=sys.stderr)
            input_is_empty = sys.stdin.read() == ""
            return float(input_is_empty)
        case "close":
            os.closerange(3, 20)
        case "start":
            child = subprocess.Popen(["sleep", "61"])
            return child.pid
    return float(len(completion))

def slow_first(completion):
    time.sleep(0.2 if completion == "a" else 0)
    return float(len(completion))

def process(completion):
    return os.getpid()

calls = []
def batched(prompts, completions, answer, **columns):
    calls.append(len(completions))
    if "raise" in completions:
        raise RuntimeError("whole batch")
    if "die" in completions:
        os._exit(7)
    return [len(calls) * 100 + len(completions) + (a == c) for a, c in zip(answer, completions)]

def batched_process(completions):
    return [os.getpid()] * len(completions)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def runner(file):
    """Makes a runner of functions, by name, and other rewards."""
    runners = []

    def make(*rewards, timeout_s=20.0, workers=2):
        parts = [
            RewardPart(reward, UserFunction.read(f"{file}:{reward}"))
            if isinstance(reward, str)
            else RewardPart(type(reward).__name__, reward)
            for reward in rewards
        ]
        runners.append(RewardRunner(parts, timeout_s=timeout_s, workers=workers))
        return runners[-1]

    yield make
    for each in runners:
        each.close()


def judged(*texts):
    return [JudgedAnswer(text, {"answer": "right"}, prompt="?", tokens=len(text)) for text in texts]


def by_answer(table):
    return {failure.answer: failure.reason for failure in table.failures}


def is_running(pid):
    """Not so for a process that has ended, but of which nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_soon(pid, seconds=60.0):  # on a machine that has much else to do
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_values_stand_by_answer_and_reward(runner):
    table = runner("slow_first", Exact("answer"), Pattern("^b+$"), "batched").score(judged("a", "bb", "right"))
    assert table.values.dtype == np.float64
    assert table.values.tolist() == [[1, 0, 0, 103], [2, 0, 1, 103], [5, 1, 0, 104]]
    assert not table.failures and not table.unjudged.any()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "ValueError: no digits (my_rewards.py:7)"),
        ("exit", "SystemExit: 3 (my_rewards.py:9)"),
        ("none", "it gave None"),
        ("nan", "it gave nan"),
        ("inf", "it gave inf"),
        ("text", "TypeError: a reward is a number or None, and the function gave str: 'good' (function.py:"),
        ("die", "its process ended with exit code 7"),
        ("crash", "its process was ended by SIGKILL"),
    ],
)
def test_a_failure_is_told_and_costs_only_its_own_answer(runner, text, reason):
    many_rewards = runner("fickle", Length(most=1))
    table = many_rewards.score(judged("a", text, "ccc", "dddd"))
    assert np.isnan(table.values).tolist() == [[False, False], [True, False], [False, False], [False, False]]
    assert np.delete(table.values[:, 0], 1).tolist() == [1, 3, 4]
    (failure,) = table.failures
    assert (failure.reward, failure.answer) == ("fickle", 1) and failure.reason.startswith(reason)
    # It fails, and what length says of the answer is no sum; None leaves out its own part.
    assert table.unjudged.tolist() == [False, text != "none", False, False] and failure.declined is (text == "none")
    assert many_rewards.score(judged("a", "bb")).values[:, 0].tolist() == [1, 2], "the runner is of no more use"


def test_rewards_of_steps_come_out_of_their_process_and_are_summed(runner):
    table = runner(Length(most=99), "fickle").score(judged("plain", "two\nsteps", "a\nbroken\nstep"))
    assert table.values[:2, 1].tolist() == [5.0, 0.75] and np.isnan(table.values[2, 1])
    assert table.steps == {(1, 1): StepRewards((3, 9), (0.25, 0.5))}
    assert by_answer(table) == {2: "it gave nan for a step"}


@pytest.mark.parametrize("text", ["hang", "hang in C"])
def test_a_reward_that_hangs_loses_its_process_and_no_number(runner, text):
    # One process: the answers behind the one that hangs have to wait for another. A second is long for these, even on a
    # machine that is busy with something else.
    table = runner("fickle", timeout_s=1.0, workers=1).score(judged("a", text, "ccc"))
    assert table.values[[0, 2], 0].tolist() == [1, 3]
    assert by_answer(table) == {1: "no answer within 1 s"}
    assert table.unjudged.tolist() == [False, True, False]


def test_a_reward_that_always_hangs_is_given_up(runner, monkeypatch):
    monkeypatch.setattr(call_pool, "MOST_TIMEOUTS", 2)
    table = runner("fickle", "slow_first", timeout_s=0.6, workers=1).score(judged(*["hang"] * 12))
    assert np.isnan(table.values[:, 0]).all() and (table.values[:, 1] == 4).all()
    reasons = [failure.reason for failure in table.failures]
    assert reasons.count("no answer within 0.6 s") == 2
    assert reasons.count("it was not called: the 2 calls before took longer than 0.6 s") == 10


def test_a_reward_that_hangs_now_and_then_is_not_given_up(runner, monkeypatch):
    monkeypatch.setattr(call_pool, "MOST_TIMEOUTS", 2)
    table = runner("fickle", timeout_s=0.8, workers=1).score(judged("hang", "a", "hang", "bb"))
    assert table.values[[1, 3], 0].tolist() == [1, 2]
    assert by_answer(table) == dict.fromkeys((0, 2), "no answer within 0.8 s")


def test_a_reward_whose_process_ends_again_and_again_is_asked_all_the_same(runner, monkeypatch):
    monkeypatch.setattr(call_pool, "MOST_TIMEOUTS", 2)  # of which none of these is one
    table = runner("fickle", workers=1).score(judged("die", "die", "die", "a"))
    assert table.values[3, 0] == 1 and set(by_answer(table)) == {0, 1, 2}


def test_a_pattern_that_backtracks_without_end_hangs_only_itself(runner):
    table = runner(Pattern("(a+)+$"), timeout_s=1.0).score(judged("a" * 60 + "b", "aaa"))
    assert by_answer(table) == {0: "no answer within 1 s"} and table.values[1, 0] == 1


def test_functions_of_batches_are_called_once_and_stay_in_their_process(runner):
    many_rewards = runner("batched", "batched_process", "process")
    first, second = (many_rewards.score(judged("x", "right", "y", "z")).values for _ in range(2))
    assert first[:, 0].tolist() == [104, 105, 104, 104] and second[:, 0].tolist() == [204, 205, 204, 204]
    assert len({*first[:, 1], *second[:, 1]}) == 1, "what it has loaded is somewhere else"
    assert os.getpid() not in {*first[:, 1], *first[:, 2]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [("raise", "RuntimeError: whole batch (my_rewards.py:"), ("die", "its process ended with exit code 7")],
)
def test_a_failing_batch_costs_no_other_reward(runner, text, reason):
    table = runner("batched", "slow_first").score(judged("x", text))
    assert np.isnan(table.values[:, 0]).all() and table.values[:, 1].tolist() == [1, len(text)]
    assert [failure.answer for failure in table.failures] == [0, 1]
    assert all(failure.reason.startswith(reason) for failure in table.failures)


def test_what_a_reward_prints_and_reads_is_not_the_conversation(runner):
    table = runner("fickle").score(judged("print", "close", "bb"))
    assert table.values[[0, 2], 0].tolist() == [1, 2]
    assert 1 in by_answer(table), "closing the pipes cannot give a number"


def test_no_answers_and_no_rewards(runner):
    assert runner("fickle").score([]).values.shape == (0, 1)
    assert runner().score(judged("a")).values.shape == (1, 0)


def test_a_row_without_the_column_costs_only_its_own_answer(runner):
    answers = [JudgedAnswer("1", {"answer": "1"}), JudgedAnswer("1", {"answr": "1"})]
    table = runner(Exact("answer")).score(answers)
    assert table.values[0, 0] == 1
    assert by_answer(table)[1].startswith("KeyError: no column 'answer' in this row; it has 'answr' (")


def test_processes_stay_from_score_to_score_and_end_with_the_runner(runner):
    many_rewards = runner("process", workers=1)
    pids = {int(many_rewards.score(judged("a")).values[0, 0]) for _ in range(3)}
    (pid,) = pids
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)  # between two calls: none of them is to blame
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its first thread may end before the others: a zombie till then
    (other,) = {int(many_rewards.score(judged("a")).values[0, 0])}
    assert other != pid and is_running(other)
    many_rewards.close()
    assert not is_running(other)


def test_large_rows_and_many_answers(runner):
    answers = [JudgedAnswer("a" * number, {"text": "x" * 200_000, "n": number}) for number in range(60)]
    assert runner("fickle", "slow_first").score(answers).values.tolist() == [[n, n] for n in range(60)]


def test_what_a_reward_started_ends_with_its_process(runner):
    many_rewards = runner("fickle")
    pid = int(many_rewards.score(judged("start")).values[0, 0])
    assert is_running(pid)
    many_rewards.close()
    assert ends_soon(pid)


def test_problems_of_all_functions_are_told_at_the_start(file, runner):
    parts = [RewardPart("a", UserFunction.read(f"{file}:nothing"))]
    file.with_name("broken.py").write_text("1 / 0")
    parts.append(RewardPart("b", UserFunction.read(f"{file.with_name('broken.py')}:f")))
    with RewardRunner(parts, workers=1) as many_rewards, pytest.raises(RecipeError) as error:
        many_rewards.start()
    first, second = error.value.problems
    assert "has no function 'nothing'; it has fickle, slow_first" in first
    assert "broken.py: the file raises ZeroDivisionError: division by zero (broken.py:1)" in second


@pytest.mark.parametrize(
    ("content", "limit_s", "message"),
    [
        ("import time; time.sleep(60)", 0.3, "no answer within"),
        ("import os; os._exit(5)", 60.0, "ended with exit code 5"),  # a process takes its time to start
    ],
)
def test_a_file_that_cannot_be_run(tmp_path, monkeypatch, content, limit_s, message):
    monkeypatch.setattr(call_pool, "LOAD_TIMEOUT_S", limit_s)
    path = tmp_path / "slow.py"
    path.write_text(content)
    part = RewardPart("a", UserFunction.read(f"{path}:f"))
    error = pytest.raises(ResourceError, match=f"rewards: loading {path}: .*{message}")
    with RewardRunner([part], timeout_s=0.1) as many_rewards, error:
        many_rewards.start()


def test_a_process_that_does_not_start_again(tmp_path):
    """A file that can be run only once, as one that takes a port or a lock."""
    path, marker = tmp_path / "once.py", tmp_path / "marker"
    path.write_text(
        f"open({str(marker)!r}, 'x')\nimport os\n"
        "def f(completion):\n    return os._exit(1) if completion == 'die' else 1\n"
    )
    with RewardRunner([RewardPart("a", UserFunction.read(f"{path}:f"))], workers=1) as many_rewards:
        table = many_rewards.score(judged("a", "die", "b", "c"))
        assert table.values[0, 0] == 1 and np.isnan(table.values[1:, 0]).all()
        assert "could not be started again: rewards: " in by_answer(table)[3] and "FileExists" in by_answer(table)[3]
        marker.unlink()
        assert many_rewards.score(judged("a")).values[0, 0] == 1


def test_others_do_the_work_of_a_process_that_does_not_start(tmp_path):
    """Here the second process, which the first one waits for before it answers."""
    path, marker, tried = tmp_path / "once.py", tmp_path / "marker", tmp_path / "tried"
    path.write_text(
        "import pathlib, time\n"
        f"marker, tried = pathlib.Path({str(marker)!r}), pathlib.Path({str(tried)!r})\n"
        "if marker.exists():\n    tried.touch()\n"
        "marker.touch(exist_ok=False)\n"
        "def f(completion):\n"
        "    while not tried.exists():\n        time.sleep(0.01)\n"
        "    time.sleep(0.02)\n"
        "    return len(completion)\n"
    )
    with RewardRunner([RewardPart("a", UserFunction.read(f"{path}:f"))], workers=2, timeout_s=60) as many_rewards:
        table = many_rewards.score(judged(*["a", "bb"] * 8))
    assert tried.exists() and table.values[:, 0].tolist() == [1, 2] * 8 and not table.failures


def test_modules_beside_the_file_can_be_imported(tmp_path):
    (tmp_path / "beside_it.py").write_text("NUMBER = 5\n")
    path = tmp_path / "f.py"
    path.write_text("from beside_it import NUMBER\ndef f(completion):\n    return NUMBER\n")
    with RewardRunner([RewardPart("a", UserFunction.read(f"{path}:f"))], workers=1) as many_rewards:
        assert many_rewards.score(judged("a")).values[0, 0] == 5


def test_a_worker_has_no_torch(tmp_path):
    path = tmp_path / "f.py"
    path.write_text("import sys\ndef f(completion):\n    return 'torch' in sys.modules or 'numpy' in sys.modules\n")
    with RewardRunner([RewardPart("a", UserFunction.read(f"{path}:f"))], workers=1) as many_rewards:
        assert many_rewards.score(judged("a")).values[0, 0] == 0
    assert "numpy" in sys.modules, "the test sees nothing"


def test_programs_are_judged_side_by_side(tmp_path):
    try:
        find_sandbox()
    except ResourceError as error:
        pytest.skip(str(error))
    answers = [JudgedAnswer("x = 1", {"tests": ["assert x == 1", f"assert x == {number}"]}) for number in range(3)]
    with RewardRunner([RewardPart("code", Code("tests"))]) as many_rewards:
        table = many_rewards.score([*answers, JudgedAnswer("x = 1", {})])
    assert table.values[:3, 0].tolist() == [0.5, 1, 0.5], by_answer(table)
    assert math.isnan(table.values[3, 0]) and "no column 'tests'" in by_answer(table)[3]


def test_an_interrupt_ends_the_scoring_at_once(runner):
    many_rewards = runner("fickle", workers=1)
    pid = int(many_rewards.score(judged("start")).values[0, 0])
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        many_rewards.score(judged("hang"))
    timer.join()
    assert ends_soon(pid)
    assert many_rewards.score(judged("a")).values[0, 0] == 1


CALLER = """
from danlu.rewards import worker_pool
from danlu.rewards.function import UserFunction
from danlu.rewards.programs.sandbox import find_sandbox
from danlu.rewards.protocol import JudgedAnswer, StepRewards
from danlu.rewards.runner import RewardPart, RewardRunner

worker_pool.usable_cores = lambda: {cores}
parts = [RewardPart(name, UserFunction.read({file!r} + ":" + name)) for name in ("process", "fickle")]
runner = RewardRunner(parts, timeout_s=60, workers=1)
print(int(runner.score([JudgedAnswer("a", {{}})]).values[0, 0]), flush=True)
runner.score([JudgedAnswer({text!r}, {{}})])
"""


@pytest.mark.parametrize(("text", "cores"), [("hang", 100), ("hang in C", 0)])
def test_a_killed_caller_leaves_no_process(file, text, cores):
    # The one that is stuck in C cannot look after its caller: the system ends it when its processor time is used up,
    # here one second.
    paths = os.pathsep.join(filter(None, sys.path))
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER.format(file=str(file), text=text, cores=cores)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    worker = int(caller.stdout.readline())
    time.sleep(0.3)
    assert is_running(worker), "it has ended before its caller"
    caller.kill()
    caller.wait()
    caller.stdout.close()
    assert ends_soon(worker)
