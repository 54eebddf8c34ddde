"""Kernels that only a GPU has: stand-ins on the CPU, which compute what the kernel promises, against a dense mask."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.reference_attention import (
    BOUNDARIES,
    CHAINS,
    ROOTS,
    SIBLINGS,
    TREES,
    ReferenceAttention,
    masked_attention,
)
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Branch
from danlu.models import attend, attention_kernels
from danlu.models.attend import PackedAttention
from danlu.models.attention_kernels import EVERY, Flex, Kernels, Varlen, VarlenTiles, documents_mask, kernels_of
from danlu.models.segments import documents_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:.torch.jit.script_method")

Kernel = Callable[..., Tensor]


def inputs(kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(40, 4, 16), (40, kv_heads, 16), (40, kv_heads, 16)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def results(strategy: Any, tensors: list[Tensor], window: int | None, softcap: float | None) -> list[Tensor]:
    out = strategy(0, tensors[0], Keys(tuple(tensors[1:])), scale=0.3, window=window, softcap=softcap)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), tensors)]


def flash(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, scale: float, left: int, right: int) -> Tensor:
    """What flash attention computes: each query sees `left` tokens before it and `right` after it, -1 for all."""
    assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == len(q)
    place = torch.arange(len(q))
    document = torch.bucketize(place, cu[1:].long(), right=True)
    ahead = place[None, :] - place[:, None]
    mask = document[:, None] == document[None, :]
    mask &= (ahead <= right) if right >= 0 else True
    mask &= (ahead >= -left) if left >= 0 else True
    return masked_attention(q, k, v, mask, scale=scale, softcap=None)


def equal_heads(q: Tensor, k: Tensor) -> None:
    assert q.shape[1] == k.shape[1], "this version knows no grouped heads"


class Versions:
    """`varlen_attn` as torch's versions have it, and how often each was called."""

    calls = 0

    def torch_2_10(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        is_causal: bool = False, return_aux: Any = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        equal_heads(query, key)
        assert is_causal and scale is not None
        return self._count(query, key, value, cu_seq_q, max_q, scale, (-1, 0))

    def torch_2_11(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        equal_heads(query, key)
        assert scale is not None
        return self._count(query, key, value, cu_seq_q, max_q, scale, window_size)

    def torch_2_13(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not enable_gqa:
            equal_heads(query, key)
        assert scale is not None
        return self._count(query, key, value, cu_seq_q, max_q, scale, window_size)

    def _count(
        self, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, window: tuple[int, int]
    ) -> Tensor:
        self.calls += 1
        assert longest == 17, "the longest document"
        return flash(q, k, v, cu, scale, *window)


@pytest.mark.parametrize("version", ["torch_2_10", "torch_2_11", "torch_2_13"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (3, None), (100, None), (None, 2.0)])
def test_the_variable_length_kernel_is_called_as_it_wants(
    version: str, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    versions, tensors = Versions(), inputs(kv_heads)
    packed = PackedAttention(BOUNDARIES, kernels=Kernels(varlen=Varlen(getattr(versions, version), EVERY)))
    want = results(ReferenceAttention(BOUNDARIES), tensors, window, softcap)
    for got, expected in zip(results(packed, tensors, window, softcap), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    takes = softcap is None and (window is None or version != "torch_2_10")
    assert versions.calls == int(takes), "what it cannot do is done in blocks"
    # Negative control: another window.
    other = results(packed, tensors, 2, softcap)
    assert not torch.allclose(other[0], want[0])


def test_the_variable_length_kernel_gets_what_it_takes_only() -> None:
    varlen = Varlen(Versions().torch_2_13)
    shapes = {(torch.bfloat16, 64): True, (torch.float16, 256): True, (torch.float32, 64): False}
    shapes |= {(torch.bfloat16, 20): False, (torch.bfloat16, 264): False}
    for (dtype, width), takes in shapes.items():
        q = torch.zeros(1, 1, width, dtype=dtype)
        assert varlen.takes(q, q, None, None) == takes
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    assert not varlen.takes(q, q, None, 30.0)
    assert varlen.takes(q, q[..., :40], None, None) and not varlen.takes(q[..., :40], q, None, None)


def test_the_installed_kernel_has_a_signature_that_is_known() -> None:
    from torch.nn.attention.varlen import varlen_attn

    varlen = Varlen(varlen_attn)
    assert varlen.windows or not varlen.grouped_heads
    assert {"scale", "cu_seq_q"} <= attention_kernels._parameters(varlen_attn)


def dense_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Kernel | None,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    kernel_options: Mapping[str, Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """What flex attention computes, over whole scores, with the blocks of its mask and what the mask says in them."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    groups, total = q.shape[1] // k.shape[1], q.shape[2]
    # On a GPU torch then takes a kernel for decoding, which fails for many queries of one key/value head.
    assert total >= 128 or (kernel_options or {}).get("BACKEND") == "TRITON", "left to choose a kernel of short packs"
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    zero, i, j = torch.tensor(0), torch.arange(total)[:, None], torch.arange(total)[None, :]
    scores = q @ k.transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores, zero, zero, i, j)
    hidden = ~(block_mask.mask_mod(zero, zero, i, j) & by_blocks(block_mask, total))
    scores = scores.masked_fill(hidden, float("-inf"))
    out = scores.softmax(-1) @ v
    return (out, scores.logsumexp(-1)) if return_lse else out


def by_blocks(mask: Any, total: int) -> Tensor:
    """[T, T]: in which blocks a flex kernel looks."""
    dense = mask.to_dense()[0, 0].bool()
    size = attention_kernels.FLEX_BLOCK
    return dense.repeat_interleave(size, 0).repeat_interleave(size, 1)[:total, :total]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, 2.0), (3, 0.5), (100, 1.0), (None, None)])
def test_softcaps_go_through_flex_attention(
    kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "FLEX_BLOCK", 4)
    calls: list[int] = []

    def flex(*args: Any, **options: Any) -> Tensor:
        calls.append(1)
        return dense_flex(*args, **options)

    tensors = inputs(kv_heads)
    packed = PackedAttention(BOUNDARIES, kernels=Kernels(flex=Flex(flex, EVERY)))
    want = results(ReferenceAttention(BOUNDARIES), tensors, window, softcap)
    for got, expected in zip(results(packed, tensors, window, softcap), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    assert len(calls) == (softcap is not None)
    assert not torch.allclose(results(packed, tensors, 2, 3.0)[0], want[0])  # negative control
    narrow, wide = torch.zeros(1, 1, 8), torch.zeros(1, 1, 16)
    assert not Flex(flex, EVERY).takes(narrow, wide) and not Flex(flex, EVERY).takes(wide, narrow)


@pytest.mark.parametrize("trees", [(), TREES])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 1.0)])
def test_sinks_go_through_flex_attention(
    window: int | None, softcap: float | None, trees: tuple[Branch, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "FLEX_BLOCK", 4)
    tensors = inputs(2)
    sinks = torch.tensor([0.5, -1.0, 2.0, 30.0], dtype=torch.float64, requires_grad=True)
    varlen = Varlen(Versions().torch_2_13, EVERY)
    kernels = Kernels(varlen=varlen, flex=Flex(dense_flex, EVERY))  # of which the first knows no sinks
    found = []
    for strategy in (PackedAttention(BOUNDARIES, trees, kernels), ReferenceAttention(BOUNDARIES, trees)):
        keys = Keys((tensors[1], tensors[2][..., :6]))
        out = strategy(0, tensors[0], keys, scale=0.3, window=window, softcap=softcap, sinks=sinks)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*tensors, sinks])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (9, 1.0), (100, None)])
def test_trees_go_through_flex_attention_and_packs_without_them_do_not(
    kv_heads: int, window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "FLEX_BLOCK", 4)
    versions, tensors = Versions(), inputs(kv_heads)
    kernels = Kernels(varlen=Varlen(versions.torch_2_13, EVERY), flex=Flex(dense_flex, EVERY))
    want = results(ReferenceAttention(BOUNDARIES, TREES), tensors, window, softcap)
    for got, expected in zip(
        results(PackedAttention(BOUNDARIES, TREES, kernels), tensors, window, softcap), want, strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
    assert versions.calls == 0
    assert not torch.allclose(
        results(PackedAttention(BOUNDARIES, SIBLINGS, kernels), tensors, window, softcap)[0], want[0]
    )
    for chains in (ROOTS, CHAINS):  # which are documents
        results(PackedAttention(BOUNDARIES, chains, kernels), tensors, window, None)
    assert versions.calls == 2


@pytest.mark.parametrize("trees", [(), TREES])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_torchs_own_flex_attention_gives_the_same_values(window: int | None, trees: tuple[Branch, ...]) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    tensors = [x.detach().float() for x in inputs(2)]  # it has no backward pass on CPU
    packed = PackedAttention(BOUNDARIES, trees, Kernels(flex=Flex(flex_attention, EVERY)))
    options = {"scale": 0.3, "window": window, "softcap": None if trees else 2.0}
    want = ReferenceAttention(BOUNDARIES, trees)(0, tensors[0], Keys(tuple(tensors[1:])), **options)  # type: ignore[arg-type]
    torch.testing.assert_close(packed(0, tensors[0], Keys(tuple(tensors[1:])), **options), want, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "softcap"), fast([(None, None), (3, 5.0)], (3, 5.0)))
def test_flex_attention_is_traced_as_a_whole_forward_and_backward(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's front end, as on a GPU, in front of torch's own operators."""
    import torch.nn.attention.flex_attention as torch_flex

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # inductor has no backward pass on a CPU
    torch._dynamo.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    kernels = Kernels(flex=Flex(compiled, EVERY))
    grown = tuple(3 * place for place in BOUNDARIES)
    for boundaries, sinks in itertools.product((BOUNDARIES, grown), (False, True)):
        settings: dict[str, Any] = {"scale": 0.25, "window": window, "softcap": softcap}
        leaves = random_leaves(boundaries[-1], sinks)
        keys = Keys(tuple(leaves[1:3]))
        settings["sinks"] = leaves[3] if sinks else None
        got, wanted = (
            torch.autograd.grad(attend(0, leaves[0], keys, **settings).sin().sum(), leaves)
            for attend in (PackedAttention(boundaries, kernels=kernels), PackedAttention(boundaries))
        )
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(2 * got[0], wanted[0], rtol=1e-4, atol=1e-4)  # control


def random_leaves(total: int, sinks: bool) -> list[Tensor]:
    """q [T, 4, 16], k and v [T, 2, 16], and sinks [4] where they are wanted; all want gradients."""
    generator = torch.Generator().manual_seed(total)
    shapes = [(total, 4, 16), (total, 2, 16), (total, 2, 16), *([(4,)] if sinks else [])]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [None, 1, 130, 300, 2000])
@pytest.mark.parametrize(
    "boundaries", [(0, 1), (0, 128, 256), (0, 5, 6, 300, 700, 1000), (0, 1000), (0, 129, 130, 900)]
)
def test_the_blocks_of_a_mask_are_those_that_torch_finds(boundaries: tuple[int, ...], window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    cpu, total = torch.device("cpu"), boundaries[-1]
    mine = documents_mask(documents_of(boundaries, ()), window, cpu)
    document = torch.bucketize(torch.arange(total), torch.tensor(boundaries[1:]), right=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query - key < window) if window is not None else (query >= 0)
        return (document[query] == document[key]) & (key <= query) & near

    theirs = create_block_mask(sees, None, None, total, total, device="cpu")
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    for counts in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(mine, counts).flatten(), getattr(theirs, counts).flatten())
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    assert torch.equal(mine.mask_mod(i, i, i, j), sees(i, i, i, j))


def branches(*sizes: tuple[int, int]) -> tuple[Branch, ...]:
    """Branches of (parent, tokens)."""
    ends = [0]
    for _, tokens in sizes:
        ends.append(ends[-1] + tokens)
    return tuple(Branch(parent, ends[n], ends[n + 1]) for n, (parent, _) in enumerate(sizes))


@pytest.mark.parametrize("window", [None, 1, 130, 300, 2000])
@pytest.mark.parametrize(
    "trees",
    [
        branches((-1, 300), (0, 128), (0, 500), (-1, 70)),
        branches((-1, 128), (0, 128), (0, 256), (2, 100), (2, 28)),
        branches((-1, 5), (-1, 200), (1, 3), (2, 90), (2, 250), (1, 400), (5, 60)),
    ],
)
def test_the_blocks_of_a_trees_mask_are_those_that_torch_finds(trees: tuple[Branch, ...], window: int | None) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    boundaries = (*(branch.start for branch in trees if branch.parent < 0), trees[-1].stop)
    total, cpu = boundaries[-1], torch.device("cpu")
    mine = documents_mask(documents_of(boundaries, trees), window, cpu)
    dense = ReferenceAttention(boundaries, trees).mask(window, cpu)
    theirs = create_block_mask(lambda b, h, query, key: dense[query, key], None, None, total, total, device="cpu")
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    for counts in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(mine, counts).flatten(), getattr(theirs, counts).flatten())
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    assert torch.equal(mine.mask_mod(i, i, i, j), dense)


def test_grouped_heads_are_repeated_where_no_kernel_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = attend.F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(options["enable_gqa"])
        assert options["enable_gqa"] or q.shape[1] == k.shape[1]
        return real(q, k, v, **options)

    monkeypatch.setattr(attend.F, "scaled_dot_product_attention", watched)
    tensors = inputs(2)
    want = results(ReferenceAttention(BOUNDARIES), tensors, None, None)
    for kernels, grouped in ((Kernels(), True), (Kernels(grouped_heads=()), False)):
        seen.clear()
        for got, expected in zip(
            results(PackedAttention(BOUNDARIES, kernels=kernels), tensors, None, None), want, strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)
        assert seen == [grouped] * 4  # documents


@pytest.mark.parametrize(
    ("capability", "hip", "triton", "varlen", "flex"),
    [
        ((7, 5), None, True, False, False),
        ((8, 0), None, True, True, True),
        ((9, 0), None, False, True, False),
        ((9, 4), "6.4", True, False, False),
    ],
)
def test_what_a_gpu_can_do_follows_from_its_generation(
    capability: tuple[int, int],
    hip: str | None,
    triton: bool,
    varlen: bool,
    flex: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    attention_kernels._cuda_kernels.cache_clear()
    found = kernels_of(torch.device("cuda", 0))
    attention_kernels._cuda_kernels.cache_clear()
    assert ((found.varlen is not None), (found.flex is not None)) == (varlen, flex)
    assert isinstance(found.tiles, VarlenTiles) == varlen == (found.tiles is not None)
    assert found.short_document < 0 and found.document_multiple == 1
    assert (torch.bfloat16 in found.grouped_heads) == varlen and torch.float32 not in found.grouped_heads


def test_other_devices_have_torchs_choice_alone() -> None:
    assert kernels_of(torch.device("meta")) == Kernels()
    cpu = kernels_of(torch.device("cpu"))
    assert cpu.varlen is None and cpu.flex is None and cpu.short_document == attention_kernels.SHORT_DOCUMENT
