"""Habits of engines that published runs were made with, as data with their sources: engines.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml

FILE = Path(__file__).with_name("engines.yaml")
# fmt: off
KEYS = frozenset(
    {"memory_kind", "memory_unit", "memory_rank", "tokens", "weights", "gathered_weights", "master_weights",
     "gradients", "reduced_gradients_pure", "states", "optimizer", "reshard_after_forward", "fsdp_units",
     "limit_all_gathers", "selective_recompute", "full_recompute", "recompute", "compile_unit", "logits",
     "sequence_parallel", "pipeline_micro_batches", "attention", "float8", "mfu_peak", "mfu_flops", "network",
     "norm_type", "micro_batch", "lengths", "deepspeed", "zero", "zero_buckets", "adapter_targets",
     "fused_adapters", "trained_copies", "quantized_base", "validation", "b200", "memory_sum",
     "optimizer_in_backward", "accumulation", "unpacked", "logit_bytes", "kept_more", "update_bytes", "buffer_bytes",
     "whole_gradients", "outer_units", "reserved_streams", "fsdp_over_context", "quantized_embedding"}
)
# fmt: on
"""What a habit can be of."""


class Habit(NamedTuple):
    value: Any
    source: str


@dataclass(frozen=True)
class Engine:
    """One engine by its habits. A property is what a row's own cells do not say.

    The value of a habit may be a mapping from facts of a run (`memory.facts`) to values.
    """

    name: str
    habits: Mapping[str, Habit]

    def value(self, key: str, default: Any = None) -> Any:
        assert key in KEYS, f"{key} is no habit"
        return self.habits[key].value if key in self.habits else default

    def is_stated(self, key: str) -> bool:
        """Whether a file of the engine says the value of a habit: it is known, and not inferred from figures."""
        return self.value(key, "unstated") != "unstated" and "inferred" not in self.habits[key].source

    @property
    def memory_kind(self) -> Literal["allocated", "active", "reserved", "device", "unstated"]:
        return cast(Any, self.value("memory_kind", "unstated"))

    @property
    def memory_unit(self) -> Literal["binary", "decimal", "unstated"]:
        return cast(Any, self.value("memory_unit", "unstated"))

    @property
    def precision(self) -> dict[str, Any]:
        """Types of what is kept: weights, gradients, states; None of one that is not known, and a mapping where it
        depends on whether DeepSpeed trains."""
        return {key: self.value(key) for key in ("weights", "gradients", "reduced_gradients_pure", "states")}

    def has_deepspeed(self, method: str, gpus: int) -> bool:
        """Whether a run goes through DeepSpeed; method: full, lora or qlora."""
        return "deepspeed" in self.habits and (method != "lora" or gpus > 1)

    @property
    def optimizer(self) -> str | None:
        return self.value("optimizer")

    @property
    def recompute(self) -> dict[str, str]:
        """What is recomputed where a row does not say: on a single GPU, and where weights are shared out."""
        return self.value("recompute", {})

    @property
    def adapter_targets(self) -> tuple[str, ...] | None:
        targets = self.value("adapter_targets")
        return None if targets is None else tuple(targets)

    @property
    def quantized_base(self) -> Literal["nf4", "nf4-dq", "int4-gptq", "int8"] | None:
        return self.value("quantized_base")

    @property
    def pipeline_micro_batches(self) -> str | None:
        return self.value("pipeline_micro_batches")


def read_engines(path: Path = FILE) -> dict[str, Engine]:
    """All engines by their repositories. Raises ValueError for a habit that is unknown or has no source."""
    engines = {}
    for repository, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        habits = {}
        for key, habit in entry["habits"].items():
            if key not in KEYS:
                raise ValueError(f"{path}: {repository}: {key} is no habit; there are {', '.join(sorted(KEYS))}")
            if set(habit) != {"value", "source"}:
                raise ValueError(f"{path}: {repository}: {key} needs a value and a source, and nothing else")
            habits[key] = Habit(habit["value"], habit["source"])
        engines[repository] = Engine(entry["name"], habits)
    return engines
