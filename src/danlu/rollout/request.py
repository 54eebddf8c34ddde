"""Sampling options and model folders, checked before a weight is read. No torch here.

torch takes a second to import. A mistyped folder or flag is reported without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from danlu.data.tokenizer_folder import resolve_tokenizer_folder
from danlu.errors import DataError, ModelError, RecipeError
from danlu.models.hf_folder import GENERATION_CONFIG, read_config, read_json, resolve_folder

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""Type of weights and activations; auto is the type the weights are stored in."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

DEVICES = ("auto", "cpu", "cuda")

# transformers' top_k where a generation_config.json that asks for sampling has none, or null.
TRANSFORMERS_TOP_K = 50

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen. Raises RecipeError, with every problem at once, for values that make no sense."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token and ignores the other options except repetition_penalty."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this probability (arXiv:1904.09751); 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest one (arXiv:2407.01082); 0 keeps all."""
    repetition_penalty: float = 1.0
    """Makes tokens of the prompt and the answer so far less likely if above 1 (CTRL, arXiv:1909.05858, sec. 4.1)."""
    seed: int = 0
    """Fixes every draw, together with the sample's index and the token's position."""

    def __post_init__(self) -> None:
        checks = (
            (0 <= self.temperature < math.inf, "temperature", "0 (greedy) or a positive number"),
            (0 < self.top_p <= 1, "top_p", "above 0 and at most 1 (1 keeps every token)"),
            (self.top_k >= 0, "top_k", "0 (keep every token) or more"),
            (0 <= self.min_p <= 1, "min_p", "between 0 (keep every token) and 1"),
            (0 < self.repetition_penalty < math.inf, "repetition_penalty", "positive (1 changes nothing)"),
            (0 <= self.seed < 2**63, "seed", "at least 0 and below 2^63"),
        )
        wrong = [(name, rule) for in_range, name, rule in checks if not in_range]
        if wrong:
            raise RecipeError(
                [f"{name}: {getattr(self, name)} is out of range; it must be {rule}" for name, rule in wrong]
            )

    @property
    def truncates(self) -> bool:
        """Whether some tokens are never drawn; log-probabilities are of the full vocabulary all the same."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


def find_model(path_or_id: str) -> Path:
    """The model folder behind a folder, a run folder or a hub id: with a config that danlu can build, and a tokenizer.

    Raises ModelError if there is none; for a run that has not written its model yet it says what to do. Raises
    DataError if it has no tokenizer.
    """
    path = Path(path_or_id).expanduser()
    if (path / "recipe.yaml").is_file() and not (path / "model" / "config.json").is_file():
        raise ModelError(
            f"{path}: this run has not written its model yet (no model/ folder). Finish it with "
            f"`danlu train {path / 'recipe.yaml'}`, which goes on from its last checkpoint, or write that checkpoint "
            f"as a model with `danlu checkpoint export {path} FOLDER`"
        )
    folder = resolve_folder(path_or_id)
    read_config(folder)
    try:
        resolve_tokenizer_folder(str(folder))
    except DataError:
        raise DataError(
            f"{folder}: this model folder has no tokenizer, so no text can be given to the model. Copy its tokenizer's "
            "files (tokenizer.json, tokenizer_config.json) into the folder"
        ) from None
    return folder


def generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json of a model folder; empty where there is none. Raises ModelError for broken JSON."""
    file = folder / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """The sampling options of generation_config.json; none where it does not ask for sampling.

    An option that it leaves out is as in transformers, for which the file is written: off, except top_k, which is 50.
    Raises ModelError for values that are no sampling options.
    """
    values = generation_config(folder)
    if not values.get("do_sample"):
        return {}
    advised = {name: values[name] for name in SAMPLING_FIELDS if values.get(name) is not None}
    for name, value in advised.items():
        if not isinstance(value, int if name == "top_k" else int | float) or isinstance(value, bool):
            expected = "an integer" if name == "top_k" else "a number"
            raise ModelError(f"{folder / GENERATION_CONFIG}: {name}: expected {expected}, found {value!r}")
    advised.setdefault("top_k", TRANSFORMERS_TOP_K)
    try:
        SamplingOptions(**advised)
    except RecipeError as error:
        raise ModelError(f"{folder / GENERATION_CONFIG}: {'; '.join(error.problems)}") from None
    return advised


def generation_stops(folder: Path) -> tuple[int, ...]:
    """The end-of-text tokens that generation_config.json names. Raises ModelError if they are no token ids."""
    eos = generation_config(folder).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(
            f"{folder / GENERATION_CONFIG}: eos_token_id: expected an integer or a list of them, found {eos!r}"
        )
    return tuple(ids)
