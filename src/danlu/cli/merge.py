"""`danlu merge`: adapters into their base, or several into one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.adapters.adapter_config import QUANTIZATIONS
from danlu.core.errors import RecipeError
from danlu.core.terminal import print_status, print_status_early

if TYPE_CHECKING:
    from danlu.adapters.combine import Combination

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
METHODS = ("linear", "cat", "ties", "dare-linear", "dare-ties")
MAJORITIES = ("total", "frequency")
SPARSIFYING = ("ties", "dare-linear", "dare-ties")


def merge(
    sources: Annotated[
        list[str], typer.Argument(metavar="RUN_OR_ADAPTER...", help="Adapter folders, or runs that ended with one.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the model; empty or new.")],
    into: Annotated[str | None, typer.Option(help="The base, if not where the adapter says it was trained.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also into another base than it was trained on.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as the base), fp32, bf16 or fp16.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="Merge into the base quantized so (nf4, ...), as it was trained over.")
    ] = None,
    as_adapter: Annotated[
        bool, typer.Option("--as-adapter", help="Write one LoRA folder from several instead of a whole model.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(help="How several become one: linear, cat, ties, dare-linear, dare-ties. Default: their sum."),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="What each is multiplied by: 0.7,0.3. Default: 1 each.")] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of each that ties and dare keep; the TIES paper has 0.2.")
    ] = None,
    majority: Annotated[
        str, typer.Option(help="How ties elects a sign: total (the larger sum) or frequency (the more adapters).")
    ] = "total",
    seed: Annotated[int, typer.Option(help="Of what dare drops.")] = 0,
    rank: Annotated[
        int | None, typer.Option(min=1, help="With --as-adapter, of what ties and dare leave. Default: the ranks' sum.")
    ] = None,
) -> None:
    """Merge an adapter into its base: a model folder that costs nothing extra to run. Also several, with weights.

    It is computed in float32 and rounded once. A base in 4 bits is written in full, and the error of it all is said.
    """
    chosen = method or ("cat" if as_adapter else "linear")
    adapter_weights = check_options(len(sources), chosen, weights, density, majority, dtype, quantization)
    if as_adapter and (len(sources) == 1 or force or quantization or dtype != "auto"):
        raise RecipeError(
            "--as-adapter makes one adapter of several, without a base: give two or more, and leave out --force, "
            "--dtype and --quantization"
        )
    print_status_early(f"merging {', '.join(sources)} into {out}")
    # torch and pydantic: for this verb, not for its --help.
    from danlu.adapters.combine import Combination

    plain = len(sources) == 1 and adapter_weights == (1.0,) and chosen in ("linear", "cat")
    combination = Combination(adapter_weights, chosen, density or 1.0, majority, seed)  # type: ignore[arg-type]
    if as_adapter:
        write_adapter(sources, out, combination, rank, into)
    else:
        write_model(sources, out, None if plain else combination, into, force, dtype, quantization)


def write_model(
    sources: list[str],
    out: Path,
    combination: Combination | None,
    into: str | None,
    force: bool,
    dtype: str,
    quantization: str | None,
) -> None:
    """Merges adapters into a base, and prints the result and its rounding errors."""
    from danlu.assembly import merging
    from danlu.cli.train import suggested_commands
    from danlu.inference.quantization_choice import quantization_section
    from danlu.numerics.dtypes import DTYPES

    section = quantization_section(quantization)
    merged = merging.merge(
        sources, out, into=into, force=force, dtype=DTYPES.get(dtype), combination=combination, quantization=section
    )
    if quantization is None and merged.trained_over is not None and not merged.quantized:
        kind = merged.trained_over
        print_status(
            f"trained over the base in {kind}, merged into the base as stored: --quantization {kind} takes the former"
        )
    how = "" if combination is None else f" ({describe(combination)})"
    print_status(f"{', '.join(map(str, merged.adapters))}{how} merged into {merged.base}")
    if merged.quantized:
        print_status("the base is quantized: merged into its dequantized weights, and written unquantized")
    name = str(merged.dtype).removeprefix("torch.")
    if not merged.rounding:
        print_status(f"written in {name}, as it was computed: nothing was rounded")
    else:
        worst, largest = merged.rounding.worst
        print_status(
            f"written in {name}: against base and adapters unmerged, the matrices differ by {merged.rounding.mean:.2%} "
            f"on average, at most by {largest:.2%} ({worst}); ||difference|| / ||matrix||, Frobenius norms"
        )
    print_status(f"model in {out}: {suggested_commands(out)}")


def write_adapter(sources: list[str], out: Path, combination: Combination, rank: int | None, into: str | None) -> None:
    """Combines adapters into one, and prints how far that is from the combination of their changes."""
    from danlu.assembly import combining
    from danlu.cli.train import suggested_commands

    combined = combining.combine(sources, out, combination, rank=rank, into=into)
    print_status(f"{', '.join(map(str, combined.adapters))} ({describe(combination)}) in one adapter")
    if combined.errors:
        worst, largest = combined.errors.worst
        print_status(
            f"it differs from the combined changes by {combined.errors.mean:.2%} on average, at most by {largest:.2%} "
            f"({worst}); ||difference|| / ||change||, Frobenius norms. Merging into the base has no such error"
            + (", nor has --method cat" if combination.method == "linear" else "")
        )
    print_status(f"adapter in {out}: {suggested_commands(out)}")


def check_options(
    sources: int,
    method: str,
    weights: str | None,
    density: float | None,
    majority: str,
    dtype: str,
    quantization: str | None,
) -> tuple[float, ...]:
    """The weight of each adapter. Raises RecipeError with all that is wrong, before anything is loaded."""
    problems = []
    adapter_weights = (1.0,) * sources
    if weights is not None:
        try:
            adapter_weights = tuple(float(text) for text in weights.split(","))
        except ValueError:
            problems.append(f"--weights: {weights!r} are no numbers; give one for each adapter, as 0.7,0.3")
        if not all(math.isfinite(weight) for weight in adapter_weights):
            problems.append(f"--weights: {weights!r} are not all finite")
        elif len(adapter_weights) != sources:
            problems.append(f"--weights: {len(adapter_weights)} are given for {sources} adapters")
    for option, value, known in (
        ("method", method, METHODS),
        ("majority", majority, MAJORITIES),
        ("dtype", dtype, PRECISIONS),
        ("quantization", quantization, (None, *QUANTIZATIONS)),
    ):
        if value not in known:
            problems.append(f"--{option}: {value!r} is unknown; use {', '.join(choice for choice in known if choice)}")
    if density is not None and not 0 < density <= 1:
        problems.append(f"--density: {density} is out of range; it must be above 0 and at most 1")
    if (density is None) == (method in SPARSIFYING):
        rule = "needs one, the share of each change that is kept, such as 0.2" if density is None else "keeps all"
        problems.append(f"--density: --method {method} {rule}")
    if problems:
        raise RecipeError(problems)
    return adapter_weights


def describe(combination: Combination) -> str:
    """Formats a combination: `ties, weights 0.7 and 0.3, density 0.2`."""
    weights = " and ".join(f"{weight:g}" for weight in combination.weights)
    kept = f", density {combination.density:g}" if combination.method in SPARSIFYING else ""
    return f"{combination.method}, weights {weights}{kept}"
