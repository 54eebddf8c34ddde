"""The bases that adapters are put on."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.peft_reference import FAMILIES
from builders.tiny_run import saved_models


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each family; nobody writes into them."""
    return saved_models(tmp_path_factory.mktemp("bases"), FAMILIES)
