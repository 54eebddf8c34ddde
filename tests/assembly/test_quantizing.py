"""4-bit folders: read by transformers with bitsandbytes and by danlu, to the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.adapter_folders import adapter_folder, changed
from builders.tiny_adapters import DOCUMENTS, logits
from builders.tiny_run import saved_models, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from danlu.adapters.adapter_config import read_adapter_config
from danlu.assembly import quantized_folder, quantizing
from danlu.assembly.base_model import ORIGIN, check_base, find_base
from danlu.assembly.frozen_base import adapter_sites, load_frozen
from danlu.assembly.quantizing import quantize
from danlu.core.errors import ModelError, ResourceError
from danlu.models.hf_folder import CONFIG, INDEX, SINGLE_FILE, fingerprint
from danlu.models.loading import load
from danlu.models.saving import save
from danlu.recipe import sections

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "hidden_size": 64, "intermediate_size": 128},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "hidden_size": 64, "intermediate_size": 128},
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 128,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
}
TOKENS = torch.randint(0, 64, (DOCUMENTS[-1],), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return saved_models(tmp_path_factory.mktemp("bases"), FAMILIES)


def theirs(folder: Path) -> Tensor:
    """transformers' logits of the first document of `logits`.

    As in training, where nothing differs but that bitsandbytes computes in float32: for inference it packs weights anew
    for CPUs with bfloat16 instructions.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    with torch.no_grad():
        return model(input_ids=TOKENS[: DOCUMENTS[1]].unsqueeze(0)).logits[0]


def ours(folder: Path) -> Tensor:
    return logits(load_frozen(folder, dtype=torch.float32).model, TOKENS)[: DOCUMENTS[1]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("section", [sections.Nf4(), sections.Nf4(double=False), sections.Fp4()], ids=str)
def test_transformers_computes_what_danlu_does(
    bases: dict[str, Path], tmp_path: Path, family: str, section: Any
) -> None:
    quantize(bases[family], tmp_path / "out", section)
    found = ours(tmp_path / "out")
    torch.testing.assert_close(theirs(tmp_path / "out"), found, rtol=1e-4, atol=1e-4)
    assert (ours(bases[family]) - found).abs().max() > 1e-2  # the negative control: it is not the original


@pytest.mark.parametrize("section", [sections.Nf4(), sections.Nf4(double=False), sections.Fp4()], ids=str)
def test_it_is_the_model_packed_while_loading(bases: dict[str, Path], tmp_path: Path, section: Any) -> None:
    report = quantize(bases["llama"], tmp_path / "out", section)
    made = load_frozen(bases["llama"], dtype=torch.float32, quantization=section).model
    read = load_frozen(tmp_path / "out", dtype=torch.float32).model
    assert torch.equal(logits(made), logits(read))
    linears = [site.module for site in adapter_sites(read) if site.group in ("attention", "mlp")]
    assert all(linear.weight is None for linear in linears)
    stored = sum(linear.quantized.stored_bytes() for linear in linears)
    assert report.quantized == sum(linear.shape[0] * linear.shape[1] for linear in linears)
    assert report.quantized_bytes == stored and report.bits == pytest.approx(8 * stored / report.quantized)
    assert report.parameters == read.config.parameter_count()
    assert report.bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / SINGLE_FILE).values())
    assert (4.12 < report.bits < 4.2) if section.double else report.bits == 4.5


def test_what_stays_is_kept_in_the_type_that_was_asked_for(bases: dict[str, Path], tmp_path: Path) -> None:
    quantize(bases["llama"], tmp_path / "out", sections.Nf4(), dtype=torch.bfloat16)
    tensors, original = load_file(tmp_path / "out" / SINGLE_FILE), load_file(bases["llama"] / SINGLE_FILE)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], original[name].to(torch.bfloat16))
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["torch_dtype"] == config["quantization_config"]["bnb_4bit_compute_dtype"] == "bfloat16"
    # Codes are made of the stored numbers, whatever the type of products.
    wide = quantize(bases["llama"], tmp_path / "wide", sections.Nf4())
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(tensors[name], load_file(tmp_path / "wide" / SINGLE_FILE)[name]) and wide.bits > 4
    weight = load_frozen(tmp_path / "out", dtype=torch.bfloat16).model.layers["1"].mlp.down_proj.quantized
    assert weight.dtype == torch.bfloat16 == weight.dense().dtype


def test_fused_layers_are_written_as_one(bases: dict[str, Path], tmp_path: Path) -> None:
    quantize(bases["phi3"], tmp_path / "out", sections.Nf4())
    tensors, original = load_file(tmp_path / "out" / SINGLE_FILE), load_file(bases["phi3"] / SINGLE_FILE)
    plain = {name for name in tensors if not name.endswith(quantizing.SUFFIXES)}
    assert plain == original.keys() and any("qkv_proj" in name for name in plain)


def test_weights_in_several_files(bases: dict[str, Path], tmp_path: Path) -> None:
    quantize(bases["llama"], tmp_path / "one", sections.Nf4())
    quantize(bases["llama"], tmp_path / "many", sections.Nf4(), shard_bytes=20_000)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    one = load_file(tmp_path / "one" / SINGLE_FILE)
    many: dict[str, Tensor] = {}
    for file in files:
        part = load_file(tmp_path / "many" / file)
        assert all(index["weight_map"][name] == file for name in part)
        many |= part
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert torch.equal(ours(tmp_path / "many"), ours(tmp_path / "one"))


def test_words_come_along(bases: dict[str, Path], tmp_path: Path) -> None:
    save(load(bases["llama"]), tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    quantize(tmp_path / "base", tmp_path / "out", sections.Nf4())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": [2, 9]}


def test_adapters_of_the_original_fit(bases: dict[str, Path], tmp_path: Path) -> None:
    quantize(bases["llama"], tmp_path / "out", sections.Nf4())
    assert json.loads((tmp_path / "out" / ORIGIN).read_text())["quantized_from"] == fingerprint(bases["llama"])
    adapter = read_adapter_config(adapter_folder(bases["llama"], tmp_path / "adapter", sections.Lora()))
    check_base(adapter, find_base(bases["llama"]))
    check_base(adapter, find_base(tmp_path / "out"))
    save(tiny_model(seed=9, **FAMILIES["llama"]), tmp_path / "other")
    quantize(tmp_path / "other", tmp_path / "other-nf4", sections.Nf4())
    for base in ("other", "other-nf4"):
        with pytest.raises(ModelError, match="was trained on another base"):
            check_base(adapter, find_base(tmp_path / base))


def test_one_weight_is_in_memory_at_a_time(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor is in the file before the next one is read, and none stays in the model."""
    order: list[str] = []
    taken: list[Any] = []
    real_take, real_add = quantizing._Writer.take, quantized_folder.TensorStream.add

    def take(self: Any, parameter: str, value: Tensor) -> None:
        order.append(f"read {parameter.rpartition('.')[0]}")
        taken.append(real_take(self, parameter, value))

    def add(self: Any, name: str, tensor: Tensor) -> None:
        order.append("written")
        real_add(self, name, tensor)

    monkeypatch.setattr(quantizing._Writer, "take", take)
    monkeypatch.setattr(quantized_folder.TensorStream, "add", add)
    done: list[tuple[int, int]] = []
    quantize(bases["llama"], tmp_path / "out", sections.Nf4(), progress=lambda *pair: done.append(pair))
    assert taken == [None] * 29 and done[-1] == (29, 29) == (len(done), len(done))
    reads = [number for number, what in enumerate(order) if what != "written"]
    assert all(order[number + 1] == "written" for number in reads)


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_quantizing_twice_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    quantize(bases["llama"], tmp_path / "once", sections.Nf4())
    with pytest.raises(ModelError, match=r"once: is quantized already \(nf4\); quantizing it again would round twice"):
        quantize(tmp_path / "once", tmp_path / "twice", sections.Fp4())
    assert not (tmp_path / "twice").exists()
    changed(tmp_path / "once", CONFIG, quantization_config=None)
    with pytest.raises(ModelError, match="is in 4 bits, though config.json does not say so"):
        quantize(tmp_path / "once", tmp_path / "twice", sections.Fp4())
    assert not (tmp_path / "twice").exists()


def test_what_would_be_left_out_is_told(tmp_path: Path) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "model"
    save(tiny_model(model_type="mistral", hidden_size=64, intermediate_size=128), alone)
    folder.mkdir()
    text = json.loads((alone / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    own = {f"language_model.{name}": tensor for name, tensor in load_file(alone / SINGLE_FILE).items()}
    vision = {"vision_tower.patch_conv.weight": torch.ones(2, 3)}
    save_file(own | vision, folder / SINGLE_FILE, metadata={"format": "pt"})
    untouched = r"has 1 tensors that are not the language model's, vision_tower\.patch_conv\.weight"
    with pytest.raises(ModelError, match=untouched):
        quantize(folder, tmp_path / "small", sections.Nf4())
    assert not (tmp_path / "small").exists()
    save_file(own, folder / SINGLE_FILE, metadata={"format": "pt"})
    assert quantize(folder, tmp_path / "small", sections.Nf4()).quantized  # control


def test_nothing_is_written_over(bases: dict[str, Path], tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in bases["phi3"].iterdir()}
    with pytest.raises(ResourceError, match="is there already. Choose an empty or new folder"):
        quantize(bases["llama"], bases["phi3"], sections.Nf4())
    assert {file.name: file.read_bytes() for file in bases["phi3"].iterdir()} == before


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("model.norm.weight", lambda tensor: tensor * 1e38, "model.norm.weight: not finite as torch.float16"),
        ("model.layers.0.mlp.up_proj.weight", lambda tensor: tensor * float("nan"), "holds NaN or infinity"),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda tensor: tensor[:3],
            r"expected shape \[128, 64\], found \[3, 64\]",
        ),
    ],
)
def test_weights_that_cannot_be_kept(
    bases: dict[str, Path], tmp_path: Path, name: str, spoil: Callable[[Tensor], Tensor], said: str
) -> None:
    save(load(bases["llama"]), tmp_path / "base")
    tensors = load_file(tmp_path / "base" / SINGLE_FILE)
    save_file(tensors | {name: spoil(tensors[name]).contiguous()}, tmp_path / "base" / SINGLE_FILE)
    with pytest.raises(ModelError, match=said):
        quantize(tmp_path / "base", tmp_path / "out", sections.Nf4(), dtype=torch.float16)
    assert [one.name for one in tmp_path.iterdir()] == ["base"]  # nor anything half-written


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda name, tensors: tensors.pop(f"{name}.absmax"), "up_proj.weight.absmax is missing"),
        (
            lambda name, tensors: tensors.update({name: tensors[name][:-1].clone()}),
            "up_proj.weight takes 4095 bytes, but 8192 numbers take 4096",
        ),
        (
            lambda name, tensors: tensors[f"{name}.nested_absmax"].mul_(torch.nan),
            "nested_absmax holds NaN or infinite values",
        ),
        (
            lambda name, tensors: tensors.update(
                {key.replace("up", "down"): one.clone() for key, one in tensors.items() if key.startswith(name)}
            ),
            r"packed is a weight of shape \[128, 64\], config.json asks for \[64, 128\]",
        ),
    ],
)  # fmt: skip
def test_a_corrupted_folder_is_told(bases: dict[str, Path], tmp_path: Path, spoil: Any, said: str) -> None:
    quantize(bases["llama"], tmp_path / "out", sections.Nf4())
    tensors = load_file(tmp_path / "out" / SINGLE_FILE)
    spoil("model.layers.0.mlp.up_proj.weight", tensors)
    save_file(tensors, tmp_path / "out" / SINGLE_FILE)
    with pytest.raises(ModelError, match=said):
        load_frozen(tmp_path / "out", dtype=torch.float32)
