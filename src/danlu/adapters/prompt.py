"""Virtual tokens, and prompt tuning: trained vectors as their embeddings (arXiv:2104.08691).

Virtual tokens have ids past the vocabulary, and stand before every document while an adapter that has them is active:
an adapter with P of them owns P consecutive ids. Collation and generation put them in front of every document or prompt
(`AdapterSet.virtual_token_ids` says which); the embedding's slot finds them in a pass and asks the adapter for their
vectors. So attention, positions, packing and caching need to know nothing of soft prompts and prefixes.

T tokens · N virtual tokens among them · P virtual tokens of an adapter · V vocabulary · D model width
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor, nn

from danlu.adapters.adapter import ShardableModule, embedding_of
from danlu.adapters.peft_values import ModuleValues, PeftContent, PeftReader
from danlu.adapters.shapes import prompt_vectors
from danlu.core.layer_types import EmbeddingLayer, LinearShard, Site
from danlu.recipe import sections


@dataclass(frozen=True)
class VirtualTokenPositions:
    """The places of one adapter's virtual tokens in one forward pass."""

    rows: Tensor  # [N] int64: their rows among the T tokens of the pass
    indices: Tensor  # [N] int64: which of the adapter's virtual tokens each is, 0 to P - 1


class VirtualTokens(ShardableModule):
    """The part of an adapter that sits in the embedding's slot and has the vectors of its virtual tokens.

    first_id: the first of its `count` consecutive ids; at least the size of the vocabulary.
    """

    def __init__(self, first_id: int, count: int) -> None:
        super().__init__()
        self.ids = range(first_id, first_id + count)
        self.adds_embeddings = True
        """False on all tensor ranks but one, where the vocabulary is cut and `embeddings` are summed over the ranks."""

    def narrow(self, shard: LinearShard) -> None:
        self.adds_embeddings = shard.first

    def positions(self, tokens: Tensor) -> VirtualTokenPositions:
        """Returns the places of this adapter's virtual tokens among tokens [T]."""
        rows = ((tokens >= self.ids.start) & (tokens < self.ids.stop)).nonzero().squeeze(1)
        return VirtualTokenPositions(rows, tokens[rows] - self.ids.start)

    def begin_pass(self, tokens: Tensor) -> None:
        """Notes where its virtual tokens are in passes over tokens [T] that do not begin at the embedding here: in
        later stages of a pipeline, and in backward passes of one of several micro-batches in flight."""

    @abstractmethod
    def embeddings(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        """Returns the embedding's output for the virtual tokens, [N, D] in `dtype`, before Gemma's multiplier."""

    def summand(self, positions: VirtualTokenPositions, dtype: torch.dtype) -> Tensor:
        """This rank's term of the sum of `embeddings` over the tensor ranks, [N, D].

        Zeros on all but one, but computed from the parameters, so that they have a gradient on every rank.
        """
        embeddings = self.embeddings(positions, dtype)
        return embeddings if self.adds_embeddings else embeddings * 0


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
        self.embedding = embedding_of(prompt_vectors(count, width)["embedding.weight"], device)

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
