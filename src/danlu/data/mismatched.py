"""Judged answers with one more branch each: the answer of another row, which estimates how far the policy has moved."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property

import numpy as np

from danlu.core.errors import DataError
from danlu.core.types import Branch, Sample
from danlu.data.samples import Samples

MISMATCHED = "mismatched"


class MismatchedAnswers:
    """`Samples` with trees that have the next row's answer behind their own prompt too (arXiv:2402.01306, section 4.1).

    The tokens of that branch carry no weight, its label is NaN and its fact `mismatched` 1, which is 0 for the others.
    The last row takes the first one's answer. An answer that does not fit loses its end.

    Args:
        samples: prompts with one answer each. max_length: the most tokens of a prompt with an answer.

    Raises:
        DataError: there is one row only.
    """

    def __init__(self, samples: Samples, max_length: int) -> None:
        if len(samples) < 2:
            raise DataError("an objective that compares answers with those of other rows (kto) needs two rows or more")
        self._samples = samples
        self._max_length = max_length

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def row_numbers(self) -> np.ndarray:
        return self._samples.row_numbers

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(self.sample(number).tokens) for number in range(len(self))], np.int32)

    def sample(self, number: int) -> Sample:
        own, other = self._samples.sample(number), self._samples.sample((number + 1) % len(self))
        prompt, answer = own.branches[0], other.branches[-1]
        room = max(1, self._max_length - prompt.stop)
        tokens = other.tokens[answer.start : answer.stop][:room]
        start = len(own.tokens)
        facts = {name: np.append(values, np.float32(np.nan)) for name, values in own.facts.items()}
        facts[MISMATCHED] = np.array([0.0] * len(own.branches) + [1.0], np.float32)
        return replace(
            own,
            tokens=np.concatenate([own.tokens, tokens]),
            weights=np.concatenate([own.weights, np.zeros(len(tokens), np.float32)]),
            branches=(*own.branches, Branch(0, start, start + len(tokens))),
            facts=facts,
        )

    def reasons(self, number: int) -> np.ndarray:
        own, following = number, (number + 1) % len(self)
        added = len(self.sample(number).tokens) - len(self._samples.sample(number).tokens)
        answer = self._samples.sample(following).branches[-1]
        return np.concatenate(
            [self._samples.reasons(own), self._samples.reasons(following)[answer.start : answer.start + added]]
        )

    def digest(self) -> str:
        described = f"{self._samples.digest()} {MISMATCHED} {self._max_length}"
        return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


def with_own_prompt(sample: Sample) -> Sample:
    """The same sample with a copy of the prompt as the root of its mismatched answer, which shares nothing then."""
    prompt, answer = sample.branches[0], sample.branches[-1]
    places = np.r_[: answer.start, : prompt.stop, answer.start : answer.stop]
    root = Branch(-1, answer.start, answer.start + prompt.stop)
    copied = [*range(len(sample.branches) - 1), 0, len(sample.branches) - 1]
    branches = (*sample.branches[:-1], root, Branch(len(sample.branches) - 1, root.stop, len(places)))
    return sample.rearranged(places, branches, copied)
