"""Models to run verbs on, and text for stdin."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.bigram import bigram_folder

CHANT = "丹炉é🎈"


@pytest.fixture(scope="session")
def stories(shared_data: Path) -> Path:
    """A real model of 260k parameters that tells stories."""
    return shared_data / "weights" / "stories260K-hf"


@pytest.fixture
def copied(stories: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(stories, tmp_path / "copy"))


@pytest.fixture(scope="session")
def chanting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says 丹炉é🎈 whatever it is told, a byte at a time, and ends its answer."""
    return bigram_folder(tmp_path_factory.mktemp("bigram") / "chanting", CHANT, ends=True)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without an end, in a context of a million tokens."""
    return bigram_folder(tmp_path_factory.mktemp("bigram") / "endless", CHANT, ends=False, context=1_000_000)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], None]:
    """Gives text to stdin, as a pipe does."""

    def give(text: str | bytes) -> None:
        encoded = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(encoded), encoding="utf-8"))

    return give
