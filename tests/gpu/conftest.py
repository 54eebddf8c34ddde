"""Tests of what a CUDA device changes. Alone they need torch, pydantic, PyYAML, safetensors and pytest:

    python -m pytest -m gpu --confcutdir tests/gpu tests/gpu

With DANLU_GPU_TESTS=cpu they run on a CPU at small sizes, which shows that the tests themselves are sound.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_CPU = os.environ.get("DANLU_GPU_TESTS") == "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not (ON_CPU or torch.cuda.is_available()):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if ON_CPU else "cuda")
