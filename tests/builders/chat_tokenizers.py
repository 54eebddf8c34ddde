"""Small tokenizers of the kinds in use, conversations for them, and an independent check of rendered samples."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from hypothesis import strategies as st

from builders.chat_templates import STYLES
from danlu.data.render import RenderedSample
from danlu.data.tokenizer import Tokenizer, load_tokenizer

Kind = Literal["byte", "byte-nfc", "prepend", "metaspace"]
"""Byte-level (GPT-2, Llama 3), the same with a normaliser (Qwen), SentencePiece with a space in front (Llama 2) and
without (Gemma)."""
KINDS: tuple[Kind, ...] = get_args(Kind)

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
MARKS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]", "[/INST]", "<|end|>",
)  # fmt: skip

_TEXTS = (
    "The quick brown fox jumps over the lazy dog. What is the weather like in Paris today? I think it is sunny.",
    "user assistant system model: hello there, how can I help you? Tools: get_weather(city). 1 + 1 = 2; 你好，世界！",
)


_FOLDERS = tempfile.TemporaryDirectory(prefix="danlu-tokenizers-")


@functools.cache
def tokenizer_and_oracle(style: str, kind: Kind = "byte") -> tuple[Tokenizer, Any]:
    """A tokenizer with a chat template of that style, and what transformers makes of the same folder: the oracle."""
    folder = make_tokenizer(Path(_FOLDERS.name) / f"{style}-{kind}", STYLES[style], kind)
    return load_tokenizer(str(folder)), pretrained(folder)


def make_tokenizer(folder: Path, template: str | None, kind: Kind = "byte", **config: Any) -> Path:
    """Write a tokenizer folder; `config` goes into tokenizer_config.json, where None takes a token away."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    specials = [*SPECIALS.values(), *MARKS]
    if kind in ("byte", "byte-nfc"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC() if kind == "byte-nfc" else None
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        specials = ["<unk>", *specials]
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        prepend = [normalizers.Prepend("▁")] if kind == "prepend" else []
        tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if kind == "prepend" else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        specials += bytes_
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + 400, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if kind in ("prepend", "metaspace"):
        tokenizer = _without_byte_tokens(tokenizer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in [*SPECIALS.values(), *MARKS]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **SPECIALS,
        **config,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def _without_byte_tokens(tokenizer: Any) -> Any:
    """The byte tokens as plain vocabulary: SentencePiece never reads `<0x0A>` in a text as a newline."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [one for one in described["added_tokens"] if not one["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


def pretrained(folder: Path) -> Any:
    """What transformers makes of a tokenizer folder: the oracle."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


# -- conversations ----------------------------------------------------------------------------------------------------

_WORDS = ("Hi", "hello", "The quick", "fox.", "user", "assistant", "1", "23!", "é", "你好", "😀", "{}", '"', "<b>", "&")
# White space of every kind, marks of templates, text that normalisers change, characters of several code points.
_ODD = (
    " ", "\n", "\n\n", "  ", "\t", "\r\n", "\u3000", "\xa0", "\u2028", "\x85", "\x1c", "\u200b", "\ufeff", "▁",
    "e\u0301", "\u212b", "ﬁ", "👨\u200d👩\u200d👧", "<", "<|im_end|>", "<|end|>", "</s>", "<think>", "</think>",
    "[INST]",
)  # fmt: skip


def plain_texts() -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(_WORDS), min_size=1, max_size=5).map(" ".join)


def odd_texts() -> st.SearchStrategy[str]:
    fragments = st.sampled_from([*_WORDS, *_ODD])
    return st.lists(fragments, min_size=1, max_size=7).map("".join).filter(lambda text: bool(text.strip()))


@st.composite
def rows(draw: st.DrawFn, texts: st.SearchStrategy[str] | None = None, tools: bool = False) -> dict[str, Any]:
    """Rows of messages, in an order that makes sense."""
    texts = st.one_of(plain_texts(), odd_texts()) if texts is None else texts
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(texts)})
        if tools and draw(st.booleans()):
            calls = [
                {"function": {"name": "look", "arguments": {"at": draw(texts), "count": 1}}}
                for _ in range(draw(st.integers(1, 2)))
            ]
            messages.append({"role": "assistant", "content": draw(st.one_of(st.just(""), texts)), "tool_calls": calls})
            messages += [{"role": "tool", "content": draw(texts)} for _ in calls]
        answer = {"role": "assistant", "content": draw(texts)}
        if tools and draw(st.booleans()):
            answer["reasoning_content"] = draw(texts)
        messages.append(answer)
    if draw(st.booleans()) and draw(st.booleans()):
        messages.append({"role": "user", "content": draw(texts)})
    listed = [{"name": "look", "description": draw(texts), "parameters": {}}] if tools and draw(st.booleans()) else None
    return {"messages": messages, **({"tools": listed} if listed else {})}


# -- the check --------------------------------------------------------------------------------------------------------


class WrongMask(AssertionError):
    """A sample is not what the oracle says it should be."""


def check_sample(oracle: Any, turns: Sequence[Any], tools: Any, sample: RenderedSample, terminator: str | None) -> None:
    """Compare a sample with transformers: its ids, and which of them are trained.

    The ids must be those of the conversation, or of a beginning of it; eos may follow where the template has no
    terminator. Trained must be exactly the tokens that hold a character of what the assistant writes in a trained turn:
    from where the prompt ends to the end of the terminator, or of the white space that stands for it.

    Args:
        oracle: transformers' tokenizer.
        turns: the messages, as chat templates see them.
        terminator: what closes an answer in this template.

    Raises:
        WrongMask: at the first difference.
    """

    def text_of(count: int, prompt: bool = False) -> str:
        return str(oracle.apply_chat_template(turns[:count], tools, tokenize=False, add_generation_prompt=prompt))

    tokens, trained = sample.tokens.tolist(), sample.weights > 0
    count = int(sample.turns.max()) + 1
    ids = oracle.apply_chat_template(turns[:count], tools, tokenize=True)["input_ids"]
    is_closed = terminator is not None or turns[count - 1]["role"] != "assistant"
    if tokens != ids + ([] if is_closed else [oracle.eos_token_id]):
        raise WrongMask(f"tokens {tokens}, transformers has {ids}")
    text = text_of(count)
    places = np.array(oracle(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])
    expected = np.zeros(len(tokens), bool)
    expected[len(ids) :] = sample.turns[-1] in sample.turns[:-1][trained[:-1]]
    for turn in np.unique(sample.turns[trained]).tolist():
        if turns[turn]["role"] != "assistant":
            raise WrongMask(f"message {turn + 1} is trained, but is the {turns[turn]['role']}'s")
        start = len(_common(text_of(turn, prompt=True), text))
        written = _common(text_of(turn + 1), text)
        stop = len(written) if terminator is None else len(written.rstrip())
        expected[: len(ids)] |= (places[:, 0] < stop) & (places[:, 1] > start)
    if wrong := np.flatnonzero(expected != trained).tolist():
        raise WrongMask(f"tokens {wrong} of {oracle.convert_ids_to_tokens(tokens)}: trained {trained[wrong].tolist()}")


def _common(one: str, other: str) -> str:
    """The common beginning, with special tokens taken as one character each."""
    specials = "|".join(re.escape(mark) for mark in (*SPECIALS.values(), *MARKS))
    pairs = zip(*(re.findall(rf"{specials}|[\s\S]", text) for text in (one, other)), strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
