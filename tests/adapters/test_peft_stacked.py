"""LoRA of experts in PEFT's format: the order of the factors of its tensors, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import changed
from builders.tiny_adapters import adapter_set
from safetensors.torch import load_file, save_file

from danlu.adapters.adapter_config import CONFIG, WEIGHTS, open_adapter
from danlu.adapters.peft_folder import add_adapter, write_adapter
from danlu.adapters.peft_stacked import stacked_tensors, unstacked
from danlu.adapters.peft_values import PREFIX
from danlu.core.errors import ModelError
from danlu.models.loading import load
from danlu.recipe import sections

EXPERTS, OUTPUTS, INPUTS, RANK = 5, 6, 7, 3


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) for shape in ((EXPERTS, RANK, INPUTS), (EXPERTS, OUTPUTS, RANK)))  # type: ignore[return-value]


def test_rows_of_a_lie_by_expert_and_columns_of_b_by_rank() -> None:
    a, b = factors()
    tensors = stacked_tensors({"mlp.experts.down_proj": (a, b)})
    flat_a, flat_b = (tensors[f"{PREFIX}mlp.experts.{end}.weight"] for end in ("lora_A", "lora_B"))
    # What PEFT 0.21's ParamWrapper multiplies.
    a_of_peft = flat_a.reshape(EXPERTS, -1, INPUTS)
    b_of_peft = flat_b.reshape(OUTPUTS, -1, EXPERTS)
    torch.testing.assert_close(torch.einsum("ore,eri->eoi", b_of_peft, a_of_peft), b @ a)
    by_expert = flat_b.reshape(OUTPUTS, EXPERTS, -1)  # the negative control: B's columns in the order of A's rows
    assert not torch.allclose(torch.einsum("oer,eri->eoi", by_expert, a_of_peft), b @ a, rtol=0.1)
    again = unstacked("mlp.experts.down_proj", flat_a, flat_b, RANK, "file")
    assert all(torch.equal(one, other) for one, other in zip(again, (a, b), strict=True))


def test_the_first_parameter_is_wrapped_innermost() -> None:
    a, b = factors()
    both = stacked_tensors({"mlp.experts.down_proj": (2 * a, b), "mlp.experts.gate_up_proj": (a, b)})
    wrapped = {key.removeprefix(PREFIX).removesuffix(".weight") for key in both}
    assert wrapped == {f"mlp.experts{base}.lora_{factor}" for base in ("", ".base_layer") for factor in "AB"}
    inner, outer = (both[f"{PREFIX}mlp.experts{base}.lora_A.weight"] for base in (".base_layer", ""))
    assert torch.equal(inner, a.flatten(0, 1)) and torch.equal(outer, 2 * inner)
    alone = stacked_tensors({"mlp.experts.gate_up_proj": (a, b)})
    assert set(alone) == {f"{PREFIX}mlp.experts.lora_{factor}.weight" for factor in "AB"}


def written(base: Path, folder: Path, *targets: str) -> Path:
    adapters = adapter_set(load(base))
    adapters.add("one", sections.Lora(targets=list(targets), rank=4))
    write_adapter(adapters, "one", folder, base="base", base_fingerprint=None)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 7, "rank_pattern": {}}, r"experts.down_proj are \[16, 48\] and \[32, 16\], its config says rank 7"),
        ({"r": 8, "rank_pattern": {}}, r"make \[2, 32, 48\] matrices, this model has \[4, 32, 48\]"),
        ({"target_parameters": None}, "experts has factors for 1 parameters of .*experts, and .* names none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which PEFT does not compute for stacked"),
    ],
)
def test_a_config_that_is_not_of_these_tensors_is_refused(
    bases: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = changed(written(bases["mixtral"], tmp_path, "experts.down_proj"), CONFIG, **change)
    with pytest.raises(ModelError, match=said):
        add_adapter(adapter_set(load(bases["mixtral"])), "one", open_adapter(folder))


def test_tensors_of_parameters_that_are_no_targets_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = written(bases["mixtral"], tmp_path, "experts")
    changed(folder, CONFIG, target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(ModelError, match="has factors for 2 parameters of .*experts, and .* names down_proj"):
        add_adapter(adapter_set(load(bases["mixtral"])), "one", open_adapter(folder))


def test_an_adapter_of_experts_does_not_fit_a_dense_model(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = written(bases["mixtral"], tmp_path, "experts")
    with pytest.raises(ModelError, match="is for model.layers.0.mlp.experts.*, a layer that this model does not have"):
        add_adapter(adapter_set(load(bases["llama"])), "one", open_adapter(folder))


def test_a_lost_factor_is_told(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = written(bases["mixtral"], tmp_path, "experts")
    tensors = load_file(folder / WEIGHTS)
    lost = next(key for key in tensors if key.endswith("experts.lora_B.weight"))
    save_file({key: value for key, value in tensors.items() if key != lost}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="experts.down_proj.lora_B.weight is missing"):
        add_adapter(adapter_set(load(bases["mixtral"])), "one", open_adapter(folder))


def test_peft_has_no_dropout_and_no_dora_on_experts(bases: dict[str, Path]) -> None:
    """Why danlu refuses DoRA there: nobody else could load it. A PEFT that can is to be looked at."""
    from builders.peft_reference import hugging_face

    for wanted in ({"use_dora": True}, {"lora_dropout": 0.1}):
        config = peft.LoraConfig(target_modules=[], target_parameters=["experts.down_proj"], **wanted)
        with pytest.raises(ValueError, match="does not work with"):
            peft.get_peft_model(hugging_face(bases["mixtral"]), config)
