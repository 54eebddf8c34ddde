"""The vocabulary that is read from a tokenizer's files, against that of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import tiny_world

from danlu.data.new_tokens import added_tokens, undescribed_tokens
from danlu.data.tokenizer import load_tokenizer
from danlu.data.vocabulary import read_vocabulary, vocabulary_size
from danlu.recipe.sections import NewToken

VOCABULARY = {"a": 0, "b": 1, "ab": 2}


def folder(path: Path, **files: Any) -> str:
    path.mkdir()
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return str(path)


def tokenizer_json(**model: Any) -> dict[str, Any]:
    added = [{"id": 3, "content": "<s>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}]
    return {"version": "1.0", "added_tokens": [added[0] | {"single_word": False}], "model": model}


def test_it_is_that_of_the_library(tmp_path: Path) -> None:
    bpe = tokenizer_json(type="BPE", vocab=VOCABULARY, merges=[["a", "b"]])
    unigram = tokenizer_json(type="Unigram", unk_id=0, vocab=[["a", -1.0], ["b", -2.0], ["ab", -3.0]])
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    later = {"added_tokens_decoder": {"4": {"content": "<pad>", "special": True}}, "eos_token": "<end>"}
    folders = [
        str(tiny_world().tokenizer),
        folder(tmp_path / "bpe", tokenizer=bpe, tokenizer_config=plain),
        folder(tmp_path / "unigram", tokenizer=unigram, tokenizer_config=plain),
        folder(tmp_path / "specials", tokenizer=bpe, tokenizer_config=plain | later),
    ]
    read = [dict(read_vocabulary(path)) for path in folders]
    assert read == [dict(load_tokenizer(path).vocabulary) for path in folders]
    assert [vocabulary_size(path) for path in folders] == [load_tokenizer(path).vocab_size for path in folders]
    assert [len(each) for each in read[1:]] == [4, 4, 6]  # control: the settings of the last one count


def test_new_tokens_have_the_ids_that_the_library_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("danlu.data.tokenizer_folder.CONVERTED", str(tmp_path))
    tokens = [NewToken(text="<plan>"), NewToken(text="<act>", special=True, description="to act")]
    path = str(tiny_world().tokenizer)
    theirs, ours = added_tokens(path, [], tokens), undescribed_tokens(path, [], tokens)
    assert [(each.text, each.id, each.special) for each in ours] == [(e.text, e.id, e.special) for e in theirs]
    assert [each.of for each in ours] == [None, None] and theirs[1].of  # control: those are described
