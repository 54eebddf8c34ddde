"""Processes of tests begin with everything loaded, whichever module's list would have been the last to be set."""

from __future__ import annotations

import multiprocessing

import pytest
from builders import fork_server
from builders.process_group import run_group


@pytest.mark.distributed
def test_a_process_of_a_group_imports_nothing_more() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(["json"])  # as `danlu verify` sets its own
    assert run_group(fork_server.modules_to_import, 1) == [[]]


def test_what_is_not_loaded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "MODULES", ["multiprocessing", "danlu.no_such_module"])
    assert fork_server.modules_to_import() == ["danlu.no_such_module"]
