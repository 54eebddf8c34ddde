"""Checks of prompts: which prompts a model can continue, and which files are rows of them. No torch here, nor numpy.

torch takes a second to import. A prompt that is too long is reported without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from danlu.models.config import ModelConfig

_ROWS = (".json", ".jsonl")


def has_rows(file: Path) -> bool:
    """Whether a file is one of rows by the ending of its name, compressed or not; any other is one prompt."""
    if file.suffix.lower() in _ROWS or Path(file.stem).suffix.lower() not in _ROWS:
        return file.suffix.lower() in _ROWS
    # Here: 10 ms that other files need not wait for.
    from danlu.data.file_formats import DECOMPRESSORS

    return file.suffix.lower() in DECOMPRESSORS


def prompt_problem(config: ModelConfig, prompt: Sequence[int], virtual_tokens: int = 0) -> str | None:
    """Returns why the model cannot continue a prompt ("has no tokens, ..."); None if it can.

    virtual_tokens: the number of tokens that adapters put before it.
    """
    context = config.context_length
    if not prompt:
        return (
            "has no tokens, and this tokenizer has no beginning-of-text token to start from: "
            "give at least one character"
        )
    if virtual_tokens + len(prompt) >= context:
        more = f" and the adapter {virtual_tokens}" if virtual_tokens else ""
        return (
            f"has {len(prompt)} tokens{more}, but the model sees {context} tokens at most "
            "(max_position_embeddings), answer included: shorten the prompt"
        )
    if max(prompt) >= config.vocab_size or min(prompt) < 0:
        token = max(prompt) if max(prompt) >= config.vocab_size else min(prompt)
        return (
            f"has token {token}, but the model's vocabulary has {config.vocab_size} tokens: "
            "tokenizer and model do not belong together"
        )
    return None
