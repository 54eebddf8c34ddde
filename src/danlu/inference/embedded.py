"""The rollout engine within the process: it decodes with the tensors of the model that it is given, a trainer's too.

Each step is one pass of the decoder over the chunks of a plan. Prompts, decoding, and reading again after a preemption
are the same case.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from danlu.core.errors import DataError, ResourceError
from danlu.inference.answer import Answer
from danlu.inference.blocks import BlockPool, long_root_digest, root_digest
from danlu.inference.draft_model import speculation_of
from danlu.inference.engine import EngineOptions, EngineStatistics, PauseMode
from danlu.inference.engine_adapters import EngineAdapters
from danlu.inference.grammar import Grammars
from danlu.inference.model_runner import ModelRunner
from danlu.inference.pipelined_decoder import PipelinedDecoder
from danlu.inference.prompts import prompt_problem
from danlu.inference.request import Completion, OnError, OnToken, Request
from danlu.inference.sampling import check_allowed_ids
from danlu.inference.scheduler import Counters, Scheduler
from danlu.inference.sequence_state import SequenceState
from danlu.inference.stepwise import StepwiseEngine
from danlu.inference.stopping import Decode
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.rope import rotated_by_length
from danlu.planning.cache_memory import gib


class EmbeddedEngine(StepwiseEngine):
    """An `engine.RolloutEngine`. Equal prompts are read once; answers share blocks as long as they are alike.

    An answer depends on its request and the weights alone: not on its neighbours, the size of the pool, or the time of
    the request.

    Args:
        dtype: of activations and of the cache; by default that of the weights.
        decode: token ids to text without special tokens; without it answers have no text.
        adapters: the adapters that requests may switch between; None: the model stays as it is.
        virtual_token_ids: tokens that every prompt begins with, where there are no `adapters`.
        version: the version of the weights.
        draft_model: proposes tokens where options.draft asks for a model.
        grammars: compile the grammars of requests; without them a request with one is refused.
        stages: the same model with the stages that have its other chunks, each with an engine that is asked the same.

    Raises ModelError for a draft model with another vocabulary, and ResourceError where not one block fits into the
    cache.
    """

    def __init__(
        self,
        model: Decoder,
        options: EngineOptions | None = None,
        *,
        dtype: torch.dtype | None = None,
        decode: Decode | None = None,
        adapters: EngineAdapters | None = None,
        virtual_token_ids: Sequence[int] = (),
        version: int = 0,
        draft_model: Decoder | None = None,
        stages: PipelinedDecoder | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(model.config, model.config.context_length, decode, grammars)
        self.options, self.version = options or EngineOptions(), version
        self._speculation, own_options = speculation_of(model, self.options, dtype, draft_model)
        self._runner = ModelRunner(model, own_options, dtype, adapters, self._speculation, stages)
        self._adapters = adapters
        self._virtual_token_ids = tuple(virtual_token_ids)
        self._counters = Counters()
        self._generated_tokens = 0
        self._arrivals = itertools.count()
        self._by_number: dict[int, Answer] = {}  # by the sequence's number
        self._undelivered: list[Answer] = []  # with tokens that are not in their text
        self._on_error: dict[int, OnError] = {}  # by the numbers of requests that take their errors themselves
        self._drafts_proposed = self._drafts_accepted = 0
        self._scheduler = self._new_scheduler()

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are those that a trainer with `numerics: exact` computes, bit for bit."""
        return self._runner.exact

    @property
    def copies_weights(self) -> bool:
        """Whether products are made with copies of weights, which are faster to multiply with (`PackedWeights`)."""
        return self._runner.copies_weights

    @copies_weights.setter
    def copies_weights(self, value: bool) -> None:
        self._runner.copies_weights = value and not self.exact
        if not value:
            self._runner.drop_copies()

    @property
    def longest(self) -> int:
        """The most tokens of a sequence, prompt and answer: the model's context, or the capacity of the cache."""
        return min(self._config.context_length, self._runner.pool.blocks * self.options.block + 1)

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's present load, and its counts since it was made."""
        pool = self._scheduler.pool
        return EngineStatistics(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks=pool.blocks,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            generated_tokens=self._generated_tokens,
            drafts_proposed=self._drafts_proposed,
            drafts_accepted=self._drafts_accepted,
            **dataclasses.asdict(self._counters),
        )

    def submit(
        self,
        request: Request,
        on_token: OnToken | None = None,
        *,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
        on_error: OnError | None = None,
    ) -> None:
        """Takes a request as `StepwiseEngine.submit` does.

        on_error: called, within a step, with an error of this request alone, which then ends as it is; without it the
        step raises.

        Raises DataError for a prompt that the model cannot continue, an adapter that is not there and a number that is
        in use, and ResourceError for a request that the cache cannot hold.
        """
        super().submit(request, on_token, decode=decode, grammars=grammars)
        if on_error is not None:
            self._on_error[request.number] = on_error

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self._config

    def uses(self, adapter: str) -> bool:
        """Whether an unfinished answer is of an adapter."""
        return any(answer.request.adapter == adapter for answer in self._answers())

    def hidden_states(self, tokens: Sequence[int], adapter: str | None = None) -> np.ndarray:
        """[S, D] float32: the last hidden states of a text [S], behind the virtual tokens of an adapter.

        Raises DataError for a model with states, or on several devices.
        """
        virtual = self._virtual_tokens(adapter)
        return self._runner.hidden_states([*virtual, *tokens], adapter)[len(virtual) :].float().cpu().numpy()

    def abort(self, number: int) -> None:
        """Ends the unfinished answers of a request as they are; the next step returns them."""
        self._abort(self._live.get(number, ()))

    def update(self, version: int, weights: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Goes on with other weights. Nothing that was cached is used again; tokens that were drawn stay.

        weights: names of the model's parameters with their values, which are copied into them; None: the model has
        changed itself. Raises ModelError for a name or a shape that the model does not have.
        """
        try:
            if weights is not None:
                self._runner.copy_weights(weights)
            self.version = version
        finally:
            self._runner.weights_changed()
            for answer in self._answers():
                answer.forget_unfinished_scores()
            self._restart()

    def pause(self, mode: PauseMode) -> list[Completion]:
        """Stops answering until `resume`; returns the answers that are complete, which with `abort` are all."""
        if mode == "abort":
            self._abort(list(self._answers()))
        self.is_paused = True
        return self._take_done()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self.is_paused = False

    def sleep(self) -> None:
        """Gives the cache's memory back until `wake`; unfinished answers are read again then."""
        self._restart()
        self._runner.drop_copies()
        self._runner.pool.release()
        self.is_asleep = True

    def wake(self) -> None:
        """Takes the cache's memory again."""
        if self.is_asleep:
            self._runner.pool.allocate()
        self.is_asleep = False

    def close(self) -> None:
        """Gives the cache's memory back. Unfinished requests are gone."""
        self._live, self._done = {}, {}
        self.sleep()

    def _advance(self) -> None:
        """Runs one pass over the unfinished requests. Raises ModelError when the model answers with NaN, unless the
        request takes its errors itself."""
        assert not self.is_asleep, "the engine sleeps: wake it before it answers"
        try:
            self._report()  # where an earlier step was interrupted
            if self._live and not self.is_paused:
                self._run()
                self._report()
        except BaseException:
            for answer in self._answers():
                answer.rewind()
            self._restart()
            raise

    def _check(self, request: Request, decode: Decode | None) -> None:
        assert decode is not None or not request.stop_strings, "stop strings are looked for in text: give decode"
        where = f"prompt {request.number}"
        known = () if self._adapters is None else (*self._adapters.names, "none")
        if request.adapter is not None and request.adapter not in known:
            there = f"there are {', '.join(known)}" if known else "the engine has none to switch between"
            raise DataError(f"{where}: no adapter {request.adapter!r}; {there}")
        virtual_tokens = len(self._virtual_tokens(request.adapter))
        if problem := prompt_problem(self._config, request.prompt, virtual_tokens):
            raise DataError(f"{where} {problem}")
        check_allowed_ids(request.sampling, self._config.vocab_size)
        self._check_number(request.number)
        # The last token is not cached: nothing comes after it.
        total = min(virtual_tokens + len(request.prompt) + request.max_new_tokens, self._config.context_length)
        if self.exact and self._config.rotates_by_growth and rotated_by_length(self._config.ropes, total):
            raise DataError(
                f"{where}: {len(request.prompt)} tokens with an answer of up to {request.max_new_tokens}: past "
                f"{self._config.max_position_embeddings} tokens dynamic rotary scaling turns keys by the length that "
                "the text has, which training sees whole: numerics: exact cannot hold. Ask for fewer tokens, or use "
                "numerics: fast"
            )
        blocks = -(-(total - 1) // self.options.block)
        if blocks > self._runner.pool.blocks:
            needed, available = blocks * self._runner.block_bytes, self._runner.pool.blocks * self._runner.block_bytes
            raise ResourceError(
                f"{where}: {len(request.prompt)} tokens with an answer of up to {request.max_new_tokens} need "
                f"{gib(needed)} GiB of cache, and there are {gib(available)}. Set rollout.cache_gib (--cache-gib) to "
                f"{gib(needed)} or more, or ask for fewer tokens"
            )

    def _virtual_tokens(self, adapter: str | None) -> tuple[int, ...]:
        return self._virtual_token_ids if self._adapters is None else self._adapters.virtual_token_ids(adapter)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            BlockPool(self._runner.pool.blocks),
            block=self.options.block,
            batch_tokens=self.options.batch_tokens,
            running_limit=self._runner.running_limit,
            # States are not swapped out: a sequence that had to make room is read again.
            preempt="recompute" if self._config.has_states else self.options.preempt,
            host=BlockPool(self._runner.pool.host_blocks),
            counters=self._counters,
            window=self._runner.window,
            has_states=self._config.has_states,
            keeps_newest=self.options.cache == "int4",
        )

    def _begin(self, answers: Sequence[Answer]) -> None:
        """Gives answers of one request to the scheduler. Of those without a token one reads the prompt for all."""
        self._live[answers[0].request.number] = list(answers)
        for answer in answers:
            answer.number, answer.sequence, answer.branches = next(self._arrivals), None, []
            self._by_number[answer.number] = answer
        growing = [answer for answer in answers if answer.finish is None]
        beginning = [answer for answer in growing if not answer.drawn]
        if beginning:
            beginning[0].branches = beginning[1:]
            for answer in beginning[1:]:
                answer.prompt_scores = beginning[0].prompt_scores
        for answer in (*beginning[:1], *(answer for answer in growing if answer.drawn)):
            answer.sequence = self._new_sequence(answer)
            self._scheduler.add(answer.sequence)
        self._undelivered += answers
        self._collect(answers)

    def _new_sequence(self, answer: Answer) -> SequenceState:
        is_long = rotated_by_length(self._config.ropes, answer.rotary_length)
        shares = self.options.prefix_sharing and not (is_long and self._config.rotates_by_growth)
        # A state is there behind the last token alone: answers to one prompt have copies of it, and no more is shared.
        shares &= not self._config.has_states
        shares &= not answer.request.prompt_logprobs  # hidden states are needed, which the cache does not keep
        root = root_digest(answer.request.adapter, self.version)
        digests = [long_root_digest(root) if is_long else root] if shares else None
        return SequenceState(
            answer.number,
            answer.tokens,
            len(answer.prompt),
            len(answer.branches),
            digests,
            rotary_length=answer.rotary_length,
        )

    def _restart(self) -> None:
        """Begins with an empty cache. Everything but the answers themselves is rebuilt, so a half-done state after an
        interruption does not matter."""
        if self._speculation is not None:
            self._speculation.reset()
        self._scheduler, self._by_number, self._undelivered = self._new_scheduler(), {}, []
        for answers in list(self._live.values()):
            for answer in answers if self._runner.route_shape is not None else ():
                if answer.finish not in (None, "abort") and answer.routes is None:
                    answer.draw_last_again()
            self._begin(answers)

    def _abort(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            answer.abort()
        self._collect(answers)

    def _report(self) -> None:
        """Appends the drawn tokens to the texts of answers, and completes those that end."""
        answers, failed = self._undelivered, []
        for answer in answers:
            try:
                answer.report()
            except Exception as error:  # of its tokenizer, or of whoever receives its tokens
                if answer.request.number not in self._on_error:
                    raise
                failed.append((answer, error))
        self._fail(failed)
        self._collect(answers)
        self._undelivered = []

    def _collect(self, answers: Iterable[Answer]) -> None:
        """Makes completions of those answers that are finished, and gives their blocks back."""
        for answer in [answer for answer in answers if answer.finish is not None and answer.number in self._by_number]:
            number = answer.request.number
            self._finish(answer)
            if number not in self._live:
                self._on_error.pop(number, None)
            if answer.sequence is not None:
                self._read_routes(answer, answer.sequence)
                self._scheduler.remove(answer.sequence)
            del self._by_number[answer.number]
            if self._speculation is not None:
                self._speculation.forget(answer.number)

    def _run(self) -> None:
        """One pass; takes the tokens that are drawn for each sequence that has caught up."""
        self._runner.propose(self._by_number.values())
        plan = self._scheduler.plan()
        outcome = self._runner.run(plan, self._by_number, self.version)
        for answer, error in outcome.failed:
            if answer.request.number not in self._on_error:
                raise error
        failed_requests = {answer.request.number for answer, _ in outcome.failed}
        rejected = {}
        drawn = [each for each in outcome.drawn if each[0].request.number not in failed_requests]
        for answer, _ in outcome.failed:
            if answer.sequence is not None:
                rejected[answer.sequence.number], answer.sequence.drafts = len(answer.sequence.drafts), []
        for answer, tokens in drawn:
            answer.drawn += tokens
            self._generated_tokens += len(tokens)
            if (sequence := answer.sequence) is not None:
                sequence.tokens += [token.token for token in tokens]
                self._drafts_proposed += len(sequence.drafts)
                self._drafts_accepted += len(tokens) - 1
                if len(tokens) <= len(sequence.drafts):
                    rejected[sequence.number] = len(sequence.drafts) + 1 - len(tokens)
                sequence.drafts = []
        self._undelivered = [answer for answer, _ in drawn]
        self._scheduler.commit(plan, rejected)
        self._fail(outcome.failed)
        for parent in [answer for answer in self._undelivered if answer.branches]:
            branches, parent.branches = parent.branches, []
            for answer in branches:
                answer.sequence = self._new_sequence(answer)
            assert parent.sequence is not None
            self._scheduler.fork(parent.sequence, [answer.sequence for answer in branches if answer.sequence])
            for answer in branches:
                if answer.sequence is not None and not answer.sequence.blocks:
                    # It waits for its place, and may have ended with its first token.
                    self._read_routes(answer, parent.sequence)

    def _fail(self, failed: Iterable[tuple[Answer, Exception]]) -> None:
        """Passes their errors to requests, and ends them as they are."""
        for answer, error in failed:
            on_error = self._on_error.pop(answer.request.number, None)
            if on_error is not None:  # else another of its answers has failed in the same pass
                on_error(error)
                answers = list(self._live.get(answer.request.number, ()))
                for each in answers:
                    each.fail()
                self._collect(answers)

    def _read_routes(self, answer: Answer, sequence: SequenceState) -> None:
        """Reads the routes of an answer's computed tokens from the blocks of a sequence, where it has any."""
        routes = self._runner.pool.routes
        if routes is not None and sequence.blocks:
            read = len(answer.prompt) + len(answer.drawn) - 1
            answer.routes = routes.read(sequence.blocks, min(sequence.computed, read))[answer.virtual_tokens :]
