"""FSDP2 as danlu uses it, on one rank: the shards are whole, and all else is as on many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders.tiny_run import tiny_model
from torch.distributed.device_mesh import init_device_mesh

from danlu.assembly.parameters import kept_whole
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.loading import meta_decoder
from danlu.optim.gradients import clip_grad_norm
from danlu.parallel import data
from danlu.parallel.comm import Group
from danlu.parallel.layout import Layout
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.ranks import DataGroups
from danlu.recipe import sections


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def gradients(model: Decoder, device: torch.device) -> torch.Tensor:
    tokens = (torch.arange(40) % 64).to(device)
    hidden = model(tokens, tokens, PackedAttention((0, 25, 40)))
    loss = (hidden.float() * torch.linspace(-1, 2, hidden.numel(), device=device).view_as(hidden)).sum()
    loss.backward()
    return loss.detach().cpu()


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_sharded_model_learns_as_a_whole_one(
    device: torch.device, mesh: Any, shard: Any, offload: bool, tmp_path: Path
) -> None:
    plain = tiny_model().to(device)
    wanted = gradients(plain, device)
    values = {name: one.detach().cpu() for name, one in plain.named_parameters()}
    alone = Group()
    groups = DataGroups(alone, alone, alone, mesh)
    ranks: Any = SimpleNamespace(tensor=alone, world=alone, layout=Layout(), dense_data=groups, expert_data=groups)
    model = meta_decoder(plain.config)
    sharder = data.Sharder(
        model, ranks, sections.Parallel(shard=shard), gathered=None, whole=kept_whole(model), offload=offload
    )
    for name, layer in model.layers.items():
        sharder.layer(f"layers.{name}", layer)
    sharder.rest(list(model.layers.values()))
    data.to_empty(model, device, offload=offload)
    held = local_parameters_of(model, ranks, {})
    with torch.no_grad():
        for name, one in held.items():
            one.local.copy_(values[name])
    on_host = {name for name, one in held.items() if one.local.device.type == "cpu"}
    if device.type != "cpu":
        assert bool(on_host) == offload and not any("norm" in name for name in on_host)
    assert torch.allclose(gradients(model, device), wanted, rtol=1e-5)
    for one in held.values():
        one.take_gradient()
    for name, one in plain.named_parameters():
        found = held[name].local.grad
        if name == "lm_head.weight":  # which hidden states do not come by
            assert one.grad is None and found is None
            continue
        assert one.grad is not None and found is not None and found.device == held[name].local.device
        assert float((found.cpu() - one.grad.cpu()).norm() / one.grad.cpu().norm()) < 1e-4, name
        assert float((2 * found.cpu() - one.grad.cpu()).norm() / one.grad.cpu().norm()) > 0.5  # control
    norms = [
        clip_grad_norm([one.local for one in held.values()], None, device=device),
        clip_grad_norm(plain.parameters(), None, device=device),
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
