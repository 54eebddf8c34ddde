"""`danlu quantize`: a model in 4 bits, as a folder that transformers and vLLM load too."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from danlu.core.errors import RecipeError
from danlu.core.terminal import print_status, print_status_early

KINDS = ("nf4", "fp4")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


def quantize(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A model folder, a finished run, a hub id; or a recipe (a YAML file)."),
    ],
    out: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OUT",
            help="Where to write it; empty or new. With a recipe: values that replace its own, key=value.",
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="nf4 (for weights, which are near normal) or fp4.")] = "nf4",
    double: Annotated[
        bool, typer.Option("--double/--no-double", help="Quantize the scales too: 4.13 bits instead of 4.5.")
    ] = True,
    dtype: Annotated[
        str, typer.Option(help="Of what is not packed, and of products: auto, fp32, bf16, fp16.")
    ] = "auto",
    experts: Annotated[
        bool, typer.Option("--experts/--no-experts", help="Models with experts: quantize these too, each by itself.")
    ] = True,
) -> None:
    """Write a model in 4 bits: linear layers packed as bitsandbytes does, embedding, head and norms as they are; or, by
    a recipe with `stage: quantize`, rounded by GPTQ, AWQ or SmoothQuant with the rows that it calibrates on.

    The folder is a model for danlu, and for transformers with bitsandbytes; transformers 5, which stacks experts, reads
    models that have some with --no-experts alone. One weight is in memory at a time.
    """
    if Path(model).suffix in (".yaml", ".yml"):
        defaults = (kind, double, dtype, experts) == ("nf4", True, "auto", True)
        _quantize_by_recipe(Path(model), out or [], [] if defaults else ["--kind, --double, --dtype, --experts"])
        return
    if len(out or []) != 1:
        raise RecipeError("danlu quantize takes MODEL and OUT, or a recipe (a file that ends with .yaml)")
    target = Path((out or [""])[0])
    problems = [f"--kind: {kind!r} is unknown; use nf4 or fp4"] if kind not in KINDS else []
    problems += [f"--dtype: {dtype!r} is unknown; use {', '.join(PRECISIONS)}"] if dtype not in PRECISIONS else []
    if problems:
        raise RecipeError(problems)
    # Mistakes are reported without torch, which takes a second to import.
    from danlu.models.hf_folder import read_config, resolve_folder

    folder = resolve_folder(model)
    read_config(folder)
    print_status_early(f"reading {folder}")
    from danlu.assembly import quantizing
    from danlu.numerics.dtypes import DTYPES
    from danlu.recipe import sections
    from danlu.training.progress import RowProgress
    from danlu.training.units import format_bytes

    section = sections.Nf4(double=double) if kind == "nf4" else sections.Fp4(double=double)
    with closing(RowProgress(sys.stderr, doing="quantizing", units="tensors")) as progress:
        shown = progress if sys.stderr.isatty() else None
        written = quantizing.quantize(folder, target, section, dtype=DTYPES.get(dtype), experts=experts, progress=shown)
    print_status(
        f"{folder} in {kind}: {written.quantized:,} of {written.parameters:,} parameters packed to "
        f"{written.bits:.3f} bits each, {format_bytes(written.bytes)} in all\n"
        f"model in {target}: try `danlu eval {target} --data FILE` or `danlu chat {target}`"
    )


def _quantize_by_recipe(file: Path, overrides: list[str], flags: list[str]) -> None:
    """Quantizes as a recipe says, and shows what came of it."""
    if flags:
        raise RecipeError(f"{flags[0]}: are of MODEL and OUT; in a recipe they are keys ({file})")
    from danlu.recipe.quantize_recipe import load_quantize_recipe

    recipe = load_quantize_recipe(file, overrides)
    print_status_early(f"reading {recipe.model}")
    from danlu.run import quantize as running
    from danlu.training.progress import RowProgress

    with closing(RowProgress(sys.stderr, doing="quantizing", units="layers")) as progress:
        shown = progress if sys.stderr.isatty() else lambda done, total: None
        result = running.quantize(recipe, sys.stderr, progress=shown)
    for note in result.notes:
        print_status(note)
    if result.resumed:
        print_status(f"{result.resumed} layers were done by an earlier run of this command")
    calibrated = f", calibrated with {result.calibration_tokens:,} tokens" if result.calibration_tokens else ""
    print_status(
        f"{result.folder} by {', '.join(step.kind for step in recipe.quantization)}{calibrated}: "
        f"{result.quantized:,} of {result.parameters:,} parameters at {result.bits:.3f} bits each\n"
        f"model in {recipe.output}: try `danlu eval {recipe.output} --data FILE`"
    )
