"""What is said of a reward function that fails."""

from __future__ import annotations

import json
import sys

import pytest

from danlu.rewards.calling import failure_reason


def test_the_line_to_blame_is_that_of_the_function_and_not_of_what_it_called() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")  # raises in json's own files
    reason = failure_reason(raised.value)
    assert reason.startswith("JSONDecodeError: Expecting property name") and "(test_calling.py:" in reason


def test_without_a_message_the_kind_and_the_line_are_said() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError
    line = sys._getframe().f_lineno - 1
    assert failure_reason(raised.value) == f"RuntimeError (test_calling.py:{line})"
