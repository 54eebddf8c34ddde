"""Outputs of a decoder for the targets of a micro-batch, each computed when an objective asks for it.

T packed tokens · N trained targets · D model width · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.device_moves import copy_to
from danlu.core.types import Batch, DivergenceKind, Outputs, TargetLosses, TokenLogprobs, TopTokens
from danlu.models.decoder import Decoder
from danlu.objectives.gradient_scale import unscale_gradient
from danlu.objectives.linear_cross_entropy import linear_cross_entropy
from danlu.objectives.vocab_slices import EXACT_SLICE_ROWS

if TYPE_CHECKING:
    from danlu.objectives.divergence import Head

OFFERED = frozenset({"cross_entropy", "divergence", "hidden", "logprobs", "top_tokens"})
OFFERED_BY_HEAD = frozenset({"scores", "values"})
"""Outputs that a decoder also offers where the objective (`types.HeadObjective`) or its folder has a head of a few
labels."""


@dataclass(frozen=True)
class DecoderOutputs:
    """The `Outputs` of a decoder: its last hidden states, with the head applied as an objective needs it."""

    model: Decoder
    last_hidden: Tensor  # [T', D]: T tokens, then those that fill the batch up to its size
    batch: Batch  # filled up: T' tokens, N' targets of which the last ones have weight 0
    tokens: int  # T
    targets: int  # N
    gradient_scale: float = 1.0
    """Factor of gradients before they are rounded to the type of activations: see `scale_gradient`."""
    head: Tensor | None = None  # [V, D]; None: the model's, as it is when it is used

    score_head: nn.Linear | None = None  # [labels, D]: what `scores` and `values` apply to hidden states
    exact: bool = False
    """Whether log-probabilities have the bits that a sampler records: the head in slices that do not follow N."""

    def with_head(self, head: Tensor) -> DecoderOutputs:
        """The same with an output matrix [V, D] that the model may have another of by the time it is used."""
        return replace(self, head=head)

    def cross_entropy(
        self, *, label_smoothing: float = 0.0, z_loss: float = 0.0, by_target: bool = False
    ) -> TargetLosses:
        """The fused head and cross-entropy; `by_target` has the N' targets of the filled-up batch."""
        losses = linear_cross_entropy(
            self._hidden_of_targets(),
            self._head(),
            self.batch.targets,
            self.batch.weights,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            gradient_scale=self.gradient_scale,
            by_target=by_target,
            **self._head_options(),
        )
        # The fused operation has the scale in its gradient already.
        total = unscale_gradient(losses.total, self.gradient_scale)
        return TargetLosses(total, losses.nll, losses.correct, losses.by_target)

    def logprobs(
        self,
        *,
        temperature: float = 1.0,
        support: Tensor | None = None,
        entropy: bool = False,
        collision: bool = False,
    ) -> TokenLogprobs:
        """Computes the log-probability [N] of each target; the entropy and collision on request: see
        `token_logprobs`."""
        from danlu.objectives.token_logprobs import token_logprobs

        padding = (0, 0, 0, len(self.batch.targets) - self.targets)
        everything = token_logprobs(
            self._hidden_of_targets(),
            self._head(),
            self.batch.targets,
            temperature=temperature,
            support=None if support is None else F.pad(support, padding, value=-1),
            entropy=entropy,
            collision=collision,
            slice_rows=EXACT_SLICE_ROWS if self.exact else None,
            **self._head_options(),
        )
        values = (everything.logprobs, everything.entropy, everything.collision)
        return TokenLogprobs(*(None if each is None else each[: self.targets] for each in values))  # type: ignore[arg-type]

    def divergence(
        self,
        teacher: Outputs,
        *,
        kind: DivergenceKind,
        beta: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor:
        """Computes the divergence of this model's distribution at each target's place from a teacher's: [N], see
        `divergence`.

        With `top_k` the outcomes are the teacher's likeliest tokens and all others as one; else every token that both
        models have. An embedding may be padded with rows that stand for no token, so one of them may have more.
        """
        from danlu.objectives.divergence import categorical_divergence, divergence
        from danlu.objectives.top_tokens import logprobs_of_tokens

        shard = self.model.vocab_shard
        group = None if shard is None else shard.group
        if top_k is None:
            assert isinstance(teacher, DecoderOutputs), "a teacher without a top_k is a decoder"
            rows = min(len(self._head()), len(teacher._head()))
            policy, teachers = self._logits(rows), teacher._logits(rows)
            values = divergence(policy, teachers, kind=kind, beta=beta, temperature=temperature, tensor_group=group)
            return values[: self.targets]
        chosen = teacher.top_tokens(top_k, temperature=temperature, vocab_size=self.model.config.vocab_size)
        logprobs = logprobs_of_tokens(
            self._logits(),
            F.pad(chosen.ids, (0, 0, 0, len(self.batch.targets) - self.targets)),  # [N', K]
            temperature=temperature,
            tensor_group=group,
            vocab_start=0 if shard is None else shard.start,
        )[: self.targets]
        return categorical_divergence(logprobs, chosen.logprobs, kind=kind, beta=beta) * temperature**2

    def top_tokens(self, k: int, *, temperature: float = 1.0, vocab_size: int | None = None) -> TopTokens:
        """The k likeliest tokens [N, k] at each target's place, of those below `vocab_size`, and all others as one."""
        from danlu.objectives.top_tokens import top_tokens

        shard, rows = self.model.vocab_shard, len(self._head())
        everything = top_tokens(
            self._logits(rows if vocab_size is None or shard is not None else min(rows, vocab_size)),
            k,
            temperature=temperature,
            tensor_group=None if shard is None else shard.group,
            vocab_start=0 if shard is None else shard.start,
        )
        return TopTokens(everything.ids[: self.targets], everything.logprobs[: self.targets])

    def scores(self) -> Tensor:
        """Applies the score head to the last token of each branch: [M] float32, or [M, labels] with several labels.

        Where there are no trees each document is one branch. The token is the branch's own last one, whatever follows
        it in the batch: the other answer, or padding. Where context ranks share branches, all have the scores that each
        computes of its own tokens.
        """
        if (shared := self.batch.shared_branches) is not None:
            own = shared.last_tokens.ge(0).nonzero().squeeze(1)
            device = self.last_hidden.device
            scores = self._head_at(copy_to(shared.last_tokens[own], device))
            of_all = scores.new_zeros(len(shared.last_tokens), *scores.shape[1:])
            return shared.all_reduce(of_all.index_copy(0, copy_to(own, device), scores))
        stops = [branch.stop for branch in self.batch.trees] or self.batch.boundaries[1:]
        last = torch.tensor([stop - 1 for stop in stops if stop <= self.tokens])  # [M], made of what the host knows
        return self._head_at(copy_to(last, self.last_hidden.device))

    def values(self) -> Tensor:
        """Applies the head to the place that each target is predicted from: [N] float32, or [N, labels]."""
        return self._head_at(self.batch.logits_indices[: self.targets])

    def hidden(self) -> Tensor:
        """The last hidden states [T, D], in the type of activations, the same on every tensor rank.

        An objective computes with them on each tensor rank, while the decoder expects of each rank a term of the
        gradient; so only the first rank's gradient goes back.
        """
        shard = self.model.vocab_shard
        hidden = self.last_hidden[: self.tokens]
        if shard is None:
            return hidden
        replicated: Tensor = _GradientOfOneRank.apply(hidden, shard.start == 0)
        return replicated

    def _head_at(self, places: Tensor) -> Tensor:
        assert self.score_head is not None, "`scores` and `values` are offered where there is a head"
        hidden = self.hidden().index_select(0, places)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        labels: Tensor = self.score_head(wide)  # [places, labels]
        return labels.squeeze(1) if labels.shape[1] == 1 else labels

    def _hidden_of_targets(self) -> Tensor:
        return self.model.head_input(self.last_hidden.index_select(0, self.batch.logits_indices))  # [N', D]

    def _head(self) -> Tensor:
        return self.model.head_weight if self.head is None else self.head

    def _logits(self, rows: int | None = None) -> Head:
        """The factors of the N' targets' logits: hidden states and head weight, of all tokens or those of the first
        rows."""
        from danlu.objectives.divergence import Head

        weight = self._head()
        weight = weight if rows is None or rows == len(weight) else weight[:rows]
        return Head(self._hidden_of_targets(), weight, self.model.config.final_softcap)

    def _head_options(self) -> dict[str, Any]:
        """Keyword arguments for this model's head, which both operations take."""
        config, shard = self.model.config, self.model.vocab_shard
        return {
            "softcap": config.final_softcap,
            "tensor_group": None if shard is None else shard.group,
            "vocab_start": 0 if shard is None else shard.start,
            "vocab_size": config.vocab_size,
        }


class _GradientOfOneRank(torch.autograd.Function):
    """The identity; its gradient counts on one rank and is 0 on the others, where a sum over the ranks follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient if ctx.counts else torch.zeros_like(gradient), None
