"""Fingerprints of everything that a run reads: rows, tokenizer, template, models, adapters, and a user's code.

Every process opens its inputs for itself, and a resumed run opens them again. So the processes compare fingerprints
before anything is read (`same_on_all_ranks`), and a checkpoint keeps them (`check_resumed`). The inputs of a run are
listed in `recipe_inputs`, and nowhere else.

Large files are hashed by a sample: names, dtypes, shapes and sizes, and the start, the middle and the end of each
tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from danlu.assembly.recipe_adapters import named_stack, tokenizer_path
from danlu.core.errors import CheckpointError, DanluError, DataError, ModelError, RecipeError
from danlu.core.safetensors_format import TensorLocation, read_header
from danlu.core.shipped_files import template_path
from danlu.data import sources
from danlu.data.tokenizer_folder import READ_FILES, resolve_tokenizer_folder
from danlu.models.hf_folder import CONFIG, read_json, read_tensors, resolve_folder
from danlu.parallel.comm import Group
from danlu.recipe import Recipe, sections
from danlu.recipe.sections.data import Columns
from danlu.recipe.value import value_section
from danlu.stages.protocols import Stage, frozen_models
from danlu.training.checkpoints.loading import read_state

SAMPLE_BYTES = 64 << 10
"""The bytes hashed of the start, the middle and the end of a tensor, or of a file that is larger than all three."""
MOST_BYTES = 512 << 20
"""The bytes hashed of one model or stream: with very many tensors the samples shrink, to `_LEAST_BYTES` at least."""
_LEAST_BYTES = 4 << 10
_THREADS = 16  # of which most wait for a disk
_BATCH = 64  # regions that a thread is given at a time
_GENERATION_CONFIG = "generation_config.json"
_OF_NO_EFFECT = frozenset({"_name_or_path", "transformers_version", "use_cache"})
"""Keys of config.json that no model is built from."""
_HASH = re.compile("[0-9a-f]{32}")
_MOST_SHOWN = 5
_MOST_CHARACTERS = 80


class Region(NamedTuple):
    """Bytes of a file, and a description of them."""

    file: Path
    offset: int
    bytes: int
    described: str = ""


@dataclass(frozen=True)
class Input:
    """One thing that a run reads. `parts` are hashes, or JSON values, by name: of files, or of keys of a config."""

    key: str
    """The key of the recipe, and which file of it: ``model.path``, ``data.train.0``."""
    path: Path | str
    parts: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    """Two inputs are compared by it; by default it is that of the parts."""
    kind: type[DanluError] = DataError
    read_again: bool = True
    """Whether a resumed run reads it: weights that a checkpoint has are not read again."""
    problem: str = ""
    """The reason why it cannot be read here; its reader raises the error, unless other processes can read it."""

    def compared(self) -> str:
        return self.problem or self.digest or _hashed(sorted(self.parts.items()))

    def state(self) -> dict[str, Any]:
        """Returns the JSON that a checkpoint keeps."""
        return {"digest": self.compared(), "parts": dict(self.parts)}


def recipe_inputs(recipe: Recipe, stage: Stage, *, resumed: bool) -> list[Input]:
    """The inputs of a run of the recipe, with their fingerprints; for one that is resumed, those that it reads
    again."""
    inputs = [each for key, read in _readers(recipe, stage) for each in _attempt(key, read)]
    return [each for each in inputs if each.read_again or not resumed]


def same_on_all_ranks(world: Group, read: Callable[[], list[Input]], barrier: Callable[[], None]) -> list[Input]:
    """The inputs that `read` finds, once all processes have found the same.

    The first reads before the others, which find its hashes of rows where they share a folder.
    Raises on every process a DanluError that names the ranks, the file, and its differences.
    """
    own = world.from_first(read, again=True, barrier=barrier)
    if world.alone:
        return own
    everyones = world.all_gather_objects(own)
    problems: dict[type[DanluError], list[str]] = {}
    for key in dict.fromkeys(each.key for inputs in everyones for each in inputs):
        by_rank = [next((each for each in inputs if each.key == key), None) for inputs in everyones]
        first = by_rank[0]
        for compared in dict.fromkeys("" if each is None else each.compared() for each in by_rank):
            ranks = [rank for rank, each in enumerate(by_rank) if (each.compared() if each else "") == compared]
            if 0 not in ranks:
                other = by_rank[ranks[0]]
                kind = (other or first or own[0]).kind
                problems.setdefault(kind, []).append(_difference_of_ranks(key, first, other, ranks))
    if problems:
        kind, lines = next(iter(problems.items()))
        text = "the processes have not opened the same files:\n  " + "\n  ".join(lines)
        raise kind(
            f"{text}\nGive each process what rank 0 has: copy the files again, name the same revision, or use a disk "
            "that all machines share"
        )
    return own


def check_resumed(checkpoint: Path | None, inputs: Sequence[Input]) -> dict[str, Any]:
    """Returns the state of the inputs for the next checkpoint, once they are those that the checkpoint was made with.

    checkpoint: None for a run that starts afresh. One that an earlier danlu wrote does not record its inputs.
    Raises CheckpointError with advice that names each file that has changed.
    """
    saved = {} if checkpoint is None else read_state(checkpoint).get("inputs", {})
    lines = []
    for each in inputs:
        before = saved.get(each.key)
        if before is None or each.problem or before["digest"] == each.compared():
            continue
        changes = _changes(before["parts"], each.parts)
        lines.append(f"{each.key}: {each.path}{f': {changes}' if changes else ''}")
    if lines:
        raise CheckpointError(
            f"{checkpoint}: the run read other files than are there now (there -> here):\n  "
            + "\n  ".join(lines)
            + "\nPut back what was there; or, to train with what is there now, start again in another `output`."
        )
    return {**saved, **{each.key: each.state() for each in inputs if not each.problem}}


def sampled_digests(regions: Mapping[str, Region]) -> dict[str, str]:
    """A hash of each region by name: of its size, its description, and the bytes of its start, middle and end."""
    size = min(SAMPLE_BYTES, max(_LEAST_BYTES, MOST_BYTES // (3 * max(1, len(regions)))))

    def hash_batch(batch: Sequence[tuple[str, Region]]) -> list[tuple[str, str]]:
        hashed, last, handle = [], None, None
        try:
            for name, region in batch:
                if region.file != last:
                    if handle is not None:
                        handle.close()
                    handle, last = region.file.open("rb", buffering=0), region.file
                assert handle is not None, "it was opened for this region or the one before"
                digest = blake2b(f"{region.described} {region.bytes}".encode(), digest_size=16)
                for start, count in _samples(region, size):
                    handle.seek(start)
                    digest.update(handle.read(count) or b"")
                hashed.append((name, digest.hexdigest()))
        finally:
            if handle is not None:
                handle.close()
        return hashed

    ordered = sorted(regions.items(), key=lambda item: (item[1].file, item[1].offset))
    with ThreadPoolExecutor(_THREADS) as threads:
        batches = [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]
        return dict(entry for part in threads.map(hash_batch, batches) for entry in part)


def _samples(region: Region, size: int) -> Iterator[tuple[int, int]]:
    """Yields (offset, bytes) of a region's samples: the whole of one that is no larger than three samples."""
    if region.bytes <= 3 * size:
        yield region.offset, region.bytes
        return
    for start in (0, (region.bytes - size) // 2, region.bytes - size):
        yield region.offset + start, size


# -- what a recipe names -----------------------------------------------------------------------------------------------

Read = Callable[[], Iterable[Input]]


def _readers(recipe: Recipe, stage: Stage) -> Iterator[tuple[str, Read]]:
    """Yields (key, function that reads) of each input; a function raises the errors of the input's user."""
    is_text = recipe.stage != "classify"
    yield from _row_readers(recipe)
    if is_text:
        # Rows that are stored are known by their tokens, whatever made them; others are tokenised while training.
        renders = recipe.data.streaming or recipe.stage == "rl" or recipe.evaluation.samples is not None
        yield "tokenizer", lambda: [_tokenizer(recipe, renders)]
        if (template := recipe.model.chat_template) is not None:
            file = str(template_path(template))
            yield "model.chat_template", lambda: [_file("model.chat_template", file, read_again=renders)]
    yield from _model_readers("model", recipe.model, weights_again=recipe.adapter is not None)
    if isinstance(recipe.model.config, str):
        config = recipe.model.config
        yield "model.config", lambda: [_config("model.config", Path(config).expanduser())]
    columns = stage.columns(recipe) if is_text else ()
    frozen = frozen_models(stage.models(recipe)) if is_text else {}
    for spec in (*frozen.values(), *(column.model for column in columns if column.model is not None)):
        yield from _model_readers(spec.key, spec.section)
    if recipe.value is not None and (path := value_section(recipe).model) is not None:
        yield "value.model", lambda: _model_or_adapter("value.model", path, read_again=False)
    draft = None if recipe.rollout is None else recipe.rollout.draft
    if isinstance(draft, sections.DraftModel):
        yield "rollout.draft", _bound(_model_or_adapter, "rollout.draft", draft.model, False)
    for number, reward in enumerate(recipe.rewards or ()):
        key = f"rewards.{number}"
        if isinstance(reward, sections.ModelReward):
            yield key, _bound(_model_or_adapter, key, reward.path)
        elif isinstance(reward, sections.FunctionReward):
            yield key, _bound(_files, key, reward.file)
    environment_files = {} if recipe.environment is None else recipe.environment.files
    for number, file in enumerate(dict.fromkeys(environment_files.values())):
        key = f"environment.{number}"
        yield key, _bound(_files, key, file)


def _row_readers(recipe: Recipe) -> Iterator[tuple[str, Read]]:
    data, memory = recipe.data, Path(recipe.data.cache).expanduser() / "files"
    sides = {"train": data.train, "eval": data.eval if isinstance(data.eval, list) else []}
    if recipe.stage == "classify":
        for side, listed in sides.items():
            for number, source in enumerate(listed):
                key = f"data.{side}.{number}"
                yield key, _bound(_images, key, source, side == "eval")
        return
    for side, listed in sides.items():
        # Of training rows that are stored, a checkpoint knows the tokens: see `PackedDataset.restore`.
        sampled = side == "train" and data.streaming
        for number, source in enumerate(listed):
            key = f"data.{side}.{number}"
            yield key, _bound(_rows, key, source, data.columns, None if sampled else memory, sampled or side == "eval")


def _model_readers(key: str, model: sections.Model, *, weights_again: bool = True) -> Iterator[tuple[str, Read]]:
    if model.path is not None:
        yield f"{key}.path", _bound(_model, f"{key}.path", model.path, weights_again)
    if model.adapters:
        yield f"{key}.adapters", _bound(_adapters, f"{key}.adapters", model.adapters, weights_again)


def _bound(read: Callable[..., Iterable[Input]], *arguments: Any) -> Read:
    return lambda: read(*arguments)


def _attempt(key: str, read: Read) -> list[Input]:
    """The inputs, or one that says why they cannot be read: whoever uses them says it best, unless others can."""
    try:
        return list(read())
    except (DanluError, OSError) as error:
        kind = type(error) if isinstance(error, DanluError) else DataError
        return [Input(key, "", kind=kind, problem=str(error))]


# -- reading one -------------------------------------------------------------------------------------------------------


def _rows(
    key: str, source: sections.Source, columns: Columns | None, memory: Path | None, read_again: bool
) -> list[Input]:
    """Rows by the bytes of their files, decompressed, and by the columns that are named; of a stream (no memory of
    hashes) by samples of the bytes."""
    files = sources.source_files(source)
    if memory is not None or files is None:
        parts = sources.file_digests(source, memory)
    else:
        parts = sampled_digests({name: Region(file, 0, file.stat().st_size) for name, file in files.items()})
    if mappings := sources.column_mappings(source, columns):
        parts = {**parts, "columns": json.dumps([mapping.key() for mapping in mappings])}
    return [Input(key, source.path, parts, read_again=read_again)]


def _images(key: str, source: sections.Source, read_again: bool) -> list[Input]:
    from danlu.data.images import image_files

    parts = {file.name: _file_hash(file) for file in image_files(source)}
    return [Input(key, source.path, parts, read_again=read_again)]


def _tokenizer(recipe: Recipe, read_again: bool) -> Input:
    key = "model.path" if recipe.model.tokenizer is None else "model.tokenizer"
    folder = resolve_tokenizer_folder(tokenizer_path(recipe.model))
    # config.json only names the tokenizer's class in old folders; it is compared as the model's.
    named = sorted({file for pattern in READ_FILES for file in folder.glob(pattern) if file.name != CONFIG})
    parts = {str(file.relative_to(folder)): _file_hash(file) for file in named if file.is_file()}
    return Input(f"{key} (tokenizer)", folder, parts, read_again=read_again)


def _model(key: str, path: str, weights_again: bool = True) -> list[Input]:
    """A model's folder: its config, the tokens that end its answers, and its weights."""
    folder = resolve_folder(path)
    inputs = [_config(f"{key} ({CONFIG})", folder / CONFIG)]
    if (folder / _GENERATION_CONFIG).is_file():
        ends = {"eos_token_id": json.dumps(read_json(folder / _GENERATION_CONFIG).get("eos_token_id"))}
        inputs.append(Input(f"{key} ({_GENERATION_CONFIG})", folder / _GENERATION_CONFIG, ends, kind=ModelError))
    return [*inputs, _weights(f"{key} (weights)", folder, read_tensors(folder), weights_again)]


def _adapters(key: str, paths: Sequence[str], weights_again: bool = True) -> list[Input]:
    """A stack of adapters, each with those that lie below it."""
    inputs = []
    for number, adapter in enumerate(named_stack(paths)):
        inputs += _adapter(f"{key}.{number}", adapter.path, weights_again)
    return inputs


def _adapter(key: str, folder: Path, weights_again: bool) -> list[Input]:
    from danlu.adapters.adapter_config import CONFIG as ADAPTER_CONFIG
    from danlu.adapters.adapter_config import WEIGHTS as ADAPTER_WEIGHTS

    configs = [name for name in (ADAPTER_CONFIG, CONFIG) if (folder / name).is_file()]
    inputs = [_config(f"{key} ({name})", folder / name) for name in configs]
    return [*inputs, _weights(f"{key} (weights)", folder, read_header(folder / ADAPTER_WEIGHTS), weights_again)]


def _model_or_adapter(key: str, path: str, read_again: bool = True) -> list[Input]:
    """Reads the start of a reward or of the values: a model's folder, a finished run, or an adapter."""
    from danlu.adapters.adapter_config import CONFIG as ADAPTER_CONFIG

    folder = Path(path).expanduser()
    is_adapter = any((place / ADAPTER_CONFIG).is_file() for place in (folder, folder / "adapter"))
    return _adapters(key, [path], read_again) if is_adapter else _model(key, path, read_again)


def _config(key: str, file: Path) -> Input:
    """A file of JSON, by its keys, so that a message can name the one that differs."""
    values = {name: json.dumps(value, sort_keys=True) for name, value in read_json(file).items()}
    return Input(key, file, {name: values[name] for name in sorted(values.keys() - _OF_NO_EFFECT)}, kind=ModelError)


def _weights(key: str, folder: Path, tensors: Mapping[str, TensorLocation], read_again: bool) -> Input:
    """Weights by name, dtype, shape and samples, in whatever files they are. Parts are by file, for the message."""
    regions = {
        name: Region(at.file, at.offset, at.bytes, f"{name} {at.dtype} {list(at.shape)}")
        for name, at in tensors.items()
    }
    digests = sampled_digests(regions)
    of_file: dict[str, list[str]] = {}
    for name in sorted(digests):
        of_file.setdefault(tensors[name].file.name, []).append(digests[name])
    parts = {file: _hashed(of_file[file]) for file in sorted(of_file)}
    return Input(key, folder, parts, _hashed([digests[name] for name in sorted(digests)]), ModelError, read_again)


def _files(key: str, *paths: str) -> list[Input]:
    return [_file(key, path, kind=RecipeError) for path in paths]


def _file(key: str, path: str, *, read_again: bool = True, kind: type[DanluError] = DataError) -> Input:
    file = Path(path).expanduser()
    return Input(key, file, {file.name: _file_hash(file)}, kind=kind, read_again=read_again)


def _file_hash(file: Path) -> str:
    return blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _hashed(value: Any) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


# -- messages ----------------------------------------------------------------------------------------------------------


def _difference_of_ranks(key: str, first: Input | None, other: Input | None, ranks: Sequence[int]) -> str:
    """Describes how the input of some ranks differs from rank 0's."""
    from danlu.parallel.world import format_ranks

    who = format_ranks(list(ranks))
    for each, owner in ((other, who), (first, "rank 0")):
        if each is not None and each.problem:
            return f"{owner}: {key}: {each.problem}"
    if first is None or other is None:
        return f"{who}: {key}: {'not read' if other is None else other.path}, rank 0: {first.path if first else 'none'}"
    changes = _changes(first.parts, other.parts)
    return f"{who}: {key}: {other.path}{f': {changes}' if changes else ''} (rank 0 -> {who}); rank 0 has {first.path}"


def _shortened(value: str) -> str:
    return value if len(value) <= _MOST_CHARACTERS else f"{value[:_MOST_CHARACTERS]}..."


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The parts that differ: files by name, keys of a config with their values."""
    changed = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if old is None or new is None:
            changed.append(f"{name} {'is new' if old is None else 'is gone'}")
        elif _HASH.fullmatch(old):
            changed.append(f"{name} is another")
        else:
            changed.append(f"{name}: {_shortened(old)} -> {_shortened(new)}")
    more = [f"and {len(changed) - _MOST_SHOWN} more"] if len(changed) > _MOST_SHOWN else []
    return ", ".join([*changed[:_MOST_SHOWN], *more])
