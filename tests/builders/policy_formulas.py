"""Policy gradients written out token by token, as the papers have them, over outputs that are given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danlu.core.types import Batch, TokenLogprobs
from danlu.objectives.policy import PolicyGradientSettings
from danlu.objectives.policy_losses import ImportanceBounds


@dataclass
class FixedOutputs:
    """Log-probabilities and entropies that are given, whatever they are asked for."""

    values: Tensor  # [N] float64
    entropies: Tensor  # [N] float64

    def logprobs(self, **asked: Any) -> TokenLogprobs:
        return TokenLogprobs(self.values, self.entropies)


def trained_answers(batch: Batch) -> Iterator[tuple[int, list[int]]]:
    """(branch, its targets) of the micro-batch's answers with trained tokens."""
    assert batch.branch is not None
    branches = batch.branch.tolist()
    for branch, numbers in itertools.groupby(range(len(branches)), key=lambda n: branches[n]):
        yield branch, list(numbers)


def token_losses(settings: PolicyGradientSettings, batch: Batch, outputs: dict[str, Any]) -> list[Tensor]:
    """The loss of each target, by the formulas."""
    log_pi, log_ref = outputs["policy"].values, outputs["reference"].values
    old = log_pi.detach() if settings.single_update else batch.columns["old"].double()
    mu, advantages = batch.columns["sampled"].double(), batch.columns["advantage"].double()
    losses: list[Tensor] = []
    for _, targets in trained_answers(batch):
        sequence = ((log_pi - old)[targets].sum() / len(targets)).exp()
        engine = (old - mu)[targets].sum().exp()
        log_w = (log_pi - old)[targets].sum().detach()
        away = float((mu - log_pi.detach())[targets].mean())
        of_engine = []
        for n in targets:
            w = engine if settings.importance and settings.importance.level == "sequence" else (old[n] - mu[n]).exp()
            of_engine.append(_bounded(float(w), settings.importance))
        for n, w in zip(targets, of_engine, strict=True):
            ratio = (log_pi[n] - old[n]).exp() if settings.ratio == "token" else sequence
            a = advantages[n]
            match settings.loss:
                case "clip":
                    most = math.inf if settings.dual_clip is None else settings.dual_clip
                    bounded = min(
                        max(ratio, 1 - settings.clip_low),
                        1 + settings.clip_high,
                        key=lambda r: float(torch.as_tensor(r).detach()),
                    )  # type: ignore[call-overload]
                    loss = -min(min(ratio, torch.tensor(most)) * a, bounded * a)
                case "cispo":
                    loss = -min(float(ratio.detach()), settings.clip_high) * a * log_pi[n]
                case "sapo":
                    tau = settings.sapo_temperatures[0 if a > 0 else 1]
                    loss = -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a
                case "vespo":
                    k, rate = vars(settings.vespo_weights[0 if a >= 0 else 1]).values()
                    log_of_all = log_w + (sum(map(math.log, of_engine)) if settings.importance else 0.0)
                    loss = -(rate + k * log_of_all - rate * log_of_all.exp()).exp() * a * log_pi[n]
            if settings.off_policy is not None and a < 0 and away > settings.off_policy:
                loss = loss * 0
            if settings.importance and settings.loss != "vespo":
                loss = loss * w
            if settings.kl:
                x = log_ref[n] - log_pi[n]
                kl = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[settings.kl_estimator]
                loss = loss + settings.kl * kl * (ratio if settings.kl_with_ratio else 1)
            losses.append(loss)
    return losses


def _bounded(w: float, bounds: ImportanceBounds | None) -> float:
    if bounds is None:
        return 1.0
    if w > bounds.high:
        return 0.0 if bounds.masks else bounds.high
    return 0.0 if bounds.low is not None and w < bounds.low else w


def mean_loss(settings: PolicyGradientSettings, batch: Batch, outputs: dict[str, Any]) -> Tensor:
    """What the step's loss is, by the names that `normalise` has for it."""
    losses = torch.stack(token_losses(settings, batch, outputs))
    answers = [losses[targets] for _, targets in trained_answers(batch)]
    by_group: dict[float, list[Tensor]] = {}
    for (branch, _), of_answer in zip(trained_answers(batch), answers, strict=True):
        by_group.setdefault(float(batch.facts["group"][branch]), []).append(of_answer)
    constant = len(answers) * (settings.constant_tokens or 1)
    mean = {
        "tokens": losses.mean(),
        "sequences": torch.stack([each.mean() for each in answers]).mean(),
        "constant": losses.sum() / constant,
        "groups": torch.stack([torch.cat(each).mean() for each in by_group.values()]).mean(),
    }[settings.normalise]
    return mean - settings.entropy * outputs["policy"].entropies.mean()
