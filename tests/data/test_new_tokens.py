"""New tokens behind those of a tokenizer: their ids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.tiny_world import tiny_world
from transformers import AutoTokenizer

from danlu.core.errors import DataError
from danlu.data import tokenizer_folder
from danlu.data.new_tokens import _added_tokens, added_tokens, extended_tokenizer
from danlu.data.tokenizer import load_tokenizer
from danlu.recipe.sections import NewToken

PLAN, ACT = NewToken(text="<plan>"), NewToken(text="<act>", special=True, description="to act")


@pytest.fixture(scope="module")
def path() -> str:
    return str(tiny_world().tokenizer)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path / "cache"))
    _added_tokens.cache_clear()


def test_ids_follow_those_of_the_tokenizer_and_text_becomes_one_token(path: str) -> None:
    own = load_tokenizer(path)
    tokens = added_tokens(path, [], [PLAN, ACT])
    assert [(token.text, token.id, token.special) for token in tokens] == [
        ("<plan>", own.vocab_size, False),
        ("<act>", own.vocab_size + 1, True),
    ]
    assert tokens[0].of is None
    assert tokens[1].of == tuple(own.encode("to act"))
    extended = load_tokenizer(folder := str(extended_tokenizer(path, tokens)))
    assert extended.encode("a<plan>b <act>") == [
        *own.encode("a"), tokens[0].id, *own.encode("b "), tokens[1].id
    ]  # fmt: skip
    assert len(own.encode("<plan>")) > 1
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("a<plan>b <act>", add_special_tokens=False) == extended.encode("a<plan>b <act>")
    assert theirs.decode([tokens[0].id, tokens[1].id], skip_special_tokens=True) == "<plan>"
    assert extended.template().render([{"role": "user", "content": "x"}]) == own.template().render(
        [{"role": "user", "content": "x"}]
    )


def test_the_second_run_reads_them_from_the_cache(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = added_tokens(path, [], [PLAN, ACT])
    folder = extended_tokenizer(path, tokens)
    _added_tokens.cache_clear()
    monkeypatch.setattr("danlu.data.tokenizer.load_tokenizer", None)
    assert added_tokens(path, [], [PLAN, ACT]) == tokens
    assert extended_tokenizer(path, tokens) == folder


def test_tokens_of_an_adapter_below_come_first(path: str) -> None:
    below = added_tokens(path, [], [PLAN])
    tokens = added_tokens(path, below, [ACT])
    assert tokens[0] == below[0]
    assert tokens[1].id == below[0].id + 1
    with pytest.raises(DataError, match="model.tokens.0: '<plan>' is a token of .* already"):
        added_tokens(path, below, [PLAN])
    with pytest.raises(DataError, match="gets the id .* there, and an adapter was trained with"):
        extended_tokenizer(path, tokens[1:])


def test_of_two_tokens_the_longer_one_is_found(path: str) -> None:
    short, long = added_tokens(path, [], [PLAN, NewToken(text="<plan>x")])
    assert load_tokenizer(str(extended_tokenizer(path, [short, long]))).encode("<plan>x<plan>") == [long.id, short.id]


def test_what_cannot_be_added_is_named(path: str) -> None:
    (known, number), *_ = load_tokenizer(path).vocabulary.items()
    with pytest.raises(
        DataError,
        match=r"model.tokens.1: .* is a token of .* already \(id {number}\). Leave it out".replace(
            "{number}", str(number)
        ),
    ):
        added_tokens(path, [], [PLAN, NewToken(text=known)])
    with pytest.raises(DataError, match="model.tokens.0.description: '' has no token"):
        added_tokens(path, [], [NewToken(text="<plan>", description="")])
