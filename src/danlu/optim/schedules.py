"""Learning-rate schedules as a pure function of the step. Imports no torch: the recipe is checked with it."""

from __future__ import annotations

import math

from danlu.recipe.sections import Schedule


def multiplier(step: int, total: int, section: Schedule) -> float:
    """Returns the factor of the optimizer's own rate at `step`, counted from 1 to `total`.

    With W warm-up steps the rate is step / W until it reaches 1 at step W (at step 1 without warm-up). From there:

    constant      1.
    linear        straight down to `floor` at the last step.
    cosine        half a cosine down to `floor` at the last step (arXiv:1608.03983, without restarts).
    wsd           1, then over the last `decay` steps 1 - sqrt(share) down to `floor` (warm-up, stable, decay:
                  MiniCPM, arXiv:2404.06395; the 1 - sqrt form did best in arXiv:2405.18392).
    inverse-sqrt  sqrt(W / step) (arXiv:1706.03762); `floor` is not used.

    The last step of linear, cosine and wsd is exactly `floor`, unless it is the step that reaches the peak.
    """
    assert 1 <= step <= total, f"step {step} of {total}"
    warmup = max(1, section.warmup_steps(total))
    if step <= warmup:
        return step / warmup
    share = (step - warmup) / (total - warmup)  # of the way from the peak to the last step, in (0, 1]
    match section.kind:
        case "constant":
            return 1.0
        case "linear":
            return _between(section.floor, 1 - share)
        case "cosine":
            return _between(section.floor, 0.5 * (1 + math.cos(math.pi * share)))
        case "wsd":
            stable_until = max(warmup, total - section.decay_steps(total))
            if step <= stable_until:
                return 1.0
            return _between(section.floor, 1 - math.sqrt((step - stable_until) / (total - stable_until)))
        case "inverse-sqrt":
            return math.sqrt(warmup / step)


def _between(floor: float, share: float) -> float:
    """`floor` at share 0 and 1 at share 1, both exactly (`floor + (1 - floor) * share` can miss 1 by a rounding)."""
    return floor * (1 - share) + share
