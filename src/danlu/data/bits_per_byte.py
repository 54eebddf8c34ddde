"""The number of bytes of text that scored tokens stand for: the divisor of bits per byte, whatever the tokenizer."""

from __future__ import annotations

import numpy as np

from danlu.data.message_spans import Reason
from danlu.data.samples import Samples
from danlu.data.tokenizer import Tokenizer


def is_plain_text(samples: Samples) -> bool:
    """Whether the samples are text (or tokens given as such) alone: no prompts, no conversations."""
    plain = (Reason.TEXT, Reason.BOS, Reason.EOS)
    return all(np.isin(samples.reasons(number), plain).all() for number in range(len(samples)))


def weighted_bytes(samples: Samples, tokenizer: Tokenizer) -> tuple[float, float]:
    """The weight of all tokens, and the UTF-8 bytes of text they stand for, each byte with the weight of its token.

    A character spread over several tokens is counted byte by byte, tokens that begin or end a document not at all, nor
    the space that some tokenizers put before a document. A text that the tokenizer normalises counts as it is then.
    """
    token_texts = tokenizer.token_bytes(range(tokenizer.vocab_size))
    lengths = np.array([len(text) for text in token_texts], np.int64)
    begins_with_space = np.array([text.startswith(b" ") for text in token_texts], bool)
    adds_space = b"".join(token_texts[token] for token in tokenizer.encode("a")) == b" a"
    weight = total = 0.0
    for number in range(len(samples)):
        sample, reasons = samples.sample(number), samples.reasons(number)
        counted = np.where(reasons == Reason.TEXT, lengths[sample.tokens], 0)  # [S]
        if adds_space and reasons[0] == Reason.BOS:
            counted[1:2] -= begins_with_space[sample.tokens[1:2]]
        weight += float(sample.weights.sum(dtype=np.float64))
        total += float(sample.weights.astype(np.float64) @ counted)
    return weight, total
