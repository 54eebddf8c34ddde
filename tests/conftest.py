"""Fixtures shared by every room's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data (texts, instructions, tokenizers, a small pretrained model), where there is one."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("DANLU_SHARED_DATA", beside))
    if not (folder / "README.md").is_file():
        pytest.skip(f"no real data at {folder}: set DANLU_SHARED_DATA to the data folder to run this test")
    return folder
