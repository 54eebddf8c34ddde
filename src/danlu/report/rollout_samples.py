"""Samples out of rollouts.jsonl: the best and the worst of the first and the last rollout, and why rewards failed.

The file has all answers of a run and may be far larger than memory: of the lines between only counts are kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danlu.core.run_files import ROLLOUTS
from danlu.core.terminal import printable
from danlu.report.run_record import lines_of, number

SHOWN = 3
"""Samples at either end of a rollout."""
MAX_CHARACTERS = 2000
"""The most characters of a prompt or an answer; both ends of a longer text are shown."""
MAX_REASON = 300
"""Characters of the reason why a reward has no number."""
MAX_REASONS = 1000
"""Different reasons that are counted apart; all further ones are one."""
OTHER_REASONS = "other reasons"


@dataclass(frozen=True)
class RolloutSample:
    """One answer with its rewards."""

    step: int
    row: str
    prompt: str
    answer: str
    finish: str
    tokens: int
    rewards: Mapping[str, float | None]
    """Rewards by the part's name, before weights; None where there is none."""
    total: float
    """The weighted sum of the parts; NaN where no part has a number."""


@dataclass(frozen=True)
class RolloutExtremes:
    """The samples of a rollout with the highest and the lowest rewards, the most extreme one first."""

    step: int
    best: Sequence[RolloutSample]
    worst: Sequence[RolloutSample]


@dataclass
class RolloutSamples:
    """The rollouts of a run that its report shows."""

    rollouts: list[RolloutExtremes] = field(default_factory=list)
    """The first one, and the last where it is another."""
    prompts: int = 0
    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Rewards that were not given, by reason."""
    damaged_lines: int = 0


def read_samples(folder: Path, weights: Mapping[str, float]) -> RolloutSamples:
    """Reads the rollouts of a run. Raises ResourceError for a file that cannot be read.

    Args:
        weights: of the parts of the reward in its sum, by name; 1 for others.
    """
    samples = RolloutSamples()
    first: list[RolloutSample] = []
    last: list[RolloutSample] = []
    for line in lines_of(folder / ROLLOUTS):
        of_prompt = None if line is None else _samples_of(line, weights)
        if line is None or of_prompt is None:
            samples.damaged_lines += 1
            continue
        samples.prompts += 1
        samples.answers += len(of_prompt)
        _count_failures(samples.failures, line)
        if not of_prompt:
            continue
        if not first or first[0].step == of_prompt[0].step:
            first += of_prompt
        if last and last[0].step != of_prompt[0].step:
            last = []
        last += of_prompt
    if first:
        samples.rollouts.append(_extremes(first))
    if first and last[0].step != first[0].step:
        samples.rollouts.append(_extremes(last))
    return samples


def shortened(text: str, most: int = MAX_CHARACTERS) -> str:
    """The text without control characters; of a longer one the beginning and the end, and how much is between."""
    if len(text) <= most:
        return printable(text)
    half = most // 2
    return printable(f"{text[:half]}\n… {len(text) - 2 * half:,} characters not shown …\n{text[-half:]}")


def _extremes(samples: Sequence[RolloutSample]) -> RolloutExtremes:
    """The best and the worst; no sample is both."""
    judged = sorted((sample for sample in samples if not math.isnan(sample.total)), key=lambda sample: -sample.total)
    best = judged[:SHOWN]
    worst = judged[len(best) :][-SHOWN:]
    return RolloutExtremes(samples[0].step, best, worst[::-1])


def _samples_of(line: Mapping[str, Any], weights: Mapping[str, float]) -> list[RolloutSample] | None:
    """The samples of a line; None for one that is not of a rollout."""
    step, answers = line.get("step"), line.get("answers")
    if not isinstance(step, int) or not isinstance(answers, list):
        return None
    prompt = _prompt_text(line.get("prompt"))
    row = shortened(str(line.get("row", "")), MAX_REASON)
    return [_sample(step, row, prompt, answer, weights) for answer in answers if isinstance(answer, dict)]


def _sample(step: int, row: str, prompt: str, answer: Mapping[str, Any], weights: Mapping[str, float]) -> RolloutSample:
    given = answer.get("rewards")
    rewards = {
        shortened(str(name), MAX_REASON): number(value)
        for name, value in (given.items() if isinstance(given, dict) else ())
    }
    values = [weights.get(name, 1.0) * value for name, value in rewards.items() if value is not None]
    tokens = answer.get("tokens")
    return RolloutSample(
        step,
        row,
        prompt,
        shortened(str(answer.get("text", ""))),
        shortened(str(answer.get("finish", "")), MAX_REASON),
        len(tokens) if isinstance(tokens, list) else 0,
        rewards,
        sum(values) if values else math.nan,
    )


def _prompt_text(prompt: Any) -> str:
    """A prompt of one text, or the messages of a conversation, each after its role."""
    if not isinstance(prompt, list):
        return shortened(str(prompt))
    messages = [message for message in prompt if isinstance(message, dict)]
    return shortened("\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages))


def _count_failures(failures: Counter[str], line: Mapping[str, Any]) -> None:
    for answer in line["answers"]:
        reasons = answer.get("failures") if isinstance(answer, dict) else None
        for reason in reasons if isinstance(reasons, list) else ():
            text = shortened(str(reason), MAX_REASON)
            failures[text if text in failures or len(failures) < MAX_REASONS else OTHER_REASONS] += 1
