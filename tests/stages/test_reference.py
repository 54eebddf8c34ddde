"""Every kind of reference is the model that the run starts from, and stays it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.pair_stage import trained_tensors
from builders.planned_memory import counted_states, planned_parts
from builders.reference_stage import STAGE, loss_of, place_stage, recipe_file, train
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error

from danlu.assembly.optimizer import optimizer_of
from danlu.assembly.parameters import model_bytes
from danlu.core.errors import RecipeError
from danlu.core.types import Pack
from danlu.models.loading import load as load_model
from danlu.models.saving import save
from danlu.recipe import load, sections
from danlu.recipe.reference import resolve_reference
from danlu.stages.roles import FrozenDecoder
from danlu.training.learner import MicroStep

EVERY_KIND = ("cached", "frozen", "adapter-off")
LORA = {"kind": "lora", "dropout": 0.5}
EVERYWHERE = {"kind": "lora", "targets": ["all-linear", "lm_head", "embed_tokens"]}
NF4 = {"kind": "nf4", "block": 32}

STARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({}, ("cached", "frozen")),
    "full on merged adapters": ({"model": {"adapters": ["below"]}}, ("cached", "frozen")),
    "lora": ({"adapter": LORA}, EVERY_KIND),
    "lora everywhere on a head": ({"adapter": EVERYWHERE, "model": {"adapters": ["head"]}}, EVERY_KIND),
    "lora with copies": ({"adapter": {"kind": "lora", "modules_to_save": ["lm_head", "norm"]}}, EVERY_KIND),
    "qlora": ({"adapter": LORA, "quantization": NF4}, EVERY_KIND),
    "stacked": ({"adapter": LORA, "model": {"adapters": ["below"]}}, EVERY_KIND),
    "stacked qlora": ({"adapter": LORA, "model": {"adapters": ["below"]}, "quantization": NF4}, EVERY_KIND),
    "continue": ({"adapter": {"kind": "continue"}, "model": {"adapters": ["below", "above"]}}, ("cached", "frozen")),
    "pissa": ({"adapter": {"kind": "pissa", "rank": 4}}, ("cached", "frozen")),
    "pissa on nf4": ({"adapter": {"kind": "pissa", "rank": 4}, "quantization": NF4}, ("cached",)),
    "prompt": ({"adapter": {"kind": "prompt", "tokens": 3}}, ("cached",)),
    "prefix": ({"adapter": {"kind": "prefix", "tokens": 3}}, ("cached",)),
    "lora on a prompt": ({"adapter": LORA, "model": {"adapters": ["prompt"]}}, EVERY_KIND),
    **{
        kind: ({"adapter": {"kind": kind}}, ("adapter-off",))
        for kind in ("dora", "rslora", "lora-plus", "lora-fa", "vera", "mora", "ia3", "bottleneck")
    },
}


@pytest.fixture(scope="module")
def adapters(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of the base as after training, by name; `above` is stacked on `below`, both of which have dropout."""
    folder, base = tmp_path_factory.mktemp("adapters"), tiny_world.base
    lora = sections.Lora(dropout=0.5)
    below = adapter_folder(base, folder / "below", lora, size=0.1)
    above = adapter_folder(base, folder / "above", lora, seed=2, size=0.1, below=(below,))
    prompt = adapter_folder(base, folder / "prompt", sections.Prompt(tokens=2), size=0.1)
    head = adapter_folder(base, folder / "head", sections.Lora(targets=["lm_head"]), size=0.1)
    return {path.name: str(path) for path in (below, above, prompt, head)}


def changes_of(start: str, adapters: Mapping[str, str]) -> dict[str, Any]:
    changes = dict(STARTS[start][0])
    if "model" in changes:
        changes["model"] = {"adapters": [adapters[name] for name in changes["model"]["adapters"]]}
    return changes


def recipe_of(world: World, folder: Path, name: str, **changes: Any) -> Any:
    return load(Path(recipe_file(world, folder, name, **changes))).recipe


@pytest.mark.parametrize(("start", "kind"), [(start, kind) for start, (_, kinds) in STARTS.items() for kind in kinds])
def test_the_first_loss_is_that_of_the_model_itself(
    tiny_world: World, tmp_path: Path, adapters: dict[str, str], start: str, kind: str
) -> None:
    recipe = recipe_of(tiny_world, tmp_path, "run", reference={"kind": kind}, **changes_of(start, adapters))
    placed, stage_data = place_stage(recipe)
    loss, margin = loss_of(placed, stage_data)
    rounding = 5e-5 if (start, kind) == ("pissa", "frozen") else 1e-6  # of W - BA + BA, which a second model has not
    assert loss == pytest.approx(math.log(2), abs=1e-6) and margin <= rounding
    # Control: a policy whose trained numbers are moved is told from its reference.
    with torch.no_grad():
        for name, parameter in placed.placed.parameters():
            if parameter.requires_grad:
                noise = torch.empty_like(parameter).normal_(generator=torch.Generator().manual_seed(len(name)))
                parameter += (1e-2 if parameter.ndim == 1 or "A" in name else 1e-3) * noise
    assert loss_of(placed, stage_data)[1] > 1e-5


def test_a_reference_with_perturbed_weights_is_seen(tiny_world: World, tmp_path: Path) -> None:
    model = load_model(tiny_world.base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.empty_like(parameter).normal_(generator=torch.Generator().manual_seed(1))
    save(model, tmp_path / "perturbed", tokenizer_from=tiny_world.tokenizer)
    frozen = {"kind": "frozen", "model": str(tmp_path / "perturbed")}
    loss, margin = loss_of(*place_stage(recipe_of(tiny_world, tmp_path, "run", reference=frozen)))
    assert margin > 1e-5 and loss != pytest.approx(math.log(2), abs=1e-6)


def test_the_bare_base_is_not_the_reference_of_stacked_adapters(
    tiny_world: World, tmp_path: Path, adapters: dict[str, str]
) -> None:
    frozen = {"kind": "frozen", "model": str(tiny_world.base)}
    recipe = recipe_of(tiny_world, tmp_path, "run", reference=frozen, **changes_of("stacked", adapters))
    assert loss_of(*place_stage(recipe))[1] > 1e-3


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_dropout_of_the_policy_does_not_reach_the_reference(
    tiny_world: World, tmp_path: Path, adapters: dict[str, str], kind: str
) -> None:
    recipe = recipe_of(tiny_world, tmp_path, "run", reference={"kind": kind}, **changes_of("stacked", adapters))
    placed, stage_data = place_stage(recipe)
    with torch.no_grad():
        for _, parameter in placed.placed.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    learner, item = placed.learner(1), stage_data.source.at(0)
    assert isinstance(item, Pack)
    batch = learner.collate([item])
    plain = {role: outputs.logprobs().logprobs for role, outputs in learner.outputs(batch, 1.0).items()}
    with learner.at(MicroStep(batch, [(0, item)], learner.totals([item]), 1)):
        dropped = {role: outputs.logprobs().logprobs for role, outputs in learner.outputs(batch, 1.0).items()}
    assert torch.equal(plain["reference"], dropped["reference"])
    assert not torch.allclose(plain["policy"], dropped["policy"])  # control


def test_matrices_of_a_frozen_model_are_kept_in_the_type_of_activations(tiny_world: World, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_world, tmp_path, "run", reference={"kind": "frozen"}, precision="bf16")
    placed, stage_data = place_stage(recipe)
    model = placed.frozen["reference"].subject.model
    assert {parameter.dtype for parameter in model.parameters() if parameter.ndim == 2} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    loss, margin = loss_of(placed, stage_data)
    assert (loss, margin) == (pytest.approx(math.log(2), abs=1e-6), 0.0)  # the same bits as of float32 ones
    assert not any("reference" in name for name in placed.weights())


def test_a_frozen_model_may_be_quantized_where_the_policy_is_not(tiny_world: World, tmp_path: Path) -> None:
    plain, packed = (
        place_stage(recipe_of(tiny_world, tmp_path, name, reference={"kind": "frozen", "quantization": quantization}))
        for name, quantization in (("plain", None), ("packed", NF4))
    )
    assert loss_of(*plain)[1] == 0 and 1e-3 < loss_of(*packed)[1] < 10
    sizes = [placed.frozen["reference"].subject.model for placed, _ in (plain, packed)]
    assert isinstance(packed[0].learner(1).roles["reference"], FrozenDecoder)
    assert sum(p.nbytes for p in sizes[1].parameters()) < sum(p.nbytes for p in sizes[0].parameters())


@pytest.mark.parametrize("start", ["full", "lora", "qlora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_frozen_model_is_counted_and_foreseen(
    tiny_world: World, tmp_path: Path, adapters: dict[str, str], start: str, precision: str
) -> None:
    parts = {}
    for kind in ("cached", "frozen"):
        changes = {**changes_of(start, adapters), "precision": precision, "reference": {"kind": kind}}
        recipe = recipe_of(tiny_world, tmp_path, "run", **changes)
        placed, _ = place_stage(recipe)
        counted, _ = counted_states(placed, optimizer_of(placed.parameters(), recipe, torch.device("cpu")))
        foreseen = planned_parts(recipe, placed.model.config)
        parts[kind] = counted.weights
        assert foreseen.weights == pytest.approx(counted.weights, rel=0.02)
    model = place_stage(recipe)[0].frozen["reference"].subject.model
    assert parts["frozen"] - parts["cached"] == model_bytes(model) > 0


def test_the_default_follows_the_adapter(tiny_world: World, tmp_path: Path, adapters: dict[str, str]) -> None:
    defaults = {
        start: resolve_reference(recipe_of(tiny_world, tmp_path, "run", **changes_of(start, adapters))).kind
        for start in STARTS
    }
    assert defaults == {
        start: "adapter-off" if "adapter-off" in kinds else "cached" for start, (_, kinds) in STARTS.items()
    }
    simpo = recipe_of(tiny_world, tmp_path, "run", objective=[{"kind": "simpo"}])
    assert resolve_reference(simpo).kind == "none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": {"kind": "adapter-off"}}, "no adapter to switch off. Use reference: cached"),
        (
            {"reference": {"kind": "adapter-off"}, "adapter": {"kind": "pissa"}},
            "starts as a part of the weights.*Use reference: cached",
        ),
        ({"reference": {"kind": "adapter-off"}, "adapter": {"kind": "prompt"}}, "puts virtual tokens before"),
        (
            {
                "reference": {"kind": "adapter-off"},
                "adapter": {"kind": "lora", "bias": "all"},
                "parallel": {"shard": "zero3"},
            },
            "only these copies are sharded",
        ),
        ({"reference": {"kind": "frozen"}, "adapter": {"kind": "prefix"}}, "does not know. Use cached"),
        ({"reference": {"kind": "none"}, "objective": [{"kind": "kto"}]}, r"objective.0 \(kto\) compares"),
        ({"reference": {"kind": "frozen", "every": 2}, "adapter": {"kind": "lora"}}, "of an adapter only its own"),
        ({"reference": {"kind": "frozen", "mix": 0.5}}, "only read with reference.every"),
        ({"reference": {"kind": "frozen", "every": 2, "quantization": NF4}}, "cannot be quantized"),
        ({"reference": {"kind": "cached"}, "data": {"streaming": True, "eval": None}, "evaluation": {}}, "only once"),
        ({"reference": {"kind": "cached"}, "stage": "sft", "objective": None}, "only stages preference and rl"),
    ],
)
def test_references_that_cannot_be_are_refused(
    tiny_world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(tiny_world, tmp_path, "run", **changes)


def test_another_vocabulary_is_refused_before_rows_are_read(tiny_world: World, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_world.base, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = {token_id: token for token, token_id in vocabulary.items()}
    vocabulary[ids[301]], vocabulary[ids[300]] = 300, 301
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = recipe_of(tiny_world, tmp_path, "run", reference={"kind": "frozen", "model": str(other)})
    with pytest.raises(RecipeError, match=r"reference\.model: .* its token 300 is .* the policy's is"):
        STAGE.builder(recipe, STAGE).check(None)
    for folder in (other,):  # control: the same vocabulary in another folder
        shutil.copy(tiny_world.base / "tokenizer.json", folder / "tokenizer.json")
    STAGE.builder(recipe, STAGE).check(None)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "margin", "eval_loss", "eval_margin")
    return [value for line in lines for name, value in line.items() if name in names]


def test_all_kinds_train_the_same(tiny_world: World, tmp_path: Path) -> None:
    """Over 20 steps, five epochs in as many orders, in micro-batches of one and of all pairs."""
    long = {"adapter": {"kind": "lora"}, "steps": 20, "evaluation": {"every": 10}, "checkpoint": {"every": 20}}
    files = {
        (kind, micro): recipe_file(
            tiny_world, tmp_path, f"{kind}-{micro}", reference={"kind": kind}, batch={"micro": micro}, **long
        )
        for kind in EVERY_KIND
        for micro in (1, 8)
    }
    files["cached", 0] = recipe_file(tiny_world, tmp_path, "seed", reference={"kind": "cached"}, **long | {"seed": 1})
    assert train(list(files.values())) == [0] * len(files)
    runs = {name: Path(file).with_suffix("") for name, file in files.items()}
    want, tensors = losses(runs["frozen", 1]), trained_tensors(runs["frozen", 1])
    assert want[0] == pytest.approx(math.log(2), abs=1e-6) and want[-2] < 0.69
    for kind in EVERY_KIND:
        for micro in (1, 8):
            assert losses(runs[kind, micro]) == pytest.approx(want, abs=1e-5), (kind, micro)
            assert worst_relative_error(trained_tensors(runs[kind, micro]), tensors) < 2e-5
    assert losses(runs["cached", 0]) != pytest.approx(want, abs=1e-5)  # control: another start of the adapter
    assert not any("reference" in name for name in trained_tensors(runs["frozen", 8]))
    assert len(list((tmp_path / "cache").glob("reference-*"))) == 2  # training rows and held-out ones, for all runs


def test_a_resumed_run_has_the_reference_that_it_began_with(tiny_world: World, tmp_path: Path) -> None:
    """Also where what was cached is gone: it is computed of the first weights, not of the checkpoint's."""
    files = [recipe_file(tiny_world, tmp_path, name) for name in ("whole", "halved")]
    assert train(files) == [0, 0]
    assert "kind: cached" in (tmp_path / "halved" / "recipe.yaml").read_text()
    for name in ("step-00000006", "model"):
        for path in (tmp_path / "halved").rglob(f"{name}*"):
            shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(tmp_path / "cache")
    assert len(list((tmp_path / "halved" / "checkpoints").glob("step-*"))) == 1
    assert train(files[1:]) == [0]
    assert losses(tmp_path / "halved") == losses(tmp_path / "whole")
    one, other = trained_tensors(tmp_path / "whole"), trained_tensors(tmp_path / "halved")
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_no_model_is_loaded_where_the_cache_is_whole(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = recipe_file(tiny_world, tmp_path, "run", reference={"kind": "cached"}, steps=3)
    assert train([file]) == [0]
    monkeypatch.setattr("danlu.stages.frozen_models.place_frozen", lambda *_: pytest.fail("everything is cached"))
    shutil.rmtree(tmp_path / "run")
    assert train([file]) == [0]
    blocks = sorted((tmp_path / "cache").glob("reference-*/*.bin"))
    with blocks[0].open("r+b") as block:  # control: a damaged block is computed again
        block.seek(-1, os.SEEK_END)
        block.write(b"\x55")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(pytest.fail.Exception, match="everything is cached"):
        train([file])
