"""A reward model as a reward: answers are rendered as it was trained on them, and scored in batches, here.

Unlike other rewards it runs in the training process, on its device, and is given all answers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from danlu.core.errors import DataError
from danlu.core.types import Pack, Sample, Task
from danlu.data.answer_trees import render_answers
from danlu.data.messages import Message, parse_turns
from danlu.data.preference_rows import AnswerRow, StepwiseAnswer, parse_answers
from danlu.data.preference_rows import JudgedAnswer as JudgedRow
from danlu.data.render import RenderedSample, RenderSettings
from danlu.data.rows import Completion
from danlu.data.tree_length import cut_answers, shorten_prompt
from danlu.data.trees import path_lengths
from danlu.inference.generation_config import Precision
from danlu.inference.load_model import LoadedModel, load_chat_tokenizer, load_model
from danlu.inference.resolve_model import ResolvedModel
from danlu.recipe.sections import QuantizationSection
from danlu.rewards.protocol import JudgedAnswer, StepRewards, lines_of
from danlu.stages.scoring import row_values, scored_rows, scoring_learner


@dataclass(frozen=True)
class RewardModel:
    """The score of each answer behind its prompt; of a process reward model the least probability that a step is right.

    As for the policy, a prompt that is a text is the user's turn where the model's own tokenizer has a chat template,
    and else stands before the answer as it is. Steps are an answer's lines that are not empty. Where prompt and answer
    are longer than the model's context, the prompt loses its beginning, and then the answer its end. None for an answer
    that has nothing to be scored: an empty one in steps, or one that the template refuses.
    """

    loaded: LoadedModel
    context: int
    """Tokens of prompt and answer that the model sees."""
    task: Task
    switched_on: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which the model has its adapters, where it is one that another model has too."""
    per_step: bool = False
    """Whether a process reward model gives each step's probability where the step ends, in the place of the least."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | StepRewards | None]:
        samples: dict[int, Sample] = {}
        for number, rendered in self._rendered(answers).items():
            tree = self._within_context(rendered)
            if tree is not None:
                where = f"answer {number}"
                samples[number] = Sample(tree.tokens, tree.weights, where, branches=tree.branches, facts=tree.facts)
        scores: list[float | StepRewards | None] = [None] * len(answers)
        with self.switched_on():
            packs = [Pack((sample,)) for sample in samples.values()]
            rows = list(scored_rows(scoring_learner(self.loaded), packs))
        for number, row in zip(samples, rows, strict=True):
            if not self._judges_steps:
                scores[number] = float(row.scores[-1])
                continue
            right = row_values(row, steps=True)["steps"]  # those that the model's context has
            ends = [end for _, end in lines_of(answers[number].text)]
            by_step = StepRewards(tuple(ends[: len(right)]), tuple(right))
            scores[number] = by_step if self.per_step else float(np.min(right))
        return scores

    @property
    def _judges_steps(self) -> bool:
        return self.task == "token-classification"

    def _rendered(self, answers: Sequence[JudgedAnswer]) -> dict[int, RenderedSample]:
        """The tokens of each answer behind its prompt, by its number; those that cannot be rendered are left out."""
        rows: dict[int, AnswerRow] = {}
        for number, answer in enumerate(answers):
            try:
                rows[number] = self._row(answer, f"answer {number}")
            except DataError:
                continue
        wheres = [f"answer {number}" for number in rows]
        trees = render_answers(list(rows.values()), wheres, self.loaded.chat_tokenizer.tokenizer, RenderSettings())
        return {number: tree for number, tree in zip(rows, trees, strict=True) if not isinstance(tree, DataError)}

    def _row(self, answer: JudgedAnswer, where: str) -> AnswerRow:
        prompt = answer.prompt
        if isinstance(prompt, str) and self.loaded.chat_tokenizer.tokenizer.has_template:
            prompt = [{"role": "user", "content": prompt}]
        if self._judges_steps:
            steps: list[Any] = [line for line, _ in lines_of(answer.text)]
            value = {"prompt": prompt, "completions": steps, "labels": [None] * len(steps)}
            row = parse_answers(value, "stepwise", "stepwise", where)
            assert isinstance(row, StepwiseAnswer), "the format says so"
            return row
        if isinstance(prompt, str):
            return JudgedRow(Completion(prompt, answer.text), True)
        tools = {"tools": answer.row.get("tools")}
        asked = parse_turns(list(prompt), tools, where, context=len(prompt))
        # Behind the checks of files, which take no empty answer: one that a policy gives has a score like any other.
        *before, last = asked.messages
        # The prompt may have begun the turn.
        said = (
            [last.continued_by(answer.text)] if last.role == "assistant" else [last, Message("assistant", answer.text)]
        )
        return JudgedRow(replace(asked, messages=(*before, *said)), True)

    def _within_context(self, tree: RenderedSample) -> RenderedSample | None:
        if max(path_lengths(tree.branches)) <= self.context:
            return tree
        bos_id = self.loaded.chat_tokenizer.tokenizer.bos_id
        return shorten_prompt(tree, self.context, bos_id) or cut_answers(tree, self.context, bos_id)


def load_reward_model(
    resolved: ResolvedModel,
    *,
    precision: Precision = "auto",
    device: str = "auto",
    quantization: QuantizationSection | None = None,
) -> RewardModel:
    """A reward model, ready to judge.

    quantization: by which the base of an adapter is packed, as when the adapter was trained; None: as it is stored.
    Raises ModelError for weights that cannot be read.
    """
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)
    loaded = load_model(resolved, tokenizer, precision=precision, device=device, quantization=quantization)
    task = resolved.config.task
    return RewardModel(loaded, loaded.model.config.context_length - resolved.virtual_tokens_per_prompt, task)
