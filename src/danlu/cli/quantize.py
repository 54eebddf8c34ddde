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
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a finished run, or a hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write it; empty or new.")],
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
    """Write a model in 4 bits: linear layers packed as bitsandbytes does, embedding, head and norms as they are.

    The folder is a model for danlu, and for transformers with bitsandbytes; transformers 5, which stacks experts, reads
    models that have some with --no-experts alone. One weight is in memory at a time.
    """
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
        written = quantizing.quantize(folder, out, section, dtype=DTYPES.get(dtype), experts=experts, progress=shown)
    print_status(
        f"{folder} in {kind}: {written.quantized:,} of {written.parameters:,} parameters packed to "
        f"{written.bits:.3f} bits each, {format_bytes(written.bytes)} in all\n"
        f"model in {out}: try `danlu eval {out} --data FILE` or `danlu chat {out}`"
    )
