"""Mixtures of experts against each token going through its experts one by one, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.small_experts import KINDS, MIXTRAL, ODD, QWEN2_MOE, experts_config, one_by_one, small_moe
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from danlu.core.errors import ModelError
from danlu.core.layer_types import DispatchedRows, RowCodes
from danlu.models import ops
from danlu.models.config import parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.experts import MoE, RowOrder
from danlu.models.layer_spec import Dense, Experts, LayerSpec, Router
from danlu.models.mixer_spec import Heads
from danlu.numerics.batch_invariant import batch_invariant
from danlu.planning.flops import layer_flops

WIDTH = 40


def width_of(spec: Experts) -> int:
    return 10 if spec is ODD else WIDTH


def tokens(count: int, width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_tokens_one_by_one(kind: str) -> None:
    spec = KINDS[kind]
    moe, x = small_moe(spec, width_of(spec)), tokens(23, width_of(spec)).requires_grad_()
    towards = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    inputs = {"x": x, **{name: each for name, each in moe.named_parameters() if each.requires_grad}}
    got, want = moe(x), one_by_one(moe, spec, x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((got * towards).sum(), list(inputs.values()))
    expected = torch.autograd.grad((want * towards).sum(), list(inputs.values()))
    for name, one, other in zip(inputs, gradients, expected, strict=True):
        assert other.abs().max() > 1e-3, name
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 1},
        {"router": replace(MIXTRAL.router, normalise=False)},
        {"router": replace(MIXTRAL.router, scale=1.001)},
        {"router": replace(MIXTRAL.router, score="sigmoid")},
        {"router": replace(MIXTRAL.router, groups=4, top_groups=1)},
    ],
    ids=str,
)
def test_another_router_gives_something_else(wrong: dict[str, object]) -> None:
    """The control of the comparison above."""
    moe, x = small_moe(MIXTRAL, WIDTH), tokens(23)
    other = one_by_one(moe, replace(MIXTRAL, **wrong), x)  # type: ignore[arg-type]
    assert (moe(x) - other).abs().max() > 1e-4


def test_the_correction_decides_who_is_chosen_and_not_how_much_they_count() -> None:
    spec = Experts(4, 2, 8, router=Router("sigmoid", bias_correction=True))
    moe, x = small_moe(spec, WIDTH), tokens(9)
    assert moe.router.correction is not None
    with torch.no_grad():
        moe.router.correction.copy_(torch.tensor([100.0, 0.0, 0.0, 50.0]))
    routes = moe.router(x)
    assert routes.experts.tolist() == [[0, 3]] * 9
    torch.testing.assert_close(routes.weights, (x @ moe.router.weight.t()).sigmoid()[:, [0, 3]])
    assert not moe.router.correction.requires_grad


def test_groups_that_are_left_out_stay_out_where_corrected_scores_are_negative() -> None:
    """DeepSeek-V3's own code fills with zero, above which no score is here: all tokens would go to the other groups."""
    spec = Experts(8, 2, 8, router=Router("sigmoid", groups=4, top_groups=1, group_score="top-2", bias_correction=True))
    moe, x = small_moe(spec, WIDTH), tokens(9)
    assert moe.router.correction is not None
    with torch.no_grad():
        moe.router.correction.copy_(torch.tensor([-5.0, -5.0, -2.0, -2.0, -5.0, -5.0, -5.0, -5.0]))
    routes = moe.router(x)
    assert routes.experts.sort(-1).values.tolist() == [[2, 3]] * 9
    assert moe.router.eligible(routes.scores).isneginf().sum(-1).tolist() == [6] * 9


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    """And not none: weight decay and moments of theirs go on."""
    spec = Experts(8, 1, 16, router=Router("sigmoid", bias=True))
    moe = small_moe(spec, WIDTH)
    with torch.no_grad():
        moe.router.bias.fill_(-9.0)
        moe.router.bias[5] = 9.0
    moe(tokens(7)).square().sum().backward()
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad[5].abs().max() > 0
        assert not parameter.grad[[0, 1, 2, 3, 4, 6, 7]].any()


def test_no_tokens_at_all() -> None:
    moe, x = small_moe(QWEN2_MOE, WIDTH), torch.zeros(0, WIDTH, requires_grad=True)
    y = moe(x)
    assert y.shape == (0, WIDTH)
    y.sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("shape", [(8, 24, 16), (8, 6, 10)], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_grouped_products_are_those_of_each_group(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Some groups are empty, the first and the last too; the incoming gradient is one number in all places."""
    counts = torch.tensor([0, 3, 0, 0, 5, 1, 4, 0])
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).requires_grad_()
    bias = torch.randn(shape[:2], generator=generator).requires_grad_()
    x = torch.randn(13, shape[2], generator=generator).to(dtype).requires_grad_()
    y = ops.grouped_linear(x, weight, counts, bias)
    groups = zip(x.split(counts.tolist()), weight, bias, strict=True)
    want = torch.cat([rows @ each.to(dtype).t() + added.to(dtype) for rows, each, added in groups])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
    got = torch.autograd.grad(y.sum(), (x, weight, bias))
    expected = torch.autograd.grad(want.sum(), (x, weight, bias))
    assert [each.dtype for each in got] == [dtype, torch.float32, torch.float32]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert not got[1][counts == 0].any() and got[1][counts > 0].abs().amax((1, 2)).min() > 0


def test_rows_lie_by_expert_and_by_token() -> None:
    experts = torch.tensor([[2, 0], [0, 1], [2, 1]])
    order = RowOrder.of(experts, 4)
    assert order.counts.tolist() == [2, 2, 2, 0]
    assert order.order.tolist() == [1, 2, 3, 5, 0, 4]
    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert order.rows_of(x).flatten().tolist() == [1.0, 10.0, 10.0, 100.0, 1.0, 100.0]
    assert order.rows_of(x)[order.places].squeeze(-1).tolist() == [[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]]


def test_half_precision_is_added_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16, and so the small terms of a token with many experts would be lost."""
    experts, x = torch.tensor([[0, 1, 2]]), torch.ones(1, 1, dtype=torch.bfloat16)
    order = RowOrder.of(experts, 3)
    rows = torch.tensor([[256.0], [1.0], [-256.0]], dtype=torch.bfloat16)
    assert order.weighted_sum(rows, torch.ones(1, 3)).item() == 1.0
    leaf = x.clone().requires_grad_()
    order.rows_of(leaf).backward(rows)  # the gradient of a token is the sum of those of its rows
    assert leaf.grad is not None and leaf.grad.item() == 1.0
    assert (rows[0] + rows[1] + rows[2]).item() == 0.0  # the control: in bfloat16


class Reversed:
    """An exchange that takes the last expert for the first one, as processes do that have them in another order."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def dispatch(self, rows: Tensor, counts: Tensor, codes: RowCodes | None = None) -> DispatchedRows:
        self.counts = counts.tolist()
        return DispatchedRows(torch.cat(rows.split(self.counts)[::-1]), counts.flip(0))

    def combine(self, rows: Tensor, codes: RowCodes | None = None) -> Tensor:
        return torch.cat(rows.split(self.counts[::-1])[::-1])


def test_an_exchange_takes_rows_away_and_back() -> None:
    moe, x = small_moe(MIXTRAL, WIDTH), tokens(31)
    want = moe(x)
    moe.experts.exchange = Reversed()
    assert (moe(x) - want).abs().max() > 1e-3  # rows reach the wrong experts
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.copy_(parameter.flip(0))
    torch.testing.assert_close(moe(x), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen2-moe", "deepseek-v3", "odd"])
def test_exact_numerics_give_a_token_the_same_bits_in_any_company(kind: str, dtype: torch.dtype) -> None:
    spec = KINDS[kind]
    moe, x = small_moe(spec, width_of(spec)).to(dtype), tokens(150, width_of(spec)).to(dtype)
    with torch.no_grad(), batch_invariant():
        whole = moe(x)
        assert torch.equal(torch.cat([moe(x[:1]), moe(x[1:7]), moe(x[7:60]), moe(x[60:])]), whole)
    torch.testing.assert_close(whole, moe(x), rtol=1e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_half_precision_is_near_and_its_routes_are_made_in_float32() -> None:
    moe, x = small_moe(MIXTRAL, WIDTH), tokens(40).bfloat16()
    y = moe(x)
    assert y.dtype == torch.bfloat16 and moe.router(x).weights.dtype == torch.float32
    want = one_by_one(moe, MIXTRAL, x.float())
    assert (y.double() - want).norm() < 0.01 * want.norm()


def test_parameters_are_those_that_the_spec_lists() -> None:
    for kind, spec in KINDS.items():
        config = experts_config(spec)
        model = Decoder(config)
        assert {name: tuple(each.shape) for name, each in model.named_parameters()} == parameter_shapes(config), kind
        assert isinstance(model.layers["0"].mlp, MoE)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_a_token_is_multiplied_with_are_counted(kind: str) -> None:
    """Twice them are the operations of a token, as torch counts them."""
    spec = KINDS[kind]
    moe, x = small_moe(spec, width_of(spec)), tokens(16, width_of(spec))
    with FlopCounterMode(display=False) as counter:
        moe.router(x)
        for _ in range(3):  # torch counts no grouped products
            torch.zeros(16 * spec.top_k, width_of(spec)) @ torch.zeros(width_of(spec), spec.intermediate_size)
        if moe.shared is not None:
            moe.shared(x)
        if moe.shared_gate is not None:
            moe.shared_gate(x)
    mixer, width = Heads(1, 1, 8, None), width_of(spec)
    of_experts, of_dense = (layer_flops(LayerSpec(mixer, feed), width).weights for feed in (spec, Dense(1)))
    assert counter.get_total_flops() == 2 * 16 * (of_experts - of_dense + 3 * width)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "a token cannot go to 9 experts of 8"),
        ({"num_experts": 0}, "num_experts is 0: it must be at least 1"),
        ({"top_k": 0}, "top_k is 0: it must be at least 1"),
        ({"router": Router(groups=3)}, "8 experts do not make 3 groups of one size"),
        ({"router": Router(groups=4, top_groups=5)}, "a token's experts cannot be of 5 groups: there are 4"),
        (
            {"router": Router(groups=8, top_groups=1)},
            "a token cannot go to 2 experts: its 1 of 8 groups have 1",
        ),
        (
            {"router": Router(groups=8, top_groups=4, group_score="top-2")},
            "groups are chosen by their two best experts: 8 of 8 have one",
        ),
        ({"shared_gate": True}, "there is no shared expert for the gate of one"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(MIXTRAL, **change)  # type: ignore[arg-type]


def test_a_mixture_is_cut_along_its_inner_width() -> None:
    assert MIXTRAL.uncuttable(4) is None
    assert MIXTRAL.uncuttable(5) == "5 does not divide the experts' width of 24"
    assert replace(MIXTRAL, shared=Dense(10)).uncuttable(4) == "4 does not divide the MLP's width of 10"
    roles = QWEN2_MOE.tensor_cut.roles
    assert roles["experts.gate_proj"] == roles["shared.up_proj"] == "column"
    assert roles["experts.down_proj"] == roles["shared.down_proj"] == "row"
    assert "router" not in roles and len(MIXTRAL.tensor_cut.roles) == 3
