"""Routing replay: tokens go where they are said to have gone, and the router is trained all the same."""

from __future__ import annotations

import pytest
import torch
from builders.reference_attention import ReferenceAttention
from builders.small_experts import DEEPSEEK_V3, MIXTRAL, small_decoder, small_moe
from torch import Tensor

from danlu.core.errors import TrainingError
from danlu.memory.recomputed_function import RecomputedFunction, recomputed_within
from danlu.models.decoder import Decoder
from danlu.models.experts import MoE
from danlu.models.load_balancing import Balancer, Balancing, BatchTokens
from danlu.models.router_replay import NO_ROUTE, recording, replaying, routers_of

TOKENS = 23


def decoder() -> Decoder:
    model = small_decoder(DEEPSEEK_V3, layers=2, vocab_size=60)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers_of(model).values():
            router.weight.normal_(generator=generator)
    return model


def perturb(model: Decoder) -> None:
    """Moves the corrections, by which experts are chosen and nothing is weighed, so that other experts are chosen."""
    generator = torch.Generator().manual_seed(9)
    for router in routers_of(model).values():
        assert router.correction is not None
        router.correction.data.copy_(torch.randn(router.num_experts, generator=generator))


def hidden(model: Decoder) -> Tensor:
    ids = torch.arange(TOKENS) % 60
    out: Tensor = model(ids, torch.arange(TOKENS), ReferenceAttention((0, TOKENS)))
    return out


def test_a_replayed_pass_is_the_recorded_one_whatever_routers_would_choose() -> None:
    model = decoder()
    with torch.no_grad():
        with recording(model) as recorded:
            want = hidden(model)
        routes = recorded.stacked(torch.arange(TOKENS))
        assert tuple(routes.shape) == (TOKENS, *(model.config.route_shape or ())) and routes.dtype == torch.int16
        perturb(model)
        with replaying(model, routes):
            assert hidden(model).equal(want)
        assert all(router.replay is None for router in routers_of(model).values())
        with recording(model) as own:
            assert not torch.allclose(hidden(model), want, atol=1e-3)  # the control: they choose others by themselves
        assert (own.stacked(torch.arange(TOKENS)) != routes).any()


def test_tokens_without_a_route_choose_their_own() -> None:
    model = decoder()
    with torch.no_grad():
        with recording(model) as first:
            hidden(model)
        perturb(model)
        known = torch.arange(TOKENS) % 3 > 0
        routes = first.stacked(torch.arange(TOKENS)).masked_fill(~known[:, None, None], NO_ROUTE)
        with replaying(model, routes), recording(model) as second:
            hidden(model)
        with recording(model) as own:
            hidden(model)
    # `recording` lies within: what it sees first is what each router chose by itself in this pass.
    assert second.stacked(torch.arange(TOKENS))[:, 0].equal(own.stacked(torch.arange(TOKENS))[:, 0])
    chosen: list[Tensor] = []
    with replaying(model, routes):
        router = routers_of(model)[0]
        x = torch.randn(TOKENS, router.weight.shape[1])
        chosen.append(router(x).experts)
    assert chosen[0][known].equal(routes[known, 0].long())
    assert chosen[0][~known].equal(router(x).experts[~known])
    assert not chosen[0][known].equal(router(x).experts[known])


def one_layer(seed: int = 0) -> tuple[MoE, Tensor, Tensor]:
    """A mixture in float64, rows, and experts [T, k] that are not what its router would choose."""
    moe = small_moe(MIXTRAL, 10, seed).double()
    x = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    experts = (moe.router(x).experts + 3) % moe.router.num_experts
    return moe, x, experts


def by_the_formula(moe: MoE, x: Tensor, experts: Tensor) -> Tensor:
    """Softmax scores of the given experts, normalised, times what each of these makes of the token."""
    scores = (x @ moe.router.weight.T).softmax(-1).gather(1, experts)
    scores = scores / scores.sum(-1, keepdim=True)
    gate, up, down = (getattr(moe.experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
    rows = []
    for token, own, share in zip(x, experts, scores, strict=True):
        inner = [torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token) for e in own]
        rows.append(sum(s * (down[e] @ h) for s, e, h in zip(share, own, inner, strict=True)))
    return torch.stack(rows)


def test_the_router_is_trained_through_the_weights_of_replayed_experts() -> None:
    moe, x, experts = one_layer()
    moe.router.replay = lambda own: experts
    y, want = moe(x), by_the_formula(moe, x, experts)
    torch.testing.assert_close(y, want, rtol=1e-10, atol=1e-12)
    weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    names, parameters = zip(*moe.named_parameters(), strict=True)
    found = torch.autograd.grad((y * weights).sum(), parameters)
    expected = torch.autograd.grad((want * weights).sum(), parameters)
    for name, one, other in zip(names, found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=name)
    assert found[names.index("router.weight")].abs().max() > 1e-3
    moe.router.replay = None
    assert not torch.allclose(moe(x), want, rtol=1e-3)  # the control: its own choice


def test_what_is_recomputed_goes_to_the_same_experts() -> None:
    """The backward pass runs when the context has ended."""
    model = decoder()
    with recording(model) as recorded, torch.no_grad():
        hidden(model)
    routes = recorded.stacked(torch.arange(TOKENS))
    perturb(model)
    mlp = model.layers["0"].mlp  # type: ignore[union-attr]
    x = torch.randn(TOKENS, model.config.hidden_size, generator=torch.Generator().manual_seed(3))

    def gradient(recompute: bool, within: bool) -> Tensor:
        function = RecomputedFunction(mlp, "mlp") if recompute else mlp
        if within:
            with recomputed_within(lambda: replaying(model, routes)):
                y = function(x)
        else:
            with replaying(model, routes):
                y = function(x)
        (found,) = torch.autograd.grad(y.square().sum(), mlp.experts.down_proj.weight)
        return found

    want = gradient(recompute=False, within=True)
    assert gradient(recompute=True, within=True).equal(want)
    with pytest.raises((AssertionError, TrainingError)):  # the control: other rows come back than were there
        assert gradient(recompute=True, within=False).equal(want)


def test_the_load_that_is_counted_is_that_of_the_replayed_experts() -> None:
    model = decoder()
    balancer = Balancer(model, Balancing("bias", rate=0.1))
    with recording(model) as recorded, torch.no_grad():
        hidden(model)
    routes = recorded.stacked(torch.arange(TOKENS))
    perturb(model)
    before = [router.correction.clone() for router in routers_of(model).values()]  # type: ignore[union-attr]
    tokens = BatchTokens.of(torch.ones(TOKENS, dtype=torch.bool), (0, TOKENS), (0, TOKENS), 1.0)
    with balancer.active(tokens), replaying(model, routes), torch.no_grad():
        hidden(model)
    balancer.end_step(lambda sums: sums)
    balancer.updated()
    for number, router in routers_of(model).items():
        counts = torch.bincount(routes[:, number].flatten().long(), minlength=router.num_experts).double()
        moved = router.correction - before[number]  # type: ignore[operator]
        torch.testing.assert_close(moved, 0.1 * torch.sign(counts.mean() - counts).float())
        own = torch.bincount(router(torch.randn(TOKENS, 32)).experts.flatten(), minlength=router.num_experts)
        assert not own.double().equal(counts)
