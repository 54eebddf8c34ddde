"""`danlu train`: a recipe becomes a run folder."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from danlu import recipe as recipes
from danlu.adapters.adapter_config import AdapterFolder, is_adapter, read_adapter_config
from danlu.cli.worker import redirect_output, report_torch_loaded, run_worker
from danlu.core.errors import RecipeError
from danlu.core.machine import total_memory_bytes, usable_cores
from danlu.core.run_files import CHECKPOINTS, RunLock
from danlu.core.terminal import print_status, print_status_early
from danlu.core.tokenizer_files import lacks_chat_template
from danlu.models.hf_folder import LENET, model_type, read_config
from danlu.parallel.exit_reports import EXIT_REPORT
from danlu.parallel.layout import layout_of
from danlu.parallel.world import World, world_from_environment
from danlu.recipe import Chain, Loaded, Recipe

if TYPE_CHECKING:
    from danlu.run.train import Outcome

MIN_PROCESS_BYTES = 128 << 20
"""A bound below the memory that a process with danlu's training loaded holds for itself alone: 202 MiB of 283, as Linux
counts."""
PROGRESS_S = 3.0
"""Seconds between lines about how many processes have started, where there are more of them than cores."""


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file (`danlu recipes copy sft` writes one).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: section.key=value.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="auto: go on where the output folder's run stopped; never; or a checkpoint folder.")
    ] = "auto",
    processes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Train in so many processes on this machine, laid out as the recipe's `parallel` says."
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start again: a run in the output folder is kept as NAME.1, NAME.2 ..."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Do all up to the first step, then stop: rows, weights, memory. Keeps nothing."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print errors only; metrics.jsonl has the rest.")
    ] = False,
) -> None:
    """Train a recipe, or a chain of them. The output folder holds everything; the same command goes on after an
    interruption.

    Under torchrun, or SLURM's srun with several tasks, danlu joins the processes that they have started.
    """
    world = world_from_environment(os.environ)
    if world is not None and processes is not None:
        raise RecipeError(
            f"--processes {processes}: this was started by {world.source} as process {world.rank} of {world.size} "
            "already. Leave --processes out there"
        )
    if overwrite:
        _check_overwrite(world, resume, dry_run)
    if world is not None:
        run_worker(world, lambda: _run_rank(world, recipe, overrides or [], resume, dry_run, quiet))
    loaded = recipes.load_recipe_or_chain(recipe, overrides or [])
    if overwrite:
        from danlu.training.run_folder import move_aside  # here: see `_train`

        move_aside(Path(output_of(loaded)).expanduser(), print_status)
    arguments = [str(recipe), *(overrides or [])]
    code = run_training(loaded, arguments, resume=resume, processes=processes or 1, dry_run=dry_run, quiet=quiet)
    if code:
        raise typer.Exit(code)


def _check_overwrite(world: World | None, resume: str, dry_run: bool) -> None:
    """Raises RecipeError where --overwrite has no sense with the other flags, or with the processes of a launcher."""
    if world is not None:
        raise RecipeError(
            f"--overwrite: {world.source} starts several processes, and one would move the folder that others write "
            "to. Move it yourself before, or use --processes"
        )
    if resume != "auto":
        raise RecipeError(f"--overwrite starts again, and --resume {resume} says from where to go on: leave one out")
    if dry_run:
        raise RecipeError("--overwrite: a dry run keeps nothing and moves nothing. Leave one of the two out")


def output_of(loaded: Loaded | Chain) -> str:
    """The output folder of a recipe or a chain, as it is written."""
    return loaded.output if isinstance(loaded, Chain) else loaded.recipe.output


def run_training(
    loaded: Loaded | Chain,
    arguments: Sequence[str],
    *,
    resume: str,
    processes: int,
    dry_run: bool = False,
    quiet: bool = False,
) -> int:
    """Trains a recipe or a chain in this process, or in several that it starts, and returns the exit code.

    arguments: of `danlu train` in these processes, the recipe's file and its overrides.
    """
    arguments = [*arguments, *(["--dry-run"] if dry_run else []), *(["--quiet"] if quiet else [])]
    if isinstance(loaded, Chain):
        from danlu.cli.chain import launch_chain, train_chain  # here: see `_train`

        if processes > 1:
            return launch_chain(loaded, arguments, resume, processes, dry_run)
        return train_chain(loaded, resume, dry_run, quiet)
    if processes > 1:
        return _launch(loaded, arguments, resume, processes, dry_run)
    return _train(loaded, resume, dry_run, quiet)


def _run_rank(world: World, recipe: Path, overrides: list[str], resume: str, dry_run: bool, quiet: bool) -> int:
    """Runs one process of several, and returns its exit code."""
    read = recipes.load_recipe_or_chain(recipe, overrides)
    chain = read if isinstance(read, Chain) else None
    loaded = read.trained[0].loaded if isinstance(read, Chain) else read
    print_to_terminal = redirect_output(world, _dry_run_folder() if dry_run else Path(output_of(read)).expanduser())
    # Here: see `_train`.
    from danlu.parallel.process_group import join_process_group, leave_process_group

    report_torch_loaded(world)
    join_process_group(loaded.recipe.device, loaded.recipe.parallel.timeout_s, print_to_terminal)
    if chain is None:
        code = _train(loaded, resume, dry_run, quiet)
    else:
        from danlu.cli.chain import train_chain  # here: see `_train`

        code = train_chain(chain, resume, dry_run, quiet, leads=world.rank == 0)
    leave_process_group()
    return code


def _dry_run_folder() -> Path:
    """The folder that the processes of a dry run print into: the launcher's, or one of this process's own."""
    report_file = os.environ.get(EXIT_REPORT)
    if report_file is None:
        return Path(tempfile.mkdtemp(prefix="danlu-dry-run-"))
    return Path(report_file).parent.parent


def _launch(loaded: Loaded, arguments: Sequence[str], resume: str, processes: int, dry_run: bool) -> int:
    """Starts `danlu train` with the same arguments in several processes, and returns the exit code."""
    check_processes(processes, [loaded])
    # Here: see `_train`.
    from danlu.training.checkpoints.manifest import MARK
    from danlu.training.checkpoints.store import CheckpointStore
    from danlu.training.run_folder import check_output_folder

    folder = Path(loaded.recipe.output).expanduser()
    check_output_folder(folder)
    if not dry_run:
        with RunLock(folder):  # let go again for rank 0: only a run that is going on should hinder the processes
            pass
    began = time.time()

    def command(attempt: int) -> list[str]:
        """The arguments of a process: a restarted run goes on from a checkpoint that it has saved itself."""
        latest = CheckpointStore(folder / CHECKPOINTS).latest() if attempt else None
        # What has been saved since the beginning is this run's, wherever it began.
        is_own = latest is not None and (latest.path / MARK).stat().st_mtime >= began
        return ["-P", "-m", "danlu", "train", *arguments, "--resume", "auto" if is_own else resume]

    def from_where() -> str:
        """The step from which a restarted run begins, in words."""
        latest = CheckpointStore(folder / CHECKPOINTS).latest()
        return "from the beginning" if latest is None else f"from step {latest.step}"

    return launch_training(loaded.recipe, command, from_where, processes, folder, dry_run)


def launch_training(
    recipe: Recipe,
    command: Callable[[int], Sequence[str]],
    from_where: Callable[[], str],
    processes: int,
    folder: Path,
    dry_run: bool,
) -> int:
    """Runs several processes that train a recipe, or a chain that begins with it, and returns the exit code.

    command, from_where: as `launch` takes them. folder: the processes print into it, of a dry run into a temporary one.
    """
    from danlu.cli.launcher import launch  # here: see `_train`

    with TemporaryDirectory(prefix="danlu-dry-run-") if dry_run else nullcontext(folder) as logs:
        return launch(
            command,
            processes,
            Path(logs),
            restarts=recipe.parallel.restarts,
            threads=recipe.threads,
            from_where=from_where,
            log=print_status,
            progress_s=PROGRESS_S if processes > usable_cores() else None,
        )


def check_processes(processes: int, recipes: Sequence[Loaded]) -> None:
    """Warns of more processes than cores. Raises RecipeError for more than this machine's memory can hold, and for a
    layout that does not fit them."""
    cores, memory = usable_cores(), total_memory_bytes()
    if processes * MIN_PROCESS_BYTES > memory:
        raise RecipeError(
            f"--processes {processes}: each takes {MIN_PROCESS_BYTES >> 20} MiB before it holds any of the model, "
            f"and this machine has {memory / 2**30:.0f} GiB in all. Use {cores}, as many as it has cores"
        )
    if processes > cores:
        print_status(
            f"{processes} processes share {cores} {'cores' if cores > 1 else 'core'}: they take turns, so this is "
            f"slower than --processes {cores}, and starting them takes {processes / cores:.0f} times as long"
        )
    for loaded in recipes:
        with loaded.naming_places():
            layout_of(loaded.recipe.parallel, processes)


def _train(loaded: Loaded, resume: str, dry_run: bool, quiet: bool) -> int:
    """Trains in this process and returns the exit code."""
    if not quiet:
        print_status_early(f"training in {loaded.recipe.output}")
    # Here, not above: a wrong recipe is refused in a fraction of the second that torch takes to import.
    from danlu.run.train import train

    log, stream = (silent, io.StringIO()) if quiet else (print_status, None)
    with loaded.naming_places():
        outcome = train(loaded, resume=resume, log=log, stream=stream, dry_run=dry_run)
    print_outcome(outcome, log)
    return outcome.exit_code


def print_outcome(outcome: Outcome, log: Callable[[str], None]) -> None:
    """Prints how a run ended, and the next commands for its result."""
    if outcome.exit_code:
        print_status(outcome.ending)
        return
    if outcome.rehearsed:
        log(
            f"dry run: all is ready for step {outcome.steps + 1}; nothing was trained, and {outcome.folder} is as it "
            "was"
        )
        return
    log(outcome.ending)
    for folder in outcome.exported:
        log(f"  {'adapter' if is_adapter(folder) else 'model'} in {folder}: {suggested_commands(folder)}")
    log(f"  curves and samples of the run: `danlu report {outcome.folder}`")


def suggested_commands(folder: Path) -> str:
    """Commands for a result, a model's or an adapter's folder, and the parts of it that other programs do not see."""
    if is_adapter(folder):
        adapter = read_adapter_config(folder)
        talk = f"generate {folder} --prompt ..." if lacks_chat_template(folder) else f"chat {folder}"
        use = talk if adapter.task == "causal-lm" else f"eval {folder} --data FILE"
        return f"try `danlu {use}` or `danlu merge {folder} MODEL_FOLDER`{_unseen_below(adapter)}"
    if model_type(folder) == LENET:
        return f"try `danlu eval {folder} --data FOLDER_OF_IMAGES`"
    if read_config(folder).task != "causal-lm":
        return f"try `danlu eval {folder} --data FILE`"
    talk = "" if lacks_chat_template(folder) else f" or `danlu chat {folder}`"
    return f"try `danlu generate {folder} --prompt ...`{talk}"


def _unseen_below(adapter: AdapterFolder) -> str:
    """A line on an adapter that was trained upon others, of which its adapter_config.json has no word."""
    if not adapter.below:
        return ""
    below = ", ".join(map(str, adapter.below))
    return (
        f"\n  warning: it was trained upon {below}, which adapter_config.json cannot say: PEFT and vLLM put it on "
        f"{adapter.base} alone, which is another model. For them use what `danlu merge` writes, all of it merged"
    )


def silent(text: str) -> None:
    """Takes the place of `print_status` under --quiet."""
