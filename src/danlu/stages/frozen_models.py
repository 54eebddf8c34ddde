"""Decoders that are only asked (a reference, a teacher): loaded as they are stored in training, placed like the policy.

None of them has float32 copies of its matrices, gradients, or a place in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.adapter_training import merged_model
from danlu.assembly.base_model import find_base
from danlu.assembly.devices import layer_by_layer, loading_device
from danlu.assembly.frozen_base import Adapted, check_frozen, load_frozen
from danlu.assembly.parallelize import LayerPlacer, Placed, Subject, place, subject_of
from danlu.assembly.recipe_adapters import (
    base_config,
    model_folder,
    open_named,
    recipe_base,
    recipe_tokens,
    tokenizer_path,
)
from danlu.core.errors import RecipeError
from danlu.core.tokenizer_files import VOCABULARY_FILES
from danlu.data.tokenizer import load_tokenizer
from danlu.models.config import is_matrix
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import check_vocabulary, read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.numerics.dtypes import DTYPES
from danlu.parallel.ranks import Ranks
from danlu.planning.layout_problems import other_problems
from danlu.planning.workload import OtherModel
from danlu.recipe import Recipe
from danlu.recipe.roles import ModelSpec
from danlu.recipe.sections import Recompute
from danlu.stages.reader import tokenizer_of
from danlu.stages.role_configs import frozen_config


def check_frozen_model(spec: ModelSpec, recipe: Recipe) -> None:
    """Raises a DanluError for faults of a frozen model, its vocabulary included, without reading weights."""
    path = spec.section.path
    if path is None:
        return
    folder = model_folder(spec.section)
    check_frozen(folder, spec.quantization)
    if spec.section.adapters:
        open_named(spec.section.adapters, find_base(path))
    if path != recipe.model.path or recipe_tokens(spec.section) != recipe_tokens(recipe.model):
        policy_tokenizer = tokenizer_of(recipe)
        if any((folder / name).is_file() for name in VOCABULARY_FILES):
            own = load_tokenizer(tokenizer_path(spec.section.model_copy(update={"tokenizer": path})))
            _check_same_vocabulary(spec.key, path, own.vocabulary, policy_tokenizer.vocabulary)
        check_vocabulary(read_config(folder), policy_tokenizer.vocab_size)
        other = OtherModel(f"{spec.key}.model", path, read_config(folder))
        if wrong := [*other_problems(recipe, other)]:
            raise RecipeError(wrong)


def _check_same_vocabulary(key: str, path: str, vocabulary: Mapping[str, int], policys: Mapping[str, int]) -> None:
    """Raises RecipeError if two tokenizers give another id to any token, naming the first."""
    tokens, policy_tokens = ({token_id: token for token, token_id in ids.items()} for ids in (vocabulary, policys))
    for token_id in sorted(tokens.keys() | policy_tokens.keys()):
        token, policy_token = tokens.get(token_id), policy_tokens.get(token_id)
        if token != policy_token:
            raise RecipeError(
                f"{key}.model: {path} has another vocabulary: its token {token_id} is {_quoted(token)}, the policy's "
                f"is {_quoted(policy_token)}. What two models say of tokens is comparable only where these are the same"
            )


def _quoted(token: str | None) -> str:
    return "absent" if token is None else repr(token)


def place_frozen(recipe: Recipe, spec: ModelSpec, vocab_size: int, ranks: Ranks, device: torch.device) -> Placed:
    """A frozen decoder on the processes of a layout, split, cut and sharded like the policy: in a pipeline each stage
    has the chunks of the same numbers of both.

    Matrices are in the type of activations, in which they multiply to the same bits as in float32, or quantized as
    `spec` says. Adapters of its section are stacked on a model of a recipe that trains one, or that is quantized; else
    they are merged, as those of the policy are. A model that moves is the policy once more, in float32.

    vocab_size: of the tokenizer, for a model from scratch.
    """
    # As if it were the policy, but nothing is recomputed, and of the offloaded parts it has parameters alone.
    offload = [part for part in recipe.memory.offload if part == "parameters"]
    memory = recipe.memory.model_copy(update={"recompute": Recompute(), "offload": offload})
    alike = recipe.model_copy(
        update={"model": spec.section, "adapter": None, "quantization": spec.quantization, "memory": memory}
    )
    if spec.mixing is not None:
        subject = subject_of(alike, frozen_config(spec.section, vocab_size), device, ranks=ranks)
    else:
        stacks = recipe.adapter is not None
        subject = _frozen_subject(alike, stacks=stacks, vocab_size=vocab_size, ranks=ranks, device=device)
    placed = place(subject, alike, ranks, device)
    placed.subject.model.requires_grad_(False)
    for parameter in placed.parallel.local_parameters.values():
        parameter.local.requires_grad_(False)
    return placed


def _frozen_subject(recipe: Recipe, *, stacks: bool, vocab_size: int, ranks: Ranks, device: torch.device) -> Subject:
    section, dtype = recipe.model, DTYPES[recipe.activations]
    device = loading_device(recipe, ranks, device)
    if section.path is None:
        model = build(frozen_config(section, vocab_size), device=device)
        initialize(model, recipe.seed)
        return Subject(_narrowed(model, dtype))
    if section.adapters and not stacks and recipe.quantization is None:
        return Subject(_narrowed(merged_model(section, device=device, config=base_config(section)), dtype))
    placer: LayerPlacer | None = None

    def layer_hook_factory(loading: Adapted) -> LayerPlacer:
        nonlocal placer
        placer = LayerPlacer(loading.model, loading.adapters, recipe, ranks, device)
        return placer

    base = recipe_base(section)
    adapted = load_frozen(
        base.folder,
        dtype=dtype,
        device=device,
        quantization=recipe.quantization,
        layer_hook_factory=layer_hook_factory if layer_by_layer(recipe, ranks) else None,
        config=base_config(section),
        keep_blocks=True,
    )
    below = AdapterStacks(adapted.adapters)
    below.use(below.add(open_named(section.adapters, base)))
    adapted.model.requires_grad_(False)
    return Subject(adapted.model, adapted.adapters, base, placer)


def _narrowed(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The same model, frozen, with its matrices in the type of activations."""
    narrow: dict[nn.Parameter, nn.Parameter] = {}  # tied matrices stay tied
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_matrix(f"{path}.{name}", parameter.ndim):
                if parameter not in narrow:
                    narrow[parameter] = nn.Parameter(parameter.detach().to(dtype))
                setattr(module, name, narrow[parameter])
    model.requires_grad_(False)
    return model
