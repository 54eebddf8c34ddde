"""Stage `distill`, and teachers of stage `rl`: as frozen models, their divergence from the policy, and checks of their
recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch
from torch import Tensor

from danlu.assembly.recipe_adapters import wide_config
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.core.line_log import OptionalLineLog
from danlu.core.run_files import ROLLOUTS
from danlu.core.types import Batch, Objective, Outputs, Role, TopTokens
from danlu.data.column_store import ColumnType
from danlu.data.tokenizer_info import tokenizer_info
from danlu.inference.resolve_model import ResolvedModel, resolve_model
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import read_config
from danlu.models.presets import from_scratch
from danlu.objectives.distillation import Distillation, HiddenStateDistillation, TeacherDivergence, TeacherTerm
from danlu.parallel.ranks import Ranks
from danlu.planning.layout_problems import teacher_problems
from danlu.planning.workload import OtherModel
from danlu.recipe import Recipe
from danlu.recipe.roles import CachedModel, ModelSpec, frozen_teachers
from danlu.recipe.sections import ForwardKL, HiddenStates, JensenShannon, Model, ReverseKL, Teacher
from danlu.recipe.teachers import teacher_shares, teachers_of
from danlu.rl.on_policy_rows import OnPolicyRows, OnPolicySettings, prompt_tokens
from danlu.stages.builder import DecoderBuilder
from danlu.stages.frozen_models import check_frozen_model
from danlu.stages.likelihood import likelihood_metrics
from danlu.stages.placed import PlacedDecoder
from danlu.stages.protocols import (
    Better,
    ColumnSpec,
    FromColumns,
    HeldOut,
    PlacedStage,
    RoleSpec,
    StageData,
    StoredRows,
)
from danlu.stages.reader import chat_tokenizer_of, tokenizer_of
from danlu.stages.rollout import sampling_options, sleeping_engine
from danlu.training.data_loader import ItemSource
from danlu.training.executor import AnyLearner
from danlu.training.run_folder import Start


class DistillationBuilder(DecoderBuilder):
    """A `ModelBuilder`: the decoder that learns, and its teachers."""

    def check(self, start: Start | None) -> None:
        """Raises a DanluError also for teachers that this policy cannot learn from."""
        super().check(start)
        check_teachers(self.recipe)

    def with_columns(self, ranks: Ranks, device: torch.device, stage_data: StageData, stream: TextIO) -> StageData:
        """Adds columns; raises DataError for a row without a prompt, where the policy answers rows itself."""
        if self.recipe.on_policy:
            assert stage_data.stored is not None, "the recipe's rules refuse streaming"
            longest_prompt(stage_data.stored)
        return super().with_columns(ranks, device, stage_data, stream)

    def place(self, ranks: Ranks, device: torch.device, start: Start | None, stage_data: StageData) -> PlacedStage:
        """The decoder and the teachers that are not cached, on the processes of a layout."""
        return self._stage(with_teacher_notes(self._policy(ranks, device, start, stage_data)), stage_data)


def with_teacher_notes(decoder: PlacedDecoder) -> PlacedDecoder:
    """Returns the placed decoder with notes on the teachers."""
    notes = (*decoder.placed.notes, *_notes(decoder.recipe.teacher or (), decoder.model.config))
    return replace(decoder, placed=replace(decoder.placed, notes=notes))


def teacher_models(recipe: Recipe) -> Mapping[Role, RoleSpec]:
    """The teachers as frozen models, or as columns of the rows."""
    models: dict[Role, RoleSpec] = {}
    for role, teacher in frozen_teachers(recipe).items():
        is_cached = isinstance(teacher, CachedModel)
        models[role] = FromColumns(partial(_from_columns, role)) if is_cached else _resolved(recipe, role)
    return models


def teacher_columns(recipe: Recipe) -> Sequence[ColumnSpec]:
    """The columns of each cached teacher: its likeliest tokens and their log-probabilities, and last that of all other
    tokens together."""
    cached = {role: teacher for role, teacher in teachers_of(recipe).items() if teacher.cache}
    if not cached:
        return ()
    temperature, rows = _divergence(recipe).temperature, _policy_config(recipe, None).vocab_size
    return [_columns(role, _resolved(recipe, role), teacher, temperature, rows) for role, teacher in cached.items()]


def _columns(role: Role, spec: ModelSpec, teacher: Teacher, temperature: float, vocab_size: int) -> ColumnSpec:
    k = teacher.top_k
    assert k is not None, "the recipe's rules ask for it where a teacher is cached"
    ids, logprobs = _column_names(role)

    def compute(outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        chosen = outputs.top_tokens(k, temperature=temperature, vocab_size=vocab_size)
        return {ids: chosen.ids, logprobs: chosen.logprobs}

    return ColumnSpec(
        role,
        spec,
        {ids: ColumnType("<i4", (k,)), logprobs: ColumnType("<f4", (k + 1,))},
        compute,
        {"temperature": temperature, "vocab_size": vocab_size},
    )


def _column_names(role: Role) -> tuple[str, str]:
    return f"{role}_ids", f"{role}_logprobs"


@dataclass(frozen=True)
class ColumnTopTokens:
    """The stored output of a cached teacher: its likeliest tokens. It is an `Outputs` with that method alone."""

    role: Role
    batch: Batch

    def top_tokens(self, k: int, *, temperature: float = 1.0, vocab_size: int | None = None) -> TopTokens:
        """Those of the columns, which were computed for this k, temperature and vocabulary."""
        ids, logprobs = (self.batch.columns[name] for name in _column_names(self.role))
        assert ids.shape[1] == k, f"{ids.shape[1]} tokens are cached, not {k}"
        return TopTokens(ids.long(), logprobs)


def _from_columns(role: Role, batch: Batch) -> Outputs:
    return cast(Outputs, ColumnTopTokens(role, batch))  # the objective asks a teacher with a top_k for nothing else


def _resolved(recipe: Recipe, role: Role) -> ModelSpec:
    """The frozen model of a teacher, with its base and adapters where its folder has an adapter."""
    model = frozen_teachers(recipe)[role]
    spec = model.model if isinstance(model, CachedModel) else model
    assert spec is not None, "a teacher is a model of its own"
    return replace(spec, section=_section(teachers_of(recipe)[role]))


def resolved_teacher(teacher: Teacher) -> ResolvedModel:
    """The folders of a teacher. Raises ModelError for one that is not there, or that has no tokenizer."""
    try:
        return resolve_model(teacher.model)
    except DataError as error:
        raise ModelError(
            f"teacher {teacher.model}: without its tokenizer nothing says that its tokens are the policy's. Copy the "
            f"tokenizer's files into its folder ({error})"
        ) from None


def _section(teacher: Teacher) -> Model:
    """The teacher as the section of a model: its folder, or its base with the adapters upon it."""
    resolved = resolved_teacher(teacher)
    if not resolved.stacks:
        return Model(path=teacher.model)
    return Model(path=str(resolved.folder), adapters=[str(adapter.path) for adapter in resolved.stacks[0]])


def teacher_divergence(recipe: Recipe) -> TeacherDivergence:
    """The divergence of a recipe's policy from its teachers."""
    divergence, shares = _divergence(recipe), teacher_shares(recipe)
    return TeacherDivergence(
        tuple(TeacherTerm(role, shares[role], teacher.top_k) for role, teacher in teachers_of(recipe).items()),
        divergence.kind,
        divergence.beta if isinstance(divergence, JensenShannon) else 0.5,
        divergence.temperature,
    )


def distillation(recipe: Recipe) -> Objective:
    """The objective of a recipe of stage distill."""
    hidden = next((term for term in recipe.objective or () if isinstance(term, HiddenStates)), None)
    teachers, loss = teachers_of(recipe), recipe.loss
    objective = Distillation(
        teacher_divergence(recipe), _divergence(recipe).cross_entropy, loss.label_smoothing, loss.z_loss
    )
    if hidden is None:
        return objective
    widths = {role: read_config(resolved_teacher(teacher).folder).hidden_size for role, teacher in teachers.items()}
    return HiddenStateDistillation(objective, hidden.weight, _policy_config(recipe, 1).hidden_size, widths)


def _divergence(recipe: Recipe) -> ForwardKL | ReverseKL | JensenShannon:
    assert recipe.divergence is not None, "the recipe's rules ask for one"
    return recipe.divergence


def held_out_distillation(recipe: Recipe, objective: Objective) -> Objective:
    """The same objective for held-out rows: label smoothing and z-loss take no part."""
    return objective.without_extras() if isinstance(objective, Distillation) else objective


def distillation_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of distillation's evaluations, in addition to the likelihood of the rows."""
    hidden = any(isinstance(term, HiddenStates) for term in recipe.objective or ())
    terms: dict[str, Better] = {"divergence": "lower", **({"hidden": "lower"} if hidden else {})}
    return {**likelihood_metrics(recipe), **terms}


def check_teachers(recipe: Recipe) -> None:
    """Raises a DanluError for a teacher that the policy cannot learn from, without reading weights.

    Their tokens must be the same. Embeddings may differ in the number of rows, for some stand for no token:
    distributions are compared over the rows that both have.
    """
    if not recipe.teacher:
        return
    rows = _policy_config(recipe, None).vocab_size
    for role, teacher in teachers_of(recipe).items():
        spec = _resolved(recipe, role)
        if teacher.cache:  # the others are among the models of the stage, which are checked for each
            check_frozen_model(spec, recipe)
        config = read_config(resolved_teacher(teacher).folder)
        if wrong := [*teacher_problems(recipe, OtherModel(f"{spec.key}.model", teacher.model, config), rows)]:
            raise RecipeError(wrong)
        own = config.vocab_size
        if teacher.top_k is not None and teacher.top_k >= min(rows, own):
            raise RecipeError(
                f"{spec.key}.top_k: {teacher.top_k} of {min(rows, own)} tokens leave no others. Give less, or leave it "
                "out for the whole distribution"
            )


def _notes(teachers: Sequence[Teacher], config: ModelConfig) -> Iterator[str]:
    """Notes for the console on the teachers of a policy with this config."""
    for teacher in teachers:
        rows = read_config(resolved_teacher(teacher).folder).vocab_size
        if rows != config.vocab_size:
            yield (
                f"teacher {teacher.model}: its embedding has {rows:,} rows and the policy's {config.vocab_size:,}; "
                f"distributions are compared over the first {min(rows, config.vocab_size):,}, which both have"
            )


def _policy_config(recipe: Recipe, vocab_size: int | None) -> ModelConfig:
    """The policy's config. vocab_size: of the tokenizer, which is asked where it is None, for a model from scratch."""
    if recipe.model.path is not None:
        return wide_config(recipe.model)
    if vocab_size is None:
        vocab_size = tokenizer_info(tokenizer_of(recipe)).vocab_size
    return from_scratch(recipe.model, vocab_size)


# -- the policy's own answers to a share of the rows, drawn while it is trained -----------------------------------


def longest_prompt(rows: StoredRows) -> int:
    """Tokens of the longest prompt that the policy may have to answer. Raises DataError for a row without a prompt."""
    samples = rows.train
    return max(prompt_tokens(samples.sample(number)) for number in range(len(samples)))


def on_policy_items(
    placed: PlacedDecoder, stage_data: StageData, learner: AnyLearner, folder: Path
) -> tuple[ItemSource, HeldOut | None]:
    """The rows that were read, with own answers to a share of them where the recipe asks for it."""
    recipe, config, (rows, held_out) = placed.recipe, placed.model.config, stage_data.items()
    if not recipe.on_policy:
        return rows, held_out
    assert stage_data.stored is not None, "the recipe's rules refuse streaming"
    rollout, chat = recipe.rollout, chat_tokenizer_of(recipe, config)
    virtual, max_length = len(placed.placed.subject.virtual_token_ids), recipe.data.max_length
    stop_ids, stop_strings = chat.split_stops(rollout.stop_strings)
    settings = OnPolicySettings(
        share=float(recipe.on_policy),
        per_step=recipe.batch.packs(max_length),
        sampling=sampling_options(rollout, recipe.seed),
        max_new_tokens=rollout.max_new_tokens,
        max_length=max_length,
        stop_ids=chat.stop_ids | stop_ids,
        stop_strings=tuple(stop_strings),
        seed=recipe.seed,
    )
    if config.rotates_by_text_length:
        settings = replace(settings, rotary_length=lambda tokens: min(virtual + tokens, config.context_length))
    length = virtual + min(longest_prompt(stage_data.stored) + settings.max_new_tokens, max_length)
    engine = sleeping_engine(recipe, placed.placed, chat.decode, [length] * settings.per_step)
    log = OptionalLineLog(folder / ROLLOUTS) if placed.parallel.ranks.leads else None
    return OnPolicyRows(rows, engine, settings, chat.decode, log), held_out
