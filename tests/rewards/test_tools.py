"""Tools: calls as answers have them, what comes of them, and what the policy is told of the functions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from danlu.core.errors import RecipeError
from danlu.core.types import MalformedCall, ToolCall
from danlu.data.tool_calls import ReadCalls
from danlu.rewards.environments.protocol import EpisodeCall, Reply, TurnText
from danlu.rewards.environments.tools import Toolbox
from danlu.rewards.environments.workers import EnvironmentWorkers

TOOLS = '''
def add(a: float, b: float) -> float:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b

async def look_up(word: str) -> dict:
    """Looks a word up.

    Args:
        word: to look up.
    """
    return {"word": word, "möglich": True}

def divide(a: float, b: float) -> str:
    """Divides.

    Args:
        a: what is divided.
        b: by what.
    """
    return str(a / b)

def bare(a):
    return a


'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def toolbox(file):
    return replace(Toolbox.read([f"{file}:{name}" for name in ("add", "look_up", "divide")]), read_calls=ReadCalls())


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, NOW = ToolCall("add", {"a": 1, "b": 2}), ToolCall("now", {})


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("3", []),
        ("the sum is {3}", []),
        ("", []),
        ("[]", []),
        ('{"answer": 3}', []),
        (hermes("add", a=1, b=2), [ADD]),
        (f"See:\n{hermes('add', a=1, b=2)}\n{hermes('divide', a=1)}", [ADD, ToolCall("divide", {"a": 1})]),
        (hermes("add", a=1, b=2).removesuffix("</tool_call>"), [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        (' [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": {}}]\n', [ADD, NOW]),
        # What has a name is no call by that.
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]', []),
        ('{"name": 3}', []),
    ],
)  # fmt: skip
def test_calls_of_answers(answer, calls):
    assert ReadCalls()(answer)[1] == calls


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "the call is no JSON: Expecting value"),
        ("<tool_call>[1]</tool_call>", 'a call is {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'a call is {"name"'),
        ('{"name": "add", "arguments": [1, 2]}', "the arguments of add are no JSON object"),
    ],
)
def test_what_was_meant_as_a_call_is_said_to_be_none(answer, problem):
    (call,) = ReadCalls()(answer)[1]
    assert isinstance(call, MalformedCall) and call.problem.startswith(problem)


def test_results_errors_and_the_end(toolbox):
    workers = EnvironmentWorkers(toolbox, count=1, timeout_s=20.0)
    answers, replies = (), (Reply(),)

    def reply(answer):
        nonlocal answers, replies
        answers = (*answers, answer)
        (got,) = workers.replies([EpisodeCall((0, 0), {}, 0, answers, replies)])
        replies = (*replies, got)
        return got

    try:
        assert workers.replies([EpisodeCall((0, 0), {}, 0)]) == [Reply()]
        assert reply(hermes("add", a=1, b=2)) == Reply((TurnText("3", "tool", "add"),))
        assert reply(hermes("look_up", word="ß")).turns == (
            TurnText('{"word": "ß", "möglich": true}', "tool", "look_up"),
        )
        several = reply(
            hermes("divide", a=1, b=0) + hermes("add", a=1) + hermes("sub", a=1) + hermes("divide", a=1, b=2)
        )
        assert several.errors == 3 and [turn.name for turn in several.turns] == ["divide", "add", "sub", "divide"]
        assert [turn.text for turn in several.turns] == [
            "error: ZeroDivisionError: division by zero (my_tools.py:26)",
            "error: add: missing a required argument: 'b'",
            "error: there is no tool 'sub'; there are add, look_up, divide",
            "0.5",
        ]
        assert reply("It is 0.5.") == Reply(done=True)
    finally:
        workers.close()


def test_the_policy_is_told_names_arguments_and_docstrings(toolbox):
    add, look_up, _ = toolbox.schemas()
    assert add["type"] == "function" and add["function"]["description"] == "Adds two numbers."
    assert add["function"]["parameters"]["properties"]["a"] == {"type": "number", "description": "the first."}
    assert add["function"]["parameters"]["required"] == ["a", "b"] and look_up["function"]["name"] == "look_up"


def test_functions_that_say_nothing_of_themselves_are_refused(file):
    with pytest.raises(RecipeError) as error:
        Toolbox.read([f"{file}:add", f"{file}:bare"]).schemas()
    (problem,) = error.value.problems
    assert problem.startswith(f"environment.tools.1: {file}:bare: ") and "with a line for each argument" in problem
    with pytest.raises(RecipeError, match=r"environment.tools.0: .*has no function 'sub'; it has add, "):
        Toolbox.read([f"{file}:sub"])
