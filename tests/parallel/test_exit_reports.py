"""What is told of processes that failed: the first reason first, the others folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danlu.core.errors import DanluError, DataError, HangError, RecipeError, ResourceError, TrainingError
from danlu.parallel.exit_reports import (
    ExitReport,
    FailureCause,
    failure_cause,
    is_peer_failure,
    read_report,
    stopped_by_signal,
    write_report,
)

GONE = "RuntimeError: Connection closed by peer\nTraceback ..."


def judged(
    *left: ExitReport | None, exits: list[int | None] | None = None, logs: dict[int, Path] | None = None
) -> FailureCause:
    codes = exits or [1] * len(left)
    return failure_cause(dict(enumerate(left)), dict(enumerate(codes)), logs or {})


def report(rank: int, kind: Any, at: float, *said: str, code: int = 1) -> ExitReport:
    return ExitReport(rank, kind, code, said, at)


def test_the_first_is_told_and_what_follows_from_it_folded() -> None:
    found = judged(
        report(0, "consequence", 3.0, GONE),
        report(1, "consequence", 1.0, GONE),  # noticed before the other had written its file
        report(2, "error", 2.0, "rows.jsonl:7: no text", code=3),
        report(3, "consequence", 4.0, GONE),
    )
    assert type(found.error) is DataError
    assert str(found.error) == "rank 2: rows.jsonl:7: no text\nranks 0, 1 and 3 then stopped waiting"
    assert found.short == "rank 2: rows.jsonl:7: no text"
    assert not found.may_retry  # it would fail in the same way


def test_what_all_met_is_told_once() -> None:
    found = judged(*(report(rank, "error", rank, "a.yaml:1: x", "a.yaml:2: y", code=2) for rank in range(3)))
    assert isinstance(found.error, RecipeError) and found.error.problems == ["a.yaml:1: x", "a.yaml:2: y"]
    some = judged(
        *(report(rank, "error", rank, "disk full", code=6) for rank in (0, 1)), report(2, "consequence", 9, GONE)
    )
    assert str(some.error) == "ranks 0 and 1: disk full\nrank 2 then stopped waiting"


def test_another_error_of_its_own_is_mentioned() -> None:
    found = judged(
        report(0, "failure", 2.0, "KeyError: 'a'\nTraceback ..."), report(1, "error", 1.0, "bad row", code=3)
    )
    assert str(found.error) == "rank 1: bad row\nrank 0 failed as well: KeyError: 'a'"


def test_a_bug_may_be_tried_again_and_shows_its_traceback() -> None:
    found = judged(
        report(0, "failure", 1.0, "KeyError at layers.3 (forward, step 2): 'a'\nTraceback ..."), None, exits=[1, None]
    )
    assert str(found.error) == "rank 0: KeyError at layers.3 (forward, step 2): 'a'\nTraceback ..."
    assert found.short == "rank 0: KeyError at layers.3 (forward, step 2): 'a'"
    assert found.may_retry and type(found.error) is DanluError


def test_killed_from_outside() -> None:
    begun = report(1, "begun", 0.0)
    # The other's words are of no known kind, but it fails because of the kill.
    for other in (report(0, "consequence", 1.0, GONE), report(0, "failure", 1.0, "OSError: what is this?")):
        found = judged(other, begun, exits=[1, -9])
        assert isinstance(found.error, ResourceError)
        assert found.short == "rank 1 was killed (SIGKILL), as the system does where memory runs out"
        assert found.may_retry
        assert str(found.error).endswith("what a step is expected to hold")
    known = failure_cause({0: None, 1: None}, {0: None, 1: -9}, {}, memory_kills=1)  # the system has counted it
    assert known.short == "rank 1 was killed (SIGKILL), because memory ran out"
    # A DanluError is a reason of its own.
    assert type(judged(report(0, "error", 1.0, "bad", code=3), begun, exits=[3, -9]).error) is DataError
    # And one that was ended because it still ran when the first had failed is not mentioned.
    assert "rank 1" not in str(judged(report(0, "error", 1.0, "bad", code=3), begun, exits=[3, None]).error)


def test_an_abort_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.txt"
    log.write_text("one\ntwo\nthree\nterminate called\n")
    found = judged(report(0, "consequence", 1.0, GONE), None, exits=[1, -6], logs={1: log})
    assert str(found.error) == (
        f"rank 1 was ended by SIGABRT\n  the end of {log}:\n    two\n    three\n    terminate called\n"
        "rank 0 then stopped waiting"
    )
    assert found.short == "rank 1 was ended by SIGABRT"


def test_an_abort_after_another_s_error_is_its_consequence() -> None:
    """gloo aborts where what the others send does not fit."""
    found = judged(report(0, "failure", 1.0, "KeyError: 'a'"), report(1, "begun", 0.0), exits=[1, -6])
    assert found.short == "rank 0: KeyError: 'a'"


def test_ended_without_a_word() -> None:
    found = judged(report(0, "consequence", 1.0, GONE), report(1, "begun", 0.0), exits=[1, 0])
    assert found.short == "rank 1 ended with exit code 0 and without a word"


def test_a_hang_is_told_once_and_may_be_tried_again() -> None:
    words = "ranks 0 and 2 have waited for 45 s in all_reduce; rank 1 never came"
    found = judged(
        report(0, "hang", 1.0, words, code=8),
        report(1, "begun", 0.0),
        report(2, "hang", 1.1, f"{words} (a little later)", code=8),
        exits=[8, None, 8],
    )
    assert isinstance(found.error, HangError) and found.error.exit_code == 8 and str(found.error) == words
    assert found.may_retry
    # One that was killed, and that the others waited for, is the reason.
    assert judged(report(0, "hang", 1.0, words, code=8), None, exits=[8, -9]).short.startswith("rank 1 was killed")


def test_only_consequences() -> None:
    found = judged(report(0, "consequence", 2.0, GONE), report(1, "consequence", 1.0, GONE))
    assert found.short == "rank 1: RuntimeError: Connection closed by peer"
    assert "rank 0 then stopped waiting" in str(found.error) and found.may_retry


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("[unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"), True),
        (ConnectionResetError("x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (TrainingError("the loss of rows at Connection closed is not finite"), False),
        (KeyError("gloo"), False),
    ],
)
def test_consequences(error: BaseException, consequence: bool) -> None:
    assert is_peer_failure(error) is consequence


def test_where_it_is_left(tmp_path: Path) -> None:
    said = ExitReport(3, "error", 3, ("bad", "worse"), 1.5)
    assert read_report(tmp_path / "none.json") is None
    write_report(
        said, {"DANLU_EXIT_REPORT": str(tmp_path / "a.json"), "TORCHELASTIC_ERROR_FILE": str(tmp_path / "b.json")}
    )
    assert read_report(tmp_path / "a.json") == said
    assert not (tmp_path / "b.json").exists()
    # torchrun reads its own format.
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    write_report(said, {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "b.json")})
    shown = ProcessFailure(3, 1, 3, str(tmp_path / "b.json"))
    assert (shown.message["message"], shown.timestamp) == ("bad\nworse", 1)
    write_report(ExitReport(3, "finished"), {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "c.json")})
    write_report(said, {})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_room_for_the_end_is_reserved_at_the_beginning(tmp_path: Path) -> None:
    """A run that ends because its disk is full has to say so on that disk."""
    file, reserved = tmp_path / "rank-0.json", tmp_path / "rank-0.json.tmp"
    ExitReport(0, "begun").write(file)
    room = reserved.stat()
    assert room.st_blocks * 512 >= 64 << 10  # taken, and not only promised
    said = ExitReport(0, "error", 6, ("the disk is full",), 1.5)
    said.write(file)
    assert read_report(file) == said and not reserved.exists()
    assert file.stat().st_ino == room.st_ino
    # Control: without a beginning there was no room.
    said.write(tmp_path / "other.json")
    assert read_report(tmp_path / "other.json") == said
    assert (tmp_path / "other.json").stat().st_ino != room.st_ino


@pytest.mark.parametrize(
    ("left", "exits", "alone"),
    [
        (("consequence", "stopped at once"), [1, 0], 1),
        (("begun", "stopped at once"), [None, 0], 1),  # still waited for the other, and was ended by the launcher
        (("stopped", "stopped at once"), [0, 0], 1),
        (("consequence", "stopped"), [1, 0], None),  # that one has saved, so the other failed of something else
        (("error", "stopped at once"), [1, 0], None),
        (("begun", "stopped at once"), [-9, 0], None),
        (("consequence", "consequence"), [1, 1], None),
    ],
)
def test_one_that_a_signal_stopped_alone(left: tuple[str, str], exits: list[int | None], alone: int | None) -> None:
    made = {}
    for rank, kind in enumerate(left):
        said = ("stopped at once; nothing was saved",) if kind == "stopped at once" else ()
        made[rank] = report(rank, "stopped" if said else kind, float(rank), *said, code=143)
    found = stopped_by_signal(made, dict(enumerate(exits)))
    assert (None if found is None else found.rank) == alone
