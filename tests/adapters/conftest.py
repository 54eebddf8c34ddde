"""The bases that adapters are put on."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.peft_reference import FAMILIES
from builders.tiny_run import tiny_model

from danlu.models.saving import save


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of each family; nobody writes into them."""
    folder = tmp_path_factory.mktemp("bases")
    for name, changes in FAMILIES.items():
        save(tiny_model(**changes), folder / name)
    return {name: folder / name for name in FAMILIES}
