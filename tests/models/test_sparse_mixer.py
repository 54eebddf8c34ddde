"""SparseMixer against transformers' class while it trains, with the same random numbers, and how experts are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.chi_square import chi_square_p
from builders.family_twins import LENGTH, random_tokens, twin

from danlu.adapters.dropout import DropoutState, SiteNumbers
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import hf_tensors
from danlu.models.loading import load
from danlu.models.router_replay import recording, replaying, routers_of
from danlu.models.sparse_mixer import chosen, jittered, noise_of, weights_of


def begun(seed: int = 0, tokens: int = LENGTH) -> DropoutState:
    state = DropoutState(seed)
    state.begin(1, [(0, tokens)])
    return state


def with_draws(model: Decoder, state: DropoutState) -> None:
    for place, router in routers_of(model).items():
        router.draws = SiteNumbers(f"router {place}", state)


def as_transformers_draws(model: Decoder) -> Iterator[torch.Tensor]:
    """danlu's random numbers as transformers' class asks for them, layer by layer."""
    width = torch.zeros(LENGTH, model.config.hidden_size)
    for router in routers_of(model).values():
        assert router.draws is not None
        spread = router.spec.input_jitter
        for purpose in ("block input", "router input"):
            yield 1 - spread + 2 * spread * router.draws.uniform(width, width.shape[1], purpose)
        noise = noise_of(router.draws, width, router.num_experts)
        for number in range(2):
            yield -noise.choice[:, number].log()  # an exponential
            yield noise.share[:, number, None]


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[torch.Tensor]], None]:
    """Makes the draws of torch those of an iterator."""

    def patch(numbers: Iterator[torch.Tensor]) -> None:
        def drawn(self: torch.Tensor, *bounds: float) -> torch.Tensor:
            if self.shape[-1] == 1:  # the second draw in the place of another, whose value it keeps
                return self
            return self.copy_(next(numbers).view_as(self))

        monkeypatch.setattr(torch.Tensor, "exponential_", drawn)
        monkeypatch.setattr(torch.Tensor, "uniform_", drawn)
        monkeypatch.setattr(torch, "rand_like", lambda like: next(numbers).view_as(like))

    return patch


def test_training_is_that_of_transformers_for_the_same_draws(
    tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path, drawing: Callable[[Iterator[torch.Tensor]], None]
) -> None:
    values = tiny_values("phimoe")
    theirs, model, tokens = twin(values, tmp_path), load(tmp_path), random_tokens(values["vocab_size"])
    grad = torch.randn(LENGTH, values["vocab_size"], generator=torch.Generator().manual_seed(2))
    state = begun()
    with_draws(model, state)
    drawing(as_transformers_draws(model))
    expected = theirs.train()(tokens[None]).logits[0]
    expected.backward(grad)

    def forward() -> torch.Tensor:
        return model.logits(model(tokens, torch.arange(LENGTH), PackedAttention((0, LENGTH))))

    found = forward()
    found.backward(grad)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    own = dict(model.named_parameters())
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    least = 1e-2 * max(float(gradient.abs().max()) for gradient in wanted.values())
    for tensor in hf_tensors(model.config, stacked=True):
        want = wanted.pop(tensor.name)
        difference = float((tensor.assembled(lambda name: own[name].grad) - want).abs().max())
        assert difference / max(float(want.abs().max()), least) < 1e-5, tensor.name
    assert not wanted
    # Controls: other draws are another function, and so is no draw at all.
    state.begin(2, [(0, LENGTH)])
    assert (forward() - expected).abs().max() > 1e-1
    state.end()
    assert (forward() - expected).abs().max() > 1e-1


def test_weights_have_the_gradient_of_the_whole_though_two_thirds_are_left_out() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.2]], requires_grad=True)
    experts = torch.tensor([[1, 0]])
    noise = noise_of(SiteNumbers("x", begun(tokens=1)), torch.zeros(1, 1), 3)
    weights = {}
    for share in (0.7, 0.8):
        shared = noise._replace(share=torch.full((1, 2), share))
        weights[share] = weights_of(logits, experts, 0.3, shared)
    softmax = logits[:, :2].softmax(1)
    assert weights[0.8][0, 0] == softmax[0, 1]
    torch.testing.assert_close(weights[0.7][0, 0], 0.3333 * softmax[0, 1])
    assert weights[0.7][0, 1] == weights[0.8][0, 1] == 1.0  # the only one near the highest of those that are left
    gradients = [
        torch.autograd.grad(each[0, 0], logits, retain_graph=True)[0] for each in (*weights.values(), softmax[:, 1:])
    ]
    assert torch.equal(gradients[0], gradients[1]) and torch.allclose(gradients[0], gradients[2])


def test_experts_are_drawn_from_the_softmax_of_those_near_the_highest() -> None:
    tokens, logits = 20_000, torch.tensor([2.0, 1.5, 1.2, 0.1])
    state = begun(tokens=tokens)
    noise = noise_of(SiteNumbers("router 0", state), torch.zeros(tokens, 1), 4)
    rows = logits.expand(tokens, -1)
    drawn = chosen(rows, 0.5, noise)
    near = logits[:3].softmax(0)
    counts = torch.bincount(drawn[:, 0], minlength=4)
    assert counts[3] == 0
    assert chi_square_p(counts[:3], near) > 1e-3
    assert chi_square_p(counts, logits.softmax(0)) < 1e-6  # control
    second = torch.bincount(drawn[drawn[:, 0] == 0, 1], minlength=4)
    assert second[0] == 0 and second[3] == 0
    assert chi_square_p(second[1:3], logits[1:3].softmax(0)) > 1e-3
    assert chosen(rows[:1], 0.5).tolist() == [[0, 1]]


def test_draws_are_a_function_of_the_step_the_token_and_the_layer() -> None:
    """So a layout, a recomputation and a resumed run draw the same."""
    x, whole = torch.zeros(12, 4), DropoutState(3)
    whole.begin(5, [(0, 8), (1, 4)])
    numbers = SiteNumbers("router 1", whole).uniform(x, 6, "choice")
    assert numbers.min() > 0 and numbers.max() < 1
    part = DropoutState(3)
    part.begin(5, [(1, 4)])
    assert torch.equal(SiteNumbers("router 1", part).uniform(x[8:], 6, "choice"), numbers[8:])
    for site, step, purpose in (("router 2", 5, "choice"), ("router 1", 6, "choice"), ("router 1", 5, "share")):
        part.begin(step, [(1, 4)])
        assert not torch.equal(SiteNumbers(site, part).uniform(x[8:], 6, purpose), numbers[8:])
    part.end()
    assert not SiteNumbers("router 1", part).active


def test_inputs_are_scattered_about_themselves() -> None:
    x = torch.full((500, 40), 2.0)
    scattered = jittered(x, SiteNumbers("x", begun(tokens=500)), 0.1)
    assert scattered.min() > 2 * 0.9**2 and scattered.max() < 2 * 1.1**2
    assert abs(float(scattered.mean()) - 2) < 5e-3 and scattered.std() > 0.1


def test_recorded_routes_are_taken_again(tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """In their order: an expert's weight depends on whether it is the first."""
    values = tiny_values("phimoe")
    twin(values, tmp_path)
    model, tokens, positions = load(tmp_path), random_tokens(values["vocab_size"]), torch.arange(LENGTH)

    def hidden() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, positions, PackedAttention((0, LENGTH)))

    with recording(model) as recorded:
        expected = hidden()
    routes = recorded.stacked(positions)
    with replaying(model, routes):
        assert torch.equal(hidden(), expected)
    with replaying(model, routes.flip(2)):
        other = hidden()
    assert other.isfinite().all() and (other - expected).abs().max() > 1e-2


def test_long_documents_have_the_long_factors(tiny_values: Callable[[str], dict[str, Any]], tmp_path: Path) -> None:
    """As published, and as vLLM computes them (phi3_long_rope_scaled_rope.py): transformers 5.23 keeps the short
    factors, so it is given the long ones in their place."""
    values = tiny_values("phimoe")
    scaling = values["rope_scaling"] | {"original_max_position_embeddings": LENGTH - 4}
    long_alone = scaling | {"short_factor": scaling["long_factor"]}
    theirs = twin(values | {"rope_scaling": long_alone}, tmp_path)
    tokens = random_tokens(values["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_scaling": scaling}))
    model = load(tmp_path)
    for length, is_alike in ((LENGTH, True), (LENGTH - 4, False)):
        with torch.no_grad():
            expected = theirs(tokens[None, :length]).logits[0]
            found = model.logits(model(tokens[:length], torch.arange(length), PackedAttention((0, length))))
        difference = (found - expected).abs().max()
        assert difference < 1e-5 if is_alike else difference > 1e-2
