"""One optimizer step: forward and backward over micro-batches, one division by the global weight, clipping.

T packed tokens · N trained targets · D model width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.data.batch import collate, fill_up
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.objectives.crossentropy import CrossEntropy, linear_cross_entropy
from danlu.optim.clip import HasGradient, clip_grad_norm
from danlu.optim.sparse import compact
from danlu.recipe.sections import LossOptions
from danlu.train.diagnosis import explain_non_finite
from danlu.train.memory_parts import Activations
from danlu.types import Batch, Pack

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Compute:
    """How numbers are made: where, in which type, through which (perhaps compiled) forward, how much at a time."""

    model: Decoder
    forward: Forward  # the model itself, or its compiled form
    device: torch.device
    dtype: torch.dtype  # of activations; parameters are float32
    micro: int  # packs in a micro-batch
    loss: LossOptions
    adapters: AdapterSet | None = None  # with one, the model itself is frozen
    activations: Activations | None = None  # counts what autograd keeps; None where the forward is compiled

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, live: all of the model, or the adapter that is trained."""
        return trained_weights(self.model, self.adapters)

    def collate(self, packs: Sequence[Pack]) -> Batch:
        """A micro-batch on the device, with the virtual tokens that an adapter wants before each document."""
        virtual = () if self.adapters is None else self.adapters.virtual_tokens
        return collate(packs, self.device, before=virtual) if virtual else collate(packs, self.device)

    def dropout(self, step: int | None, first: int = 0) -> None:
        """Dropout of adapters for tokens from number `first` of a step on; None: no more of it."""
        if self.adapters is not None:
            noise = self.adapters.making.noise
            noise.end() if step is None else noise.begin(step, first)


def trained_weights(model: Decoder, adapters: AdapterSet | None) -> dict[str, Tensor]:
    """What training changes, by name, live: all of a model, or the adapter on top, its frozen parts included."""
    named = model.named_parameters() if adapters is None else adapters.tensors(adapters.active[-1]).items()
    return {name: parameter.detach() for name, parameter in named}


@dataclass(frozen=True)
class Gradients:
    """What `accumulate` leaves beside the gradients: sums over the step, and how large the whole gradient was."""

    loss: float  # mean over trained weight, with label smoothing and z-loss
    nll: float  # mean without them
    accuracy: float
    norm: float  # global 2-norm of the mean loss's gradient, before clipping; not finite after an fp16 overflow
    tokens: int
    trained_tokens: int
    lengths: tuple[int, ...]  # of documents, for counting operations


def cross_entropy(compute: Compute, batch: Batch, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy:
    """The weighted sum of losses of a micro-batch; the head runs on its N trained positions only."""
    batch = fill_up(batch)
    hidden = compute.forward(batch.tokens, batch.positions, PackedAttention(batch.boundaries), compute.dtype)  # [T, D]
    return linear_cross_entropy(
        hidden.index_select(0, batch.sources),  # [N, D]
        compute.model.head_weight,
        batch.targets,
        batch.weights,
        softcap=compute.model.config.final_softcap,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        gradient_scale=gradient_scale,
    )


def micro_batches(packs: Sequence[Pack], size: int) -> list[Sequence[Pack]]:
    return [packs[start : start + size] for start in range(0, len(packs), size)]


def accumulate(
    compute: Compute,
    packs: Sequence[Pack],
    *,
    step: int,
    clip: float | None,
    loss_scale: float = 1.0,
    holders: Iterable[HasGradient] | None = None,
) -> Gradients:
    """Leaves in `.grad` the clipped gradient of the mean loss over `packs`, however they are cut into micro-batches.

    Each micro-batch adds the gradient of a sum; the division by the step's whole weight happens once, with clipping.
    With an fp16 `loss_scale`, a gradient that overflowed is left alone and its norm returned as it is. `holders` are
    what the optimizer takes gradients from (`Optimizers.gradient_holders`), by default the model's parameters.

    Raises TrainingError, which names step, rows and tensor, when a loss is not finite.
    """
    sums: list[Tensor] = []
    weight = 0.0
    trained = place = 0
    lengths: list[int] = []
    for group in micro_batches(packs, compute.micro):
        batch = compute.collate(group)
        compute.dropout(step, place)
        place += len(batch.tokens)
        with nullcontext() if compute.activations is None else compute.activations.counted(len(batch.targets)):
            entropy = cross_entropy(compute, batch, compute.loss, loss_scale)
        compute.dropout(None)
        entropy.total.backward()
        compact(compute.model.parameters())
        sums.append(torch.stack((entropy.total.detach(), entropy.nll, entropy.correct)))
        weight += batch.weight
        trained += len(batch.targets)
        lengths += [end - start for start, end in zip(batch.boundaries[:-1], batch.boundaries[1:], strict=True)]
    by_micro = torch.stack(sums).double().cpu()  # one wait for the device, after all the work has been handed to it
    total, nll, correct = by_micro.sum(0).tolist()
    if not math.isfinite(total):
        culprit = int((~by_micro[:, 0].isfinite()).nonzero()[0])
        group = micro_batches(packs, compute.micro)[culprit]
        raise explain_non_finite(compute.model, compute.collate(group), compute.dtype, step)
    norm = clip_grad_norm(
        compute.model.parameters() if holders is None else holders, clip, scale=1 / (weight * loss_scale)
    )
    return Gradients(
        loss=total / weight,
        nll=nll / weight,
        accuracy=correct / weight,
        norm=norm,
        tokens=sum(pack.tokens for pack in packs),
        trained_tokens=trained,
        lengths=tuple(lengths),
    )
