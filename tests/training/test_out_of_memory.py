from __future__ import annotations

import pytest
import torch

from danlu.training.out_of_memory import OutOfMemory, is_out_of_memory, out_of_memory_message, requested_bytes


def test_the_allocator_of_this_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 2**50


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total ..."), 5 * 2**29),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (MemoryError(), None),
        (MemoryError("Unable to allocate 1.2 TiB for an array"), None),
        (OutOfMemory("step 3: out of memory"), None),
    ],
)
def test_allocators_of_others(error: BaseException, wanted: int | None) -> None:
    assert is_out_of_memory(error)
    assert requested_bytes(error) == wanted


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("not enough memory: you tried to allocate 8 bytes"),
        OSError("cannot allocate memory"),
    ],
)
def test_other_errors_are_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_in_short() -> None:
    assert out_of_memory_message(OutOfMemory("step 3, backward: out of memory")) == "step 3, backward: out of memory"
    assert out_of_memory_message(RuntimeError("Tried to allocate 20.00 MiB")).endswith(
        "out of memory when 20.0 MiB more were asked for"
    )
