"""Runs on this CPU by which a plan is judged: `danlu train` of many kinds, beside what `danlu plan` says of each.

They use the command line alone. Rows are synthetic; the models are large enough that products take most of a step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from small_recipes import Case, command, environment, run, write_inputs, write_recipe

SHAPE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
LATENT = {
    **SHAPE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 176,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
STEPS = 10
TEXT: dict[str, Any] = {"stage": "pretrain", "model": {"config": SHAPE}}
_MIXTURE: dict[str, Any] = {"stage": "pretrain", "model": {"config": LATENT}}
_LORA: dict[str, Any] = {"adapter": {"kind": "lora", "rank": 8}}
_PAIRS: dict[str, Any] = {"batch": {"rows": 8, "micro": 2}}
RUNS: dict[str, Case] = {
    "pretrain": Case(TEXT),
    "pretrain, bf16": Case({**TEXT, "precision": "bf16"}),
    "elementwise": Case({**TEXT, "memory": {"recompute": "elementwise"}}),
    "selective": Case({**TEXT, "memory": {"recompute": "selective"}}),
    "full": Case({**TEXT, "memory": {"recompute": "full"}}),
    "every": Case({**TEXT, "memory": {"recompute": "every"}}),
    "8-bit moments": Case({**TEXT, "optimizer": {"kind": "adamw8bit", "learning_rate": 1e-3}}),
    "muon": Case({**TEXT, "optimizer": {"kind": "muon", "learning_rate": 1e-3}}),
    "average": Case({**TEXT, "ema": {"decay": 0.9}}),
    "experts, latent attention": Case(_MIXTURE),
    "experts, full": Case({**_MIXTURE, "memory": {"recompute": "full"}}),
    "sft": Case({"stage": "sft"}, on_base=True),
    "lora": Case(_LORA, on_base=True),
    "dora": Case({"adapter": {"kind": "dora", "rank": 8}}, on_base=True),
    "qlora": Case({**_LORA, "quantization": "nf4"}, on_base=True),
    "qlora, full": Case({**_LORA, "quantization": "nf4", "memory": {"recompute": "full"}}, on_base=True),
    "dpo": Case({"stage": "dpo", **_PAIRS}, on_base=True),
    "dpo, lora": Case({"stage": "dpo", **_PAIRS, **_LORA}, on_base=True),
    "two data ranks": Case({**TEXT, "parallel": {"data": 2}}, processes=2),
    "zero3": Case({**TEXT, "parallel": {"shard": "zero3", "data": 2}}, processes=2),
    "zero1, lora": Case({**_LORA, "parallel": {"shard": "zero1", "data": 2}}, processes=2, on_base=True),
    "tensor": Case({**TEXT, "parallel": {"tensor": 2, "sequence": True}}, processes=2),
    "context": Case({**TEXT, "parallel": {"context": 2}}, processes=2),
    "pipeline": Case({**TEXT, "parallel": {"pipeline": 2}, "batch": {"sequences": 16, "micro": 2}}, processes=2),
}
STATES = ("weights", "adapter", "optimizer", "average")
"""Parts that a run counts to the byte."""
OF_STEP = ("gradients", "activations", "logits", "gathered", "packed", "stash")
"""Parts of which a run's allocator sees the sum, at its largest within a step."""
ALLOCATION = Path(__file__).parent / "allocation"


class Comparison(NamedTuple):
    """What a plan says of a run, over what the run took; 1 is exact."""

    name: str
    states: Mapping[str, float]
    """Weights, adapter, optimizer state and average, those that there are."""
    step: float
    """The most that a step allocates besides them."""
    total: float
    """Both together."""
    seconds: float | None
    """None where the machine was not measured."""


@dataclass(frozen=True)
class CpuRuns:
    """Runs in one folder, of one checkout."""

    checkout: Path
    folder: Path
    length: int = 512

    def compare(self, names: list[str], *, timed: bool = True) -> Iterator[Comparison]:
        """Trains each of some runs, one after the other, and yields its comparison. timed: with its seconds."""
        base = self.train("base", Case(TEXT)) / "model"
        for name in names:
            yield self._compare(name, RUNS[name], base, timed=timed)

    def train(self, name: str, case: Case, base: Path = Path(), *, allocation: Path | None = None) -> Path:
        """Trains a recipe and returns its run folder. allocation: prefix of the files with the bytes of each rank."""
        write_inputs(self.folder / "inputs")
        output = self.folder / (name.replace(", ", "-").replace(" ", "-") + ("-profiled" if allocation else ""))
        file = output.with_suffix(".yaml")
        changes = {"batch": {"sequences": 8, "micro": 2}, "steps": STEPS, **case.changes}
        own = Case({**changes, "checkpoint": {"every": 1000}}, case.processes, case.on_base)
        write_recipe(file, own, self.folder / "inputs", output, base, self.folder / "cache")
        if allocation is None:
            env = environment(self.checkout)
        else:
            env = {**environment(self.checkout, ALLOCATION), "DANLU_ALLOCATION": str(allocation)}
        arguments = [*command(file, own), f"data.max_length={self.length}"]
        if allocation is not None:
            arguments.append("steps=3")
        run([each for each in arguments if each != "-P"] if allocation else arguments, env)
        return output

    def _compare(self, name: str, case: Case, base: Path, *, timed: bool) -> Comparison:
        profiled = self.train(name, case, base, allocation=self.folder / "allocated")
        output = self.train(name, case, base) if timed else profiled
        measured = json.loads((output / "summary.json").read_text())["memory"]
        ranks = self.folder.glob("allocated.*")
        of_step = max(int(file.read_text()) for file in ranks)
        for file in self.folder.glob("allocated.*"):
            file.unlink()
        plan = self.plan(output)
        said = plan["memory"]["parts"]
        states = {part: said[part] / measured[part] for part in STATES if measured[part]}
        step = sum(said[part] for part in OF_STEP) + plan["memory"]["communication"]
        whole = sum(measured[part] for part in STATES)
        total = (sum(said[part] for part in STATES) + step) / (whole + of_step)
        seconds = (plan["seconds"] or {}).get("total") if timed else None
        return Comparison(name, states, step / of_step, total, seconds and seconds / step_seconds(output))

    def plan(self, output: Path) -> dict[str, Any]:
        """The plan of the recipe of a run, as `danlu plan --json` prints it."""
        arguments = [
            sys.executable,
            "-P",
            "-m",
            "danlu",
            "plan",
            str(output.with_suffix(".yaml")),
            f"data.max_length={self.length}",
            "--json",
        ]
        ended = subprocess.run(arguments, env=environment(self.checkout), capture_output=True, text=True, check=True)
        return json.loads(ended.stdout)  # type: ignore[no-any-return]


def step_seconds(output: Path) -> float:
    """The median seconds of the steps of a run but its first two."""
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(step["tokens"] / step["tokens_per_second"] for step in steps[2:])
