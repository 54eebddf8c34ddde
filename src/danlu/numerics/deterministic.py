"""`deterministic: true`: only algorithms of torch that give the same bits each time.

On a CPU all that danlu uses do. On CUDA some kernels add with atomics, in whatever order threads arrive: the backward
passes of attention and of the embedding among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from danlu.core.errors import ResourceError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
SAME_EACH_TIME = ":4096:8"
"""The workspace with which cuBLAS promises the same bits, of two the one that costs no speed (24 MiB on a GPU)."""
_NONE_KNOWN = "does not have a deterministic implementation"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context in which torch uses deterministic algorithms only, if `wanted`; else nothing changes.

    Enter it before the first matrix product on a GPU: cuBLAS reads its workspace then.
    Raises ResourceError for an operation that has no such algorithm.
    """
    if not wanted:
        yield
        return
    os.environ.setdefault(WORKSPACE, SAME_EACH_TIME)
    filling: Any = torch.utils.deterministic
    fills = filling.fill_uninitialized_memory
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    searches = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # which picks by time, and so not always the same
    filling.fill_uninitialized_memory = False  # writes all new memory once, for the sake of programs that read it
    try:
        yield
    except RuntimeError as error:
        if _NONE_KNOWN not in str(error):
            raise
        operation = str(error).partition(_NONE_KNOWN)[0].strip()
        raise ResourceError(
            f"deterministic: true, but {operation} of torch {torch.__version__} {_NONE_KNOWN} on this device. "
            "Set deterministic: false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.backends.cudnn.benchmark = searches
        filling.fill_uninitialized_memory = fills
