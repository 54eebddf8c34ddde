"""Byte-level BPE, pre-token by pre-token: text is split by the tokenizer's own patterns, each pre-token encoded once.

Byte-level BPE never merges across the pre-tokens that its pre-tokenizer makes, so a text's tokens are those of its
pre-tokens, and most of these have been seen before. Splitting with Python's `regex` and looking pre-tokens up takes a
fraction of the tokenizers library's time (which remembers pre-tokens too, but tracks where each character came from).
The ids are the same, or the library is asked: for a tokenizer with anything that is not known here, for characters on
which the two regular expression engines might differ, for text that a normaliser would change.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""ByteLevel's default pattern (that of GPT-2)."""

MAX_CACHED_PRE_TOKENS = 1 << 16
MAX_CACHED_CHARACTERS = 64  # longer pre-tokens seldom come again

# What Oniguruma (the library's engine) and `regex` read alike, character by character as a test proves. Not among it:
# other properties, anchors, back references, class set operations and nested classes, counts that are lazy or
# possessive, looking ahead for something (which can match nothing), and ignoring the case of anything but contractions.
PROPERTIES = ("L", "Lu", "Ll", "Lt", "Lm", "Lo", "N", "P", "S", "M", "Han", "Hiragana", "Katakana")
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ESCAPE = rf"\\[pP]\{{(?:{'|'.join(PROPERTIES)})\}}|\\[sSdDrnt]|\\[^\w\s]"
_SHARED_SYNTAX = re.compile(
    rf"(?:{_ESCAPE}|{re.escape(CONTRACTIONS)}|\(\?[:!]|[)|?+*]|\{{\d*,?\d*\}}(?![?+])"
    rf"|\[\^?(?:{_ESCAPE}|[^\\\[\]&~|])+\]|[^\\\[\](){{}}^$.|?+*])+"
)
_CLASS = re.compile(r"\[(?:\\.|[^\\\]])+\]|\\[pP]\{[A-Za-z]+\}|\\[sSdD]")
# A lower-case letter to one engine and a letter without case to the other.
_DISPUTED = frozenset("\u0295")

Splitter = Callable[[str], list[str]]


def byte_level_encoder(fast: Any) -> ByteLevelEncoder | None:
    """An encoder for a `tokenizers.Tokenizer`; None where its ids might differ from the library's."""
    model, added = fast.model, list(fast.get_added_tokens_decoder().values())
    is_plain_bpe = type(model).__name__ == "BPE" and not any(
        (model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix, model.byte_fallback)
    )
    adds_plainly = not fast.encode_special_tokens and all(
        token.content and not (token.lstrip or token.rstrip or token.single_word) for token in added
    )
    # Added tokens that are looked for before and after normalising take turns; one kind alone needs no second look.
    one_pass = len({token.normalized for token in added}) <= 1
    is_known = is_plain_bpe and adds_plainly and one_pass and _description(fast.normalizer) in ({}, {"type": "NFC"})
    splitters = _splitters(_description(fast.pre_tokenizer)) if is_known else None
    if splitters is None:
        return None
    ids = {token.content: number for number, token in fast.get_added_tokens_decoder().items()}
    return ByteLevelEncoder(fast, splitters, ids, normalizes=fast.normalizer is not None)


class ByteLevelEncoder:
    """Encodes texts by the ids of their pre-tokens. Made by `byte_level_encoder`."""

    def __init__(self, fast: Any, splitters: Sequence[Splitter], added: dict[str, int], normalizes: bool) -> None:
        self._fast = fast
        self._splitters = tuple(splitters)
        self._ids_by_pre_token = _PreTokenIds(fast.model)
        self._added = {content: array("i", [token]).tobytes() for content, token in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if added else lambda text: [text]
        self._normalizes = normalizes
        self._characters = set(map(chr, range(128)))

    def encode(self, text: str) -> bytes:
        """The ids of a text as it stands, special tokens in it recognised, as native 32-bit integers."""
        if not text.isascii() and not self._is_unambiguous(text):
            return array("i", self._fast.encode(text, add_special_tokens=False).ids).tobytes()
        ids: list[bytes] = []
        for number, part in enumerate(self._split(text)):
            if number % 2:
                ids.append(self._added[part])
            elif part:
                pre_tokens = [part]
                for split in self._splitters:
                    pre_tokens = split(part) if len(pre_tokens) == 1 else [t for p in pre_tokens for t in split(p)]
                ids.extend(map(self._ids_by_pre_token.__getitem__, pre_tokens))
        return b"".join(ids)

    def _is_unambiguous(self, text: str) -> bool:
        """Whether a normaliser leaves the text alone and both engines know the class of each of its characters."""
        if not self._characters.issuperset(text):
            new = set(text) - self._characters
            # A character that Python does not know is too new for an older table, and a letter in a newer one.
            if any(unicodedata.category(character) == "Cn" for character in new) or not _DISPUTED.isdisjoint(new):
                return False
            self._characters |= new
        return not self._normalizes or unicodedata.is_normalized("NFC", text)


class _PreTokenIds(dict[str, bytes]):
    """Pre-tokens and their ids; a new pre-token is encoded by the tokenizer's model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._tokenize = model.tokenize

    def __missing__(self, pre_token: str) -> bytes:
        written = pre_token.encode().decode("latin-1").translate(PRINTABLE)
        ids = array("i", [token.id for token in self._tokenize(written)]).tobytes()
        if len(self) < MAX_CACHED_PRE_TOKENS and len(pre_token) <= MAX_CACHED_CHARACTERS:
            self[pre_token] = ids
        return ids


def _description(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json has it; empty for one that is not there."""
    described: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return described


def _splitters(pre_tokenizer: dict[str, Any]) -> list[Splitter] | None:
    """Returns functions that split a text as a pre-tokenizer does, in steps; None for one that is not known here or not
    byte-level.
    """
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    patterns = []
    for number, step in enumerate(steps, 1):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "Digits"}:
                patterns.append(r"\p{N}+")
            case {"type": "ByteLevel", "add_prefix_space": False} if number == len(steps):
                patterns += [GPT2] if step.get("use_regex", True) else []
            case _:
                return None
    # Imported here: only tokenising needs it.
    import regex

    if not all(_SHARED_SYNTAX.fullmatch(pattern) and not regex.fullmatch(pattern, "") for pattern in patterns):
        return None
    return [_splitter(pattern) for pattern in patterns]


def _splitter(pattern: str) -> Splitter:
    """Returns a function that cuts a text into its matches and the parts between them."""
    import regex

    for_ascii = _for_ascii(pattern)
    matches_in_ascii, matches = re.compile(for_ascii).findall, regex.compile(pattern).findall
    split_ascii, split_unicode = re.compile(f"({for_ascii})").split, regex.compile(f"({pattern})").split
    leaves_gaps = False

    def split(text: str) -> list[str]:
        nonlocal leaves_gaps
        if not leaves_gaps:
            matching: list[str] = matches_in_ascii(text) if text.isascii() else matches(text)
            if sum(map(len, matching)) == len(text):
                return matching
            leaves_gaps = True
        return [pre_token for pre_token in (split_ascii if text.isascii() else split_unicode)(text) if pre_token]

    return split


def _for_ascii(pattern: str) -> str:
    """The pattern for `re`, which knows no classes of Unicode but is twice as fast, and for ASCII texts alone."""
    return _CLASS.sub(lambda character_class: _ascii_members(character_class[0]), pattern)


@functools.cache
def _ascii_members(character_class: str) -> str:
    """The ASCII characters of a class, as a class of `re`."""
    import regex

    characters = [character for character in map(chr, range(128)) if regex.fullmatch(character_class, character)]
    return f"[{''.join(map(re.escape, characters))}]" if characters else "(?!)"


# The character that a byte-level vocabulary writes for each byte: GPT-2's table, which moves up blank ones.
_PLAIN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_MOVED = [byte for byte in range(256) if byte not in _PLAIN]
PRINTABLE = {byte: chr(byte) for byte in _PLAIN} | {byte: chr(256 + place) for place, byte in enumerate(_MOVED)}
