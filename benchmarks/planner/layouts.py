"""Layouts whose speed papers publish, as danlu plans them: Llama 3's table of parallelism, and DeepSeek-V3's GPU hours.

The papers' figures are in layouts.yaml. What an engine does that danlu does not is stated there too, and changes the
plan here: products in FP8, exchanges that computation hides.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import layout_of
from danlu.planning.chunk_costs import LayerTimes
from danlu.planning.cluster import Cluster, Link
from danlu.planning.collective_seconds import each_collective_seconds
from danlu.planning.machine_profile import Result
from danlu.planning.measured_table import Seconds
from danlu.planning.speeds import CardSpeeds
from danlu.planning.step import plan_step
from danlu.planning.step_plan import StepPlan
from danlu.planning.target import Target
from danlu.planning.workload import Workload
from danlu.recipe import Recipe, load
from danlu.run.read_workload import read_workload

FILE = Path(__file__).with_name("layouts.yaml")
CARDS_OF_NODE = 8
_SMS = 132
"""Streaming multiprocessors of an H100 and an H800."""


@dataclass(frozen=True)
class EightBitProducts(CardSpeeds):
    """Speeds of a card on which products that would be of bf16 are of FP8: those of the head too."""

    def product(self, m: float, n: float, k: float, precision: str, result: Result = "output") -> Seconds:
        """A product [m, n] that sums over k, as a linear layer makes it for a result."""
        return super().product(m, n, k, "fp8" if precision == "bf16" else precision, result)

    def grouped(
        self, groups: float, rows: float, n: float, k: float, precision: str, result: Result = "output"
    ) -> Seconds:
        """The products [rows, n] of some groups, each of which sums over k."""
        return super().grouped(groups, rows, n, k, "fp8" if precision == "bf16" else precision, result)


@dataclass(frozen=True)
class PlannedLayout:
    """A published layout next to its plan."""

    name: str
    published: float
    expected: float
    plan: StepPlan

    @property
    def error(self) -> float:
        """Relative; above 0 where too much is expected."""
        return self.expected / self.published - 1


def llama_layouts(configs: Path) -> Iterator[PlannedLayout]:
    """Yields the layouts of Llama 3's table: TFLOP/s of a GPU, counted as the paper's MFU counts them.

    configs: folders with a config.json each.
    """
    entry = _entries()["llama-3-405b"]
    config = read_config_values(_values(configs, entry))
    between = [entry["split"]["between"]] * (entry["pipeline"]["stages"] * entry["pipeline"]["chunks"] - 2)
    split = [entry["split"]["ends"], *between, entry["split"]["ends"]]
    for row in entry["layouts"]:
        ranks = row["data"] * row["context"] * entry["tensor"] * entry["pipeline"]["stages"]
        parallel = {
            "tensor": entry["tensor"],
            "sequence": entry["sequence"],
            "shard": entry["shard"],
            "pipeline": entry["pipeline"] | {"split": split},
            "context": {"size": row["context"], "method": entry["context_method"]},
        }
        cluster = _cluster(entry, ranks // CARDS_OF_NODE)
        workload = _workload(configs, entry, config, parallel, row)
        plan = _plan(workload, cluster, entry)
        attention = 12 * len(config.layers) * config.layers[0].attention.query_width * row["length"]
        flops = 6 * config.parameter_count() + attention
        assert plan.tokens_per_s is not None, "a cluster has speeds"
        name = f"{ranks:,} GPUs, data {row['data']}, context {row['context']}, length {row['length']:,}"
        yield PlannedLayout(name, row["tflops"], plan.tokens_per_s / ranks * flops / 1e12, plan)


def deepseek_hours(configs: Path) -> Iterator[PlannedLayout]:
    """Yields GPU hours of DeepSeek-V3 for a trillion tokens: with all multiprocessors, and without those that
    communicate.

    Exchanges of tokens and messages are hidden: a step takes as long as with links that take no time, or as long as
    the exchanges.
    """
    entry = _entries()["deepseek-v3"]
    values = _values(configs, entry)
    values["num_hidden_layers"] += entry["more_layers"]
    config = read_config_values(values)
    parallel = {"expert": entry["expert"], "shard": entry["shard"], "pipeline": entry["pipeline"]}
    workload = _workload(configs, entry, config, parallel, entry)
    cluster = _cluster(entry, entry["nodes"])
    silent = replace(cluster, links=(Link(None, float("inf"), 0.0),))
    plan = _plan(workload, silent, entry)
    assert plan.seconds is not None, "a cluster has speeds"
    exchanges = sum(
        each.seconds for each in each_collective_seconds(plan.worst.traffic, cluster) if each.kind == "all-to-all"
    )
    for name, share in (
        ("all SMs compute", 1.0),
        ("without SMs that communicate", _SMS / (_SMS - entry["communicating_sms"])),
    ):
        seconds = max(plan.seconds.total * share, exchanges * entry["exchanged_share"])
        hours = cluster.ranks * seconds / 3600 * 1e12 / plan.tokens
        yield PlannedLayout(name, entry["gpu_hours"], hours, plan)


def _entries() -> Mapping[str, Any]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def _values(configs: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads((configs / entry["config"] / "config.json").read_text(encoding="utf-8"))


def _cluster(entry: Mapping[str, Any], nodes: int) -> Cluster:
    cluster = Cluster.parse(f"{nodes}x{CARDS_OF_NODE}x{entry['card']}")
    *inside, network = cluster.links
    return replace(cluster, links=(*inside, network._replace(bytes_per_s=entry["network_gb_s"] * 1e9)))


def _workload(
    configs: Path, entry: Mapping[str, Any], config: ModelConfig, parallel: dict[str, Any], row: Mapping[str, Any]
) -> Workload:
    """The workload of pretraining on full packs, micro-batches of one of them."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "tokenizer.json").write_text("{}", encoding="utf-8")  # named by the recipe, and not read
        (place / "train.txt").write_text("text", encoding="utf-8")
        recipe = {
            "stage": "pretrain",
            "output": str(place / "run"),
            "model": {"config": str(configs / entry["config"] / "config.json"), "tokenizer": folder},
            "data": {"train": str(place / "train.txt"), "max_length": row["length"]},
            "batch": {"sequences": row["sequences"], "micro": 1},
            "precision": "bf16",
            "parallel": parallel,
        }
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        read: Recipe = load(place / "recipe.yaml").recipe
        return read_workload(read, config, judges=False)


def _plan(workload: Workload, cluster: Cluster, entry: Mapping[str, Any]) -> StepPlan:
    layout, target = layout_of(workload.recipe.parallel, cluster.ranks), Target(cluster)
    speeds = target.training_speeds(compiled=entry["compiled"])  # danlu's own recipes cannot compile tensor ranks
    assert isinstance(speeds, CardSpeeds), "the cluster is one of cards"
    if entry.get("products") == "fp8":
        speeds = EightBitProducts(speeds.card, speeds.efficiency)
    return plan_step(workload, layout, target, LayerTimes(speeds))
