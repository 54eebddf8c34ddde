"""Pipeline schedules as lists: one contract for all of them, torch's lists beside, and no process."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders.schedule_contract import messages_match, rendezvous, violations

from danlu.core.errors import RecipeError
from danlu.parallel.schedules import (
    KINDS,
    Action,
    chunks_per_rank,
    forwards_only,
    peak_in_flight,
    placement,
    schedule,
    schedule_problems,
)
from danlu.parallel.schedules.messages import with_messages
from danlu.planning.pipeline_simulation import bubble, bubble_formula, in_flight_formula, simulate

VARIANTS = [(kind, chunks_per_rank(kind)) for kind in KINDS] + [("interleaved", 3)]
variants = pytest.mark.parametrize(("kind", "chunks"), VARIANTS)


def sizes(kind: str, chunks: int) -> Iterator[tuple[int, int]]:
    """(stages, micro-batches), also one stage, odd ones, and fewer micro-batches than stages."""
    for stages in (1, 2, 3, 4, 8):
        for micro_batches in (1, 2, 3, 4, 5, 8, 16):
            if not [*schedule_problems(kind, stages, chunks, micro_batches)]:
                yield stages, micro_batches


@variants
def test_every_schedule_keeps_the_contract(kind: str, chunks: int) -> None:
    count = 0
    for stages, micro_batches in sizes(kind, chunks):
        lists = schedule(kind, stages, chunks, micro_batches)
        held = placement(kind, stages, chunks)
        wrong = violations(lists, held, micro_batches, update_each=kind == "pipedream")
        assert not wrong, f"p {stages}, m {micro_batches}: {wrong}"
        count += 1
    assert count >= 15


@variants
def test_in_flight_and_bubble_are_those_of_the_formulas(kind: str, chunks: int) -> None:
    compared = 0
    for stages, micro_batches in sizes(kind, chunks):
        lists = schedule(kind, stages, chunks, micro_batches)
        for rank, actions in enumerate(lists):
            assert peak_in_flight(actions) == in_flight_formula(kind, rank, stages, chunks, micro_batches)[1]
        simulated = bubble(simulate(lists))
        _, formula = bubble_formula(kind, stages, chunks, micro_batches)
        if formula is not None:
            assert simulated.ratio == pytest.approx(formula, abs=1e-12), (stages, micro_batches)
            compared += 1
        if kind == "zbv" and formula is not None:
            assert simulated.inner_idle_s == (0.0,) * stages
    assert compared >= 8


def test_formulas_are_those_of_the_papers() -> None:
    """At p = 4, m = 8, so that a formula and a list cannot be wrong together."""
    ratios = {kind: bubble_formula(kind, 4, chunks_per_rank(kind), 8)[1] for kind in KINDS}
    assert ratios == pytest.approx(
        {
            "naive": 3,
            "gpipe": 3 / 8,
            "1f1b": 3 / 8,
            "interleaved": 3 / 16,
            "zb-h1": 1 / 8,
            "zbv": 1 / 16,
            "dualpipev": 1 / 16,
            "pipedream": 3 / 8,
        }
    )
    in_flight = {
        kind: [in_flight_formula(kind, rank, 4, chunks_per_rank(kind), 8)[1] for rank in range(4)] for kind in KINDS
    }
    assert in_flight == {
        "naive": [1, 1, 1, 1],
        "gpipe": [8, 8, 8, 8],
        "1f1b": [4, 3, 2, 1],
        "interleaved": [11, 9, 7, 5],
        "zb-h1": [4, 4, 4, 4],
        "zbv": [8, 8, 8, 8],
        "dualpipev": [9, 9, 9, 9],
        "pipedream": [4, 3, 2, 1],
    }


# A change of one rank's list -> how the contract names it.
def without(kind: str) -> Callable[[list[Action]], list[Action]]:
    """The list without its last action of a kind."""

    def changed(actions: list[Action]) -> list[Action]:
        last = max(number for number, action in enumerate(actions) if action.kind == kind)
        return actions[:last] + actions[last + 1 :]

    return changed


def swapped(first: str, second: str) -> Callable[[list[Action]], list[Action]]:
    """The list with its first action of a kind and the first later one of another kind in each other's place."""

    def changed(actions: list[Action]) -> list[Action]:
        i = next(number for number, action in enumerate(actions) if action.kind == first)
        j = next(number for number in range(i + 1, len(actions)) if actions[number].kind == second)
        actions[i], actions[j] = actions[j], actions[i]
        return actions

    return changed


def twice(actions: list[Action]) -> list[Action]:
    first = next(action for action in actions if action.kind == "forward")
    return [first, *actions]


def early_update(actions: list[Action]) -> list[Action]:
    return [actions[-1], *actions[:-1]]


def other_peer(actions: list[Action]) -> list[Action]:
    number = next(number for number, action in enumerate(actions) if action.kind == "send")
    actions[number] = actions[number]._replace(peer=(actions[number].peer or 0) + 1)
    return actions


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("forward"), "once"),
        (without("weight"), "once"),
        (twice, "once"),
        (without("send"), "messages"),
        (without("receive"), "messages"),
        (other_peer, "messages"),
        (swapped("send", "send"), "messages"),
        (swapped("receive", "receive"), "messages"),
        (without("reduce"), "update"),
        (swapped("weight", "reduce"), "reduce"),
        (without("update"), "update"),
        (early_update, "update"),
        (swapped("input", "weight"), "order"),
        (swapped("receive", "input"), "order"),
        (swapped("receive", "send"), "deadlock"),
    ],
)
@pytest.mark.parametrize("kind", ["zb-h1", "zbv"])
def test_a_broken_list_breaks_the_contract(kind: str, change: Any, named: str) -> None:
    chunks = chunks_per_rank(kind)
    lists = [list(actions) for actions in schedule(kind, 4, chunks, 8)]
    lists[1] = change(lists[1])
    wrong = violations(lists, placement(kind, 4, chunks), 8, update_each=False)
    assert [line for line in wrong if line.startswith(named)], wrong


def test_sends_before_receives_would_wait_for_each_other() -> None:
    """1F1B as it is often written: each rank sends its activation, then receives the gradient that the next rank
    sends before it receives: with buffers it runs, with sends that wait it does not."""
    lists = []
    for actions in schedule("1f1b", 4, 1, 8):
        late: list[Action] = []
        waiting: list[Action] = []
        for action in actions:  # receives directly before the computation that needs them
            if action.kind == "receive":
                waiting.append(action)
                continue
            if action.kind in ("forward", "backward"):
                what = "activation" if action.kind == "forward" else "gradient"
                late += [message for message in waiting if (message.what, message.micro) == (what, action.micro)]
                waiting = [message for message in waiting if message not in late]
            late.append(action)
        lists.append(late)
    assert bubble(simulate(lists)).ratio == pytest.approx(3 / 8)
    wrong = violations(lists, placement("1f1b", 4, 1), 8, update_each=False)
    assert [line for line in wrong if line.startswith("deadlock")] and not [
        line for line in wrong if "messages" in line
    ]


def test_a_greedy_list_of_zb_h1_misses_its_bubble() -> None:
    """1F1B with weight gradients directly behind input gradients: 0.25, not the 0.125 of ranks that put them off."""
    lists = []
    for rank in range(4):
        actions = [Action("forward", rank, micro) for micro in range(4 - rank)]
        for micro in range(8):
            actions += [Action("input", rank, micro), Action("weight", rank, micro)]
            if micro + 4 - rank < 8:
                actions.append(Action("forward", rank, micro + 4 - rank))
        lists.append(actions)
    greedy = with_messages(lists, placement("zb-h1", 4, 1), update_each=False)
    assert bubble(simulate(greedy)).ratio == pytest.approx(0.25)
    assert bubble(simulate(schedule("zb-h1", 4, 1, 8))).ratio == pytest.approx(0.125)


def test_chunks_are_placed_in_a_loop_or_in_a_v() -> None:
    assert placement("1f1b", 3, 1) == ((0,), (1,), (2,))
    assert placement("interleaved", 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert placement("zbv", 3, 2) == placement("dualpipev", 3, 2) == ((0, 5), (1, 4), (2, 3))


def test_one_process_takes_its_micro_batches_one_after_the_other() -> None:
    (actions,) = schedule("1f1b", 1, 1, 2)
    assert actions == (
        Action("forward", 0, 0),
        Action("backward", 0, 0),
        Action("forward", 0, 1),
        Action("backward", 0, 1),
        Action("reduce", 0),
        Action("update"),
    )


def test_pipedream_updates_after_each_micro_batch() -> None:
    (first, last) = schedule("pipedream", 2, 1, 3)
    assert [(a.kind, a.micro) for a in last if a.kind not in ("send", "receive")] == [
        (kind, micro) for micro in range(3) for kind in ("forward", "backward", "reduce", "update")
    ]
    # Two versions of the first rank's weights: micro-batch 1 goes forward before the update of micro-batch 0.
    kinds = [(a.kind, a.micro) for a in first]
    assert kinds.index(("forward", 1)) < kinds.index(("update", 0)) < kinds.index(("forward", 2))


@variants
def test_forward_passes_alone_come_to_their_end(kind: str, chunks: int) -> None:
    stages, micro_batches = 4, 8
    lists = [forwards_only(actions) for actions in schedule(kind, stages, chunks, micro_batches)]
    assert {a.kind for actions in lists for a in actions} == {"forward", "send", "receive"}
    assert sum(a.kind == "forward" for actions in lists for a in actions) == stages * chunks * micro_batches
    assert [*messages_match(lists), *rendezvous(lists, stages * chunks)] == []


KIND = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}


def torch_lists(name: str, stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """torch's computations of each rank."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

        ranks = get_schedule_ops(name, stages, micro_batches, chunks)
    flat = [[part for op in ops if op for part in (op.sub_actions or (op,))] for ops in ranks]
    return [
        [
            Action(KIND[op.computation_type.name], op.stage_index, op.microbatch_index)  # type: ignore[arg-type]
            for op in ops
            if op.computation_type.name in KIND
        ]
        for ops in flat
    ]


def renumbered(actions: list[Action], rank: int) -> Iterator[Action]:
    """torch's list of a schedule with one chunk, which numbers every chunk 0, and 1F1B's last forwards from 1 to m."""
    count = dict.fromkeys(KIND.values(), -1)
    for action in actions:
        count[action.kind] += 1
        yield action._replace(chunk=rank, micro=count[action.kind])


def computations(kind: str, stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    lists = schedule(kind, stages, chunks, micro_batches)
    return [[action for action in actions if action.kind in KIND.values()] for actions in lists]


@pytest.mark.parametrize(
    ("kind", "name", "chunks"),
    [
        ("gpipe", "GPipe", 1),
        ("1f1b", "1F1B", 1),
        ("interleaved", "Interleaved1F1B", 2),
        ("interleaved", "Interleaved1F1B", 3),
        ("zbv", "ZBVZeroBubble", 2),
        ("dualpipev", "DualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_lists_are_torch_s(kind: str, name: str, chunks: int, stages: int, micro_batches: int) -> None:
    ours = computations(kind, stages, chunks, micro_batches)
    theirs = torch_lists(name, stages, chunks, micro_batches)
    if chunks == 1:
        theirs = [[*renumbered(actions, rank)] for rank, actions in enumerate(theirs)]
    if kind == "zbv":  # put-off weight gradients are ours in the order in which they were put off
        ours, theirs = (
            [[Action("weight") if a.kind == "weight" else a for a in actions] for actions in lists]
            for lists in (ours, theirs)
        )
    assert ours == theirs


@pytest.mark.parametrize("micro_batches", range(1, 20))
def test_interleaved_fits_what_torch_s_fits(micro_batches: int) -> None:
    fits = True
    try:
        torch_lists("Interleaved1F1B", 4, 2, micro_batches)
    except ValueError:
        fits = False
    assert fits == (not [*schedule_problems("interleaved", 4, 2, micro_batches)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zvb", 4, 2, 8), "kind: there is no schedule 'zvb'. Did you mean 'zbv'? There are naive, gpipe, 1f1b"),
        (("interleaved", 4, 2, 9), "micro_batches: 9, which interleaved on 4 stages cannot divide into equal rounds. "
         "Use 8 or 10"),
        (("interleaved", 4, 1, 8), "chunks: 1, but interleaved needs 2 or more on each rank. Use 2, or 1f1b"),
        (("1f1b", 4, 2, 8), "chunks: 2, but 1f1b has 1 on each rank. Use 1, or interleaved"),
        (("zbv", 4, 3, 8), "chunks: 3, but zbv has 2 on each rank. Use 2"),
        (("dualpipev", 4, 2, 7), "micro_batches: 7, but dualpipev on 4 stages needs 8 or more. Use 8, or zbv"),
        (("gpipe", 0, 1, 8), "stages: 0, but it must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_scheduled_is_refused_with_what_can(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        schedule(*arguments)
    assert str(refused.value).startswith(message)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RecipeError) as refused:
        schedule("dualpipev", 4, 3, 2)
    assert [problem.split(":")[0] for problem in refused.value.problems] == ["chunks", "micro_batches"]


def test_actions_in_words() -> None:
    words = [str(action) for actions in schedule("zb-h1", 2, 1, 1) for action in actions]
    assert words[:2] == [
        "forward of micro-batch 0 in chunk 0",
        "send the activation of micro-batch 0 from chunk 0 to rank 1",
    ]
    assert "receive the gradient of micro-batch 0 for chunk 0 from rank 1" in words
    assert "weight gradient of micro-batch 0 in chunk 1" in words
    assert words[-2:] == ["sum the gradients of chunk 1 over data ranks", "update the weights"]


def test_lists_need_no_torch() -> None:
    program = (
        "import sys, danlu.parallel.schedules, danlu.planning.pipeline_simulation; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
