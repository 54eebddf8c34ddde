"""Model folders that can write text, and the advice of their generation_config.json. No torch here.

torch takes a second to import. A mistyped folder or flag is reported without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.data.tokenizer_folder import resolve_tokenizer_folder
from danlu.inference.request import SamplingOptions
from danlu.models.hf_folder import GENERATION_CONFIG, read_config, read_json, resolve_folder

if TYPE_CHECKING:
    from danlu.data.tokenizer import Tokenizer
    from danlu.models.config import ModelConfig

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""Type of weights and activations; auto is the type the weights are stored in."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

DEVICES = ("auto", "cpu", "cuda")

# transformers' top_k where a generation_config.json that asks for sampling has none, or null.
TRANSFORMERS_TOP_K = 50

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def find_model(path_or_id: str) -> Path:
    """The model folder behind a folder, a run folder or a hub id: with a config that danlu can build, and a tokenizer.

    Raises ModelError if there is none; for a run that has not written its model yet it advises the user. Raises
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


def end_tokens(tokenizer: Tokenizer, config: ModelConfig, *folders: Path) -> frozenset[int]:
    """Tokens that end an answer, wherever one is drawn: the tokenizer's and its chat template's, those of config.json,
    and those of the generation_config.json of folders. Raises ModelError as `generation_stops` does."""
    configured = (token for folder in folders for token in generation_stops(folder))
    return frozenset((*tokenizer.end_of_turn_ids, *config.eos_token_ids, *configured))


def generation_stops(folder: Path) -> tuple[int, ...]:
    """The end-of-text tokens that generation_config.json names. Raises ModelError if they are no token ids."""
    eos = generation_config(folder).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(
            f"{folder / GENERATION_CONFIG}: eos_token_id: expected an integer or a list of them, found {eos!r}"
        )
    return tuple(ids)
