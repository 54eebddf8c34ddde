"""What vLLM takes from a folder that it serves, by its own rules, read without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def stop_ids(folder: Path) -> set[int]:
    """Tokens at which vLLM ends an answer with a folder as `--model` (or its `--generation-config`, of an adapter).

    `SamplingParams.update_from_generation_config` (vllm/sampling_params.py): the tokenizer's eos_token, and
    eos_token_id of generation_config.json, an id or a list of ids; without such a file, that of config.json.
    """
    generation = _values(folder / "generation_config.json") or _values(folder / "config.json")
    given = generation.get("eos_token_id")
    ids = {given} if isinstance(given, int) else set(given or ())
    eos = _values(folder / "tokenizer_config.json").get("eos_token")
    text = eos["content"] if isinstance(eos, dict) else eos
    return ids | {token for token, own in added_tokens(folder).items() if own == text}


def added_tokens(folder: Path) -> dict[int, str]:
    """The tokenizer's added tokens, by id."""
    return {each["id"]: each["content"] for each in _values(folder / "tokenizer.json")["added_tokens"]}


def check_opens(folder: Path, base: Path | None = None) -> None:
    """Raises AssertionError unless vLLM's tokenizer and its embedding fit each other, and it can stop at each token.

    base: of an adapter, whose embedding counts.
    """
    tokenizer = _values(folder / "tokenizer.json")
    largest = max([*tokenizer["model"]["vocab"].values(), *added_tokens(folder)])
    size = _values((base or folder) / "config.json")["vocab_size"]
    assert largest < size, f"{folder}: the tokenizer makes id {largest}, and the model embeds {size} tokens"
    assert stop_ids(folder) <= set(range(size)), f"{folder}: ends answers at tokens that the model does not have"


def _values(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
