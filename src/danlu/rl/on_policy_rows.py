"""Rows of which a share is answered by the policy itself, with the weights of the step that trains on the answers.

On-policy distillation (GKD, arXiv:2306.13649, algorithm 1): the teacher scores each token that the student wrote. The
choice of rows, and the draws, follow from the seed and the item's number, so a resumed run and every layout draw the
same answers.

S tokens of a row
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from danlu.core.errors import DataError
from danlu.core.line_log import LineLog
from danlu.core.types import ROTARY_LENGTH, Pack, Sample
from danlu.data.permutation import key
from danlu.inference.engine import RolloutEngine, awake
from danlu.inference.request import Completion, Request, SamplingOptions
from danlu.inference.stopping import Decode
from danlu.parallel.phase import PHASE
from danlu.rl.experience_trees import with_facts
from danlu.training.data_loader import ItemSource


@dataclass(frozen=True)
class OnPolicySettings:
    """The rows that the policy answers, and how; the names are those of the recipe."""

    share: float
    """The share of items that the policy answers itself."""
    per_step: int
    """Items of an optimizer step."""
    sampling: SamplingOptions
    max_new_tokens: int
    max_length: int
    """Tokens that a prompt and its answer have together at most."""
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    rotary_length: Callable[[int], int] | None = None
    """Maps the final length of a text in tokens to the length that LongRoPE rotates it by, virtual tokens included;
    None where nothing is rotated by it."""

    def answers(self, number: int) -> bool:
        """Whether the policy answers item `number` itself: a draw of its own for each item."""
        return key(self.seed, "on-policy", number) < self.share * 2**64


@dataclass
class OnPolicyRows:
    """A `train.position.GeneratedItems`: rows, and the policy's own answers in the place of some of theirs.

    Args:
        rows: items of one sample each, by number.
        engine: asleep but while it answers. All processes make the same calls.
        decode: token ids to text, for the log.
        log: a line for each own answer; None on other processes than the first.
    """

    rows: ItemSource
    engine: RolloutEngine
    settings: OnPolicySettings
    decode: Decode
    log: LineLog | None = None

    _step: int | None = None  # of the items that are there
    _items: list[Pack] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)
    _lines_before: int = 0
    """Lines of the log before the present step's answers."""

    def at(self, number: int) -> Pack:
        """Returns item `number` of the run; the first of a step has all own answers of the step drawn.

        Raises the engine's errors.
        """
        step, place = divmod(number, self.settings.per_step)
        if step != self._step:
            self._draw(step)
        return self._items[place]

    def state(self, number: int) -> dict[str, Any]:
        """Returns the state of the rows, and the length of the log; a step that has not been taken draws its answers
        again."""
        step, place = divmod(number, self.settings.per_step)
        begun = step == self._step
        lines = 0 if self.log is None else self.log.lines
        state = {"rows": self.rows.state(number), "log_lines": self._lines_before if begun and not place else lines}
        return {**state, "step": step, "metrics": self._metrics} if begun and place else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up `state`; answers that were pending come with `restore_tensors`.

        Raises CheckpointError where the rows are others.
        """
        self.rows.restore(state["rows"])
        self._step, self._items = state.get("step"), []
        self._metrics = {name: float(value) for name, value in state.get("metrics", {}).items()}
        if self.log is not None:
            self.log.truncate(int(state["log_lines"]))

    def tensors(self, number: int) -> Mapping[str, Tensor]:
        """The own answers of a step of which some items were taken and others were not."""
        step, place = divmod(number, self.settings.per_step)
        if step != self._step or not place:
            return {}
        answers = [
            item.samples[0].tokens[prompt_tokens(self._row(own)) :]
            for own, item in zip(self._numbers(step), self._items, strict=True)
            if self.settings.answers(own)
        ]
        flat = np.concatenate([np.zeros(0, np.int32), *answers])
        lengths = np.array([len(answer) for answer in answers], np.int64)
        return {"tokens": torch.from_numpy(flat), "lengths": torch.from_numpy(lengths)}

    def restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes up the answers of `tensors`, after `restore`."""
        assert self._step is not None, "restore comes first"
        answers = torch.split(tensors["tokens"], tensors["lengths"].tolist())
        self._items = self._with_answers(self._step, [answer.numpy() for answer in answers])

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the present step: the share of own answers, their lengths, how many were cut off, and the
        seconds."""
        return self._metrics

    def close(self) -> None:
        """Closes the engine and the log."""
        self.engine.close()
        if self.log is not None:
            self.log.close()

    def _numbers(self, step: int) -> range:
        return range(step * self.settings.per_step, (step + 1) * self.settings.per_step)

    def _row(self, number: int) -> Sample:
        item = self.rows.at(number)
        assert isinstance(item, Pack) and len(item.samples) == 1, "the recipe's rules leave out packing"
        return item.samples[0]

    def _draw(self, step: int) -> None:
        own = [number for number in self._numbers(step) if self.settings.answers(number)]
        if self.log is not None and step == 0:  # what a run has left that ended before its first checkpoint
            self.log.truncate(0)
        self._lines_before = 0 if self.log is None else self.log.lines
        started = time.perf_counter()
        completions = self._answered([self._request(number, self._row(number)) for number in own])
        seconds = time.perf_counter() - started
        self._items = self._with_answers(step, [np.array(completion.tokens, np.int32) for completion in completions])
        self._step = step
        self._metrics = {"on_policy": len(own) / self.settings.per_step, "rollout_s": seconds}
        if completions:
            lengths = [len(completion.tokens) for completion in completions]
            self._metrics |= {
                "length": sum(lengths) / len(lengths),
                "length_max": float(max(lengths)),
                "truncated": sum(completion.is_truncated for completion in completions) / len(completions),
            }
        if self.log is not None:
            self._write(self.log, step, completions)

    def _answered(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion of each request, by the weights that the policy has now."""
        if not requests:
            return []
        PHASE.begin("rollout")
        with awake(self.engine):
            return self.engine.generate(requests)

    def _request(self, number: int, row: Sample) -> Request:
        settings, length = self.settings, prompt_tokens(row)
        return Request(
            number,
            tuple(row.tokens[:length].tolist()),
            settings.sampling,
            min(settings.max_new_tokens, settings.max_length - length),
            stop_ids=settings.stop_ids,
            stop_strings=settings.stop_strings,
        )

    def _with_answers(self, step: int, answers: Sequence[np.ndarray]) -> list[Pack]:
        """The items of a step, given its own answers in the order of their numbers."""
        left = iter(answers)
        items = []
        for number in self._numbers(step):
            row, answers_itself = self._row(number), self.settings.answers(number)
            item = Pack((with_answer(row, next(left)) if answers_itself else row,))
            if self.settings.rotary_length is not None:
                text = self._request(number, row).text_length if answers_itself else None
                length = np.nan if text is None else self.settings.rotary_length(text)
                item = with_facts(item, {ROTARY_LENGTH: np.array([length], np.float32)})
            items.append(item)
        return items

    def _write(self, log: LineLog, step: int, completions: Sequence[Completion]) -> None:
        for completion in completions:
            row = self._row(completion.number)
            prompt = self.decode(row.tokens[: prompt_tokens(row)].tolist())
            answer = {"text": completion.text, "finish": completion.finish, "tokens": completion.tokens}
            line = {"step": step + 1, "number": completion.number, "row": row.row, "prompt": prompt}
            log.append(json.dumps({**line, "answers": [{**answer, "rewards": {}}]}, ensure_ascii=False))
        log.sync()


def prompt_tokens(row: Sample) -> int:
    """The number of a row's tokens that are its prompt: all that stand before its last answer, the last run of trained
    tokens.

    Raises DataError for a row without a trained token, or without a possible prompt: a text with all tokens trained but
    the first, which nothing predicts.
    """
    trained = np.flatnonzero(row.weights)
    if not len(trained):
        raise DataError(f"{row.row}: no token is trained, so there is no answer that the policy could replace")
    breaks = np.flatnonzero(np.diff(trained) > 1)
    start = int(trained[0] if not len(breaks) else trained[breaks[-1] + 1])
    if start <= 1:
        raise DataError(
            f"{row.row}: has no prompt that the policy could answer, for all of its tokens are trained. on_policy "
            "needs conversations, or prompts with completions"
        )
    return start


def with_answer(row: Sample, answer: np.ndarray) -> Sample:
    """The row with `answer` [A] int32 in the place of its last answer, which it weighs as much as.

    Nothing else is trained: turns before it are context.
    """
    length = prompt_tokens(row)
    weights = np.zeros(length + len(answer), np.float32)
    weights[length:] = row.weights[length]
    return replace(row, tokens=np.concatenate([row.tokens[:length], answer]), weights=weights)
