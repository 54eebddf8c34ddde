"""`parallel.device_map`: what its keys and values name, and rules of which each row of the table breaks exactly one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe import load
from danlu.recipe.device_map import MapEntry, device_named, entries_of, named_devices, part_named

Write = Callable[..., str]

BASE = {"stage": "sft", "model": "base", "data": "rows.json", "output": "runs/x", "parallel": "{device_map: auto}"}
BY_HAND = "{device_map: {embed: cuda:0, layers.0-15: cuda:0, layers.16-31: cuda:1, head: cuda:1}}"


def text(**changed: str) -> str:
    return "\n".join(f"{key}: {value}" for key, value in {**BASE, **changed}.items())


def problems(write: Write, **changed: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load(write(text(**changed)))
    return tuple(caught.value.problems)


def test_a_map_is_a_word_or_names_parts(write: Write) -> None:
    assert load(write(text())).recipe.parallel.device_map == "auto"
    assert load(write(text(parallel="{device_map: balanced}"))).recipe.parallel.device_map == "balanced"
    by_hand = load(write(text(parallel=BY_HAND))).recipe.parallel.device_map
    assert isinstance(by_hand, dict)
    assert entries_of(by_hand) == [
        MapEntry("embed", "embed", "cuda:0"),
        MapEntry("layers.0-15", range(16), "cuda:0"),
        MapEntry("layers.16-31", range(16, 32), "cuda:1"),
        MapEntry("head", "head", "cuda:1"),
    ]
    assert named_devices(by_hand) == {"cuda:1": "layers.16-31", "cuda:0": "embed"}
    rest = load(write(text(parallel='{device_map: {"": 0, model.layers.3: 1}}'))).recipe.parallel.device_map
    assert isinstance(rest, dict)
    assert entries_of(rest) == [MapEntry("", "", "cuda:0"), MapEntry("model.layers.3", range(3, 4), "cuda:1")]


def test_parts_have_the_names_of_transformers_too() -> None:
    assert [part_named(name) for name in ("model.embed_tokens", "lm_head", "model.norm")] == ["embed", "head", "head"]
    assert part_named("model.layers.7") == part_named("layers.7") == range(7, 8)
    assert [part_named(name) for name in ("gpt_neox.embed_in", "embed_out")] == ["embed", "head"]
    assert part_named("gpt_neox.layers.7") == part_named("model.language_model.layers.7") == range(7, 8)
    for name in ("layers", "layers.", "layers.-1", "layers.1-", "layers.0.mlp", "embedding", "layers.0,1", "model.x"):
        assert part_named(name) is None, name
    assert [device_named(value) for value in ("cpu", "cuda", "cuda:3", 3, "03")] == ["cpu", "cuda:0", *["cuda:3"] * 3]
    for value in ("disk", "cuda:", "cuda:x", -1, "mps", "cpu:0", "cuda:-1", ""):
        assert device_named(value) is None, value


@pytest.mark.parametrize(
    ("by_hand", "message"),
    [
        ("{embd: cpu}", "'embd' names no part that has a device. Did you mean 'embed'?"),
        ("{layers.4.mlp: cpu}", "'layers.4.mlp' names no part that has a device. A layer is on one device as a whole"),
        ("{blocks.1: cpu}", "'blocks.1' names no part that has a device. There are embed, layers.0 (or layers.0-15)"),
        (
            "{model.rotary_emb: 0}",
            "'model.rotary_emb' names no part that has a device. Rotary tables are made for each",
        ),
        ("{gpt_neox.rotary_emb: 0}", "Rotary tables are made for each micro-batch: leave it out"),
        ("{gpt_neox.layers.4.mlp: 0}", "A layer is on one device as a whole: use layers.4"),
        ("{head: gpu:1}", "head: 'gpu:1' is no device; there are cpu and cuda:0, cuda:1, ... Did you mean 'cuda:1'?"),
        ("{head: disk}", "head: 'disk' is no device; there are cpu and cuda:0, cuda:1, ..."),
        ("{layers.5-3: cpu}", "layers.5-3: the last layer comes before the first"),
        ("{layers.0-3: 0, layers.3-5: 1}", "layer 3 is in layers.0-3 and in layers.3-5. Name each layer once"),
        ("{norm: 0, lm_head: 1}", "norm and lm_head are on one device"),
        ("{}", "a map without entries"),
    ],
)
def test_what_a_map_cannot_name_is_told(write: Write, by_hand: str, message: str) -> None:
    found = problems(write, parallel=f"{{device_map: {by_hand}}}")
    assert len(found) == 1 and message in found[0], found
    assert "parallel.device_map" in found[0]


def test_a_word_that_is_none_is_told(write: Write) -> None:
    assert "Did you mean 'balanced'?" in problems(write, parallel="{device_map: balance}")[0]
    for value in ("[cuda:0]", "1", "{embed: true}", "{embed: [0]}", "{embed: 0.5}", "{embed: null}"):
        assert "parallel.device_map" in problems(write, parallel=f"{{device_map: {value}}}")[0], value


def test_where_transformers_has_it_the_key_is_pointed_to(write: Write) -> None:
    found = problems(write, model="{path: base, device_map: auto}")
    assert "parallel.device_map" in found[0], found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "{device_map: auto, data: 2}"}, "parallel.data: a device map divides the layers within one"),
        ({"parallel": "{device_map: auto, tensor: 2}"}, "parallel.tensor: a device map divides the layers within one"),
        ({"parallel": "{device_map: auto, pipeline: 2}"}, "parallel.pipeline: a device map divides the layers"),
        ({"parallel": "{device_map: auto, context: 2}"}, "parallel.context: a device map divides the layers"),
        ({"parallel": "{device_map: auto, expert: 2}"}, "parallel.expert: a device map divides the layers"),
        ({"parallel": "{device_map: auto, shard: zero3}"}, "parallel.shard: a model is sharded among processes"),
        ({"parallel": "{device_map: auto, workers: threads}"}, "parallel.workers: threads each have a copy"),
        ({"numerics": "exact"}, "numerics: whether bits are those of a rollout is checked on one device"),
        ({"compile": "true"}, "compile: what is compiled is the forward pass on one device"),
        (
            {"memory": "{recompute: {kind: planned, budget: 1}}", "batch": "{sequences: 8, micro: 1}"},
            "memory.recompute.kind: a plan is measured on one device",
        ),
        ({"memory": "{offload: [activations]}"}, "memory.offload: activations are offloaded from one device"),
        ({"memory": "{offload: [parameters]}"}, "memory.offload: parameters are offloaded from one device"),
        (
            {"stage": "distill", "teacher": "base", "on_policy": "0.5", "rollout": "{engine: vllm, url: 'http://x'}"},
            "rollout.engine: a server is given the weights of a model on one device",
        ),
        (
            {"stage": "grpo", "rewards": "{kind: exact, column: a}"},
            "stage: rewards, values and routes of answers are those of a model on",
        ),
        ({"stage": "classify", "model": "{preset: lenet5}"}, "stage: lenet5 is one small model, which nothing divides"),
        ({"device": "cpu", "parallel": BY_HAND}, "device: cpu, and parallel.device_map has 'embed' on a GPU"),
    ],
)
def test_what_one_process_cannot_do_is_refused(write: Write, changes: dict[str, str], message: str) -> None:
    found = problems(write, **changes)
    assert [problem for problem in found if message in problem], found
    if "parallel" not in changes:  # control: on one device it is allowed
        load(write(text(**changes, parallel="{}")))


@pytest.mark.parametrize(
    ("changes", "device_map"),
    [
        (
            {
                "adapter": "lora",
                "quantization": "nf4",
                "memory": "{recompute: full, offload: [optimizer]}",
                "ema": "0.9",
            },
            "auto",
        ),
        ({"stage": "distill", "teacher": "base", "on_policy": "0.5", "evaluation": "{every: 9, samples: hi}"}, "auto"),
        ({"parallel": "{device_map: auto, data: 1, restarts: 2}", "device": "cpu"}, "auto"),
        ({"parallel": '{device_map: {"": cpu}}', "device": "cpu"}, {"": "cpu"}),
    ],
)
def test_what_several_devices_do_is_allowed(write: Write, changes: dict[str, str], device_map: object) -> None:
    assert load(write(text(**changes))).recipe.parallel.device_map == device_map
