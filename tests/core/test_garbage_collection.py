"""The collector of cycles is off in a block, and afterwards as it was."""

from __future__ import annotations

import gc

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
