"""Process groups with a program outside the run, such as a server that takes its weights from rank 0.

They are separate from the run's own world: a process may be in a group of another program without being in the default
group of torch.distributed, and the other way round.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.core.errors import ResourceError


class TorchGroup:
    """Rank 0 of a group as `torch.distributed.init_process_group` makes it, which the other program joins by its name.

    The other program waits for the store of this one at `address` and `port`. Both ends need versions of torch (and, on
    GPUs, of NCCL) that understand each other.
    """

    def __init__(self, name: str, world_size: int, address: str, *, timeout_s: float = 300.0) -> None:
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.name = name
        self._world_size, self._timeout = world_size, timedelta(seconds=timeout_s)
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self._group: Any = None
        self.port: int = self._store.port

    def join(self) -> TorchGroup:
        """Waits for the other members, and returns itself."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        # The prefixes that torch.distributed puts before a group's keys: by the caller, the group and the device.
        store: Any = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        try:
            if self.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(store, 0, self._world_size, options)
            else:
                self._group = dist.ProcessGroupGloo(store, 0, self._world_size, self._timeout)
        except RuntimeError as error:
            raise ResourceError(f"the process group {self.name} of {self._world_size} did not form: {error}") from error
        return self

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor to all other members; returns when it has gone."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        on_device = tensor.contiguous().to("cuda" if self.backend == "nccl" else "cpu")
        self._group.broadcast([on_device], options).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()

    def close(self) -> None:
        self._group = self._store = None


class NCCLGroup:
    """Rank 0 of a NCCL communicator that is known by its id alone, with no store: all members enter at the same time.

    Through torch's binding of NCCL, so that nothing else needs to be installed. Never run: it takes two GPUs.
    """

    name = "nccl"

    def __init__(self, unique_id: bytes, world_size: int) -> None:
        from torch.cuda import nccl

        self._nccl = nccl
        self._communicators = [nccl.init_rank(world_size, unique_id, 0)]
        # A vLLM worker does this when it has joined, to warm up, and waits for it.
        nccl.all_reduce([torch.zeros(1, device="cuda")], comms=self._communicators)
        torch.cuda.synchronize()

    @staticmethod
    def unique_id() -> bytes:
        """A new communicator's id of 128 bytes. Raises ResourceError without a GPU."""
        from torch.cuda import nccl

        if not torch.cuda.is_available():
            raise ResourceError(
                "hand_over: group: weights go to vLLM over NCCL, and this machine has no GPU. Use folder"
            )
        return bytes(nccl.unique_id())

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor to all other members; returns when it has gone."""
        self._nccl.broadcast([tensor.contiguous().to("cuda")], 0, comms=self._communicators)
        torch.cuda.synchronize()

    def close(self) -> None:
        self._communicators = []
