"""How many processes a run has and which of them this is, by the environment variables of their launcher.

Imports no torch: the command line asks before it loads anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from danlu.core.errors import RecipeError

_RANK, _SIZE, _ADDRESS, _PORT = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


@dataclass(frozen=True)
class World:
    """The processes of a run and this one's place among them."""

    rank: int
    size: int
    local_rank: int | None  # number among the processes of this machine; None where it is not known
    address: str  # host of rank 0, at which the processes rendezvous
    port: int
    source: str  # the source of these values, for messages: "torchrun"

    def variables(self) -> dict[str, str]:
        """The environment variables that torch.distributed reads."""
        variables = {_RANK: self.rank, _SIZE: self.size, _ADDRESS: self.address, _PORT: self.port}
        if self.local_rank is not None:
            variables["LOCAL_RANK"] = self.local_rank
        return {name: str(value) for name, value in variables.items()}


def world_from_environment(environ: Mapping[str, str]) -> World | None:
    """The world that the variables of torchrun, SLURM's srun or the user describe; None for a single process.

    Raises RecipeError for variables that contradict each other or are no numbers.
    """
    if _SIZE in environ or _RANK in environ:
        return _from_variables(environ)
    if _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        return _from_slurm(environ)
    return None


def _from_variables(environ: Mapping[str, str]) -> World | None:
    size = _number(environ, _SIZE)
    if size == 1:
        return None
    missing = [name for name in (_RANK, _ADDRESS, _PORT) if name not in environ]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        raise RecipeError(
            f"{_SIZE} is {size} in the environment, but {' and '.join(missing)} {verb} not set. Start danlu with "
            f"torchrun, srun or --processes {size}, which set them all; or unset {_SIZE} to train in one process"
        )
    rank = _number(environ, _RANK)
    if size < 1:
        raise RecipeError(f"{_SIZE} is {size} in the environment: a run has at least one process")
    if not 0 <= rank < size:
        raise RecipeError(f"{_RANK} is {rank} in the environment, and {_SIZE} {size}: ranks count from 0 to {size - 1}")
    local = None
    if "LOCAL_RANK" in environ:
        local = _number(environ, "LOCAL_RANK")
    elif (local_size := _number(environ, "LOCAL_WORLD_SIZE", 0)) > 0:
        local = rank % local_size
    source = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment variables"
    return World(rank, size, local, environ[_ADDRESS], _number(environ, _PORT), source)


def _from_slurm(environ: Mapping[str, str]) -> World:
    """The world of a task that srun started with others. The batch script itself, outside of srun, is one process."""
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID", 0)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise RecipeError(
            "SLURM started several tasks, but SLURM_STEP_NODELIST, which names their machines, is not set"
        )
    return World(
        rank=_number(environ, "SLURM_PROCID"),
        size=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID"),
        address=environ.get(_ADDRESS) or first_host(nodes),
        # Below the ephemeral ports of the system, and a different one for each job step that may run at the same time.
        port=_number(environ, _PORT, 12_000 + (job * 31 + step) % 20_000),
        source="SLURM",
    )


def first_host(nodes: str) -> str:
    """The first of SLURM's compressed list of hosts: ``gpu[03-05,9],login1`` -> ``gpu03``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if first is None:
        raise RecipeError(f"SLURM's list of machines {nodes!r} cannot be read. Set {_ADDRESS} to the machine of rank 0")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def format_ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0-5, 7 and 9``."""
    numbers = sorted(set(ranks))
    # Indices at which a run of consecutive ranks begins, and the end of the last one.
    breaks = [0, *(index for index, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    parts: list[str] = []
    for start, end in pairwise(breaks):
        run = numbers[start:end]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The whole number in a variable. Raises RecipeError for one that is no number, or not set and without default."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\s*-?\d+\s*", text):
        seen = "not set" if text is None else f"{text!r}, which is no number"
        raise RecipeError(f"{name} is {seen} in the environment; it says how the processes of a run are numbered")
    return int(text)
