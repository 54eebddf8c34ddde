"""8-bit moments against bitsandbytes' values and decoding, against nearest codes, and against float32 AdamW."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor
from torch.nn import Parameter

from danlu.optim import eight_bit
from danlu.optim.adamw import AdamW, Moments
from danlu.optim.eight_bit import EightBitMoments, dynamic_map

BETAS = (0.9, 0.95)
KINDS = [("exp_avg", True), ("exp_avg_sq", False)]


def gradient(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Magnitudes over several decades, and zeros, as gradients have them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    widths = torch.exp(2 * torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    return numbers * widths * (torch.rand(shape, generator=generator) > 0.05)


def make(shape: tuple[int, ...], moments: Moments | None, decay: float = 0.1) -> tuple[Parameter, AdamW]:
    parameter = Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    return parameter, AdamW([{"params": [parameter], "weight_decay": decay}], 1e-2, BETAS, 1e-8, moments=moments)


def take_steps(parameter: Parameter, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        parameter.grad = gradient(tuple(parameter.shape), seed=10 + step)
        optimizer.step()


def after(steps: int, shape: tuple[int, ...], moments: Moments | None) -> tuple[Parameter, AdamW]:
    parameter, optimizer = make(shape, moments)
    take_steps(parameter, optimizer, range(steps))
    return parameter, optimizer


def decoded(state: dict[str, Tensor], name: str, signed: bool, block: int) -> Tensor:
    codes, absmax = state[name], state[f"{name}_absmax"]
    values = torch.ops.bitsandbytes.dequantize_blockwise(
        codes, absmax, create_dynamic_map(signed), block, torch.float32
    )
    return values.view(codes.shape)


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_those_of_bitsandbytes(signed: bool) -> None:
    assert torch.equal(dynamic_map(signed), create_dynamic_map(signed))
    assert not torch.equal(dynamic_map(signed), create_dynamic_map(not signed))


@pytest.mark.parametrize(("name", "signed"), KINDS)
@pytest.mark.parametrize("shape", [(40, 256), (67, 131), (5000,)])
def test_a_code_is_the_nearest_up_to_eleven_bits_of_the_share(name: str, signed: bool, shape: tuple[int, ...]) -> None:
    _, exact = after(1, shape, None)
    _, coded = after(1, shape, EightBitMoments())
    (wanted,), (state,) = exact.state.values(), coded.state.values()
    values = wanted[name].flatten()
    for number, block in enumerate(values.split(256)):
        absmax = block.abs().amax()
        assert state[f"{name}_absmax"][number] == absmax
        shares = block.double() / absmax.double()
        table = create_dynamic_map(signed).double()
        distances = (shares[:, None] - table).abs()
        codes = state[name].flatten()[256 * number :][: len(block)].long()
        if not signed:
            assert codes.min() == 1  # a nearest code of 0 is the one exception
            distances[:, 0] = 2
        taken = distances.gather(1, codes[:, None]).squeeze(1)
        nearest = distances.amin(1)
        assert (taken <= nearest + 2**-10 * shares.abs()).all()
        assert (taken == nearest).double().mean() > 0.95
        beside = distances.gather(1, (codes[:, None] + 1).clamp(max=255)).squeeze(1)  # negative control
        assert not (beside <= nearest + 2**-10 * shares.abs()).all()


@pytest.mark.parametrize("shape", [(40, 256), (67, 131)])
@pytest.mark.parametrize("block", [256, 64])
def test_the_next_step_starts_from_what_bitsandbytes_decodes(shape: tuple[int, ...], block: int) -> None:
    parameter, optimizer = after(3, shape, EightBitMoments(block))
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    assert len(state["exp_avg_absmax"]) == -(-parameter.numel() // block)

    def from_float32(first: Tensor, second: Tensor) -> Parameter:
        other, float32 = make(shape, None)
        other.data.copy_(before)
        float32.load({other: {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}})
        take_steps(other, float32, range(3, 4))
        return other

    before = parameter.detach().clone()
    first, second = (decoded(state, name, signed, block) for name, signed in KINDS)
    take_steps(parameter, optimizer, range(3, 4))
    assert torch.equal(parameter, from_float32(first.clone(), second.clone()))
    assert not torch.equal(parameter, from_float32(first * 1.01, second.clone()))
    assert not torch.equal(parameter, from_float32(first.clone(), second * 1.01))


def test_training_is_nearer_to_float32_than_with_bitsandbytes() -> None:
    shape = (64, 512)
    exact, _ = after(20, shape, None)
    ours, _ = after(20, shape, EightBitMoments())
    theirs, _ = make(shape, None)
    peer = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-2, betas=BETAS, eps=1e-8, weight_decay=0.1)
    for step in range(20):
        theirs.grad = gradient(shape, seed=10 + step)
        peer.step()
    error, peers_error = (ours - exact).norm(), (theirs - exact).norm()
    start, _ = make(shape, None)
    assert 0 < error < peers_error < (exact - start).norm()


def test_a_second_moment_that_is_small_beside_others_never_becomes_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest_move() -> float:
        """Of elements whose gradient is small in a block, where one is large, and then 0."""
        parameter, optimizer = make((16, 256), EightBitMoments(), decay=0.0)
        grad = torch.full((16, 256), 1e-4)
        grad[:, 0] = 10.0
        for number in range(2):
            before = parameter.detach().clone()
            parameter.grad = grad * (1 - number)
            optimizer.step()
        return (parameter - before).abs().max().item()

    assert largest_move() < 1.1 * 1e-2  # the learning rate
    eight_bit._tables.cache_clear()
    codes_of_halves = eight_bit._codes_of_halves
    nearest = codes_of_halves(False).clone()
    nearest[0] = 0
    shares = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float() / 2**15
    nearest[shares < dynamic_map(False)[1] / 2] = 0
    monkeypatch.setattr(eight_bit, "_codes_of_halves", lambda signed: codes_of_halves(True) if signed else nearest)
    jump = largest_move()  # negative control: plain nearest codes
    eight_bit._tables.cache_clear()
    assert jump > 100 * 1e-2


def test_pieces_and_the_way_of_looking_up_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (67, 131)
    whole, optimizer = after(3, shape, EightBitMoments())
    monkeypatch.setattr(eight_bit, "_CHUNK_CPU", 1024)
    for by_select in (True, False):
        monkeypatch.setattr(eight_bit, "_uses_index_select", lambda device, answer=by_select: answer)
        parameter, other = after(3, shape, EightBitMoments())
        assert torch.equal(parameter, whole)
        for name, tensor in optimizer.state[whole].items():
            assert torch.equal(other.state[parameter][name], tensor)
    assert not torch.equal(whole, after(3, shape, EightBitMoments(128))[0])


def test_small_parameters_keep_float32_moments_and_large_ones_a_quarter() -> None:
    moments = EightBitMoments()
    small, _ = after(3, (4095,), moments)
    assert torch.equal(small, after(3, (4095,), None)[0])
    large, optimizer = after(3, (4096,), moments)
    assert not torch.equal(large, after(3, (4096,), None)[0])
    state = optimizer.state[large]
    assert sum(tensor.nbytes for tensor in state.values()) == 2 * 4096 + 2 * 16 * 4 + 4
    assert {name: (spec.shape, spec.dtype) for name, spec in moments.specs(large.shape).items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in state.items()
    }


def test_a_gradient_laid_out_another_way_and_gradients_of_zeros() -> None:
    parameter, optimizer = make((64, 128), EightBitMoments())
    other, same = make((64, 128), EightBitMoments())
    still, unmoved = make((64, 128), EightBitMoments(), decay=0.0)
    before = still.detach().clone()
    for step in range(2):
        grad = gradient((64, 128), step)
        parameter.grad, other.grad, still.grad = grad, grad.T.contiguous().T, torch.zeros_like(grad)
        for each in (optimizer, same, unmoved):
            each.step()
    assert torch.equal(parameter, other)
    assert torch.equal(still, before)


@pytest.mark.parametrize(("columns", "block", "by_row"), [(256, 64, True), (256, 256, True), (96, 64, False)])
def test_rows_of_an_embedding(columns: int, block: int, by_row: bool) -> None:
    """Stepped by row where no block spans two of them, with the bits of a whole step."""

    def train(rows: bool) -> tuple[Parameter, AdamW, list[bool]]:
        table, optimizer = make((64, columns), EightBitMoments(block), decay=0.0)
        done = []
        for step, words in enumerate(([1, 5], [5, 60], [7])):
            index = torch.tensor(words)
            values = gradient((len(words), columns), step)
            grad = torch.sparse_coo_tensor(index[None], values, table.shape, is_coalesced=True, check_invariants=True)
            table.grad = grad if rows else grad.to_dense()
            done.append(rows and optimizer.step_rows(optimizer.param_groups[0], table))
            if not done[-1]:
                table.grad = grad.to_dense()
                optimizer.step()
        return table, optimizer, done

    table, optimizer, done = train(rows=True)
    whole, other, _ = train(rows=False)
    assert done == [by_row] * 3
    assert torch.equal(table, whole)
    compared = {name: tensor for name, tensor in optimizer.state[table].items() if name.endswith("absmax")}
    assert compared and "step" in optimizer.state[table]
    for name, tensor in {**compared, "step": optimizer.state[table]["step"]}.items():
        assert torch.equal(tensor, other.state[whole][name])


@pytest.mark.gpu
def test_on_a_gpu_it_is_within_rounding_of_the_cpu() -> None:
    here, _ = after(5, (67, 131), EightBitMoments())
    there, optimizer = make((67, 131), EightBitMoments())
    there.data = there.data.to("cuda")
    for step in range(5):
        there.grad = gradient((67, 131), seed=10 + step).to("cuda")
        optimizer.step()
    assert all(tensor.is_cuda for tensor in optimizer.state[there].values())
    # A moment on the edge of two codes may be rounded the other way there.
    assert ((here - there.cpu()).abs() < 1e-4).double().mean() > 0.99
