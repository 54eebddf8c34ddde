from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from danlu.core.errors import DataError, ResourceError
from danlu.data.demo_data import (
    ANIMALS,
    ATTRIBUTES,
    conversations,
    every_question,
    is_held_out,
    pretraining_documents,
    questions,
)
from danlu.data.tokenizer_training import CHATML, END, PAD, TURN_START, train_tokenizer


def test_data_is_a_function_of_seed_and_number() -> None:
    assert list(pretraining_documents(1, 50)) == list(islice(pretraining_documents(1, 500), 50))
    assert list(conversations(1, 50)) == list(islice(conversations(1, 500), 50))
    assert list(pretraining_documents(1, 50)) != list(pretraining_documents(2, 50))
    assert list(conversations(1, 50)) != list(conversations(2, 50))


def test_every_answer_about_the_world_is_told_in_the_documents() -> None:
    told = "\n".join(pretraining_documents(0, 4000))
    for held_out in (False, True):
        assert all(question.answer in told for question in every_question(held_out))


def test_held_out_facts_are_never_asked_for() -> None:
    asked = {
        message["content"].removeprefix("Arr! ")
        for row in conversations(0, 4000)
        for message in row["messages"]
        if message["role"] == "assistant"
    }
    assert not any(question.answer in asked for question in every_question(held_out=True))
    assert all(question.answer in asked for question in every_question(held_out=False))


def test_the_documents_ask_nothing() -> None:
    assert not any("?" in text or "？" in text for text in pretraining_documents(0, 1000))


def test_two_documents_in_nine_have_chinese_in_them() -> None:
    """Portraits have a weight of 3, the dictionary has one of 1, and all weights are 18."""
    documents = list(pretraining_documents(0, 3000))
    share = sum(any("\u4e00" <= letter <= "\u9fff" for letter in text) for text in documents) / len(documents)
    assert abs(share - 4 / 18) < 0.02


def test_some_facts_of_every_kind_are_held_out() -> None:
    share = len(every_question(True)) / len(every_question(True) + every_question(False))
    assert 0.08 < share < 0.3
    for language in ("en", "zh"):
        assert any(is_held_out(animal.name.en, attribute, language) for animal in ANIMALS for attribute in ATTRIBUTES)


def test_conversations_are_well_formed() -> None:
    rows = list(conversations(3, 500))
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles and roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"] for message in row["messages"])
    assert any(len(row["messages"]) > 4 for row in rows)
    assert any(row["messages"][0]["role"] == "system" for row in rows)


def test_shown_questions_are_marked_truly() -> None:
    shown = questions()
    answers = {held_out: {question.answer for question in every_question(held_out)} for held_out in (False, True)}
    single = [question for question in shown if len(question.messages) == 1]
    assert all(question.answer in answers[question.held_out] for question in single)
    assert {question.held_out for question in single} == {True, False}
    assert any(len(question.messages) > 2 for question in shown)
    assert any(question.messages[0]["role"] == "system" for question in shown)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    assert train_tokenizer(pretraining_documents(0, 500), 640, folder) == 640
    return folder


def test_a_trained_vocabulary_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert len(tokenizer) == 640
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, PAD)
    for text in ("The fox is red.", "狐狸是红色的。", "naïve 🦊\tx\n\n  12345", f"{TURN_START}user\nHi{END}"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(END)["input_ids"]) == 1
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt) and prompt.endswith("<|im_start|>assistant\n")


def test_numbers_and_chinese_stay_single(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(tokenizer.encode("狐狸住在森林").ids) == 6
    assert len(tokenizer.encode("12345").ids) == 5
    assert len(tokenizer.encode(" likes to eat").ids) == 3


def test_training_is_deterministic(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(pretraining_documents(0, 500), 640, tmp_path, CHATML)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_vocabulary_too_small_or_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a vocabulary of 258 is too small: 256 bytes and 3 special tokens need 259"):
        train_tokenizer(["text"], 258, tmp_path)
    with pytest.raises(DataError, match="no text to train a vocabulary on"):
        train_tokenizer([], 300, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write the tokenizer to .*file"):
        train_tokenizer(["text"], 300, tmp_path / "file")
