"""Several models trained in one run: the role of each parameter, and the roles that are frozen while others learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from danlu.core.types import Role
from danlu.optim.gradients import HasGradient

NORM = "grad_norm"
"""`grad_norm/ROLE` is the norm of the gradient of one of several models."""


@dataclass(frozen=True)
class RoleGradients:
    """The holders of a step's gradients."""

    updated: Mapping[Role, Sequence[HasGradient]]
    """Holders by the role of their model, sorted."""
    frozen: Sequence[HasGradient]
    """Holders of models that are not updated in this step."""

    def drop_frozen(self) -> None:
        """Takes the gradients of models that are frozen away: they are neither clipped nor used."""
        for holder in self.frozen:
            holder.grad = None


@dataclass(frozen=True)
class TrainedRoles:
    """The models of a run that trains several, by role: the gradient of each is clipped by itself.

    role_of: from the name of a parameter. roles: those that are there also where this process, a stage of a pipeline,
    has nothing that is trained of them. frozen: of a role the first steps in which its model is not updated.
    """

    role_of: Callable[[str], Role]
    frozen: Mapping[Role, int] = field(default_factory=dict)
    roles: Sequence[Role] = ()

    def gradients(self, holders: Iterable[tuple[str, HasGradient]], step: int) -> RoleGradients:
        """Sorts `holders`, with the names of their parameters, by their roles in a step."""
        by_role: dict[Role, list[HasGradient]] = {role: [] for role in self.roles}
        for name, holder in holders:
            by_role.setdefault(self.role_of(name), []).append(holder)
        frozen = [role for role in by_role if step <= self.frozen.get(role, 0)]
        return RoleGradients(
            {role: by_role[role] for role in sorted(by_role) if role not in frozen},
            [holder for role in frozen for holder in by_role[role]],
        )
