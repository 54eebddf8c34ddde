"""A run from its recipe to a finished folder: a list of calls that builds the parts and hands them to the loop.

The common part of all runs is here. The differences between a language model and a classifier are behind a `Task`,
which the stage chooses. A run leaves in its folder: recipe.yaml (resolved), environment.json, metrics.jsonl,
tensorboard/, checkpoints/, the result as a model folder in model/ (and model-ema/ when the recipe keeps an average),
and at the end summary.json.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

import torch

from danlu.assembly.devices import check_devices
from danlu.assembly.optimizer import optimizer_of
from danlu.assembly.parameters import parameters_of, trained_parameters_of
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import RecipeError, ResourceError, Stopped
from danlu.core.run_files import CHECKPOINTS, ENVIRONMENT, METRICS, RECIPE, RunLock
from danlu.core.stop_signals import TOGETHER_S, StopRequest
from danlu.numerics.deterministic import deterministic
from danlu.parallel.comm import ALONE, new_group, world_size
from danlu.parallel.layout import layout_of, placing_problems
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.phase import track_modules
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.planning.product_peak import product_speeds, slower
from danlu.recipe import Loaded, Recipe, resolved_yaml
from danlu.recipe.device_map import named_devices
from danlu.run.auto_values import with_auto_values
from danlu.run.displays import ConsoleLog, displays
from danlu.run.export import export_result
from danlu.run.input_fingerprints import check_resumed, recipe_inputs, same_on_all_ranks
from danlu.run.memory_report import MemoryReport
from danlu.run.run_plan import RunPlan, plan_in_summary
from danlu.stages.protocols import PlacedModel, PlacedStage, Reader, Stage, StageData, StepBudget
from danlu.stages.table import STAGES
from danlu.training.checkpoints.folders import step_of
from danlu.training.checkpoints.loading import read_state
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.data_loader import DataLoader
from danlu.training.environment import changes_that_matter, describe_environment, write_environment
from danlu.training.loop import fit
from danlu.training.memory_parts import memory_line, resident_bytes
from danlu.training.metrics import MetricsLog, Recorder, peak_memory_bytes, read_metrics
from danlu.training.recorders import OptionalRecorder
from danlu.training.run_folder import Start, check_output_folder, finished, require_writable, starting_point
from danlu.training.state import Cadence, Run, restore
from danlu.training.summary import clear_summary, few_steps, flat_loss, further_line, seconds_in, write_summary
from danlu.training.timeline import TimelineWriter
from danlu.training.trackers import WandB, wandb_problem
from danlu.training.units import parameters_and_trained
from danlu.training.watch import Watch

if TYPE_CHECKING:
    from danlu.numerics.loss_scaling import LossScaler
    from danlu.optim.ema import Ema
    from danlu.planning.product_peak import Peak

Log = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    folder: Path
    steps: int
    exit_code: int  # 0, or 128 + the number of the signal that stopped it
    exported: tuple[Path, ...]  # model folders; empty when stopped before the end
    already: bool = False  # it had ended before, and nothing was done now
    rehearsed: bool = False  # all but the steps was done, and nothing was kept

    @property
    def ending(self) -> str:
        """A line about how the run has ended."""
        if self.exit_code:
            return self.stopped
        already = "was finished already, " if self.already else "finished "
        return f"{already}after step {self.steps}: {self.folder}"

    @property
    def stopped(self) -> str:
        """The message about a run that a signal ended."""
        if not self.steps:
            return "stopped before the first step, with nothing to save; the same command starts again"
        return f"stopped after step {self.steps}, saved in {self.folder}; the same command goes on from there"


@dataclass(frozen=True)
class _Session:
    """The place of a run and the way to its user, the same from the beginning to the end."""

    folder: Path
    into: Path
    """The folder that is written to: for a dry run not the run's folder, but a temporary one."""
    device: torch.device
    ranks: Ranks
    log: Log
    stream: TextIO
    console: ConsoleLog

    @property
    def is_dry(self) -> bool:
        return self.into != self.folder


def train(
    loaded: Loaded,
    *,
    resume: str = "auto",
    log: Log,
    stream: TextIO | None = None,
    dry_run: bool = False,
    stage: Stage | None = None,
    rehearse: Callable[[Run], None] = lambda run: None,
) -> Outcome:
    """Trains the recipe in its output folder, going on where an earlier run of it stopped.

    resume: auto (go on when the folder holds a run of this recipe), never (refuse such a folder), or the path of one of
    its checkpoints.
    stream: where progress is shown; stderr by default.
    dry_run: do all up to the first step (rows, weights, optimizer, a checkpoint taken up), and then stop. The output
    folder is only looked at; tokens stay in their cache.
    stage: the row of `STAGES` that is trained, by default the one that the recipe names.
    rehearse: called by a dry run with the run that is ready; its files are temporary.
    Raises DanluError of the kind that fits, and Stopped for a signal when there is nothing to be saved (or a second
    one); earlier checkpoints stay.
    """
    recipe = loaded.recipe
    stage = stage or STAGES[recipe.stage]
    folder = Path(recipe.output).expanduser()
    device = _device(recipe)
    ranks = ranks_of(layout_of(recipe.parallel, world_size()), device.type)
    stream = stream or sys.stderr
    if ranks.leads:
        check_output_folder(folder)  # before the lock leaves a file there
    else:
        log, stream = _silence, io.StringIO()
    with ExitStack() as closing:
        if recipe.threads is not None:
            closing.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(recipe.threads)
        closing.enter_context(deterministic(recipe.deterministic))
        if recipe.numerics == "exact":
            from danlu.numerics.batch_invariant import batch_invariant

            closing.enter_context(batch_invariant())
        into, console = folder, ConsoleLog(None, log)
        if dry_run:
            into = Path(closing.enter_context(TemporaryDirectory(prefix="danlu-dry-run-")))
            require_writable(folder)
        elif ranks.leads:
            closing.enter_context(RunLock(folder))
            console = closing.enter_context(ConsoleLog(folder, log))
        stop_request = closing.enter_context(StopRequest(together_s=0.0 if ranks.alone else TOGETHER_S))
        stop_request.at_once = True
        try:
            session = _Session(folder, into, device, ranks, console.log, stream, console)
            outcome = _train(session, loaded, stage, resume, rehearse, stop_request)
            console.write(outcome.ending)
            return outcome
        except Stopped as stop:
            if dry_run:
                raise
            latest = CheckpointStore(folder / CHECKPOINTS).latest()
            kept = "nothing was saved" if latest is None else f"the checkpoint of step {latest.step} stays"
            raise Stopped(stop.number, f"stopped at once; {kept}, and the same command goes on from there") from None


def _silence(line: str) -> None:
    """The log of processes other than the first, which drops lines."""


def _train(
    session: _Session,
    loaded: Loaded,
    stage: Stage,
    resume: str,
    rehearse: Callable[[Run], None],
    stop_request: StopRequest,
) -> Outcome:
    folder, into, device, ranks, log = session.folder, session.into, session.device, session.ranks, session.log
    recipe = ranks.world.from_first(
        lambda: with_auto_values(loaded, folder, resume, device, log, session.stream, dry=session.is_dry),
        barrier=lambda: _barrier("auto values"),
    )
    start = ranks.world.from_first(lambda: starting_point(folder, recipe, resume, log, into=into))
    is_over = start is not None and resume == "auto" and not start.goes_further
    if start is not None and is_over and (done := finished(start.path, recipe, folder)):
        return Outcome(folder, step_of(start.path), 0, done, already=True)
    if ranks.leads:
        clear_summary(into)
    if recipe.log.wandb is not None and (problem := wandb_problem()):
        raise RecipeError(problem)
    for note in loaded.notes:
        log(note)
    if ranks.leads and (remark := _slower_precision(recipe, device)):
        log(remark)
    ranks.world.from_first(lambda: _describe(session, recipe, start))
    if recipe.model.tokens:
        from danlu.assembly.token_notes import new_token_lines

        for line in ranks.world.from_first(lambda: new_token_lines(recipe.model), barrier=lambda: _barrier("tokens")):
            log(line)
    stage.criterion(recipe)  # a metric that the stage lacks is reported before rows are read
    reader, builder = stage.reader(recipe), stage.builder(recipe, stage)
    builder.check(start)
    _check_layout(recipe, ranks, device)
    inputs = same_on_all_ranks(
        ranks.world,
        lambda: recipe_inputs(recipe, stage, resumed=start is not None),
        barrier=lambda: _barrier("inputs"),
    )
    known_inputs = check_resumed(None if start is None else start.path, inputs)
    with ExitStack() as closing:
        # Before rows are read, which may take hours.
        trackers = [] if session.is_dry else _trackers(recipe, session, closing)
        stage_data = ranks.world.from_first(
            lambda: reader.read(session.stream), again=True, barrier=lambda: _barrier("data")
        )
        program = resident_bytes(device)
        closing.callback(stage_data.close)
        for line in stage_data.lines:
            log(line)
        run_plan = RunPlan(recipe, device, ranks.world.size)
        memory_report = closing.enter_context(MemoryReport(recipe, device, run_plan))
        stage_data = builder.with_columns(ranks, device, stage_data, session.stream)
        placed = builder.place(ranks, device, start, stage_data)
        peak = placed.budget.peak()
        for line in (*placed.policy.notes, *([] if peak is None else [peak.line()])):
            log(line)
        run = _build(session, recipe, stage, reader, stage_data, placed, start, run_plan)
        run.inputs = known_inputs
        closing.callback(run.store.close)
        closing.callback(run.data_loader.close)
        memory_report.began(run, placed.budget)
        if ranks.leads:
            for line in memory_report.expected():
                log(line)
            if not session.is_dry:
                run_plan.write(into, run.learner.micro, log)
        run.stop_request = stop_request
        if session.is_dry:
            if run.metrics is not None:
                closing.callback(run.metrics.close)
            rehearse(run)
            return Outcome(folder, run.state.step, 0, (), rehearsed=True)
        if run.metrics is not None:
            shows = displays(recipe, stage, reader.counted, run, session.stream, session.console)
            for recorder in (run.metrics, *shows):
                closing.callback(recorder.close)
            run.recorders = (run.metrics, *shows, *trackers)
        stop_request.at_once = False
        fit(run)
        stop_request.at_once = True
    for line in stage_data.late_lines():
        log(line)
    if run.stopping():
        signalled = max(ranks.world.all_gather_objects(stop_request.exit_code))  # perhaps not every process was
        return Outcome(folder, run.state.step, signalled, ())
    return _finish(session, run, placed, recipe, program, peak)


def _finish(
    session: _Session, run: Run, placed: PlacedStage, recipe: Recipe, program: int, peak: Peak | None
) -> Outcome:
    """Exports the result of a run that has done its steps, and writes its summary.

    program: bytes that the process held before models were placed. peak: the speed that utilisation is measured
    against.
    """
    memory = None
    if run.learner.activations is not None and run.learner.activations.peak_bytes:
        memory = placed.budget.memory(run)
        session.log(memory_line(memory, program, peak_memory_bytes(session.device)))
    # The loss of items that the model makes itself falls and rises with them, whatever is learnt.
    logged = None if run.metrics is None or run.data_loader.generated is not None else read_metrics(run.metrics.path)
    if logged is not None and (flat := flat_loss(logged)) is not None:
        session.log(flat)
    exported = export_result(run, placed.exporter, recipe, session.folder, session.log)
    if placed.policy.parallel.ranks.leads:
        plan = plan_in_summary(session.into, memory)
        speed = None if peak is None else peak.to_json()
        write_summary(run, exported[0], *_parameter_counts(run), memory, speed, plan)
    return Outcome(session.folder, run.state.step, 0, exported)


def _barrier(name: str) -> None:
    """Waits for all processes, however long one of them takes."""
    from danlu.parallel.process_group import untimed_barrier

    untimed_barrier(name)


def _describe(session: _Session, recipe: Recipe, start: Start | None) -> None:
    """Writes the recipe and the environment of the run; logs changes that could make a resumed run differ."""
    folder, into, log = session.folder, session.into, session.log
    environment, file = describe_environment(session.device), folder / ENVIRONMENT
    if start is not None:
        log(f"resuming {folder} from {start.path.name}")
        for change in start.changes:
            log(f"changed since then: {change}")
        if file.is_file():
            for line in changes_that_matter(json.loads(file.read_text()), environment):
                log(f"the last bits of numbers may differ from an uninterrupted run: {line}")
    try:
        write_atomically(into / RECIPE, resolved_yaml(recipe).encode())
        write_environment(into / ENVIRONMENT, environment)
    except OSError as error:
        raise ResourceError(
            f"{into}: the run folder cannot be written: {error.strerror}. Free some space, or choose another `output`."
        ) from error


def _build(
    session: _Session,
    recipe: Recipe,
    stage: Stage,
    reader: Reader,
    stage_data: StageData,
    placed: PlacedStage,
    start: Start | None,
    run_plan: RunPlan,
) -> Run:
    """All the parts of a run, put back to `start` if there is one."""
    folder, device, ranks, log, policy = session.into, session.device, session.ranks, session.log, placed.policy
    generate = policy.generate()  # first: prompts that cannot be continued are reported before anything is written
    optimizer = optimizer_of(policy.parameters(), recipe, device, objective_rate=stage.objective_rate(recipe))
    per_step = recipe.batch.packs(recipe.data.max_length)
    total_steps, total_packs = _total_steps(recipe, stage_data)
    micro = _micro_batch_size(recipe, reader, policy.parallel, placed.budget, run_plan, start)
    store = CheckpointStore(
        folder / CHECKPOINTS,
        keep=recipe.checkpoint.keep,
        keep_every=recipe.checkpoint.keep_every,
        keep_best=recipe.checkpoint.keep_best,
        criterion=stage.criterion(recipe),
        background=recipe.checkpoint.background,
        group=ALONE if ranks.alone else new_group("checkpoint", ranks.world.ranks, backend="gloo"),
    )
    metrics = MetricsLog(folder / METRICS) if ranks.leads else None
    learner = policy.learner(micro, stage_data.sources)
    source, held_out = stage.items(policy, stage_data, learner, folder)
    run = Run(
        learner=learner,
        optimizer=optimizer,
        schedule=recipe.schedule,
        clip=recipe.gradient_clipping,
        data_loader=DataLoader(source, per_step=per_step, total=total_packs, stretches=stage_data.stretches),
        cadence=_cadence(recipe, total_steps),
        watch=Watch(recipe.watch),
        store=store,
        metrics=metrics,
        recorders=() if metrics is None else (metrics,),
        stop_request=StopRequest(),
        scaler=_scaler(reader.targets(per_step)) if recipe.activations == "fp16" else None,
        roles=stage.trained_roles(recipe),
        ema=_moving_average(recipe, policy),
        held_out=held_out,
        early_stop=recipe.evaluation.early_stop,
        criterion=stage.criterion(recipe),
        sample_prompts=() if recipe.evaluation.samples is None else tuple(recipe.evaluation.samples.prompts),
        generate=generate,
        least_seconds=placed.budget.least_seconds(),
        base=policy.base(),
    )
    if not ranks.alone:
        track_modules(policy.model)
    lines = 0 if start is None else _resume(run, start, log)
    policy.check_weights()
    if (every := recipe.log.timeline) is not None:
        run.timeline = TimelineWriter.in_folder(folder, every, ranks.world, device, after_step=run.state.step)
    if metrics is not None:
        metrics.truncate(lines)
        run.started -= seconds_in(read_metrics(metrics.path))
    log(_summary(recipe, reader, policy, run))
    if (warning := few_steps(run.cadence.total, _amount(reader, run))) is not None:
        log(warning)
    return run


def _total_steps(recipe: Recipe, stage_data: StageData) -> tuple[int, int | None]:
    """Returns (steps of the run, packs of it), the second None where the recipe counts steps.

    Raises RecipeError for a schedule that needs more steps.
    """
    total_packs = None
    if stage_data.per_epoch is not None and recipe.steps is None:
        total_packs = math.ceil((recipe.epochs or 1) * stage_data.per_epoch)
    per_step = recipe.batch.packs(recipe.data.max_length)
    total_steps = recipe.steps if total_packs is None else math.ceil(total_packs / per_step)
    assert total_steps is not None, "the recipe's rules ask for steps when streaming"
    if problems := recipe.schedule.problems(total_steps):
        raise RecipeError([f"schedule.{field}: {message}." for field, message in problems])
    return total_steps, total_packs


def _check_layout(recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
    """Raises RecipeError for settings that no model can be placed or stepped with in the layout of this run."""
    wrong = [*placing_problems(recipe, ranks.layout, device.type)]
    if ranks.layout.pipeline > 1:
        from danlu.planning.layout_problems import micro_batch_problems

        wrong += micro_batch_problems(recipe, ranks.layout)
    if wrong:
        raise RecipeError(wrong)


def _micro_batch_size(
    recipe: Recipe,
    reader: Reader,
    parallel: ParallelContext,
    budget: StepBudget,
    run_plan: RunPlan,
    start: Start | None,
) -> int:
    """Packs of a micro-batch: those of the run that goes on, or as many as are asked for or fit into memory.

    Raises RecipeError where the pipeline's schedule cannot do a step of so many micro-batches.
    """
    ranks, pipeline = parallel.ranks, parallel.pipeline
    per_step = recipe.batch.packs(recipe.data.max_length)
    share = -(-per_step // ranks.data.size)
    is_one = parallel.updates_each_micro_batch  # its step is one micro-batch on each data rank
    changed = start is not None and any(change.key in ("batch.micro", "batch.memory") for change in start.changes)
    if start is not None and not changed and not is_one:
        micro: int = read_state(start.path)["micro"]  # found again it could differ, and with it how sums are rounded
    else:
        asked = budget.automatic_micro() if recipe.batch.micro == "auto" else recipe.batch.micro
        micro = ranks.world.from_first(run_plan.micro_batch) if asked is None else min(asked, share)
    micro_batches = -(-per_step // (ranks.data.size * micro))
    is_dealt_by_tokens = recipe.batch.rows is not None  # how many micro-batches follows from the rows of each step
    unfit = [] if pipeline is None else pipeline.problems(micro_batches)
    if unfit and not is_dealt_by_tokens:
        raise RecipeError([f"parallel.pipeline: micro-batches of a step: {message}" for message in unfit])
    if is_one and micro_batches > 1:
        fits = "fit into memory" if recipe.batch.micro == "auto" else "are asked for"
        raise RecipeError(
            f"batch: pipedream's step is one micro-batch, and {per_step} {reader.items} for {ranks.data.size} data "
            f"ranks are {micro_batches} of the {micro} that {fits}. Use batch.sequences: {micro * ranks.data.size}, or "
            "parallel.pipeline.schedule: 1f1b"
        )
    return micro


def _resume(run: Run, start: Start, log: Log) -> int:
    """Restores the run from `start` and deletes later checkpoints; the lines of metrics that there were then."""
    lines: int = restore(run, start.path)["metrics_lines"]
    if start.goes_further and not run.finished:
        log(further_line(run))
    later = run.store.discard_after(run.state.step)
    if later:
        log(f"deleted {', '.join(path.name for path in later)}: checkpoints after {start.path.name}")
    metrics = run.metrics
    if metrics is not None and metrics.lines < lines:
        log(f"{metrics.path}: {metrics.lines} lines, but {lines} when {start.path.name} was saved: some are lost")
    return lines


def _device(recipe: Recipe) -> torch.device:
    """The device of the run; of several a GPU, where there is one."""
    check_devices(recipe.parallel.device_map, recipe.device)
    name, section = recipe.device, recipe.parallel.device_map
    if section is not None and not isinstance(section, str):
        return torch.device(max(named_devices(section)))
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device: cuda, but torch sees no CUDA device. Use device: auto or cpu.")
    return torch.device(name)


def _scaler(tokens: int) -> LossScaler:
    """Makes fp16's loss scaling for steps of this many tokens: the loss is their sum, which is a scale already."""
    from danlu.numerics.loss_scaling import LossScaler

    return LossScaler(scale=2.0 ** max(0, 20 - tokens.bit_length()))


def _moving_average(recipe: Recipe, policy: PlacedModel) -> Ema | None:
    if recipe.ema is None:
        return None
    from danlu.optim.ema import Ema

    return Ema(policy.parameters(), recipe.ema.decay)


def _cadence(recipe: Recipe, total: int) -> Cadence:
    tenth = max(1, math.ceil(total / 10))
    evaluated = recipe.data.eval is not None or recipe.evaluation.samples is not None
    return Cadence(
        total=total,
        log=recipe.log.every,
        checkpoint=recipe.checkpoint.every or tenth,
        evaluation=(recipe.evaluation.every or tenth) if evaluated else None,
    )


def _trackers(recipe: Recipe, session: _Session, closing: ExitStack) -> list[Recorder]:
    """W&B where the recipe asks for it, on the first process; closed with `closing`.

    Raises a DanluError on all processes where it cannot be used.
    """
    trackers: list[Recorder] = []
    project = recipe.log.wandb
    if project is None:
        return trackers

    def begin() -> None:
        wandb = WandB(project, session.folder, recipe.model_dump(mode="json"))
        trackers.append(OptionalRecorder(wandb, "log.wandb", session.log))
        closing.callback(trackers[0].close)

    session.ranks.world.from_first(begin, barrier=lambda: _barrier("wandb"))
    return trackers


def _parameter_counts(run: Run) -> tuple[int, int]:
    """Returns (parameters, trained parameters) of the whole model, over all processes."""
    parallel = run.learner.parallel
    model, local = run.learner.model, {**parallel.elsewhere, **parallel.local_parameters}
    return parameters_of(model, local), trained_parameters_of(model, local)


def _slower_precision(recipe: Recipe, device: torch.device) -> str | None:
    """A warning about products that another precision makes faster here; None of 8-bit ones, which have no rival."""
    if recipe.fp8 is not None:
        return None
    return slower(recipe.activations, product_speeds(device, also=recipe.activations))


def _summary(recipe: Recipe, reader: Reader, policy: PlacedModel, run: Run) -> str:
    parameters, trained = _parameter_counts(run)
    packs = "" if run.data_loader.total is None else f", {run.data_loader.total:,} {reader.items}"
    counted = parameters_and_trained(parameters, trained)
    return (
        f"{policy.name} with {counted}, on {run.learner.device}, {recipe.precision_name}; "
        f"{run.cadence.total:,} steps of {_amount(reader, run)} (micro-batches of {run.learner.micro}){packs}"
    )


def _amount(reader: Reader, run: Run) -> str:
    """The size of a step: "4 x 64 tokens"; with stages "8 x 32 tokens, from step 6 on of 4 x 64 tokens"."""
    stretches = run.data_loader.stretches
    first = stretches[0].amount or reader.amount(stretches[0].per_step)
    return ", ".join([first, *(f"from step {later.first_step:,} on of {later.amount}" for later in stretches[1:])])
