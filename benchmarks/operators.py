"""Whether this checkout's training steps call the same aten operators, in the same order, as another checkout's.

    python benchmarks/operators.py BASE_CHECKOUT [--cases sft lora qlora] [--show 5]

Each case of `small_recipes.py` is trained for a few steps in both checkouts in one process under a TorchDispatchMode,
which notes every operator with the shapes and types of its tensors. A step is what lies between two lines of
metrics.jsonl; no name of danlu's modules is needed to find it. Compared are the steps as lists: prints the number of
operators of each step, those whose operands have other shapes, and around the first operator that is another one
`--show` operators of either side; exits 1 where one is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from small_recipes import CASES, command, environment, run, write_inputs, write_recipe

STEPS = 3
# Runs `danlu train` in a checkout of any age: argv is METRICS LOG ARGUMENTS...
DRIVER = """
import json, os, sys
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils._python_dispatch import TorchDispatchMode

metrics, log, *arguments = sys.argv[1:]

class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.lines = [[]], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        lines = open(metrics, "rb").read().count(b"\\n") if os.path.exists(metrics) else 0
        if lines != self.lines:
            self.lines = lines
            self.calls.append([])
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        inputs = ", ".join(f"{str(x.dtype)[6:]}{list(x.shape)}" for x in tensors)
        self.calls[-1].append(f"{func}({inputs})")
        return func(*args, **(kwargs or {}))

from danlu.cli.main import main
with Log() as logged:
    code = main(arguments)
with open(log, "w") as file:
    json.dump(logged.calls, file)
sys.exit(code)
"""


def operators(checkout: Path, name: str, folder: Path, inputs: Path, base: Path) -> list[list[str]]:
    """The operators of each step of a case: forward, backward, clipping, the update, up to its line of metrics."""
    recipe, output, log = folder / f"{name}.yaml", folder / name, folder / f"{name}.json"
    case = replace(CASES[name], changes={**CASES[name].changes, "steps": STEPS, "checkpoint": {"every": 100}})
    write_recipe(recipe, case, inputs, output, base, folder / "cache")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    arguments = command(recipe, case)[4:]  # without `python -P -m danlu`
    run([sys.executable, str(driver), str(output / "metrics.jsonl"), str(log), *arguments], environment(checkout))
    calls: list[list[str]] = json.loads(log.read_text())
    return calls[1:STEPS]  # what precedes the first line is set-up too, what follows the last one is the export


def difference(ours: list[str], theirs: list[str], shown: int) -> list[str]:
    """The first place where two lists differ, with what surrounds it; empty where they are equal."""
    for place, (our, their) in enumerate(zip_longest(ours, theirs, fillvalue="")):
        if operator(our) != operator(their):
            around = slice(max(0, place - shown), place + shown)
            return [
                f"  operator {place}, in this checkout:",
                *(f"    {call}" for call in ours[around]),
                "  in the base checkout:",
                *(f"    {call}" for call in theirs[around]),
            ]
    return []


def operator(call: str) -> str:
    """`aten.mm.default` of `aten.mm.default(float32[8, 4], float32[4, 2])`."""
    return call.partition("(")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", type=Path, metavar="BASE_CHECKOUT")
    quick = [name for name, case in CASES.items() if case.is_quick]
    parser.add_argument("--cases", nargs="+", choices=quick, default=quick)
    parser.add_argument("--show", type=int, default=5)
    options = parser.parse_args()
    this = Path(__file__).resolve().parents[1]
    all_same = True
    with tempfile.TemporaryDirectory(prefix="operators-") as temporary:
        folder = Path(temporary)
        inputs, sides = folder / "inputs", {"this": this, "base": options.base.resolve()}
        write_inputs(inputs)
        pretrain = folder / "pretrain.yaml"
        write_recipe(pretrain, CASES["pretrain"], inputs, folder / "pretrain", folder, folder / "cache")
        run(command(pretrain, CASES["pretrain"]), environment(sides["base"]))
        for name in options.cases:
            calls = {}
            for side, checkout in sides.items():
                (folder / side).mkdir(exist_ok=True)
                calls[side] = operators(checkout, name, folder / side, inputs, folder / "pretrain" / "model")
            counts = ", ".join(str(len(step)) for step in calls["this"])
            steps = list(zip(calls["this"], calls["base"], strict=True))
            same = bool(steps) and not any(difference(ours, theirs, 0) for ours, theirs in steps)
            all_same &= same
            print(f"{name:10} {'same' if same else 'DIFFERENT'}: {counts} operators in steps 2 to {STEPS}", flush=True)
            pairs = {(our, their) for ours, theirs in steps for our, their in zip(ours, theirs, strict=False)}
            for our, their in sorted(pairs if same else ()):
                if our != their:
                    print(f"  other operands: {our}, in the base checkout {their}")
            for number, (ours, theirs) in enumerate(steps, 2):
                if lines := difference(ours, theirs, options.show):
                    print(
                        f"  step {number}: {len(ours)} operators, {len(theirs)} in the base checkout", *lines, sep="\n"
                    )
    print("the same operators in every case" if all_same else "NOT the same operators")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
