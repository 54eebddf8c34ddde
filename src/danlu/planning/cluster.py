"""The machines that a run is planned for: cards, nodes and the links between ranks. Importing this imports no torch.

A cluster is named in short (`16x8xH100-80G`: nodes, cards of each, kind), or in a file:

    cards: {kind: H100-80G, nodes: 16, each: 8, price: 2.5}
    links: [{ranks: 8, gb_s: 450, us: 5}, {ranks: all, gb_s: 50, us: 20}]

Of a kind that is not in the table (`cards.py`) the file gives memory, bandwidth and peaks itself. Ranks are numbered
node by node.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from danlu.core.errors import RecipeError
from danlu.core.machine import total_memory_bytes
from danlu.core.small_files import read_small_text
from danlu.core.spelling import did_you_mean
from danlu.planning.cards import PRECISIONS, Card, card_of_device, find_card, nvidia_devices
from danlu.recipe.yaml_reader import MAX_BYTES, parse
from danlu.recipe.yaml_tree import Node, Problem

if TYPE_CHECKING:
    from danlu.planning.machine_profile import MachineProfile

# Seconds until the first byte of a collective has arrived, of links that a name stands for; a file gives its own.
NVLINK_LATENCY_S, PCIE_LATENCY_S, NETWORK_LATENCY_S = 5e-6, 10e-6, 20e-6
_MOST_RANKS = 1 << 20
_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Link(NamedTuple):
    """A connection between groups of neighbouring ranks: 0 to N-1, N to 2N-1 and so on."""

    ranks: int | None
    """N, the size of the groups; None: all ranks are one group."""
    bytes_per_s: float
    """The bytes that each rank sends in a second, in one direction, while all of its group send."""
    latency_s: float

    def connects(self, first: int, last: int) -> bool:
        """Whether two ranks are in one group."""
        return self.ranks is None or first // self.ranks == last // self.ranks


NO_LINK = Link(1, math.inf, 0.0)
"""The link of a group of one rank, which sends nothing."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal cards, one rank on each card, and the links between them."""

    card: Card
    nodes: int
    cards_per_node: int
    links: tuple[Link, ...]
    """Links from the smallest groups to the largest; none where they are not known, as of an unmeasured CPU."""
    price_per_card_hour: float | None = None
    host_memory_bytes: int | None = None
    """The memory of each node, outside of its cards."""

    @property
    def ranks(self) -> int:
        """The cards of all nodes."""
        return self.nodes * self.cards_per_node

    def link_between(self, ranks: Sequence[int]) -> Link:
        """Returns the slowest link that a group of ranks needs: that of the smallest groups that have all of them.

        A range takes as long as two ranks. Raises RecipeError where the links are not known.
        """
        if isinstance(ranks, range):
            first, last = ranks[0], ranks[-1]
            return self.link_across(first, last) if first <= last else self.link_across(last, first)
        return self.link_across(min(ranks), max(ranks))

    def link_across(self, first: int, last: int) -> Link:
        """Returns the link of a group by its smallest and its largest rank. Raises RecipeError as `link_between`."""
        assert 0 <= first <= last < self.ranks, f"ranks {first} to {last} of a cluster with {self.ranks}"
        if first == last:
            return NO_LINK
        slowest = next((link for link in self.links if link.connects(first, last)), None)
        if slowest is None:
            raise RecipeError(
                f"the links between the {self.ranks} ranks of {self.card.name} are not known. Run danlu bench machine "
                f"--processes {self.ranks}, or name a cluster with --on"
            )
        return slowest

    @classmethod
    def of_card(cls, card: Card, nodes: int = 1, cards_per_node: int = 1) -> Cluster:
        """A cluster with the links of the maker's own systems: NVLink or PCI Express in a node, a network between."""
        links = []
        connected = card.nvlink_ranks or cards_per_node
        if not card.nvlink_spans_nodes:
            connected = min(connected, cards_per_node)
        smaller, larger = sorted((connected, cards_per_node))
        # Bridges between pairs do not count in nodes of three cards: a group of neighbours would cut a pair.
        if card.nvlink is None or connected == 1 or larger % smaller:
            connected = 1
        else:
            links.append(Link(connected, card.nvlink, NVLINK_LATENCY_S))
        if connected < cards_per_node:
            links.append(Link(cards_per_node, card.pcie, PCIE_LATENCY_S))
        links.append(Link(None, card.network, NETWORK_LATENCY_S))
        return cls(card, nodes, cards_per_node, _all_in_last(links, nodes * cards_per_node))

    @classmethod
    def parse(cls, text: str, source: str = "--on") -> Cluster:
        """Reads `16x8xH100-80G` (nodes, cards of each, kind), `8xA100-80G` (one node) or `H100-80G` (one card).

        source: the place of the text in messages. Raises RecipeError.
        """
        match = re.fullmatch(r"(?:(?P<nodes>\d+)x)?(?:(?P<each>\d+)x)?(?P<kind>[^\W\d].*)", text.strip())
        if match is None:
            raise RecipeError(
                f"{source} {text!r}: no cluster. Write nodes, cards of each node and their kind, as 16x8xH100-80G, or "
                "name a file that ends in .yaml"
            )
        counts = [int(count) for count in (match["nodes"], match["each"]) if count is not None]
        problem = _problem_of_counts(counts)
        card = find_card(match["kind"])
        problems = ([problem] if problem else []) + ([card] if isinstance(card, str) else [])
        if problems or isinstance(card, str):
            raise RecipeError([f"{source} {text!r}: {problem}" for problem in problems])
        return cls.of_card(card, *[1, 1, *counts][-2:])

    @classmethod
    def read(cls, file: Path | str) -> Cluster:
        """Reads a cluster from a YAML file. Raises RecipeError with file and line for all that is wrong in it."""
        try:
            text = read_small_text(Path(file), MAX_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"--on {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        problems: list[Problem] = []
        tree = parse(text, str(file), problems)
        cluster = None if tree is None else _ClusterReader(problems).cluster(tree)
        if problems or cluster is None:
            raise RecipeError([problem.line(str(file)) for problem in problems])
        return cluster

    @classmethod
    def of(cls, text: str) -> Cluster:
        """Reads a cluster as `--on` gives it: a file that ends in .yaml, .yml or .json, else a name."""
        return cls.read(text) if re.search(r"\.(ya?ml|json)$", text) else cls.parse(text)

    @classmethod
    def here(cls, profile: MachineProfile | None = None, ranks: int | None = None) -> Cluster:
        """This machine: its GPUs, or its processors and their memory shared among ranks.

        profile: gives measured bandwidth, peaks and links; without it those of a CPU are not known. ranks: processes;
        None: as many as the profile has, else one for each GPU, and one on a CPU. torch is not imported: nvidia-smi
        names the GPUs.
        """
        host = total_memory_bytes()
        ranks = ranks or (profile.machine.processes if profile is not None else None)
        if devices := [] if profile is not None and profile.machine.device == "cpu" else nvidia_devices():
            name, memory = min(devices, key=lambda device: device[1])  # of unequal ones the least decides
            known = card_of_device(name) or Card(name, memory, None, {})
            cluster = cls.of_card(replace(known, memory_bytes=memory), 1, ranks or len(devices))
            cluster = replace(cluster, host_memory_bytes=host)
        else:
            count = ranks or 1
            cluster = cls(Card("CPU", host // count, None, {}), 1, count, (), None, host)
        return cluster if profile is None else _measured(cluster, profile)


def _measured(cluster: Cluster, profile: MachineProfile) -> Cluster:
    """The cluster with the bandwidth, peaks and links of a profile."""
    peaks = {**cluster.card.peaks, **profile.peaks()}
    card = replace(cluster.card, name=profile.machine.processor, bandwidth=profile.bandwidth(), peaks=peaks)
    link = profile.link()
    return replace(cluster, card=card, links=cluster.links if link is None else (Link(None, *link),))


def _all_in_last(links: Sequence[Link], ranks: int) -> tuple[Link, ...]:
    """The links without those that a smaller cluster does not need; the last one connects all ranks."""
    needed = []
    for link in links:
        is_last = link.ranks is None or link.ranks >= ranks
        needed.append(link._replace(ranks=None) if is_last else link)
        if is_last:
            break
    return tuple(needed)


def _problem_of_counts(counts: Iterable[int]) -> str | None:
    counts = list(counts)
    if 0 in counts:
        return "0 nodes or cards, and a run needs 1 at least"
    if math.prod(counts) > _MOST_RANKS:
        return f"more than {_MOST_RANKS:,} cards"
    return None


class _ClusterReader:
    """Reads the tree of a cluster file, and collects its problems."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def cluster(self, tree: Node) -> Cluster | None:
        """The cluster; None where problems leave none."""
        sections = self.mapping(tree, "", ("cards", "links"))
        if sections is not None and "cards" not in sections:
            self.problems.append(Problem("cards", "missing: the kind and the number of the cards", tree.origin))
        if not sections or "cards" not in sections:
            return None
        keys = ("kind", "nodes", "each", "price", "peak", "memory", "bandwidth", "host_memory")
        cards = self.mapping(sections["cards"], "cards", keys)
        if cards is None:
            return None
        counts = [self.count(cards.get(key), f"cards.{key}") for key in ("nodes", "each")]
        if (problem := _problem_of_counts(counts)) is not None:
            self.problems.append(Problem("cards", problem, sections["cards"].origin))
        card = self.card(cards, sections["cards"])
        price = self.number(cards.get("price"), "cards.price", "dollars for an hour of one card", least=0)
        host = self.size(cards.get("host_memory"), "cards.host_memory")
        links = self.links(sections["links"], math.prod(counts)) if "links" in sections else None
        if self.problems or card is None:
            return None
        cluster = Cluster.of_card(card, *counts)
        return replace(
            cluster, price_per_card_hour=price, host_memory_bytes=host, links=cluster.links if links is None else links
        )

    def card(self, entries: Mapping[str, Node], cards: Node) -> Card | None:
        """The card of a kind, with what the file says itself in place of the table's figures."""
        known: Card | str | None = None
        if (kind := entries.get("kind")) is not None:
            known = find_card(str(kind.value))
            if isinstance(known, str) and "memory" not in entries:
                hint = " Or give its memory, bandwidth and peak by hand"
                self.problems.append(Problem("cards.kind", f"{known}.{hint}", kind.origin))
                return None
        memory = self.size(entries.get("memory"), "cards.memory")
        bandwidth = self.number(entries.get("bandwidth"), "cards.bandwidth", "GB/s")
        peaks = self.peaks(entries["peak"]) if "peak" in entries else {}
        if not isinstance(known, Card):
            for key in ("memory", "bandwidth", "peak"):
                if key not in entries:
                    message = "missing: cards that the table does not have need memory, bandwidth and peak by hand"
                    self.problems.append(Problem(f"cards.{key}", message, cards.origin))
            name = "cards" if kind is None else str(kind.value)
            return Card(name, memory or 0, bandwidth and bandwidth * 1e9, peaks)
        changes: dict[str, Any] = {"peaks": {**known.peaks, **peaks}}
        if memory is not None:
            changes["memory_bytes"] = memory
        if bandwidth is not None:
            changes["bandwidth"] = bandwidth * 1e9
        return replace(known, **changes)

    def peaks(self, node: Node) -> dict[str, float]:
        """Peaks in FLOP/s: a mapping by type, or one number in TFLOP/s for bf16 and fp16."""
        if not isinstance(node.value, dict):
            number = self.number(node, "cards.peak", "TFLOP/s, or a mapping of types to them")
            return {} if number is None else {"bf16": number * 1e12, "fp16": number * 1e12}
        entries = self.mapping(node, "cards.peak", PRECISIONS) or {}
        numbers = {name: self.number(entry, f"cards.peak.{name}", "TFLOP/s") for name, entry in entries.items()}
        return {name: number * 1e12 for name, number in numbers.items() if number is not None}

    def links(self, node: Node, ranks: int) -> tuple[Link, ...]:
        """The links of a list, from the smallest groups to the largest."""
        if not isinstance(node.value, list) or not node.value:
            self.problems.append(Problem("links", "no list of links, as [{ranks: all, gb_s: 50, us: 20}]", node.origin))
            return ()
        links: list[tuple[Link, Node]] = []
        for index, entry in enumerate(node.value):
            key = f"links.{index}"
            fields = self.mapping(entry, key, ("ranks", "gb_s", "us"))
            if fields is None:
                continue
            for missing in [name for name in ("ranks", "gb_s", "us") if name not in fields]:
                self.problems.append(Problem(f"{key}.{missing}", "missing", entry.origin))
            group = fields.get("ranks")
            count = None if group is None or group.value == "all" else self.count(group, f"{key}.ranks", " or all")
            rate = self.number(fields.get("gb_s"), f"{key}.gb_s", "GB/s that each rank sends in one direction")
            latency = self.number(fields.get("us"), f"{key}.us", "microseconds", least=0)
            links.append((Link(count, (rate or 0) * 1e9, (latency or 0) / 1e6), entry))
        if not self.problems:
            self.check_nested(links, ranks, node)
        return _all_in_last(sorted((link for link, _ in links), key=_group_size), ranks)

    def check_nested(self, links: Sequence[tuple[Link, Node]], ranks: int, node: Node) -> None:
        """Adds a problem where groups are of one size, cut each other, or leave ranks without a link."""
        ordered = sorted(links, key=lambda pair: _group_size(pair[0]))
        for (smaller, _), (larger, entry) in itertools.pairwise(ordered):
            if smaller.ranks == larger.ranks:
                named = "all" if larger.ranks is None else larger.ranks
                self.problems.append(Problem("links", f"two links of {named} ranks. Keep one", entry.origin))
            elif larger.ranks is not None and larger.ranks % (smaller.ranks or 1):
                message = f"groups of {larger.ranks} ranks cut groups of {smaller.ranks}: take a multiple"
                self.problems.append(Problem("links", message, entry.origin))
        if ordered and _group_size(ordered[-1][0]) < ranks:
            message = f"no link connects all {ranks} ranks. Add {{ranks: all, gb_s: ..., us: ...}}"
            self.problems.append(Problem("links", message, node.origin))

    def mapping(self, node: Node, key: str, known: Sequence[str]) -> dict[str, Node] | None:
        """The entries of a mapping with known keys; None where it is none."""
        if not isinstance(node.value, dict):
            wanted = f"no mapping. It has the keys {', '.join(known)}"
            self.problems.append(Problem(key, wanted, node.origin))
            return None
        for name, entry in node.value.items():
            if name not in known:
                message = f"unknown key.{did_you_mean(name, list(known))} There are {', '.join(known)}"
                self.problems.append(Problem(f"{key}.{name}".lstrip("."), message, entry.key_origin or entry.origin))
        return {name: entry for name, entry in node.value.items() if name in known}

    def count(self, node: Node | None, key: str, also: str = "") -> int:
        """A whole number from 1 up; 1 where there is none."""
        if node is None:
            return 1
        if isinstance(node.value, bool) or not isinstance(node.value, int) or not 1 <= node.value <= _MOST_RANKS:
            message = f"{node.plain!r} is no whole number from 1 to {_MOST_RANKS:,}{also}"
            self.problems.append(Problem(key, message, node.origin))
            return 1
        return node.value

    def number(self, node: Node | None, key: str, unit: str, least: float | None = None) -> float | None:
        """A number above 0, or from `least` up; None where there is none."""
        if node is None:
            return None
        value = node.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (value > 0 if least is None else value >= least):  # type: ignore[operator]
            bound = "above 0" if least is None else f"from {least:g} up"
            self.problems.append(Problem(key, f"{node.plain!r} is no number {bound}: {unit}", node.origin))
            return None
        return float(value)  # type: ignore[arg-type]

    def size(self, node: Node | None, key: str) -> int | None:
        """Bytes, of a text with a unit such as 80GB or 79.2GiB; None where there is none."""
        if node is None:
            return None
        try:
            return parse_bytes(str(node.value))
        except ValueError as error:
            self.problems.append(Problem(key, str(error), node.origin))
            return None


def _group_size(link: Link) -> float:
    return math.inf if link.ranks is None else link.ranks


def parse_bytes(text: str) -> int:
    """`80GB` -> 80,000,000,000 and `79.2GiB` -> 85,040,350,003. Raises ValueError for what has no such form."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]i?B)", text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no size. Write a number above 0 with its unit, as 80GB or 79.2GiB")
    return round(float(match[1]) * _UNITS[match[2]])
