from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from danlu.core.errors import ModelError
from danlu.models.hf_folder import read_config, read_json, read_tensors, resolve_folder


def test_a_model_folder_or_a_run_with_a_model_in_it_is_found(tmp_path: Path) -> None:
    model, run = tmp_path / "plain", tmp_path / "run"
    for folder in (model, run / "model"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert resolve_folder(model) == model
    assert resolve_folder(str(run)) == run / "model"
    assert resolve_folder(run / "model") == run / "model"


def test_what_is_no_model_is_said_with_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"neither a model folder .* nor a finished run .*; it holds notes.txt"):
        resolve_folder(tmp_path)
    with pytest.raises(
        ModelError, match=r"a model is a folder with config.json and safetensors weights, this is a file"
    ):
        resolve_folder(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match="absent/deep/er: no such folder"):
        resolve_folder(tmp_path / "absent" / "deep" / "er")


def test_an_unknown_hub_id_says_that_the_hub_was_out_of_reach() -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing: no such folder, and this hub id is not in the local cache"):
        resolve_folder("nobody/nothing")


def test_a_hub_snapshot_in_the_local_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789012345678901234567890123456789"
    cache = tmp_path / "models--org--name"
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"org/name: the hub snapshot at .* has no config.json; it holds nothing"):
        resolve_folder("org/name")
    (cache / "snapshots" / commit / "config.json").write_text("{}")
    assert resolve_folder("org/name") == cache / "snapshots" / commit


REPOSITORY = {
    "config.json": "{}",
    "generation_config.json": "{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1-of-2.safetensors", "b": "w[2].safetensors"}}
    ),
    "tokenizer.json": "{}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "model-1-of-2.safetensors": "",
    "w[2].safetensors": "",
}
BESIDE = (
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "w2.safetensors",
    "onnx/model.safetensors",
    "onnx/config.json",
    "original/model-1-of-2.safetensors",
    "original/params.json",
    "pytorch_model.bin",
    "README.md",
    "modeling.py",
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A repository of the hub: what it holds, by name. Asked for, its files come into tmp_path / COMMIT."""
    from huggingface_hub.utils import filter_repo_objects

    held: dict[str, str] = {}

    def snapshot_download(name: str, allow_patterns: list[str], revision: str | None = None) -> str:
        assert name == "org/name" and revision in (None, "c0ffee")
        folder = tmp_path / "c0ffee"
        for file in filter_repo_objects(held, allow_patterns=allow_patterns):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(held[file])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return held


def test_of_a_hub_repository_only_what_the_index_names_is_taken(hub: dict[str, str]) -> None:
    hub |= REPOSITORY | dict.fromkeys(BESIDE, "large")
    folder = resolve_folder("org/name")
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == set(REPOSITORY)


def test_of_a_hub_repository_with_one_file_of_weights_no_other_is_taken(hub: dict[str, str]) -> None:
    shards = dict.fromkeys(
        ("model-00001-of-00002.safetensors", "consolidated.safetensors", "vae/model.safetensors"), ""
    )
    hub |= {"config.json": "{}", "model.safetensors": "", **shards}
    folder = resolve_folder("org/name")
    assert {file.name for file in folder.rglob("*")} == {"config.json", "model.safetensors"}


def test_configs_that_cannot_be_read_name_file_and_place(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ModelError, match=r"config.json: no such file"):
        read_config(tmp_path)
    file.write_text('{\n  "model_type": llama\n}')
    with pytest.raises(ModelError, match=r"config.json:2:17: broken JSON"):
        read_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, found list"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="is a folder. Name the JSON file in it, such as .*config.json"):
        read_json(tmp_path)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)


def test_weights_that_are_absent_or_pickled_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no weights: neither model.safetensors nor .*; it holds config.json"):
        read_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"only pickled weights .* convert it once: python -c .*save_pretrained"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    with pytest.raises(ModelError, match=r"index.json names 1 shards, absent: a.safetensors"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="weight_map must say for each tensor which file holds it"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("kind", ["absolute", "above", "by way of a folder", "below", "backslash", "itself", "empty"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, kind: str) -> None:
    """Files that are there and would be read, and places that are none."""
    inside = tmp_path / "model"
    (inside / "deep").mkdir(parents=True)
    shard = {
        "absolute": str(tmp_path / "secret.safetensors"),
        "above": "../secret.safetensors",
        "by way of a folder": "deep/../../secret.safetensors",
        "below": "deep/a.safetensors",
        "backslash": "..\\secret.safetensors",
        "itself": ".",
        "empty": "",
    }[kind]
    for file in (tmp_path / "secret.safetensors", inside / "deep" / "a.safetensors", inside / "a.safetensors"):
        save_file({"w": torch.ones(2)}, file)
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"v": "a.safetensors", "w": shard}}))
    with pytest.raises(ModelError) as caught:
        read_tensors(inside)
    assert str(caught.value) == (
        f"{index}: weight_map has w in {shard!r}, which is no file name of this folder. "
        "danlu reads nothing outside of it"
    )
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert read_tensors(inside)["w"].file == inside / "a.safetensors"


def test_a_tensor_in_two_shards_is_read_where_the_index_says(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"x": torch.zeros(2), "y": torch.zeros(2)}, tmp_path / "b.safetensors")
    weight_map = {"x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert {name: each.file.name for name, each in read_tensors(tmp_path).items()} == weight_map
