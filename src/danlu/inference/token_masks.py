"""Masks of the tokens that answers may go on with: by their grammars, and before they have as many tokens as they need.

n answers · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from danlu.core.errors import DataError
from danlu.inference.grammar import TokenMatcher, require_llguidance
from danlu.inference.support import Support

if TYPE_CHECKING:
    from danlu.inference.answer import Answer


class MaskWriter:
    """Computes the masks of a pass, those of several grammars in parallel."""

    def next_masks(self, answers: Sequence[Answer], vocab_size: int) -> list[np.ndarray | None]:
        """[ceil(V / 8)] uint8, the lowest bit first, of the tokens that each answer may go on with; None for an answer
        that may go on with all that its sampling options allow."""
        masks: list[np.ndarray | None] = [None] * len(answers)
        matched = [(i, answer.matcher) for i, answer in enumerate(answers) if answer.matcher is not None]
        if matched:
            of_grammars = self.of_grammars([matcher for _, matcher in matched], vocab_size)
            for (i, _), mask in zip(matched, of_grammars, strict=True):
                masks[i] = mask
        for i, answer in enumerate(answers):
            if answer.is_confined:
                masks[i] = _with_options(answer, masks[i], vocab_size)
        return masks

    @cached_property
    def _executor(self) -> Any:
        return require_llguidance().LLExecutor()

    def of_grammars(self, matchers: Sequence[TokenMatcher], vocab_size: int) -> np.ndarray:
        """[n, ceil(V / 8)] uint8, of the tokens that grammars allow."""
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        bitmask = np.zeros((len(matchers), -(-vocab_size // 32)), dtype=np.int32)
        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0].matcher, bitmask)
        else:
            places = [(each.matcher, place) for place, each in enumerate(matchers)]
            fill_next_token_bitmask_par(self._executor, places, bitmask)
        return bitmask.view(np.uint8)[:, : -(-vocab_size // 8)]


def supports_in_grammar(matcher: TokenMatcher, tokens: Sequence[int], vocab_size: int) -> list[Support | None]:
    """The tokens that a grammar allowed in the place of each of these; None where it allowed all, as behind its end.

    matcher: the state before the first of them, which stays as it is. Raises DataError for a token that it does not
    allow.
    """
    writer, state = MaskWriter(), matcher.copy()
    supports: list[Support | None] = []
    for place, token in enumerate(tokens):
        if state.is_complete:
            supports.append(None)
            continue
        (mask,) = writer.of_grammars([state], vocab_size)
        support = Support.of_bits(mask, vocab_size)
        if support is not None and token not in support:
            raise DataError(f"token {place} of the answer ({token}) is none that its grammar allows there")
        supports.append(support)
        state.accept(token)
    return supports


def _with_options(answer: Answer, mask: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """A mask without what the answer's request leaves out.

    Where a grammar allows nothing but the end, an answer may end before it has as many tokens as it needs.
    """
    request = answer.request
    if request.sampling.allowed_ids is not None:
        allowed = _bits_of(request.sampling.allowed_ids, vocab_size)
        mask = allowed if mask is None else mask & allowed
    if answer.needs_more:
        stops = _bits_of(tuple(sorted(request.stop_ids)), vocab_size)
        others = (_all_bits(vocab_size) if mask is None else mask) & ~stops
        mask = others if mask is None or others.any() else mask
    assert mask is not None, "the answer is confined by one of the two"
    return mask


@lru_cache(maxsize=1)
def _all_bits(vocab_size: int) -> np.ndarray:
    return np.packbits(np.ones(vocab_size, dtype=bool), bitorder="little")


@lru_cache(maxsize=8)
def _bits_of(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """[ceil(V / 8)] uint8: the bits of some tokens."""
    inside = np.zeros(vocab_size, dtype=bool)
    inside[list(ids)] = True
    return np.packbits(inside, bitorder="little")
