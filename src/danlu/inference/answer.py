"""One answer while it grows: its tokens as they were drawn, its text, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from danlu.inference.grammar import Grammars, TokenMatcher
from danlu.inference.penalties import GeneratedTokens, SeenTokens, TokenCounts
from danlu.inference.recorded_routes import routes_from_json, routes_to_json, with_length
from danlu.inference.request import Completion, Finish, NewToken, OnToken, Request
from danlu.inference.sampling import TokenScore
from danlu.inference.sequence_state import SequenceState
from danlu.inference.stopping import Decode, TextStream
from danlu.inference.support import Support


class DrawnToken(NamedTuple):
    """A token of an answer and the record of its draw; see `Completion`."""

    token: int
    logprob: float
    drawn: float
    support: Support | None
    version: int
    top: tuple[tuple[int, float], ...]


class Answer:
    """One sample of a request.

    `drawn` is its whole state, and grows by the tokens that a pass draws: everything else here follows from it, so that
    an answer can be interrupted anywhere and continued (`rewind`).

    virtual_token_ids: the sequence's first tokens, before the prompt. grammars: compile that of the request, where it
    has one.
    """

    def __init__(
        self,
        request: Request,
        sample: int,
        virtual_token_ids: Sequence[int],
        context: int,
        decode: Decode | None = None,
        on_token: OnToken | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.request, self.sample = request, sample
        self.decode, self.on_token = decode, on_token
        self.drawn: list[DrawnToken] = []
        self.prompt_scores: list[TokenScore] = []
        """Scores of the prompt's tokens from the second on, as far as it is read; empty where they are not
        requested."""
        self.prompt = [*virtual_token_ids, *request.prompt]
        self.virtual_tokens = len(virtual_token_ids)
        self.longest = min(request.max_new_tokens, context - len(self.prompt))
        """The most tokens that it can have, by the request or by the model's context."""
        self.rotary_length = min(len(virtual_token_ids) + request.text_length, context)
        """Tokens that the text may have at last, by which LongRoPE rotates all of them."""
        self.number = -1
        """The sequence number; -1 until the engine assigns one."""
        self.sequence: SequenceState | None = None
        """The scheduler's state of the sequence; None until the first token, for samples that branch off another's
        prompt."""
        self.branches: list[Answer] = []
        """Further samples that begin as soon as this one's prompt is computed."""
        self.routes: np.ndarray | None = None
        """[tokens, layers, experts of a token] int16 of prompt and answer, once it is complete; see `Completion`."""
        self.finish: Finish | None = None
        self.reported = 0  # tokens that are in the text, and that `on_token` was called with
        self._stream = self._new_stream()
        self._seen, self._generated = self._new_seen(), self._new_generated()
        self._grammars = grammars
        self.matcher = self._new_matcher()
        """The state of the answer in its grammar; None where it has none."""

    @property
    def key(self) -> tuple[int, int]:
        """The request's number and the sample."""
        return self.request.number, self.sample

    @property
    def tokens(self) -> list[int]:
        """All known tokens of the sequence."""
        return self.prompt + [drawn.token for drawn in self.drawn]

    @property
    def needs_more(self) -> bool:
        """Whether the answer may not end before the next token, for it is too short."""
        return len(self.drawn) < self.request.min_new_tokens

    @property
    def is_confined(self) -> bool:
        """Whether the next token has to be one of a mask: by a grammar, or because the answer may not end yet."""
        return self.matcher is not None or self.needs_more

    @property
    def seen(self) -> np.ndarray | None:
        """The tokens that a repetition penalty counts: [n] int64 of prompt and answer, without virtual ones."""
        return None if self._seen is None else self._seen.ids

    @property
    def generated(self) -> TokenCounts | None:
        """The tokens that presence and frequency penalties count: those of the answer."""
        return None if self._generated is None else self._generated.counts

    def report(self) -> None:
        """Takes the tokens that were drawn into the text, one by one, and tells `on_token`. Sets `finish` at the last;
        tokens that were drawn behind it are dropped."""
        while self.finish is None and self.reported < len(self.drawn):
            drawn = self.drawn[self.reported]
            text, self.finish = self._take(drawn.token)
            self.reported += 1
            if self.finish is not None:
                del self.drawn[self.reported :]
            if self.on_token is not None:
                number, sample = self.key
                self.on_token(NewToken(number, sample, drawn.token, drawn.logprob, text, drawn.top, self.finish))

    def abort(self) -> None:
        """Ends the answer as it is."""
        if self.finish is None:
            del self.drawn[self.reported :]
            self.finish = "abort"
            if self._stream is not None:
                self._stream.close()

    def fail(self) -> None:
        """Ends the answer without its text, since decoding may be the step that failed."""
        self.decode = self._stream = None
        self.abort()

    def rewind(self) -> None:
        """Rebuilds the text of the reported tokens, after an interruption that may have left it half decoded."""
        reported, self.reported = self.reported, 0
        aborted = self.finish == "abort"
        self.finish, self._stream = None, self._new_stream()
        self._seen, self._generated = self._new_seen(), self._new_generated()
        self.matcher = self._new_matcher()
        for drawn in self.drawn[:reported]:
            _, self.finish = self._take(drawn.token)
            self.reported += 1
        if self.finish is not None:
            del self.drawn[self.reported :]
        elif aborted:
            self.abort()

    def begin_again(self) -> None:
        """Drops all tokens, which are drawn again: for an answer that an engine cannot go on with."""
        self.drawn.clear()
        self.finish, self.reported = None, 0
        self.rewind()

    def draw_last_again(self) -> None:
        """Drops the last token, which will be drawn again: for an answer that was interrupted between its end and the
        reading of its routes. Random numbers follow from its position."""
        del self.drawn[-1]
        self.reported = min(self.reported, len(self.drawn))
        self.rewind()

    def completion(self) -> Completion:
        """The completion of the finished answer."""
        assert self.finish is not None, "the answer is still growing"
        columns = [list(column) for column in zip(*self.drawn, strict=True)] or [[] for _ in DrawnToken._fields]
        tokens, logprobs, drawn, support, versions, top = columns
        return Completion(
            number=self.request.number,
            sample=self.sample,
            tokens=tokens,
            logprobs=logprobs,
            drawn=drawn,
            support=_whole_supports(support),
            versions=versions,
            text="" if self._stream is None else self._stream.text,
            finish=self.finish,
            top=top if self.request.top_logprobs else None,
            prompt_logprobs=[score.logprob for score in self.prompt_scores] if self.request.prompt_logprobs else None,
            prompt_top=[score.top for score in self.prompt_scores] if self._wants_prompt_top else None,
            routes=None
            if self.routes is None
            else with_length(self.routes, len(self.request.prompt) + len(tokens) - 1),
        )

    def prompt_to_score(self, start: int, stop: int) -> range:
        """Returns the places among `start` to `stop`, which a pass computes, with next tokens of the prompt that
        `prompt_scores` lacks."""
        if not self.request.prompt_logprobs:
            return range(0)
        places = range(max(start, self.virtual_tokens + len(self.prompt_scores)), min(stop, len(self.prompt) - 1))
        assert not places or places.start == self.virtual_tokens + len(self.prompt_scores), "scores come in order"
        return places

    def forget_unfinished_scores(self) -> None:
        """Has a prompt that is being read scored again from its beginning, since other weights would go on with it."""
        if not self.drawn:
            self.prompt_scores.clear()

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {
            "sample": self.sample,
            "reported": self.reported,
            "aborted": self.finish == "abort",
            "prompt_scores": self.prompt_scores,
            "drawn": [
                [*drawn[:3], None if drawn.support is None else drawn.support.ids.tolist(), drawn.version, drawn.top]
                for drawn in self.drawn
            ],
            **({} if self.routes is None else {"routes": routes_to_json(self.routes)}),
        }

    def restore(self, state: dict[str, Any], vocab_size: int) -> None:
        """Restores the state that `state` returned."""
        self.drawn = [_drawn_token(row, vocab_size) for row in state["drawn"]]
        self.prompt_scores = [
            TokenScore(logprob, tuple((token, value) for token, value in top))
            for logprob, top in state["prompt_scores"]
        ]
        self.routes = routes_from_json(state.get("routes"))
        self.reported = state["reported"]
        self.finish = "abort" if state["aborted"] else None
        self.rewind()

    @property
    def _wants_prompt_top(self) -> bool:
        return self.request.prompt_logprobs and self.request.top_logprobs > 0

    def _new_stream(self) -> TextStream | None:
        if self.decode is None:
            return None
        request = self.request
        return TextStream(self.decode, request.stop_strings, request.prompt, shows_stop=request.shows_stop)

    def _new_seen(self) -> SeenTokens | None:
        return None if self.request.sampling.repetition_penalty == 1.0 else SeenTokens(self.request.prompt)

    def _new_matcher(self) -> TokenMatcher | None:
        if self.request.grammar is None:
            return None
        assert self._grammars is not None, "the engine refuses a grammar that it cannot compile"
        matcher, prompt = self._grammars.matcher(self.request.grammar), self.request.prompt
        for token in prompt[len(prompt) - self.request.answer_tokens :]:
            matcher.accept(token)
        return matcher

    def _new_generated(self) -> GeneratedTokens | None:
        return GeneratedTokens() if self.request.sampling.counts_tokens else None

    def _take(self, token: int) -> tuple[str, Finish | None]:
        """Appends the next token to the text. Returns the text that can be shown now, and why the answer ends if it
        does."""
        stream, request = self._stream, self.request
        finish: Finish | None = None
        if self._seen is not None:
            self._seen.add(token)
        if self._generated is not None:
            self._generated.add(token)
        is_stop = token in request.stop_ids
        if self.matcher is not None:
            self.matcher.accept(token)
            is_stop |= self.matcher.ended_by(token)
        may_stop = self.reported + 1 > request.min_new_tokens
        text = "" if stream is None or (is_stop and not request.shows_stop) else stream.push(token, may_stop=may_stop)
        if is_stop or (self.matcher is not None and self.matcher.is_complete):
            finish = "stop"
        elif stream is not None and stream.stopped:
            finish = "stop_string"
        elif self.reported + 1 >= self.longest:
            finish = "length" if self.reported + 1 >= request.max_new_tokens else "context"
        if finish is not None and stream is not None:
            text += stream.close()
            # A stop string that ends in the withheld text is complete only now.
            finish = "stop_string" if stream.stopped else finish
        return text, finish


def _whole_supports(supports: list[Support | None]) -> list[Support] | None:
    """A support for each token, the whole vocabulary where nothing was filtered; None if that is so everywhere."""
    vocab_size = next((support.vocab_size for support in supports if support is not None), None)
    if vocab_size is None:
        return None
    whole = Support.of(np.arange(vocab_size), vocab_size)
    return [whole if support is None else support for support in supports]


def _drawn_token(row: list[Any], vocab_size: int) -> DrawnToken:
    token, logprob, drawn, ids, version, top = row
    support = None if ids is None else Support.of(np.array(ids, dtype=np.int64), vocab_size)
    return DrawnToken(token, logprob, drawn, support, version, tuple((id_, value) for id_, value in top or ()))
