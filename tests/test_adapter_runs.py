"""Runs with adapters and quantized bases: what is trained and what is not, exact resumption, stacks, results."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.tiny_adapters import logits
from builders.tiny_world import World, danlu, differences, last_state, metrics, write_rows
from safetensors.torch import load_file
from torch import Tensor

from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.peft_folder import WEIGHTS, add_adapter
from danlu.assembly.frozen_base import adapters_of
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import fingerprint
from danlu.models.loading import load
from danlu.numerics import bitsandbytes_kernels
from danlu.recipe import sections
from danlu.run import train
from danlu.training import loop

pytestmark = pytest.mark.usefixtures("tokenising_here")

RUNS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora"},
    "lora with dropout, biases and a norm": {
        "adapter": {"kind": "lora", "dropout": 0.3, "modules_to_save": ["norm"], "targets": ["attention", "down_proj"]}
    },
    "lora on embedding and head": {"adapter": {"kind": "lora", "targets": ["all-linear", "embed_tokens", "lm_head"]}},
    "lora+": {"adapter": "lora-plus", "precision": "bf16"},
    "lora-fa": {"adapter": "lora-fa"},
    "dora": {"adapter": {"kind": "dora", "exact_norm": True, "dropout": 0.1}},
    "pissa": {"adapter": {"kind": "pissa", "svd_iterations": 4}},
    "olora, averaged": {"adapter": "olora", "ema": 0.9},
    "qlora": {"adapter": "lora", "quantization": "nf4", "precision": "bf16"},
    "pissa on 4 bits": {"adapter": "pissa", "quantization": {"kind": "fp4", "double": False}},
    "loftq": {"adapter": {"kind": "loftq", "loftq_iterations": 2}, "quantization": "nf4"},
    "dora on integers": {"adapter": "dora", "quantization": {"kind": "int8", "group": 16}},
    "vera": {"adapter": {"kind": "vera", "rank": 16}, "optimizer": {"learning_rate": 0.1}},
    "mora": {"adapter": {"kind": "mora", "rank": 4, "dropout": 0.1}},
    "ia3": {"adapter": "ia3", "optimizer": {"learning_rate": 0.1}},
    "bottleneck": {"adapter": {"kind": "bottleneck", "width": 8}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3, "projection": 16}, "quantization": "nf4"},
    "prompt": {"adapter": {"kind": "prompt", "tokens": 3, "text": "Answer shortly."}},
    "8-bit states": {"adapter": "lora", "optimizer": {"kind": "adamw8bit", "smallest": 1, "learning_rate": 1e-2}},
}
EVALUATED = {"data": {"eval": 10}, "evaluation": {"every": 2}}


def recipe(world: World, output: Path, **changes: Any) -> Path:
    return world.recipe(output, **{"model": {"config": None, "path": str(world.base), "tokenizer": None}, **changes})


def cut_off(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM in the middle of a step, once."""
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            monkeypatch.setattr(loop, "accumulate", real)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", accumulate)


@pytest.mark.parametrize("name", RUNS)
def test_interrupted_and_resumed_equals_uninterrupted(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes = {**EVALUATED, **RUNS[name], "steps": 5}
    assert danlu("train", recipe(tiny_world, tmp_path / "whole", **changes)) == 0
    parts = recipe(tiny_world, tmp_path / "parts", **changes)
    cut_off(monkeypatch, 3)
    assert danlu("train", parts) == 143
    assert last_state(tmp_path / "parts")[0].name == "step-00000003"
    assert danlu("train", parts) == 0
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    assert danlu("train", parts) == 0  # finished already


def test_the_comparison_of_runs_sees_another_seed(tiny_world: World, tmp_path: Path) -> None:
    """The negative control of the one before."""
    for seed in (0, 1):
        changes = {**EVALUATED, **RUNS["lora"], "steps": 2, "seed": seed}
        assert danlu("train", recipe(tiny_world, tmp_path / f"{seed}", **changes)) == 0
    assert differences(tmp_path / "0", tmp_path / "1")


def test_a_run_goes_on_upon_the_base_that_it_began_on(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], first: Path
) -> None:
    """Weights, config and the adapters below are compared before data is read; each is named, and nothing is lost."""
    base, below = shutil.copytree(tiny_world.base, tmp_path / "base"), shutil.copytree(first, tmp_path / "below")
    (below / "adapter" / "danlu.json").unlink()  # as another tool's: it does not say itself which base is its own
    config, adapter = base / "config.json", below / "adapter" / "adapter_config.json"
    section = {"config": None, "tokenizer": None, "path": str(base), "adapters": [str(below)]}
    changes = {"model": section, "adapter": {"kind": "lora", "rank": 2}, "steps": 8}
    assert danlu("train", recipe(tiny_world, tmp_path / "whole", **changes)) == 0
    parts = recipe(tiny_world, tmp_path / "parts", **changes)
    cut_off(monkeypatch, 5)
    assert danlu("train", parts) == 143
    before = fingerprint(base)

    def refused(file: Path, content: bytes, said: str, *command: object) -> None:
        kept = file.read_bytes()
        file.write_bytes(content)
        capfd.readouterr()
        assert danlu(*(command or ("train", parts))) == 5
        told = capfd.readouterr().err
        assert said in told and "Put back what was there" in told and "step-00000005" in told
        file.write_bytes(kept)

    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-3] ^= 0x40
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_bytes(weights)
    after = fingerprint(tmp_path / "other")
    said = f"weights of model.path: {base} (fingerprint {before}) -> {base} (fingerprint {after})"
    refused(base / "model.safetensors", bytes(weights), said)
    refused(
        base / "model.safetensors", bytes(weights), said, "checkpoint", "export", tmp_path / "parts", tmp_path / "x"
    )
    values = json.loads(config.read_text())
    said = f"rms_norm_eps in the config.json of {base}: {values['rms_norm_eps']} -> 0.01"
    refused(config, json.dumps(values | {"rms_norm_eps": 0.01}).encode(), said)
    values = json.loads(adapter.read_text())
    refused(adapter, json.dumps(values | {"lora_alpha": 1}).encode(), f"the adapter {below / 'adapter'}: ")
    assert not (tmp_path / "x").exists()
    assert danlu("train", parts) == 0
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


def test_a_full_run_does_not_need_its_first_weights_again(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: here all weights are the checkpoint's, and a changed base changes nothing."""
    base = shutil.copytree(tiny_world.base, tmp_path / "base")
    changes = {"model": {"config": None, "tokenizer": None, "path": str(base)}, "steps": 6}
    assert danlu("train", recipe(tiny_world, tmp_path / "whole", **changes)) == 0
    parts = recipe(tiny_world, tmp_path / "parts", **changes)
    cut_off(monkeypatch, 3)
    assert danlu("train", parts) == 143
    weights = bytearray((base / "model.safetensors").read_bytes())
    weights[-3] ^= 0x40
    (base / "model.safetensors").write_bytes(weights)
    assert danlu("train", parts) == 0
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize("there", [True, False])
def test_what_unpacks_a_base_in_4_bits_is_told(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], there: bool
) -> None:
    bitsandbytes_kernels.library.cache_clear()
    if not there:
        monkeypatch.setattr(bitsandbytes_kernels, "find_spec", lambda name: None)
    quantized = {"adapter": "lora", "quantization": "nf4", "steps": 2}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **quantized)) == 0
    told = capfd.readouterr().err
    by = "bitsandbytes (" if there else "plain torch, which takes longer: bitsandbytes is not installed."
    assert told.count("4-bit weights are unpacked by ") == 1 and f"4-bit weights are unpacked by {by}" in told
    asked = ("generate", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "1", "--quantization", "nf4")
    assert danlu(*asked) == 0
    assert (f"4-bit weights are unpacked by {by}" in capfd.readouterr().err) is not there
    assert danlu("train", recipe(tiny_world, tmp_path / "plain", adapter="lora", steps=2)) == 0
    assert "4-bit" not in capfd.readouterr().err  # the negative control: there are none
    bitsandbytes_kernels.library.cache_clear()


@pytest.mark.parametrize("name", RUNS)
def test_only_what_should_be_trained_changes(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every tensor of the model but those of the adapter is bit-identical after four steps."""
    seen: list[dict[str, Tensor]] = []
    models: list[Decoder] = []

    def watched(training: Any) -> None:
        model = training.learner.model
        models.append(model)
        seen.append(tensors_of(model))
        loop.fit(training)
        seen.append(tensors_of(model))

    monkeypatch.setattr(train, "fit", watched)
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **{**RUNS[name], "steps": 4})) == 0
    before, after = seen
    trained = {key for key, parameter in models[0].named_parameters() if parameter.requires_grad}
    assert before.keys() == after.keys() and trained
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == trained
    assert not any(key.endswith(("codes", "absmax")) for key in changed)


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """Copies of all parameters and buffers; what is shared counts once."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def test_dropout_does_not_depend_on_micro_batches(tiny_world: World, tmp_path: Path) -> None:
    losses = {}
    for name, micro, dropout in (("one", 1, 0.5), ("four", 4, 0.5), ("none", 4, 0.0)):
        changes = {"adapter": {"kind": "lora", "dropout": dropout}, "batch": {"micro": micro}, "steps": 6}
        assert danlu("train", recipe(tiny_world, tmp_path / name, **changes)) == 0
        losses[name] = [line["loss"] for line in metrics(tmp_path / name) if "loss" in line]
    assert losses["one"] == pytest.approx(losses["four"], rel=1e-5)
    assert losses["none"] != pytest.approx(losses["four"], rel=1e-4)


def test_the_result_is_the_trained_model(tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Decoder] = []

    def kept(training: Any) -> None:
        models.append(training.learner.model)
        loop.fit(training)

    monkeypatch.setattr(train, "fit", kept)
    changes = {"adapter": {"kind": "pissa", "modules_to_save": ["norm"]}, "precision": "fp32"}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **changes)) == 0
    again = load(tiny_world.base)
    base = logits(again)
    add_adapter(adapters_of(again), "back", open_adapter(tmp_path / "run" / "adapter"))
    torch.testing.assert_close(logits(again), logits(models[0]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(base, logits(again), atol=1e-3)
    assert {"tokenizer.json", "danlu.json", "adapter_config.json"} <= {
        file.name for file in (tmp_path / "run" / "adapter").iterdir()
    }


@pytest.fixture
def first(tiny_world: World, tmp_path: Path) -> Path:
    assert danlu("train", recipe(tiny_world, tmp_path / "first", adapter="lora")) == 0
    return tmp_path / "first"


def adapted(base: Path, *folders: Path) -> Tensor:
    model = load(base)
    adapters = adapters_of(model)
    for folder in folders:
        add_adapter(adapters, folder.name, open_adapter(folder / "adapter"))
    return logits(model)


def model_section(world: World, *adapters: Path) -> dict[str, Any]:
    return {"config": None, "tokenizer": None, "path": str(world.base), "adapters": [str(path) for path in adapters]}


def first_loss(folder: Path) -> float:
    return next(line["loss"] for line in metrics(folder) if "loss" in line)


def last_loss(folder: Path) -> float:
    return [line["loss"] for line in metrics(folder) if "loss" in line][-1]


def test_an_adapter_is_trained_on(tiny_world: World, tmp_path: Path, first: Path) -> None:
    again = recipe(tiny_world, tmp_path / "again", model=model_section(tiny_world, first), adapter="continue")
    assert danlu("train", again) == 0
    assert first_loss(tmp_path / "again") < 0.95 * first_loss(first)  # it starts where the first ended, not anew
    tensors = [load_file(folder / "adapter" / WEIGHTS) for folder in (first, tmp_path / "again")]
    assert tensors[0].keys() == tensors[1].keys()
    assert not any(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])


def test_a_new_adapter_upon_another(
    tiny_world: World, tmp_path: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upon = {"model": model_section(tiny_world, first), "adapter": {"kind": "lora", "rank": 2}, "steps": 8}
    assert danlu("train", recipe(tiny_world, tmp_path / "upon", **upon)) == 0
    assert first_loss(tmp_path / "upon") < 0.95 * first_loss(first)
    own = json.loads((tmp_path / "upon" / "adapter" / "danlu.json").read_text())
    assert own["below"] == [str((first / "adapter").resolve())]
    alone, both = adapted(tiny_world.base, tmp_path / "upon"), adapted(tiny_world.base, first, tmp_path / "upon")
    assert not torch.allclose(alone, both, atol=1e-3)
    parts = recipe(tiny_world, tmp_path / "parts", **upon)
    cut_off(monkeypatch, 5)
    assert danlu("train", parts) == 143 and danlu("train", parts) == 0
    assert differences(tmp_path / "upon", tmp_path / "parts") == []


def test_a_whole_model_from_an_adapter(tiny_world: World, tmp_path: Path, first: Path) -> None:
    """Without `adapter` what is named below is merged, and everything is trained."""
    whole = recipe(
        tiny_world, tmp_path / "whole", model=model_section(tiny_world, first), optimizer={"learning_rate": 0.0}
    )
    assert danlu("train", whole) == 0
    found = logits(load(tmp_path / "whole" / "model"))
    torch.testing.assert_close(found, adapted(tiny_world.base, first), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, logits(load(tiny_world.base)), atol=1e-3)


def test_a_checkpoint_holds_the_adapter_alone_and_can_be_exported(tiny_world: World, tmp_path: Path) -> None:
    changes = {"adapter": {"kind": "dora", "init": "pissa"}, "quantization": "nf4", "ema": 0.9}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **changes)) == 0
    _, hashes, _ = last_state(tmp_path / "run")
    assert {name.rpartition(".")[2] for name in hashes if name.startswith("model.")} == {
        "lora_A", "lora_B", "lora_magnitude_vector", "initial_A", "initial_B",
    }  # fmt: skip
    for flags, own in ((), "adapter"), (("--average",), "adapter-ema"):
        out = tmp_path / own
        assert danlu("checkpoint", "export", tmp_path / "run", out, *flags) == 0
        assert (out / WEIGHTS).read_bytes() == (tmp_path / "run" / own / WEIGHTS).read_bytes()


@pytest.mark.parametrize("verb", ["train", "preview"])
def test_folders_that_cannot_be_used_are_told_before_rows_are_read(
    tiny_world: World, tmp_path: Path, first: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    odd, upper = shutil.copytree(first, tmp_path / "odd"), tmp_path / "upper"
    config = odd / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"init_lora_weights": "corda"}))
    adapter_folder(tiny_world.base, upper / "adapter", sections.Lora(), below=(first / "adapter",))
    data = {"train": str(write_rows(tmp_path / "broken.jsonl", ["{"]))}
    for named, said in (
        ([odd], f"{config}: init_lora_weights is 'corda': the start was taken out of the base and cannot be found"),
        ([upper, first], f"is stacked below {upper / 'adapter'}, which was trained on top of it"),
        ([tmp_path / "gone"], f"{tmp_path / 'gone'}: no such folder; an adapter is a folder with adapter_config.json"),
    ):
        section = model_section(tiny_world, *named)
        run_ = recipe(tiny_world, tmp_path / "run", model=section, adapter="continue", data=data)
        assert danlu(verb, run_) == 4
        assert said in capfd.readouterr().err


def test_an_adapter_of_another_base_is_refused(
    tiny_world: World, tmp_path: Path, first: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "other", steps=2)) == 0
    section = {**model_section(tiny_world, first), "path": str(tmp_path / "other")}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", model=section, adapter="continue")) == 4
    said = capfd.readouterr().err
    assert "was trained on another base" in said and "Use the base it was trained on" in said


def test_an_adapter_of_another_tool_with_another_base_s_name_is_doubted(
    tiny_world: World, tmp_path: Path, first: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Names are no proof: a model may lie anywhere under any name. So it is told, and not refused."""
    (first / "adapter" / "danlu.json").unlink()
    config = first / "adapter" / "adapter_config.json"
    again = {"model": model_section(tiny_world, first), "adapter": "continue", "steps": 2}
    assert danlu("train", recipe(tiny_world, tmp_path / "same", **again)) == 0
    assert "the shapes fit" not in capfd.readouterr().err
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "owner/Other-1B"}))
    assert danlu("train", recipe(tiny_world, tmp_path / "other", **again)) == 0
    assert "was trained on owner/Other-1B, and here it is put on" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"adapter": "lora"}, {"adapter": "dora", "quantization": "nf4"}], ids=str)
def test_a_compiled_run_is_the_same_but_for_rounding(
    tiny_world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    losses = {}
    for compiled in (False, True):
        output = tmp_path / f"compiled-{compiled}"
        assert danlu("train", recipe(tiny_world, output, **changes, compile=compiled, steps=4)) == 0
        losses[compiled] = [line["loss"] for line in metrics(output) if "loss" in line]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert len(set(losses[True])) == 4


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"adapter": {"kind": "lora", "targets": "q_prj"}}, 2, "'q_prj' matches no layer of this model. Near: q_proj"),
    ({"adapter": {"kind": "lora", "rank": 64}}, 2, "adapter.rank: 64 is above 32"),
    ({"adapter": {"kind": "lora", "rnak": 64}}, 2, "adapter.rnak: unknown key in Lora. Did you mean 'rank'?"),
    ({"adapter": "loar"}, 2, "adapter.kind: unknown kind 'loar'. Did you mean 'lora'?"),
    ({"adapter": "loftq"}, 2, "loftq makes up for what quantization loses: add quantization: nf4"),
    ({"quantization": "nf4"}, 2, "a quantized model cannot be trained itself: add adapter: lora"),
    ({"adapter": "continue"}, 2, "continue trains the last of model.adapters on, and there is none"),
    ({"adapter": {"kind": "lora", "svd_iterations": 3}}, 2, "adapter.svd_iterations: only read with init: pissa"),
    ({"adapter": {"kind": "lora", "targets": ["q_prjo"]}}, 2, "adapter.targets: 'q_prjo' matches no layer of this mod"),
    (
        {"adapter": {"kind": "lora", "rank_pattern": {"k_prjo": 2}}},
        2,
        "adapter.rank_pattern: 'k_prjo' matches no layer",
    ),
    ({"adapter": {"kind": "dora", "targets": ["embed_tokens"]}}, 2, "dora cannot sit on an embedding (model.embed_tok"),
    (
        {"adapter": {"kind": "lora", "init": "pissa", "targets": ["embed_tokens"]}},
        2,
        "init: pissa cannot sit on an emb",
    ),
    ({"adapter": {"kind": "vera", "targets": ["embed_tokens"]}}, 2, "vera cannot sit on an embedding"),
    (
        {"adapter": {"kind": "lora", "targets": ["lm_head"], "dropout": 0.1}},
        2,
        "adapter.dropout: the head is multiplied",
    ),
    ({"adapter": {"kind": "mora", "rank": 30}}, 2, "adapter.rank: 30 makes a square of width"),
    ({"adapter": {"kind": "ia3", "feedforward": ["down_prjo"]}}, 2, "adapter.feedforward: 'down_prjo' matches no lay"),
]


@pytest.mark.parametrize("verb", ["train", "preview"])
@pytest.mark.parametrize(("changes", "code", "said"), BAD)
def test_what_cannot_be_is_said_before_rows_are_read(
    tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, said: str,
    verb: str,
) -> None:  # fmt: skip
    changes = {**changes, "data": {"train": str(write_rows(tmp_path / "broken.jsonl", ["{"]))}}  # is not even read
    assert danlu(verb, recipe(tiny_world, tmp_path / "run", **changes)) == code
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists() or not any((tmp_path / "run" / "checkpoints").iterdir())


def test_an_adapter_needs_a_finished_model(
    tiny_world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert danlu("train", tiny_world.recipe(tmp_path / "run", adapter="lora")) == 2
    assert "adapter: an adapter is trained on a finished model: give model.path" in capfd.readouterr().err
