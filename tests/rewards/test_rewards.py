"""Rewards of texts and of a user's functions."""

from __future__ import annotations

import math

import pytest

from danlu.core.errors import RecipeError
from danlu.rewards.function import UserFunction
from danlu.rewards.protocol import JudgedAnswer, StepRewards, TrainerState
from danlu.rewards.runner import RewardPart, RewardRunner
from danlu.rewards.text import Exact, Length, Mathematical, Numeric, Pattern


def judged(text, **row):
    return JudgedAnswer(text, row, prompt="?", tokens=len(text.split()))


def test_texts():
    answers = [judged(" Paris ", answer="Paris"), judged("paris", answer="Paris")]
    assert Exact("answer")(answers) == [1, 0]
    assert Exact("answer", ignore_case=True)(answers) == [1, 1]
    assert Pattern("####")([judged("so #### 3"), judged("3")]) == [1, 0]
    assert Pattern(r"\d+", whole=True)([judged("12"), judged("12 apples")]) == [1, 0]


def test_numbers_and_mathematics():
    solved = "9 + 9 = 18\n#### 18"
    answers = [judged("It is 18.", answer=solved), judged("17", answer=solved), judged("", answer=solved)]
    assert Numeric("answer")(answers) == [1, 0, 0]
    assert Numeric("answer")([judged("3", answer="three")]) == [None]
    assert Mathematical("answer")(answers) == [1, 0, 0]
    assert Mathematical("answer")([judged(r"\boxed{\frac{1}{2}}", answer="0.5")]) == [1]
    assert Mathematical("answer")([judged("1", answer="")]) == [None]


def test_numbers_of_columns_stay_numbers():
    """A float was read as text: 1e-05 was -5, and 2e6 was 6."""
    reward = Numeric("answer", tolerance=1e-9)
    columns = [1e-05, 2e6, 18, 0.1, "1e-05", "2e6"]
    right = ["0.00001", "It is 2,000,000.", "18.0", "0.10", "1e-05", "2000000"]
    answers = [judged(text, answer=column) for text, column in zip(right, columns, strict=True)]
    assert reward(answers) == [1] * 6
    assert reward([judged(text, answer=columns[0]) for text in ("-5", "1e-04", "5", "0")]) == [0] * 4
    assert reward([judged("6", answer=2e6), judged("1", answer=True)]) == [0, None]
    assert Exact("answer")(answers[:1] + answers[2:4]) == [1, 1, 1]
    assert Exact("answer")([judged("18", answer=18.5), judged("True", answer=True), judged("18 eggs", answer=18)]) == [
        0,
        1,
        0,
    ]


def test_a_float_of_a_column_is_the_number_that_it_is_written_as():
    """0.1 is a tenth, not the nearest float to it."""
    reward = Numeric("answer", tolerance=0.0)
    assert reward([judged(text, answer=0.1) for text in ("0.1", "1/10", "0.1000000000000000055")]) == [1, 1, 0]


def test_a_percentage_may_be_given_with_its_sign_or_without():
    answers = [judged(text, answer=column) for text in ("60%", "60", "0.6") for column in (60, "60%", 0.6)]
    assert Numeric("answer")(answers) == [1, 1, 1, 1, 1, 0, 0, 1, 1]


def test_the_tolerance_is_absolute_below_one_and_relative_above():
    reward = Numeric("answer", tolerance=0.1)
    wanted = [(0.5, "0.59"), (0.5, "0.61"), (0.0, "0.05"), (20.0, "21.9"), (20.0, "22.1"), (-20.0, "-21.9")]
    assert reward([judged(text, answer=column) for column, text in wanted]) == [1, 0, 1, 1, 0, 1]


def test_a_null_reference_is_no_text():
    for null in (None, math.nan):
        for reward in (Exact("answer"), Numeric("answer")):
            assert reward([judged("None", answer=null), judged("nan", answer=null)]) == [None, None]
    (verdict,) = Numeric("answer").verdicts([judged("It is 18.", answer=17)])
    assert verdict.as_json() == {"extracted": "18", "why": "another number: 17"}


def test_lengths():
    rewards = Length(fewest=2, most=4, slack=4)(
        [judged("a"), judged("a b c"), judged("a b c d e f"), judged("a " * 20)]
    )
    assert rewards == [-0.25, 0, -0.5, -1]


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(KeyError, match="no column 'answr' in this row; it has 'answer'"):
        Exact("answr")([judged("1", answer="1")])


FUNCTIONS = """
import math

def short(completion, **row):
    return -len(completion) / row["scale"]

def of_columns(completion, answer):
    return completion == answer

def batched(prompts, completions, answer, **rest):
    return [float(a == b) for a, b in zip(completions, answer)]

def undecided(completion):
    return None if "?" in completion else math.nan if "!" in completion else 1

def text(completion):
    return "good"

def too_few(completions):
    return [1.0]

unrelated = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    return path


def test_functions_by_answer_and_by_batch(file):
    answers = [judged("abc", answer="abc", scale=2), judged("ab?", answer="abc", scale=2)]
    assert UserFunction.read(f"{file}:short").load()(answers) == [-1.5, -1.5]
    assert UserFunction.read(f"{file}:of_columns").load()(answers) == [1, 0]
    assert UserFunction.read(f"{file}:batched").load()(answers) == [1, 0]
    *others, undefined = UserFunction.read(f"{file}:undecided").load()([*answers, judged("!")])
    assert others == [1, None] and math.isnan(undefined)


def test_functions_are_called_as_trl_calls_them(tmp_path):
    """Conversations are lists of messages on both sides, and functions may be asynchronous."""
    path = tmp_path / "trl_style.py"
    path.write_text(
        "async def contents(prompts, completions, **columns):\n"
        "    return [len(c[0]['content']) + 10 * len(p) if c[0]['role'] == 'assistant' else None\n"
        "            for p, c in zip(prompts, completions)]\n"
    )
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    reward = UserFunction.read(f"{path}:contents").load()
    assert reward.takes_batch
    assert reward([JudgedAnswer("two", {}, messages), JudgedAnswer("2", {}, messages[1:])]) == [23, 11]


STEPS = """
import numpy

def by_line(completion, rewards):
    return rewards

def as_array(completion, rewards):
    return numpy.array(rewards)

def in_batches(completions, rewards):
    return rewards
"""


def test_a_list_rewards_the_steps_of_an_answer(tmp_path):
    path = tmp_path / "steps.py"
    path.write_text(STEPS)
    text = "1 + 1 = 2\r\n\n  \nso 2\n"  # two lines that are not empty, of 9 and 4 characters
    by_line = StepRewards((9, 19), (0.5, -1.0))
    for name in ("by_line", "as_array"):
        assert UserFunction.read(f"{path}:{name}").load()([judged(text, rewards=[0.5, -1])]) == [by_line]
    pairs = [judged(text, rewards=[(3, 1), (3, 2), (20, 0.5)]), judged("a", rewards=2.0), judged("", rewards=[])]
    wanted = [StepRewards((3, 3, 20), (1.0, 2.0, 0.5)), 2.0, StepRewards((), ())]
    assert UserFunction.read(f"{path}:in_batches").load()(pairs) == wanted
    for rewards, message in (
        ([1, 2, 3], "3 rewards for an answer of 2 steps, which are its lines that are not empty; pairs"),
        ([(3, 1), 2], "rewards of steps are numbers, or pairs"),
        ([(5, 1), (3, 1)], r"steps end at \[5, 3\], which has to rise within the 20 characters of the answer"),
        ([(21, 1)], r"steps end at \[21\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            UserFunction.read(f"{path}:by_line").load()([judged(text, rewards=rewards)])


def test_a_file_is_run_once_and_stays_as_it_was_read(file):
    file.write_text(
        "calls = []\ndef count(completion):\n    calls.append(0)\n    return len(calls)\ncount_too = count\n"
    )
    first, second = UserFunction.read(f"{file}:count"), UserFunction.read(f"{file}:count_too")
    file.write_text("def count(completion):\n    return -1\n")
    assert first([judged("a")]) == [1] and second([judged("a")]) == [2] and first([judged("a")]) == [3]
    assert UserFunction.read(f"{file}:count").load()([judged("a")]) == [-1]


def test_functions_that_do_not_say_a_number(file):
    with pytest.raises(TypeError, match="a number or None, and the function gave str: 'good'"):
        UserFunction.read(f"{file}:text").load()([judged("a")])
    with pytest.raises(ValueError, match="1 rewards for 2 answers"):
        UserFunction.read(f"{file}:too_few").load()([judged("a"), judged("b")])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("short", "FILE.py:NAME"),
        ("nowhere.py:short", "no file nowhere.py"),
        ("{file}:unrelated", "no function 'unrelated'; it has short, of_columns, batched"),
        ("{broken}:f", r"raises NameError: name 'x' is not defined \(broken.py:2\)"),
        ("{syntax}:f", r"raises SyntaxError: .*\(syntax.py, line 1\)"),
        ("{ends}:f", r"raises SystemExit: 3 \(ends.py:1\)"),
        ("{latin}:f", "cannot be read: 'utf-8' codec can't decode byte"),
    ],
)
def test_functions_that_cannot_be_loaded(file, reference, message):
    contents = {"broken": b"\nx", "syntax": b"def f(:", "ends": b"raise SystemExit(3)", "latin": b"# \xe9"}
    paths = {name: file.with_name(f"{name}.py") for name in contents}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        UserFunction.read(reference.format(file=file, **paths)).load()


def test_the_policys_answers_win_over_columns_of_their_names(tmp_path):
    """A row's `completions` took the place of what the policy had said."""
    path = tmp_path / "given.py"
    path.write_text(
        "def batched(prompts, completions, tokens, finish, turns, **row):\n"
        "    assert 'prompt' not in row and 'completion' not in row\n"
        "    return [float((p, c, n, f, t) == ('?', 'mine', 1, 'stop', ()))\n"
        "            for p, c, n, f, t in zip(prompts, completions, tokens, finish, turns)]\n"
        "def each(prompt, completion, tokens, finish, turns, **row):\n"
        "    return float((prompt, completion, tokens, finish, turns) == ('?', 'mine', 1, 'stop', ()))\n"
    )
    names = ("prompt", "prompts", "completion", "completions", "tokens", "finish", "turns")
    answers = [judged("mine", **dict.fromkeys(names, "of the row")) for _ in range(2)]
    for name in ("batched", "each"):
        assert UserFunction.read(f"{path}:{name}")(answers) == [1, 1], name


def test_arguments_that_trl_gives_a_function(tmp_path):
    """As TRL's GRPO trainer calls reward functions: token ids, the trainer's state, and two functions that log."""
    file = tmp_path / "trl.py"
    file.write_text(
        "def both(completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):\n"
        "    log_extra('length', [len(ids) for ids in completion_ids])\n"
        "    log_extra('said', completions)\n"
        "    log_metric('step', trainer_state.global_step)\n"
        "    return [len(ids) / trainer_state.max_steps + trainer_state.epoch for ids in completion_ids]\n\n"
        "def one(completion, completion_ids, log_extra, **row):\n"
        "    log_extra('first', completion_ids[0])\n"
        "    return float(len(row))\n\n"
        "def wrong(completions, log_extra):\n"
        "    log_extra('a', [1])\n"
        "    return [1.0 for _ in completions]\n"
    )
    state, said = TrainerState(6, 10, 0.5), (("a", [7]), ("b", [8, 9]))
    answers = [JudgedAnswer(text, {"x": 1}, "?", token_ids=ids, state=state) for text, ids in said]
    parts = [RewardPart(name, UserFunction.read(f"{file}:{name}")) for name in ("both", "one", "wrong")]
    with RewardRunner(parts, workers=1) as runner:
        table = runner.score(answers)
    assert table.values[:, 0].tolist() == pytest.approx([0.6, 0.7]) and table.metrics == {(0, "step"): 6.0}
    assert [table.logged[place, 0].extra for place in (0, 1)] == [
        {"length": 1, "said": "a"},
        {"length": 2, "said": "b"},
    ]
    assert [table.logged[place, 1].extra for place in (0, 1)] == [{"first": 7}, {"first": 8}]
    assert len(set(table.values[:, 1])) == 1 and table.values[0, 1] == 4.0, "a row has no columns of TRL's"
    assert "log_extra('a', ..) was given 1 values for 2 answers" in str(table.failures[0])
