"""From a recipe to a finished run folder: a list of calls that builds the parts and hands them to the loop.

The only file that knows every room. What it leaves in the run folder: recipe.yaml (resolved), environment.json,
metrics.jsonl, tensorboard/, checkpoints/, the result as a Hugging Face folder in model/ (model-ema/ beside it when the
recipe keeps an average), and at the end summary.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import torch

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.slot import leave_slots_uncompiled
from danlu.assembly.base import Base
from danlu.assembly.frozen import model_bytes
from danlu.assembly.trained import adapted_model, check_adapters, doubts, merged_model, write_result
from danlu.data.packs import Packs
from danlu.data.prepare import Prepared, prepare
from danlu.data.statistics import Statistics
from danlu.data.stream import Stream
from danlu.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
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
from danlu.numerics.product import PackedWeight, leave_products_uncompiled, shared_bytes
from danlu.objectives.crossentropy import slice_bytes, workspace_bytes
from danlu.optim.build import Optimizers
from danlu.optim.build import build as build_optimizer
from danlu.optim.ema import Ema
from danlu.optim.schedules import problems as schedule_problems
from danlu.plan import memory
from danlu.plan.flops import Shape, training_flops
from danlu.plan.gemm import measured_peak
from danlu.recipe import Loaded, Recipe, resolved_yaml, sections
from danlu.rollout.generate import generate
from danlu.rollout.request import SamplingOptions
from danlu.rollout.wording import Wording
from danlu.train.checkpoint import CheckpointStore, load_checkpoint, read_group, read_state
from danlu.train.durable import write_durably
from danlu.train.environment import changes_that_matter, describe_environment, write_environment
from danlu.train.faults import StopRequest
from danlu.train.lock import RunLock
from danlu.train.loop import fit
from danlu.train.manifest import is_checkpoint_folder, step_of
from danlu.train.memory_parts import Activations, MemoryParts, resident_bytes
from danlu.train.metrics import MetricsLog, Recorder, peak_memory_bytes, read_metrics
from danlu.train.position import Feed
from danlu.train.progress import RowProgress, progress_on
from danlu.train.run_folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    METRICS,
    RECIPE,
    Start,
    finished,
    refuse_strangers,
    result_names,
    run_recipe,
    starting_point,
)
from danlu.train.state import Cadence, Generate, Run, restore
from danlu.train.step import Compute, trained_weights
from danlu.train.summary import clear_summary, seconds_in, write_summary
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
    clear_summary(folder)
    if recipe.log.wandb is not None and (problem := wandb_problem()):
        raise RecipeError(problem)
    device = _device(recipe)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    for note in loaded.notes:
        say(note)
    _describe(folder, recipe, device, start, say)
    check_adapters(recipe.model, recipe.adapter)
    prepared = _prepare(recipe, stream)
    for line in data_lines(prepared):
        say(line)
    with ExitStack() as closing:
        source = _source(recipe, prepared)
        if isinstance(source, Stream):
            closing.callback(source.close)
        run, subject = _build(recipe, prepared, source, device, folder, start, say)
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
    memory = None
    if run.compute.activations is not None and run.compute.activations.most:
        memory = _memory(run)
        say(memory.line(subject.program_bytes, peak_memory_bytes(device)))
    exported = _export(run, subject, recipe, folder, say)
    write_summary(run, exported[0], memory)
    return Outcome(folder, run.state.step, 0, exported)


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
) -> tuple[Run, Subject]:
    """All the parts of a run, put back to `start` if there is one."""
    words = prepared.tokenizer or _tokenizer_facts(recipe)
    config = _model_config(recipe, words)
    program = resident_bytes(device)
    subject = _subject(recipe, config, device, start)
    for doubt in doubts(recipe.model):
        say(doubt)
    model = subject.model
    # On a GPU it would make the host wait in every micro-batch, and compiled code has no such tensors.
    model.embed_tokens.gradient_of_rows = device.type == "cpu" and not recipe.compile
    optimizer = build_optimizer(model.named_parameters(), recipe.optimizer, rate_of=_rate_of(recipe))
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
        micro = _micro(recipe, model, optimizer, per_step, device)
    if recipe.compile and any(isinstance(module, PackedWeight) for module in model.modules()):
        leave_products_uncompiled()
        leave_slots_uncompiled()
    forward = model.compiled() if recipe.compile else model
    compute = Compute(
        model,
        forward,
        device,
        DTYPES[recipe.precision],
        micro,
        recipe.loss,
        subject.adapters,
        None if recipe.compile else Activations.beside([*model.parameters(), *model.buffers()]),
    )
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
        generate=_sampler(recipe, subject, compute.dtype),
        least_seconds=_at_peak_speed(config, compute.dtype, device, frozen=subject.adapters is not None),
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
    run.started -= seconds_in(read_metrics(metrics.path))
    say(_summary(recipe, config, run))
    return run, replace(subject, program_bytes=program)


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
    return facts_of(_tokenizer(recipe))


def _model_config(recipe: Recipe, words: TokenizerFacts) -> ModelConfig:
    if recipe.model.path is None:
        config = from_scratch(recipe.model, words.size, words.bos_id, words.eos_id)
    else:
        config = read_config(resolve_folder(recipe.model.path))
    check_vocabulary(config, words.size)
    return config


@dataclass(frozen=True)
class Subject:
    """What is trained: a model, or the adapters of one that is frozen."""

    model: Decoder
    adapters: AdapterSet | None = None
    base: Base | None = None
    program_bytes: int = 0  # resident before it was there


def _subject(recipe: Recipe, config: ModelConfig, device: torch.device, start: Start | None) -> Subject:
    """The decoder in float32 with its first weights, or memory for those of `start`; or a frozen one with adapters."""
    if recipe.adapter is not None:
        adapted, base = adapted_model(
            recipe.model,
            recipe.adapter,
            recipe.quantization,
            dtype=DTYPES[recipe.precision],
            device=device,
            seed=recipe.seed,
            encode=lambda text: Wording(_tokenizer(recipe)).encode_prompt(text),
            taken_up=None if start is None else read_group(start.path, "model"),
        )
        return Subject(adapted.model, adapted.adapters, base)
    if start is not None:
        return Subject(build(config, device=device))
    if recipe.model.adapters:
        return Subject(merged_model(recipe.model, device=device))
    if recipe.model.path is not None:
        return Subject(load(resolve_folder(recipe.model.path), device=device))
    model = build(config, device=device)
    initialize(model, recipe.seed)
    return Subject(model)


def _memory(run: Run) -> MemoryParts:
    """The parts of the run's memory, as they were in training."""
    compute, optimizer = run.compute, run.optimizer
    adapter = 0 if compute.adapters is None else sum(one.nbytes for one in compute.weights().values())
    assert compute.activations is not None
    return MemoryParts(
        weights=model_bytes(compute.model) - adapter,
        adapter=adapter,
        gradients=optimizer.gradient_bytes(),
        optimizer=optimizer.held_state_bytes(),
        average=0 if run.ema is None else sum(one.nbytes for one in run.ema.state_tensors().values()),
        activations=compute.activations.most,
        logits=workspace_bytes(
            compute.activations.targets,
            compute.model.config.hidden_size,
            compute.model.config.vocab_size,
            element_bytes=compute.dtype.itemsize,
            device_type=compute.device.type,
            frozen=not compute.model.head_weight.requires_grad,
        ),
        packed=shared_bytes(),
    )


def _rate_of(recipe: Recipe) -> Callable[[str], float] | None:
    """LoRA+: what B's learning rate is multiplied by."""
    ratio = getattr(recipe.adapter, "rate_ratio", 1.0)
    return None if ratio == 1 else lambda name: ratio if name.endswith("lora_B") else 1.0


def _tokenizer(recipe: Recipe) -> Tokenizer:
    return load_tokenizer(_tokenizer_path(recipe), recipe.model.chat_template)


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


def _micro(recipe: Recipe, model: Decoder, optimizer: Optimizers, per_step: int, device: torch.device) -> int:
    """Packs in a micro-batch: as given, or the most whose activations fit into what memory the rest leaves."""
    if recipe.batch.micro != "auto":
        return min(recipe.batch.micro, per_step)
    shape, width, length = _shape(model.config), DTYPES[recipe.precision].itemsize, recipe.data.max_length
    held = model_bytes(model)
    fixed = held + optimizer.gradient_bytes() + optimizer.held_state_bytes() + slice_bytes(device.type)
    if recipe.ema is not None:
        fixed += sum(parameter.nbytes for parameter in optimizer.parameters.values())
    if recipe.batch.memory is not None:
        budget = recipe.batch.memory * 2**30 - fixed
        if budget < memory.activation_bytes(shape, [length], width):
            need = (fixed + memory.activation_bytes(shape, [length], width)) / 2**30
            raise RecipeError(
                f"batch.memory: {recipe.batch.memory} GiB do not hold one pack: weights, gradients, optimizer and a "
                f"pack of {length} tokens need about {need:.2f} GiB. Give more, or lower data.max_length."
            )
    else:
        budget = 0.8 * (_free_memory(device) - (fixed - held))  # the weights are in memory already
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
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, frozen: bool
) -> Callable[[Sequence[int], int], float]:
    """Seconds a step would take at the machine's own matrix-product speed; divided by the real ones, that is MFU."""
    shape, peak = _shape(config), measured_peak(dtype, device)
    return lambda lengths, targets: training_flops(shape, lengths, targets, frozen=frozen) / peak


def _sampler(recipe: Recipe, subject: Subject, dtype: torch.dtype) -> Generate | None:
    samples = recipe.evaluation.samples
    if samples is None:
        return None
    wording = Wording(_tokenizer(recipe))
    options = SamplingOptions(temperature=samples.temperature, seed=recipe.seed)
    encode = wording.encode_prompt if recipe.stage == "pretrain" else wording.encode_chat_prompt

    def write(prompts: Sequence[str]) -> list[str]:
        tokens = [encode(prompt) for prompt in prompts]
        stops = sorted(wording.stop_ids)
        answers = generate(
            subject.model,
            tokens,
            options,
            samples.max_new_tokens,
            stops,
            decode=wording.decode,
            dtype=dtype,
            before=() if subject.adapters is None else subject.adapters.virtual_tokens,
        )
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


def _export(run: Run, subject: Subject, recipe: Recipe, folder: Path, say: Say) -> tuple[Path, ...]:
    """The result: a model in the type of activations that it was trained with (fp16: float32), or an adapter."""
    best = run.store.best() if recipe.checkpoint.keep_best else None
    if best is not None and best.step != run.state.step:
        say(f"exporting step {best.step}, which had the lowest evaluation loss ({best.loss:.4f})")
        into = {"model": run.compute.weights()}
        if run.ema is not None:
            into["ema"] = run.ema.state_tensors()
        load_checkpoint(best.path, into)
    own, averaged = (folder / name for name in result_names(recipe))
    if run.ema is None:
        return (_write(subject, recipe, own),)
    with run.averaged():
        _write(subject, recipe, averaged)
    return _write(subject, recipe, own), averaged


def _write(subject: Subject, recipe: Recipe, target: Path) -> Path:
    given = recipe.model.chat_template
    words = tokenizer_folder(_tokenizer_path(recipe))
    template = None if given is None else Path(given).expanduser().read_text(encoding="utf-8")
    if subject.adapters is not None and subject.base is not None:
        write_result(
            subject.adapters,
            subject.base,
            target,
            started_from=recipe.model.adapters,
            quantization=recipe.quantization,
            continued=isinstance(recipe.adapter, sections.Continue),
            tokenizer_from=words,
            chat_template=template,
        )
        return target
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    save_model(subject.model, target, dtype=dtype, tokenizer_from=words, chat_template=template)
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
    config = _model_config(recipe, _tokenizer_facts(recipe))
    subject = _subject(recipe, config, torch.device("cpu"), Start(path, ()))
    group = "ema" if average else "model"
    weights = trained_weights(subject.model, subject.adapters)
    if average:
        trained = {name for name, parameter in subject.model.named_parameters() if parameter.requires_grad}
        weights = {name: tensor for name, tensor in weights.items() if name in trained}
    load_checkpoint(path, {group: weights})
    _write(subject, recipe, target)
    return path
