"""A bare `tokenizer.model` as a tokenizers.Tokenizer: SentencePiece BPE (Llama 2, Mistral, Gemma), tiktoken (Llama 3).

transformers 5.23 reads such a file too, but without the rules that stand in it (the space before a text, how spaces are
joined), and so to other ids than the model was trained with. The file says all that is needed; tests compare the ids
with the sentencepiece and tiktoken libraries, which are not needed to read it.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from danlu.core.errors import DataError
from danlu.data.byte_level_bpe import PRINTABLE

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How Llama 3 cuts text before it merges bytes (tokenizer.py of the model's release)."""
_LLAMA3_RANKS = 128_000
_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
_SPACE = "\u2581"  # SentencePiece's sign for a space


Token = TypeVar("Token", str, bytes)


class PieceType(IntEnum):
    """The type of a piece in a SentencePiece model (sentencepiece_model.proto)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class ConvertedTokenizer:
    """A tokenizer and the special tokens that its file names.

    Attributes:
        fast: tokenizers.Tokenizer.
        specials: those of bos_token, eos_token, unk_token and pad_token that exist.
    """

    fast: Any
    specials: dict[str, str]


def convert(file: Path, *, adds_bos: bool = True) -> ConvertedTokenizer | None:
    """The tokenizer in a `tokenizer.model`; None for a SentencePiece model that is not BPE.

    Args:
        adds_bos: a text begins with the beginning-of-text token, where there is one.

    Raises:
        DataError: the file is neither a SentencePiece model nor Llama 3's ranks, or is damaged.
    """
    content = file.read_bytes()
    ranks = _ranks(content)
    try:
        if ranks is not None:
            return _from_ranks(ranks, file, adds_bos)
        return _from_sentencepiece(_Model.of(content), adds_bos)
    except (IndexError, ValueError, KeyError, struct.error) as error:
        raise DataError(f"{file}: neither a SentencePiece model nor a tiktoken vocabulary: {error}") from error


# -- SentencePiece ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """The content of a SentencePiece model. `pieces`: text, score and type, in the order of their ids."""

    pieces: list[tuple[str, float, PieceType]]
    trainer: Mapping[int, Any]
    normalizer: Mapping[int, Any]

    @classmethod
    def of(cls, content: bytes) -> _Model:
        pieces, trainer, normalizer = [], {}, {}
        for number, value in _fields(content):
            if number == 1:
                piece = dict(_fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                pieces.append((piece[1].decode(), score, PieceType(piece.get(3, PieceType.NORMAL))))
            elif number == 2:
                trainer = dict(_fields(value))
            elif number == 3:
                normalizer = dict(_fields(value))
        if not pieces:
            raise ValueError("it holds no pieces")
        return cls(pieces, trainer, normalizer)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message: whole numbers, else bytes as they stand."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(message):
            raise ValueError("it ends too early")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _from_sentencepiece(model: _Model, adds_bos: bool) -> ConvertedTokenizer | None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if model.trainer.get(3, 1) != 2:  # model_type: 1 is unigram, 2 BPE
        return None
    if model.normalizer.get(2):
        raise ValueError(
            f"it replaces characters by a table ({model.normalizer.get(1, b'').decode()}), which cannot be followed "
            "exactly. Put a tokenizer.json next to it"
        )
    vocabulary = {text: number for number, (text, _, _) in enumerate(model.pieces)}
    if len(vocabulary) < len(model.pieces):
        raise ValueError("a piece occurs twice")
    # SentencePiece merges to the piece with the highest score first.
    ranks = {text: -score for text, score, kind in model.pieces if kind == PieceType.NORMAL}
    kinds = {text: kind for text, _, kind in model.pieces}
    unknown = next((text for text, kind in kinds.items() if kind == PieceType.UNKNOWN), None)
    fast = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(ranks),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(kind == PieceType.BYTE for kind in kinds.values()),
        )
    )
    has_prefix, escapes = bool(model.normalizer.get(3, 1)), bool(model.normalizer.get(5, 1))
    ids = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
    numbers = {name: model.trainer.get(field, default) for name, (field, default) in ids.items()}
    # -1, none at all, is a very large number to protobuf.
    specials = {name: model.pieces[n][0] for name, n in numbers.items() if 0 <= n < len(model.pieces)}
    # Mistral's later models mark turns with control pieces, and only what begins a text gets the space before it. Where
    # there are none (Llama 2), each turn is a text of its own between the ends of others.
    apart = (PieceType.CONTROL, PieceType.USER_DEFINED)
    marks = [text for text, kind in kinds.items() if kind in apart and text not in specials.values()]
    steps: list[Any] = []
    if model.normalizer.get(4, 1):  # remove_extra_whitespaces
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if marks and has_prefix and escapes:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        steps += [normalizers.Prepend(_SPACE)] if has_prefix else []
        steps += [normalizers.Replace(" ", _SPACE)] if escapes else []
    if steps:
        fast.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = [text for text, kind in kinds.items() if kind in (PieceType.CONTROL, PieceType.UNKNOWN)]
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    added = [text for text, kind in kinds.items() if kind == PieceType.USER_DEFINED]
    fast.add_tokens([AddedToken(text, normalized=_SPACE in text, special=False) for text in added])
    return _with_bos(ConvertedTokenizer(fast, specials), adds_bos)


# -- tiktoken ---------------------------------------------------------------------------------------------------------


def _ranks(content: bytes) -> dict[bytes, int] | None:
    """Bytes -> rank, of lines such as `aGVsbG8= 15339`; None for another kind of file."""
    ranks: dict[bytes, int] = {}
    for line in content.splitlines():
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            return None
    return ranks or None


def _from_ranks(ranks: Mapping[bytes, int], file: Path, adds_bos: bool) -> ConvertedTokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if len(ranks) != _LLAMA3_RANKS or sorted(ranks.values()) != list(range(_LLAMA3_RANKS)):
        raise DataError(
            f"{file}: a tiktoken vocabulary of {len(ranks):,} tokens. Only Llama 3's, of {_LLAMA3_RANKS:,}, can be "
            "read from this file alone: of others it says neither how text is cut nor which special tokens there are. "
            "Put a tokenizer.json next to it"
        )
    written = {token: token.decode("latin-1").translate(PRINTABLE) for token in ranks}
    fast = Tokenizer(
        models.BPE(
            {written[token]: rank for token, rank in ranks.items()},
            [(written[left], written[right]) for left, right in _merges(ranks)],
            ignore_merges=True,  # a piece that is a token is that token, whatever its merges
        )
    )
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    reserved = count()
    names = (_LLAMA3_NAMED.get(at) or f"reserved_special_token_{next(reserved)}" for at in range(256))
    fast.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False, special=True) for name in names])
    specials = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    return _with_bos(ConvertedTokenizer(fast, specials), adds_bos)


def _merges(ranks: Mapping[Token, float]) -> list[tuple[Token, Token]]:
    """Every way to make a piece of two others, the piece with the lowest rank first, the earlier one of equal ranks."""
    by_rank = sorted(ranks, key=ranks.__getitem__)
    cuts = ((piece[:cut], piece[cut:]) for piece in by_rank for cut in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in ranks and right in ranks]


def _with_bos(converted: ConvertedTokenizer, adds_bos: bool) -> ConvertedTokenizer:
    from tokenizers import processors

    bos = converted.specials.get("bos_token")
    if adds_bos and bos is not None:
        converted.fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, converted.fast.token_to_id(bos))]
        )
    return converted
