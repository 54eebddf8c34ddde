"""`danlu bench`: what this machine can do, measured."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

app = typer.Typer(help="Measure this machine.", no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Measure this machine."""  # a callback, so that the only verb so far keeps its name on the command line


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

    from danlu.errors import ResourceError
    from danlu.plan.gemm import measured_peak

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is not auto, cpu or cuda", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise ResourceError("--device cuda: torch sees no GPU here. Use --device cpu.")
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    for count in (threads or _thread_counts(os.cpu_count() or 1)) if on_cpu else [torch.get_num_threads()]:
        torch.set_num_threads(count)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            peak = measured_peak(dtype, "cpu" if on_cpu else "cuda", seconds, fresh=True)
            name = str(dtype).removeprefix("torch.")
            if as_json:
                device_name = "cpu" if on_cpu else "cuda"
                line = {"dtype": name, "device": device_name, "threads": count, "flops_per_second": peak}
                typer.echo(json.dumps(line))
            else:
                where = f"{count:3d} thread{'s' if count > 1 else ' '}" if on_cpu else torch.cuda.get_device_name()
                typer.echo(f"{name:10}{where}  {peak / 1e9:10.1f} GFLOP/s")


def _thread_counts(cores: int) -> list[int]:
    """1, 2, 4 ... and all of them."""
    return sorted({2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores})
