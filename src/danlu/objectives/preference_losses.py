"""Losses of pairs of answers and of judged answers, one value each, as functions of log-probabilities of whole answers.

All are evaluated in float64, which holds the difference of two sums over thousands of tokens; they are few numbers.
None hides a NaN.

P pairs, or answers of one label
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.recipe.sections import (
    AlphaDivergence,
    Aot,
    AotUnpaired,
    ApoZeroUnpaired,
    Bco,
    Cpo,
    DeltaTerm,
    Discopop,
    Exo,
    ForwardKlDivergence,
    Hinge,
    Ipo,
    JsDivergence,
    Kto,
    LogRatioTerm,
    Orpo,
    Robust,
    Sigmoid,
    SigmoidNorm,
    Simpo,
    Sppo,
)

MOST_EXPONENT = 80.0
"""The largest argument of an exponential that grows with the ratio (TRL's); the gradient is 0 beyond it."""
LEAST_NEGATIVE = -torch.finfo(torch.float32).eps
"""The largest log-probability of a token with finite odds; nearer to 0, float32 does not distinguish it from 0."""


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of answers under the models, sums over the tokens of each: [P] float64.

    In pairs, the n-th of chosen and rejected belong together; with answers that were judged alone, chosen are the
    desirable and rejected the undesirable ones, and there may be more of one than of the other.
    """

    chosen: Tensor  # log-probability under the policy
    rejected: Tensor
    reference_chosen: Tensor  # under the reference; 0 without one
    reference_rejected: Tensor
    chosen_tokens: Tensor  # the weight of its tokens
    rejected_tokens: Tensor
    margins: Tensor  # of the rows of pairs; 0 where a row has none
    chosen_facts: Mapping[str, Tensor]  # those of `STEP_FACTS` that the step was prepared with
    rejected_facts: Mapping[str, Tensor]
    pair_likelihood: Tensor | None = None  # WPO's weight of each pair, where a term asks for it

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """log pi / pi_ref of (chosen, rejected)."""
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def per_token(self) -> tuple[Tensor, Tensor]:
        """The mean log-probability of the tokens of (chosen, rejected)."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def logistic(x: Tensor, flipped: float = 0.0) -> Tensor:
    """-log sigmoid(x) where the share `flipped` of labels is taken to be the other way round."""
    loss = -(1 - flipped) * F.logsigmoid(x)
    return loss - flipped * F.logsigmoid(-x) if flipped else loss


def log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logprob); p is at most as near to 1 as float32 can tell."""
    logprob = logprob.clamp(max=LEAST_NEGATIVE)
    near_one = logprob > -math.log(2)  # of the two forms of log(1 - p), each is exact where the other cancels
    small = torch.where(near_one, logprob, -1.0)
    large = torch.where(near_one, -1.0, logprob)
    return logprob - torch.where(near_one, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def scores(term: DeltaTerm, pairs: Answers) -> tuple[Tensor, Tensor]:
    """f'(pi / pi_ref) of (chosen, rejected), without constants: f-DPO (arXiv:2309.16240)."""
    chosen, rejected = pairs.ratios
    return _score(term, chosen), _score(term, rejected)


def _score(term: DeltaTerm, ratio: Tensor) -> Tensor:
    divergence = term.divergence
    if isinstance(divergence, ForwardKlDivergence):
        return 1 - (-ratio).clamp(max=MOST_EXPONENT).exp()
    if isinstance(divergence, JsDivergence):
        return math.log(2) + F.logsigmoid(ratio)
    if isinstance(divergence, AlphaDivergence) and divergence.alpha != 1:
        order = divergence.alpha - 1
        return torch.expm1((order * ratio).clamp(max=MOST_EXPONENT)) / order
    return ratio


def _delta(term: DeltaTerm, pairs: Answers) -> Tensor:
    chosen, rejected = scores(term, pairs)
    return chosen - rejected


def _delta_per_token(term: DeltaTerm, pairs: Answers) -> Tensor:
    chosen, rejected = scores(term, pairs)
    return chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens


def _rewards(term: LogRatioTerm, pairs: Answers) -> tuple[Tensor, Tensor]:
    chosen, rejected = pairs.ratios
    return term.beta * chosen, term.beta * rejected


def _sigmoid(term: Sigmoid, pairs: Answers) -> Tensor:
    return logistic(term.beta * _delta(term, pairs) - pairs.margins, term.label_smoothing)


def _robust(term: Robust, pairs: Answers) -> Tensor:
    x, flipped = term.beta * _delta(term, pairs) - pairs.margins, term.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(x) + flipped * F.logsigmoid(-x)) / (1 - 2 * flipped)


def _hinge(term: Hinge, pairs: Answers) -> Tensor:
    return (1 + pairs.margins - term.beta * _delta(term, pairs)).relu()


def _ipo(term: Ipo, pairs: Answers) -> Tensor:
    return (_delta_per_token(term, pairs) - 1 / (2 * term.beta)).square()


def _exo(term: Exo, pairs: Answers) -> Tensor:
    x, flipped = term.beta * _delta(term, pairs), term.label_smoothing
    of_chosen = x.sigmoid() * (F.logsigmoid(x) - math.log1p(-flipped))
    return of_chosen + (-x).sigmoid() * (F.logsigmoid(-x) - math.log(flipped))


def _discopop(term: Discopop, pairs: Answers) -> Tensor:
    x = term.beta * _delta(term, pairs)
    # exp(-x) sigmoid(x / tau) in one exponential: its factors are infinity and 0 far below 0.
    return logistic(x) * (-x / term.tau).sigmoid() + (F.logsigmoid(x / term.tau) - x).clamp(max=MOST_EXPONENT).exp()


def _sigmoid_norm(term: SigmoidNorm, pairs: Answers) -> Tensor:
    return logistic(term.beta * _delta_per_token(term, pairs) - pairs.margins)


def _nca(term: LogRatioTerm, pairs: Answers) -> Tensor:
    chosen, rejected = _rewards(term, pairs)
    return logistic(chosen) + 0.5 * logistic(-chosen) + 0.5 * logistic(-rejected)


def _bco(term: Bco, pairs: Answers) -> Tensor:
    chosen, rejected = _rewards(term, pairs)
    if term.shift == "none":
        return logistic(chosen) + logistic(-rejected)
    shift = term.beta * pairs.chosen_facts[BCO_SHIFT]
    return logistic(chosen - shift) + logistic(shift - rejected)


def _sppo(term: Sppo, pairs: Answers) -> Tensor:
    chosen, rejected = pairs.ratios
    return (chosen - 0.5 / term.beta).square() + (rejected + 0.5 / term.beta).square()


def _apo_zero(term: LogRatioTerm, pairs: Answers) -> Tensor:
    chosen, rejected = _rewards(term, pairs)
    return (-chosen).sigmoid() + rejected.sigmoid()


def _apo_down(term: LogRatioTerm, pairs: Answers) -> Tensor:
    chosen, rejected = _rewards(term, pairs)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def _aot(term: Aot, pairs: Answers) -> Tensor:
    over_rejected = pairs.chosen - pairs.rejected
    return logistic(term.beta * (over_rejected - pairs.chosen_facts[AOT_PARTNER]), term.label_smoothing)


def _aot_unpaired(term: AotUnpaired, pairs: Answers) -> Tensor:
    """Each answer of the pair against its partner in the sorted order, which is fixed and in any micro-batch.

    Both halves of a couple that the sort makes say its whole loss, so the value is halved; each carries the gradient of
    one half, so the gradient is not.
    """
    chosen, rejected = pairs.ratios
    over = chosen - pairs.chosen_facts[AOT_UNPAIRED_PARTNER], pairs.rejected_facts[AOT_UNPAIRED_PARTNER] - rejected
    twice = sum((logistic(term.beta * each, term.label_smoothing) for each in over), torch.zeros_like(chosen))
    return twice - 0.5 * twice.detach()


def _simpo(term: Simpo, pairs: Answers) -> Tensor:
    chosen, rejected = pairs.per_token
    return logistic(term.beta * (chosen - rejected) - term.gamma - pairs.margins, term.label_smoothing)


def _cpo(term: Cpo, pairs: Answers) -> Tensor:
    return logistic(term.beta * (pairs.chosen - pairs.rejected) - pairs.margins, term.label_smoothing)


def _orpo(term: Orpo, pairs: Answers) -> Tensor:
    chosen, rejected = pairs.per_token
    return term.beta * logistic(log_odds(chosen) - log_odds(rejected))


PAIR_LOSSES: dict[str, Callable[[Any, Answers], Tensor]] = {
    "aot": _aot,
    "aot-unpaired": _aot_unpaired,
    "apo-down": _apo_down,
    "apo-zero": _apo_zero,
    "bco": _bco,
    "cpo": _cpo,
    "discopop": _discopop,
    "exo": _exo,
    "hinge": _hinge,
    "ipo": _ipo,
    "nca": _nca,
    "orpo": _orpo,
    "robust": _robust,
    "sigmoid": _sigmoid,
    "sigmoid-norm": _sigmoid_norm,
    "simpo": _simpo,
    "sppo": _sppo,
}
"""Functions from pairs to the loss [P] of each, by the kind of a term. `sft` has only its likelihood."""


def _kto(term: Kto, answers: Answers) -> tuple[Tensor, Tensor]:
    chosen, rejected = answers.ratios
    chosen, rejected = chosen - answers.chosen_facts[KTO_KL], rejected - answers.rejected_facts[KTO_KL]
    return (-term.beta * chosen).sigmoid(), (term.beta * rejected).sigmoid()


def _apo_zero_unpaired(term: ApoZeroUnpaired, answers: Answers) -> tuple[Tensor, Tensor]:
    chosen, rejected = answers.ratios
    return (-term.beta * chosen).sigmoid(), (term.beta * rejected).sigmoid()


JUDGED_LOSSES: dict[str, Callable[[Any, Answers], tuple[Tensor, Tensor]]] = {
    "apo-zero-unpaired": _apo_zero_unpaired,
    "kto": _kto,
}
"""Functions from judged answers to the losses of desirable and of undesirable ones, by the kind of a term."""

NLL_WEIGHTS: dict[str, Callable[[Any], float]] = {
    "cpo": lambda term: term.nll,
    "orpo": lambda term: 1.0,
    "sft": lambda term: 1.0,
}
"""The weight of the negative log-likelihood of chosen answers, by the kind of a term."""

# Facts of branches that are known once the whole step has been seen: see `preference.StepPreference`.
AOT_PARTNER = "aot_partner"
"""The reference's sorted difference at the rank of the pair's own among the policy's, a fact of a chosen answer."""
AOT_UNPAIRED_PARTNER = "aot_unpaired_partner"
"""The ratio of the answer with the other label and the same rank among its own kind, a fact of an answer."""
KTO_KL = "kto_kl"
"""The step's estimate of the KL divergence between policy and reference, a fact of a judged answer."""

BCO_SHIFT = "bco_shift"
"""The running mean of all answers' ratios, a fact of an answer; times beta it is BCO's reward shift."""
STEP_FACTS = (AOT_PARTNER, AOT_UNPAIRED_PARTNER, BCO_SHIFT, KTO_KL)
