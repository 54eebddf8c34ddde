"""What environment variables say of the processes of a run."""

from __future__ import annotations

import pytest

from danlu.core.errors import RecipeError
from danlu.parallel.world import World, first_host, format_ranks, world_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_worlds() -> None:
    assert world_from_environment({}) is None
    assert world_from_environment(TORCHRUN) == World(5, 8, 1, "10.0.0.1", 29400, "torchrun")
    plain = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    assert world_from_environment(plain) == World(5, 8, None, "10.0.0.1", 29400, "environment variables")
    assert world_from_environment(without(TORCHRUN, "LOCAL_RANK")) == World(5, 8, 1, "10.0.0.1", 29400, "torchrun")
    nobody_said = without(TORCHRUN, "LOCAL_RANK") | {"LOCAL_WORLD_SIZE": "0"}
    assert world_from_environment(nobody_said) == World(5, 8, None, "10.0.0.1", 29400, "torchrun")
    assert world_from_environment(SRUN) == World(6, 8, 2, "gpu03", 12000 + (4711 * 31 + 2) % 20000, "SLURM")
    assert world_from_environment(SRUN | {"MASTER_ADDR": "here", "MASTER_PORT": "1234"}) == World(
        6, 8, 2, "here", 1234, "SLURM"
    )


def test_alone_where_one_process_was_started() -> None:
    assert world_from_environment({"WORLD_SIZE": "1"}) is None  # as container platforms set it
    assert world_from_environment(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert world_from_environment(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) is None
    # The batch script itself: SLURM says how many tasks the job may have, but none has been started.
    assert (
        world_from_environment(without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID") | {"SLURM_NTASKS": "8"}) is None
    )


def test_processes_that_danlu_starts_inside_of_slurm_are_its_own() -> None:
    inside = world_from_environment(SRUN | TORCHRUN)
    assert inside is not None and (inside.rank, inside.address) == (5, "10.0.0.1")


def test_two_steps_of_a_job_meet_at_different_ports() -> None:
    ports = {world.port for step in range(4) if (world := world_from_environment(SRUN | {"SLURM_STEP_ID": str(step)}))}
    assert len(ports) == 4


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE is 4 in the environment, but RANK and MASTER_ADDR and MASTER_PORT are not set.",
        ),
        (
            without(TORCHRUN, "MASTER_PORT"),
            "but MASTER_PORT is not set. Start danlu with torchrun, srun or --processes 8",
        ),
        ({"RANK": "0"}, "WORLD_SIZE is not set in the environment"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 in the environment, and WORLD_SIZE 8: ranks count from 0 to 7"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE is 0 in the environment: a run has at least one process"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST, which names their machines, is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": ","}, "SLURM's list of machines ',' cannot be read. Set MASTER_ADDR"),
    ],
)
def test_contradictions(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        world_from_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[9,03-05]", "gpu9"),
        ("rack[1-2]-node[10-12]", "rack1-node10"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "rank 1"),
        ([2, 0], "ranks 0 and 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 3], "ranks 0, 2 and 3"),
        ([*range(6), 7, 9], "ranks 0-5, 7 and 9"),
    ],
)
def test_named(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
