"""Training a tokenizer and writing it as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from danlu.core.errors import DataError, ResourceError

TURN_START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
"""The ChatML layout of a conversation: `<|im_start|>role`, the text, `<|im_end|>`, and a newline after each message."""

MIN_VOCAB_SIZE = 256 + 3  # one token for each byte, so that any text can be written, and the special ones


def train_tokenizer(texts: Iterable[str], size: int, folder: Path, chat_template: str = CHATML) -> int:
    """Trains a byte-level BPE tokenizer and writes the folder that `AutoTokenizer.from_pretrained` reads.

    One token, `<|im_end|>`, ends both a turn of a conversation and a plain-text document, and it is the tokenizer's
    `eos_token`: generation in chat then stops with the token that pretraining has already taught. `<|endoftext|>` only
    pads, for tools that need a pad token different from eos.

    Args:
        texts: texts to learn merges from. size: entries in all, special tokens included; fewer when the texts offer no
            more merges. folder: the folder to write; created when missing.
        chat_template: Jinja; ChatML by default.

    Returns:
        The entries the vocabulary really has.

    Raises:
        DataError: `size` cannot hold the 256 bytes and the special tokens, or there is no text.
        ResourceError: the folder cannot be written.
    """
    if size < MIN_VOCAB_SIZE:
        raise DataError(f"a vocabulary of {size} is too small: 256 bytes and 3 special tokens need {MIN_VOCAB_SIZE}")
    # Imported here: training a model must not hold the tokenizers library.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits and Han characters stay single. Every number would otherwise be a word of its own, and Chinese, which has
    # no spaces to stop a merge, would fill a small vocabulary with whole phrases.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\p{Han}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, TURN_START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise DataError("no text to train a vocabulary on")
    tokenizer.train_from_iterator(chain([first], texts), trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write the tokenizer to {folder}: {error.strerror or error}") from error
    return int(tokenizer.get_vocab_size())
