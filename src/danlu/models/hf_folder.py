"""Model folders in Hugging Face form: finding them, reading their config, and checking their tensors. No torch here.

That weights fit the config is checked by index and headers alone. It takes milliseconds, so it comes before rows are
tokenised, which may take hours.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from io import FileIO
from pathlib import Path, PurePath
from typing import Any

from danlu.core.errors import ModelError
from danlu.core.output_folder import shortened
from danlu.core.safetensors_format import FLOAT_DTYPES, TensorLocation, read_header
from danlu.core.small_files import check_regular_entries, parse_json, read_small_text
from danlu.core.tokenizer_files import TOKENIZER_FILES
from danlu.models.block_scaled import (
    CODED_METHODS,
    CodedLocation,
    FolderLayouts,
    ScaledLocation,
    StoredLocation,
    fp8_block,
    is_zero,
    quantization_method,
    with_codes,
    with_scaled,
)
from danlu.models.config import ModelConfig
from danlu.models.families import READ_AS
from danlu.models.hf_config import read_config_values
from danlu.models.hf_layout import (
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    IGNORED,
    SCORE,
    SCORE_BIAS,
    HFTensor,
    hf_name,
    hf_tensors,
    holds_stacked_experts,
    own_name,
)
from danlu.models.hf_rope import ignored_rope_settings
from danlu.models.multimodal import MULTIMODAL, TEXT_CONFIG, language_name

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENET = "lenet5"
"""The model type of a classifier of images (`models.lenet`), which is read by other means than a decoder."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_RUN_RESULT = "model"
_MTP = "num_nextn_predict_layers"
_SAMPLE_BYTES = 4096


def resolve_folder(path_or_id: str | Path) -> Path:
    """The model folder meant by a folder, a finished danlu run, or a hub id (from the local cache when offline).

    Raises ModelError if there is none, saying where it looked.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        for folder in (path, path / _RUN_RESULT):
            if folder.is_dir():
                _check_entries(folder)
            if (folder / CONFIG).is_file():
                return folder
        raise ModelError(
            f"{path}: neither a model folder ({CONFIG} is missing) nor a finished run (no {_RUN_RESULT}/{CONFIG}); "
            f"it holds {_listing(path)}"
        )
    if path.exists():
        raise ModelError(f"{path}: a model is a folder with {CONFIG} and safetensors weights, this is a file")
    name = str(path_or_id)
    if not _HUB_ID.fullmatch(name) or name in (".", ".."):
        raise ModelError(f"{path}: no such folder")
    return _hub_snapshot(name)


def find_config(path_or_id: str | Path) -> ModelConfig:
    """Returns the ModelConfig of a folder that `resolve_folder` finds; only config.json is fetched for a hub id.

    Raises ModelError.
    """
    return read_config(config_folder(path_or_id))


def config_folder(path_or_id: str | Path) -> Path:
    """The folder of `resolve_folder`; of a hub id nothing but config.json is fetched. Raises ModelError."""
    name = str(path_or_id)
    if Path(name).expanduser().exists() or not _HUB_ID.fullmatch(name):
        return resolve_folder(path_or_id)
    return _download(name, [CONFIG])


def _check_entries(folder: Path) -> None:
    """Raises ModelError for a pipe or a device among a model's files, which would be waited for or passed over."""
    try:
        check_regular_entries(folder)
    except OSError as error:
        raise ModelError(f"{error.filename}: cannot be read: {error.strerror}. Take it out of the folder") from None


def _hub_snapshot(name: str) -> Path:
    """A model of the hub in the local cache: its config, its tokenizer, and the weights that danlu reads, nothing else.

    Repositories also hold the same weights in other formats (`consolidated.safetensors`, `onnx/`), often larger than
    the model itself. Which shards belong to the model is known from its index, so they are asked for afterwards, of the
    same commit.
    """
    folder = _download(name, [CONFIG, GENERATION_CONFIG, INDEX, SINGLE_FILE, "danlu.json", *TOKENIZER_FILES])
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{name}: the hub snapshot at {folder} has no {CONFIG}; it holds {_listing(folder)}")
    if not (folder / SINGLE_FILE).is_file() and (folder / INDEX).is_file():
        # Escaped: the names are patterns to the hub's client.
        folder = _download(name, [glob.escape(shard) for shard in _shards(folder)], revision=folder.name)
    return folder


def _download(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    # Costs 0.3 s of start-up that local folders need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from danlu.core.hub_access import hub_within_bound

    unreachable = None
    try:
        with hub_within_bound() as unreachable:
            return Path(snapshot_download(name, allow_patterns=list(patterns), revision=revision))
    except LocalEntryNotFoundError:
        what = "no such folder, and this hub id is" if revision is None else "some of the model's weights are"
        reason = "" if unreachable is None else f" ({unreachable})"
        raise ModelError(
            f"{name}: {what} not in the local cache while the hub cannot be reached{reason}. "
            f"Check the path, or go online once (`hf download {name}`)"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(f"{name}: no such folder, and the hub does not give it: {error}") from None


def model_type(path_or_id: str | Path) -> str | None:
    """The `model_type` of a local model folder's, or finished run's, config; None where there is none."""
    path = Path(path_or_id).expanduser()
    file = next((parent / CONFIG for parent in (path, path / _RUN_RESULT) if (parent / CONFIG).is_file()), None)
    return None if file is None else read_json(file).get("model_type")


def read_config(folder: str | Path) -> ModelConfig:
    """The ModelConfig of a model folder. Raises ModelError, naming file and key."""
    file = Path(folder) / CONFIG
    values = read_json(file)
    config = read_config_values(values, where=str(file))
    if config.multimodal is not None and config.tie_word_embeddings and "tie_word_embeddings" not in values:
        # transformers then unties a head that is stored next to the embedding and differs from it.
        has_weights = any((Path(folder) / name).is_file() for name in (SINGLE_FILE, INDEX))
        names = {language_name(name) for name in read_tensors(Path(folder))} if has_weights else set()
        return replace(config, tie_word_embeddings="lm_head.weight" not in names)
    return config


def ignored_settings(folder: Path) -> list[str]:
    """Returns warnings about settings of a folder's config.json that change nothing here but that other
    programs apply.
    """
    values = read_json(folder / CONFIG)
    parts = [part for part in (values, values.get(TEXT_CONFIG)) if isinstance(part, dict)]
    remarks = [remark for part in parts for remark in ignored_rope_settings(part)]
    if values.get("model_type") == "mimo" and values.get(_MTP):
        remarks.append(
            f"{_MTP}: the layers that predict further tokens (MTP) are left out of the result, which is a "
            f"{READ_AS['mimo']} model"
        )
    return [f"{folder / CONFIG}: {remark}" for remark in remarks]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError with line and column when it is not one."""
    try:
        values = parse_json(read_small_text(file))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}:{error.lineno}:{error.colno}: broken JSON: {error.msg}") from None
    except IsADirectoryError:
        raise ModelError(f"{file}: is a folder. Name the JSON file in it, such as {file / 'config.json'}") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{file}: expected a JSON object, found {type(values).__name__}")
    return values


def read_tensors(folder: Path) -> dict[str, TensorLocation]:
    """Name -> location of every tensor in the folder's weights, one file or shards. Reads headers only.

    Raises ModelError for weights that are absent, truncated, or not as the index says.
    """
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder}: only pickled weights (pytorch_model*.bin), which can run any code when opened; danlu reads "
            'safetensors alone. If you trust the file, convert it once: python -c "from transformers import '
            f"AutoModelForCausalLM as A; A.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\""
        )
    raise ModelError(f"{folder}: no weights: neither {SINGLE_FILE} nor {INDEX}; it holds {_listing(folder)}")


def _read_shards(folder: Path) -> dict[str, TensorLocation]:
    weight_map = _weight_map(folder)
    shards = _shards(folder)
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise ModelError(f"{folder}: {INDEX} names {len(shards)} shards, absent: {', '.join(absent[:10])}")
    stored: dict[str, TensorLocation] = {}
    for shard in shards:
        tensors = read_header(folder / shard).items()
        stored |= {name: location for name, location in tensors if weight_map.get(name, shard) == shard}
    lost = [name for name, shard in weight_map.items() if name not in stored or stored[name].file.name != shard]
    if lost:
        raise ModelError(
            f"{folder}: {INDEX} promises tensors that their shard does not hold: "
            + ", ".join(f"{name} ({weight_map[name]})" for name in lost[:10])
        )
    return stored


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file, as the folder's index has it. Raises ModelError where it is something else."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{folder / INDEX}: weight_map must say for each tensor which file holds it")
    for name, shard in weight_map.items():
        if shard != PurePath(shard).name or "\\" in shard or shard in ("", ".."):
            raise ModelError(
                f"{folder / INDEX}: weight_map has {name} in {shard!r}, which is no file name of this folder. "
                "danlu reads nothing outside of it"
            )
    return weight_map


def _shards(folder: Path) -> list[str]:
    """The files that the folder's index names."""
    return sorted(set(_weight_map(folder).values()))


def fingerprint(folder: Path) -> str:
    """A hash that tells one base from another: of name, dtype and shape of each tensor, its first and last 4 KiB."""
    return tensors_fingerprint(read_tensors(folder))


def tensors_fingerprint(tensors: Mapping[str, TensorLocation]) -> str:
    """`fingerprint` of tensors by name, whatever files they are in."""
    digest = blake2b(digest_size=16)
    for name, location in sorted(tensors.items()):
        digest.update(f"{name} {location.dtype} {location.shape}".encode())
        with FileIO(location.file) as handle:
            for start in (location.offset, max(location.offset, location.offset + location.bytes - _SAMPLE_BYTES)):
                handle.seek(start)
                digest.update(handle.read(min(_SAMPLE_BYTES, location.bytes)) or b"")
    return digest.hexdigest()


def check_vocabulary(config: ModelConfig, tokenizer_size: int) -> None:
    """Raises ModelError if the tokenizer can make ids that the model has no embedding for."""
    if tokenizer_size > config.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer_size} tokens, the model embeds only {config.vocab_size}: ids from "
            f"{config.vocab_size} on would have no embedding. Use the model's own tokenizer"
        )


def _listing(folder: Path) -> str:
    return shortened(sorted(entry.name for entry in folder.iterdir()), 8) or "nothing"


FOUR_BIT = "U8"  # dtype of a weight in 4 bits: its codes, two a byte; its constants are `<name>.absmax`, ...
_MAX_SHOWN = 10


def own_tensors(folder: Path, config: ModelConfig) -> dict[str, TensorLocation]:
    """Returns the locations of the tensors that danlu trains, by name among `hf_tensors`. Raises ModelError as
    `read_tensors`.
    """
    return {own: location for own, (_, location) in _own_tensors(folder, config).items()}


def _own_tensors(folder: Path, config: ModelConfig) -> dict[str, tuple[str, TensorLocation]]:
    """The names in the folder and locations of `own_tensors`."""
    named = ((own_name(name, config), name, location) for name, location in read_tensors(folder).items())
    return {own: (name, location) for own, name, location in named if own is not None}


def stored_tensors(
    folder: Path, config: ModelConfig, layouts: FolderLayouts | None
) -> tuple[dict[str, StoredLocation], list[str]]:
    """The tensors that danlu trains by name among `hf_tensors`, those that make one weight together joined, and
    messages about those that do not fit together.

    layouts: how the folder stores its quantized weights, where its config.json names one of `CODED_METHODS`.
    Raises ModelError as `read_tensors`, and as `fp8_block`.
    """
    values = _config_values(folder)
    own = _own_tensors(folder, config)
    locations = {name: location for name, (_, location) in own.items()}
    scaled, problems = with_scaled(locations, fp8_block(values, str(folder / CONFIG)))
    if layouts is None:
        return {**scaled}, problems
    stored, apart = with_codes(scaled, layouts, lambda name: own[name][0])
    return stored, problems + apart


def _config_values(folder: Path) -> dict[str, Any]:
    """The values of a folder's config.json; none where a folder has weights alone."""
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def untouched_tensors(folder: Path, config: ModelConfig) -> dict[str, TensorLocation]:
    """The other tensors of a folder, by their names there: parts of a multimodal model, layers that predict further."""
    stored = read_tensors(folder)
    return {name: location for name, location in stored.items() if own_name(name, config) is None}


def expected_tensors(config: ModelConfig, stored: Mapping[str, StoredLocation]) -> list[HFTensor]:
    """The tensors that a folder is to hold, as they lie in it: experts one by one or stacked, as it has them; of
    MXFP4's numbers the inputs, which share scales, last.

    stored: the folder's tensors by name among `hf_tensors`, with their scales.
    """
    tensors = hf_tensors(config, stacked=holds_stacked_experts(stored, config))
    either_way = config.multimodal is not None and MULTIMODAL[config.multimodal].transposed_experts
    return [as_stored(tensor, stored.get(tensor.name), either_way=either_way) for tensor in tensors]


def as_stored(tensor: HFTensor, location: StoredLocation | None, *, either_way: bool = False) -> HFTensor:
    """A tensor as it lies in a folder: MXFP4's numbers have the inputs last, which share scales.

    either_way: whether folders have the matrices of experts either way round, as their shapes tell.
    """
    if isinstance(location, ScaledLocation) and location.is_mxfp4:
        return tensor.transposed
    turned = either_way and location is not None and len(tensor.shape) == 3 and location.shape != tensor.shape
    return tensor.transposed if turned else tensor


def check_headers(
    folder: Path, config: ModelConfig, *, quantized: bool, layouts: FolderLayouts | None = None
) -> dict[str, StoredLocation]:
    """Checks that index, headers and file sizes fit the config, and returns the location of each tensor that danlu
    trains, with its scales if it has any.

    quantized: weights may be in bitsandbytes' 4 bits. layouts: as `stored_tensors` has it. Raises one ModelError with
    all problems of the tensors: missing, unknown, of another shape or dtype; and those of `hf_folder.read_tensors`.
    """
    stored, problems = stored_tensors(folder, config, layouts)
    expected = expected_tensors(config, stored)
    embedding, head = hf_name(EMBEDDING, config), hf_name(HEAD, config)
    four_bit = {tensor.name for tensor in expected if tensor.name in stored and stored[tensor.name].dtype == FOUR_BIT}
    if layouts is not None:
        four_bit = set()  # bytes of another method are none of this one
    if four_bit and not quantized:
        raise ModelError(f"{folder}: its weights are stored in 4 bits; here the original weights are needed")
    expected = [tensor for tensor in expected if tensor.name not in four_bit]
    names = {tensor.name for tensor in expected}
    torn = {problem.partition(" in ")[0] for problem in problems}
    for tensor in expected:
        location = stored.get(tensor.name)
        if location is None and tensor.name.removesuffix(".weight") in torn:
            continue
        if location is None and config.tie_word_embeddings and tensor.name == embedding:
            location = stored.get(head)  # some tools keep a tied matrix under its other name
        if location is None:
            problems.append(f"{tensor.name}: missing; expected shape {list(tensor.shape)}")
        elif location.shape != tensor.shape:
            shapes = f"expected shape {list(tensor.shape)}, found {list(location.shape)}"
            problems.append(f"{tensor.name} in {location.file.name}: {shapes}")
        elif location.dtype not in FLOAT_DTYPES:
            problems.append(f"{tensor.name} in {location.file.name}: expected floating point, found {location.dtype}")
    may_hold = names | ({head} if config.tie_word_embeddings else set())
    if config.task != "causal-lm":  # its own head is read by `models.score_head`
        may_hold |= {head, hf_name(HEAD_BIAS, config), SCORE, SCORE_BIAS}
    for name, location in stored.items():
        is_constant = any(name == weight or name.startswith(f"{weight}.") for weight in four_bit)
        is_constant = is_constant or _is_zero_bias(name, location, stored)
        if name not in may_hold and not is_constant and not IGNORED.search(name):
            problems.append(f"{name} in {location.file.name}: not a tensor of this {config.family} model")
    if not problems:
        return stored
    if layouts is None and (method := quantization_method(_config_values(folder))) in CODED_METHODS:
        raise ModelError(f"{folder}: its weights are stored as {method}; here the original weights are needed")
    if len(problems) == 1 and problems[0].startswith(f"{head}: missing"):
        problems.append('if its head is the embedding, set "tie_word_embeddings": true in config.json')
    more = [f"... and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
    raise ModelError("\n  ".join([f"{folder}: the weights do not fit config.json:", *problems[:_MAX_SHOWN], *more]))


def _is_zero_bias(name: str, location: StoredLocation, stored: Mapping[str, StoredLocation]) -> bool:
    """Whether a tensor is the bias of a weight with codes that adds nothing: tools for GPTQ gave every layer one."""
    weight = stored.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
    return isinstance(weight, CodedLocation) and isinstance(location, TensorLocation) and is_zero(location)
