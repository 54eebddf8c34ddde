"""The rollout engine: what answers prompts with the model while it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, PositiveInt, Section, VariantSection


class Ngram(VariantSection):
    """Prompt lookup: what followed the last few tokens where they occurred before."""

    kind: Literal["ngram"] = "ngram"
    tokens: PositiveInt = 4
    """Tokens that are proposed at a time."""
    longest: PositiveInt = 3
    """The longest end of the text that is looked for earlier in it; shorter ones follow."""


class DraftModel(VariantSection):
    """A smaller model with the same vocabulary (arXiv:2211.17192)."""

    kind: Literal["model"] = "model"
    model: str
    """A Hugging Face folder, a hub id or a finished run."""
    tokens: PositiveInt = 4
    """Tokens that are proposed at a time."""


Draft = Annotated[Ngram | DraftModel, Field(discriminator="kind")]


class Rollout(Section):
    """The engine that samples from the policy. Of its settings none but `draft` changes an answer, and that one keeps
    the distribution which answers are drawn from."""

    short = "engine"

    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """embedded answers in this process, with the trainer's own tensors; vllm and sglang are servers that run elsewhere,
    which are handed the weights."""
    url: str | None = None
    """vllm, sglang: where the server listens, such as http://localhost:8000."""
    block: PositiveInt = 16
    """Tokens whose keys and values are kept together (the page size)."""
    cache_gib: Annotated[float, Field(gt=0)] = 2.0
    """The most memory that keys and values take, in GiB, on each process."""
    batch_tokens: PositiveInt = 1024
    """The most tokens of one forward pass; longer prompts are read in several (chunked prefill)."""
    sequences: PositiveInt = 256
    """The most answers that grow at a time."""
    prefix_sharing: bool = True
    """Read prompts that begin alike once, and share the keys and values of what they have in common."""
    draft: Draft | None = None
    """Speculative decoding: ngram or model proposes tokens, which the policy checks in one pass."""
    preempt: Literal["recompute", "swap"] = "recompute"
    """What becomes of an answer that has to make room for others: read again later, or copied to the host's memory."""
    swap_gib: NonNegative = 4.0
    """preempt: swap: host memory for what was swapped out, in GiB."""
