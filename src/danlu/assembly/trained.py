"""The model of a recipe that has adapters: which base, what lies below, what is trained; and its result as a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.description import CONFIG, WEIGHTS, AdapterFolder, resolve_adapter, stacked
from danlu.adapters.folder import add_adapter, open_adapter, write_adapter
from danlu.assembly.base import Base, check_base, find_base
from danlu.assembly.frozen import Adapted, Arriving, adapters_of, load_frozen
from danlu.assembly.stacks import Stacks
from danlu.errors import ModelError
from danlu.models.decoder import Decoder
from danlu.models.folder import read_config, tensors_fingerprint
from danlu.models.loading import load, skeleton
from danlu.models.saving import copy_words, fresh_folder, write_template
from danlu.models.tensor_file import read_header
from danlu.recipe import sections

TRAINED = "default"
"""What the adapter that is trained is called, as in PEFT."""


def adapted_model(
    model: sections.Model,
    adapter: sections.AdapterSection,
    quantization: sections.QuantizationSection | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    encode: Callable[[str], Sequence[int]] | None,
    taken_up: Mapping[str, Tensor] | None,
    arriving: Arriving | None = None,
) -> tuple[Adapted, Base]:
    """A frozen base with the adapters of `model.adapters` below and the one that is trained on top, or with
    `adapter: continue` the last of them trained on.

    taken_up: tensors of the adapter as an earlier run saved them, where this goes on.
    arriving: as `load_frozen` has it; not with adapters below, which are put on a base that is whole.
    Raises ModelError for folders that are no adapters or belong to another base.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    base = find_base(model.path)
    below = _open(model.adapters, base)
    continued = _last(below, model.adapters) if isinstance(adapter, sections.Continue) else None

    def take_up(adapters: AdapterSet) -> None:
        if taken_up is not None and continued is None:
            adapters.take_up(TRAINED, taken_up)

    adapted = load_frozen(
        base.folder,
        dtype=dtype,
        device=device,
        quantization=quantization,
        seed=seed,
        new={} if continued is not None else {TRAINED: adapter},
        encode=encode,
        taken_up=take_up,
        arriving=arriving,
    )
    adapters = adapted.adapters
    stacks = Stacks(adapters)
    stacks.use(stacks.add(below))
    if continued is not None:
        add_adapter(adapters, TRAINED, continued)
    else:
        adapters.activate(*adapters.active, TRAINED)
    adapters.train_only(TRAINED)
    return adapted, base


def base_identity(model: sections.Model) -> dict[str, Any]:
    """What a trained adapter lies upon, as JSON for its checkpoints: the base's fingerprint, the revision of a hub id,
    what its config.json computes, and the adapters below.

    The first and last bytes of each tensor are looked at, not all of them.
    """
    assert model.path is not None, "the recipe's rules ask for a base"
    base = find_base(model.path)
    config = json.loads(json.dumps(asdict(read_config(base.folder)), default=str))
    below = {}
    for folder in _stack(model.adapters):
        digest = blake2b((folder.path / CONFIG).read_bytes(), digest_size=16)
        digest.update(tensors_fingerprint(read_header(folder.path / WEIGHTS)).encode())
        below[str(folder.path.resolve())] = digest.hexdigest()
    named = {"path": base.named, "fingerprint": base.fingerprint, "revision": base.revision}
    return {"model": named, "config": config, "adapters": below}


def base_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How what lies under an adapter differs between two `base_identity`, each as "there -> here"; none if it is the
    same. Keys of the config that only one of them has are of another version of danlu and are not judged.
    """
    found = []
    if then["model"]["fingerprint"] != now["model"]["fingerprint"]:
        found.append(f"weights of model.path: {_named(then['model'])} -> {_named(now['model'])}")
    found += [
        f"{key} in the config.json of {now['model']['path']}: {then['config'][key]!r} -> {value!r}"
        for key, value in now["config"].items()
        if key in then["config"] and then["config"][key] != value
    ]
    known = list(then["adapters"].values())
    if len(known) != len(now["adapters"]):
        found.append(
            f"model.adapters: {', '.join(then['adapters']) or 'none'} -> {', '.join(now['adapters']) or 'none'}"
        )
    else:
        found += [
            f"the adapter {path}: {before} -> {digest}"
            for before, (path, digest) in zip(known, now["adapters"].items(), strict=True)
            if before != digest
        ]
    return found


def _named(model: Mapping[str, Any]) -> str:
    revision = f"revision {model['revision']}, " if model["revision"] else ""
    return f"{model['path']} ({revision}fingerprint {model['fingerprint']})"


def check_adapters(model: sections.Model, adapter: sections.AdapterSection | None) -> None:
    """What can be told of a recipe's adapters before its data is read: folders, their base, targets, ranks.

    Raises ModelError and RecipeError as `adapted_model` would.
    """
    if model.path is None or (adapter is None and not model.adapters):
        return
    base = find_base(model.path)
    _open(model.adapters, base)
    if adapter is not None and not isinstance(adapter, sections.Continue):
        adapters_of(skeleton(read_config(base.folder))).chosen(adapter)


def doubts(model: sections.Model) -> list[str]:
    """For the console: adapters of other tools that name a base of another name than the recipe does."""
    if not model.adapters or model.path is None:
        return []
    base = find_base(model.path)
    return [
        f"{folder.path}: was trained on {folder.base}, and here it is put on {base.named}: the shapes fit, but if they "
        "are two models its result makes no sense"
        for folder in _stack(model.adapters)
        if folder.danlu.get("base_fingerprint") is None
        and folder.base
        and Path(folder.base).name.lower() != Path(base.named).name.lower()
    ]


def merged_model(model: sections.Model, *, device: torch.device) -> Decoder:
    """A base in float32 with the adapters of `model.adapters` merged into it, to be trained as a whole."""
    assert model.path is not None, "the recipe's rules ask for a base"
    base = find_base(model.path)
    folders = _open(model.adapters, base)
    decoder = load(base.folder, device=device)
    adapters = adapters_of(decoder, device=device)
    stacks = Stacks(adapters)
    stacks.use(stacks.add(folders))
    adapters.absorb()
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
) -> None:
    """The trained adapter as a PEFT folder with the words beside it; it appears whole or not at all.

    started_from: `model.adapters`, upon which it was trained and which it needs; continued: all but the last.
    quantization: how the base was held meanwhile, so that it is held the same way when the adapter is used.
    value, writes: as `adapters.folder.write_adapter` has them, for an adapter cut among processes.
    """
    if not writes:
        for name in adapters.tensors(TRAINED):
            assert value is not None, "processes that write nothing help with values"
            value(name)
        return
    below = _stack(started_from)
    if continued:
        _last(below, started_from)
    needed = sum(4 * tensor.numel() for tensor in adapters.tensors(TRAINED).values())
    with fresh_folder(target, 3 * needed, holds=CONFIG) as fresh:
        paths = [str(folder.path.resolve()) for folder in below]
        write_adapter(
            adapters,
            TRAINED,
            fresh,
            base=base.named,
            base_fingerprint=base.fingerprint,
            below=paths,
            quantization=None if quantization is None else quantization.model_dump(mode="json"),
            value=value,
        )
        copy_words(tokenizer_from, fresh)
        if chat_template is not None:
            write_template(fresh, chat_template)


def _open(paths: Sequence[str], base: Base) -> list[AdapterFolder]:
    folders = [open_adapter(folder.path) for folder in _stack(paths)]
    for folder in folders:
        check_base(folder, base)
        read_header(folder.path / WEIGHTS)  # truncated or broken: told before data is tokenised
    return folders


def _stack(paths: Sequence[str]) -> list[AdapterFolder]:
    """The adapters named, each with those that it was trained upon below it and none twice."""
    found = {folder.path.resolve(): folder for path in paths for folder in stacked(path)}
    return list(found.values())


def _last(stack: list[AdapterFolder], paths: Sequence[str]) -> AdapterFolder:
    """Takes the adapter named last off the stack. Raises ModelError if another named one was trained upon it."""
    last = resolve_adapter(paths[-1])
    if stack[-1].path.resolve() != last.resolve():
        raise ModelError(
            f"{last}: lies below {stack[-1].path}, which was trained upon it, and so cannot be trained on above it. "
            "Name it alone in model.adapters"
        )
    return stack.pop()
