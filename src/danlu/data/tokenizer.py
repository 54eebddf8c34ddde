"""A Hugging Face tokenizer as rendering needs it: text to ids with the place of every token, and the chat template."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date as Date
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from danlu.core.errors import DataError
from danlu.core.shipped_files import template_path, templates
from danlu.data.byte_level_bpe import PRINTABLE, ByteLevelEncoder, byte_level_encoder
from danlu.data.chat_template import ChatTemplate
from danlu.data.column_values import abbreviate
from danlu.data.tokenizer_folder import broken_json, fast_tokenizer_folder, read_chat_template

_PROBE = (
    " two  spaces\n\n\tand tabs, it's I'LL 1234567 3.14 naïve 你好，世界 Привет ﬁ ① e\u0301 😀 def f(x):\n    return x "
    "▁under "
)
LONG_TEXT = 4096
"""Characters from which on encoding a text takes milliseconds."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Encoded:
    """The tokens of several texts, end to end.

    Attributes:
        ids: [T] int32.
        starts: [T] int64, where each token begins, counted over all the texts end to end.
        stops: [T] int64, where it ends.
        counts: [texts] int64, tokens of each text.
        sizes: [texts] int64, length of each text in bytes or characters (`Tokenizer.offsets_in_bytes`).
    """

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray


class Tokenizer:
    """A fast tokenizer and its chat template.

    Attributes:
        vocab_size: ids go from 0 to vocab_size - 1.
        eos_id, bos_id, pad_id: None where the tokenizer has none.
        offsets_in_bytes: places of tokens are counted in UTF-8 bytes (byte-level tokenizers), else in characters.
        adds_bos: plain text begins with bos when this tokenizer is used the ordinary way.
        fast: the `tokenizers.Tokenizer` behind it.

    Args:
        date: the day that chat templates write, see `ChatTemplate`.   template_kwargs: their further variables.
    """

    def __init__(
        self,
        pretrained: Any,
        path: str,
        templates: Mapping[str, str],
        template_path: str | None = None,
        date: Date | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._date = date
        self._template_kwargs = dict(template_kwargs or {})
        self._template_path = template_path or path
        self._pretrained = pretrained
        self.fast = pretrained.backend_tokenizer
        self.fast.no_padding()
        self.fast.no_truncation()
        self._templates = dict(templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._vocabulary: dict[str, int] = self.fast.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(self._vocabulary.values()) + 1
        self.eos_id: int | None = pretrained.eos_token_id
        self.bos_id: int | None = pretrained.bos_token_id
        self.pad_id: int | None = pretrained.pad_token_id
        with_specials = self.fast.encode("", add_special_tokens=True).ids
        self.adds_bos = self.bos_id is not None and with_specials[:1] == [self.bos_id]
        self._byte_lengths = _byte_lengths(self.fast, self._vocabulary, self.vocab_size)
        self._normalizes = self.fast.normalizer is not None

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Every token with its id."""
        return self._vocabulary

    @property
    def offsets_in_bytes(self) -> bool:
        """Whether places of tokens are counted in UTF-8 bytes; else in characters."""
        return self._byte_lengths is not None

    # -- text ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands: nothing added, special tokens in the text recognised.

        Raises DataError for a word without a token, where the tokenizer has none for unknown words.
        """
        with naming_unknown_words(self.fast, (text,), self.path):
            if len(text) > LONG_TEXT:  # other threads wait for what is encoded alone, and not for a batch
                return list(self.fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            return list(self.fast.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> Encoded:
        """Returns ids and places of several texts.

        For a byte-level tokenizer the places follow from the length of each token, which is several times cheaper than
        having them tracked. For a text that it normalises to another, or with lengths that do not add up (a token that
        swallows the spaces around it), they are tracked like those of any other tokenizer.

        Raises DataError as `encode` does.
        """
        if self._byte_lengths is None:
            with naming_unknown_words(self.fast, texts, self.path):
                encodings = self.fast.encode_batch(texts, add_special_tokens=False)
            sizes = np.array([len(text) for text in texts], np.int64)
            counts = np.array([len(encoding) for encoding in encodings], np.int64)
            offsets = chain.from_iterable(encoding.offsets for encoding in encodings)
            places = np.fromiter(chain.from_iterable(offsets), np.int64)
            places = places.reshape(-1, 2) + np.repeat(np.cumsum(sizes) - sizes, counts)[:, None]
            return Encoded(_concatenate([encoding.ids for encoding in encodings]), *_monotonic(places), counts, sizes)
        flat, counts = self._encode_bytewise(texts)
        sizes = np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64)
        ends = np.cumsum(counts)
        lengths = self._byte_lengths[flat]
        reached = np.concatenate([[0], np.cumsum(lengths)])  # [T + 1] bytes of text before each token
        wrong = np.diff(reached[np.concatenate([[0], ends])]) != sizes
        if self._normalizes:
            kept = [text.isascii() or unicodedata.is_normalized("NFC", text) for text in texts]
            wrong |= ~np.array(kept, bool)
        if not wrong.any():
            return Encoded(flat, reached[:-1], reached[1:], counts, sizes)
        # Each text counts from its own base: the lengths of a wrong one would shift the places of all behind it.
        bases = np.cumsum(sizes) - sizes
        stops = reached[1:] + np.repeat(bases - reached[ends - counts], counts)
        places = np.stack([stops - lengths, stops], axis=1)
        for number in np.flatnonzero(wrong).tolist():
            part = slice(ends[number] - counts[number], ends[number])
            places[part] = self._byte_places(texts[number]) + bases[number]
        return Encoded(flat, *_monotonic(places), counts, sizes)

    def _encode_bytewise(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids end to end and how many each text has, of a byte-level tokenizer."""
        if self._encoder is None:
            encoded = [encoding.ids for encoding in self.fast.encode_batch_fast(texts, add_special_tokens=False)]
            return _concatenate(encoded), np.array([len(ids) for ids in encoded], np.int64)
        encoded_bytes = [self._encoder.encode(text) for text in texts]
        counts = np.array([len(ids) // 4 for ids in encoded_bytes], np.int64)
        return np.frombuffer(b"".join(encoded_bytes), np.int32), counts

    @cached_property
    def _encoder(self) -> ByteLevelEncoder | None:
        return byte_level_encoder(self.fast)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included and spaces as they are."""
        return str(self._pretrained.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of text that each token stands for on its own; a character may be spread over several tokens.

        Empty for an id that stands for no token.
        """
        known = self._added_tokens
        has_bytes = getattr(self.fast.model, "byte_fallback", False)
        texts = []
        for token in ids:
            written: str = known[token].content if token in known else self.fast.id_to_token(token) or ""
            if token in known:
                texts.append(written.encode())
            elif self._writes_bytes and _BYTES.keys() >= set(written):
                texts.append(bytes(_BYTES[character] for character in written))
            elif has_bytes and _BYTE_TOKEN.fullmatch(written):
                texts.append(bytes([int(written[3:5], 16)]))
            else:
                texts.append(written.replace("\u2581", " ").encode())
        return texts

    @cached_property
    def longest_token(self) -> int:
        """The characters of the longest token. A text has at least as many tokens as this goes into its length."""
        return max(map(len, self._vocabulary))

    @cached_property
    def _added_tokens(self) -> dict[int, Any]:
        # The library makes this table again at each call: 16 ms for 6,259 tokens.
        return dict(self.fast.get_added_tokens_decoder())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that a text cannot contain by its letters alone, such as `<|im_end|>`."""
        return frozenset(token for token, added in self._added_tokens.items() if added.special)

    @cached_property
    def added_texts(self) -> dict[int, str]:
        """The added tokens, special ones among them, in the order of their ids."""
        return {token: added.content for token, added in sorted(self._added_tokens.items())}

    @cached_property
    def _writes_bytes(self) -> bool:
        # Not `offsets_in_bytes`: a tokenizer that normalises its text (Qwen's) writes its vocabulary in bytes too.
        return "ByteLevel" in repr(self.fast.decoder)

    @cached_property
    def missing_bytes(self) -> int:
        """The number of bytes, of 256, that a byte-level vocabulary has no token for: text loses them without a
        trace.
        """
        if not self._writes_bytes or getattr(self.fast.model, "unk_token", None) is not None:
            return 0
        return len(_BYTES.keys() - self._vocabulary.keys())

    def _byte_places(self, text: str) -> np.ndarray:
        """[S, 2] int64: where each token of a text begins and ends, in bytes, as the tokenizer tracks it."""
        characters = np.array(self.fast.encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
        widths = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
        return np.concatenate([[0], np.cumsum(widths)])[characters]

    # -- conversations ------------------------------------------------------------------------------------------------

    @property
    def template_sources(self) -> Mapping[str, str]:
        """The text of each chat template by its name; `default` is that of ordinary conversations."""
        return self._templates

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template for ordinary conversations, which may be one that does not
        compile.
        """
        return "default" in self._templates

    def template(self, tools: bool = False) -> ChatTemplate:
        """The chat template, or the one for conversations with tools where the tokenizer has one of its own.

        Raises:
            DataError: there is none, or it does not compile.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._compiled:
            if name not in self._templates:
                raise DataError(
                    f"{self.path}: this tokenizer has no chat template, so conversations cannot be rendered. Name one "
                    f"in model.chat_template: {self._offered_templates()}. Or train on rows of plain text or "
                    "prompt/completion strings"
                )
            self._compiled[name] = self._compile(self._templates[name], self._template_path)
        return self._compiled[name]

    def _compile(self, source: str, name: str) -> ChatTemplate:
        specials, added = self._pretrained.special_tokens_map, (token.content for token in self._added_tokens.values())
        return ChatTemplate(source, specials, added, name, self._date, self._template_kwargs)

    def _offered_templates(self) -> str:
        """The templates that come with danlu, those first with which a token of this tokenizer ends an answer."""
        ending, others = list[str](), list[str]()
        for name in templates():
            source = template_path(name).read_text(encoding="utf-8")
            (ending if self._compile(source, name).terminators else others).append(name)
        offered = f"{', '.join(ending)} (one of its tokens ends an answer there)" if ending else ""
        rest = f"{', '.join(others)} (with tokens that it lacks)" if others else ""
        return f"{' or '.join(part for part in (offered, rest) if part)}, or a Jinja file"

    @cached_property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """Tokens at which generation stops: those that close an answer or its calls in the template, and eos."""
        closing = list[str]()
        # No template, or a broken one: plain text can be trained on and generated all the same.
        with suppress(DataError):
            closing += self.template().terminators
        with suppress(DataError):
            closing += self.template(tools=True).call_terminators
        ids = [self._vocabulary[token] for token in closing]
        return tuple(dict.fromkeys([*ids, *([] if self.eos_id is None else [self.eos_id])]))

    def require_eos(self) -> int:
        """The end-of-text token.

        Raises:
            DataError: there is none.
        """
        if self.eos_id is None:
            raise DataError(
                f"{self.path}: this tokenizer has no end-of-text token (eos_token), so a model could not learn to "
                "stop. Add eos_token to its tokenizer_config.json, or set data.append_eos: false"
            )
        return self.eos_id

    @property
    def special_texts(self) -> dict[str, Any]:
        """Its special tokens by their names in tokenizer_config.json: bos_token, eos_token, ..."""
        return dict(self._pretrained.special_tokens_map)

    def is_same(self, tokenizer: Tokenizer) -> bool:
        """Whether both tokenizers have the same entries and templates, and give the same ids of texts of all kinds."""

        def facts(of: Tokenizer) -> tuple[Any, ...]:
            added = sorted(token.content for token in of._added_tokens.values())
            texts = (_PROBE, " ".join(added), f"{_PROBE}{''.join(added)}{_PROBE}")
            ids = [of.fast.encode(text).ids if has_tokens(of.fast, text) else None for text in texts]
            return of._vocabulary, of._templates, of.special_ids, of.bos_id, of.eos_id, of.pad_id, ids

        return facts(self) == facts(tokenizer)


def load_tokenizer(
    path: str,
    chat_template: str | None = None,
    date: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a folder, a finished run, or a hub id.

    Args:
        chat_template: a Jinja file, or the name of one that comes with danlu, in the place of the tokenizer's own.
        date: the day (2026-11-22) that the template writes as today's; None for the time at which it is asked.
        template_kwargs: further variables of the template, such as enable_thinking.

    Raises:
        DataError: there is no tokenizer, it cannot be read, or the Jinja file is missing.
    """
    folder = fast_tokenizer_folder(path)
    template = read_chat_template(chat_template)
    # Imported here: a second and 70 MiB that a run on cached tokens does not need.
    from transformers import AutoTokenizer

    try:
        pretrained: Any = AutoTokenizer.from_pretrained(folder, config=_plain_config(folder), trust_remote_code=False)
    except Exception as error:  # whatever the library raises on a damaged folder
        said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        if not (folder / "tokenizer.json").is_file() and any(folder.glob("*.model")):
            # A SentencePiece model that is not BPE; transformers asks for another package.
            said += (
                ". To read a SentencePiece model, install the sentencepiece package, or put a tokenizer.json next to it"
            )
        said = broken_json(folder) or f"{type(error).__name__}: {said}"
        raise DataError(f"{path}: the tokenizer cannot be read: {said}") from error
    if not getattr(pretrained, "is_fast", False):
        kind = type(pretrained).__name__
        raise DataError(
            f"{path}: {kind} has no fast form; save it with a tokenizer.json (transformers: save_pretrained)"
        )
    templates = {"default": template} if template is not None else _own_templates(path, pretrained.chat_template)
    day = None if date is None else Date.fromisoformat(date)
    return Tokenizer(pretrained, path, templates, chat_template, day, template_kwargs)


def _own_templates(path: str, own: Any) -> dict[str, str]:
    """The chat templates of a tokenizer by name, as transformers has read them.

    Raises:
        DataError: they are no texts.
    """
    if not own:
        return {}
    templates = own if isinstance(own, dict) else {"default": own}
    for name, source in templates.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise DataError(
                f"{path}: the chat_template in tokenizer_config.json is no text but {source!a:.60}. Correct it, or "
                "name a Jinja file in model.chat_template"
            )
    return templates


def _plain_config(folder: Path) -> Any:
    """The model's config.json for AutoTokenizer, as an object of no model's class; None to have it read the usual way.

    The usual way imports the model's own class, and where there is torch that takes half of torch.distributed with it:
    1.3 s at the start of every process that answers. The class matters only where tokenizer_config.json does not name
    the tokenizer's.
    """
    from transformers import PreTrainedConfig

    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # missing, or broken: the library says so itself
        return None
    if not isinstance(named, dict) or not isinstance(values, dict) or "auto_map" in named | values:
        return None
    if not named.get("tokenizer_class"):
        return None
    # No more than what is asked for: a config without a class cannot read what only that class knows (rope_scaling).
    asked = {name: values[name] for name in ("model_type", "tokenizer_class", "model_name") if name in values}
    return PreTrainedConfig.from_dict(asked, name_or_path=str(folder))


def _concatenate(ids: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(ids), np.int32)


def _monotonic(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops [T] of places [T, 2], made to rise: a token that a normaliser put in can point back to 0."""
    return np.maximum.accumulate(places[:, 0]), np.maximum.accumulate(places[:, 1])


def _byte_lengths(fast: Any, vocabulary: Mapping[str, int], size: int) -> np.ndarray | None:
    """[size] int64: bytes of text each token stands for, or None if this is not a byte-level tokenizer.

    Byte-level vocabularies write every byte as one printable character, so a token's length is its number of
    characters; added tokens stand for themselves.
    """
    # Imported here, like transformers: a run on cached tokens does without.
    from tokenizers import normalizers

    pre, normalizer = repr(fast.pre_tokenizer), fast.normalizer
    is_plain = normalizer is None or isinstance(normalizer, normalizers.NFC)  # which leaves nearly every text alone
    if not is_plain or "ByteLevel" not in pre or "add_prefix_space=True" in pre:
        return None
    lengths = np.zeros(size, np.int64)
    lengths[list(vocabulary.values())] = [len(token) for token in vocabulary]
    for number, token in fast.get_added_tokens_decoder().items():
        lengths[number] = len(token.content.encode())
    return lengths


_BYTES = {character: byte for byte, character in PRINTABLE.items()}


@contextmanager
def naming_unknown_words(fast: Any, texts: Sequence[str], path: str) -> Iterator[None]:
    """Turns the library's error about a word without a token into a DataError that names the first such word.

    fast: the `tokenizers.Tokenizer` that encodes the texts.   path: that of the tokenizer, for the message.
    """
    try:
        yield
    except Exception as error:  # the library has no type of its own for it
        if "unk" not in str(error).lower():
            raise
        word = next((word for text in texts for word in text.split() if not has_tokens(fast, word)), "a character")
        raise DataError(
            f"{path}: this tokenizer has no token for {abbreviate(word)}, and none for unknown words (unk_token). "
            "Add one to its tokenizer.json, or take the text out"
        ) from error


def has_tokens(fast: Any, text: str) -> bool:
    """Whether a `tokenizers.Tokenizer` can encode a text."""
    try:
        fast.encode(text, add_special_tokens=False)
    except Exception:  # as above
        return False
    return True
