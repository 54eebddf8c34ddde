"""The tokens of a tokenizer with their ids, from its files: a tokenizer library takes seconds to import, and torch with
it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.core.small_files import parse_json
from danlu.data.tokenizer_folder import fast_tokenizer_folder, read_json_object

_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_vocabulary(path: str) -> Mapping[str, int]:
    """Returns every token of a folder, a finished run or a hub id with its id, as `load_tokenizer(path).vocabulary`.

    A folder in a form that danlu does not read itself is loaded by the library. Raises DataError as `load_tokenizer`.
    """
    folder = fast_tokenizer_folder(path)
    settings = read_json_object(folder / "tokenizer_config.json")
    try:
        vocabulary = None if "fast_tokenizer_files" in settings else _stored_vocabulary(folder)
        if vocabulary is not None:
            return _with_special_tokens(vocabulary, settings, read_json_object(folder / "special_tokens_map.json"))
    except (KeyError, TypeError, ValueError, AttributeError):  # the library says what is wrong with such files
        pass
    from danlu.data.tokenizer import load_tokenizer

    return load_tokenizer(path).vocabulary


def vocabulary_size(path: str) -> int:
    """Returns how many rows an embedding needs for the tokens of a tokenizer. Raises DataError as `read_vocabulary`."""
    vocabulary = read_vocabulary(path)
    if not vocabulary:
        raise DataError(f"{path}: the tokenizer has no tokens")
    return max(vocabulary.values()) + 1


def _stored_vocabulary(folder: Path) -> dict[str, int] | None:
    """The tokens in tokenizer.json, or in vocab.json and added_tokens.json; None where the folder has neither."""
    if (folder / "tokenizer.json").is_file():
        stored = parse_json((folder / "tokenizer.json").read_bytes())
        model = stored["model"]["vocab"]
        # Unigram models list [token, score] by id, all others map tokens to ids.
        tokens = {entry[0]: number for number, entry in enumerate(model)} if isinstance(model, list) else dict(model)
        return tokens | {entry["content"]: entry["id"] for entry in stored.get("added_tokens") or ()}
    if (folder / "vocab.json").is_file():
        added = folder / "added_tokens.json"
        tokens = dict(parse_json((folder / "vocab.json").read_bytes()))
        return tokens | (parse_json(added.read_bytes()) if added.is_file() else {})
    return None


def _with_special_tokens(vocabulary: dict[str, int], *settings: Mapping[str, Any]) -> dict[str, int]:
    """Adds the tokens that transformers adds to a tokenizer: those that its settings name and its vocabulary lacks."""
    for number, entry in sorted(settings[0].get("added_tokens_decoder", {}).items(), key=lambda each: int(each[0])):
        vocabulary.setdefault(_text(entry), int(number))
    for text in (text for values in settings for text in _special_texts(values)):
        if text not in vocabulary:
            vocabulary[text] = max(vocabulary.values(), default=-1) + 1
    return vocabulary


def _special_texts(values: Mapping[str, Any]) -> Iterator[str]:
    for name in _SPECIALS:
        if values.get(name) is not None:
            yield _text(values[name])
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = values.get(name) or ()
        yield from map(_text, listed.values() if isinstance(listed, dict) else listed)


def _text(token: Any) -> str:
    """The text of a token, which is an object with further settings in some files."""
    text = token["content"] if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no token")
    return text
