"""Worker processes: what a reply is, and how the end of a worker is seen."""

from __future__ import annotations

import pytest

from danlu.core.errors import ResourceError
from danlu.core.worker_process import WorkerProcess


def replies_of(statement: str, *requests: object) -> list[bytes | None]:
    worker = WorkerProcess(f"from danlu.core.worker_process import Caller; caller = Caller(); {statement}", *requests)
    replies = []
    try:
        while not replies or replies[-1] is not None:
            replies.append(worker.receive(60.0))
    finally:
        worker.end()
    return replies


def test_a_worker_replies_and_nothing_printed_is_a_reply() -> None:
    statement = "first = caller.receive(); print('chatter'); caller.send([b'a', first]); caller.reply({'b': 1})"
    assert replies_of(statement, b"\0bytes") == [b"a\0bytes", b'{"b": 1}', None]
    # control: what is written into the pipe itself is seen, and ends the conversation
    assert replies_of("caller.replies.write(b'chatter ' * 9); caller.replies.flush(); caller.receive()", 0) == [None]


@pytest.mark.parametrize(("write", "replies"), [("content", [b"whole", None]), ("content[:-1]", [None])])
def test_a_torn_reply_is_none(write: str, replies: list[bytes | None]) -> None:
    statement = (
        "import io; own, caller.replies = caller.replies, io.BytesIO(); caller.send([b'whole']); "
        f"content = caller.replies.getvalue(); own.write({write}); own.flush()"
    )
    assert replies_of(statement, 0) == replies


def test_a_worker_that_keeps_its_error_output_says_how_it_ended() -> None:
    worker = WorkerProcess("import sys; print('no such library', file=sys.stderr); sys.exit(7)", 0, keeps_stderr=True)
    try:
        assert worker.receive(60.0) is None
        assert (worker.ending(30.0), worker.stderr()) == ("ended with exit code 7", "no such library")
        with pytest.raises(ResourceError, match="loading it: its process ended with exit code 7"):
            worker.report_of(None, "loading it")
    finally:
        worker.end()
