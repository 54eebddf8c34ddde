"""Rules between the keys of a recipe. They need no torch and no model, so an impossible run is refused at once.

Each rule is a generator of problems, given sections or the recipe, which have the right types already; `problems` runs
those that concern a recipe. That a key is not read is said on its field (`ReadWith`), and `unread_keys` reports it.
`missing_files` looks at the file system and is separate for that reason. `notes` are warnings about a recipe that is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from danlu.recipe.rules.unread_keys import unread_keys
from danlu.recipe.sections import AdamW, AdamW8bit, Recipe
from danlu.recipe.yaml_tree import Problem

__all__ = ["is_local", "language_stage", "missing_files", "notes", "problems"]


def problems(recipe: Recipe) -> list[Problem]:
    """Everything in a recipe that contradicts itself, rule by rule. No file is looked at."""
    return list(_problems(recipe))


def _problems(recipe: Recipe) -> Iterator[Problem]:
    stage = recipe.stage
    yield from paths.paths_are_valid(recipe)
    yield from unread_keys(recipe)
    yield from training.run_length_is_given_once(recipe.steps, recipe.epochs)
    yield from training.numbers_are_within_bounds(recipe)
    yield from model.model_has_one_start(recipe.model, stage)
    yield from model.template_date_is_valid(recipe.model.chat_template_date)
    yield from model.template_kwargs_are_free(recipe.model.chat_template_kwargs)
    yield from training.batch_size_is_divisible(recipe)
    yield from training.schedule_fits_run(recipe.schedule, recipe.steps)
    yield from data.packing_suits_stage(recipe.data, stage)
    yield from data.pretraining_has_no_turns(recipe.data, stage)
    yield from model.preset_suits_stage(recipe.model.preset, stage)
    yield from data.sources_are_consistent(recipe.data)
    yield from data.columns_are_known(recipe.data, stage)
    yield from data.streaming_is_consistent(recipe)
    yield from data.evaluation_has_rows(recipe)
    yield from data.judged_rows_are_read_whole(recipe.data, stage)
    yield from training.rewind_has_checkpoint(recipe)
    yield from training.optimizer_is_consistent(recipe.optimizer, recipe.adapter)
    yield from model.adapter_has_base_model(recipe)
    if recipe.fp8 is not None:
        from danlu.recipe.rules import precision

        yield from precision.fp8_is_possible(recipe)
    if any((recipe.quantization, recipe.adapter, recipe.reference, recipe.teacher)):
        from danlu.recipe.rules import quantization

        yield from quantization.format_can_be_trained(recipe)
        yield from quantization.zeros_take_the_adapter(recipe)
    if recipe.long_context is not None:
        yield from long_context.lengths_do_not_shrink(recipe.long_context.stages, recipe)
        yield from long_context.longrope_has_factors(recipe.long_context, recipe)
    if recipe.objective is not None:
        yield from objective.objective_fits_stage(recipe.objective, stage)
        yield from objective.preference_terms_go_together(recipe.objective, stage)
    if stage in ("preference", "rl"):
        yield from reference.reference_is_consistent(recipe)
    if stage in ("distill", "rl"):
        yield from distillation.distillation_has_teacher(recipe)
    if stage == "distill":
        yield from distillation.distillation_has_one_divergence(recipe.objective or (), recipe.teacher or ())
        if recipe.on_policy:
            yield from distillation.own_answers_are_possible(recipe)
    if recipe.data.prompt is not None or recipe.rewards:
        yield from rl.prompt_template_is_valid(recipe.data.prompt, recipe.rewards or ())
    if stage == "rl":
        yield from distillation.divergence_suits_drawn_tokens(recipe)
        yield from rl.rows_hold_prompts(recipe.data)
        yield from rl.rewards_are_given(recipe)
        if recipe.environment is not None:
            yield from environment.environment_is_consistent(recipe.environment, recipe)
        yield from rl.rollout_can_be_trained_on(recipe)
        yield from rl.format_is_one(recipe)
        yield from rl.policy_gradient_reads_its_keys(recipe)
        yield from rl.batch_of_prompts_is_divisible(recipe.batch)
    if recipe.value is not None and recipe.policy_gradient is not None and recipe.policy_gradient.needs_value:
        yield from value.values_have_a_model(recipe.value, recipe)
    if recipe.router is not None:
        yield from router.experts_can_be_balanced(recipe.router, recipe)
    yield from placement.layout_is_supported(recipe)
    yield from placement.context_is_supported(recipe)
    yield from pipeline.pipeline_is_supported(recipe)
    if recipe.parallel.device_map is not None:
        yield from device_map.device_map_is_supported(recipe.parallel.device_map, recipe)
    yield from placement.memory_is_consistent(recipe)
    yield from rollout.engine_is_used(recipe)
    yield from rollout.engine_is_possible(recipe)
    yield from rollout.precision_is_possible(recipe)
    yield from rollout.exact_is_possible(recipe)
    yield from paths.output_is_separate(recipe)


def notes(recipe: Recipe) -> list[str]:
    """Returns warnings about a recipe that may run but may not be as meant; for the console, once."""
    remarks = []
    if recipe.activations == "fp16" and recipe.device == "cpu":
        remarks.append("precision: fp16 on a CPU is several times slower than bf16 or fp32 and has no advantage there")
    files = [
        (key, (paths.file_of(source), source.subset, source.split)) for key, source in paths.sources_of(recipe.data)
    ]
    evaluated = {rows for key, rows in files if key.startswith("data.eval")}
    trained = {rows for key, rows in files if key.startswith("data.train")}
    if shared := evaluated & trained:
        names = ", ".join(sorted(file for file, *_ in shared))
        remarks.append(f"data.eval: {names} is also trained on, so the evaluation loss says little")
    optimizer = recipe.optimizer
    is_8bit = isinstance(optimizer, AdamW8bit) or (isinstance(optimizer, AdamW) and optimizer.moments == "8bit")
    if is_8bit and recipe.device != "cuda":
        remarks.append(
            "optimizer: 8-bit AdamW keeps 2 bytes of state a parameter instead of 8, and on a CPU its update takes "
            "about eight times as long (63M parameters: 0.42 s instead of 0.06): take it for memory"
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
