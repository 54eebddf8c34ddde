"""One optimizer step: forward and backward over micro-batches, one division by the global weight, clipping.

T packed tokens · N trained targets · D model width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from danlu.adapters.adapter_set import AdapterSet
from danlu.data.batch import EMPTY_PACK, collate, pad_to_bucket
from danlu.memory.activation_offload import ActivationOffload
from danlu.models.attend import PackedAttention
from danlu.models.decoder import Decoder
from danlu.objectives.crossentropy import CrossEntropy, linear_cross_entropy
from danlu.optim.clip import HasGradient, clip_grad_norm, non_finite
from danlu.optim.sparse import coalesce_gradients
from danlu.parallel.step_parallel import StepParallel
from danlu.parallel.threads import Replicas, shares_of
from danlu.parallel.watchdog import PHASE
from danlu.recipe.sections import LossOptions
from danlu.train.diagnosis import explain_non_finite
from danlu.train.memory_parts import Activations
from danlu.types import Batch, Item, Pack

Forward = Callable[..., Tensor]


class MicroBatch(Protocol):
    """What of a micro-batch the loop looks at, whatever it is made of."""

    @property
    def weight(self) -> float: ...  # sum over its targets

    @property
    def targets(self) -> Tensor: ...  # [N]


class Learner(Protocol):
    """What is trained, and how its loss is made: all that a language model and a classifier of images differ in."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def micro(self) -> int: ...  # packs in a micro-batch

    @property
    def loss(self) -> LossOptions: ...

    @property
    def activations(self) -> Activations | None: ...

    @property
    def parallel(self) -> StepParallel: ...

    def weights(self) -> dict[str, Tensor]: ...  # what training changes, by name, live: as much as this process holds

    # Of what its own data is made of: packs, images. A MicroBatch on the device; of nothing, one that is nothing.
    def collate(self, packs: Sequence[Any]) -> Any: ...

    def set_dropout(
        self, step: int | None, packs: Sequence[tuple[int, Any]] = ()
    ) -> None: ...  # dropout; None: no more

    def losses(self, batch: Any, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy: ...

    def explain(self, batch: Any, step: int) -> Exception: ...  # why a loss is not finite


@dataclass(frozen=True)
class Compute:
    """A decoder as it learns: where, in which type, through which (perhaps compiled) forward, how much at a time."""

    model: Decoder
    forward: Forward  # the model itself, or its compiled form
    device: torch.device
    dtype: torch.dtype  # of activations; parameters are float32
    micro: int  # packs in a micro-batch
    loss: LossOptions
    adapters: AdapterSet | None = None  # with one, the model itself is frozen
    activations: Activations | None = None  # counts what autograd keeps; None where the forward is compiled
    parallel: StepParallel = field(default_factory=StepParallel)
    through: Callable[..., CrossEntropy] | None = None  # DDP around `Losses`
    offload: ActivationOffload | None = None  # where activations wait for the backward pass, if not on the device
    multiple: int = 1  # of which the number of tokens is one, where ranks cut them

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, live: all of the model, or the adapter that is trained."""
        named = trained_weights(self.model, self.adapters)
        held = self.parallel.local_parameters
        return {name: held[name].local.detach() for name in named} if held else named

    def collate(self, packs: Sequence[Pack]) -> Batch:
        """A micro-batch on the device, with the virtual tokens that an adapter wants before each document."""
        virtual = () if self.adapters is None else self.adapters.virtual_token_ids
        return collate(packs or [EMPTY_PACK], self.device, virtual_token_ids=virtual)

    def set_dropout(self, step: int | None, packs: Sequence[tuple[int, Pack]] = ()) -> None:
        """Dropout of adapters for packs of a step, each with its number in the step; None: no more of it."""
        if self.adapters is not None:
            dropout_state, virtual = self.adapters.build_context.dropout_state, len(self.adapters.virtual_token_ids)
            if step is None:
                dropout_state.end()
            else:
                told = packs or [(0, EMPTY_PACK)]
                dropout_state.begin(
                    step, [(number, pack.tokens + virtual * len(pack.samples)) for number, pack in told]
                )

    def losses(self, batch: Batch, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy:
        """The weighted sum of losses of a micro-batch."""
        if not torch.is_grad_enabled():
            return self.own_losses(batch, loss, gradient_scale)
        with nullcontext() if self.offload is None else self.offload.active():
            return (self.through or self.own_losses)(batch, loss, gradient_scale)

    def own_losses(self, batch: Batch, loss: LossOptions, gradient_scale: float) -> CrossEntropy:
        """The same, without what is around it."""
        return cross_entropy(self, batch, loss, gradient_scale)

    def explain(self, batch: Batch, step: int) -> Exception:
        """Why the loss of `batch` is not finite."""
        # Each process has its part of the parameters.
        by_rank = self.parallel.ranks.world.all_gather_objects(non_finite(self.model.named_parameters()))
        names = list(dict.fromkeys(name for names in by_rank for name in names))
        return explain_non_finite(self.model, batch, self.dtype, step, names, multiple=self.multiple)


@dataclass(frozen=True)
class Split:
    """A micro-batch dealt out to the replicas of one process."""

    parts: tuple[Batch, ...]

    @property
    def weight(self) -> float:
        return sum(part.weight for part in self.parts)

    @property
    def targets(self) -> Tensor:
        """[N], on the first device."""
        return torch.cat([part.targets.to(self.parts[0].targets.device) for part in self.parts])


@dataclass(frozen=True)
class ThreadedCompute(Compute):
    """The same over replicas in one process: see `parallel.threads`."""

    replicas: Replicas | None = None

    def collate(self, packs: Sequence[Pack]) -> Any:
        """Each replica's part of a micro-batch, on its device."""
        assert self.replicas is not None, "threads run replicas"
        devices = self.replicas.devices
        parts = zip(shares_of(packs, len(devices)), devices, strict=True)
        return Split(tuple(collate(part or [EMPTY_PACK], device) for part, device in parts))

    def losses(self, batch: Any, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy:
        """The sum of all replicas' losses, on the first device."""
        assert self.replicas is not None, "threads run replicas"

        def work(model: Any, part: Batch) -> CrossEntropy:
            own = replace(self, model=model, forward=model, device=part.tokens.device)
            return cross_entropy(own, part, loss, gradient_scale)

        found = self.replicas.run(work, batch.parts)
        total, nll, correct = (
            torch.stack([getattr(one, name).to(self.device) for one in found]).sum()
            for name in ("total", "nll", "correct")
        )
        return CrossEntropy(total, nll, correct)

    def explain(self, batch: Any, step: int) -> Exception:
        """Why a loss is not finite, for the first part of which it is not."""
        names = non_finite(self.model.named_parameters())
        return explain_non_finite(self.model, batch.parts[0], self.dtype, step, names)


class Losses(nn.Module):
    """A model with its loss as one module, which is what DDP wants to be put around."""

    def __init__(self, model: nn.Module, of: Callable[..., CrossEntropy]) -> None:
        super().__init__()
        self.model = model
        self._of = of

    def forward(self, batch: Any, loss: LossOptions, gradient_scale: float) -> CrossEntropy:
        return self._of(batch, loss, gradient_scale)


def trained_weights(model: Decoder, adapters: AdapterSet | None) -> dict[str, Tensor]:
    """What training changes, by name, live: all of a model, or the adapter on top, its frozen parts included."""
    named = model.named_parameters() if adapters is None else adapters.tensors(adapters.active[-1]).items()
    return {name: parameter.detach() for name, parameter in named}


@dataclass(frozen=True)
class Gradients:
    """What `accumulate` leaves beside the gradients: sums over the step, and how large the whole gradient was.

    Of a step without a trained target loss, nll and accuracy are NaN, and the norm is 0.
    """

    loss: float  # mean over trained weight, with label smoothing and z-loss
    nll: float  # mean without them
    accuracy: float
    norm: float  # global 2-norm of the mean loss's gradient, before clipping; not finite after an fp16 overflow
    tokens: int
    trained_tokens: int
    lengths: tuple[int, ...]  # of documents, on all processes, for counting operations


def cross_entropy(compute: Compute, batch: Batch, loss: LossOptions, gradient_scale: float = 1.0) -> CrossEntropy:
    """The weighted sum of losses of a micro-batch; the head runs on its N trained positions only."""
    batch = pad_to_bucket(batch, compute.multiple)
    hidden = compute.forward(batch.tokens, batch.positions, PackedAttention(batch.boundaries), compute.dtype)  # [T, D]
    model, vocab_shard = compute.model, compute.model.vocab_shard
    return linear_cross_entropy(
        hidden.index_select(0, batch.sources),  # [N, D]
        model.head_weight,
        batch.targets,
        batch.weights,
        softcap=model.config.final_softcap,
        tensor_group=None if vocab_shard is None else vocab_shard.group,
        vocab_start=0 if vocab_shard is None else vocab_shard.start,
        vocab_size=model.config.vocab_size,
        label_smoothing=loss.label_smoothing,
        z_loss=loss.z_loss,
        gradient_scale=gradient_scale,
    )


def micro_batches(packs: Sequence[Pack], size: int) -> list[Sequence[Pack]]:
    return [packs[start : start + size] for start in range(0, len(packs), size)]


def accumulate(
    compute: Learner,
    packs: Sequence[Item],
    *,
    step: int,
    clip: float | None,
    loss_scale: float = 1.0,
    holders: Iterable[HasGradient] | None = None,
) -> Gradients:
    """Leaves in `.grad` the clipped gradient of the mean loss over `packs`, however they are cut into micro-batches.

    Each micro-batch adds the gradient of a sum; the division by the step's whole weight happens once, with clipping.
    Of many processes each takes its share of the packs. With an fp16 `loss_scale`, a gradient that overflowed is left
    alone and its norm returned as it is. `holders` are what the optimizer takes gradients from
    (`Optimizers.gradient_holders`), by default the model's parameters. Packs without a trained target on any process
    have no mean loss: `trained_tokens` is then 0, and there is no gradient to update by.

    Raises TrainingError, which names step, rows and tensor, when a loss is not finite.
    """
    parallel = compute.parallel
    own = [(number, packs[number]) for number in parallel.local_range(packs)]
    rounds = parallel.num_micro_batches(len(packs), compute.micro)
    groups = [own[start : start + compute.micro] for start in range(0, rounds * compute.micro, compute.micro)]
    sums: list[Tensor] = []
    weight = 0.0
    trained = 0
    for number, group in enumerate(groups, 1):
        batch = compute.collate([pack for _, pack in group])
        compute.set_dropout(step, group)
        PHASE.begin("forward", step)
        with parallel.micro_batch(number == rounds):
            with nullcontext() if compute.activations is None else compute.activations.counted(len(batch.targets)):
                entropy = compute.losses(batch, compute.loss, loss_scale)
            PHASE.begin("backward")
            entropy.total.backward()
        compute.set_dropout(None)
        if parallel.alone:
            coalesce_gradients(compute.model.parameters())
        sums.append(torch.stack((entropy.total.detach(), entropy.nll, entropy.correct)))
        weight += batch.weight
        trained += len(batch.targets)
    PHASE.begin("sum of gradients")
    parallel.reduce_gradients()
    by_micro = torch.stack(sums).double().cpu()  # one wait for the device, after all the work has been handed to it
    counts = torch.tensor([weight, trained], dtype=torch.float64)
    total, nll, correct, weight, every_trained = parallel.all_reduce_data(torch.cat((by_micro.sum(0), counts))).tolist()
    if not math.isfinite(total):
        raise _explained(compute, by_micro, groups, step)
    tokens = sum(pack.tokens for pack in packs)
    lengths = tuple(length for pack in packs for length in pack.lengths)
    if not every_trained:
        return Gradients(math.nan, math.nan, math.nan, norm=0.0, tokens=tokens, trained_tokens=0, lengths=lengths)
    norm = clip_grad_norm(
        compute.model.parameters() if holders is None else holders,
        clip,
        scale=1 / (weight * loss_scale),
        group=None if parallel.alone else parallel.ranks.world,
        shares=None if parallel.alone else parallel.norm_weights(),
        device=compute.device,
    )
    return Gradients(
        loss=total / weight,
        nll=nll / weight,
        accuracy=correct / weight,
        norm=norm,
        tokens=tokens,
        trained_tokens=int(every_trained),
        lengths=lengths,
    )


def _explained(
    compute: Learner, by_micro: Tensor, groups: Sequence[Sequence[tuple[int, Item]]], step: int
) -> Exception:
    """The explanation of the first process whose loss is not finite; all look, for looking takes collectives."""
    culprits = (~by_micro[:, 0].isfinite()).nonzero()
    mine = compute.explain(
        compute.collate([pack for _, pack in groups[int(culprits[0]) if len(culprits) else 0]]), step
    )
    found = compute.parallel.ranks.world.all_gather_objects((len(culprits) > 0, mine))
    return next(error for bad, error in found if bad)
