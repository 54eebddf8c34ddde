"""The host's memory that a process takes while a model is loaded and while checkpoints and the result are written, in
addition to what it has there throughout. Imports no torch.

Loading reads a tensor at a time into its place (`models.loading`); checkpoints go from their memory to the disk, a
GPU's through buffers (`training.checkpoints.shard_files`); of the result the first process gathers one tensor at a time
(`training.checkpoints.gathering`).
"""

from __future__ import annotations

import math

from danlu.core.safetensors_format import BUFFER_BYTES, STAGING_BYTES, WRITING_THREADS
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.parallel.layout import Layout
from danlu.planning.batch_shape import ELEMENT_BYTES
from danlu.planning.rank_memory import RankStates
from danlu.planning.step_plan import HostBytes
from danlu.planning.workload import Workload


def host_bytes(workload: Workload, states: RankStates, layout: Layout, device_type: str) -> HostBytes:
    """The bytes of a process with these states; while the result is written those of the first one."""
    return HostBytes(
        loading=_loading(workload), step=states.offloaded, saving=_saving(workload, states, layout, device_type)
    )


def _loading(workload: Workload) -> int:
    """A buffer, and of a base that is frozen one weight as it is stored, which is taken to be in the type of
    activations; nothing for weights that are drawn."""
    recipe = workload.recipe
    if recipe.model.path is None:
        return 0
    if recipe.adapter is None:
        return BUFFER_BYTES
    sizes = (math.prod(each.shape) for each in workload.policy.tensors if not each.of_adapter)
    return BUFFER_BYTES + max(sizes, default=0) * ELEMENT_BYTES[recipe.activations]


def _saving(workload: Workload, states: RankStates, layout: Layout, device_type: str) -> int:
    trained = [each for each in states.tensors if each.whole.trained]
    local = [math.prod(each.shape) * FLOAT32_BYTES for each in trained]
    # The largest tensors of a GPU, weights and both moments, each pass a buffer in a thread of its own.
    threads = min(workload.recipe.threads or WRITING_THREADS, WRITING_THREADS)
    staged = [min(size, STAGING_BYTES) for size in sorted(local * 3, reverse=True)[:threads]]
    checkpoint = 0 if device_type == "cpu" else sum(staged)
    whole = [each.whole.elements * FLOAT32_BYTES for each in trained]
    is_shared = any(each.shape != each.whole.shape for each in trained) or layout.pipeline > 1
    # One whole tensor, and one part of it.
    gathered = max(whole, default=0) + max(local, default=0) if is_shared else 0
    return max(checkpoint, BUFFER_BYTES + gathered)


def result_bytes(workload: Workload) -> int:
    """Bytes of the tensors of the folder that a run leaves: the model in bfloat16 or float32, or the adapter that was
    trained, in float32."""
    recipe, tensors = workload.recipe, workload.policy.tensors
    if recipe.adapter is not None:
        return sum(each.elements * FLOAT32_BYTES for each in tensors if each.trained)
    element_bytes = 2 if recipe.activations in ("bf16", "auto") else FLOAT32_BYTES
    return sum(each.elements * element_bytes for each in tensors)
