from __future__ import annotations

import errno
import importlib.util
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.types import StepMetrics
from danlu.training.trackers import TensorBoard, WandB, wandb_problem


def metrics(step: int, loss: float) -> StepMetrics:
    return StepMetrics(step, loss, 0.5, 1e-4, 100, 80, 1000.0, 1 << 20, {"z_loss": 0.25})


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.step(metrics(1, 2.5))
    board.evaluation(1, {"loss": 2.25, "rows": 4, "note": "text is no curve"})
    board.event(1, "sample", prompt="Once", text="upon a time")
    board.step(metrics(2, math.nan))
    board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == [
        "eval/loss", "eval/rows", "train/grad_norm", "train/learning_rate", "train/loss", "train/memory_bytes",
        "train/tokens", "train/tokens_per_second", "train/trained_tokens", "train/z_loss",
    ]  # fmt: skip
    assert scalars(tmp_path, "eval/loss") == [(1, 2.25)]
    assert scalars(tmp_path, "train/loss")[0] == (1, 2.5)
    assert math.isnan(scalars(tmp_path, "train/loss")[1][1])
    text = events.Tensors("sample/text_summary")[0]
    assert text.tensor_proto.string_val[0].decode() == "**prompt**: Once\n\n**text**: upon a time"


def test_a_resumed_run_hides_points_after_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3, 4):
        first.step(metrics(step, float(step)))
    first.close()
    # TensorBoard reads files by name, which begins with the second of their creation: the first process was earlier.
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "events.out.tfevents.1000000000.host.1.0")
    second = TensorBoard(tmp_path, after_step=2)
    second.step(metrics(3, 30.0))
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_disk_that_fills_up_is_explained_and_closing_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    board = TensorBoard(tmp_path)
    board.close()
    monkeypatch.setattr(board._writer, "add_event", full)
    monkeypatch.setattr(board._writer, "close", full)
    with pytest.raises(ResourceError) as error:
        board.evaluation(1, {"loss": 1.0})
    assert str(error.value) == (
        f"{tmp_path}: TensorBoard's files cannot be written: No space left on device. Free some space, or set "
        "log.tensorboard: false."
    )
    board.close()
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="file/board: TensorBoard's files cannot be written: Not a directory"):
        TensorBoard(tmp_path / "file" / "board")


def test_a_missing_wandb_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    message = "log.wandb: the wandb package is not installed. Run `pip install wandb`, or leave log.wandb out."
    assert wandb_problem() == message
    with pytest.raises(RecipeError, match="the wandb package is not installed"):
        WandB("project", tmp_path, {})


def test_wandb_without_login_or_network_is_worded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        # wandb.errors.UsageError of wandb 0.15 to 0.19, wandb/sdk/wandb_login.py: prompt_api_key.
        raise RuntimeError("api_key not configured (no-tty). call wandb.login(key=[your_api_key])")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    with pytest.raises(ResourceError) as error:
        WandB("furnace", tmp_path, {})
    assert str(error.value) == (
        "log.wandb: W&B does not let the run begin: api_key not configured (no-tty). call "
        "wandb.login(key=[your_api_key]). Run `wandb login` (or set WANDB_API_KEY) and look at the network; or set "
        "WANDB_MODE=offline, which keeps the curves in the run folder for `wandb sync`; or leave log.wandb out"
    )


def test_wandb_gets_curves_and_the_same_id_after_a_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, Any]]] = []

    def init(**options: Any) -> SimpleNamespace:
        begun.append(options)
        return SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=object()))
    for step in (1, 2):
        tracker = WandB("furnace", tmp_path, {"seed": 0})
        tracker.step(metrics(step, 2.0))
        tracker.evaluation(step, {"loss": 1.5})
        tracker.event(step, "spike", loss=9.0)
        tracker.close()
    assert begun[0] == begun[1]
    assert begun[0]["project"] == "furnace"
    assert begun[0]["resume"] == "allow"
    assert logged[0][1]["train/loss"] == 2.0
    assert logged[1] == (1, {"eval/loss": 1.5})
    assert logged[2] == (1, {"event/spike": "loss: 9.0"})
