"""The model of a recipe with adapters: its base, the adapters below, the trained one; and its result as a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from danlu.adapters.adapter_config import CONFIG, AdapterFolder, adapter_stack, open_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.merge import UNMERGEABLE_KINDS, merge_and_unload, merged_parameter
from danlu.adapters.peft_folder import add_adapter, write_adapter
from danlu.adapters.token_rows import TokenRows
from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.base_model import Base, check_base, rotated_by, weight_layouts
from danlu.assembly.frozen_base import Adapted, LayerHookFactory, adapters_of, load_frozen
from danlu.assembly.recipe_adapters import named_stack, open_named, recipe_base, take_last, trained_tokens
from danlu.core.errors import RecipeError
from danlu.core.layer_types import TRAINED
from danlu.core.output_folder import replace_folder
from danlu.core.types import Task
from danlu.models.config import ModelConfig, same_rotation
from danlu.models.decoder import Decoder
from danlu.models.hf_config import config_values
from danlu.models.hf_folder import CONFIG as MODEL_CONFIG
from danlu.models.hf_folder import read_config, read_json
from danlu.models.loading import load
from danlu.models.saving import (
    copy_tokenizer,
    with_untouched_values,
    write_json,
    write_pad_token,
    write_stop_ids,
    write_template,
)
from danlu.models.score_head import head_tensors
from danlu.recipe import Recipe, sections
from danlu.recipe.sections import AdapterSection, Continue
from danlu.recipe.value import VALUE, value_adapter, value_section, value_share


def adapted_model(
    model: sections.Model,
    adapter: sections.AdapterSection,
    quantization: sections.QuantizationSection | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    encode: Callable[[str], Sequence[int]] | None,
    saved_adapter: Mapping[str, Tensor] | None,
    layer_hook_factory: LayerHookFactory | None = None,
    config: ModelConfig | None = None,
    value: sections.AdapterSection | AdapterFolder | None = None,
) -> tuple[Adapted, Base]:
    """A frozen base with the adapters of `model.adapters` below and the one that is trained on top, or with
    `adapter: continue` the last of them trained on.

    saved_adapter: tensors of the adapter as an earlier run saved them, where this goes on.
    layer_hook_factory, config: as `load_frozen` has them; no hook with adapters below, which are put on a base that is
    whole.
    value: of a model of values on the same base, which is trained too, and not active afterwards.
    Raises ModelError for folders that are no adapters or belong to another base.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    base = recipe_base(model)
    below = open_named(model.adapters, base)
    continued = take_last(below, model.adapters) if isinstance(adapter, sections.Continue) else None

    new = {} if continued is not None else {TRAINED: adapter}
    if value is not None and not isinstance(value, AdapterFolder):
        new[VALUE] = value
    adapted = load_frozen(
        base.folder,
        dtype=dtype,
        device=device,
        quantization=quantization,
        seed=seed,
        new=new,
        token_ids={TRAINED: trained_tokens(model, adapter)},
        encode=encode,
        saved_factors={} if saved_adapter is None or continued is not None else {TRAINED: saved_adapter},
        layer_hook_factory=layer_hook_factory,
        config=config,
        keep_blocks=True,
    )
    adapters = adapted.adapters
    stacks = AdapterStacks(adapters)
    stacks.use(stacks.add(below))
    if below and continued is None:
        start_rows(adapters, TRAINED)
    if isinstance(value, AdapterFolder):
        add_adapter(adapters, VALUE, value)
        check_value_adapter(adapters)
        stacks.use(0)
    if continued is not None:
        add_adapter(adapters, TRAINED, continued)
    else:
        adapters.activate(*adapters.active, TRAINED)
    adapters.train_only(TRAINED, *([] if value is None else [VALUE]))
    return adapted, base


def start_rows(adapters: AdapterSet, name: str) -> None:
    """Sets the rows of single tokens of a new adapter to those of the base with the active adapters, upon which it
    then begins without effect."""
    rows = {site: module for site, module in adapters.added[name].modules.items() if isinstance(module, TokenRows)}
    changing = [each for each in adapters.active if adapters.added[each].section.kind not in UNMERGEABLE_KINDS]
    with adapters.switched_to(changing):
        for site, module in rows.items():
            module.initialize_from(merged_parameter(adapters, f"{site}.weight"))


def merged_model(model: sections.Model, *, device: torch.device, config: ModelConfig | None = None) -> Decoder:
    """A base in float32 with the adapters of `model.adapters` merged into it, to be trained as a whole.

    config: as `models.loading.load` has it.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    base = recipe_base(model)
    folders = open_named(model.adapters, base)
    decoder = load(base.folder, device=device, config=config, layouts=weight_layouts(base.folder))
    adapters = adapters_of(decoder, device=device)
    stacks = AdapterStacks(adapters)
    stacks.use(stacks.add(folders))
    merge_and_unload(adapters)
    return decoder


def write_result(
    adapters: AdapterSet,
    base: Base,
    target: Path,
    *,
    started_from: Sequence[str],
    continued: bool,
    quantization: sections.QuantizationSection | None,
    tokenizer_from: Path,
    chat_template: str | None,
    value: Callable[[str], Tensor | None] | None = None,
    writes: bool = True,
    score_head: nn.Linear | None = None,
    pad_token: tuple[str, int] | None = None,
    stop_ids: Sequence[int] = (),
    name: str = TRAINED,
    task: Task | None = None,
) -> None:
    """Writes a trained adapter as a PEFT folder with the tokenizer in it; it appears whole or not at all.

    started_from: `model.adapters`, upon which it was trained and which it needs; continued: all but the last.
    quantization: how the base was held meanwhile, so that it is held the same way when the adapter is used. value,
    writes: as `adapters.peft_folder.write_adapter` has them, for an adapter cut among processes. score_head, pad_token,
    stop_ids: as `models.saving.save` has them.
    name: the adapter's name in the set. task: the adapter's, where that is not the model's.
    """
    model = adapters.model
    assert isinstance(model, Decoder)
    if not writes:
        for parameter in adapters.tensors(name):
            assert value is not None, "processes that write nothing help with values"
            value(parameter)
        return
    below = named_stack(started_from)
    if continued:
        take_last(below, started_from)
    rotated = _rotated_config(model.config, base, below)
    needed = sum(4 * tensor.numel() for tensor in adapters.tensors(name).values())
    with replace_folder(target, 3 * needed, own_file=CONFIG) as fresh:
        paths = [str(folder.path.resolve()) for folder in below]
        write_adapter(
            adapters,
            name,
            fresh,
            base=base.named,
            base_fingerprint=base.fingerprint,
            below=paths,
            quantization=None if quantization is None else quantization.of_base(),
            value=value,
            task=task or model.config.task,
            head=None if score_head is None else head_tensors(score_head),
            rotated=rotated is not None,
            tokens=base.tokens,
            # As PEFT resizes the base, by its tokenizer.
            vocab_size=model.config.vocab_size if base.tokens and model.config.vocab_padding else None,
        )
        if rotated is not None:
            write_json(fresh / MODEL_CONFIG, rotated)
        copy_tokenizer(tokenizer_from, fresh)
        if pad_token is not None:
            write_pad_token(fresh, pad_token[0])
        if stop_ids:
            write_stop_ids(fresh, [*model.config.eos_token_ids, *stop_ids])
        if chat_template is not None:
            write_template(fresh, chat_template)


def _rotated_config(config: ModelConfig, base: Base, below: Sequence[AdapterFolder]) -> dict[str, Any] | None:
    """The content of a config.json of the base as it was rotated in training; None where the base with the adapters
    below says the same.

    config: of the model that was trained.
    """
    own = read_config(base.folder)
    if same_rotation(config, rotated_by(own, below)):
        return None
    stored = read_json(base.folder / MODEL_CONFIG)
    dtype = stored.get("torch_dtype") or stored.get("dtype") or "float32"
    values = config_values(replace(config, task=own.task), torch_dtype=str(dtype))
    quantized = {key: stored[key] for key in ("quantization_config",) if key in stored}
    return {**with_untouched_values(base.folder, config, values), **quantized}


def value_on_base(recipe: Recipe) -> AdapterSection | AdapterFolder | None:
    """The section of a new adapter, or the folder of the one it starts as; None where there is none.

    Raises ModelError for a folder that is no adapter, or of another base; RecipeError for one that was trained upon
    other adapters than the policy's lies upon.
    """
    if value_share(recipe) != "base":
        return None
    path = value_section(recipe).model
    if path is None:
        return value_adapter(recipe)
    *below, folder = adapter_stack(path)
    folder = open_adapter(folder.path)
    assert recipe.model.path is not None, "the recipe's rules ask for a base"
    base = recipe_base(recipe.model)
    check_base(folder, base)
    policys = named_stack(recipe.model.adapters)
    if isinstance(recipe.adapter, Continue):
        take_last(policys, recipe.model.adapters)
    if [each.path.resolve() for each in below] != [each.path.resolve() for each in policys]:
        wants, has = (", ".join(str(each.path) for each in stack) or "the bare base" for stack in (below, policys))
        raise RecipeError(
            f"value.model: {path} was trained upon {wants}, and the policy's adapter lies upon {has}. Use share: none, "
            "or an adapter that was trained upon the same"
        )
    config = read_config(base.folder)
    rotated = [rotated_by(config, stack) for stack in ([*below, folder], named_stack(recipe.model.adapters))]
    if not same_rotation(*rotated):
        raise RecipeError(
            f"value.model: {path} was trained with another rotary embedding of the base (long_context) than the "
            "policy's adapter, and both are on one base. Use share: none"
        )
    return folder


def check_value_adapter(adapters: AdapterSet) -> None:
    """Raises RecipeError for an adapter of values, in the model, that cannot take turns with the policy's."""
    added = adapters.added[VALUE]
    reason = None
    if added.copies:
        reason = "has trained copies of parameters of the base (modules_to_save or bias)"
    elif added.virtual_tokens():
        reason = "puts virtual tokens before every document"
    elif added.base_changing_sites():
        reason = f"took its start out of the base ({added.section.init})"
    if reason is not None:
        raise RecipeError(f"value.model: the adapter there {reason}, and both models read that base. Use share: none")
