"""The tensors of adapters, told without torch, against those of adapters on decoders without values."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from builders.tensor_worker import CONFIG, FAMILIES

from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.lora import LowRank
from danlu.adapters.shapes import BASE_CHANGING_INITS, Tensors, adapter_shapes, shapes_of_adapter
from danlu.assembly.frozen_base import adapters_of
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Axis
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.hf_config import read_config_values
from danlu.models.loading import meta_decoder
from danlu.models.sites import adapter_name, sites_of
from danlu.models.tensor_cut import tensor_parts
from danlu.parallel import tensor
from danlu.parallel.comm import Group
from danlu.recipe import sections

MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "fused layers": {"model_type": "phi3", "pad_token_id": 0},
    "experts": {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "latents": FAMILIES["deepseek_v3"],
    "linear attention": FAMILIES["qwen3.5"],
    "parallel layers": FAMILIES["cohere2"],
}
EVERYWHERE = ["all-linear", "embed_tokens", "lm_head"]
SECTIONS: dict[str, Any] = {
    "lora": sections.Lora(targets=EVERYWHERE),
    "lora, ranks by pattern": sections.Lora(rank=4, rank_pattern={"o_proj": 2}),
    "lora, copies": sections.Lora(modules_to_save=["lm_head", "norm", "0.mlp.down_proj"], bias="all"),
    "lora, biases of its layers": sections.Lora(targets=["o_proj"], bias="adapted"),
    "rslora": sections.RsLora(),
    "lora-fa": sections.LoraFa(),
    "lora-plus": sections.LoraPlus(),
    "pissa": sections.Pissa(rank=4),
    "olora": sections.Olora(rank=4),
    "loftq": sections.Loftq(rank=4),
    "gaussian": sections.Lora(init="gaussian"),
    "dora": sections.Dora(targets=["all-linear", "lm_head"]),
    "dora, from singular vectors": sections.Dora(init="pissa", rank=4),
    "vera": sections.Vera(rank=6, modules_to_save=["embed_tokens"]),
    "mora": sections.Mora(rank=2, targets=["o_proj", "lm_head"]),
    "mora, sharing": sections.Mora(rank=2, targets=["o_proj"], form="sharing"),
    "ia3": sections.Ia3(targets=["o_proj"], feedforward=[]),
    "ia3, inputs": sections.Ia3(targets=["o_proj", "lm_head"], feedforward=["o_proj"]),
    "houlsby": sections.Bottleneck(width=5),
    "pfeiffer": sections.Bottleneck(width=5, placement="pfeiffer", modules_to_save=["norm"]),
    "prefix": sections.Prefix(tokens=3),
    "prefix, projection": sections.Prefix(tokens=3, projection=7),
    "prompt": sections.Prompt(tokens=3),
}
ROWS: dict[str, Sequence[int]] = {"embedding": [3, 9], "head": [3, 9]}
# Kinds that a model refuses, by the words of its message.
REFUSED = {
    ("latents", "prefix"): "has not",
    ("latents", "prefix, projection"): "has not",
    ("linear attention", "prefix"): "linear attention",
    ("linear attention", "prefix, projection"): "linear attention",
    ("experts", "lora, copies"): "0.mlp.down_proj",
}


def config_of(model: str) -> ModelConfig:
    return read_config_values({**CONFIG, **MODELS[model]})


def told(config: ModelConfig, section: Any, token_ids: Mapping[str, Sequence[int]]) -> Tensors:
    return shapes_of_adapter(
        "default",
        section,
        sites_of(config),
        parameter_shapes(config),
        hf_name=partial(adapter_name, config=config),
        tied=config.tie_word_embeddings,
        token_ids=token_ids,
    )


def adapted(config: ModelConfig, section: Any, token_ids: Mapping[str, Sequence[int]]) -> AdapterSet:
    """The adapter on a decoder without values, as it is once the base's weights are there."""
    model = meta_decoder(config)
    adapters = adapters_of(model, device="meta", encode=lambda text: [0])
    adapters.add("default", section, token_ids=token_ids)
    for module in adapters.added["default"].modules.values():
        if isinstance(module, LowRank):
            if section.init in BASE_CHANGING_INITS:
                module.set_initial_factors(module.lora_A.detach(), module.lora_B.detach())
            if module.lora_magnitude_vector is not None:
                module.base_row_squares = torch.empty_like(module.lora_magnitude_vector)
    adapters.finish_loading()
    adapters.train_only("default")
    return adapters


Described = dict[str, tuple[tuple[int, ...], str, bool]]


def described(adapters: AdapterSet) -> tuple[Described, Described]:
    """The parameters and the buffers of an adapter: shape, type, whether it is trained."""
    parameters = {
        name: (tuple(each.shape), str(each.dtype), each.requires_grad)
        for name, each in adapters.tensors("default").items()
    }
    buffers = {
        f"{slot}.default.{name}": (tuple(each.shape), str(each.dtype), False)
        for slot, module in adapters.added["default"].slots().items()
        for name, each in module.named_buffers()
    }
    return parameters, buffers


def as_described(tensors: Tensors) -> tuple[Described, Described]:
    halves: tuple[Described, Described] = ({}, {})
    for name, each in tensors.items():
        halves[each.is_buffer][name] = (each.shape, f"torch.{each.type}", each.trained)
    return halves


@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_those_of_the_adapter(model: str) -> None:
    config = config_of(model)
    differing = told(config, SECTIONS["lora"], {})
    for kind, section in SECTIONS.items():
        if refusal := REFUSED.get((model, kind)):
            with pytest.raises(RecipeError, match=refusal):
                adapted(config, section, {})
            with pytest.raises(RecipeError, match=refusal):
                told(config, section, {})
            continue
        adapters, tensors = adapted(config, section, {}), told(config, section, {})
        assert as_described(tensors) == described(adapters), kind
        bytes_told = sum(each.bytes for each in tensors.values() if not each.is_buffer)
        assert bytes_told == sum(each.nbytes for each in adapters.tensors("default").values()), kind
        assert kind == "lora" or tensors.keys() != differing.keys() or tensors != differing, kind  # control


@pytest.mark.parametrize("model", ["grouped queries", "tied"])
@pytest.mark.parametrize("saved", [[], ["embed_tokens"]])
def test_rows_of_single_tokens_are_those_of_the_adapter(model: str, saved: list[str]) -> None:
    config = config_of(model)
    section = sections.Lora(targets=["q_proj"], modules_to_save=saved)
    adapters, tensors = adapted(config, section, ROWS), told(config, section, ROWS)
    assert as_described(tensors) == described(adapters)
    rows = [name for name in tensors if name.endswith("token_rows")]
    assert len(rows) == {("grouped queries", False): 2, ("tied", False): 1, ("grouped queries", True): 1}.get(
        (model, bool(saved)), 0
    )


def test_stacked_matrices_of_experts_have_factors_of_each() -> None:
    config = config_of("experts")
    section = sections.LoraFa(targets=["experts"], rank=3)
    tensors = told(config, section, {})
    assert as_described(tensors) == described(adapted(config, section, {}))
    assert tensors["layers.0.mlp.experts.down_proj.adapter.default.lora_A"].shape == (4, 3, 24)


@pytest.mark.parametrize(
    "kind", ["lora", "dora", "vera", "mora", "ia3", "ia3, inputs", "houlsby", "prefix, projection"]
)
@pytest.mark.parametrize("model", ["grouped queries", "experts", "tied"])
def test_tensor_ranks_have_the_local_parts(model: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axes of each tensor, and the features that the layer has left, give the shape on a tensor rank."""
    monkeypatch.setattr(tensor, "subgroup_of", lambda group, size: Group(group.name, group.ranks[:size], 0))
    config, section = config_of(model), SECTIONS[kind]
    adapters = adapted(config, section, {})
    whole = {site.name: site.shape for site in sites_of(config)}
    cuts = tensor.cut(adapters.model, adapters, Group("tensor", (0, 1), 0), sequence=False)  # type: ignore[arg-type]
    local = {name: tuple(each.shape) for name, each in adapters.tensors("default").items()}
    copies, changed = tensor_parts(config, 2, 0, sequence=False), 0
    for name, each in told(config, section, {}).items():
        if each.is_buffer:
            continue
        site = name.partition(".adapter.")[0]
        shape = copies[name].box.sizes if name in copies else each.shape
        if site in whole and each.axes:
            module: Any = adapters.model.get_submodule(site)
            here = module.shape if hasattr(module, "shape") else tuple(module.weight.shape)
            axis: Axis = "outputs" if here[0] != whole[site][0] else "inputs"
            shape = each.local(axis, here[axis == "inputs"])
        assert local[name] == shape == cuts.boxes[name].sizes, name
        changed += shape != each.shape
    uncut = ("mora", "ia3", "houlsby", "prefix, projection")  # (IA)^3: here of the outputs of o_proj
    assert (changed > 0) == (kind not in uncut)


def test_a_site_has_the_tensors_of_its_kind() -> None:
    site = next(site for site in sites_of(config_of("grouped queries")) if site.name.endswith("k_proj"))
    assert {name: each.shape for name, each in adapter_shapes(site, sections.Dora(rank=3)).items()} == {
        "lora_A": (3, 48),
        "lora_B": (24, 3),
        "lora_magnitude_vector": (24,),
        "base_row_squares": (24,),
    }
    counts = [
        sum(math.prod(each.shape) for each in adapter_shapes(site, sections.Lora(rank=rank)).values())
        for rank in (1, 8)
    ]
    assert counts == [72, 8 * 72]


def test_they_are_told_without_torch() -> None:
    code = "import sys, danlu.adapters.shapes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
