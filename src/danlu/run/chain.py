"""Works through the stages of a chain one after the other: finished ones are skipped, and one that was stopped goes on.

A stage is an ordinary run in a folder of its own, or a folder that `danlu quantize` writes. So this file has only the
order, and `chain.json` in the chain's folder: the hash of each result that a stage was begun with. It shows whether a
stage's start has been trained again since.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import CheckpointError, ResourceError
from danlu.core.run_files import CHAIN, CHECKPOINTS, METRICS
from danlu.core.safetensors_format import read_header
from danlu.core.small_files import parse_json, read_small_text
from danlu.models.hf_folder import tensors_fingerprint
from danlu.recipe import Chain, ChainStage, QuantizeStage
from danlu.run.train import Log, Outcome, train
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.metrics import read_metrics
from danlu.training.run_folder import result_names

if TYPE_CHECKING:
    from danlu.run.chained_quantize import QuantizeOutcome

SHOWN_METRICS = {"classify": "accuracy", "preference": "accuracy", "reward": "accuracy", "rl": "reward"}
"""The metric of the summary by stage; the loss for others."""


@dataclass(frozen=True)
class StageOutcome:
    """The end of a stage of a chain."""

    stage: ChainStage | QuantizeStage
    outcome: Outcome | QuantizeOutcome | None
    """None where a dry run cannot try it, because what it starts from is not there yet."""

    @property
    def metric(self) -> str:
        """The metric of its last evaluation, or of its last step where nothing is evaluated: `eval_loss 2.0312`; of a
        stage that quantizes its method."""
        if isinstance(self.stage, QuantizeStage):
            return self.stage.loaded.recipe.described
        lines = read_metrics(self.folder / METRICS) if (self.folder / METRICS).is_file() else []
        metric = SHOWN_METRICS.get(self.stage.loaded.recipe.stage, "loss")
        for name in (f"eval_{metric}", metric, "eval_loss", "loss"):
            values = [line[name] for line in lines if name in line]
            if values:
                return f"{name} {values[-1]:.4f}" if isinstance(values[-1], float | int) else f"{name} {values[-1]}"
        return ""

    @property
    def folder(self) -> Path:
        """The run folder of the stage."""
        return run_folder(self.stage)


@dataclass(frozen=True)
class ChainOutcome:
    """The end of a chain: the stages up to the last one, in order; a signal stopped that one."""

    stages: tuple[StageOutcome, ...]
    exit_code: int  # 0, or 128 + the number of the signal that stopped it


def run_folder(stage: ChainStage | QuantizeStage) -> Path:
    """The folder that a stage writes."""
    return Path(stage.loaded.recipe.output).expanduser()


def train_chain(
    chain: Chain,
    *,
    resume: str = "auto",
    log: Log,
    stream: TextIO | None = None,
    dry_run: bool = False,
    leads: bool = True,
    ended: Callable[[StageOutcome], None] = lambda ended: None,
) -> ChainOutcome:
    """Trains, or quantizes, each stage in its folder, going on where an earlier run of the chain stopped.

    resume: auto, or never (refuse folders that hold a run).   stream: as in `run.train`.
    dry_run: try each stage up to its first step, where its start is there; nothing is kept.
    leads: whether this is the first process of the run, which reports the progress and writes chain.json.
    ended: is called after each stage.
    Raises CheckpointError where a stage was begun with another result of an earlier one than is there now, and the
    errors of `run.train` and `run.quantize`.
    """
    folder = Path(chain.output).expanduser()
    outcomes: list[StageOutcome] = []
    for number, stage in enumerate(chain.stages, 1):
        if leads:
            log(f"stage {number} of {len(chain.stages)}: {stage.name} in {run_folder(stage)}")
        earlier = {each.name: each for each in chain.stages[: number - 1]}
        inputs = {name: _result_hash(earlier[name]) for name in stage.inputs}
        outcome: Outcome | QuantizeOutcome | None = None
        if not dry_run or None not in inputs.values():
            _check_inputs(folder, stage, inputs, keep=not dry_run and leads)
            with stage.loaded.naming_places():
                if isinstance(stage, ChainStage):
                    outcome = train(stage.loaded, resume=resume, log=log, stream=stream, dry_run=dry_run)
                else:
                    from danlu.run.chained_quantize import quantize_stage

                    outcome = quantize_stage(stage, resume=resume, stream=stream, dry_run=dry_run, leads=leads)
        outcomes.append(StageOutcome(stage, outcome))
        ended(outcomes[-1])
        if outcome is not None and outcome.exit_code:
            return ChainOutcome(tuple(outcomes), outcome.exit_code)
        gc.collect()  # models refer to themselves by their hooks
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ChainOutcome(tuple(outcomes), 0)


def _result_hash(stage: ChainStage | QuantizeStage) -> str | None:
    """The hash of a stage's result, by samples of each tensor; None where it is not there."""
    folder = run_folder(stage)
    if isinstance(stage, ChainStage):
        folder /= result_names(stage.loaded.recipe)[0]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(tensors_fingerprint(read_header(file)).encode())
    return digest.hexdigest()


def _check_inputs(
    folder: Path, stage: ChainStage | QuantizeStage, inputs: dict[str, str | None], *, keep: bool
) -> None:
    """Raises CheckpointError if a stage that goes on was begun with other results than `inputs`, or one that quantizes
    with another recipe, which its folder does not have.

    keep: write down the inputs of a stage that begins.
    """
    settings: dict[str, Any] | None = None
    if isinstance(stage, ChainStage):
        begun = CheckpointStore(run_folder(stage) / CHECKPOINTS).latest() is not None
    else:
        from danlu.run import chained_quantize

        begun, settings = chained_quantize.has_begun(stage), chained_quantize.settings_of(stage)
    file = folder / CHAIN
    known = parse_json(read_small_text(file)) if file.is_file() else {}
    of_settings = f"{stage.name}.recipe"  # no stage's name has a dot
    if begun and stage.name in known:
        changed = [f"another result of {name}" for name, each in inputs.items() if known[stage.name].get(name) != each]
        if settings is not None:
            changed += _changed_settings(known.get(of_settings, {}), settings)
        if changed:
            again = "train" if settings is None else "quantize"
            raise CheckpointError(
                f"{run_folder(stage)}: this stage was begun with {', '.join(changed)} than is there now. Delete its "
                f"folder to {again} it again, or choose another `output`."
            )
    written = {**known, stage.name: inputs} | ({} if settings is None else {of_settings: settings})
    if not keep or known == written:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{json.dumps(written, indent=2)}\n".encode())
    except OSError as error:
        raise ResourceError(
            f"{file}: cannot be written: {error.strerror}. Free some space, or choose another `output`."
        ) from error


def _changed_settings(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The keys with other values than a stage was begun with."""
    keys = sorted(key for key in {*there, *here} if there.get(key) != here.get(key))
    return [f"another {key} ({json.dumps(there.get(key))})" for key in keys]
