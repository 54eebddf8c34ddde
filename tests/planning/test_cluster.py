"""Clusters by name and by file, the links that groups of ranks need, and the published figures of cards."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from danlu.core.errors import RecipeError
from danlu.core.machine import total_memory_bytes
from danlu.planning import cluster as cluster_module
from danlu.planning.cards import CARDS, PRECISIONS, card_of_device, find_card
from danlu.planning.cluster import NO_LINK, Cluster, Link, parse_bytes

GIB = 2**30


def test_a_name_says_nodes_cards_and_kind() -> None:
    cluster = Cluster.parse("16x8xH100-80G")
    assert (cluster.nodes, cluster.cards_per_node, cluster.ranks, cluster.card.name) == (16, 8, 128, "H100-80G")
    assert cluster.links == (Link(8, 450e9, 5e-6), Link(None, 50e9, 20e-6))
    one = Cluster.parse("h100-80gb")
    assert (one.nodes, one.cards_per_node, one.card) == (1, 1, cluster.card)
    node = Cluster.parse("8xA100-80G")
    assert (node.nodes, node.cards_per_node, node.links) == (1, 8, (Link(None, 300e9, 5e-6),))
    assert Cluster.parse("2xL4").links == (Link(None, 32e9, 10e-6),)


def test_cards_without_nvlink_in_the_whole_node_go_over_pci_express() -> None:
    # Bridges connect pairs; they help nobody where a node has three cards, for the second pair would cross two nodes.
    assert [link.ranks for link in Cluster.parse("4x8xA100-80G-PCIe").links] == [2, 8, None]
    assert [link.ranks for link in Cluster.parse("4x3xA100-80G-PCIe").links] == [3, None]
    assert [link.ranks for link in Cluster.parse("4x1xA100-80G-PCIe").links] == [None]
    # A rack of GB200 has 18 nodes of four cards, and NVLink between all of them.
    assert Cluster.parse("36x4xGB200").links == (Link(72, 900e9, 5e-6), Link(None, 50e9, 20e-6))
    assert Cluster.parse("4x4xGB200").links == (Link(None, 900e9, 5e-6),)


@pytest.mark.parametrize(
    ("ranks", "bytes_per_s"),
    [
        (range(8), 450e9),
        ([8, 11, 9], 450e9),
        (range(8, 16, 2), 450e9),
        (range(15, 7, -1), 450e9),
        ([7, 8], 50e9),
        (range(0, 128, 8), 50e9),
        (range(4, 12), 50e9),
    ],
)
def test_a_group_has_the_slowest_link_that_it_needs(ranks: list[int], bytes_per_s: float) -> None:
    assert Cluster.parse("16x8xH100-80G").link_between(ranks).bytes_per_s == bytes_per_s


def test_a_rank_alone_needs_no_link_and_a_range_of_a_million_takes_no_longer_than_a_pair() -> None:
    assert Cluster.parse("H100-80G").link_between([0]) == NO_LINK
    assert Cluster.parse("131072x8xH100-80G").link_between(range(1 << 20)).ranks is None
    with pytest.raises(AssertionError, match="ranks 0 to 8 of a cluster with 8"):
        Cluster.parse("8xH100-80G").link_between([0, 8])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("0x8xH100-80G", "--on '0x8xH100-80G': 0 nodes or cards, and a run needs 1 at least"),
        ("16x8x", "--on '16x8x': no cluster. Write nodes, cards of each node and their kind, as 16x8xH100-80G"),
        ("-2xH100-80G", "no cluster"),
        ("", "no cluster"),
        ("9999999x8xH100-80G", "more than 1,048,576 cards"),
        ("8xH100", "'H100' is several: H100-80G-PCIe, H100-94G-NVL, H100-80G. Name one of them"),
        ("8xH10-80G", "no card 'H10-80G' is known. Did you mean 'H100-80G'? There are GB200-186G, "),
        ("8xTPU", "no card 'TPU' is known. There are GB200-186G, "),
    ],
)
def test_a_senseless_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as found:
        Cluster.parse(name)
    assert message in str(found.value)


def read(tmp_path: Path, text: str) -> Cluster:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return Cluster.of(str(file))


def test_a_file_says_kind_price_and_links(tmp_path: Path) -> None:
    text = """
cards: {kind: H100-80G, nodes: 16, each: 8, price: 2.5, host_memory: 2TB}
links: [{ranks: all, gb_s: 50, us: 20}, {ranks: 8, gb_s: 450, us: 5}]
"""
    found = read(tmp_path, text)
    named = Cluster.parse("16x8xH100-80G")
    assert (found.card, found.ranks, found.links) == (named.card, 128, named.links)
    assert (found.price_per_card_hour, found.host_memory_bytes) == (2.5, 2 * 10**12)
    assert read(tmp_path, "cards: {kind: H100-80G, nodes: 16, each: 8}").links == named.links


def test_a_file_gives_cards_by_hand(tmp_path: Path) -> None:
    card = read(tmp_path, "cards: {kind: mine, memory: 79.2GiB, bandwidth: 2400, peak: {bf16: 700, fp32: 60}}").card
    assert (card.name, card.memory_bytes, card.bandwidth) == ("mine", round(79.2 * GIB), 2400e9)
    assert card.peaks == {"bf16": 700e12, "fp32": 60e12}
    with pytest.raises(RecipeError, match=r"mine: its peak with fp8 is not known \(known: bf16, fp32\)"):
        card.peak("fp8")
    changed = read(tmp_path, "cards: {kind: H100-80G, memory: 94GB, bandwidth: 2400, peak: 700}").card
    known = find_card("H100-80G")
    assert not isinstance(known, str)
    assert (changed.memory_bytes, changed.bandwidth) == (94 * 10**9, 2400e9)
    assert changed.peaks == {**known.peaks, "bf16": 700e12, "fp16": 700e12}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("cards: {kind: H100-80G, nodes: 0}", ["1:32 cards.nodes: 0 is no whole number from 1 to 1,048,576"]),
        ("cards: {kind: H100-80G, each: 2.5}", ["1:31 cards.each: 2.5 is no whole number"]),
        ("cards: {kind: H100-80G, nodes: 4096, each: 4096}", ["1:8 cards: more than 1,048,576 cards"]),
        ("cards: {kind: H10-80G}", ["1:15 cards.kind: no card 'H10-80G' is known. Did you mean 'H100-80G'?"]),
        ("cards: {kind: H100-80G, node: 2}", ["1:25 cards.node: unknown key. Did you mean 'nodes'?"]),
        ("cards: {kind: H100-80G, bandwidth: -1}", ["1:36 cards.bandwidth: -1 is no number above 0: GB/s"]),
        ("cards: {kind: H100-80G, memory: 80}", ["1:33 cards.memory: '80' is no size."]),
        ("cards: {kind: H100-80G, memory: 0GB}", ["1:33 cards.memory: '0GB' is no size."]),
        ("cards: {kind: H100-80G, price: -1}", ["1:32 cards.price: -1 is no number from 0 up"]),
        ("cards: {kind: H100-80G, peak: {bf61: 9}}", ["cards.peak.bf61: unknown key. Did you mean 'bf16'?"]),
        ("cards: {kind: H100-80G, peak: fast}", ["cards.peak: 'fast' is no number above 0: TFLOP/s, or a mapping"]),
        ("cards: {memory: 80GB}", ["1:8 cards.bandwidth: missing: cards that", "1:8 cards.peak: missing"]),
        ("links: []", ["1:1 cards: missing"]),
        ("cards: 8", ["1:8 cards: no mapping. It has the keys kind, nodes"]),
        ("3", ["1:1: no mapping. It has the keys cards, links"]),
        ("cards: {kind: L4, nodes: 2}\nlinks: []", ["2:8 links: no list of links"]),
        (
            "cards: {kind: L4, nodes: 2, each: 8}\nlinks: [{ranks: 8, gb_s: 32, us: 5}]",
            ["2:8 links: no link connects all 16 ranks. Add {ranks: all, gb_s: ..., us: ...}"],
        ),
        (
            "cards: {kind: L4}\nlinks: [{ranks: al, gb_s: -1}]",
            [
                "2:9 links.0.us: missing",
                "2:17 links.0.ranks: 'al' is no whole number from 1 to 1,048,576 or all",
                "2:27 links.0.gb_s: -1 is no number above 0",
            ],
        ),
        (
            "cards: {kind: L4, nodes: 9}\nlinks: [{ranks: 4, gb_s: 9, us: 1}, {ranks: 6, gb_s: 8, us: 1},"
            " {ranks: all, gb_s: 1, us: 1}, {ranks: all, gb_s: 1, us: 1}]",
            ["2:37 links: groups of 6 ranks cut groups of 4: take a multiple", "2:95 links: two links of all ranks."],
        ),
        ("cards: {kind: L4, kind: L4}", ["1:19 cards.kind: given twice"]),
        ("cards: {kind: L4", ["not valid YAML"]),
    ],
)
def test_a_senseless_file_is_refused_with_its_lines(tmp_path: Path, text: str, problems: list[str]) -> None:
    with pytest.raises(RecipeError) as found:
        read(tmp_path, text)
    assert len(found.value.problems) == len(problems)
    for problem, said in zip(problems, found.value.problems, strict=True):
        assert said.startswith(str(tmp_path / "cluster.yaml")) and problem in said


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--on .*none.yaml: cannot be read: No such file"):
        Cluster.of(str(tmp_path / "none.yaml"))


def test_this_machine_without_gpus_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "nvidia_devices", list)
    here = Cluster.here(ranks=2)
    assert (here.ranks, here.card.memory_bytes) == (2, total_memory_bytes() // 2)
    assert (here.card.bandwidth, here.host_memory_bytes) == (None, total_memory_bytes())
    assert here.link_between([1]) == NO_LINK
    with pytest.raises(RecipeError, match="danlu bench machine --processes 2"):
        here.link_between([0, 1])


def test_this_machine_with_gpus_is_named_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 81559\\nNVIDIA H100 80GB HBM3, 81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    here = Cluster.here()
    assert (here.card.name, here.ranks, here.card.memory_bytes) == ("H100-80G", 2, 81559 << 20)
    assert here.links == (Link(None, 450e9, 5e-6),)
    program.write_text("#!/bin/sh\nprintf 'NVIDIA L4, 23034\\nNVIDIA T4, 15360\\n'\n")
    assert (Cluster.here().card.name, Cluster.here().ranks) == ("T4-16G", 2)
    program.write_text("#!/bin/sh\necho 'no devices were found'; exit 6\n")
    assert Cluster.here().card.name == "CPU"


def test_the_rows_of_the_table_are_plausible() -> None:
    assert len({card.name for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert set(card.peaks) <= set(PRECISIONS) and "fp16" in card.peaks
        size = int(card.name.split("-")[1].rstrip("G"))
        assert 0.9 * size * 1e9 < card.memory_bytes <= size * GIB
        assert card.peaks["fp32"] <= card.peaks["fp16"] <= card.peaks.get("fp8", math.inf)
        # Products of 16-bit numbers need 40 to 700 operations for each byte that comes from the memory.
        assert card.bandwidth is not None and 30 < card.peaks["fp16"] / card.bandwidth < 700
        assert find_card(card.name) is card


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80G-PCIe"),
        ("NVIDIA H800", "H800-80G"),
        ("NVIDIA H20", "H20-96G"),
        ("NVIDIA H200 NVL", "H200-141G-NVL"),
        ("NVIDIA GB200", "GB200-186G"),
        ("NVIDIA B300 SXM6 AC", "B300-288G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A10G", None),
    ],
)
def test_a_device_finds_its_row(device: str, card: str | None) -> None:
    found = card_of_device(device)
    assert (found and found.name) == card


def test_sizes_have_units() -> None:
    assert [parse_bytes(text) for text in ("24GB", "1.5 GiB", "512MiB")] == [24 * 10**9, 3 << 29, 1 << 29]
    for wrong in ("24", "24G", "GB", "-1GB", "0GB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(wrong)
