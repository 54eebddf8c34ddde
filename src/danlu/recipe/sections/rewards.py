"""The rewards of stage `rl`, which judge answers. Several are added up, each with its weight."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, PositiveInt, Section, Share, VariantSection

Positive = Annotated[float, Field(gt=0)]

FUNCTION_PATTERN = r"\.py:"
"""The text in a bare value that names a function, and no kind."""


def file_of(function: str) -> str:
    """The file in the path of a function or class, `my_rewards.py` of `my_rewards.py:short`."""
    return function.rpartition(":")[0] or function


class RewardSection(VariantSection):
    """A reward that judges answers."""

    weight: float = 1.0
    """The weight of the reward in the sum."""
    name: str | None = None
    """The name of its metrics, as in reward/NAME; by default its kind, or its function."""

    @property
    def label(self) -> str:
        """The name of the reward's metrics."""
        return self.kind if self.name is None else self.name


class ExactReward(RewardSection):
    """1 where the answer is the text of a column, up to spaces, or the number that it holds; else 0."""

    kind: Literal["exact"] = "exact"
    column: str
    """The column of the row that holds the right answer."""
    ignore_case: bool = False
    """Take small and capital letters as equal."""


class NumericReward(RewardSection):
    """1 where the last number of the answer is that of a column; else 0."""

    kind: Literal["numeric"] = "numeric"
    column: str
    """The column of the row that holds the right answer."""
    tolerance: NonNegative = 1e-6
    """How far both may differ: relative, and absolute for numbers below 1. 60% is 60, and 0.6 too."""


class MathReward(RewardSection):
    r"""1 where the final answer (between its <answer> tags, in its last \boxed, behind its #### or "the answer is";
    else its last formula or number) is the same mathematics as a column; else 0. Formulas are compared by the package
    math-verify, exactly: 0.333 is not 1/3. A unit may be left out, and a unit that differs is wrong. An answer that
    takes more than half a second to compare is wrong, and counted in `reward/NAME/late`.
    """

    kind: Literal["math"] = "math"
    column: str
    """The column of the row that holds the right answer, alone or at the end of a worked solution."""


class FormatReward(RewardSection):
    """1 where a regular expression is found in the answer; else 0."""

    kind: Literal["format"] = "format"
    pattern: str
    """A regular expression of Python, in which a dot also matches the end of a line."""
    whole: bool = False
    """It has to match all of the answer."""


class LengthReward(RewardSection):
    """0 within bounds of an answer's tokens, and falling outside of them, to no less than -1."""

    kind: Literal["length"] = "length"
    fewest: Annotated[int, Field(ge=0)] = 0
    """Tokens below which it falls."""
    most: PositiveInt | None = None
    """Tokens above which it falls."""
    slack: PositiveInt = 1
    """Tokens outside of the bounds over which it falls to -1."""


class CodeReward(RewardSection):
    """The share of tests that the program in the answer passes. It runs in a sandbox without files and network, and the
    tests in a process that it cannot reach."""

    kind: Literal["code"] = "code"
    column: str
    """The column of the row that holds the tests: Python or a list of it (asserts as in MBPP, check(candidate) as in
    HumanEval, pytest, unittest), or inputs and outputs as in APPS and TACO."""
    timeout_s: Positive = 5.0
    """Seconds that a test may take."""
    memory_mib: PositiveInt = 512
    """Memory that all processes of a program may take together, in MiB."""
    processes: PositiveInt = 2
    """Answers that are judged at a time."""
    sandbox: Literal["auto", "bubblewrap", "unshare", "none"] = "auto"
    """The sandbox that keeps programs from the machine: bubblewrap, or the same namespaces without it (unshare); auto
    takes the first that works, and none runs them with limits alone.
    """


class FunctionReward(RewardSection):
    """A function of yours: `def short(completion, **row) -> float | None`; one with a parameter `completions` is called
    as TRL calls it. A list in the place of a number rewards steps: the answer's lines, or pairs (end, reward)."""

    short = "path"
    short_pattern: ClassVar[str] = FUNCTION_PATTERN

    kind: Literal["function"] = "function"
    path: str = Field(json_schema_extra={"pattern": FUNCTION_PATTERN})
    """The file and the name of the function in it, as in my_rewards.py:short."""

    @property
    def file(self) -> str:
        """The path without the function's name."""
        return file_of(self.path)

    @property
    def label(self) -> str:
        """The name of the reward's metrics."""
        return self.path.rpartition(":")[2] if self.name is None else self.name


class ModelReward(RewardSection):
    """The score of a reward model, such as stage `reward` trains."""

    kind: Literal["model"] = "model"
    path: str
    """A Hugging Face folder, a hub id or a finished run."""
    per_step: bool = False
    """Reward each step, for a model that judges steps (objective stepwise): each step earns, at its last token, the
    probability that it is right; false: the answer earns the least of them.
    """


class JudgeReward(RewardSection):
    """The mark that a language model gives, asked over HTTP as OpenAI's servers are."""

    kind: Literal["judge"] = "judge"
    url: str
    """The URL of the server, such as http://localhost:8000/v1."""
    model: str
    """The name that the server knows it by."""
    prompt: str
    """The request: a template over {prompt}, {completion} and the columns of the row."""
    pattern: str | None = None
    """A regular expression; its first group is the mark in the reply, where it matches last; null takes the last number
    that is no bound of a scale: 3 of 3/10. A reply that is cut off has no mark, nor have thoughts.
    """
    max_new_tokens: PositiveInt = 512
    """The longest that it says."""
    temperature: NonNegative = 0.0
    """0 takes the likeliest token each time."""
    bounds: tuple[float, float] | None = None
    """The lowest and the highest mark, which become 0 and 1; a mark beyond them is none. By default the mark is the
    reward."""
    api_key_variable: str | None = None
    """The environment variable that holds the server's key; the key itself is in no recipe."""
    connections: PositiveInt = 16
    """Requests that are under way at a time."""
    timeout_s: Positive = 60.0
    """Seconds that the server may take for a mark."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often it is asked again where it is busy or does not answer, each time after a longer pause."""


Reward = Annotated[
    ExactReward
    | NumericReward
    | MathReward
    | FormatReward
    | LengthReward
    | CodeReward
    | FunctionReward
    | ModelReward
    | JudgeReward,
    Field(discriminator="kind"),
]


class RewardLimits(Section):
    """How long rewards are waited for, and how many may fail."""

    timeout_s: Positive = 60.0
    """Seconds that a call of a function or a pattern may take, with one answer (with all answers of a rollout for a
    function of `completions`); it is given up on then. Programs and judges have a `timeout_s` of their own."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that call functions and patterns; auto takes one per core, and at most 8."""
    failures: Share = 0.5
    """The share of a rollout's answers that are left out, since a reward failed or none was given, above which the run
    stops."""
