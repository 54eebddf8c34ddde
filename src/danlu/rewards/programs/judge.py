"""The judge: a process that answers' programs cannot reach, which runs tests on proxies of their objects.

It forks for each test. The tests are those of a data set, so it has a sandbox of its own; a program's objects come over
that program's socket as data. Standard library only, like the guest's side.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import gc
import importlib
import importlib.util
import inspect
import io
import json
import marshal
import math
import os
import signal
import socket
import symtable
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any, NoReturn

from danlu.rewards.programs.limits import limit
from danlu.rewards.programs.proxies import Answer, Proxy

START_S = 60.0
"""The seconds for a sandbox to start."""
LARGEST_OUTPUT = 16 * 2**20
RUNNERS = ("unittest.main", "pytest.main", "unittest.TextTestRunner().run", "sys.exit", "exit", "quit")
"""Calls by which tests run themselves; the judge runs them instead."""
TYPES = frozenset(name for name, value in vars(builtins).items() if isinstance(value, type))
LONGEST_REASON = 300


class NoProgram:
    """The empty program in the place of an answer's: it defines nothing."""

    def wait_until_ready(self) -> None:
        """Returns at once."""

    def request(self, operation: str, *arguments: Any) -> Any:
        """No names; anything else raises NameError."""
        if operation in ("load", "names"):
            return {}
        if operation == "functions":
            return []
        raise NameError("the program defines nothing")


class Missing:
    """An undefined name as an argument: any use of it raises NameError."""

    def __getattr__(self, name: str) -> Any:
        raise NameError("the program does not define what is tested")

    def __call__(self, *positional: Any, **named: Any) -> Any:
        raise NameError("the program does not define what is tested")


Program = Answer | NoProgram


def main(control: int, paths: list[str], limits: dict[str, int], temporary_bytes: int | None) -> None:
    """Judges test after test, each in a process of its own, until the other end of the socket closes."""
    sys.path += paths
    limit(limits)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), io.StringIO(), io.StringIO()  # noqa: SIM115
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=control)
    gc.freeze()  # objects here stay, and forks need not copy them to count them
    while True:
        modules, descriptors, _, _ = socket.recv_fds(requests, 4096, 2)
        if not descriptors:
            os._exit(0)
        for name in modules.decode().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)  # here, so that the next test need not
        if not os.fork():
            requests.close()
            _judge(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _judge(session: int, channel: int | None = None) -> NoReturn:
    """Judges one test, writes the verdict, and ends this process."""

    def log(state: str, reason: str = "") -> NoReturn:
        with contextlib.suppress(OSError):
            os.write(session, json.dumps([state, reason]).encode() + b"\n")
        os._exit(0)

    try:
        with open(session, "rb", closefd=False) as stream:
            test = marshal.load(stream)
        started = False
        late = f"longer than {test['timeout_s']:g} s"
        signal.signal(signal.SIGALRM, lambda *_: log("late", late) if started else log("not started", "it takes long"))
        signal.setitimer(signal.ITIMER_REAL, test["start_s"])
        program: Program = NoProgram()
        if channel is not None:
            program = Answer(channel, lambda reason: log("lost" if started else "not started", reason))
        program.wait_until_ready()
        started = True
        signal.setitimer(signal.ITIMER_REAL, test["timeout_s"])
        limit({"RLIMIT_CPU": math.ceil(test["timeout_s"]) + 2})
        FORMS[test["form"]](program, test)
    except BaseException as error:
        log("failed", _reason(error))
    log("passed")


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST_REASON]
    except BaseException:
        return type(error).__name__


def _run_source(program: Program, test: dict[str, Any]) -> None:
    """Runs tests that are Python: statements, `check(candidate)`, functions of pytest, classes of unittest."""
    tree = ast.parse(test["source"])
    calls_check = _calls_check(tree)
    tree.body = _without_runners(tree.body)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["test_answer"] = module
    own = _names_of_answer(test["source"])
    _add_answer_modules(tree, program, own)
    program.request("load", test["code"], False)
    names = Names(vars(module), program)
    names.add(own)
    if not own & (names.keys() | names.live) and (shadowed := _builtins_of_answer(tree)):
        names.add(shadowed)
    exec(compile(tree, "<test>", "exec"), names)
    vars(module).update(names)
    defined = [value for value in names.values() if getattr(value, "__module__", None) == "__main__"]
    functions = [each for each in defined if type(each) is types.FunctionType]
    for check in (each for each in functions if _is_check(each) and not calls_check):
        check(_candidate(program, test))
    cases = [each for each in defined if isinstance(each, type) and issubclass(each, unittest.TestCase)]
    if cases:
        _run_unittest(cases)
    tests = [each for each in functions if each.__name__.startswith("test") and not _is_check(each)]
    classes = [each for each in defined if isinstance(each, type) and each not in cases and each.__name__[:4] == "Test"]
    if classes or any(inspect.signature(each).parameters or hasattr(each, "pytestmark") for each in tests):
        _run_pytest(module)
    else:
        for each in tests:
            result = each()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))


class Names(dict[str, Any]):
    """The names that a test sees: its own, and the answer's, of which plain data is asked for each time it is read."""

    def __init__(self, given: dict[str, Any], program: Program) -> None:
        super().__init__(given)
        self._program = program
        self.live = set[str]()
        """The answer's variables with plain data, which its functions may set."""

    def add(self, names: set[str]) -> None:
        """Adds those of the names that the answer defines."""
        for name, value in self._program.request("names", sorted(names)).items():
            if name not in names:
                continue  # the program names what it likes
            if isinstance(value, Proxy | type | types.ModuleType):
                self[name] = value
            else:
                self.live.add(name)

    def __missing__(self, name: str) -> Any:
        if name not in self.live:
            raise KeyError(name)
        return self._program.request("names", [name])[name]


async def _awaited(value: Any) -> Any:
    return await value


def _is_check(function: types.FunctionType) -> bool:
    """Whether a function has the form of HumanEval: it takes the function under test."""
    parameters = list(inspect.signature(function).parameters)
    return len(parameters) == 1 and (function.__name__ == "check" or parameters == ["candidate"])


def _calls_check(tree: ast.Module) -> bool:
    return any(
        isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and ast.unparse(each.value.func) == "check"
        for each in tree.body
    )


def _candidate(program: Program, test: dict[str, Any]) -> Any:
    """Returns the argument of `check`: the function that the row names, else the answer's last one."""
    name = test["entry_point"]
    if name is None:
        functions = program.request("functions")
        hinted = [each for each in test["hints"] if each in functions]
        name = (hinted or functions or [""])[-1]
    return program.request("names", [name]).get(name, Missing())


def _without_runners(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements without those that run the tests of the module, also in `if __name__ == "__main__"`."""
    kept: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.If):
            statement.body = _without_runners(statement.body) or [ast.copy_location(ast.Pass(), statement)]
        value = getattr(statement, "value", None)
        if not (isinstance(value, ast.Call) and ast.unparse(value.func) in RUNNERS and _is_runner(value)):
            kept.append(statement)
    return kept


def _is_runner(call: ast.Call) -> bool:
    """Whether a call runs tests; `sys.exit(1)` is a test's own."""
    is_exit = ast.unparse(call.func) in ("sys.exit", "exit", "quit")
    return not is_exit or any(isinstance(each, ast.Call) for each in call.args)


def _names_of_answer(source: str) -> set[str]:
    """The names that tests use and neither define nor have from Python."""
    module = symtable.symtable(source, "<test>", "exec")
    bound = {each.get_name() for each in module.get_symbols() if each.is_assigned() or each.is_imported()}
    used, tables = set[str](), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        of_module = table is module
        used |= {
            each.get_name() for each in table.get_symbols() if each.is_referenced() and (of_module or each.is_global())
        }
        bound |= {each.get_name() for each in table.get_symbols() if each.is_declared_global() and each.is_assigned()}
    return used - bound - vars(builtins).keys() - {"__name__", "__file__"}


def _builtins_of_answer(tree: ast.Module) -> set[str]:
    """The builtin functions that tests of nothing else call innermost: an answer may be named like one, as `sum`."""
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    return {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in vars(builtins)
        and call.func.id not in TYPES
        and not any(isinstance(each, ast.Call) for argument in call.args for each in ast.walk(argument))
    }


def _add_answer_modules(tree: ast.Module, program: Program, own: set[str]) -> None:
    """Has the answer's names in modules that tests import and that are nowhere: `from solution import add`."""
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and each.module and not each.level:
            names = [each.module]
        elif isinstance(each, ast.Import):
            names = [alias.name for alias in each.names]
        else:
            continue
        for name in names:
            root = name.partition(".")[0]
            if root not in sys.modules and importlib.util.find_spec(root) is None:
                sys.modules[name] = sys.modules[root] = AnswerModule(root, program, own)


class AnswerModule(types.ModuleType):
    """A module that has an answer's names, of which `import *` takes those that the tests use and do not have."""

    def __init__(self, name: str, program: Program, own: set[str]) -> None:
        super().__init__(name)
        self._program, self._own = program, own
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return sorted(self._own.intersection(self._program.request("names", ["*"])))
        names = {} if name.startswith("__") else self._program.request("names", [name])
        if name not in names:
            raise AttributeError(f"the program does not define {name!r}")
        return names[name]


def _run_unittest(cases: list[Any]) -> None:
    """Runs test cases. Raises AssertionError where one fails, or none was run to its end."""
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case) for case in cases)
    result = unittest.TestResult()
    suite.run(result)
    failures = [*result.failures, *result.errors, *((test, "succeeds") for test in result.unexpectedSuccesses)]
    if failures:
        raise AssertionError(str(failures[0][1]).strip().rpartition("\n")[2])
    if result.testsRun <= len(result.skipped):
        raise AssertionError("no test was run")


def _run_pytest(module: types.ModuleType) -> None:
    """Runs a module's tests by pytest. Raises AssertionError where one fails, or none was run to its end."""
    import pytest

    passed, failed = [], []

    class Collected(pytest.Module):
        def _getobj(self) -> Any:
            return module

    class Plugin:
        def pytest_pycollect_makemodule(self, module_path: Any, parent: Any) -> Any:
            return Collected.from_parent(parent, path=module_path)

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
            if not inspect.iscoroutinefunction(pyfuncitem.obj):
                return None
            names = pyfuncitem._fixtureinfo.argnames
            asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
            return True

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                failed.append(str(report.longrepr).rpartition("\n")[2])
            elif report.when == "call" and report.passed:
                passed.append(report.nodeid)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed:
                failed.append(str(report.longrepr))

    os.makedirs("tests", exist_ok=True)
    with open("tests/test_answer.py", "w"):
        pass
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--rootdir=tests", "-c", os.devnull]
    status = pytest.main([*options, "-o", "python_functions=test", "tests/test_answer.py"], plugins=[Plugin()])
    if failed or not passed or status != pytest.ExitCode.OK:
        raise AssertionError(failed[0] if failed else "not all tests were run" if passed else "no test was run")


def _run_call(program: Program, test: dict[str, Any]) -> None:
    """Calls a function of the program with arguments out of a data set, as APPS and TACO mean it."""
    arguments, expected = json.loads(test["arguments"]), json.loads(test["expected"])
    program.request("load", test["code"], True)
    names = program.request("names", [test["name"], "Solution"])
    function = getattr(names["Solution"](), test["name"]) if "Solution" in names else names[test["name"]]
    output = _json_like(function(*map(_with_integer_keys, arguments)))
    wanted = _with_integer_keys(expected)
    is_wrapped = isinstance(wanted, list) and len(wanted) == 1 and output == _with_integer_keys(wanted[0])
    if not (is_wrapped or output == wanted):
        raise AssertionError(f"another result than {expected!r:.100}")


def _json_like(value: Any) -> Any:
    """A result with lists in the place of tuples, which JSON does not have."""
    return [_json_like(each) for each in value] if type(value) in (list, tuple) else value


def _with_integer_keys(value: Any) -> Any:
    """Returns an object of JSON with numbers as keys, where all keys are numbers: JSON has texts for keys."""
    try:
        return {int(key): each for key, each in value.items()} if isinstance(value, dict) and value else value
    except ValueError:
        return value


def _run_script(program: Program, test: dict[str, Any]) -> None:
    """Runs the program with an input, and compares its output."""
    ended_well, output = program.request("script", test["code"], test["given"], LARGEST_OUTPUT)
    if ended_well is not True or not isinstance(output, str):
        raise AssertionError("the program ended with an error")
    if not same_output(output, test["expected"]):
        raise AssertionError(f"another output than {test['expected']!r:.100}")


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs are equal up to spaces at the ends of lines, empty lines, and the last digits of numbers."""
    printed, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (output, expected))
    if len(printed) != len(wanted) or any(len(a) != len(b) for a, b in zip(printed, wanted, strict=True)):
        return False
    pairs = ((a, b) for left, right in zip(printed, wanted, strict=True) for a, b in zip(left, right, strict=True))
    return all(a == b or _nearly(a, b) for a, b in pairs)


def _nearly(output: str, expected: str) -> bool:
    """Whether two words are almost the same number, as numpy's allclose has it, where one is no integer."""
    try:
        int(output), int(expected)
    except ValueError:
        pass
    else:
        return int(output) == int(expected)
    try:
        return abs(float(output) - float(expected)) <= 1e-8 + 1e-5 * abs(float(expected))
    except (ValueError, OverflowError):
        return False


FORMS: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "source": _run_source,
    "call": _run_call,
    "script": _run_script,
}
