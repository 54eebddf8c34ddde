"""Counting and balancing of experts against their formulas, token by token and document by document in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from builders.small_experts import DEEPSEEK_V3, MIXTRAL, QWEN2_MOE, small_decoder
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from danlu.memory.layer_plan import LayerPlan
from danlu.memory.recompute import wrap
from danlu.memory.recomputed_function import recomputed_within
from danlu.models import load_balancing
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.experts import MoE
from danlu.models.layer_spec import Experts
from danlu.models.load_balancing import Balancer, Balancing, BatchTokens

LENGTHS = (5, 9, 2)  # of documents; two of them in the first pack
FILLER = 3
COEFFICIENTS = {"sequence": 0.3, "step": 0.5, "z": 0.7}


def batch_of(lengths: Sequence[int] = LENGTHS, *, filler: int = FILLER, factor: float = 2.0) -> BatchTokens:
    """Documents in order, the first two in one pack and each other in its own, and a filler behind them."""
    sizes = [*lengths, filler] if filler else list(lengths)
    boundaries = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
    real = torch.arange(boundaries[-1]) < sum(lengths)
    return BatchTokens.of(real, boundaries, [0, *boundaries[2 if len(boundaries) > 2 else 1 :]], factor)


def scores_of(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """logits and scores [T, E] in float64."""
    logits = x.double() @ moe.router.weight.double().t()
    return logits, logits.softmax(-1) if moe.router.spec.score == "softmax" else logits.sigmoid()


def losses(moe: MoE, spec: Experts, x: Tensor, load: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Each loss, summed over the real tokens of x [T, D], by the papers' formulas."""
    logits, scores = scores_of(moe, x)
    shares = scores / scores.sum(-1, keepdim=True)
    total = {"sequence": torch.zeros(()).double(), "step": torch.zeros(()).double(), "z": torch.zeros(()).double()}
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        best = scores[part].topk(spec.top_k).indices
        f = torch.stack([(best == expert).sum() for expert in range(spec.num_experts)]).double()
        f *= spec.num_experts / (spec.top_k * length)
        total["sequence"] += length * (f * shares[part].mean(0)).sum()
        total["step"] += length * (load.double() * shares[part].mean(0)).sum()
        total["z"] += logits[part].exp().sum(-1).log().square().sum()
        start += length
    return total


def balanced(spec: Experts, balancing: Balancing, seed: int = 0) -> tuple[Decoder, Balancer, MoE]:
    model = small_decoder(spec, seed)
    moe = model.layers["0"].mlp
    assert isinstance(moe, MoE)
    return model, Balancer(model, balancing), moe


def tokens(count: int) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(5))


KINDS = {
    "sequence": Balancing("sequence", sequence=COEFFICIENTS["sequence"]),
    "step": Balancing("step", rate=COEFFICIENTS["step"]),
    "z": Balancing(z=COEFFICIENTS["z"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [MIXTRAL, DEEPSEEK_V3], ids=["softmax", "sigmoid"])
def test_gradients_are_those_of_the_loss_in_the_papers(spec: Experts, kind: str) -> None:
    _, balancer, moe = balanced(spec, KINDS[kind])
    batch, x = batch_of(), tokens(sum(LENGTHS) + FILLER)
    layer = balancer.layers["0"]
    layer.load.copy_(torch.linspace(0.2, 1.8, spec.num_experts))
    inputs = [x.requires_grad_(), moe.router.weight]
    plain = torch.autograd.grad(moe(x).sum(), inputs)
    with balancer.active(batch):
        got = torch.autograd.grad(moe(x).sum(), inputs)
    loss = losses(moe, spec, x, layer.load, LENGTHS)[kind]
    want = torch.autograd.grad(batch.factor * COEFFICIENTS[kind] * loss, inputs)
    for one, without, added in zip(got, plain, want, strict=True):
        assert added.abs().max() > 1e-3
        torch.testing.assert_close(one - without, added.to(one.dtype), rtol=1e-4, atol=1e-5)
    assert not want[0][sum(LENGTHS) :].any()  # the filler has no part in it
    totals = balancer.end_step(lambda sums: sums)
    reported = totals["router/z" if kind == "z" else "router/balance"]
    assert reported == pytest.approx(loss.item() / sum(LENGTHS), rel=1e-5)


def test_virtual_tokens_within_a_document_have_no_part_in_it() -> None:
    _, balancer, moe = balanced(MIXTRAL, KINDS["sequence"])
    x, batch = tokens(12), batch_of((7, 5), filler=0)
    real = torch.arange(12) != 0
    with balancer.active(BatchTokens.of(real, (0, 7, 12), (0, 12), batch.factor)):
        moe(x)
    loss = losses(moe, MIXTRAL, x[1:], torch.ones(8), (6, 5))["sequence"]
    assert balancer.end_step(lambda sums: sums)["router/balance"] == pytest.approx(loss.item() / 11, rel=1e-5)


def test_a_document_alone_is_transformers_loss_of_one_layer() -> None:
    """transformers does not divide f by k. Over several layers it would take the means of all tokens of all layers
    before it multiplies, so that one layer's imbalance hides another's: no sum over layers."""
    _, balancer, moe = balanced(MIXTRAL, KINDS["sequence"])
    x = tokens(30)
    with balancer.active(batch_of((30,), filler=0)):
        moe(x)
    theirs = load_balancing_loss_func((scores_of(moe, x)[0].float(),), MIXTRAL.num_experts, MIXTRAL.top_k)
    ours = balancer.end_step(lambda sums: sums)["router/balance"]
    assert theirs.item() == pytest.approx(MIXTRAL.top_k * ours, rel=1e-5)


def decoder_gradients(
    model: Decoder, balancer: Balancer | None, lengths: Sequence[int], *, filler: int = 0
) -> dict[str, Tensor]:
    """Of a sum over the tokens of documents, each of which goes through the model as `lengths` packs it."""
    model.zero_grad()
    sizes = [*lengths, filler] if filler else list(lengths)
    boundaries = tuple(sum(sizes[:place]) for place in range(len(sizes) + 1))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (sum(LENGTHS),), generator=generator)
    towards = torch.randn(sum(LENGTHS), 32, generator=generator)
    ids, towards = ids[: sum(lengths)], towards[: sum(lengths)]
    _backward(model, balancer, ids, towards, boundaries, sum(lengths))
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def _backward(
    model: Decoder, balancer: Balancer | None, ids: Tensor, towards: Tensor, boundaries: tuple[int, ...], real: int
) -> None:
    fill = boundaries[-1] - real
    ids = torch.nn.functional.pad(ids, (0, fill))
    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(boundaries)])
    is_real = torch.arange(boundaries[-1]) < real
    batch = BatchTokens.of(is_real, boundaries, boundaries, 2.0)
    if balancer is None:
        hidden = model(ids, positions, PackedAttention(boundaries))
    else:
        with recomputed_within(lambda: balancer.active(batch)):
            hidden = model(ids, positions, PackedAttention(boundaries))
    (hidden[:real] * towards).sum().backward()


EVERYTHING = Balancing("sequence", sequence=0.3, z=0.1)


def test_packed_with_a_filler_is_one_document_after_the_other() -> None:
    model, balancer, _ = balanced(QWEN2_MOE, EVERYTHING)
    whole = decoder_gradients(model, balancer, LENGTHS, filler=FILLER)
    counted = {name: layer.sums.clone() for name, layer in balancer.layers.items()}
    metrics = balancer.end_step(lambda sums: sums)
    model.zero_grad()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 61, (sum(LENGTHS),), generator=generator)
    towards = torch.randn(sum(LENGTHS), 32, generator=generator)
    for part, goal in zip(ids.split(LENGTHS), towards.split(LENGTHS), strict=True):
        _backward(model, balancer, part, goal, (0, len(part)), len(part))
    for name, layer in balancer.layers.items():
        torch.testing.assert_close(layer.sums, counted[name], rtol=1e-6, atol=1e-6)
        assert torch.equal(layer.sums[:6], counted[name][:6])
        assert layer.sums[:6].sum() == sum(LENGTHS) * QWEN2_MOE.top_k
    assert balancer.end_step(lambda sums: sums) == pytest.approx(metrics, rel=1e-5)
    for name, gradient in whole.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-4, atol=1e-5)
    without = decoder_gradients(model, None, LENGTHS)
    assert (without["layers.0.mlp.router.weight"] - whole["layers.0.mlp.router.weight"]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["elementwise", "selective", "full", "segments"])
def test_what_is_recomputed_is_counted_once_and_balanced_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, recomputed = balanced(QWEN2_MOE, EVERYTHING), balanced(QWEN2_MOE, EVERYTHING)
    of_kind = "full" if kind == "segments" else kind
    plan = [LayerPlan(layer, of_kind, 0 if kind == "segments" else None) for layer in range(2)]  # type: ignore[arg-type]
    wrap(recomputed[0], plan)
    want = decoder_gradients(*kept[:2], LENGTHS, filler=FILLER)
    got = decoder_gradients(*recomputed[:2], LENGTHS, filler=FILLER)
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    for one, other in zip(kept[1].layers.values(), recomputed[1].layers.values(), strict=True):
        assert torch.equal(one.sums, other.sums) and one.sums.sum() > 0
    if of_kind == "full":  # the control: counted again
        monkeypatch.setattr(load_balancing, "is_recomputing", lambda: False)
        decoder_gradients(*recomputed[:2], LENGTHS, filler=FILLER)
        layer = recomputed[1].layers["0"]
        assert layer.sums[:6].sum() == (1 + 2 + (kind == "segments")) * sum(LENGTHS) * QWEN2_MOE.top_k


def test_biases_move_towards_the_mean_by_the_counts_of_the_step() -> None:
    _, balancer, moe = balanced(DEEPSEEK_V3, Balancing("bias", rate=0.25))
    assert moe.router.correction is not None
    before = moe.router.correction.detach().clone()
    for part in tokens(40).split(20):
        with balancer.active(batch_of((20,), filler=0)):
            moe(part)
    assert torch.equal(moe.router.correction, before)
    counts = torch.bincount(moe.router(tokens(40)).experts.flatten(), minlength=8).double()
    other_process = torch.tensor([50.0, 0, 0, 0, 0, 0, 0, 0])
    metrics = balancer.end_step(lambda sums: sums.add_(torch.nn.functional.pad(other_process, (0, len(sums) - 8))))
    assert torch.equal(balancer.layers["0"].counts, counts + other_process)
    assert metrics["router/0/load"] == pytest.approx(float((counts + other_process).max() / (170 / 8)))
    balancer.updated()
    want = before + 0.25 * torch.sign(170 / 8 - counts - other_process)
    assert torch.equal(moe.router.correction, want.float())
    assert not torch.equal(want, before + 0.25 * torch.sign(120 / 8 - counts))  # by one process's counts
    balancer.updated()  # the next step has no counts yet: those of the last one hold
    assert torch.equal(balancer.layers["0"].sums, torch.zeros(12).double())


def test_the_step_before_gives_f_and_uniform_at_first() -> None:
    _, balancer, moe = balanced(MIXTRAL, KINDS["step"])
    layer = balancer.layers["0"]
    assert layer.load.tolist() == [1.0] * 8
    with balancer.active(batch_of()):
        moe(tokens(sum(LENGTHS) + FILLER))
    chosen = moe.router(tokens(sum(LENGTHS) + FILLER)[: sum(LENGTHS)]).experts
    balancer.end_step(lambda sums: sums)
    counts = torch.bincount(chosen.flatten(), minlength=8)
    torch.testing.assert_close(layer.load, counts * 8 / (sum(LENGTHS) * 2))
    assert list(balancer.tensors()) == ["router.load.0", "router.load.1"]
    assert balancer.tensors()["router.load.0"] is layer.load
    balancer.end_step(lambda sums: sums)  # a step that saw no tokens changes nothing
    torch.testing.assert_close(layer.load, counts * 8 / (sum(LENGTHS) * 2))


def within_capacity(experts: Tensor, packs: Sequence[int], spec: Experts, factor: float) -> list[list[int]]:
    """The experts of each token that have room, one row after the other."""
    kept: list[list[int]] = []
    for size in packs:
        room = dict.fromkeys(range(spec.num_experts), math.ceil(factor * size * spec.top_k / spec.num_experts))
        for of_token in experts[len(kept) : len(kept) + size].tolist():
            free = [expert for expert in of_token if room[expert] > 0]
            for expert in free:
                room[expert] -= 1
            kept.append([expert if expert in free else spec.num_experts for expert in of_token])
    return kept


def test_experts_take_the_first_rows_of_each_pack() -> None:
    _, balancer, moe = balanced(QWEN2_MOE, Balancing(capacity=1.0))
    x, plain = tokens(sum(LENGTHS) + FILLER), moe.router(tokens(sum(LENGTHS) + FILLER))
    packs = (LENGTHS[0] + LENGTHS[1], LENGTHS[2])
    with balancer.active(batch_of()):
        routes, y = moe.router(x), moe(x)
    want = within_capacity(plain.experts[: sum(LENGTHS)], packs, QWEN2_MOE, 1.0)
    assert routes.experts[: sum(LENGTHS)].tolist() == want
    dropped = sum(row.count(QWEN2_MOE.num_experts) for row in want)
    assert dropped > 3
    assert (routes.experts[sum(LENGTHS) :] == QWEN2_MOE.num_experts).all()  # fillers take no room
    metrics = balancer.end_step(lambda sums: sums)
    assert metrics["router/0/dropped"] == pytest.approx(dropped / (sum(LENGTHS) * QWEN2_MOE.top_k))
    # What is dropped adds nothing: as if its weight were zero.
    weights = plain.weights.masked_fill(routes.experts == QWEN2_MOE.num_experts, 0.0)
    assert moe.shared is not None and moe.shared_gate is not None
    total = moe.shared_gate(x).sigmoid() * moe.shared(x)
    for token in range(len(x)):
        for expert, weight in zip(plain.experts[token].tolist(), weights[token], strict=True):
            counts = torch.zeros(QWEN2_MOE.num_experts, dtype=torch.long)
            counts[expert] = 1
            total[token] = total[token] + weight * moe.experts(x[token : token + 1], counts)[0]
    torch.testing.assert_close(y, total, rtol=1e-5, atol=1e-6)
    moe.zero_grad()
    with balancer.active(batch_of()):
        moe(x).square().sum().backward()
    got = moe.router.weight.grad
    assert got is not None and got.isfinite().all() and got.abs().max() > 0


def test_everything_dropped_leaves_the_shared_expert() -> None:
    _, balancer, moe = balanced(replace(QWEN2_MOE, shared_gate=False), Balancing(capacity=1.0))
    x = tokens(4)
    with balancer.active(batch_of((), filler=4)):
        y = moe(x)
        y.sum().backward()
    assert moe.shared is not None
    assert torch.equal(y, moe.shared(x))
    assert all(each.grad is not None and not each.grad.any() for each in moe.experts.parameters())


def test_layers_on_another_device_have_the_tokens_of_each_micro_batch() -> None:
    _, balancer, _ = balanced(MIXTRAL, EVERYTHING)
    other = torch.device("meta")
    for lengths in (LENGTHS, (4, 1), LENGTHS):
        batch = batch_of(lengths)
        with balancer.active(batch):
            moved = balancer.tokens_on(other)
            assert moved is not None and moved.real.device == other
            assert moved.real.shape == batch.real.shape  # not those of the micro-batch before
            assert balancer.tokens_on(other) is moved  # made once for all layers there
            assert balancer.tokens_on(batch.real.device) is batch


def test_outside_of_its_context_nothing_is_counted() -> None:
    _, balancer, moe = balanced(MIXTRAL, replace(EVERYTHING, capacity=0.5))
    x = tokens(12)
    want = small_decoder(MIXTRAL).layers["0"].mlp(x)  # type: ignore[operator,union-attr]
    assert torch.equal(moe(x), want)
    assert not balancer.layers["0"].sums.any() and not balancer.end_step(lambda sums: sums)


def test_one_of_several_tensor_ranks_adds_the_gradient() -> None:
    model = small_decoder(MIXTRAL)
    balancer = Balancer(model, EVERYTHING, adds_gradient=False)
    got = decoder_gradients(model, balancer, LENGTHS)
    counted = balancer.layers["0"].sums.clone()
    want = decoder_gradients(small_decoder(MIXTRAL), None, LENGTHS)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert counted[:8].sum() == sum(LENGTHS) * 2  # it counts all the same
