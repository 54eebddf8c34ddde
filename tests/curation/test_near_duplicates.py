"""Near duplicates against the exhaustive Jaccard index, and the traps: chains, arrival, short rows, Chinese."""

from __future__ import annotations

import numpy as np
import pytest
from builders.curated_rows import check_gathering, conversation, documents, outcomes
from builders.near_duplicates import pairs_with_jaccard, planted_texts

from danlu.curation.minhash import EMPTY, band_keys, signatures
from danlu.curation.near_duplicates import NearDuplicates, clusters, jaccard
from danlu.curation.ragged import Ragged
from danlu.curation.rows import document
from danlu.curation.run_steps import run_steps
from danlu.curation.word_hashes import shingles

FRAME = "You are a careful assistant who answers in whole sentences, names sources, and never guesses at numbers"


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return planted_texts(originals=40, copies=3, words=80, seed=5)


def test_signatures_estimate_the_jaccard_index(texts: list[str]) -> None:
    sets = shingles(texts, 5)
    values = signatures(sets, 112)
    exact = pairs_with_jaccard(texts, 5, 0.02)
    errors = np.array([(values[left] == values[right]).mean() - index for (left, right), index in exact.items()])
    deviation = np.array([(index * (1 - index) / 112) ** 0.5 for index in exact.values()])
    assert len(exact) > 150
    assert abs(errors.mean()) < 0.01
    # datasketch 2.0.0 with 112 permutations misses by as much: its squared errors are 1.0 of the variance too.
    scaled = np.mean((errors[deviation > 0] / deviation[deviation > 0]) ** 2)
    assert 0.6 < scaled < 1.5


def test_nearly_all_duplicates_are_dropped_and_nothing_else(texts: list[str]) -> None:
    exact = pairs_with_jaccard(texts, 5, 0.0)
    result = check_gathering(NearDuplicates(at_least=0.7), documents(*texts))
    dropped = {account.place: account.decisions[0][1] for account in result.accounts if account.outcome == "dropped"}
    assert len(dropped) > 60
    for place, verdict in dropped.items():
        assert verdict.kept is not None and verdict.kept < place and verdict.kept not in dropped
        assert verdict.value == pytest.approx(exact[verdict.kept, place]) and verdict.value >= verdict.threshold == 0.7
    alike = [pair for pair, index in exact.items() if index >= 0.8]
    missed = [pair for pair in alike if not dropped.keys() & set(pair)]
    assert len(missed) <= 0.02 * len(alike)


def test_which_row_stays_does_not_hang_on_the_order_of_sources() -> None:
    text = FRAME
    rows = [document(f"{text} last", 1, 0), document(text, 0, 3), document(f"{text} end", 0, 1)]
    result = run_steps([rows], [NearDuplicates()])
    assert [row.id for row in result.rows] == [rows[2].id]


def test_the_end_of_a_chain_stays() -> None:
    """The second is like the first, the third like the second, but the third is not like the first."""
    words = [f"w{number}" for number in range(200)]
    chain = [" ".join(words[at : at + 120]) for at in (0, 10, 20, 60)]
    at_least = 0.8
    exact = pairs_with_jaccard(chain, 5, 0.0)
    assert exact[0, 1] >= at_least and exact[1, 2] >= at_least and exact[0, 2] < at_least  # the chain
    many_bands = NearDuplicates(bands=(40, 3), at_least=at_least)
    result = check_gathering(many_bands, documents(*chain))
    assert [account.outcome for account in result.accounts] == ["kept", "dropped", "kept", "kept"]
    measured = many_bands.measure(documents(*chain))
    buckets = many_bands.merge([many_bands.gather(documents(*chain), measured, [])])
    summary = many_bands.conclude(0, buckets)
    assert summary["cluster"].tolist() == [0, 0, 0, 0]  # control: all four were in one cluster


def test_short_rows_are_compared_by_characters() -> None:
    rows = documents(
        "Thank you very much!", "thank you, very much", "Thank you very match", "Thanks", "OK", "ok.", "No"
    )
    assert [outcome for outcome, _ in outcomes(rows, NearDuplicates(bands=(40, 2), at_least=0.55))] == [
        "kept", "dropped", "dropped", "kept", "kept", "dropped", "kept"
    ]  # fmt: skip


def test_chinese_is_compared_by_characters() -> None:
    poem = "床前明月光疑是地上霜举头望明月低头思故乡"
    rows = documents(
        poem, "床前明月光，疑是地上霜。举头望明月，低头思故乡！", poem[:10] + poem[:9:-1], poem.replace("乡", "里")
    )
    assert [outcome for outcome, _ in outcomes(rows, NearDuplicates())] == ["kept", "dropped", "kept", "dropped"]


def test_rows_without_shingles_are_not_equal() -> None:
    rows = documents("...", "", "!!!", "???")
    assert [outcome for outcome, _ in outcomes(rows, NearDuplicates())] == ["kept"] * 4
    assert (signatures(shingles(["...", "!"], 5), 8) == EMPTY).all()  # control: their signatures are


def test_a_system_prompt_makes_no_duplicates() -> None:
    frame = FRAME
    rows = [
        conversation(0, "What is the tallest mountain on earth, and who climbed it first?", "Everest.", system=frame),
        conversation(1, "How do bees find their way back to the hive in the evening?", "By the sun.", system=frame),
    ]
    assert [outcome for outcome, _ in outcomes(rows, NearDuplicates())] == ["kept", "kept"]


def test_clusters_are_connected_parts() -> None:
    buckets = {"key": np.array([1, 1, 2, 2, 3, 4, 4, 4], np.uint64), "place": np.array([5, 9, 9, 12, 40, 2, 3, 8])}
    conclusion = clusters(buckets)
    assert conclusion["place"].tolist() == [2, 3, 5, 8, 9, 12]
    assert conclusion["cluster"].tolist() == [2, 2, 5, 2, 5, 5]


def test_bands_are_of_all_their_values() -> None:
    values = np.arange(24, dtype=np.uint32).reshape(2, 12)
    values[1, 4:] = values[0, 4:]
    keys = band_keys(values, 3, 4)
    assert (keys[0] == keys[1]).tolist() == [False, True, True]
    values[1, 11] += 1
    assert (band_keys(values, 3, 4)[1] == keys[1]).tolist() == [True, True, False]
    assert len(np.unique(band_keys(np.zeros((1, 12), np.uint32), 3, 4))) == 3


def test_a_set_longer_than_a_chunk_has_the_signature_of_its_parts() -> None:
    elements = np.unique(np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64))
    whole = signatures(Ragged(elements, np.array([len(elements)])), 16)
    parts = signatures(Ragged(elements, np.array([1000, len(elements)])), 16)
    assert np.array_equal(whole[0], parts.min(axis=0)) and not np.array_equal(whole[0], parts[0])


def test_jaccard_is_that_of_sets() -> None:
    assert jaccard(np.array([1, 4, 9]), np.array([4, 9, 10, 12])) == 2 / 5
    assert jaccard(np.array([], np.uint64), np.array([1])) == jaccard(np.array([1]), np.array([])) == 0.0
