"""A tokenizer of whole words, without one for those that it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from danlu.core.errors import DataError
from danlu.data.prompt_encoding import encode_text
from danlu.data.raw_rows import RawRow
from danlu.data.render import RenderedSample, RenderSettings, render_rows
from danlu.data.rows import Completion, Row, Text
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizing import TokenizeSettings, tokenise

WORDS = {"red": 0, "fox": 1, "owl": 2, "<eos>": 3}


def tokenizer(folder: Path, kind: str = "words", unknown: str | None = None) -> Tokenizer:
    model = {
        "words": lambda: models.WordLevel(WORDS, **({"unk_token": unknown} if unknown else {})),
        "pieces": lambda: models.WordPiece(WORDS, **({"unk_token": unknown} if unknown else {})),
    }[kind]()
    fast = FastTokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_the_first_unknown_word_is_named(tmp_path: Path, kind: str) -> None:
    loaded = tokenizer(tmp_path, kind)
    assert loaded.encode("red fox") == [0, 1]
    with pytest.raises(DataError, match=r"no token for 'crow', and none for unknown words \(unk_token\)\. Add one"):
        loaded.encode("red crow fox hen")
    with pytest.raises(DataError, match="no token for 'hen'"):
        loaded.encode_many(["red", "fox hen"])
    with pytest.raises(DataError, match="no token for 'crow'"):
        encode_text(loaded, "crow")
    assert tokenizer(tmp_path / "other", kind, unknown="red").encode("red crow") == [0, 0]  # control


def test_only_the_rows_that_have_one_are_bad(tmp_path: Path) -> None:
    loaded = tokenizer(tmp_path)
    rows: list[Row] = [Text("red fox"), Completion("red", " crow"), Text("owl"), Completion("red", " fox")]
    wheres = [f"rows.jsonl:{number}" for number in range(1, 5)]
    good, bad, *others = render_rows(rows, wheres, loaded, RenderSettings())
    assert isinstance(bad, DataError) and str(bad).startswith("rows.jsonl:2: ") and "'crow'" in str(bad)
    alone = [render_rows([row], [where], loaded, RenderSettings())[0] for row, where in zip(rows, wheres, strict=True)]
    for of_row, expected in zip([good, *others], [alone[0], *alone[2:]], strict=True):
        assert isinstance(of_row, list) and isinstance(expected, list)
        (sample,), (same,) = of_row, expected
        assert isinstance(sample, RenderedSample) and sample.where == same.where
        assert sample.tokens.tolist() == same.tokens.tolist() and sample.weights.tolist() == same.weights.tolist()


def test_a_preparation_counts_them_as_bad_rows(tmp_path: Path) -> None:
    settings = TokenizeSettings("auto", RenderSettings(), 64, "truncate")
    raw = [RawRow(number, f"r:{number + 1}", {"text": text}) for number, text in enumerate(["red", "hen", "fox"])]
    chunk = tokenise(tokenizer(tmp_path), (settings, raw))
    assert chunk.statistics.bad_rows == 1 and len(chunk.block) == 2
    assert [message.partition(": ")[0] for message in chunk.bad] == ["r:2"]


def test_tokenizers_without_such_a_token_can_be_compared(tmp_path: Path) -> None:
    one, other = tokenizer(tmp_path / "one"), tokenizer(tmp_path / "other")
    assert one.is_same(other) and not one.is_same(tokenizer(tmp_path / "third", unknown="red"))
