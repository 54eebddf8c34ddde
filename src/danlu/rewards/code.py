"""A reward for programs: the share of tests that the code of an answer passes, in a sandbox that it does not leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import DataError
from danlu.rewards.judge import prompt_text
from danlu.rewards.programs.blocks import code_of
from danlu.rewards.programs.sandbox import find_sandbox
from danlu.rewards.programs.session import ProgramResult, judge_program
from danlu.rewards.programs.test_forms import NoTest, ProgramTest, parse_tests
from danlu.rewards.protocol import Explains, JudgedAnswer, Verdict, column_of


@dataclass(frozen=True)
class Code(Explains):
    """The share of tests that the last code block of an answer passes; 0 for an answer without code.

    The tests, in any form of `programs.test_forms`, run in a judge; the answer runs in a sandbox of its own and never
    sees them.

    Raises (when called):
        ResourceError: no sandbox works here, and `sandbox` is not none.
        DataError: a cell holds no test, or one that the empty program passes.
    """

    column: str
    timeout_s: float = 5.0
    memory_mib: int = 512
    processes: int = 2
    """How many answers `RewardRunner` has judged at a time."""
    sandbox: str = "auto"
    """auto, bubblewrap, unshare, or none."""
    _tried: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """The hashes of tests that were tried on the empty program, which fails them."""

    def check_row(self, row: Mapping[str, Any], prompt: str = "", *, runs: bool = False) -> None:
        """Raises DataError for a cell without a test; with `runs` also for a test that the empty program passes."""
        try:
            tests = parse_tests(row[self.column], row, prompt)
        except NoTest as error:
            raise DataError(f"column {self.column!r}: {error}") from None
        if runs:
            self._require_failing(tests)

    def judge(self, answer: JudgedAnswer) -> Verdict:
        """The share, with the code that was found, and why the first test that fails does."""
        find_sandbox(self.sandbox)
        column_of(answer, self.column)
        prompt = prompt_text(answer.prompt)
        self.check_row(answer.row, prompt, runs=True)
        tests = parse_tests(answer.row[self.column], answer.row, prompt)
        code = code_of(answer.text)
        if code is None:
            return Verdict.of(0.0, None, "no block of Python")
        results = self._results(code, tests)
        passed = sum(result.passed for result in results)
        failed = next(
            (f"; test {number}: {each.reason}" for number, each in enumerate(results, 1) if not each.passed), ""
        )
        return Verdict.of(passed / len(tests), code, f"{passed} of {len(tests)} tests passed{failed}")

    def _results(self, code: str | None, tests: Sequence[ProgramTest]) -> list[ProgramResult]:
        kind = find_sandbox(self.sandbox)
        return judge_program(code, tests, timeout_s=self.timeout_s, memory_mib=self.memory_mib, sandbox=kind)

    def _require_failing(self, tests: Sequence[ProgramTest]) -> None:
        """Raises DataError where the empty program passes a test; each is tried when it is first seen."""
        for test in tests:
            if hash(test) in self._tried:
                continue
            if test.form == "script":
                passes = not test.expected.split()
            else:
                passes = test.form == "source" and self._results(None, [test])[0].passed
            if passes:
                shown = test.source or test.given
                raise DataError(
                    f"column {self.column!r}: the empty program passes a test, so it tests nothing: {shown!r:.200}"
                )
            self._tried.add(hash(test))
