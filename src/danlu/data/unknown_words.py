"""Words that a tokenizer has no token for, where it has none for unknown words either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from danlu.core.errors import DataError
from danlu.data.column_values import abbreviate


@contextmanager
def naming_unknown_words(fast: Any, texts: Sequence[str], path: str) -> Iterator[None]:
    """Turns the library's error about a word without a token into a DataError that names the first such word.

    fast: the `tokenizers.Tokenizer` that encodes the texts.   path: that of the tokenizer, for the message.
    """
    try:
        yield
    except Exception as error:  # the library has no type of its own for it
        if "unk" not in str(error).lower():
            raise
        word = next((word for text in texts for word in text.split() if not has_tokens(fast, word)), "a character")
        raise DataError(
            f"{path}: this tokenizer has no token for {abbreviate(word)}, and none for unknown words (unk_token). "
            "Add one to its tokenizer.json, or take the text out"
        ) from error


def has_tokens(fast: Any, text: str) -> bool:
    """Whether a `tokenizers.Tokenizer` can encode a text."""
    try:
        fast.encode(text, add_special_tokens=False)
    except Exception:  # as above
        return False
    return True
