"""Speculative decoding (arXiv:2211.17192): tokens that are proposed cheaply, and checked by the model in one pass.

A sequence with proposals is computed up to the last of them, and a token is drawn behind each. The first that differs
from its proposal ends the round: the draws after it followed a token that is not there.

Proposals of an n-gram are certain, so a draw by the plain rule keeps each as often as rejection sampling would, and
answers are those without proposals, to the token. A draft model draws its proposals, and rejection sampling keeps more
of them. There the token at a place follows from both models' distributions at it and the place's random numbers: not
from where rounds begin and end, so neither neighbours nor interruptions matter. To that end the draft model proposes
for every place, also the one behind the last proposal that is checked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from danlu.inference.sampling import Drawn, DrawRow, ProposedToken, draw


@dataclass(frozen=True)
class DraftSequence:
    """A sequence that proposals are made for."""

    number: int
    """The number of the sequence in the engine."""
    tokens: Sequence[int]
    """All that are known, virtual ones and the prompt's among them."""
    prompt_length: int
    """Tokens before the answer."""
    limit: int
    """The most proposals to check. It follows from the sequence alone."""
    row: DrawRow
    """The inputs of the next token's draw."""
    virtual_tokens: int
    """Tokens before the prompt, which only the model that is drawn from knows."""
    rotary_length: int
    """The length that LongRoPE rotates by, as in `Chunk`, with virtual tokens."""

    def rows(self, proposed: Sequence[int]) -> list[DrawRow]:
        """The inputs of the draws of the next token and of those after each proposal."""
        rows, seen, generated = [self.row], self.row.seen, self.row.generated
        for count in range(1, len(proposed) + 1):
            before = proposed[:count]
            row = dataclasses.replace(
                self.row,
                position=self.row.position + count,
                seen=None if seen is None else np.concatenate((np.asarray(seen), np.asarray(before))),
                generated=None if generated is None else generated.plus(before),
            )
            rows.append(row)
        return rows


class Proposer(Protocol):
    """Proposes tokens that may follow."""

    @property
    def draws(self) -> bool: ...  # whether proposals at temperatures above 0 are drawn from a distribution

    # At most `limit` proposals for each sequence; where they are drawn, one more. How many follows from it alone.
    def propose(self, sequences: Sequence[DraftSequence]) -> list[list[ProposedToken]]: ...

    def forget(self, number: int) -> None: ...  # of a sequence that is over

    def reset(self) -> None: ...  # other weights


class NgramProposer:
    """Proposes the tokens that followed an earlier occurrence of the text's end: prompt lookup decoding, as in
    transformers and vLLM.

    The longest end of up to `longest` tokens that is found counts, and of several places the latest.
    """

    draws = False

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._places: dict[int, _NgramPlaces] = {}  # by sequence

    def propose(self, sequences: Sequence[DraftSequence]) -> list[list[ProposedToken]]:
        """Returns up to `limit` proposals for each sequence, none where its end has not come before."""
        return [[ProposedToken(token, None) for token in self._propose(sequence)] for sequence in sequences]

    def forget(self, number: int) -> None:
        """Drops the index of a sequence."""
        self._places.pop(number, None)

    def reset(self) -> None:
        """Drops the indexes of all sequences."""
        self._places = {}

    def _propose(self, sequence: DraftSequence) -> list[int]:
        if sequence.limit == 0:
            return []
        places = self._places.setdefault(sequence.number, _NgramPlaces(self._longest))
        start = places.find_end_of(sequence.tokens)
        if start is None:
            return []
        # Where the text repeats itself in a short period, proposals are read from the proposals before them.
        text = list(sequence.tokens[start:])
        for place in range(sequence.limit):
            text.append(text[place])
        return text[-sequence.limit :]


class _NgramPlaces:
    """The latest places where the n-grams of a growing text ended."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._end: dict[tuple[int, ...], int] = {}
        self._indexed = 1  # n-grams that end before this place are in `_end`

    def find_end_of(self, tokens: Sequence[int]) -> int | None:
        """The place after which the longest end of the text came before; None if not even its last token did."""
        for end in range(self._indexed, len(tokens)):
            for size in range(1, min(self._longest, end) + 1):
                self._end[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        sizes = range(min(self._longest, len(tokens) - 1), 0, -1)
        ends = (self._end.get(tuple(tokens[-size:])) for size in sizes)
        return next((end for end in ends if end is not None), None)


class Speculation:
    """Proposals of an engine's sequences, and the draws that check them."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._proposals: dict[int, tuple[int, list[ProposedToken]]] = {}  # by sequence: tokens before, proposals

    def propose(self, sequences: Sequence[DraftSequence]) -> list[list[int]]:
        """Tokens to check for each sequence, the same until it has grown. Whoever asked may check fewer of them, from
        the first on."""
        self._complete(sequences)
        proposals = (self._proposals[sequence.number][1][: sequence.limit] for sequence in sequences)
        return [[proposed.token for proposed in of_sequence] for of_sequence in proposals]

    def draw(
        self,
        logits: Tensor,
        checks: Sequence[tuple[DraftSequence, Sequence[int]]],
        *,
        slice_rows: int | None = None,
    ) -> list[Drawn]:
        """The next tokens of sequences: of each those proposals that the model would draw too, and one more.

        Args:
            logits: [R, V] float32, behind the last known token of each sequence and behind each of its proposals.
            checks: sequences with the proposals that were computed behind their known tokens, none for those that
                have just been read.
            slice_rows: as in `sampling.draw`.
        """
        self._complete([dataclasses.replace(check, limit=0) for check, _ in checks if self._is_coupled(check)])
        rows: list[DrawRow] = []
        for sequence, proposed in checks:
            rows += self._rows(sequence, proposed)
        drawn = draw(logits, rows, slice_rows=slice_rows)
        start, parts = 0, []
        for _, proposed in checks:
            kept = 0
            while kept < len(proposed) and drawn.tokens[start + kept] == proposed[kept]:
                kept += 1
            parts.append(drawn.rows(start, start + kept + 1))
            start += len(proposed) + 1
        return parts

    def forget(self, number: int) -> None:
        """Drops the proposals of a sequence that is over."""
        self._proposals.pop(number, None)
        self._proposer.forget(number)

    def reset(self) -> None:
        """Drops the proposals of all sequences, as after a change of weights."""
        self._proposals = {}
        self._proposer.reset()

    def _complete(self, sequences: Sequence[DraftSequence]) -> None:
        """Asks for proposals for sequences that have none at their length."""
        lacking = [
            sequence for sequence in sequences if self._proposals.get(sequence.number, (-1,))[0] != len(sequence.tokens)
        ]
        if lacking:
            for sequence, proposed in zip(lacking, self._proposer.propose(lacking), strict=True):
                self._proposals[sequence.number] = (len(sequence.tokens), proposed)

    def _is_coupled(self, sequence: DraftSequence) -> bool:
        """Whether the next token is drawn with the draft model's. The first of an answer never is: several answers draw
        theirs from one reading of the prompt."""
        is_first = len(sequence.tokens) == sequence.prompt_length
        return self._proposer.draws and sequence.row.options.temperature > 0 and not is_first

    def _rows(self, sequence: DraftSequence, proposed: Sequence[int]) -> list[DrawRow]:
        rows = sequence.rows(proposed)
        if not self._is_coupled(sequence):
            return rows
        _, proposals = self._proposals[sequence.number]
        assert [token.token for token in proposals[: len(proposed)]] == list(proposed), "other tokens were proposed"
        # A draft model with a shorter context proposes nothing past it.
        return [
            row if token is None else dataclasses.replace(row, proposed=token)
            for row, token in itertools.zip_longest(rows, proposals[: len(rows)])
        ]
