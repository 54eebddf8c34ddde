"""Teachers of stages `distill` and `rl` in a verification: small models, with small adapters where they have some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from danlu.assembly.frozen_base import stored_quantization
from danlu.core.errors import RecipeError
from danlu.core.types import Role
from danlu.models.config import ModelConfig
from danlu.parallel.layout import Layout, problems
from danlu.recipe import Recipe
from danlu.recipe.sections import Teacher
from danlu.recipe.teachers import teachers_of
from danlu.stages.distillation import resolved_teacher
from danlu.verification.proxy_adapters import proxy_adapter_folders
from danlu.verification.proxy_model import proxy_config
from danlu.verification.role_proxies import small_blocks, write_model

_LOGIT_SCALE = 10.0
"""Random weights say nearly the same of every token: a divergence between two such models is lost in rounding."""
_MOST_OTHER_ROWS = 16  # by which the embeddings of teacher and policy differ, where they do


def with_small_teachers(
    recipe: Recipe, config: ModelConfig, small: ModelConfig, layout: Layout, folder: Path, length: int
) -> tuple[Recipe, list[str]]:
    """Returns (the recipe with a small model in place of each teacher, notes); each has weights of its own.

    It keeps the properties that `proxy_config` keeps, a width of its own, quantization and adapters, and whether the
    embedding has more or fewer rows than the policy's.

    Args:
        config: of the large policy; `small` of the small one.
        folder: where the models are written.
        length: as `proxy_model.trained_length`.

    Raises RecipeError for a teacher that the layout cannot shard, DanluError for one that cannot be read.
    """
    teachers, notes = [], []
    for number, (role, teacher) in enumerate(teachers_of(recipe).items()):
        seed = recipe.seed + 1 + number
        shrunken, adapters = _small_teacher(recipe, role, teacher, config, small, layout, folder / role, seed, length)
        on = f", with adapters of the same kinds: {adapters}" if adapters else ""
        notes.append(f"{role} is a small model with weights of its own{on}")
        teachers.append(shrunken)
    return (recipe.model_copy(update={"teacher": teachers}), notes) if teachers else (recipe, [])


def _small_teacher(
    recipe: Recipe,
    role: Role,
    teacher: Teacher,
    config: ModelConfig,
    small: ModelConfig,
    layout: Layout,
    folder: Path,
    seed: int,
    length: int,
) -> tuple[Teacher, str]:
    """Returns (the section of a small teacher, the kinds of its adapters in words); its model is written into
    `folder`."""
    resolved = resolved_teacher(teacher)
    large = resolved.config
    if wrong := list(problems(recipe.parallel, large)):
        raise RecipeError([f"{role} ({teacher.model}): {problem}" for problem in wrong])
    quantization = teacher.quantization or stored_quantization(resolved.folder)
    other_rows = large.vocab_size - config.vocab_size
    rows = small.vocab_size + max(-_MOST_OTHER_ROWS, min(other_rows, _MOST_OTHER_ROWS))
    other_width = None if large.hidden_size == config.hidden_size else small.hidden_size
    shape = proxy_config(
        large, layout, quantized=quantization is not None, other_width=other_width, trained_length=length
    )
    shape = replace(shape, vocab_size=rows)
    # Nothing reads the tokenizer, but a folder without one is no teacher.
    write_model(shape, folder, seed, logit_scale=_LOGIT_SCALE, tokenizer_from=resolved.tokenizer_folder)
    model, kinds = folder, ""
    if resolved.stacks:
        top = str(resolved.stacks[0][-1].path)
        paths, kinds = proxy_adapter_folders([top], large, folder, folder.with_name(f"{role}-adapters"), seed=seed)
        model = Path(paths[0])
    top_k = None if teacher.top_k is None else min(teacher.top_k, small.vocab_size // 4)
    changes = {"model": str(model), "quantization": small_blocks(quantization), "top_k": top_k}
    return teacher.model_copy(update=changes), kinds
