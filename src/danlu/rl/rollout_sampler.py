"""The prompts of a rollout, answered by the policy and rewarded.

M answers · R rewards of each
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from danlu.data.prompts import Prompt, PromptOrder
from danlu.inference.engine import RolloutEngine, awake
from danlu.inference.episode import Episode, episode_metrics
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.support import check_trainable
from danlu.parallel.comm import Group
from danlu.parallel.phase import PHASE
from danlu.parallel.process_group import from_first_untimed
from danlu.rewards.protocol import JudgedAnswer, StepRewards, TrainerState, Verdict
from danlu.rewards.runner import RewardPart, RewardTable
from danlu.rewards.summary import distinct_failures
from danlu.rewards.text import Mathematical
from danlu.rl.asynchronous import AsynchronousRollouts

Generate = Callable[[Sequence[Request]], Sequence[Completion]]
"""All answers to requests, in their order and by sample."""

GREEDY_NUMBERS, EVALUATION_NUMBERS = 1 << 40, 1 << 41
"""Numbers of requests for greedy answers, and for evaluations, begin here: no two requests of a run have the same."""


@dataclass(frozen=True)
class ExperienceSettings:
    """Settings of a rollout; the names are those of the recipe."""

    prompts: int
    samples: int
    sampling: SamplingOptions
    max_new_tokens: int
    updates: int = 1
    passes: int = 1
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    greedy: bool = False
    """Whether a greedy answer to each prompt is judged too, as a baseline."""
    resample: int = 0
    """The number of times that prompts are replaced when all their answers have the same reward (DAPO's dynamic
    sampling)."""
    failures: float = 0.5
    """The largest share of answers that are left out for want of a reward; past it the run ends."""
    vocab_size: int = 0
    seed: int = 0
    max_steps: int = 0
    """Updates of the whole run, for rewards."""
    grammar: Callable[[Sequence[int]], str] | None = None
    """Maps a prompt's tokens to the grammar that its answers follow; None: any text."""
    rotary_length: Callable[[int], int] | None = None
    """Maps a prompt's tokens to the most tokens that its texts may have, virtual ones included; None where the trainer
    need not know, for nothing but LongRoPE rotates an answer by them."""

    @property
    def items(self) -> int:
        """The number of items that a rollout is trained on, with repeats."""
        return self.prompts * self.passes

    @property
    def items_per_update(self) -> int:
        """The number of items of a step."""
        return self.prompts // self.updates


class Rewards(Protocol):
    """Judges answers by parts that are added up; see `rewards.runner`."""

    @property
    def parts(self) -> Sequence[RewardPart]: ...

    def score(self, answers: Sequence[JudgedAnswer]) -> RewardTable: ...

    def close(self) -> None: ...


class PlaysEpisodes(Protocol):
    """Has answers come about in several turns; see `rollout.episodes` and `rollout.agent_episodes`."""

    def answer(
        self,
        generate: Callable[[Sequence[Request]], list[Completion]],
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
    ) -> Sequence[Completion]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answered:
    """Prompts with their answers and rewards."""

    numbers: tuple[int, ...]  # of the prompts in the run
    prompts: tuple[Prompt, ...]
    completions: tuple[tuple[Completion, ...], ...]  # of each prompt
    rewards: np.ndarray  # [prompts, samples, R], NaN where there is none, and in all of an answer that is left out
    greedy_rewards: np.ndarray | None  # [prompts, R]
    steps: tuple[tuple[Mapping[int, StepRewards], ...], ...] = ()
    """The rewards of each answer's steps, by the number of the reward; empty where none has any."""

    def chosen(self, places: Sequence[int]) -> Answered:
        """Some of the prompts."""
        index = list(places)
        return Answered(
            tuple(self.numbers[place] for place in index),
            tuple(self.prompts[place] for place in index),
            tuple(self.completions[place] for place in index),
            self.rewards[index],
            None if self.greedy_rewards is None else self.greedy_rewards[index],
            tuple(self.steps[place] for place in index),
        )

    @classmethod
    def joined(cls, several: Sequence[Answered]) -> Answered:
        """All of them, in their order."""
        greedy = [each.greedy_rewards for each in several if each.greedy_rewards is not None]
        return cls(
            tuple(number for each in several for number in each.numbers),
            tuple(prompt for each in several for prompt in each.prompts),
            tuple(of_prompt for each in several for of_prompt in each.completions),
            np.concatenate([each.rewards for each in several]),
            np.concatenate(greedy) if greedy else None,
            tuple(of_prompt for each in several for of_prompt in each.steps),
        )


@dataclass
class Times:
    """Seconds that parts of a rollout took."""

    hand_over: float = 0.0
    """Seconds until the engine had the present weights, including its waking."""
    rollout: float = 0.0
    reward: float = 0.0
    publish: float = 0.0
    """Asynchronous: of handing weights over and asking prompts, which the next rollout waits for."""


@dataclass
class RolloutSampler:
    """Answers prompts of the run in their order; all processes make the same calls.

    Args:
        prompts: the prompts of the whole run; numbers go on over its epochs.
        engine: asleep outside of `awake`.
        world: the group of all processes; the first asks for rewards.
        asynchronous: draws the answers to train on while the trainer works; None: `engine` draws them when they are
            needed.
    """

    prompts: PromptOrder
    engine: RolloutEngine
    rewards: Rewards
    settings: ExperienceSettings
    world: Group
    asynchronous: AsynchronousRollouts | None = None
    episodes: PlaysEpisodes | None = None
    """Plays the episodes where an environment answers back; None elsewhere."""
    next_prompt: int = 0
    times: Times = field(default_factory=Times)
    """Seconds that the parts of the present rollout took."""
    failures: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Reasons why rewards were not given in the present rollout, by prompt and sample; on the first process."""
    verdicts: dict[tuple[int, int], dict[str, Verdict]] = field(default_factory=dict)
    """The verdicts of the present rollout, by prompt and sample, on the first process."""
    extra: dict[tuple[int, int], dict[str, dict[str, Any]]] = field(default_factory=dict)
    """The values that users' functions logged for an answer, by the name of the reward, likewise."""
    logged: dict[str, float] = field(default_factory=dict)
    """The metrics that users' functions logged in the present rollout."""
    state: TrainerState = field(default_factory=TrainerState)
    """The state of the run, for rewards."""
    late: np.ndarray | None = None
    """[R] Of the present rollout: answers that took too long to compare; None before the first are judged."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which the engine answers with the policy's present weights."""
        self._begin_rollout()
        start = time.perf_counter()
        with awake(self.engine):
            self.times.hand_over = time.perf_counter() - start
            yield

    def close(self) -> None:
        """Closes the engines, the rewards and the episodes."""
        if self.asynchronous is not None:
            self.asynchronous.close()
        self.engine.close()
        self.rewards.close()
        if self.episodes is not None:
            self.episodes.close()

    def _begin_rollout(self, published_s: float = 0.0) -> None:
        self.times = Times(rollout=published_s)
        self.failures, self.verdicts, self.late = {}, {}, None
        self.extra, self.logged = {}, {}

    def why_unrewarded(self) -> str:
        """Returns the reasons why rewards were not given, as sentences for a message."""
        reasons = distinct_failures(
            (f"prompt {number}, sample {sample}", reason)
            for (number, sample), several in self.failures.items()
            for reason in several
        )
        return f"{'; '.join(reasons)}. " if reasons else ""

    def begin_update(self, updates: int, rollouts: int) -> None:
        """Continues the answers of asynchronous rollouts under the present weights, and asks the prompts that may be
        asked by now.

        updates: that the policy has had; rollouts: that have been drawn. All processes call it between two updates.
        """
        asynchronous, settings = self.asynchronous, self.settings
        if asynchronous is None:
            return
        PHASE.begin("rollout")
        start = time.perf_counter()
        asynchronous.publish(updates)
        to_come = asynchronous.rollouts_to_begin(settings.updates * settings.passes) - rollouts
        self._ask_up_to(asynchronous, self.next_prompt + to_come * settings.prompts)
        asynchronous.poll()
        self.times.publish += time.perf_counter() - start

    def _ask_up_to(self, asynchronous: AsynchronousRollouts, number: int) -> None:
        """Asks prompts of the run with lower numbers that have not been asked."""
        for prompt_number in range(asynchronous.asked, number):
            asynchronous.submit(self._requests_of([prompt_number], [self.prompts.at(prompt_number)]))
        asynchronous.asked = max(asynchronous.asked, number)

    def next_rollout(self) -> tuple[Answered, dict[str, float]]:
        """Answers the prompts of a rollout; prompts without signal are replaced as far as possible. Returns the answers
        and metrics."""
        if self.asynchronous is None:
            with self.awake():
                return self._next_rollout()
        self._begin_rollout(published_s=self.times.publish)
        return self._next_rollout()

    def _next_rollout(self) -> tuple[Answered, dict[str, float]]:
        settings, wanted = self.settings, self.settings.prompts
        kept, without = list[Answered](), list[Answered]()
        asked, lacking = 0, wanted
        for _ in range(1 + settings.resample):
            answered = self._answer_next(lacking)
            asked += lacking
            signal = self._has_signal(answered)
            if settings.resample == 0:
                signal = np.ones_like(signal)
            kept.append(answered.chosen(np.flatnonzero(signal).tolist()))
            without.append(answered.chosen(np.flatnonzero(~signal).tolist()))
            lacking = wanted - sum(len(some.numbers) for some in kept)
            if lacking == 0:
                break
        whole = Answered.joined([*kept, Answered.joined(without).chosen(range(lacking))])
        no_signal = float((~self._has_signal(whole)).mean())
        return whole, {
            "prompts_asked": float(asked),
            "no_signal": no_signal,
            **self._late_metrics(),
            **self.logged,
            **episode_metrics(whole.completions),
        }

    def _late_metrics(self) -> dict[str, float]:
        """Counts, for each reward that compares formulas, the answers that timed out and were given 0."""
        late = np.zeros(len(self.rewards.parts)) if self.late is None else self.late
        return {
            f"reward/{part.name}/late": float(count)
            for part, count in zip(self.rewards.parts, late.tolist(), strict=True)
            if isinstance(part.reward, Mathematical)
        }

    def _has_signal(self, answered: Answered) -> np.ndarray:
        """[prompts] bool: answers have different rewards."""
        total = self.totals(answered.rewards)  # [prompts, samples]
        highest = np.where(np.isnan(total), -np.inf, total).max(1)
        lowest = np.where(np.isnan(total), np.inf, total).min(1)
        return highest - lowest > 1e-9

    def totals(self, rewards: np.ndarray) -> np.ndarray:
        """The weighted sum over the last axis of rewards [..., R]; NaN where none was given."""
        total = np.nan_to_num(rewards) @ np.array([part.weight for part in self.rewards.parts])
        return np.where(np.isnan(rewards).all(-1), np.nan, total)

    def _answer_next(self, count: int) -> Answered:
        """Answers to the next prompts, with their rewards."""
        settings = self.settings
        numbers = range(self.next_prompt, self.next_prompt + count)
        self.next_prompt += count
        prompts = [self.prompts.at(number) for number in numbers]
        requests = self._requests_of(numbers, prompts)
        generate: Generate = partial(self._generate, prompts=[*prompts, *prompts])
        if self.asynchronous is not None:
            self._ask_up_to(self.asynchronous, self.next_prompt)
            generate = self.asynchronous.take
        completions, rewards, steps = self._judged_completions(requests, [*prompts, *prompts], generate)
        sampled = completions[: count * settings.samples]
        for completion in sampled:
            if completion.tokens:  # an environment may fail before the first
                check_trainable(completion, settings.sampling, settings.vocab_size)
        return Answered(
            tuple(numbers),
            tuple(prompts),
            tuple(tuple(sampled[i * settings.samples : (i + 1) * settings.samples]) for i in range(count)),
            rewards[: len(sampled)].reshape(count, settings.samples, -1),
            rewards[len(sampled) :] if settings.greedy else None,
            tuple(tuple(steps[i * settings.samples : (i + 1) * settings.samples]) for i in range(count)),
        )

    def answer(self, numbers: Sequence[int], prompts: Sequence[Prompt], sampling: SamplingOptions) -> Answered:
        """One answer to each of other prompts, which are not trained on; numbers: of their requests."""
        requests = self._requests(numbers, prompts, sampling, 1)
        generate = partial(self._generate, prompts=prompts)
        completions, rewards, steps = self._judged_completions(requests, prompts, generate)
        return Answered(
            tuple(numbers),
            tuple(prompts),
            tuple((completion,) for completion in completions),
            rewards[:, None],
            None,
            tuple((of_answer,) for of_answer in steps),
        )

    def _requests_of(self, numbers: Sequence[int], prompts: Sequence[Prompt]) -> list[Request]:
        """Makes the requests of training prompts: their samples, then their greedy answers where these count."""
        settings = self.settings
        requests = self._requests(numbers, prompts, settings.sampling, settings.samples)
        if settings.greedy:
            greedy_numbers = [GREEDY_NUMBERS + number for number in numbers]
            requests += self._requests(greedy_numbers, prompts, replace(settings.sampling, temperature=0.0), 1)
        return requests

    def _requests(
        self, numbers: Sequence[int], prompts: Sequence[Prompt], sampling: SamplingOptions, samples: int
    ) -> list[Request]:
        settings = self.settings
        return [
            Request(
                number,
                prompt.tokens,
                sampling,
                settings.max_new_tokens,
                samples,
                stop_ids=settings.stop_ids,
                stop_strings=settings.stop_strings,
                grammar=None if settings.grammar is None else settings.grammar(prompt.tokens),
                source=None if self.episodes is None else prompt,
            )
            for number, prompt in zip(numbers, prompts, strict=True)
        ]

    def _generate(self, requests: Sequence[Request], prompts: Sequence[Prompt]) -> Sequence[Completion]:
        """Answers of the trainer's own engine to requests, each of one of the prompts in order."""
        if self.episodes is None:
            return self.engine.generate(requests)
        return self.episodes.answer(self.engine.generate, requests, prompts)

    def _judged_completions(
        self, requests: Sequence[Request], prompts: Sequence[Prompt], generate: Generate
    ) -> tuple[list[Completion], np.ndarray, list[dict[int, StepRewards]]]:
        """The completions of requests, each of one of the prompts in order, their rewards [completions, R] and those of
        their steps, by the number of the reward."""
        start = time.perf_counter()
        PHASE.begin("rollout")
        completions = generate(requests)
        self.times.rollout += time.perf_counter() - start
        start = time.perf_counter()
        of_completions = [
            prompt for request, prompt in zip(requests, prompts, strict=False) for _ in range(request.samples)
        ]
        answers = [
            judged_answer(completion, prompt, self.state)
            for prompt, completion in zip(of_completions, completions, strict=True)
        ]
        PHASE.begin("rewards")
        rewards, steps, late, self.logged = from_first_untimed(
            self.world, lambda: self._rewarded(answers, completions), "rewards"
        )
        self.late = late if self.late is None else self.late + late
        self.times.reward += time.perf_counter() - start
        return list(completions), rewards, steps

    def _rewarded(
        self, answers: Sequence[JudgedAnswer], completions: Sequence[Completion]
    ) -> tuple[np.ndarray, list[dict[int, StepRewards]], np.ndarray, dict[str, float]]:
        """Rewards [completions, R], those of steps, how many answers each reward was too long about [R], and the
        metrics that were logged."""
        table = self.rewards.score(answers)
        self.logged = {**self.logged, **self._metrics_of(table)}
        for (answer, reward), logged in table.logged.items():
            if logged.extra:
                key = completions[answer].number, completions[answer].sample
                self.extra.setdefault(key, {})[self.rewards.parts[reward].name] = dict(logged.extra)
        for (answer, reward), verdict in table.verdicts.items():
            completion = completions[answer]
            of_answer = self.verdicts.setdefault((completion.number, completion.sample), {})
            of_answer[self.rewards.parts[reward].name] = verdict
        for failure in table.failures:
            completion = completions[failure.answer]
            self.failures.setdefault((completion.number, completion.sample), []).append(
                f"{failure.reward}: {failure.reason}"
            )
        left_out = table.unjudged
        for place, completion in enumerate(completions):
            if isinstance(completion, Episode) and completion.failure is not None:
                self.failures[completion.number, completion.sample] = [f"environment: {completion.failure}"]
                left_out[place] = True
        # Whatever the other rewards say of an answer that one failed for, or of an episode that was not played to its
        # end: without a number of all parts it is in no baseline and no mean.
        values = np.where(left_out[:, None], np.nan, table.values)
        steps: list[dict[int, StepRewards]] = [{} for _ in completions]
        for (answer, reward), of_steps in table.steps.items():
            if not left_out[answer]:
                steps[answer][reward] = of_steps
        return values, steps, table.late, self.logged

    def _metrics_of(self, table: RewardTable) -> dict[str, float]:
        return {
            f"reward/{self.rewards.parts[reward].name}/{name}": value for (reward, name), value in table.metrics.items()
        }


def judged_answer(completion: Completion, prompt: Prompt, state: TrainerState) -> JudgedAnswer:
    """An answer as rewards see it. state: of the run in which it was drawn."""
    episode = completion if isinstance(completion, Episode) else None
    return JudgedAnswer(
        completion.text,
        prompt.row,
        prompt.prompt,
        len(completion.tokens),
        completion.finish,
        completion.number,
        completion.sample,
        turns=() if episode is None else episode.turns,
        environment_reward=None if episode is None else episode.reward,
        token_ids=completion.tokens,
        state=state,
    )
