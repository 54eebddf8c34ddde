"""The tokens that sampling's filters left, kept for a trainer: ids or a bitmask, whichever is smaller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from danlu.core.errors import DataError
from danlu.inference.request import Completion, SamplingOptions

ID_BYTES = 4


@dataclass(frozen=True)
class Support:
    """A subset of a vocabulary. Exactly one of the two is there."""

    vocab_size: int
    sorted_ids: np.ndarray | None = None  # [K] int32, rising
    bitmask: np.ndarray | None = None  # [ceil(V / 8)] uint8, the lowest bit first

    @classmethod
    def of(cls, ids: np.ndarray, vocab_size: int) -> Support:
        """Makes a support from ids [K], rising."""
        if ID_BYTES * len(ids) <= -(-vocab_size // 8):
            return cls(vocab_size, sorted_ids=ids.astype(np.int32))
        inside = np.zeros(vocab_size, dtype=bool)
        inside[ids] = True
        return cls(vocab_size, bitmask=np.packbits(inside, bitorder="little"))

    @classmethod
    def of_bits(cls, bits: np.ndarray, vocab_size: int) -> Support | None:
        """Makes a support from bits [ceil(V / 8)] uint8, the lowest first; None where they are all set."""
        count = int(np.bitwise_count(bits).sum())
        if count == vocab_size:
            return None
        if ID_BYTES * count <= len(bits):
            ids = np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))
            return cls(vocab_size, sorted_ids=ids.astype(np.int32))
        return cls(vocab_size, bitmask=bits)

    @property
    def ids(self) -> np.ndarray:
        """The ids, [K] int64, rising."""
        if self.sorted_ids is not None:
            return self.sorted_ids.astype(np.int64)
        assert self.bitmask is not None, "a support is ids or a bitmask"
        return np.flatnonzero(np.unpackbits(self.bitmask, count=self.vocab_size, bitorder="little"))

    def __contains__(self, token: int) -> bool:
        if self.sorted_ids is not None:
            place = int(np.searchsorted(self.sorted_ids, token))
            return place < len(self.sorted_ids) and int(self.sorted_ids[place]) == token
        assert self.bitmask is not None, "a support is ids or a bitmask"
        return 0 <= token < self.vocab_size and bool(self.bitmask[token // 8] >> (token % 8) & 1)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without Python's own."""
        stored = self.bitmask if self.sorted_ids is None else self.sorted_ids
        assert stored is not None
        return int(stored.nbytes)


def support_matrix(supports: list[Support]) -> np.ndarray:
    """[N, K] int64 for `objectives.token_logprobs`: ids of each token's support, -1 where it has fewer than K."""
    rows = [support.ids for support in supports]
    matrix = np.full((len(rows), max((len(row) for row in rows), default=0)), -1, dtype=np.int64)
    for place, row in zip(matrix, rows, strict=True):
        place[: len(row)] = row
    return matrix


def check_trainable(completion: Completion, sampling: SamplingOptions, vocab_size: int) -> None:
    """Raises DataError for an answer that a trainer cannot recompute the log-probabilities of, and so not train on.

    That is where a penalty or temperature 0 chose the tokens, and where tokens were left out and it is not known, for
    each token, which. vocab_size: the trained model's.
    """
    where = f"prompt {completion.number}, sample {completion.sample}"
    if sampling.biased_ids:
        raise DataError(f"{where}: drawn with a logit bias, which a trainer's log-probabilities do not have")
    for name, off in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
        if (value := getattr(sampling, name)) != off:
            raise DataError(
                f"{where}: drawn with a {name.replace('_', ' ')} of {value:g}, which a trainer's log-probabilities do "
                f"not have. Set {name} to {off} where they are trained on"
            )
    if sampling.temperature == 0:
        raise DataError(
            f"{where}: drawn at temperature 0, where the likeliest token is certain: there is no distribution with "
            "log-probabilities to train on. Set temperature above 0"
        )
    count = len(completion.tokens)
    for name in ("logprobs", "drawn", "versions"):
        if len(getattr(completion, name)) != count:
            raise DataError(f"{where}: {count} tokens, but {len(getattr(completion, name))} entries of {name}")
    if not (sampling.truncates or sampling.allowed_ids is not None) and completion.support is None:
        return
    if completion.support is None:
        raise DataError(
            f"{where}: filters left tokens out (top_k {sampling.top_k}, top_p {sampling.top_p:g}, min_p "
            f"{sampling.min_p:g}, allowed_ids), and the answer does not say which. Keep its support, or "
            "sample without filters"
        )
    if len(completion.support) != count:
        raise DataError(
            f"{where}: {count} tokens, but supports for {len(completion.support)}: they are of another state "
            "of the answer"
        )
    for place, (token, support) in enumerate(zip(completion.tokens, completion.support, strict=True)):
        if support.vocab_size != vocab_size:
            raise DataError(
                f"{where}: the support of token {place} is of a vocabulary of {support.vocab_size} tokens, and the "
                f"model has {vocab_size}: they do not belong together"
            )
        if token not in support:
            raise DataError(
                f"{where}: token {place} ({token}) is not in its own support, which must be of another answer"
            )
