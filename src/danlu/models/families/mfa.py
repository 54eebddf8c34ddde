"""Multi-matrix factorization attention (arXiv:2412.19255): danlu's own family, which no class of transformers loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from danlu.models.config import ModelConfig
from danlu.models.families.family import GENERATION_ONLY, Family
from danlu.models.hf_rope import RopeRules, read_rope
from danlu.models.hf_values import HFValues
from danlu.models.layer_spec import LayerSpec
from danlu.models.mixer_spec import Factorized


def read_mfa(hf: HFValues, plain: LayerSpec, layers: int) -> dict[str, Any]:
    head_dim = hf.integer("head_dim")
    mixer = Factorized(
        heads=hf.integer("num_attention_heads"),
        head_dim=head_dim,
        rope=read_rope(hf, head_dim, RopeRules(rotates_part=True)),
        query_rank=hf.integer("query_rank") if "query_rank" in hf else head_dim,
        key_reuse=hf.flag("key_reuse"),
        query_norm=hf.flag("query_norm"),
    )
    return {"layers": (replace(plain, mixer=mixer),) * layers}


def write_mfa(config: ModelConfig) -> dict[str, Any]:
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Factorized), "the family has factorized attention"
    return {"query_rank": mixer.query_rank, "key_reuse": mixer.key_reuse, "query_norm": mixer.query_norm}


FAMILIES: dict[str, Family] = {
    "mfa": Family(
        architecture="MFA",
        architectures=GENERATION_ONLY,
        read=read_mfa,
        write=write_mfa,
        ropes_differ=True,
        defaults={"bos_token_id": None, "eos_token_id": None, "num_key_value_heads": 1},
    )
}
