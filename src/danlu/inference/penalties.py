"""Penalties of tokens that came before: for repetition (CTRL), and for presence and frequency, as OpenAI has them.

B sequences · V vocabulary · n distinct tokens
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from danlu.inference.sampling import DrawRow


class TokenCounts(NamedTuple):
    """The number of times that each token of an answer was generated."""

    ids: np.ndarray
    """[n] int64, distinct, in no particular order."""
    counts: np.ndarray
    """[n] int64, at least 1."""

    def plus(self, tokens: Sequence[int]) -> TokenCounts:
        """Returns the counts with further tokens."""
        more = np.asarray(tokens, dtype=np.int64)
        ids, places = np.unique(np.concatenate((self.ids, more)), return_inverse=True)
        counts = np.zeros(len(ids), dtype=np.int64)
        np.add.at(counts, places, np.concatenate((self.counts, np.ones_like(more))))
        return TokenCounts(ids, counts)


class SeenTokens:
    """The distinct tokens of a sequence as it grows, for the repetition penalty."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._distinct = set(tokens)
        self._ids = array("q", self._distinct)

    def add(self, token: int) -> None:
        """Takes the next token."""
        if token not in self._distinct:
            self._distinct.add(token)
            self._ids.append(token)

    @property
    def ids(self) -> np.ndarray:
        """[n] int64, in no particular order; a copy."""
        return np.array(self._ids, dtype=np.int64)


class GeneratedTokens:
    """The tokens of an answer as it grows, counted for presence and frequency penalties."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids, self._counts = array("q"), array("q")

    def add(self, token: int) -> None:
        """Takes the next token."""
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    @property
    def counts(self) -> TokenCounts:
        """Returns a copy of the counts."""
        return TokenCounts(np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.int64))


def penalise(logits: Tensor, rows: Sequence[DrawRow]) -> None:
    """Applies biases and penalties of each row to logits [B, V], in place: after biases that for repetition, as vLLM
    does.

    Touches the tokens that came before alone: a sequence has a few hundred distinct ones, a vocabulary a hundred
    thousand.
    """
    for i, row in enumerate(rows):
        if row.options.biased_ids:
            biases = torch.tensor(row.options.biases, dtype=logits.dtype, device=logits.device)
            logits[i, torch.tensor(row.options.biased_ids, device=logits.device)] += biases
    if repeated := [i for i, row in enumerate(rows) if row.options.repetition_penalty != 1.0]:
        seen, lengths = [], []
        for i in repeated:
            ids = rows[i].seen
            assert ids is not None, "a repetition penalty needs the tokens so far"
            seen.append(np.asarray(ids, dtype=np.int64) + i * logits.shape[1])
            lengths.append(len(ids))
        penalties = np.array([rows[i].options.repetition_penalty for i in repeated], dtype=np.float32)
        index = torch.from_numpy(np.concatenate(seen)).to(logits.device)
        penalty = torch.from_numpy(np.repeat(penalties, lengths)).to(logits.device)
        flat = logits.view(-1)
        values = flat[index]
        flat[index] = torch.where(values < 0, values * penalty, values / penalty)
    if counted := [i for i, row in enumerate(rows) if row.options.counts_tokens]:
        places, amounts = [], []
        for i in counted:
            generated, options = rows[i].generated, rows[i].options
            assert generated is not None, "presence and frequency penalties need the tokens of the answer"
            places.append(generated.ids + i * logits.shape[1])
            amounts.append(options.presence_penalty + options.frequency_penalty * generated.counts)
        index = torch.from_numpy(np.concatenate(places)).to(logits.device)
        logits.view(-1)[index] -= torch.from_numpy(np.concatenate(amounts).astype(np.float32)).to(logits.device)
