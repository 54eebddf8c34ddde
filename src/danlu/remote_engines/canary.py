"""Checks after each weight sync that the engine answers with the trainer's weights; if not, the run stops.

Weights that never arrive, arrive in part, or are hidden by cached keys and values of old ones leave no trace but worse
answers: an adapter that never reached the rollouts was found by its users in verl (#7495), unsloth (#8701) and ms-swift
(#9855).

Fixed prompts are continued in the same way as rollouts, cached prefixes included, and the trainer computes the
log-probabilities of the same tokens. Tensors of one layer, another each time, are compared by value where the engine
reports its own.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from danlu.core.errors import TrainingError
from danlu.core.output_folder import shortened
from danlu.inference.engine import RolloutEngine
from danlu.inference.logprob_gap import RolloutGap, rollout_gap
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.remote_engines.hand_over import folder_weights
from danlu.remote_engines.server_interface import Continuation, RolloutServer

if TYPE_CHECKING:
    from torch import Tensor

    from danlu.remote_engines.fleet import ServerFleet

Score = Callable[[Sequence[Sequence[int]], Sequence[int], str | None], list[list[float]]]
"""Maps (sequences of prompt and answer, tokens of each prompt, adapter or "none") to the trainer's log-probabilities of
the answers' tokens, at temperature 1."""

Differing = Callable[[int | None], list[str]]
"""Returns, for a version, the names of that version's sample of tensors with other values in the engine; for None all
tensors are compared."""

FIRST_NUMBER = 1 << 61
"""The canary's requests are numbered from here, above those of a run."""


@dataclass(frozen=True)
class CanaryReport:
    """The result of a check that passed."""

    gap: RolloutGap
    """The gap between the engine's log-probabilities and the trainer's."""
    adapter_gap: float | None
    """Mean |with - without the adapter| by the trainer, of the same tokens; None without an adapter."""
    answers: CanaryAnswers
    """The answers, which any engine with these weights has to give."""


@dataclass(frozen=True)
class CanaryAnswers:
    """A canary's requests, and the answers to them of an engine that has the trainer's weights."""

    requests: Sequence[Request]
    completions: Sequence[Completion]
    tolerance: float

    def check(self, server: RolloutServer) -> None:
        """Raises TrainingError where a server answers otherwise: by its log-probabilities as far as its tokens agree.

        Servers that round otherwise may draw another token where two are almost equally likely, and say another text
        from there on; one with other weights gives the first tokens other log-probabilities.
        """
        differences: list[float] = []
        for request, completion in zip(self.requests, self.completions, strict=True):
            answer = server.answer(
                Continuation(
                    request_id=f"danlu-canary-{uuid.uuid4().hex}",
                    request=request,
                    tokens=request.prompt,
                    max_new_tokens=request.max_new_tokens,
                    adapter=request.adapter,
                )
            )
            both = zip(answer.tokens, completion.tokens, answer.logprobs, completion.logprobs, strict=False)
            agreeing = takewhile(lambda pair: pair[0] == pair[1], both)
            differences += [abs(logprob - other) for _, _, logprob, other in agreeing]
        mean = sum(differences) / len(differences) if differences else math.inf
        if not mean <= self.tolerance:
            how = f"log-probabilities differ by {mean:.3g} nats on average" if differences else "no token is the same"
            raise TrainingError(
                f"canary: {server.address} does not answer as a server with the trainer's weights did: {how} "
                f"({self.tolerance:g} is let pass)"
            )


@dataclass(frozen=True)
class Canary:
    """The prompts of the check after each weight sync, and the tolerance of its answers."""

    prompts: Sequence[tuple[int, ...]]
    """Prompts of several blocks of the cache each, so that remains of an old prefix show."""
    score: Score
    tolerance: float
    """The tolerance of the mean gap, in nats; 0 for an engine that is exact."""
    new_tokens: int = 16
    adapter: str | None = None
    """The adapter in training: its answers must differ from the base's."""
    differing: Differing | None = None

    def check(self, engine: RolloutEngine) -> CanaryReport:
        """Raises TrainingError, naming tensors, where the engine does not answer with the trainer's weights."""
        differing = [] if self.differing is None else self.differing(engine.version)
        answers = self._answers(engine, self.adapter)
        trainer = self._score(answers, self.adapter)
        gap = rollout_gap(answers, trainer)
        adapter_gap: float | None = None
        if self.adapter is not None:
            base = self._score(answers, "none")
            adapter_gap = _mean_difference(trainer, base)
            if adapter_gap > 0 and self._is_base(engine, answers, gap.mean, base):
                raise TrainingError(
                    f"canary: adapter {self.adapter} (version {engine.version}) does not reach the rollout engine: "
                    f"its answers are those of the base, from which the trainer's differ by {adapter_gap:.2g} nats a "
                    "token. All of the adapter's tensors are missing there: load it by the name that requests have"
                )
        if differing or not gap.mean <= self.tolerance:
            raise TrainingError(self._mismatch(engine.version, answers, trainer, gap, differing))
        return CanaryReport(gap, adapter_gap, CanaryAnswers(self.requests(self.adapter), answers, self.tolerance))

    def _is_base(
        self, engine: RolloutEngine, answers: Sequence[Completion], mean: float, base: Sequence[Sequence[float]]
    ) -> bool:
        """Whether answers that should be the adapter's are the base's. base: the trainer's log-probabilities by that.

        A change that is too small for the tolerance shows in the engine's own answers: with equal draws the base says
        the same to the last bit only where the adapter does nothing.
        """
        if mean > self.tolerance:
            return rollout_gap(answers, base).mean <= self.tolerance
        unadapted = self._answers(engine, "none")
        said, unadapted_said = ([(answer.tokens, answer.logprobs) for answer in both] for both in (answers, unadapted))
        return said == unadapted_said

    def _answers(self, engine: RolloutEngine, adapter: str | None) -> list[Completion]:
        return engine.generate(self.requests(adapter))

    def requests(self, adapter: str | None) -> list[Request]:
        """The requests of the check."""
        return [
            Request(
                number=FIRST_NUMBER + index,
                prompt=tuple(prompt),
                sampling=SamplingOptions(),
                max_new_tokens=self.new_tokens,
                adapter=adapter,
            )
            for index, prompt in enumerate(self.prompts)
        ]

    def _score(self, answers: Sequence[Completion], adapter: str | None) -> list[list[float]]:
        sequences = [(*prompt, *answer.tokens) for prompt, answer in zip(self.prompts, answers, strict=True)]
        return self.score(sequences, [len(prompt) for prompt in self.prompts], adapter)

    def _mismatch(
        self,
        version: int,
        answers: Sequence[Completion],
        trainer: Sequence[Sequence[float]],
        gap: RolloutGap,
        differing: Sequence[str],
    ) -> str:
        """Describes the mismatch, with the names of all tensors that differ."""
        largest = [rollout_gap([answer], [row]).largest for answer, row in zip(answers, trainer, strict=True)]
        if self.differing is None:
            tensors = "the engine does not tell what its tensors are"
        elif names := list(dict.fromkeys([*differing, *self.differing(None)])):
            tensors = f"{shortened(names, 5)} {'has' if len(names) == 1 else 'have'} other values there"
        else:
            tensors = (
                "all tensors that can be compared are equal, so it may be keys and values of old weights that are used "
                "again, or another precision"
            )
        return (
            f"canary: the rollout engine does not answer with the trainer's weights of version {version}: {tensors}. "
            f"Log-probabilities of {gap.tokens} tokens differ by {gap.mean:.3g} nats on average "
            f"({self.tolerance:g} is let pass), by {gap.largest:.3g} at most, "
            f"in the answer to canary prompt {largest.index(max(largest))}"
        )


def check_form(
    engine: RolloutEngine,
    requests: Sequence[Request],
    score_within: Callable[[Sequence[Completion]], Sequence[Sequence[float]]],
    tolerance: float,
) -> None:
    """Checks that servers confine answers in a form to the tokens that the trainer has computed for them.

    score_within: maps answers to the trainer's log-probabilities of their tokens among those of their supports. Raises
    TrainingError where the mean difference of the servers' from these exceeds `tolerance`, in nats, and the errors of
    `engine.generate`.
    """
    answers = engine.generate(requests)
    drawn = [answer.drawn for answer in answers]
    mean = _mean_difference(drawn, score_within(answers))
    if not mean <= tolerance:
        raise TrainingError(
            f"canary: answers in rollout.format have log-probabilities that differ from the trainer's by {mean:.3g} "
            f"nats on average ({tolerance:g} is let pass), and answers without it do not: the server's grammar engine "
            "leaves other tokens to choose from than llguidance does here. Install the same release of llguidance on "
            "both sides, or use engine: embedded"
        )


def compare_with_servers(
    servers: ServerFleet | None,
    config: ModelConfig,
    value: Callable[[str], Tensor | None],
    from_first: Callable[[Callable[[], list[str]]], list[str]] = lambda make: make(),
) -> Differing:
    """Compares tensors with those of servers.

    Args:
        servers: None on processes that only help with `value`.
        value: maps a parameter's name in the decoder to the whole tensor, on the first process at least; a collective
            call where parameters are sharded.
        from_first: returns a function's result of the first process on all of them; see `parallel.comm.Group`.
    """

    def differing(version: int | None) -> list[str]:
        sampled = {name: value(name) for name in _sampled_parameters(config, version)}

        def ask() -> list[str]:
            assert servers is not None, "the first process speaks to servers"
            weights = ((name, tensor) for name, tensor in sampled.items() if tensor is not None)
            tensors = dict(folder_weights(config, weights, complete=False))

            def names_of(server: RolloutServer) -> list[str]:
                where = f" ({server.address})" if len(servers.replicas) > 1 else ""
                return [f"{name}{where}" for name in server.differing(tensors)]

            return [name for names in servers.each(names_of) for name in names]

        return from_first(ask)

    return differing


def _sampled_parameters(config: ModelConfig, version: int | None) -> list[str]:
    """The parameters that are compared at a version: those of one layer, and those outside of layers."""
    names = list(parameter_shapes(config))
    if version is None:
        return names
    layer = f"layers.{version % len(config.layers)}."
    return [name for name in names if name.startswith(layer) or not name.startswith("layers.")]


def _mean_difference(rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    pairs = [pair for both in zip(rows, others, strict=True) for pair in zip(*both, strict=True)]
    return sum(abs(value - other) for value, other in pairs) / len(pairs)
