"""What each kind of attention keeps of a token: by its formula, in the docs, and as the pool allocates it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from builders.small_config import small_config

from danlu.inference.pool import CachePool
from danlu.models.decoder import Decoder, Layer
from danlu.models.layer_spec import Mixer
from danlu.models.mixer_spec import Factorized, Heads, Latent
from danlu.models.rope_config import Rope
from danlu.planning.cache_memory import block_bytes

DOCS = Path(__file__).parents[2] / "docs" / "rollout.md"
ROPE = Rope(1e4, 128, 4096)
WIDE = Rope(1e4, 256, 4096)
KINDS: dict[str, Mixer] = {
    "multi-head (MHA)": Heads(32, 32, 128, ROPE),
    "grouped-query (GQA), 8 key/value heads": Heads(32, 8, 128, ROPE),
    "multi-query (MQA)": Heads(32, 1, 128, ROPE),
    "latent (MLA, arXiv:2405.04434)": Latent(32, 512, 128, 128, Rope(1e4, 64, 4096)),
    "factorized (MFA, arXiv:2412.19255)": Factorized(32, 256, WIDE, query_rank=256),
    "factorized with key reuse (MFA-KR)": Factorized(32, 256, WIDE, query_rank=256, key_reuse=True),
}
SMALL: dict[str, dict[str, Any]] = {
    "multi-head (MHA)": {"kv_heads": 4},
    "grouped-query (GQA), 8 key/value heads": {"kv_heads": 2},
    "multi-query (MQA)": {"kv_heads": 1},
    "latent (MLA, arXiv:2405.04434)": {
        "mixer": Latent,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "v_head_dim": 7,
    },
    "factorized (MFA, arXiv:2412.19255)": {"mixer": Factorized, "query_rank": 8},
    "factorized with key reuse (MFA-KR)": {"mixer": Factorized, "query_rank": 8, "key_reuse": True},
}


def test_the_docs_say_what_is_kept() -> None:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in DOCS.read_text().splitlines()]
    table = {row[0]: row for row in rows if row[0] in KINDS and len(row) == 4}
    assert table.keys() == KINDS.keys()
    for name, mixer in KINDS.items():
        _, _, numbers, size = table[name]
        assert int(numbers.rpartition("=")[2]) == mixer.cached_width, name
        assert int(size.replace(",", "")) == 2 * mixer.cached_width, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_the_pool_allocates_what_the_formula_says(name: str, dtype: torch.dtype) -> None:
    config = small_config(layers=3, **SMALL[name])
    model = Decoder(config)
    layers = [cast(Layer, layer).attention.cache for layer in model.layers.values()]
    pool = CachePool(layers, blocks=5, block=4, dtype=dtype, device=torch.device("cpu"))
    storages = {view.untyped_storage().data_ptr(): view for layer in range(3) for view in pool.tensors(layer)}
    allocated = sum(view.dtype.itemsize * view.numel() for layer in range(3) for view in pool.tensors(layer))
    assert allocated == 5 * 4 * 3 * dtype.itemsize * config.layers[0].mixer.cached_width
    assert block_bytes(layers, 4, dtype.itemsize) * 5 == allocated
    assert len(storages) == 1, "tensors of one shape lie in one"
