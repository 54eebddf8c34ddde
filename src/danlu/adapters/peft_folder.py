"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, where tensors have no adapter's name.

Every kind of adapter has a module with the same two functions (`FORMATS`): `to_peft(section, modules, sites)` gives the
values of adapter_config.json and the tensors, `from_peft(reader, sites)` the section and the values of each module by
where it sits (those that are read as LoRA have the latter alone). Settings that PEFT does not have are in danlu.json
next to them: the fingerprint of the base, and the section of the recipe. Kinds that PEFT does not have are written the
same way under a peft_type of danlu's own, so that no tool mistakes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import Parameter

from danlu import __version__
from danlu.adapters import bottleneck, ia3, mora, peft_lora, peft_products, prefix, prompt, token_rows, vera
from danlu.adapters.adapter_config import CONFIG, DANLU, ROTATED, TASK_TYPES, TOKENS, WEIGHTS, AdapterFolder
from danlu.adapters.adapter_set import AdapterSet, AddedAdapter
from danlu.adapters.hf_layers import HFLayer
from danlu.adapters.peft_lora import for_original_base
from danlu.adapters.peft_values import PREFIX, ModuleValues, PeftReader
from danlu.adapters.shapes import BASE_CHANGING_INITS
from danlu.adapters.token_rows import TokenRows
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.core.types import Task
from danlu.recipe import sections

FORMATS: dict[str, ModuleType] = {
    "ADALORA": peft_products,
    "DANLU_BOTTLENECK": bottleneck,
    "DANLU_MORA": mora,
    "IA3": ia3,
    "LOHA": peft_products,
    "LOKR": peft_products,
    "LORA": peft_lora,
    "PREFIX_TUNING": prefix,
    "PROMPT_TUNING": prompt,
    "VERA": vera,
}
"""The modules by peft_type."""
_VOCABULARY = ("embed_tokens.", "lm_head.")
"""How parameters with a row for each token begin."""
_BY_SECTION: dict[type, ModuleType] = {
    sections.Bottleneck: bottleneck,
    sections.Ia3: ia3,
    sections.Mora: mora,
    sections.Prefix: prefix,
    sections.Prompt: prompt,
    sections.Vera: vera,
}


def format_of(section: Any) -> ModuleType:
    """Returns the module that writes the adapter of a section."""
    return peft_lora if isinstance(section, sections.LowRank) else _BY_SECTION[type(section)]


def write_adapter(
    adapters: AdapterSet,
    name: str,
    folder: Path,
    *,
    base: str,
    base_fingerprint: str | None,
    below: Sequence[str] = (),
    quantization: Mapping[str, Any] | None = None,
    value: Callable[[str], Tensor | None] | None = None,
    writes: bool = True,
    task: Task = "causal-lm",
    head: Mapping[str, Tensor] | None = None,
    rotated: bool = False,
    tokens: Sequence[AddedToken] = (),
    vocab_size: int | None = None,
) -> None:
    """Writes one adapter of the set into an existing, empty folder, in float32.

    Args:
        base: folder or hub id of the model that it belongs to.
        below: adapter folders between the base and this adapter, lowest first.
        quantization: the recipe's section of the base's quantization.
        value: from a tensor's name in the model to the whole tensor, a collective call where the adapter is sharded.
        writes: False on processes that only take part in `value`, and touch no file.
        task, head: the task of a model that classifies, and its head's tensors as model folders name them
            ("score.weight"). rotated: the base's rotary embedding is another one under it, and the caller writes a
            config.json with it. tokens: for which the base needs rows that it does not have.
        vocab_size: the number of rows that are written of an embedding or head which is trained in full; None: all.
    """
    added = adapters.added[name]
    whole = None if value is None else {parameter: value(parameter) for parameter in adapters.tensors(name)}
    if not writes:
        return
    with _holding(adapters, added, whole):
        own = {place: module for place, module in added.modules.items() if not isinstance(module, TokenRows)}
        values, tensors = format_of(added.section).to_peft(added.section, own, adapters.sites)
        of_tokens, rows = token_rows.to_peft(added.modules, adapters.sites, tied=adapters.tied)
        values, tensors = values | of_tokens, tensors | rows
        saved, copies = _trained_copies(adapters, added, vocab_size)
        tensors |= copies
    for key, tensor in (head or {}).items():
        tensors[f"{PREFIX}{key}"] = tensor
        saved = sorted({*saved, key.rpartition(".")[0]})
    config = {
        **values,
        "task_type": TASK_TYPES[task],
        "base_model_name_or_path": base,
        "inference_mode": True,
        "modules_to_save": saved or None,
    }
    danlu = {
        "version": __version__,
        "base_fingerprint": base_fingerprint,
        "below": list(below),
        "adapter": added.section.model_dump(mode="json"),
        ROTATED: rotated,
        TOKENS: [asdict(token) for token in tokens],
        # An adapter with factors taken out of the base is written for the original one, before quantization.
        "quantization": None if getattr(added.section, "init", None) in BASE_CHANGING_INITS else quantization,
    }
    write_files(folder, config, danlu, tensors)


@contextmanager
def _holding(adapters: AdapterSet, added: AddedAdapter, whole: Mapping[str, Tensor | None] | None) -> Iterator[None]:
    """Replaces an adapter's parameters within the block by the `whole` tensors of the same names in the model."""
    if whole is None:
        yield
        return
    replacements: dict[Tensor, Parameter] = {}
    for name, parameter in adapters.tensors(added.name).items():
        value = whole[name]
        assert value is not None, f"{name}: no value on the process that writes"
        replacements[parameter] = Parameter(value, requires_grad=False)
    # Through the modules' tables of parameters: a module does not let a plain tensor be assigned over a shard.
    tables = {id(part): part._parameters for module in added.modules.values() for part in module.modules()}
    saved_tables = [(table, dict(table)) for table in tables.values()]
    copies = [(copy, copy.trained) for copy in added.copies]
    try:
        for table in tables.values():
            table.update({key: replacements[shard] for key, shard in table.items() if shard is not None})
        for copy in added.copies:
            copy.trained = replacements[copy.trained]
        yield
    finally:
        for table, values in saved_tables:
            table.update(values)
        for copy, trained in copies:
            copy.trained = trained


def write_files(
    folder: Path, config: Mapping[str, Any], danlu: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes the files of an adapter: adapter_config.json, danlu.json and the tensors in float32.

    Raises ModelError for tensors that are not finite.
    """
    for file, content in ((CONFIG, config), (DANLU, danlu)):
        (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Cloned: two names of one tensor (a tied head) are two tensors on disk.
    whole = {key: tensor.detach().to("cpu", torch.float32).clone() for key, tensor in tensors.items()}
    for key, tensor in whole.items():
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{key} is not finite; the adapter is not written")
    (folder / WEIGHTS).write_bytes(save(whole, metadata={"format": "pt"}))


def read_tensors(folder: AdapterFolder) -> dict[str, Tensor]:
    """The tensors of an adapter by their keys in its file. Raises ModelError if they cannot be read."""
    try:
        return load_file(folder.path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder.path / WEIGHTS}: cannot be read: {error}") from None


def read_head(folder: AdapterFolder) -> dict[str, Tensor]:
    """The tensors of the head that an adapter of a model that classifies has, as model folders name them."""
    if folder.task == "causal-lm":
        return {}
    head = {key.removeprefix(PREFIX): tensor for key, tensor in read_tensors(folder).items() if _is_of_head(key)}
    if "score.weight" not in head:
        raise ModelError(
            f"{folder.path / WEIGHTS}: a {folder.values.get('task_type')} adapter without its head {PREFIX}score.weight"
        )
    return head


def _is_of_head(key: str) -> bool:
    return key.startswith(f"{PREFIX}score.")


def add_adapter(adapters: AdapterSet, name: str, folder: AdapterFolder) -> None:
    """Adds the adapter of a folder to the set, and activates it on top of the active ones.

    Raises ModelError for tensors that are missing, unknown, or of another shape, as in an adapter of another base.
    """
    where = str(folder.path / WEIGHTS)
    section, values, fully_trained, untrained, token_ids = _contents(adapters, folder)
    for key, tensor in untrained.items():
        _check_base(adapters, key, tensor, where, {each for ids in token_ids.values() for each in ids})
    if any(_base_parameter(key) == adapters.hf_name("embed_tokens.weight") for key in fully_trained):
        adapters.head_as_linear()  # PEFT leaves a tied head at the base's embedding
    adapters.add(name, section, token_ids=token_ids, check_ranks=False)
    added = adapters.added[name]
    for place, by_name in values.items():
        parameters = dict(added.modules[place].named_parameters())
        for key, value in by_name.items():
            parameters[key].data.copy_(value)
    copies = {adapters.hf_name(copy.name): copy for copy in added.copies}
    new_tokens = folder.tokens(max(site.shape[0] for site in adapters.sites if site.group == "embedding"))
    for key, tensor in fully_trained.items():
        copy = copies.get(_base_parameter(key))
        if copy is None:
            raise ModelError(f"{where}: {key} is of the base, and {CONFIG} does not say in `bias` that it is trained")
        into = copy.trained.data
        if copy.name.startswith(_VOCABULARY) and len(tensor) == max((token.id + 1 for token in new_tokens), default=0):
            into = into[: len(tensor)]  # the rows that no token has are the base's
        if into.shape != tensor.shape:
            raise ModelError(f"{where}: {key} is {list(tensor.shape)}, this model needs {list(copy.trained.shape)}")
        into.copy_(tensor)


def section_of(adapters: AdapterSet, folder: AdapterFolder) -> Any:
    """The recipe's section for the adapter in a folder; the model of the set may be without weights.

    Raises ModelError as `add_adapter` does, except for an embedding that is not the base's.
    """
    return _contents(adapters, folder)[0]


def _contents(
    adapters: AdapterSet, folder: AdapterFolder
) -> tuple[Any, ModuleValues, dict[str, Tensor], dict[str, Tensor], dict[str, list[int]]]:
    """Reads an adapter folder: its section, the values of its modules, tensors of the base by their keys in the file,
    and the tokens with rows that it trains, of embedding and head.

    The tensors are the parameters of the base that it trains in full, and the embeddings of the base that PEFT writes
    with an adapter of them.
    Raises ModelError for an adapter that does not fit the model, or that danlu cannot compute.
    """
    where = str(folder.path / WEIGHTS)
    reader = PeftReader(folder.values, read_tensors(folder), where)
    if folder.kind == "LORA":
        reader = for_original_base(reader, partial(_loaded_weight, adapters, where))
    try:
        section, values = FORMATS[folder.kind].from_peft(reader, adapters.sites)
    except ValidationError as error:  # values that no recipe may have either
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ModelError(f"{folder.path / CONFIG}: {key} is {first['input']!r}: {first['msg']}") from None
    token_ids, rows = token_rows.from_peft(reader, adapters.sites, tied=adapters.tied)
    values |= {place: {token_rows.PARAMETER: value} for place, value in rows.items()}
    rest = {key: tensor for key, tensor in reader.tensors.items() if key not in reader.used}
    if folder.task != "causal-lm":  # its head is no part of the decoder: see `read_head`
        rest = {key: tensor for key, tensor in rest.items() if not _is_of_head(key)}
    untrained = {key: rest.pop(key) for key in list(rest) if key.endswith(".base_layer.weight")}
    settings = _full_training_settings(folder.values, rest, adapters, where)
    fields = type(section).model_fields
    section = section.model_copy(update={key: value for key, value in settings.items() if key in fields})
    return section, values, rest, untrained, token_ids


def _loaded_weight(adapters: AdapterSet, where: str, module: str) -> Tensor | None:
    """The weight [O, I] of a Hugging Face folder's module, as in the base's folder; None where there is no such module.

    Raises ModelError where it cannot be known: of a quantized layer, and of a head that is tied to the embedding.
    """
    sites = [site for site in adapters.sites if site.hf_name == module]
    if not sites:
        return None
    if any(site.module is None for site in sites):
        raise ModelError(
            f"{where}: PEFT takes the start of this adapter out of {module}, which in this model is the embedding: "
            "PEFT changes both then, and no adapter can. Train it again without lm_head among the targets"
        )
    parts = [adapters.loaded_weight(site) for site in sites]
    if (packed := next((site for site, part in zip(sites, parts, strict=True) if part is None), None)) is not None:
        raise ModelError(
            f"{where}: the start of this adapter (init_lora_weights) is a part of {packed.hf_name}, which is "
            "quantized here, so its value is another. Leave out `quantization`, or merge the adapter into the base "
            "(`danlu merge`) and quantize the result"
        )
    return HFLayer(module, tuple(sites)).assembled([part for part in parts if part is not None])


def _trained_copies(
    adapters: AdapterSet, added: AddedAdapter, vocab_size: int | None
) -> tuple[list[str], dict[str, Tensor]]:
    """PEFT's `modules_to_save`, and the tensors of all copies by key; an embedding's copy is also a tied head's."""
    modules: set[str] = set()
    tensors: dict[str, Tensor] = {}
    adapted = {site.hf_name for site in added.sites}
    targets = getattr(added.section, "modules_to_save", ())
    for copy in added.copies:
        name = adapters.hf_name(copy.name)
        module, _, attribute = name.rpartition(".")
        saved = any(module == target or module.endswith(f".{target}") for target in targets)
        trained = copy.trained[:vocab_size] if copy.name.startswith(_VOCABULARY) else copy.trained
        if saved:
            modules.add(module)
            tensors[f"{PREFIX}{name}"] = trained
            if copy.name == "embed_tokens.weight" and adapters.tied:
                modules.add("lm_head")
                tensors[f"{PREFIX}lm_head.weight"] = trained
        else:  # a bias of the base
            peft_name = f"{module}.base_layer.{attribute}" if module in adapted else name
            tensors[f"{PREFIX}{peft_name}"] = trained
    return sorted(modules), tensors


def _check_base(adapters: AdapterSet, key: str, tensor: Tensor, where: str, trained: set[int]) -> None:
    """Raises ModelError unless a tensor that PEFT wrote with an adapter of the embedding equals the model's own.

    trained: tokens with rows that the adapter trains, and that PEFT's base may have been resized for.
    """
    name = _base_parameter(key)
    parameters = {adapters.hf_name(own): parameter for own, parameter in adapters.base_parameters().items()}
    embedding = adapters.hf_name("embed_tokens.weight")
    base: Tensor | None = parameters.get(name, parameters[embedding] if name == "lm_head.weight" else None)
    check_base_matrix(where, key, name, base, tensor, trained)


def check_base_matrix(
    where: str, key: str, name: str, base: Tensor | None, tensor: Tensor, trained: Collection[int]
) -> None:
    """Raises ModelError unless a matrix of the base that PEFT wrote with an adapter equals the model's own, `base`.

    trained: tokens with rows that the adapter trains, and that PEFT's base may have been resized for.
    """
    if base is not None and token_rows.is_base_of_rows(key):
        rows = [row for row in range(min(len(base), len(tensor))) if row not in trained]
        base, tensor = base[rows], tensor[rows]
    if base is None or base.shape != tensor.shape or not torch.allclose(base.float(), tensor.float(), atol=1e-6):
        raise ModelError(
            f"{where}: {key} is not the base's own {name}: the vocabulary was changed while it was trained. "
            "Save that base as a model folder and name it as model.path"
        )


def _base_parameter(key: str) -> str:
    """Returns the name of the base's parameter in Hugging Face folders for a key of an adapter's file."""
    return key.removeprefix(PREFIX).replace(".token_adapter.", ".").replace(".base_layer.", ".")


def _full_training_settings(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], adapters: AdapterSet, where: str
) -> dict[str, Any]:
    """The recipe's `modules_to_save` and `bias`, by which the base's tensors in an adapter's file are trained.

    Raises ModelError for tensors that the model does not have.
    """
    known = {adapters.hf_name(name) for name in adapters.base_parameters()}
    if "lm_head.weight" in {_base_parameter(key) for key in tensors}:
        known.add("lm_head.weight")
    for key in tensors:
        if _base_parameter(key) not in known:
            raise ModelError(f"{where}: {key} is no tensor of this model: the adapter is of another base")
    bias = {"none": "none", "all": "all", "lora_only": "adapted"}.get(str(values.get("bias", "none")), "none")
    owners = {_base_parameter(key).rpartition(".")[0] for key in tensors}
    # As PEFT matches them, and all others with a weight: a head that is tied to a saved embedding is not in the list.
    with_weight = {_base_parameter(key).rpartition(".")[0] for key in tensors if key.endswith(".weight")}
    ends = tuple(values.get("modules_to_save") or [])
    saved = sorted(owner for owner in owners if owner in with_weight or owner.endswith(ends))
    return {"modules_to_save": saved, "bias": bias}
