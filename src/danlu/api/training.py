"""`danlu.train`: a recipe becomes a run, as `danlu train` makes it, from a Python program or a notebook."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.cli.train import run_training
from danlu.core.errors import RecipeError
from danlu.core.run_files import METRICS
from danlu.parallel.world import world_from_environment
from danlu.recipe import Chain, ChainStage, QuantizeStage, Recipe, load_recipe_or_chain

if TYPE_CHECKING:
    from danlu.api.model import Model


@dataclass(frozen=True)
class Run:
    """A run that has ended, or that a signal has stopped."""

    folder: Path
    """The recipe's `output`."""
    steps: int
    """The steps that are done and saved; of a chain, those of all its stages."""
    exit_code: int
    """0, or 128 + the number of the signal that stopped it: calling `train` again goes on from there."""
    result: Path | None
    """The folder of the trained model or adapter; None where the run was stopped before its end."""
    stages: tuple[Run, ...] = ()
    """The runs of a chain's stages, as far as it came; empty for a recipe of one stage."""

    @property
    def stopped(self) -> bool:
        """Whether a signal stopped it before its end."""
        return self.exit_code != 0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one for each logged step, evaluation or event; of a chain its last stage's."""
        # Here: it loads torch, which `train` has loaded where it has trained in this process.
        from danlu.training.metrics import read_metrics

        file = (self.stages[-1] if self.stages else self).folder / METRICS
        return read_metrics(file) if file.is_file() else []

    def load(self) -> Model:
        """Loads the result; see `danlu.load`. Raises ModelError where the run was stopped before its end."""
        from danlu.api.model import load
        from danlu.core.errors import ModelError

        if self.result is None:
            raise ModelError(f"{self.folder}: the run was stopped before its end; call train again, and it goes on")
        return load(self.result)


def train(
    recipe: str | os.PathLike[str],
    overrides: Mapping[str, object] | Sequence[str] = (),
    *,
    processes: int = 1,
    resume: str = "auto",
) -> Run:
    """Trains a recipe, or a chain of them, as `danlu train` does: the same files, messages and bits.

    Messages and progress go to stderr. On the main thread a signal (Ctrl-C, a notebook's interrupt) has the run stop
    after its step and save; the Run that is returned says so, and the same call goes on. On another thread signals stay
    the program's. What was set for the process stays as it was: signal handlers, torch's threads and determinism.

    Args:
        recipe: the path of a YAML file.
        overrides: values that replace the file's, by dotted keys (`{"optimizer.learning_rate": 1e-4, "steps": 100}`),
            or as they are written on the command line (`["steps=100"]`).
        processes: more than one are started on this machine, laid out as the recipe's `parallel` says.
        resume: auto goes on where the run in the output folder stopped; never refuses such a folder; or the folder of
            one of its checkpoints.

    Raises DanluError of the kind that fits (`danlu.DanluError`), and KeyboardInterrupt for a signal when there is
    nothing to be saved, or a second one.
    """
    if isinstance(processes, bool) or not isinstance(processes, int) or processes < 1:
        raise RecipeError(f"processes: {processes!r} is no number of processes. Use 1 or more")
    world = world_from_environment(os.environ)
    if world is not None:
        raise RecipeError(
            f"danlu.train: {world.source} has started this as process {world.rank} of {world.size}, and danlu.train "
            "starts processes by itself. Use processes=N in one program, or have the launcher run `danlu train`"
        )
    path, written = os.fspath(recipe), override_texts(overrides)
    loaded = load_recipe_or_chain(path, written)
    code = run_training(loaded, [path, *written], resume=resume, processes=processes)
    if not isinstance(loaded, Chain):
        return _run_of(loaded.recipe, code)
    stages = [_run_of_stage(stage, code) for stage in loaded.stages]
    done = tuple(run for run in stages if run.steps or run.result is not None)
    result = stages[-1].result
    return Run(Path(loaded.output).expanduser(), sum(run.steps for run in done), code, result, done)


def override_texts(overrides: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Overrides as they are written on the command line.

    Raises RecipeError for a value that no recipe has, and for one text in the place of a list.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides: {overrides!r} is one text. Use a list, [{overrides!r}], or a dict of keys")
    if not isinstance(overrides, Mapping):
        return [str(text) for text in overrides]
    texts, problems = list[str](), list[str]()
    for key, value in overrides.items():
        try:
            texts.append(f"{key}={_written(value)}")
        except TypeError as error:
            problems.append(f"overrides: {key}: {error}")
    if problems:
        raise RecipeError(problems)
    return texts


def _written(value: object) -> str:
    """A value as YAML, in its flow style, has it. Raises TypeError for one that YAML does not have."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: object) -> Any:
    """The value in types of JSON; numbers of numpy and the like are those of Python. Raises TypeError."""
    match value:
        case None | bool() | str():
            return value
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case Integral():
            return int(value)
        case Real() if math.isfinite(value):
            return float(value)
    raise TypeError(
        f"{value!r} ({type(value).__name__}) cannot be written in a recipe. Use texts, numbers, True, False, None, "
        "paths, and lists and dicts of them"
    )


def _run_of_stage(stage: ChainStage | QuantizeStage, code: int) -> Run:
    """The run of a chain's stage; one that quantizes takes no steps, and its folder is the result."""
    if isinstance(stage, ChainStage):
        return _run_of(stage.loaded.recipe, code)
    from danlu.run.chained_quantize import is_finished

    folder = Path(stage.loaded.recipe.output).expanduser()
    return Run(folder, 0, 0, folder) if is_finished(folder) else Run(folder, 0, code, None)


def _run_of(recipe: Recipe, code: int) -> Run:
    """The run of a recipe, by the files in its folder. code: of the process, which counts for an unfinished run."""
    from danlu.training.run_folder import result_names
    from danlu.training.runs import read_run

    folder = Path(recipe.output).expanduser()
    info = read_run(folder)
    is_finished = info.state == "finished"
    return Run(folder, info.step, 0 if is_finished else code, folder / result_names(recipe)[0] if is_finished else None)
