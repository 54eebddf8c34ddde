"""The collector of cycles is off in a block, and afterwards as it was; and it does not run when a command has ended."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from danlu.core.garbage_collection import collection_paused


def fail() -> None:
    with collection_paused():
        assert not gc.isenabled()
        raise ValueError("inside")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_left_as_it_was(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="inside"):
            fail()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


CYCLE = """
from danlu.core.garbage_collection import skip_collection_at_exit

class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self):
        print("collected")

Cycle()
"""


@pytest.mark.parametrize(("last_line", "output"), [("skip_collection_at_exit()", ""), ("", "collected\n")])
def test_cycles_are_not_looked_for_at_exit(last_line: str, output: str) -> None:
    ended = subprocess.run([sys.executable, "-c", CYCLE + last_line], check=True, capture_output=True, text=True)
    assert ended.stdout == output
