"""Rows of single tokens of several adapters in one adapter folder: PEFT computes what merging them gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder, changed
from builders.peft_reference import hugging_face, theirs
from builders.tiny_adapters import logits
from builders.tiny_run import tiny_model
from builders.tiny_world import World
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from danlu.adapters.adapter_config import CONFIG, DANLU, WEIGHTS
from danlu.adapters.combine import Combination
from danlu.assembly.base_model import find_base, with_rows_for
from danlu.assembly.combining import combine
from danlu.assembly.merging import merge
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections

PLAN, ACT = AddedToken("<plan>", 64), AddedToken("<act>", 65)
SECTION = sections.Lora(rank=2, targets=["attention"])
TEXT = torch.tensor([7, 64, 9, 65, 3, 20, 64, 7, 31, 65, 65, 2, 3, 7, 64, 40])
WEIGHTED = (0.7, -0.4)


def with_rows(base: Path, folder: Path, *tokens: AddedToken, more: tuple[int, ...] = (), **settings: Any) -> Path:
    ids = [*more, *(token.id for token in tokens)]
    section = settings.pop("section", SECTION)
    token_ids = {"embedding": ids, "head": ids}
    return adapter_folder(base, folder, section, tokens=tokens, token_ids=token_ids, size=0.2, **settings)


@pytest.fixture(scope="module", params=["tied", "untied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    save(tiny_model(tie_word_embeddings=request.param == "tied"), folder)
    return folder


@pytest.fixture(scope="module")
def two(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both train the rows of one new token and of the base's token 7; the second of another new token too."""
    folder = tmp_path_factory.mktemp("two")
    return [
        with_rows(base, folder / "0", PLAN, more=(7,), seed=1),
        with_rows(base, folder / "1", PLAN, ACT, more=(3, 7), seed=2),
    ]


def extended(base: Path) -> Path:
    return with_rows_for(find_base(base), [PLAN, ACT]).folder


def close(some: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(some, other, rtol=1e-5, atol=1e-5))


def of_peft(base: Path, folder: Path) -> Tensor:
    padded = theirs(peft.PeftModel.from_pretrained(hugging_face(extended(base)), folder), TEXT)
    return padded[:, : ACT.id + 1]


@pytest.mark.parametrize("method", ["cat", "ties", "dare-linear"])
def test_peft_computes_what_merging_into_the_base_does(
    base: Path, two: list[Path], tmp_path: Path, method: Any
) -> None:
    density = 1.0 if method == "cat" else 0.6
    combination = Combination(WEIGHTED, method, density, seed=3)
    combine(two, tmp_path / "one", combination)
    merge(two, tmp_path / "merged", combination=combination)
    rows = {key: tensor for key, tensor in load_file(tmp_path / "one" / WEIGHTS).items() if "token_adapter" in key}
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    for key, tensor in rows.items():
        name = key.removeprefix("base_model.model.").partition(".token_adapter")[0]
        assert torch.equal(tensor, whole[f"{name}.weight"][[3, 7, 64, 65]])
    config = json.loads((tmp_path / "one" / CONFIG).read_text())
    assert len(config["trainable_token_indices"]) == len(rows)
    found = of_peft(base, tmp_path / "one")
    assert close(found, adapted_logits(extended(base), tmp_path / "one", tokens=TEXT))
    if method == "cat":  # of the others the factors are rounded to a rank
        assert close(found, logits(load(tmp_path / "merged"), TEXT))
    assert not close(found, of_peft(base, two[0]))


def test_rows_are_the_base_s_and_the_weighted_changes(base: Path, two: list[Path], tmp_path: Path) -> None:
    combine(two, tmp_path / "one", Combination(WEIGHTED, "cat"))
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    start = load(extended(base)).get_parameter("embed_tokens.weight").detach()
    first, second, found = (load_file(folder / WEIGHTS)[key] for folder in (*two, tmp_path / "one"))
    by_hand = {
        3: start[3] - 0.4 * (second[0] - start[3]),
        7: start[7] + 0.7 * (first[0] - start[7]) - 0.4 * (second[1] - start[7]),
        64: start[64] + 0.7 * (first[1] - start[64]) - 0.4 * (second[2] - start[64]),
        65: start[65] - 0.4 * (second[3] - start[65]),
    }
    torch.testing.assert_close(found, torch.stack(list(by_hand.values())), rtol=1e-6, atol=1e-6)
    own = json.loads((tmp_path / "one" / DANLU).read_text())
    assert [token["text"] for token in own["tokens"]] == ["<plan>", "<act>"]
    assert json.loads((tmp_path / "one" / CONFIG).read_text())["base_model_name_or_path"] == str(base.resolve())


def test_rows_upon_an_adapter_change_its_rows(base: Path, tmp_path: Path) -> None:
    lower = with_rows(base, tmp_path / "lower", PLAN, more=(7,))
    uppers = [
        with_rows(base, tmp_path / f"upper-{seed}", PLAN, ACT, more=(7,), seed=seed, below=(lower,)) for seed in (2, 3)
    ]
    combination = Combination(WEIGHTED, "cat")
    combine(uppers, tmp_path / "one", combination)
    merge(uppers, tmp_path / "merged", combination=combination)
    found = adapted_logits(extended(base), lower, tmp_path / "one", tokens=TEXT)
    assert close(found, logits(load(tmp_path / "merged"), TEXT))
    assert not close(found, adapted_logits(extended(base), tmp_path / "one", tokens=TEXT))


def test_an_adapter_of_peft_on_a_resized_base(base: Path, two: list[Path], tmp_path: Path) -> None:
    """PEFT writes the matrices that it has resized with the rows."""
    other = shutil.copytree(two[1], tmp_path / "other")
    start = load(extended(base)).get_parameter("embed_tokens.weight").detach()
    key = "base_model.model.model.embed_tokens.token_adapter.base_layer.weight"
    save_file(load_file(other / WEIGHTS) | {key: start}, other / WEIGHTS)
    combine([two[0], other], tmp_path / "one", Combination(WEIGHTED, "cat"))
    combine(two, tmp_path / "same", Combination(WEIGHTED, "cat"))
    found, same = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "same"))
    assert found.keys() == same.keys() and all(torch.equal(found[name], same[name]) for name in found)
    save_file(load_file(other / WEIGHTS) | {key: start + 1}, other / WEIGHTS)
    with pytest.raises(ModelError, match=r"embed_tokens.token_adapter.base_layer.weight is not the base's own"):
        combine([two[0], other], tmp_path / "never", Combination(WEIGHTED, "cat"))


def test_what_cannot_be_combined(base: Path, two: list[Path], tmp_path: Path) -> None:
    both = Combination(WEIGHTED, "cat")
    of_all = adapter_folder(base, tmp_path / "all", sections.Lora(rank=2, targets=["embed_tokens"]))
    with pytest.raises(ModelError, match=r"model.embed_tokens: one adapter trains rows .* another a low-rank change"):
        combine([two[0], of_all], tmp_path / "out", both)
    other = with_rows(base, tmp_path / "other", AddedToken("<end>", 64))
    with pytest.raises(ModelError, match="new tokens of the same id 64: '<plan>' and '<end>'"):
        combine([two[0], other], tmp_path / "out", both)
    uppers = [with_rows(base, tmp_path / f"upper-{seed}", PLAN, seed=seed, below=(of_all,)) for seed in (2, 3)]
    with pytest.raises(ModelError, match=r"all: changes all rows of model.embed_tokens, and adapters upon it"):
        combine(uppers, tmp_path / "out", both)
    beyond = shutil.copytree(two[1], tmp_path / "beyond")
    changed(beyond, CONFIG, trainable_token_indices={"embed_tokens": [900]})
    with pytest.raises(ModelError, match="has 900, and this base has 72 rows"):
        combine([two[0], beyond], tmp_path / "out", both)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_has_the_tokens_of_all(tiny_world: World, tmp_path: Path) -> None:
    plan, act = AddedToken("<plan>", 400), AddedToken("<act>", 401)
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.tokenizer)
    folders = []
    for number, tokens in enumerate([[plan], [plan, act]]):
        folder = with_rows(tiny_world.base, tmp_path / str(number), *tokens)
        tokenizer.add_tokens([token.text for token in tokens])
        tokenizer.save_pretrained(folder)
        folders.append(folder)
    combine(folders, tmp_path / "one", Combination(WEIGHTED, "cat"))
    merge(folders, tmp_path / "merged")
    for name in ("one", "merged"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).convert_tokens_to_ids(["<plan>", "<act>"]) == [400, 401]
