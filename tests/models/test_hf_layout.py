"""The places where adapters may sit, told from a config alone and from the decoder that it makes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from danlu.assembly.frozen_base import adapter_sites
from danlu.models.decoder import Decoder
from danlu.models.hf_layout import config_sites
from danlu.models.modules import Linear


@pytest.mark.parametrize("case", ["gemma2", "llama-2", "phi-4", "qwen2", "llama-tied-smollm2"])
def test_the_sites_of_a_config_are_the_layers_of_its_decoder(case: str, tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model(case)
    told, found = config_sites(model.config), adapter_sites(model)
    assert [(site.name, site.hf_name, site.group, site.layer, site.shape) for site in told] == [
        (site.name, site.hf_name, site.group, site.layer, site.shape) for site in found
    ]
    linears = {name: one for name, one in model.named_modules() if isinstance(one, Linear) and name != "lm_head"}
    layers = {site.name: site.module for site in found if site.layer is not None}
    assert layers == linears and all(linears[site.name].shape == site.shape for site in told if site.layer is not None)
    first = [site.name.rpartition(".")[2] for site in told if site.layer == 0]
    assert first == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (found[-1].module is None) == model.config.tie_word_embeddings and found[0].module is model.embed_tokens


def test_they_are_told_without_torch() -> None:
    code = "import sys, danlu.models.hf_layout, danlu.adapters.targets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
