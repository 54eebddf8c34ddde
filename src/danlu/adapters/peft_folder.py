"""Adapter folders as PEFT has them: adapter_config.json and adapter_model.safetensors, with no adapter name inside.

What PEFT has no word for is in danlu.json beside them: which base it is, and the section of the recipe. Kinds that PEFT
does not know are written the same way under a peft_type of our own, so that no tool takes them for something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import Parameter

from danlu import __version__
from danlu.adapters.adapter_config import CONFIG, DANLU, WEIGHTS, AdapterFolder
from danlu.adapters.adapter_set import AdapterSet, AddedAdapter
from danlu.adapters.low_rank_init import BASE_CHANGING_INITS
from danlu.adapters.peft_formats import FORMATS, format_of
from danlu.adapters.peft_lora import for_original_base
from danlu.adapters.peft_values import PREFIX
from danlu.errors import ModelError


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
) -> None:
    """Writes one adapter of the set into an existing, empty folder; float32.

    base: the model it belongs to. below: adapter folders that lay between the two, if any. quantization: how the base
    was held, as the recipe says it.
    value: whole tensors by their names in the model, where the adapter is cut among processes; writes: False on those
    that only help with it, and touch no file.
    """
    added = adapters.added[name]
    whole = None if value is None else {own: value(own) for own in adapters.tensors(name)}
    if not writes:
        return
    with _holding(adapters, added, whole):
        values, tensors = format_of(added.section).to_peft(added.section, added.modules, adapters.sites)
        saved, more = _copies(adapters, added)
        tensors |= more
    config = {
        **values,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "modules_to_save": saved or None,
    }
    own = {
        "version": __version__,
        "base_fingerprint": base_fingerprint,
        "below": list(below),
        "adapter": added.section.model_dump(mode="json"),
        # One that took its start out of the weights is written for the weights as they were, before any rounding.
        "quantization": None if getattr(added.section, "init", None) in BASE_CHANGING_INITS else quantization,
    }
    write_files(folder, config, own, tensors)


@contextmanager
def _holding(adapters: AdapterSet, added: AddedAdapter, whole: Mapping[str, Tensor | None] | None) -> Iterator[None]:
    """Within it the modules of an adapter hold `whole` tensors, by their names in the model, in place of their own."""
    if whole is None:
        yield
        return
    held: dict[Tensor, Parameter] = {}
    for name, parameter in adapters.tensors(added.name).items():
        value = whole[name]
        assert value is not None, f"{name}: no value on the process that writes"
        held[parameter] = Parameter(value, requires_grad=False)
    # The modules' own tables, since what is there may be a shard that no other parameter may be assigned to.
    tables = {id(part): part._parameters for module in added.modules.values() for part in module.modules()}
    before = [(table, dict(table)) for table in tables.values()]
    copies = [(copy, copy.trained) for copy in added.copies]
    try:
        for table in tables.values():
            table.update({key: held[one] for key, one in table.items() if one is not None})
        for copy in added.copies:
            copy.trained = held[copy.trained]
        yield
    finally:
        for table, values in before:
            table.update(values)
        for copy, trained in copies:
            copy.trained = trained


def write_files(folder: Path, config: Mapping[str, Any], own: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The files of an adapter: adapter_config.json, danlu.json and the tensors, float32.

    Raises ModelError for tensors that are not finite.
    """
    for file, content in ((CONFIG, config), (DANLU, own)):
        (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    # Cloned: two names of one tensor (a tied head) are two tensors on disk.
    whole = {key: tensor.detach().to("cpu", torch.float32).clone() for key, tensor in tensors.items()}
    for key, tensor in whole.items():
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{key} is not finite; the adapter is not written")
    (folder / WEIGHTS).write_bytes(save(whole, metadata={"format": "pt"}))


def read_files(folder: AdapterFolder) -> dict[str, Tensor]:
    """The tensors of an adapter by their names on disk. Raises ModelError if they cannot be read."""
    try:
        return load_file(folder.path / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder.path / WEIGHTS}: cannot be read: {error}") from None


def add_adapter(adapters: AdapterSet, name: str, folder: AdapterFolder) -> None:
    """Puts the adapter of a folder into the set, active above the others.

    Raises ModelError for tensors that are missing, unknown, or of another shape: the adapter of another base.
    """
    contents = _contents(adapters, folder)
    where, section = str(folder.path / WEIGHTS), contents.section
    for key, tensor in contents.of_base.items():
        _check_base(adapters, key, tensor, where)
    if any(_disk_parameter(key) == "model.embed_tokens.weight" for key in contents.whole):
        adapters.head_as_linear()  # PEFT leaves a tied head at the base's embedding
    adapters.add(name, section, check_ranks=False)
    added = adapters.added[name]
    for site, by_name in contents.values.items():
        parameters = dict(added.modules[site].named_parameters())
        for key, value in by_name.items():
            parameters[key].data.copy_(value)
    by_disk = {adapters.hf_name(copy.name): copy for copy in added.copies}
    for key, tensor in contents.whole.items():
        copy = by_disk.get(_disk_parameter(key))
        if copy is None:
            raise ModelError(f"{where}: {key} is of the base, and {CONFIG} does not say in `bias` that it is trained")
        if copy.trained.shape != tensor.shape:
            raise ModelError(f"{where}: {key} is {list(tensor.shape)}, this model needs {list(copy.trained.shape)}")
        copy.trained.data.copy_(tensor)


def section_of(adapters: AdapterSet, folder: AdapterFolder) -> Any:
    """What a recipe would say of the adapter in a folder; the model of the set may be without weights.

    Raises ModelError as `add_adapter` does, but for an embedding that is not the base's.
    """
    return _contents(adapters, folder).section


@dataclass(frozen=True)
class _Contents:
    """What an adapter's file holds."""

    section: Any
    values: Mapping[str, Mapping[str, Tensor]]  # of each module by where it sits
    whole: Mapping[str, Tensor]  # parameters of the base that are trained in full, by their names on disk
    of_base: Mapping[str, Tensor]  # the base's own, which PEFT writes beside an adapter of the embedding


def _contents(adapters: AdapterSet, folder: AdapterFolder) -> _Contents:
    where = str(folder.path / WEIGHTS)
    told: Mapping[str, Any] = folder.values
    tensors: Mapping[str, Tensor] = read_files(folder)
    if folder.kind == "LORA":
        told, tensors = for_original_base(told, tensors, partial(_loaded_weight, adapters, where), where)
    try:
        section, values, used = FORMATS[folder.kind].from_peft(told, tensors, adapters.sites, where)
    except ValidationError as error:  # values that no recipe may have either
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ModelError(f"{folder.path / CONFIG}: {key} is {first['input']!r}: {first['msg']}") from None
    rest = {key: tensor for key, tensor in tensors.items() if key not in used}
    of_base = {key: rest.pop(key) for key in list(rest) if key.endswith(".base_layer.weight")}
    more = _saved_modules(folder.values, rest, adapters, where)
    fields = type(section).model_fields
    section = section.model_copy(update={key: value for key, value in more.items() if key in fields})
    return _Contents(section, values, rest, of_base)


def _loaded_weight(adapters: AdapterSet, where: str, module: str) -> Tensor | None:
    """The weight of a module on disk, [O, I], as the base's folder has it; None where this model has no such module.

    Raises ModelError where it is not to be had: in few bits, or a head that is the embedding.
    """
    sites = [site for site in adapters.sites if site.hf_name == module]
    if not sites:
        return None
    if any(site.module is None for site in sites):
        raise ModelError(
            f"{where}: PEFT takes the start of this adapter out of {module}, which in this model is the embedding: "
            "PEFT changes both then, and no adapter can. Train it anew without lm_head among the targets"
        )
    parts = [adapters.loaded_weight(site) for site in sites]
    if (lost := next((one for one, part in zip(sites, parts, strict=True) if part is None), None)) is not None:
        raise ModelError(
            f"{where}: the start of this adapter (init_lora_weights) is a part of {lost.hf_name}, which is "
            "quantized here, so its value is another. Leave out `quantization`, or merge the adapter into the base "
            "(`danlu merge`) and quantize the result"
        )
    return torch.cat([part for part in parts if part is not None])


def _copies(adapters: AdapterSet, added: AddedAdapter) -> tuple[list[str], dict[str, Tensor]]:
    """Modules trained in full, by their names on disk, and their tensors; a tied head goes along with its embedding."""
    modules: set[str] = set()
    tensors: dict[str, Tensor] = {}
    adapted = {site.hf_name for site in added.sites}
    for copy in added.copies:
        name = adapters.hf_name(copy.name)
        module, _, attribute = name.rpartition(".")
        saved = any(
            module == one or module.endswith(f".{one}") for one in getattr(added.section, "modules_to_save", ())
        )
        if saved:
            modules.add(module)
            tensors[f"{PREFIX}{name}"] = copy.trained
            if copy.name == "embed_tokens.weight" and adapters.tied:
                modules.add("lm_head")
                tensors[f"{PREFIX}lm_head.weight"] = copy.trained
        else:  # a bias of the base
            inside = f"{module}.base_layer.{attribute}" if module in adapted else name
            tensors[f"{PREFIX}{inside}"] = copy.trained
    return sorted(modules), tensors


def _check_base(adapters: AdapterSet, key: str, tensor: Tensor, where: str) -> None:
    """PEFT writes the whole embedding beside an adapter of it; here it must be the one that the model has."""
    name = _disk_parameter(key)
    own = {adapters.hf_name(one): parameter for one, parameter in adapters.base_parameters().items()}
    base = own.get(name, own["model.embed_tokens.weight"] if name == "lm_head.weight" else None)
    if base is None or base.shape != tensor.shape or not torch.allclose(base.float(), tensor.float(), atol=1e-6):
        raise ModelError(
            f"{where}: {key} is not the base's own {name}: the vocabulary was changed while it was trained. "
            "Save that base as a model folder and name it as model.path"
        )


def _disk_parameter(key: str) -> str:
    return key.removeprefix(PREFIX).replace(".base_layer.", ".")


def _saved_modules(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], adapters: AdapterSet, where: str
) -> dict[str, Any]:
    """`modules_to_save` and `bias` that explain the tensors that belong to the base."""
    known = {adapters.hf_name(name) for name in adapters.base_parameters()}
    if "lm_head.weight" in {_disk_parameter(key) for key in tensors}:
        known.add("lm_head.weight")
    for key in tensors:
        if _disk_parameter(key) not in known:
            raise ModelError(f"{where}: {key} is no tensor of this model: the adapter is of another base")
    bias = {"none": "none", "all": "all", "lora_only": "adapted"}.get(str(values.get("bias", "none")), "none")
    named = values.get("modules_to_save") or []
    owners = {_disk_parameter(key).rpartition(".")[0] for key in tensors}
    # As PEFT matches them; and whatever else is there in full: a head that is tied to a saved embedding is not named.
    in_full = {_disk_parameter(key).rpartition(".")[0] for key in tensors if key.endswith(".weight")}
    saved = sorted(owner for owner in owners if owner in in_full or any(owner.endswith(one) for one in named))
    return {"modules_to_save": saved, "bias": bias}
