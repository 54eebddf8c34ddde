"""Attention with sinks and output gates against transformers' modules: gpt-oss and Qwen3-Next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.small_config import small_config
from torch import Tensor, nn

from danlu.models import attention_kernels
from danlu.models.attend import BlockwiseAttention, PackedAttention, visible
from danlu.models.attention import Attention
from danlu.models.decoder import Decoder

LENGTH = 33


def decoder(**changes: Any) -> tuple[Decoder, Attention]:
    """A decoder of one layer, in float64, and its attention."""
    model = Decoder(small_config(layers=1, **changes)).double()
    attention = model.layers["0"].attention
    assert isinstance(attention, Attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model, attention


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(LENGTH, 32, generator=generator, dtype=torch.float64).requires_grad_()


def hidden(window: int | None) -> Tensor:
    """[1, 1, T, T]: -inf where a query does not see a key."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    return mask.masked_fill_(~visible(LENGTH, LENGTH, window, torch.device("cpu")), float("-inf"))[None, None]


def with_gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("short", [0, 768])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_is_that_of_gpt_oss(
    window: int | None, exact: bool, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    monkeypatch.setattr(attention_kernels, "SHORT_DOCUMENT", short)
    model, attention = decoder(windows=(window,), sinks=True, qkv_bias=True, o_bias=True)
    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        attention_bias=True, sliding_window=window or 1, attn_implementation="eager",
        layer_types=["full_attention" if window is None else "sliding_attention"],
    )  # fmt: skip
    twin = GptOssAttention(config, 0).double()
    missing, unexpected = twin.load_state_dict(attention.state_dict(), strict=True)
    assert not missing and not unexpected
    x, rotations = inputs(), model.rotations(torch.arange(LENGTH), torch.float64)
    cos, sin = (table[None, :, :4] for table in rotations[0][:2])
    want = with_gradients(
        twin(x.unsqueeze(0), (cos, sin), hidden(window))[0].squeeze(0),
        [x, *(twin.get_parameter(name) for name, _ in attention.named_parameters())],
    )
    attend = (BlockwiseAttention if exact else PackedAttention)((0, LENGTH))
    got = with_gradients(attention(x, rotations, attend), [x, *attention.parameters()])
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-10)
    # Negative control: another head's sink.
    assert attention.sinks is not None
    with torch.no_grad():
        attention.sinks.copy_(attention.sinks.roll(1))
    assert not torch.allclose(attention(x, rotations, attend), want[0])


def test_the_output_gate_is_that_of_qwen3_next() -> None:
    """Whose q_proj makes queries and gates, of each head one behind the other."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    model, attention = decoder(output_gate=True, qk_norm="head")
    config = Qwen3NextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1,
        rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    twin = Qwen3NextAttention(config, 0).double()
    values = attention.state_dict()
    queries, gates = (values.pop(f"{name}.weight").view(4, 8, 32) for name in ("q_proj", "gate_proj"))
    values["q_proj.weight"] = torch.cat((queries, gates), dim=1).flatten(0, 1)
    for name in ("q_norm.weight", "k_norm.weight"):
        values[name] = values[name] - 1  # there stored as differences from one
    twin.load_state_dict(values)
    x, rotations = inputs(), model.rotations(torch.arange(LENGTH), torch.float64)
    cos, sin = (table.unsqueeze(0) for table in rotations[0][:2])
    want = with_gradients(twin(x.unsqueeze(0), (cos, sin), hidden(None))[0].squeeze(0), [x])
    got = with_gradients(attention(x, rotations, PackedAttention((0, LENGTH))), [x])
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)  # norms there are made in float32
    assert isinstance(attention.gate_proj, nn.Module)  # negative control: the gate the other way round
    weight = attention.gate_proj.get_parameter("weight")
    with torch.no_grad():
        weight.mul_(-1)
    assert not torch.allclose(attention(x, rotations, PackedAttention((0, LENGTH))), want[0])
