"""Models of other roles than the policy in a verification: small ones in their place, and the columns that they would
fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from danlu.assembly.stored_base import stored_quantization
from danlu.core.errors import RecipeError
from danlu.core.types import Pack, Sample
from danlu.data.batch import collate, pad_to_bucket
from danlu.models.attend import attend_for
from danlu.models.config import ModelConfig
from danlu.models.initialize import initialize, named_generator
from danlu.models.loading import build
from danlu.models.saving import save
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.layout import Layout, problems
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.reference import resolve_reference
from danlu.recipe.roles import REFERENCE, ModelSpec
from danlu.recipe.sections import Cached, Fp4, Frozen, Model, Nf4, QuantizationSection
from danlu.recipe.teachers import teachers_of
from danlu.recipe.value import VALUE, value_adapter, value_share
from danlu.stages.columns import all_answers
from danlu.stages.distillation import resolved_teacher
from danlu.stages.frozen_models import place_frozen
from danlu.stages.protocols import ColumnSpec, Stage
from danlu.stages.roles import FrozenDecoder
from danlu.verification.proxy_adapters import GROUP, proxy_adapter_folders, proxy_section
from danlu.verification.proxy_model import BLOCK, proxy_config

_PERTURBATION = 0.1  # standard deviation that is put on norms and biases, which otherwise are all alike
_MOVES_EVERY = 2  # steps at most, so that a moving reference moves in a verification
_MOST_WARMUP = 1  # steps at most, so that the policy moves in a verification
_LOGIT_SCALE = 10.0
"""Random weights say nearly the same of every token: a divergence between two such models is lost in rounding."""
_MOST_OTHER_ROWS = 16  # by which the embeddings of teacher and policy differ, where they do


def write_model(
    config: ModelConfig, folder: Path, seed: int, *, logit_scale: float = 1.0, tokenizer_from: Path | None = None
) -> None:
    """Writes a small model with random numbers, also in norms and biases.

    logit_scale: factor of its head. tokenizer_from: a folder with a tokenizer to copy.
    """
    model = build(config)
    initialize(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.empty_like(parameter).normal_(
                    generator=named_generator(seed, f"{name} stirred")  # the name is the seed: it stays
                )
                parameter.add_(noise, alpha=_PERTURBATION)
        if config.task == "causal-lm":  # others have no such head
            for weight in model.head_parameters():
                weight.mul_(logit_scale)
    save(model, folder, tokenizer_from=tokenizer_from)


def proxy_reference(recipe: Recipe, config: ModelConfig, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns (changes of the recipe, notes): a reference in memory is a small model with other weights than the
    policy.

    Else its use would not show in the first step, where a reference has the policy's outputs.

    config: of the small policy. folder: where models are written.
    """
    match resolve_reference(recipe):
        case Frozen() as section:
            write_model(config, folder / REFERENCE, recipe.seed + 1)
            changes: dict[str, Any] = {
                "model": str(folder / REFERENCE),
                "quantization": small_blocks(section.quantization),
            }
            notes = ["the reference is another small model than the policy"]
            if section.every is not None:
                changes["every"] = min(section.every, _MOVES_EVERY)
                notes.append(f"the reference moves every {changes['every']} steps")
            return {"reference": section.model_copy(update=changes)}, notes
        case Cached() as section:
            write_model(config, folder / REFERENCE, recipe.seed + 1)
            return {"reference": section}, ["the cached reference is another small model than the policy"]
        case section:
            return {"reference": section}, []


def proxy_value(
    recipe: Recipe, config: ModelConfig, small: ModelConfig, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    """Returns (changes of the recipe, notes).

    config, small: of the large policy and of the small one, which is in `folder`. Where the recipe names the start of
    the value model, a small one is written there: an adapter of the same kind, or a model with the policy's sizes.
    """
    section, share = recipe.value, value_share(recipe)
    if section is None or share in (None, "policy"):
        return {}, []
    changes: dict[str, Any] = {}
    notes = []
    if section.warmup > _MOST_WARMUP:
        changes["warmup"] = _MOST_WARMUP
        notes.append(f"the policy is held for {_MOST_WARMUP} step, not {section.warmup}")
    if section.adapter is not None:
        own = value_adapter(recipe)
        changes["adapter"] = None if own is None else proxy_section(own, config, small)
    if section.model is not None and share == "base":
        (changes["model"],), kind = proxy_adapter_folders(
            [section.model], config, folder / "model", folder / VALUE, seed=recipe.seed + 2
        )
        notes.append(f"values start from a {kind} adapter with numbers of its own")
    elif section.model is not None:
        write_model(small, folder / VALUE, recipe.seed + 2)
        changes["model"] = str(folder / VALUE)
        notes.append("values start from another small model than the policy")
    return {"value": section.model_copy(update=changes)}, notes


def proxy_teachers(
    recipe: Recipe, config: ModelConfig, small: ModelConfig, layout: Layout, folder: Path, length: int
) -> tuple[dict[str, Any], list[str]]:
    """Returns (changes of the recipe, notes): a small model in place of each teacher, with weights of its own.

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
        seed, own = recipe.seed + 1 + number, folder / role
        resolved = resolved_teacher(teacher)
        large = resolved.config
        if wrong := list(problems(recipe.parallel, large)):
            raise RecipeError([f"{role} ({teacher.model}): {problem}" for problem in wrong])
        quantization = teacher.quantization or stored_quantization(resolved.folder)
        shape = proxy_config(
            large,
            layout,
            quantized=quantization is not None,
            other_width=None if large.hidden_size == config.hidden_size else small.hidden_size,
            trained_length=length,
        )
        other_rows = max(-_MOST_OTHER_ROWS, min(large.vocab_size - config.vocab_size, _MOST_OTHER_ROWS))
        shape = replace(shape, vocab_size=small.vocab_size + other_rows)
        # Nothing reads the tokenizer, but a folder without one is no teacher.
        write_model(shape, own, seed, logit_scale=_LOGIT_SCALE, tokenizer_from=resolved.tokenizer_folder)
        model, adapters = str(own), ""
        if resolved.stacks:
            top = str(resolved.stacks[0][-1].path)
            (model,), kinds = proxy_adapter_folders([top], large, own, folder / f"{role}-adapters", seed=seed)
            adapters = f", with adapters of the same kinds: {kinds}"
        notes.append(f"{role} is a small model with weights of its own{adapters}")
        top_k = None if teacher.top_k is None else min(teacher.top_k, small.vocab_size // 4)
        changes = {"model": model, "quantization": small_blocks(quantization), "top_k": top_k}
        teachers.append(teacher.model_copy(update=changes))
    return ({"teacher": teachers} if teachers else {}), notes


def has_frozen_models(recipe: Recipe) -> bool:
    """Whether the recipe has models of their own, apart from the policy, which are not trained."""
    in_memory = any(not teacher.cache for teacher in recipe.teacher or ())
    return in_memory or isinstance(resolve_reference(recipe), Frozen)


def small_blocks(section: QuantizationSection | None) -> QuantizationSection | None:
    """Quantization in blocks that fit small matrices."""
    if isinstance(section, Nf4 | Fp4):
        return section.model_copy(update={"block": BLOCK})
    if section is not None and "group" in type(section).model_fields:
        return section.model_copy(update={"group": min(section.group, GROUP)})
    return section


def with_columns(
    items: Sequence[Pack], recipe: Recipe, stage: Stage, folder: Path | None, vocab_size: int
) -> Sequence[Pack]:
    """The items with the columns that a stage computes before training.

    folder: of small models, by the names of the columns; None for the recipe's own.
    """
    for spec in stage.columns(recipe):
        model = spec.model or ModelSpec(spec.name, recipe.model, recipe.base_quantization)
        if folder is not None and spec.name == REFERENCE:  # the recipe names no model of its own for it
            model = ModelSpec(spec.name, Model(path=str(folder / REFERENCE)))
        frozen = place_frozen(recipe, model, vocab_size, Ranks(), torch.device("cpu")).subject.model
        outputs = FrozenDecoder(frozen, frozen, DTYPES[recipe.activations], recipe.numerics == "exact")
        items = [Pack(tuple(_with_column(sample, spec, outputs) for sample in pack.samples)) for pack in items]
    return items


@torch.no_grad()
def _with_column(sample: Sample, spec: ColumnSpec, outputs: FrozenDecoder) -> Sample:
    asked = all_answers(sample)
    batch = collate([Pack((asked,))])
    filled = pad_to_bucket(batch)
    computed = spec.compute(outputs(batch, filled, attend_for(filled, exact=outputs.exact)), batch)
    places = torch.from_numpy(asked.weights).nonzero().squeeze(1)
    columns = {}
    for name, of_targets in computed.items():
        column = of_targets.new_zeros(len(sample.tokens), *of_targets.shape[1:])
        column[places] = of_targets[: len(places)]
        columns[name] = column.numpy()
    return replace(sample, columns={**sample.columns, **columns})
