"""What every pipeline schedule promises, checked on its lists alone: each function returns what is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from danlu.parallel.schedules import Action

Lists = Sequence[Sequence[Action]]
SECOND_END = {"activation": 1, "gradient": -1}  # from the chunk that sends to the chunk that receives


def violations(lists: Lists, held: Sequence[Sequence[int]], micro_batches: int, *, update_each: bool) -> list[str]:
    """All of what is wrong with the lists of a step, over chunks that the ranks hold as `held` says."""
    return [
        *computed_once(lists, held, micro_batches),
        *messages_match(lists),
        *gradients_are_reduced(lists, held, micro_batches, update_each),
        *rendezvous(lists, 1 + max(chunk for chunks in held for chunk in chunks)),
    ]


def computed_once(lists: Lists, held: Sequence[Sequence[int]], micro_batches: int) -> Iterator[str]:
    """Each micro-batch goes once through each chunk, forward and backward, on the rank that holds the chunk."""
    for rank, (actions, chunks) in enumerate(zip(lists, held, strict=True)):
        counts = Counter((a.kind, a.chunk, a.micro) for a in actions)
        for chunk in chunks:
            for micro in range(micro_batches):
                forward, whole, half, weight = (
                    counts.pop((kind, chunk, micro), 0) for kind in ("forward", "backward", "input", "weight")
                )
                if forward != 1 or (whole, half, weight) not in ((1, 0, 0), (0, 1, 1)):
                    yield f"once: rank {rank} chunk {chunk} micro-batch {micro}: {forward} {whole} {half} {weight}"
        if other := [key for key in counts if key[0] in ("forward", "backward", "input", "weight")]:
            yield f"once: rank {rank} computes {other} too"


def messages_match(lists: Lists) -> Iterator[str]:
    """The sends from a rank to another are the other's receives from it, in the same order, in each direction."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(lists):
        for a in actions:
            if a.kind == "send":
                sent[rank, a.peer].append((a.what, a.chunk + SECOND_END[a.what], a.micro))
            elif a.kind == "receive":
                received[a.peer, rank].append((a.what, a.chunk, a.micro))
    for route in sent.keys() | received.keys():
        if route[0] == route[1] or sent[route] != received[route]:
            yield f"messages: from rank {route[0]} to rank {route[1]}"


def gradients_are_reduced(
    lists: Lists, held: Sequence[Sequence[int]], micro_batches: int, update_each: bool
) -> Iterator[str]:
    """Each chunk's gradients are summed once they are complete, and before the update that uses them."""
    for rank, (actions, chunks) in enumerate(zip(lists, held, strict=True)):
        complete: dict[int, int] = dict.fromkeys(chunks, 0)
        reduced: list[tuple[int | None, int | None]] = []
        updates = 0
        for a in actions:
            if a.kind in ("backward", "weight"):
                complete[a.chunk] += 1
            elif a.kind == "reduce":
                reduced.append((a.chunk, a.micro))
                expected = updates + 1 if update_each else micro_batches
                if complete.get(a.chunk) != expected:
                    yield f"reduce: rank {rank} sums chunk {a.chunk} after {complete.get(a.chunk)} micro-batches"
            elif a.kind == "update":
                micro = updates if update_each else None
                if a.micro != micro or sorted(reduced) != [(chunk, micro) for chunk in sorted(chunks)]:
                    yield f"update: rank {rank} updates {a.micro} when it has summed {reduced}"
                updates, reduced = updates + 1, []
        if updates != (micro_batches if update_each else 1) or actions[-1].kind != "update":
            yield f"update: rank {rank} updates {updates} times, last is {actions[-1]}"


def rendezvous(lists: Lists, num_chunks: int) -> Iterator[str]:
    """The lists come to their end where a send waits for its receive, and nothing is computed before what it needs.

    Every rank does one action after the other; a message passes only when both of its ranks have come to it.
    """
    position = [0] * len(lists)
    there: list[set[tuple[object, ...]]] = [set() for _ in lists]  # what each rank has

    def current(rank: int) -> Action | None:
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(lists)):
            while (a := current(rank)) is not None:
                if a.kind == "receive":
                    break  # passes with its send
                if a.kind == "send":
                    end = current(a.peer)
                    if end is None or (end.kind, end.peer, end.what, end.micro) != ("receive", rank, a.what, a.micro):
                        break
                    if (a.what, a.chunk, a.micro) not in there[rank]:
                        yield f"order: rank {rank} sends before it is there: {a}"
                    there[a.peer].add((a.what, a.chunk, a.micro))
                    position[a.peer] += 1
                elif a.kind not in ("reduce", "update"):
                    yield from (
                        f"order: rank {rank}: {a} before {need}" for need in missing(a, there[rank], num_chunks)
                    )
                    there[rank].add((RESULT[a.kind], a.chunk, a.micro))
                position[rank] += 1
                moved = True
    waiting = [f"rank {rank}: {current(rank)}" for rank in range(len(lists)) if current(rank) is not None]
    if waiting:
        yield "deadlock: " + "; ".join(waiting)


RESULT = {"forward": "activation", "backward": "gradient", "input": "gradient", "weight": "weight"}


def missing(a: Action, there: set[tuple[object, ...]], num_chunks: int) -> list[tuple[object, ...]]:
    """What a computation needs and its rank does not have."""
    needed: list[tuple[object, ...]] = []
    if a.kind == "forward" and a.chunk > 0:
        needed = [("activation", a.chunk - 1, a.micro)]
    if a.kind in ("backward", "input"):
        needed = [("activation", a.chunk, a.micro)]
        if a.chunk < num_chunks - 1:
            needed.append(("gradient", a.chunk + 1, a.micro))
    if a.kind == "weight":
        needed = [("gradient", a.chunk, a.micro)]
    return [need for need in needed if need not in there]
