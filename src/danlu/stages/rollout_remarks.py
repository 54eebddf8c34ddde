"""The rollouts of steps for the console: their numbers, and warnings about those that teach nothing or less than they
could: equal rewards, answers that never end, answers without a reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from danlu.recipe import Recipe
from danlu.recipe.policy_scores import objective_section

REMARKED_STEPS = 5
"""Logged steps in a row of which something is true before it is said; all of them in a run that logs fewer."""
_EQUAL = 1e-9
"""A standard deviation of rewards below it is none."""


class RolloutRemarks:
    """A `training.recorders.Remark` on the steps of stage rl; each remark is made once in a run."""

    def __init__(self, recipe: Recipe) -> None:
        self._max_new_tokens = recipe.rollout.max_new_tokens
        self._max_turns = None if recipe.environment is None else recipe.environment.max_turns
        self._rewards_teach = recipe.divergence is None or any(recipe.reward_weights.values())
        self._by_prompt = objective_section(recipe).baseline in ("group", "leave-one-out")
        self._failures = recipe.reward_limits.failures
        self._lasting_steps = REMARKED_STEPS
        if recipe.steps is not None:
            self._lasting_steps = max(1, min(REMARKED_STEPS, recipe.steps // recipe.log.every))
        self._in_a_row = {"equal": 0, "truncated": 0, "unrewarded": 0}
        self._said: set[str] = set()

    def __call__(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yields warnings that are true of the last steps, this one included."""
        count = self._lasting_steps
        is_equal = metrics.get("no_signal", 0.0) >= 1 if self._by_prompt else metrics.get("reward_std", 1.0) < _EQUAL
        lasting = f"in the last {count} logged steps" if count > 1 else "in the only logged step"
        if self._rewards_teach and self._lasts("equal", is_equal):
            which = "all answers to a prompt" if self._by_prompt else "all answers"
            yield (
                f"{which} have had the same reward {lasting}, so nothing tells better ones from worse ones. Look at "
                "them in rollouts.jsonl (danlu report), and try the rewards on given answers: `danlu eval --rewards "
                "RECIPE --data FILE --answers COLUMN`"
            )
        # An answer of one token is not meant to end by itself.
        if self._lasts("truncated", self._max_new_tokens > 1 and metrics.get("truncated", 0.0) >= 1.0):
            out_of_turns = metrics.get("out_of_turns", 0.0)
            limits = [f"rollout.max_new_tokens ({self._max_new_tokens})"] if out_of_turns < 1 else []
            advice = "start from a model that ends its answers"
            if out_of_turns > 0:
                limits.append(f"environment.max_turns ({self._max_turns})")
                advice = "see that the environment returns Done"
            yield f"all answers have been cut off at {' or '.join(limits)} {lasting}. Raise it, or {advice}"
        unrewarded = metrics.get("unrewarded", 0.0)
        if self._lasts("unrewarded", unrewarded > 0):
            yield (
                f"some answers have had no reward {lasting} ({unrewarded:.0%} of this one's) and were left out; the "
                f"run stops where more than reward_limits.failures ({self._failures:.0%}) have none. `danlu report` "
                "says why"
            )

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Whether something has just been so for as many steps as it takes."""
        self._in_a_row[what] = self._in_a_row[what] + 1 if is_so else 0
        if self._in_a_row[what] < self._lasting_steps or what in self._said:
            return False
        self._said.add(what)
        return True


def rollout_numbers(metrics: Mapping[str, float]) -> str:
    """Formats the rollout of a step for the console: `reward 0.512 length 34.2 entropy 1.231 kl 0.0021 cut 12% `.

    `cut` is the share of answers that were cut off. Numbers that a step does not have are left out.
    """
    # To the reference, by whichever estimator the recipe names; else to the policy that drew the answers.
    kl = next((name for name in metrics if name.startswith("kl/") or name in ("kl", "kl_in_reward")), "approx_kl")
    formats = {
        "reward": "reward {:.3f}",
        "length": "length {:.1f}",
        "entropy": "entropy {:.3f}",
        kl: "approx_kl {:.4f}" if kl == "approx_kl" else "kl {:.4f}",
        "truncated": "cut {:.0%}",
    }
    return "".join(f"{shown.format(metrics[name])} " for name, shown in formats.items() if name in metrics)
