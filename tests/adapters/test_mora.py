"""MoRA against a reference written from the paper's equations, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from danlu.adapters.adapter import DenseLinear
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.mora import Folding, Mora
from danlu.adapters.targets import Form, square_width
from danlu.core.layer_types import Recomputed
from danlu.models import ops
from danlu.models.modules import Linear

TOKENS = 5
FORMS: list[Form] = ["rotation", "sharing"]
# Inputs, outputs, width: it divides both; neither; is above the outputs; makes one group; many outputs of few inputs.
SHAPES = [(12, 18, 6), (14, 22, 6), (14, 4, 6), (8, 9, 8), (7, 40, 4)]


def rotated(group: Tensor, position: int) -> Tensor:
    """Rotary embedding of one group at a position, pair by pair: feature i goes with feature i + w/2."""
    half = len(group) // 2
    turned = torch.empty_like(group)
    for pair in range(half):
        angle = position * 10000.0 ** (-2 * pair / len(group))
        first, second = group[pair], group[pair + half]
        turned[pair] = first * math.cos(angle) - second * math.sin(angle)
        turned[pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return turned


def from_the_paper(x: Tensor, m: Tensor, outputs: int, form: Form) -> Tensor:
    """One token at a time, one number at a time: equations 6 (sharing) and 9 (rotation) of arXiv:2405.12130."""
    width = len(m)
    rows = []
    for token in x:
        groups = -(-len(token) // width)
        filled = torch.stack([token[index % len(token)] for index in range(groups * width)])
        pieces = [filled[start : start + width] for start in range(0, len(filled), width)]
        if form == "sharing":
            made = m @ sum(pieces)
        else:
            made = torch.cat([m @ rotated(piece, position) for position, piece in enumerate(pieces)])
        rows.append(torch.stack([made[index % len(made)] for index in range(outputs)]))
    return torch.stack(rows)


def mora(inputs: int, outputs: int, width: int, form: Form, dropout: Dropout | None = None) -> Mora:
    module = Mora((outputs, inputs), width, form, dropout or Dropout(0, "", DropoutState(0))).double()
    module.mora_M.data = torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return module


def base_of(inputs: int, outputs: int) -> Linear:
    torch.manual_seed(0)
    linear = Linear(inputs, outputs, bias=False).double()
    torch.nn.init.normal_(linear.weight)
    return linear.requires_grad_(False)


def gradients(y: Tensor, x: Tensor, module: Mora) -> tuple[Tensor, ...]:
    torch.manual_seed(9)
    return torch.autograd.grad((y * torch.randn_like(y)).sum(), [x, module.mora_M], retain_graph=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "outputs", "width"), SHAPES)
def test_outputs_and_gradients_are_those_of_the_paper(inputs: int, outputs: int, width: int, form: Form) -> None:
    module, linear = mora(inputs, outputs, width, form), base_of(inputs, outputs)
    x = torch.randn(TOKENS, inputs, dtype=torch.float64, requires_grad=True)
    base = linear.base(x)
    ours = module.adapt_output(x, base, linear)
    plain = base + from_the_paper(x, module.mora_M, outputs, form)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(ours, x, module), gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    other_form = FORMS[1 - FORMS.index(form)]
    if width < inputs:  # with one group both forms are M x
        assert not torch.allclose(ours, base + from_the_paper(x, module.mora_M, outputs, other_form), rtol=1e-2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "outputs", "width"), SHAPES)
def test_merged_is_unmerged_and_differentiable(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, width: int, form: Form
) -> None:
    monkeypatch.setattr("danlu.adapters.mora.COLUMNS_PER_TILE", 5)
    module, linear = mora(inputs, outputs, width, form), base_of(inputs, outputs)
    x = torch.randn(TOKENS, inputs, dtype=torch.float64, requires_grad=True)
    ours = x @ module.merged_into(DenseLinear(linear.weight, None)).weight.t()
    plain = linear.base(x) + from_the_paper(x, module.mora_M, outputs, form)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)
    for one, other in zip(gradients(ours, x, module), gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_the_delta_reaches_a_rank_that_lora_of_as_many_numbers_does_not(form: Form) -> None:
    """The paper's point: of 16 x 32 with the parameters of LoRA at rank 3, rank 12 instead of 3."""
    width = square_width((16, 32), 3, form)
    module = mora(32, 16, width, form)
    assert width == 12 and module.mora_M.numel() == 3 * (16 + 32)
    assert torch.linalg.matrix_rank(module.delta(torch.float64)) >= 12


def test_the_width_of_the_square_is_that_of_the_authors_code() -> None:
    assert square_width((4096, 4096), 8, "rotation") == square_width((4096, 4096), 8, "sharing") == 256
    assert square_width((11008, 4096), 8, "sharing") == 348  # sqrt(120832) = 347.6
    assert square_width((1024, 4096), 3, "sharing") == 124 and square_width((10, 15), 1, "rotation") == 4


@pytest.mark.parametrize("form", FORMS)
def test_dropout_reaches_the_path_alone_and_backward_draws_the_same_mask(form: Form) -> None:
    dropout_state = DropoutState(3)
    module, linear = mora(14, 9, 6, form, Dropout(0.4, "layers.0", dropout_state)), base_of(14, 9)
    x = torch.randn(TOKENS, 14, dtype=torch.float64, requires_grad=True)
    dropout_state.begin(5, [(2, TOKENS)])
    mask = module.dropout(torch.ones_like(x))
    ours = module.adapt_output(x, linear.base(x), linear)
    dropout_state.begin(6, [(0, TOKENS)])  # by the time of the backward pass the run may be elsewhere
    found = gradients(ours, x, module)
    plain = linear.base(x) + from_the_paper(x * mask, module.mora_M, 9, form)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(found, gradients(plain, x, module), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(ours, linear.base(x) + from_the_paper(x, module.mora_M, 9, form), rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_an_input_that_can_be_made_again_is_not_kept(form: Form) -> None:
    module, linear = mora(14, 9, 6, form), base_of(14, 9)
    gate, up = (torch.randn(TOKENS, 14, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inner = ops.gated_mlp_activation(gate, up, "silu")
    again = Recomputed(lambda gate, up: ops.gated_mlp_activation(gate, up, "silu"), (gate, up))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours = module.adapt_output(inner, linear.base(inner), linear, again)
    known = {
        tensor.untyped_storage().data_ptr()
        for tensor in (gate, up, linear.weight, *module.parameters(), *module.buffers())
    }
    assert all(tensor.untyped_storage().data_ptr() in known for tensor in kept)
    plain = linear.base(inner) + from_the_paper(inner, module.mora_M, 9, form)
    wanted = [gate, up, module.mora_M]
    found = torch.autograd.grad((ours * ours).sum(), wanted, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad((plain * plain).sum(), wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_in_bfloat16_parameters_and_their_gradient_stay_float32(form: Form) -> None:
    module = mora(14, 22, 6, form).float()
    x = torch.randn(TOKENS, 14, dtype=torch.bfloat16, requires_grad=True)
    y = module.adapt_output(x, torch.zeros(TOKENS, 22, dtype=torch.bfloat16), base_of(14, 22))
    exact = from_the_paper(x.double(), module.mora_M.double(), 22, form)
    torch.testing.assert_close(y.double(), exact, rtol=0.05, atol=0.1)
    assert [grad.dtype for grad in gradients(y, x, module)] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("form", FORMS)
def test_the_ways_in_and_out_are_transposed_for_the_backward_pass(form: Form) -> None:
    folding = Folding(14, 22, 6, form)
    x, y = torch.randn(3, 14, dtype=torch.float64), torch.randn(3, 22, dtype=torch.float64)
    angles = folding.angles() if form == "rotation" else None
    z = torch.randn_like(folding.compress(x, angles))
    there, back = folding.compress(x, angles), folding.compress_transposed(z, angles)
    torch.testing.assert_close((there * z).sum(), (x * back).sum())
    torch.testing.assert_close((folding.decompress(z) * y).sum(), (z * folding.decompress_transposed(y)).sum())
