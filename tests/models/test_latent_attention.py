"""Latent attention: its two forms are one function, and gradients go through what keys are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.reference_attention import BOUNDARIES, SIBLINGS, TREES, ReferenceAttention
from builders.small_config import small_config
from builders.tiny_adapters import adapter_set, perturb
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.layer_types import Keys
from danlu.models import attend as attend_module
from danlu.models.attend import BlockwiseAttention, PackedAttention, absorbed_keys
from danlu.models.decoder import Decoder
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.initialize import initialize
from danlu.models.latent_attention import Absorbed, LatentAttention
from danlu.models.mixer_spec import Latent
from danlu.recipe.sections import Lora

SIZES: dict[str, Any] = {
    "mixer": Latent,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "layers": 1,
}
POSITIONS = torch.cat([torch.arange(stop - start) for start, stop in itertools.pairwise(BOUNDARIES)])


def tree_positions() -> Tensor:
    """[T] int64: of each token of `TREES` on its path."""
    ends: list[int] = []
    positions = []
    for parent, start, stop in TREES:
        before = 0 if parent < 0 else ends[parent]
        ends.append(before + stop - start)
        positions.append(torch.arange(before, ends[-1]))
    return torch.cat(positions)


def decoder(dtype: torch.dtype = torch.float64, **changes: Any) -> Decoder:
    model = Decoder(small_config(**{**SIZES, **changes}))
    initialize(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention" in name and parameter.ndim == 2:
                parameter.mul_(4)  # so that scores are of some size
    return model.to(dtype)


def weighted(hidden: Tensor) -> Tensor:
    """A sum whose gradient the last norm does not take away."""
    return (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)).sum()


class OverStored:
    """Attention over what is stored, by one dense mask: the absorbed form written out."""

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        self.reference = ReferenceAttention(boundaries)
        self.calls = 0

    def __call__(self, layer: int, q: Tensor, keys: Keys, **options: Any) -> Tensor:
        assert keys.absorb is not None
        self.calls += 1
        absorbed = Keys(absorbed_keys(keys.stored, keys.absorb))
        return keys.absorb.outputs(self.reference(layer, keys.absorb.queries(q), absorbed, **options))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("rank", [None, 10])
def test_the_expanded_form_is_the_absorbed_one(dtype: torch.dtype, limit: float, rank: int | None) -> None:
    model = decoder(dtype, q_lora_rank=rank)
    tokens = torch.arange(40) % 61
    found = []
    for attend in (ReferenceAttention(BOUNDARIES), OverStored(BOUNDARIES)):
        hidden = model(tokens, POSITIONS, attend, dtype)  # type: ignore[arg-type]
        found.append([hidden, *torch.autograd.grad(weighted(hidden), list(model.layers.parameters()))])
    for absorbed, expanded in zip(found[1], found[0], strict=True):
        assert (absorbed - expanded).abs().max() <= limit * expanded.abs().max()
    # Negative control: values of other features of the latent.
    attention = model.layers["0"].attention
    assert isinstance(attention, LatentAttention)
    rolled = replace(attention.spec, qk_nope_head_dim=5, v_head_dim=8)
    attention.spec, spec = rolled, attention.spec
    broken = Absorbed(attention)
    attention.spec = spec
    q = torch.randn(4, 4, 10, dtype=dtype)
    assert not torch.allclose(
        broken.outputs(q.new_ones(4, 4, 12))[..., :7], Absorbed(attention).outputs(q.new_ones(4, 4, 12))
    )


def test_the_absorbed_form_has_the_adapter_of_what_it_absorbs() -> None:
    """What expands the latent is absorbed while tokens are generated: with its adapter, or another model answers."""
    model = decoder(torch.float32)
    tokens = torch.arange(40) % 61

    def hidden(attend: Any) -> Tensor:
        with torch.no_grad():
            return model(tokens, POSITIONS, attend, torch.float32)

    bare = hidden(OverStored(BOUNDARIES))
    adapters = adapter_set(model)
    adapters.add("made", Lora(rank=3, targets=["kv_b_proj"]))
    perturb(adapters, "made")
    expanded, absorbed = hidden(ReferenceAttention(BOUNDARIES)), hidden(OverStored(BOUNDARIES))
    assert (absorbed - expanded).abs().max() <= 2e-5 * expanded.abs().max()
    assert (absorbed - bare).abs().max() > 1e-2 * expanded.abs().max()  # the control: without it


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("trees", [(), TREES])
def test_packed_equals_a_dense_mask(trees: Any, exact: bool) -> None:
    """With `exact` values are those of the absorbed form and gradients those of the expanded one."""
    model = decoder()
    tokens, positions = torch.arange(40) % 61, tree_positions() if trees else POSITIONS
    found = []
    kind = BlockwiseAttention if exact else PackedAttention
    for attend in (kind(BOUNDARIES, trees), ReferenceAttention(BOUNDARIES, trees)):
        hidden = model(tokens, positions, attend, torch.float64)
        found.append([hidden, *torch.autograd.grad(weighted(hidden), list(model.layers.parameters()))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    if trees:  # negative control
        wrong = model(tokens, positions, kind(BOUNDARIES, SIBLINGS), torch.float64)
        assert not torch.allclose(wrong, found[1][0])


def test_exact_training_is_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not with an adapter on the matrix that is absorbed, whose dropout a merged one has not."""
    model, calls = decoder(torch.float32), []
    queries = Absorbed.queries
    monkeypatch.setattr(Absorbed, "queries", lambda self, q, **more: calls.append(more) or queries(self, q, **more))
    tokens = torch.arange(40) % 61
    plain = model(tokens, POSITIONS, BlockwiseAttention(BOUNDARIES))
    assert calls == [{"exact": True}]
    monkeypatch.setattr(Absorbed, "merges_adapter", True)
    expanded = model(tokens, POSITIONS, BlockwiseAttention(BOUNDARIES))
    assert len(calls) == 1
    torch.testing.assert_close(plain, expanded, rtol=1e-4, atol=1e-5)
    assert attend_module.exact_absorb(Keys((plain,), None, None)) is None


def test_which_form_takes_less() -> None:
    """Of DeepSeek-V3, by multiplications of one head: a key expanded costs 512 x 256, a query and a key 320 against
    1088 multiplications."""
    spec = Latent(128, 512, 128, 128, rope=decoder().config.ropes[0].__class__(1e4, 64, 4096))
    attention = LatentAttention.__new__(LatentAttention)
    torch.nn.Module.__init__(attention)
    attention.spec = spec
    few = Absorbed(attention).fewest_expanded
    expanded, absorbed = (lambda n: 512 * 256 + n * 320), (lambda n: n * 1088)
    assert absorbed(few - 1) <= expanded(few - 1) and expanded(few) < absorbed(few)


def test_sizes_that_cannot_be_are_refused(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    values = tiny_values("deepseek-v3")
    with pytest.raises(ModelError, match="kv_lora_rank is 0: it must be at least 1"):
        read_config_values({**values, "kv_lora_rank": 0})
    with pytest.raises(ModelError, match="rotary embedding turns pairs of features, but 7 of head_dim 7"):
        read_config_values({**values, "qk_rope_head_dim": 7})
    with pytest.raises(ModelError, match="rotary scaling 'dynamic' is not supported for this family"):
        read_config_values({**values, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})


def test_kimi_k2_is_read_as_deepseek_v3(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    values = tiny_values("deepseek-v3")
    kimi = read_config_values({**values, "model_type": "kimi_k2"})
    assert kimi == read_config_values(values)
    assert config_values(kimi, torch_dtype="bfloat16")["model_type"] == "deepseek_v3"
