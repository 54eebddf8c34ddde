"""The faults that `danlu verify` must find; `--inject builders.faults:NAME` injects one.

Each is a change made from outside to the processes of the layout while they run; danlu itself has no switch for any of
them.
"""

from __future__ import annotations

from builders.faults import context, experts, pipelines, steps, surroundings
from danlu.verification.fault import Fault

FAULTS: dict[str, Fault] = dict(
    sorted((context.FAULTS | experts.FAULTS | pipelines.FAULTS | steps.FAULTS | surroundings.FAULTS).items())
)
"""All faults by name, sorted."""


def injected(name: str) -> str:
    """The value of `--inject`, and of `Options.fault`, for one of them."""
    return f"{__name__}:{name}"
