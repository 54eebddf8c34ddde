"""The machine that a plan is for: a cluster by its figures, or this machine as it was measured. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from danlu.planning.batch_shape import Kernels
from danlu.planning.cluster import Cluster
from danlu.planning.machine_profile import MachineProfile
from danlu.planning.speeds import COMPILED_PASSES, CardSpeeds, ProfileSpeeds, Speeds

CPU = "CPU"
"""The name of a card that is a CPU's processors (`Cluster.here`)."""


@dataclass(frozen=True)
class Target:
    """The ranks that a plan is for."""

    cluster: Cluster
    profile: MachineProfile | None = None
    """Measured speeds; None: those of the cluster's cards."""

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        if self.profile is not None:
            return self.profile.machine.device
        return "cpu" if self.cluster.card.name == CPU else "cuda"

    @property
    def kernels(self) -> Kernels:
        """The attention kernels of its devices."""
        return "cpu" if self.device_type == "cpu" else "flash"

    @cached_property
    def speeds(self) -> Speeds | None:
        """The speeds of its devices; None where nothing is known, as of a CPU that was not measured."""
        if self.profile is not None:
            return ProfileSpeeds(self.profile)
        return None if self.cluster.card.bandwidth is None else CardSpeeds(self.cluster.card)

    def training_speeds(self, *, compiled: bool) -> Speeds | None:
        """The speeds of training steps. compiled: whether a card's operators are (`compile`); those that were measured
        are not."""
        speeds = self.speeds
        if not compiled or not isinstance(speeds, CardSpeeds):
            return speeds
        return replace(speeds, efficiency=replace(speeds.efficiency, passes=COMPILED_PASSES))

    @property
    def links(self) -> Cluster | MachineProfile:
        """Where the seconds of collectives are known from."""
        if self.profile is not None and self.profile.machine.processes > 1:
            return self.profile
        return self.cluster

    @property
    def known_links(self) -> Cluster | MachineProfile | None:
        """The same; None where several ranks have links of which nothing is known."""
        links = self.links
        is_known = isinstance(links, MachineProfile) or links.ranks == 1 or bool(links.links)
        return links if is_known else None
