"""Merged models on disk: the same logits as base and adapters apart, and as PEFT's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.adapter_folders import adapted_logits, adapter_folder, changed, of_another_tool, widened
from builders.tiny_adapters import DOCUMENTS, logits
from builders.tiny_run import saved_models, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from danlu.adapters.combine import Combination
from danlu.adapters.peft_folder import DANLU, WEIGHTS
from danlu.assembly import merging
from danlu.assembly.frozen_base import load_frozen
from danlu.assembly.merging import merge
from danlu.assembly.quantizing import quantize
from danlu.core.errors import ModelError, ResourceError
from danlu.models.hf_folder import CONFIG, SINGLE_FILE, read_config
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "phi3": {"model_type": "phi3", "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "tied": {"tie_word_embeddings": True},
    "even": {"num_key_value_heads": 4},  # no matrix has a side below 32, which is as far as PEFT's decomposition goes
}
SECTIONS: list[tuple[str, Any]] = [
    ("llama", sections.Lora()),
    ("llama", sections.Dora(rank=3)),
    ("llama", sections.Pissa()),
    ("llama", sections.Lora(bias="all", modules_to_save=["norm", "lm_head"], targets=["q_proj", "embed_tokens"])),
    ("llama", sections.Ia3(targets=["q_proj", "mlp"], feedforward=["down_proj", "gate_proj", "up_proj"])),
    ("llama", sections.Vera(rank=16)),
    ("llama", sections.Mora(rank=4)),
    ("phi3", sections.Lora(targets=["q_proj", "up_proj"])),
    ("gemma2", sections.Lora(targets=["all-linear", "embed_tokens"])),
    ("tied", sections.Lora()),
    ("tied", sections.Lora(targets=["lm_head"])),
    ("tied", sections.Lora(targets=["q_proj", "embed_tokens"])),
    ("tied", sections.Lora(modules_to_save=["embed_tokens"])),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    folders = saved_models(folder, FAMILIES)
    save(tiny_model(seed=5, attention_bias=True), folder / "other")
    return {**folders, "other": folder / "other"}


def size_of(section: Any) -> float:
    return 0.3 if section.kind in ("ia3", "vera") else 0.05


@pytest.mark.parametrize(("family", "section"), SECTIONS)
def test_merged_is_unmerged(bases: dict[str, Path], tmp_path: Path, family: str, section: Any) -> None:
    folder = adapter_folder(bases[family], tmp_path / "adapter", section, size=size_of(section))
    report = merge([folder], tmp_path / "out")
    apart = adapted_logits(bases[family], folder)
    merged = load(tmp_path / "out")
    torch.testing.assert_close(logits(merged), apart, rtol=1e-5, atol=1e-5)
    assert (logits(load(bases[family])) - apart).abs().max() > 1e-2  # the negative control
    assert report.rounding == {} and not report.quantized
    assert report.base == bases[family] and report.adapters == (folder,)
    assert merged.config.tie_word_embeddings == (family == "tied" and section.targets == ["all-linear"])


@pytest.mark.parametrize("family", ["llama", "phi3", "tied"])
def test_the_merged_model_is_pefts(bases: dict[str, Path], tmp_path: Path, family: str) -> None:
    folder = adapter_folder(bases[family], tmp_path / "adapter", sections.Lora(rank=4, scaling="rslora"))
    merge([folder], tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    ours = load_file(tmp_path / "out" / SINGLE_FILE)
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if family == "tied" else set())
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)
    name = next(name for name in ours if "down_proj" in name)
    assert not torch.allclose(ours[name], load_file(bases[family] / SINGLE_FILE)[name], atol=1e-3)


def test_what_tools_read_of_it(bases: dict[str, Path], tmp_path: Path) -> None:
    """transformers loads it, also with a head that its base had tied."""
    folder = adapter_folder(bases["tied"], tmp_path / "adapter", sections.Lora(targets=["lm_head"]))
    merge([folder], tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    tokens = torch.arange(DOCUMENTS[-1])
    first = tokens[: DOCUMENTS[1]].unsqueeze(0)
    with torch.no_grad():
        theirs = model(input_ids=first).logits[0]
    ours = logits(load(tmp_path / "out"), tokens)[: DOCUMENTS[1]]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(load(bases["tied"]), tokens)[: DOCUMENTS[1]], theirs, atol=1e-3)


def test_weights_are_rounded_once_and_by_how_much_is_said(bases: dict[str, Path], tmp_path: Path) -> None:
    save(load(bases["llama"]), tmp_path / "base", dtype=torch.bfloat16)
    folder = adapter_folder(tmp_path / "base", tmp_path / "adapter", sections.Lora())
    report = merge([folder], tmp_path / "out")
    assert report.dtype == torch.bfloat16  # as the base
    merge([folder], tmp_path / "wide", dtype=torch.float32)
    written, exact = (load_file(tmp_path / name / SINGLE_FILE) for name in ("out", "wide"))
    base = load_file(tmp_path / "base" / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(written[one], exact[one].to(torch.bfloat16)) for one in exact)
    # Two roundings, as of the change before it is added, are something else.
    twice = base[name] + (exact[name] - base[name].float()).to(torch.bfloat16)
    assert not torch.equal(twice, written[name])
    error = (written[name].float() - exact[name]).norm() / exact[name].norm()
    assert report.rounding["layers.1.mlp.up_proj.weight"] == pytest.approx(float(error), rel=1e-4)
    assert 1e-3 < report.rounding.mean <= report.rounding.worst[1] < 2.0**-8
    assert report.rounding.worst[0] in report.rounding and not any("norm" in one for one in report.rounding)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_base_in_4_bits_is_merged_into_and_written_in_full(
    bases: dict[str, Path], tmp_path: Path, family: str
) -> None:
    # Magnitudes of magnitudes would be of all parts of a fused tensor together, of whose parts one by one they are not.
    section = sections.Nf4(double=family == "llama")
    quantize(bases[family], tmp_path / "nf4", section)
    folder = adapter_folder(bases[family], tmp_path / "adapter", sections.Lora())
    report = merge([folder], tmp_path / "out", into=tmp_path / "nf4")
    assert report.quantized and report.dtype == torch.float32
    apart = adapted_logits(bases[family], folder, model=load_frozen(tmp_path / "nf4", dtype=torch.float32).model)
    torch.testing.assert_close(logits(load(tmp_path / "out")), apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(apart, adapted_logits(bases[family], folder), atol=1e-3)
    rounded = merge([folder], tmp_path / "half", into=tmp_path / "nf4", dtype=torch.bfloat16)
    assert 1e-3 < rounded.rounding.mean < 2.0**-8 and len(rounded.rounding) == 16
    # The same base, packed while it is loaded.
    merge([folder], tmp_path / "here", quantization=section)
    ours, theirs = (load_file(tmp_path / name / SINGLE_FILE) for name in ("out", "here"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_an_adapter_was_trained_upon_is_merged_too(bases: dict[str, Path], tmp_path: Path) -> None:
    lower = adapter_folder(bases["llama"], tmp_path / "lower", sections.Lora(modules_to_save=["norm"]))
    upper = adapter_folder(bases["llama"], tmp_path / "upper", sections.Lora(rank=2), seed=2, below=(lower,))
    merge([upper], tmp_path / "out")
    both = adapted_logits(bases["llama"], lower, upper)
    torch.testing.assert_close(logits(load(tmp_path / "out")), both, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(adapted_logits(bases["llama"], of_another_tool(upper)), both, atol=1e-3)


# -- several ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(bases: dict[str, Path], tmp_path: Path) -> list[Path]:
    made = [sections.Lora(rank=4), sections.Lora(rank=4, targets=["attention"], alpha=3), sections.Lora(rank=2)]
    return [
        adapter_folder(bases["even"], tmp_path / f"adapter-{number}", section, seed=number)
        for number, section in enumerate(made)
    ]


def pefts(base: Path, folders: list[Path], **how: Any) -> dict[str, torch.Tensor]:
    """Weights of PEFT's merge: its combination of all the changes has full rank here, and so loses nothing."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, folders[0], adapter_name="0")
    for number, folder in enumerate(folders[1:], start=1):
        adapted.load_adapter(folder, adapter_name=str(number))
    names = [str(number) for number in range(len(folders))]
    adapted.base_model.add_weighted_adapter(names, list(how.pop("weights")), "all", svd_rank=32, **how)
    adapted.set_adapter("all")
    return dict(adapted.merge_and_unload().state_dict())


WEIGHTS_OF = (0.7, -0.4, 1.2)


@pytest.mark.parametrize(
    ("combination", "theirs"),
    [
        (Combination(WEIGHTS_OF), {"combination_type": "svd"}),
        (Combination(WEIGHTS_OF, "cat"), {"combination_type": "cat"}),
        (Combination(WEIGHTS_OF, "ties", 0.3), {"combination_type": "ties_svd", "density": 0.3}),
        (
            Combination(WEIGHTS_OF, "ties", 0.6, "frequency"),
            {"combination_type": "ties_svd", "density": 0.6, "majority_sign_method": "frequency"},
        ),
    ],
    ids=lambda value: value.method if isinstance(value, Combination) else "",
)
def test_several_are_merged_as_pefts_combinations(
    bases: dict[str, Path], tmp_path: Path, three: list[Path], combination: Combination, theirs: dict[str, Any]
) -> None:
    merge(three, tmp_path / "out", combination=combination)
    expected = pefts(bases["even"], three, weights=WEIGHTS_OF, **theirs)
    ours = load_file(tmp_path / "out" / SINGLE_FILE)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=2e-6)
    merge(three, tmp_path / "sum")  # weights 1: the negative control
    other = load_file(tmp_path / "sum" / SINGLE_FILE)
    assert not torch.allclose(other["model.layers.0.mlp.up_proj.weight"], ours["model.layers.0.mlp.up_proj.weight"])


def test_dare_depends_on_seed_and_name_alone(tmp_path: Path, three: list[Path]) -> None:
    found = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        merge(three, tmp_path / name, combination=Combination(WEIGHTS_OF, "dare-ties", 0.5, seed=seed))
        found[name] = load_file(tmp_path / name / SINGLE_FILE)
    assert all(torch.equal(tensor, found["again"][key]) for key, tensor in found["one"].items())
    assert any(not torch.equal(tensor, found["other"][key]) for key, tensor in found["one"].items())


@pytest.mark.parametrize(
    ("family", "section"),
    [("llama", sections.Dora()), ("phi3", sections.Lora(targets=["q_proj", "v_proj", "up_proj"]))],
)
def test_a_weight_scales_an_adapter(bases: dict[str, Path], tmp_path: Path, family: str, section: Any) -> None:
    """Of phi3 too, which keeps several matrices in one tensor."""
    folder = adapter_folder(bases[family], tmp_path / "adapter", section)
    merge([folder], tmp_path / "whole")
    merge([folder], tmp_path / "half", combination=Combination((0.5,)))
    base, whole, half = (load_file(one / SINGLE_FILE) for one in (bases[family], tmp_path / "whole", tmp_path / "half"))
    for name in base:
        torch.testing.assert_close(half[name], (base[name] + whole[name]) / 2, rtol=1e-5, atol=1e-6)


def test_what_both_were_trained_upon_counts_once(bases: dict[str, Path], tmp_path: Path) -> None:
    lower = adapter_folder(bases["llama"], tmp_path / "lower", sections.Lora())
    uppers = [
        adapter_folder(bases["llama"], tmp_path / f"upper-{seed}", sections.Lora(rank=2), seed=seed, below=(lower,))
        for seed in (2, 3)
    ]
    merge(uppers, tmp_path / "out")
    expected = adapted_logits(bases["llama"], lower, *uppers)
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, rtol=1e-5, atol=1e-5)
    alone = adapter_folder(bases["llama"], tmp_path / "alone", sections.Lora())
    with pytest.raises(
        ModelError, match="alone was trained on top of other adapters than .*upper-2: they change different"
    ):
        merge([uppers[0], alone], tmp_path / "never")


@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"]])
def test_several_of_which_one_unties_the_head(bases: dict[str, Path], tmp_path: Path, targets: list[str]) -> None:
    one = adapter_folder(bases["tied"], tmp_path / "one", sections.Lora())
    other = adapter_folder(bases["tied"], tmp_path / "other", sections.Lora(targets=targets), seed=2)
    merge([one, other], tmp_path / "out")
    assert not read_config(tmp_path / "out").tie_word_embeddings
    expected = adapted_logits(bases["tied"], one, other)
    torch.testing.assert_close(logits(load(tmp_path / "out")), expected, rtol=1e-5, atol=1e-5)


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_another_base_is_refused_unless_forced(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = adapter_folder(bases["llama"], tmp_path / "adapter", sections.Lora())
    out = tmp_path / "out"
    with pytest.raises(ModelError, match=r"was trained on another base .*llama.* than .*other: .* or give --force"):
        merge([folder], out, into=bases["other"])
    assert not out.exists()
    merge([folder], out, into=bases["other"], force=True)
    torch.testing.assert_close(logits(load(out)), adapted_logits(bases["other"], folder), rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="the adapter is of another base"):  # shapes are never forced
        merge([widened(folder, "down_proj.lora_B")], tmp_path / "never", force=True)
    with pytest.raises(ModelError, match="which danlu does not support"):
        merge([changed(folder, "adapter_config.json", use_bdlora={"nblocks": 2})], tmp_path / "never")
    with pytest.raises(ModelError, match="peft_type 'POLY' is not supported"):
        merge([changed(folder, "adapter_config.json", peft_type="POLY")], tmp_path / "never")


def test_a_base_that_moved_is_told_and_can_be_named(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = adapter_folder(bases["llama"], tmp_path / "adapter", sections.Lora())
    changed(folder, "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    with pytest.raises(
        ModelError, match=r"trained on cannot be had. .*gone: no such folder. Say where it is with --in"
    ):
        merge([folder], tmp_path / "out")
    merge([folder], tmp_path / "out", into=bases["llama"])
    changed(folder, "adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(ModelError, match="does not say which model it was trained on. Name it with --into FOLDER"):
        merge([folder], tmp_path / "again")


def test_several_of_other_tools_must_name_one_base(bases: dict[str, Path], tmp_path: Path) -> None:
    one, other = (
        of_another_tool(adapter_folder(bases[name], tmp_path / f"of-{name}", sections.Lora()))
        for name in ("llama", "other")
    )
    with pytest.raises(ModelError, match=r"of-other: was trained on .*other, the first adapter on .*llama"):
        merge([one, other], tmp_path / "out")
    merge([one, other], tmp_path / "out", into=bases["llama"])


def test_nothing_is_written_over(bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = adapter_folder(bases["llama"], tmp_path / "adapter", sections.Lora())
    monkeypatch.setattr(merging, "load_frozen", lambda *args, **more: pytest.fail("work was done before it was told"))
    for target in (bases["other"], folder, folder / WEIGHTS):
        with pytest.raises(ResourceError, match="is there already. Choose an empty or new folder"):
            merge([folder], target)
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    merge([folder], tmp_path / "empty")


@pytest.mark.parametrize(
    "section", [sections.Prefix(tokens=2), sections.Prompt(tokens=2), sections.Bottleneck(width=4)]
)
def test_what_is_no_weight_is_not_merged(bases: dict[str, Path], tmp_path: Path, section: Any) -> None:
    folder = adapter_folder(bases["llama"], tmp_path / "adapter", section)
    for combination in (None, Combination((0.5,))):
        with pytest.raises(
            ModelError, match=f"'0-.*' .{section.kind}. changes what flows through the model, not its we"
        ):
            merge([folder], tmp_path / "out", combination=combination)
    assert not (tmp_path / "out").exists()


def test_no_more_than_a_parameter_is_made_at_a_time(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base stays as it was loaded: what is written is made when it is needed, and not kept."""
    folder = adapter_folder(bases["llama"], tmp_path / "adapter", sections.Lora())
    seen = []
    real = merging.save

    def watched(model: Any, *args: Any, **more: Any) -> None:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        real(model, *args, **more)
        seen.append(all(torch.equal(before[name], now) for name, now in model.named_parameters()))

    monkeypatch.setattr(merging, "save", watched)
    merge([folder], tmp_path / "out")
    assert seen == [True]


def test_words_are_the_adapters_or_the_bases(bases: dict[str, Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    save(load(bases["llama"]), base)
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    merge([folder], tmp_path / "wordless")
    assert not (tmp_path / "wordless" / "tokenizer.json").exists()
    (base / "tokenizer.json").write_text('"of the base"')
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    merge([folder], tmp_path / "one")
    assert (tmp_path / "one" / "tokenizer.json").read_text() == '"of the base"'
    (folder / "tokenizer.json").write_text('"of the adapter"')
    merge([folder], tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == '"of the adapter"'
    for out in ("one", "other"):  # what ends an answer is not lost, whoever wrote the tokenizer
        assert json.loads((tmp_path / out / "generation_config.json").read_text()) == {"eos_token_id": [2, 7]}
    assert not (tmp_path / "other" / DANLU).exists() and (tmp_path / "other" / CONFIG).is_file()
