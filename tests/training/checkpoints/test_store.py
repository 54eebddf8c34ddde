"""Saving, loading, refusing damage. What kills and full disks do is in test_checkpoint_faults.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from builders.checkpoint_damage import check_every_tensor_and_header, flip
from safetensors.torch import load_file
from torch import Tensor

from danlu.core.errors import CheckpointError
from danlu.training.checkpoints.folders import CheckpointInfo, best_checkpoint, to_prune
from danlu.training.checkpoints.loading import load_checkpoint, read_group, read_state
from danlu.training.checkpoints.shard_files import plan_shards, write_shard
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.checkpoints.verification import verify
from danlu.training.criterion import LOSS, Criterion

STATE = {"step": 7, "rate": 0.1, "sampler": {"epoch": 1, "order": [3, 1, 2]}, "stopped": None, "done": False}


def tensors(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=draw)
    return {
        "model": {
            "embed.weight": torch.randn(7, 4, generator=draw),
            "half": torch.randn(3, generator=draw).to(torch.bfloat16),
            "mask": torch.tensor([True, False, True]),
            "codes": torch.arange(5, dtype=torch.uint8),
            "empty": torch.zeros(0, 4),
            "transposed": weight.t(),
        },
        "optimizer": {"step": torch.tensor(3.0), "exp_avg": weight * 2, "count": torch.tensor(2**40 + 1)},
        "ema": {},
    }


def blank(like: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {group: {name: torch.zeros_like(t) for name, t in named.items()} for group, named in like.items()}


def store(tmp_path: Path, **options: object) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", **{"background": False, "keep": 99, **options})  # type: ignore[arg-type]


def equal(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[g].keys() == b[g].keys()
        and all(a[g][n].dtype == b[g][n].dtype and torch.equal(a[g][n], b[g][n]) for n in a[g])
        for g in a
    )


@pytest.mark.parametrize("background", [False, True])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path, background: bool) -> None:
    saved = tensors()
    with store(tmp_path, background=background) as checkpoints:
        path = checkpoints.save(7, saved, STATE)
    loaded = blank(saved)
    assert load_checkpoint(path, loaded) == STATE
    assert equal(loaded, saved)
    assert not equal(loaded, tensors(seed=1))
    assert {group: read_group(path, group) for group in saved}.keys() == saved.keys()
    assert equal({group: read_group(path, group) for group in saved}, saved)
    assert read_state(path) == STATE


def test_tensors_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    saved = tensors()
    with store(tmp_path, background=True) as checkpoints:
        path = checkpoints.save(1, saved, {})
        for tensor in saved["model"].values():
            tensor.zero_()
    assert equal({"model": read_group(path, "model")}, {"model": tensors()["model"]})


def test_any_safetensors_reader_reads_the_shards(tmp_path: Path) -> None:
    saved = tensors()
    path = store(tmp_path).save(1, saved, {})
    read = load_file(path / "model-00001-of-00001.safetensors")
    assert equal({"model": read}, {"model": saved["model"]})


def test_shards_are_cut_by_size_and_cover_every_byte(tmp_path: Path) -> None:
    named = {f"w{i}": torch.full((10,), float(i)) for i in range(7)}
    plans = plan_shards("model", named, shard_bytes=100)
    assert [sorted(plan.offsets) for plan in plans] == [["w0", "w1"], ["w2", "w3"], ["w4", "w5"], ["w6"]]
    assert [plan.file for plan in plans][-1] == "model-00004-of-00004.safetensors"
    for plan in plans:
        shard = write_shard(tmp_path, plan, named, threads=2)
        assert (tmp_path / plan.file).stat().st_size == shard.bytes == plan.bytes
        assert shard.header_bytes + sum(entry.bytes for entry in shard.tensors.values()) == shard.bytes
        assert equal({"": load_file(tmp_path / plan.file)}, {"": {name: named[name] for name in plan.offsets}})


def test_one_tensor_above_the_shard_size_gets_a_file_of_its_own() -> None:
    plans = plan_shards("model", {"big": torch.zeros(1000), "small": torch.zeros(1)}, shard_bytes=100)
    assert [list(plan.offsets) for plan in plans] == [["big"], ["small"]]


def test_tensors_start_at_multiples_of_their_element_size() -> None:
    plan = plan_shards("m", {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(3, dtype=torch.int64)})[0]
    assert plan.offsets["b"] % 8 == 0
    assert plan.offsets["a"] == plan.offsets["b"] + 24


def test_every_flipped_byte_is_found_and_the_tensor_named(tmp_path: Path) -> None:
    path = store(tmp_path).save(3, tensors(), STATE)
    check_every_tensor_and_header(path)
    for name in ("state.json", "manifest.json"):
        flip(path / name, 5)
        (problem,) = verify(path)
        assert name in problem
        assert "altered" in problem
        flip(path / name, 5)
    assert verify(path) == []


def test_missing_short_and_unmarked_files_are_found(tmp_path: Path) -> None:
    original = store(tmp_path).save(3, tensors(), STATE)

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(original, tmp_path / name / original.name))

    path = damaged("missing")
    (path / "model-00001-of-00001.safetensors").unlink()
    (problem,) = verify(path)
    assert "model-00001-of-00001.safetensors: missing; it held " in problem
    assert "and 3 more tensors" in problem

    path = damaged("short")
    file = path / "optimizer-00001-of-00001.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    assert verify(path) == [f"{file}: {size - 1:,} bytes, {size:,} were written."]

    path = damaged("unmarked")
    (path / "COMPLETE").unlink()
    assert "half-written, it has no COMPLETE marker" in verify(path)[0]

    path = damaged("mark")
    (path / "COMPLETE").write_text("{")
    assert "COMPLETE: the marker is damaged" in verify(path)[0]
    assert CheckpointStore(path.parent).latest() is not None  # loading it must fail aloud, not pass over it

    (path / "manifest.json").unlink()
    shutil.copy(original / "COMPLETE", path)
    assert verify(path) == [f"{path / 'manifest.json'}: missing."]
    assert verify(tmp_path / "step-00000009") == [f"{tmp_path / 'step-00000009'}: there is no such checkpoint."]


def test_damage_in_one_group_does_not_stop_reading_another(tmp_path: Path) -> None:
    path = store(tmp_path).save(3, tensors(), STATE)
    flip(path / "optimizer-00001-of-00001.safetensors", -1)
    assert read_group(path, "model").keys() == tensors()["model"].keys()
    with pytest.raises(CheckpointError):
        read_group(path, "optimizer")


def test_a_damaged_newest_checkpoint_names_the_intact_one_and_touches_nothing(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, tensors(step), {"step": step})
    for step in (2, 3):
        flip(checkpoints.folder / f"step-0000000{step}" / "model-00001-of-00001.safetensors", -1)
    newest = checkpoints.latest()
    assert newest is not None
    assert newest.step == 3
    into = blank(tensors())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(newest.path, into)
    message = str(caught.value)
    assert "step-00000003 is damaged:" in message
    assert "model-00001-of-00001.safetensors: tensor codes was altered" in message
    folder = checkpoints.folder
    assert message.endswith(
        f"Step 1 is intact. To go on from it, add to the `danlu train` command: --resume {folder / 'step-00000001'}"
    )
    assert equal(into, blank(tensors()))
    flip(folder / "step-00000001" / "state.json", 0)
    with pytest.raises(CheckpointError, match="No older checkpoint is intact"):
        load_checkpoint(newest.path, into)


def test_tensors_that_do_not_fit_are_all_named_and_nothing_is_touched(tmp_path: Path) -> None:
    path = store(tmp_path).save(3, tensors(), STATE)
    into = {"model": blank(tensors())["model"]}
    into["model"]["half"] = into["model"]["half"].float()
    into["model"]["embed.weight"] = torch.zeros(8, 4)
    into["model"]["new"] = torch.zeros(1)
    del into["model"]["mask"]
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, into)
    assert set(str(caught.value).splitlines()[1:]) == {
        "  model.half: the checkpoint has bfloat16 [3], this run needs float32 [3]",
        "  model.embed.weight: the checkpoint has float32 [7, 4], this run needs float32 [8, 4]",
        "  model.new: this run needs it, the checkpoint does not have it",
        "  model.mask: the checkpoint has it, this run does not",
    }
    assert all(not tensor.any() for tensor in into["model"].values())
    with pytest.raises(CheckpointError, match="has no tensors of 'reward'; it has model, optimizer, ema"):
        load_checkpoint(path, {"reward": {}})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1: 2}}, r"state\.a: the key 1 is no string"),
        ({"a": [0, (1, 2)]}, r"state\.a\[1\]: a tuple does not come back from JSON as it was"),
        ({"a": torch.tensor(1)}, r"state\.a: a Tensor does not come back"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        store(tmp_path).save(1, {}, state)
    assert not (tmp_path / "checkpoints").exists()


def test_floats_of_the_state_come_back_exactly(tmp_path: Path) -> None:
    values = [0.1, 1e-320, 2**53 + 1, float("inf"), -0.0]
    path = store(tmp_path).save(1, {}, {"values": values})
    assert read_state(path)["values"] == values
    assert str(read_state(path)["values"][4]) == "-0.0"


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=1)
    checkpoints.save(5, tensors(0), {"pass": 1})
    path = checkpoints.save(5, tensors(1), {"pass": 2})
    assert read_state(path) == {"pass": 2}
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["step-00000005"]


def test_pruning_keeps_newest_every_kth_and_best(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2, keep_every=4, keep_best=True)
    losses = {1: 3.0, 2: 1.0, 3: 1.0, 4: float("nan"), 5: 2.0, 6: None, 7: 2.5}
    for step, loss in losses.items():
        checkpoints.save(step, {}, {}, loss=loss)
    assert [info.step for info in checkpoints.checkpoints()] == [2, 4, 6, 7]
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.loss) == (2, 1.0)
    assert json.loads((checkpoints.folder / "step-00000004" / "COMPLETE").read_text())["loss"] is None


def test_the_best_is_by_what_the_run_is_judged_by(tmp_path: Path) -> None:
    accuracy = Criterion("accuracy", higher_is_better=True)
    checkpoints = store(tmp_path, keep=1, keep_best=True, criterion=accuracy)
    for step, (loss, value) in enumerate([(1.0, 0.2), (3.0, 0.9), (2.0, 0.9), (0.5, float("nan")), (4.0, 0.1)], 1):
        checkpoints.save(step, {}, {}, loss=loss, value=value)
    assert [info.step for info in checkpoints.checkpoints()] == [2, 5]
    best = checkpoints.best()
    assert best is not None and (best.step, best.value, best.criterion) == (2, 0.9, accuracy)
    mark = best.path / "COMPLETE"
    assert json.loads(mark.read_text())["judged"] == {"metric": "accuracy", "higher_is_better": True, "value": 0.9}
    # Control: of marks that know the loss alone, as earlier ones, the best is the one with the lowest.
    for info in checkpoints.checkpoints():
        entries = json.loads((info.path / "COMPLETE").read_text())
        (info.path / "COMPLETE").write_text(json.dumps({k: v for k, v in entries.items() if k != "judged"}))
    assert [info.value for info in checkpoints.checkpoints()] == [3.0, 4.0]
    assert (found := checkpoints.best()) is not None and found.criterion == LOSS and found.loss == 3.0


def test_to_prune_against_the_obvious_rule() -> None:
    infos = [CheckpointInfo(s, Path(), s != 9, 0, [None, 5.0, 4.0][s % 3], 0.0) for s in range(1, 13)]
    doomed = [info.step for info in to_prune(infos, keep=3, keep_every=5, keep_best=True)]
    assert doomed == [1, 3, 4, 6, 7, 8]  # not 2 (best), 5 and 10 (every 5th), 9 (incomplete), 10 11 12 (newest)
    assert best_checkpoint(infos[:1] and infos) == infos[1]
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        to_prune(infos, keep=0)


def test_discard_after_deletes_the_future(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, {}, {})
    assert [path.name for path in checkpoints.discard_after(1)] == ["step-00000002", "step-00000003"]
    assert [info.step for info in checkpoints.checkpoints()] == [1]


def test_odd_dtypes_and_group_names_are_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model: tensor z has dtype torch\.complex64"):
        store(tmp_path).save(1, {"model": {"z": torch.zeros(1, dtype=torch.complex64)}}, {})
    with pytest.raises(ValueError, match=r"'\.\./x': a group is named in lower-case"):
        store(tmp_path).save(1, {"../x": {}}, {})
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.gpu
def test_cuda_tensors_pass_through_a_small_buffer(tmp_path: Path) -> None:
    large = torch.randn(3, 5 << 20, device="cuda")  # 60 MiB: several chunks of the staging buffer
    saved = {"model": {"large": large, "transposed": large[:, :1000].t(), "scalar": torch.tensor(2.0, device="cuda")}}
    with store(tmp_path, background=True) as checkpoints:
        path = checkpoints.save(1, saved, {})
        expected = {"model": {name: tensor.cpu() for name, tensor in saved["model"].items()}}
        large.zero_()
    assert equal({"model": read_group(path, "model")}, expected)
    load_checkpoint(path, saved)
    assert equal({"model": {name: tensor.cpu() for name, tensor in saved["model"].items()}}, expected)
