"""What a step is expected to hold in memory, from shapes alone, against the parts of runs and what autograd keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.peak_memory import peak_in
from builders.tiny_world import CONFIG, World, danlu

from danlu import run
from danlu.errors import RecipeError
from danlu.language import PlacedDecoder
from danlu.memory_estimate import MemoryEstimate, estimate, keeps_scores, largest_micro
from danlu.models.families import read_config_values
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.objectives.crossentropy import slice_bytes
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.ranks import Ranks
from danlu.placing import optimizer_of, place, subject_of
from danlu.recipe import Recipe, load
from danlu.train import loop
from danlu.train.step import accumulate
from danlu.types import Pack, Sample

CPU = torch.device("cpu")
LORA = {"kind": "lora", "targets": ["all-linear", "lm_head"], "modules_to_save": ["norm"]}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 8-bit Adam, average": {"optimizer": "adamw8bit", "ema": 0.9},
    "full, galore": {"optimizer": {"kind": "galore", "rank": 4}},
    "lora": {"adapter": LORA},
    "dora": {"adapter": "dora"},
    "pissa": {"adapter": "pissa"},
    "vera": {"adapter": {"kind": "vera", "rank": 16}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3, "projection": 8}},
    "prompt": {"adapter": {"kind": "prompt", "tokens": 3}},
    "bottleneck": {"adapter": {"kind": "bottleneck", "width": 8}},
    "nf4": {"adapter": "lora", "quantization": "nf4"},
    "int4": {"adapter": "lora", "quantization": {"kind": "int4", "group": 12}},
    "selective": {"memory": "selective"},
    "every": {"memory": {"recompute": "every"}},
}


def recipe_of(world: World, folder: Path, changes: Mapping[str, Any]) -> Recipe:
    adapted = {"model": {"path": str(world.base), "config": None, "tokenizer": None}} if "adapter" in changes else {}
    return load(world.recipe(folder / "run", **{**adapted, **changes})).recipe


def placed_of(recipe: Recipe) -> PlacedDecoder:
    if recipe.model.path is not None:
        config = read_config(Path(recipe.model.path))
    else:
        assert isinstance(recipe.model.config, dict)
        config = read_config_values({"vocab_size": 400, **recipe.model.config})
    return PlacedDecoder(recipe, place(subject_of(recipe, config, CPU), recipe, Ranks(), CPU), CPU)


@pytest.mark.parametrize("name", RUNS)
def test_shapes_alone_tell_what_a_placed_model_holds(tiny_world: World, tmp_path: Path, name: str) -> None:
    recipe = recipe_of(tiny_world, tmp_path, {"precision": "bf16", **RUNS[name]})
    placed = placed_of(recipe)
    optimizer = optimizer_of(placed.parameters(), recipe, CPU)
    held = placed.estimate(optimizer, 2)
    foreseen = estimate(recipe, placed.model.config, layout=Layout(), device_type="cpu", micro=2)
    assert vars(foreseen.parts) == vars(held.parts)
    assert foreseen.elsewhere == held.elsewhere == 0
    more = estimate(recipe, placed.model.config, layout=Layout(), device_type="cpu", micro=3)
    assert more.parts.activations > held.parts.activations  # control


KEPT: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"memory": "selective"},
    "full": {"memory": "full"},
    "lora": {"adapter": "lora"},
    "lora, selective": {"adapter": "lora", "memory": "selective"},
    "lora, full": {"adapter": "lora", "memory": "full"},
}
WIDE = {**CONFIG, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 400}
LENGTH = 512


@pytest.fixture(scope="module")
def wide_base(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "base"
    config = read_config_values({**WIDE, "max_position_embeddings": LENGTH})
    model = build(config)
    initialize(model, 0)
    save(model, folder, dtype=torch.float32, tokenizer_from=tiny_world.base)
    return folder


@pytest.mark.parametrize("name", KEPT)
def test_what_is_expected_is_the_peak_of_a_step_and_not_much_more(
    tiny_world: World, tmp_path: Path, wide_base: Path, name: str
) -> None:
    changes = {"batch": {"sequences": 2, "micro": 2}, "data": {"max_length": LENGTH}, "precision": "bf16"}
    model = {"model": {"path": str(wide_base), "config": None, "tokenizer": None}}
    recipe = load(tiny_world.recipe(tmp_path / "run", **{**model, **changes, **KEPT[name]})).recipe
    placed = placed_of(recipe)
    compute, optimizer = placed.learner(2), optimizer_of(placed.parameters(), recipe, CPU)
    placed.model.embed_tokens.sparse_gradient = False
    tokens, weights = np.ones(LENGTH, dtype=np.int32), np.ones(LENGTH, dtype=np.float32)
    weights[0] = 0
    packs = [Pack((Sample(tokens, weights, "row"),))] * 2
    accumulate(compute, packs, step=1, clip=None)
    optimizer.zero_grad()
    peak = peak_in(lambda: accumulate(compute, packs, step=2, clip=None))
    parts = placed.estimate(optimizer, 2).parts
    expected = parts.activations + parts.logits + parts.gradients
    assert peak <= expected <= 1.6 * peak, f"{expected / peak:.2f}"


def test_what_is_offloaded_or_sharded_is_not_on_the_device(tiny_world: World, tmp_path: Path) -> None:
    config = read_config_values(WIDE)
    shared = {"parallel": {"shard": "zero3", "data": 4}}
    found = {}
    for name, changes in {
        "whole": {},
        "shared": shared,
        "offloaded": {**shared, "memory": {"offload": ["parameters", "optimizer"]}},
        "optimizer": {"memory": {"offload": ["optimizer"]}},
    }.items():
        recipe = load(tiny_world.recipe(tmp_path / name, **changes)).recipe
        layout = layout_of(recipe.parallel, 4 if "parallel" in changes else 1)
        found[name] = estimate(recipe, config, layout=layout, device_type="cuda", micro=1)
    whole, shares = found["whole"].parts, found["shared"].parts
    assert whole.gathered == 0 and shares.gathered > 0
    assert whole.weights / 4 < shares.weights < whole.weights / 3.9  # norms are whole on each
    assert whole.optimizer / 4 < shares.optimizer < whole.optimizer / 3.9
    assert found["offloaded"].parts.weights == found["offloaded"].parts.optimizer == 0
    assert found["offloaded"].parts.gathered == shares.gathered
    assert found["offloaded"].elsewhere > shares.weights + shares.optimizer
    assert found["optimizer"].elsewhere == whole.optimizer and found["optimizer"].parts.optimizer == 0


def test_flash_kernels_keep_no_scores() -> None:
    cpu, cuda = keeps_scores("cpu", None), keeps_scores("cuda", 30.0)
    assert cpu(512, None) and cpu(4096, 1024) and not cpu(4096, None) and not cpu(4096, 8192)
    assert keeps_scores("cpu", 30.0)(4096, None)
    assert not cuda(512, None) and not cuda(4096, 1024)


def test_a_budget_that_holds_no_pack_is_told_with_the_recompute_that_would(tiny_world: World, tmp_path: Path) -> None:
    def one_pack(gib: float = 1.0, **changes: Any) -> MemoryEstimate:
        data = {"data": {"max_length": 4096}, "batch": {"sequences": 4, "micro": "auto", "memory": gib}}
        recipe = load(tiny_world.recipe(tmp_path / "run", **data, **changes)).recipe
        config = read_config_values({**WIDE, "num_hidden_layers": 20})
        return estimate(recipe, config, layout=Layout(), device_type="cuda", micro=1)

    def budget(*kinds: str) -> float:
        """Halfway between what a pack needs with two kinds, in GiB; room for the head's slices is set aside apart."""
        parts = [one_pack(**({"memory": kind} if kind != "none" else {})).parts for kind in kinds]
        needs = [each.total - each.logits + slice_bytes("cuda") for each in parts]
        return sum(needs) / len(needs) / 2**30

    short = budget("none", "selective")
    with pytest.raises(RecipeError, match=r"do not hold one packed sequence: .* need about [\d.]+ GiB") as told:
        largest_micro(one_pack(short), 4)
    assert f"batch.memory: {short} GiB" in str(told.value)
    assert "With memory: {recompute: selective} they need about" in str(told.value)
    assert largest_micro(one_pack(short, memory="selective"), 4) == 1
    assert largest_micro(one_pack(8 * short), 4) == 4
    with pytest.raises(RecipeError, match=r"With memory: \{recompute: full\}"):
        largest_micro(one_pack(budget("selective", "full")), 4)
    with pytest.raises(RecipeError, match="Give more, or lower data.max_length"):
        largest_micro(one_pack(0.01), 4)


def test_more_than_there_is_is_told_with_what_to_set(tiny_world: World, tmp_path: Path) -> None:
    recipe = load(tiny_world.recipe(tmp_path / "run", batch={"sequences": 4, "micro": 4})).recipe
    config = read_config_values(WIDE)
    found = estimate(recipe, config, layout=Layout(), device_type="cpu", micro=4)
    assert len(found.lines(None)) == len(found.lines(2**40)) == 1
    first, second = found.lines(2**20)
    assert first.startswith("memory expected: weights ") and "activations" in first
    assert "are more than the 1.00 MiB that are free. Set " in second
    assert "batch.micro: 2 (is 4; the result is the same)" in second or "adamw8bit" in second


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("where", ["the third step", "the optimizer"])
def test_memory_that_runs_out_is_told_with_what_took_it_and_what_to_set(
    tiny_world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    if where == "the optimizer":
        monkeypatch.setattr(run, "optimizer_of", lambda *arguments: torch.empty(2**50, dtype=torch.uint8))
    else:
        accumulate = loop.accumulate

        def lacking(*arguments: Any, **options: Any) -> Any:
            if options["step"] == 3:
                torch.empty(2**50, dtype=torch.uint8)
            return accumulate(*arguments, **options)

        monkeypatch.setattr(loop, "accumulate", lacking)
    assert danlu("train", tiny_world.recipe(tmp_path / "run", batch={"sequences": 4, "micro": 4})) == 6
    said = capsys.readouterr().err
    error = said[said.index("error: ") :]
    assert "out of memory when 1024 TiB more were asked for. This process holds " in error
    assert "Traceback" not in error and "Set " in error and "memory: {recompute: selective}" in error
    if where == "the optimizer":
        assert "nothing was saved yet" in error
        return
    assert "a step takes weights 173 KiB + " in error and "activations " in error
    assert "batch.micro: 2 (is 4; the result is the same)" in error
    assert "step 2 is saved; the same command, with the change, goes on from there" in error
    monkeypatch.undo()
    again = tiny_world.recipe(tmp_path / "run", batch={"sequences": 4, "micro": 2})
    assert danlu("train", again) == 0


@pytest.mark.slow
def test_preview_and_train_say_what_a_step_will_hold(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenising_here: None
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2, schedule={"warmup": 1})
    assert danlu("preview", recipe) == 0
    foreseen = capsys.readouterr().out
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("memory expected: ")]
    assert line.removeprefix("memory ") in foreseen
    assert said.index("memory expected") < said.index("memory: weights")  # before the first step, and at the end
