"""Published measurements of training runs: the rows of a CSV file as runs, or the reason why a row is left out.

The columns are those of the data folder's `measurements/published_measurements.csv`. Nothing here knows single rows:
the text of a cell decides, so that a table with other rows of the same columns is read in the same way. Importing this
imports no torch.

Memory is bytes of one GPU. A number that the source prints as GB or G is in the unit that its engine counts in, or GiB
where that is not known; `Memory.unit_is_certain` is false where no file of the engine says the unit.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from planner.architectures import Architecture
from planner.engines import Engine
from planner.published_cards import card, card_name

GIB = 2**30
_UNITS = {"GiB": GIB, "MiB": 2**20}


Base = Literal["nf4", "nf4-dq", "int4-gptq", "int8"]
"""Formats of a quantized base; nf4-dq quantizes the scales of nf4 too."""


class LeftOut(Enum):
    """Why a row does not count for memory, or for speed."""

    NOT_MEASURED = "a rule of thumb or a claim, not a measurement"
    NO_FIGURE = "no such figure is published"
    OUT_OF_MEMORY = "did not fit: a bound, not a figure"
    CONTRADICTORY = "its own numbers contradict each other"
    ROUNDED = "rounded by its authors in a script's comment or a README ('about')"
    CAPPED = "the length is a cap, and the samples are shorter"
    LONGEST = "the length is that of the longest sample: right for the peak of memory, not for speed"
    NO_MODEL = "the model's shape is not known here"
    NO_METHOD = "a method that is not known here"
    NO_ADAPTER = "rank or targets of the adapter are not stated"
    NO_BATCH = "the micro-batch is not stated"
    NO_LENGTH = "the length is not stated"
    NO_LAYOUT = "the layout is not stated"
    NO_PRECISION = "the precision is not stated"
    NO_OPTIMIZER = "the optimizer is not stated"
    NO_RECOMPUTE = "recomputation is not stated"
    NO_TOKENS = "only FLOP/s or a utilization is published, and how they are computed is not stated"
    NO_CARD = "the card is not stated"


@dataclass(frozen=True)
class Method:
    """What is trained: everything, or an adapter over a frozen, perhaps quantized, base."""

    kind: Literal["full", "lora", "qlora"]
    rank: int | None = None
    targets: tuple[str, ...] | None = None
    """Products with an adapter, by the names of `Architecture.products`; None where neither row nor engine says."""
    trained: tuple[Literal["embedding", "head"], ...] = ()
    """Whole matrices that are trained besides the adapter."""
    base: Base | None = None
    """The format of the frozen base where it is quantized."""


@dataclass(frozen=True)
class Precision:
    """Types of numbers, as the row and its engine state them; None where neither does."""

    weights: str | None
    """Of the weights that the optimizer updates, or of a frozen base."""
    gradients: str | None
    states: str | None
    activations: str
    products: str
    """Of the operands of matrix products: bf16, float8 or mxfp8."""


@dataclass(frozen=True)
class Layout:
    """Ranks by axis. Their product is the number of GPUs, `fsdp` and `replicas` being the two of data parallelism."""

    fsdp: int = 1
    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: Literal[1, 2, 3] | None = None
    """The stage of ZeRO that shares out states among the replicas; FSDP is not meant."""
    schedule: str | None = None
    asynchronous_tensor: bool = False
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        return self.fsdp * self.replicas

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


@dataclass(frozen=True)
class Memory:
    bytes: float
    kind: Literal["allocated", "active", "reserved", "device", "unstated"]
    """Of torch's allocator, or of the device as nvidia-smi shows it."""
    unit_is_certain: bool
    divided_sum: bool
    """Whether the source gives a sum over its GPUs, of which this is one GPU's share."""


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    """Of one GPU."""
    from_step: bool
    """Whether it is computed from a step's seconds, which the source rounds."""
    mfu: float | None
    """As the source computes it, in [0, 1]."""


@dataclass(frozen=True)
class PublishedRun:
    """One run, as far as its row and its engine's habits state it."""

    id: str
    group: str
    source: str
    engine: str
    card: str | None
    architecture: Architecture
    method: Method
    precision: Precision
    optimizer: str | None
    length: int
    lengths: Literal["exact", "longest", "cap"]
    """Whether all rows have this length, the longest has it, or none needs to reach it."""
    micro_batch: int
    """Rows in one forward pass of one data-parallel rank; of a pipeline, in one of its micro-batches."""
    accumulation: int
    """Micro-batches of a step; 1 where the row does not say."""
    gpus: int
    layout: Layout
    recompute: str | None
    """none, full, or selective: products and attention are kept."""
    compiled: bool | None
    offload: frozenset[str]
    """What lies in host memory: activations, optimizer, weights."""
    optimizer_in_backward: bool
    chunked_loss: bool
    memory: Memory | None
    speed: Speed | None
    memory_left_out: LeftOut | None
    speed_left_out: LeftOut | None


@dataclass(frozen=True)
class Row:
    """A row of the table: a run, unless too little is known of it to be one."""

    id: str
    source: str
    run: PublishedRun | None
    memory_left_out: LeftOut | None
    speed_left_out: LeftOut | None


def read_rows(path: Path, architectures: Mapping[str, Architecture], engines: Mapping[str, Engine]) -> list[Row]:
    """Reads every row of a table. Raises ValueError, with the line, where a column is missing or a number is none."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = _COLUMNS - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: the columns {', '.join(sorted(missing))} are missing")
        rows = []
        for cells in reader:
            try:
                rows.append(_row(cells, architectures, engines))
            except ValueError as error:
                raise ValueError(f"{path}:{reader.line_num} ({cells['id']}): {error}") from None
    return rows


# fmt: off
_COLUMNS = frozenset(
    {"id", "split_group", "kind", "source", "model", "params", "method", "precision", "optimizer", "seq_len",
     "micro_batch", "grad_accum", "num_gpus", "gpu", "parallel", "act_ckpt", "compile", "measured_peak_GiB",
     "mem_unit_as_published", "mem_scope", "tokens_per_s_per_gpu", "step_time_s", "MFU_pct", "TFLOPS_per_gpu",
     "notes"}
)
# fmt: on


def _row(cells: Mapping[str, str], architectures: Mapping[str, Architecture], engines: Mapping[str, Engine]) -> Row:
    engine = engines.get(cells["source"].split()[0])
    architecture = architecture_of(cells, architectures)
    memory, speed = _memory(cells, engine), _speed(cells)
    missing = list(_missing(cells, architecture, engine))
    memory_reasons, speed_reasons = _reasons(cells, missing, engine, memory, speed)
    memory_out = memory_reasons[0] if memory_reasons else None
    speed_out = speed_reasons[0] if speed_reasons else None
    run = None
    if architecture is not None and engine is not None and not missing and cells["kind"] in ("measured", "OOM"):
        run = _run(cells, architecture, engine, memory, speed, memory_out, speed_out)
    return Row(cells["id"], cells["source"].split()[0], run, memory_out, speed_out)


def _reasons(
    cells: Mapping[str, str],
    missing: list[LeftOut],
    engine: Engine | None,
    memory_figure: Memory | None,
    speed: Speed | None,
) -> tuple[list[LeftOut], list[LeftOut]]:
    """All reasons to leave a row out for memory, and for speed; the first is the one to name."""
    unusable = _unusable(cells)
    memory = [unusable] if unusable else [*missing]
    timed = [unusable] if unusable else [*missing]
    name = card_name(cells["gpu"])
    if memory_figure is not None and name is not None and memory_figure.bytes > card(name).memory_bytes:
        memory.insert(0, LeftOut.CONTRADICTORY)
    if not _optimizer(cells, engine):
        memory.append(LeftOut.NO_OPTIMIZER)
    if speed is None:
        timed.append(LeftOut.NO_TOKENS)
    if _lengths(cells) == "longest":
        timed.append(LeftOut.LONGEST)
    if name is None:
        timed.append(LeftOut.NO_CARD)
    if cells["kind"] == "measured" and not cells["measured_peak_GiB"]:
        memory.insert(0, LeftOut.NO_FIGURE)
    if cells["kind"] == "measured" and not _has_speed(cells):
        timed.insert(0, LeftOut.NO_FIGURE)
    return memory, timed


def _unusable(cells: Mapping[str, str]) -> LeftOut | None:
    """The reason that counts whatever else the row says."""
    notes = cells["notes"]
    if cells["kind"] == "OOM":
        return LeftOut.OUT_OF_MEMORY
    if cells["kind"] != "measured":
        return LeftOut.NOT_MEASURED
    if re.search(r"suspicious|does not match", notes) or "prints" in cells["gpu"]:
        return LeftOut.CONTRADICTORY
    if re.search(r"rounded by its authors|uses about", notes):
        return LeftOut.ROUNDED
    if _lengths(cells) == "cap":
        return LeftOut.CAPPED
    return None


def _missing(cells: Mapping[str, str], architecture: Architecture | None, engine: Engine | None) -> Iterator[LeftOut]:
    """Reasons for which neither memory nor speed of a row can be predicted, the plainest first."""
    if not cells["seq_len"]:
        yield LeftOut.NO_LENGTH
    if not cells["micro_batch"]:
        yield LeftOut.NO_BATCH
    if architecture is None:
        yield LeftOut.NO_MODEL
    if _layout(cells["parallel"], int(cells["num_gpus"] or 1)) is None:
        yield LeftOut.NO_LAYOUT
    if not cells["precision"] or "presumed" in cells["precision"]:
        yield LeftOut.NO_PRECISION
    if _recompute(cells, engine) is None:
        yield LeftOut.NO_RECOMPUTE
    method = _method(cells, engine)
    if method is None:
        yield LeftOut.NO_METHOD
    elif method.kind != "full" and (method.rank is None or method.targets is None):
        yield LeftOut.NO_ADAPTER


def _run(
    cells: Mapping[str, str],
    architecture: Architecture,
    engine: Engine,
    memory: Memory | None,
    speed: Speed | None,
    memory_out: LeftOut | None,
    speed_out: LeftOut | None,
) -> PublishedRun:
    gpus = int(cells["num_gpus"] or 1)
    layout, method = _layout(cells["parallel"], gpus), _method(cells, engine)
    assert layout is not None and method is not None, "a row that lacks them is left out before"
    micro_batch, accumulation = int(cells["micro_batch"]), int(cells["grad_accum"] or 1)
    if layout.pipeline > 1 and engine.pipeline_micro_batches == "stages":
        stages = layout.pipeline * (2 if layout.schedule == "interleaved-1F1B" else 1)
        micro_batch, accumulation = max(1, micro_batch // stages), accumulation * stages
    notes, added = cells["notes"], _added(cells["notes"])
    return PublishedRun(
        cells["id"],
        cells["split_group"],
        cells["source"],
        engine.name,
        card_name(cells["gpu"]),
        architecture,
        method,
        _precision(cells, engine, method),
        _optimizer(cells, engine),
        int(cells["seq_len"]),
        _lengths(cells),
        micro_batch,
        accumulation,
        gpus,
        layout,
        _recompute(cells, engine),
        {"yes": True, "no": False}.get(cells["compile"]),
        frozenset(
            (["activations"] if "offload" in cells["act_ckpt"] else [])
            + (["weights", "optimizer"] if "CPU offload" in cells["parallel"] else [])
            + (["activations"] if "CPU offload True" in notes else [])
        ),
        added >= 5 and method.kind == "full",
        added >= 3,
        memory,
        speed,
        memory_out,
        speed_out,
    )


# The table of torchtune adds one option a row. Its notes name the newest; those before it hold too.
_ADDITIONS = ("+packed", "+compile", "+chunked CE", "+act ckpt", "+optimizer in backward", "+activation offload")


def _added(notes: str) -> int:
    """How many options of torchtune's table hold; of its later rows, which end it, all."""
    for number, name in enumerate(_ADDITIONS, start=1):
        if notes.startswith(name):
            return number
    return len(_ADDITIONS) if "each row adds to the previous" in notes and not notes.startswith("baseline") else 0


def architecture_of(cells: Mapping[str, str], architectures: Mapping[str, Architecture]) -> Architecture | None:
    """The shape of the row's model; learned positions are as many as its length, as its parameters are counted."""
    name = re.sub(r"\s*\(.*\)$", "", cells["model"]).split("/")[-1].lower()
    found = architectures.get(name)
    return found.at_length(int(cells["seq_len"])) if found and cells["seq_len"] else found


def _method(cells: Mapping[str, str], engine: Engine | None) -> Method | None:
    """What is trained; None for a method without products that have an adapter (prefixes, bone)."""
    text, precision = cells["method"], cells["precision"]
    if text in ("full", "full pretrain"):
        return Method("full")
    found = re.match(r"(Q?)LoRA(?: r(\d+))?", text)
    if found is None:
        return None
    rank = int(found[2]) if found[2] else None
    named = re.search(r"\((q,v);", text)
    targets = tuple(named[1].split(",")) if named else engine.adapter_targets if engine else None
    base: Base | None = "nf4-dq" if "nf4-dq" in precision else "nf4" if "nf4" in precision else None
    if found[1]:
        base = "int4-gptq" if "GPTQ" in text else base or (engine.quantized_base if engine else None)
    method = Method("qlora" if base else "lora", rank, targets, base=base)
    return replace(method, trained=("embedding", "head")) if "trainable embedding" in text else method


def _precision(cells: Mapping[str, str], engine: Engine, method: Method) -> Precision:
    text = cells["precision"].lower()
    products = "mxfp8" if "mxfp8" in text else "float8" if re.search(r"float8|fp8 ", text) else "bf16"
    states = re.search(r"\((bf16|fp32) states\)", cells["optimizer"])
    activations = "fp16" if method.base == "int4-gptq" and "qlora fp16" in text else "bf16"
    habit = engine.precision
    kept_states = habit["states"]
    if isinstance(kept_states, Mapping):
        has_deepspeed = engine.has_deepspeed(method.kind, int(cells["num_gpus"] or 1))
        kept_states = kept_states["deepspeed" if has_deepspeed else "otherwise"]
    gradients = habit.get("reduced_gradients_pure" if "pure" in text else "gradients", habit.get("gradients"))
    return Precision(
        habit.get("frozen_weights", habit.get("weights")) if method.kind != "full" else habit.get("weights"),
        gradients,
        states[1] if states else "int8" if "8bit" in cells["optimizer"].lower() else kept_states,
        activations,
        products,
    )


def _optimizer(cells: Mapping[str, str], engine: Engine | None) -> str | None:
    return cells["optimizer"] or (engine.optimizer if engine else None)


def _recompute(cells: Mapping[str, str], engine: Engine | None) -> str | None:
    text = cells["act_ckpt"]
    if not text:
        habit = engine.recompute if engine else {}
        return habit.get("single" if cells["parallel"] == "single" else "sharded")
    return re.split(r"[ +]", text)[0]


def _lengths(cells: Mapping[str, str]) -> Literal["exact", "longest", "cap"]:
    notes = cells["notes"]
    if "longest sample" in notes:
        return "longest"
    if "packing=true" in notes.lower():
        return "exact"
    return "cap" if re.search(r"unpacked|is a cap|shorter than max_length", notes) else "exact"


_AXES = {"fsdp": "fsdp", "tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "replicas", "ep": "expert"}


def _layout(text: str, gpus: int) -> Layout | None:
    """Reads a layout such as `FSDP32 TP8 asyncTP`; None for one that is not stated, or is not one of equal ranks."""
    lower = text.lower()
    if lower == "single":
        return Layout()
    if not text or re.search(r"best config|device_map", lower):
        return None
    axes: dict[str, int] = {}
    for axis, ranks in re.findall(r"\b(fsdp|tp|pp|cp|dp|ep)(\d+)\b", lower):
        axes[_AXES[axis]] = int(ranks)
    zero = re.search(r"\bzero(\d)", lower)
    sharded = re.search(r"\bfsdp\b(?!\d)", lower)
    rest = gpus // _product(axes.get(axis, 1) for axis in ("fsdp", "tensor", "pipeline", "context", "replicas"))
    if rest > 1:
        axes["fsdp" if sharded else "replicas"] = rest * axes.get("fsdp" if sharded else "replicas", 1)
    schedule = "interleaved-1F1B" if "interleaved" in lower else "1F1B" if axes.get("pipeline", 1) > 1 else None
    layout = Layout(
        **axes,
        zero=({"1": 1, "2": 2, "3": 3}[zero[1]] if zero else 3 if lower.startswith("zero ") else None),  # type: ignore[arg-type]
        schedule=schedule,
        asynchronous_tensor="asynctp" in lower,
        sequence_parallel=bool(re.search(r"\bsp\b", lower)),
    )
    return layout if layout.gpus == gpus else None


def _product(numbers: Iterator[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _memory(cells: Mapping[str, str], engine: Engine | None) -> Memory | None:
    if not cells["measured_peak_GiB"]:
        return None
    # The column in GiB is the compiler's; what the source prints says more of its unit.
    printed = re.match(r"([\d.]+) *(\w*)$", cells["mem_unit_as_published"])
    number, unit = (float(printed[1]), printed[2]) if printed else (float(cells["measured_peak_GiB"]), "")
    decimal = printed is not None and engine is not None and engine.memory_unit == "decimal"
    amount = number * _UNITS.get(unit, 1e9 if decimal else GIB)
    summed = cells["mem_scope"] == "total over all GPUs"
    certain = unit in _UNITS or (engine is not None and engine.is_stated("memory_unit"))
    kind = "active" if "ACTIVE" in cells["notes"] else engine.memory_kind if engine else "unstated"
    return Memory(amount / (int(cells["num_gpus"]) if summed else 1), kind, certain, summed)


def _has_speed(cells: Mapping[str, str]) -> bool:
    return any(cells[name] for name in ("tokens_per_s_per_gpu", "step_time_s", "MFU_pct", "TFLOPS_per_gpu"))


def _speed(cells: Mapping[str, str]) -> Speed | None:
    """Tokens per second of a GPU; from a step's seconds where only these are published, of data-parallel ranks."""
    mfu = float(cells["MFU_pct"]) / 100 if cells["MFU_pct"] else None
    step = float(cells["step_time_s"]) if cells["step_time_s"] else None
    if cells["tokens_per_s_per_gpu"]:
        # The table's compiler has divided the tokens of a step by its seconds where both are there.
        return Speed(float(cells["tokens_per_s_per_gpu"]), step is not None, mfu)
    layout = _layout(cells["parallel"], int(cells["num_gpus"] or 1))
    if step and cells["seq_len"] and cells["micro_batch"] and cells["grad_accum"] and layout:
        ranks = layout.data / layout.gpus
        tokens = int(cells["seq_len"]) * int(cells["micro_batch"]) * int(cells["grad_accum"]) * ranks
        return Speed(tokens / step, True, mfu)
    return None
