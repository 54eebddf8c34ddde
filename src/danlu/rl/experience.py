"""Training items of reinforcement learning: answers of the policy itself, with rewards, drawn again every few steps.

A rollout belongs to `updates x passes` steps: its prompts are answered with the weights that the policy has then,
rewards are asked for once, by one process, and every process holds every tree. The prompts and the draws follow from
the seed and from numbers, so a resumed run repeats them; a rollout that is half trained is in the checkpoint.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from danlu.core.errors import TrainingError
from danlu.core.line_log import LineLog
from danlu.core.types import ROTARY_LENGTH, Pack
from danlu.data.permutation import Permutation
from danlu.data.prompts import Prompt
from danlu.inference.episode import Episode
from danlu.inference.stopping import Decode
from danlu.parallel.phase import PHASE
from danlu.rewards.environments.user_class import EnvironmentReward
from danlu.rewards.protocol import TrainerState
from danlu.rewards.runner import RewardPart
from danlu.rl.estimators import Estimator, Judged
from danlu.rl.experience_trees import (
    OLD,
    SAMPLED,
    answer_tree,
    items_from_tensors,
    items_to_tensors,
    with_columns,
    with_facts,
    with_routes,
    with_supports,
)
from danlu.rl.rollout_sampler import EVALUATION_NUMBERS, Answered, ExperienceSettings, RolloutSampler
from danlu.rl.step_places import TokenRewards, token_rewards

STALENESS = ("staleness", "staleness_max")
"""Metrics of asynchronous rollouts: updates between the weights that drew a token and those that are trained on it."""

Scores = tuple[Sequence[Mapping[str, np.ndarray]], Sequence[Mapping[str, np.ndarray]]]
"""Results of a pass without gradients for each item: scores of its tokens [S], and scores of its branches."""


@dataclass
class Experience:
    """A `train.position.GeneratedItems`: the policy's own answers.

    Args:
        sampler: answers the prompts and has the answers rewarded.
        estimator: gives tokens their advantages.
        score: a pass without gradients over the items of a step, where it is needed: log-probabilities of the trainer
            (`old`) and the reference, and values of a critic, for each token. All processes call it together.
        log: the log of answers, a line a prompt; None on other processes than the first.
        laid_out: an item as it goes through the model.
        decode: token ids to text, where rewards judge steps of it.
    """

    sampler: RolloutSampler
    estimator: Estimator
    score: Callable[[Sequence[Pack]], Scores] | None = None
    log: LineLog | None = None
    laid_out: Callable[[Pack], Pack] = lambda item: item
    decode: Decode | None = None

    _rollout: int | None = None  # of the items that are there
    _items: list[Pack] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)
    _lag: int = 0  # updates that the policy has had since the present rollout was made
    _before: dict[str, Any] = field(default_factory=dict)
    """The state from which the present rollout was made."""
    _pending: tuple[int, list[str]] = (0, [])
    """The half-trained rollout of a checkpoint: its number, and the rows of its items."""
    _refused_lines: int = 0
    """Lines of the log from a rollout that stopped the run, and that is repeated when it goes on."""

    @property
    def settings(self) -> ExperienceSettings:
        """The settings of rollouts."""
        return self.sampler.settings

    def at(self, number: int) -> Pack:
        """Returns item `number` of the run; the first item of a rollout draws the whole rollout.

        Raises TrainingError where too many answers have no reward, and the errors of the engine and of rewards.
        """
        settings = self.settings
        rollout, place = divmod(number, settings.items)
        self._lag, begins = divmod(place, settings.items_per_update)
        if begins == 0:
            self._begin_update(number)
        if rollout != self._rollout:
            self._roll_out(rollout)
            self._begin_update(number)  # more may be asked where prompts were replaced
        fresh = place < settings.items_per_update
        item = self._items[self._place(rollout, place)]
        return with_facts(item, {"fresh": np.full(len(item.samples[0].branches), fresh, np.float32)})

    def state(self, number: int) -> dict[str, Any]:
        """Returns the state that cannot be recomputed: the next prompt, the estimator's state, unfinished answers.

        A rollout of which no step has been taken is drawn again on resume, except an asynchronous one: the weights that
        have drawn it are gone.
        """
        if self._is_made_again(number):
            return self._before
        state = self._made_from()
        if (asynchronous := self.sampler.asynchronous) is not None:
            # With the present weights first: whatever is drawn after this is drawn with weights that a checkpoint has.
            self._begin_update(number)
            state["asynchronous"] = asynchronous.state()
        rollout = number // self.settings.items
        if rollout == self._rollout:
            rows = [item.samples[0].row for item in self._items]
            state |= {"rollout": rollout, "rows": rows, "metrics": self._metrics}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up `state`; items that were pending come with `restore_tensors`.

        Raises CheckpointError where the prompts are others.
        """
        prompts = self.sampler.prompts
        prompts.restore({name: state.get(name) for name in prompts.state()})
        self._rollout, self._items = None, []
        self.sampler.next_prompt = int(state["next_prompt"])
        self._pending = state.get("rollout", 0), list(state.get("rows", ()))
        self._metrics = {name: float(value) for name, value in state.get("metrics", {}).items()}
        self.estimator.restore(state["estimator"])
        if self.sampler.asynchronous is not None:
            self.sampler.asynchronous.restore(state["asynchronous"])
        if self.log is not None:
            self.log.truncate(int(state["log_lines"]))
            self._refused_lines = 0

    def _made_from(self) -> dict[str, Any]:
        return {
            **self.sampler.prompts.state(),
            "next_prompt": self.sampler.next_prompt,
            "estimator": self.estimator.state(),
            "log_lines": 0 if self.log is None else self.log.lines - self._refused_lines,
        }

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        """The items of a rollout that is half trained, or was drawn with weights that are gone."""
        if number // self.settings.items != self._rollout or self._is_made_again(number):
            return {}
        return items_to_tensors(self._items)

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the items up."""
        self._rollout, rows = self._pending
        self._items = items_from_tensors(tensors, rows)

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the present rollout; the age of its weights is that at the present step."""
        ages = {name: self._metrics[name] + self._lag for name in STALENESS if name in self._metrics}
        return {**self._metrics, **ages}

    def held_out(self, prompts: Sequence[Prompt]) -> list[Pack]:
        """The items of an evaluation by the policy as it is now: each prompt with one greedy answer and its rewards, so
        that two evaluations differ by the weights. They are not trained on.

        Their numbers are their own: an evaluation leaves the draws of training as they are.
        """
        numbers = range(EVALUATION_NUMBERS, EVALUATION_NUMBERS + len(prompts))
        with self.sampler.awake():
            answered = self.sampler.answer(numbers, prompts, replace(self.settings.sampling, temperature=0.0))
        items = []
        for item in self._items_of(answered):  # zeros and NaN in the place of what the estimator says
            branches = len(item.samples[0].branches)
            item = with_columns(item, {name: np.zeros(item.tokens, np.float32) for name in self.estimator.columns})
            item = with_facts(item, {name: np.full(branches, np.nan, np.float32) for name in self.estimator.facts})
            items.append(self.laid_out(item))
        return items

    def close(self) -> None:
        """Closes the engine, the rewards and the log."""
        self.sampler.close()
        if self.log is not None:
            self.log.close()

    def _place(self, rollout: int, number: int) -> int:
        """The tree that is item `number` of a rollout: where a rollout has several steps, each pass has an order of its
        own."""
        settings = self.settings
        pass_, place = divmod(number, settings.prompts)
        if settings.items == settings.items_per_update:
            return place
        return Permutation.of(settings.prompts, settings.seed, "updates", rollout, pass_)[place]

    def _scored(
        self, items: Sequence[Pack], rollout: int, score: Callable[[Sequence[Pack]], Scores]
    ) -> tuple[list[Mapping[str, np.ndarray]], list[Mapping[str, np.ndarray]]]:
        """The scores of all items, asked for as the steps of the first pass take them.

        So the first step goes through the model in the very micro-batches that the pass without gradients had, and
        finds the same bits: its ratios are exactly 1.
        """
        per_update = self.settings.items_per_update
        order = [self._place(rollout, number) for number in range(len(items))]
        of_tokens: dict[int, Mapping[str, np.ndarray]] = {}
        of_branches: dict[int, Mapping[str, np.ndarray]] = {}
        PHASE.begin("scoring")
        for start in range(0, len(items), per_update):
            places = order[start : start + per_update]
            through_model = [self.laid_out(items[place]) for place in places]
            for place, item, tokens, branches in zip(places, through_model, *score(through_model), strict=True):
                of_tokens[place] = {name: _of_tree(values, item, items[place]) for name, values in tokens.items()}
                of_branches[place] = branches
        return [of_tokens[place] for place in range(len(items))], [of_branches[place] for place in range(len(items))]

    def _is_made_again(self, number: int) -> bool:
        """Whether item `number` is the first of the present rollout, which follows from weights that are there."""
        rollout, place = divmod(number, self.settings.items)
        return rollout == self._rollout and place == 0 and self.sampler.asynchronous is None

    def _begin_update(self, number: int) -> None:
        """Says that the items from `number` on are trained on next."""
        rollout = number // self.settings.items
        self.sampler.begin_update(number // self.settings.items_per_update, rollout + (rollout == self._rollout))

    def _roll_out(self, rollout: int) -> None:
        self._before = self._made_from()
        if self.log is not None and (rollout == 0 or self._refused_lines):
            # Of a run that ended before its first checkpoint, or of this rollout when it was refused.
            self.log.truncate(self._before["log_lines"] if rollout else 0)
            self._refused_lines = 0
            self._before["log_lines"] = self.log.lines
        settings = self.settings
        epoch = self.sampler.next_prompt / self.sampler.prompts.per_epoch
        updates = rollout * settings.updates * settings.passes
        self.sampler.state = TrainerState(updates, settings.max_steps, epoch)
        try:
            answered, metrics = self.sampler.next_rollout()
            self._check_rewards(answered, rollout)
        except BaseException:  # the state that is saved then has these prompts before it
            self.sampler.next_prompt = self._before["next_prompt"]
            raise
        items = self._items_of(answered)
        token_scores: Sequence[Mapping[str, np.ndarray]] = [{} for _ in items]
        branch_scores: Sequence[Mapping[str, np.ndarray]] = token_scores
        start = time.perf_counter()
        if self.score is not None:
            token_scores, branch_scores = self._scored(items, rollout, self.score)
            items, gap = _with_old(items, token_scores)
            metrics |= gap
        scoring_s = time.perf_counter() - start
        judged = self._judged(items, answered, token_scores, branch_scores)
        self._items, more = self.estimator.estimate(judged)
        self._items = [self.laid_out(item) for item in self._items]
        self._rollout = rollout
        if self.sampler.asynchronous is not None:
            metrics |= _staleness(answered, rollout * self.settings.updates * self.settings.passes)
        seconds = self.sampler.times
        times = {"rollout_s": seconds.rollout, "reward_s": seconds.reward, "scoring_s": scoring_s}
        if self.sampler.asynchronous is None:  # else weights are handed over between updates, which `rollout_s` has
            times["hand_over_s"] = seconds.hand_over
        self._metrics = {**metrics, **more, **_reward_statistics(judged), **times}
        if self.log is not None:
            self._write(self.log, rollout, answered)
        if self.sampler.asynchronous is not None:
            self.sampler.asynchronous.forget_taken()

    def _check_rewards(self, answered: Answered, rollout: int) -> None:
        """Raises TrainingError where too many answers have no reward, with the answers in the log to be looked at."""
        without = float(np.isnan(answered.rewards).all(-1).mean())
        if without <= self.settings.failures:
            return
        if self.log is not None:
            before = self.log.lines
            self._write(self.log, rollout, answered)
            self._refused_lines = self.log.lines - before
        first, last = answered.numbers[0], answered.numbers[-1]
        advice = ""
        if not all(isinstance(part.reward, EnvironmentReward) for part in self.sampler.rewards.parts):
            advice = (
                " Try the rewards on given answers first: `danlu eval --rewards RECIPE --data FILE --answers COLUMN`"
            )
        raise TrainingError(
            f"{without:.0%} of the answers to prompts {first} to {last} have no reward, and reward_limits.failures "
            f"is {self.settings.failures:g}. {self.sampler.why_unrewarded()}The answers are in rollouts.jsonl.{advice}"
        )

    # -- trees

    def _items_of(self, answered: Answered) -> list[Pack]:
        totals = self.sampler.totals(answered.rewards)
        items = []
        for place, (prompt, completions) in enumerate(zip(answered.prompts, answered.completions, strict=True)):
            facts: dict[str, Sequence[float]] = {
                "reward": totals[place].tolist(),
                "group": [float(place)] * len(completions),
                "length": [float(len(completion.tokens)) for completion in completions],
                "truncated": [float(completion.is_truncated) for completion in completions],
                "fresh": [0.0] * len(completions),
            }
            if self.settings.rotary_length is not None:
                facts[ROTARY_LENGTH] = [float(self.settings.rotary_length(len(prompt.tokens)))] * len(completions)
            for part, reward in enumerate(self.sampler.rewards.parts):
                facts[f"reward/{reward.name}"] = answered.rewards[place, :, part].tolist()
            items.append(answer_tree(prompt.tokens, completions, prompt.where, facts))
        items = with_supports(items, answered.completions)
        return with_routes(items, answered.completions, [prompt.tokens for prompt in answered.prompts])

    def _judged(
        self,
        items: Sequence[Pack],
        answered: Answered,
        token_scores: Sequence[Mapping[str, np.ndarray]],
        branch_scores: Sequence[Mapping[str, np.ndarray]],
    ) -> Judged:
        prompts, samples, parts = answered.rewards.shape
        completions = [completion for of_prompt in answered.completions for completion in of_prompt]
        return Judged(
            items,
            answered.rewards.reshape(prompts * samples, parts),
            [part.weight for part in self.sampler.rewards.parts],
            np.repeat(np.arange(prompts), samples),
            np.array([len(completion.tokens) for completion in completions]),
            np.array([completion.is_truncated for completion in completions]),
            answered.greedy_rewards,
            token_scores,
            branch_scores,
            self._step_rewards(answered),
        )

    def _step_rewards(self, answered: Answered) -> list[dict[int, TokenRewards]]:
        """Returns the rewards of each answer's steps, at the tokens where the steps end; nothing where no reward judges
        steps."""
        if not any(steps for of_prompt in answered.steps for steps in of_prompt):
            return []
        assert self.decode is not None, "who has rewards of steps says how tokens become text"
        return [
            token_rewards(completion, prompt.tokens, steps, self.decode)
            for prompt, completions, of_prompt in zip(
                answered.prompts, answered.completions, answered.steps, strict=True
            )
            for completion, steps in zip(completions, of_prompt, strict=True)
        ]

    def _write(self, log: LineLog, rollout: int, answered: Answered) -> None:
        """Writes a line for each prompt: its text, its answers and their rewards."""
        settings, parts = self.settings, self.sampler.rewards.parts
        step = rollout * settings.updates * settings.passes + 1
        for place, (number, prompt) in enumerate(zip(answered.numbers, answered.prompts, strict=True)):
            answers: list[dict[str, Any]] = []
            for completion, rewards in zip(answered.completions[place], answered.rewards[place], strict=True):
                entry: dict[str, Any] = {
                    "text": completion.text,
                    "finish": completion.finish,
                    "tokens": completion.tokens,
                    "rewards": _by_part(rewards, parts),
                }
                if self.sampler.asynchronous is not None:
                    entry["versions"] = run_lengths(completion.versions)
                if isinstance(completion, Episode):
                    entry["turns"] = [dict(turn) for turn in completion.turns]
                if failures := self.sampler.failures.get((completion.number, completion.sample)):
                    entry["failures"] = failures
                if verdicts := self.sampler.verdicts.get((completion.number, completion.sample)):
                    entry["verdicts"] = {name: verdict.as_json() for name, verdict in verdicts.items()}
                if extra := self.sampler.extra.get((completion.number, completion.sample)):
                    entry["extra"] = extra
                if steps := answered.steps[place][len(answers)] if answered.steps else {}:
                    entry["steps"] = {parts[part].name: asdict(of_steps) for part, of_steps in steps.items()}
                answers.append(entry)
            line = {"step": step, "number": number, "row": prompt.where, "prompt": prompt.prompt, "answers": answers}
            if answered.greedy_rewards is not None:
                line["greedy_rewards"] = _by_part(answered.greedy_rewards[place], parts)
            log.append(json.dumps(line, ensure_ascii=False))
        log.sync()


def run_lengths(versions: Sequence[int]) -> list[list[int]]:
    """[[version, tokens], ...]: with which weights an answer was drawn, in the order of its tokens."""
    return [[version, len(list(tokens))] for version, tokens in itertools.groupby(versions)]


def _staleness(answered: Answered, updates: int) -> dict[str, float]:
    """Computes the mean and the greatest age, in updates, of the weights that drew the rollout's tokens."""
    versions = [version for of_prompt in answered.completions for each in of_prompt for version in each.versions]
    if not versions:  # environments failed before the first token
        return {}
    ages = updates - np.array(versions)
    return dict(zip(STALENESS, (float(ages.mean()), float(ages.max())), strict=True))


def _of_tree(values: np.ndarray, laid_out: Pack, item: Pack) -> np.ndarray:
    """[S] of an item, from values [S'] of its tokens as they go through the model, perhaps with copies of prompts."""
    column = np.zeros(item.tokens, values.dtype)
    column[item.samples[0].weights > 0] = values[laid_out.samples[0].weights > 0]
    return column


def _by_part(rewards: np.ndarray, parts: Sequence[RewardPart]) -> dict[str, float | None]:
    """Rewards [R] of an answer by the names of the parts; None for one that was not given."""
    return {part.name: None if np.isnan(value) else value for part, value in zip(parts, rewards.tolist(), strict=True)}


def _with_old(
    items: Sequence[Pack], token_scores: Sequence[Mapping[str, np.ndarray]]
) -> tuple[list[Pack], dict[str, float]]:
    """The items with the trainer's own log-probabilities, and how far the engine's are from these."""
    if OLD not in token_scores[0]:
        return list(items), {}
    gaps = [
        np.abs(scores[OLD] - item.samples[0].columns[SAMPLED])[item.samples[0].weights > 0]
        for item, scores in zip(items, token_scores, strict=True)
    ]
    gap = np.concatenate(gaps)
    with_old = [
        with_columns(item, {OLD: scores[OLD].astype(np.float32)})
        for item, scores in zip(items, token_scores, strict=True)
    ]
    return with_old, {"rollout_gap_mean": float(gap.mean()), "rollout_gap_max": float(gap.max())}


def _reward_statistics(judged: Judged) -> dict[str, float]:
    """Computes metrics of the rollout: the standard deviation of rewards, where there are any, the longest answer, and
    the share without reward."""
    total = judged.total.numpy()
    total = total[~np.isnan(total)]
    values = {"length_max": float(judged.lengths.max()), "unrewarded": 1 - len(total) / len(judged.lengths)}
    return {**values, "reward_std": float(total.std())} if len(total) else values
