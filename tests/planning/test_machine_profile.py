"""Profiles of machines: their files, and the seconds that they give; with invented measurements."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from danlu.core.errors import DataError, RecipeError, ResourceError
from danlu.planning import machine_profile
from danlu.planning.cluster import Cluster, Link
from danlu.planning.machine_profile import GROUPED, Machine, MachineProfile, machine_here
from danlu.planning.measured_table import Table

MACHINE = Machine("A processor", "cpu", 2, 1, "2.13.0")
PRODUCTS = ((1, 512), (64, 512), (64, 512))
LINK = (1024, 1 << 20)


def profile(machine: Machine = MACHINE, at: str = "2026-11-27T12:00:00+00:00") -> MachineProfile:
    products = [2 * m * n * k / 1e11 for m, n, k in itertools.product(*PRODUCTS)]
    tables = {
        "product fp32": Table.rising(PRODUCTS, products),
        "input_gradient fp32": Table.rising(PRODUCTS, [5 * seconds for seconds in products]),
        "weight_gradient fp32": Table.rising(PRODUCTS, [2 * seconds for seconds in products]),
        "grouped fp32": Table.rising(((4, 16), (8, 64)), [4 * 8 / 1e6, 4 * 64 / 1e6, 16 * 8 / 1e6, 16 * 64 / 1e6]),
        "copy fp32": Table.rising(((1 << 16, 1 << 20),), [1e-6, 1e-4]),
        "attention fp32": Table.rising(((64, 512), (1, 4), (64,)), [1e-5, 4e-5, 6.4e-4, 2.56e-3], (2, 1, 1)),
        "attention_backward fp32": Table.rising(((64, 512), (1, 4), (64,)), [2e-5, 8e-5, 1e-3, 5e-3], (2, 1, 1)),
        "adamw": Table.rising(((1024, 4096),), [1e-6, 4e-6]),
        "dequantize_nf4": Table.rising(((1024, 4096),), [2e-6, 8e-6]),
        "call": Table.rising(((1,),), [1e-6]),
        "call_behind_products": Table.rising(((1,),), [4e-6]),
        "call_trained": Table.rising(((1,),), [2e-5]),
    }
    if machine.processes > 1:
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            tables[kind] = Table.rising((LINK,), [1e-4, 1e-4 + ((1 << 20) - 1024) / 2e9])
    return MachineProfile(machine, tables, at)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    written = profile()
    file = written.write(tmp_path)
    assert MachineProfile.read(file) == written
    assert [path.name for path in tmp_path.iterdir()] == [MACHINE.file_name]
    changed = replace(written, tables={**written.tables, "call": Table.rising(((1,),), [9e-6])})
    assert changed.write(tmp_path) == file and MachineProfile.read(file) == changed != written


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "or torn"),
        ('{"format": 4, "machine"', "or torn"),
        ("[]", "or torn"),
        ('{"format": 3}', "format 3, and this danlu reads 4"),
        ('{"format": 4, "machine": {"processor": "x"}}', "or torn"),
    ],
)
def test_a_torn_profile_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / MACHINE.file_name
    file.write_text(content)
    with pytest.raises(DataError) as found:
        MachineProfile.read(file)
    assert str(file) in str(found.value) and said in str(found.value)
    assert "Measure it again with danlu bench machine" in str(found.value)


def test_a_profile_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = profile().write(tmp_path)
    whole = file.read_bytes()
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError):
            MachineProfile.read(file)
    file.write_bytes(whole)
    assert MachineProfile.read(file) == profile()


def test_a_profile_of_another_machine_is_refused_under_this_ones_name(tmp_path: Path) -> None:
    foreign = profile(replace(MACHINE, processor="Another processor")).write(tmp_path)
    file = foreign.rename(tmp_path / MACHINE.file_name)
    with pytest.raises(DataError, match=r"is of another machine \(Another processor, 2 threads, torch 2.13.0\)"):
        MachineProfile.read(file)
    assert MachineProfile.read(file.rename(tmp_path / "theirs.json")).machine.processor == "Another processor"
    with pytest.raises(DataError, match="no such profile. Run danlu bench machine"):
        MachineProfile.read(file)


def test_this_machines_newest_profile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert MachineProfile.here(folder=tmp_path, device="cpu") is None
    (tmp_path / "older.json").write_text(json.dumps({"format": machine_profile.FORMAT - 1}))
    assert MachineProfile.here(folder=tmp_path, device="cpu") is None
    here = machine_here("cpu", threads=4)
    for machine, minute in (
        (here, 1),
        (replace(here, threads=2), 2),
        (replace(here, processes=2, threads=1), 3),
        (replace(here, torch="1.0"), 4),
        (replace(here, processor="Another"), 5),
    ):
        profile(machine, f"2026-11-27T12:0{minute}:00+00:00").write(tmp_path)

    def threads(**options: int) -> int | None:
        found = MachineProfile.here(folder=tmp_path, device="cpu", **options)
        return None if found is None else found.machine.threads

    assert [threads(), threads(threads=4), threads(threads=3), threads(processes=2)] == [2, 4, None, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads() == 4
    (tmp_path / "torn.json").write_text("{")
    assert threads() == 4
    with pytest.raises(DataError, match="torn"):
        threads(threads=3)


def test_narrow_heads_take_less_than_the_narrowest_that_were_measured() -> None:
    tables = {"attention fp32": Table(((512,), (4,), (64, 128)), (1e-3, 1.5e-3), (2, 1, 1))}
    found = replace(profile(), tables=tables)
    assert found.attention_seconds(512, 4, 16, "fp32") == pytest.approx(1e-3 - 0.5e-3 * 48 / 64)
    assert found.attention_seconds(512, 4, 16, "fp32").extrapolated
    assert found.attention_seconds(512, 4, 64, "fp32") == 1e-3
    steep = replace(found, tables={"attention fp32": replace(tables["attention fp32"], seconds=(1e-3, 4e-3))})
    assert steep.attention_seconds(512, 4, 16, "fp32") == pytest.approx(1e-3 / 4)


def test_documents_of_another_kernel_have_seconds_of_their_own() -> None:
    axes = ((4,), (64,))
    tables = {
        "attention bf16": Table(((256, 768), *axes), (8e-2, 7e-1), (2, 1, 1)),
        "attention_long bf16": Table(((1024,), *axes), (5e-2,), (2, 1, 1)),
    }
    found = replace(profile(), tables=tables)
    assert found.attention_seconds(768, 4, 64, "bf16") == 7e-1
    assert found.attention_seconds(1024, 4, 64, "bf16") == 5e-2
    assert found.attention_seconds(2048, 4, 64, "bf16") == pytest.approx(2e-1)
    alone = replace(found, tables={"attention bf16": tables["attention bf16"]})
    assert alone.attention_seconds(1024, 4, 64, "bf16") > 1, "control: one kernel says nothing about the other"


def test_rows_of_a_document_are_filled_up_on_a_cpu() -> None:
    found = profile()
    assert found.attention_seconds(225, 4, 64, "fp32") == found.attention_seconds(256, 4, 64, "fp32")
    assert found.attention_seconds(224, 4, 64, "fp32") < found.attention_seconds(225, 4, 64, "fp32")
    card = replace(found, machine=replace(MACHINE, device="cuda"))
    assert card.attention_seconds(225, 4, 64, "fp32") < card.attention_seconds(256, 4, 64, "fp32")


def test_gradients_of_a_layer_are_looked_up_by_its_tokens_outputs_and_inputs() -> None:
    """Each with a table of its own; control: the sizes in the order of an output's find other numbers."""
    numbers = Table(PRODUCTS, tuple(1e-6 * (index + 1) for index in range(8)))  # 1 token: 64x64, 64x512, 512x64, ..
    found = replace(profile(), tables={"input_gradient fp32": numbers, "weight_gradient fp32": numbers})
    assert found.product_seconds(1, 64, 512, "fp32", "input_gradient") == numbers.at(1, 512, 64) == 3e-6
    assert found.product_seconds(64, 512, 1, "fp32", "weight_gradient") == numbers.at(1, 64, 512) == 2e-6
    assert found.product_seconds(512, 64, 512, "fp32", "weight_gradient") == numbers.at(512, 512, 64) == 7e-6
    with pytest.raises(RecipeError, match="product fp32 was not measured"):
        found.product_seconds(1, 64, 512, "fp32")


def test_computation_is_slowed_by_the_share_that_was_measured() -> None:
    found = profile(replace(MACHINE, processes=2, threads=1))
    assert found.slowed_share(1 << 20) == 0
    whole = found.tables["all_reduce"].seconds
    tables = {**found.tables, "all_reduce_meanwhile": Table((LINK,), (whole[0] / 2, whole[1] * 3))}
    assert replace(found, tables=tables).slowed_share(1024) == pytest.approx(0.5)
    assert replace(found, tables=tables).slowed_share(1 << 20) == 1


def test_seconds_are_those_of_the_tables() -> None:
    found = profile()
    assert found.product_seconds(512, 512, 64, "fp32") == 2 * 512 * 512 * 64 / 1e11
    assert found.product_seconds(1024, 512, 64, "fp32").extrapolated
    assert found.bytes_seconds(1 << 20) == 1e-4
    assert found.attention_seconds(512, 4, 64, "fp32") == 2.56e-3
    assert found.attention_seconds(512, 4, 128, "fp32").extrapolated
    assert found.attention_seconds(64, 1, 64, "fp32", backward=True) == 2e-5
    assert found.update_seconds(2048) == pytest.approx(2e-6)
    assert found.dequantize_seconds(2048) == pytest.approx(4e-6)
    assert [found.call_seconds(), found.call_seconds(trained=True)] == [1e-6, 2e-5]
    assert found.call_seconds(behind_products=True) == 4e-6
    assert found.peaks() == {"fp32": pytest.approx(1e11)}
    assert found.bandwidth() == (1 << 20) / 1e-4
    with pytest.raises(RecipeError, match=r"product bf16 was not measured, but adamw, attention fp32, "):
        found.product_seconds(1, 64, 64, "bf16")


def test_grouped_products_of_other_matrices_take_as_much_longer_as_one_does() -> None:
    found = profile()
    measured = found.grouped_seconds(4, 64, GROUPED, GROUPED, "fp32")
    assert measured == 4 * 64 / 1e6 and not measured.extrapolated
    assert found.grouped_seconds(4, 64, GROUPED, 64, "fp32") == pytest.approx(measured / 8)


def test_collectives_of_other_numbers_of_ranks_follow_a_ring() -> None:
    found = profile(replace(MACHINE, processes=2, threads=1))
    measured = found.collective_seconds("all_reduce", 1 << 20, 2)
    assert measured == found.tables["all_reduce"].seconds[-1] and not measured.extrapolated
    four = found.collective_seconds("all_reduce", 1 << 20, 4)
    rest = measured - 1e-4
    assert four.extrapolated and four == pytest.approx(3e-4 + 1.5 * rest)
    assert found.collective_seconds("all_gather", 1 << 20, 1) == 0
    assert found.collective_seconds("send", 1 << 20, 4) == found.tables["send"].seconds[-1]
    with pytest.raises(RecipeError, match="no links measured. Run danlu bench machine --processes 4"):
        profile().collective_seconds("all_reduce", 1024, 4)


def test_a_cluster_has_the_profiles_speed_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.planning.cluster.nvidia_devices", list)
    alone = Cluster.here(profile())
    assert (alone.card.name, alone.ranks, alone.card.bandwidth) == ("A processor", 1, (1 << 20) / 1e-4)
    assert alone.card.peak("fp32") == pytest.approx(1e11)
    both = Cluster.here(profile(replace(MACHINE, processes=2, threads=1)))
    (link,) = both.links
    assert both.ranks == 2 and both.link_between([0, 1]) == link
    assert link == Link(None, pytest.approx(2e9), 1e-4)


def test_a_gpu_that_nvidia_smi_does_not_show_is_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "nvidia_devices", list)
    assert machine_here().device == "cpu"
    with pytest.raises(ResourceError, match="nvidia-smi shows no GPU here"):
        machine_here("cuda")


def test_this_machine_is_named_by_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_profile, "nvidia_devices", lambda: [("NVIDIA H100 80GB HBM3", 81559 << 20)])
    assert machine_here().processor == "NVIDIA H100 80GB HBM3"
    assert machine_here("cpu").device == "cpu"
    assert json.loads(profile().write(tmp_path).read_text())["format"] == machine_profile.FORMAT
