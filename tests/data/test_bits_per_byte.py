"""Bytes of text behind tokens: those of the text itself, whatever the tokenizer makes of it."""

from __future__ import annotations

import pytest
from builders.chat_tokenizers import KINDS, Kind, tokenizer_and_oracle
from builders.rendering import render

from danlu.data.render import RenderedSample, RenderSettings
from danlu.data.rows import Completion, Text
from danlu.data.samples import SampleBlock
from danlu.data.tokenizing import fit_to_length
from danlu.evaluation.text import is_plain_text, weighted_bytes

TEXTS = ["The quick brown fox.", "naïve 丹炉 — 🎈🎈!", "  two spaces, then a line\n\n and tabs\t\t", "?"]


def block(kind: Kind, texts: list[str], max_length: int | None = None) -> SampleBlock:
    """Texts as samples, without an end-of-text token; longer ones are split."""
    tokenizer, _ = tokenizer_and_oracle("chatml", kind)
    whole = [render(Text(text), "row", tokenizer, RenderSettings(append_eos=False))[0] for text in texts]
    parts = [part for one in whole for part in fit_to_length(one, max_length, "split").samples]
    return joined(parts)


def joined(parts: list[RenderedSample]) -> SampleBlock:
    numbers, wheres = [0] * len(parts), ["row"] * len(parts)
    return SampleBlock.of(
        [part.tokens for part in parts],
        [part.weights for part in parts],
        [part.reasons for part in parts],
        numbers,
        wheres,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_scored_text(kind: Kind) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", kind)
    for text in TEXTS:
        samples = block(kind, [text])
        if not len(samples):  # a text of one token has nothing that is scored
            continue
        weight, counted = weighted_bytes(samples, tokenizer)
        sample = samples.sample(0)
        unscored = 0
        if sample.weights[0] == 0 and sample.tokens[0] != tokenizer.bos_id:  # nothing stands before the first token
            unscored = len(tokenizer.token_bytes(sample.tokens[:1])[0]) - (kind == "prepend")
        assert counted == len(text.encode()) - unscored, text
        assert weight == sample.weights.sum()
        assert is_plain_text(samples)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_document_have_the_bytes_of_the_whole(kind: Kind) -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", kind)
    text = " ".join(TEXTS)
    whole = weighted_bytes(block(kind, [text]), tokenizer)
    for length in (2, 5, 8):
        pieces = block(kind, [text], length)
        assert len(pieces) > 2
        assert weighted_bytes(pieces, tokenizer) == whole


def test_other_rows_are_no_plain_text() -> None:
    tokenizer, _ = tokenizer_and_oracle("chatml", "byte")
    assert not is_plain_text(
        joined(render(Completion("a b", " c d"), "row", tokenizer, RenderSettings(append_eos=False)))
    )
