"""What is to be said of rollouts that teach nothing: equal rewards, or answers that never come to their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from danlu.language.reinforcement import objective_section
from danlu.recipe import Recipe

REMARKED_STEPS = 5
"""Logged steps in a row of which something is true before it is said."""
_EQUAL = 1e-9
"""A standard deviation of rewards below it is none."""


class RolloutRemarks:
    """A `train.remarks.Remark` on the steps of stage rl; each remark is made once in a run."""

    def __init__(self, recipe: Recipe) -> None:
        self._max_new_tokens = recipe.rollout.max_new_tokens
        self._rewards_teach = recipe.divergence is None or any(recipe.reward_weights.values())
        self._by_prompt = objective_section(recipe).baseline in ("group", "leave-one-out")
        self._in_a_row = {"equal": 0, "truncated": 0}
        self._said: set[str] = set()

    def __call__(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """What has been true of the last steps, this one included."""
        lasting = f"in the last {REMARKED_STEPS} logged steps"
        if self._rewards_teach and self._lasts("equal", self._is_equal(metrics)):
            which = "all answers to a prompt" if self._by_prompt else "all answers"
            yield (
                f"{which} have had the same reward {lasting}, so nothing tells better ones from worse ones. Look at "
                "them in rollouts.jsonl (danlu report), and try the rewards on given answers: `danlu eval --rewards "
                "RECIPE --data FILE --answers COLUMN`"
            )
        # An answer of one token is not meant to end by itself.
        if self._lasts("truncated", self._max_new_tokens > 1 and metrics.get("truncated", 0.0) >= 1.0):
            yield (
                f"all answers have been cut off at rollout.max_new_tokens ({self._max_new_tokens}) {lasting}. Raise "
                "it, or start from a model that ends its answers"
            )

    def _is_equal(self, metrics: Mapping[str, float]) -> bool:
        if self._by_prompt:
            return metrics.get("no_signal", 0.0) >= 1.0
        return metrics.get("reward_std", 1.0) < _EQUAL

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Whether something has just been so for as many steps as it takes."""
        self._in_a_row[what] = self._in_a_row[what] + 1 if is_so else 0
        if self._in_a_row[what] < REMARKED_STEPS or what in self._said:
            return False
        self._said.add(what)
        return True
