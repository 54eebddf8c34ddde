"""Factorized attention against its equations, written out head by head and token by token in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.reference_attention import BOUNDARIES
from builders.small_config import small_config
from torch import Tensor

from danlu.core.errors import ModelError, RecipeError
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.factorized_attention import FactorizedAttention
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import load
from danlu.models.mixer_spec import Factorized
from danlu.models.presets import from_scratch
from danlu.models.rope import rotary_tables
from danlu.models.saving import save
from danlu.recipe.sections import Model


def decoder(**changes: Any) -> Decoder:
    model = Decoder(small_config(mixer=Factorized, **{"layers": 1, "query_rank": 8, **changes}))
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model.double()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = len(x) // 2
    return x * cos + torch.cat((-x[half:], x[:half])) * sin


def written_out(attention: FactorizedAttention, x: Tensor) -> Tensor:
    """o_t = sum over heads of O_h sum over s of softmax(q_th . k_s / sqrt(C)) v_s, with q_th = Q_h S_q x_t."""
    tokens, width = len(x), attention.head_dim
    assert attention.rope is not None
    tables = rotary_tables(attention.rope, torch.arange(tokens)).to(torch.float64)
    of_heads = attention.q_b_proj.weight.view(-1, width, attention.q_b_proj.shape[1])  # [H, C, Q]
    outputs = attention.o_proj.weight.view(len(x[0]), -1, width)  # [D, H, C]
    keys, values = [], []
    for t in range(tokens):
        k = attention.k_proj.weight @ x[t]
        if attention.key_reuse is None:
            v = attention.v_proj.weight @ x[t]
        else:  # (I + diag(alpha) N) k
            whole = torch.eye(width).double() + torch.diag(attention.key_reuse_gate) @ attention.key_reuse.weight
            v = whole @ k
        keys.append(rotated(k, tables.cos[t], tables.sin[t]))
        values.append(v)
    rows = []
    for t in range(tokens):
        shared = attention.q_a_proj.weight @ x[t]
        if attention.q_a_norm is not None:
            shared = shared / (shared.square().mean() + attention.q_a_norm.eps).sqrt() * attention.q_a_norm.weight
        row = torch.zeros_like(x[t])
        for h in range(len(of_heads)):
            q = rotated(of_heads[h] @ shared, tables.cos[t], tables.sin[t])
            scores = torch.stack([q @ keys[s] / math.sqrt(width) for s in range(t + 1)])
            shares = scores.softmax(0)
            row = row + outputs[:, h] @ sum(shares[s] * values[s] for s in range(t + 1))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "changes", [{}, {"key_reuse": True}, {"query_rank": 12, "query_norm": True}, {"key_reuse": True, "heads": 7}]
)
def test_it_is_what_its_equations_say(changes: dict[str, Any]) -> None:
    model = decoder(**changes)
    attention = model.layers["0"].attention
    assert isinstance(attention, FactorizedAttention)
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    rotations = model.rotations(torch.arange(9), torch.float64)
    found = []
    for out in (attention(x, rotations, PackedAttention((0, 9))), written_out(attention, x)):
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        found.append([out, *torch.autograd.grad((out * weight).sum(), [x, *attention.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)  # tables are made in float32
    if "key_reuse" in changes:  # negative control: the value of a rotated key
        k = attention.k_proj(x).unsqueeze(1)
        keys, values = attention._of_keys(rotations[0], (k,))
        _, of_rotated = attention._of_keys(None, (keys,), torch.arange(9))
        assert not torch.allclose(values, of_rotated)


def test_key_reuse_starts_with_values_that_are_keys() -> None:
    model = Decoder(small_config(mixer=Factorized, query_rank=8, key_reuse=True, layers=1))
    initialize(model, 0)
    attention = model.layers["0"].attention
    assert isinstance(attention, FactorizedAttention)
    assert attention.key_reuse_gate.abs().max() == 0 < attention.key_reuse.weight.abs().max()
    k = torch.randn(5, 1, 8)
    keys, values = attention._of_keys(None, (k,), torch.arange(5))
    assert torch.equal(values, k) and not torch.equal(keys, k)


@pytest.mark.parametrize("key_reuse", [False, True])
def test_a_model_from_scratch_is_written_and_read(key_reuse: bool, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    given = {"model_type": "mfa", **sizes, "num_attention_heads": 6, "head_dim": 16, "key_reuse": key_reuse}
    config = from_scratch(Model(config=given), 61)
    assert read_config_values(config_values(config, torch_dtype="float32")) == config
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Factorized) and (mixer.heads, mixer.query_rank, mixer.key_reuse) == (6, 16, key_reuse)
    model = Decoder(config)
    initialize(model, 3)
    save(model, tmp_path)
    again = load(tmp_path)
    tokens, positions = torch.arange(40) % 61, torch.arange(40)
    want = model(tokens, positions, PackedAttention(BOUNDARIES))
    assert torch.equal(again(tokens, positions, PackedAttention(BOUNDARIES)), want)


def test_what_cannot_be_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    given = {"model_type": "mfa", **sizes, "num_attention_heads": 6, "vocab_size": 61, "head_dim": 16}
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert read_config_values({**given, **dynamic}).rotates_by_length
    with pytest.raises(ModelError, match=r"key reuse keeps keys as they are before rotation.*key_reuse: false"):
        read_config_values({**given, **dynamic, "key_reuse": True})
    with pytest.raises(ModelError, match="query_rank is 0: it must be at least 1"):
        read_config_values({**given, "query_rank": 0})


def test_prefixes_are_refused() -> None:
    from danlu.adapters.targets import choose
    from danlu.models.sites import sites_of
    from danlu.recipe import sections

    sites = sites_of(decoder().config)
    with pytest.raises(RecipeError, match=r"a prefix takes the place of keys and values of heads.*Use kind: prompt"):
        choose(sites, sections.Prefix(tokens=3))
    assert choose(sites, sections.Prompt(tokens=3))
    names = {site.name for site in choose(sites, sections.Lora(targets=["attention"]))}
    assert names == {f"layers.0.attention.{name}" for name in ("q_a_proj", "q_b_proj", "k_proj", "v_proj", "o_proj")}
