"""Requests to a rollout engine, and its answers: tokens in, tokens out. No torch here.

torch takes a second to import. A mistyped flag is reported without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from danlu.core.errors import RecipeError

if TYPE_CHECKING:
    import numpy as np

    from danlu.data.prompts import Prompt
    from danlu.inference.support import Support

Finish = Literal["stop", "stop_string", "length", "context", "turns", "abort"]
"""stop: a stop token; stop_string: one of these; length: max_new_tokens; context: the model's context is full; turns:
an episode has had all its turns; abort: whoever asked took the request back, or an environment failed."""


LOWEST_TEMPERATURE = 1e-6
"""The lowest temperature: logits over a lower one leave the range of float32, or differ by so much that only the
likeliest is ever drawn, as at 0."""
HIGHEST_PENALTY = 1e6
"""Logits times a larger penalty for repetition, or over one below its inverse, do likewise."""


@dataclass(frozen=True)
class SamplingOptions:
    """The options by which the next token is chosen. Raises RecipeError, with every problem at once, for values that
    make no sense."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token and ignores the other options except penalties."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability (arXiv:1904.09751); 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one (arXiv:2407.01082); 0 keeps all."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the answer so far less likely if above 1 (CTRL, arXiv:1909.05858, sec. 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the answer so far, as OpenAI has it; not of the prompt's."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens of the answer, as often as each is in it so far."""
    seed: int = 0
    """Fixes every draw, together with the request's number, the sample's index and the token's position."""
    allowed_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn, before any other filter; None allows the whole vocabulary."""
    biased_ids: tuple[int, ...] = ()
    """Tokens with a bias: OpenAI's logit_bias."""
    biases: tuple[float, ...] = ()
    """The number that is added to the logit of each of these tokens, before any other penalty."""

    def __post_init__(self) -> None:
        checks = (
            (
                self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf,
                "temperature",
                f"0 (greedy) or a number of at least {LOWEST_TEMPERATURE:g}",
            ),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps every token)"),
            (self.top_k >= 0, "top_k", "0 (keep every token) or more"),
            (0 <= self.min_p <= 1, "min_p", "between 0 (keep every token) and 1"),
            (
                1 / HIGHEST_PENALTY <= self.repetition_penalty <= HIGHEST_PENALTY,
                "repetition_penalty",
                f"between {1 / HIGHEST_PENALTY:g} and {HIGHEST_PENALTY:g} (1 changes nothing)",
            ),
            (-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2 (0 changes nothing)"),
            (-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2 (0 changes nothing)"),
            (0 <= self.seed < 2**63, "seed", "at least 0 and below 2^63"),
            (self.allowed_ids is None or len(self.allowed_ids) > 0, "allowed_ids", "one token or more, or left out"),
            (len(self.biases) == len(self.biased_ids), "biases", "one number for each of biased_ids"),
            (all(map(math.isfinite, self.biases)), "biases", "finite numbers"),
        )
        wrong = [(name, rule) for in_range, name, rule in checks if not in_range]
        if wrong:
            raise RecipeError(
                [f"{name}: {getattr(self, name)} is out of range; it must be {rule}" for name, rule in wrong]
            )

    @property
    def counts_tokens(self) -> bool:
        """Whether how often a token is in the answer so far makes a difference."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalises(self) -> bool:
        """Whether tokens are made more or less likely than the model has them: those that came before, or by a bias."""
        return self.repetition_penalty != 1 or self.counts_tokens or bool(self.biased_ids)

    @property
    def truncates(self) -> bool:
        """Whether the options exclude tokens; log-probabilities are of the full vocabulary all the same."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Request:
    """One prompt, and how it is to be continued."""

    number: int
    """The number of the prompt in the run, or of the request in a server's life: no two unfinished requests share one.
    Random numbers follow from (seed, random_number, sample, position), so a repeated number repeats its draws."""
    prompt: tuple[int, ...]
    """The prompt's tokens, without the virtual tokens of adapters, which the engine puts before it."""
    sampling: SamplingOptions = SamplingOptions()
    max_new_tokens: int = 256
    samples: int = 1
    """Answers, each drawn by itself."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer, usually the model's end-of-text and end-of-turn tokens."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer, wherever they fall between tokens."""
    shows_stop: bool = False
    """Whether what ended an answer is in its text, where it has a text."""
    min_new_tokens: int = 0
    """The fewest tokens of an answer: before that no stop token is drawn, and no stop string ends it."""
    grammar: str | None = None
    """The grammar that answers have to follow, as `inference.grammar` writes it; None: any text."""
    answer_tokens: int = 0
    """The number of the prompt's last tokens that are the answer's first ones, where a server goes on with an answer:
    its grammar reads them first."""
    adapter: str | None = None
    """The name of an adapter of the engine, or "none" for the base alone; None: the adapter that is active in the
    model."""
    top_logprobs: int = 0
    """The number of likeliest tokens that are kept with their log-probabilities, for each token of the answers."""
    prompt_logprobs: bool = False
    """Whether log-probabilities of the prompt's tokens are returned, and their `top_logprobs`. Such a prompt is
    computed whole: the prefix cache is of no use."""
    first_sample: int = 0
    """The number of the first of `samples`: a server that is asked for one of several answers draws it as that one."""
    draw_number: int | None = None
    """The number that random numbers follow from in place of `number`, where the same draws are wanted again: a request
    to a server that brings a seed has the same answer whatever else was asked before it."""

    draw_sample: int = 0
    """Added to the sample's index in the key of its random numbers: where the later turns of the samples of a prompt
    are requests of their own, each goes on with the numbers of its sample."""
    rotary_length: int | None = None
    """Tokens by which LongRoPE chooses its factors, where the text goes on behind this answer (an episode in several
    turns); None: prompt and `max_new_tokens`, as many as this text may have. Without virtual tokens."""
    source: Prompt | None = field(default=None, compare=False, repr=False)
    """The prompt's source, for an environment that answers back (`episode_engine`). Not in states: a caller that
    restores a request has the run's prompts."""

    def __post_init__(self) -> None:
        assert self.max_new_tokens > 0, f"max_new_tokens is {self.max_new_tokens}"
        assert self.samples > 0, f"{self.samples} samples"

    @property
    def sample_numbers(self) -> range:
        """The numbers of its answers."""
        return range(self.first_sample, self.first_sample + self.samples)

    @property
    def text_length(self) -> int:
        """Tokens that the text may have at last, without virtual ones."""
        return len(self.prompt) + self.max_new_tokens if self.rotary_length is None else self.rotary_length

    @property
    def random_number(self) -> int:
        """The request's part of the key of its random numbers."""
        return self.number if self.draw_number is None else self.draw_number


@dataclass(frozen=True)
class NewToken:
    """One token of an answer, as soon as it is drawn."""

    number: int
    sample: int
    token: int
    logprob: float
    text: str
    """The text that can be shown now; empty while a character or a possible stop string is incomplete."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, where they were asked for."""
    finish: Finish | None = None


OnToken = Callable[[NewToken], None]
OnError = Callable[[Exception], None]
"""Called with the error of a request while others go on."""


@dataclass(frozen=True)
class Completion:
    """One answer. The token that stopped it is in `tokens`, but not in `text`; nor is a stop string.

    Lists have one entry for each of `tokens`; log-probabilities are in nats.
    """

    number: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    """The model's: log softmax(logits / temperature) over the whole vocabulary, before any penalty or filter
    (temperature 0 counts as 1). A trainer recomputes these. NaN of answers with a grammar by servers that give `drawn`
    alone (vLLM, SGLang)."""
    drawn: list[float]
    """Log-probabilities under the sampling distribution: after penalties, allowed tokens, temperature and filters."""
    support: list[Support] | None
    """The tokens that the filters left at each place; None where no filter was on."""
    versions: list[int]
    """The version of the weights that each token was drawn with."""
    text: str
    """Empty where the engine has no `decode`."""
    finish: Finish
    top: list[tuple[tuple[int, float], ...]] | None = None
    """The likeliest tokens, as in `NewToken`; None where none were requested."""
    prompt_logprobs: list[float] | None = None
    """Log-probabilities of the prompt's tokens from the second on, as `logprobs`, by the weights that it was read with;
    None where none were requested."""
    prompt_top: list[tuple[tuple[int, float], ...]] | None = None
    """The likeliest tokens at the same places, as `top`."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """[tokens, layers with experts, experts of a token] int16: the experts that each token of the prompt (without
    virtual ones) and of the answer went to when it was read last, so that a trainer can send it there too; -1 where
    that is not known. The last token of the answer, which nothing comes after, is not read and has none. None where it
    is not recorded (`EngineOptions.routes`), for models without experts, and for answers that were aborted before they
    were read."""

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut off, by max_new_tokens, the end of the model's context, or the number of turns."""
        return self.finish in ("length", "context", "turns")
