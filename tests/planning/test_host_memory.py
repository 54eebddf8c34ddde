"""The host's memory while a model is loaded and saved, and the disk of the result, on sizes that are easy to add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builders.tiny_world import CONFIG, World

from danlu.core.safetensors_format import BUFFER_BYTES, STAGING_BYTES
from danlu.models.config import parameter_shapes
from danlu.models.hf_config import read_config_values
from danlu.parallel.layout import layout_of
from danlu.planning.host_memory import host_bytes, result_bytes
from danlu.planning.rank_memory import rank_states
from danlu.planning.step_plan import HostBytes
from danlu.planning.workload import Workload
from danlu.recipe import load
from danlu.run.read_workload import read_workload

WIDE = {**CONFIG, "hidden_size": 2048, "vocab_size": 16384, "tie_word_embeddings": False}
EMBEDDING = 4 * 2048 * 16384


def workload_of(world: World, folder: Path, **changes: Any) -> Workload:
    recipe = load(world.recipe(folder / "run", **{"precision": "bf16", **changes})).recipe
    return read_workload(recipe, read_config_values(WIDE), judges=False)


def host(workload: Workload, ranks: int = 1, device_type: str = "cpu") -> HostBytes:
    layout = layout_of(workload.recipe.parallel, ranks)
    return host_bytes(workload, rank_states(workload, layout, device_type=device_type), layout, device_type)


def test_weights_that_are_drawn_need_nothing_and_stored_ones_a_buffer(tiny_world: World, tmp_path: Path) -> None:
    drawn = workload_of(tiny_world, tmp_path, model={"config": WIDE})
    assert host(drawn) == HostBytes(0, 0, BUFFER_BYTES)
    base = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    assert host(workload_of(tiny_world, tmp_path, model=base)).loading == BUFFER_BYTES
    frozen = workload_of(tiny_world, tmp_path, model=base, adapter="lora")
    assert host(frozen).loading == BUFFER_BYTES + EMBEDDING // 2  # one weight in bfloat16


def test_checkpoints_of_a_gpu_pass_buffers_and_a_shared_result_is_gathered_tensor_by_tensor(
    tiny_world: World, tmp_path: Path
) -> None:
    several = workload_of(tiny_world, tmp_path, model={"config": WIDE}, threads=8)
    assert 6 * STAGING_BYTES < host(several, device_type="cuda").saving <= 8 * STAGING_BYTES  # two matrices, 3 of each
    assert host(several).saving == BUFFER_BYTES  # a CPU's tensors are written from where they are
    one = workload_of(tiny_world, tmp_path, model={"config": WIDE}, threads=1)
    assert host(one, device_type="cuda").saving == STAGING_BYTES
    shared = workload_of(tiny_world, tmp_path, model={"config": WIDE}, parallel={"shard": "zero3", "data": 4})
    assert host(shared, 4).saving == BUFFER_BYTES + EMBEDDING + EMBEDDING // 4
    replicated = workload_of(tiny_world, tmp_path, model={"config": WIDE}, parallel={"data": 4})
    assert host(replicated, 4).saving == BUFFER_BYTES  # control: each process has all of it


def test_a_result_is_the_model_or_the_adapter(tiny_world: World, tmp_path: Path) -> None:
    whole = workload_of(tiny_world, tmp_path, model={"config": WIDE})
    count = sum(map(_count, parameter_shapes(whole.config).values()))
    assert result_bytes(whole) == 2 * count
    in_float32 = workload_of(tiny_world, tmp_path, model={"config": WIDE}, precision="fp32")
    assert result_bytes(in_float32) == 4 * count
    base = {"path": str(tiny_world.base), "config": None, "tokenizer": None}
    adapter = workload_of(tiny_world, tmp_path, model=base, adapter="lora")
    assert result_bytes(adapter) == sum(each.bytes for each in adapter.policy.tensors if each.trained) < count


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
