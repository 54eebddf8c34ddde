"""A model that always says the same: each byte of its text has one that follows it, and nothing else counts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from danlu.data.tokenizer import load_tokenizer
from danlu.data.tokenizer_training import MIN_VOCAB_SIZE, train_tokenizer
from danlu.models.loading import build
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.recipe import sections

WIDTH = MIN_VOCAB_SIZE + MIN_VOCAB_SIZE % 2  # one feature for each token, and rotary embedding wants pairs


def bigram_folder(folder: Path, text: str, *, ends: bool, context: int = 512) -> Path:
    """A Hugging Face folder (Llama, ChatML, one token a byte) that answers anything with `text`, at any temperature.

    ends: after the text comes the end-of-turn token, else the text again. No byte may occur twice in the text.
    """
    words = folder.with_name(f"{folder.name}-tokenizer")
    train_tokenizer(["a"], MIN_VOCAB_SIZE, words)
    tokenizer = load_tokenizer(str(words))
    spoken = tokenizer.encode(text)
    assert len(spoken) == len(set(spoken)) == len(text.encode()), f"a byte occurs twice in {text!r}"
    assert tokenizer.eos_id is not None
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }
    model = build(
        from_scratch(sections.Model(config=config, tokenizer="none"), tokenizer.vocab_size, None, tokenizer.eos_id)
    )
    following = torch.full((tokenizer.vocab_size,), spoken[0])
    for one, other in pairwise(spoken):
        following[one] = other
    following[spoken[-1]] = tokenizer.eos_id if ends else spoken[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        tokens = torch.arange(tokenizer.vocab_size)
        model.embed_tokens.weight[tokens, tokens] = 1.0
        assert model.lm_head is not None
        model.lm_head.weight[following, tokens] = 1.0  # times sqrt(WIDTH) by the norm: a logit of 16
    save(model, folder, tokenizer_from=words)
    return folder
