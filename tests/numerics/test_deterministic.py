from __future__ import annotations

import os

import pytest
import torch

from danlu.core.errors import ResourceError
from danlu.numerics.deterministic import WORKSPACE, deterministic


def settings() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def test_torch_is_asked_for_the_same_bits_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = settings()
    with deterministic(False):
        assert settings() == before and WORKSPACE not in os.environ
    inside = None
    with deterministic(True):
        inside = settings(), os.environ[WORKSPACE]
    assert inside == ((True, False, False, False), ":4096:8")
    assert settings() == before
    with pytest.raises(KeyError), deterministic(True):
        raise KeyError
    assert settings() == before


def test_a_workspace_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with deterministic(True):
        assert os.environ[WORKSPACE] == ":16:8"


def test_an_operation_without_such_an_algorithm_is_named() -> None:
    said = "frobnicate_cuda does not have a deterministic implementation, but you set 'torch.use_determin"
    with (
        pytest.raises(
            ResourceError, match=r"deterministic: true, but frobnicate_cuda of torch .* Set deterministic: f"
        ),
        deterministic(True),
    ):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="something else"), deterministic(True):
        raise RuntimeError("something else")
