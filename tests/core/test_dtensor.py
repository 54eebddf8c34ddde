"""DTensors are told from plain tensors, and a process that has none imports nothing for them."""

from __future__ import annotations

import torch
from builders.torch_process import TorchProcess

from danlu.core.dtensor import is_dtensor, local_tensor
from danlu.parallel.traffic_counter import fake_process_group


def test_a_run_imports_neither_dtensors_nor_sympy(torch_process: TorchProcess) -> None:
    seen = "[name for name in ('torch.distributed.tensor', 'torch.distributed.fsdp', 'sympy') if name in sys.modules]"
    modules = "danlu.run.train, danlu.cli.train"
    program = f"import sys, {modules}; print({seen}); import torch.distributed.fsdp; print(len({seen}))"
    assert torch_process.run(program).split("\n")[-3:] == ["[]", "3", ""]


def test_dtensors_are_told_from_plain_tensors() -> None:
    plain = torch.arange(6.0).reshape(2, 3)
    assert not is_dtensor(plain) and local_tensor(plain) is plain
    with fake_process_group(2):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        shard = DTensor.from_local(plain, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert is_dtensor(shard) and shard.shape == (4, 3)
        assert torch.equal(local_tensor(shard), plain) and not is_dtensor(local_tensor(shard))
