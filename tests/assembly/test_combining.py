"""Several LoRA folders made one, against PEFT's add_weighted_adapter on the same folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder, changed, of_another_tool, widened
from builders.tiny_adapters import logits
from builders.tiny_run import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from danlu.adapters.adapter_config import CONFIG, DANLU, WEIGHTS
from danlu.adapters.combine import Combination
from danlu.assembly.combining import combine
from danlu.assembly.merging import merge
from danlu.core.errors import ModelError, ResourceError
from danlu.models.hf_folder import SINGLE_FILE
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.numerics.relative_error import RelativeErrors
from danlu.recipe import sections

STRENGTHS = (0.7, -0.4, 1.2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "base"
    save(tiny_model(num_key_value_heads=4), folder)
    return folder


@pytest.fixture(scope="module")
def three(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one rank, with scales of their own; one of them on fewer layers."""
    made = [
        sections.Lora(rank=4),
        sections.Lora(rank=4, alpha=3, scaling="rslora"),
        sections.Lora(rank=4, targets=["attention"], alpha_pattern={"q_proj": 9}),
    ]
    folder = tmp_path_factory.mktemp("three")
    return [adapter_folder(base, folder / str(number), one, seed=number) for number, one in enumerate(made)]


def pefts(base: Path, folders: list[Path], **how: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of PEFT's combined adapter, by module."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, folders[0], adapter_name="0")
    for number, folder in enumerate(folders[1:], start=1):
        adapted.load_adapter(folder, adapter_name=str(number))
    adapted.base_model.add_weighted_adapter([str(n) for n in range(len(folders))], list(STRENGTHS), "all", **how)
    return {
        name.removeprefix("base_model.model."): (module.lora_A["all"].weight.data, module.lora_B["all"].weight.data)
        for name, module in adapted.named_modules()
        if hasattr(module, "lora_A") and "all" in module.lora_A
    }


def ours(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = load_file(folder / WEIGHTS)
    names = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in tensors}
    return {
        name: (tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"])
        for name in names
    }


def test_linear_is_pefts(base: Path, tmp_path: Path, three: list[Path]) -> None:
    report = combine(three, tmp_path / "out", Combination(STRENGTHS, "linear"))
    found, expected = ours(tmp_path / "out"), pefts(base, three, combination_type="linear")
    assert found.keys() == expected.keys()
    for name, factors in found.items():
        for one, other in zip(factors, expected[name], strict=True):
            torch.testing.assert_close(one, other)
    assert report.errors.worst[1] >= report.errors.mean > 0.1  # it is not the sum of the changes, and says so
    wrong = pefts(base, three[::-1], combination_type="linear")
    assert not torch.allclose(found["model.layers.0.self_attn.q_proj"][0], wrong["model.layers.0.self_attn.q_proj"][0])


@pytest.mark.parametrize("place", range(3))
def test_a_module_that_is_not_finite_is_the_worst(place: int) -> None:
    errors = {f"m{number}": 0.1 * (number + 1) for number in range(3)} | {f"m{place}": float("nan")}
    assert RelativeErrors(errors).worst[0] == f"m{place}"


def test_cat_is_pefts_and_exact(base: Path, tmp_path: Path, three: list[Path]) -> None:
    report = combine(three, tmp_path / "out", Combination(STRENGTHS, "cat"))
    expected = pefts(base, three, combination_type="cat")
    for name, (a, b) in ours(tmp_path / "out").items():
        rank = len(a)  # PEFT fills up with zeros where an adapter is not there
        torch.testing.assert_close(a, expected[name][0][:rank])
        torch.testing.assert_close(b, expected[name][1][:, :rank])
        assert rank == (12 if "self_attn" in name else 8) and not expected[name][0][rank:].any()
    assert report.errors == {} and report.errors.mean == 0.0
    merge(three, tmp_path / "merged", combination=Combination(STRENGTHS))
    combined = adapted_logits(base, tmp_path / "out")
    torch.testing.assert_close(combined, logits(load(tmp_path / "merged")), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(combined, adapted_logits(base, three[0]), atol=1e-3)
    with_peft = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "out"
    )
    tokens = torch.arange(5)
    with torch.no_grad():
        theirs = with_peft(input_ids=tokens.unsqueeze(0)).logits[0]
    found = adapted_logits(base, tmp_path / "out", tokens=torch.arange(16))[:5]
    torch.testing.assert_close(theirs, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [6, 32])
@pytest.mark.parametrize("majority", ["total", "frequency"])
def test_ties_is_pefts_of_the_changes(base: Path, tmp_path: Path, three: list[Path], rank: int, majority: Any) -> None:
    how = Combination(STRENGTHS, "ties", 0.4, majority)
    report = combine(three, tmp_path / "out", how, rank=rank)
    expected = pefts(
        base, three, combination_type="ties_svd", density=0.4, majority_sign_method=majority, svd_rank=rank
    )
    for name, (a, b) in ours(tmp_path / "out").items():
        assert len(a) == rank
        torch.testing.assert_close(b @ a, expected[name][1] @ expected[name][0], rtol=1e-5, atol=1e-5)
    merge(three, tmp_path / "merged", combination=how)
    exact = torch.allclose(adapted_logits(base, tmp_path / "out"), logits(load(tmp_path / "merged")), atol=1e-4)
    assert exact == (rank == 32)  # as far as the ranks go; and what is cut off is said
    assert (report.errors.worst[1] < 1e-5) == (rank == 32)
    if rank == 6:
        assert 0.1 < report.errors.mean < report.errors.worst[1] < 1


def test_what_is_cut_off_is_measured(tmp_path: Path, three: list[Path]) -> None:
    """The error of a rank is what the singular values beyond it say."""
    how = Combination(STRENGTHS, "dare-linear", 0.5, seed=3)
    combine(three, tmp_path / "whole", how, rank=32)
    report = combine(three, tmp_path / "cut", how, rank=5)
    for name, (a, b) in ours(tmp_path / "whole").items():
        values = torch.linalg.svdvals(b @ a)
        expected = values[5:].square().sum().sqrt() / values.square().sum().sqrt()
        assert report.errors[name] == pytest.approx(float(expected), rel=1e-3)
    other = combine(three, tmp_path / "other", Combination(STRENGTHS, "dare-linear", 0.5, seed=4), rank=5)
    again = combine(three, tmp_path / "again", how, rank=5)
    assert again.errors == report.errors != other.errors


def test_of_a_large_matrix_a_few_directions_are_found_as_well(tmp_path: Path) -> None:
    save(tiny_model(hidden_size=128, intermediate_size=160), tmp_path / "base")
    section = sections.Lora(rank=1, targets=["down_proj"])
    folders = [adapter_folder(tmp_path / "base", tmp_path / f"{seed}", section, seed=seed) for seed in (1, 2)]
    how = Combination((1.0, 1.0), "ties", 0.5)
    report = combine(folders, tmp_path / "out", how, rank=2)
    whole = combine(folders, tmp_path / "whole", how, rank=128)
    assert whole.errors.worst[1] < 1e-5
    for name, (a, b) in ours(tmp_path / "whole").items():
        values = torch.linalg.svdvals(b @ a)
        expected = values[2:].square().sum().sqrt() / values.square().sum().sqrt()
        assert report.errors[name] == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize("family", [{"model_type": "phi3", "pad_token_id": 0}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("method", ["cat", "ties", "dare-linear"])
def test_fused_layers_and_embeddings(tmp_path: Path, family: dict[str, Any], method: Any) -> None:
    base = tmp_path / "base"
    save(tiny_model(**family), base)
    made = [sections.Lora(), sections.Lora(rank=3, targets=["v_proj", "embed_tokens"])]
    folders = [adapter_folder(base, tmp_path / str(seed), one, seed=seed) for seed, one in enumerate(made)]
    how = Combination((1.0, 0.5), method, 1.0 if method == "cat" else 0.6)
    combine(folders, tmp_path / "out", how, rank=64)
    merge(folders, tmp_path / "merged", combination=how)
    found = adapted_logits(base, tmp_path / "out")
    torch.testing.assert_close(found, logits(load(tmp_path / "merged")), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, logits(load(base)), atol=1e-3)


def test_what_the_folder_says(base: Path, tmp_path: Path, three: list[Path]) -> None:
    lower = adapter_folder(base, tmp_path / "lower", sections.Lora())
    uppers = [
        adapter_folder(base, tmp_path / f"upper-{seed}", sections.Lora(rank=2), seed=seed, below=(lower,))
        for seed in (2, 3)
    ]
    (uppers[1] / "tokenizer.json").write_text("{}")
    combine(uppers, tmp_path / "out", Combination((1.0, 1.0), "cat"))
    config, own = (json.loads((tmp_path / "out" / file).read_text()) for file in (CONFIG, DANLU))
    assert config["peft_type"] == "LORA" and config["r"] == config["lora_alpha"] == 4
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert own["below"] == [str(lower)] and own["made_from"] == [str(one) for one in uppers]
    assert own["base_fingerprint"] == json.loads((uppers[0] / DANLU).read_text())["base_fingerprint"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    merge([tmp_path / "out"], tmp_path / "merged")
    expected = adapted_logits(base, lower, *uppers)
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, rtol=1e-5, atol=1e-5)


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (sections.Dora(), "is DoRA, and its change is not the product of two factors. Merge it into its base"),
        (sections.Vera(rank=16), "is VERA; only LoRA adapters become one adapter"),
        (sections.Lora(modules_to_save=["norm"]), "trains model.norm.weight in full, which no LoRA adapter can add up"),
    ],
)
def test_other_kinds(base: Path, tmp_path: Path, three: list[Path], section: Any, said: str) -> None:
    other = adapter_folder(base, tmp_path / "other", section)
    with pytest.raises(ModelError, match=said):
        combine([three[0], other], tmp_path / "out", Combination((1.0, 1.0), "cat"))
    assert not (tmp_path / "out").exists()


def test_an_embedding_beside_its_adapter_stays(base: Path, tmp_path: Path) -> None:
    """PEFT writes it; it has to be one and the same."""
    section = sections.Lora(rank=2, targets=["embed_tokens"])
    folders = [adapter_folder(base, tmp_path / str(seed), section, seed=seed) for seed in (1, 2)]
    key = "base_model.model.model.embed_tokens.base_layer.weight"
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    for folder in folders:
        save_file(load_file(folder / WEIGHTS) | {key: embedding}, folder / WEIGHTS)
    combine(folders, tmp_path / "out", Combination((1.0, 1.0), "cat"))
    assert torch.equal(load_file(tmp_path / "out" / WEIGHTS)[key], embedding)
    save_file(load_file(folders[1] / WEIGHTS) | {key: embedding + 1}, folders[1] / WEIGHTS)
    with pytest.raises(ModelError, match="embed_tokens.base_layer.weight is not that of the others"):
        combine(folders, tmp_path / "never", Combination((1.0, 1.0), "cat"))


def test_what_does_not_add_up(base: Path, tmp_path: Path, three: list[Path]) -> None:
    both = Combination((1.0, 1.0), "linear")
    small = adapter_folder(base, tmp_path / "small", sections.Lora(rank=2))
    with pytest.raises(ModelError, match=r"linear sums factors of one rank, here are \[2, 4\]. Use --method cat"):
        combine([three[0], small], tmp_path / "out", both)
    save(tiny_model(seed=3, num_key_value_heads=4), tmp_path / "base")
    foreign = adapter_folder(tmp_path / "base", tmp_path / "foreign", sections.Lora(rank=4))
    for folder in (foreign, of_another_tool(foreign)):
        with pytest.raises(ModelError, match=r"foreign: was trained on another base \(.*base\) than "):
            combine([three[0], folder], tmp_path / "out", both)
    changed(foreign, CONFIG, base_model_name_or_path=str(base.resolve()))
    with pytest.raises(ModelError, match=r"down_proj: the adapters are of different models: it is \[32, 48\] and \[33"):
        combine([three[0], widened(foreign, "1.mlp.down_proj.lora_B")], tmp_path / "out", both)
    with pytest.raises(ResourceError, match="is there already"):
        combine(three[:2], base, both)


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of a base with experts, of which one is on fewer matrices."""
    folder = tmp_path_factory.mktemp("experts")
    save(tiny_model(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2), folder / "base")
    made = [sections.Lora(rank=3, targets=["q_proj", "experts"]), sections.Lora(rank=2, targets=["experts.down_proj"])]
    return [adapter_folder(folder / "base", folder / str(n), one, seed=n) for n, one in enumerate(made)]


def test_adapters_of_experts_are_combined_by_expert(of_experts: list[Path], tmp_path: Path) -> None:
    """Side by side they are what both merged into the base are; cut to a rank, the nearest for each expert."""
    combine(of_experts, tmp_path / "cat", Combination((0.7, -0.4), "cat"))
    both = logits(load(merged_folder(of_experts, tmp_path / "whole", (0.7, -0.4))))
    merge([tmp_path / "cat"], tmp_path / "merged")
    torch.testing.assert_close(logits(load(tmp_path / "merged")), both, rtol=1e-5, atol=1e-5)
    one = logits(load(merged_folder(of_experts[:1], tmp_path / "one", (0.7,))))
    assert (one - both).abs().max() > 1e-3  # the negative control: the second adapter matters
    full = combine(of_experts, tmp_path / "ties", Combination((0.7, -0.4), "ties"), rank=48)
    assert max(error for name, error in full.errors.items() if "experts" in name) < 1e-5
    low = combine(of_experts, tmp_path / "low", Combination((0.7, -0.4), "ties", density=0.5), rank=1)
    assert min(error for name, error in low.errors.items() if "experts" in name) > 0.1
    values = json.loads((tmp_path / "cat" / CONFIG).read_text())
    names = {name.rpartition(".")[2] for name in values["target_parameters"]}
    assert names == {"gate_up_proj", "down_proj"} and values["target_modules"] == ["q_proj"]


def test_ties_trims_each_expert_as_a_tensor_of_its_own(of_experts: list[Path], tmp_path: Path) -> None:
    """This base has a tensor for each expert: merged, each is what its own changes alone combine to."""
    ties = Combination((0.7, -0.4), "ties", density=0.3)
    start = load_file(of_experts[0].parent / "base" / SINGLE_FILE)
    merge(of_experts, tmp_path / "both", combination=ties)
    for number, folder in enumerate(of_experts):
        merge([folder], tmp_path / str(number))
    both, *alone = (load_file(tmp_path / name / SINGLE_FILE) for name in ("both", "0", "1"))
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(4)]
    changes = [[merged[name] - start[name] for name in names] for merged in alone]
    for number, name in enumerate(names):
        expected = start[name] + ties.of([of_adapter[number] for of_adapter in changes], never)
        assert torch.equal(both[name], expected)
    together = ties.of([torch.stack(of_adapter) for of_adapter in changes], never)  # the negative control
    assert not torch.equal(both[names[0]], start[names[0]] + together[0])
    combine(of_experts, tmp_path / "adapter", ties, rank=48)
    merge([tmp_path / "adapter"], tmp_path / "of-adapter")
    for name in names:
        torch.testing.assert_close(
            load_file(tmp_path / "of-adapter" / SINGLE_FILE)[name], both[name], rtol=0, atol=1e-5
        )


def never(number: int) -> torch.Generator:
    raise AssertionError("nothing is drawn here")


def merged_folder(folders: list[Path], target: Path, weights: tuple[float, ...]) -> Path:
    merge(folders, target, combination=Combination(weights))
    return target
