"""The bytes of a rollout engine's cache, as planned and as its pool's tensors have them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.small_config import small_config

from danlu.core.errors import ResourceError
from danlu.inference.draft_model import DraftModelProposer
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import DraftOptions, EngineOptions
from danlu.inference.pool import CachePool
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.layer_spec import Experts
from danlu.models.mixer_spec import Factorized, Latent
from danlu.planning.cache_memory import cache_bytes

MIB = 2**-10  # in GiB


def with_experts(config: ModelConfig) -> ModelConfig:
    """The second layer has experts."""
    first, second = config.layers
    return replace(config, layers=(first, replace(second, feed=Experts(4, 2, 16))))


LATENT: dict[str, Any] = {"mixer": Latent, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "v_head_dim": 7}
CONFIGS = {
    "grouped-query": small_config(),
    "windows": small_config(windows=(8, 16)),
    "latent": small_config(**LATENT),
    "factorized": small_config(mixer=Factorized, query_rank=8),
    "key reuse": small_config(mixer=Factorized, query_rank=8, key_reuse=True),
    "linear attention": small_config(deltas=(0, 1)),
    "linear attention and heads": small_config(deltas=(1,)),
    "experts": with_experts(small_config()),
}
OPTIONS = EngineOptions(block=4, cache_gib=MIB / 8, sequences=6)


def decoder(config: ModelConfig) -> Decoder:
    return Decoder(config).to(torch.float32)


def bytes_of(pool: CachePool) -> int:
    """The bytes of all tensors of a pool on its device."""
    tensors = [view for layer in range(len(pool.layers)) for view in pool.tensors(layer)]
    tensors += [] if pool.routes is None else [pool.routes._blocks]
    tensors += [] if pool.states is None else [each for layer in pool.states._layers for each in layer]
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_planned_bytes_are_those_of_the_pool(name: str) -> None:
    config = CONFIGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        for options in (OPTIONS, replace(OPTIONS, cache_gib=1.0), replace(OPTIONS, routes=True)):
            engine = EmbeddedEngine(decoder(config), options, dtype=dtype)
            pool = engine._runner.pool
            assert isinstance(pool, CachePool)
            planned = cache_bytes(config, options.bounds, element_bytes=dtype.itemsize)
            assert planned == bytes_of(pool) > 0, f"{options}"
            assert planned <= options.cache_gib * 2**30
            if options.cache_gib == 1.0:  # control: with every context full there is one size
                assert planned != cache_bytes(config, options.bounds, element_bytes=2 * dtype.itemsize)


def test_a_draft_model_has_a_part_of_the_cache() -> None:
    options = replace(OPTIONS, draft=DraftOptions("model"), preempt="swap")
    small = small_config(layers=1, kv_heads=1)
    engine = EmbeddedEngine(decoder(CONFIGS["experts"]), options, draft_model=decoder(small))
    assert engine._speculation is not None
    proposer = engine._speculation._proposer
    assert isinstance(proposer, DraftModelProposer)
    pools = engine._runner.pool, proposer._runner.pool
    sizes = [bytes_of(pool) for pool in pools if isinstance(pool, CachePool)]
    planned = cache_bytes(CONFIGS["experts"], options.bounds, element_bytes=4, draft=small)
    assert planned == sum(sizes) and min(sizes) > 0
    assert planned != cache_bytes(CONFIGS["experts"], options.bounds, element_bytes=4)


def test_tensor_ranks_share_heads_and_not_latents() -> None:
    bounds = replace(OPTIONS, cache_gib=1.0).bounds
    for name, parts in (("grouped-query", 2), ("latent", 1), ("key reuse", 1), ("linear attention", 2)):
        whole, each = (cache_bytes(CONFIGS[name], bounds, element_bytes=4, ranks=ranks) for ranks in (1, 2))
        assert whole == parts * each, name


def test_a_cache_without_room_for_a_block_is_refused_as_the_engine_refuses_it() -> None:
    options = replace(OPTIONS, cache_gib=1e-7)
    with pytest.raises(ResourceError) as of_engine:
        EmbeddedEngine(decoder(CONFIGS["grouped-query"]), options)
    with pytest.raises(ResourceError) as of_plan:
        cache_bytes(CONFIGS["grouped-query"], options.bounds, element_bytes=4)
    assert str(of_plan.value) == str(of_engine.value)
    assert "rollout.cache_gib: 1e-07 does not hold one block of 4 tokens" in str(of_plan.value)
