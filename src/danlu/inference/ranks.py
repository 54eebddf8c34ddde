"""A rollout engine on several processes: requests are dealt among data ranks, and every process gets all answers.

Ranks that have one copy of the model together, tensor ranks and stages of a pipeline, answer the same requests with the
same draws. Data ranks answer different ones, in passes of their own, and so do context ranks, for sequences are not cut
here; where each pass gathers sharded weights they make them in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from danlu.core.errors import DataError
from danlu.inference.rank_status import PeerFailedError, PeerStatus, gather_answers
from danlu.inference.request import Completion, Request
from danlu.inference.sharded_weights import ShardedWeights
from danlu.parallel.ranks import Ranks

if TYPE_CHECKING:
    from danlu.inference.embedded import EmbeddedEngine

STEPS_PER_EXCHANGE = 16
"""Steps of an engine between two looks at the other ranks, where no pass needs them: often enough that the wait for one
that is behind stays far below the time that a collective may take, and that an error elsewhere ends the work here."""


class ParallelEngine:
    """A `RolloutEngine` over one engine on each process: each data and context rank answers its share, with the other
    ranks of its copy of the model. All processes make the same calls in the same order.

    Args:
        engine: answers on this process.
        ranks: this process among all.
        model: its forward pass is one of the engine, through all stages.
        weights: the model's, where data ranks shard them.
    """

    def __init__(
        self, engine: EmbeddedEngine, ranks: Ranks, model: nn.Module, weights: ShardedWeights | None = None
    ) -> None:
        self.engine, self._ranks, self._model, self._weights = engine, ranks, model, weights
        self.version = engine.version
        self._world_status = PeerStatus(ranks.world)
        self._copy_status = PeerStatus(ranks.tensor, ranks.pipeline)
        """Status of the ranks that have one copy of the model together."""
        self._steps = 0
        self._in_pass = False  # within a pass that has collectives

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to the requests, in their order and by sample, on all processes.

        Requests are dealt by the tokens they may take, longest first. Raises an error of any process on all of them,
        after which the requests are gone.
        """
        dealt = longest_first(requests)
        own = self._share_of(dealt)
        return in_order(requests, self._together(lambda: self._answer(own)))

    def update(self, version: int) -> None:
        """Goes on with the policy's present weights."""
        self._close_weights()

        def update() -> list[Completion]:
            self.engine.update(version)
            return []

        self._together(update, passes=False)
        self.version = version

    def sleep(self) -> None:
        """Gives the memory of caches and gathered weights back until `wake`."""
        self._close_weights()
        self.engine.sleep()

    def wake(self) -> None:
        """Takes the memory of caches again."""
        self.engine.wake()

    def close(self) -> None:
        """Gives all memory back."""
        self._close_weights()
        self.engine.close()

    # ── this process ──

    def _share_of(self, requests: Sequence[Request]) -> list[Request]:
        """This process's requests: each goes to the rank that has the fewest tokens to come when its turn is (Graham's
        LPT rule)."""
        data = self._ranks.dense_data.all
        loads, own = [0] * data.size, []
        for request in requests:
            share = loads.index(min(loads))
            loads[share] += expected_tokens(request)
            if share == data.index:
                own.append(request)
        return own

    def _answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to this process's share."""
        submitted: list[Request] = []
        completions: list[Completion] = []
        try:
            for request in requests:
                self.engine.submit(request)
                submitted.append(request)
            while self.engine.unfinished:
                self._before_step()
                completions += self.engine.step()
        except Exception:
            if not self._in_pass:
                for request in submitted:
                    self.engine.abort(request.number)
                self.engine.step()  # runs no pass, for nothing is left: returns what was aborted
            raise
        return completions

    # ── all processes ──

    def _before_step(self) -> None:
        """Now and then, where passes are not made in step, a look at the other ranks."""
        if self._is_in_step:
            return  # each pass looks at them
        self._steps += 1
        if self._steps % STEPS_PER_EXCHANGE == 0:
            self._world_status.exchange(works=True)

    @contextmanager
    def _checked_passes(self) -> Iterator[None]:
        """A context in which each pass that has collectives begins with a check whether all who take part still come to
        it."""
        is_cut = self._ranks.tensor.size > 1 or self._ranks.pipeline.size > 1
        if not (self._is_in_step or is_cut):
            yield
            return
        status = self._world_status if self._is_in_step else self._copy_status

        def begin(*_: object) -> None:
            status.exchange(works=True)
            self._in_pass = True

        def end(*_: object) -> None:
            self._in_pass = False

        # Before FSDP2's own hook, which gathers.
        hooks = self._model.register_forward_pre_hook(begin, prepend=True), self._model.register_forward_hook(end)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _together(self, work: Callable[[], list[Completion]], *, passes: bool = True) -> list[Completion]:
        """Runs this process's work while others do theirs; returns the completions of all. Raises an error of any on
        all.

        passes: whether the work runs the model. An error in the middle of a pass that has collectives is raised at
        once: others wait in them for a process that will not come, and end when it has gone.
        """
        own: list[Completion] = []
        error: Exception | None = None
        if passes and self._weights is not None:
            self._weights.open()
            # Copies would be of the whole model, which has no room.
            self.engine.copies_weights = not self._is_in_step
        self._world_status.begin()
        self._copy_status.begin()
        self._in_pass = False
        try:
            with self._checked_passes():
                own = work()
        except PeerFailedError:
            pass
        except Exception as problem:
            if self._in_pass:
                raise
            error = problem
        self._wait_for_others(failed=error is not None, passes=passes)
        speaks = self._ranks.tensor.index == self._ranks.pipeline.index == 0  # for the ranks of its copy of the model
        try:
            completions = gather_answers(self._ranks.world, own if speaks else [], error)
        except Exception:
            self._close_weights()
            # Some were interrupted and some not: without caches they go on alike, as ranks of one copy must.
            self.engine.update(self.version)
            raise
        self._close_weights()
        return completions

    def _wait_for_others(self, *, failed: bool, passes: bool) -> None:
        """Waits until all have come here. Meanwhile those that gather in each pass need this process in it."""
        if passes and not self._is_in_step and not self._copy_status.any_failed:
            self._copy_status.exchange(works=False, failed=failed)
        while not self._world_status.any_failed and self._world_status.exchange(works=False, failed=failed):
            if not self._world_status.any_failed and self._weights is not None and self._is_in_step:
                self._weights.empty_pass()

    @property
    def _is_in_step(self) -> bool:
        """Whether each pass gathers weights, so that all data ranks take part in it."""
        return self._weights is not None and self._weights.in_step

    def _close_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()


def expected_tokens(request: Request) -> int:
    """The most tokens of a request: its prompt, which is read once, and all tokens of its answers."""
    return len(request.prompt) + request.samples * request.max_new_tokens


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """The requests by the tokens they may take. Raises DataError where two have one number."""
    numbers = [request.number for request in requests]
    places = {number: place for place, number in enumerate(numbers)}
    if repeated := [number for place, number in enumerate(numbers) if places[number] != place]:
        raise DataError(f"prompt {repeated[0]}: another unfinished request has this number. Give each its own")
    return sorted(requests, key=expected_tokens, reverse=True)


def in_order(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Completion]:
    """Answers in the order of their requests, and by sample."""
    places = {request.number: place for place, request in enumerate(requests)}
    return sorted(completions, key=lambda completion: (places[completion.number], completion.sample))
