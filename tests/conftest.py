"""Fixtures shared by every room's tests."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import builders.tiny_world
import pytest
import torch  # noqa: F401  # verbs say what they are about to do only where it is still to be loaded: the same in each test
from builders.case_sample import sample
from builders.engine_models import endless, loaded, small_decoder  # noqa: F401 - fixtures
from builders.fork_server import MODULES, SERVER
from builders.tiny_world import World, tokenise_here
from builders.torch_process import torch_process  # noqa: F401 - a fixture
from hypothesis import settings

from danlu.numerics import batch_invariant

gc.disable()  # until tests are collected: see `pytest_collection`
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts the tests in the background has signals ignored that they are about, in their children too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The same examples each time, so that no change is refused for what it did not do; `make test-all` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("new", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


TEXT_OF_TIER = {"distributed": r"mark\.distributed", "end_to_end": r"\btiny_world\b|\bloaded: Loaded\b"}
"""A pattern that files with tests of a tier have, by the tier's mark."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of one tier imports only files that can have tests of it; importing all takes each worker half a minute."""
    wanted = config.getoption("markexpr")
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    marks = re.findall(r"^pytestmark = pytest\.mark\.(\w+)$", text, re.MULTILINE)  # of all tests of the file
    excluded = any(f"not {mark}" in wanted for mark in marks)
    pattern = TEXT_OF_TIER.get(wanted.partition(" and ")[0])
    return True if excluded or (pattern is not None and not re.search(pattern, text)) else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that train, answer or check with a whole world of data are a tier of their own."""
    texts: dict[Path, str] = {}
    for item in items:
        if isinstance(item, pytest.Function) and "tiny_world" in item.fixturenames:
            item.add_marker(pytest.mark.end_to_end)
        text = texts.get(item.path) or texts.setdefault(item.path, item.path.read_text(encoding="utf-8"))
        for tier, pattern in TEXT_OF_TIER.items():
            if item.get_closest_marker(tier) is not None and not re.search(pattern, text):
                raise pytest.UsageError(f"{item.nodeid}: a run of tier {tier} misses it: its file lacks {pattern}")
    _mark_more_cases(items)


def _mark_more_cases(items: list[pytest.Item]) -> None:
    """Marks the cases of parametrized fast tests that `make test` leaves out: see `case_sample`."""
    cases: dict[str, dict[str, pytest.Item]] = {}  # by id of the test, and of its cases
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not _is_of_another_tier(item):
            cases.setdefault(item.nodeid.removesuffix(f"[{item.callspec.id}]"), {})[item.callspec.id] = item
    for cases_of_test in cases.values():
        for case in cases_of_test.keys() - sample(tuple(cases_of_test)):
            cases_of_test[case].add_marker(pytest.mark.more_cases)


def _is_of_another_tier(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(tier) is not None for tier in ("slow", "gpu", "distributed", "end_to_end"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Libraries and collected tests live until the end, so that the garbage collector need not walk over them."""
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)  # the default looks for cycles so often that it costs a fiftieth of the time


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Files need not outlast a power failure here, and a run waits for the disk some twenty times a checkpoint.

    What is synchronised, and in which order, is tested by tests that put a function of their own in this place.
    """

    def looked_up(fd: int) -> None:
        os.fstat(fd)  # a closed file is an error still

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", looked_up)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """`danlu verify` forks from the tests' server, whose modules are those of the tests also where it is first."""
    SERVER.set_forkserver_preload(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SERVER, "set_forkserver_preload", lambda names: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def products_of_a_module() -> Iterator[None]:
    """Exact products, which an engine puts in the place of torch's until its process ends, end with their file."""
    yield from _products_end_here()


@pytest.fixture(autouse=True)
def products_of_a_test() -> Iterator[None]:
    """Exact products end with the test that began them, and not with a later one when a file's fixture did."""
    yield from _products_end_here()


def _products_end_here() -> Iterator[None]:
    before = batch_invariant._library
    yield
    if before is None and batch_invariant._library is not None:
        batch_invariant._library._destroy()
        batch_invariant._library = None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data (texts, instructions, tokenizers, a small pretrained model), where there is one."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("DANLU_SHARED_DATA", beside))
    if not (folder / "README.md").is_file():
        pytest.skip(f"no real data at {folder}: set DANLU_SHARED_DATA to the data folder to run this test")
    return folder


@pytest.fixture(scope="session")
def tiny_world() -> World:
    """A tokenizer, rows and recipes over them, for `danlu train` in a second."""
    return builders.tiny_world.tiny_world()


@pytest.fixture
def tokenising_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are tokenised in this process, which has loaded what that takes, not in new ones."""
    tokenise_here(monkeypatch)


@pytest.fixture(scope="module")
def module_tokenises_here() -> Iterator[None]:
    """The same for all tests of a module and for fixtures that it shares between them."""
    with pytest.MonkeyPatch.context() as patch:
        tokenise_here(patch)
        yield
