"""Divergences from teachers, and the objective of distillation: these, and the rows' own tokens.

N targets · D policy's width · D' teacher's width
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from danlu.core.types import Batch, DivergenceKind, Loss, Metric, Outputs, Role, Totals
from danlu.objectives.cross_entropy import losses_by_source


@dataclass(frozen=True)
class TeacherTerm:
    """The term of one teacher in the divergence."""

    role: Role
    share: float = 1.0  # of the divergence; those of all teachers add up to 1
    top_k: int | None = None  # its likeliest tokens and all others as one; None: its whole distribution


@dataclass(frozen=True)
class TeacherDivergence:
    """How far the policy is from its teachers at each target's place: the mean of the divergences by their shares."""

    teachers: Sequence[TeacherTerm]
    kind: DivergenceKind = "forward"
    beta: float = 0.5
    temperature: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Divergences, and of teachers with a top_k their likeliest tokens."""
        chosen = {"top_tokens"} if any(teacher.top_k is not None for teacher in self.teachers) else set()
        return frozenset({"divergence"} | chosen)

    @property
    def roles(self) -> frozenset[Role]:
        """The teachers."""
        return frozenset(teacher.role for teacher in self.teachers)

    def __call__(self, outputs: Mapping[Role, Outputs]) -> Tensor:
        """[N] float32, nats, times temperature^2 (see `objectives.divergence`); carries the policy's gradient."""
        values = [teacher.share * self._from(teacher, outputs) for teacher in self.teachers]
        return torch.stack(values).sum(0)

    def _from(self, teacher: TeacherTerm, outputs: Mapping[Role, Outputs]) -> Tensor:
        return outputs["policy"].divergence(
            outputs[teacher.role], kind=self.kind, beta=self.beta, temperature=self.temperature, top_k=teacher.top_k
        )


@dataclass(frozen=True)
class Distillation:
    """alpha x cross-entropy + (1 - alpha) x divergence from the teachers (arXiv:1503.02531, section 2), over targets.

    Each target is weighed as in fine-tuning. The metrics are `divergence`, and `accuracy` and `nll` of the rows' own
    tokens.
    """

    divergence: TeacherDivergence
    alpha: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        """The cross-entropy also where alpha is 0, for the metrics."""
        return self.divergence.needs | {"cross_entropy"}

    def without_extras(self) -> Distillation:
        """The same without label smoothing and z-loss, for held-out rows."""
        return replace(self, label_smoothing=0.0, z_loss=0.0)

    def __call__(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the policy's outputs for `batch`; `totals` are not needed, for every target is a term."""
        policy = outputs["policy"]
        with nullcontext() if self.alpha else torch.no_grad():
            likelihood = policy.cross_entropy(
                label_smoothing=self.label_smoothing, z_loss=self.z_loss, by_target=batch.target_sources is not None
            )
        divergence = (self.divergence(outputs) * batch.weights).sum()
        total = divergence if not self.alpha else self.alpha * likelihood.total + (1 - self.alpha) * divergence
        return Loss(
            total,
            {
                "accuracy": Metric(likelihood.correct, batch.weight),
                "nll": Metric(likelihood.nll, batch.weight),
                "divergence": Metric(divergence.detach(), batch.weight),
                **losses_by_source(likelihood.by_target, batch),
            },
        )


class HiddenStateDistillation(nn.Module):
    """`Distillation` plus the mean squared error between hidden states (arXiv:1909.10351, equation 8).

    At each target's place, the mean over D' of (W h - h')^2, with h of the policy, h' of a teacher and W [D', D] a map
    of its own for each teacher, which is trained; weighed like a target, and over teachers by their shares.
    """

    def __init__(
        self, distillation: Distillation, weight: float, policy_width: int, widths: Mapping[Role, int]
    ) -> None:
        """policy_width: D. widths: D' of each teacher."""
        super().__init__()
        self.distillation, self.weight = distillation, weight
        # A module's name has no dots.
        maps = {role.replace(".", "_"): nn.Linear(policy_width, width, bias=False) for role, width in widths.items()}
        self.projections = nn.ModuleDict(maps)

    @property
    def needs(self) -> frozenset[str]:
        """The model outputs that the divergence reads, and hidden states."""
        return self.distillation.needs | {"hidden"}

    def forward(self, outputs: Mapping[Role, Outputs], batch: Batch, totals: Totals) -> Loss:
        """The loss of the policy's outputs for `batch`."""
        loss = self.distillation(outputs, batch, totals)
        own = outputs["policy"].hidden().index_select(0, batch.logits_indices).float()  # [N, D]
        teachers = self.distillation.divergence.teachers
        errors = [self._error(own, outputs[teacher.role], teacher, batch) for teacher in teachers]
        error = torch.stack(errors).sum()
        return Loss(loss.total + self.weight * error, {**loss.metrics, "hidden": Metric(error.detach(), batch.weight)})

    def _error(self, own: Tensor, outputs: Outputs, teacher: TeacherTerm, batch: Batch) -> Tensor:
        """The teacher's share of the weighted sum over targets: a scalar."""
        wanted = outputs.hidden().index_select(0, batch.logits_indices).float()  # [N, D']
        mapped = self.projections[teacher.role.replace(".", "_")](own)
        return teacher.share * ((mapped - wanted).square().mean(1) * batch.weights).sum()
