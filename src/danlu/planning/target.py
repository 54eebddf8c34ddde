"""The machine that a plan is for: a cluster by its figures, or this machine as it was measured. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from danlu.planning.batch_shape import Kernels
from danlu.planning.cluster import Cluster
from danlu.planning.device_map import Device
from danlu.planning.machine_profile import MachineProfile
from danlu.planning.speeds import COMPILED_PASSES, CardSpeeds, ProfileSpeeds, Speeds

HOST_SHARE = 2
"""The memory of a node outside of its cards over that of its cards, where a cluster does not say it: of NVIDIA's DGX
systems from V100 to H100 it is 2 to 3.2."""
CPU = "CPU"
"""The name of a card that is a CPU's processors (`Cluster.here`)."""


@dataclass(frozen=True)
class Target:
    """The ranks that a plan is for."""

    cluster: Cluster
    profile: MachineProfile | None = None
    """Measured speeds; None: those of the cluster's cards."""
    free_bytes: int | None = None
    """Bytes of a rank's memory that nothing else takes when the run begins; None: all of its card's."""
    devices: tuple[Device, ...] = ()
    """The devices that `parallel.device_map` deals the layers of one process to."""
    own_kernels: Kernels | None = None
    """The attention kernels that torch has here; None: the usual ones."""

    def room_bytes(self, device: str = "") -> int:
        """Bytes that a rank may take, or one device of a device map; 0 where they are not known."""
        whole, free = self.cluster.card.memory_bytes, self.free_bytes
        if device:
            free = next(each.free_bytes for each in self.devices if each.name == device)
            return whole if free is None else free
        return whole if free is None else min(whole, free)

    @property
    def host_room_bytes(self) -> int:
        """Bytes of the host's memory for each rank of a node."""
        cluster = self.cluster
        if cluster.host_memory_bytes is not None:
            return cluster.host_memory_bytes // cluster.cards_per_node
        return HOST_SHARE * cluster.card.memory_bytes

    @property
    def device_type(self) -> str:
        """ "cpu" or "cuda"."""
        if self.profile is not None:
            return self.profile.machine.device
        return "cpu" if self.cluster.card.name == CPU else "cuda"

    @property
    def kernels(self) -> Kernels:
        """The attention kernels of its devices."""
        if self.own_kernels is not None:
            return self.own_kernels
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
