"""Encoding word by word gives the ids of the tokenizers library, or steps aside."""

from __future__ import annotations

import functools
import json
import unicodedata
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from danlu.data import byte_level_bpe
from danlu.data.byte_level_bpe import GPT2, byte_level_encoder
from danlu.data.demo_data import pretraining_documents
from danlu.data.tokenizer import load_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior)


KNOWN = {
    "gpt2": GPT2_BYTES,
    "llama3": pre_tokenizers.Sequence([split(LLAMA3), BYTES]),
    "cased": pre_tokenizers.Sequence([split(CASED), BYTES]),
    "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_BYTES]),
    "numbers": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), GPT2_BYTES]),
    "gaps": pre_tokenizers.Sequence([split(r"\d|\p{Han}"), GPT2_BYTES]),
    "uncut": BYTES,
}
CORPUS = [*pretraining_documents(0, 200), "I'll you've ÉCOLE Straße 12345 你好，世界！\n\n x  y\r\n z"]
SPECIALS = ["<|end|>", "<|end|>x", "<tool>"]


@functools.cache
def trained(name: str, *, ignore_merges: bool = False, nfc: bool = False) -> Any:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = KNOWN[name]
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def ids(encoded: bytes) -> list[int]:
    return list(array("i", encoded))


def characters() -> st.SearchStrategy[str]:
    """Texts in which patterns have something to disagree about."""
    alphabet = st.one_of(
        st.sampled_from(" \t\n\r\u00a0\u2003\u3000\u0085\x1c\x1f_-/.,!🙂\u200d\u0301\u0345"),
        st.sampled_from("'sStTlLdDrReEvVmM\u017f0123٣½Ⅷ你好aéÉǅʰ\u0295"),
        st.characters(exclude_categories=["Cs"]),
    )
    return st.lists(st.one_of(alphabet, st.sampled_from([*SPECIALS, " the", "'ll", "  \n", "I'd"]))).map("".join)


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=25, deadline=None)
@given(text=characters(), ignore_merges=st.booleans(), nfc=st.booleans())
def test_ids_are_those_of_the_library(name: str, text: str, ignore_merges: bool, nfc: bool) -> None:
    assert_same_ids(name, text, ignore_merges=ignore_merges, nfc=nfc)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=200, deadline=None)
@given(text=characters(), ignore_merges=st.booleans(), nfc=st.booleans())
def test_ids_of_many_texts_are_those_of_the_library(name: str, text: str, ignore_merges: bool, nfc: bool) -> None:
    assert_same_ids(name, text, ignore_merges=ignore_merges, nfc=nfc)


def assert_same_ids(name: str, text: str, *, ignore_merges: bool, nfc: bool) -> None:
    tokenizer = trained(name, ignore_merges=ignore_merges, nfc=nfc)
    found = byte_level_encoder(tokenizer)
    assert found is not None
    assert ids(found.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def cut_both_ways(name: str, text: str) -> tuple[list[str], list[str]]:
    """Pieces of a text as danlu and as the library cut it, written as byte-level vocabularies write them."""
    cuts = byte_level_bpe._splitters(json.loads(KNOWN[name].__getstate__()))
    assert cuts is not None
    found = [text]
    for cut in cuts:
        found = [piece for one in found for piece in cut(one)]
    written = [piece.encode().decode("latin-1").translate(byte_level_bpe.PRINTABLE) for piece in found]
    return written, [piece for piece, _ in KNOWN[name].pre_tokenize_str(text)]


@functools.cache
def known_characters() -> str:
    """All that Unicode has assigned and the two engines agree on."""
    assigned = (one for one in map(chr, range(0x110000)) if unicodedata.category(one) not in ("Cn", "Cs"))
    return "".join(one for one in assigned if one not in byte_level_bpe._DISPUTED)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 19])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "cased", "gaps"])
def test_every_character_is_cut_as_by_the_library(name: str, every: int) -> None:
    """All of Unicode, or of it each character of so many, among letters, digits, spaces, marks and apostrophes."""
    known = known_characters()[::every]
    for start in range(0, len(known), 5000):
        ours, theirs = cut_both_ways(name, "".join(f"{one}a '{one}{one} 1" for one in known[start : start + 5000]))
        assert ours == theirs


@pytest.mark.parametrize("what", [rf"\p{{{name}}}" for name in byte_level_bpe.PROPERTIES] + [r"\s", r"\d"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 23])
def test_every_class_that_is_let_through_has_the_same_characters(what: str, every: int) -> None:
    import regex

    text = known_characters()[::every]
    left = "".join(text[start:stop] for _, (start, stop) in split(what, "removed").pre_tokenize_str(text))
    assert left == regex.sub(what, "", text)
    assert 0 < len(left) < len(text)
    assert left != regex.sub(r"\p{Lu}" if what != r"\p{Lu}" else r"\p{Ll}", "", text)


def test_the_comparisons_see_a_difference() -> None:
    ours, theirs = cut_both_ways("cased", "\u0295Ab")  # to one engine a letter without case
    assert ours != theirs
    found = byte_level_encoder(trained("cased"))
    assert found is not None
    assert not found._is_unambiguous("\u0295Ab")  # so the library is asked
    assert not found._is_unambiguous("\u0378")  # no character yet
    assert found._is_unambiguous("é你🙂")
    other = byte_level_encoder(trained("gpt2"))
    assert other is not None
    text = "12345 You'LL"
    assert ids(other.encode(text)) != trained("cased").encode(text, add_special_tokens=False).ids


def test_pieces_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_level_bpe, "MAX_CACHED_PRE_TOKENS", 3)
    tokenizer = trained("gpt2")
    found = byte_level_encoder(tokenizer)
    assert found is not None
    text = "one two three four five " + "x" * 100 + " one two"
    for _ in range(2):
        assert ids(found.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids
    assert list(found._ids_by_pre_token) == ["one", " two", " three"]


def changed(tokenizer: Any, **parts: Any) -> Any:
    copy = Tokenizer.from_str(tokenizer.to_str())
    for name, value in parts.items():
        setattr(copy, name, value)
    return copy


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": None},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(LLAMA3, "removed"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(LLAMA3, "merged_with_next"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([BYTES, split(LLAMA3)])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"\p{L}*"), BYTES])},  # matches nothing as well
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"^\p{L}+$"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"[a-z&&[^aeiou]]+"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"(a)\1"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"\p{N}{1,3}+"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"\p{Greek}+"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"(?i:strasse)"), BYTES])},
        {"pre_tokenizer": pre_tokenizers.Sequence([split(r"(?=a)|b"), BYTES])},
        {"normalizer": normalizers.NFKC()},
        {"normalizer": normalizers.Lowercase()},
        {"encode_special_tokens": True},
    ],
)
def test_what_is_not_known_is_left_to_the_library(parts: dict[str, Any]) -> None:
    assert byte_level_encoder(trained("llama3")) is not None
    assert byte_level_encoder(changed(trained("llama3"), **parts)) is None


def test_added_tokens_that_reach_around_themselves_are_left_to_the_library() -> None:
    for token in (
        AddedToken("<a>", lstrip=True, normalized=False),
        AddedToken("<a>", rstrip=True, normalized=False),
        AddedToken("<a>", single_word=True, normalized=False),
        AddedToken("<a>", normalized=True),
    ):
        tokenizer = changed(trained("llama3"))
        tokenizer.add_tokens([token])
        assert byte_level_encoder(tokenizer) is None
    tokenizer = changed(trained("llama3"))
    tokenizer.add_tokens([AddedToken("<a>", normalized=False)])
    assert byte_level_encoder(tokenizer) is not None
    assert byte_level_encoder(Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))) is None
    assert byte_level_encoder(Tokenizer(models.BPE(byte_fallback=True))) is None


def test_real_text_and_a_real_tokenizer(shared_data: Any) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "minimind"))
    fast = tokenizer.fast
    found = byte_level_encoder(fast)
    assert found is not None
    for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json"):
        for row in json.loads((shared_data / "instruct" / name).read_text(encoding="utf-8")):
            text = "<|im_start|>user\n".join(map(str, row.values()))
            assert ids(found.encode(text)) == fast.encode(text, add_special_tokens=False).ids


def test_gpt2_is_what_the_library_cuts_by() -> None:
    text = "I'll  say 12½ things,\n\n  don't\tyou? 'S \u3000x"
    cuts = byte_level_bpe._splitters({"type": "ByteLevel", "add_prefix_space": False})
    again = byte_level_bpe._splitters(json.loads(pre_tokenizers.Sequence([split(GPT2), BYTES]).__getstate__()))
    assert cuts is not None and again is not None
    assert cuts[0](text) == again[0](text)
