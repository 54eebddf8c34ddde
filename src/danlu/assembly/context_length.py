"""How long a sample may be for the model that a recipe trains. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from danlu.adapters.adapter_config import adapter_stack
from danlu.models.hf_folder import find_config
from danlu.models.presets import from_scratch
from danlu.recipe import sections


def max_sample_length(model: sections.Model, adapter: Any) -> int:
    """The most tokens a sample may have: the model's context length less the virtual tokens of its adapters.

    adapter: section of the recipe, or None. Raises ModelError for a config that danlu cannot read.
    """
    config = find_config(model.path) if model.path is not None else from_scratch(model, vocab_size=1)
    stacks = (adapter_stack(Path(path).expanduser()) for path in model.adapters)
    below = {folder.path.resolve(): folder for stack in stacks for folder in stack}
    virtual = [folder.values.get("num_virtual_tokens") for folder in below.values()]
    if isinstance(adapter, sections.Prefix | sections.Prompt):
        virtual.append(adapter.tokens)
    return config.context_length - sum(count for count in virtual if isinstance(count, int))
