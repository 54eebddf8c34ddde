"""Text in and out of a model, for tokenizers of every kind."""

from __future__ import annotations

import pytest
from builders.chat_tokenizers import KINDS, Kind, make_tokenizer, tokenizer_and_oracle

from danlu.core.errors import DataError
from danlu.data.tokenizer import load_tokenizer
from danlu.inference.chat_tokenizer import ChatTokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_transformers(kind: Kind) -> None:
    tokenizer, oracle = tokenizer_and_oracle("chatml", kind)
    chat = ChatTokenizer(tokenizer)
    for text in ("Hello there", " a 丹炉", "<s>given"):
        begun = text.startswith("<s>")
        assert chat.encode_prompt(text) == oracle(text, add_special_tokens=not begun)["input_ids"]
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi 🎈"}]
    text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.encode_chat(messages) == oracle(text, add_special_tokens=False)["input_ids"]
    assert chat.encode_chat_prompt("Hi 🎈") == chat.encode_chat(messages[1:]) != chat.encode_chat(messages)


def test_half_a_character_in_a_conversation_is_an_error() -> None:
    chat = ChatTokenizer(tokenizer_and_oracle("chatml", "byte")[0])
    with pytest.raises(DataError, match=r"the text holds \\ud800, half a character"):
        chat.encode_chat([{"role": "user", "content": "a\ud800"}])
    assert chat.encode_chat([{"role": "user", "content": "a"}])  # control


def test_an_empty_prompt_is_the_beginning_or_an_error(tmp_path) -> None:
    with_bos = load_tokenizer(str(make_tokenizer(tmp_path / "with", None)))
    assert ChatTokenizer(with_bos).encode_prompt("") == [with_bos.bos_id]
    without = make_tokenizer(tmp_path / "without", None, bos_token=None)
    with pytest.raises(DataError, match=f"{without}: the prompt is empty, and this tokenizer has no beginning-of-text"):
        ChatTokenizer(load_tokenizer(str(without))).encode_prompt("")


def test_marks_of_the_conversation_do_not_show(tmp_path) -> None:
    chat = ChatTokenizer(tokenizer_and_oracle("chatml", "byte")[0])
    ids = chat.tokenizer.encode("<s>Hello<|im_end|></s><pad> there")
    assert chat.decode(ids) == "Hello there"
    end = chat.tokenizer.encode("<|im_end|>")[0]
    assert end in chat.stop_ids and chat.tokenizer.eos_id in chat.stop_ids
    assert chat.split_stops(["</s>", "###", "<|im_end|>"]) == (
        {end, chat.tokenizer.eos_id},
        ["###"],
    )


def test_no_chat_template(tmp_path) -> None:
    folder = make_tokenizer(tmp_path / "plain", None)
    with pytest.raises(
        DataError, match=rf"{folder}: no chat template that says who speaks .*--chat-template FILE.jinja"
    ):
        ChatTokenizer(load_tokenizer(str(folder))).require_chat_template()
