"""The cross-entropy over a vocabulary that is cut among processes, against the whole, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from builders import tensor_worker
from builders.process_group import run_group

from danlu.numerics.relative_error import worst_error

pytestmark = pytest.mark.distributed

EXTRAS: list[dict[str, Any]] = [
    {},
    {"softcap": 5.0},
    {"label_smoothing": 0.1},
    {"softcap": 3.0, "label_smoothing": 0.2, "z_loss": 1e-2, "gradient_scale": 8.0},
]
SETTINGS = [extras | {"frozen": frozen} for extras, frozen in itertools.product(EXTRAS, (False, True))]


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_equal_those_of_the_whole_vocabulary(size: int) -> None:
    for found in run_group(tensor_worker.vocabulary_loss, size, SETTINGS):
        for settings, errors in zip(SETTINGS, found, strict=True):
            assert worst_error(errors.values()) < 1e-12, (settings, errors)
            assert ("head" in errors) == (not settings["frozen"])


def test_of_equal_logits_on_several_processes_the_first_is_the_likeliest() -> None:
    settings = [{"frozen": frozen, "ties": True, **extras} for extras in EXTRAS[:2] for frozen in (False, True)]
    for found in run_group(tensor_worker.vocabulary_loss, 4, settings):
        assert all(max(errors.values()) < 1e-12 for errors in found), found


def test_a_process_that_does_not_hear_the_others_is_seen() -> None:
    settings = [{"frozen": frozen, "deaf": True} for frozen in (False, True)]
    for found in run_group(tensor_worker.vocabulary_loss, 2, settings):
        assert all(errors["nll"] > 1e-3 and errors["hidden"] > 1e-3 for errors in found)
    # Equal logits with smaller words elsewhere are counted as right by a process that hears nothing of them.
    for found in run_group(tensor_worker.vocabulary_loss, 2, [one | {"ties": True} for one in settings]):
        assert any(errors["correct"] > 1e-3 for errors in found)
