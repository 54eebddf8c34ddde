"""A bare tokenizer.model: the ids are those of the library that made it."""

from __future__ import annotations

import base64
import io
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from builders.chat_tokenizers import odd_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import DataError
from danlu.data import tokenizer_folder
from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizer_conversion import LLAMA3_PATTERN, convert
from danlu.data.tokenizer_folder import fast_tokenizer_folder

TEXTS = st.one_of(odd_texts(), st.text(alphabet="ab cd  é你龘😀\n\t▁'1", max_size=40), st.text(max_size=20))
WORDS = ["hello there", "the cat sat on the mat", "a fox ran over the hill", "你好 世界", "1 2 3 4 5 6 7 8 9"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path_factory.mktemp("converted")))


def ids(fast: Any, text: str) -> list[int]:
    return list(fast.encode(text, add_special_tokens=False).ids)


def trained(**options: Any) -> bytes:
    """A small SentencePiece BPE model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20),
        model_writer=model,
        model_type=options.pop("model_type", "bpe"),
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 340, "byte_fallback": True, "normalization_rule_name": "identity", **options},
    )
    return model.getvalue()


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def test_ids_of_llama_2_are_those_of_sentencepiece(shared_data: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    file = shared_data / "tokenizers/llama2-sp/tokenizer.model"
    fast, library = convert(file), sentencepiece.SentencePieceProcessor(str(file))
    assert fast is not None and fast.specials == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def compare(text: str) -> None:
        if not any(mark in text for mark in ("<s>", "</s>", "<unk>")):  # written out they are special tokens here
            assert ids(fast.fast, text) == library.encode(text)
            assert fast.fast.decode(library.encode(text)) == library.decode(library.encode(text))

    compare()
    lines = [
        line
        for line in (shared_data / "README.md").read_text().splitlines()
        if "<unk>" not in line and "<s>" not in line
    ]
    assert [ids(fast.fast, line) for line in lines] == library.encode(lines)
    assert ids(fast.fast, "Hello  world") == [15043, 29871, 3186] != ids(fast.fast, "Hello world")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"add_dummy_prefix": False, "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
        {"byte_fallback": False, "vocab_size": 80},
        {"user_defined_symbols": ["<sep>", "[x]"], "remove_extra_whitespaces": False},
        {"control_symbols": ["[INST]", "[/INST]"], "remove_extra_whitespaces": False},
        {"bos_id": -1, "pad_id": 3},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_ids_are_those_of_sentencepiece_whatever_its_rules(options: dict[str, Any], tmp_path: Path) -> None:
    model = trained(**options)
    import sentencepiece

    (tmp_path / "tokenizer.model").write_bytes(model)
    converted = convert(tmp_path / "tokenizer.model")
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert converted is not None
    known = {
        name: getattr(library, f"{name[:3]}_id")() for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    assert {name: converted.fast.token_to_id(text) for name, text in converted.specials.items()} == {
        name: number for name, number in known.items() if number >= 0
    }

    @settings(max_examples=100, deadline=None)
    @given(TEXTS)
    def compare(text: str) -> None:
        # Where turns are marked, a space that a text begins with is the one that SentencePiece would put before it.
        marked = any("symbols" in name for name in options)
        if marked and text.startswith((" ", "\u2581")):
            return
        # Its own sign for a space, written out, counts as one only at the end where spaces are taken out.
        if options.get("remove_extra_whitespaces", True) and "\u2581" in text:
            return
        if not any(mark in text for mark in ("<s>", "</s>", "<unk>", "<pad>", "[INST]", "[/INST]")):
            assert ids(converted.fast, text) == library.encode(text)

    compare()
    for text in ("hello  there", "a<sep>cat [x]the"):
        assert ids(converted.fast, text) == library.encode(text)


def test_marks_of_turns_are_control_pieces_and_only_a_text_s_beginning_has_a_space(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        trained(control_symbols=["[INST]", "[/INST]"], remove_extra_whitespaces=False)
    )
    converted = convert(tmp_path / "tokenizer.model")
    assert converted is not None
    marks = [converted.fast.token_to_id(mark) for mark in ("[INST]", "[/INST]")]
    inside = ids(converted.fast, "hello")
    assert ids(converted.fast, "[INST] hello[/INST]") == [marks[0], *inside, marks[1]]


# -- tiktoken ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama3(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary as large as Llama 3's: GPT-2's tokens by rank, and more that texts do not hold."""
    from danlu.data.byte_level_bpe import PRINTABLE

    back = {character: byte for byte, character in PRINTABLE.items()}
    vocabulary = json.loads((shared_data / "tokenizers/gpt2/vocab.json").read_text())
    del vocabulary["<|endoftext|>"]
    tokens = [bytes(back[character] for character in token) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    held = set(tokens)
    fillers = (b"\xff" + number.to_bytes(3, "big") for number in range(200_000))
    tokens += islice((filler for filler in fillers if filler not in held), 128_000 - len(tokens))
    file = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    file.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return file


def test_ids_of_llama_3_are_those_of_tiktoken(llama3: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    converted = convert(llama3)
    assert converted is not None
    library = tiktoken.Encoding(
        "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=load_tiktoken_bpe(str(llama3)), special_tokens={}
    )

    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    def compare(text: str) -> None:
        assert ids(converted.fast, text) == library.encode(text, disallowed_special=())
        assert converted.fast.decode(ids(converted.fast, text)) == text

    compare()
    named = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id", "reserved_special_token_0"]
    marks = [converted.fast.token_to_id(f"<|{name}|>") for name in named]
    assert marks == [128000, 128001, 128006, 128007, 128009, 128002]
    assert converted.fast.token_to_id("<|reserved_special_token_250|>") == 128255
    assert ids(converted.fast, "<|eot_id|>hello") == [128009, *ids(converted.fast, "hello")]


# -- a folder with nothing else ---------------------------------------------------------------------------------------


def test_a_folder_with_only_a_tokenizer_model_is_a_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(shared_data / "tokenizers/llama2-sp", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(str(folder))
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.adds_bos) == (32000, 1, 2, True)
    assert loaded.encode("Hello  world") == [15043, 29871, 3186]
    assert loaded.decode([15043, 29871, 3186]) == "Hello  world"
    written = fast_tokenizer_folder(str(folder))
    assert written == fast_tokenizer_folder(str(folder)) != folder, "converted once"
    theirs = AutoTokenizer.from_pretrained(written)
    assert theirs("Hello  world").input_ids == [1, 15043, 29871, 3186]
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "pad_token": "<unk>"})
    )
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    again = load_tokenizer(str(folder))
    assert (again.adds_bos, again.pad_id) == (False, 0)
    assert again.template().render([{"role": "user", "content": "Hi"}]) == "Hi"


def test_a_cache_that_cannot_be_written_hinders_nothing(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path / "file" / "converted"))
    assert load_tokenizer(str(shared_data / "tokenizers/llama2-sp")).encode("Hello") == [15043]


def test_a_tokenizer_model_that_cannot_be_read(tmp_path: Path, shared_data: Path) -> None:
    file = tmp_path / "tokenizer.model"
    for content in (
        b"",
        b"hello",
        b"\n" * 9,
        (shared_data / "tokenizers/llama2-sp/tokenizer.model").read_bytes()[:999],
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"^{file}: neither a SentencePiece model nor a tiktoken vocabulary: \S"):
            load_tokenizer(str(tmp_path))
    file.write_text("aGVsbG8= 0\n")
    with pytest.raises(DataError, match=rf"^{file}: a tiktoken vocabulary of 1 tokens. Only Llama 3's, of 128,000"):
        load_tokenizer(str(tmp_path))
    file.write_bytes(trained(normalization_rule_name="nmt_nfkc"))
    with pytest.raises(DataError, match=r"it replaces characters by a table \(nmt_nfkc\), which cannot be followed"):
        load_tokenizer(str(tmp_path))
    file.write_bytes(trained(model_type="unigram", vocab_size=60, byte_fallback=False))
    assert convert(file) is None, "left to transformers"
