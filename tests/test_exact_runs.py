"""`danlu train` with `numerics: exact`: products that do not hang on the pack, checked before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import World, danlu, metrics

from danlu.models.modules import Linear
from danlu.numerics import batch_invariant

pytestmark = pytest.mark.usefixtures("tokenising_here")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def test_training_is_the_same_up_to_rounding(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: list[int] = []
    in_tiles = batch_invariant._in_tiles
    monkeypatch.setattr(
        batch_invariant, "_in_tiles", lambda left, *rest: tiles.append(len(left)) or in_tiles(left, *rest)
    )
    assert danlu("train", tiny_world.recipe(tmp_path / "fast", steps=4)) == 0
    assert not tiles
    assert danlu("train", tiny_world.recipe(tmp_path / "exact", steps=4, numerics="exact")) == 0
    assert tiles and batch_invariant._library is None
    assert losses(tmp_path / "exact") == pytest.approx(losses(tmp_path / "fast"), rel=1e-5)


def test_a_product_that_does_not_keep_it_ends_the_run(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Linear.base

    def one_product(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        y = base(linear, x)
        return torch.mm(x, linear.dense_weight(x.dtype).t(), out=torch.empty_like(y))

    monkeypatch.setattr(Linear, "base", one_product)
    assert danlu("train", tiny_world.recipe(tmp_path / "run", numerics="exact")) == 6
    said = capsys.readouterr().err
    assert "numerics: exact does not hold for this model on cpu" in said
    assert "product [T, " in said and "Use numerics: fast" in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_check_has_the_type_of_activations_and_the_tokens_of_adapters(
    tiny_world: World, tmp_path: Path, monkeypatch: Any
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "danlu.inference.self_check.check_exact", lambda model, dtype, **more: calls.append({"dtype": dtype, **more})
    )
    changes = {"model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}
    adapter = {"kind": "prompt", "tokens": 3}
    recipe = tiny_world.recipe(
        tmp_path / "run", steps=2, numerics="exact", adapter=adapter, precision="bf16", **changes
    )
    assert danlu("train", recipe) == 0
    assert [call["dtype"] for call in calls] == [torch.bfloat16]
    assert len(calls[0]["virtual_token_ids"]) == 3
