"""What the adapters that a run trains are called, and of which model of a run a parameter is, by its name."""

from __future__ import annotations

from danlu.core.types import Role

TRAINED = "default"
"""What the adapter that is trained is called, as in PEFT."""
VALUE: Role = "value"
"""PPO's model of values: its role, what its adapter is called, and what the names of its own parameters begin with."""
_SCORE_HEAD = "objective.score."


def role_of(name: str) -> Role:
    """The model that a trained parameter is of: that of values, or the policy.

    Of values are the score head, what begins with `value.`, and what the adapter `value` has in any module.
    """
    return VALUE if name.startswith(_SCORE_HEAD) or VALUE in name.split(".") else "policy"


def own_name(name: str) -> str:
    """What a parameter of a decoder of values is called in optimizer and checkpoints."""
    return f"{VALUE}.{name}"
