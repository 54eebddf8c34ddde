"""Language models in a verification: a small decoder, or adapters on one, and packs of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from danlu.assembly.recipe_adapters import base_config, check_adapters
from danlu.core.errors import ModelError, RecipeError
from danlu.data.batch import EMPTY_PACK, empty_like
from danlu.models.config import ModelConfig
from danlu.models.hf_config import config_values
from danlu.models.hf_folder import read_config
from danlu.models.layer_spec import Experts
from danlu.models.long_context import ropes_by_length, with_long_context
from danlu.models.presets import from_scratch
from danlu.parallel.layout import Layout, problems
from danlu.planning.pipeline_split import pipedream_problems, split_problems
from danlu.recipe import Recipe
from danlu.recipe.routing_replay import replays_routes
from danlu.stages.builder import check_router
from danlu.stages.distillation import check_teachers, resolved_teacher
from danlu.stages.table import STAGES
from danlu.verification.data import fold_tokens, proxy_data
from danlu.verification.proxy import PreparedProxy, Proxy
from danlu.verification.proxy_model import (
    CANDIDATES,
    LENGTH_OF_ROUTES,
    MAX_LENGTH,
    staged_ropes,
    trained_length,
)
from danlu.verification.proxy_recipe import proxy_recipe
from danlu.verification.role_proxies import with_columns
from danlu.verification.synthetic_rollouts import with_synthetic_routes

_VOCAB_SIZE = 32_000  # of a model from scratch without its tokenizer


def prepare_proxy(recipe: Recipe, layout: Layout, count: int, folder: Path, *, full: bool) -> PreparedProxy:
    """`count` packs and a shrunken model for them; the folders that it starts from are written into `folder`.

    Of a model with experts there are `CANDIDATES` times as many packs.

    full: keep the recipe's own model and lengths.
    Raises RecipeError for a layout that the large model cannot be cut into, or a router that it has not, ModelError for
    adapters of another one.
    """
    check_adapters(recipe.model, recipe.adapter)
    check_teachers(recipe)
    config = _config(recipe, None)
    check_router(recipe.router, config, replays=recipe.rollout.routing_replay)
    max_length = recipe.data.max_length
    if not full:
        longest = LENGTH_OF_ROUTES if config.has_experts else MAX_LENGTH
        short = min(recipe.data.max_length, longest)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": short})})
    data = proxy_data(recipe, count * (CANDIDATES if config.has_experts else 1))
    unscaled = _config(recipe, data.vocab_size)
    config, length = with_long_context(unscaled, recipe.long_context, max_length), trained_length(data.packs)
    carried = split_problems(recipe.parallel.pipeline, config) if config.carries_values else ()
    if wrong := [*problems(recipe.parallel, config), *carried, *pipedream_problems(recipe, config)]:
        raise RecipeError(wrong)
    small_recipe, small, notes = (recipe, config, []) if full else proxy_recipe(recipe, config, layout, folder, length)
    assert full or not list(problems(small_recipe.parallel, small)), "divides as the large one does"
    stage = STAGES[recipe.stage]
    small = replace(small, task=stage.task(recipe))
    # Rows that one of the embeddings has more than another stand for no token.
    teachers = map(resolved_teacher, small_recipe.teacher or ())
    known_tokens = min([small.vocab_size, *(read_config(teacher.folder).vocab_size for teacher in teachers)])
    folded = data.packs if full and data.vocab_size is not None else fold_tokens(data.packs, known_tokens)
    packs = with_columns(folded, small_recipe, stage, None if full else folder, small.vocab_size)
    if small.has_experts and recipe.stage == "rl" and replays_routes(recipe):
        packs = with_synthetic_routes(packs, small, recipe.seed)
        notes.append("tokens go to experts that are drawn, in the place of those of a rollout (rollout.routing_replay)")
    by_stage = ropes_by_length(unscaled, recipe.long_context)
    ropes = staged_ropes(config, small, by_stage, None if full else length)
    if ropes:
        notes.append(f"stages of {', '.join(f'{tokens:,}' for tokens in by_stage)} tokens, a step of each")
    has_files = recipe.adapter is not None or can_be_written(small)
    if not has_files:
        notes.append("the result is compared by parameters, for no config.json can say this model")
    first = packs[0].samples[0]
    return PreparedProxy(
        recipe=small_recipe,
        proxy=Proxy(
            small,
            None if full else small.vocab_size,
            empty=empty_like(first) if first.branches or first.columns else EMPTY_PACK,
            staged_ropes=ropes,
            has_files=has_files,
        ),
        items=packs,
        parameters=small.parameter_count(),
        item_name="prompts" if recipe.stage == "rl" else "packed sequences" if recipe.row_type is None else "rows",
        model_summary=_summary(small, config),
        data_summary=data.source,
        notes=notes,
        stages=tuple(ropes),
    )


def can_be_written(config: ModelConfig) -> bool:
    """Whether the config.json of its family can describe a model."""
    try:
        config_values(config, torch_dtype="float32")
    except ModelError:
        return False
    return True


def _config(recipe: Recipe, vocab_size: int | None) -> ModelConfig:
    if recipe.model.path is not None:
        return base_config(recipe.model)
    given = recipe.model.config if isinstance(recipe.model.config, dict) else {}
    return from_scratch(recipe.model, vocab_size or int(given.get("vocab_size", _VOCAB_SIZE)), 1, 2)


def _summary(small: ModelConfig, large: ModelConfig) -> str:
    def sizes(config: ModelConfig) -> str:
        feeds = {kind.feed.num_experts for kind in config.kinds if isinstance(kind.feed, Experts)}
        experts = "".join(f", {count} experts" for count in sorted(feeds))
        return f"{len(config.layers)} layers of {config.layers[0].mixer}{experts}, width {config.hidden_size}"

    instead = "" if small == large else f" in place of {sizes(large)}"
    return f"{small.family}, {sizes(small)}{instead}"
