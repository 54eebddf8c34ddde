"""Prompt tuning: trained vectors as the embeddings of virtual tokens before every document (arXiv:2104.08691).

N virtual tokens of a pass · P of the adapter · V vocabulary · D model width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from danlu.adapters.peft_values import ModuleValues, PeftContent, PeftReader
from danlu.adapters.virtual_tokens import VirtualTokenPositions, VirtualTokens
from danlu.core.layer_types import EmbeddingLayer, Site
from danlu.recipe import sections

_KEY = "prompt_embeddings"


class Prompt(VirtualTokens):
    """A soft prompt. Parameter: embedding.weight [P, D], in units of the residual stream, so after Gemma's multiplier.

    It starts as the embeddings of ordinary tokens, which needs the model's weights: uninitialised until
    `initialize_from`.

    Args:
        width: D.
        multiplier: the factor of the rows of the model's embedding. token_ids: the tokens with the embeddings that it
            starts as, repeated where there are fewer than P.
    """

    def __init__(
        self, first_id: int, count: int, width: int, multiplier: float, token_ids: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(first_id, count)
        self.multiplier = multiplier
        self.initial_token_ids = tuple(islice(cycle(token_ids), count))
        self.is_initialized = False
        self.embedding = nn.Embedding.from_pretrained(torch.empty(count, width, device=device), freeze=False)

    @torch.no_grad()
    def initialize_from(self, embedding: EmbeddingLayer) -> None:
        """Sets the vectors to the model's embeddings of `initial_token_ids`."""
        ids = torch.tensor(self.initial_token_ids, device=embedding.weight.device)
        self.embedding.weight.copy_(embedding.weight[ids].float() * self.multiplier)
        self.is_initialized = True

    def embeddings(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        rows: Tensor = self.embedding(positions.indices)
        if self.multiplier == 1.0:
            return rows.to(dtype)
        # Undoes the embedding's multiplication; its multiplier is rounded to the type of activations.
        return (rows / torch.tensor(self.multiplier, dtype=dtype, device=rows.device).to(rows.dtype)).to(dtype)


def random_token_ids(generator: torch.Generator, vocab_size: int, count: int) -> list[int]:
    """`count` tokens to start from when no text is given, drawn uniformly from the vocabulary; PEFT's SAMPLE_VOCAB."""
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return ids


# ── PEFT's format ──


def to_peft(section: sections.Prompt, modules: Mapping[str, nn.Module], sites: Sequence[Site]) -> PeftContent:
    """Values of adapter_config.json, and tensors by name. modules: by site name; sites: all of the model's."""
    (module,) = modules.values()
    assert isinstance(module, Prompt)
    weight = module.embedding.weight.detach()
    values = {
        "peft_type": "PROMPT_TUNING",
        "num_virtual_tokens": weight.shape[0],
        "token_dim": weight.shape[1],
        "num_transformer_submodules": 1,
        "num_layers": len({site.layer for site in sites if site.layer is not None}),
        "prompt_tuning_init": "RANDOM",  # how PEFT would initialize a new one, not this one
    }
    return values, {_KEY: weight}


def from_peft(reader: PeftReader, sites: Sequence[Site]) -> tuple[sections.Prompt, ModuleValues]:
    """The section, and the values of each site's module.

    Raises ModelError for tensors that do not fit the model.
    """
    (site,) = (site for site in sites if site.group == "embedding")
    count = reader.positive_int("num_virtual_tokens")
    weight = reader.tensor(_KEY, (count, site.shape[1]))
    return sections.Prompt(tokens=count), {site.name: {"embedding.weight": weight}}
