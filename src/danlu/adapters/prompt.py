"""Prompt tuning: trained vectors in the place of the embeddings of words before every document (arXiv:2104.08691).

N virtual tokens of a pass · P of the adapter · V vocabulary · D model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from danlu.adapters.peft_values import positive_int, take_tensor
from danlu.adapters.virtual_tokens import Places, VirtualTokens
from danlu.recipe import sections
from danlu.types import EmbeddingLayer, Site

_KEY = "prompt_embeddings"


class Prompt(VirtualTokens):
    """Parameter: embedding.weight [P, D], in the units of the residual stream: no multiplier of Gemma's is applied.

    It starts as the vectors of words, so it needs the model's weights: uninitialised until `start`.

    multiplier: what the embedding multiplies its vectors by.
    """

    def __init__(
        self, first: int, count: int, width: int, multiplier: float, words: Sequence[int], device: torch.device | str
    ) -> None:
        super().__init__(first, count)
        self.multiplier = multiplier
        self.words = tuple(islice(cycle(words), count))  # which words' vectors it starts as
        self.started = False
        self.embedding = nn.Embedding.from_pretrained(torch.empty(count, width, device=device), freeze=False)

    @torch.no_grad()
    def start(self, embedding: EmbeddingLayer) -> None:
        words = torch.tensor(self.words, device=embedding.weight.device)
        self.embedding.weight.copy_(embedding.weight[words].float() * self.multiplier)
        self.started = True

    def vectors(self, places: Places, dtype: torch.dtype) -> Tensor:
        rows: Tensor = self.embedding(places.which)
        if self.multiplier == 1.0:
            return rows.to(dtype)
        # The embedding multiplies by the multiplier rounded to the type of activations.
        return (rows / torch.tensor(self.multiplier, dtype=dtype, device=rows.device).to(rows.dtype)).to(dtype)


def random_words(generator: torch.Generator, vocabulary: int, count: int) -> list[int]:
    """Words to start from when no text is given; PEFT's SAMPLE_VOCAB."""
    found: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
    return found


# ── in PEFT's words ──


def to_peft(
    section: sections.Prompt, modules: Mapping[str, nn.Module], sites: Sequence[Site]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config values and tensors of an adapter: `modules` by site name, `sites` all of the model's."""
    (module,) = modules.values()
    assert isinstance(module, Prompt)
    weight = module.embedding.weight.detach()
    values = {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": weight.shape[0],
        "token_dim": weight.shape[1],
        "num_transformer_submodules": 1,
        "num_layers": len({site.layer for site in sites if site.layer is not None}),
        "prompt_tuning_init": "RANDOM",  # of a loaded one nothing is drawn
    }
    return values, {_KEY: weight}


def from_peft(
    values: Mapping[str, Any], tensors: Mapping[str, Tensor], sites: Sequence[Site], where: str
) -> tuple[sections.Prompt, dict[str, dict[str, Tensor]], set[str]]:
    """The section, the values of each site's module by name, and the keys of `tensors` that they came from.

    Raises ModelError for tensors that do not fit the model.
    """
    (site,) = (site for site in sites if site.group == "embedding")
    count = positive_int(values, "num_virtual_tokens", where)
    weight = take_tensor(tensors, _KEY, (count, site.shape[1]), where)
    return sections.Prompt(tokens=count), {site.name: {"embedding.weight": weight}}, {_KEY}
