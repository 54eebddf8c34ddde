"""From a recipe to a finished run folder: a list of calls that builds the parts and hands them to the loop.

The only file that knows every room. What it leaves in the run folder: recipe.yaml (resolved), environment.json,
metrics.jsonl, tensorboard/, checkpoints/, and the result as a Hugging Face folder in model/ (model-ema/ beside it when
the recipe keeps an average).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from danlu.data.packs import Packs
from danlu.data.prepare import Prepared, prepare
from danlu.data.statistics import Statistics
from danlu.data.stream import Stream
from danlu.data.tokenizer import load_tokenizer, tokenizer_folder
from danlu.data.tokenizing import TokenizerFacts, facts_of
from danlu.errors import CheckpointError, RecipeError, ResourceError, Stopped
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.folder import check_vocabulary, read_config, resolve_folder
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.presets import from_scratch
from danlu.models.saving import save as save_model
from danlu.numerics.loss_scaling import LossScaler
from danlu.objectives.crossentropy import slice_bytes
from danlu.optim.build import Optimizers
from danlu.optim.build import build as build_optimizer
from danlu.optim.ema import Ema
from danlu.optim.schedules import problems as schedule_problems
from danlu.plan import memory
from danlu.plan.flops import Shape, training_flops
from danlu.plan.gemm import measured_peak
from danlu.recipe import Loaded, Recipe, resolved_yaml
from danlu.rollout.generate import generate
from danlu.rollout.request import SamplingOptions
from danlu.rollout.wording import Wording
from danlu.train.checkpoint import CheckpointStore, load_checkpoint, read_state
from danlu.train.durable import write_durably
from danlu.train.environment import changes_that_matter, describe_environment, write_environment
from danlu.train.faults import StopRequest
from danlu.train.lock import RunLock
from danlu.train.loop import fit
from danlu.train.manifest import is_checkpoint_folder, step_of
from danlu.train.metrics import MetricsLog, Recorder
from danlu.train.position import Feed
from danlu.train.progress import RowProgress, progress_on
from danlu.train.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    METRICS,
    MODEL,
    MODEL_EMA,
    RECIPE,
    Start,
    finished,
    refuse_strangers,
    run_recipe,
    starting_point,
)
from danlu.train.state import Cadence, Generate, Run, restore
from danlu.train.step import Compute
from danlu.train.trackers import TensorBoard, WandB, wandb_problem
from danlu.train.watch import Watch
from danlu.types import Pack

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# More tokens at once make CPU steps no faster (measured from 1024 to 8192), only larger.
MOST_CPU_TOKENS = 4096

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    folder: Path
    steps: int
    exit_code: int  # 0, or 128 + the number of the signal that stopped it
    exported: tuple[Path, ...]  # model folders; empty when stopped before the end
    already: bool = False  # it had ended before, and nothing was done now

    @property
    def stopped(self) -> str:
        """What to tell of a run that a signal ended."""
        if not self.steps:
            return "stopped before the first step, with nothing to save; the same command starts again"
        return f"stopped after step {self.steps}, saved in {self.folder}; the same command goes on from there"


def train(loaded: Loaded, *, resume: str = "auto", say: Say, stream: TextIO | None = None) -> Outcome:
    """Trains the recipe in its output folder, going on where an earlier run of it stopped.

    resume: auto (go on when the folder holds a run of this recipe), never (refuse such a folder), or the path of one of
    its checkpoints.
    stream: where progress is shown; stderr by default.
    Raises DanluError of the kind that fits, and Stopped for a signal when there is nothing to be saved (or a second
    one); whatever was saved before stays.
    """
    recipe = loaded.recipe
    folder = Path(recipe.output).expanduser()
    stream = stream or sys.stderr
    refuse_strangers(folder)  # before the lock leaves a file there
    with RunLock(folder), StopRequest() as faults:
        faults.at_once = True
        try:
            return _train(loaded, folder, resume, faults, say, stream)
        except Stopped as stop:
            latest = CheckpointStore(folder / CHECKPOINTS).latest()
            kept = "nothing was saved" if latest is None else f"the checkpoint of step {latest.step} stays"
            raise Stopped(stop.number, f"stopped at once; {kept}, and the same command goes on from there") from None


def _train(loaded: Loaded, folder: Path, resume: str, faults: StopRequest, say: Say, stream: TextIO) -> Outcome:
    recipe = loaded.recipe
    start = starting_point(folder, recipe, resume, say)
    if start is not None and resume == "auto" and (done := finished(start.path, recipe, folder)):
        return Outcome(folder, step_of(start.path), 0, done, already=True)
    if recipe.log.wandb is not None and (problem := wandb_problem()):
        raise RecipeError(problem)
    device = _device(recipe)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    for note in loaded.notes:
        say(note)
    _describe(folder, recipe, device, start, say)
    prepared = _prepare(recipe, stream)
    for line in data_lines(prepared):
        say(line)
    with ExitStack() as closing:
        source = _source(recipe, prepared)
        if isinstance(source, Stream):
            closing.callback(source.close)
        run = _build(recipe, prepared, source, device, folder, start, say)
        closing.callback(run.store.close)
        run.faults = faults
        run.recorders = (run.metrics, *_shows(recipe, folder, run, stream))
        for recorder in run.recorders:
            closing.callback(recorder.close)
        faults.at_once = False
        fit(run)
        faults.at_once = True
    if isinstance(source, Stream):
        for line in row_lines("data, as far as it was read", source.statistics):
            say(line)
    if faults.requested:
        return Outcome(folder, run.state.step, faults.exit_code, ())
    return Outcome(folder, run.state.step, 0, _export(run, recipe, folder, say))


def _prepare(recipe: Recipe, stream: TextIO) -> Prepared:
    rows = RowProgress(stream)
    try:
        return prepare(
            recipe.data,
            stage=recipe.stage,
            tokenizer_path=_tokenizer_path(recipe),
            chat_template=recipe.model.chat_template,
            seed=recipe.seed,
            progress=rows,
        )
    finally:
        rows.close()


def _describe(folder: Path, recipe: Recipe, device: torch.device, start: Start | None, say: Say) -> None:
    """Writes what the run is and where it runs; says what of that could make a resumed run differ."""
    environment = describe_environment(device)
    file = folder / ENVIRONMENT
    if start is not None:
        say(f"resuming {folder} from {start.path.name}")
        for change in start.changes:
            say(f"changed since then: {change}")
        if file.is_file():
            for line in changes_that_matter(json.loads(file.read_text()), environment):
                say(f"the last bits of numbers may differ from an uninterrupted run: {line}")
    try:
        write_durably(folder / RECIPE, resolved_yaml(recipe).encode())
        write_environment(file, environment)
    except OSError as error:
        raise ResourceError(
            f"{folder}: the run folder cannot be written: {error.strerror}. "
            "Free some space, or choose another `output`."
        ) from error


def _build(
    recipe: Recipe,
    prepared: Prepared,
    source: Packs | Stream,
    device: torch.device,
    folder: Path,
    start: Start | None,
    say: Say,
) -> Run:
    """All the parts of a run, put back to `start` if there is one."""
    words = prepared.tokenizer or _tokenizer_facts(recipe)
    config = _model_config(recipe, words)
    model = _model(recipe, config, device, filled=start is None)
    # On a GPU it would make the host wait in every micro-batch, and compiled code has no such tensors.
    model.embed_tokens.gradient_of_rows = device.type == "cpu" and not recipe.compile
    optimizer = build_optimizer(model.named_parameters(), recipe.optimizer)
    per_step = recipe.batch.packs(recipe.data.max_length)
    total_packs = None
    if isinstance(source, Packs) and recipe.steps is None:
        total_packs = math.ceil((recipe.epochs or 1) * source.packs_per_epoch)
    total_steps = recipe.steps if total_packs is None else math.ceil(total_packs / per_step)
    assert total_steps is not None, "the recipe's rules ask for steps when streaming"
    if wrong := schedule_problems(recipe.schedule, total_steps):
        raise RecipeError(wrong)
    held_out = _held_out(recipe, prepared)
    if start is not None and not any(change.key in ("batch.micro", "batch.memory") for change in start.changes):
        micro = read_state(start.path)["micro"]  # found anew it could differ, and with it how sums are rounded
    else:
        micro = _micro(recipe, config, optimizer, per_step, device)
    forward = model.compiled() if recipe.compile else model
    compute = Compute(model, forward, device, DTYPES[recipe.precision], micro, recipe.loss)
    store = CheckpointStore(
        folder / CHECKPOINTS,
        keep=recipe.checkpoint.keep,
        keep_every=recipe.checkpoint.keep_every,
        keep_best=recipe.checkpoint.keep_best,
        background=recipe.checkpoint.background,
    )
    metrics = MetricsLog(folder / METRICS)
    run = Run(
        compute=compute,
        optimizer=optimizer,
        schedule=recipe.schedule,
        clip=recipe.gradient_clipping,
        feed=Feed(source, per_step=per_step, total=total_packs),
        cadence=_cadence(recipe, total_steps),
        watch=Watch(recipe.watch),
        store=store,
        metrics=metrics,
        recorders=(metrics,),
        faults=StopRequest(),
        scaler=_scaler(per_step * recipe.data.max_length) if recipe.precision == "fp16" else None,
        ema=None if recipe.ema is None else Ema(model.named_parameters(), recipe.ema.decay),
        held_out=held_out,
        early_stop=recipe.evaluation.early_stop,
        sample_prompts=() if recipe.evaluation.samples is None else tuple(recipe.evaluation.samples.prompts),
        generate=_sampler(recipe, model, compute.dtype),
        least_seconds=_at_peak_speed(config, compute.dtype, device),
    )
    lines = 0
    if start is not None:
        lines = restore(run, start.path)["metrics_lines"]
        later = run.store.discard_after(run.state.step)
        if later:
            say(f"deleted {', '.join(path.name for path in later)}: checkpoints after {start.path.name}")
        if metrics.lines < lines:
            say(f"{metrics.path}: {metrics.lines} lines, but {lines} when {start.path.name} was saved: some are lost")
    metrics.truncate(lines)
    say(_summary(recipe, config, run))
    return run


def _device(recipe: Recipe) -> torch.device:
    name = recipe.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise RecipeError("device: cuda, but torch sees no CUDA device. Use device: auto or cpu.")
    return torch.device(name)


def _tokenizer_path(recipe: Recipe) -> str:
    named = recipe.model.tokenizer
    if named is not None:
        return named
    assert recipe.model.path is not None, "the recipe's rules ask for a tokenizer when the model is from scratch"
    return str(resolve_folder(recipe.model.path))


def _tokenizer_facts(recipe: Recipe) -> TokenizerFacts:
    """For a stream, which tokenises in other processes and only later."""
    tokenizer = load_tokenizer(_tokenizer_path(recipe), recipe.model.chat_template)
    return facts_of(tokenizer)


def _model_config(recipe: Recipe, words: TokenizerFacts) -> ModelConfig:
    if recipe.model.path is None:
        config = from_scratch(recipe.model, words.size, words.bos_id, words.eos_id)
    else:
        config = read_config(resolve_folder(recipe.model.path))
    check_vocabulary(config, words.size)
    return config


def _model(recipe: Recipe, config: ModelConfig, device: torch.device, *, filled: bool) -> Decoder:
    """The decoder in float32; with `filled` its initial weights, else memory for a checkpoint's."""
    if not filled:
        return build(config, device=device)
    if recipe.model.path is not None:
        return load(resolve_folder(recipe.model.path), device=device)
    model = build(config, device=device)
    initialize(model, recipe.seed)
    return model


def _source(recipe: Recipe, prepared: Prepared) -> Packs | Stream:
    if prepared.train is not None:
        return Packs(prepared.train, recipe.data.packing, recipe.data.max_length, recipe.seed)
    return Stream(
        recipe.data,
        stage=recipe.stage,
        tokenizer_path=_tokenizer_path(recipe),
        chat_template=recipe.model.chat_template,
        seed=recipe.seed,
    )


def _held_out(recipe: Recipe, prepared: Prepared) -> list[Pack] | None:
    if prepared.eval is None:
        return None
    packs = Packs(prepared.eval, recipe.data.packing, recipe.data.max_length, recipe.seed, shuffle=False)
    return [packs.at(number) for number in range(packs.packs_per_epoch)]


def _shape(config: ModelConfig) -> Shape:
    return Shape(
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        windows=config.windows,
    )


def _micro(recipe: Recipe, config: ModelConfig, optimizer: Optimizers, per_step: int, device: torch.device) -> int:
    """Packs in a micro-batch: as given, or the most whose activations fit into what memory the rest leaves."""
    if recipe.batch.micro != "auto":
        return min(recipe.batch.micro, per_step)
    shape, width, length = _shape(config), DTYPES[recipe.precision].itemsize, recipe.data.max_length
    parameters = sum(parameter.numel() for parameter in optimizer.parameters.values())
    fixed = memory.parameter_bytes(parameters, optimizer.state_bytes(), ema=recipe.ema is not None)
    fixed += slice_bytes(device.type)
    if recipe.batch.memory is not None:
        budget = recipe.batch.memory * 2**30 - fixed
        if budget < memory.activation_bytes(shape, [length], width):
            need = (fixed + memory.activation_bytes(shape, [length], width)) / 2**30
            raise RecipeError(
                f"batch.memory: {recipe.batch.memory} GiB do not hold one pack: weights, gradients, optimizer and a "
                f"pack of {length} tokens need about {need:.2f} GiB. Give more, or lower data.max_length."
            )
    else:
        held = 4 * parameters  # the weights are in memory already
        budget = 0.8 * (_free_memory(device) - (fixed - held))
    most = per_step if device.type == "cuda" else min(per_step, max(1, MOST_CPU_TOKENS // length))
    return memory.largest_micro(shape, [length], width, budget, most)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _scaler(tokens: int) -> LossScaler:
    """fp16's loss scaling for steps of so many tokens: the loss is their sum, which is a scale already."""
    return LossScaler(initial=2.0 ** max(0, 20 - tokens.bit_length()))


def _cadence(recipe: Recipe, total: int) -> Cadence:
    tenth = max(1, math.ceil(total / 10))
    evaluated = recipe.data.eval is not None or recipe.evaluation.samples is not None
    return Cadence(
        total=total,
        log=recipe.log.every,
        checkpoint=recipe.checkpoint.every or tenth,
        evaluation=(recipe.evaluation.every or tenth) if evaluated else None,
    )


def _at_peak_speed(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Callable[[Sequence[int], int], float]:
    """Seconds a step would take at the machine's own matrix-product speed; divided by the real ones, that is MFU."""
    shape, peak = _shape(config), measured_peak(dtype, device)
    return lambda lengths, targets: training_flops(shape, lengths, targets) / peak


def _sampler(recipe: Recipe, model: Decoder, dtype: torch.dtype) -> Generate | None:
    samples = recipe.evaluation.samples
    if samples is None:
        return None
    wording = Wording(load_tokenizer(_tokenizer_path(recipe), recipe.model.chat_template))
    options = SamplingOptions(temperature=samples.temperature, seed=recipe.seed)
    encode = wording.encode_prompt if recipe.stage == "pretrain" else wording.encode_chat_prompt

    def write(prompts: Sequence[str]) -> list[str]:
        tokens = [encode(prompt) for prompt in prompts]
        stops = sorted(wording.stop_ids)
        answers = generate(model, tokens, options, samples.max_new_tokens, stops, decode=wording.decode, dtype=dtype)
        return [answer.text for answer in answers]

    return write


def _shows(recipe: Recipe, folder: Path, run: Run, stream: TextIO) -> list[Recorder]:
    """What tells people about the run, beside the metrics file."""
    shows: list[Recorder] = [progress_on(stream, total=run.cadence.total, done=run.state.step)]
    if recipe.log.tensorboard:
        shows.append(TensorBoard(folder / "tensorboard", after_step=run.state.step))
    if recipe.log.wandb is not None:
        shows.append(WandB(recipe.log.wandb, folder, recipe.model_dump(mode="json")))
    return shows


def _summary(recipe: Recipe, config: ModelConfig, run: Run) -> str:
    parameters = sum(parameter.numel() for parameter in run.compute.model.parameters())
    per_step = run.feed.per_step
    lengths = (
        f"{per_step} x {recipe.data.max_length} tokens" if recipe.data.packing.kind != "none" else f"{per_step} rows"
    )
    packs = "" if run.feed.total is None else f", {run.feed.total:,} packs"
    size = f"{parameters:,}" if parameters < 10**6 else f"{parameters / 1e6:,.1f}M"
    return (
        f"{config.family} with {size} parameters on {run.compute.device}, {recipe.precision}; "
        f"{run.cadence.total:,} steps of {lengths} (micro-batches of {run.compute.micro}){packs}"
    )


def data_lines(prepared: Prepared) -> list[str]:
    """What became of the rows, for the console: nothing is cut, dropped or skipped without being told."""
    lines = row_lines("data", prepared.statistics)
    if prepared.eval_statistics is not None:
        lines += row_lines("evaluation data", prepared.eval_statistics)
    elif prepared.train is not None and prepared.eval is not None:
        lines.append(f"evaluation data: {len(prepared.eval):,} samples of these rows are held out")
    if prepared.tokenizer is not None and prepared.tokenizer.warning:
        lines.append(prepared.tokenizer.warning)
    return lines


def row_lines(name: str, found: Statistics) -> list[str]:
    if not found.rows:  # a stream is counted while it is read
        return []
    lines = [f"{name}: {found.rows:,} rows, {found.tokens:,} tokens, {found.trained_share:.0%} of them trained"]
    if found.shortened:
        what = ", ".join(f"{count:,} {done}" for done, count in found.shortened.items())
        lost = f"{found.lost_tokens:,} tokens are left out"
        lines.append(f"{name}: {found.shortened.total():,} rows are longer than data.max_length: {what}; {lost}")
    lines += [f"{name}: {count:,} rows dropped: {reason}" for reason, count in found.dropped.items()]
    if found.bad_rows:
        rows = "row" if found.bad_rows == 1 else "rows"
        lines.append(f"{name}: {found.bad_rows:,} bad {rows} skipped, the first: {found.bad_examples[0]}")
    return lines


def _export(run: Run, recipe: Recipe, folder: Path, say: Say) -> tuple[Path, ...]:
    """The result as Hugging Face folders, in the type of activations that it was trained with (fp16: float32)."""
    best = run.store.best() if recipe.checkpoint.keep_best else None
    if best is not None and best.step != run.state.step:
        say(f"exporting step {best.step}, which had the lowest evaluation loss ({best.loss:.4f})")
        into = {"model": {name: parameter.detach() for name, parameter in run.compute.model.named_parameters()}}
        if run.ema is not None:
            into["ema"] = run.ema.state_tensors()
        load_checkpoint(best.path, into)
    if run.ema is None:
        return (_write(run.compute.model, recipe, folder / MODEL),)
    with run.averaged():
        averaged = _write(run.compute.model, recipe, folder / MODEL_EMA)
    return _write(run.compute.model, recipe, folder / MODEL), averaged


def _write(model: Decoder, recipe: Recipe, target: Path) -> Path:
    given = recipe.model.chat_template
    save_model(
        model,
        target,
        dtype=torch.bfloat16 if recipe.precision == "bf16" else torch.float32,
        tokenizer_from=tokenizer_folder(_tokenizer_path(recipe)),
        chat_template=None if given is None else Path(given).expanduser().read_text(encoding="utf-8"),
    )
    return target


def export(path: Path, target: Path, *, average: bool = False) -> Path:
    """Writes a checkpoint as the Hugging Face folder that the run would have ended with had it ended there.

    path: a run, for its newest checkpoint, or one of its checkpoints; the run may be training meanwhile.
    average: the averaged weights instead, of a recipe that keeps an average.
    Returns the checkpoint's folder. Raises CheckpointError if there is none, or it is damaged or has no average;
    ResourceError if `target` holds anything.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ResourceError(f"{target}: is there already. Choose an empty or new folder")
    if not is_checkpoint_folder(path):
        latest = CheckpointStore(path / CHECKPOINTS).latest()
        if latest is None:
            raise CheckpointError(f"{path}: neither a run with a checkpoint nor a checkpoint")
        path = latest.path
    recipe = run_recipe(path.resolve().parent.parent)
    if average and recipe.ema is None:
        raise CheckpointError(f"{path}: the run keeps no averaged weights (its recipe has no `ema`)")
    model = build(_model_config(recipe, _tokenizer_facts(recipe)))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    load_checkpoint(path, {"ema" if average else "model": weights})
    _write(model, recipe, target)
    return path
