"""A rollout engine that is a server elsewhere: vLLM or SGLang, asked over HTTP for one answer at a time.

Each answer is a request of its own, with a seed of its own, so that answers arrive as they are complete and a single
answer is requested again when a connection breaks. `unfinished` answers are on this side: nothing that the server
forgets is lost, and a repeated answer is counted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError, ResourceError
from danlu.core.http_client import ConnectionLost, RequestRefused
from danlu.core.output_folder import shortened
from danlu.inference.answer import Answer, DrawnToken
from danlu.inference.engine import PauseMode
from danlu.inference.engine_adapters import BASE
from danlu.inference.engine_state import request_from_json, request_to_json
from danlu.inference.prompts import prompt_problem
from danlu.inference.request import Completion, OnToken, Request
from danlu.inference.stopping import Decode
from danlu.models.config import ModelConfig
from danlu.remote_engines.hand_over import HandOver
from danlu.remote_engines.requests_in_flight import Outcome, RequestsInFlight
from danlu.remote_engines.server_interface import RolloutServer, ServerAnswer, ServerOptions

if TYPE_CHECKING:
    from torch import Tensor

FRUITLESS_ATTEMPTS = 3
"""The number of requests for an answer that breaks off without a further token, while the server is there."""
ABORT_S = 5.0
"""Seconds that a server which aborts its requests may take between two of its replies."""


class HTTPEngine:
    """Satisfies `engine.RolloutEngine`; its log-probabilities are the trainer's but for rounding, or as `exact` says.

    A step waits until an answer is complete, or for `step_s`. `on_token` is called with all tokens of an answer when it
    arrives.

    Args:
        hand_over: the way of weight sync; None where weights never change.
        decode: token ids to text without special tokens; without it answers have no text, and stop strings are refused.
        version: the version of the server's present weights, which it is notified of.
        step_s: how long a step waits for an answer; None: until one is there.

    Raises ResourceError where the server is not there within `reconnect_s`, ModelError where its answers cannot be
    trusted (see `RolloutServer.check`).
    """

    def __init__(
        self,
        server: RolloutServer,
        options: ServerOptions,
        config: ModelConfig,
        *,
        hand_over: HandOver | None = None,
        decode: Decode | None = None,
        version: int = 0,
        step_s: float | None = None,
    ) -> None:
        self._step_s = step_s
        self.server, self.options, self.config = server, options, config
        self.version = version
        self.hand_over = hand_over
        self._decode = decode
        if not server.wait_until_there(options.reconnect_s):
            raise ResourceError(
                f"{server.address}: no rollout server answers GET /health there within {options.reconnect_s:g} s "
                "(reconnect_s). Start it first, or give its url"
            )
        server.check(config)
        server.label_version(str(version))
        self._context = min(config.context_length, server.context)
        self._in_flight = RequestsInFlight(server, options.connections)
        self._live: dict[tuple[int, int], Answer] = {}  # by request and sample, in the order of arrival
        self._waiting: deque[Answer] = deque()  # to be asked for
        self._done: list[Completion] = []
        self._problems: list[Exception] = []  # of requests that were refused
        self._aborted: set[tuple[int, int]] = set()
        self._fruitless: dict[tuple[int, int], int] = {}
        self._lost: Exception | None = None
        self._is_paused = self._is_asleep = False

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are the trainer's to the last bit."""
        return self.server.exact

    @property
    def unfinished(self) -> int:
        """Answers that were asked for and that `step` has not returned."""
        return len(self._live) + len(self._done)

    def submit(self, request: Request, on_token: OnToken | None = None, *, decode: Decode | None = None) -> None:
        """Takes a request; its answers come with later steps. Raises DataError where the model or the server cannot
        answer it.

        decode: in place of the engine's, for an adapter with a tokenizer of its own.
        """
        decode = decode or self._decode
        self._check(request, decode)
        for sample in request.sample_numbers:
            self._add(Answer(request, sample, (), self._context, decode, on_token))

    def abort(self, number: int) -> None:
        """Ends the answers to a request as they are."""
        for answer in [answer for answer in self._waiting if answer.request.number == number]:
            self._waiting.remove(answer)
            answer.abort()
            self._complete(answer)
        in_flight = self._in_flight.ids(lambda answer: answer.request.number == number)
        if in_flight:
            self._aborted |= {answer.key for answer in in_flight.values()}
            self.server.abort(list(in_flight))

    def step(self) -> list[Completion]:
        """Waits for an answer, as long as `step_s` says, and returns all that are complete; does not wait while paused.

        Raises DataError for a request that the server refused, which is then forgotten, and ResourceError where the
        server went away and did not come back as it was. Unfinished answers stay unfinished: the next step asks again.
        """
        if not self._is_paused:
            self._dispatch()
        self._receive(wait=not (self._is_paused or self._done or self._problems), timeout_s=self._step_s)
        if self._done:
            done, self._done = self._done, []
            return done
        if self._problems:
            raise self._problems.pop(0)
        if self._lost is not None:
            self._reconnect()
        return []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers to the requests, in their order and by sample. If one is refused at once, none has been taken."""
        assert not self._is_paused, "the engine is paused: resume it before it answers"
        for request in requests:
            self._check(request, self._decode)
        for request in requests:
            self.submit(request)
        wanted = [(request.number, sample) for request in requests for sample in request.sample_numbers]
        completions: dict[tuple[int, int], Completion] = {}
        try:
            while not all(key in completions for key in wanted):
                completions |= {(completion.number, completion.sample): completion for completion in self.step()}
        except BaseException:
            self._done = [*completions.values(), *self._done]
            raise
        answers = [completions.pop(key) for key in wanted]
        self._done = [*completions.values(), *self._done]  # to other requests
        return answers

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Hands the server new weights, and drops its prefix cache and the cached state of unfinished answers.

        weights: names of the decoder's parameters with their values; None where an adapter alone is handed over.
        Where this fails the server stays paused: its weights are not known. A server that sleeps sleeps on.
        """
        assert self.hand_over is not None, "no way was given by which weights reach the server"
        if self._is_asleep:
            self.server.wake_weights()
        elif not self._is_paused:
            # Servers replace an adapter only when no answer needs it.
            interrupts = self.hand_over.route == "adapter"
            self.server.pause("abort" if interrupts else "keep")
            if interrupts:
                self._interrupted()
        self.hand_over(self.server, str(version), weights)
        if not self._is_asleep:  # when it has no cache
            self.server.drop_prefix_cache()
        self.version = version
        if not self._is_paused:
            self.server.resume()

    def pause(self, mode: PauseMode) -> list[Completion]:
        """Stops answering until `resume`; returns the answers that `abort` and `wait` completed."""
        completions: list[Completion] = []
        match mode:
            case "abort":
                self._aborted |= set(self._live)
                self.server.pause("abort")
                self._interrupted()
                for answer in self._waiting:
                    answer.abort()
                    self._complete(answer)
                self._waiting.clear()
            case "wait":
                while self._live:
                    completions += self.step()
                self.server.pause("keep")
            case "keep":
                self.server.pause("keep")
        self._is_paused = True
        done, self._done = self._done, []
        return [*completions, *done]

    def resume(self) -> None:
        """Goes on after `pause`."""
        self.server.resume()
        self._is_paused = False

    def sleep(self) -> None:
        """Has the server give its cache's memory back until `wake`. Unfinished answers go on from their tokens then."""
        if self._is_asleep:
            return
        self.server.sleep()
        self._interrupted()
        self._is_paused = self._is_asleep = True

    def wake(self) -> None:
        """Takes the memory again, and goes on."""
        if self._is_asleep:
            self.server.wake()
            self._is_paused = self._is_asleep = False

    def state(self) -> dict[str, Any]:
        """Unfinished requests with the tokens of their answers that have arrived, as JSON has it."""
        requests: dict[int, dict[str, Any]] = {}
        for answer in self._live.values():
            entry = requests.setdefault(answer.request.number, {"request": request_to_json(answer.request)})
            entry.setdefault("answers", []).append(answer.state())
        return {"requests": list(requests.values())}

    def restore(self, state: dict[str, Any], on_token: OnToken | None = None) -> None:
        """Takes up the requests of another engine's `state`."""
        for entry in state["requests"]:
            request = request_from_json(entry["request"])
            self._check(request, self._decode)
            for answer_state in entry["answers"]:
                answer = Answer(request, answer_state["sample"], (), self._context, self._decode, on_token)
                answer.restore(answer_state, self.config.vocab_size)
                self._add(answer)

    def close(self) -> None:
        """Aborts the unfinished requests at the server. The server itself goes on."""
        self._in_flight.abandon()
        self._waiting.clear()
        self._live.clear()
        # Where the server is gone, its answers are gone with it.
        with suppress(ConnectionLost, RequestRefused):
            self._in_flight.abort_abandoned()
        self._in_flight.close()
        self.server.close()
        if self.hand_over is not None:
            self.hand_over.close()

    def _check(self, request: Request, decode: Decode | None) -> None:
        """Raises DataError as `submit` does."""
        where = f"prompt {request.number}"
        problem = prompt_problem(self.config, request.prompt)
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
        if (problem := self.server.problem(request)) is not None:
            raise DataError(f"{where}: {problem}")
        if any(number == request.number for number, _ in self._live):
            raise DataError(f"{where}: a request with this number is unfinished. Give each its own")

    def _add(self, answer: Answer) -> None:
        self._live[answer.key] = answer
        if answer.finish is None:
            self._waiting.append(answer)
        else:
            self._complete(answer)

    def _dispatch(self) -> None:
        """Asks for answers that wait, as far as there are connections."""
        self._in_flight.abort_abandoned()
        default = None if self.hand_over is None else self.hand_over.adapter
        while self._waiting and not self._in_flight.is_full:
            answer = self._waiting.popleft()
            adapter = answer.request.adapter
            self._in_flight.send(answer, default if adapter is None else None if adapter == BASE else adapter)

    def _receive(self, *, wait: bool, timeout_s: float | None = None) -> bool:
        """Takes the outcomes that have arrived; returns whether there were any."""
        arrived = self._in_flight.receive(wait=wait, timeout_s=timeout_s)
        for answer, outcome in arrived:
            if answer.key in self._live:
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
            self._problems.append(DataError(f"prompt {number}: {self.server.name} refuses it: {outcome}"))
        else:
            self._waiting.appendleft(answer)
            self._problems.append(outcome)

    def _extend(self, answer: Answer, outcome: ServerAnswer) -> None:
        """Takes the tokens of an answer."""
        foreign = {label for label in outcome.version_labels if not label.isdecimal()}
        if foreign:  # of a server that was restarted with the weights of its own
            self._lost = ResourceError(f"{self.server.address}: an answer was drawn with weights {sorted(foreign)}")
            self._waiting.appendleft(answer)
            return
        for index, token in enumerate(outcome.tokens):
            support = None if outcome.support is None else outcome.support[index]
            top = () if outcome.top is None else outcome.top[index]
            logprob, drawn = outcome.logprobs[index], outcome.drawn[index]
            version = int(outcome.version_labels[index])
            answer.drawn.append(DrawnToken(token, logprob, drawn, support, version, top))
        if outcome.tokens:  # then all that was drawn before has been read again with them
            answer.routes = outcome.routes
        answer.report()
        if answer.finish is None and outcome.finish == "abort" and answer.key not in self._aborted:
            self._ask_again(answer, "the server aborted it", progress=bool(outcome.tokens))
            return
        if answer.finish is None:
            answer.abort()
            if outcome.finish != "abort":  # by a stop token of its own, or at the end of its context
                answer.finish = "stop" if outcome.finish == "stop" else "context"
        self._complete(answer)

    def _complete(self, answer: Answer) -> None:
        self._done.append(answer.completion())
        del self._live[answer.key]
        self._aborted.discard(answer.key)
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
        self._live = {key: answer for key, answer in self._live.items() if key[0] != number}

    def _interrupted(self) -> None:
        """Takes the remaining outcomes after the server has aborted its requests, and lets the rest wait."""
        while self._in_flight and self._receive(wait=True, timeout_s=ABORT_S):
            pass
        # These came when the server took no more requests.
        self._waiting.extendleft(reversed(self._in_flight.abandon()))
        self._fruitless.clear()

    def _reconnect(self) -> None:
        """Waits for a server that was lost. Raises ResourceError if it does not come back with the same weights."""
        lost, self._lost = self._lost, None
        reconnect_s = self.options.reconnect_s
        if not self.server.wait_until_there(reconnect_s):
            raise ConnectionLost(
                f"{lost}. The server was not back within {reconnect_s:g} s (reconnect_s). {self._unfinished_text()}"
            )
        self.server.check(self.config)
        label = self.server.version_label()
        if label != str(self.version):
            raise ResourceError(
                f"{self.server.address}: the server was restarted and has weights {label!r} in place of version "
                f"{self.version} ({lost}). Hand the weights over again. {self._unfinished_text()}"
            )

    def _unfinished_text(self) -> str:
        numbers = list(dict.fromkeys(str(number) for number, _ in self._live))
        if not numbers:
            return "No answer is unfinished"
        return f"{len(self._live)} answers are unfinished, to prompts {shortened(numbers, 5)}, and are kept"
