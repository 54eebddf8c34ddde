"""A whole world for `danlu train` on a temporary folder: tokenizer, data, recipe; runs in this process or a forked one.

Nothing here waits for a machine: rows are tokenised once a test process into a cache that the runs share, and processes
to be killed are forked from a server that has torch loaded already.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders.fork_server import SERVER
from danlu.core.types import Pack
from danlu.data.demo_data import conversations, pretraining_documents
from danlu.data.tokenizer_training import train_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class World:
    """Where the tokenizer and the rows are, and recipes over them."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def chat(self) -> Path:
        return self.folder / "chat.jsonl"

    @property
    def text(self) -> Path:
        return self.folder / "text.jsonl"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def values(self, output: Path, **changes: Any) -> dict[str, Any]:
        """A recipe of 12 steps in 4 x 64 tokens, two micro-batches each, as YAML would give it.

        A change is laid over the section of its name where both are mappings, and takes its place where not; None
        leaves it out.
        """
        values: dict[str, Any] = {
            "stage": "sft",
            "model": {"tokenizer": str(self.tokenizer), "config": CONFIG},
            "data": {"train": str(self.chat), "max_length": 64, "cache": str(self.cache), "workers": 1},
            "batch": {"sequences": 4, "micro": 2},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
            "schedule": {"kind": "cosine", "warmup": 2},
            "steps": 12,
            "precision": "fp32",
            "threads": 1,
            "checkpoint": {"every": 4},
            "log": {"tensorboard": False},
            "output": str(output),
        }
        for name, change in changes.items():
            both = isinstance(change, Mapping) and isinstance(values.get(name), Mapping)
            values[name] = {**values[name], **change} if both else change
        return {name: value for name, value in values.items() if value is not None}

    @property
    def base(self) -> Path:
        """A finished model folder of this shape, for adapters."""
        from danlu.models.hf_config import read_config_values
        from danlu.models.initialize import initialize
        from danlu.models.loading import build
        from danlu.models.saving import save

        folder = self.folder / "base"
        if not folder.is_dir():
            model = build(read_config_values({**CONFIG, "vocab_size": 400, "tie_word_embeddings": False}))
            initialize(model, 0)
            save(model, folder, tokenizer_from=self.tokenizer)
        return folder

    def recipe(self, output: Path, file: Path | None = None, **changes: Any) -> Path:
        """The file of that recipe, beside `output` when no place is given."""
        file = file or output.with_name(f"{output.name}.yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(self.values(output, **changes), allow_unicode=True), encoding="utf-8")
        return file


@functools.cache
def tiny_world() -> World:
    """One for this test process; its folder goes when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="danlu-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    world = World(folder)
    documents = list(pretraining_documents(0, 400))
    train_tokenizer(documents, 400, world.tokenizer)
    write_rows(world.text, [{"text": text} for text in documents[:100]])
    write_rows(world.chat, list(conversations(0, 100)))
    return world


def write_rows(file: Path, rows: Sequence[object]) -> Path:
    """JSON lines; a string is written as it is, so that a line can be broken."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


class InThisProcess:
    """Stands in for the tokenising processes: loading a tokenizer once is enough for all the rows of these tests."""

    def __init__(self, job: Any, count: int) -> None:
        self._job = job

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        work = self._job.start()
        return (work(task) for task in tasks)

    def close(self) -> None:
        return None


def tokenise_here(patch: pytest.MonkeyPatch) -> None:
    """Lets this process tokenise rows, in the place of new ones, until `patch` is undone."""
    # Here: a stream reads in a thread, and transformers cannot be imported by two threads at once.
    from transformers import AutoTokenizer, PreTrainedConfig  # noqa: F401

    from danlu.data import prepare, stream

    for room in (prepare, stream):
        patch.setattr(room, "WorkerPool", InThisProcess)


# -- running ----------------------------------------------------------------------------------------------------------


def danlu(*arguments: object) -> int:
    """One command line in this process; its exit code. What it prints is for pytest's capture."""
    from danlu.cli.main import main

    return main([str(argument) for argument in arguments])


def start(arguments: Sequence[object], output: Path, before: Callable[[], None] | None = None) -> BaseProcess:
    """`danlu ARGUMENTS` in a forked process that writes to `output`; `before` (picklable) runs in it first."""
    child = SERVER.Process(target=_child, args=([str(argument) for argument in arguments], output, before))
    child.start()
    return child


def _child(arguments: list[str], output: Path, before: Callable[[], None] | None) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    if before is not None:
        before()
    from danlu.cli.main import main

    sys.exit(main(arguments))


def spike_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """From now on the rows that these steps see first have a gradient norm a thousand times too large, ever after."""
    from danlu.training import loop

    real = loop.accumulate
    left, rows = set(steps), set()

    def accumulate(compute: Any, packs: Sequence[Pack], **options: Any) -> Any:
        gradients = real(compute, packs, **options)
        seen = tuple(sample.row for pack in packs for sample in pack.samples)
        if options["step"] in left:
            left.remove(options["step"])
            rows.add(seen)
        return replace(gradients, norm=1000 * gradients.norm) if seen in rows else gradients

    monkeypatch.setattr(loop, "accumulate", accumulate)


# -- comparing --------------------------------------------------------------------------------------------------------


def last_state(run: Path) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """The newest checkpoint of a run: where, the hash of every tensor by `group.name`, and the rest of its state."""
    from danlu.training.checkpoints.folders import list_checkpoints
    from danlu.training.checkpoints.manifest import read_manifest

    path = [info.path for info in list_checkpoints(run / "checkpoints") if info.complete][-1]
    manifest = read_manifest(path)
    hashes = {
        f"{group}.{name}": entry.sha256
        for group in manifest.groups
        for name, (_, entry) in manifest.tensors(group).items()
    }
    return path, hashes, json.loads((path / "state.json").read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine and the moment; "nan" stays a string, which equals itself."""
    return [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reproducible(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line of metrics.jsonl that is the same in each run of one recipe, interrupted or not."""
    from danlu.training.metrics import TIMING_FIELDS

    return {name: value for name, value in fields.items() if name not in TIMING_FIELDS}


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    """Lines of events, of all or of those named."""
    return [line for line in metrics(run) if "event" in line and (not names or line["event"] in names)]


def differences(one: Path, other: Path) -> list[str]:
    """What two finished runs do not have bit for bit in common: tensors, state, metrics, exported files."""
    (_, ours, our_state), (_, theirs, their_state) = last_state(one), last_state(other)
    found = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    found += [
        f"state.{name}" for name in our_state.keys() | their_state if our_state.get(name) != their_state.get(name)
    ]
    found += ["metrics.jsonl"] if metrics(one) != metrics(other) else []
    for name in ("model", "model-ema", "adapter", "adapter-ema"):
        files = {file.name for run in (one, other) for file in (run / name).glob("*")}
        found += [
            f"{name}/{file}"
            for file in sorted(files)
            if not all((run / name / file).is_file() for run in (one, other))
            or (one / name / file).read_bytes() != (other / name / file).read_bytes()
        ]
    return found
