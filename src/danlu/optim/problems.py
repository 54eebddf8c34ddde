"""Settings an optimizer cannot work with, told before torch is imported."""

from __future__ import annotations

from danlu.recipe.sections import SGD, Adafactor, AdamW, Lion, Muon, Optimizer


def problems(section: Optimizer) -> list[str]:
    """One line per setting that is out of its range; empty when the section is sound."""
    found: list[str] = []
    match section:
        case AdamW() | Lion():
            found += _below_one("betas", *section.betas)
        case SGD():
            found += _below_one("momentum", section.momentum)
            if section.nesterov and section.momentum == 0:
                found.append(
                    "optimizer.nesterov: Nesterov momentum needs optimizer.momentum above 0. "
                    "Set momentum: 0.9, or nesterov: false."
                )
        case Adafactor():
            if section.beta2_decay > 0:
                found.append(
                    f"optimizer.beta2_decay: {section.beta2_decay} is above 0. It is the exponent of the step, "
                    "so it is negative: -0.8 is usual."
                )
            if section.clip_threshold < 1:
                found.append(
                    f"optimizer.clip_threshold: {section.clip_threshold} is below 1, the size an update has already. "
                    "Use 1.0 or more."
                )
        case Muon():
            found += _below_one("momentum", section.momentum)
            found += _below_one("adamw_betas", *section.adamw_betas)
            if section.newton_schulz_steps >= 100:
                found.append(
                    f"optimizer.newton_schulz_steps: {section.newton_schulz_steps} is too many: use 5, at most 99."
                )
    return found


def _below_one(key: str, *values: float) -> list[str]:
    return [
        f"optimizer.{key}: {value} never forgets, so nothing new is learned. Use a value below 1."
        for value in values
        if value >= 1
    ]
