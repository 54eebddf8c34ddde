"""From prompts to completions: each distinct prompt is prefilled once, then all sequences are decoded together.

Finished sequences leave the batch at once, so the cost of a step is that of the sequences that are still growing.

B sequences · T tokens, flat · D model width · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from danlu.errors import ModelError
from danlu.models.decoder import Decoder
from danlu.rollout.cache import KVCache
from danlu.rollout.prompts import check_prompts
from danlu.rollout.request import SamplingOptions
from danlu.rollout.sampling import DrawRow, SeenTokens, draw
from danlu.rollout.stopping import Decode, TextStream

# Prompt tokens per forward pass: enough for efficient matrix products, few enough that the attention scores of one pass
# over a long prompt stay small.
PREFILL_TOKENS = 1024

Finish = Literal["stop", "stop_string", "length", "context"]
"""stop: a stop token; stop_string: one of these; length: max_new_tokens; context: the model's context is full."""

OnToken = Callable[[int, int, str], None]
"""Called for each new token with the sample's index, the token, and the new text that can be shown (may be "")."""


@dataclass(frozen=True)
class Completion:
    """One answer. The token that stopped it is in `tokens`, but not in `text`; nor is a stop string."""

    tokens: list[int]
    logprobs: list[float]
    """One per token, nats: log softmax(logits / temperature) over the whole vocabulary (see `sampling.sample`)."""
    text: str
    """Empty when no `decode` was given."""
    finish: Finish


@dataclass(frozen=True)
class Stopping:
    """What ends an answer, whichever comes first. `context` counts prompt and answer together."""

    max_new_tokens: int
    context: int
    ids: frozenset[int] = frozenset()


@dataclass
class Answer:
    """One sequence while it grows."""

    sample: int  # index of its random numbers
    position: int  # of the next token
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, token: int, logprob: float, stopping: Stopping) -> str:
        """Takes the next token, sets `finish` where it is the last, and returns the new text that can be shown."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.position += 1
        text = "" if self.stream is None or token in stopping.ids else self.stream.push(token)
        if token in stopping.ids:
            self.finish = "stop"
        elif self.stream is not None and self.stream.stopped:
            self.finish = "stop_string"
        elif len(self.tokens) >= stopping.max_new_tokens:
            self.finish = "length"
        elif self.position >= stopping.context:
            self.finish = "context"
        if self.finish is not None and self.stream is not None:
            text += self.stream.close()
            # A stop string that ends in the withheld text is complete only now.
            self.finish = "stop_string" if self.stream.stopped else self.finish
        return text

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish is not None, "the answer is still growing"
        return Completion(self.tokens, self.logprobs, self.stream.text if self.stream else "", self.finish)


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    on_token: OnToken | None = None,
    *,
    decode: Decode | None = None,
    dtype: torch.dtype | None = None,
    virtual_token_ids: Sequence[int] = (),
) -> list[Completion]:
    """One completion for each prompt, in order. Equal prompts are prefilled once and continued separately.

    Args:
        options: how tokens are chosen; prompt i draws with sample index i, whatever other prompts there are.
        stop_ids: tokens that end an answer, usually the model's end-of-text and end-of-turn tokens.
        stop_strings: texts that end an answer, wherever they fall between tokens; they need `decode`.
        decode: token ids to text without special tokens; without it answers have no text.
        dtype: of activations; by default that of the weights.
        virtual_token_ids: tokens that every prompt begins with: those of soft prompts and prefixes.

    Raises DataError for a prompt that is empty, too long for the model or outside its vocabulary, and ModelError when
    the model answers with NaN.
    """
    assert max_new_tokens > 0, f"max_new_tokens is {max_new_tokens}"
    assert decode is not None or not stop_strings, "stop strings are looked for in text: give decode"
    check_prompts(model.config, prompts, len(virtual_token_ids))
    stopping = Stopping(max_new_tokens, model.config.context_length, frozenset(stop_ids))
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    row_of = {prompt: row for row, prompt in enumerate(distinct)}
    rows = [row_of[tuple(prompt)] for prompt in prompts]
    answers = [
        Answer(
            index, len(virtual_token_ids) + len(prompt), TextStream(decode, stop_strings, prompt) if decode else None
        )
        for index, prompt in enumerate(prompts)
    ]
    if not answers:
        return []
    with torch.inference_mode():
        cache = KVCache(len(distinct))
        logits = prefill(model, cache, [(*virtual_token_ids, *prompt) for prompt in distinct], dtype)
        cache, logits = cache.fork(rows), logits[rows]
        grow(model, cache, logits, answers, prompts, options, stopping, on_token, dtype)
    return [answer.completion() for answer in answers]


def prefill_chunks(counts: Sequence[int], budget: int) -> list[list[int]]:
    """How many tokens of each prompt go into each pass: prompts in order, at most `budget` tokens a pass.

    >>> prefill_chunks([3, 4], budget=5)
    [[3, 2], [0, 2]]
    """
    remaining, chunks = list(counts), []
    while any(remaining):
        room, chunk = budget, []
        for count in remaining:
            chunk.append(min(count, room))
            room -= chunk[-1]
        remaining = [count - taken for count, taken in zip(remaining, chunk, strict=True)]
        chunks.append(chunk)
    return chunks


def prefill(
    model: Decoder,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],  # new tokens of each sequence of the cache, at least one each
    dtype: torch.dtype | None = None,
    budget: int = PREFILL_TOKENS,
) -> Tensor:  # [B, V] float32
    """Reads tokens into the cache; returns the logits after the last one of each sequence.

    The result does not depend on the budget: rotary scalings that depend on the length of a document use that of the
    whole sequence.
    """
    device = next(model.parameters()).device
    dtype = dtype or next(model.parameters()).dtype
    totals = [past + len(prompt) for past, prompt in zip(cache.lengths, prompts, strict=True)]
    last: list[Tensor | None] = [None] * len(prompts)  # hidden state [D] of each sequence's last token
    read = [0] * len(prompts)  # tokens of each prompt
    for chunk in prefill_chunks([len(prompt) for prompt in prompts], budget):
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        ends: dict[int, int] = {}  # from a sequence that ends in this pass to the index of its last token
        for row, count in enumerate(chunk):
            tokens += prompts[row][read[row] : read[row] + count]
            positions += range(cache.lengths[row], cache.lengths[row] + count)
            lengths += [totals[row]] * count
            read[row] += count
            if count and read[row] == len(prompts[row]):
                ends[row] = len(tokens) - 1
        attend = cache.extend(chunk)
        inputs = [torch.tensor(column, device=device) for column in (tokens, positions, lengths)]  # [T] each
        hidden = model(inputs[0], inputs[1], attend, dtype, inputs[2])  # [T, D]
        for row, end in ends.items():
            last[row] = hidden[end]
    return model.logits(torch.stack([state for state in last if state is not None]))


def grow(
    model: Decoder,
    cache: KVCache,
    logits: Tensor,  # [B, V] after the last token of each sequence of the cache
    answers: Sequence[Answer],
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    stopping: Stopping,
    on_token: OnToken | None,
    dtype: torch.dtype | None = None,
) -> None:
    """Adds tokens to the answers until each is finished. The last token of a sequence does not get into the cache."""
    dtype = dtype or next(model.parameters()).dtype
    active = list(answers)
    penalised = options.repetition_penalty != 1.0
    seen = {answer.sample: SeenTokens(prompt) for answer, prompt in zip(answers, prompts, strict=True)}
    while True:
        rows = [
            DrawRow(options, answer.sample, 0, answer.position, seen[answer.sample].ids if penalised else None)
            for answer in active
        ]
        drawn = draw(logits, rows)
        for answer, token, logprob in zip(active, drawn.tokens, drawn.logprobs, strict=True):
            if not math.isfinite(logprob):
                raise ModelError(
                    f"the model's output is not finite at position {answer.position}: a weight may be NaN, or the "
                    f"numbers leave the range of {str(dtype).removeprefix('torch.')} (try a wider dtype)"
                )
            text = answer.add(token, logprob, stopping)
            seen[answer.sample].add(token)
            if on_token is not None:
                on_token(answer.sample, token, text)
        finished = [row for row, answer in enumerate(active) if answer.finish is not None]
        if len(finished) == len(active):
            return
        if finished:
            order = cache.drop(finished)
            active = [active[row] for row in order]
        tokens = torch.tensor([answer.tokens[-1] for answer in active], device=logits.device)
        positions = torch.tensor(cache.lengths, device=logits.device)
        # Rotary scalings that depend on the length: cached keys keep the frequencies of the length that they were
        # computed at, as in transformers.
        logits = model.logits(model(tokens, positions, cache.extend([1] * len(active)), dtype, positions + 1))
