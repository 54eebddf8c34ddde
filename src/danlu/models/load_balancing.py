"""How evenly the experts of each layer are loaded: counted, and kept even by losses or by biases of their choice.

All sums are over the tokens of a whole step, so neither packing, accumulation nor a layout can change them. A loss that
multiplies two means over a batch, as Switch Transformer's f·P (arXiv:2101.03961, eq. 4), is no such sum: cut into
micro-batches it is another one. These losses take its place, for each layer, with P the scores of a token divided by
their sum, E experts and k of them for a token:

- `sequence` (DeepSeek-V3, arXiv:2412.19437, eq. 17-20): f·P of each document, f from its own tokens' k highest scores;
- `step`: f·P with the f of the step before, E times the share of its rows that each expert had; at first 1;
- `z` (ST-MoE, arXiv:2202.08906, eq. 5): the square of the logsumexp of a token's logits.

Each is a mean over the step's tokens, in which a document counts by its length, and a sum over layers. And `bias`
(arXiv:2408.15664): after an update, the bias that is added to the scores for the choice of experts moves by `rate`, up
where an expert had fewer rows than the mean in the step, down where it had more.

T tokens of a micro-batch · E experts · k experts of a token
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from danlu.core import device_moves
from danlu.core.types import Share
from danlu.models.decoder import Decoder, Layer
from danlu.models.experts import MoE, Router, Routes
from danlu.models.forward_values import from_forward

SumOverRanks = Callable[[Tensor], Tensor]
"""Sums a tensor over processes that have other tokens, in place."""

_LOSSES_AND_MORE = ("dropped", "entropy", "balance", "z")


@dataclass(frozen=True)
class Balancing:
    """The method that keeps experts evenly loaded, and its strength."""

    kind: Literal["bias", "sequence", "step", "none"] = "none"
    rate: float = 0.0
    """bias: the step of the biases in an update; step: the coefficient of its loss."""
    sequence: float = 0.0
    """The coefficient of the loss of each document."""
    z: float = 0.0
    """The coefficient of the z-loss."""
    capacity: float | None = None
    """How many times its even share of a pack's rows an expert takes at most; None: all of them."""


@dataclass(frozen=True)
class BatchTokens:
    """The tokens of a micro-batch as routers have to know them."""

    real: Tensor  # [T] bool; False: of no row, so neither counted nor in any loss
    documents: Tensor  # [T] int64, the number of each token's document
    document_lengths: Tensor  # [documents] float32, real tokens of each
    packs: Tensor  # [T] int64, the number of each token's pack
    pack_lengths: Tensor  # [packs] float64, real tokens of each
    factor: float  # the factor of sums over tokens as terms of the objective's total
    sum_over_documents: SumOverRanks | None = None
    """Sums over the processes that have other tokens of the same documents; None where there are none."""

    @classmethod
    def of(cls, real: Tensor, boundaries: Sequence[int], packs: Sequence[int], factor: float) -> BatchTokens:
        """Describes tokens in documents, and documents in packs.

        boundaries, packs: offsets into T, from 0 to T.
        """
        document, pack = _runs(boundaries, real), _runs(packs, real)
        lengths = torch.zeros(len(boundaries) - 1, device=real.device).index_add_(0, document, real.float())
        pack_lengths = torch.zeros(len(packs) - 1, dtype=torch.float64, device=real.device)
        return cls(real, document, lengths, pack, pack_lengths.index_add_(0, pack, real.double()), factor)

    def of_share(self, shares: Sequence[Share], index: int, sum_over_documents: SumOverRanks) -> BatchTokens:
        """Returns the same for the share of one context rank: documents count as whole ones, though other ranks have
        parts of them.

        The rows that fill the share up are one more document, with the number behind theirs.
        """
        lengths = Counter[int]()
        for run in itertools.chain.from_iterable(share.runs for share in shares):
            lengths[run.document] += run.tokens
        count = max(lengths, default=-1) + 1
        numbers = torch.tensor([*(run.document for run in shares[index].runs), count], device=self.real.device)
        whole = torch.tensor([*(lengths[number] for number in range(count)), 0.0], device=self.real.device)
        documents = numbers.index_select(0, self.documents)
        return replace(self, documents=documents, document_lengths=whole, sum_over_documents=sum_over_documents)

    def on(self, device: torch.device) -> BatchTokens:
        """The same on another device."""
        named: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in named.items():
            if isinstance(value, Tensor):
                named[name] = device_moves.move(value, device)
        return BatchTokens(**named)


def _runs(boundaries: Sequence[int], like: Tensor) -> Tensor:
    """[T] int64: the number of the run, of those between `boundaries`, that each place is in."""
    sizes = torch.tensor(boundaries, device=like.device).diff()
    return torch.repeat_interleave(sizes, output_size=len(like))


class Balancer:
    """Counts the load of all experts of a decoder in each step, and keeps it even.

    adds_gradient: whether this process adds the gradients of the losses. Every tensor rank has all tokens and the whole
    of these gradients, and a router's gradient is summed over them: so one of them adds it.
    """

    def __init__(self, model: Decoder, balancing: Balancing, *, adds_gradient: bool = True) -> None:
        self.balancing = balancing
        self.adds_gradient = adds_gradient
        self.tokens: BatchTokens | None = None
        """The tokens of the micro-batch that goes through the model; None: nothing is counted, and nothing added."""
        self._copies: dict[torch.device, BatchTokens] = {}
        """Copies of `_copied` on the devices of other layers, where a model is on several devices."""
        self._copied: BatchTokens | None = None
        self.layers: dict[str, LayerBalancer] = {}
        for name, layer in model.layers.items():
            assert isinstance(layer, Layer)
            if isinstance(layer.mlp, MoE):
                self.layers[name] = LayerBalancer(layer.mlp.router, self)
                layer.mlp.router.balancer = self.layers[name]
                layer.mlp.router.drops = balancing.capacity is not None

    @contextmanager
    def active(self, tokens: BatchTokens) -> Iterator[None]:
        """Counts and balances the tokens that go through the model in the context."""
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before

    def tokens_on(self, device: torch.device) -> BatchTokens | None:
        """`tokens` on the device of a layer, moved there when its first layer asks."""
        if self.tokens is None or self.tokens.real.device == device:
            return self.tokens
        if self._copied is not self.tokens:
            self._copied, self._copies = self.tokens, {}
        if device not in self._copies:
            self._copies[device] = self.tokens.on(device)
        return self._copies[device]

    def tensors(self) -> dict[str, Tensor]:
        """The state that the next step depends on, besides the model's parameters, by name, live."""
        if self.balancing.kind != "step":
            return {}
        return {f"router.load.{name}": layer.load for name, layer in self.layers.items()}

    @torch.no_grad()
    def end_step(self, sum_over_data: SumOverRanks) -> dict[str, float]:
        """Sums the counts over all processes, each of which calls this, and returns the metrics to log.

        By layer: `load`, the most rows of an expert over their mean; `entropy`, of a token's scores in nats, its mean;
        with a capacity `dropped`, the share of rows beyond it. Over all layers together the losses, without their
        coefficients.
        """
        if not self.layers:
            return {}
        of_layers = [layer.sums for layer in self.layers.values()]
        sums = sum_over_data(torch.cat([each.to(of_layers[0].device) for each in of_layers]))
        sizes = [len(each) for each in of_layers]
        for layer, part in zip(self.layers.values(), sums.split(sizes), strict=True):
            layer.end_step(part)
        metrics: dict[str, float] = {}
        balance = z = 0.0
        for (name, layer), part in zip(self.layers.items(), sums.cpu().split(sizes), strict=True):
            rows, others = part.split([layer.router.num_experts, len(_LOSSES_AND_MORE)])
            count = float(rows.sum())
            if not count:
                continue
            dropped, entropy, balance_of_layer, z_of_layer = others.tolist()
            tokens = count / layer.router.top_k
            metrics[f"router/{name}/load"] = float(rows.max() / rows.mean())
            metrics[f"router/{name}/entropy"] = entropy / tokens
            if self.balancing.capacity is not None:
                metrics[f"router/{name}/dropped"] = dropped / count
            balance, z = balance + balance_of_layer / tokens, z + z_of_layer / tokens
        if metrics and (self.balancing.kind == "step" or self.balancing.sequence):
            metrics["router/balance"] = balance
        if metrics and self.balancing.z:
            metrics["router/z"] = z
        return metrics

    def updated(self) -> None:
        """Moves biases by the counts of the step that has ended; called after an update that was made."""
        if self.balancing.kind == "bias":
            for layer in self.layers.values():
                layer.move_bias()


def merged_metrics(of_stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merges the metrics that `Balancer.end_step` returned on each stage of a pipeline into those of all layers."""
    merged: dict[str, float] = {}
    for metrics in of_stages:
        for name, value in metrics.items():
            merged[name] = merged.get(name, 0.0) + value  # the losses are sums over layers; all else is of one layer
    return merged


class LayerBalancer:
    """The part of one layer; the slot `balancer` of its router."""

    def __init__(self, router: Router, owner: Balancer) -> None:
        self.router, self.owner, self.balancing = router, owner, owner.balancing
        experts, device = router.num_experts, router.weight.device
        self.counts = torch.zeros(experts, dtype=torch.float64, device=device)
        """[E]: rows that were meant for each expert in the step that ended last, on all processes."""
        self.load = torch.ones(experts, device=device)
        """[E] float32: the same, divided by their mean; 1 before the first step."""
        self.sums = torch.zeros(experts + len(_LOSSES_AND_MORE), dtype=torch.float64, device=device)
        """The counts of this process in this step so far: rows of each expert, then `_LOSSES_AND_MORE`."""

    def __call__(self, logits: Tensor, routes: Routes) -> Routes:
        """The routes, with the losses' gradients in their weights, and without experts that are beyond their capacity.

        logits [T, E] float32.
        """
        tokens = self.owner.tokens_on(logits.device)
        if tokens is None:
            return routes
        shares = routes.scores / routes.scores.sum(-1, keepdim=True)  # [T, E]
        balance, z = self._balance_loss(shares, tokens), self._z_loss(logits, tokens)
        experts = routes.experts if self.balancing.capacity is None else self._within_capacity(routes.experts, tokens)
        if not is_recomputing():
            self._count(routes.experts, experts, shares.detach(), torch.stack((balance, z)).detach(), tokens)
        weights = routes.weights
        if self.owner.adds_gradient and torch.is_grad_enabled():
            coefficient = self.balancing.rate if self.balancing.kind == "step" else self.balancing.sequence
            weights = _WithLoss.apply(weights, (coefficient * balance + self.balancing.z * z) * tokens.factor)
        return Routes(experts, weights, routes.scores)

    def end_step(self, sums: Tensor) -> None:
        """Takes over `sums` over all processes, and resets the counts."""
        self.counts.copy_(sums[: len(self.counts)])
        if self.counts.any():  # not so in a step of which this layer saw nothing
            self.load.copy_(self.counts / self.counts.mean())
        self.sums.zero_()

    @torch.no_grad()
    def move_bias(self) -> None:
        assert self.router.correction is not None, "a recipe with biases has a family that keeps them"
        self.router.correction.add_(torch.sign(self.counts.mean() - self.counts), alpha=self.balancing.rate)

    def _balance_loss(self, shares: Tensor, tokens: BatchTokens) -> Tensor:
        """The sum over real tokens of f·P, for shares P [T, E]."""
        if self.balancing.kind == "step":
            f = self.load
        elif self.balancing.sequence:
            best = shares.detach().topk(self.router.top_k).indices  # eq. 18 knows neither corrections nor groups
            chosen = torch.zeros_like(shares).scatter_(1, best, 1.0).masked_fill_(~tokens.real.unsqueeze(1), 0.0)
            of_document = shares.new_zeros(len(tokens.document_lengths), shares.shape[1])
            of_document.index_add_(0, tokens.documents, chosen)
            if (sum_over_documents := tokens.sum_over_documents) is not None:
                own = of_document
                of_document = from_forward(lambda: sum_over_documents(own))
            even = tokens.document_lengths.clamp(min=1).unsqueeze(1) * self.router.top_k / shares.shape[1]
            f = (of_document / even).index_select(0, tokens.documents)
        else:
            return shares.new_zeros(())
        return (shares * f).sum(-1).masked_fill(~tokens.real, 0.0).sum()

    def _z_loss(self, logits: Tensor, tokens: BatchTokens) -> Tensor:
        if not self.balancing.z:
            return logits.new_zeros(())
        return logits.logsumexp(-1).square().masked_fill(~tokens.real, 0.0).sum()

    def _within_capacity(self, experts: Tensor, tokens: BatchTokens) -> Tensor:
        """experts [T, k], with E in the place of those that are full: an expert takes the first rows of a pack.

        Of a pack, so that neither micro-batches nor a layout decide which rows are left out.
        """
        assert self.balancing.capacity is not None
        top_k, count = experts.shape[1], self.router.num_experts
        limits = (self.balancing.capacity * top_k / count * tokens.pack_lengths).ceil().long()  # [packs]
        keys = (experts * len(limits) + tokens.packs.unsqueeze(1)).flatten()  # one of each expert and pack
        order = keys.argsort(stable=True)
        sizes = torch.bincount(keys, minlength=count * len(limits))
        before = torch.arange(len(keys), device=keys.device) - (sizes.cumsum(0) - sizes)[keys[order]]
        place = torch.empty_like(order).scatter_(0, order, before).view_as(experts)  # among the rows of its key
        return experts.masked_fill(place >= limits[tokens.packs].unsqueeze(1), count)

    def _count(self, chosen: Tensor, kept: Tensor, shares: Tensor, losses: Tensor, tokens: BatchTokens) -> None:
        count = self.router.num_experts
        real = tokens.real.unsqueeze(1).expand_as(chosen)
        self.sums[:count].index_add_(0, chosen.flatten(), real.flatten().double())
        dropped = ((kept == count) & real).sum()
        entropy = -torch.special.xlogy(shares, shares).sum(-1).masked_fill(~tokens.real, 0.0).sum()
        self.sums[count:] += torch.stack([dropped.double(), entropy.double(), *losses.double()])


def is_recomputing() -> bool:
    """Whether this forward pass runs within a backward pass: it has been made, and counted, before."""
    return torch._C._current_graph_task_id() != -1


class _WithLoss(torch.autograd.Function):
    """Returns x as it is; in the backward pass `loss`, a scalar, gets the gradient 1, like a term of the minimised
    loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad.new_ones(())
