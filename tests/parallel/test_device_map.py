"""Layers on several devices of one process: what is moved, and that what meets is on one device.

Stub devices are the CPU by other names, where values can be compared, and the meta device, whose tensors no operation
takes together with the CPU's: a pass forward and backward over both shows that all that had to be moved was.

T packed tokens · D model width · R rotated features of a head
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.device_moves import Move, recorded
from builders.small_config import small_config
from builders.small_experts import DEEPSEEK_V3, MIXTRAL, experts_config
from builders.tiny_adapters import adapter_set, perturb
from builders.tiny_run import SyntheticPacks
from builders.tree_pairs import tree_pair
from torch import Tensor

from danlu.adapters.adapter_set import AdapterSet
from danlu.core.types import Pack
from danlu.memory import recompute
from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.load_balancing import Balancer, Balancing
from danlu.models.loading import meta_decoder
from danlu.models.mixer_spec import Latent
from danlu.parallel import device_map as placement
from danlu.recipe import sections
from danlu.recipe.sections import Recompute
from danlu.stages.learner import DecoderLearner
from danlu.training.learner import MicroStep

SPLIT = DeviceMap("cpu:0", ("cpu:0", "cpu:0", "cpu:1", "cpu:1"), "cpu:1")
THERE_AND_BACK = DeviceMap("cpu:0", ("cpu:0", "cpu:1", "cpu:1", "cpu:0"), "cpu:0")
TWO_PACKS = [SyntheticPacks().at(number) for number in range(2)]
SIZES = {"vocab_size": 64, "layers": 4}


def learner_of(
    config: ModelConfig,
    device_map: DeviceMap | None,
    adapter: Any = None,
    recomputed: Recompute | None = None,
    balancing: Balancing | None = None,
) -> tuple[DecoderLearner, AdapterSet | None]:
    model = Decoder(config)
    initialize(model, 0)
    adapters = None
    if adapter is not None:
        adapters = adapter_set(model)
        adapters.add("own", adapter)
        perturb(adapters, "own", size=0.05)
        adapters.train_only("own")
    if recomputed is not None:
        recompute.wrap(model, recompute.plan_of(recomputed, model))
    head = "cpu"
    if device_map is not None:
        placement.move_parameters(model, adapters, device_map)
        placement.move_activations(model, device_map)
        head = device_map.head
    if adapters is not None:
        adapters.refresh_copies()
    balancer = None if balancing is None else Balancer(model, balancing)
    return DecoderLearner(
        model, model, torch.device(head), torch.float32, 2, adapters=adapters, balancer=balancer
    ), adapters


def step(learner: DecoderLearner, items: Sequence[Pack]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, gradients by name) of one micro-batch."""
    batch, totals = learner.collate(items), learner.totals(items)
    own = MicroStep(batch, [*enumerate(items)], totals, 1)
    with learner.at(own):
        loss = learner.losses(batch, totals)
    with learner.at(own):
        loss.total.backward()
    gradients = {name: each.grad for name, each in learner.model.named_parameters() if each.grad is not None}
    return loss.total.detach(), gradients


LORA = sections.Lora(rank=4, dropout=0.3, targets=["all-linear"], modules_to_save=["norm"])
CASES: dict[str, dict[str, Any]] = {
    "dense": {"config": small_config(**SIZES)},
    "tied, other norms": {"config": small_config(**SIZES, tie_word_embeddings=True, norms="pre-post")},
    "windows": {"config": small_config(**SIZES, windows=(4, None, 4, None))},
    "latent": {"config": small_config(**SIZES, mixer=Latent, kv_lora_rank=12, qk_nope_head_dim=4, v_head_dim=6)},
    "linear attention": {"config": small_config(**SIZES, deltas=(0, 2))},
    "experts": {"config": experts_config(MIXTRAL, **SIZES), "balancing": Balancing("sequence", sequence=0.1, z=0.01)},
    "experts, biased": {"config": experts_config(DEEPSEEK_V3, **SIZES), "balancing": Balancing("bias", 0.01)},
    "lora": {"config": small_config(**SIZES), "adapter": LORA},
    "vera": {"config": small_config(**SIZES), "adapter": sections.Vera(rank=8)},
    "prefix": {"config": small_config(**SIZES), "adapter": sections.Prefix(tokens=3, projection=8)},
    "prompt": {"config": small_config(**SIZES), "adapter": sections.Prompt(tokens=3)},
    "recomputed layers": {"config": small_config(**SIZES), "recomputed": Recompute(kind="full")},
    "recomputed segments": {"config": small_config(**SIZES), "recomputed": Recompute(kind="every", layers=3)},
    "recomputed in parts": {
        "config": small_config(**SIZES),
        "adapter": LORA,
        "recomputed": Recompute(kind="selective"),
    },
}


@pytest.mark.parametrize(
    ("case", "device_map"),
    fast(
        itertools.product(CASES, [SPLIT, THERE_AND_BACK]),
        *zip(CASES, itertools.cycle([SPLIT, THERE_AND_BACK]), strict=False),
    ),
)
def test_the_bits_are_those_of_one_device(case: str, device_map: DeviceMap) -> None:
    loss, gradients = step(learner_of(device_map=None, **CASES[case])[0], TWO_PACKS)
    if CASES[case]["config"].tie_word_embeddings:
        device_map = DeviceMap(device_map.embed, device_map.layers, device_map.embed)
    with recorded() as moves:
        mapped, _ = learner_of(device_map=device_map, **CASES[case])
        placed = len(moves)
        mapped_loss, mapped_gradients = step(mapped, TWO_PACKS)
    assert torch.equal(loss, mapped_loss)
    assert gradients.keys() == mapped_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, mapped_gradients[name]), name
    assert placed and len(moves) > placed
    other, _ = step(mapped, TWO_PACKS[:1])  # control: another batch has another loss
    assert not torch.equal(other, loss)


def moved_in_a_step(device_map: DeviceMap, layers: int, **case: Any) -> list[Move]:
    with recorded() as moves:
        learner, _ = learner_of(small_config(vocab_size=64, layers=layers), device_map, **case)
        moves.clear()
        step(learner, TWO_PACKS)
        return moves


def test_hidden_states_move_where_the_device_changes_and_tables_once() -> None:
    tokens = sum(pack.tokens for pack in TWO_PACKS)
    x, table = (tokens, 32), (tokens, 8)
    there = [Move(table, "cpu:1"), Move(table, "cpu:1")]
    # Tokens and positions are where the loss is computed.
    here = [Move((tokens,), "cpu:0"), Move(table, "cpu:0"), Move(table, "cpu:0")]
    from_first, from_second = (Move(x, device, forward=False) for device in ("cpu:0", "cpu:1"))
    assert moved_in_a_step(SPLIT, 4) == [*here, Move(x, "cpu:1"), from_second]
    wanted = [Move(x, "cpu:1"), *there, Move(x, "cpu:0"), from_first, from_second]
    assert moved_in_a_step(THERE_AND_BACK, 4) == wanted
    longer = DeviceMap("cpu:0", ("cpu:0", *["cpu:1"] * 6, "cpu:0"), "cpu:0")
    assert moved_in_a_step(longer, 8) == wanted  # six layers there move no more than two
    assert moved_in_a_step(DeviceMap("cpu:0", ("cpu:0",) * 4, "cpu:0"), 4) == []
    head_alone = DeviceMap("cpu:0", ("cpu:0",) * 4, "cpu:1")
    assert moved_in_a_step(head_alone, 4) == [*here, Move(x, "cpu:1"), from_second]


def test_a_layer_that_is_recomputed_has_its_input_on_its_own_device() -> None:
    without = moved_in_a_step(SPLIT, 4)
    assert moved_in_a_step(SPLIT, 4, recomputed=Recompute(kind="full")) == without
    segments = moved_in_a_step(SPLIT, 4, recomputed=Recompute(kind="every", layers=4))
    assert len(segments) > len(without)  # a segment keeps one input: between its layers it is moved again


ON_META = {
    "then meta": DeviceMap("cpu", ("cpu", "cpu", "meta", "meta"), "meta"),
    "in turns": DeviceMap("meta", ("meta", "cpu", "meta", "cpu"), "cpu"),
    "and back": DeviceMap("cpu", ("cpu", "meta", "meta", "cpu"), "cpu"),
}
WITHOUT_VALUES = [name for name, case in CASES.items() if "balancing" not in case]
"""Cases whose layers read no values on the host."""


@pytest.mark.parametrize(
    ("case", "name"),
    fast(itertools.product(WITHOUT_VALUES, ON_META), *zip(WITHOUT_VALUES, itertools.cycle(ON_META), strict=False)),
)
def test_all_that_meets_is_on_one_device(case: str, name: str) -> None:
    device_map = ON_META[name]
    if case in ("prefix", "prompt"):  # virtual tokens are looked for among the tokens' values
        device_map = ON_META["and back"]
    if CASES[case]["config"].tie_word_embeddings:
        device_map = DeviceMap(device_map.head, device_map.layers, device_map.head)
    with recorded():
        learner, adapters = learner_of(device_map=device_map, **CASES[case])
        _, gradients = step(learner, TWO_PACKS)
    assert {gradient.device.type for gradient in gradients.values()} == {"cpu", "meta"} or adapters is not None
    trained = {name: each for name, each in learner.model.named_parameters() if each.requires_grad}
    assert gradients.keys() == trained.keys()
    for name, gradient in gradients.items():
        assert gradient.device.type == device_map.of_parameter(name), name


def test_experts_know_the_tokens_of_a_micro_batch_on_their_own_device() -> None:
    config, feed = small_config(**SIZES), experts_config(MIXTRAL, **SIZES).layers[1]
    config = replace(config, layers=(config.layers[0], feed, *config.layers[2:]))
    device_map = DeviceMap("meta", ("meta", "cpu", "meta", "meta"), "meta")
    with recorded() as moves:
        learner, _ = learner_of(config, device_map, balancing=Balancing("sequence", sequence=0.1, z=0.01, capacity=2.0))
        moves.clear()
        balancer = learner.balancer
        assert balancer is not None
        step(learner, TWO_PACKS)
    assert balancer.layers["1"].sums.device.type == "cpu"
    assert [move.device for move in moves if move.shape == (len(TWO_PACKS),)] == ["cpu"]  # lengths of the packs
    learner.balancer.tokens_on = lambda device: balancer.tokens  # type: ignore[union-attr,method-assign]
    with recorded(), pytest.raises(RuntimeError, match="meta"):  # control
        step(learner, TWO_PACKS)


@pytest.mark.parametrize("case", ["windows", "latent", "linear attention", "prefix", "recomputed in parts"])
def test_micro_batches_of_other_lengths_add_up_as_on_one_device(case: str) -> None:
    """What was moved for one micro-batch (tables, boundaries, masks of dropout) is nothing to the next."""
    micro_batches = [TWO_PACKS, [SyntheticPacks().at(5)], [SyntheticPacks().at(number) for number in (7, 8, 9)]]
    assert len({sum(pack.tokens for pack in items) for items in micro_batches}) == 3
    alone, _ = learner_of(device_map=None, **CASES[case])
    with recorded():
        mapped, _ = learner_of(device_map=THERE_AND_BACK, **CASES[case])
        for items in (*micro_batches, TWO_PACKS):
            loss, gradients = step(alone, items)  # which adds to those before
            mapped_loss, mapped_gradients = step(mapped, items)
            assert torch.equal(loss, mapped_loss)
            assert all(torch.equal(gradients[name], mapped_gradients[name]) for name in gradients)
            assert gradients.keys() == mapped_gradients.keys()
    again, _ = learner_of(device_map=None, **CASES[case])
    assert torch.equal(step(again, TWO_PACKS)[0], loss)
    last = step(again, TWO_PACKS)[1]
    assert any(not torch.equal(gradients[name], last[name]) for name in last)  # control: two micro-batches are not four


def test_trees_are_attended_on_every_device() -> None:
    trees = [tree_pair(number) for number in range(3)]
    loss, gradients = step(learner_of(CASES["dense"]["config"], None)[0], trees)
    with recorded():
        mapped_loss, mapped_gradients = step(learner_of(CASES["dense"]["config"], SPLIT)[0], trees)
        step(learner_of(CASES["dense"]["config"], ON_META["in turns"])[0], trees)
    assert torch.equal(loss, mapped_loss)
    assert all(torch.equal(gradients[name], mapped_gradients[name]) for name in gradients)


@pytest.mark.parametrize("broken", ["tables", "hidden states"])
def test_what_is_not_moved_fails(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The negative control of the meta device."""
    with recorded():
        if broken == "tables":
            monkeypatch.setattr(placement._RotationCopies, "on", lambda self, device, rotations: rotations)
        else:
            real: Callable[..., None] = placement._before
            monkeypatch.setattr(
                placement,
                "_before",
                lambda *args, moves_input, rotations=None: real(*args, moves_input=False, rotations=rotations),
            )
        learner, _ = learner_of(CASES["dense"]["config"], ON_META["and back"])
        with pytest.raises(RuntimeError, match="meta"):
            step(learner, TWO_PACKS)


def test_parameters_are_allocated_on_their_devices() -> None:
    model = meta_decoder(CASES["tied, other norms"]["config"])
    placement.allocate(model, DeviceMap("cpu", ("meta", "cpu", "meta", "cpu"), "cpu"))
    on_meta = {name.split(".")[1] for name, each in model.named_parameters() if each.is_meta}
    assert on_meta == {"0", "2"} and not model.norm.weight.is_meta
