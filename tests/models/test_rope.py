from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from danlu.core.errors import ModelError
from danlu.models.hf_rope import RopeRules, read_rope, write_rope
from danlu.models.hf_values import HFValues
from danlu.models.rope import document_lengths, inverse_frequencies, rotary_tables
from danlu.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    ntk_theta,
)

HEAD_DIM = 32
ROPE = Rope(50000.0, HEAD_DIM, 64)

SCALINGS: list[RopeScaling] = [
    LinearScaling(4.0),
    Llama3Scaling(8.0, 1.0, 4.0, 32),
    Llama3Scaling(32.0, 1.0, 4.0, 8192),
    YarnScaling(4.0, 32),
    YarnScaling(40.0, 4096, mscale=0.7, mscale_all_dim=1.3),
    YarnScaling(4.0, 32, attention_factor=1.25, beta_fast=8.0, beta_slow=2.0, truncate=False),
    YarnScaling(0.5, 32),
]


def theirs(rope: Rope, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert rope.scaling is not None
    written = write_rope(rope, HEAD_DIM)
    hf = LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=rope.max_position_embeddings, **written)
    return ROPE_INIT_FUNCTIONS[rope.scaling.kind](hf, "cpu", seq_len=seq_len)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_are_transformers(scaling: RopeScaling, share: float) -> None:
    rope = Rope(50000.0, int(HEAD_DIM * share), 256, scaling)
    expected, attention = theirs(rope)
    assert torch.equal(inverse_frequencies(rope), expected)
    cos, sin, _ = rotary_tables(rope, torch.tensor([0, 1, 2, 700]))
    assert cos.shape == sin.shape == (4, rope.dim)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos[0], torch.full_like(cos[0], attention))
    angles = torch.tensor(700.0) * expected
    torch.testing.assert_close(sin[3], torch.cat((angles, angles)).sin() * attention)
    assert not torch.equal(inverse_frequencies(replace(rope, scaling=None)), expected)


@pytest.mark.parametrize("length", [5, 64, 65, 300])
def test_dynamic_frequencies_follow_the_length_of_the_document(length: int) -> None:
    rope = replace(ROPE, scaling=DynamicScaling(2.0))
    expected, _ = theirs(rope, seq_len=length)
    torch.testing.assert_close(inverse_frequencies(rope, torch.tensor([length]))[0], expected, rtol=1e-6, atol=0)
    assert torch.equal(expected, inverse_frequencies(ROPE)) == (length <= rope.max_position_embeddings)


def test_dynamic_tables_of_a_pack_are_those_of_its_documents_alone() -> None:
    rope = replace(ROPE, scaling=DynamicScaling(2.0))
    lengths = [3, 100, 1, 70]
    alone = [rotary_tables(rope, torch.arange(length))[:2] for length in lengths]
    packed = rotary_tables(rope, torch.cat([torch.arange(length) for length in lengths]))[:2]
    for table, pieces in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(table, torch.cat(pieces), atol=2e-5, rtol=0)  # torch's pow rounds by vector lane
    as_one = rotary_tables(rope, torch.arange(174))
    assert (as_one[0][:3] - packed[0][:3]).abs().max() > 0.05


def test_lengths_are_read_from_positions() -> None:
    positions = torch.tensor([0, 1, 2, 0, 0, 1, 9])
    assert document_lengths(positions).tolist() == [3, 3, 3, 1, 2, 2, 10]


def longrope(dim: int = HEAD_DIM, **settings: float) -> LongRopeScaling:
    short = tuple(1 + 0.01 * pair for pair in range(dim // 2))
    long = tuple(1 + 0.5 * pair for pair in range(dim // 2))
    return LongRopeScaling(short, long, 64, **{"factor": 4.0, **settings})


@pytest.mark.parametrize("settings", [{}, {"attention_factor": 1.3}, {"factor": 1.0}], ids=str)
@pytest.mark.parametrize("length", [5, 64, 65, 300])
def test_longrope_frequencies_follow_the_length_of_the_document(length: int, settings: dict[str, float]) -> None:
    rope = Rope(50000.0, HEAD_DIM, 256, longrope(**settings))
    expected, attention = theirs(rope, seq_len=length)
    assert torch.equal(inverse_frequencies(rope, torch.tensor([length]))[0], expected)
    assert torch.equal(expected, inverse_frequencies(rope)) == (length <= 64)
    assert rope.attention_scaling == attention


def test_longrope_tables_of_a_pack_are_those_of_its_documents_alone() -> None:
    rope = Rope(50000.0, HEAD_DIM, 256, longrope())
    lengths = [3, 100, 64, 65]
    alone = [rotary_tables(rope, torch.arange(length))[:2] for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = rotary_tables(rope, positions)[:2]
    for table, pieces in zip(packed, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(table, torch.cat(pieces), atol=1e-6, rtol=0)
    as_long = rotary_tables(rope, positions, torch.full_like(positions, 65))
    assert torch.equal(as_long.cos[3:103], packed[0][3:103])
    assert (as_long.cos[103:167] - packed[0][103:167]).abs().max() > 0.05


def test_longrope_wants_a_factor_for_each_pair() -> None:
    with pytest.raises(ModelError, match=r"short_factor has 8 factors, and 32 rotated features of a head are 16 pairs"):
        Rope(50000.0, HEAD_DIM, 256, longrope(16))
    with pytest.raises(ModelError, match=r"long_factor has 0\.0: frequencies are divided"):
        LongRopeScaling((1.0,), (0.0,), 64, 4.0)


@pytest.mark.parametrize(
    ("long_factor", "said"),
    [
        ([2.0] * 5, "long_factor has 5 factors, and 12 rotated features of a head are 6 pairs"),
        ([2.0, 0.0] * 3, r"longrope: long_factor is \[2.0, 0.0, .*\], which it cannot be"),
    ],
)
def test_wrong_factors_of_a_folder_are_told_with_their_key(long_factor: list[float], said: str) -> None:
    def read(long_factor: list[float]) -> Rope:
        scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": long_factor}
        values = {"max_position_embeddings": 256, "rope_scaling": scaling, "rope_theta": 50000.0}
        return read_rope(HFValues(values, {}, "model/config.json"), 12, RopeRules())

    with pytest.raises(ModelError, match=f"model/config.json: rope_scaling: {said}"):
        read(long_factor)
    assert read([2.0] * 6).scaling is not None  # control


def test_ntk_slows_the_slowest_pair_by_the_factor_and_leaves_the_fastest() -> None:
    plain = inverse_frequencies(ROPE)
    scaled = inverse_frequencies(replace(ROPE, theta=ntk_theta(ROPE.theta, ROPE.dim, 8.0)))
    assert scaled[0] == plain[0]
    torch.testing.assert_close(scaled[-1], plain[-1] / 8, rtol=1e-6, atol=0)
    assert (scaled[1:] < plain[1:]).all()
    dynamic = replace(ROPE, scaling=DynamicScaling(1.0))  # whose factor 1 has NTK's base for a document of that length
    torch.testing.assert_close(inverse_frequencies(dynamic, torch.tensor([8 * 64]))[0], scaled, rtol=1e-5, atol=0)
    with pytest.raises(ModelError, match="more than one rotated pair"):
        ntk_theta(10000.0, 2, 4.0)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (0.707, 0.707), (1.0, None)])
def test_score_scale_is_deepseeks(mscale: float, mscale_all_dim: float | None) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    yarn = YarnScaling(40.0, 4096, mscale=mscale, mscale_all_dim=mscale_all_dim)
    settings = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": mscale}
    settings |= {} if mscale_all_dim is None else {"mscale_all_dim": mscale_all_dim}
    hf = DeepseekV3Config(
        hidden_size=16, num_attention_heads=2, q_lora_rank=4, kv_lora_rank=4, rope_parameters=settings
    )
    scale = DeepseekV3Attention(hf, 0).scaling * hf.qk_head_dim**0.5
    assert yarn.score_scale == pytest.approx(scale, rel=1e-12)
    assert (yarn.score_scale > 1.1) == (mscale_all_dim is not None)
