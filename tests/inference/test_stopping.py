"""Text while it is being written: whole characters, nothing past a stop string, nothing lost."""

from __future__ import annotations

import random

import pytest

from danlu.inference.stopping import Detokenizer, StopStrings, TextStream


def by_bytes(tokens):
    """A byte-level tokenizer: broken UTF-8 comes out as U+FFFD; ids from 256 are special and skipped."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def byte_runs(tokens):
    """As SentencePiece with byte fallback: drops a leading space, and a run of bytes is broken as a whole."""
    pieces, run = [], []
    for token in [*tokens, None]:
        if token is not None and token < 256:
            run.append(token)
            continue
        if run:
            try:
                pieces.append(bytes(run).decode())
            except UnicodeDecodeError:
                pieces.append("\ufffd" * len(run))
            run = []
        if token is not None:
            pieces.append([" a", " the", "x"][token - 256])
    return "".join(pieces).removeprefix(" ")


def stream(detokenizer, tokens):
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


TEXTS = ["plain", "naïve café", "丹炉 炼丹", "🧑‍🚀 family 👩‍👩‍👧", "a\ufffdb", "مرحبا"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_join_to_the_text(text):
    pieces = stream(Detokenizer(by_bytes), text.encode())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert max(len(piece) for piece in pieces) == 1  # as soon as its last byte is there


def test_broken_bytes_are_shown_in_the_end_not_hidden():
    assert stream(Detokenizer(by_bytes), b"ok\xe4\xb8") == ["o", "k", "", "", "\ufffd"]
    assert "".join(stream(Detokenizer(by_bytes), b"a\xe4b")) == "a\ufffdb"


def test_special_tokens_do_not_disturb():
    assert "".join(stream(Detokenizer(by_bytes), [300, 65, 300, *"é".encode(), 300])) == "Aé"


def test_random_streams_join_to_the_whole_with_byte_fallback_and_context():
    rng = random.Random(0)
    for _ in range(200):
        words = [rng.choice([[256], [257], [258], list("炉".encode()), list("🧪".encode())]) for _ in range(30)]
        tokens = [token for word in words for token in word]
        cut = rng.randrange(len(tokens))
        whole, prompt = byte_runs(tokens), byte_runs(tokens[:cut])
        detokenizer = Detokenizer(byte_runs, tokens[:cut])
        assert prompt.rstrip("\ufffd") + "".join(stream(detokenizer, tokens[cut:])) == whole


def test_context_keeps_the_space_that_a_start_would_lose():
    assert "".join(stream(Detokenizer(byte_runs, [256]), [257])) == " the"
    assert "".join(stream(Detokenizer(byte_runs), [257])) == "the"  # control: without context it is a start


def test_stop_string_across_pieces_is_never_half_shown():
    stop = StopStrings(["###", "\nUser:"])
    assert [stop.push(piece) for piece in ["Hi", " #", "#", " ok\n", "Us", "er", ":x"]] == [
        "Hi", " ", "", "## ok", "", "", ""
    ]  # fmt: skip
    assert stop.matched


def test_what_might_have_been_a_stop_string_comes_out():
    stop = StopStrings(["###"])
    assert [stop.push("a#"), stop.push("#b"), stop.push("#"), stop.flush()] == ["a", "##b", "", "#"]
    assert not stop.matched


def test_earliest_stop_string_wins():
    stop = StopStrings(["world", "lo"])
    assert stop.push("hello world") == "hel"


def test_any_cut_of_the_text_gives_the_same():
    rng, text, strings = random.Random(1), "abababcabcababcc abc", ["ababc", "cc"]
    first = min(text.find(string) for string in strings)
    for _ in range(100):
        cuts = sorted(rng.sample(range(1, len(text)), 6))
        stop, shown = StopStrings(strings), ""
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            shown += stop.push(text[start:end])
            assert text[:first].startswith(shown)
            if stop.matched:
                break
        assert shown == text[:first]
    assert first == 2


def test_stream_holds_half_characters_and_half_stop_strings():
    stream = TextStream(by_bytes, ["炉。"])
    shown = [stream.push(token) for token in "丹炉火。".encode()]
    assert [piece for piece in shown if piece] == ["丹", "炉火", "。"]
    assert stream.close() == "" and stream.text == "丹炉火。" and not stream.stopped
    stream = TextStream(by_bytes, ["炉。"])
    assert "".join(stream.push(token) for token in "丹炉。火".encode()[:9]) == "丹"
    assert stream.stopped and stream.close() == "" and stream.text == "丹"


def test_a_stop_string_can_be_completed_by_what_was_held():
    stream = TextStream(by_bytes, ["\ufffd"])
    assert [stream.push(0x61), stream.push(0xE4)] == ["a", ""]
    assert stream.close() == "" and stream.stopped
