"""A recipe of `danlu quantize`: rows as packs, the model layer by layer, and the folder that is written."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from danlu.adapters.adapter_config import is_adapter, read_adapter_config, resolve_adapter
from danlu.assembly.calibration import Calibration
from danlu.assembly.layerwise_quantizing import LayerResult, LayerwiseQuantizer, Method, quantized_sites
from danlu.assembly.merging import find_tokenizer
from danlu.assembly.quantized_folder import ExportedModel
from danlu.assembly.recipe_adapters import dataset_spec
from danlu.assembly.stored_base import refuse_quantized
from danlu.core.errors import DanluError, DataError, ModelError, RecipeError, ResourceError, Stopped
from danlu.core.output_folder import refuse_existing
from danlu.core.shard_box import ShardBox
from danlu.core.types import Pack
from danlu.data.packed_dataset import PackedDataset
from danlu.data.prepare import DatasetSpec, prepare
from danlu.data.tokenizer_export import end_of_turn_ids
from danlu.inference.generation_config import find_model
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import CONFIG, read_config, read_json, resolve_folder, untouched_tensors
from danlu.models.loading import load_boxes, meta_decoder, stored_dtype
from danlu.models.saving import boxes_of, save
from danlu.models.sites import sites_of
from danlu.numerics.dtypes import DTYPES
from danlu.numerics.format import FP8_BLOCKS, MXFP4, MXFP8, NVFP4, Format, Scaled, ScaleKind, ZeroKind
from danlu.numerics.quantizers.awq import Awq
from danlu.numerics.quantizers.gptq import Gptq
from danlu.numerics.quantizers.quantizer import Nearest, Quantizer
from danlu.recipe.loading import load_resolved
from danlu.recipe.sections import Data
from danlu.recipe.sections.quantizing import (
    AwqRounding,
    CalibrationData,
    GptqRounding,
    QuantizeRecipe,
)
from danlu.training.progress import RowProgress


@dataclass(frozen=True)
class Quantized:
    """The outcome of a recipe."""

    folder: Path
    """The folder of the model that was quantized."""
    quantized: int
    """Parameters that have codes."""
    parameters: int
    bits: float
    """Bits of a quantized parameter, its share of scales and zeros included."""
    calibration_tokens: int
    resumed: int
    """Layers that an earlier run of the same command had done."""
    notes: tuple[str, ...]
    """Messages on parts that are not quantized as the method has it, and on rows that were left out."""


def work_folder(recipe: QuantizeRecipe) -> Path:
    """The folder next to the output that has the finished layers until the output is whole."""
    target = Path(recipe.output).expanduser()
    return target.with_name(f".{target.name}.quantizing")


def quantize(
    recipe: QuantizeRecipe, stream: TextIO, *, progress: Callable[[int, int], None], dry_run: bool = False
) -> Quantized:
    """Quantizes a model as a recipe says, and writes it into `recipe.output`.

    The work is kept in a folder next to the output until that is whole: the same command goes on where a killed one
    stopped. stream: where the reading of rows is shown; progress: called with the layers that are done, and all.
    dry_run: do all up to the first layer, and write nothing; no parameter of the outcome is quantized then.

    Raises ModelError for a model that is quantized already, that classifies, or has weights that are not finite,
    RecipeError for groups that do not divide its inputs, DataError for rows that cannot be used, and ResourceError
    where `recipe.output` holds anything, or a device is not there; Stopped where a signal stops the work on layers.
    """
    target = Path(recipe.output).expanduser()
    refuse_existing(target)
    refuse_float_zeros(recipe)
    folder = find_model(recipe.model) if recipe.needs_calibration else resolve_folder(recipe.model)
    config = read_config(folder)
    _check_model(folder, config)
    check_groups(config, recipe)
    stored = stored_dtype(folder)
    dtype = DTYPES.get(recipe.dtype, torch.float32 if stored == torch.float64 else stored)
    method = method_of(recipe, dtype)
    exported = None if recipe.export == "dense" else _exported(folder, config, recipe, method)
    device = _device(recipe.device)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    notes, calibration = list[str](), None
    if recipe.needs_calibration:
        assert recipe.calibration is not None, "the recipe's rules ask for it"
        packs, notes = calibration_packs(recipe, recipe.calibration, folder, config, stream)
        calibration = Calibration.of(config, folder, packs, dtype=DTYPES[recipe.precision], device=device)
    notes += trained_otherwise(recipe, method)
    tokens = 0 if calibration is None else calibration.tokens
    if dry_run:
        return Quantized(folder, 0, config.parameter_count(), 0.0, tokens, 0, tuple(notes))
    work = work_folder(recipe)
    layers = LayerwiseQuantizer(config, folder, method, calibration, work, dtype=dtype, device=device)
    with _saying_how_far(layers, len(config.layers)):
        resumed = layers.run(progress)
        written = _Written(folder, config, layers)
        if exported is None:
            _save_dense(folder, target, config, written, dtype)
        else:
            exported.write(folder, target, dtype=dtype, value=written.value, scaled=written.scaled)
    shutil.rmtree(work)
    return Quantized(
        folder,
        written.quantized,
        config.parameter_count(),
        written.bits / max(1, written.quantized),
        tokens,
        resumed,
        (*notes, *written.notes),
    )


@contextmanager
def _saying_how_far(layers: LayerwiseQuantizer, total: int) -> Iterator[None]:
    """Gives a signal that stops the work within the block a message on what the next run finds."""
    try:
        yield
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        done = layers.finished()
        kept = "goes on from there" if done else "starts again"
        raise Stopped(
            number, f"stopped at once; {done} of {total} layers are quantized, and the same command {kept}"
        ) from None


def _save_dense(folder: Path, target: Path, config: ModelConfig, written: _Written, dtype: torch.dtype) -> None:
    """Writes a folder with the numbers of the codes."""
    tokenizer = find_tokenizer([folder])
    save(
        meta_decoder(config),
        target,
        dtype=dtype,
        tokenizer_from=tokenizer,
        generation_from=folder,
        value=boxes_of(written.value),
        origin=folder,
        stop_ids=() if tokenizer is None else end_of_turn_ids(str(tokenizer)),
    )


def _exported(folder: Path, config: ModelConfig, recipe: QuantizeRecipe, method: Method) -> ExportedModel:
    """The tensors of a folder in another tool's layout. Raises ModelError for a model that it cannot hold."""
    assert recipe.export != "dense"
    if untouched := untouched_tensors(folder, config):
        raise ModelError(
            f"export: {recipe.export}: {folder} has {len(untouched)} tensors that are not the language model's, "
            f"{next(iter(untouched))} among them, which would be left out. Use export: dense"
        )
    names = [
        f"layers.{number}.{name}.weight"
        for number in range(len(config.layers))
        for name in quantized_sites(config, number, experts=recipe.experts)
    ]
    return ExportedModel(config, method.form, recipe.export, names, rounds_activations=recipe.activations == "int8")


def method_of(recipe: QuantizeRecipe, dtype: torch.dtype) -> Method:
    """The method of a recipe; dtype: of the weights that are not quantized."""
    rounding = recipe.rounding
    quantizer: Quantizer = Nearest()
    if isinstance(rounding, GptqRounding):
        quantizer = Gptq(rounding.act_order, rounding.damping)
    elif isinstance(rounding, AwqRounding):
        quantizer = Awq(rounding.clip)
    scaling = isinstance(rounding, AwqRounding)
    return Method(quantizer, format_of(recipe, dtype), recipe.smoothing, scaling, recipe.experts)


_FIXED_FORMATS: Mapping[str, Format] = {
    "fp8": FP8_BLOCKS,
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}
_SCALES: Mapping[torch.dtype, ScaleKind] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def format_of(recipe: QuantizeRecipe, dtype: torch.dtype) -> Format:
    """The format of weights, with the scales that the folder has: float16 in AWQ's and GPTQ's, else of the model's
    type; float32 where it has dense numbers and no scales."""
    rounding = recipe.rounding
    if recipe.export in _FIXED_FORMATS:
        return _FIXED_FORMATS[recipe.export]
    scale: ScaleKind = "float16" if recipe.export in ("awq", "gptq") else _SCALES.get(dtype, "float32")
    if recipe.export == "dense":
        scale = "float32"
    zero: ZeroKind = "none" if rounding.symmetric else "integer"
    return Format(f"int{rounding.bits}", (1, rounding.group), scale, zero)  # type: ignore[arg-type]


def refuse_float_zeros(recipe: QuantizeRecipe) -> None:
    """Raises ModelError for a run, or a folder, of a QA-LoRA, which merges into zeros that no export holds."""
    path = Path(recipe.model).expanduser()
    if not is_adapter(path) or not read_adapter_config(resolve_adapter(path)).values.get("use_qalora"):
        return
    raise ModelError(
        f"{path}: qa-lora merges into zeros that are no integers, and zeros of awq, gptq and compressed-tensors are: "
        "rounded, the change would be another one by several percent. `danlu merge` writes the merged numbers as a "
        "dense folder"
    )


def trained_otherwise(recipe: QuantizeRecipe, method: Method) -> list[str]:
    """A note for the console where the run of a model trained it for a format, and this is not how it is rounded."""
    path = Path(recipe.model).expanduser() / "recipe.yaml"
    if not path.is_file():
        return []
    try:
        trained = load_resolved(path).trained_quantization
    except DanluError:
        return []
    if trained is None:
        return []
    from danlu.assembly.trained_quantization import trained_format

    if isinstance(method.quantizer, Nearest) and method.smoothing is None and method.form == trained_format(trained):
        return []
    settings = ", ".join(f"{key}: {value}" for key, value in trained.model_dump().items() if key != "trained")
    return [
        f"{recipe.model} was trained for other numbers ({settings}): these are lost. kind: nearest, with the same bits "
        "and group and an export with such scales, writes them"
    ]


def check_groups(config: ModelConfig, recipe: QuantizeRecipe) -> None:
    """Raises RecipeError where a group does not divide the inputs of a layer that is quantized."""
    group = recipe.rounding.group if recipe.export not in _FIXED_FORMATS else 0
    chosen = {
        f"layers.{number}.{name}"
        for number in range(len(config.layers))
        for name in quantized_sites(config, number, experts=recipe.experts)
    }
    inputs = {site.name: site.shape[1] for site in sites_of(config) if site.name in chosen}
    wrong = [name for name, width in inputs.items() if group and width % group]
    if not wrong:
        return
    dividing = [size for size in (256, 128, 64, 32, 16, 8, 4) if all(width % size == 0 for width in inputs.values())]
    use = f"Use {', '.join(map(str, dividing))}, or" if dividing else "Use"
    raise RecipeError(
        f"quantization.{len(recipe.quantization) - 1}.group: {group} does not divide the {inputs[wrong[0]]} inputs of "
        f"{wrong[0]} ({len(wrong)} of {len(inputs)} layers). {use} 0 for one scale a row"
    )


def calibration_packs(
    recipe: QuantizeRecipe, section: CalibrationData, folder: Path, config: ModelConfig, stream: TextIO
) -> tuple[list[Pack], list[str]]:
    """The packs of a recipe's rows, rendered as in training, and notes for the console.

    Rows on which the run that made the model evaluates are left out. Raises DataError for rows that cannot be read, and
    where none is left.
    """
    length = min(section.max_length, config.context_length)
    data = Data(
        train=section.data,
        max_length=length,
        train_on="all",
        cache=section.cache,
        on_bad_row=section.on_bad_row,
        bad_row_limit=section.bad_row_limit,
    )
    spec = DatasetSpec(data, "sft", str(folder), None, recipe.seed, section="calibration")
    with closing(RowProgress(stream)) as progress:
        train = prepare(spec, progress=progress).train
    assert train is not None, "rows that are streamed are no calibration"
    packs = PackedDataset(train, data.packing, length, recipe.seed)
    evaluated, notes = _evaluated(recipe.model, length)
    chosen, count, left_out = list[Pack](), 0, 0
    for number in range(packs.packs_per_epoch):
        pack = packs.at(number)
        samples = tuple(
            each for each in pack.samples if each.tokens[: evaluated.length].tobytes() not in evaluated.rows
        )
        left_out += len(pack.samples) - len(samples)
        if not samples:
            continue
        pack = Pack(samples)
        if chosen and count + pack.tokens > section.tokens:
            break
        chosen.append(pack)
        count += pack.tokens
    names = ", ".join(source.path for source in section.data)
    if not chosen:
        raise DataError(
            f"calibration.data: {names}: the run of {recipe.model} evaluates on all of these rows, and calibration "
            "would make its figures better than they are. Name other rows"
        )
    if left_out:
        notes.append(f"calibration: {left_out:,} rows are left out, on which the run of {recipe.model} evaluates")
    if count < section.tokens and number + 1 == packs.packs_per_epoch:
        notes.append(f"calibration: {names} has {count:,} tokens, fewer than calibration.tokens: {section.tokens:,}")
    return chosen, notes


@dataclass(frozen=True)
class _Evaluated:
    """The rows that a run evaluates on, by their first `length` tokens."""

    rows: frozenset[bytes]
    length: int


def _evaluated(model: str, length: int) -> tuple[_Evaluated, list[str]]:
    """The evaluation rows of the run that ended with a model, none of a folder that is no run's; notes."""
    path = Path(model).expanduser() / "recipe.yaml"
    nothing = _Evaluated(frozenset(), length)
    if not path.is_file():
        return nothing, []
    try:
        trained = load_resolved(path)
        if trained.data.eval is None or trained.stage not in ("pretrain", "sft", "distill"):
            return nothing, []
        held_out = prepare(dataset_spec(trained)).eval
    except DanluError as error:
        return nothing, [f"calibration: may have rows that {path} evaluates on, which cannot be read: {error}"]
    if held_out is None:
        return nothing, []
    shared = min(length, trained.data.max_length)
    rows = (held_out.sample(number).tokens[:shared].tobytes() for number in range(len(held_out)))
    return _Evaluated(frozenset(rows), shared), []


class _Written:
    """The parameters of a quantized model as `save` asks for them; the layer that was asked for last is in memory."""

    def __init__(self, folder: Path, config: ModelConfig, layers: LayerwiseQuantizer) -> None:
        self._folder, self._config, self._layers = folder, config, layers
        self._number, self._result = -1, LayerResult()
        self._counted: set[str] = set()
        self.quantized = 0
        self.bits = 0
        """Bits of all codes, scales and zeros."""
        self.notes: list[str] = []

    def value(self, name: str) -> Tensor:
        """A parameter by its name in the decoder, float32."""
        first, *rest = name.split(".")
        if first != "layers":
            value = torch.empty(dict(meta_decoder(self._config).named_parameters())[name].shape)
            load_boxes(self._folder, self._config, {name: (value, ShardBox.full(value.shape))})
            return value
        self._read(int(rest[0]))
        if name not in self._result.quantized:
            return self._result.others[name]
        return self.scaled(name).decode()

    def scaled(self, name: str) -> Scaled:
        """The codes of a parameter that is quantized."""
        self._read(int(name.split(".")[1]))
        scaled = self._result.quantized[name]
        if name not in self._counted:
            self._counted.add(name)
            self.quantized += scaled.codes.numel()
            self.bits += scaled.codes.numel() * scaled.format.bits + 8 * scaled.scales.nbytes
            self.bits += 0 if scaled.zeros is None else scaled.zeros.numel() * scaled.format.bits
        return scaled

    def _read(self, number: int) -> None:
        """Reads a layer, if it is not the last one that was read."""
        if number != self._number:
            self._number = number
            self._result = self._layers.result(number)
            self.notes += [note for note in self._result.notes if note not in self.notes]


def _check_model(folder: Path, config: ModelConfig) -> None:
    refuse_quantized(folder, "Name the model it was made from")
    if read_json(folder / CONFIG).get("quantization_config") is not None:
        raise ModelError(
            f"{folder}: is quantized already (quantization_config in {CONFIG}); quantizing it again would round twice. "
            "Name the model it was made from"
        )
    if config.task != "causal-lm":
        raise ModelError(f"{folder}: a reward model is not quantized; quantize the language model that it starts from")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ResourceError("device: cuda: there is no GPU here. Leave it out, or use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
