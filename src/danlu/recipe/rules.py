"""Rules between the keys of a recipe. They need no torch and no model, so a run that cannot be says so at once.

Each rule is a generator of problems over a recipe whose types are right already; `problems` runs them all.
`missing_files` looks at the file system and is apart for that reason. `notes` are remarks on a recipe that is allowed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from danlu.errors import RecipeError
from danlu.recipe.messages import closest_match, format_value
from danlu.recipe.sections import (
    SGD,
    Adafactor,
    AdamW,
    AdamW8bit,
    Continue,
    Data,
    Dora,
    GaLore,
    LowRank,
    Muon,
    PagedAdamW,
    Recipe,
    Section,
    Source,
)
from danlu.recipe.yaml_tree import Problem

MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4095
"""Of Linux and its file systems."""
MAX_TRIED = 10_000
"""Numbers next to a `batch.micro` that does not divide a step, among which one that does is looked for."""
MAX_NAMES = 2000
"""Of a folder, among which a misspelt one is looked for."""

FILE_TYPES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".bz2", ".xz", ".zst")


def problems(recipe: Recipe) -> list[Problem]:
    """Everything in a recipe that contradicts itself."""
    return [problem for rule in RULES for problem in rule(recipe)]


def paths_can_be(recipe: Recipe) -> Iterator[Problem]:
    """What no file system takes for a name; found here, because Python raises other errors for it at each use."""
    for key, path in _paths(recipe).items():
        if (said := _impossible(path)) is not None:
            yield Problem(key, said)


def _impossible(path: str) -> str | None:
    if "\0" in path:
        return f"{format_value(path)} holds a NUL character, which no file name can. Take it out"
    if not path.strip():
        return f"{format_value(path)} is an empty path. Name a file or a folder, or leave the key out"
    if path.startswith("~"):
        try:
            Path(path).expanduser()
        except RuntimeError:
            user = path.partition("/")[0].removeprefix("~")
            whose = f"there is no user {user!r}" if user else "this user has no home folder"
            return f"{format_value(path)}: {whose}. Write the path in full"
    part, whole = max(len(os.fsencode(part)) for part in path.split("/")), len(os.fsencode(path))
    if part > MAX_NAME_BYTES or whole > MAX_PATH_BYTES:
        return (
            f"{format_value(path)} is too long: a name may have {MAX_NAME_BYTES} bytes and a path "
            f"{MAX_PATH_BYTES:,}, not {part if part > MAX_NAME_BYTES else whole:,}"
        )
    return None


def _paths(recipe: Recipe) -> dict[str, str]:
    """Every path of a recipe, read or written, by its key."""
    model = recipe.model
    named: dict[str, object] = {
        "model.path": model.path,
        "model.config": model.config,
        "model.tokenizer": model.tokenizer,
        "model.chat_template": model.chat_template,
        "data.cache": recipe.data.cache,
        "memory.folder": recipe.memory.folder,
        "optimizer.folder": getattr(recipe.optimizer, "folder", None),
        "output": recipe.output,
    }
    named |= {f"model.adapters.{index}": path for index, path in enumerate(model.adapters)}
    named |= {key: _file_of(source) for key, source in _sources(recipe.data)}
    return {key: path for key, path in named.items() if isinstance(path, str)}


def length_of_run(recipe: Recipe) -> Iterator[Problem]:
    if recipe.steps is not None and recipe.epochs is not None:
        yield Problem("steps", "the run's length is given twice: keep steps or epochs", reads=("epochs",))


def model_start(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    given = [name for name in model.one_of if getattr(model, name) is not None]
    if len(given) != 1:
        said = "path, preset and config are all missing" if not given else f"both {' and '.join(given)} are given"
        message = f"{said}: give exactly one (path: a folder to start from; preset or config: from scratch)"
        yield Problem("model", message, reads=tuple(f"model.{name}" for name in model.one_of))
    elif given != ["path"] and model.tokenizer is None and recipe.stage != "classify":
        message = f"a model from a {given[0]} needs a tokenizer: add model.tokenizer (a folder or a hub id)"
        yield Problem("model.tokenizer", message, reads=(f"model.{given[0]}",))


def date_is_a_day(recipe: Recipe) -> Iterator[Problem]:
    given = recipe.model.chat_template_date
    if given is None:
        return
    try:
        written = date.fromisoformat(given).isoformat()
    except ValueError:
        written = None
    if written != given:
        yield Problem("model.chat_template_date", f"{given!r} is no day: write year, month and day as 2026-11-22")


def batch_size(recipe: Recipe) -> Iterator[Problem]:
    batch, data = recipe.batch, recipe.data
    packed = data.packing.kind != "none"
    both = ("batch.tokens", "batch.sequences")
    if (batch.tokens is None) == (batch.sequences is None):
        said = (
            "tokens and sequences are both missing" if batch.tokens is None else "tokens and sequences are both given"
        )
        yield Problem("batch", f"{said}: give one of them", reads=both)
        return
    if batch.tokens is not None and packed and batch.tokens % data.max_length:
        below = batch.tokens // data.max_length * data.max_length
        nearby = f"{below} or {below + data.max_length}" if below else f"{data.max_length}"
        message = (
            f"{batch.tokens} is not a multiple of data.max_length {data.max_length}, the length of a packed sequence. "
        )
        yield Problem("batch.tokens", f"{message}Use {nearby}", reads=("data.max_length", "data.packing"))
        return
    if batch.tokens is not None and not packed:
        message = "without packing a step is counted in rows. Give batch.sequences instead"
        yield Problem("batch.tokens", message, reads=("data.packing",))
        return
    packs = batch.sequences if batch.sequences is not None else (batch.tokens or 0) // data.max_length
    if packs > MAX_PACKS:
        if batch.tokens is not None:
            message = f"{batch.tokens:,} tokens are {packs:,} packed sequences of {data.max_length} tokens, and a step "
            yield Problem("batch.tokens", f"{message}has at most {MAX_PACKS:,}", reads=("data.max_length",))
        return
    if isinstance(batch.micro, int) and packs % batch.micro:
        begin = min(batch.micro, packs)
        around = (n for distance in range(begin) for n in (begin - distance, begin + distance) if n <= packs)
        near = next((n for n in islice(around, MAX_TRIED) if packs % n == 0), 1)
        message = f"{batch.micro} does not divide the {packs} sequences of a step. Use {near}, or auto"
        yield Problem("batch.micro", message, reads=(*both, "data.max_length"))


MAX_PACKS = 2**24  # of a step: a Python object each

# What no machine can do, or nobody means; far above what was ever published.
_MOST: tuple[tuple[str, float, str], ...] = (
    ("steps", 10**10, "steps: a millisecond each would be four months"),
    ("epochs", 10**10, "epochs: at a millisecond for each, four months"),
    ("batch.sequences", MAX_PACKS, "in a step: each is an object of its own"),
    ("data.max_length", 2**24, "tokens: those of a packed sequence go through the model at once"),
    ("data.shuffle_buffer", 10**9, "rows: they are held in memory"),
    ("data.workers", 1024, "processes"),
    ("threads", 4096, "threads"),
    ("evaluation.samples.max_new_tokens", 2**24, "tokens: the keys and values of each are held in memory"),
    ("adapter.rank", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.width", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.projection", 2**17, "columns: no matrix of a model is as wide"),
    ("adapter.tokens", 2**20, "tokens: they stand before every document"),
)


def amounts_are_possible(recipe: Recipe) -> Iterator[Problem]:
    for key, most, what in _MOST:
        value: Any = recipe
        for name in key.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int | float) and value > most:
            yield Problem(key, f"{value:,} is more than the {most:,} {what}. Give less")
    if recipe.stage != "classify" and recipe.data.max_length < 2:
        message = "1 trains nothing: the first token of a sample is context. Give 2 or more"
        yield Problem("data.max_length", message)


def schedule_fits(recipe: Recipe) -> Iterator[Problem]:
    schedule = recipe.schedule
    if schedule.kind != "wsd" and schedule.decay != 0.2:
        yield Problem("schedule.decay", f"only the wsd schedule has a decay; this one is {schedule.kind}")
    if schedule.kind in ("constant", "inverse-sqrt") and schedule.floor != 0.1:
        yield Problem("schedule.floor", f"the {schedule.kind} schedule has no floor; linear, cosine and wsd do")
    for field, message in schedule.problems(recipe.steps):
        yield Problem(f"schedule.{field}", message, reads=("steps", "schedule.warmup", "schedule.decay"))


def packing_suits(recipe: Recipe) -> Iterator[Problem]:
    packing, data = recipe.data.packing, recipe.data
    reads = ("stage", "data.packing.kind")
    if packing.kind != "best-fit" and packing.window != 4096:
        yield Problem("data.packing.window", f"only best-fit packing has a window; this is {packing.kind}", reads=reads)
    if packing.kind != "concatenate":
        return
    if recipe.stage == "sft":
        message = "a conversation must stay whole, so concatenate is for stage pretrain. Use best-fit or none"
        yield Problem("data.packing.kind", message, reads=reads)
        return
    for index, source in enumerate(data.train):
        if source.format not in ("auto", "text", "tokenized"):
            message = f"concatenate joins plain text, and rows of {source.format} are not. Use packing best-fit"
            yield Problem(f"data.train.{index}.format", message, reads=reads)


def pretraining_has_no_roles(recipe: Recipe) -> Iterator[Problem]:
    if recipe.stage != "pretrain":
        return
    # `assistant` is the default and stands in every resolved recipe; `all` is what pretraining does anyway.
    if recipe.data.train_on == "last":
        message = "pretraining trains every token: train_on is for stage sft"
        yield Problem("data.train_on", message, reads=("stage",))
    if recipe.data.system is not None:
        yield Problem("data.system", "pretraining has no system prompt: it is for stage sft", reads=("stage",))


# What is about words, tokens and layers, and would be passed over in silence by a classifier of images.
_OF_LANGUAGE = (
    "model.config", "model.tokenizer", "model.chat_template", "model.chat_template_date", "model.adapters",
    "data.max_length", "data.packing",
    "data.overlong", "data.train_on", "data.system", "data.on_bad_row", "data.bad_row_limit", "data.append_eos",
    "data.streaming", "data.shuffle_buffer", "data.workers", "data.cache", "adapter", "quantization", "batch.tokens",
    "batch.memory", "evaluation.samples", "parallel.tensor", "parallel.sequence", "memory.recompute", "memory.offload",
    "memory.folder", "compile",
)  # fmt: skip


def images_have_no_words(recipe: Recipe) -> Iterator[Problem]:
    preset = recipe.model.preset
    if recipe.stage != "classify":
        if preset == "lenet5":
            message = "lenet5 classifies images: it needs stage classify. For language models use tiny or small"
            yield Problem("model.preset", message, reads=("stage",))
        return
    if preset not in (None, "lenet5"):
        yield Problem("model.preset", f"{preset} is a language model; stage classify trains lenet5", reads=("stage",))
    for key in _OF_LANGUAGE:
        section: Section = recipe
        *above, name = key.split(".")
        for part in above:
            section = getattr(section, part)
        if getattr(section, name) != type(section).model_fields[name].get_default():
            said = ". A step is counted in images: give batch.sequences" if key == "batch.tokens" else ""
            yield Problem(key, f"not read with stage classify, which has no tokens{said}", reads=("stage",))
    for key, source in _sources(recipe.data):
        for name in ("weight", "format"):
            if getattr(source, name) != Source.model_fields[name].get_default():
                yield Problem(key.replace("path", name), "not read with stage classify", reads=("stage",))


def sources_mix(recipe: Recipe) -> Iterator[Problem]:
    train = recipe.data.train
    if not train:
        yield Problem("data.train", "the list is empty: name at least one file or data set")
    if recipe.data.eval == []:
        yield Problem("data.eval", "the list is empty: name a source, give a share such as 0.02, or leave eval out")
    weighted = [source.weight is not None for source in train]
    if any(weighted) and not all(weighted):
        index = weighted.index(False)
        message = "has no weight although other sources do: give every source a weight, or none"
        yield Problem(f"data.train.{index}", message)
    seen: dict[Source, int] = {}
    for index, source in enumerate(train):
        same = source.model_copy(update={"weight": None})
        if same in seen:
            message = f"the same as data.train.{seen[same]}. To use it more often, give the sources weights"
            yield Problem(f"data.train.{index}", message)
        seen.setdefault(same, index)


def streaming_suits(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if not data.streaming:
        if data.shuffle_buffer != 10_000:
            yield Problem("data.shuffle_buffer", "only read with data.streaming: true", reads=("data.streaming",))
        return
    if recipe.epochs is not None:
        message = "a stream has no known end, so it cannot run for epochs. Give steps"
        yield Problem("epochs", message, reads=("data.streaming",))
    elif recipe.steps is None:
        yield Problem(
            "steps", "missing: a stream has no known end, so streaming needs steps", reads=("data.streaming",)
        )
    if isinstance(data.eval, int | float):
        message = (
            f"{format_value(data.eval)} of a stream cannot be set aside. Give evaluation rows as files of their own"
        )
        yield Problem("data.eval", message, reads=("data.streaming",))


def bad_rows(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.on_bad_row == "error" and recipe.data.bad_row_limit != 100:
        message = "only read with data.on_bad_row: skip"
        yield Problem("data.bad_row_limit", message, reads=("data.on_bad_row",))


def evaluation_has_rows(recipe: Recipe) -> Iterator[Problem]:
    evaluation = recipe.evaluation
    if recipe.data.eval is not None:
        return
    needs = "needs rows to evaluate on: add data.eval (a share such as 0.02, or files)"
    if evaluation.early_stop is not None:
        yield Problem("evaluation.early_stop", f"early stop {needs}", reads=("data.eval",))
    if evaluation.every is not None and evaluation.samples is None:
        message = f"evaluation {needs}, or evaluation.samples to generate"
        yield Problem("evaluation.every", message, reads=("data.eval", "evaluation.samples"))
    if recipe.checkpoint.keep_best:
        yield Problem("checkpoint.keep_best", f"keep_best {needs}", reads=("data.eval",))


def rewind_has_checkpoint(recipe: Recipe) -> Iterator[Problem]:
    every, steps = recipe.checkpoint.every, recipe.steps
    if recipe.watch.policy == "rewind" and every is not None and steps is not None and every >= steps:
        message = f"rewind needs a checkpoint to go back to, and the first is at step {every} of {steps}. "
        reads = ("checkpoint.every", "steps")
        yield Problem("watch.policy", f"{message}Lower checkpoint.every", reads=reads)


def optimizer_works(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if isinstance(optimizer, SGD) and optimizer.nesterov and optimizer.momentum == 0:
        yield Problem("optimizer.nesterov", "Nesterov's step needs momentum above 0", reads=("optimizer.momentum",))
    if isinstance(optimizer, GaLore) and recipe.adapter is not None:
        message = "galore projects gradients of whole matrices, and an adapter's are small. Use adamw, or no adapter"
        yield Problem("optimizer.kind", message, reads=("adapter",))


def adapter_has_base(recipe: Recipe) -> Iterator[Problem]:
    model, adapter = recipe.model, recipe.adapter
    if model.path is None and adapter is not None:
        message = "an adapter is trained beside a finished model: give model.path"
        yield Problem("adapter", message, reads=("model.path",))
    if model.path is None and model.adapters:
        yield Problem("model.adapters", "adapters sit on a finished model: give model.path", reads=("model.path",))
    if isinstance(adapter, Continue) and not model.adapters:
        message = "continue trains the last of model.adapters on, and there is none. Name one, or choose a kind"
        yield Problem("adapter.kind", message, reads=("model.adapters",))
    if isinstance(adapter, Dora) and model.adapters:
        message = "dora scales the weights themselves, so it cannot be stacked on model.adapters. Use kind: lora"
        yield Problem("adapter.kind", message, reads=("model.adapters",))
    if isinstance(adapter, LowRank):
        if adapter.init == "loftq" and recipe.quantization is None:
            message = "loftq makes up for what quantization loses: add quantization: nf4, or choose another init"
            yield Problem("adapter.init", message, reads=("quantization",))
        if adapter.svd_iterations is not None and adapter.init != "pissa":
            yield Problem("adapter.svd_iterations", "only read with init: pissa", reads=("adapter.init",))
        if adapter.loftq_iterations != 1 and adapter.init != "loftq":
            yield Problem("adapter.loftq_iterations", "only read with init: loftq", reads=("adapter.init",))


def quantization_has_adapter(recipe: Recipe) -> Iterator[Problem]:
    if recipe.quantization is not None and recipe.adapter is None:
        message = "a quantized model cannot be trained itself: add adapter: lora (or another), or leave it out"
        yield Problem("quantization", message, reads=("adapter",))


def layout_suits(recipe: Recipe) -> Iterator[Problem]:
    parallel, optimizer = recipe.parallel, recipe.optimizer
    if parallel.shard == "none":
        if parallel.replicate != 1:
            message = "copies of a sharded model, and nothing is sharded. Add shard: zero3, or leave it out"
            yield Problem("parallel.replicate", message, reads=("parallel.shard",))
        if parallel.accumulate == "sharded":
            message = "gradients are not sharded. Add shard: zero2 or zero3, or leave it out"
            yield Problem("parallel.accumulate", message, reads=("parallel.shard",))
    if parallel.sequence and parallel.tensor == 1:
        message = (
            "tokens are sharded among tensor-parallel ranks, and parallel.tensor is 1. Raise it, or leave this out"
        )
        yield Problem("parallel.sequence", message, reads=("parallel.tensor",))
    if parallel.workers == "threads":
        others = ("shard", "tensor", "pipeline", "context", "expert")
        for name in (name for name in others if getattr(parallel, name) not in ("none", 1)):
            message = "threads in one process each hold all of the model. Use workers: processes, or leave this out"
            yield Problem(f"parallel.{name}", message, reads=("parallel.workers",))
        if recipe.adapter is not None or recipe.compile:
            key = "adapter" if recipe.adapter is not None else "compile"
            message = "threads are for looking at how whole models are trained in parallel. Use workers: processes"
            yield Problem(key, message, reads=("parallel.workers",))
        away = "activations" in recipe.memory.offload
        if away or recipe.memory.recompute.kind != "none":
            key = "memory.offload" if away else "memory.recompute.kind"
            message = "threads run copies of the model at the same time, of which nothing is recomputed or offloaded"
            yield Problem(key, f"{message}. Leave it out, or use workers: processes", reads=("parallel.workers",))
    if isinstance(optimizer, WHOLE_MATRICES) and (parallel.shard != "none" or parallel.tensor > 1):
        whole = "parallel.shard: none" if parallel.tensor == 1 else "parallel: {}, which keeps them whole"
        message = (
            f"{optimizer.kind} works on whole matrices, and here each process has a part of them. "
            f"Use adamw, adamw8bit, lion or sgd, or {whole}"
        )
        yield Problem("optimizer.kind", message, reads=("parallel.shard", "parallel.tensor"))
    if recipe.compile and parallel.tensor > 1:
        message = "torch.compile does not follow the collectives of tensor parallelism. Leave it out"
        yield Problem("compile", message, reads=("parallel.tensor",))


def memory_suits(recipe: Recipe) -> Iterator[Problem]:
    memory, recompute = recipe.memory, recipe.memory.recompute
    if recompute.kind != "every" and recompute.layers is not None:
        yield Problem("memory.recompute.layers", "only read with kind: every", reads=("memory.recompute.kind",))
    if recompute.kind != "planned" and recompute.budget is not None:
        yield Problem("memory.recompute.budget", "only read with kind: planned", reads=("memory.recompute.kind",))
    if recompute.kind == "planned":
        if recompute.budget is None:
            message = "missing: a plan needs to know how many GiB activations may take"
            yield Problem("memory.recompute.budget", message, reads=("memory.recompute.kind",))
        if recipe.batch.micro == "auto":
            message = "auto, but a plan of recomputation needs to know the size of a micro-batch. Give a number"
            yield Problem("batch.micro", message, reads=("memory.recompute.kind",))
    if recipe.compile and (recompute.kind != "none" or "activations" in memory.offload):
        message = (
            "compiled code decides itself what it keeps. Leave out compile, or recompute and offload of activations"
        )
        yield Problem("compile", message, reads=("memory.recompute.kind", "memory.offload"))
    if "gradients" in memory.offload and "parameters" not in memory.offload:
        message = "gradients are kept where their parameters are. Add parameters"
        yield Problem("memory.offload", message)
    if "optimizer" in memory.offload and not isinstance(recipe.optimizer, AdamW | AdamW8bit | PagedAdamW):
        message = (
            f"the state of {recipe.optimizer.kind} stays on the device. Use adamw or adamw8bit, or leave out optimizer"
        )
        yield Problem("memory.offload", message, reads=("optimizer.kind",))
    eight = recipe.optimizer
    if "optimizer" in memory.offload and isinstance(eight, AdamW8bit) and (eight.block, eight.smallest) != (256, 4096):
        message = "offloaded 8-bit moments have blocks of 256 and begin at 4096 elements. Leave block and smallest out"
        yield Problem("optimizer.block", message, reads=("memory.offload",))
    if memory.folder is not None and not memory.offload:
        yield Problem("memory.folder", "nothing is offloaded to it: add memory.offload", reads=("memory.offload",))


WHOLE_MATRICES = (Muon, GaLore, Adafactor)


def output_is_apart(recipe: Recipe) -> Iterator[Problem]:
    if _impossible(recipe.output) is not None:
        return
    output = _resolve(recipe.output)
    named = {
        "model.path": recipe.model.path,
        "model.config": recipe.model.config,
        "model.tokenizer": recipe.model.tokenizer,
    }
    paths = {key: value for key, value in named.items() if isinstance(value, str)}
    paths.update({key: _file_of(source) for key, source in _sources(recipe.data)})
    for key, path in paths.items():
        if _impossible(path) is not None:
            continue
        place = _resolve(path)
        if place == output or output in place.parents:
            relation = "is" if place == output else "lies in"
            message = f"{key} ({path}) {relation} the output folder, where the run writes. Choose another output"
            yield Problem("output", message, reads=(key,))


def _resolve(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _sources(data: Data) -> Iterator[tuple[str, Source]]:
    for index, source in enumerate(data.train):
        yield f"data.train.{index}.path", source
    for index, source in enumerate(data.eval if isinstance(data.eval, list) else []):
        yield f"data.eval.{index}.path", source


def _file_of(source: Source) -> str:
    """The path without the `#500` that takes the first 500 rows."""
    path, mark, rows = source.path.rpartition("#")
    return path if mark and rows.isdecimal() else source.path


def language_stage(recipe: Recipe, reader: str) -> Literal["pretrain", "sft"]:
    """The stage of a recipe for a language model. Raises RecipeError: `reader` can do nothing with another."""
    if recipe.stage == "classify":
        raise RecipeError(f"stage: classify has no tokens, and {reader} is for language models")
    return recipe.stage


SHIPPED_NAMES = ("base-model", "tokenizer")
"""Of models and tokenizers in the recipes that come with danlu, for a user to replace: they are nobody's on the hub."""


def missing_files(recipe: Recipe) -> list[Problem]:
    """Paths that cannot be hub ids and are not there, each with the nearest name in its folder."""
    named = {
        "model.path": recipe.model.path,
        "model.config": recipe.model.config,
        "model.tokenizer": recipe.model.tokenizer,
    }
    paths = {key: value for key, value in named.items() if isinstance(value, str)}
    paths["model.chat_template"] = recipe.model.chat_template or ""
    paths.update({key: _file_of(source) for key, source in _sources(recipe.data)})
    local_only = {"model.config", "model.chat_template"}
    local_only |= {key for key in ("model.path", "model.tokenizer") if paths.get(key) in SHIPPED_NAMES}
    if recipe.stage == "classify":
        local_only |= {key for key, _ in _sources(recipe.data)}
    return [
        Problem(key, _not_there(_resolve(path), path))
        for key, path in paths.items()
        if path and (key in local_only or is_local(path)) and _impossible(path) is None and not _exists(_resolve(path))
    ]


def _exists(path: Path) -> bool:
    """Whether there is something, as far as this user may see: what is hidden tells so itself when it is opened."""
    try:
        return path.exists()
    except OSError:
        return True


def is_local(path: str) -> bool:
    """Whether a path cannot be a hub id, which is `name` or `owner/name` without a file's ending."""
    return (
        path.startswith(("/", ".", "~"))
        or path.count("/") > 1
        or path.endswith("/")
        or path.lower().endswith(FILE_TYPES)
        or "\\" in path
    )


def _not_there(place: Path, written: str) -> str:
    folder = place.parent
    if not folder.is_dir():
        return f"no file or folder {written!r}: there is no folder {str(folder)!r}"
    try:
        names = {entry.name.lower(): entry.name for entry in islice(folder.iterdir(), MAX_NAMES)}
    except OSError:  # a folder that may be entered but not listed
        names = {}
    guess = closest_match(place.name, list(names))
    hint = f" Did you mean {str(Path(written).parent / names[guess])!r}?" if guess else ""
    return f"no file or folder {written!r} in {str(folder)!r}.{hint}"


def notes(recipe: Recipe) -> list[str]:
    """Remarks on a recipe that may run but may not be what was meant; for the console, once."""
    found = []
    if recipe.precision == "fp16" and recipe.device == "cpu":
        found.append("precision: fp16 on a CPU is several times slower than bf16 or fp32 and has no advantage there")
    named = [(key, (_file_of(source), source.split)) for key, source in _sources(recipe.data)]
    evaluated = {rows for key, rows in named if key.startswith("data.eval")}
    both = evaluated & {rows for key, rows in named if key.startswith("data.train")}
    if both:
        names = ", ".join(sorted(file for file, _ in both))
        found.append(f"data.eval: {names} is also trained on, so the evaluation loss says little")
    if isinstance(recipe.optimizer, AdamW8bit) and recipe.device != "cuda":
        found.append(
            "optimizer: adamw8bit keeps 2 bytes of state a parameter instead of 8, and on a CPU its update takes about "
            "eight times as long (63M parameters: 0.42 s instead of 0.06): take it for memory"
        )
    if recipe.optimizer.learning_rate == 0:
        found.append("optimizer.learning_rate: 0 trains nothing")
    return found


RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    paths_can_be,
    length_of_run,
    amounts_are_possible,
    model_start,
    date_is_a_day,
    batch_size,
    schedule_fits,
    packing_suits,
    pretraining_has_no_roles,
    images_have_no_words,
    sources_mix,
    streaming_suits,
    bad_rows,
    evaluation_has_rows,
    rewind_has_checkpoint,
    optimizer_works,
    adapter_has_base,
    quantization_has_adapter,
    layout_suits,
    memory_suits,
    output_is_apart,
)
