"""Compares every family with transformers on small random models: logits, gradients, and folders both ways.

    python benchmarks/families.py

It takes the models and the measures of the tests (tests/models), and prints the worst of the cases of each family.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from builders.family_twins import random_tokens, twin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from danlu.models.attend import PackedAttention  # noqa: E402
from danlu.models.loading import load  # noqa: E402
from danlu.models.saving import save  # noqa: E402

MODELS = runpy.run_path(str(TESTS / "models" / "conftest.py"))
GRADIENTS = runpy.run_path(str(TESTS / "models" / "test_family_gradients.py"))


class Difference(NamedTuple):
    """How far a model is from transformers'."""

    logits: float  # the largest absolute difference, of logits with a standard deviation above 0.1
    gradients: float  # the largest of all tensors, in units of the tensor's largest gradient
    tensors: int  # of the folder that danlu writes, that are not those of transformers' folder bit for bit


def difference(values: dict[str, Any], folder: Path) -> Difference:
    """Compares a random model with this config.json; both write a folder below `folder`."""
    theirs, mine = folder / "theirs", folder / "mine"
    theirs.mkdir(parents=True)
    model = twin(values, theirs)
    tokens = random_tokens(values["vocab_size"])
    decoder = load(theirs)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        length = len(tokens)
        found = decoder.logits(decoder(tokens, torch.arange(length), PackedAttention((0, length))))
    save(decoder, mine)
    before, after = load_file(theirs / "model.safetensors"), load_file(mine / "model.safetensors")
    same = {name for name in before.keys() & after.keys() if torch.equal(before[name], after[name])}
    gradients = GRADIENTS["largest_difference"](values, model, theirs)
    return Difference(float((found - expected).abs().max()), gradients, len((before.keys() | after.keys()) - same))


def main() -> None:
    """Prints the table, a line a family."""
    sys.stdout.write("| family | cases | logits | gradients | tensors that differ |\n|---|---|---|---|---|\n")
    cases = {name: {**MODELS["TINY"], **values} for name, values in MODELS["CASES"].items()}
    for family in sorted({values["model_type"] for values in cases.values()}):
        own = {name: values for name, values in cases.items() if values["model_type"] == family}
        with tempfile.TemporaryDirectory() as folder:
            found = [difference(values, Path(folder, name)) for name, values in own.items()]
        logits, gradients, tensors = (max(column) for column in zip(*found, strict=True))
        sys.stdout.write(f"| `{family}` | {len(own)} | {logits:.1e} | {gradients:.1e} | {tensors} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
