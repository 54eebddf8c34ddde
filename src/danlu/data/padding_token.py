"""The token that a model which classifies is padded with, as transformers pads its batches."""

from __future__ import annotations

from collections.abc import Iterable

from danlu.data.tokenizer import Tokenizer

_MEANT_FOR_NOTHING = ("pad", "reserved", "unused")
"""Words in the names of special tokens that no text has, the best first (`<|finetune_right_pad_id|>`)."""


def padding_token(tokenizer: Tokenizer, ends: Iterable[int] = ()) -> tuple[str, int] | None:
    """Returns (text, id) of a token that no answer ends with: a model that classifies can be padded with it alone.

    transformers scores at the last token that is not `pad_token_id`. Where that is the end-of-text or end-of-turn
    token, as many tokenizers have it, an answer would be scored at the token before its end.

    It is the tokenizer's own padding token where that is suitable; else a reserved special token, that of unknown
    characters, or that of beginnings. None where there is no such token: transformers then takes one row at a time.

    ends: tokens that answers end with besides the tokenizer's own end-of-turn tokens.
    """
    refused = {*ends, *tokenizer.end_of_turn_ids}
    if tokenizer.eos_id is not None:
        refused.add(tokenizer.eos_id)
    special = {text: token for token, text in tokenizer.added_texts.items() if token in tokenizer.special_ids - refused}
    by_name = {name: text for name, text in tokenizer.special_texts.items() if text in special}
    named = [by_name[name] for name in ("pad_token", "unk_token", "bos_token") if name in by_name]
    spare = [text for word in _MEANT_FOR_NOTHING for text in special if word in text.lower()]
    own = named[:1] if "pad_token" in by_name else []
    text = next(iter([*own, *spare, *named]), None)
    return None if text is None else (text, special[text])
