"""Language models as the task of a run: tokenised rows, a decoder or adapters on top of one, a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.slot import leave_slots_uncompiled
from danlu.assembly.adapter_training import write_result
from danlu.assembly.context_length import max_sample_length
from danlu.assembly.frozen_base import check_frozen, model_bytes
from danlu.assembly.recipe_adapters import base_changes, base_identity, check_adapters, doubts
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, PreparedData, prepare
from danlu.data.statistics import Statistics, beyond_positions
from danlu.data.stream import StreamingDataset
from danlu.data.tokenizer import Tokenizer, load_tokenizer
from danlu.data.tokenizer_export import exported_tokenizer
from danlu.data.tokenizer_folder import fast_tokenizer_folder, template_date
from danlu.data.tokenizing import TokenizerInfo, tokenizer_info
from danlu.errors import CheckpointError, DanluError, DataError, RecipeError
from danlu.memory_estimate import (
    MemoryEstimate,
    check_size,
    estimate_of,
    find_micro_batch,
    gathered_parameters,
)
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import check_vocabulary, read_config, resolve_folder
from danlu.models.hf_validation import check_headers
from danlu.models.presets import from_scratch
from danlu.models.saving import save
from danlu.numerics.four_bit_weight import unpack_kernels
from danlu.numerics.quantized_weight import QuantizedWeightModule, dense_workspace_bytes, leave_products_uncompiled
from danlu.objectives.crossentropy import workspace_bytes
from danlu.optim.build import Optimizers
from danlu.parallel.comm import world_size
from danlu.parallel.layout import Sizes, problems
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.placing import Placed, Subject, check_placing, learner, place, shards_on_host, subject_of
from danlu.plan.flops import shape_of, training_flops
from danlu.plan.gemm import Peak, peak_of
from danlu.plan.precision import DTYPES
from danlu.recipe import Recipe, sections
from danlu.recipe.rules import language_stage
from danlu.rollout.chat_tokenizer import ChatTokenizer
from danlu.rollout.generate import generate, prompt_problem
from danlu.rollout.request import SamplingOptions
from danlu.tasks import LeastSeconds, Material
from danlu.train.checkpoints.loading import read_group, read_state
from danlu.train.memory_parts import Activations, MemoryParts
from danlu.train.progress import RowProgress
from danlu.train.run_folder import Start
from danlu.train.state import Generate, Run
from danlu.train.step import Compute, trained_weights
from danlu.types import Pack

log = logging.getLogger(__name__)


class Language:
    """A `Task`: a language model on packs of tokens."""

    items = "packed sequences"
    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._tokenizer_info: TokenizerInfo | None = None  # known once rows are prepared, unless they are streamed

    def check(self, start: Start | None) -> None:
        recipe = self.recipe
        check_adapters(recipe.model, recipe.adapter)
        if start is not None:
            self._check_base(start.path)
        if recipe.model.path is not None:
            folder, where = resolve_folder(recipe.model.path), recipe.model.path
            config = read_config(folder)
            self._check_layout(config)
            if recipe.adapter is not None:
                check_frozen(folder, recipe.quantization)
            elif start is None:  # weights of a checkpoint will take the place of these
                check_headers(folder, config, packed=False)
        else:  # the tokenizer, which is not read yet, decides the vocabulary of a config that does not
            config, where = from_scratch(recipe.model, 1), recipe.model.preset or "model.config"
        check_size(recipe, config, where, world_size())
        if recipe.evaluation.samples is not None:
            tokenizer = _tokenizer(recipe)
            _sample_prompts(recipe, ChatTokenizer(tokenizer), self._config(tokenizer_info(tokenizer)))

    def _check_layout(self, config: ModelConfig) -> None:
        if wrong := list(problems(self.recipe.parallel, _sizes(config))):
            raise RecipeError(wrong)

    def _check_base(self, checkpoint: Path) -> None:
        """Raises CheckpointError if an adapter would go on upon another base than the one under its checkpoint."""
        then = None if self.recipe.adapter is None else read_state(checkpoint).get("base")
        if then is None:  # all weights are the checkpoint's, or it was written by a danlu that kept no fingerprint
            return
        if found := base_changes(then, base_identity(self.recipe.model)):
            raise CheckpointError(
                f"{checkpoint}: its adapter was trained on another base than the one that is there now (there -> "
                "here):\n  " + "\n  ".join(found) + "\nPut back what was there; or, to train upon the new base, start "
                "anew in another `output`."
            )

    def read(self, stream: TextIO) -> Material:
        """Of several processes the first tokenises; the others find it in the cache."""
        recipe, prepared = self.recipe, self._prepared(stream)
        self._tokenizer_info = prepared.tokenizer
        lines = data_lines(prepared) + self._beyond_positions(prepared)
        held_out = _held_out(recipe, prepared)
        if prepared.train is not None:
            packs = PackedDataset(prepared.train, recipe.data.packing, recipe.data.max_length, recipe.seed)
            _check_targets(map(packs.at, range(packs.packs_per_epoch)), "data.train", "train on")
            return Material(packs, packs.packs_per_epoch, held_out, lines)
        source = StreamingDataset(_dataset_spec(recipe))
        late = "data, as far as it was read"
        return Material(source, None, held_out, lines, lambda: row_lines(late, source.statistics), source.close)

    def _beyond_positions(self, prepared: PreparedData) -> list[str]:
        recipe, sides = self.recipe, [side for side in (prepared.train, prepared.eval) if side is not None]
        lengths = None if prepared.train is None else np.concatenate([side.lengths for side in sides])
        return beyond_positions(max_sample_length(recipe.model, recipe.adapter), recipe.data.max_length, lengths)

    def place(self, ranks: Ranks, device: torch.device, start: Start | None) -> PlacedDecoder:
        recipe, config = self.recipe, self._config()
        self._check_layout(config)
        check_placing(recipe, ranks, device)
        subject = self._subject(config, device, start, ranks=ranks)
        placed = place(subject, recipe, ranks, device, resumed=start is not None)
        # On a GPU it would make the host wait in every micro-batch, and compiled code has no such tensors.
        # Processes sum whole gradients.
        rows = device.type == "cpu" and not recipe.compile and ranks.alone
        placed.subject.model.embed_tokens.sparse_gradient = rows
        return PlacedDecoder(recipe, placed, device)

    def unplaced(self, checkpoint: Path) -> PlacedDecoder:
        self._check_base(checkpoint)
        device = torch.device("cpu")
        subject = self._subject(self._config(), device, Start(checkpoint, ()))
        return PlacedDecoder(self.recipe, Placed(subject, StepParallel()), device)

    def amount(self, items: int) -> str:
        data = self.recipe.data
        return f"{items} x {data.max_length} tokens" if data.packing.kind != "none" else f"{items} rows"

    def targets(self, items: int) -> int:
        return items * self.recipe.data.max_length

    def _prepared(self, stream: TextIO) -> PreparedData:
        recipe, rows = self.recipe, RowProgress(stream)
        try:
            return prepare(_dataset_spec(recipe), progress=rows)
        finally:
            rows.close()

    def _config(self, info: TokenizerInfo | None = None) -> ModelConfig:
        model, info = self.recipe.model, info or self._tokenizer_info or tokenizer_info(_tokenizer(self.recipe))
        if model.path is None:
            config = from_scratch(model, info.vocab_size, info.bos_id, info.eos_id)
        else:
            config = read_config(resolve_folder(model.path))
        check_vocabulary(config, info.vocab_size)
        return config

    def _subject(
        self, config: ModelConfig, device: torch.device, start: Start | None, *, ranks: Ranks | None = None
    ) -> Subject:
        recipe = self.recipe
        saved = None if start is None or recipe.adapter is None else read_group(start.path, "model")
        return subject_of(
            recipe,
            config,
            device,
            saved=saved,
            resumed=start is not None,
            encode=lambda text: ChatTokenizer(_tokenizer(recipe)).encode_prompt(text),
            ranks=ranks,
        )


@dataclass(frozen=True)
class PlacedDecoder:
    """A `PlacedModel`: a decoder, or adapters on one."""

    recipe: Recipe
    placed: Placed
    device: torch.device

    @property
    def model(self) -> Decoder:
        return self.placed.subject.model

    @property
    def parallel(self) -> StepParallel:
        return self.placed.parallel

    @property
    def name(self) -> str:
        return self.model.config.family

    @property
    def notes(self) -> Sequence[str]:
        unpacked = (kernel.note for kernel in unpack_kernels(self.model, self.dtype))
        return (*doubts(self.recipe.model), *self.placed.notes, *unpacked)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.recipe.precision]

    def parameters(self) -> list[tuple[str, Parameter]]:
        return self.placed.parameters()

    def base(self) -> dict[str, Any] | None:
        return None if self.recipe.adapter is None else base_identity(self.recipe.model)

    def weights(self) -> dict[str, Tensor]:
        return trained_weights(self.model, self.placed.subject.adapters)

    def _trained(self) -> dict[str, Tensor]:
        """The same, as much of each as is here."""
        held = self.parallel.local_parameters
        return {name: held[name].local.detach() if held else one for name, one in self.weights().items()}

    def micro(self, optimizer: Optimizers, most: int) -> int:
        estimate = self.estimate(optimizer, 1)
        resident = estimate.parts.weights + estimate.parts.adapter
        return find_micro_batch(estimate, most, resident_bytes=resident)

    def estimate(self, optimizer: Optimizers, micro: int) -> MemoryEstimate:
        return _estimate(self.recipe, self.placed, self._trained(), optimizer, self.device, micro)

    def learner(self, micro: int) -> Compute:
        model, compiled = self.model, self.recipe.compile
        if compiled and any(isinstance(module, QuantizedWeightModule) for module in model.modules()):
            leave_products_uncompiled()
            leave_slots_uncompiled()
        if compiled and torch.__version__ < "2.12":  # which has wrong gradients of adapters: see `models.ops._SwiGLU`
            leave_slots_uncompiled()
        counted = None if compiled else Activations.beside([*model.parameters(), *model.buffers()])
        return learner(self.placed, self.recipe, self.device, micro, compiled=compiled, activations=counted)

    def generate(self) -> Generate | None:
        return _sampler(self.recipe, self.placed.subject, self.dtype)

    def peak(self) -> Peak:
        return peak_of(self.dtype, self.device, self.parallel.ranks.world.size)

    def least_seconds(self) -> LeastSeconds:
        shape = shape_of(self.model.config)
        peak = self.peak().divisor
        frozen = self.placed.subject.adapters is not None
        return lambda lengths, targets: training_flops(shape, lengths, targets, frozen=frozen) / peak

    def expected(self, run: Run) -> MemoryEstimate:
        return self.estimate(run.optimizer, run.compute.micro)

    def memory(self, run: Run) -> MemoryParts:
        return _memory(run)

    def write(self, target: Path, value: Callable[[str], Tensor | None] | None, *, writes: bool) -> None:
        """A model in the type of activations that it was trained with (fp16: float32), or an adapter."""
        _write(self.placed.subject, self.recipe, target, value, writes=writes)


def _tokenizer_path(recipe: Recipe) -> str:
    named = recipe.model.tokenizer
    if named is not None:
        return named
    assert recipe.model.path is not None, "the recipe's rules ask for a tokenizer when the model is from scratch"
    return str(resolve_folder(recipe.model.path))


def _tokenizer(recipe: Recipe) -> Tokenizer:
    model = recipe.model
    return load_tokenizer(_tokenizer_path(recipe), model.chat_template, model.chat_template_date)


def written_date(recipe: Recipe) -> str | None:
    """The day that the chat template writes in this run: the recipe's, else today's; None where it writes none."""
    if recipe.stage != "sft":
        return None
    return template_date(_tokenizer_path(recipe), recipe.model.chat_template, recipe.model.chat_template_date)


def _dataset_spec(recipe: Recipe) -> DatasetSpec:
    return DatasetSpec(
        recipe.data,
        language_stage(recipe, "tokenising"),
        _tokenizer_path(recipe),
        recipe.model.chat_template,
        recipe.seed,
        recipe.model.chat_template_date,
    )


def _held_out(recipe: Recipe, prepared: PreparedData) -> list[Pack] | None:
    if prepared.eval is None:
        return None
    packs = PackedDataset(prepared.eval, recipe.data.packing, recipe.data.max_length, recipe.seed, shuffle=False)
    held_out = [packs.at(number) for number in range(packs.packs_per_epoch)]
    _check_targets(held_out, "data.eval", "evaluate on")
    return held_out


def _check_targets(packs: Iterable[Pack], key: str, use: str) -> None:
    """Refuse packs that all lack a target: the first token of a pack never is one, whatever its weight.

    Raises DataError.
    """
    if not any(sample.weights.any() for pack in packs for sample in pack.samples):
        raise DataError(
            f"{key}: cut into packed sequences, its rows have no trained token to {use}. Raise data.max_length, or "
            "look at the rows' own labels and weights with `danlu preview`"
        )


def _sizes(config: ModelConfig) -> Sizes:
    return Sizes(config.heads, config.kv_heads, config.intermediate_size, config.vocab_size)


def _memory(run: Run) -> MemoryParts:
    """The parts of the run's memory, as they were in training."""
    compute = run.compute
    assert isinstance(compute, Compute), "these are the parts of a language model's memory"
    assert compute.activations is not None
    average = 0 if run.ema is None else sum(one.nbytes for one in run.ema.state_tensors().values())
    return replace(
        _held(compute.model, compute.adapters, compute.weights(), run.optimizer, average),
        activations=compute.activations.most,
        logits=workspace_bytes(
            compute.activations.targets,
            compute.model.config.hidden_size,
            compute.model.config.vocab_size,
            element_bytes=compute.dtype.itemsize,
            device_type=compute.device.type,
            frozen=not compute.model.head_weight.requires_grad,
        ),
        packed=dense_workspace_bytes(),
    )


def _held(
    model: Decoder, adapters: AdapterSet | None, weights: Mapping[str, Tensor], optimizer: Optimizers, average: int
) -> MemoryParts:
    """What is there in every step, whatever goes through the model. weights: what is trained, as much as is here."""
    adapter = 0 if adapters is None else sum(one.nbytes for one in weights.values())
    return MemoryParts(
        weights=model_bytes(model) + _aside_bytes(adapters) - adapter,
        adapter=adapter,
        gradients=optimizer.gradient_bytes(),
        optimizer=optimizer.resident_state_bytes(),
        average=average,
        activations=0,
        logits=0,
    )


def _aside_bytes(adapters: AdapterSet | None) -> int:
    """Of parameters that have stepped aside for copies of theirs which are trained."""
    added = () if adapters is None else adapters.added.values()
    return sum(copy.original.nbytes for one in added for copy in one.copies)


def _estimate(
    recipe: Recipe,
    placed: Placed,
    weights: Mapping[str, Tensor],
    optimizer: Optimizers,
    device: torch.device,
    micro: int,
) -> MemoryEstimate:
    """What a step of this process is expected to hold: counted, but for activations and logits."""
    model, ranks = placed.subject.model, placed.parallel.ranks
    average = sum(one.nbytes for one in optimizer.parameters.values()) if recipe.ema is not None else 0
    held = _held(model, placed.subject.adapters, weights, optimizer, average)
    elsewhere = optimizer.state_bytes() - optimizer.resident_state_bytes()
    if ranks.data.size > 1 and shards_on_host(recipe, device):
        elsewhere += held.total
        held = replace(held, weights=0, adapter=0, gradients=0, optimizer=0, average=0)
    gathered, gradients = gathered_parameters(model, recipe)
    packed = (one.shape for one in model.modules() if isinstance(one, QuantizedWeightModule))
    fixed = replace(
        held,
        gradients=held.gradients + gradients,
        packed=max((rows * columns for rows, columns in packed), default=0) * DTYPES[recipe.precision].itemsize,
        gathered=gathered,
    )
    return estimate_of(
        recipe,
        model.config,
        fixed,
        plan=placed.plan,
        micro=micro,
        device_type=device.type,
        offloaded_bytes=elsewhere,
        processes=ranks.world.size,
    )


def _sampler(recipe: Recipe, subject: Subject, dtype: torch.dtype) -> Generate | None:
    samples = recipe.evaluation.samples
    if samples is None:
        return None
    chat_tokenizer = ChatTokenizer(_tokenizer(recipe))
    options = SamplingOptions(temperature=samples.temperature, seed=recipe.seed)
    virtual_token_ids = () if subject.adapters is None else subject.adapters.virtual_token_ids
    known = _sample_prompts(recipe, chat_tokenizer, subject.model.config, len(virtual_token_ids))

    def write(prompts: Sequence[str]) -> list[str]:
        tokens = [known[prompt] for prompt in prompts]
        stops = sorted(chat_tokenizer.stop_ids)
        answers = generate(
            subject.model,
            tokens,
            options,
            samples.max_new_tokens,
            stops,
            decode=chat_tokenizer.decode,
            dtype=dtype,
            virtual_token_ids=virtual_token_ids,
        )
        return [answer.text for answer in answers]

    return write


def _sample_prompts(
    recipe: Recipe, chat_tokenizer: ChatTokenizer, config: ModelConfig, virtual: int = 0
) -> dict[str, list[int]]:
    """The tokens of each prompt that samples are asked for, rendered once for the whole run.

    virtual: tokens of adapters before each prompt, where they are known.
    Raises DataError with all prompts that cannot be rendered or that the model cannot continue.
    """
    assert recipe.evaluation.samples is not None, "there are prompts"
    encode = chat_tokenizer.encode_prompt if recipe.stage == "pretrain" else chat_tokenizer.encode_chat_prompt
    tokens: dict[str, list[int]] = {}
    problems: dict[str, str] = {}  # a reason that many prompts share is told of the first
    for index, prompt in enumerate(recipe.evaluation.samples.prompts):
        named = f"evaluation.samples.prompts.{index} ({_beginning(prompt)!r})"
        try:
            tokens[prompt] = encode(prompt)
        except DataError as error:
            problems.setdefault(str(error), f"{named}: {error}")
            continue
        if problem := prompt_problem(config, tokens[prompt], virtual):
            problems[named] = f"{named} {problem}"
    if problems:
        raise DataError("\n  ".join(problems.values()))
    return tokens


def _beginning(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"


def _write(
    subject: Subject, recipe: Recipe, target: Path, value: Callable[[str], Tensor | None] | None, *, writes: bool
) -> None:
    given = recipe.model.chat_template
    tokenizer_folder = (
        _exported_tokenizer_folder(subject, recipe) if writes else fast_tokenizer_folder(_tokenizer_path(recipe))
    )
    template = None if given is None else Path(given).expanduser().read_text(encoding="utf-8")
    if subject.adapters is not None and subject.base is not None:
        write_result(
            subject.adapters,
            subject.base,
            target,
            started_from=recipe.model.adapters,
            quantization=recipe.quantization,
            continued=isinstance(recipe.adapter, sections.Continue),
            tokenizer_from=tokenizer_folder,
            chat_template=template,
            value=value,
            writes=writes,
        )
        return
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    save(
        subject.model,
        target,
        dtype=dtype,
        tokenizer_from=tokenizer_folder,
        chat_template=template,
        value=value,
        writes=writes,
    )


def _exported_tokenizer_folder(subject: Subject, recipe: Recipe) -> Path:
    """The folder of the tokenizer's files for the result, which is read by the type that its config.json says."""
    family = None if subject.adapters is not None and subject.base is not None else subject.model.config.family
    path = _tokenizer_path(recipe)
    try:
        found = exported_tokenizer(path, family)
    except DanluError as error:  # nothing that has been trained may be lost for it
        log.warning("%s: whether the result's tokenizer is read as the one trained with is not known: %s", path, error)
        return fast_tokenizer_folder(path)
    if not found.faithful:
        log.warning(
            "%s: beside a config.json of model_type %s, transformers (and danlu by it) reads another tokenizer from "
            "these files than the one that was trained with. Use the model with the tokenizer's own folder",
            path,
            family,
        )
    return found.folder


def data_lines(prepared: PreparedData) -> list[str]:
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
    lines += [f"{name}: {line}" for line in (*found.cut_lines(), *found.template_lines(), *found.unread_lines())]
    if found.bad_rows:
        rows = "row" if found.bad_rows == 1 else "rows"
        lines.append(f"{name}: {found.bad_rows:,} bad {rows} skipped, the first: {found.bad_examples[0]}")
    return lines
