"""The advantages of policy gradients: how much better an answer, or a token, was than expected.

Rewards are few, so all is float64 on the host. A reward that is NaN was not given: it is left out of every mean, and
the answer gets the advantage 0. The tests compare with exact values (`tests/textbook`).

M answers · R rewards of an answer · N tokens of all answers, one behind the other
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group", "leave-one-out", "greedy", "batch", "none"]
"""The value subtracted from a reward.

It is the mean of the prompt's answers (GRPO, arXiv:2402.03300), of its other answers (RLOO, arXiv:2402.14740), the
reward of its greedy answer (ReMax, arXiv:2310.10505), the mean of all answers (REINFORCE++, arXiv:2501.03262), or
nothing.
"""
Scale = Literal["group", "batch", "mean", "none"]
"""The divisor of the difference.

It is the standard deviation of the prompt's answers (GRPO) or of all of them (arXiv:2508.08221), the mean of the
prompt's answers (MaxRL, arXiv:2602.02710), or nothing (Dr. GRPO, arXiv:2503.20783).
"""

SMALLEST_SCALE = 1e-4
"""Added to the divisor, as in TRL: answers that are all alike have no deviation, and get 0."""
SMALLEST_MEAN = 0.1
"""The least mean that is divided by: the paper divides by that of rewards of 0 and 1 whatever it is, but a sum of
weighted rewards may be near 0, and 1 / mean then is the step."""


def answer_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """The advantage of each answer among those of its prompt, (reward - baseline) / scale: [M] float64.

    Args:
        rewards: [M], NaN where there is none.
        groups: [M] int64, the number of each answer's prompt: equal numbers are one group.
        greedy_rewards: [M], for the baseline "greedy": of the greedy answer to the same prompt.

    An answer without others in its group gets 0 with the baselines "group" and "leave-one-out": there is nothing to
    compare it with. Standard deviations have n - 1 in the denominator.
    """
    assert rewards.shape == groups.shape, f"{rewards.shape} rewards in groups {groups.shape}"
    given = ~rewards.isnan()
    values = rewards.double().nan_to_num(0.0)
    _, index = groups.unique(return_inverse=True)
    counts, sums = _sum_by(index, given.double()), _sum_by(index, values)  # by group
    count, mean = counts[index], (sums / counts.clamp(min=1))[index]  # [M]
    everything = values[given]
    match baseline:
        case "group":
            difference = values - mean
        case "leave-one-out":
            difference = torch.where(count > 1, (values - mean) * count / (count - 1).clamp(min=1), 0.0)
        case "greedy":
            assert greedy_rewards is not None, "the baseline is the reward of a greedy answer"
            difference = values - greedy_rewards.double()
            given = given & ~greedy_rewards.isnan()
        case "batch":
            difference = values - everything.mean()
        case "none":
            difference = values
    match scale:
        case "group":
            squares = _sum_by(index, (values - mean).square() * given)[index]
            difference = difference / ((squares / (count - 1).clamp(min=1)).sqrt() + SMALLEST_SCALE)
        case "batch":
            deviation = everything.std() if len(everything) > 1 else everything.new_zeros(())
            difference = difference / (deviation + SMALLEST_SCALE)
        case "mean":
            difference = difference / mean.clamp(min=SMALLEST_MEAN)
        case "none":
            pass
    return torch.where(given, difference, 0.0)


def combined_advantages(
    rewards: Tensor,
    weights: Sequence[float],
    groups: Tensor,
    *,
    apart: bool,
    baseline: Baseline = "group",
    scale: Scale = "group",
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """Computes the advantages [M] of answers with several rewards [M, R], each with its weight.

    By default the weighted sum of the rewards is one reward. `apart` makes advantages of each reward alone, and divides
    their weighted sum by its deviation over all answers (GDPO, arXiv:2601.05242): a reward that varies little counts no
    less than one that varies much. A reward that is NaN counts as 0 next to others; an answer without any gets the
    advantage 0.
    """
    by_weight = torch.tensor(list(weights), dtype=torch.float64)  # [R]
    unscored = rewards.isnan().all(1)
    if not apart:
        total = weighted_reward(rewards, weights)
        greedy = None if greedy_rewards is None else weighted_reward(greedy_rewards, weights)
        return answer_advantages(total, groups, baseline=baseline, scale=scale, greedy_rewards=greedy)
    parts = [
        answer_advantages(
            rewards[:, part],
            groups,
            baseline=baseline,
            scale=scale,
            greedy_rewards=None if greedy_rewards is None else greedy_rewards[:, part],
        )
        for part in range(rewards.shape[1])
    ]
    total = torch.stack(parts, 1) @ by_weight
    scored = total[~unscored]
    if len(scored) < 2:
        return torch.zeros_like(total)
    normalised = (total - scored.mean()) / (scored.std() + SMALLEST_SCALE)
    return torch.where(unscored, 0.0, normalised)


def weighted_reward(rewards: Tensor, weights: Sequence[float]) -> Tensor:
    """[M] float64: the weighted sum of an answer's rewards [M, R] that were given; NaN where none was."""
    by_weight = torch.tensor(list(weights), dtype=torch.float64)
    total = rewards.double().nan_to_num(0.0) @ by_weight
    return torch.where(rewards.isnan().all(1), float("nan"), total)


def overlong_penalty(lengths: Tensor, longest: int, margin: int) -> Tensor:
    """[M]: 0 up to `longest` - `margin` tokens, falling to -1 at `longest` (DAPO's soft punishment, arXiv:2503.14476).

    lengths: [M] tokens of each answer.
    """
    assert 0 < margin <= longest, f"a margin of {margin} of {longest} tokens"
    return -((lengths.double() - (longest - margin)) / margin).clamp(0.0, 1.0)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    last_values: Tensor,
    offsets: Sequence[int],
    *,
    discount: float = 1.0,
    trace_decay: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns of every token (GAE, arXiv:1506.02438): [N] float64 each.

    A_t = delta_t + gamma lambda A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; the return is A_t + V_t, the target of
    the values.

    Args:
        rewards: [N], the reward of each token.
        values: [N], V of the place that each token is drawn from.
        last_values: [M], V behind the last token of each answer: 0 where it ended, and the critic's value where it was
            cut off and goes on in principle.
        offsets: M + 1 of them, where answers begin and end among the N tokens.
        discount: gamma.
        trace_decay: lambda; 1 gives returns less values, 0 the errors of one step.
    """
    counts = [stop - start for start, stop in itertools.pairwise(offsets)]
    lengths, longest = torch.tensor(counts), max(counts, default=0)
    # By steps from the end, over all answers at once: answers are aligned at their ends.
    reward, value = (_aligned_at_end(x.double().split(counts), longest) for x in (rewards, values))  # [M, L]
    following = torch.cat([value[:, 1:], last_values.double().unsqueeze(1)], 1)
    delta = reward + discount * following - value
    advantages = torch.zeros_like(delta)
    carried = torch.zeros(len(lengths), dtype=torch.float64)
    for step in reversed(range(longest)):
        carried = delta[:, step] + discount * trace_decay * carried
        advantages[:, step] = carried
    real = torch.arange(longest) >= longest - lengths.unsqueeze(1)  # [M, L]; answers stay in order
    return advantages[real], (advantages + value)[real]


def whitened(values: Tensor, weights: Tensor, *, shift: bool = True) -> Tensor:
    """Values [N] with the deviation 1, and with the mean 0 if they are shifted, over entries weighed by weights [N].

    Zero weights leave entries out; these become 0.
    """
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / total
    result = (values - mean) * torch.rsqrt(variance + 1e-8)
    return torch.where(weights > 0, result if shift else result + mean, 0.0)


def _sum_by(index: Tensor, values: Tensor) -> Tensor:
    groups = int(index.max()) + 1 if len(index) else 0
    return values.new_zeros(groups).index_add(0, index, values)


def _aligned_at_end(rows: Sequence[Tensor], longest: int) -> Tensor:
    """[M, L]: rows of different lengths, each behind as many zeros as it is shorter than L."""
    aligned = torch.zeros(len(rows), longest, dtype=torch.float64)
    for place, row in zip(aligned, rows, strict=True):
        place[longest - len(row) :] = row
    return aligned
