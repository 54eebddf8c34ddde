"""On which device each part of a model goes: in equal shares, by memory, by hand; and maps that do not fit a model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders.small_config import small_config
from builders.small_experts import MIXTRAL

from danlu.models.chunks import DeviceMap
from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES
from danlu.models.hf_layout import hf_name
from danlu.models.multimodal import MULTIMODAL
from danlu.planning.device_map import Device, device_map_of, device_map_problems, layer_parameters

TWO = [Device("cuda:0", 100), Device("cuda:1", 100)]


def sizes_of(device_map: DeviceMap) -> list[int]:
    return [len(list(run)) for _, run in itertools.groupby(device_map.layers)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("free", [(1, 1, 1), (4, 1, 2), (1, 3, 9)])
@pytest.mark.parametrize("vocab_size", [61, 900])
def test_shares_are_the_best_of_all_splits(tied: bool, free: Sequence[int], vocab_size: int) -> None:
    config = small_config(layers=9, vocab_size=vocab_size, tie_word_embeddings=tied)
    wide = replace(config.layers[0], feed=MIXTRAL)
    config = replace(config, layers=(*config.layers[:3], wide, wide, *config.layers[5:]))
    costs, matrix = layer_parameters(config), vocab_size * config.hidden_size
    devices = [Device(f"cuda:{number}", size) for number, size in enumerate(free)]

    def fullest(sizes: Sequence[int], shares: Sequence[int]) -> float:
        borders = list(itertools.accumulate(sizes, initial=0))
        of_devices = [sum(costs[start:stop]) for start, stop in itertools.pairwise(borders)]
        of_devices[0] += matrix
        of_devices[-1] += 0 if tied else matrix
        return max(cost / share for cost, share in zip(of_devices, shares, strict=True))

    every = [cut for cut in itertools.product(range(1, 10), repeat=3) if sum(cut) == 9]
    for kind, shares in (("auto", free), ("balanced", (1, 1, 1))):
        device_map = device_map_of(kind, config, devices)  # type: ignore[arg-type]
        assert device_map.embed == "cuda:0" and device_map.head == ("cuda:0" if tied else "cuda:2")
        best = min(fullest(cut, shares) for cut in every)
        assert fullest(sizes_of(device_map), shares) == pytest.approx(best, rel=1e-12)
        assert fullest([3, 3, 3], shares) > best or best == pytest.approx(fullest([3, 3, 3], shares))
    if tuple(free) != (1, 1, 1):  # control: memory makes a difference
        assert sizes_of(device_map_of("auto", config, devices)) != sizes_of(device_map_of("balanced", config, devices))


def test_devices_of_which_nothing_is_known_share_equally_and_those_beyond_the_layers_are_left_out() -> None:
    config = small_config(layers=4)
    unknown = [Device("cuda:0", None), Device("cuda:1", 10**12)]
    assert device_map_of("auto", config, unknown) == device_map_of("balanced", config, unknown)
    many = [Device(f"cuda:{number}", 100) for number in range(6)]
    assert device_map_of("auto", config, many) == DeviceMap(
        "cuda:0", ("cuda:0", "cuda:1", "cuda:2", "cuda:3"), "cuda:3"
    )
    assert device_map_of("auto", config, [Device("cpu", 1)]) == DeviceMap("cpu", ("cpu",) * 4, "cpu")


def test_a_model_beside_another_has_its_head_where_the_loss_is() -> None:
    untied, tied = (small_config(layers=4, tie_word_embeddings=each) for each in (False, True))
    for kind in ("auto", "balanced"):
        assert device_map_of(kind, untied, TWO, loss_device="cuda:0").head == "cuda:0"  # type: ignore[arg-type]
        assert device_map_of(kind, tied, TWO, loss_device="cuda:1").embed == "cuda:1"  # type: ignore[arg-type]


def test_by_hand() -> None:
    config = small_config(layers=4)
    wanted = DeviceMap("cuda:0", ("cuda:0", "cuda:0", "cuda:0", "cuda:1"), "cuda:1")
    for by_hand in (
        {"embed": "cuda:0", "layers.0-2": 0, "layers.3": "cuda:1", "head": 1},
        {"": "cuda", "model.layers.3": 1, "lm_head": 1, "model.norm": "cuda:1"},
    ):
        assert not [*device_map_problems(by_hand, config)]
        assert device_map_of(by_hand, config, TWO) == wanted
    assert str(wanted) == "embed, layers 0-2 on cuda:0; layer 3, head on cuda:1"
    assert wanted.devices == ("cuda:0", "cuda:1")
    assert wanted.layers_on("cuda:0") == [0, 1, 2]
    of_parameters = {"embed_tokens.weight": 0, "layers.2.mlp.up_proj.weight": 0, "layers.3.attention_norm.weight": 1}
    for name, number in {**of_parameters, "norm.weight": 1, "lm_head.weight": 1}.items():
        assert wanted.of_parameter(name) == f"cuda:{number}", name


TIED = small_config(layers=4, tie_word_embeddings=True)
NEOX = replace(small_config(layers=4), family="gpt_neox")


def test_parts_have_the_names_of_each_family() -> None:
    """Users of accelerate and transformers know the modules of their model, of language parts too."""
    wanted = DeviceMap("cuda:0", ("cuda:0", "cuda:0", "cuda:0", "cuda:1"), "cuda:1")
    models = [replace(small_config(layers=4), family=family) for family in FAMILIES]
    models += [replace(small_config(layers=4), multimodal=model_type) for model_type in MULTIMODAL]
    for config in models:
        by_hand = {hf_name(part, config): int(part != "embed_tokens") for part in ("embed_tokens", "norm", "lm_head")}
        prefix = hf_name("norm", config).rpartition(".")[0]
        by_hand |= {f"{prefix}.layers.{number}": number // 3 for number in range(4)}
        assert not [*device_map_problems(by_hand, config)], (config.family, config.multimodal)
        assert device_map_of(by_hand, config, TWO) == wanted
    # transformers' own class of GPT-NeoX calls the head lm_head, and its folders embed_out.
    assert device_map_of({"": 0, "gpt_neox.layers.3": 1, "lm_head": 1}, NEOX, TWO) == wanted


@pytest.mark.parametrize(
    ("by_hand", "config", "message"),
    [
        ({"": 0, "layers.2-4": 1}, small_config(layers=4), "layers.2-4, and the model has 4 layers, 0 to 3"),
        ({"embed": 0, "layers.1-2": 0, "head": 0}, small_config(layers=4), "no device for layers 0 and 3"),
        ({"embed": 0, "layers.0-2": 0, "head": 0}, small_config(layers=4), "no device for layer 3"),
        ({"layers.0-3": 0, "head": 0}, small_config(layers=4), "no device for embed"),
        ({"layers.0-3": 0, "embed": 0}, small_config(layers=4), "no device for head"),
        (
            {"": 0, "gpt_neox.layers.3": 1},
            small_config(layers=4),
            "gpt_neox.layers.3 names a part of another family. This model has model.embed_tokens, model.layers.0, "
            "model.norm, lm_head",
        ),
        ({"": 0, "embed_in": 1}, small_config(layers=4), "embed_in names a part of another family"),
        (
            {"": 0, "model.language_model.norm": 1},
            NEOX,
            "This model has gpt_neox.embed_in, gpt_neox.layers.0, gpt_neox.final_layer_norm, embed_out",
        ),
        (
            {"": 0, "head": 1},
            TIED,
            "this model's head is its embedding, one matrix, and cannot be on cuda:0 and cuda:1",
        ),
    ],
)
def test_what_does_not_fit_a_model_is_told(by_hand: dict[str, int], config: ModelConfig, message: str) -> None:
    found = [*device_map_problems(by_hand, config)]
    assert len(found) == 1 and message in found[0], found


def test_maps_that_danlu_makes_have_no_problems() -> None:
    assert not [*device_map_problems("auto", TIED)] and not [*device_map_problems(None, TIED)]
    untied_score = replace(TIED, task="sequence-classification")  # whose head is the objective's own
    assert not [*device_map_problems({"": 0, "head": 1}, untied_score)]
