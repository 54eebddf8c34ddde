"""Rules between the keys of a recipe. They need no torch and no model, so an impossible run is refused at once.

Each rule is a generator of problems over a recipe whose types are right already; `problems` runs them all.
`missing_files` looks at the file system and is separate for that reason. `notes` are warnings about a recipe that is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from danlu.recipe.rules import (
    data,
    device_map,
    distillation,
    environment,
    long_context,
    model,
    objective,
    paths,
    pipeline,
    placement,
    reference,
    rl,
    rollout,
    router,
    training,
    value,
)
from danlu.recipe.rules.model import language_stage
from danlu.recipe.rules.paths import is_local, missing_files
from danlu.recipe.sections import AdamW8bit, Recipe
from danlu.recipe.yaml_tree import Problem

__all__ = ["RULES", "is_local", "language_stage", "missing_files", "notes", "problems"]

RULES: tuple[Callable[[Recipe], Iterator[Problem]], ...] = (
    paths.paths_are_valid,
    training.run_length_is_given_once,
    training.numbers_are_within_bounds,
    model.model_has_one_start,
    model.template_date_is_valid,
    training.batch_size_is_divisible,
    training.schedule_fits_run,
    data.packing_suits_stage,
    data.pretraining_has_no_roles,
    model.classification_reads_no_language_keys,
    data.sources_are_consistent,
    data.streaming_is_consistent,
    data.bad_row_limit_is_read,
    data.evaluation_has_rows,
    data.judged_rows_are_read_whole,
    training.rewind_has_checkpoint,
    training.optimizer_is_consistent,
    model.adapter_has_base_model,
    model.quantization_has_adapter,
    long_context.long_context_fits_stage,
    long_context.lengths_do_not_shrink,
    long_context.longrope_has_factors,
    objective.objective_fits_stage,
    objective.preference_terms_go_together,
    objective.term_reads_its_keys,
    reference.reference_is_consistent,
    distillation.distillation_has_teacher,
    distillation.distillation_has_one_divergence,
    distillation.divergence_reads_its_keys,
    distillation.own_answers_are_possible,
    rl.rl_keys_fit_stage,
    rl.prompt_template_is_valid,
    rl.rows_hold_prompts,
    rl.rewards_are_given,
    environment.environment_is_consistent,
    rl.rollout_can_be_trained_on,
    rl.policy_gradient_reads_its_keys,
    rl.batch_of_prompts_is_divisible,
    value.values_have_a_model,
    router.experts_can_be_balanced,
    placement.layout_is_supported,
    placement.context_is_supported,
    pipeline.pipeline_is_supported,
    device_map.device_map_is_supported,
    placement.memory_is_consistent,
    rollout.engine_is_used,
    rollout.engine_reads_its_keys,
    rollout.exact_is_possible,
    paths.output_is_separate,
)


def problems(recipe: Recipe) -> list[Problem]:
    """Everything in a recipe that contradicts itself, rule by rule. No file is looked at."""
    return [problem for rule in RULES for problem in rule(recipe)]


def notes(recipe: Recipe) -> list[str]:
    """Returns warnings about a recipe that may run but may not be as meant; for the console, once."""
    remarks = []
    if recipe.precision == "fp16" and recipe.device == "cpu":
        remarks.append("precision: fp16 on a CPU is several times slower than bf16 or fp32 and has no advantage there")
    files = [(key, (paths.file_of(source), source.split)) for key, source in paths.sources_of(recipe.data)]
    evaluated = {rows for key, rows in files if key.startswith("data.eval")}
    trained = {rows for key, rows in files if key.startswith("data.train")}
    if shared := evaluated & trained:
        names = ", ".join(sorted(file for file, _ in shared))
        remarks.append(f"data.eval: {names} is also trained on, so the evaluation loss says little")
    if isinstance(recipe.optimizer, AdamW8bit) and recipe.device != "cuda":
        remarks.append(
            "optimizer: adamw8bit keeps 2 bytes of state a parameter instead of 8, and on a CPU its update takes about "
            "eight times as long (63M parameters: 0.42 s instead of 0.06): take it for memory"
        )
    value_adapter = None if recipe.value is None else recipe.value.adapter
    for key, adapter in (("adapter", recipe.adapter), ("value.adapter", value_adapter)):
        if not recipe.drops_out and (dropout := getattr(adapter, "dropout", 0.0)):
            remarks.append(
                f"{key}.dropout: {dropout:g} is not applied: ratios are to the policy that drew the answers, without it"
            )
    if recipe.optimizer.learning_rate == 0:
        remarks.append("optimizer.learning_rate: 0 trains nothing")
    return remarks
