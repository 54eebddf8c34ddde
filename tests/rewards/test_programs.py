"""Programs of answers: what is right passes, and no answer forges its verdict, in either sandbox."""

from __future__ import annotations

import json
import os
import posix
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders.deceiving_programs import DECEIVING
from builders.programs import CLOSE, CLOSE_TESTS, FORGED, HONEST, LIMITED

from danlu.core.errors import ResourceError
from danlu.rewards.programs import cgroups, pod, sandbox, session
from danlu.rewards.programs.blocks import code_of
from danlu.rewards.programs.proxies import Answer
from danlu.rewards.programs.sandbox import KINDS, find_sandbox
from danlu.rewards.programs.session import judge_program
from danlu.rewards.programs.test_forms import parse_tests

ADD = "assert add(1, 2) == 3\nassert add(5, 5) == 10\n"


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """Each kind of sandbox; both have to say the same."""
    try:
        return find_sandbox(request.param)
    except ResourceError as error:
        pytest.skip(str(error))


def judged(kind, code, tests, row=None, **limits):
    given = {"timeout_s": 20.0, "memory_mib": 512, **limits}
    return judge_program(code, parse_tests(tests, row or {}), sandbox=kind, **given)


def at_once(function, names):
    """The results of a function by name, several at a time: most of them wait for processes."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


def test_right_programs_pass(kind):
    reasons = at_once(lambda name: judged(kind, *HONEST[name])[0].reason, HONEST)
    assert {name: reason for name, reason in reasons.items() if reason} == {}


def test_wrong_programs_fail(kind):
    verdicts = at_once(lambda name: judged(kind, FORGED[name], ADD, timeout_s=0.7)[0], FORGED)
    assert [name for name, verdict in verdicts.items() if verdict.passed] == []
    assert judged(kind, "def add(a, b): return a + b", ADD)[0].passed, "it has taken the judge with it"


def test_programs_made_for_the_judge_fail(kind):
    verdicts = at_once(lambda name: judged(kind, DECEIVING[name][0], DECEIVING[name][1]), DECEIVING)
    passed = {name: [each.passed for each in of_one] for name, of_one in verdicts.items()}
    assert {name: each for name, each in passed.items() if any(each)} == {}


def test_numbers_that_are_only_close_are_compared_by_the_judge(kind):
    several = at_once(lambda name: [each.passed for each in judged(kind, CLOSE[name], [*CLOSE_TESTS])], CLOSE)
    assert several == dict.fromkeys(CLOSE, [False] * len(CLOSE_TESTS))
    passed = [verdict.passed for verdict in judged(kind, "def f(): return 4.5", [*CLOSE_TESTS])]
    assert passed == [True] * 6 + [False] + [True] * 6


def test_programs_meet_their_limits(kind, tmp_path):
    (tmp_path / "precious").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"PORT": server.getsockname()[1], "PATH": str(tmp_path / "precious"), "PID": os.getpid()}

        def verdict(name):
            code, tests, _ = LIMITED[name]
            for key, value in values.items():
                tests = tests.replace(key, repr(value))
            return judged(kind, code.replace("TESTS", str(Path(__file__).parent)), tests, memory_mib=256)[0]

        verdicts = at_once(verdict, LIMITED)
    for name, (*_, reason) in LIMITED.items():
        assert not verdicts[name].passed and reason in verdicts[name].reason, (name, verdicts[name])


def test_limits_hold_without_control_groups(kind, monkeypatch):
    monkeypatch.setattr(sandbox, "take_cgroup", lambda *limits: None)
    for name, reasons in {
        "three children with the memory of one each": ["too much memory"],
        "a bomb": ["too many processes", "BlockingIOError"],  # whichever is first
    }.items():
        code, tests, _ = LIMITED[name]
        (verdict,) = judged(kind, code, tests, memory_mib=255)  # a limit for which no sandbox rests
        assert not verdict.passed and any(reason in verdict.reason for reason in reasons), verdict


def test_what_a_program_started_ends_with_its_verdict(kind):
    seconds = f"{4000 + os.getpid() / 1e6}"
    code = (
        "import os, time\ndef f():\n    if not os.fork():\n        os.setsid()\n        if not os.fork():\n"
        f"            os.execvp('sleep', ['sleep', '{seconds}'])\n        os._exit(0)\n"
        "    while 'sleep' not in str([open(f'/proc/{p}/comm').read() for p in os.listdir('/proc') if p.isdigit()]):\n"
        "        if not os.listdir('/proc'): return time.sleep(0.3) or 1\n    return 1"
    )
    assert judged(kind, code, "assert f() == 1")[0].passed
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [each for each in commands if seconds.encode() in each]


def test_each_test_begins_with_a_program_that_nothing_has_touched(kind):
    code = (
        "import os\nn = 0\ndef f():\n    global n\n    n += 1\n    open('a', 'x').close()\n    return n, os.listdir()"
    )
    assert [each.reason for each in judged(kind, code, ["assert f() == (1, ['a'])"] * 2)] == ["", ""]
    hangs = "def f(x):\n    while x: pass\n    return x"
    verdicts = judged(kind, hangs, ["assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0"], timeout_s=0.7)
    assert not verdicts[1].passed and verdicts[1].reason == "longer than 0.7 s"
    assert "the program ended" in judged(kind, "import os\ndef f(): os._exit(0)", "assert f()")[0].reason


def test_without_a_sandbox_limits_hold_all_the_same():
    verdicts = judged("none", "def add(a, b): return a + b", [ADD, "assert add(1, 1) == 3"])
    assert [each.passed for each in verdicts] == [True, False]
    assert not judged("none", "def add(a, b): return bytearray(9 << 30)", ADD)[0].passed


def test_a_test_that_ends_its_process_has_failed():
    (verdict,) = judged("none", "x = 1", "import os\nos._exit(0)")
    assert (verdict.passed, verdict.reason) == (False, "the test ended the process that ran it")


def test_an_answer_does_with_objects_of_the_tests_what_is_listed_alone():
    class Forty:
        def __add__(self, other):
            return 40 + other

    answer = Answer(-1, lambda reason: pytest.fail(reason))
    answer._exported.append(Forty())
    assert answer._done(0, "__add__", [2]) == 42
    for operation, *values in (("__setattr__", "x", 1), ("__reduce__",), ("__init_subclass__",)):
        with pytest.raises(AttributeError, match=operation):
            answer._done(0, operation, values)


def test_a_program_is_a_plain_child_where_it_can_have_no_namespaces(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pod, "limit", lambda limits: None)
    monkeypatch.setattr(pod, "serve", lambda descriptor, folder: posix._exit(posix.write(descriptor, folder.encode())))
    programs = pod.Programs({}, 2**20)
    programs.libc = SimpleNamespace(unshare=lambda flags: -1)
    ours, child_socket = socket.socketpair()
    control, _ = socket.socketpair()
    with ours, child_socket, control, _:
        programs.start(child_socket.fileno(), control)
        child_socket.close()
        assert ours.recv(16) == b"1" and programs.libc is None
        programs.end()


def test_where_users_may_mount_the_sandbox_of_system_calls_works():
    """The tests of each kind pass over one that does not work, so they would be silent on one that is broken."""
    root = "mount -t tmpfs none /tmp && cd /tmp && mkdir old && pivot_root . old"
    new = ["--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts"]
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", *new, "sh", "-c", root], capture_output=True).returncode
    ):
        pytest.skip("users may not mount here")
    assert find_sandbox("unshare") == "unshare"


def test_a_sandbox_that_has_ended_serves_no_other_answer(monkeypatch):
    ours, theirs = socket.socketpair()
    ended = object.__new__(sandbox.Sandbox)
    ended.socket = ours

    def end_behind(order, descriptors):
        ours.send(order)
        theirs.close()
        return True

    monkeypatch.setattr(ended, "hand_over", end_behind, raising=False)
    with ours:
        assert not ended.rest()


def test_sandboxes_that_the_system_has_ended_while_they_rested_are_replaced(kind, monkeypatch):
    monkeypatch.setattr(session, "_resting", resting := {})
    limits = {"memory_mib": 254}
    at_once(lambda name: judged(kind, HONEST[name][0], HONEST[name][1], **limits), [*HONEST][:4])
    (waiting,) = resting.values()
    waiting += [sandbox.Sandbox(kind, sandbox.GUEST, waiting[0]._limits, is_shared_limit=True) for _ in range(2)]
    for each in waiting:
        each.process.kill()
        each.process.wait()
    assert judged(kind, "def add(a, b): return a + b", ADD, **limits)[0].passed


def test_a_control_group_that_is_gone_is_not_taken_again(monkeypatch, tmp_path):
    gone, present = cgroups.Cgroup(tmp_path / "gone", None), cgroups.Cgroup(tmp_path, None)
    monkeypatch.setattr(cgroups, "_free", {1: [present, gone]})
    assert cgroups.take_cgroup(1, 1) is present


def test_a_system_without_sandboxes_is_refused_once(monkeypatch):
    monkeypatch.setattr(sandbox, "_works", lambda kind: False)
    with pytest.raises(ResourceError, match=r"bubblewrap \(bwrap\) and user namespaces do not work .*`sandbox: none`"):
        find_sandbox()
    with pytest.raises(ResourceError, match="sandbox unshare does not work"):
        find_sandbox("unshare")
    assert find_sandbox("none") == "none"
    monkeypatch.setattr(sandbox, "_works", lambda kind: kind == "unshare")
    assert find_sandbox() == "unshare"


def test_the_shared_cases(kind, shared_data):
    wrong = []
    for line in (shared_data / "cases" / "code_answers.jsonl").read_text().splitlines():
        case = json.loads(line)
        verdicts = judged(kind, code_of(case["answer"]), case["tests"])
        if all(each.passed for each in verdicts) != case["right"]:
            wrong.append(case["name"])
    assert wrong == []


def test_what_a_derived_object_holds_is_read_from_its_plain_value(kind):
    lies = "class S(str):\n    def __len__(s): return 5\n    def __getitem__(s, i): return 'b'\n"
    lies += "    def __iter__(s): return iter('b')\n"
    tests = [
        "assert len(f()) == 5",
        "assert f()[0] == 'b'",
        "assert list(f()) == ['b']",
        "assert len(f()) == 1 and f()[0] == 'a'",
    ]
    assert [each.passed for each in judged(kind, lies + "def f(): return S('a')", tests)] == [False, False, False, True]
