"""What the flight recorder's trace says of a process, and how it travels."""

from __future__ import annotations

from typing import Any

from danlu.parallel.flight_recorder import PendingCollective, ProcessState, decode, oldest_pending

SECOND = 10**9


def entry(number: int, created: int, **changes: Any) -> dict[str, Any]:
    values = {
        "retired": False,
        "time_created_ns": created,
        "process_group": ["2", "data"],
        "profiling_name": "gloo:all_reduce",
        "is_p2p": False,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "input_sizes": [[3, 5]],
    }
    return values | changes


def test_the_oldest_collective_under_way() -> None:
    done = [entry(1, 0, retired=True), entry(2, 1, retired=True)]
    assert oldest_pending({"entries": done}, {}, 9) is None
    two = {"entries": [*done, entry(4, 6 * SECOND), entry(3, 4 * SECOND)]}
    assert oldest_pending(two, {"2": (0, 2)}, 9 * SECOND) == PendingCollective(
        "all_reduce", "2", (0, 2), 3, ((3, 5),), 5.0
    )


def test_a_state_comes_back_from_the_store() -> None:
    pending = PendingCollective("all_reduce", "0", (0, 1, 2, 3), 7, ((3, 5),), 45.2)
    for state in (ProcessState(pending, "a", "b"), ProcessState(None, "", "")):
        assert decode(state.encode()) == state
