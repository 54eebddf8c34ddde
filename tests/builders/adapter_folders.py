"""Model folders and adapter folders on disk, trained by nobody, for the tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from builders.tiny_adapters import logits, perturb
from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.adapter_set import NO_TOKENS
from danlu.adapters.peft_folder import DANLU, WEIGHTS, write_adapter
from danlu.assembly.adapter_stacks import AdapterStacks
from danlu.assembly.base_model import find_base, with_rows_for
from danlu.assembly.frozen_base import adapters_of
from danlu.core.added_token import AddedToken
from danlu.models.loading import load
from danlu.models.score_head import head_tensors, new_score_head


def adapter_folder(
    base: Path,
    folder: Path,
    section: Any,
    *,
    seed: int = 1,
    size: float = 0.05,
    below: tuple[Path, ...] = (),
    scores: bool = False,
    tokens: Sequence[AddedToken] = (),
    token_ids: Mapping[str, Sequence[int]] = NO_TOKENS,
) -> Path:
    """An adapter of a base with numbers as after training, in danlu's form; upon others where there are some.

    scores: that of a reward model, with a head.
    tokens: for which the base gets rows. token_ids: with rows that it trains, of "embedding" and "head".
    """
    named_base = with_rows_for(find_base(base), tokens)
    adapters = adapters_of(load(named_base.folder))
    adapters.add("made", section, token_ids=token_ids)
    adapters.train_only("made")
    perturb(adapters, "made", seed=seed, size=size)
    folder.mkdir(parents=True)
    paths = [str(path.resolve()) for path in below]
    head = new_score_head(load(base).config.hidden_size, 1, bias=False, seed=seed, std=1.0) if scores else None
    write_adapter(
        adapters,
        "made",
        folder,
        base=named_base.named,
        base_fingerprint=named_base.fingerprint,
        below=paths,
        task="sequence-classification" if scores else "causal-lm",
        head=None if head is None else head_tensors(head),
        tokens=tokens,
    )
    return folder


def adapted_logits(base: Path, *folders: Path, tokens: Tensor | None = None, model: Any = None) -> Tensor:
    """Of a base with adapters one upon the other, none of them merged."""
    model = load(base) if model is None else model
    stacks = AdapterStacks(adapters_of(model))
    stacks.use(stacks.add([open_adapter(folder) for folder in folders]))
    return logits(model, tokens, virtual_token_ids=stacks.adapters.virtual_token_ids)


def of_another_tool(folder: Path) -> Path:
    """Takes away what only danlu writes."""
    (folder / DANLU).unlink()
    return folder


def changed(folder: Path, file: str, **values: Any) -> Path:
    """Sets keys of a JSON file; None takes one away."""
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return folder


def widened(folder: Path, name: str) -> Path:
    """Makes one tensor of an adapter a row longer."""
    tensors = load_file(folder / WEIGHTS)
    key = next(key for key in tensors if name in key)
    tensors[key] = torch.cat([tensors[key], tensors[key][:1]])
    save_file(tensors, folder / WEIGHTS)
    return folder
