"""Supports in the smaller of two forms, and answers that may not be trained on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from danlu.core.errors import DataError
from danlu.inference.request import Completion, SamplingOptions
from danlu.inference.support import Support, check_trainable, support_matrix

V = 64


@pytest.mark.parametrize("vocab_size", [61, 64, 4099])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_ids_come_back_whichever_form_is_smaller(vocab_size, share):
    ids = np.flatnonzero(np.random.default_rng(0).random(vocab_size) < share)
    support = Support.of(ids, vocab_size)
    assert support.ids.tolist() == ids.tolist() and support.ids.dtype == np.int64
    assert support.nbytes == min(4 * len(ids), -(-vocab_size // 8))
    assert (support.sorted_ids is None) != (support.bitmask is None)
    inside = set(ids.tolist())
    assert [token in support for token in range(-1, vocab_size + 9)] == [
        token in inside for token in range(-1, vocab_size + 9)
    ]


def test_a_matrix_fills_short_rows_with_none():
    supports = [Support.of(np.array(ids, dtype=np.int64), V) for ids in ([1, 5, 60], [], [2], range(V))]
    matrix = support_matrix(supports)
    assert matrix.shape == (4, V)
    assert [row[row >= 0].tolist() for row in matrix] == [[1, 5, 60], [], [2], list(range(V))]
    assert (matrix[0, 3:] == -1).all()
    assert support_matrix([]).shape == (0, 0)


FILTERED = SamplingOptions(top_p=0.9)


def answer(**changes) -> Completion:
    support = [Support.of(np.array(ids), V) for ids in ([1, 4], [2, 3, 9], [7])]
    values = {"tokens": [4, 9, 7], "logprobs": [-1.0] * 3, "drawn": [-0.5] * 3, "versions": [0] * 3, "support": support}
    return Completion(number=5, sample=2, text="", finish="length", **{**values, **changes})


def test_answers_with_what_a_trainer_needs_pass():
    check_trainable(answer(), FILTERED, V)
    check_trainable(answer(), SamplingOptions(allowed_ids=(1, 2, 3, 4, 7, 9)), V)
    check_trainable(answer(support=None), SamplingOptions(temperature=0.7), V)


@pytest.mark.parametrize(
    ("completion", "sampling", "message"),
    [
        (
            answer(),
            SamplingOptions(repetition_penalty=1.2),
            "prompt 5, sample 2: drawn with a repetition penalty of 1.2",
        ),
        (
            answer(),
            SamplingOptions(presence_penalty=-0.5),
            "presence penalty of -0.5, which a trainer's .* Set presence_penalty to 0 where they are trained on",
        ),
        (answer(), SamplingOptions(frequency_penalty=0.5), "sample 2: drawn with a frequency penalty of 0.5"),
        (answer(support=None), SamplingOptions(temperature=0), "temperature 0, where the likeliest token is certain"),
        (answer(support=None), FILTERED, "filters left tokens out .top_k 0, top_p 0.9, min_p 0, allowed_ids., and the"),
        (
            answer(support=None),
            SamplingOptions(allowed_ids=(4, 9, 7)),
            "does not say which. Keep its support, or sample without filters",
        ),
        (
            answer(support=answer().support[:2]),
            FILTERED,
            "3 tokens, but supports for 2: they are of another state of the answer",
        ),
        (answer(tokens=[4, 9, 7, 1]), FILTERED, "4 tokens, but 3 entries of logprobs"),
        (answer(versions=[]), FILTERED, "3 tokens, but 0 entries of versions"),
        (answer(tokens=[4, 9, 8]), FILTERED, r"token 2 \(8\) is not in its own support"),
        (answer(support=answer().support[:2]), SamplingOptions(), "supports for 2"),
    ],
)
def test_answers_that_lack_it_are_refused(completion, sampling, message):
    with pytest.raises(DataError, match=message):
        check_trainable(completion, sampling, V)


def test_a_support_of_another_vocabulary_is_refused():
    other = [dataclasses.replace(support, vocab_size=80) for support in answer().support]
    with pytest.raises(DataError, match="support of token 0 is of a vocabulary of 80 tokens, and the model has 64"):
        check_trainable(answer(support=other), FILTERED, V)
