"""Tensor parallelism in float32 and bfloat16, what it sends, shapes without values, sampling, beside data ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import tensor_worker
from builders.process_group import run_group
from builders.tensor_worker import CONFIG, Case

from danlu.numerics.relative_error import worst_error
from danlu.recipe import sections

pytestmark = pytest.mark.distributed

LORA = sections.Lora(targets=["all-linear", "embed_tokens", "lm_head"])
DORA = sections.Dora(targets=["all-linear"])


def test_float32_gradients_equal_those_of_one_process() -> None:
    cases = {str(sequence): Case(dtype=torch.float32, sequence=sequence) for sequence in (False, True)}
    for rank in run_group(tensor_worker.each, 2, tensor_worker.compare, cases):
        assert all(worst_error(errors.values()) < 1e-6 for errors in rank.values())


def test_bfloat16_gradients_are_as_close_as_those_of_one_process() -> None:
    for rank in run_group(tensor_worker.narrow_types, 2, Case(dtype=torch.bfloat16, sequence=True)):
        for name, (cut, whole) in rank.items():
            assert cut < 2 * whole + 0.01, (name, cut, whole)
            assert cut > 1e-4, f"{name} was not computed in bfloat16"


# What a layer sends in the forward and in the backward pass.
SENT: dict[str, tuple[Case, list[str], list[str]]] = {
    "whole": (Case(), ["sum"] * 2, ["sum"] * 2),
    # What the products behind an entrance want in the backward pass is gathered again, once for all of them.
    "sequence": (
        Case(sequence=True),
        ["all-gather", "reduce-scatter"] * 2,
        ["all-gather", "all-gather", "reduce-scatter"] * 2,
    ),
    "lora": (Case(adapters=(LORA,)), ["sum"] * 2, ["sum"] * 2),
    # The norms of rows: one sum for each of the two layers whose rows are cut.
    "dora": (Case(adapters=(DORA,)), ["sum"] * 4, ["sum"] * 2),
}


def test_a_layer_sends_twice_each_way() -> None:
    cases = {name: replace(case, dtype=torch.float32) for name, (case, _, _) in SENT.items()}
    for rank in run_group(tensor_worker.each, 2, tensor_worker.collectives, cases, [1, 2, 3]):
        for name, (case, forward, backward) in SENT.items():
            seen = rank[name]
            for more in (2, 3):
                added = {way: seen[more][way][len(seen[more - 1][way]) :] for way in ("forward", "backward")}
                assert sorted(added["forward"]) == sorted(forward), name
                assert sorted(added["backward"]) == sorted(backward), name
            # Beside the layers: the embedding is summed, and the head is entered. The first entrance of all sends
            # nothing back where nothing before it is trained.
            ends = {way: len(seen[1][way]) for way in ("forward", "backward")}
            once = 2 if case.sequence else 1
            assert ends == {"forward": len(forward) + once, "backward": len(backward) + once - (name == "dora")}


GATHERED = CONFIG["num_hidden_layers"] * 2 * 16 * CONFIG["hidden_size"] * 4
"""Bytes of all tokens at the entrances of attention and MLP."""
# What is not kept of them when they are gathered again, on two processes.
SAVED: dict[str, tuple[Case, int]] = {
    "none": (Case(), GATHERED // 2),  # each keeps its own half
    "selective": (Case(prepare="selective"), GATHERED),  # which is what a norm makes, and made again as well
    "full": (Case(prepare="full"), 0),
    # Nothing before the first entrance is trained, so no gradient leads back to it: what was gathered there is kept.
    "lora": (Case(adapters=(sections.Lora(targets=["all-linear"]),)), GATHERED // 2 * 3 // 4),
    # No gradient takes the input of a product that is frozen.
    "lora on rows": (Case(adapters=(sections.Lora(targets=["o_proj", "down_proj"]),)), 0),
}


def test_tokens_that_were_gathered_are_not_kept() -> None:
    cases = {name: replace(case, sequence=True, dtype=torch.float32) for name, (case, _) in SAVED.items()}
    for rank in run_group(tensor_worker.kept, 2, cases):
        found = {name: with_all - without for name, (with_all, without) in rank.items()}
        assert found == {name: saved for name, (_, saved) in SAVED.items()}


@pytest.mark.parametrize("sequence", [False, True])
def test_shapes_are_cut_before_there_are_values(sequence: bool) -> None:
    ranks = run_group(tensor_worker.shapes_first, 4, Case(sequence=sequence))
    covered: dict[str, int] = {}
    for rank in ranks:
        assert rank["error"] < 1e-11
        for name, box in rank["boxes"].items():
            assert rank["shapes"][name] == box.sizes
            if box.is_writer:
                covered[name] = covered.get(name, 0) + torch.Size(box.sizes).numel()
    assert covered == {name: torch.Size(box.global_shape).numel() for name, box in ranks[0]["boxes"].items()}
    words = [rank["shapes"]["embed_tokens.weight"][0] for rank in ranks]
    assert sum(words) == CONFIG["vocab_size"] and len(set(words)) == 2  # 131 words do not fall into 4 equal parts
    heads = [rank["boxes"]["layers.0.attention.k_proj.weight"] for rank in ranks]
    assert [(box.offsets[0], box.replicas, box.is_writer) for box in heads] == [
        (0, 2, True),
        (0, 2, False),
        (12, 2, True),
        (12, 2, False),
    ]


SAMPLED: dict[str, Case] = {
    "whole": Case(),
    "sequence": Case(sequence=True),
    "multi-query, tied": Case({"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "lora": Case(adapters=(LORA,)),
    "prefix": Case(adapters=(sections.Prefix(tokens=3),)),
    "prompt": Case(adapters=(sections.Prompt(tokens=3),), sequence=True),
}


def test_every_process_samples_what_the_whole_model_does() -> None:
    for rank in run_group(tensor_worker.each, 2, tensor_worker.sampled, SAMPLED):
        for name, found in rank.items():
            for way in ("greedy", "drawn"):
                whole, cut = found[way]
                assert cut == whole, name
                torch.testing.assert_close(*found[f"{way} logprobs"], rtol=1e-9, atol=1e-9)
            assert found["greedy"][0] != found["drawn"][0]


def test_heads_that_several_hold_are_summed_within_their_tensor_group() -> None:
    ranks = run_group(tensor_worker.beside_data, 4, Case({"num_key_value_heads": 1}))
    for rank, found in enumerate(ranks):
        mine = (0, 1) if rank < 2 else (2, 3)
        name = "layers.0.attention.k_proj.weight"
        assert worst_error(found["errors"].values()) < 1e-11
        assert found["partial"] == dict.fromkeys(found["partial"], mine)
        assert {one.rpartition(".")[0].rpartition(".")[2] for one in found["partial"]} == {"k_proj", "v_proj"}
        assert found["copies"][name] == (2, rank % 2 == 0)
        assert found["copies"]["layers.0.attention.q_proj.weight"] == (1, True)
        assert found["copies"]["norm.weight"] == (2, rank % 2 == 0)


REFUSED: dict[str, dict[str, Any]] = {
    "4 does not divide the 6 parts of layers.0.attention.q_proj. Use a divisor of 6": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
    },
    "4 does not divide the 6 parts of layers.0.attention.k_proj, nor is it a multiple. Use a divisor of 6": {
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 4,
    },
    "4 does not divide the 82 parts of layers.0.mlp.gate_proj. Use a divisor of 82": {"intermediate_size": 82},
    "4 is more than the 3 tokens of the vocabulary. Use at most 3": {"vocab_size": 3},
}


def test_what_cannot_be_cut_is_said() -> None:
    cases = {message: Case(config) for message, config in REFUSED.items()}
    for rank in run_group(tensor_worker.each, 4, tensor_worker.refused, cases):
        assert rank == {message: f"RecipeError: parallel.tensor: {message}" for message in REFUSED}
