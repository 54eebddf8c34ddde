"""Shapes of the models that published runs are of: from architectures.yaml, and from folders with a config.json.

A shape here is what parameters, FLOPs and activations are counted from. Models of the Llama kind come from configs;
the file has those that no config of the data folder describes, each with its source. Importing this imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

FILE = Path(__file__).with_name("architectures.yaml")


@dataclass(frozen=True)
class Architecture:
    """A decoder of equal layers: attention, then a feed-forward, both behind a norm."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int
    tied: bool
    gated: bool
    """Whether the feed-forward has a gate: three products in place of two."""
    norm: Literal["rms", "layer"]
    """A layer norm has a bias."""
    norms: int
    """Norms of a layer; 1 where attention and feed-forward share theirs."""
    qkv_bias: bool
    bias: bool
    """Of all other products of a layer."""
    head_bias: bool
    positions: Literal["rotary", "learned"]
    parallel: bool
    """Whether attention and feed-forward read the same input."""
    position_rows: int
    """Rows of a table of learned positions."""
    source: str

    def at_length(self, length: int) -> Architecture:
        """The same model with as many learned positions as a length, as those who vary the length set it."""
        return replace(self, position_rows=length) if self.positions == "learned" else self

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's matrix products, by name."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        products = {
            "q": (self.width, queries),
            "k": (self.width, keys),
            "v": (self.width, keys),
            "o": (queries, self.width),
            "up": (self.width, self.inner),
            "down": (self.inner, self.width),
        }
        return products | ({"gate": (self.width, self.inner)} if self.gated else {})

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not the embedding's."""
        return 0 if self.tied else self.vocabulary * self.width

    @property
    def layer_parameters(self) -> int:
        products = self.products
        biased = [name for name in products if (self.qkv_bias if name in "qkv" else self.bias)]
        biases = sum(products[name][1] for name in biased)
        return sum(a * b for a, b in products.values()) + biases + self.norms * self._norm_parameters

    @property
    def _norm_parameters(self) -> int:
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def parameters(self) -> int:
        positions = self.position_rows * self.width if self.positions == "learned" else 0
        ends = self.embedding_parameters + self.head_parameters + (self.vocabulary if self.head_bias else 0)
        return ends + positions + self.layers * self.layer_parameters + self._norm_parameters


def adapter_parameters(architecture: Architecture, rank: int, targets: tuple[str, ...]) -> int:
    """Parameters of the low-rank matrices of all layers."""
    products = architecture.products
    return architecture.layers * sum(rank * sum(products[name]) for name in targets)


def read_architectures(configs: Path | None) -> dict[str, Architecture]:
    """All shapes by their names in lower letters: those of the file, and those of the configs in a folder."""
    found: dict[str, Architecture] = {}
    for folder in sorted(configs.iterdir()) if configs else ():
        config = folder / "config.json"
        if config.is_file():
            shape = _from_config(folder.name, json.loads(config.read_text(encoding="utf-8")))
            if shape is not None:
                found[_key(folder.name)] = shape
    entries: Mapping[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, entry in entries["models"].items():
        values = dict(_DEFAULTS | entries["families"].get(entry.get("family"), {}) | entry)
        values.pop("family", None)
        found[_key(name)] = _from_values(name, values)
    for other, name in entries["same"].items():
        if _key(name) in found:
            found[_key(other)] = found[_key(name)]
    return found


_DEFAULTS: dict[str, Any] = {
    "tied": False,
    "gated": True,
    "norm": "rms",
    "norms": 2,
    "qkv_bias": False,
    "bias": False,
    "head_bias": False,
    "positions": "rotary",
    "parallel": False,
    "position_rows": 0,
}


def _key(name: str) -> str:
    """A model's name as rows have it: without its owner, in lower letters."""
    return name.split("__")[-1].split("/")[-1].lower()


def _from_values(name: str, values: dict[str, Any]) -> Architecture:
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("head_width", values["width"] // values["heads"])
    values.setdefault("inner", 4 * values["width"])
    return Architecture(name, **values)


def _from_config(name: str, config: Mapping[str, Any]) -> Architecture | None:
    """The shape of a config of the Llama kind; None of another kind, which rows here do not need."""
    if config.get("model_type") not in ("llama", "mistral", "qwen2"):
        return None
    values = _DEFAULTS | {
        "width": config["hidden_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads", config["num_attention_heads"]),
        "inner": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
        "qkv_bias": config["model_type"] == "qwen2",
        "source": f"config.json of {name}",
    }
    if config.get("head_dim"):
        values["head_width"] = config["head_dim"]
    return _from_values(name, values)
