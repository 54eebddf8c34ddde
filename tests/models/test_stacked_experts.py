"""Folders in which the experts of a layer share two tensors, as transformers 5 has them in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.shard_box import ShardBox
from danlu.models.attend import PackedAttention
from danlu.models.config import parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.families import FAMILIES
from danlu.models.hf_config import read_config_values
from danlu.models.hf_folder import check_headers, read_config
from danlu.models.hf_layout import holds_stacked_experts
from danlu.models.loading import load, load_boxes, stored_dtype
from danlu.models.saving import save

CASES = (
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "olmoe",
    "glm4-moe",
    "deepseek-v2-moe",
    "deepseek-v3-moe",
    "minimax-m2",
    "granite-moe",
    "granite-4-experts",
    "qwen3-next",
    "qwen3.5-moe",
)
TOKENS = torch.randint(0, 131, (12,), generator=torch.Generator().manual_seed(1))


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, torch.arange(len(TOKENS)), PackedAttention((0, len(TOKENS)))))


@pytest.fixture(scope="module", params=CASES)
def folders(
    request: pytest.FixtureRequest,
    tiny_values: Callable[[str], dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, Tensor]:
    """(with stacked experts, as published, expected logits) of a random model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stacked, published = (tmp_path_factory.mktemp(name) for name in ("stacked", "published"))
    values = tiny_values(request.param)
    (stacked / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(stacked)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" not in name and tensor.ndim and "inv_freq" not in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(stacked, save_original_format=False)
    model.save_pretrained(published)
    with torch.no_grad():
        expected = model(TOKENS[None]).logits[0]
    return stacked, published, expected


def test_they_are_read_and_written_as_the_family_publishes_them(
    folders: tuple[Path, Path, Tensor], tmp_path: Path
) -> None:
    stacked, published, expected = folders
    before = load_file(stacked / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") and one.ndim == 3 for name, one in before.items())
    model = load(stacked)
    assert expected.std() > 0.02
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    save(model, tmp_path / "mine")
    mine, wanted = (load_file(each / "model.safetensors") for each in (tmp_path / "mine", published))
    assert mine.keys() == wanted.keys() != before.keys()
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    for name in [name for name in before if name.endswith("experts.gate_up_proj")]:  # control: up above gate
        before[name] = before[name].roll(before[name].shape[1] // 2, dims=1)
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "config.json").write_bytes((stacked / "config.json").read_bytes())
    save_file(before, tmp_path / "wrong" / "model.safetensors", metadata={"format": "pt"})
    assert (logits(load(tmp_path / "wrong")) - expected).abs().max() > 1e-4


def test_a_process_reads_the_boxes_of_its_experts(folders: tuple[Path, Path, Tensor]) -> None:
    stacked, _, _ = folders
    config, whole = read_config(stacked), load(stacked)
    names = [name for name, shape in parameter_shapes(config).items() if ".experts." in name and len(shape) == 3]
    targets = {}
    for name in names:
        shape = parameter_shapes(config)[name]
        box = ShardBox(shape, (1, 2, 0), (2, shape[1] - 2, shape[2] - 1))
        targets[name] = (torch.full(box.sizes, float("nan")), box)
    load_boxes(stacked, config, targets)
    assert names and all(
        torch.equal(one, box.view_of(whole.get_parameter(name))) for name, (one, box) in targets.items()
    )


def test_which_families_have_both_forms() -> None:
    both = {name for name, family in FAMILIES.items() if family.stacked_modules}
    are_published_stacked = {"gpt_oss", "gemma4_text"}
    assert both == {name for name, family in FAMILIES.items() if family.has_experts} - are_published_stacked


def test_a_dense_model_has_no_such_tensors(tiny_values: Callable[[str], dict[str, Any]]) -> None:
    names = ["model.layers.0.mlp.experts.gate_up_proj"]
    assert not holds_stacked_experts(names, read_config_values(tiny_values("llama-2")))
    assert holds_stacked_experts(names, read_config_values(tiny_values("mixtral")))
    assert not holds_stacked_experts(
        ["model.layers.0.mlp.experts.3.down_proj.weight"], read_config_values(tiny_values("qwen3-moe"))
    )


def test_a_stack_of_another_size_is_refused(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    model = tiny_model("qwen3-moe")
    save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    few = {name: one for name, one in stored.items() if ".experts." not in name}
    layer = "model.layers.1.mlp.experts"
    few |= {f"{layer}.gate_up_proj": torch.ones(7, 46, 48), f"{layer}.down_proj": torch.ones(7, 48, 24)}
    save_file(few, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        check_headers(tmp_path, model.config, quantized=False)
    assert f"{layer}.gate_up_proj in model.safetensors: expected shape [7, 48, 48], found [7, 46, 48]" in str(
        caught.value
    )
    assert "model.layers.3.mlp.experts.gate_up_proj: missing; expected shape [7, 48, 48]" in str(caught.value)


def test_their_type_is_that_of_the_folder(tmp_path: Path) -> None:
    stacked = {"model.embed_tokens.weight": torch.ones(2, 2), "experts.gate_up_proj": torch.ones(2, 8, 4).bfloat16()}
    save_file(stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert stored_dtype(tmp_path) == torch.bfloat16
