"""The files of a result from which transformers reads the tokenizer that was trained with, and its padding token."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from danlu.core.errors import DataError
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizer_folder import (
    converted_folder,
    copy_tokenizer_files,
    fast_tokenizer_folder,
    read_json_object,
    tokenizer_fingerprint,
    write_fast_tokenizer,
)
from danlu.data.worker_pool import WorkerPool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedTokenizer:
    """The folder from which a tokenizer's files are copied into a result.

    Attributes:
        faithful: whether transformers reads the same tokenizer from them there.
    """

    folder: Path
    faithful: bool = True


@dataclass(frozen=True)
class ExportJob:
    """The job (`danlu.data.worker_pool.Job`) of finding out: it loads tokenizers, which a training process need not."""

    def start(self) -> Callable[[tuple[Path, str | None]], ExportedTokenizer]:
        return _export


def exported_tokenizer(path: str, model_type: str | None) -> ExportedTokenizer:
    """Returns the tokenizer's files for a result folder with `model_type` in its config.json; None: it has no such key.

    transformers chooses the class of a tokenizer by that type too, and some classes make another tokenizer of the same
    files. Where that happens the files are rewritten, so that any class reads the tokenizer that was trained with.

    Raises:
        DataError: there is no tokenizer, or it cannot be read.
    """
    folder = fast_tokenizer_folder(path)
    if not _depends_on_type(folder, model_type):
        return ExportedTokenizer(folder)
    with WorkerPool(ExportJob(), 1) as workers:
        return next(iter(workers.map([(folder, model_type)])))


def end_of_turn_ids(path: str, chat_template: str | None = None) -> tuple[int, ...]:
    """The tokens that end an answer, for the configs of a result: those by which the chat template closes turns, and
    the end-of-text token.

    chat_template: as `load_tokenizer` has it. Of a tokenizer that cannot be read there are none, with a warning: its
    files are copied all the same, and nothing that has been trained may be lost for it.
    """
    try:
        return load_tokenizer(path, chat_template).end_of_turn_ids
    except DataError as error:
        log.warning("which tokens end an answer is not known, and the result names the base's alone: %s", error)
        return ()


def _depends_on_type(folder: Path, model_type: str | None) -> bool:
    """Whether transformers might choose another class with a config.json of that type than with the tokenizer's own."""
    if read_json_object(folder / "config.json").get("model_type") == model_type:
        return False
    named = read_json_object(folder / "tokenizer_config.json").get("tokenizer_class")
    has_json = (folder / "tokenizer.json").is_file()
    return not (has_json and named in ("PreTrainedTokenizerFast", "TokenizersBackend")) or model_type == "qwen2"


def _export(task: tuple[Path, str | None]) -> ExportedTokenizer:
    folder, model_type = task
    trained = load_tokenizer(str(folder))
    if _reads_same_tokenizer(trained, folder, model_type):
        return ExportedTokenizer(folder)
    target = converted_folder(f"{tokenizer_fingerprint(str(folder))}-{model_type}")
    specials = {name: text for name, text in trained.special_texts.items() if isinstance(text, str)}
    if not (target / "tokenizer.json").is_file():
        target = write_fast_tokenizer(folder, target, trained.fast, specials)
    if _reads_same_tokenizer(trained, target, model_type):
        return ExportedTokenizer(target)
    return ExportedTokenizer(folder, faithful=False)


def _reads_same_tokenizer(trained: Tokenizer, folder: Path, model_type: str | None) -> bool:
    """Whether transformers reads the tokenizer from these files with a config.json of that type."""
    with tempfile.TemporaryDirectory(prefix="danlu-tokenizer-") as name:
        copy_tokenizer_files(folder, Path(name))
        if model_type is not None:
            (Path(name) / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        try:
            return load_tokenizer(name).is_same(trained)
        except DataError:
            return False


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
