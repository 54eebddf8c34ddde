"""Cards that published runs were made on, as danlu's table of cards has them or as their source describes them."""

from __future__ import annotations

import re
from dataclasses import replace

from danlu.planning.cards import Card, find_card

_NAMES = (
    (r"a100[-_ ]?40", "A100-40G"),
    (r"a100[-_ ]?80", "A100-80G"),
    (r"h100[-_ ]?96", "H100-96G"),
    (r"h100[-_ ]?80", "H100-80G"),
    (r"gb200", "GB200-186G"),
    (r"b200.*h200", None),  # the table of the source names another card than its text
    (r"h200", "H200-141G"),
    (r"b200.*power", "B200-180G-limited"),
    (r"b200", "B200-180G"),
    (r"4090", "RTX4090-24G"),
    (r"a6000", "A6000-48G"),
    (r"l40s", "L40S-48G"),
    (r"mi300x", "MI300X-192G"),
)


def card_name(text: str) -> str | None:
    """The card that a cell names; None where it names none, or two."""
    return next((name for pattern, name in _NAMES if re.search(pattern, text.lower())), None)


def card(name: str) -> Card:
    """A card by a name that `card_name` gives."""
    if name == "H100-96G":
        # pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md@31a17bfd: 96 GB of HBM2e at 2.4 TB/s, 500 W;
        # its peak lies between those of SXM and NVL, and that of SXM is what its MFU is computed with. Memory is as
        # much as of another card of 96 GB.
        memory = card("H20-96G").memory_bytes
        return replace(card("H100-80G"), name=name, memory_bytes=memory, bandwidth=2.4e12)
    if name == "B200-180G-limited":
        return replace(card("B200-180G"), name=name)  # by how much its power is limited is not said
    found = find_card(name)
    assert isinstance(found, Card), found
    return found
