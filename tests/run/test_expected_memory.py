"""The planned memory of a step, from shapes alone, against the parts of runs and what autograd keeps."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from builders.adapter_folders import adapter_folder
from builders.expert_folder import EXPERTS, expert_folder
from builders.peak_memory import peak_in
from builders.placed_decoder import config_of, placed_of
from builders.planned_memory import LARGE, counted_states, machine, planned, planned_parts
from builders.preference_samples import tree
from builders.pretended_ranks import pretended_rank
from builders.tiny_world import CONFIG, World, danlu

from danlu.assembly import devices, machine_memory
from danlu.assembly.frozen_base import adapter_sites
from danlu.assembly.machine_memory import kernels_name
from danlu.assembly.optimizer import optimizer_of
from danlu.assembly.parallelize import place, subject_of
from danlu.assembly.quantizing import quantize
from danlu.core.errors import ModelError, RecipeError
from danlu.core.memory_parts import MemoryParts
from danlu.core.types import Pack, Sample
from danlu.data.batch import empty_like
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.layer_spec import Dense, LayerSpec
from danlu.models.loading import build
from danlu.models.mixer_spec import Heads
from danlu.models.rope_config import Rope
from danlu.models.saving import save
from danlu.parallel.layout import Layout, layout_of
from danlu.parallel.ranks import Ranks
from danlu.planning.automatic_micro_batch import MARGIN
from danlu.planning.batch_shape import BatchShape
from danlu.planning.device_map import Device
from danlu.planning.layer_graph import LayerGraph
from danlu.planning.lengths import Lengths
from danlu.planning.rank_memory import rank_states
from danlu.planning.step import stage_memory
from danlu.recipe import Recipe, load, sections
from danlu.run import preview_model, train
from danlu.run.expected_memory import expected_lines, with_change
from danlu.run.memory_report import MemoryReport
from danlu.run.planned_step import PlannedStep, planned_step
from danlu.run.read_workload import read_workload
from danlu.run.run_plan import RunPlan
from danlu.stages.builder import placed_decoder
from danlu.stages.table import STAGES
from danlu.training import gradient_memory, loop
from danlu.training.step import accumulate
from danlu.training.units import format_bytes

CPU = torch.device("cpu")
LORA = {"kind": "lora", "targets": ["all-linear", "lm_head"], "modules_to_save": ["norm"]}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 8-bit Adam, average": {"optimizer": "adamw8bit", "ema": 0.9},
    "full, galore": {"optimizer": {"kind": "galore", "rank": 4}},
    "lora": {"adapter": LORA},
    "dora": {"adapter": "dora"},
    "pissa": {"adapter": "pissa"},
    "vera": {"adapter": {"kind": "vera", "rank": 16}},
    "prefix": {"adapter": {"kind": "prefix", "tokens": 3, "projection": 8}},
    "prompt": {"adapter": {"kind": "prompt", "tokens": 3}},
    "bottleneck": {"adapter": {"kind": "bottleneck", "width": 8}},
    "nf4": {"adapter": "lora", "quantization": "nf4"},
    "int4": {"adapter": "lora", "quantization": {"kind": "int4", "group": 12}},
    "elementwise": {"memory": "elementwise"},
    "selective": {"memory": "selective"},
    "every": {"memory": {"recompute": "every"}},
}


def recipe_of(world: World, folder: Path, changes: Mapping[str, Any]) -> Recipe:
    adapted = {"model": {"path": str(world.base), "config": None, "tokenizer": None}} if "adapter" in changes else {}
    return load(world.recipe(folder / "run", **{**adapted, **changes})).recipe


@pytest.mark.parametrize("name", RUNS)
def test_shapes_alone_tell_what_a_placed_model_holds(tiny_world: World, tmp_path: Path, name: str) -> None:
    recipe = recipe_of(tiny_world, tmp_path, {"precision": "bf16", **RUNS[name]})
    placed = placed_of(recipe)
    counted, offloaded = counted_states(placed, optimizer_of(placed.parameters(), recipe, CPU))
    config = placed.model.config
    states = rank_states(read_workload(recipe, config, judges=True), Layout())
    assert (vars(states.parts), states.offloaded) == (vars(counted), offloaded) and offloaded == 0
    two, three = (planned_parts(recipe, config, micro=micro) for micro in (2, 3))
    assert without_passes(two) == without_passes(counted)
    assert two.activations + two.logits < three.activations + three.logits  # control


@pytest.mark.parametrize("adapter", ["continue", "lora"])
def test_adapters_in_files_count_as_they_are_placed(tiny_world: World, tmp_path: Path, adapter: str) -> None:
    """The one that is continued is trained; below a new one they are frozen."""
    folder = adapter_folder(tiny_world.base, tmp_path / "below", sections.Lora(rank=3))
    model = {"path": str(tiny_world.base), "config": None, "tokenizer": None, "adapters": [str(folder)]}
    recipe = load(tiny_world.recipe(tmp_path / "run", model=model, adapter=adapter)).recipe
    placed = placed_of(recipe)
    counted, _ = counted_states(placed, optimizer_of(placed.parameters(), recipe, CPU))
    states = rank_states(read_workload(recipe, placed.model.config, judges=True), Layout())
    assert vars(states.parts) == vars(counted) and counted.gradients > 0
    without = recipe.model_copy(update={"model": recipe.model.model_copy(update={"adapters": []})})
    alone = rank_states(read_workload(without, placed.model.config, judges=True), Layout())
    assert alone.parts.total < states.parts.total  # control


def without_passes(parts: MemoryParts) -> dict[str, int]:
    """The parts that are there throughout a step."""
    return {name: getattr(parts, name) for name in ("weights", "adapter", "gradients", "optimizer", "average")}


@pytest.mark.parametrize("name", ["full, 8-bit Adam, average", "lora", "nf4", "every"])
def test_each_device_of_a_map_is_planned_by_itself(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of a model on two devices (the CPU by two names) each has what its parameters take, and its layers' activations;
    the parts of all together are those of one device."""
    two = (Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30))
    monkeypatch.setattr(devices, "visible_devices", lambda device: two)
    changes = {"precision": "bf16", "parallel": {"device_map": "balanced"}, **RUNS[name]}
    recipe = recipe_of(tiny_world, tmp_path, changes)
    config = read_config(tiny_world.base)
    loss_device = torch.device("cpu:1")
    subject = subject_of(recipe, config, loss_device, ranks=Ranks())
    placed = place(subject, recipe, Ranks(), loss_device)
    decoder = placed_decoder(recipe, STAGES["sft"], placed, config, loss_device)
    whole = without_passes(counted_states(decoder, optimizer_of(decoder.parameters(), recipe, CPU))[0])
    plan = planned(recipe, config, devices=two, micro=2)
    memory = [stage.memory for stage in plan.stages]
    first, second = (each.parts for each in memory)
    assert [each.device for each in memory] == ["cpu:0", "cpu:1"]
    for part, count in whole.items():
        assert abs(getattr(first, part) + getattr(second, part) - count) <= 1, part
    tensors = [*decoder.model.named_parameters(), *decoder.model.named_buffers()]
    on_first = sum(each.nbytes for name, each in tensors if name.startswith(("embed_tokens", "layers.0.")))
    assert abs(first.weights + first.adapter - on_first) <= 1
    without = recipe.model_copy(update={"parallel": sections.Parallel()})
    alone = planned(without, config, micro=2)
    of_first, of_second, of_all = (each.activations + each.logits for each in (first, second, alone.worst.memory.parts))
    assert min(of_first, of_second) > 0 and max(of_first, of_second) <= of_all
    # The loss is computed on the second; its bytes count where the peak is there.
    assert first.logits == 0 and (name != "lora" or second.logits == alone.worst.memory.parts.logits > 0)
    target = machine(Layout(), devices=two)
    workload = read_workload(recipe, config, judges=True)
    lines = [*expected_lines(PlannedStep(workload, target, plan))]
    assert [line.partition(": ")[0] for line in lines] == ["memory expected on cpu:0", "memory expected on cpu:1"]
    assert [each.memory.device for each in alone.stages] == [""]  # control: on one device


def test_a_micro_batch_fits_into_each_device(tiny_world: World, tmp_path: Path) -> None:
    changes = {
        "batch": {"sequences": 64, "micro": "auto"},
        "data": {"max_length": 32},
        "parallel": {"device_map": {"embed": "cpu", "layers.0": "cuda:0", "layers.1": "cuda:1", "head": "cuda:1"}},
    }
    recipe = recipe_of(tiny_world, tmp_path, {**changes, "adapter": "lora"})
    config = read_config(tiny_world.base)

    def micro(*rooms: int, **batch: Any) -> int:
        own = tuple(Device(name, room) for name, room in zip(("cpu", "cuda:0", "cuda:1"), rooms, strict=True))
        changed = recipe.model_copy(update={"batch": recipe.batch.model_copy(update=batch)})
        return planned(changed, config, devices=own, device_type="cuda").micro

    large, small = 1 << 30, 1 << 20
    assert micro(large, large, large) == 64
    assert 1 <= micro(large, small, large) < 64 and 1 <= micro(large, large, small) < 64  # each of them alone
    with pytest.raises(RecipeError, match=r"batch.memory: 0.0001 GiB of cuda:1 do not hold one packed sequence"):
        micro(large, large, large, memory=0.0001)


@pytest.mark.parametrize(
    ("device_map", "gib", "machine"),
    [
        (None, 1, "this GPU has"),
        ("auto", 2, "cuda:0 and cuda:1 have"),
        ({"": 1}, 1, "cuda:1 has"),
        ({"": "cpu", "head": 0}, 5, "cpu and cuda:0 have"),
    ],
)
def test_a_model_may_be_as_large_as_all_devices_together(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device_map: Any, gib: int, machine: str
) -> None:
    recipe = recipe_of(tiny_world, tmp_path, {})
    recipe = recipe.model_copy(update={"parallel": sections.Parallel(device_map=device_map)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    monkeypatch.setattr(machine_memory, "host_memory_bytes", lambda: 4 * 2**30)
    need = gib * 2.0**30
    monkeypatch.setattr(machine_memory, "weight_bytes", lambda *_: need)
    config = replace(config_of(recipe), vocab_size=1 << 26)  # so many parameters that the plan is asked
    machine_memory.check_size(recipe, config, "base", 1)
    need += 1
    with pytest.raises(ModelError, match=f"base: .* {gib}.0 GiB here; {machine} {gib}.0 GiB"):
        machine_memory.check_size(recipe, config, "base", 1)


def test_what_ran_out_is_told_of_each_device(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"embed": "cpu", "layers.0": "cuda:0", "layers.1": "cuda:1", "head": "cuda:1"}
    recipe = recipe_of(tiny_world, tmp_path, {"parallel": {"device_map": places}, "adapter": "lora"})
    own = tuple(Device(name, 1 << 30) for name in ("cpu", "cuda:0", "cuda:1"))
    several = planned(recipe, read_config(tiny_world.base), devices=own, device_type="cuda")
    workload = read_workload(recipe, read_config(tiny_world.base), judges=True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, (5 + (device.index or 0)) * 2**30))
    for name in ("memory_reserved", "max_memory_allocated", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    device = torch.device("cuda")
    report = MemoryReport(recipe, device, RunPlan(recipe, device, 1))
    told = report._room(PlannedStep(workload, machine(Layout(), devices=own), several))
    assert "This process holds" in told and "Of 5.00 GiB on GPU (cuda:0)" in told and "6.00 GiB on GPU (cuda:1)" in told
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 7 * 2**30))
    assert report._room(None).startswith("Of 7.00 GiB on GPU this process has")  # control: on one device


@pytest.mark.parametrize("is_stored", [False, True], ids=["quantized while read", "stored"])
def test_shapes_alone_tell_what_quantized_experts_hold(tiny_world: World, tmp_path: Path, is_stored: bool) -> None:
    folder = expert_folder(tiny_world)
    if is_stored:
        quantize(folder, tmp_path / "nf4", sections.Nf4(), experts=False)
        shutil.copytree(tiny_world.tokenizer, tmp_path / "nf4", dirs_exist_ok=True)
    path = tmp_path / "nf4" if is_stored else folder
    changes: dict[str, Any] = {
        "model": {"path": str(path), "config": None, "tokenizer": None},
        "adapter": "lora",
        **({} if is_stored else {"quantization": "nf4"}),
    }
    recipe = load(tiny_world.recipe(tmp_path / "run", precision="bf16", **changes)).recipe
    placed = placed_of(recipe)
    counted, _ = counted_states(placed, optimizer_of(placed.parameters(), recipe, CPU))
    workload = read_workload(recipe, placed.model.config, judges=True)

    def foreseen(layout: Layout, device_type: str = "cpu") -> MemoryParts:
        return rank_states(workload, layout, device_type=device_type).parts

    alone, distributed = foreseen(Layout()), layout_of(sections.Parallel(expert=2), 2)
    assert vars(alone) == vars(counted)
    experts = [site for site in adapter_sites(placed.model) if site.experts is not None]
    count = sum(site.shape[0] * site.shape[1] * EXPERTS["n_routed_experts"] for site in experts)  # type: ignore[operator]
    own = 2 * count if is_stored else sum(site.module.quantized.stored_bytes() for site in experts)
    assert alone.weights - foreseen(distributed).weights == own // 2
    # A GPU makes all experts of a matrix dense at once, of those that a rank has.
    largest = max(site.shape[0] * site.shape[1] * EXPERTS["n_routed_experts"] for site in experts)  # type: ignore[operator]
    if not is_stored:
        assert foreseen(Layout(), "cuda").packed == 2 * largest == 2 * foreseen(distributed, "cuda").packed


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("name", ["full", "lora", "nf4"])
def test_a_run_holds_what_was_counted(tiny_world: World, tmp_path: Path, name: str) -> None:
    base = {"model": {"config": None, "tokenizer": None, "path": str(tiny_world.base)}, "precision": "bf16", "steps": 2}
    file = tiny_world.recipe(tmp_path / "run", **base, **RUNS[name])
    assert danlu("train", file) == 0
    measured = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    config = read_config(tiny_world.base)
    counted = vars(planned_parts(load(file).recipe, config))
    assert all(measured[part] == counted[part] for part in ("weights", "adapter", "gradients", "optimizer"))
    if name == "full":  # 16 bytes a parameter, and a step counter for each tensor
        parts = ("weights", "gradients", "optimizer")
        expected = 16 * config.parameter_count() + 4 * len(parameter_shapes(config))
        assert sum(measured[part] for part in parts) == expected


KEPT: dict[str, dict[str, Any]] = {
    "none": {},
    "elementwise": {"memory": "elementwise"},
    "selective": {"memory": "selective"},
    "full": {"memory": "full"},
    "every": {"memory": {"recompute": "every"}},
    "offload": {"memory": {"offload": ["activations"]}},
    "full, offload": {"memory": {"recompute": "full", "offload": ["activations"]}},
    "lora": {"adapter": "lora"},
    "lora, selective": {"adapter": "lora", "memory": "selective"},
    "lora, full": {"adapter": "lora", "memory": "full"},
}
WIDE = {**CONFIG, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 400}
LENGTH = 512


@pytest.fixture(scope="module")
def wide_base(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide") / "base"
    config = read_config_values({**WIDE, "max_position_embeddings": LENGTH})
    model = build(config)
    initialize(model, 0)
    save(model, folder, dtype=torch.float32, tokenizer_from=tiny_world.base)
    return folder


class MeasuredStep(NamedTuple):
    """The most bytes that a step of two micro-batches allocates, and what is planned of it."""

    peak: int
    recipe: Recipe
    config: ModelConfig
    layout: Layout
    lengths: Lengths

    def parts(self, **changes: Any) -> MemoryParts:
        """The planned parts; changes: of the recipe's sections."""
        own = self.recipe.model_copy(update=changes)
        layout = self.layout if own.parallel == self.recipe.parallel else Layout()
        return planned(own, self.config, layout, lengths=self.lengths).worst.memory.parts

    def expected(self, **changes: Any) -> int:
        """The planned bytes of what comes and goes in a step."""
        parts = self.parts(**changes)
        return parts.activations + parts.logits + parts.gradients + parts.gathered


def measured_step(
    world: World,
    folder: Path,
    base: Path,
    changes: Mapping[str, Any],
    *,
    micro: int,
    length: int,
    row: int | None = None,
    ranks: int = 1,
) -> MeasuredStep:
    """Measures a step of two micro-batches: the second one finds gradients there.

    ranks: of a world of which this process pretends to be the first.
    """
    model = {"model": {"path": str(base), "config": None, "tokenizer": None}}
    if "offload" in (memory := changes.get("memory", {})):
        changes = {**changes, "memory": {**memory, "folder": str(folder)}}
    settings: dict[str, Any] = {"data": {"max_length": length}, "precision": "bf16", **changes}
    data = layout_of(load(world.recipe(folder / "run", **{**model, **settings})).recipe.parallel, ranks).data
    settings["batch"] = {"sequences": 2 * micro * data, "micro": micro}
    recipe = load(world.recipe(folder / "run", **{**model, **settings})).recipe
    layout = layout_of(recipe.parallel, ranks)
    with pretended_rank(layout, 0) if ranks > 1 else nullcontext(Ranks()) as own:
        placed = placed_of(recipe, ranks=own)
        compute, optimizer = placed.learner(micro), optimizer_of(placed.parameters(), recipe, CPU)
        placed.model.embed_tokens.sparse_gradient = False
        row = row or length
        tokens, weights = np.ones(row, dtype=np.int32), np.ones(row, dtype=np.float32)
        weights[0] = 0
        packs = [Pack((Sample(tokens, weights, "row"),) * (length // row))] * (2 * micro * layout.data)
        # Torch's profiler does not see pages of the program's own. Messages of pretended ranks do not arrive.
        with (
            patch.object(gradient_memory, "move_out_of_the_heap", lambda parameters: None),
            patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        ):
            accumulate(compute, packs, step=1, clip=None)
            optimizer.zero_grad()
            peak = peak_in(lambda: accumulate(compute, packs, step=2, clip=None))
        return MeasuredStep(peak, recipe, placed.model.config, layout, Lengths((row,) * (9 * micro), "file"))


def fast(names: Iterable[str], *fast_ones: str) -> list[Any]:
    """Names as parameters, of which few are of the fast tests: bfloat16 is slow on a CPU that has no products of it."""
    return [name if name in fast_ones else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", fast(KEPT, "none", "every", "lora, full"))
def test_what_is_expected_is_the_peak_of_a_step_and_not_much_more(
    tiny_world: World, tmp_path: Path, wide_base: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    step = measured_step(tiny_world, tmp_path, wide_base, KEPT[name], micro=2, length=LENGTH)
    ratio = step.expected() / step.peak
    print("RATIO", name, ratio)
    record_property("expected_over_allocated", round(ratio, 3))  # in the file of --junitxml
    assert 0.99 <= ratio <= (1.1 if "offload" in name else 1.03), f"{ratio:.3f}"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor": (2, {"tensor": 2}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "zero1": (4, {"shard": "zero1"}),
    "zero2": (4, {"shard": "zero2"}),
    "zero3": (4, {"shard": "zero3"}),
    "ring": (2, {"context": 2}),
    "longer ring": (4, {"context": 4}),
    "gathered keys": (2, {"context": {"size": 2, "method": "gather"}}),
    "exchanged heads": (2, {"context": {"size": 2, "method": "ulysses"}}),
}


@pytest.mark.parametrize("name", fast(LAYOUTS, "ring"))
def test_the_expected_peak_of_a_rank(tiny_world: World, tmp_path: Path, wide_base: Path, name: str) -> None:
    ranks, parallel = LAYOUTS[name]
    changes, length = {"parallel": parallel}, LENGTH * (2 if name == "ring" else 4)
    step = measured_step(tiny_world, tmp_path, wide_base, changes, micro=1, length=length, ranks=ranks)
    ratio = step.expected() / step.peak
    assert 0.96 <= ratio <= 1.04, f"{ratio:.3f}"
    of_one = step.parts(parallel=sections.Parallel())  # control
    if "zero" not in name:
        assert of_one.activations > 1.1 * step.parts().activations


def test_context_ranks_keep_the_probabilities_of_documents_that_stay_whole(
    tiny_world: World, tmp_path: Path, wide_base: Path
) -> None:
    changes = {"parallel": {"context": 2}}
    step = measured_step(tiny_world, tmp_path, wide_base, changes, micro=2, length=LENGTH, row=64, ranks=2)
    assert 0.95 <= step.expected() / step.peak <= 1.05
    all_cut = step._replace(lengths=Lengths((LENGTH,) * 9, "file"))  # control
    assert all_cut.parts().activations < 0.95 * step.parts().activations


@pytest.mark.parametrize("name", ["none", pytest.param("full", marks=pytest.mark.slow), "lora, full"])
def test_short_rows_in_long_packs_are_expected_with_their_probabilities(
    tiny_world: World, tmp_path: Path, name: str
) -> None:
    """Attention keeps probabilities of short documents alone, so a pack of them takes more than one long document."""
    length, rows = 1536, 512
    base = tmp_path / "base"
    model = build(read_config_values({**WIDE, "num_hidden_layers": 2, "max_position_embeddings": length}))
    initialize(model, 0)
    save(model, base, dtype=torch.float32, tokenizer_from=tiny_world.base)
    step = measured_step(tiny_world, tmp_path, base, KEPT[name], micro=1, length=length, row=rows)

    def expected(*lengths: int) -> int:
        return step._replace(lengths=Lengths(lengths, "file")).expected()

    short, long = (rows,) * 9, (length,) * 9
    assert 0.99 <= expected(*short) / step.peak <= 1.1, f"{expected(*short) / step.peak:.3f}"
    assert expected(*long) < step.peak  # control: the longest row alone
    assert expected(*long, *short) == expected(*short)


def test_two_answers_of_full_length_are_expected_where_they_are_one_item(
    tiny_world: World, tmp_path: Path, wide_base: Path
) -> None:
    model = {"path": str(wide_base), "config": None, "tokenizer": None}
    batch = {"sequences": None, "rows": 2, "micro": 1}
    changes = {"stage": "orpo", "data": {"max_length": LENGTH}, "precision": "bf16", "batch": batch, "model": model}
    recipe = load(tiny_world.recipe(tmp_path / "run", **changes)).recipe
    placed = placed_of(recipe)
    answer = [7] * (LENGTH - 2)
    items = [tree([1, 2], [answer, answer], [1, 1], label=[np.nan, 1, 0], margin=[np.nan] * 3)]
    placed = replace(placed, empty=empty_like(items[0].samples[0]))
    compute, optimizer = placed.learner(1), optimizer_of(placed.parameters(), recipe, CPU)
    placed.model.embed_tokens.sparse_gradient = False
    accumulate(compute, items, step=1, clip=None)
    optimizer.zero_grad()
    peak = peak_in(lambda: accumulate(compute, items, step=2, clip=None))
    parts = planned_parts(recipe, placed.model.config)
    expected = parts.activations + parts.logits + parts.gradients
    assert peak <= expected <= 1.5 * peak, f"{expected / peak:.2f}"
    of_one = planned_parts(recipe.model_copy(update={"stage": "sft", "objective": None}), placed.model.config)
    assert of_one.activations + of_one.logits + of_one.gradients < peak  # control


def test_a_reward_model_is_expected_without_a_head_over_the_vocabulary(tiny_world: World, tmp_path: Path) -> None:
    changes = {"stage": "reward", "batch": {"sequences": None, "rows": 2, "micro": 1}}
    recipe = recipe_of(tiny_world, tmp_path, changes)
    told = TokenizerInfo(400, None, None, None, ())
    config = preview_model.config_of(recipe, told)
    assert config is not None and config.task == "sequence-classification"
    held = placed_of(recipe, config)
    optimizer = optimizer_of(held.parameters(), recipe, CPU)
    parts, _ = counted_states(held, optimizer)
    foreseen = planned_parts(recipe, config)
    head = 4 * config.hidden_size  # bytes of the one row of the score head, which a config does not have
    assert (parts.weights - foreseen.weights, parts.gradients - foreseen.gradients) == (head, head)
    assert foreseen.logits == 0
    language = replace(config, task="causal-lm")
    assert planned_parts(recipe, language).logits > 0  # control


@pytest.mark.parametrize("name", fast(["full", "every", "offload", "full, offload"], "full"))
def test_a_step_that_fits_only_with_recompute_or_offload_is_not_refused(
    tiny_world: World, tmp_path: Path, wide_base: Path, name: str
) -> None:
    """An eighth more than a step takes is enough for `batch.memory`: the loss's workspace is free before the first
    layer recomputes."""
    step = measured_step(tiny_world, tmp_path, wide_base, KEPT[name], micro=1, length=4 * LENGTH)
    parts = step.parts()
    need = parts.total - step.expected() + step.peak
    batch = step.recipe.batch.model_copy(update={"micro": "auto", "memory": 1.125 * need / 2**30})
    tight = step.recipe.model_copy(update={"batch": batch})
    assert planned(tight, step.config, lengths=step.lengths).micro == 1
    keeps_all = tight.model_copy(update={"memory": sections.Memory()})
    with pytest.raises(RecipeError, match=r"do not hold one packed sequence"):  # control
        planned(keeps_all, step.config, lengths=step.lengths)


def test_a_step_that_fits_only_with_tensor_parallelism_is_not_refused(tiny_world: World, tmp_path: Path) -> None:
    config = read_config_values({**WIDE, "num_hidden_layers": 20})

    def recipe(degree: int, gib: float) -> tuple[Recipe, Layout]:
        changes = {"parallel": {"tensor": degree}} if degree > 1 else {}
        batch = {"sequences": 4, "micro": "auto", "memory": gib}
        own = load(tiny_world.recipe(tmp_path / "run", data={"max_length": 4096}, batch=batch, **changes)).recipe
        return own, layout_of(own.parallel, degree)

    whole, half = (peak_of(*recipe(degree, 1.0), config) for degree in (1, 2))
    assert half < 0.75 * whole
    between = (whole + half) / 2 / 2**30
    with_two, layout = recipe(2, between)
    assert planned(with_two, config, layout, "cuda").micro == 1
    with pytest.raises(RecipeError, match=r"do not hold one packed sequence"):
        planned(recipe(1, between)[0], config, device_type="cuda")


def peak_of(recipe: Recipe, layout: Layout, config: ModelConfig) -> int:
    """The bytes of a step with micro-batches of one packed sequence, on GPUs."""
    workload = read_workload(recipe, config, judges=True)
    return max(each.peak for each in stage_memory(workload, layout, machine(layout, "cuda"), 1))


def test_what_is_offloaded_or_sharded_is_not_on_the_device(tiny_world: World, tmp_path: Path) -> None:
    config = read_config_values(WIDE)
    shared = {"parallel": {"shard": "zero3", "data": 4}}
    found = {}
    for name, changes in {
        "whole": {},
        "shared": shared,
        "offloaded": {**shared, "memory": {"offload": ["parameters", "optimizer"]}},
        "optimizer": {"memory": {"offload": ["optimizer"]}},
    }.items():
        recipe = load(tiny_world.recipe(tmp_path / name, **changes)).recipe
        layout = layout_of(recipe.parallel, 4 if "parallel" in changes else 1)
        workload = read_workload(recipe, config, judges=False)
        found[name] = rank_states(workload, layout, device_type="cuda")
    whole, shares = found["whole"].parts, found["shared"].parts
    assert whole.gathered == 0 and shares.gathered > 0
    assert whole.weights / 4 < shares.weights < whole.weights / 3.9  # norms are whole on each
    assert whole.optimizer / 4 < shares.optimizer < whole.optimizer / 3.9
    assert found["offloaded"].parts.weights == found["offloaded"].parts.optimizer == 0
    assert found["offloaded"].parts.gathered == shares.gathered
    assert found["offloaded"].offloaded > shares.weights + shares.optimizer
    largest = max(math.prod(shape) for shape in parameter_shapes(config).values())
    # One parameter's moments and step counter are on the device at a time.
    assert found["optimizer"].parts.optimizer == 8 * largest + 4
    assert found["optimizer"].offloaded == whole.optimizer - found["optimizer"].parts.optimizer


def test_flash_kernels_keep_no_scores() -> None:
    def scores(device_type: str, length: int, window: int | None = None, softcap: float | None = None) -> int:
        mixer = Heads(heads=4, kv_heads=2, head_dim=8, rope=Rope(1e4, 8, 512), window=window, softcap=softcap)
        batch = BatchShape.of_lengths([length], 2, kernels_name(device_type))
        return LayerGraph(LayerSpec(mixer, Dense(64)), 32, batch).kept.elements

    assert all((scores("cpu", 512), scores("cpu", 4096, 1024), scores("cpu", 4096, softcap=30.0)))
    assert not scores("cpu", 4096) and not scores("cpu", 4096, 8192)
    assert not scores("cuda", 512, softcap=30.0) and not scores("cuda", 4096, 1024)


def test_a_budget_that_holds_no_pack_is_told_with_the_recompute_that_would(tiny_world: World, tmp_path: Path) -> None:
    config = read_config_values({**WIDE, "num_hidden_layers": 20})

    def recipe(gib: float = 1.0, **changes: Any) -> Recipe:
        data = {"data": {"max_length": 4096}, "batch": {"sequences": 4, "micro": "auto", "memory": gib}}
        return load(tiny_world.recipe(tmp_path / "run", **data, **changes)).recipe

    def micro(gib: float, **changes: Any) -> int:
        return planned(recipe(gib, **changes), config, device_type="cuda").micro

    def budget(*kinds: str) -> float:
        """Halfway between what a pack needs with two kinds, in GiB."""
        needs = [peak_of(recipe(memory={"recompute": kind}), Layout(), config) for kind in kinds]
        return sum(needs) / len(needs) / 2**30

    short = budget("none", "selective")
    with pytest.raises(RecipeError, match=r"do not hold one packed sequence: .* need about [\d.]+ GiB") as told:
        micro(short)
    assert f"batch.memory: {short} GiB" in str(told.value)
    assert "With memory.recompute=selective they need about" in str(told.value)
    assert micro(short, memory="selective") == 1
    assert micro(8 * short) == 4
    with pytest.raises(RecipeError, match=r"With memory.recompute=full they"):
        micro(budget("selective", "full"))
    with pytest.raises(RecipeError, match="Give more, or lower data.max_length"):
        micro(0.01)


def test_a_margin_stays_free_of_what_is_not_asked_for(tiny_world: World, tmp_path: Path) -> None:
    batch = {"sequences": 64, "micro": "auto"}
    recipe = load(tiny_world.recipe(tmp_path / "run", data={"max_length": 64}, batch=batch)).recipe
    config = config_of(recipe)
    workload = read_workload(recipe, config, judges=True)
    (eight,) = stage_memory(workload, Layout(), machine(Layout()), 8)
    room = eight.fixed + (eight.peak - eight.fixed) / (1 - MARGIN)
    assert planned(recipe, config, room=math.ceil(room)).micro == 8
    assert planned(recipe, config, room=math.floor(room) - 1).micro == 7  # control
    with_budget = batch | {"memory": eight.peak / 2**30}  # of what is asked for, all may be taken
    exact = load(tiny_world.recipe(tmp_path / "run", data={"max_length": 64}, batch=with_budget)).recipe
    assert planned(exact, config).micro == 8


def test_more_than_there_is_is_told_with_what_makes_it_fit(tiny_world: World, tmp_path: Path) -> None:
    recipe = load(tiny_world.recipe(tmp_path / "run", batch={"sequences": 8, "micro": 4})).recipe

    def lines(room: int) -> list[str]:
        target = replace(machine(Layout()), free_bytes=room)
        return [*expected_lines(planned_step(recipe, target))]

    (first,) = lines(LARGE)
    assert first.startswith("memory expected: weights ") and "activations" in first
    whole = planned_step(recipe, machine(Layout())).plan.worst.memory.allocated
    assert lines(whole) == [first]
    _, second = lines(whole - 1)
    assert " that are free. Each of these alone makes it fit: " in second and "batch.micro=" in second
    change, size = re.findall(r"([\w.]+=\w+) \(([\d.]+ [KM]iB)\)", second)[0]
    changed = planned_step(with_change(recipe, change), machine(Layout())).plan.worst.memory.allocated
    assert format_bytes(changed) == size and changed < whole  # the change keeps its promise
    assert "No single change makes it fit. These save most, each alone: " in lines(1000)[1]


@pytest.mark.usefixtures("tokenising_here")
@pytest.mark.parametrize("where", ["the third step", "the optimizer"])
def test_memory_that_runs_out_is_told_with_what_took_it_and_what_to_set(
    tiny_world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    if where == "the optimizer":
        monkeypatch.setattr(train, "optimizer_of", lambda *_, **__: torch.empty(2**50, dtype=torch.uint8))
    else:
        accumulate = loop.accumulate

        def lacking(*arguments: Any, **options: Any) -> Any:
            if options["step"] == 3:
                torch.empty(2**50, dtype=torch.uint8)
            return accumulate(*arguments, **options)

        monkeypatch.setattr(loop, "accumulate", lacking)
    assert danlu("train", tiny_world.recipe(tmp_path / "run", batch={"sequences": 4, "micro": 4})) == 6
    said = capsys.readouterr().err
    error = said[said.index("error: ") :]
    assert "out of memory when 1024 TiB more were asked for. This process holds " in error
    assert "Traceback" not in error and "These save most, each alone: " in error and "memory.recompute=full (" in error
    if where == "the optimizer":
        assert "nothing was saved yet" in error
        return
    assert "a step takes weights 173 KiB + " in error and "activations " in error
    assert "batch.micro=1 (" in error
    assert "step 2 is saved; the same command, with the change, goes on from there" in error
    monkeypatch.undo()
    again = tiny_world.recipe(tmp_path / "run", batch={"sequences": 4, "micro": 2})
    assert danlu("train", again) == 0


@pytest.mark.slow
def test_preview_plan_and_train_say_the_same_of_a_step(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenising_here: None
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2, schedule={"warmup": 1}, data={"cache": str(tmp_path / "own")})

    def previewed(*overrides: str) -> str:
        assert danlu("preview", recipe, *overrides) == 0
        (line,) = [each.strip() for each in capsys.readouterr().out.splitlines() if each.startswith("  expected: ")]
        return line.removeprefix("expected: ")

    def planned_line(*overrides: str) -> str:
        assert danlu("plan", recipe, "--json", *overrides) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        parts = " + ".join(f"{name} {format_bytes(count)}" for name, count in memory["parts"].items() if count)
        return f"{parts} = {format_bytes(memory['allocated'])} in tensors"

    foreseen = previewed()
    assert foreseen.startswith(f"{planned_line()}, for micro-batches of 2 x 64 tokens")
    for change in ("batch.micro=auto", "adapter=prompt", "memory.recompute=full", "optimizer=lion"):
        base = [f"model.path={tiny_world.base}", "model.config=null"]
        line = previewed(*base, change)
        assert line.startswith(planned_line(*base, change)) and line != foreseen  # control: another recipe's differs
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("memory expected: ")]
    assert line.removeprefix("memory expected: ") == foreseen
    assert said.index("memory expected") < said.index("memory: weights")  # before the first step, and at the end


@pytest.mark.parametrize("stages", [2, 4])
def test_pipedream_s_first_stage_keeps_a_version_for_each_of_the_others(
    tiny_world: World, tmp_path: Path, stages: int
) -> None:
    config = read_config_values({**CONFIG, "num_hidden_layers": 4, "vocab_size": 400, "tie_word_embeddings": False})

    def parts(name: str, **changes: Any) -> MemoryParts:
        pipeline = {"stages": stages, "schedule": name}
        recipe = recipe_of(tiny_world, tmp_path, {"parallel": {"pipeline": pipeline}, **changes})
        layout = layout_of(recipe.parallel, stages)
        return rank_states(read_workload(recipe, config, judges=True), layout).parts

    synchronous = parts("1f1b", batch={"sequences": 4, "micro": 2})
    stashing = parts("pipedream", batch={"sequences": 2, "micro": 2})
    assert stashing == replace(synchronous, stash=(stages - 1) * synchronous.gradients)  # all weights are trained
    assert synchronous.stash == 0
