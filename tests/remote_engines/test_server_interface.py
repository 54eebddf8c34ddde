"""Seeds, versions by token, and which tensors of vLLM can be compared."""

from __future__ import annotations

import itertools
import time

import pytest

from danlu.inference.request import Request, SamplingOptions
from danlu.remote_engines.server_interface import during, seed_of, versions_by_token
from danlu.remote_engines.vllm import comparable_tensors


def test_each_answer_and_each_continuation_has_a_seed_of_its_own():
    keys = itertools.product((0, 1), (0, 1, 2), (0, 1, 2), (0, 5))
    seeds = {
        seed_of(Request(number, (1,), SamplingOptions(seed=seed)), sample, position)
        for seed, number, sample, position in keys
    }
    assert len(seeds) == 2 * 3 * 3 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_request_that_names_the_number_of_its_draws_repeats_them():
    first, again, other = Request(1, (1,), draw_number=7), Request(2, (1,), draw_number=7), Request(2, (1,))
    assert seed_of(first, 0, 0) == seed_of(again, 0, 0) != seed_of(other, 0, 0)


def test_ranges_of_weights_become_a_label_for_each_token():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    assert versions_by_token(spans, 3) == ["3", "3", "4"]
    assert versions_by_token([], 0) == []
    with pytest.raises(AssertionError, match="weight versions of 3 tokens for an answer of 4"):
        versions_by_token(spans, 4)


def test_vllm_s_stacks_are_compared_as_a_whole():
    names = {
        f"model.layers.0.{name}.weight"
        for name in (
            *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            *("mlp.gate_proj", "mlp.down_proj", "input_layernorm"),
        )
    }
    layer = "model.layers.0"
    assert comparable_tensors(dict.fromkeys([*names, "model.norm.weight", "model.embed_tokens.weight"])) == {
        f"{layer}.self_attn.qkv_proj.weight": [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"],
        f"{layer}.self_attn.o_proj.weight": [f"{layer}.self_attn.o_proj.weight"],
        f"{layer}.mlp.down_proj.weight": [f"{layer}.mlp.down_proj.weight"],
        f"{layer}.input_layernorm.weight": [f"{layer}.input_layernorm.weight"],
        "model.norm.weight": ["model.norm.weight"],
    }


def test_tensors_of_gpt_neox_are_compared_by_the_names_of_transformers_class():
    parts = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    names = [f"gpt_neox.layers.1.{part}.{kind}" for part in (*parts, "input_layernorm") for kind in ("weight", "bias")]
    names.append("gpt_neox.final_layer_norm.bias")
    assert comparable_tensors(dict.fromkeys([*names, "gpt_neox.embed_in.weight", "embed_out.weight"])) == {
        name.replace("gpt_neox", "model"): [name] for name in names
    }


def test_tensors_of_a_language_part_are_compared_by_vllms_names():
    names = [f"model.language_model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert comparable_tensors(dict.fromkeys([*names, "model.language_model.norm.weight"])) == {
        "language_model.model.layers.0.self_attn.qkv_proj.weight": names,
        "language_model.model.norm.weight": ["model.language_model.norm.weight"],
    }


def test_layers_that_a_folder_has_in_one_are_compared_as_they_are():
    names = ["self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.q_norm"]
    names = [f"model.layers.0.{name}.weight" for name in names]
    assert comparable_tensors(dict.fromkeys(names)) == {name: [name] for name in names}


def test_what_fails_on_either_side_is_raised():
    class Client:
        def __init__(self, error):
            self.error = error

        def post(self, path, body):
            if self.error is not None:
                raise self.error

    assert during(lambda: 5, Client(None), "/x", {}) == 5
    with pytest.raises(ValueError, match="from the server"):
        during(lambda: 5, Client(ValueError("from the server")), "/x", {})

    def fails():
        raise KeyError("from here")

    with pytest.raises(KeyError, match="from here"):
        during(fails, Client(None), "/x", {})

    def fails_later():
        time.sleep(0.2)
        raise KeyError("nobody came")

    with pytest.raises(ValueError, match="from the server"):
        during(fails_later, Client(ValueError("from the server")), "/x", {})
