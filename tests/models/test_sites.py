"""The places where adapters may sit, told from a config alone and from the decoder that it makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from danlu.assembly.frozen_base import adapter_sites
from danlu.models.decoder import Decoder
from danlu.models.modules import Embedding, GroupedLinear, Linear
from danlu.models.sites import sites_of


@pytest.mark.parametrize("case", ["gemma2", "llama-2", "phi-4", "qwen2", "llama-tied-smollm2"])
def test_the_sites_of_a_config_are_the_layers_of_its_decoder(case: str, tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model(case)
    told, found = sites_of(model.config), adapter_sites(model)
    assert [(site.name, site.hf_name, site.group, site.layer, site.shape) for site in told] == [
        (site.name, site.hf_name, site.group, site.layer, site.shape) for site in found
    ]
    linears = {name: one for name, one in model.named_modules() if isinstance(one, Linear) and name != "lm_head"}
    layers = {site.name: site.module for site in found if site.layer is not None}
    assert layers == linears and all(linears[site.name].shape == site.shape for site in told if site.layer is not None)
    first = [site.name.rpartition(".")[2] for site in told if site.layer == 0]
    assert first == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (found[-1].module is None) == model.config.tie_word_embeddings and found[0].module is model.embed_tokens


@pytest.mark.parametrize("case", ["qwen2-moe", "deepseek-v3", "qwen3.5"])
def test_the_sites_of_experts_latents_and_linear_attention_are_those_of_the_decoder(
    case: str, tiny_model: Callable[..., Decoder]
) -> None:
    model = tiny_model(case)
    sites = sites_of(model.config)
    assert sites == [replace(site, module=None) for site in adapter_sites(model)]
    kept = (Linear, GroupedLinear, Embedding)
    assert {site.name for site in sites} | {"lm_head"} == {
        name for name, module in model.named_modules() if isinstance(module, kept)
    } | {"lm_head"}
    stacked = [site for site in sites if site.experts is not None]
    assert [model.get_submodule(site.name).weight.shape for site in stacked] == [
        (site.experts, *site.shape) for site in stacked
    ]
    assert sites != sites_of(tiny_model("qwen3").config)  # control


def test_they_are_told_without_torch() -> None:
    code = "import sys, danlu.models.sites, danlu.adapters.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
