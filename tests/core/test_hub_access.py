"""A hub that does not answer: models, tokenizers and data sets are looked for in the local cache, after one try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danlu.core import hub_access
from danlu.core.errors import DanluError
from danlu.core.hub_access import hub_within_bound
from danlu.data.sources import read_rows
from danlu.data.tokenizer_folder import resolve_tokenizer_folder
from danlu.models.hf_folder import find_config, resolve_folder
from danlu.recipe.sections import Source

NAME = "nobody/nothing-here"
ASKED: dict[str, Callable[[], object]] = {
    "model": lambda: resolve_folder(NAME),
    "config": lambda: find_config(NAME),
    "tokenizer": lambda: resolve_tokenizer_folder(NAME),
    "data set": lambda: list(read_rows(Source(path=NAME))),
}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The addresses that were asked, of which none can be reached."""
    tried = list[tuple[str, int]]()

    def refuse(address: tuple[str, int], timeout: float) -> None:
        tried.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    monkeypatch.setattr(hub_access, "_silent", {})
    set_offline(monkeypatch, False)
    return tried


def set_offline(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", value)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", value)


def modes() -> list[bool]:
    """Whether the hub's client, and that of `datasets`, is offline."""
    import datasets.config
    from huggingface_hub import constants

    return [constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE]


@pytest.mark.parametrize("what", ASKED)
def test_it_is_told_at_once_and_asked_once(
    what: str, tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client would try six times; one that is offline by itself is asked all the same."""
    for _ in range(2):  # the second time it is known
        with pytest.raises(DanluError, match=r"huggingface\.co cannot be reached: Name or service not known"):
            ASKED[what]()
        assert tried == [("huggingface.co", 443)] and modes() == [False, False]
    set_offline(monkeypatch, True)
    with pytest.raises(DanluError, match=NAME) as error:
        ASKED[what]()
    assert "Name or service" not in str(error.value) and len(tried) == 1


def test_the_client_is_offline_only_where_the_hub_does_not_answer(
    tried: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_within_bound() as reason:
        assert reason == "huggingface.co cannot be reached: Name or service not known" and modes() == [True, True]
    assert modes() == [False, False]
    monkeypatch.setattr(hub_access, "REMEMBERED_S", 0.0)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://mirror.example")
    connection: Any = type("Connection", (), {"close": lambda self: tried.append(("closed", 0))})
    monkeypatch.setattr("socket.create_connection", lambda address, timeout: tried.append(address) or connection())
    with hub_within_bound() as reason:
        assert reason is None and modes() == [False, False]
    assert tried[1:] == [("mirror.example", 80), ("closed", 0)]
    monkeypatch.setattr(hub_access, "getproxies", lambda: {"https": "proxy"})
    with hub_within_bound() as reason:
        assert reason is None and len(tried) == 3
