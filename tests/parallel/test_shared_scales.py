"""One scale of a tensor that ranks have parts of: the maximum over them."""

from __future__ import annotations

import pytest
from builders import shared_scales
from builders.process_group import run_group

pytestmark = pytest.mark.distributed


def test_ranks_with_parts_of_a_tensor_have_the_codes_of_the_whole() -> None:
    """The control: each rank by the maximum of its own part."""
    for distances in run_group(shared_scales.parts, 2, "tensor", True):
        assert max(distances.values()) < 1e-6, distances
    for distances in run_group(shared_scales.parts, 2, "tensor", False):
        assert min(distances.values()) > 1e-3, distances
