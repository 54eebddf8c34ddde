"""Profiles of machines: measured seconds of the operations of a step, by size and type. This imports no torch.

`measure_machine.py` and `measure_links.py` measure; `danlu bench machine` writes the result.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import DataError, RecipeError, ResourceError
from danlu.core.small_files import parse_json, read_small
from danlu.models.kernel_limits import ROW_MULTIPLE, SHORT_DOCUMENT
from danlu.planning.cards import nvidia_devices
from danlu.planning.measured_table import Seconds, Table
from danlu.planning.product_peak import cpu_model

FORMAT = 4
"""The format of a profile's file; a change of the tables' meaning raises it."""
PRODUCT_BEFORE = (256, 1024, 1024)
"""Rows, outputs and inputs of the float32 products behind which calls are measured on a CPU: some 5 to 20 ms."""
BYTES_BEFORE = 4 * (256 * 1024 + 1024 * 1024 + 256 * 1024)
"""Bytes that such a product reads and writes."""
PROFILES = "~/.cache/danlu/machine"
Device = Literal["cpu", "cuda"]
Result = Literal["output", "input_gradient", "weight_gradient"]
"""The results of the three products of a linear layer with T tokens, O outputs, I inputs: x [T, I] with W [O, I] along
I, the gradient [T, O] with W along O, and the gradient with x along T. Operands that lie in memory across the sum are
other work for a library: bfloat16 without units of its own takes five times as long for a gradient of the input."""
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Streamed = Literal["copy", "new", "add", "activation", "activation_backward", "norm", "norm_backward"]
"""Operations that take as long as their bytes. copy: into memory that the caches hold; all others make new tensors, as
a step does, which nothing has written to for long."""
GROUPED = 512
"""Inputs and outputs of the matrices of which grouped products are measured."""
_AGAIN = "Measure it again with danlu bench machine"


class _OlderProfileError(DataError):
    """A file is a profile in a format that this danlu does not read any more."""


@dataclass(frozen=True)
class Machine:
    """The machine that a profile is of: all that changes its speed."""

    processor: str  # as the system names it, or the GPU
    device: Device
    threads: int  # of each process
    processes: int  # that compute at the same time
    torch: str  # its version

    @property
    def key(self) -> str:
        """One line that names the machine, for messages."""
        several = f" in each of {self.processes} processes" if self.processes > 1 else ""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.processor}, {threads}{several}, torch {self.torch}"

    @property
    def file_name(self) -> str:
        """The name of the profile's file."""
        return f"{sha256(f'{self.device} {self.key}'.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class MachineProfile:
    """Measured seconds of the operations of a step on one machine, by size and type; `danlu bench machine` writes it.

    Precisions are those of a recipe: fp32, bf16, fp16. Sizes that were not measured are between or beyond those that
    were, which the returned `Seconds` tell.
    """

    machine: Machine
    tables: Mapping[str, Table]
    measured_at: str = ""  # UTC, in ISO 8601

    @classmethod
    def read(cls, file: Path | str) -> MachineProfile:
        """Reads a profile from its file. Raises DataError for a file that is none, is torn, or is of another machine
        than its name says."""
        file = Path(file)
        try:
            content = parse_json(read_small(file))
            if isinstance(content["format"], int) and content["format"] < FORMAT:
                formats = f"format {content['format']}, and this danlu reads {FORMAT}"
                raise _OlderProfileError(f"{file}: a profile of an older danlu ({formats}). {_AGAIN}")
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, and this danlu reads {FORMAT}")
            machine = Machine(**content["machine"])
            tables = {str(name): Table.from_json(table) for name, table in content["tables"].items()}
            profile = cls(machine, tables, str(content["measured_at"]))
        except FileNotFoundError:
            raise DataError(f"{file}: no such profile. Run danlu bench machine") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{file}: not a profile of a machine, or torn ({reason}). {_AGAIN}") from None
        if file.name != machine.file_name and re.fullmatch(r"[0-9a-f]{16}\.json", file.name):
            raise DataError(f"{file}: is of another machine ({machine.key}) than its name says. {_AGAIN}")
        return profile

    @classmethod
    def here(
        cls, processes: int = 1, threads: int | None = None, folder: str | Path = PROFILES, device: Device | None = None
    ) -> MachineProfile | None:
        """Returns the newest profile of this machine, without importing torch; None where it was not measured.

        threads: of each process; None: OMP_NUM_THREADS where it is set, else any number. device: None is a GPU where
        nvidia-smi shows one. Profiles of an older danlu are passed over. Raises DataError for a torn file where there
        is no other.
        """
        if threads is None and (set_threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
            threads = int(set_threads)
        here = machine_here(device, threads or 0, processes)
        matching: list[MachineProfile] = []
        torn: DataError | None = None
        for file in sorted(Path(folder).expanduser().glob("*.json")):
            try:
                profile = cls.read(file)
            except _OlderProfileError:
                continue
            except DataError as error:
                torn = error
                continue
            machine = profile.machine
            has_threads = threads is None or here.device == "cuda" or machine.threads == threads
            if has_threads and replace(machine, threads=here.threads) == here:
                matching.append(profile)
        if not matching and torn is not None:
            raise torn
        return max(matching, key=lambda profile: profile.measured_at, default=None)

    def write(self, folder: str | Path = PROFILES) -> Path:
        """Writes the profile in place of an older one of this machine, and returns its file. Raises OSError."""
        folder = Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, **self.to_json()}
        write_atomically(folder / self.machine.file_name, json.dumps(content).encode())
        return folder / self.machine.file_name

    def to_json(self) -> dict[str, Any]:
        """Returns machine, date and tables as JSON holds them."""
        tables = {name: table.to_json() for name, table in self.tables.items()}
        return {"machine": vars(self.machine), "measured_at": self.measured_at, "tables": tables}

    def product_seconds(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        """Seconds of a product [m, n] that sums over k, as a linear layer makes it for a result."""
        match result:
            case "output":
                return self._table("product", precision).at(m, n, k)
            case "input_gradient":
                return self._table("input_gradient", precision).at(m, k, n)
            case "weight_gradient":
                return self._table("weight_gradient", precision).at(k, m, n)

    def grouped_seconds(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        """Seconds of the products [rows, n] of a number of groups, each of which sums over k.

        Outputs are measured, with matrices of one size; other matrices and results take as much longer as one product
        does.
        """
        table = self._table("grouped", precision)
        measured = table.at(groups, rows)
        own = self.product_seconds(rows, n, k, precision, result)
        of_measured = self.product_seconds(rows, GROUPED, GROUPED, precision)
        return Seconds(measured * own / of_measured, measured.extrapolated or own.extrapolated)

    def bytes_seconds(self, count: float, kind: Streamed = "copy", precision: str = "fp32") -> Seconds:
        """Seconds of an operation that reads and writes `count` bytes together."""
        return self._table(kind, precision).at(count)

    def attention_seconds(
        self, length: float, heads: float, width: float, precision: str, *, backward: bool = False
    ) -> Seconds:
        """Seconds of causal attention in one document; with as many heads of keys as of queries.

        On a CPU rows are filled up: a document takes as long as one of the next multiple of ROW_MULTIPLE tokens.

        Documents of up to SHORT_DOCUMENT tokens and longer ones are computed by kernels of their own where a profile
        has tables of both, and seconds of one say nothing about the other: in bfloat16 without AVX512 blocks of
        products are twenty times slower.

        Narrower heads than were measured take as much less time as the narrowest two that were measured say: softmax
        has the same numbers for any width. They take a share of the width at least.
        """
        name = "attention_backward" if backward else "attention"
        is_apart = length > SHORT_DOCUMENT and f"{name}_long {precision}" in self.tables
        table = self._table(f"{name}_long" if is_apart else name, precision)
        if self.machine.device == "cpu":
            length = -(-length // ROW_MULTIPLE) * ROW_MULTIPLE
        narrowest, *wider = table.axes[2]
        if width >= narrowest or not wider:
            return table.at(length, heads, width)
        first, second = table.at(length, heads, narrowest), table.at(length, heads, wider[0])
        slope = (second - first) / (wider[0] - narrowest)
        return Seconds(max(first * width / narrowest, first - slope * (narrowest - width)), extrapolated=True)

    def update_seconds(self, elements: float) -> Seconds:
        """Seconds of AdamW's update of float32 weights with both moments."""
        return self._table("adamw").at(elements)

    def dequantize_seconds(self, elements: float) -> Seconds:
        """Seconds in which an NF4 matrix becomes a dense one."""
        return self._table("dequantize_nf4").at(elements)

    def call_seconds(self, *, trained: bool = False, behind_products: bool = False) -> Seconds:
        """Seconds of an operation on next to nothing: the cost of the call.

        trained: with gradients, both ways together, each behind a product. behind_products: whether products, which
        take the caches, come before it; else it is one of many small calls.
        """
        return self._table("call_trained" if trained else "call_behind_products" if behind_products else "call").at(1)

    def collective_seconds(self, kind: Collective, count: float, ranks: int) -> Seconds:
        """Seconds of a collective of `ranks` processes: of a tensor of `count` bytes that is summed, that is gathered
        in the end, that each process scatters in the beginning or deals out to all, or that is sent.

        Of another number of ranks than were measured by the steps and bytes of a ring. Raises RecipeError where links
        were not measured.
        """
        if kind not in self.tables:
            raise RecipeError(f"{self.machine.key}: no links measured. Run danlu bench machine --processes {ranks}")
        seconds = self.tables[kind].at(count)
        measured_ranks = self.machine.processes
        if kind == "send" or ranks == measured_ranks:
            return seconds
        if ranks == 1:
            return Seconds(0.0)
        latency = self.tables[kind].at(self.tables[kind].axes[0][0])
        rest = max(0.0, seconds - latency) * (1 - 1 / ranks) / (1 - 1 / measured_ranks)
        return Seconds(latency * (ranks - 1) / (measured_ranks - 1) + rest, extrapolated=True)

    def slowed_share(self, count: float) -> float:
        """The share of the seconds of a collective of `count` bytes by which computation that goes on meanwhile takes
        longer: 1 where the same processors send, as gloo's threads on a busy CPU; 0 where it was not measured.
        """
        if (table := self.tables.get("all_reduce_meanwhile")) is None:
            return 0.0
        return min(1.0, table.at(count) / self.tables["all_reduce"].at(count))

    def peaks(self) -> dict[str, float]:
        """FLOP/s of the fastest product of each type that was measured."""
        peaks = {}
        for name, table in self.tables.items():
            kind, _, precision = name.partition(" ")
            if kind == "product":
                work = (2 * math.prod(size) for size in itertools.product(*table.axes))
                peaks[precision] = max(flops / time for flops, time in zip(work, table.seconds, strict=True))
        return peaks

    def bandwidth(self) -> float:
        """Bytes/s of copies of the largest tensors, reads and writes together."""
        table = self._table("copy", "fp32")
        return table.axes[0][-1] / table.seconds[-1]

    def link(self) -> tuple[float, float] | None:
        """Bytes/s in one direction and seconds of latency between two processes; None where it was not measured."""
        if (table := self.tables.get("send")) is None:
            return None
        (sizes,), seconds = table.axes, table.seconds
        return (sizes[-1] - sizes[0]) / max(1e-12, seconds[-1] - seconds[0]), seconds[0]

    def _table(self, kind: str, precision: str = "") -> Table:
        name = f"{kind} {precision}".strip()
        if name not in self.tables:
            measured = ", ".join(sorted(self.tables)) or "nothing"
            raise RecipeError(f"{self.machine.key}: {name} was not measured, but {measured}. {_AGAIN}")
        return self.tables[name]


def machine_here(device: Device | None = None, threads: int = 0, processes: int = 1) -> Machine:
    """This machine, without importing torch. device: None is a GPU where nvidia-smi shows one.

    Raises ResourceError for cuda where nvidia-smi shows none, as with GPUs of other makers.
    """
    gpus = [] if device == "cpu" else nvidia_devices()
    if device == "cuda" and not gpus:
        raise ResourceError("nvidia-smi shows no GPU here, and a profile of GPUs needs their names. Use --device cpu")
    processor = gpus[0][0] if gpus else cpu_model()
    return Machine(processor, "cuda" if gpus else "cpu", threads, processes, version("torch"))
