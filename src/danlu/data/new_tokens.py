"""A tokenizer with new tokens behind those that it has: a folder of the cache, which is read like any other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from danlu.core.added_token import AddedToken, as_added_tokens
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import DataError
from danlu.data.tokenizer_folder import (
    converted_folder,
    fast_tokenizer_folder,
    tokenizer_fingerprint,
    write_fast_tokenizer,
)
from danlu.data.vocabulary import read_vocabulary
from danlu.recipe.sections import NewToken


def added_tokens(path: str, below: Sequence[AddedToken], tokens: Sequence[NewToken]) -> list[AddedToken]:
    """The new tokens of a run with their ids, behind those that the adapters below it were trained with.

    path: the folder or hub id of the tokenizer that they are added to. Raises DataError as `load_tokenizer` does, for a
    token that the tokenizer has already, and for a description without tokens.
    """
    return list(_added_tokens(path, tokenizer_fingerprint(path), tuple(below), tuple(tokens)))


def undescribed_tokens(path: str, below: Sequence[AddedToken], tokens: Sequence[NewToken]) -> list[AddedToken]:
    """`added_tokens` without the tokens of their descriptions, for which no tokenizer library is loaded."""
    return list(_undescribed(path, tokenizer_fingerprint(path), tuple(below), tuple(tokens)))


@cache
def _undescribed(
    path: str, fingerprint: str, below: tuple[AddedToken, ...], tokens: tuple[NewToken, ...]
) -> tuple[AddedToken, ...]:
    vocabulary = {**read_vocabulary(path), **{token.text: token.id for token in below}}
    _check_new(path, vocabulary, tokens)
    first = max(vocabulary.values()) + 1
    return (*below, *(AddedToken(token.text, first + number, token.special) for number, token in enumerate(tokens)))


@cache
def _added_tokens(
    path: str, fingerprint: str, below: tuple[AddedToken, ...], tokens: tuple[NewToken, ...]
) -> tuple[AddedToken, ...]:
    """`added_tokens`, kept in a file next to the tokenizers of the cache: most runs load no tokenizer for it."""
    asked = [(token.text, token.special, token.description) for token in tokens]
    file = converted_folder(f"{fingerprint}-{_digest(repr((below, asked)))}.json")
    with suppress(OSError, ValueError):
        return as_added_tokens(json.loads(file.read_text(encoding="utf-8")))
    added = (*below, *_with_ids(path, below, tokens))
    with suppress(OSError):  # a home that cannot be written
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps([asdict(token) for token in added]).encode())
    return added


def extended_folder(path: str, tokens: Sequence[AddedToken]) -> Path:
    """The folder of the cache that a tokenizer with these tokens has, or would have."""
    entries = [(token.text, token.id, token.special) for token in tokens]
    return converted_folder(f"{tokenizer_fingerprint(path)}-tokens-{_digest(repr(entries))}")


def extended_tokenizer(path: str, tokens: Sequence[AddedToken]) -> Path:
    """Returns the folder of a tokenizer with these tokens. Raises DataError where one would get another id."""
    folder = extended_folder(path, tokens)
    if (folder / "tokenizer.json").is_file():
        return folder
    from danlu.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    for token, own in zip(tokens, _add(tokenizer.fast, tokens), strict=True):
        if own != token.id:
            raise DataError(
                f"{path}: {token.text!r} gets the id {own} there, and an adapter was trained with {token.id}. Name the "
                "tokenizer that it was trained with in model.tokenizer"
            )
    specials = {name: text for name, text in tokenizer.special_texts.items() if isinstance(text, str)}
    return write_fast_tokenizer(fast_tokenizer_folder(path), folder, tokenizer.fast, specials)


def tokenizer_with(folder: Path, tokens: Sequence[AddedToken]) -> Path:
    """Returns a tokenizer's folder itself where it has these tokens, else one of the cache with all of them.

    Raises DataError as `extended_tokenizer` does.
    """
    if not tokens:
        return folder
    from danlu.data.tokenizer import load_tokenizer

    vocabulary = load_tokenizer(str(folder)).vocabulary
    missing = [token for token in tokens if vocabulary.get(token.text) != token.id]
    return extended_tokenizer(str(folder), tokens) if missing else folder


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _check_new(path: str, vocabulary: Mapping[str, int], tokens: Sequence[NewToken]) -> None:
    """Raises DataError for a token that a vocabulary has already, or that is there twice."""
    ids = dict(vocabulary)
    for number, token in enumerate(tokens):
        if (known := ids.get(token.text)) is not None:
            raise DataError(
                f"model.tokens.{number}: {token.text!r} is a token of {path} already (id {known}). Leave it out: its "
                "rows are trained where the whole model is, and with an adapter by adapter.trainable_tokens"
            )
        ids[token.text] = -1


def _with_ids(path: str, below: Sequence[AddedToken], tokens: Sequence[NewToken]) -> list[AddedToken]:
    # Imported here: a run on cached tokens loads no tokenizer.
    from danlu.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    vocabulary = {**tokenizer.vocabulary, **{token.text: token.id for token in below}}
    _check_new(path, vocabulary, tokens)
    described: list[tuple[int, ...] | None] = []
    for number, token in enumerate(tokens):
        described.append(None if token.description is None else tuple(tokenizer.encode(token.description)))
        if described[-1] == ():
            raise DataError(
                f"model.tokens.{number}.description: {token.description!r} has no token. Give a text, or leave it out"
            )
    _add(tokenizer.fast, below)
    ids = _add(tokenizer.fast, tokens)
    return [
        AddedToken(token.text, own, token.special, of) for token, own, of in zip(tokens, ids, described, strict=True)
    ]


def _add(fast: Any, tokens: Sequence[AddedToken | NewToken]) -> list[int]:
    """Adds tokens one by one, so that their ids follow their order whether they are special or not; returns the ids."""
    from tokenizers import AddedToken as Entry

    for token in tokens:
        entry = Entry(token.text, normalized=False, special=token.special)
        (fast.add_special_tokens if token.special else fast.add_tokens)([entry])
    return [fast.token_to_id(token.text) for token in tokens]
