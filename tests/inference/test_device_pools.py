"""A cache on several devices: answers of a decoder whose layers lie on them are those of one device, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.device_moves import recorded
from builders.small_config import small_config
from builders.small_experts import MIXTRAL, experts_config

from danlu.core.errors import ResourceError
from danlu.inference.device_pools import DevicePools
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.mixer_spec import Latent
from danlu.parallel.device_map import move_activations, move_parameters
from danlu.planning.cache_memory import CacheKind, CacheSizes

MAP = DeviceMap("cpu:0", ("cpu:0", "cpu:1", "cpu:1", "cpu:2"), "cpu:2")
SIZES: dict[str, Any] = {"vocab_size": 64, "layers": 4}
CONFIGS = {
    "dense": small_config(**SIZES),
    "windows": small_config(**SIZES, windows=(4, None, 4, None)),
    "latent": small_config(**SIZES, mixer=Latent, kv_lora_rank=12, qk_nope_head_dim=4, v_head_dim=6),
    "linear attention": small_config(**SIZES, deltas=(0, 2)),
    "experts": experts_config(MIXTRAL, **SIZES),
}
BLOCK = 4
ROOMY: dict[str, Any] = {"cache_gib": 0.01}
CACHES: tuple[CacheKind, ...] = ("auto", "fp8", "int8", "int4")


def tight(config: ModelConfig, cache: CacheKind = "auto") -> dict[str, Any]:
    """Room for fourteen blocks, or for two answers' newest tokens and as much for blocks, so that answers are swapped
    out."""
    layers: list[Any] = [layer.attention.cache for layer in Decoder(config).layers.values()]  # type: ignore[union-attr]
    sizes = CacheSizes.of(layers, BLOCK, 4, cache=cache)
    room = 14 * sizes.block_bytes + (2 * sizes.slot_bytes if cache == "int4" else 0)
    return {"cache_gib": room / 2**30, "swap_gib": 0.01, "preempt": "swap"}


def engine_of(config: ModelConfig, device_map: DeviceMap | None, **options: Any) -> EmbeddedEngine:
    model = Decoder(config)
    initialize(model, 0)
    model.requires_grad_(False)
    if device_map is not None:
        move_parameters(model, None, device_map)
        move_activations(model, device_map)
    return EmbeddedEngine(
        model, EngineOptions(block=BLOCK, batch_tokens=16, packed_gib=0.0, **options), dtype=torch.float32
    )


def answers(engine: EmbeddedEngine, seed: int = 0) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Of prompts that begin alike and are read in parts, several answers each; the engine sleeps in between."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 9], list(range(20, 50))]
    sampling = SamplingOptions(temperature=1.0, seed=seed)
    requests = [Request(number, tuple(prompt), sampling, 9, samples=2) for number, prompt in enumerate(prompts)]
    engine.sleep()
    engine.wake()
    return [(answer.tokens, answer.logprobs) for answer in engine.generate(requests)]


CASES = [
    (name, room, cache)
    for name, caches in {**dict.fromkeys(CONFIGS, ("auto",)), "dense": CACHES, "latent": CACHES}.items()
    for cache in caches
    for room in ("roomy", "tight")
    if (name, room) != ("linear attention", "tight")
]
"""States are not swapped."""
CHOSEN = [case for case in CASES if case[1:] == ("tight", "auto")]


@pytest.mark.parametrize(
    ("name", "room", "cache"),
    fast(CASES, *CHOSEN, ("linear attention", "roomy", "auto"), ("dense", "tight", "int4"), ("latent", "roomy", "fp8")),
)
def test_answers_are_those_of_one_device(name: str, room: str, cache: CacheKind) -> None:
    config = CONFIGS[name]
    options = {"cache": cache, **(ROOMY if room == "roomy" else tight(config, cache))}
    with recorded() as moves:
        mapped = engine_of(config, MAP, **options)
        assert isinstance(mapped._runner.pool, DevicePools)
        moves.clear()
        several = answers(mapped)
    assert several == answers(engine_of(config, None, **options))
    assert {move.device for move in moves} == {"cpu:0", "cpu:1", "cpu:2"}
    assert answers(engine_of(config, None, **options), seed=1) != several  # control
    if cache != "auto":  # control: entries as they are
        assert answers(engine_of(config, None, **ROOMY)) != several
    assert (mapped.statistics.swaps > 0) == (room == "tight")


def test_each_device_has_memory_for_its_own_layers() -> None:
    pool = engine_of(CONFIGS["dense"], MAP, **ROOMY)._runner.pool
    assert isinstance(pool, DevicePools)
    sizes = {device: sum(x.nbytes for (x,) in each._storage.values()) for device, each in pool._pools.items()}
    assert sizes["cpu:0"] == sizes["cpu:2"] == sizes["cpu:1"] // 2 > 0
    assert sum(sizes.values()) <= 0.01 * 2**30
    for layer, device in enumerate(MAP.layers):
        storage = {x.untyped_storage().data_ptr() for (x,) in pool._pools[device]._storage.values()}
        assert {x.untyped_storage().data_ptr() for x in pool.tensors(layer)} <= storage


def test_a_cache_that_holds_no_block_is_told() -> None:
    with pytest.raises(ResourceError, match="does not hold one block"):
        engine_of(CONFIGS["dense"], MAP, cache_gib=1e-9)


ON_META = DeviceMap("cpu", ("cpu", "meta", "meta", "cpu"), "cpu")


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"experts"}))  # their rows are counted
def test_what_a_cache_keeps_is_on_the_device_of_its_layer(name: str) -> None:
    """Tensors of the meta device, which have no values, meet none of the CPU's."""
    for cache in CACHES if name == "dense" else ("auto",):
        with recorded():
            assert len(answers(engine_of(CONFIGS[name], ON_META, cache=cache, **ROOMY))) == 6


def test_a_cache_on_one_device_does_not_do() -> None:
    """The negative control."""
    with recorded():
        engine = engine_of(CONFIGS["dense"], ON_META, **ROOMY)
        runner = engine._runner
        layers = [layer.attention.cache for layer in runner.model.layers.values()]  # type: ignore[union-attr]
        sizes = {"blocks": runner.pool.blocks, "block": BLOCK, "dtype": torch.float32}
        runner.pool = DevicePools(layers, ["cpu"] * 4, **sizes)  # type: ignore[arg-type]
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            answers(engine)
