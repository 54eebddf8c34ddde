"""Parameters as boxes of the tensors on disk: written and read, of experts and of what takes turns in a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.models import hf_layout, initialize, safetensors_io, saving
from danlu.models.decoder import Decoder
from danlu.models.families import llama
from danlu.models.families.family import LLAMA_MODULES, Stored
from danlu.models.hf_folder import read_tensors
from danlu.models.hf_layout import HFTensor
from danlu.models.safetensors_io import TensorReader

EXPERTS, WIDTH, INNER, HEADS = 4, 6, 10, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "layers.0.attention.q_proj.weight": (HEADS * 4, WIDTH),
    "layers.0.attention.gate_proj.weight": (HEADS * 4, WIDTH),
    "layers.0.attention.k_proj.weight": (HEADS * 2, WIDTH),
    "layers.0.mlp.experts.gate_proj.weight": (EXPERTS, INNER, WIDTH),
    "layers.0.mlp.experts.gate_proj.bias": (EXPERTS, INNER),
    "layers.0.mlp.experts.up_proj.weight": (EXPERTS, INNER, WIDTH),
    "layers.0.mlp.experts.up_proj.bias": (EXPERTS, INNER),
    "layers.0.mlp.experts.down_proj.weight": (EXPERTS, WIDTH, INNER),
    "norm.weight": (WIDTH,),
}
GATE, UP, DOWN = (f"layers.0.mlp.experts.{name}_proj.weight" for name in ("gate", "up", "down"))
PATH, ATTENTION = "model.layers.0.mlp.experts", "model.layers.0.self_attn"


def experts(name: Callable[[str, str], str], **flags: bool) -> dict[str, str | Stored]:
    """The entries of a family for experts. name: from projection and attribute to the tensor's."""
    return {
        f"mlp.experts.{projection}_proj.{kind}": Stored(name(projection, kind), **flags)
        for projection in ("gate", "up", "down")
        for kind in ("weight", "bias")
    }


def fused(projection: str, kind: str) -> str:
    """transformers' name of stacked experts."""
    return f"mlp.experts.{'down' if projection == 'down' else 'gate_up'}_proj{'' if kind == 'weight' else '_bias'}"


def interleaved(one: Tensor, other: Tensor) -> Tensor:
    """Whose last index takes turns between two tensors."""
    return torch.stack([one, other], dim=-1).flatten(-2)


def by_head(*rows: Tensor) -> Tensor:
    """For each head its rows of all tensors, one under the other."""
    return torch.cat([one.unflatten(0, (HEADS, -1)) for one in rows], dim=1).flatten(0, 1)


def of_mixtral(values: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {"w1": GATE, "w2": DOWN, "w3": UP}
    weights = {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{short}.weight": values[name][expert]
        for expert in range(EXPERTS)
        for short, name in named.items()
    }
    return weights | {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{short}.bias": values[name.replace("weight", "bias")][expert]
        for expert in range(EXPERTS)
        for short, name in (("w1", GATE), ("w3", UP))
    }


def of_gpt_oss(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{PATH}.gate_up_proj": interleaved(values[GATE].mT, values[UP].mT),
        f"{PATH}.gate_up_proj_bias": interleaved(
            values[GATE.replace("weight", "bias")], values[UP.replace("weight", "bias")]
        ),
        f"{PATH}.down_proj": values[DOWN].mT,
    }


def of_stacked(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{PATH}.gate_up_proj": torch.cat([values[GATE], values[UP]], dim=1),
        f"{PATH}.gate_up_proj_bias": torch.cat([values[name.replace("weight", "bias")] for name in (GATE, UP)], dim=1),
        f"{PATH}.down_proj": values[DOWN],
    }


SHORT = {"gate": "w1", "up": "w3", "down": "w2"}
LAYOUTS: dict[str, tuple[dict[str, str | Stored], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "mixtral": (experts(lambda one, kind: f"block_sparse_moe.experts.*.{SHORT[one]}.{kind}"), of_mixtral),
    "gpt_oss": (experts(fused, transposed=True, alternates=True), of_gpt_oss),
    "stacked": (experts(fused), of_stacked),
}


@pytest.fixture(params=LAYOUTS)
def layout(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Decoder]
) -> tuple[list[HFTensor], Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """The tensors of a folder with experts, and what they are of a parameter table without a model."""
    modules, expected = LAYOUTS[request.param]
    own: dict[str, str | Stored] = {
        **LLAMA_MODULES,
        "attention.q_proj": Stored("self_attn.q_proj", turns=lambda layer: HEADS),
        "attention.gate_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        **modules,
    }
    monkeypatch.setitem(llama.FAMILIES, "llama", replace(llama.FAMILIES["llama"], modules=own))
    monkeypatch.setattr(hf_layout, "parameter_shapes", lambda config: SHAPES)
    return hf_layout.hf_tensors(tiny_model("llama-2").config), expected


@pytest.fixture
def values() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def write(tensors: list[HFTensor], values: dict[str, Tensor], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    saving._write_weights(folder, saving.boxes_of(values.__getitem__), {"model.safetensors": tensors}, dtype)


def test_they_lie_on_disk_as_transformers_has_them(
    layout: tuple[list[HFTensor], Callable[[dict[str, Tensor]], dict[str, Tensor]]],
    values: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    tensors, expected = layout
    queries_and_gate = [values[f"layers.0.attention.{name}_proj.weight"] for name in ("q", "gate")]
    wanted = expected(values) | {
        "model.norm.weight": values["norm.weight"],
        f"{ATTENTION}.k_proj.weight": values["layers.0.attention.k_proj.weight"],
        f"{ATTENTION}.q_proj.weight": by_head(*queries_and_gate),
    }
    assert {tensor.name: tensor.shape for tensor in tensors} == {name: one.shape for name, one in wanted.items()}
    write(tensors, values, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == wanted.keys()
    for tensor in tensors:
        assert torch.equal(stored[tensor.name], wanted[tensor.name]), tensor.name
        assert torch.equal(tensor.assembled(values.__getitem__), wanted[tensor.name])
    swapped = values | {GATE: values[UP], UP: values[GATE]}
    assert any(not torch.equal(one.assembled(swapped.__getitem__), wanted[one.name]) for one in tensors)  # control
    write(tensors, values, tmp_path, torch.bfloat16)
    narrow = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(narrow[name], one.to(torch.bfloat16)) for name, one in wanted.items())


def boxes(shape: tuple[int, ...]) -> Iterator[ShardBox]:
    """Boxes of a tensor: all, nothing, and ranges of indices along one dimension or all of them."""
    yield ShardBox.full(shape)
    yield ShardBox(shape, (0,) * len(shape), (0, *shape[1:]))
    for dim, size in enumerate(shape):
        for start, end in ((0, size // 2), (size // 2, size), (size // 3, size // 3 + 1)):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = start, end - start
            yield ShardBox(shape, tuple(offsets), tuple(sizes))
    inner = tuple(min(1, size - 1) for size in shape)
    yield ShardBox(shape, inner, tuple(size - at for size, at in zip(shape, inner, strict=True)))


@pytest.mark.parametrize("buffer_bytes", [1 << 22, 28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_box_is_read_back(
    layout: tuple[list[HFTensor], Callable[[dict[str, Tensor]], dict[str, Tensor]]],
    values: dict[str, Tensor],
    dtype: torch.dtype,
    buffer_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, _ = layout
    write(tensors, values, tmp_path, dtype)
    stored = read_tensors(tmp_path)
    monkeypatch.setattr(safetensors_io, "BUFFER_BYTES", buffer_bytes)
    for name, value in values.items():
        for box in boxes(tuple(value.shape)):
            target = torch.full(box.sizes, float("nan"))
            with TensorReader() as reader:
                for tensor in tensors:
                    reader.fill(tensor, stored[tensor.name], {name: (target, box)})
            assert torch.equal(target, box.view_of(value).to(dtype).float()), (name, str(box))


@pytest.mark.parametrize("of", [1, 2, 4])
def test_only_the_bytes_of_a_box_are_read(
    layout: tuple[list[HFTensor], Callable[[dict[str, Tensor]], dict[str, Tensor]]],
    values: dict[str, Tensor],
    of: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, _ = layout
    write(tensors, values, tmp_path)
    stored = read_tensors(tmp_path)
    read_bytes = 0
    read_exactly = safetensors_io.read_exactly

    def counted(handle: object, target: Tensor) -> int:
        nonlocal read_bytes
        read_bytes += target.nbytes
        return read_exactly(handle, target)  # type: ignore[arg-type]

    monkeypatch.setattr(safetensors_io, "read_exactly", counted)
    targets = {}
    for name in (GATE, UP, DOWN):
        box = ShardBox(SHAPES[name], (EXPERTS - EXPERTS // of, 0, 0), (EXPERTS // of, *SHAPES[name][1:]))
        targets[name] = (torch.empty(box.sizes), box)
    with TensorReader() as reader:
        for tensor in tensors:
            reader.fill(tensor, stored[tensor.name], targets)
    assert read_bytes == sum(values[name].nbytes for name in targets) // of
    for name, (target, box) in targets.items():
        assert torch.equal(target, box.view_of(values[name]))


def test_a_process_draws_its_own_experts_only(
    tiny_model: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_model("llama-2").config
    whole = initialize.initial_value(config, GATE, ShardBox.full(SHAPES[GATE]), 3)
    drawn = 0
    normal = Tensor.normal_

    def counted(self: Tensor, *args: float, **settings: torch.Generator) -> Tensor:
        nonlocal drawn
        drawn += self.numel()
        return normal(self, *args, **settings)

    monkeypatch.setattr(Tensor, "normal_", counted)
    for expert in range(EXPERTS):
        drawn = 0
        box = ShardBox(SHAPES[GATE], (expert, 0, 2), (1, INNER, WIDTH - 2))
        assert torch.equal(initialize.initial_value(config, GATE, box, 3), box.view_of(whole))
        assert drawn == INNER * WIDTH
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(initialize.initial_value(config, UP, ShardBox.full(SHAPES[GATE]), 3), whole)
