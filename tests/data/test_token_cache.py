from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders.logged import logged

from danlu.core.errors import ResourceError
from danlu.data import token_cache
from danlu.data.samples import SampleBlock, Selection
from danlu.data.store_names import MARKER
from danlu.data.token_cache import StoreWriter, TokenCache, TokenStore

Build = Callable[[Callable[[int], StoreWriter]], None]


def block(seed: int, samples: int = 20, largest: int = 1000, weights: list[float] | None = None) -> SampleBlock:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 30, samples)
    return SampleBlock.of(
        [generator.integers(0, largest, n).astype(np.int32) for n in lengths],
        [generator.choice(weights or [0.0, 1.0], n).astype(np.float32) for n in lengths],
        [generator.integers(0, 5, n).astype(np.uint8) for n in lengths],
        [100 * seed + i for i in range(samples)],
        [f"文件 {seed}.jsonl:{i + 1}" for i in range(samples)],
    )


def writes(*blocks: SampleBlock, vocabulary: int = 1000) -> Build:
    def build(open_writer: Callable[[int], StoreWriter]) -> None:
        writer = open_writer(vocabulary)
        for one in blocks:
            writer.add(one)
        writer.finish({"rows": 3})

    return build


def refuses(open_writer: Callable[[int], StoreWriter]) -> None:
    raise AssertionError("built although it was there")


def assert_same(store: TokenStore | Selection, expected: SampleBlock) -> None:
    assert np.array_equal(store.lengths, expected.lengths)
    assert np.array_equal(store.row_numbers, expected.row_numbers)
    for number in range(len(expected)):
        found, wanted = store.sample(number), expected.sample(number)
        assert found.tokens.dtype == np.int32 and found.weights.dtype == np.float32
        assert np.array_equal(found.tokens, wanted.tokens)
        assert np.array_equal(found.weights.view(np.uint32), wanted.weights.view(np.uint32))
        assert np.array_equal(store.reasons(number), expected.reasons(number))
        assert found.row == wanted.row


def test_a_block_keeps_what_it_was_given() -> None:
    tokens = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    weights = [np.array([0.0, 0.1], np.float32), np.array([-0.0], np.float32)]
    one = SampleBlock.of(tokens, weights, [np.array([4, 5], np.uint8), np.array([4], np.uint8)], [0, 0], ["a", "b"])
    assert one.sample(0).weights.tolist() == [0.0, float(np.float32(0.1))]
    assert one.reasons(0).tolist() == [4, 5]
    assert one.sample(1).row == "b"


def test_joined_blocks_equal_their_parts() -> None:
    parts = [block(1), block(2, weights=[0.0, 0.3]), block(3, samples=0)]
    joined = SampleBlock.join(parts)
    whole = Selection.all_of(parts, [f"{number}.jsonl" for number in range(len(parts))])
    assert_same(whole, joined)
    assert [sample.source for sample in whole] == [
        f"{number}.jsonl" for number, part in enumerate(parts) for _ in range(len(part))
    ]
    assert len(SampleBlock.join([])) == 0


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, np.uint16), (65537, np.int32)])
def test_what_is_written_is_read(tmp_path: Path, vocabulary: int, dtype: type) -> None:
    parts = [block(seed, largest=vocabulary) for seed in range(3)]
    store = TokenCache(tmp_path).get("rows", {"a": 1}, writes(*parts, vocabulary=vocabulary))
    assert_same(store, SampleBlock.join(parts))
    assert store._tokens.dtype == dtype
    assert store.statistics == {"rows": 3}
    assert store.max_token == max(part.tokens.max() for part in parts)
    again = TokenCache(tmp_path).get("rows", {"a": 1}, refuses)
    assert_same(again, SampleBlock.join(parts))


def test_the_check_sees_a_changed_weight(tmp_path: Path) -> None:
    """Negative control of assert_same."""
    store = TokenCache(tmp_path).get("rows", {}, writes(block(1)))
    with pytest.raises(AssertionError):
        assert_same(store, block(1, weights=[0.0, 0.5]))


def test_any_number_of_different_weights_is_exact(tmp_path: Path) -> None:
    many = block(1, samples=200, weights=np.random.default_rng(0).random(2000).astype(np.float32).tolist())
    assert len(many.palette) > 256
    parts = [block(0), many, block(2)]
    store = TokenCache(tmp_path).get("rows", {}, writes(*parts))
    assert_same(store, SampleBlock.join(parts))


def test_a_store_without_samples(tmp_path: Path) -> None:
    store = TokenCache(tmp_path).get("rows", {}, writes())
    assert len(store) == 0 and store.max_token == -1


def test_other_settings_are_another_store(tmp_path: Path) -> None:
    first = TokenCache(tmp_path).get("rows", {"max_length": 1}, writes(block(1)))
    second = TokenCache(tmp_path).get("rows", {"max_length": 2}, writes(block(2)))
    assert first.folder != second.folder
    assert_same(first, block(1))


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: _flip(folder / "tokens.bin", 7), "tokens.bin: wrong checksum from byte 0"),
        (lambda folder: os.truncate(folder / "labels.bin", 5), "labels.bin: 5 bytes, expected"),
        (lambda folder: (folder / "rows.bin").unlink(), "rows.bin: missing"),
        (lambda folder: (folder / MARKER).write_text("{"), "Expecting property name"),
        (lambda folder: (folder / "statistics.json").write_text("{"), "Expecting property name"),
    ],
)
def test_damage_is_noticed_and_repaired(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(TokenCache(tmp_path).get("rows", {}, writes(block(1))).folder)
    with logged() as text:
        store = TokenCache(tmp_path).get("rows", {}, writes(block(1)))
    assert said in text.getvalue() and "tokenising again" in text.getvalue()
    assert_same(store, block(1))
    assert_same(TokenCache(tmp_path).get("rows", {}, refuses), block(1))


def test_checksums_cover_every_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "CHECK_BYTES", 64)
    store = TokenCache(tmp_path).get("rows", {}, writes(block(1), block(2)))
    size = (store.folder / "tokens.bin").stat().st_size
    for at in (0, 63, 64, size // 2, size - 1):
        _flip(store.folder / "tokens.bin", at)
        assert TokenCache(tmp_path)._read(store.folder) is None
        _flip(store.folder / "tokens.bin", at)
    assert TokenCache(tmp_path)._read(store.folder) is not None


def test_an_error_while_building_leaves_nothing(tmp_path: Path) -> None:
    def fails(open_writer: Callable[[int], StoreWriter]) -> None:
        open_writer(10).add(block(1, largest=10))
        raise KeyError("broken row")

    with pytest.raises(KeyError, match="broken row"):
        TokenCache(tmp_path).get("rows", {}, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, array: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_cache._SummedFile, "write", full)
    with pytest.raises(ResourceError, match=r"the disk is full: \d+ MiB are left for the token cache .* larger disk"):
        TokenCache(tmp_path).get("rows", {}, writes(block(1)))


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ResourceError, match=r"the token cache .*file cannot be written \(.*\): set data.cache to a folder you may"
    ):
        TokenCache(tmp_path / "file").get("rows", {}, writes(block(1)))


SCRIPT = """
import os, sys, time
from pathlib import Path
import numpy as np
from danlu.data.token_cache import TokenCache
from danlu.data.samples import SampleBlock

def build(open_writer):
    writer = open_writer(100)
    one = [np.array([1, 2, 3], np.int32)]
    writer.add(SampleBlock.of(one, [np.zeros(3, np.float32)], [np.zeros(3, np.uint8)], [0], ["row"]))
    print("building", flush=True)
    sys.stdin.readline()
    writer.finish({"by": os.getpid()})

store = TokenCache(Path(sys.argv[1])).get("rows", {}, build)
print(store.statistics["by"], flush=True)
"""


def _start(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_a_killed_run_leaves_nothing_the_next_one_sees(tmp_path: Path) -> None:
    with _start(tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob("*.unfinished"))) == 1
    TokenCache(tmp_path).get("another", {}, writes(block(1)))  # any later run cleans up, whatever it builds
    assert not list(tmp_path.glob("*.unfinished"))
    store = TokenCache(tmp_path).get("rows", {}, writes(block(2)))
    assert_same(store, block(2))


def test_the_second_of_two_runs_waits_and_reads(tmp_path: Path) -> None:
    with _start(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "building\n"
        TokenCache(tmp_path).get("another", {}, writes(block(1)))
        assert len(list(tmp_path.glob("*.unfinished"))) == 1, "work in progress was removed"
        stores: list[TokenStore] = []
        waiting = threading.Thread(target=lambda: stores.append(TokenCache(tmp_path).get("rows", {}, refuses)))
        with logged() as text:
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive() and "waiting for it" in text.getvalue()
            process.stdin.write("\n")
            process.stdin.flush()
            waiting.join(20)
        assert stores[0].statistics == {"by": process.pid}


def test_the_marker_is_written_last(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    writer = StoreWriter(folder, "key", 10)
    writer.add(block(1, largest=10))
    assert not (folder / MARKER).exists()
    writer.finish({})
    assert (
        json.loads((folder / MARKER).read_text())["files"]["tokens.bin"]["bytes"]
        == (folder / "tokens.bin").stat().st_size
    )
