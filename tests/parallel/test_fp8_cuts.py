"""Layers that tensor ranks share and products in 8 bits do not go together with."""

from __future__ import annotations

from typing import Any

import pytest
from builders.small_config import small_config
from builders.tiny_world import CONFIG

from danlu.models.hf_config import read_config_values
from danlu.models.mixer_spec import Latent
from danlu.models.operations import is_gate
from danlu.models.tensor_cut import LinearCut, linear_cuts
from danlu.numerics.arithmetic import RECIPES
from danlu.parallel.fp8_cuts import BLOCKS, fp8_problems
from danlu.recipe.sections import Fp8Products

HEADS = {
    **CONFIG,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 576,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("recipe", "degree", "text"),
    [
        ("tile", 4, "k_proj: 2 ranks share a key/value head, and its output's gradient is a sum"),
        ("mxfp8", 2, None),
        ("tile", 2, None),
        ("mxfp8", 1, None),
    ],
)
def test_ranks_that_share_a_key_are_refused(recipe: Any, degree: int, text: str | None) -> None:
    problems = list(fp8_problems(Fp8Products(recipe=recipe), read_config_values(HEADS), degree))
    assert (problems == []) if text is None else (len(problems) == 1 and text in problems[0])
    assert not list(fp8_problems(None, read_config_values(HEADS), degree)), "in bf16 they may"


def test_cuts_within_blocks_of_mxfp8_are_refused() -> None:
    config = read_config_values({**HEADS, "num_key_value_heads": 8, "intermediate_size": 544})
    (problem,) = fp8_problems(Fp8Products(recipe="mxfp8"), config, 4)
    assert "136 of the 544 features of layers.0.mlp.gate_proj, and mxfp8 scales blocks of 32" in problem
    assert not list(fp8_problems(Fp8Products(recipe="tile"), config, 4)), "tiles may be cut anywhere"


def test_context_ranks_share_one_scale_in_attention_of_heads_alone() -> None:
    heads, latent = (
        read_config_values(HEADS),
        small_config(mixer=Latent, kv_lora_rank=12, qk_nope_head_dim=4, v_head_dim=6),
    )
    section = Fp8Products(recipe="tensor")
    (problem,) = fp8_problems(section, latent, 1, 2)
    assert "parallel.context.size: attention of kind latent" in problem and "Use recipe: tile" in problem
    assert not [*fp8_problems(section, heads, 1, 2), *fp8_problems(section, latent, 1, 1)]
    assert not list(fp8_problems(Fp8Products(recipe="tile"), latent, 1, 2))


def test_cuts_are_those_of_the_specs() -> None:
    cuts = {each.name: each for each in linear_cuts(read_config_values(HEADS), 4)}
    head = HEADS["hidden_size"] // 8
    assert cuts["layers.0.attention.q_proj"] == LinearCut("layers.0.attention.q_proj", "outputs", 256, 64, 1)
    assert cuts["layers.0.attention.k_proj"] == LinearCut("layers.0.attention.k_proj", "outputs", 2 * head, head, 2)
    assert cuts["layers.0.mlp.down_proj"] == LinearCut("layers.0.mlp.down_proj", "inputs", 576, 144, 1)


def test_gates_are_not_in_8_bits() -> None:
    assert is_gate("layers.0.attention.a_proj") and is_gate("a_proj") and not is_gate("layers.0.mlp.gate_proj")


def test_blocks_are_those_of_scales_that_are_rounded_down() -> None:
    floors = {name: formats.x.block[1] for name, formats in RECIPES.items() if formats.x.rounding == "floor"}
    assert floors == BLOCKS
