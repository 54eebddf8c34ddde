"""Small adapters: of the kinds of the large ones, on layers that stand for theirs, and they change what is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder
from builders.tiny_adapters import logits

from danlu.adapters.adapter_config import adapter_stack, read_adapter_config
from danlu.core.errors import ModelError, RecipeError
from danlu.models.config import ModelConfig
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.saving import save
from danlu.parallel.layout import Layout
from danlu.recipe import sections
from danlu.verification.proxy_adapters import RANK, TOKENS, WIDTH, proxy_adapter_folders, proxy_section
from danlu.verification.proxy_model import proxy_config

LARGE = read_config_values(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 300,
        "mlp_bias": True,
    }
)
SMALL = proxy_config(LARGE, Layout(tensor=2))
KINDS = {
    "bottleneck": sections.Bottleneck(width=16),
    "dora": sections.Dora(rank=8),
    "ia3": sections.Ia3(),
    "lora": sections.Lora(rank=8, alpha=32, targets=["all-linear", "embed_tokens"], modules_to_save=["lm_head"]),
    "mora": sections.Mora(rank=8),
    "prefix": sections.Prefix(tokens=5),
    "prompt": sections.Prompt(tokens=5),
    "vera": sections.Vera(rank=32),
}


def model_folder(config: ModelConfig, folder: Path) -> Path:
    model = build(config)
    initialize(model, 0)
    save(model, folder)
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large model and a small one."""
    folder = tmp_path_factory.mktemp("bases")
    return model_folder(LARGE, folder / "large"), model_folder(SMALL, folder / "small")


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_the_same_kind_sits_on_the_small_model_and_matters(
    kind: str, bases: tuple[Path, Path], tmp_path: Path
) -> None:
    large, small = bases
    given = adapter_folder(large, tmp_path / "given", KINDS[kind])
    (made,), words = proxy_adapter_folders([str(given)], LARGE, small, tmp_path / "small", seed=3)
    folder = read_adapter_config(Path(made))
    assert (folder.kind, words) == (read_adapter_config(given).kind, kind)
    without, along = logits(load(small)), adapted_logits(small, Path(made))
    assert float((along - without).abs().max()) > 5e-3 * float(without.abs().max())
    (again,), _ = proxy_adapter_folders([str(given)], LARGE, small, tmp_path / "again", seed=3)
    (other,), _ = proxy_adapter_folders([str(given)], LARGE, small, tmp_path / "other", seed=4)
    assert torch.equal(adapted_logits(small, Path(again)), along)
    assert not torch.equal(adapted_logits(small, Path(other)), along)


def test_what_lies_below_what_stays(bases: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = bases
    below = adapter_folder(large, tmp_path / "below", sections.Lora(rank=8))
    upon = adapter_folder(large, tmp_path / "upon" / "adapter", sections.Ia3(), below=(below,))
    other = adapter_folder(large, tmp_path / "other", sections.Vera())
    made, words = proxy_adapter_folders([str(other), str(tmp_path / "upon")], LARGE, small, tmp_path / "small", seed=0)
    assert words == "vera and lora and ia3"
    assert [[one.path.name for one in adapter_stack(path)] for path in made] == [["0-other"], ["1-below", "2-upon"]]
    assert upon.is_dir()


def test_one_with_rows_of_single_tokens_has_them_on_the_small_model(bases: tuple[Path, Path], tmp_path: Path) -> None:
    large, small = bases
    ids = {"embedding": [3, 9], "head": [3, 9]}
    given = adapter_folder(large, tmp_path / "given", sections.Lora(rank=4), token_ids=ids)
    (made,), _ = proxy_adapter_folders([str(given)], LARGE, small, tmp_path / "small", seed=3)
    rows = read_adapter_config(Path(made)).values["trainable_token_indices"]
    size = SMALL.vocab_size
    assert set(map(tuple, rows.values())) == {(1, size // 2, size - 1)}


def test_an_adapter_of_another_base_is_told(bases: tuple[Path, Path], tmp_path: Path) -> None:
    wider = model_folder(replace(LARGE, hidden_size=96), tmp_path / "wider")
    given = adapter_folder(wider, tmp_path / "given", sections.Lora(rank=4))
    with pytest.raises(ModelError, match="the adapter is of another base"):
        proxy_adapter_folders([str(given)], LARGE, bases[1], tmp_path / "small", seed=0)


def small(section: Any) -> Any:
    return proxy_section(section, LARGE, SMALL)


def test_sizes_get_small_and_scales_stay() -> None:
    lora = small(sections.Lora(rank=64, alpha=128, rank_pattern={"q_proj": 32}, alpha_pattern={"q_proj": 64}))
    assert (lora.rank, lora.alpha) == (RANK, 8.0)
    assert (lora.rank_pattern, lora.alpha_pattern) == ({"q_proj": 6}, {"q_proj": 4.0})
    rslora = small(sections.RsLora(rank=16, alpha=8))
    assert rslora.alpha / rslora.rank**0.5 == 8 / 16**0.5
    assert small(sections.Lora(rank=2, alpha=7)).alpha == 7
    assert (small(sections.Vera()).rank, small(sections.Mora()).rank) == (RANK, RANK)
    assert (small(sections.Bottleneck()).width, small(sections.Prompt()).tokens) == (WIDTH, TOKENS)
    prefix = small(sections.Prefix(projection=512))
    assert (prefix.tokens, prefix.projection) == (TOKENS, WIDTH)
    assert small(sections.Continue()) == sections.Continue()


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["all-linear", "q_proj"], ["all-linear", "q_proj"]),
        (["model.layers.3.self_attn.q_proj"], ["layers.1.attention.q_proj"]),
        (["layers.1.attention.q_proj", "layers.0.attention.q_proj"], ["layers.0.attention.q_proj"]),
        ([r".*layers\.[23]\..*up_proj"], ["layers.1.mlp.up_proj"]),
        ([r".*layers\.[0-3]\..*up_proj"], [r".*layers\.[0-3]\..*up_proj"]),
    ],
)
def test_layers_by_number_are_those_that_stand_for_them(targets: list[str], wanted: list[str]) -> None:
    section = sections.Lora(targets=targets, rank_pattern={"layers.3.self_attn.q_proj": 2, "up_proj": 3})
    assert small(section).targets == wanted
    assert small(section).rank_pattern == {"layers.1.attention.q_proj": 2, "up_proj": 3}


def test_modules_trained_in_full_are_of_layers_that_are_there() -> None:
    section = sections.Lora(modules_to_save=["lm_head", "model.layers.2.mlp", "model.layers.3.mlp"])
    assert small(section).modules_to_save == ["lm_head", "model.layers.1.mlp"]
    ia3 = small(sections.Ia3(targets=["layers.3.mlp.down_proj"], feedforward=["layers.3.mlp.down_proj"]))
    assert ia3.targets == ia3.feedforward == ["layers.1.mlp.down_proj"]


def test_a_target_of_no_layer_is_told() -> None:
    with pytest.raises(RecipeError, match="'q_prj' matches no layer"):
        small(sections.Lora(targets=["q_prj"]))
