"""The parts of parameters that tensor ranks have, without a module, against decoders that are really cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from builders.tensor_worker import CONFIG, FAMILIES

from danlu.core.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.models.layer_spec import Dense, Experts
from danlu.models.loading import meta_decoder
from danlu.models.tensor_cut import TensorCut, TensorPart, share, tensor_parts
from danlu.parallel import tensor
from danlu.parallel.comm import Group

MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "latent attention and experts": {
        **FAMILIES["deepseek_v3"],
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
    },
}
ALL = FAMILIES | MIXTURES


def test_experts_and_a_network_that_are_normed_apart_are_not_cut() -> None:
    """Norms behind each of their sums need whole ones, and tensor ranks have parts of them."""
    apart = Experts(4, 2, 8, shared=Dense(8), branch_norms=True)
    assert "which need whole sums: use `expert`" in str(apart.uncuttable(2))
    assert apart.uncuttable(1) is None and replace(apart, branch_norms=False).uncuttable(2) is None  # control
    with pytest.raises(ModelError, match="normed apart from a shared network need one"):
        replace(apart, shared=None)


@pytest.fixture
def cut_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelConfig, int, int, bool], dict[str, TensorPart]]:
    """The parts of a decoder without values that is cut as tensor rank `rank` of `degree` cuts it, in one process."""

    def subgroup(group: Group, size: int) -> Group:
        start = group.index // size * size
        return Group(group.name, group.ranks[start : start + size], group.index - start)

    monkeypatch.setattr(tensor, "subgroup_of", subgroup)

    def parts(config: ModelConfig, degree: int, rank: int, sequence: bool) -> dict[str, TensorPart]:
        model = meta_decoder(config)
        cuts = tensor.cut(model, None, Group("tensor", tuple(range(degree)), rank), sequence=sequence)
        for name, parameter in model.named_parameters():
            assert cuts.boxes[name].sizes == tuple(parameter.shape), name
        groups = {name: group.size for name, group in cuts.partial.items()}
        return {name: TensorPart(box, groups.get(name, 1)) for name, box in cuts.boxes.items()}

    return parts


@pytest.mark.parametrize("name", sorted(ALL))
def test_parts_are_those_of_a_decoder_that_is_cut(
    name: str, cut_parts: Callable[[ModelConfig, int, int, bool], dict[str, TensorPart]]
) -> None:
    config = replace(read_config_values({**CONFIG, **ALL[name]}), vocab_padding=5)
    for degree, rank, sequence in ((2, 0, True), (2, 1, False), (4, 1, False), (4, 3, True)):
        assert tensor_parts(config, degree, rank, sequence=sequence) == cut_parts(config, degree, rank, sequence)


def _with(**changes: Any) -> Callable[[TensorCut], TensorCut]:
    return lambda cut: replace(cut, **changes)


WRONG: Mapping[str, tuple[str, Callable[[TensorCut], TensorCut]]] = {
    "keys are not shared by ranks": ("llama", lambda cut: replace(cut, units={})),
    "norms of all heads are whole": ("olmo2", _with(norms={})),
    "convolutions are whole": ("qwen3.5", _with(slots={})),
}


@pytest.mark.parametrize("fault", sorted(WRONG))
def test_a_wrong_declaration_shows(
    fault: str,
    cut_parts: Callable[[ModelConfig, int, int, bool], dict[str, TensorPart]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: parts by a wrong declaration are not those of the decoder that is cut by the right one."""
    family, change = WRONG[fault]
    config = read_config_values({**CONFIG, **FAMILIES[family]})
    right = cut_parts(config, 4, 1, False)
    mixer = type(config.layers[0].mixer)
    declared = mixer.tensor_cut.fget  # type: ignore[union-attr]
    monkeypatch.setattr(mixer, "tensor_cut", property(lambda spec: change(declared(spec))))
    assert tensor_parts(config, 4, 1, sequence=False) != right


def test_ranks_together_have_every_parameter_once() -> None:
    config = replace(read_config_values({**CONFIG, **FAMILIES["olmo2"]}), vocab_padding=5)
    by_rank = [tensor_parts(config, 4, rank, sequence=False) for rank in range(4)]
    for name, part in by_rank[0].items():
        written = sum(parts[name].box.numel for parts in by_rank if parts[name].box.is_writer)
        assert written == math.prod(part.box.global_shape), name


def test_features_that_cannot_be_cut_have_no_share() -> None:
    assert share(64, 16, "column", 3, 0) is None
    assert share(32, 16, "column", 4, 0) is None  # control: grouped, two ranks have the same head
    assert share(32, 16, "grouped", 4, 3) == (16, 16, 2)
