"""The kinds of adapter on disk, and the module that reads and writes each.

Every kind offers the same two functions: `to_peft(section, modules, sites)` gives the values of adapter_config.json and
the tensors, `from_peft(reader, sites)` the section and the values of each module by where it sits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from danlu.adapters import bottleneck, ia3, mora, peft_lora, prefix, prompt, vera
from danlu.recipe import sections

FORMATS: dict[str, ModuleType] = {
    "DANLU_BOTTLENECK": bottleneck,
    "DANLU_MORA": mora,
    "IA3": ia3,
    "LORA": peft_lora,
    "PREFIX_TUNING": prefix,
    "PROMPT_TUNING": prompt,
    "VERA": vera,
}
"""The modules by peft_type."""
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
