"""The base, adapters and data that a recipe names: resolved, validated before data is read, fingerprinted. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.assembly.base_model import Base, check_base, find_base, rotated_by, tokens_of, with_rows_for
from danlu.core.added_token import AddedToken
from danlu.core.errors import DataError, ModelError
from danlu.core.safetensors_format import read_header
from danlu.models.config import ModelConfig
from danlu.models.hf_config import config_values
from danlu.models.hf_folder import find_config, ignored_settings, read_config, resolve_folder, tensors_fingerprint
from danlu.models.presets import from_scratch
from danlu.recipe import Recipe, sections
from danlu.recipe.rules import language_stage

if TYPE_CHECKING:
    from danlu.adapters.adapter_config import AdapterFolder
    from danlu.data.prepare import DatasetSpec


def check_adapters(model: sections.Model, adapter: sections.AdapterSection | None) -> None:
    """Validates a recipe's adapters before its data is read: folders, their base, targets and ranks.

    Raises ModelError and RecipeError as `trained.adapted_model` would.
    """
    if model.path is None or (adapter is None and not model.adapters):
        return
    base = recipe_base(model)
    below = open_named(model.adapters, base)
    if isinstance(adapter, sections.Continue):
        take_last(below, model.adapters)
    elif adapter is not None:
        from danlu.adapters.targets import check_rows, choose
        from danlu.models.sites import sites_of

        config = read_config(base.folder)
        sites = sites_of(config)
        tokens = trained_tokens(model, adapter)
        check_rows(sites, choose(sites, adapter), adapter, tokens, tied=config.tie_word_embeddings)


def check_without_weights(model: sections.Model, adapter: sections.AdapterSection | None) -> None:
    """`check_adapters` without the checks that need the base's weights, which are not downloaded for it."""
    if model.path is None or Path(model.path).expanduser().is_dir():
        check_adapters(model, adapter)
        return
    for folder in named_stack(model.adapters):
        from danlu.adapters.adapter_config import open_adapter

        open_adapter(folder.path)
    if adapter is not None and not isinstance(adapter, sections.Continue):
        from danlu.adapters.targets import choose
        from danlu.models.sites import sites_of

        choose(sites_of(find_config(model.path)), adapter)


def max_sample_length(
    model: sections.Model, adapter: Any, long_context: sections.LongContext | None = None, max_length: int = 1
) -> int:
    """The most tokens a sample may have: the model's context length less the virtual tokens of its adapters.

    adapter: section of the recipe, or None. long_context: scales the model, for documents of `max_length` tokens.
    Raises ModelError for a config that danlu cannot read or scale.
    """
    config = _config_of(model)
    if long_context is not None:
        from danlu.models.long_context import with_long_context

        config = with_long_context(config, long_context, max_length)
    return config.context_length - _virtual_tokens(model, adapter)


def longest_shared_path(data: sections.Data, model: sections.Model, adapter: Any) -> int | None:
    """The most tokens that a path of a sample's tree may have for its stem to be shared; None: any number, 0: none is.

    A path that is longer repeats its stem (`data.trees.repeat_stem`). Under dynamic NTK and LongRoPE a document longer
    than the model was trained for is rotated by its length, so that two answers of different lengths have no stem in
    common.

    adapter: section of the recipe, or None. Raises ModelError for a config that danlu cannot read.
    """
    if not data.share_stem:
        return 0
    fixed = _config_of(model).fixed_rotation_length
    return None if fixed is None else max(0, fixed - _virtual_tokens(model, adapter))


def base_config(model: sections.Model) -> ModelConfig:
    """The config of `model.path`, rotated as the adapters of `model.adapters` were trained with.

    Of a hub id that is not there nothing but its config.json is fetched. Raises ModelError.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    return rotated_by(wide_config(model), named_stack(model.adapters))


def wide_config(model: sections.Model) -> ModelConfig:
    """The config of `model.path`, with rows for new tokens. Raises ModelError, and DataError for tokens."""
    assert model.path is not None, "the recipe's rules ask for a base"
    config, tokens = find_config(model.path), recipe_tokens(model, described=False)
    if not tokens:
        return config
    from danlu.assembly.extended_base import extended_config

    return extended_config(config, tokens)


def recipe_base(model: sections.Model) -> Base:
    """The base of a recipe, with rows for new tokens. Raises ModelError, and DataError for tokens."""
    assert model.path is not None, "the recipe's rules ask for a base"
    return with_rows_for(find_base(model.path), recipe_tokens(model))


def model_folder(model: sections.Model) -> Path:
    """The folder of the weights of `model.path`, with rows for new tokens. Raises as `recipe_base`."""
    assert model.path is not None, "the recipe's rules ask for a base"
    return recipe_base(model).folder if recipe_tokens(model, described=False) else resolve_folder(model.path)


def recipe_tokens(model: sections.Model, *, described: bool = True) -> list[AddedToken]:
    """The new tokens of a recipe: those that its adapters below were trained with, and its own behind them.

    described: with the tokens of their descriptions, for which a tokenizer is loaded.
    Raises DataError for tokens that the tokenizer has, or cannot have.
    """
    below = tokens_below(model)
    if not model.tokens:
        return below
    from danlu.data.new_tokens import added_tokens, undescribed_tokens

    return (added_tokens if described else undescribed_tokens)(own_tokenizer(model), below, model.tokens)


def tokens_below(model: sections.Model) -> list[AddedToken]:
    """The new tokens that the adapters below were trained with."""
    stack = named_stack(model.adapters)
    if not stack:
        return []
    assert model.path is not None, "the recipe's rules ask for a base"
    return tokens_of(stack, find_config(model.path).vocab_rows)


def trained_tokens(model: sections.Model, adapter: sections.AdapterSection | None) -> list[int]:
    """The ids of the tokens with rows that a new adapter trains: the recipe's new tokens, and those that it names.

    Raises DataError for tokens that the tokenizer does not have.
    """
    if adapter is None or isinstance(adapter, sections.Continue):
        return []
    below = {token.id for token in tokens_below(model)}
    tokens = recipe_tokens(model, described=False)
    ids = [token.id for token in tokens if token.id not in below]
    named: list[str] = getattr(adapter, "trainable_tokens", [])
    if named:
        from danlu.data.vocabulary import read_vocabulary

        path = own_tokenizer(model)
        vocabulary = {**read_vocabulary(path), **{token.text: token.id for token in tokens}}
        if unknown := [text for text in named if text not in vocabulary]:
            raise DataError(
                f"adapter.trainable_tokens: {unknown[0]!r} is no token of {path}. Name tokens that it has, or add it "
                "in model.tokens"
            )
        ids += [vocabulary[text] for text in named]
    return sorted(set(ids))


def tokenizer_path(model: sections.Model) -> str:
    """The folder of the recipe's tokenizer: its own, or the model's; with new tokens. Raises DataError for those."""
    own, tokens = own_tokenizer(model), recipe_tokens(model, described=False)
    if not tokens:
        return own
    from danlu.data.new_tokens import extended_tokenizer

    return str(extended_tokenizer(own, tokens))


def own_tokenizer(model: sections.Model) -> str:
    """The folder of the recipe's tokenizer without new tokens."""
    if model.tokenizer is not None:
        return model.tokenizer
    assert model.path is not None, "the recipe's rules ask for a tokenizer when the model is from scratch"
    return str(resolve_folder(model.path))


def dataset_spec(recipe: Recipe, tokenizer: str | None = None) -> DatasetSpec:
    """Everything that decides which tokens a recipe trains on; tokenizer: its folder or hub id, if not the recipe's."""
    from danlu.data.prepare import DatasetSpec

    return DatasetSpec(
        recipe.data,
        language_stage(recipe, "tokenising"),
        tokenizer or tokenizer_path(recipe.model),
        recipe.model.chat_template,
        recipe.seed,
        recipe.model.chat_template_date,
        recipe.row_type,
        recipe.needs_mismatched,
        template_kwargs=recipe.model.chat_template_kwargs,
    )


def _config_of(model: sections.Model) -> ModelConfig:
    if model.path is not None:
        return base_config(model)
    return from_scratch(model, vocab_size=1)


def _virtual_tokens(model: sections.Model, adapter: Any) -> int:
    """Tokens that the adapters put before every document."""
    virtual = [folder.values.get("num_virtual_tokens") for folder in named_stack(model.adapters)]
    if isinstance(adapter, sections.Prefix | sections.Prompt):
        virtual.append(adapter.tokens)
    return sum(count for count in virtual if isinstance(count, int))


def base_identity(model: sections.Model) -> dict[str, Any]:
    """Identifies the base of a trained adapter, as JSON for its checkpoints: the base's fingerprint, the revision of a
    hub id, the computation by its config.json, and the adapters below.

    The first and last bytes of each tensor are looked at, not all of them.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    base = find_base(model.path)
    config = json.loads(json.dumps(config_values(base_config(model), torch_dtype="float32")))
    below = {}
    for folder in named_stack(model.adapters):
        from danlu.adapters.adapter_config import CONFIG, WEIGHTS

        digest = blake2b((folder.path / CONFIG).read_bytes(), digest_size=16)
        digest.update(tensors_fingerprint(read_header(folder.path / WEIGHTS)).encode())
        below[str(folder.path.resolve())] = digest.hexdigest()
    named = {"path": base.named, "fingerprint": base.fingerprint, "revision": base.revision}
    return {"model": named, "config.json": config, "adapters": below}


def base_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The differences between two `base_identity`, each as "saved -> current"; empty if they are the same.

    A key of the config that only one of them has is of another version of danlu and is not judged.
    """
    changes, known_values = [], saved.get("config.json", {})
    if saved["model"]["fingerprint"] != current["model"]["fingerprint"]:
        changes.append(f"weights of model.path: {_named(saved['model'])} -> {_named(current['model'])}")
    changes += [
        f"{key} in the config.json of {current['model']['path']}: {known_values[key]!r} -> {value!r}"
        for key, value in current["config.json"].items()
        if key in known_values and known_values[key] != value
    ]
    known = list(saved["adapters"].values())
    if len(known) != len(current["adapters"]):
        changes.append(
            f"model.adapters: {', '.join(saved['adapters']) or 'none'} -> {', '.join(current['adapters']) or 'none'}"
        )
    else:
        changes += [
            f"the adapter {path}: {saved_digest} -> {digest}"
            for saved_digest, (path, digest) in zip(known, current["adapters"].items(), strict=True)
            if saved_digest != digest
        ]
    return changes


def _named(model: Mapping[str, Any]) -> str:
    revision = f"revision {model['revision']}, " if model["revision"] else ""
    return f"{model['path']} ({revision}fingerprint {model['fingerprint']})"


def adapter_warnings(model: sections.Model) -> list[str]:
    """Warnings for the console: settings of the base that are ignored, and adapters of other tools that name another
    base than the recipe does."""
    if model.path is None:
        return []
    ignored = ignored_settings(resolve_folder(model.path))
    if not model.adapters:
        return ignored
    base = find_base(model.path)
    return ignored + [
        f"{folder.path}: was trained on {folder.base}, and here it is put on {base.named}: the shapes fit, but if they "
        "are two models its result makes no sense"
        for folder in named_stack(model.adapters)
        if folder.danlu.get("base_fingerprint") is None
        and folder.base
        and Path(folder.base).name.lower() != Path(base.named).name.lower()
    ]


def open_named(paths: Sequence[str], base: Base) -> list[AdapterFolder]:
    """Opens the adapters at `paths`, with those below them, and checks that they fit the base. Raises ModelError."""
    from danlu.adapters.adapter_config import WEIGHTS, open_adapter

    folders = [open_adapter(folder.path) for folder in named_stack(paths)]
    for folder in folders:
        check_base(folder, base)
        read_header(folder.path / WEIGHTS)  # raises for a truncated or broken file before data is tokenised
    return folders


def named_stack(paths: Sequence[str]) -> list[AdapterFolder]:
    """The adapters at `paths`, each with the adapters below it, lowest first and none twice."""
    if not paths:
        return []
    from danlu.adapters.adapter_config import adapter_stack

    folders = {folder.path.resolve(): folder for path in paths for folder in adapter_stack(path)}
    return list(folders.values())


def take_last(stack: list[AdapterFolder], paths: Sequence[str]) -> AdapterFolder:
    """Removes the adapter of `paths[-1]` from the stack and returns it. Raises ModelError if it is not on top."""
    from danlu.adapters.adapter_config import resolve_adapter

    last = resolve_adapter(paths[-1])
    if stack[-1].path.resolve() != last.resolve():
        raise ModelError(
            f"{last}: is stacked below {stack[-1].path}, which was trained on top of it, and so cannot be trained "
            "on above it. Name it alone in model.adapters"
        )
    return stack.pop()
