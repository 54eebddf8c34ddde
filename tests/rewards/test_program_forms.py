"""The tests of programs in the forms of published data sets, and the code in answers."""

from __future__ import annotations

import json

import pytest

from danlu.core.errors import DataError, ResourceError
from danlu.rewards.build import check_columns, check_first_tests
from danlu.rewards.code import Code
from danlu.rewards.programs.blocks import code_of
from danlu.rewards.programs.judge import same_output
from danlu.rewards.programs.sandbox import find_sandbox
from danlu.rewards.programs.test_forms import NoTest, parse_tests
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardPart, RewardRunner

ADD, SUB = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b\n"

# Rows in the form of, in order: google-research-datasets/mbpp (full and sanitized), openai/openai_humaneval,
# codeparrot/apps (README of each on the Hugging Face hub) and of APPS's and human-eval's harnesses, which say how they
# are run: github.com/hendrycks/apps eval/testing_util.py, github.com/openai/human-eval human_eval/execution.py.
FORMS = {
    "mbpp": (
        "test_list",
        {
            "test_list": ["assert add(1, 2) == 3", "assert add(1, 1) == 2"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
    ),
    "mbpp with set-up": ("test_list", {"test_list": ["assert add(*PAIR) == 3"], "test_setup_code": "PAIR = (1, 2)"}),
    "mbpp sanitized": (
        "test_list",
        {"test_list": ["assert math.isclose(add(1, 2), 3)"], "test_imports": ["import math"]},
    ),
    "humaneval": (
        "test",
        {
            "test": "\n\nMETADATA = {\n    'author': 'jt',\n}\n\n\n"
            "def check(candidate):\n    assert candidate(1, 2) == 3\n",
            "entry_point": "add",
        },
    ),
    "apps called": (
        "input_output",
        {"input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [[3], 4]})},
    ),
    "pytest": ("test", {"test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"}),
    "pytest with parameters": (
        "test",
        {
            "test": "import pytest\nfrom solution import add\n\n"
            "@pytest.mark.parametrize('a, b, c', [(1, 2, 3), (0, 4, 4)])\n"
            "def test_add(a, b, c):\n    assert add(a, b) == c\n\n"
            "class TestAdd:\n    def test_more(self, tmp_path):\n        assert add(1, 1) == 2\n"
        },
    ),
    "unittest": (
        "test",
        {
            "test": "import unittest\n\nclass TestAdd(unittest.TestCase):\n"
            "    def setUp(self):\n        self.one = 1\n\n    def test(self):\n"
            "        self.assertEqual(add(self.one, 2), 3)\n\nif __name__ == '__main__':\n    unittest.main()\n"
        },
    ),
    "called at once": ("test", {"test": "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)\n"}),
    "json in a cell": ("test", {"test": json.dumps(["assert add(1, 2) == 3"])}),
    "python in a cell": ("test", {"test": "['assert add(1, 2) == 3', \"assert add('a', 'b') == 'ab'\"]"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def sandboxed():
    try:
        find_sandbox()
    except ResourceError as error:
        pytest.skip(str(error))


def rewards(answers, column, row, **settings):
    return Code(column, **{"timeout_s": 20.0, **settings})(
        [JudgedAnswer(f"```python\n{text}```", row) for text in answers]
    )


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_run_as_its_data_set_means_it(sandboxed, name):
    column, row = FORMS[name]
    assert rewards([ADD, SUB, "x = 1\n"], column, row) == [1, 0, 0]


def test_the_share_of_tests(sandboxed):
    row = {"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'b'"]}
    assert rewards([ADD, SUB], "tests", row) == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert Code("tests")([JudgedAnswer("no code at all!", row)]) == [0]


def test_what_humaneval_checks(sandboxed):
    """The row's entry point, else the function of the prompt, else the answer's last."""
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    helped = ADD + "\ndef helper(a, b):\n    return 0\n"
    assert rewards([helped], "test", {"test": test, "entry_point": "add"}) == [1]
    assert rewards([helped], "test", {"test": test}) == [0]
    answer = JudgedAnswer(helped, {"test": test}, prompt='def add(a, b):\n    """Adds."""\n')
    assert Code("test")([answer]) == [1]


def test_programs_that_read_and_print(sandboxed):
    """APPS: an input and an output each, on standard input and output; half of the cases are half of the reward."""
    row = {"input_output": json.dumps({"inputs": ["2\n3\n", ["4", "5"]], "outputs": ["5\n", ["9"]]})}
    programs = {
        "print(int(input()) + int(input()))\n": 1,
        "import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\n\n"
        "if __name__ == '__main__':\n    main()\n": 1,
        "import sys\nprint(sum(map(int, open(0))), flush=True)\nsys.exit()\n": 1,
        "print(5)\n": 0.5,
        "print(int(input()) - int(input()))\n": 0,
        "print(5)\n1 / 0\n": 0,
        "import os\nos.write(1, b'5')\nos._exit(3)\n": 0,
        "a, b = map(int, [input(), input()])\nprint(reduce(lambda x, y: x + y, [a, b]))\n": 1,  # what APPS imports
    }
    assert rewards(programs, "input_output", row) == list(programs.values())


def test_functions_of_programming_contests(sandboxed):
    """APPS: a method of `Solution` where there is one, lists for tuples, numbers for the keys of JSON."""
    row = {"input_output": {"fn_name": "pair", "inputs": [[[1, 2]], [[3]]], "outputs": [[[1, 2]], [3]]}}
    solution = "class Solution:\n    def pair(self, x: List[int]):\n        return tuple(x)\n"
    assert rewards([solution, "def pair(x): return x\n", "def pair(x): return [[1, 2]]\n"], "input_output", row) == [
        1,
        1,
        0.5,
    ]
    row = {"input_output": {"fn_name": "get", "inputs": [[{"1": 2}]], "outputs": [2]}}
    assert rewards(["def get(d): return d[1]\n", "def get(d): return d['1']\n"], "input_output", row) == [1, 0]


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2 \n\n", "1 2\n", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("100000001", "100000002", False),
        ("nan", "1.0", False),
        ("yes", "YES", False),
        ("", "1", False),
        ("1e400", "1", False),
    ],
)
def test_outputs_are_equal(output, expected, same):
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (None, "empty"),
        ([], "empty"),
        ([""], "a test is empty"),
        ("[]", "empty"),
        ("add(1, 2)", "it tests nothing"),
        ("def f(): pass", "it tests nothing"),
        ("3 + 4 = 7", "a test is no Python"),
        ({"input_output": 1}, "known are inputs and outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        (3, "it is int"),
        ([3], "a list of tests holds int"),
    ],
)
def test_cells_without_a_test_are_refused_while_rows_are_read(cell, message):
    with pytest.raises(NoTest, match=message):
        parse_tests(cell, {})
    parts = [RewardPart("code", Code("tests"))]
    with pytest.raises(DataError, match=rf"rows.jsonl:3: reward code: column 'tests': .*{message}"):
        check_columns(parts, {"tests": cell}, "rows.jsonl:3")
    check_columns(parts, {"tests": "assert add(1, 2) == 3"}, "rows.jsonl:4")


EMPTY_PASSES = (
    "assert True",
    "try:\n    assert add(1, 2) == 3\nexcept NameError:\n    pass",
    "def check(candidate):\n    assert 1",
    "def verify():\n    assert add(1, 2) == 3",
    {"inputs": ["1"], "outputs": [" \n"]},
)


def test_a_test_that_the_empty_program_passes_is_refused(sandboxed):
    parts = [RewardPart("code", Code("tests"))]
    good = {"tests": "assert add(1, 2) == 3"}
    for cell in EMPTY_PASSES:
        rows = [(good, "rows.jsonl:1"), ({"tests": cell}, "rows.jsonl:2")]
        with pytest.raises(
            DataError, match="rows.jsonl:2: reward code: column 'tests': the empty program passes a test"
        ):
            check_first_tests(parts, rows)
    later = [(good, "rows.jsonl:1")] * 64 + [({"tests": "assert True"}, "rows.jsonl:65")]
    check_first_tests(parts, later)
    answers = [JudgedAnswer(ADD, row, prompt="Add.") for row in (good, {"tests": "assert True"})]
    with RewardRunner(parts) as runner:
        assert runner.score(answers[:1]).values.tolist() == [[1]]
        with pytest.raises(DataError, match=r"reward code, prompt 'Add.': column 'tests': the empty program passes"):
            runner.score(answers)


BLOCKS = {
    "```python\nx = 1\n```": "x = 1",
    "Here:\n```python\nx = 1\n```\nor\n```py\nx = 2\n```": "x = 2",
    "```Python\nx = 1\n```": "x = 1",
    "```python3\nx = 1\n```": "x = 1",
    "```PYTHON  \nx = 1\n```": "x = 1",
    "``` python\nx = 1\n```": "x = 1",
    "```python title=\"a.py\"\nx = 1\n```": "x = 1",
    "```python\r\nx = 1\r\ny = 2\r\n```\r\n": "x = 1\ny = 2",
    "1. So:\n   ```python\n   def f():\n       return 1\n   ```": "def f():\n    return 1",
    "- So:\n\t```python\n\tx = 1\n\t```": "x = 1",
    "> ```python\n> x = 1\n> ```": "x = 1",
    "```python\n    x = 1\n```": "x = 1",
    "```bash\npip install x\n```\n```python\nx = 1\n```": "x = 1",
    "```python\nx = 1\n```\nIt prints:\n```\n1\n```": "x = 1",
    "```python\nx = 1\n```\n```output\n1\n```": "x = 1",
    "```python\nx = 1\n```\n```bash\npython x.py\n```": "x = 1",
    "```\nx = 1\n```\nprints\n```\n5\n```": "x = 1",
    "```\nprint(input())\n```": "print(input())",
    "```text\nx = 1\n```": None,
    "```javascript\nx = 1\n```": None,
    "~~~python\nx = 1\n~~~": "x = 1",
    "````python\nx = '''\n```\n'''\n````": "x = '''\n```\n'''",
    "```python\nx = 1```": "x = 1",
    "```\nunclosed": None,
    "def f(): return 1": "def f(): return 1",
    "I cannot say.": None,
    "": None,
    "```python\n```": "",
}  # fmt: skip


def test_the_code_of_an_answer():
    found = {text: code_of(text) for text in BLOCKS}
    assert {text: None if code is None else code.strip() for text, code in found.items()} == BLOCKS


def test_a_verdict_says_what_was_judged_and_why(sandboxed):
    row = {"tests": ["assert add(1, 1) == 2", "assert add(1, 2) == 4"]}
    (verdict,) = Code("tests").verdicts([JudgedAnswer(f"```python\n{ADD}```", row)])
    assert (verdict.value, verdict.extracted) == (0.5, ADD)
    assert verdict.why == "1 of 2 tests passed; test 2: AssertionError: "
    (verdict,) = Code("tests").verdicts([JudgedAnswer("no code at all!", row)])
    assert (verdict.value, verdict.extracted, verdict.why) == (0, None, "no block of Python")
