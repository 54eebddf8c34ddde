"""The documents of a micro-batch that is like the mean of a run's. Imports no torch."""

from __future__ import annotations

from danlu.planning.lengths import Lengths


def mean_documents(lengths: Lengths, sequences: int, max_length: int) -> list[int]:
    """Documents of `sequences` packed sequences: of each length as many as the run has, in proportion.

    A longer row is cut into packed sequences. The last document is as long as fills the rest.
    """
    tokens = sequences * max_length
    if not lengths.documents:
        return [max_length] * sequences
    shares: list[int] = []
    for length in lengths.documents:
        whole, rest = divmod(length, max_length)
        shares += [max_length] * whole + [rest] * (rest > 0)
    shares.sort()
    count = max(1, round(len(shares) * tokens / sum(shares)))
    # The middle of each of `count` equal shares of the sorted lengths; a share goes round where rows are few.
    chosen = [shares[int((index + 0.5) * len(shares) / count) % len(shares)] for index in range(count)]
    documents: list[int] = []
    free = tokens
    for length in chosen:
        if free:
            documents.append(min(length, free))
            free -= documents[-1]
    return [*documents, *([free] if free else [])]
