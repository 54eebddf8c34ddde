"""The rollout engine over servers, such as vLLM and SGLang, each asked over HTTP for one answer at a time.

Each answer is a request of its own, with a seed of its own, so that answers arrive as they are complete and a single
answer is requested again when a connection breaks. `unfinished` answers are on this side: nothing that a server forgets
is lost, and a repeated answer is counted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from danlu.core.errors import DataError, ModelError, ResourceError
from danlu.core.http_client import ConnectionLost, RequestRefused
from danlu.core.output_folder import shortened
from danlu.inference.answer import Answer, DrawnToken
from danlu.inference.engine_adapters import BASE
from danlu.inference.grammar import Grammars, lark_grammar, shared_lark
from danlu.inference.prompts import prompt_problem
from danlu.inference.request import Request
from danlu.inference.stepwise import StepwiseEngine
from danlu.inference.stopping import Decode
from danlu.inference.support import Support
from danlu.inference.token_masks import supports_in_grammar
from danlu.models.config import ModelConfig
from danlu.remote_engines.fleet import ServerFleet
from danlu.remote_engines.hand_over import HandOver
from danlu.remote_engines.requests_in_flight import Outcome, RequestsInFlight
from danlu.remote_engines.server_interface import RolloutServer, ServerAnswer, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor

FRUITLESS_ATTEMPTS = 3
"""The number of requests for an answer that breaks off without a further token, while the server is there."""
ABORT_S = 5.0
"""Seconds that a server which aborts its requests may take between two of its replies."""


class HTTPEngine(StepwiseEngine):
    """The engine of the first process of a `ServedPolicy`; log-probabilities are the trainer's but for rounding.

    A step waits until an answer is complete, or for `step_s`. `on_token` is called with all tokens of an answer when it
    arrives.

    Args:
        hand_over: the way of weight sync; None where weights never change.
        decode: token ids to text without special tokens; without it answers have no text, and stop strings are refused.
        grammars: compile those of requests; without them a request with one is refused.
        version: the version of the servers' present weights, which they are notified of.
        step_s: how long a step waits for an answer; None: until one is there.

    Raises ResourceError where no server is there within `reconnect_s`, ModelError where its answers cannot be trusted
    (see `RolloutServer.check` and `check_grammars`).
    """

    def __init__(
        self,
        servers: ServerFleet,
        options: ServerOptions,
        config: ModelConfig,
        *,
        hand_over: HandOver | None = None,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
        version: int = 0,
        step_s: float | None = None,
    ) -> None:
        self._step_s = step_s
        self.servers, self.options = servers, options
        self.version = version
        self.hand_over = hand_over
        if not servers.wait_until_there(options.reconnect_s):
            raise ResourceError(
                f"{servers.address}: no rollout server answers GET /health there within {options.reconnect_s:g} s "
                "(reconnect_s). Start it first, or give its url"
            )
        servers.check(config, in_form=grammars is not None)
        servers.label_version(str(version))
        super().__init__(config, min(config.context_length, servers.context), decode, grammars)
        if grammars is not None and self.recomputes_supports:
            _ = self._shared_grammars  # so that its error comes now
        self._in_flight = RequestsInFlight(servers, options.connections)
        self._waiting: deque[Answer] = deque()  # to be asked for
        self._problems: list[Exception] = []  # of requests that were refused
        self._fruitless: dict[tuple[int, int], int] = {}
        self._lost: Exception | None = None

    @cached_property
    def _shared_grammars(self) -> Grammars:
        """The grammars of servers that do not say which tokens one left."""
        assert self.grammars is not None, "a request with a grammar is refused without them"
        return self.grammars.ended_by_eos()

    @property
    def recomputes_supports(self) -> bool:
        """Whether the tokens that a grammar left are computed here, for some server does not report them."""
        return not all(server.shares_grammars for server in self.servers.connected)

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Hands the server new weights, and drops its prefix cache and the cached state of unfinished answers.

        weights: names of the decoder's parameters with their values; None where an adapter alone is handed over.
        Where this fails the server stays paused: its weights are not known. A server that sleeps sleeps on.
        """
        assert self.hand_over is not None, "no way was given by which weights reach the servers"
        with self._controlling():
            each = self.servers.each
            if self.is_asleep:
                each(lambda server: server.wake_weights())
            else:
                # Servers replace an adapter only when no answer needs it.
                interrupts = self.hand_over.route == "adapter" or not all(
                    server.labels_tokens for server in self.servers.connected
                )
                each(lambda server: server.pause("abort" if interrupts else "keep"), idle=True)
                if interrupts:
                    self._interrupted()
            self.hand_over(self.servers, str(version), weights)
            if not self.is_asleep:  # when it has no cache
                each(lambda server: server.drop_prefix_cache())
            self.version = version
            if not self.is_asleep:
                each(lambda server: server.resume(), idle=False)

    def sleep(self) -> None:
        """Has servers give their caches' memory back until `wake`. Unfinished answers go on from their tokens then."""

        def sleep(server: RolloutServer) -> None:
            server.sleep()
            server.is_asleep = True

        if self.is_asleep:
            return
        with self._controlling():
            self.servers.each(sleep, idle=True)
        self._interrupted()
        self.is_paused = self.is_asleep = True

    def wake(self) -> None:
        """Takes the memory again, and goes on."""

        def wake(server: RolloutServer) -> None:
            server.wake()
            server.is_asleep = False

        if self.is_asleep:
            with self._controlling():
                self.servers.each(wake, idle=False)
            self.is_paused = self.is_asleep = False

    def close(self) -> None:
        """Aborts the unfinished requests at the servers. The servers themselves go on."""
        self._in_flight.abandon()
        self._waiting.clear()
        self._live.clear()
        # Where the server is gone, its answers are gone with it.
        with suppress(ConnectionLost, RequestRefused):
            self._in_flight.abort_abandoned()
        self._in_flight.close()
        self.servers.close()
        if self.hand_over is not None:
            self.hand_over.close()

    def _check(self, request: Request, decode: Decode | None) -> None:
        where = f"prompt {request.number}"
        problem = prompt_problem(self._config, request.prompt)
        if problem is None and len(request.prompt) >= self._context:
            problem = f"has {len(request.prompt)} tokens, and the server was started for {self._context} at most"
        if problem is None and request.stop_strings and decode is None:
            problem = "is to end at stop strings, and the engine was given no tokenizer to find them with"
        if problem is not None:
            raise DataError(f"{where} {problem}")
        if request.sampling.counts_tokens:
            raise DataError(
                f"{where}: presence_penalty and frequency_penalty count the tokens of an answer, and a server that is "
                "asked for the rest of one after an interruption counts those alone: leave both at 0"
            )
        if request.prompt_logprobs:
            raise DataError(
                f"{where}: log-probabilities of prompts are not asked of servers: leave prompt_logprobs out"
            )
        for server in self.servers.connected:
            if (problem := server.problem(request)) is not None:
                raise DataError(f"{where}: {problem}")
        self._check_number(request.number)

    def _begin(self, answers: Sequence[Answer]) -> None:
        self._live[answers[0].request.number] = list(answers)
        for answer in answers:
            if answer.finish is None:
                self._waiting.append(answer)
            else:
                self._finish(answer)

    def _advance(self) -> None:
        """Waits for an answer, as long as `step_s` says; does not wait while the servers sleep.

        Raises DataError for a request that a server refused, which is then forgotten, and ResourceError where the
        servers went away and did not come back as they were. Unfinished answers stay unfinished: the next step asks
        again.
        """
        if not self.is_asleep:
            self._dispatch()
        self._receive(wait=not (self.is_asleep or self._done or self._problems), timeout_s=self._step_s)
        if self._done:
            return
        if self._problems:
            raise self._problems.pop(0)
        if self._lost is not None:
            self._reconnect()

    def _dispatch(self) -> None:
        """Asks for answers that wait, as far as there are connections."""
        self._in_flight.abort_abandoned()
        default = None if self.hand_over is None else self.hand_over.adapter
        while self._waiting and not self._in_flight.is_full:
            answer = self._waiting.popleft()
            if answer.drawn and answer.matcher is not None and self.recomputes_supports:
                answer.begin_again()  # such a server reads a grammar from the answer's first token on
            adapter = answer.request.adapter
            self._in_flight.send(answer, default if adapter is None else None if adapter == BASE else adapter)

    def _receive(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Takes the outcomes that have arrived; returns whether there were any."""
        arrived = self._in_flight.receive(wait=wait, timeout_s=timeout_s)
        for answer, outcome in arrived:
            if answer.request.number in self._live:
                self._take(answer, outcome)
        return bool(arrived)

    def _take(self, answer: Answer, outcome: Outcome) -> None:
        """Handles the outcome of one request."""
        if isinstance(outcome, ServerAnswer):
            self._extend(answer, outcome)
        elif isinstance(outcome, ConnectionLost) or (isinstance(outcome, RequestRefused) and outcome.status >= 500):
            self._lost = outcome
            self._ask_again(answer, str(outcome))
        elif isinstance(outcome, RequestRefused):
            number = answer.request.number
            self._forget(number)
            self._problems.append(DataError(f"prompt {number}: {self.servers.name} refuses it: {outcome}"))
        else:
            self._waiting.appendleft(answer)
            self._problems.append(outcome)

    def _extend(self, answer: Answer, outcome: ServerAnswer) -> None:
        """Takes the tokens of an answer."""
        foreign = outcome.foreign_labels
        if foreign:  # of a server that was restarted with the weights of its own
            self._lost = ResourceError(f"{self.servers.address}: an answer was drawn with weights {sorted(foreign)}")
            self._waiting.appendleft(answer)
            return
        supports: Sequence[Support | None] | None = outcome.support
        if outcome.lacks_support and answer.drawn:  # a server that has just come back went on with another's answer
            answer.begin_again()
            self._waiting.appendleft(answer)
            return
        if outcome.lacks_support:
            try:
                supports = self._supports(answer, outcome.tokens)
            except DataError as error:
                self._forget(answer.request.number)
                self._problems.append(self._foreign_token(answer, error))
                return
        for index, token in enumerate(outcome.tokens):
            support = None if supports is None else supports[index]
            top = () if outcome.top is None else outcome.top[index]
            logprob, drawn = outcome.logprobs[index], outcome.drawn[index]
            version = int(outcome.version_labels[index])
            answer.drawn.append(DrawnToken(token, logprob, drawn, support, version, top))
        if outcome.tokens:  # then all that was drawn before has been read again with them
            answer.routes = outcome.routes
        answer.report()
        if answer.finish is None and outcome.finish == "abort":
            self._ask_again(answer, "the server aborted it", progress=bool(outcome.tokens))
            return
        if answer.finish is None:  # by a stop token of its own, or at the end of its context
            answer.abort()
            answer.finish = "stop" if outcome.finish == "stop" else "context"
        self._finish(answer)

    def _supports(self, answer: Answer, tokens: Sequence[int]) -> Sequence[Support | None]:
        """The tokens that a grammar left to a server, which was asked for the whole answer. Raises DataError for a
        token that is none of them."""
        assert answer.request.grammar is not None, "the server had one"
        matcher = self._shared_grammars.matcher(lark_grammar(shared_lark(answer.request.grammar)))
        return supports_in_grammar(matcher, tokens, self._config.vocab_size)

    def _foreign_token(self, answer: Answer, error: DataError) -> ModelError:
        number, sample = answer.key
        return ModelError(
            f"prompt {number}, sample {sample}: {self.servers.name} reads rollout.format otherwise than the trainer "
            f"does: {error}. Install the release of llguidance here that the server has, or use engine: embedded"
        )

    def _finish(self, answer: Answer) -> None:
        super()._finish(answer)
        self._fruitless.pop(answer.key, None)

    def _ask_again(self, answer: Answer, reason: str, *, progress: bool = False) -> None:
        """Puts an answer first among those that wait."""
        self._waiting.appendleft(answer)
        self._fruitless[answer.key] = 0 if progress else self._fruitless.get(answer.key, 0) + 1
        if self._fruitless[answer.key] >= FRUITLESS_ATTEMPTS:
            del self._fruitless[answer.key]
            number, sample = answer.key
            self._problems.append(
                ResourceError(
                    f"prompt {number}, sample {sample}: asked for {FRUITLESS_ATTEMPTS} times without a token: "
                    f"{reason}. {self._unfinished_text()}"
                )
            )

    def _forget(self, number: int) -> None:
        """Drops a request with all its answers."""
        self._waiting = deque(answer for answer in self._waiting if answer.request.number != number)
        self._in_flight.abandon(lambda answer: answer.request.number == number)
        self._live.pop(number, None)

    def _interrupted(self) -> None:
        """Takes the remaining outcomes after the server has aborted its requests, and lets the rest wait."""
        while self._in_flight and self._receive(wait=True, timeout_s=ABORT_S):
            pass
        # These came when the server took no more requests.
        self._waiting.extendleft(reversed(self._in_flight.abandon()))
        self._fruitless.clear()

    @contextmanager
    def _controlling(self) -> Iterator[None]:
        """Controls servers within the block. Raises ConnectionLost, with what to do, where the only one goes away."""
        try:
            yield
        except ConnectionLost as lost:
            raise ConnectionLost(f"{lost}. {self._going_on_text()}") from None

    def _going_on_text(self) -> str:
        return (
            "Start the server again, and then the run, which resumes from its last checkpoint. As it starts, it waits "
            f"{self.options.reconnect_s:g} s for the server (rollout.server.reconnect_s)"
        )

    def _reconnect(self) -> None:
        """Waits for a server that was lost. Raises ResourceError if it does not come back with the same weights."""
        lost, self._lost = self._lost, None
        reconnect_s = self.options.reconnect_s
        if not self.servers.wait_until_there(reconnect_s):
            raise ConnectionLost(
                f"{lost}. The server was not back within {reconnect_s:g} s (reconnect_s). {self._unfinished_text()}. "
                f"{self._going_on_text()}"
            )
        self.servers.check(self._config, in_form=self.grammars is not None)
        label = self.servers.version_label()
        if label != str(self.version):
            raise ResourceError(
                f"{self.servers.address}: the server was restarted and has weights {label!r} in place of version "
                f"{self.version} ({lost}). Hand the weights over again. {self._unfinished_text()}"
            )

    def _unfinished_text(self) -> str:
        if not self._live:
            return "No answer is unfinished"
        count, numbers = len(list(self._answers())), [str(number) for number in self._live]
        return f"{count} answers are unfinished, to prompts {shortened(numbers, 5)}, and are kept"
