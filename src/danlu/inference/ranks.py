"""A rollout engine on several processes: requests are dealt among data ranks, and every process gets all answers.

Ranks that have one copy of the model together, tensor ranks and stages of a pipeline, answer the same requests with the
same draws. Data ranks answer different ones, in passes of their own, and so do context ranks, for sequences are not cut
here; where each pass gathers sharded weights they make them in step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from danlu.core.errors import DanluError, DataError
from danlu.inference.completion_bytes import from_bytes
from danlu.inference.engine import PauseMode, RolloutEngine
from danlu.inference.rank_status import PeerFailedError, PeerStatus, first_failure, payload_of
from danlu.inference.request import Completion, OnToken, Request
from danlu.inference.sharded_weights import ShardedWeights
from danlu.inference.stopping import Decode
from danlu.parallel.process_group import untimed_barrier
from danlu.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.inference.embedded import EmbeddedEngine

STEPS_PER_EXCHANGE = 16
"""Steps of an engine between two looks at the other ranks, where no pass needs them: often enough that the wait for one
that is behind stays far below the time that a collective may take, and that an error elsewhere ends the work here."""

_barriers = itertools.count()

Offer = Callable[[], "Iterable[tuple[str, Tensor]] | None"]
Check = Callable[[RolloutEngine], None]


@dataclass
class _Dealt:
    """An unfinished request: the share that answers it, the most tokens of it, and the answers that are still to
    come."""

    share: int
    tokens: int
    answers: int


def expected_tokens(request: Request) -> int:
    """The most tokens of a request: its prompt, which is read once, and all tokens of its answers."""
    return len(request.prompt) + request.samples * request.max_new_tokens


class ParallelEngine:
    """A `RolloutEngine` over one engine on each process. All processes make the same calls in the same order.

    Args:
        engine: answers on this process; None where another process answers for this one.
        ranks: this process among all.
        model: the embedded engine's. weights: the model's, where data ranks shard them.
        shares: the number of shares that requests are dealt among; share: the one that this process answers.
        speaks: whether others have the answers of this share from this process.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        ranks: Ranks,
        *,
        model: nn.Module | None = None,
        weights: ShardedWeights | None = None,
        shares: int,
        share: int,
        speaks: bool,
    ) -> None:
        self.engine, self._ranks, self._model, self._weights = engine, ranks, model, weights
        self._shares, self._share, self._speaks = shares, share, speaks
        self.version = 0 if engine is None else engine.version
        self._world_status = PeerStatus(ranks.world)
        self._copy_status = PeerStatus(ranks.tensor, ranks.pipeline)
        """Status of the ranks that have one copy of the model together."""
        self._dealt: dict[int, _Dealt] = {}
        self._kept: list[Completion] = []  # complete, and not returned yet
        self._steps = 0
        self._in_pass = False  # within a pass that has collectives
        self._embedded: EmbeddedEngine | None = None
        self._offer: Offer | None = None
        self._check: Check | None = None
        self._is_unchecked = False  # since an update

    @classmethod
    def embedded(
        cls, engine: EmbeddedEngine, ranks: Ranks, model: nn.Module, weights: ShardedWeights | None = None
    ) -> ParallelEngine:
        """Makes an engine in which each data and context rank answers its share, with the other ranks of its copy of
        the model.

        model: its forward pass is one of the engine, through all stages.
        """
        data, speaks = ranks.dense_data.all, ranks.tensor.index == ranks.pipeline.index == 0
        embedded = cls(engine, ranks, model=model, weights=weights, shares=data.size, share=data.index, speaks=speaks)
        embedded._embedded = engine
        return embedded

    @classmethod
    def remote(
        cls, engine: RolloutEngine | None, ranks: Ranks, *, offer: Offer | None = None, check: Check | None = None
    ) -> ParallelEngine:
        """The first process, which alone has an engine, asks a server for all of them.

        offer: called on all processes by an `update` without weights; those that the server is to have.
        check: called on all processes before the first answer after an update; raises where the server has others.
        """
        remote = cls(engine, ranks, shares=1, share=0, speaks=ranks.leads)
        remote._offer, remote._check = offer, check
        return remote

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are the trainer's to the last bit; of no engine on a server."""
        return self.engine is not None and self.engine.exact

    @property
    def unfinished(self) -> int:
        """Answers on all processes that were asked for and have not been returned."""
        return sum(dealt.answers for dealt in self._dealt.values()) + len(self._kept)

    def submit(self, request: Request, on_token: OnToken | None = None, *, decode: Decode | None = None) -> None:
        """Gives a request to the share with the fewest tokens to come. `on_token` is called where it is answered.

        Raises an engine's error on all processes.
        """
        self.check_weights()
        dealt = self._deal([request])[0]

        def take() -> list[Completion]:
            if self._is_own(dealt):
                self._local.submit(request, on_token, decode=decode)
            return []

        self._together(take, passes=False)
        self._dealt[request.number] = dealt

    def abort(self, number: int) -> None:
        """Ends the unfinished answers of a request as they are; the next step returns them."""
        if number in self._dealt and self._is_own(self._dealt[number]):
            self._local.abort(number)

    def step(self) -> list[Completion]:
        """One step of every engine that has something to do; the answers that are complete, of all processes."""
        completions: list[Completion] = []
        if self._dealt:
            completions = self._together(lambda: self._local.step() if self.engine and self._local.unfinished else [])
        kept, self._kept = self._kept, []
        return [*kept, *completions]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to the requests, in their order and by sample, on all processes.

        Requests are dealt by the tokens they may take, longest first. Raises an error of any process on all of them,
        after which the requests are gone.
        """
        self.check_weights()
        numbers = [request.number for request in requests]
        places = {number: place for place, number in enumerate(numbers)}
        taken = [number for place, number in enumerate(numbers) if number in self._dealt or places[number] != place]
        if taken:
            raise DataError(f"prompt {taken[0]}: another unfinished request has this number. Give each its own")
        longest_first = sorted(requests, key=lambda each: (-expected_tokens(each), places[each.number]))
        dealt = dict(zip((each.number for each in longest_first), self._deal(longest_first), strict=True))
        own = [request for request in longest_first if self._is_own(dealt[request.number])]
        self._dealt |= dealt
        try:
            completions = self._together(lambda: self._answer(own))
        except BaseException:
            for number in numbers:
                self._dealt.pop(number, None)
            raise
        self._kept += [completion for completion in completions if completion.number not in places]
        asked = [completion for completion in completions if completion.number in places]
        return sorted(asked, key=lambda completion: (places[completion.number], completion.sample))

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Goes on with other weights; `weights` is gone through on every process, for making it may take them all."""
        self._close_weights()
        if weights is None and self._offer is not None:
            weights = self._offer()

        def take() -> list[Completion]:
            left = iter(weights) if weights is not None else None
            try:
                if self.engine is not None:
                    self.engine.update(version, left)
            finally:
                for _ in left or ():
                    pass
            return []

        self._together(take, passes=False)
        self.version = version
        self._is_unchecked = True

    def pause(self, mode: PauseMode) -> list[Completion]:
        """Stops answering until `resume`; returns the answers that `abort` and `wait` completed."""
        engine = self.engine
        completions = self._together(lambda: [] if engine is None else engine.pause(mode), passes=mode == "wait")
        self._close_weights()
        kept, self._kept = self._kept, []
        return [*kept, *completions]

    def resume(self) -> None:
        """Goes on after `pause`."""
        if self.engine is not None:
            self.engine.resume()

    def sleep(self) -> None:
        """Gives the memory of caches and gathered weights back until `wake`."""
        self._close_weights()
        if self.engine is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Takes the memory of caches again."""
        if self.engine is not None:
            self.engine.wake()

    def state(self) -> dict[str, Any]:
        """Unfinished requests of all processes with their answers so far, as JSON has it."""
        own = self.engine.state()["requests"] if self.engine is not None and self._speaks else []
        payloads = self._ranks.world.all_gather_bytes(json.dumps(own).encode())
        return {"requests": [entry for payload in payloads for entry in json.loads(payload)]}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the requests of another engine's `state`, which may have been one of more or fewer processes."""
        for entry in state["requests"]:
            fields = entry["request"]
            share = (loads := self._loads()).index(min(loads))
            tokens = len(fields["prompt"]) + len(entry["answers"]) * fields["max_new_tokens"]
            dealt = self._dealt[fields["number"]] = _Dealt(share, tokens, len(entry["answers"]))
            if self._is_own(dealt):
                self._local.restore({"requests": [entry]})

    def close(self) -> None:
        """Gives all memory back. Unfinished requests are gone."""
        self._dealt, self._kept = {}, []
        self._close_weights()
        if self.engine is not None:
            self.engine.close()

    # ── this process ──

    @property
    def _local(self) -> RolloutEngine:
        assert self.engine is not None, "another process answers for this one"
        return self.engine

    def _is_own(self, dealt: _Dealt) -> bool:
        return self.engine is not None and dealt.share == self._share

    def _deal(self, requests: Sequence[Request]) -> list[_Dealt]:
        """Each request for the share that has the fewest tokens to come when its turn is (Graham's LPT rule)."""
        loads = self._loads()
        dealt = []
        for request in requests:
            share = loads.index(min(loads))
            dealt.append(_Dealt(share, expected_tokens(request), request.samples))
            loads[share] += dealt[-1].tokens
        return dealt

    def _loads(self) -> list[int]:
        loads = [0] * self._shares
        for dealt in self._dealt.values():
            loads[dealt.share] += dealt.tokens
        return loads

    def _answer(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns all answers to this process's share, and the others that became complete meanwhile."""
        if self.engine is None:
            return []
        others = self.engine.unfinished
        submitted: list[Request] = []
        collected: list[Completion] = []
        try:
            for request in requests:
                self.engine.submit(request)
                submitted.append(request)
            wanted = {(request.number, sample) for request in requests for sample in request.sample_numbers}
            while wanted:
                self._before_step()
                completions = self.engine.step()
                collected += completions
                wanted -= {(completion.number, completion.sample) for completion in completions}
        except Exception:
            if not self._in_pass:
                for request in submitted:
                    self.engine.abort(request.number)
                if not others:
                    self.engine.step()  # runs no pass, for nothing is left: returns what was aborted
            raise
        return collected

    # ── all processes ──

    def _before_step(self) -> None:
        """Now and then, where passes are not made in step, a look at the other ranks."""
        if self._is_in_step or self._model is None:
            return  # each pass looks at them, or no other process works
        self._steps += 1
        if self._steps % STEPS_PER_EXCHANGE == 0:
            self._world_status.exchange(works=True)

    def check_weights(self) -> None:
        """Checks once after each update whether answers are by its weights; raises the fault on all processes."""
        if self._check is None or not self._is_unchecked:
            return
        self._is_unchecked = False  # the check asks for answers
        error: DanluError | None = None
        try:
            self._check(self)
        except DanluError as problem:
            error = problem
        if (failure := first_failure(self._ranks.world.all_gather_bytes(payload_of([], error)), error)) is not None:
            raise failure from error

    @contextmanager
    def _checked_passes(self) -> Iterator[None]:
        """A context in which each pass that has collectives begins with a check whether all who take part still come to
        it."""
        is_cut = self._ranks.tensor.size > 1 or self._ranks.pipeline.size > 1
        if self._model is None or not (self._is_in_step or is_cut):
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
            if self._embedded is not None:  # copies would be of the whole model, which has no room
                self._embedded.copies_weights = not self._is_in_step
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
        payloads = self._ranks.world.all_gather_bytes(payload_of(own if self._speaks else [], error))
        if (failure := first_failure(payloads, error)) is not None:
            self._close_weights()
            if self._model is not None and self.engine is not None:
                # Some were interrupted and some not: without caches they go on alike, as ranks of one copy must.
                self.engine.update(self.version)
            raise failure from error
        completions = [completion for payload in payloads for completion in from_bytes(payload[1:])]
        completions = [completion for completion in completions if completion.number in self._dealt]
        for completion in completions:
            dealt = self._dealt[completion.number]
            dealt.answers -= 1
            if dealt.answers == 0:
                del self._dealt[completion.number]
        if not self._dealt:
            self._close_weights()
        return completions

    def _wait_for_others(self, *, failed: bool, passes: bool) -> None:
        """Waits until all have come here. Meanwhile those that gather in each pass need this process in it."""
        if self._model is None:  # a server may take longer than a collective may
            untimed_barrier(f"rollout-{next(_barriers)}")
            return
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
