"""Outputs of the models of other roles for a micro-batch: frozen decoders, the policy without its adapter, columns.

T packed tokens · N trained targets
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.layer_types import Attend
from danlu.core.types import ROTARY_LENGTH, Batch, Outputs
from danlu.models.decoder import Decoder
from danlu.numerics.quantized_weight import QuantizedWeightModule, leave_products_uncompiled
from danlu.stages.outputs import DecoderOutputs

if TYPE_CHECKING:
    from danlu.adapters.adapter_set import AdapterSet

Forward = Callable[..., Tensor]
"""A decoder, or its compiled form."""


def forward_of(model: Decoder, *, compiled: bool) -> Forward:
    """The decoder, or its compiled form, in which quantized products and, where torch needs it, adapters are not."""
    if not compiled:
        return model
    from danlu.adapters.dropout import leave_token_keys_uncompiled

    leave_token_keys_uncompiled()
    is_quantized = any(isinstance(module, QuantizedWeightModule) for module in model.modules())
    if is_quantized:
        leave_products_uncompiled()
    if is_quantized or torch.__version__ < "2.12":  # which has wrong gradients of adapters: see `models.ops._SwiGLU`
        from danlu.adapters.slot import leave_slots_uncompiled

        leave_slots_uncompiled()
    return model.compiled()


class RoleOutputs(Protocol):
    """Makes the outputs of one role for a micro-batch; they carry no gradients."""

    def __call__(self, batch: Batch, filled: Batch, attend: Attend, x: Tensor | None = None) -> Outputs:
        """Computes the role's outputs for `batch`, which goes through models as `filled`: see
        `data.batch.pad_to_bucket`.

        x: the output of the chunk before the last one, where the role is a decoder in several.
        """


@dataclass(frozen=True)
class DecoderPass:
    """A decoder's forward pass, with the head that it has apart from that over the vocabulary, if any."""

    model: Decoder
    forward: Forward
    dtype: torch.dtype  # of activations
    exact: bool = False  # see `DecoderOutputs`
    score_head: nn.Linear | None = field(default=None, kw_only=True)

    def outputs(
        self, batch: Batch, filled: Batch, attend: Attend, x: Tensor | None = None, gradient_scale: float = 1.0
    ) -> DecoderOutputs:
        """Computes the outputs for `batch`, which goes through the decoder as `filled`.

        x: the output of the chunk before the last one, where the decoder is in several.
        """
        hidden = self.hidden(batch, filled, attend, self.model.chunks.last, x)  # [T', D]
        counts, head = (len(batch.tokens), len(batch.targets)), self.score_head
        return DecoderOutputs(self.model, hidden, filled, *counts, gradient_scale, score_head=head, exact=self.exact)

    def hidden(self, batch: Batch, filled: Batch, attend: Attend, chunk: int, x: Tensor | None) -> Tensor:
        """Computes the hidden states after a chunk for `batch`, which goes through the decoder as `filled`.

        x: the output of the chunk before; None for the first.
        """
        rotation: dict[str, Any] = {} if batch.stage_length is None else {"stage_length": batch.stage_length}
        if filled.document_lengths is not None:
            rotation["lengths"] = filled.document_lengths
        if ROTARY_LENGTH in batch.facts and self.model.config.rotates_by_text_length:
            rotation["lengths"] = recorded_lengths(filled).to(filled.tokens.device)
        if self.model.chunks.last > 0:
            rotation |= {"chunk": chunk, "x": x}
        with self._real_rows(len(batch.tokens)):
            return self.forward(filled.tokens, filled.positions, attend, self.dtype, **rotation)

    def _real_rows(self, count: int) -> AbstractContextManager[None]:
        """A context, now and where activations are recomputed, in which padding behind so many tokens is left out of
        scales of all tokens."""
        real_rows = self.model.real_rows
        if real_rows is None:
            return nullcontext()
        from danlu.memory.recomputed_function import recomputed_also_within

        return recomputed_also_within(lambda: real_rows(count))


@dataclass(frozen=True)
class FrozenDecoder(DecoderPass):
    """A `RoleOutputs`: a decoder of its own, which is not trained."""

    def __call__(self, batch: Batch, filled: Batch, attend: Attend, x: Tensor | None = None) -> DecoderOutputs:
        """The decoder's hidden states, computed now, and its head, applied when it is asked for."""
        with torch.no_grad():
            return self.outputs(batch, filled, attend, x)

    def hidden_states(self, batch: Batch, filled: Batch, attend: Attend, chunk: int, x: Tensor | None) -> Tensor:
        """Those behind a chunk before the last one, without gradients: see `hidden`."""
        with torch.no_grad():
            return self.hidden(batch, filled, attend, chunk, x)


@dataclass(frozen=True, kw_only=True)
class AdapterOff(DecoderPass):
    """A `RoleOutputs`: the policy without the adapter `name`, and with those that are stacked below it."""

    adapters: AdapterSet
    name: str

    def __call__(self, batch: Batch, filled: Batch, attend: Attend, x: Tensor | None = None) -> DecoderOutputs:
        """Computes the outputs as a `FrozenDecoder` does, without dropout; the head is taken here, for it may have an
        adapter too."""
        with self._switched_off():
            return self.outputs(batch, filled, attend, x).with_head(self.model.head_weight)

    def hidden_states(self, batch: Batch, filled: Batch, attend: Attend, chunk: int, x: Tensor | None) -> Tensor:
        """Computes hidden states as a `FrozenDecoder` does, without dropout."""
        with self._switched_off():
            return self.hidden(batch, filled, attend, chunk, x)

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        dropout_state = self.adapters.build_context.dropout_state
        with torch.no_grad(), self.adapters.without(self.name), dropout_state.suspended():
            yield


@dataclass(frozen=True)
class StoredOutputs:
    """A `RoleOutputs` that reads values which were computed before training from the batch's columns."""

    outputs: Callable[[Batch], Outputs]

    def __call__(self, batch: Batch, filled: Batch, attend: Attend, x: Tensor | None = None) -> Outputs:
        """The outputs over the columns of `batch`."""
        assert x is None, "columns go through no chunks"
        return self.outputs(batch)


DecoderRole = FrozenDecoder | AdapterOff
"""A `RoleOutputs` that goes through the chunks of a pipeline together with the policy, each with its own."""


def recorded_lengths(filled: Batch) -> Tensor:
    """[T'] int64 on the host: by how many tokens each document was rotated when its answers were drawn.

    Branches of a document have the same fact, or none (its stem). Documents without one, which nobody has drawn, are
    rotated by their own length.
    """
    recorded = filled.facts[ROTARY_LENGTH]  # [M]
    if filled.shared_branches is not None:
        assert filled.document_lengths is not None, "context ranks know of each token how long its document is"
        own_lengths = filled.document_lengths.cpu()
        is_root = torch.tensor([branch.parent < 0 for branch in filled.trees] or [True] * len(recorded))
        documents = is_root.cumsum(0) - 1  # [M]
        by_document = torch.full((len(documents),), torch.nan)
        by_document[documents[~recorded.isnan()]] = recorded[~recorded.isnan()]
        of_tokens = by_document[documents[filled.shared_branches.branch_of_token]]  # [T], NaN where none is recorded
        of_tokens = F.pad(of_tokens, (0, len(own_lengths) - len(of_tokens)), value=torch.nan)
        return torch.where(of_tokens.isnan(), own_lengths, of_tokens.nan_to_num().long())
    lengths = torch.tensor(filled.boundaries).diff()
    of_documents = lengths.clone()
    starts = torch.tensor([branch.start for branch in filled.trees] or filled.boundaries[:-1])
    documents = torch.searchsorted(torch.tensor(filled.boundaries), starts, right=True) - 1
    documents = documents[: len(recorded)]  # without what fills the batch up
    is_recorded = ~recorded.isnan()
    of_documents[documents[is_recorded]] = recorded[is_recorded].long()
    return of_documents.repeat_interleave(lengths)
