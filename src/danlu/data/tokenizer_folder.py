"""The folder of a tokenizer: found, checked, fingerprinted, and converted where it holds only a `tokenizer.model`.

No tokenizer library is loaded here but for a conversion.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from datetime import date as Date
from pathlib import Path
from typing import Any

from danlu.core.errors import DataError
from danlu.core.shipped_files import template_path
from danlu.core.small_files import check_regular, parse_json, read_small_text
from danlu.core.tokenizer_files import NAMED_TEMPLATES, TOKENIZER_FILES, VOCABULARY_FILES

MAX_FILE_BYTES = 512 << 20
"""The largest size of one file of a tokenizer: the largest known, a tokenizer.json of 256,000 words, has 33 MiB."""
MAX_TEMPLATE_BYTES = 4 << 20
READ_FILES = (*TOKENIZER_FILES, "config.json")  # which names the tokenizer's class in old folders
CONVERTED = "~/.cache/danlu/tokenizers"
"""The folder where tokenizers that have only a `tokenizer.model` are kept in a form that other tools can read."""


def resolve_tokenizer_folder(path: str) -> Path:
    """The local folder with a tokenizer's files: the one named, its `model` part for a finished run, or a hub snapshot.

    Raises:
        DataError: none of them is there.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _hub_snapshot(path)
    for candidate in (folder, folder / "model"):
        _check_files(candidate)
        if any((candidate / name).is_file() for name in VOCABULARY_FILES):
            return candidate
    raise DataError(
        f"{path}: no tokenizer in this folder (one of {', '.join(VOCABULARY_FILES)}). Name a folder or hub id that has "
        "one in model.tokenizer"
    )


def converted_folder(name: str) -> Path:
    """Returns the folder of the converted tokenizer of that name."""
    return Path(CONVERTED).expanduser() / name


def fast_tokenizer_folder(path: str) -> Path:
    """Returns `tokenizer_folder` with a tokenizer.json: a bare `tokenizer.model` is converted into a folder of the
    cache.

    Other tools read such a file to other ids, or not at all, so the files of a result come from there too.

    Raises:
        DataError: there is no tokenizer, or the file is damaged.
    """
    folder = resolve_tokenizer_folder(path)
    model = folder / "tokenizer.model"
    preferred = ("tokenizer.json", "vocab.json", "tekken.json")
    if not model.is_file() or any((folder / name).is_file() for name in preferred):
        return folder
    config = read_json_object(folder / "tokenizer_config.json")
    if "fast_tokenizer_files" in config:
        return folder
    target = converted_folder(tokenizer_fingerprint(str(folder)))
    if (target / "tokenizer.json").is_file():
        return target
    from danlu.data.tokenizer_conversion import convert

    converted = convert(model, adds_bos=config.get("add_bos_token") is not False)
    if converted is None:
        return folder
    return write_fast_tokenizer(folder, target, converted.fast, converted.specials)


def tokenizer_fingerprint(
    path: str,
    chat_template: str | None = None,
    date: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Returns a hash of a tokenizer's files, without loading any library for them: the key of its tokens in the cache.

    date: as `template_date` gives it.   template_kwargs: further variables of its chat template.

    Raises:
        DataError: there is no tokenizer, or the Jinja file is missing.
    """
    folder = resolve_tokenizer_folder(path)
    digest = hashlib.blake2b(repr((read_chat_template(chat_template), date)).encode(), digest_size=16)
    if template_kwargs:
        digest.update(json.dumps(template_kwargs, sort_keys=True).encode())
    for file in sorted({file for pattern in READ_FILES for file in folder.glob(pattern)}):
        if file.is_file():
            content = file.read_bytes()
            digest.update(f"\0{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def template_date(path: str, chat_template: str | None = None, date: str | None = None) -> str | None:
    """The day that a tokenizer's chat template writes: `date`, or today; None for a template that asks for none.

    The template's text is searched, no library is loaded for it.

    Raises:
        DataError: there is no tokenizer, or the Jinja file is missing.
    """
    template, folder = read_chat_template(chat_template), resolve_tokenizer_folder(path)
    files = ("tokenizer_config.json", "chat_template.jinja", f"{NAMED_TEMPLATES}/*.jinja") if template is None else ()
    texts = [template.encode()] if template is not None else []
    texts += [file.read_bytes() for pattern in files for file in folder.glob(pattern) if file.is_file()]
    if not any(b"strftime_now" in text for text in texts):
        return None
    return date or today().isoformat()


def today() -> Date:
    """The day that chat templates write where none is given; tests replace it."""
    return Date.today()


def _check_files(folder: Path) -> None:
    """Raises DataError for files that would block or fill memory, such as a pipe: they are nobody's tokenizer."""
    for file in (file for pattern in READ_FILES for file in folder.glob(pattern)):
        try:
            check_regular(file)
            if file.stat().st_size > MAX_FILE_BYTES:
                raise DataError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB, as no file of a tokenizer is")
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _hub_snapshot(path: str) -> Path:
    if Path(path).expanduser().is_file():
        raise DataError(f"{path}: a tokenizer is a folder; name the folder that this file is in")
    if path.count("/") > 1 or path.startswith((".", "/", "~")) or not path:
        raise DataError(f"{path}: no such folder")
    # Imported here: only hub ids need it.
    from huggingface_hub import snapshot_download

    from danlu.core.hub_access import hub_within_bound

    unreachable = None
    try:
        with hub_within_bound() as unreachable:
            return Path(snapshot_download(path, allow_patterns=list(READ_FILES)))
    except Exception as error:  # the hub client raises a dozen kinds, with none in common
        said = (str(error).strip().splitlines() or [""])[0]
        reason = unreachable or f"{type(error).__name__}: {said}"
        raise DataError(
            f"{path}: no such folder in {Path.cwd()}, and no tokenizer from the hub either: {reason}"
        ) from error


def read_chat_template(path: str | None) -> str | None:
    """The text of a Jinja file, or of a template that comes with danlu by its name; None for no path.

    Raises DataError if it cannot be read."""
    if path is None:
        return None
    try:
        return read_small_text(template_path(path), MAX_TEMPLATE_BYTES)
    except OSError as error:
        raise DataError(f"model.chat_template: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"model.chat_template: {path} cannot be read: {error}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; {} where it is missing or something else, which the library reports itself."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def write_fast_tokenizer(folder: Path, target: Path, fast: Any, specials: Mapping[str, str]) -> Path:
    """A tokenizer's folder with `fast` as its tokenizer.json, of no class of its own: at `target` in the cache.

    specials: bos_token and so on, where tokenizer_config.json names none.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent))
    except OSError:  # a home that cannot be written
        fresh = target = Path(tempfile.mkdtemp(prefix="danlu-tokenizer-"))
        atexit.register(shutil.rmtree, fresh, ignore_errors=True)
    copy_tokenizer_files(folder, fresh)
    config = read_json_object(folder / "tokenizer_config.json")
    own = {name: value for name, value in config.items() if name != "auto_map"}
    written = {**specials, **own, "tokenizer_class": "PreTrainedTokenizerFast"}
    (fresh / "tokenizer_config.json").write_text(json.dumps(written, ensure_ascii=False, indent=2), encoding="utf-8")
    fast.save(str(fresh / "tokenizer.json"))
    if fresh != target:
        try:
            fresh.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def copy_tokenizer_files(folder: Path, target: Path) -> None:
    """Copy the files that a tokenizer is read from, and its generation defaults."""
    for file in {file for pattern in (*TOKENIZER_FILES, "generation_config.json") for file in folder.glob(pattern)}:
        if file.is_file():
            copy = target / file.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)


def broken_json(folder: Path) -> str:
    """Names the file that is no JSON, and the place in it; the libraries name only the place."""
    for file in (file for pattern in READ_FILES for file in sorted(folder.glob(pattern)) if file.suffix == ".json"):
        try:
            values = parse_json(file.read_bytes())
        except json.JSONDecodeError as error:
            return f"{file.name}:{error.lineno}:{error.colno}: broken JSON: {error.msg}"
        except (OSError, ValueError) as error:
            return f"{file.name}: {error}"
        if not isinstance(values, dict):
            return f"{file.name}: expected a JSON object, found {type(values).__name__}"
    return ""
