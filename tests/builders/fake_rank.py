"""A process that does the work of a rank without a model: it counts steps, and misbehaves where told to.

    python fake_rank.py FOLDER JSON

JSON: `steps` (default 6) with `pause_s` in each; `torch`: join the group, and agree in it after each step;
`loads`: the step at which a rank says that it has loaded torch; `begins_after_s`: before it says that it has begun;
`does`: what a rank does at a step instead of going on, in the attempts of `attempts` (default: the first alone). Each
step is a line of FOLDER/steps-RANK.txt; an attempt goes on after the last step that rank 0 has written.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from danlu.cli.worker import redirect_output, report_torch_loaded, run_worker
from danlu.core.errors import DataError, RecipeError, Stopped
from danlu.parallel import exit_reports
from danlu.parallel.world import World, world_from_environment

GONE = "Connection closed by peer"


def full(report: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Stop:
    """Asks to stop after a step on SIGINT and SIGTERM, as `danlu.core.stop_signals.StopRequest` does."""

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.asked)

    def asked(self, number: int, frame: Any) -> None:
        self.number = number


def misbehave(what: str, rank: int, folder: Path) -> None:
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "data error":
            raise DataError(f"rows.jsonl:{rank}: a bad row")
        case "recipe error":
            raise RecipeError(["a.yaml:1: first", "a.yaml:2: second"])
        case "bug":
            raise ValueError("no such thing")
        case "gone":
            raise RuntimeError(GONE)
        case "sleep":
            time.sleep(600)
        case "stuck":  # in C++, where signals wait
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            time.sleep(600)
        case "stopped":
            raise Stopped(signal.SIGTERM, "stopped at once; nothing was saved")
        case "error on a full disk":
            exit_reports.write_report = full  # type: ignore[assignment]
            raise DataError(f"rows.jsonl:{rank}: a bad row")
        case str() if what.startswith("wait for "):
            while not (folder / what.removeprefix("wait for ")).exists():
                time.sleep(0.01)
        case "abort at the end":  # as gloo's threads may: the work is done, and that is noted
            os._exit = lambda code: os.abort()  # type: ignore[assignment]


def body(world: World, folder: Path, plan: dict[str, Any]) -> int:
    redirect_output(world, folder)
    print(f"hello from {world.rank} with {os.environ.get('OMP_NUM_THREADS')} threads", flush=True)
    stop = Stop()
    if plan.get("torch"):
        import torch
        import torch.distributed as dist

        from danlu.parallel.process_group import join_process_group, leave_process_group

        torch.set_num_threads(1)
        join_process_group("cpu", 60)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    does = plan.get("does", {}) if int(attempt) in plan.get("attempts", [0]) else {}
    lead, own = folder / "steps-0.txt", folder / f"steps-{world.rank}.txt"
    done = len(lead.read_text().splitlines()) if int(attempt) and lead.exists() else 0
    if plan.get("torch"):
        dist.barrier()
    for step in range(done + 1, plan.get("steps", 6) + 1):
        time.sleep(plan.get("pause_s", 0))
        at, what = does.get(str(world.rank), (0, ""))
        if plan.get("loads", {}).get(str(world.rank)) == step:
            report_torch_loaded(world)
        if at == step:
            misbehave(what, world.rank, folder)
        number = stop.number
        if plan.get("torch"):
            asked = torch.tensor(number)
            dist.all_reduce(asked, dist.ReduceOp.MAX)  # all stop after the same step
            number = int(asked)  # of a signal that came meanwhile the next step tells
        with own.open("a") as lines:
            lines.write(f"{step} of attempt {attempt}\n")
        if number:
            print(f"stopped after step {step}", file=sys.stderr, flush=True)
            time.sleep(plan.get("saving_s", {}).get(str(world.rank), 0))
            (folder / f"saved-{world.rank}").touch()
            if plan.get("torch"):
                leave_process_group()
            return 128 + number
    if plan.get("torch"):
        leave_process_group()
    return 0


if __name__ == "__main__":
    this = world_from_environment(os.environ)
    assert this is not None, "to be started as one of several"
    plan: dict[str, Any] = json.loads(sys.argv[2])
    time.sleep(plan.get("begins_after_s", 0))
    run_worker(this, lambda: body(this, Path(sys.argv[1]), plan))
