"""Stage `rl`: prompts as the rows of a run, and the builder of the decoder that answers them and learns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TextIO

import numpy as np
import torch

from danlu.assembly.parallelize import Subject
from danlu.assembly.recipe_adapters import max_sample_length, tokenizer_path
from danlu.core.errors import DataError, RecipeError
from danlu.core.types import Pack
from danlu.data.batch import empty_like
from danlu.data.prepare import DatasetSpec, prepare_prompts
from danlu.data.prompts import Prompt, PromptOrder
from danlu.data.tokenizer_info import tokenizer_info
from danlu.data.tool_calls import unknown_form_line
from danlu.inference.grammar import check_grammar, form_grammar
from danlu.inference.request import Completion
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.sections import AgentSection, Tools
from danlu.rewards.build import check_columns, check_first_tests, check_functions
from danlu.rewards.environments.build import check_environment, check_environment_code, tool_schemas
from danlu.rl.experience_trees import SUPPORT, answer_tree, with_columns
from danlu.stages.builder import DecoderBuilder
from danlu.stages.data_remarks import thought_lines
from danlu.stages.distillation import check_teachers, with_teacher_notes
from danlu.stages.policy_objective import estimator_of
from danlu.stages.protocols import PlacedStage, Prompts, StageData
from danlu.stages.reader import tokenizer_of
from danlu.stages.reinforcement import AnsweringDecoder
from danlu.stages.reward_model import RewardModel
from danlu.stages.rewards import recipe_rewards, reward_parts, rewards_on_base
from danlu.stages.role_configs import own_reward_bytes
from danlu.stages.rollout import leaves_tokens_out
from danlu.training.progress import RowProgress
from danlu.training.run_folder import Start


class PromptReader:
    """A `Reader`: the prompts of stage rl."""

    items = "prompts"
    counted = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def read(self, stream: TextIO) -> StageData:
        """Every process reads and renders the prompts."""
        recipe, model = self.recipe, self.recipe.model
        spec = DatasetSpec(
            recipe.data,
            "rl",
            tokenizer_path(recipe.model),
            model.chat_template,
            recipe.seed,
            model.chat_template_date,
            max_new_tokens=recipe.rollout.max_new_tokens,
            tools=tool_schemas(recipe.environment),
            in_turns=recipe.environment is not None,
            template_kwargs=model.chat_template_kwargs,
        )
        with closing(RowProgress(stream)) as progress:
            prompts = prepare_prompts(spec, progress=progress)
        parts = reward_parts(recipe)
        everyone = (*prompts.train, *prompts.eval)
        for prompt in everyone:
            check_columns(parts, prompt.row, prompt.where)
        positions = max_sample_length(model, recipe.adapter)
        tokenizer = tokenizer_of(recipe)
        calls = []
        if isinstance(recipe.environment, Tools | AgentSection) and tokenizer.has_template:
            calls = [line for line in [unknown_form_line(tokenizer.template(tools=True))] if line is not None]
        return StageData(
            None,
            len(prompts.train) * recipe.batch.passes,
            None,
            [
                *prompts.lines(),
                *position_lines(everyone, recipe.data.max_length, spec.max_new_tokens, positions),
                *calls,
                *thought_lines(recipe, everyone, tokenizer),
            ],
            tokenizer=tokenizer_info(tokenizer),
            empty=empty_item(recipe),
            prompts=Prompts(PromptOrder(prompts.train, recipe.seed), prompts.train, prompts.eval),
        )

    def amount(self, items: int) -> str:
        """The number of prompts and answers, as text."""
        return f"{items} prompts x {self.recipe.rollout.samples} answers"

    def targets(self, items: int) -> int:
        """The most targets that `items` prompts have."""
        rollout, environment = self.recipe.rollout, self.recipe.environment
        longest = rollout.max_new_tokens
        if environment is not None:
            longest = min(longest * environment.max_turns, self.recipe.data.max_length)
        return items * rollout.samples * longest


def position_lines(prompts: Sequence[Prompt], max_length: int, max_new_tokens: int, positions: int) -> list[str]:
    """Warnings about prompts that have too few positions left in the model for a whole answer.

    positions: of the model, for a prompt and its answer. Raises DataError for a prompt that leaves no answer any room.
    """
    if max_length <= positions:
        return []
    advice = f"Set data.max_length to {positions}, or give the model more (max_position_embeddings, rope_scaling)"
    lengths = np.array([len(prompt.tokens) for prompt in prompts])
    too_long = np.flatnonzero(lengths >= positions)
    if len(too_long):
        first = prompts[too_long[0]]
        raise DataError(
            f"{first.where}: the prompt has {len(first.tokens):,} tokens, and the model has {positions:,} positions "
            f"for it and its answer; {len(too_long):,} of {len(prompts):,} prompts are too long. {advice}"
        )
    limit = f"data.max_length: {max_length:,} is more than the {positions:,} positions that the model has"
    cut = int((lengths > positions - max_new_tokens).sum())
    if not cut:
        return []
    return [
        f"{limit}: {cut:,} of {len(prompts):,} prompts leave less than rollout.max_new_tokens for answers. {advice}"
    ]


def empty_item(recipe: Recipe) -> Pack:
    """An item without targets that has the columns and facts of the stage's items."""
    completion = Completion(0, 0, [0], [0.0], [0.0], None, [0], "", "stop")
    parts = [f"reward/{name}" for name in recipe.reward_weights]
    names = ["reward", "group", "length", "truncated", "fresh", *parts, *estimator_of(recipe).facts]
    item = answer_tree([0], [completion], "filled up", {name: [np.nan] for name in names})
    columns = {name: np.zeros(2, np.float32) for name in estimator_of(recipe).columns}
    if leaves_tokens_out(recipe.rollout):
        columns[SUPPORT] = np.full((2, 1), -1, np.int32)
    return empty_like(with_columns(item, columns).samples[0])


class RolloutBuilder(DecoderBuilder):
    """A `ModelBuilder`: the decoder that answers and learns, and its teachers where it has some."""

    def check(self, start: Start | None) -> None:
        """Raises a DanluError also for faulty rewards and environments, and for teachers with other tokens."""
        super().check(start)
        check_teachers(self.recipe)
        reward_parts(self.recipe)
        if (form := self.recipe.rollout.format) is not None:
            try:
                check_grammar(form_grammar(form.kinds))
            except DataError as error:
                raise RecipeError(f"rollout.format: {error}") from None
        if self.recipe.environment is not None:
            check_environment(self.recipe.environment)

    def place(self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData) -> PlacedStage:
        """Places the decoder, and the models of other roles, on the processes of a layout.

        Raises also the errors of loading rewards and a user's environment, and DataError for tests of programs that the
        empty program passes, before any model is loaded.
        """
        ranks.world.from_first(partial(self._check_loading, stage_data))
        recipe, judges = self.recipe, dict[str, RewardModel]()

        def put_judges_on_base(subject: Subject) -> list[str]:
            on_base, lines = rewards_on_base(recipe, subject, ranks)
            judges.update(on_base)
            return lines

        decoder = with_teacher_notes(self._policy(ranks, device, start, stage_data, put_judges_on_base))
        policy = AnsweringDecoder(**vars(decoder), rewards=partial(recipe_rewards, judges=judges))
        return self._stage(policy, stage_data, own_reward_bytes(recipe, judges) if ranks.leads else 0)

    def _check_loading(self, stage_data: StageData) -> None:
        parts = reward_parts(self.recipe)
        check_functions(parts, self.recipe.reward_limits)
        if stage_data.prompts is not None:
            check_first_tests(parts, ((prompt.row, prompt.where) for prompt in stage_data.prompts.train))
        if self.recipe.environment is not None:
            check_environment_code(self.recipe.environment)
