"""A head with a bias, in every output of a decoder and in the engine: as logits with it say, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders.generation import generate
from builders.rollout_requests import GREEDY, PROMPTS, requests, slowly
from builders.small_config import small_config
from builders.tiny_run import SyntheticPacks
from torch import Tensor

from danlu.core.types import Batch
from danlu.data.batch import collate
from danlu.inference.engine import EngineOptions
from danlu.models.attend import attend_for
from danlu.models.decoder import BIAS_COLUMNS, Decoder
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.stages.outputs import DecoderOutputs

CONFIG = small_config(vocab_size=300, head_bias=True, vocab_padding=4)


def decoder(seed: int = 0) -> Decoder:
    model = build(CONFIG)
    initialize(model, seed)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def batch_of_targets() -> Batch:
    return collate([SyntheticPacks().at(number) for number in range(3)])


def outputs_of(model: Decoder, batch: Batch, *, exact: bool = False) -> tuple[DecoderOutputs, Tensor]:
    """The outputs, and the logits of the targets with their gradients."""
    hidden = model(batch.tokens, batch.positions, attend_for(batch), torch.float32)
    outputs = DecoderOutputs(model, hidden, batch, len(batch.tokens), len(batch.targets), exact=exact)
    return outputs, model.logits(hidden.index_select(0, batch.logits_indices))


def gradients(value: Tensor, model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward(retain_graph=True)
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


OUTPUTS: dict[str, tuple[Callable[[DecoderOutputs], Tensor], Callable[[Tensor, Batch], Tensor]]] = {
    "cross_entropy": (
        lambda outputs: outputs.cross_entropy().total,
        lambda logits, batch: -(batch.weights * of_targets(logits, batch)).sum(),
    ),
    "logprobs": (lambda outputs: outputs.logprobs().logprobs.sum(), lambda *both: of_targets(*both).sum()),
    "top_tokens": (
        lambda outputs: outputs.divergence(teacher(), kind="forward", top_k=3).sum(),
        lambda logits, batch: grouped(logits).sum(),
    ),
    "divergence": (
        lambda outputs: outputs.divergence(teacher(), kind="forward").sum(),
        lambda logits, batch: kl(logits).sum(),
    ),
}


def of_targets(logits: Tensor, batch: Batch) -> Tensor:
    return logits.log_softmax(1).gather(1, batch.targets[:, None]).squeeze(1)


def teacher() -> DecoderOutputs:
    with torch.no_grad():
        return outputs_of(decoder(seed=1), batch_of_targets())[0]


def teacher_logprobs() -> Tensor:
    with torch.no_grad():
        return outputs_of(decoder(seed=1), batch_of_targets())[1].log_softmax(1)


def kl(logits: Tensor) -> Tensor:
    wanted = teacher_logprobs()
    return (wanted.exp() * (wanted - logits.log_softmax(1))).sum(1)


def grouped(logits: Tensor) -> Tensor:
    """The same over three tokens and all others as one."""
    wanted, own = teacher_logprobs(), logits.log_softmax(1)
    ids = wanted.topk(3).indices
    both = []
    for each in (wanted, own):
        rest = each.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        both.append(torch.cat((each.gather(1, ids), rest), 1))
    return (both[0].exp() * (both[0] - both[1])).sum(1)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_those_of_the_logits_with_the_bias(name: str) -> None:
    model, batch = decoder(), batch_of_targets()
    outputs, logits = outputs_of(model, batch)
    own, expected = OUTPUTS[name]
    found, wanted = own(outputs), expected(logits, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    gradient, wanted_gradient = gradients(found, model), gradients(wanted, model)
    assert gradient.keys() == wanted_gradient.keys() >= {"lm_head.bias", "lm_head.weight"}
    for parameter, each in wanted_gradient.items():
        torch.testing.assert_close(gradient[parameter], each, rtol=0, atol=1e-5 * float(each.abs().max()) + 1e-9)
    assert wanted_gradient["lm_head.bias"][: CONFIG.vocab_size].abs().max() > 1e-3
    assert not wanted_gradient["lm_head.bias"][CONFIG.vocab_size :].any()  # no token has these rows
    with torch.no_grad():  # control
        model.lm_head.bias.zero_()  # type: ignore[union-attr]
    assert (own(outputs_of(model, batch)[0]) - wanted).abs() > 1e-2


def test_the_matrix_has_a_column_for_the_bias() -> None:
    model = decoder()
    assert model.head_weight.shape == (CONFIG.vocab_size, CONFIG.hidden_size + BIAS_COLUMNS)
    hidden = torch.randn(5, CONFIG.hidden_size)
    torch.testing.assert_close(model.head_input(hidden) @ model.head_weight.T, model.logits(hidden))
    plain = build(replace(CONFIG, head_bias=False))
    assert plain.head_input(hidden) is hidden and plain.head_weight.shape[1] == CONFIG.hidden_size


@pytest.mark.parametrize("exact", [False, True])
def test_the_engine_draws_with_the_bias(exact: bool) -> None:
    model = decoder().requires_grad_(False)
    (answer,) = generate(model, PROMPTS[:1], GREEDY, 6, options=EngineOptions(exact=exact))
    tokens, logprobs = slowly(model, requests(count=6)[0])
    assert list(answer.tokens) == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
