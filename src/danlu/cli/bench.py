"""`danlu bench`: the speed of this machine, and the losses of a model in few bits, measured."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.cli.model_flags import Device, Dtype, check_flags
from danlu.core.errors import DataError
from danlu.core.terminal import echo

if TYPE_CHECKING:
    from danlu.core.types import Pack
    from danlu.inference.generation_config import Precision
    from danlu.inference.resolve_model import ResolvedModel
    from danlu.recipe.sections import QuantizationSection

MAX_WINDOW = 2048  # tokens that are scored at once, where the model's context is no shorter

app = typer.Typer(help="Measure this machine, or a model.", no_args_is_help=True, add_completion=False)


@app.command()
def gemm(
    seconds: Annotated[float, typer.Option(min=0.05, help="Time for each measurement.")] = 1.0,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="CPU threads; may be given several times.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")] = False,
) -> None:
    """The fastest matrix product by type and threads: the peak that a run's utilisation (MFU) is measured against.

    The numbers are kept in ~/.cache/danlu/gemm.json, where training looks for them.
    """
    # torch takes a second to import, which `danlu bench --help` should not.
    import torch

    from danlu.core.errors import ResourceError
    from danlu.planning.machine_profile import measured_peak, specified_peak

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not auto, cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("--device cuda: torch sees no GPU here. Use --device cpu.")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    kind = "cpu" if on_cpu else "cuda"
    for count in (threads or _thread_counts(os.cpu_count() or 1)) if on_cpu else [torch.get_num_threads()]:
        torch.set_num_threads(count)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            peak = measured_peak(dtype, kind, seconds, fresh=True)
            specified = specified_peak(dtype, kind)
            name = str(dtype).removeprefix("torch.")
            if as_json:
                line = {
                    "dtype": name,
                    "device": kind,
                    "threads": count,
                    "flops_per_second": peak,
                    "specified_flops_per_second": specified,
                }
                echo(json.dumps(line))
            else:
                where = f"{count:3d} thread{'s' if count > 1 else ' '}" if on_cpu else torch.cuda.get_device_name()
                known = "" if specified is None else f"  (specified: {specified / 1e9:.1f})"
                echo(f"{name:10}{where}  {peak / 1e9:10.1f} GFLOP/s{known}")


def _thread_counts(cores: int) -> list[int]:
    """1, 2, 4 ... and all of them."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})


@app.command()
def quantization(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a finished run, or a hub id.")],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text to measure the perplexity on.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How much of the text is used.")] = 16384,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Measure the losses of a model in NF4, FP4, INT8 and INT4: errors of linear layers, bits a parameter, perplexity.

    bits are counted from what is stored. error is ||W - Q|| / ||W|| of all linear layers together, worst that of the
    layer that loses most (--json names it), mean is mean |W - Q| / mean |W|.

    NF4 and FP4 are in blocks of 64 with their scales quantized too, or left whole; INT8 and INT4 in groups of 128.
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
        "int8": sections.Int8(group=128),
        "int4": sections.Int4(group=128),
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
