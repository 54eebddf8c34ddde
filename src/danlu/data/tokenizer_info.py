"""The facts about a tokenizer that are kept with its tokens. Imports no tokenizer library and no numpy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danlu.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenizerInfo:
    """The facts about the tokenizer that the rest of a run needs, without loading it."""

    vocab_size: int  # ids go from 0 to vocab_size - 1
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    end_of_turn_ids: tuple[int, ...]  # where generation stops
    missing_bytes: int = 0  # see `Tokenizer.missing_bytes`

    @property
    def warning(self) -> str | None:
        """Returns the warning about a tokenizer that loses text; None for one that does not."""
        if not self.missing_bytes:
            return None
        return (
            f"tokenizer: it has no token for {self.missing_bytes} of the 256 bytes, and text loses them without a "
            "trace; use one that has them all"
        )


def tokenizer_info(tokenizer: Tokenizer) -> TokenizerInfo:
    """The facts of a tokenizer that is loaded."""
    return TokenizerInfo(**{each.name: getattr(tokenizer, each.name) for each in fields(TokenizerInfo)})
