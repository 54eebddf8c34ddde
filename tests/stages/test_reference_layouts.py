"""A reference of any kind is the same in every layout, and one that moves does so on every process alike."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.pair_stage import trained_tensors
from builders.process_group import run_group
from builders.reference_stage import PairSamples, ShuffledPairs, recipe_file, train
from builders.tiny_world import World
from builders.worst_errors import worst_relative_error
from torch import Tensor
from torch.nn.functional import logsigmoid

from danlu.core.types import Sample
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.loading import load as load_model
from danlu.recipe import sections

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2": {"shard": "zero2"},
    "zero3": {"shard": "zero3"},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
}
MOVING = {"kind": "frozen", "every": 2, "mix": 0.6}
RUNS: dict[str, dict[str, Any]] = {
    "cached": {"reference": {"kind": "cached"}},
    "frozen": {"reference": {"kind": "frozen"}},
    "moving": {"reference": MOVING},
    "adapter-off": {"reference": {"kind": "adapter-off"}, "adapter": {"kind": "lora"}},
    "qlora": {
        "reference": {"kind": "frozen"},
        "adapter": {"kind": "lora"},
        "quantization": {"kind": "int8", "group": 8},
    },
    "recomputed": {
        "reference": {"kind": "adapter-off"},
        "adapter": {"kind": "lora"},
        "memory": {"recompute": {"kind": "full"}},
    },
}
SHORT: dict[str, Any] = {"steps": 4, "evaluation": {"every": 4}, "checkpoint": {"every": 4}}


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "margin", "eval_loss", "eval_margin")
    return [value for line in lines for name, value in line.items() if name in names]


@pytest.mark.slow
@pytest.mark.distributed
def test_every_kind_is_the_same_in_every_layout(tiny_world: World, tmp_path: Path) -> None:
    below = str(adapter_folder(tiny_world.base, tmp_path / "below", sections.Lora(), size=0.1))

    def file(name: str, run: str, **changes: Any) -> str:
        on_adapters = {"model": {"adapters": [below]}} if run in ("adapter-off", "qlora") else {}
        cache = {"data": {"cache": str(tmp_path / f"cache-{name}")}}
        return recipe_file(
            tiny_world, tmp_path, f"{name}-{run}", **RUNS[run], **on_adapters, **cache, **SHORT, **changes
        )

    assert train([file("alone", run) for run in RUNS]) == [0] * len(RUNS)
    files = [file(name, run, parallel=parallel) for name, parallel in LAYOUTS.items() for run in RUNS]
    assert run_group(train, 2, files) == [[0] * len(files)] * 2
    for run in RUNS:
        want, tensors = losses(tmp_path / f"alone-{run}"), trained_tensors(tmp_path / f"alone-{run}")
        assert want[0] == pytest.approx(math.log(2), abs=1e-6)
        assert any("reference." in name for name in tensors) == (run == "moving")
        for name in LAYOUTS:
            folder = tmp_path / f"{name}-{run}"
            assert losses(folder) == pytest.approx(want, abs=2e-5), folder.name
            assert trained_tensors(folder).keys() == tensors.keys(), folder.name
            assert worst_relative_error(trained_tensors(folder), tensors) < 2e-5, folder.name


def test_threads_ask_one_frozen_model(tiny_world: World, tmp_path: Path) -> None:
    threads = {"parallel": {"workers": "threads", "data": 2}}
    files = [
        recipe_file(tiny_world, tmp_path, f"{kind}-{name}", reference={"kind": kind}, **SHORT, **changes)
        for kind in ("cached", "frozen")
        for name, changes in (("alone", {}), ("threads", threads))
    ]
    assert train(files) == [0] * 4
    for kind in ("cached", "frozen"):
        assert losses(tmp_path / f"{kind}-threads") == pytest.approx(losses(tmp_path / f"{kind}-alone"), abs=1e-5)


def answer_logprob(model: Decoder, sample: Sample, answer: int) -> Tensor:
    """The log-probability of one answer, its prompt and itself laid out as a document of its own."""
    stem, branch = sample.branches[0], sample.branches[answer]
    tokens = torch.tensor([*sample.tokens[: stem.stop], *sample.tokens[branch.start : branch.stop]], dtype=torch.int64)
    hidden = model(tokens, torch.arange(len(tokens)), PackedAttention((0, len(tokens))), torch.float32)
    logprobs = model.logits(hidden).log_softmax(-1)
    return logprobs[stem.stop - 1 : -1].gather(1, tokens[stem.stop :, None]).sum()


def test_a_moving_reference_is_that_of_a_plain_loop(tiny_world: World, tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "optimizer": {"kind": "sgd", "learning_rate": 0.5, "momentum": 0.0},
        "schedule": {"kind": "constant", "warmup": 0},
        "gradient_clipping": None,
    }
    runs = {"moving": MOVING, "still": {"kind": "frozen"}}
    files = [recipe_file(tiny_world, tmp_path, name, reference=kind, **plain) for name, kind in runs.items()]
    assert train(files) == [0, 0]
    policy, reference, source = load_model(tiny_world.base), load_model(tiny_world.base), ShuffledPairs(PairSamples())
    want = []
    for step in range(1, 7):
        loss = torch.zeros(())
        for number in range(4 * (step - 1), 4 * step):
            (sample,) = source.at(number).samples
            ratios = [
                answer_logprob(policy, sample, answer) - answer_logprob(reference, sample, answer).detach()
                for answer in (1, 2)
            ]
            loss = loss - logsigmoid(0.1 * (ratios[0] - ratios[1])) / 4
        want.append(loss.item())
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for own, followed in zip(reference.parameters(), policy.parameters(), strict=True):
                assert followed.grad is not None
                followed -= 0.5 * followed.grad
                if step % 2 == 0:
                    own.copy_(0.6 * followed + 0.4 * own)

    def trained_losses(name: str) -> list[float]:
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    assert trained_losses("moving") == pytest.approx(want, abs=1e-5)
    assert trained_losses("still") != pytest.approx(want, abs=1e-5)  # control
    tensors = trained_tensors(tmp_path / "moving")
    expected = {f"reference.{name}": value.detach() for name, value in reference.named_parameters()}
    assert expected.keys() == {name for name in tensors if name.startswith("reference.")}
    assert worst_relative_error({name: tensors[name] for name in expected}, expected) < 1e-5


def test_a_moving_reference_goes_on_where_it_was(tiny_world: World, tmp_path: Path) -> None:
    files = [recipe_file(tiny_world, tmp_path, name, reference=MOVING) for name in ("whole", "halved")]
    assert train(files) == [0, 0]
    shutil.rmtree(max((tmp_path / "halved" / "checkpoints").glob("step-*")))
    shutil.rmtree(tmp_path / "halved" / "model")
    assert train(files[1:]) == [0]
    whole, halved = trained_tensors(tmp_path / "whole"), trained_tensors(tmp_path / "halved")
    assert [name for name in whole if not torch.equal(whole[name], halved[name])] == []
    assert losses(tmp_path / "halved") == losses(tmp_path / "whole")
    assert not any("reference" in file.name for file in (tmp_path / "whole" / "model").iterdir())
