"""Shapes and bytes of optimizer state, told without torch, against the state of optimizers that have made a step."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from danlu.core.shard_box import ShardBox
from danlu.memory.pages import paged_state
from danlu.optim.build import build as build_optimizer
from danlu.optim.ema import Ema
from danlu.optim.state_shapes import average_bytes, optimizer_bytes, parameter_state
from danlu.recipe.sections import SGD, Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer, PagedAdamW

build = partial(build_optimizer, paged_state=paged_state)
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (131, 17),
    "layers.0.attention.q_proj.weight": (67, 17),
    "layers.0.attention.q_proj.bias": (67,),
    "layers.0.mlp.experts.up_proj.weight": (3, 67, 23),
    "layers.0.mlp.down_proj.weight": (17, 301),
    "layers.0.mlp.experts.up_proj.bias": (3, 67),
    "lm_head.weight": (131, 17),
    "norm.weight": (17,),
}
SECTIONS: dict[str, Optimizer] = {
    "adamw": AdamW(),
    "adamw, bf16": AdamW(moments="bf16"),
    "adamw, 8 bits": AdamW(moments="8bit"),
    "adamw8bit": AdamW8bit(),
    "adamw8bit, odd blocks": AdamW8bit(block=37, smallest=100),
    "adamw8bit, all": AdamW8bit(smallest=0),
    "paged": PagedAdamW(),
    "paged, 8 bits": PagedAdamW(bits=8),
    "sgd": SGD(),
    "sgd without momentum": SGD(momentum=0.0),
    "adafactor": Adafactor(),
    "lion": Lion(),
    "muon": Muon(),
    "galore": GaLore(rank=5),
    "galore, 8 bits": GaLore(rank=16, states="adamw8bit"),
}
Kept = dict[str, dict[str, tuple[tuple[int, ...], str]]]


def stepped(section: Optimizer, shapes: dict[str, tuple[int, ...]], **options: Any) -> tuple[Any, Kept]:
    """The optimizer behind its first step, and the shapes and types of what it keeps for each parameter."""
    parameters = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = build(parameters.items(), section, **options)
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = torch.linspace(-1, 1 + number, parameter.numel()).view(parameter.shape)
    optimizer.step()
    kept: Kept = {name: {} for name in shapes}
    for key, tensor in optimizer.state_tensors().items():
        state, _, name = key.partition(".")
        kept[name][state] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return optimizer, kept


def told(section: Optimizer, shapes: dict[str, tuple[int, ...]]) -> Kept:
    return {
        name: {state: (one.shape, one.type) for state, one in parameter_state(section, name, shape).items()}
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", SECTIONS)
def test_state_is_what_an_optimizer_keeps(name: str) -> None:
    section = SECTIONS[name]
    optimizer, kept = stepped(section, SHAPES)
    assert kept == told(section, SHAPES)
    real = sum(tensor.nbytes for tensor in optimizer.state_tensors().values())
    counted = optimizer_bytes(section, SHAPES, paged=isinstance(section, PagedAdamW))
    assert counted.state == real == optimizer.state_bytes()
    # control: other sections keep something else for the same parameters
    alike = [{"adamw", "paged"}, {"adamw, 8 bits", "adamw8bit", "paged, 8 bits"}]
    others = next((names - {name} for names in alike if name in names), set())
    assert {key for key, other in SECTIONS.items() if key != name and told(other, SHAPES) == kept} == others


@pytest.mark.parametrize(
    "name", ["adamw", "adamw, bf16", "adamw8bit, odd blocks", "paged, 8 bits", "lion", "adafactor", "muon"]
)
def test_state_of_shards_is_that_of_their_own_shapes(name: str) -> None:
    """Rows divided among ranks as FSDP2 divides them: equal parts, fewer rows on the last ranks, none at all."""
    section, shards = SECTIONS[name], 5
    total = 0
    for index in range(shards):
        shapes = {key: ShardBox.full(shape).shard(0, shards, index).sizes for key, shape in SHAPES.items()}
        for key, shape in SHAPES.items():
            chunks = torch.empty(shape).chunk(shards)
            assert shapes[key] == (tuple(chunks[index].shape) if index < len(chunks) else (0, *shape[1:])), key
        shapes = {key: shape for key, shape in shapes.items() if 0 not in shape}
        optimizer, kept = stepped(section, shapes)
        assert kept == told(section, shapes)
        total += optimizer.state_bytes()
    whole = optimizer_bytes(section, SHAPES, paged=False).state
    assert (total != whole) == (name != "lion")  # control: each shard has a counter, or scales, of its own


def test_gradients_that_are_projected_wait_with_a_low_rank() -> None:
    section = SECTIONS["galore"]
    parameters = {name: Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = build(parameters.items(), section)
    sum((parameter.sum() for parameter in parameters.values()), torch.zeros(())).backward()
    waiting = sum(holder.grad.nbytes for holder in optimizer.gradient_holders() if holder.grad is not None)
    largest = 4 * 17 * 301  # is whole while it is projected
    assert optimizer_bytes(section, SHAPES, paged=False).gradients == waiting + largest == optimizer.gradient_bytes()
    plain = optimizer_bytes(AdamW(), SHAPES, paged=False).gradients
    assert plain == 4 * sum(parameter.numel() for parameter in parameters.values()) > waiting


@pytest.mark.parametrize("section", [AdamW(), AdamW(moments="bf16"), AdamW8bit(block=37, smallest=100)], ids=str)
def test_offloaded_state_is_the_recipes_own(section: Optimizer, tmp_path: Any) -> None:
    """A run may begin to offload its state, so blocks stay what the recipe says."""
    optimizer, kept = stepped(section, SHAPES, offload=True, folder=str(tmp_path))
    assert kept == told(section, SHAPES)
    counted = optimizer_bytes(section, SHAPES, paged=True)
    assert optimizer.resident_state_bytes() == counted.resident < counted.state == optimizer.state_bytes()
    plain, _ = stepped(section, SHAPES)
    scalars = optimizer.state_scalars()
    build({name: Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}.items(), section).load_state(
        {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}, scalars
    )
    assert plain.state_tensors().keys() == optimizer.state_tensors().keys()


def test_the_average_is_one_more_copy() -> None:
    named = [(name, Parameter(torch.ones(shape))) for name, shape in SHAPES.items()]
    average = Ema(named, 0.9).state_tensors()
    assert average_bytes(SHAPES.values()) == sum(tensor.nbytes for tensor in average.values())


def test_they_are_told_without_torch() -> None:
    code = "import sys, danlu.optim.state_shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
