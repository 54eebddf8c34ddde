"""`danlu bench`: the speed of this machine, and the losses of a model in few bits, measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from danlu.cli.model_flags import Device, Dtype, check_flags
from danlu.core.errors import DataError, RecipeError
from danlu.core.terminal import echo

if TYPE_CHECKING:
    from danlu.core.types import Pack
    from danlu.inference.generation_config import Precision
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.planning.machine_profile import MachineProfile
    from danlu.recipe.sections import QuantizationSection

MAX_WINDOW = 2048  # tokens that are scored at once, where the model's context is no shorter

app = typer.Typer(help="Measure this machine, or a model.", no_args_is_help=True, add_completion=False)


@app.command()
def machine(
    processes: Annotated[
        int, typer.Option(min=1, help="Measure so many processes at once too, and the links between them.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of each process; by default OMP_NUM_THREADS, else a share.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a profile, for scripts.")] = False,
) -> None:
    """Measure this machine for planning: products, memory, attention, optimizer, links. It takes half a minute or so.

    The profiles are kept in ~/.cache/danlu/machine, one for each number of processes, and the fastest products, which
    MFU is measured against, in ~/.cache/danlu/gemm.json, where training looks for them.
    """
    # torch takes a second to import, which `danlu bench --help` should not.
    import torch

    from danlu.core.errors import ResourceError
    from danlu.core.machine import usable_cores
    from danlu.numerics.dtypes import DTYPES
    from danlu.planning.machine_profile import machine_here
    from danlu.planning.measure_links import measure_machine
    from danlu.planning.product_peak import measured_peak, specified_peak

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not auto, cpu or cuda", param_hint="--device")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ResourceError("--device cuda: torch sees no GPU here. Use --device cpu.")
    kind: Literal["cpu", "cuda"] = "cuda" if gpus and device != "cpu" else "cpu"
    if kind == "cuda" and processes > gpus:
        raise ResourceError(f"--processes {processes}: there are {gpus} GPUs here, and each process needs one.")
    if threads is not None:
        torch.set_num_threads(threads)
    for precision, dtype in DTYPES.items():
        peak, specified = measured_peak(dtype, kind, fresh=True), specified_peak(dtype, kind)
        if not as_json:
            known = "" if specified is None else f"  (specified: {specified / 1e9:,.0f})"
            echo(f"fastest product with {precision}  {peak / 1e9:10,.1f} GFLOP/s{known}")
    variable = os.environ.get("OMP_NUM_THREADS", "")
    set_threads = threads or (int(variable) if variable.isdigit() else None)
    for count in dict.fromkeys((1, processes)):
        own_threads = set_threads or (torch.get_num_threads() if count == 1 else max(1, usable_cores() // count))
        profile = measure_machine(machine_here(kind, own_threads, count))
        try:
            file = str(profile.write())
        except OSError as error:
            raise ResourceError(f"~/.cache/danlu/machine: the profile cannot be kept there: {error.strerror}") from None
        if as_json:
            echo(json.dumps({"file": file, **profile.to_json()}))
        else:
            show_profile(profile, file)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def gemm() -> None:
    """Say what measures products now."""
    raise RecipeError("danlu bench gemm is now danlu bench machine, which measures products and more. Run that")


@app.command()
def quantization(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a finished run, or a hub id.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to measure the perplexity on.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How much of the text is used.")] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure the losses of a model in every format of a base: errors of linear layers, bits a parameter, perplexity.

    bits are counted from what is stored. error is ||W - Q|| / ||W|| of all linear layers together, worst that of the
    layer that loses most (--json names it), mean is mean |W - Q| / mean |W|.

    NF4 and FP4 are in blocks of 64 with their scales quantized too, or left whole; integers and FP8 in groups of 128;
    MXFP8, MXFP4 and NVFP4 as they are defined.
    """
    precision = check_flags({}, 0, dtype, device, [])
    # numpy, a tenth of a second, and below torch, more than one: for this verb, not for its --help.
    from danlu.inference.resolve_model import resolve_model

    resolved = resolve_model(model)
    content = None if text is None else read_start(text, 16 * tokens)
    from danlu.assembly.quantizing import quantization_errors
    from danlu.recipe import sections
    from danlu.training.progress import RowProgress

    formats: dict[str, QuantizationSection] = {
        "nf4": sections.Nf4(),
        "nf4, scales whole": sections.Nf4(double=False),
        "fp4": sections.Fp4(),
        **{each.model_fields["kind"].default: each() for each in sections.QUANTIZATIONS[2:]},
    }
    with closing(RowProgress(sys.stderr, doing="measuring", units="layers")) as progress:
        errors = quantization_errors(resolved.folder, formats, progress if sys.stderr.isatty() else None)
    rows = [
        {
            "format": name,
            "bits": error.bits,
            "error": error.relative,
            "worst": error.worst,
            "worst_layer": error.worst_layer,
            "mean": error.mean_relative,
        }
        for name, error in errors.items()
    ]
    result: dict[str, Any] = {"model": str(resolved.folder), "parameters": next(iter(errors.values())).elements}
    if content is not None:
        packs = windows(resolved, content, tokens)
        result["text"] = str(text)
        result["tokens"] = sum(pack.tokens - 1 for pack in packs)
        result["perplexity"] = perplexity(resolved, packs, None, precision, device)
        for row, section in zip(rows, formats.values(), strict=True):
            row["perplexity"] = perplexity(resolved, packs, section, precision, device)
    if as_json:
        echo(json.dumps({**result, "formats": rows}, ensure_ascii=False))
    else:
        show(result, rows)


def read_start(file: Path, characters: int) -> str:
    """The first characters of a text file. Raises DataError if it cannot be read."""
    try:
        with file.open(encoding="utf-8") as handle:
            return handle.read(characters)
    except UnicodeDecodeError:
        raise DataError(f"{file}: not UTF-8 text; convert it first") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None


def windows(resolved: ResolvedModel, text: str, tokens: int) -> list[Pack]:
    """The first tokens of a text in windows of the model's context; of each window all but the first are scored.

    Raises DataError if there are fewer than two.
    """
    import numpy as np

    from danlu.core.types import Pack, Sample
    from danlu.inference.load_model import load_chat_tokenizer

    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder).tokenizer
    front = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    ids = tokenizer.encode(text)[:tokens]
    step = min(resolved.config.context_length, MAX_WINDOW) - len(front)
    window_ids = [np.array([*front, *ids[start : start + step]], dtype=np.int32) for start in range(0, len(ids), step)]
    if not window_ids or len(window_ids[0]) < 2:
        raise DataError("the text has fewer than two tokens: there is nothing to predict. Give a longer one")
    weights = [np.concatenate(([0], np.ones(len(window) - 1))).astype(np.float32) for window in window_ids]
    samples = [Sample(*arrays, "text") for arrays in zip(window_ids, weights, strict=True)]
    return [Pack((sample,)) for sample in samples if len(sample.tokens) > 1]


def perplexity(
    resolved: ResolvedModel, packs: list[Pack], section: QuantizationSection | None, precision: Precision, device: str
) -> float:
    """exp of the mean negative log-probability of a token, with the linear layers as a section says."""
    from danlu.inference.load_model import load_chat_tokenizer, load_model
    from danlu.stages.learner import DecoderLearner
    from danlu.training.evaluation import evaluate

    chat_tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)
    opened = load_model(resolved, chat_tokenizer, precision=precision, device=device, quantization=section)
    place = opened.model.embed_tokens.weight.device
    scores = evaluate(DecoderLearner(opened.model, opened.model, place, opened.dtype, 1), packs)
    assert scores is not None, "windows have tokens to score"
    return scores.perplexity


def show_profile(profile: MachineProfile, file: str) -> None:
    """Prints the main numbers of a profile."""
    # Here because rich costs as much as the rest of a command line that only asks for help.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    precisions = list(profile.peaks())
    for heading in ("", *precisions):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def rate(title: str, amount: float, seconds: Callable[[str], float]) -> None:
        table.add_row(title, *(f"{amount / seconds(precision) / 1e9:,.1f}" for precision in precisions))

    square, row = (1024, 1024, 1024), (1, 1024, 1024)
    rate("products of 1024 rows, GFLOP/s", 2 * 1024**3, lambda precision: profile.product_seconds(*square, precision))
    rate("products of one row, GFLOP/s", 2 * 1024**2, lambda precision: profile.product_seconds(*row, precision))
    work = 2 * 1024 * 1024 * 8 * 64  # the half of 4 x length^2 x heads x width that is not masked
    rate(
        "attention, 1024 tokens, 8 heads, GFLOP/s",
        work,
        lambda precision: profile.attention_seconds(1024, 8, 64, precision),
    )
    rate(
        "its backward pass, GFLOP/s",
        5 * work / 2,
        lambda precision: profile.attention_seconds(1024, 8, 64, precision, backward=True),
    )
    rate("copies of 64 MiB, GB/s", 1 << 27, lambda precision: profile.bytes_seconds(1 << 27, "copy", precision))
    rate("norms of 16 MiB, GB/s", 1 << 24, lambda precision: profile.bytes_seconds(1 << 24, "norm", precision))
    echo(f"{profile.machine.key}:")
    Console().print(table)
    updates, dequantized = ((1 << 21) / seconds(1 << 21) / 1e6 for seconds in (
        profile.update_seconds, profile.dequantize_seconds
    ))  # fmt: skip
    calls = [1e6 * profile.call_seconds(**how) for how in ({}, {"behind_products": True}, {"trained": True})]
    echo(f"AdamW {updates:,.0f} million weights a second, NF4 made dense {dequantized:,.0f} million")
    echo(f"a call {calls[0]:.1f} us; behind a product {calls[1]:.1f} us, with its backward pass {calls[2]:.1f} us")
    if (link := profile.link()) is not None:
        ranks = profile.machine.processes
        summed = (1 << 24) / profile.collective_seconds("all_reduce", 1 << 24, ranks) / 1e9
        echo(f"links: {link[0] / 1e9:.2f} GB/s, {link[1] * 1e6:.0f} us; all_reduce of 16 MiB {summed:.2f} GB/s")
    echo(f"kept in {file}")


def show(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The table for people."""
    # Here because rich costs as much as the rest of a command line that only asks for help.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    headings = ["bits", "error", "worst", "mean", *(["perplexity"] if "perplexity" in result else [])]
    table.add_column("format", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if "perplexity" in result:
        table.add_row("as stored", "", "", "", "", f"{result['perplexity']:.4f}")
    for row in rows:
        shares = [f"{row[key]:.2%}" for key in ("error", "worst", "mean")]
        lost = [f"{row['perplexity']:.4f}"] if "perplexity" in row else []
        table.add_row(row["format"], f"{row['bits']:.3f}", *shares, *lost)
    echo(f"{result['model']}: {result['parameters']:,} parameters in linear layers")
    Console().print(table)
    if "perplexity" in result:
        echo(f"perplexity of {result['tokens']:,} tokens of {result['text']}")
