from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders.tiny_run import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from danlu.core.errors import ModelError
from danlu.models import loading, safetensors_io
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import check_vocabulary
from danlu.models.loading import load
from danlu.models.saving import save

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def change(tmp_path: Path, tiny_model: Callable[..., Decoder]) -> Callable[[str, Change], Path]:
    """Saves a tiny model of a case, changes its tensors on disk, and gives its folder."""

    def make(case: str, act: Change) -> Path:
        save(tiny_model(case), tmp_path / case)
        file = tmp_path / case / "model.safetensors"
        tensors = load_file(file)
        act(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return tmp_path / case

    return make


def same_parameters(one: Decoder, other: Decoder) -> bool:
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(left[0] == right[0] and torch.equal(left[1], right[1]) for left, right in pairs)


@pytest.mark.parametrize("case", ["gemma2", "phi-4", "qwen2"])
def test_any_buffer_size_reads_the_same(
    case: str, tiny_model: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(case)
    save(model, tmp_path / "wide")
    save(model, tmp_path / "narrow", dtype=torch.bfloat16)
    narrow = load(tmp_path / "narrow")
    for module in (loading, safetensors_io):
        monkeypatch.setattr(module, "BUFFER_BYTES", 1000)
    assert same_parameters(load(tmp_path / "wide"), model)
    assert same_parameters(load(tmp_path / "narrow"), narrow)
    assert same_parameters(load(tmp_path / "narrow"), tiny_model(case).to(torch.bfloat16).to(torch.float32))
    assert same_parameters(load(tmp_path / "narrow", dtype=torch.bfloat16), tiny_model(case).to(torch.bfloat16))
    assert not same_parameters(narrow, model)


def test_a_tied_matrix_may_be_stored_once_twice_or_under_the_other_name(change: Callable[[str, Change], Path]) -> None:
    once = load(change("qwen2", lambda tensors: None))

    def twice(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other_name(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    def unlike(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    assert same_parameters(load(change("qwen2", twice)), once)
    assert same_parameters(load(change("qwen2", other_name)), once)
    with pytest.raises(ModelError, match=r'but lm_head.weight and model.embed_tokens.weight differ. Set "tie_word_emb'):
        load(change("qwen2", unlike))


def test_old_rotary_tables_are_passed_over(change: Callable[[str, Change], Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)

    once = load(change("llama-2", lambda tensors: None))
    assert same_parameters(load(change("llama-2", add)), once)


Q0 = "model.layers.0.self_attn.q_proj.weight"
SPOILT: list[tuple[str, Change, str]] = [
    ("llama-2", lambda t: t.pop(Q0), rf"{Q0}: missing; expected shape \[48, 48\]"),
    ("llama-2", lambda t: t.pop("lm_head.weight"), 'missing.*\n.*set "tie_word_embeddings": true'),
    (
        "llama-2",
        lambda t: t.update({Q0: torch.ones(48, 12)}),
        rf"{Q0} in .*: expected shape \[48, 48\], found \[48, 12\]",
    ),
    ("llama-2", lambda t: t.update({Q0: torch.ones(48, 48).int()}), rf"{Q0} in .*: expected floating point, found I32"),
    ("llama-2", lambda t: t.update(new=torch.ones(2)), "new in model.safetensors: not a tensor of this llama model"),
    ("llama-2", lambda t: t[Q0].view(-1)[5].fill_(float("nan")), f"tensor {Q0} holds NaN or infinity"),
    ("llama-2", lambda t: t[Q0].view(-1)[5].fill_(float("-inf")), f"tensor {Q0} holds NaN or infinity"),
    ("phi-4", lambda t: t.pop("model.layers.1.self_attn.qkv_proj.weight"), r"qkv_proj.weight: missing; .*\[72, 48\]"),
]


@pytest.mark.parametrize(("case", "act", "message"), SPOILT)
def test_what_is_wrong_with_a_tensor_is_said(
    case: str, act: Change, message: str, change: Callable[[str, Change], Path]
) -> None:
    with pytest.raises(ModelError, match=message):
        load(change(case, act))


def test_all_problems_come_at_once_up_to_ten(change: Callable[[str, Change], Path]) -> None:
    with pytest.raises(ModelError) as caught:
        load(change("llama-2", lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:14]]))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("llama-2: the weights do not fit config.json:")
    assert len(lines) == 12
    assert lines[-1].strip() == "... and 4 more"


def test_values_too_large_for_the_wanted_type_are_named(change: Callable[[str, Change], Path]) -> None:
    folder = change("llama-2", lambda tensors: tensors[Q0].view(-1)[5].fill_(1e6))
    with pytest.raises(ModelError, match=rf"tensor {Q0} has values too large for torch.float16"):
        load(folder, dtype=torch.float16)
    load(folder, dtype=torch.bfloat16)


def test_a_truncated_shard_is_found_before_anything_is_read(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    save(tiny_model("llama-2"), tmp_path, shard_bytes=60_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-10])
    with pytest.raises(ModelError, match=rf"{shards[1].name}: truncated: the header promises {len(content)} bytes"):
        load(tmp_path)
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"index.json names {len(shards)} shards, absent: {shards[1].name}"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_refused(tiny_model: Callable[..., Decoder], tmp_path: Path) -> None:
    save(tiny_model("llama-2"), tmp_path, shard_bytes=60_000)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["ghost"] = min(values["weight_map"].values())
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"promises tensors that their shard does not hold: ghost \(model-00001-of-"):
        load(tmp_path)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tiny_model: Callable[..., Decoder]) -> None:
    config = tiny_model("llama-2").config
    check_vocabulary(config, 131)
    with pytest.raises(ModelError, match="the tokenizer has 132 tokens, the model embeds only 131"):
        check_vocabulary(config, 132)


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_a_model_without_its_head_has_names_without_a_prefix(tmp_path: Path, tied: bool) -> None:
    """As transformers' LlamaModel writes it; a head that is missing is named."""
    model = tiny_model(tie_word_embeddings=tied)
    save(model, tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "bare")
    assert all(not name.startswith("model.") for name in load_file(tmp_path / "bare" / "model.safetensors"))
    if not tied:
        with pytest.raises(ModelError, match="lm_head.weight: missing"):
            load(tmp_path / "bare")
        return
    for name, parameter in load(tmp_path / "bare").named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_model_that_classifies_leaves_out_the_head_and_its_bias(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    save(tiny_model(model_type="phimoe", num_local_experts=3, lm_head_bias=True), folder)
    whole = load(folder)
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = ["PhimoeForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(values))
    classifier = load(folder)
    names = {name for name, _ in whole.named_parameters()} - {name for name, _ in classifier.named_parameters()}
    assert names == {"lm_head.weight", "lm_head.bias"}
