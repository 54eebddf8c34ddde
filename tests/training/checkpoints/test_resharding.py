"""Checkpoints that several processes write together, loaded into other boxes by any number of them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import checkpoint_worker
from builders.checkpoint_damage import check_every_tensor_and_header, flip
from builders.checkpoint_worker import LAYOUTS, blank, differing, wholes
from builders.process_group import run_group
from safetensors.torch import load_file, save

from danlu.core.errors import CheckpointError
from danlu.core.shard_box import ShardBox
from danlu.parallel.comm import ALONE
from danlu.training.checkpoints import shard_files, verification
from danlu.training.checkpoints.folders import list_checkpoints
from danlu.training.checkpoints.loading import load_checkpoint, read_group
from danlu.training.checkpoints.manifest import MANIFEST, MARK, mark_text, read_manifest
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.checkpoints.verification import verify

STEPS = {layout: 10 + number for number, layout in enumerate(LAYOUTS, 1)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four processes in every layout, and of one process in `alone`; nobody changes them."""
    folder = tmp_path_factory.mktemp("saved")
    said = run_group(checkpoint_worker.saves, 4, str(folder))
    assert all(one == said[0] for one in said), "the ranks do not agree about what there is"
    with CheckpointStore(folder / "alone", background=False) as store:
        store.save(1, wholes(), {"rank": 0})
    return folder


def paths(saved: Path) -> list[Path]:
    return [saved / layout / f"step-{step:08d}" for layout, step in STEPS.items()] + [saved / "alone" / "step-00000001"]


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / "checkpoints" / path.name))


@pytest.mark.distributed
def test_one_process_reads_what_four_wrote(saved: Path) -> None:
    assert checkpoint_worker.load_all([str(path) for path in paths(saved)], 0, 1, ALONE) == []
    for path in paths(saved):
        assert verify(path) == []
        assert differing({group: read_group(path, group) for group in wholes()}, wholes()) == []
    older = saved / "rows" / "step-00000001"
    assert differing({"model": read_group(older, "model")}, {"model": wholes()["model"]}) != []


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 4])
def test_any_boxes_out_of_any_boxes(saved: Path, size: int) -> None:
    for wrong in run_group(checkpoint_worker.loads, size, [str(path) for path in paths(saved)]):
        assert wrong == []


@pytest.mark.distributed
def test_each_box_is_written_once_and_by_the_rank_that_has_it(saved: Path) -> None:
    for layout, step in STEPS.items():
        manifest = read_manifest(saved / layout / f"step-{step:08d}")
        for group, named in wholes().items():
            boxes = manifest.parts(group)
            assert boxes.keys() == named.keys()
            for name, entries in boxes.items():
                assert sum(entry.box.numel for entry in entries) == named[name].numel(), f"{layout} {group}.{name}"
    manifest = read_manifest(saved / "rows" / f"step-{STEPS['rows']:08d}")
    held = {shard.file: shard for shard in manifest.shards}
    file = "model-rank00002-00001-of-00001.safetensors"
    assert held[file].tensors["wide"].box == ShardBox(wholes()["model"]["wide"].shape, (4, 0), (2, 12))
    assert "step.wide" not in held["optimizer-rank00001-00001-of-00001.safetensors"].tensors
    # Any reader of safetensors finds the box in the file.
    read = load_file(saved / "rows" / f"step-{STEPS['rows']:08d}" / file)
    assert torch.equal(read["wide"], wholes()["model"]["wide"][4:6])


@pytest.mark.distributed
def test_only_the_bytes_of_the_box_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    real = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        count = real(fd, buffers, offset)
        read[0] += count
        return count

    for layout in ("rows", "columns", "same"):
        path = saved / layout / f"step-{STEPS[layout]:08d}"
        whole = wholes()["model"]
        # All other tensors are of one whole; of `wide`, rows 1 to 5 of columns 2 to 9.
        box = ShardBox((7, 12), (1, 2), (5, 7))
        into = {name: torch.zeros_like(one) for name, one in whole.items()} | {"wide": torch.zeros(5, 7)}
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", counted)
            read[0] = 0
            load_checkpoint(path, {"model": into}, {"model": {"wide": box}})
        assert torch.equal(into["wide"], whole["wide"][1:6, 2:9])
        assert read[0] == sum(one.nbytes for one in into.values())


@pytest.mark.distributed
def test_a_target_that_is_not_flat_is_filled_in_place(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_CHUNK_BYTES", 100)  # two rows at a time
    whole = wholes()["model"]
    for path in paths(saved):
        into = {name: torch.zeros_like(one) for name, one in whole.items()}
        into["wide"] = torch.zeros(12, 7).t()
        into["experts"] = torch.zeros(6, 3, 4).permute(2, 1, 0)
        load_checkpoint(path, {"model": into})
        assert differing({"model": into}, {"model": whole}) == []


# -- damage -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest, and the mark with it, as if it had been saved so."""
    values = json.loads((path / MANIFEST).read_text())
    change(values)
    text = json.dumps(values, indent=1)
    (path / MANIFEST).write_text(text)
    (path / MARK).write_text(mark_text(text, total_bytes=1, loss=None, time=0.0))


@pytest.mark.distributed
def test_every_flipped_byte_is_found_and_the_box_named(saved: Path, tmp_path: Path) -> None:
    path = copied(paths(saved)[0], tmp_path)
    check_every_tensor_and_header(path)


@pytest.mark.distributed
def test_damage_stops_all_processes_with_one_message(saved: Path, tmp_path: Path) -> None:
    path = copied(paths(saved)[0], tmp_path)
    intact = copied(saved / "rows" / "step-00000001", tmp_path)
    file = path / "model-rank00002-00001-of-00001.safetensors"
    entry = read_manifest(path).tensors("model")["wide[4:6, 0:12]"][1]
    flip(file, entry.offset)
    lost = path / "model-rank00003-00001-of-00001.safetensors"
    lost.unlink()
    for message, touched in run_group(checkpoint_worker.refused, 4, str(path), ""):
        assert not touched
        assert message == (
            f"CheckpointError: {path} is damaged:\n"
            f"  {file}: tensor wide[4:6, 0:12] was altered (SHA-256 differs).\n"
            f"  {lost}: missing; it held wide[6:7, 0:12], experts[3:4, 0:3, 0:6], codes[6:8, 0:8].\n"
            f"Step 1 is intact. To go on from it, add to the `danlu train` command: --resume {intact}"
        )


@pytest.mark.distributed
def test_a_box_that_is_in_no_file_or_in_two_is_named(saved: Path, tmp_path: Path) -> None:
    path = copied(paths(saved)[0], tmp_path)

    def drop(values: dict[str, Any]) -> None:
        (shard,) = (one for one in values["shards"] if one["file"].startswith("model-rank00001"))
        del shard["tensors"]["wide"]

    def widen(values: dict[str, Any]) -> None:
        (shard,) = (one for one in values["shards"] if one["file"].startswith("model-rank00001"))
        shard["tensors"]["wide"]["start"] = [1, 0]

    original = (path / MANIFEST).read_bytes(), (path / MARK).read_bytes()
    rewritten(path, drop)
    assert verify(path) == [f"{path}: tensor model.wide: [2:4, 0:12] of [7, 12] is in no file."]
    assert verify(path, ["optimizer"]) == []
    with pytest.raises(CheckpointError, match=r"tensor model\.wide: \[2:4, 0:12\] of \[7, 12\] is in no file"):
        read_group(path, "model")
    (path / MANIFEST).write_bytes(original[0])
    rewritten(path, widen)
    assert verify(path) == [f"{path}: tensor model.wide: [1:2, 0:12] of [7, 12] is in two files."]
    (path / MANIFEST).write_bytes(original[0])
    (path / MARK).write_bytes(original[1])
    assert verify(path) == []


@pytest.mark.distributed
def test_shares_of_the_hashing_are_disjoint_and_all_of_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = paths(saved)[0]
    hashed: list[tuple[int, int, int]] = []
    real = verification._hash_range

    def noted(fd: int, offset: int, size: int) -> str:
        hashed.append((os.fstat(fd).st_ino, offset, size))
        return real(fd, offset, size)

    monkeypatch.setattr(verification, "_hash_range", noted)
    assert verify(path) == []
    alone, hashed = sorted(hashed), []
    shares = []
    for number in range(3):
        hashed.clear()
        assert verify(path, share=(number, 3)) == []
        shares.append(list(hashed))
    assert sorted(one for share in shares for one in share) == alone
    sizes = [sum(size for _, _, size in share) for share in shares]
    assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.distributed
def test_tensors_that_do_not_fit_are_named_on_all_processes(saved: Path) -> None:
    path = paths(saved)[1]
    expected = {
        "dtype on rank 1": "model.wide: the checkpoint has float32 [7, 12], this run needs float64 [7, 12]",
        "a name too much on rank 2": "model.new: this run needs it, the checkpoint does not have it",
        "a name too few": "model.vector: the checkpoint has it, this run does not",
    }
    for change, line in expected.items():
        for message, touched in run_group(checkpoint_worker.refused, 4, str(path), change):
            assert not touched
            assert message == f"CheckpointError: {path} does not fit this run:\n  {line}"
    # What one process has no use for, another has.
    assert all(
        message == "" for message, _ in run_group(checkpoint_worker.refused, 4, str(path), "a name too few on rank 0")
    )


@pytest.mark.distributed
def test_other_shapes_are_told_by_the_whole(saved: Path) -> None:
    into = {"optimizer": {"exp_avg.wide": torch.zeros(4, 13), "step.wide": torch.zeros(())}}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(paths(saved)[0], into, {"optimizer": {"exp_avg.wide": ShardBox((8, 13), (0, 0), (4, 13))}})
    assert str(caught.value).splitlines()[1:] == [
        "  optimizer.exp_avg.wide: the checkpoint has float32 [7, 12], this run needs float32 [8, 13]"
    ]


# -- saving while other things go on ----------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_save_beside_training(tmp_path: Path) -> None:
    sums = run_group(checkpoint_worker.saves_while_training, 4, str(tmp_path / "checkpoints"))
    assert sums == [[float(sum(range(4)) + 4 * number) for number in range(20)] + [4.0] * 3] * 4
    path = tmp_path / "checkpoints" / "step-00000001"
    assert differing({group: read_group(path, group) for group in wholes()}, wholes()) == []


@pytest.mark.distributed
@pytest.mark.parametrize("background", [False, True])
def test_an_error_on_one_rank_is_an_error_on_all(tmp_path: Path, background: bool) -> None:
    folder = tmp_path / "checkpoints"
    said = run_group(checkpoint_worker.saves_with_an_error, 3, str(folder), background)
    full = "cannot be written: it needs "
    for rank, messages in enumerate(said):
        fine, odd_state, no_shard, no_sync, no_mark, twice, again, steps = messages
        assert (fine, again, steps) == ("", "", "[1, 7]")
        where = "TypeError" if rank == 1 else "NoneType"
        assert odd_state == (
            f"CheckpointError: rank 1: TypeError: state.rank: a tuple does not come back from JSON as it was <- {where}"
        )
        assert no_shard.startswith(f"ResourceError: rank 1: {folder}: the checkpoint of step 3 {full}")
        assert "The checkpoint of step 1 stays." in no_shard
        assert no_shard.endswith("<- ResourceError") == (rank == 1)
        assert no_sync.startswith(f"ResourceError: rank 1: {folder}: the checkpoint of step 4 {full}")
        assert "(and on 1 other ranks: 2)" in no_sync
        assert no_mark.startswith(f"ResourceError: {folder}: the checkpoint of step 5 {full}")
        assert "is not kept, for its parts are not the whole" in twice
        assert "tensor model.wide: [2:4, 0:12] of [7, 12]" not in twice
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000001", "step-00000007"]
    assert verify(folder / "step-00000007") == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "victim", "size", "complete"),
    [
        ("write_shard", 1, 2, 1),
        ("sync_file", 1, 2, 1),
        ("sync_file", 2, 4, 1),
        ("sync_file", 0, 2, 1),
        ("sync_folder", 0, 4, 1),
        ("write_atomically", 0, 2, 1),
        ("to_prune", 0, 2, 2),  # the mark is on the disk by then
    ],
)
def test_a_rank_that_vanishes_leaves_the_older_checkpoint(
    tmp_path: Path, name: str, victim: int, size: int, complete: int
) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(AssertionError, match=rf"ranks \[{victim}\] of {size} wrote no result"):
        run_group(checkpoint_worker.dies, size, str(folder), name, victim)
    for rank in set(range(size)) - {victim}:
        assert (tmp_path / f"said-{rank}").read_text(), f"rank {rank} noticed nothing"
    latest = [info for info in list_checkpoints(folder) if info.complete][-1]
    assert latest.step == complete
    assert verify(latest.path) == []
    assert differing({"model": read_group(latest.path, "model")}, {"model": wholes(complete - 1)["model"]}) == []
    with CheckpointStore(folder, keep=1) as store:
        store.save(3, wholes(), {})
    assert [one.name for one in folder.iterdir()] == ["step-00000003"]


# -- state that cannot be cut -----------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_moments_in_blocks(tmp_path: Path) -> None:
    assert run_group(checkpoint_worker.saves_eight_bit, 4, str(tmp_path)) == [[]] * 4
    for name, shape in checkpoint_worker.EIGHT_BIT:
        # One process that never was cut: blocks are independent of each other.
        expected = {"optimizer": checkpoint_worker.eight_bit_state(shape, ShardBox.full(shape))}
        into = blank(expected)
        path = tmp_path / name / "step-00000001"
        assert verify(path) == []
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path, into)
        lines = str(caught.value).splitlines()
        assert lines[1] == (
            f"  optimizer.exp_avg_absmax.w: the checkpoint has [0:3, 0:{shape[1]}] of {list(shape)} in blocks, which "
            "cannot be resharded; this run needs all of it"
        )
        assert lines[-1].startswith(
            "State that is kept in blocks of a shard (as 8-bit moments are) loads with the strategy and world size "
        )
        assert not any(bool(one.any()) for one in into["optimizer"].values())
        with pytest.raises(CheckpointError, match="in blocks, which cannot be resharded"):
            read_group(path, "optimizer")


def test_whole_blocks_into_boxes_that_are_not_of_whole_blocks(tmp_path: Path) -> None:
    shape = (10, 300)
    whole = {"optimizer": checkpoint_worker.eight_bit_state(shape, ShardBox.full(shape))}
    path = CheckpointStore(tmp_path, background=False).save(1, whole, {})
    box = checkpoint_worker.rows(shape, 1, 4)
    into = blank({"optimizer": checkpoint_worker.eight_bit_state(shape, box)})
    boxes = {"optimizer": {name: checkpoint_worker.state_box(one, box) for name, one in into["optimizer"].items()}}
    with pytest.raises(CheckpointError, match=r"absmax\.w: the checkpoint has \[0:12\] of \[12\] in blocks"):
        load_checkpoint(path, into, boxes)


# -- checkpoints of the first format ----------------------------------------------------------------------------------


def test_a_checkpoint_of_the_first_format_still_loads(tmp_path: Path) -> None:
    """Written here byte for byte as it was before there were boxes."""
    path = tmp_path / "checkpoints" / "step-00000004"
    path.mkdir(parents=True)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7.0)}
    content = save(tensors, metadata={"format": "pt"})
    (path / "model-00001-of-00001.safetensors").write_bytes(content)
    header = 8 + int.from_bytes(content[:8], "little")
    places = json.loads(content[8:header])
    entries = {}
    for name, tensor in tensors.items():
        start, end = (header + at for at in places[name]["data_offsets"])
        entries[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "offset": start,
            "bytes": end - start,
            "sha256": hashlib.sha256(content[start:end]).hexdigest(),
        }
    shard = {
        "file": "model-00001-of-00001.safetensors",
        "group": "model",
        "bytes": len(content),
        "header_bytes": header,
        "header_sha256": hashlib.sha256(content[:header]).hexdigest(),
        "tensors": entries,
    }
    state = b'{"step": 4}'
    (path / "state.json").write_bytes(state)
    manifest = {"format": 1, "step": 4, "groups": ["model"], "shards": [shard]}
    manifest |= {"state_bytes": len(state), "state_sha256": hashlib.sha256(state).hexdigest()}
    text = json.dumps(manifest, indent=1)
    (path / MANIFEST).write_text(text)
    (path / MARK).write_text(mark_text(text, total_bytes=1, loss=None, time=0.0))
    assert verify(path) == []
    assert differing({"model": read_group(path, "model")}, {"model": tensors}) == []
    part = {"a": torch.zeros(2, 1), "b": torch.zeros(())}
    assert load_checkpoint(path, {"model": part}, {"model": {"a": ShardBox((2, 3), (0, 1), (2, 1))}}) == {"step": 4}
    assert part["a"].tolist() == [[1.0], [4.0]]
    rewritten(path, lambda values: values.update(format=3))
    assert "cannot be read by this version of danlu (written by a newer danlu)" in verify(path)[0]
