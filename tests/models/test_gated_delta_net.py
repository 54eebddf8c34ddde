"""Linear attention as a part of a decoder: against transformers, packed and in trees, and what is predicted of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.small_config import small_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.errors import ModelError, RecipeError
from danlu.core.types import Branch
from danlu.models.attend import BlockwiseAttention, PackedAttention
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.gated_delta_net import GatedDeltaNet
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.mixer_spec import Delta
from danlu.models.saving import save
from danlu.planning.flops import DecoderFlops

TREE = (Branch(-1, 0, 40), Branch(0, 40, 47), Branch(0, 47, 90), Branch(2, 90, 95), Branch(2, 95, 110))
PATHS = (((0, 40), (40, 47)), ((0, 40), (47, 90), (90, 95)), ((0, 40), (47, 90), (95, 110)))


def decoder(**changes: Any) -> Decoder:
    """Two layers of linear attention and one by heads, which make each other's outputs differ visibly."""
    model = Decoder(small_config(layers=3, deltas=(0, 2), **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def copied_from(theirs: Any, spec: Delta, config: ModelConfig) -> GatedDeltaNet:
    """The module with the weights of transformers'."""
    mine = GatedDeltaNet(config, spec, 0)
    widths = (spec.key_width, spec.key_width, spec.value_width)
    with torch.no_grad():
        for letter, weight, conv in zip(
            "qkv", theirs.in_proj_qkv.weight.split(widths), theirs.conv1d.weight.split(widths), strict=True
        ):
            mine.get_parameter(f"{letter}_proj.weight").copy_(weight)
            mine.get_parameter(f"{letter}_conv1d.weight").copy_(conv)
        for own, other in (("gate", "z"), ("b", "b"), ("a", "a")):
            mine.get_parameter(f"{own}_proj.weight").copy_(theirs.get_parameter(f"in_proj_{other}.weight"))
        mine.A_log.copy_(theirs.A_log)
        mine.dt_bias.copy_(theirs.dt_bias)
        mine.o_norm.weight.copy_(theirs.norm.weight)
        mine.o_proj.weight.copy_(theirs.out_proj.weight)
    return mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

    torch.manual_seed(0)
    spec = Delta(heads=4, key_heads=2, key_dim=16, value_dim=12)
    theirs = Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(
            hidden_size=32,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=12,
            num_hidden_layers=1,
        ),
        0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    mine = copied_from(theirs, spec, small_config(deltas=(0,), norm_offset=1.0, rms_norm_eps=1e-6))
    if dtype != torch.float32:
        theirs = theirs.to(dtype)
    x = torch.randn(90, 32)
    own_x, other_x = x.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
    y = mine(own_x, (), PackedAttention((0, 90)))
    expected = theirs(other_x[None])[0]
    assert y.dtype == dtype and expected.std() > 0.1
    near: dict[str, Any] = {"atol": 5e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    torch.testing.assert_close(y, expected, **near)
    weights = torch.randn(90, 32)
    (y.float() * weights).sum().backward()
    (expected.float() * weights).sum().backward()
    if dtype == torch.float32:
        torch.testing.assert_close(own_x.grad, other_x.grad, atol=2e-5, rtol=1e-4)
        for own, other in ((mine.A_log, theirs.A_log), (mine.dt_bias, theirs.dt_bias)):
            torch.testing.assert_close(own.grad, other.grad, atol=2e-5, rtol=1e-4)
        convs = [conv.weight.grad for conv in (mine.q_conv1d, mine.k_conv1d, mine.v_conv1d)]
        torch.testing.assert_close(torch.cat(convs), theirs.conv1d.weight.grad, atol=5e-5, rtol=1e-4)
    assert mine.A_log.grad is not None and mine.A_log.grad.dtype == torch.float32


def passed(model: Decoder, tokens: Tensor, positions: Sequence[int], attend: Any) -> tuple[Tensor, list[Tensor]]:
    """Hidden states, and the gradient of a sum over them of each parameter but the head's."""
    model.zero_grad()
    hidden = model(tokens, torch.tensor(positions), attend, torch.float64)
    weights = torch.randn(hidden.shape[1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (hidden * weights * (1 + tokens[:, None] % 3)).sum().backward()
    return hidden.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_branches_are_what_whole_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder().double()
    tokens = torch.randint(61, (110,), generator=torch.Generator().manual_seed(1))
    positions = [*range(40), *range(40, 47), *range(40, 83), *range(83, 88), *range(83, 98)]
    hidden, _ = passed(model, tokens, positions, PackedAttention((0, 110), TREE))
    for path in PATHS:
        rows = torch.cat([torch.arange(*part) for part in path])
        alone, _ = passed(model, tokens[rows], range(len(rows)), PackedAttention((0, len(rows))))
        torch.testing.assert_close(hidden[rows], alone, atol=1e-12, rtol=0)
    flat, _ = passed(model, tokens, positions, PackedAttention((0, 110)))
    assert (flat - hidden)[47:].abs().max() > 1e-2


def test_packed_documents_are_documents_alone_with_their_gradients() -> None:
    model = decoder().double()
    lengths, boundaries = (3, 70, 1, 130), (0, 3, 73, 74, 204)
    tokens = torch.randint(61, (204,), generator=torch.Generator().manual_seed(2))
    positions = [position for length in lengths for position in range(length)]
    hidden, gradients = passed(model, tokens, positions, PackedAttention(boundaries))
    summed = [torch.zeros_like(each) for each in gradients]
    for start, stop in itertools.pairwise(boundaries):
        alone, parts = passed(model, tokens[start:stop], range(stop - start), PackedAttention((0, stop - start)))
        torch.testing.assert_close(hidden[start:stop], alone, atol=1e-12, rtol=0)
        for total, part in zip(summed, parts, strict=True):
            total += part
    for mine, total in zip(gradients, summed, strict=True):
        torch.testing.assert_close(mine, total, atol=1e-9, rtol=1e-9)
    joined, _ = passed(model, tokens, positions, PackedAttention((0, 204)))
    assert (joined - hidden).abs().max() > 1e-2


def test_parameters_are_those_of_the_spec() -> None:
    model = decoder()
    assert {name: tuple(each.shape) for name, each in model.named_parameters()} == parameter_shapes(model.config)


def test_first_values_forget_at_all_rates() -> None:
    config = small_config(deltas=(0, 1), norm_offset=1.0, hidden_size=32)
    model = build(config)
    initialize(model, 0)
    net = model.layers["0"].attention
    assert isinstance(net, GatedDeltaNet)
    steps = torch.nn.functional.softplus(net.dt_bias.detach())
    assert 1e-3 <= steps.min() < steps.max() <= 0.1 + 1e-6
    assert net.A_log.max() <= torch.tensor(16.0).log() and torch.equal(net.o_norm.weight, torch.ones(6))
    assert net.q_conv1d.weight.abs().max() <= 0.5 < 4 * net.q_conv1d.weight.std()
    assert not torch.equal(net.dt_bias, model.layers["1"].get_parameter("attention.dt_bias"))


def test_operations_are_those_of_the_recurrence() -> None:
    """Three products with each state for each token, whatever the documents."""
    config = small_config(layers=2, deltas=(0, 1))
    weights = DecoderFlops(config).weights
    for lengths in ((10,), (4, 6)):
        assert DecoderFlops(config).forward(lengths, 0) == 10 * (2 * weights + 2 * 6 * 4 * 8 * 6)


def test_exact_numerics_are_refused() -> None:
    model = decoder()
    with pytest.raises(ModelError, match="numerics: exact does not hold for linear attention"):
        model(torch.arange(5), torch.arange(5), BlockwiseAttention((0, 5)))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"linear_num_value_heads": 5, "linear_num_key_heads": 2}, "5 value heads cannot share 2 key heads evenly"),
    ({"linear_conv_kernel_dim": 0}, "conv_width is 0: it must be at least 1"),
    ({"full_attention_interval": 0}, "full_attention_interval: 0 is no number of layers"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types: expected layers of both kinds"),
    ({"layer_types": ["mamba"] * 4}, "layer_types: not supported: mamba"),
    ({"layer_types": ["full_attention"]}, "layer_types: expected a list with one entry for each of 4 layers"),
    ({"attention_bias": True}, "attention_bias: a gate of attention with a bias is not supported"),
    ({"attn_output_gate": False}, "attn_output_gate: transformers computes this family with the gate alone"),
    ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: linear attention is computed with silu alone"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_configs_that_cannot_be_built_are_refused(
    changes: dict[str, Any], message: str, tiny_values: Callable[[str], dict[str, Any]]
) -> None:
    with pytest.raises(ModelError, match=message):
        read_config_values({**tiny_values("qwen3.5"), **changes})


def test_a_config_that_its_family_cannot_say_is_not_written(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    config = read_config_values(tiny_values("qwen3.5"))
    narrower = config.with_layers(
        lambda layer: layer if layer is not config.layers[0] else type(layer)(Delta(2, 2, 8, 12), layer.feed)
    )
    with pytest.raises(ModelError, match="mixer"):
        config_values(narrower, torch_dtype="float32")


def test_a_prefix_has_no_place_in_linear_attention(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    from danlu.adapters.targets import choose
    from danlu.models.sites import sites_of
    from danlu.recipe import sections

    sites = sites_of(read_config_values(tiny_values("qwen3.5")))
    with pytest.raises(RecipeError, match="prefix stands in the place of keys and values"):
        choose(sites, sections.Prefix(tokens=2))


def test_layers_that_predict_further_tokens_reach_the_result(
    tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    values = {**tiny_values("qwen3.5"), "mtp_num_hidden_layers": 1}
    model = build(read_config_values(values))
    initialize(model, 0)
    save(model, tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(values))
    further = {"mtp.fc.weight": torch.randn(3, 5).bfloat16(), "mtp.norm.weight": torch.randn(5)}
    file = tmp_path / "base" / "model.safetensors"
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    save(load(tmp_path / "base"), tmp_path / "result", origin=tmp_path / "base")
    result = load_file(tmp_path / "result" / "model.safetensors")
    assert result.keys() == load_file(file).keys()
    assert all(
        torch.equal(result[name], tensor) and result[name].dtype == tensor.dtype for name, tensor in further.items()
    )
    assert json.loads((tmp_path / "result" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
