"""Stage quantize of a chain: `danlu quantize` in the stage's folder, by the first process of a run."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from danlu.models.hf_folder import CONFIG
from danlu.recipe import QuantizeStage
from danlu.run.quantize import Quantized, quantize, work_folder
from danlu.training.progress import RowProgress

_WITHOUT_EFFECT = ("output", "threads", "device")
"""Keys that may change before a stage goes on."""
_POLL_S = 0.5
"""Seconds between two looks of a process for the folder that the first one writes."""


@dataclass(frozen=True)
class QuantizeOutcome:
    """The end of a stage that quantizes."""

    folder: Path
    lines: tuple[str, ...]
    """Messages for the console: notes, and what was done."""
    exit_code: int = 0
    steps: int = 0
    """A stage that quantizes takes none."""


def settings_of(stage: QuantizeStage) -> dict[str, Any]:
    """The values of a stage's recipe that its folder depends on, as JSON has them; not the model of an earlier stage,
    which is known by its hash."""
    left_out = {*_WITHOUT_EFFECT, *(["model"] if stage.inputs else [])}
    return stage.loaded.recipe.model_dump(mode="json", exclude=left_out)


def is_finished(folder: Path) -> bool:
    """Whether a stage has written its folder, which appears whole."""
    return (folder / CONFIG).is_file()


def has_begun(stage: QuantizeStage) -> bool:
    """Whether a stage has finished layers, or its folder."""
    recipe = stage.loaded.recipe
    return is_finished(Path(recipe.output).expanduser()) or work_folder(recipe).is_dir()


def quantize_stage(
    stage: QuantizeStage, *, resume: str, stream: TextIO | None, dry_run: bool, leads: bool
) -> QuantizeOutcome:
    """Quantizes as a stage says, and returns at once where that was done before.

    resume: auto, or never (refuse a folder that is there).   stream: as in `run.train`.
    leads: whether this is the first process, which does the work; others wait until the folder is there.
    Raises the errors of `run.quantize`.
    """
    recipe = stage.loaded.recipe
    target = Path(recipe.output).expanduser()
    if resume == "auto" and is_finished(target):
        if leads and not dry_run:
            shutil.rmtree(work_folder(recipe), ignore_errors=True)  # of a run that was killed behind its last write
        return QuantizeOutcome(target, (f"was quantized already: {target}",))
    if not leads:
        while not dry_run and not is_finished(target):
            time.sleep(_POLL_S)
        return QuantizeOutcome(target, ())
    shown, threads = stream or sys.stderr, torch.get_num_threads()
    try:
        with closing(RowProgress(shown, doing="quantizing", units="layers")) as progress:
            result = quantize(recipe, shown, progress=progress, dry_run=dry_run)
    finally:
        torch.set_num_threads(threads)  # those of the recipe are of this stage alone
    return QuantizeOutcome(target, (*result.notes, *_lines(stage, result, target, dry_run=dry_run)))


def _lines(stage: QuantizeStage, result: Quantized, target: Path, *, dry_run: bool) -> list[str]:
    """The console's lines on what was done."""
    calibrated = f", calibrated with {result.calibration_tokens:,} tokens" if result.calibration_tokens else ""
    if dry_run:
        return [f"dry run: all is ready to quantize {result.folder}{calibrated}; nothing was written"]
    done = [f"{result.resumed} layers were done by an earlier run of this chain"] if result.resumed else []
    return [
        *done,
        f"{result.folder} by {stage.loaded.recipe.described}{calibrated}: {result.quantized:,} of "
        f"{result.parameters:,} parameters at {result.bits:.3f} bits each",
        f"  model in {target}: try `danlu eval {target} --data FILE`",
    ]
