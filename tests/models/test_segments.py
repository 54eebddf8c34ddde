"""Branches as runs of queries with the keys on their paths."""

from __future__ import annotations

import pytest
from builders.reference_attention import BOUNDARIES, CHAINS, ROOTS, TREES, ReferenceAttention
from torch import device

from danlu.models.segments import Segment, documents_of


def test_segments_of_a_tree_by_hand() -> None:
    assert documents_of(BOUNDARIES, TREES) == (
        (Segment(0, 5, ((0, 5),)),),
        (Segment(5, 6, ((5, 6),)),),
        (
            Segment(6, 10, ((6, 10),)),
            Segment(10, 12, ((6, 12),)),
            Segment(12, 15, ((6, 15),)),
            Segment(15, 16, ((6, 12), (15, 16))),
            Segment(16, 23, ((6, 10), (16, 23))),  # a chain of two
        ),
        (Segment(23, 30, ((23, 30),)), Segment(30, 36, ((23, 36),)), Segment(36, 40, ((23, 30), (36, 40)))),
    )


def test_chains_and_roots_are_documents() -> None:
    assert documents_of(BOUNDARIES, ()) == documents_of(BOUNDARIES, ROOTS) == documents_of(BOUNDARIES, CHAINS)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_keys_of_some_queries_and_of_all_of_them_are_what_a_mask_says(window: int | None) -> None:
    mask = ReferenceAttention(BOUNDARIES, TREES).mask(window, device("cpu"))
    for segment in (segment for document in documents_of(BOUNDARIES, TREES) for segment in document):
        for start in range(segment.start, segment.stop):
            for stop in range(start + 1, segment.stop + 1):
                rows = mask[start:stop]
                for found, seen in (
                    (segment.keys_of_any(start, stop, window), rows.any(0)),
                    (segment.keys_of_all(start, stop, window), rows.all(0)),
                ):
                    assert [key for first, end in found for key in range(first, end)] == seen.nonzero()[:, 0].tolist()


def test_a_segment_may_be_moved() -> None:
    segment = Segment(15, 16, ((6, 12), (15, 16)))
    assert segment.moved(-6) == Segment(9, 10, ((0, 6), (9, 10)))
    assert (segment.before, segment.path_length) == (6, 7)
