"""The names of adapters that a run trains, and the model of a run that a parameter belongs to, by its name."""

from __future__ import annotations

from danlu.core.types import Role

TRAINED = "default"
"""The name of the trained adapter, as in PEFT."""
VALUE: Role = "value"
"""PPO's value model: its role, the name of its adapter, and the prefix of its own parameters' names."""
_SCORE_HEAD = "objective.score."


def role_of(name: str) -> Role:
    """The model that a trained parameter belongs to: the value model, or the policy.

    The value model has the score head, names that begin with `value.`, and the adapter `value` of any module.
    """
    return VALUE if name.startswith(_SCORE_HEAD) or VALUE in name.split(".") else "policy"


def own_name(name: str) -> str:
    """The name of a value decoder's parameter in optimizer and checkpoints."""
    return f"{VALUE}.{name}"
