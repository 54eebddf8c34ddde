"""Whether this checkout trains the same bits as another one: for changes that should not move any number.

    python benchmarks/same_bits.py BASE_CHECKOUT [--cases sft lora] [--keep FOLDER]

Each case of `small_recipes.py` is trained with `danlu train` at a fixed seed in both checkouts, with a checkpoint after
each step, and a second time in the base checkout, where it is killed (SIGKILL) while the checkpoint of step 5 is being
published; this checkout then resumes that folder. Compared bit for bit:

    steps      every line of metrics.jsonl, but for times and memory: loss, gradient norm, learning rate, counts
    gradients  the optimizer's state after step 1: Adam's first moment is then a constant times the gradient
    states     every tensor of every checkpoint: weights, moments, averages, by file and name
    result     every tensor of the exported model or adapter
    resumed    the same three of the run that was killed in the base checkout and resumed in this one

Prints a table; exits 1 where anything differs. `--keep` keeps the runs, and takes the base checkout's from there the
next time. The first case, pretrain, gives the others their base model and always runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from small_recipes import CASES, Case, command, environment, run, write_inputs, write_recipe

KILLED_AT = 5
NOT_COMPARED = {"tokens_per_second", "memory_bytes", "mfu", "step_s", "eval_s", "elapsed_s", "time"}
# Python runs a sitecustomize of its path in every process, so also in those that danlu starts.
SITE = f"""
import os, signal, sys
def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("/step-{KILLED_AT:08d}"):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""


def tensors(folder: Path) -> dict[str, str]:
    """The hash of every tensor of the safetensors files below a folder, by file and name."""
    hashes = {}
    files = folder.rglob("*.safetensors")
    # A hidden folder is what a killed process was writing; it goes when nothing has that process's number.
    for file in sorted(
        file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - a file is no mapping
                tensor = content.get_tensor(name).contiguous()
                header = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                numbers = tensor.flatten().view(dtype=_bytes_dtype()).numpy().tobytes() if tensor.numel() else b""
                hashes[f"{file.relative_to(folder)} {name}"] = hashlib.sha256(header + numbers).hexdigest()
    return hashes


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8


def steps(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of steps in metrics.jsonl, without times and memory."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if key not in NOT_COMPARED} for line in lines if "grad_norm" in line
    ]


def train(checkout: Path, case: Case, runs: Path, name: str, inputs: Path, base: Path, *, killed: bool = False) -> Path:
    """Trains a case unless its finished run is there; its run folder."""
    output = runs / name
    if (runs / f"{name}.done").exists():
        return output
    shutil.rmtree(output, ignore_errors=True)
    recipe = runs / f"{name}.yaml"
    write_recipe(recipe, case, inputs, output, base, runs / "cache")
    site = runs / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    env = environment(checkout, *([site] if killed else []))
    # -9: killed itself; 6: the launcher of a group of which a process was killed.
    run(command(recipe, case), env, expected=(-9, 6) if killed else (0,))
    (runs / f"{name}.done").touch()
    return output


def compare(run: Path, base_run: Path) -> dict[str, str]:
    """What of two finished runs is the same: `same (n)` or what differs first, by part."""
    results = {}
    run_steps, base_steps = steps(run), steps(base_run)
    pairs = list(zip(run_steps, base_steps, strict=False))
    differing = next((a["step"] for a, b in pairs if a != b), None)
    if differing is None and len(run_steps) != len(base_steps):
        differing = f"{len(run_steps)} lines, not {len(base_steps)}"
    results["steps"] = f"same ({len(pairs)})" if differing is None else f"DIFFER at step {differing}"
    hashes, base_hashes = tensors(run), tensors(base_run)
    parts: dict[str, Callable[[str], bool]] = {
        "gradients": lambda key: key.startswith("checkpoints/step-00000001/") and "optimizer" in key,
        "states": lambda key: key.startswith("checkpoints/"),
        "result": lambda key: not key.startswith("checkpoints/"),
    }
    for part, belongs in parts.items():
        keys = sorted(key for key in hashes.keys() | base_hashes.keys() if belongs(key))
        wrong = [key for key in keys if hashes.get(key) != base_hashes.get(key)]
        is_same = bool(keys) and not wrong
        results[part] = f"same ({len(keys)})" if is_same else f"DIFFER ({len(wrong)}: {(wrong or ['no tensor'])[0]})"
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path, metavar="BASE_CHECKOUT")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    options = parser.parse_args()
    this = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        inputs, of_base, of_this = folder / "inputs", folder / "base", folder / "this"
        write_inputs(inputs)
        shutil.rmtree(of_this, ignore_errors=True)
        for runs in (of_base, of_this):
            runs.mkdir(exist_ok=True)
        base = train(options.base.resolve(), CASES["pretrain"], of_base, "pretrain", inputs, folder) / "model"
        all_same = True
        for name in options.cases:
            began, case = time.perf_counter(), CASES[name]
            base_run = train(options.base.resolve(), case, of_base, name, inputs, base)
            broken = train(options.base.resolve(), case, of_base, f"{name}-killed", inputs, base, killed=True)
            finished = train(this, case, of_this, name, inputs, base)
            resumed = of_this / f"{name}-resumed"
            shutil.copytree(broken, resumed)
            recipe = of_base / f"{name}-killed.yaml"
            published = sorted(path.name for path in (resumed / "checkpoints").glob("step-*"))
            assert published[-1] == f"step-{KILLED_AT - 1:08d}", published
            run(command(recipe, case, f"output={resumed}"), environment(this))
            results = compare(finished, base_run)
            again = compare(resumed, base_run)
            results["resumed"] = "same" if all(value.startswith("same") for value in again.values()) else str(again)
            same = all(value.startswith("same") for value in results.values())
            all_same &= same
            shown = "   ".join(f"{part} {value}" for part, value in results.items())
            print(f"{name:14} {shown}   {time.perf_counter() - began:.0f} s", flush=True)
    print("the same bits in every case" if all_same else "NOT the same bits")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
