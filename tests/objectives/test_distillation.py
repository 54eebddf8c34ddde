"""The objective of distillation against whole logits, over micro-batches and with fp16's scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from builders.tiny_run import SyntheticPacks, tiny_model
from builders.worst_errors import worst_relative_error
from torch import Tensor, nn

from danlu.core.types import Objective, Pack
from danlu.data.batch import EMPTY_PACK, collate
from danlu.models.attend import attend_for
from danlu.models.decoder import Decoder
from danlu.objectives.distillation import Distillation, HiddenStateDistillation, TeacherDivergence, TeacherTerm
from danlu.stages.learner import DecoderLearner
from danlu.stages.roles import FrozenDecoder
from danlu.training.step import StepGradients, accumulate

ITEMS = [SyntheticPacks().at(number) for number in range(5)]
TEACHER_WIDTH, CAP = 48, 5.0
ONE = (TeacherTerm("teacher"),)


def sharpened(model: Decoder, factor: float) -> Decoder:
    """So that a model of random weights says something."""
    with torch.no_grad():
        model.head_weight.mul_(factor)
    return model


def teachers(vocab_size: int = 64) -> dict[str, Decoder]:
    """A wider one, and one of another family that caps its logits."""
    gemma = {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": CAP}
    return {
        "teacher": sharpened(tiny_model(seed=1, hidden_size=TEACHER_WIDTH, vocab_size=vocab_size), 10),
        "teacher.1": sharpened(tiny_model(seed=2, vocab_size=vocab_size, **gemma), 10),
    }


def learner(objective: Objective, policy: Decoder, micro: int = 2, **models: Decoder) -> DecoderLearner:
    roles = {role: FrozenDecoder(model.requires_grad_(False), model, torch.float32) for role, model in models.items()}
    return DecoderLearner(policy, policy, torch.device("cpu"), torch.float32, micro, objective, objective, roles=roles)


def step(
    objective: Objective, micro: int = 2, loss_scale: float = 1.0, vocab_size: int = 64, items: Sequence[Pack] = ITEMS
) -> tuple[StepGradients, dict[str, Tensor]]:
    """A step's loss and metrics, and its gradients by name."""
    policy = sharpened(tiny_model(), 6)
    asking = learner(objective, policy, micro, **teachers(vocab_size))
    own = dict(objective.named_parameters()) if isinstance(objective, nn.Module) else {}
    parameters = {**dict(policy.named_parameters()), **own}
    for parameter in parameters.values():
        parameter.grad = None
    done = accumulate(asking, items, step=1, clip=None, loss_scale=loss_scale, holders=list(parameters.values()))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return done, {
        name: grad.to_dense() if grad.is_sparse else grad for name, grad in gradients.items() if grad is not None
    }


Formula = Callable[[Tensor, Tensor, float], Tensor]


def forward_kl(logp: Tensor, logq: Tensor, squared: float) -> Tensor:
    return squared * (logq.exp() * (logq - logp)).sum(1)


def written_out(
    shares: dict[str, float], temperature: float, alpha: float, divergence: Formula = forward_kl, vocab_size: int = 64
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss of a step and its gradients, from whole logits of each model."""
    policy = sharpened(tiny_model(), 6)
    batch = collate(ITEMS)

    def logits(model: Decoder) -> Tensor:
        hidden = model(batch.tokens, batch.positions, attend_for(batch))
        return model.logits(hidden)[batch.logits_indices][:, :64]  # [N, V]

    own = logits(policy)
    nll = -own.log_softmax(1).gather(1, batch.targets[:, None]).squeeze(1)
    total = alpha * nll
    for role, share in shares.items():
        said = logits(teachers(vocab_size)[role].requires_grad_(False))
        logp, logq = ((values / temperature).log_softmax(1) for values in (own, said))
        total = total + (1 - alpha) * share * divergence(logp, logq, temperature**2)
    loss = (total * batch.weights).sum() / batch.weights.sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("micro", [1, 2, 8])
def test_loss_and_gradients_equal_the_formula_in_any_micro_batches(micro: int) -> None:
    objective = Distillation(TeacherDivergence(ONE, "forward", temperature=2.0), alpha=0.3)
    done, gradients = step(objective, micro)
    want, wanted = written_out({"teacher": 1.0}, 2.0, 0.3)
    assert done.loss == pytest.approx(want, rel=1e-5)
    assert done.loss == pytest.approx(0.3 * done.metrics["nll"] + 0.7 * done.metrics["divergence"], rel=1e-6)
    assert worst_relative_error(gradients, wanted) < 1e-5
    # Negative controls: without the factor T^2, or with the temperature of the teacher alone, it is another loss.
    dropped, _ = written_out({"teacher": 1.0}, 2.0, 0.3, lambda logp, logq, squared: forward_kl(logp, logq, 1.0))
    assert done.loss != pytest.approx(dropped, rel=1e-2)


def test_several_teachers_are_a_mean_by_their_shares() -> None:
    objective = Distillation(
        TeacherDivergence((TeacherTerm("teacher", 0.25), TeacherTerm("teacher.1", 0.75)), temperature=1.5)
    )
    done, gradients = step(objective)
    want, wanted = written_out({"teacher": 0.25, "teacher.1": 0.75}, 1.5, 0.0)
    assert done.loss == pytest.approx(want, rel=1e-5) and worst_relative_error(gradients, wanted) < 1e-5
    assert done.loss != pytest.approx(written_out({"teacher": 0.75, "teacher.1": 0.25}, 1.5, 0.0)[0], rel=1e-2)


def grouped(logprobs: Tensor, ids: Tensor) -> Tensor:
    others = torch.ones_like(logprobs).scatter(1, ids, 0)
    return torch.cat((logprobs.gather(1, ids), (logprobs.exp() * others).sum(1, keepdim=True).log()), 1)


@pytest.mark.parametrize("micro", [1, 8])
def test_the_likeliest_tokens_of_a_teacher_with_all_others_as_one(micro: int) -> None:
    def over_outcomes(logp: Tensor, logq: Tensor, squared: float) -> Tensor:
        ids = logq.topk(5, dim=1).indices
        return forward_kl(grouped(logp, ids), grouped(logq, ids), squared)

    def renormalised(logp: Tensor, logq: Tensor, squared: float) -> Tensor:
        ids = logq.topk(5, dim=1).indices
        return forward_kl(logp.gather(1, ids), logq.gather(1, ids).log_softmax(1), squared)

    done, gradients = step(Distillation(TeacherDivergence((TeacherTerm("teacher", top_k=5),), temperature=2.0)), micro)
    want, wanted = written_out({"teacher": 1.0}, 2.0, 0.0, over_outcomes)
    assert done.loss == pytest.approx(want, rel=1e-5) and worst_relative_error(gradients, wanted) < 1e-5
    other, others = written_out({"teacher": 1.0}, 2.0, 0.0, renormalised)
    assert done.loss != pytest.approx(other, rel=1e-2) and worst_relative_error(gradients, others) > 1e-2


@pytest.mark.parametrize("top_k", [None, 5])
def test_rows_of_an_embedding_that_stand_for_no_token_take_no_part(top_k: int | None) -> None:
    term = TeacherTerm("teacher", top_k=top_k)
    done, gradients = step(Distillation(TeacherDivergence((term,))), vocab_size=70)

    def chosen(logp: Tensor, logq: Tensor, squared: float) -> Tensor:
        ids = logq.topk(5, dim=1).indices
        return forward_kl(logp, logq, 1.0) if top_k is None else forward_kl(grouped(logp, ids), grouped(logq, ids), 1.0)

    want, wanted = written_out({"teacher": 1.0}, 1.0, 0.0, chosen, vocab_size=70)
    assert done.loss == pytest.approx(want, rel=1e-5) and worst_relative_error(gradients, wanted) < 1e-5


def matching(seed: int = 0) -> HiddenStateDistillation:
    torch.manual_seed(seed)
    terms = (TeacherTerm("teacher", 0.5), TeacherTerm("teacher.1", 0.5, top_k=4))
    widths = {"teacher": TEACHER_WIDTH, "teacher.1": 32}
    return HiddenStateDistillation(Distillation(TeacherDivergence(terms), alpha=0.5), 0.2, 32, widths)


def test_hidden_states_are_matched_by_a_map_that_is_trained() -> None:
    objective = matching()
    done, gradients = step(objective)
    batch, policy, asked = collate(ITEMS), sharpened(tiny_model(), 6), teachers()

    def hidden(model: Decoder) -> Tensor:
        return model(batch.tokens, batch.positions, attend_for(batch))[batch.logits_indices]

    errors = [
        0.5 * (objective.projections[name](hidden(policy)) - hidden(asked[role]).detach()).square().mean(1)
        for role, name in (("teacher", "teacher"), ("teacher.1", "teacher_1"))
    ]
    want = (torch.stack(errors).sum(0) * batch.weights).sum() / batch.weights.sum()
    assert done.metrics["hidden"] == pytest.approx(want.item(), rel=1e-5)
    plain, _ = step(objective.distillation)
    assert done.loss == pytest.approx(plain.loss + 0.2 * want.item(), rel=1e-5)
    (wanted,) = torch.autograd.grad(0.2 * want, objective.projections["teacher"].weight)
    torch.testing.assert_close(gradients["projections.teacher.weight"], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Distillation(TeacherDivergence(ONE, "forward", temperature=2.0), alpha=0.3),
        lambda: Distillation(TeacherDivergence((TeacherTerm("teacher", top_k=5),), "reverse")),
        lambda: Distillation(TeacherDivergence(ONE, "jensen-shannon", beta=0.3)),
        matching,
    ],
)
def test_a_loss_scale_is_in_every_gradient_and_in_no_value(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = make()
    (done, want), (scaled, got) = step(objective), step(objective, loss_scale=4096.0)
    assert scaled.loss == pytest.approx(done.loss, rel=1e-6)
    assert worst_relative_error(got, want) < 1e-6
    # Negative control: the division by a scale that is in no gradient is seen.
    monkeypatch.setattr("danlu.stages.learner.scale_gradient", lambda x, scale: x)
    assert worst_relative_error(step(objective, loss_scale=4096.0)[1], want) > 0.5


def test_an_empty_micro_batch_adds_nothing() -> None:
    objective = Distillation(TeacherDivergence((TeacherTerm("teacher", top_k=5),)), alpha=0.3)
    done, want = step(objective, micro=1)
    again, got = step(objective, micro=1, items=[*ITEMS, EMPTY_PACK])
    assert again.loss == pytest.approx(done.loss, rel=1e-6) and worst_relative_error(got, want) < 1e-6
