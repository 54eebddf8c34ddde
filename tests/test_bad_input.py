"""What users get wrong: `danlu train` says what, where and what to do, exits with its code, and spoils nothing."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.tiny_world import CONFIG, World, danlu, differences, last_state, write_rows
from safetensors.torch import load_file, save_file

from danlu.assembly import machine_memory
from danlu.core.errors import ModelError
from danlu.core.run_files import RunLock
from danlu.models import saving
from danlu.models.hf_config import read_config_values
from danlu.recipe import load
from danlu.run import train
from danlu.training.checkpoints.verification import verify

Train = Callable[..., str]

pytestmark = pytest.mark.usefixtures("tokenising_here")


@pytest.fixture
def refused(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Train:
    """Trains a recipe that must be refused before its first step, and gives what was said."""

    def train(code: int, *overrides: str, **changes: Any) -> str:
        cache = tmp_path / "cache"
        output = tmp_path / "run"
        data = {**changes.pop("data", {}), "cache": str(cache)}
        assert danlu("train", tiny_world.recipe(output, data=data, **changes), *overrides) == code
        out, said = capsys.readouterr()
        assert out == "" and "Traceback" not in said
        assert said.startswith("error: ") or "\nerror: " in said
        left = {entry.name for entry in output.glob("*")}
        assert left <= {".lock", "logs", "recipe.yaml", "environment.json"}
        assert not list(cache.glob("*.unfinished"))
        return said[said.index("error: ") :]

    return train


# -- the recipe -------------------------------------------------------------------------------------------------------


def test_mistakes_in_the_recipe_come_together_and_nothing_is_made(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", step=5, precision=16, data={"train": str(tmp_path / "chatt.jsonl")})
    write_rows(tmp_path / "chat.jsonl", [])
    assert danlu("train", recipe) == 2
    said = capsys.readouterr().err
    assert "step: unknown key" in said and "Did you mean 'steps'?" in said
    assert "precision: " in said and "fp32" in said
    assert "no file or folder" in said and f"Did you mean '{tmp_path / 'chat.jsonl'}'?" in said
    assert said.count("error: ") == 3
    assert not (tmp_path / "run").exists()


# -- rows -------------------------------------------------------------------------------------------------------------


def messages(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = messages(("user", "hi"), ("assistant", "hello"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', "rows.jsonl:3:15: broken JSON"),
        (
            {"prompt_id": 1, "n": 2},
            "rows.jsonl:3: no column 'messages', which rows of format messages have; the columns are prompt_id, n",
        ),
        (
            {"instruction": "a", "output": "b"},
            "This row looks like alpaca: put rows of different formats in files of their own",
        ),
        (
            messages(("assistant", "hello"), ("user", "hi"), ("assistant", "yes")),
            "rows.jsonl:3 message 1: the conversation starts with the assistant; add the user's turn before it",
        ),
        (
            messages(("user", "hi"), ("user", "are you there?"), ("assistant", "yes")),
            "rows.jsonl:3 message 2: two user turns in a row; join them into one",
        ),
        (
            messages(("user", "hi"), ("assistant", "")),
            "rows.jsonl:3 message 2: the assistant's answer is empty; remove the row",
        ),
        (
            messages(("user", "hi"), ("alien", "yes")),
            "rows.jsonl:3 message 2: unknown role 'alien'. Known roles: system",
        ),
    ],
    ids=["broken JSON", "columns", "mixed", "assistant first", "two user turns", "empty answer", "role"],
)
def test_a_bad_row_is_named(tmp_path: Path, refused: Train, row: object, message: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, GOOD, row, GOOD])
    said = refused(3, data={"train": str(rows)})
    assert message in said
    assert "Set data.on_bad_row: skip to leave such rows out" in said


def test_bad_rows_can_be_skipped_and_are_counted(
    tiny_world: World, tmp_path: Path, refused: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [messages(("user", "hi"), ("assistant", "")), "{", messages(("alien", "hi"))]
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, *bad, GOOD])
    data = {"train": str(rows), "on_bad_row": "skip", "cache": str(tmp_path / "cache")}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", steps=2, data=data)) == 0
    assert "data: 3 bad rows skipped, the first: rows.jsonl:2 message 2: the assistant's" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    said = refused(3, data={**data, "bad_row_limit": 2})
    assert "more than 2 bad rows (data.bad_row_limit); the last one: rows.jsonl:4 message 1: unknown role" in said


def test_packs_without_a_target_are_refused(tmp_path: Path, refused: Train) -> None:
    """Of a pack the first token is context, and the only target of this row is the first of its second pack."""
    tokens = list(range(30, 94))
    rows = write_rows(tmp_path / "one.jsonl", [{"input_ids": tokens, "labels": [-100] * 32 + [62] + [-100] * 31}])
    data = {"train": str(rows), "packing": "concatenate", "max_length": 32}
    said = refused(3, stage="pretrain", data=data)
    assert "data.train: cut into packed sequences, its rows have no trained token to train on. Raise " in said
    whole = write_rows(tmp_path / "whole.jsonl", [{"input_ids": tokens}])
    said = refused(3, stage="pretrain", data={**data, "train": str(whole), "eval": [str(rows)]})
    assert "data.eval: cut into packed sequences, its rows have no trained token to evaluate on" in said


def test_an_empty_file(tmp_path: Path, refused: Train) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [])
    assert f"{rows}: the file is empty" in refused(3, data={"train": str(rows)})


def test_many_answers_cut_before_their_end_are_told(
    tiny_world: World, tmp_path: Path, refused: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    long = messages(("user", "hi"), ("assistant", "a long story " * 100))
    rows = write_rows(tmp_path / "rows.jsonl", [long, *[GOOD] * 8])
    data = {"train": str(rows), "cache": str(tmp_path / "cache")}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", steps=2, data=data)) == 0
    said = capsys.readouterr().err
    told = "data: 1 of 9 samples train an answer that is cut before its end, and nothing of when to stop: raise"
    assert f"{told} data.max_length, or leave such rows out" in said
    assert "only 2 optimizer steps of 4 x 64 tokens: little is learnt in so few. Raise epochs (or steps)" in said
    assert "did not fall" not in said
    shutil.rmtree(tmp_path / "run")
    write_rows(tmp_path / "rows.jsonl", [long, *[GOOD] * 10])  # control: not many of them
    flat = {"optimizer": {"kind": "adamw", "learning_rate": 0.0}, "batch": {"sequences": 1, "micro": 1}}
    assert danlu("train", tiny_world.recipe(tmp_path / "run", steps=20, data=data, **flat)) == 0
    said = capsys.readouterr().err
    assert "cut before its end" not in said and "optimizer steps of" not in said
    assert "the loss did not fall: " in said
    shutil.rmtree(tmp_path / "run")
    write_rows(tmp_path / "rows.jsonl", [long, long])  # all of them: an error, with max_length first
    said = refused(3, data=data)
    assert said.startswith("error: 2 rows are longer than data.max_length: raise it first. rows.jsonl:1: answers are")


def test_rows_too_long_for_anything_to_be_trained(tmp_path: Path, refused: Train) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [messages(("user", "hi there " * 100), ("assistant", "yes"))] * 2)
    said = refused(3, data={"train": str(rows)})
    assert "no row is left to train on, of 2 (2 longer than max_length, with no trained token in what was left)" in said
    assert "Check data.train_on, data.max_length, data.overlong" in said


# -- tokenizers and templates -----------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(tiny_world: World, tmp_path: Path) -> Callable[..., str]:
    """A copy of the tokenizer folder, changed."""

    def copy(*, template: str | None = "", **settings: Any) -> str:
        folder = tmp_path / "tokenizer"
        shutil.copytree(tiny_world.tokenizer, folder)
        if template is None:
            (folder / "chat_template.jinja").unlink()
        elif template:
            (folder / "chat_template.jinja").write_text(template)
        file = folder / "tokenizer_config.json"
        values = {**json.loads(file.read_text()), **settings}
        file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        return str(folder)

    return copy


def test_a_tokenizer_without_chat_template(refused: Train, tokenizer: Callable[..., str]) -> None:
    folder = tokenizer(template=None)
    said = refused(3, model={"tokenizer": folder})
    assert f"{folder}: this tokenizer has no chat template, so conversations cannot be rendered. Name one in" in said


def test_a_template_that_raises(refused: Train, tokenizer: Callable[..., str]) -> None:
    folder = tokenizer(template="{{ raise_exception('only Latin, please') }}")
    said = refused(3, model={"tokenizer": folder})
    assert f"{folder}: not even a question and its answer can be rendered" in said and "only Latin, please" in said


def test_a_template_that_is_no_jinja(refused: Train, tokenizer: Callable[..., str]) -> None:
    said = refused(3, model={"tokenizer": tokenizer(template="{% for message in %}")})
    assert "chat template" in said and "line 1" in said


def test_a_tokenizer_without_an_end_of_text(refused: Train, tokenizer: Callable[..., str], tiny_world: World) -> None:
    folder = tokenizer(eos_token=None)
    said = refused(3, stage="pretrain", model={"tokenizer": folder}, data={"train": str(tiny_world.text)})
    assert f"{folder}: this tokenizer has no end-of-text token (eos_token), so a model could not learn to stop." in said
    assert "set data.append_eos: false" in said


def test_a_tokenizer_without_pad_needs_none(
    tiny_world: World, tmp_path: Path, tokenizer: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(
        tmp_path / "run",
        steps=2,
        model={"tokenizer": tokenizer(pad_token=None)},
        data={"cache": str(tmp_path / "cache")},
    )
    assert danlu("train", recipe) == 0


# -- prompts of samples -----------------------------------------------------------------------------------------------


def test_samples_of_a_tokenizer_without_chat_template(
    tmp_path: Path, refused: Train, tokenizer: Callable[..., str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "Who is there? ", "completion": "The owl."}] * 20)
    words = tokenizer(template=None)
    samples = {"samples": {"prompts": ["Who?", "Where?"], "max_new_tokens": 4}}
    said = refused(3, model={"tokenizer": words}, data={"train": str(rows)}, evaluation=samples)
    assert f"evaluation.samples.prompts.0 ('Who?'): {words}: this tokenizer has no chat template" in said
    assert said.count("this tokenizer has no chat template") == 1, "one reason for all prompts is told once"
    assert not (tmp_path / "cache").exists(), "told before rows are tokenised"


def test_samples_longer_than_the_model_sees(tmp_path: Path, refused: Train) -> None:
    prompts = ["Who is there?", "hoo " * 300, "And " * 200]
    said = refused(3, evaluation={"samples": {"prompts": prompts, "max_new_tokens": 4}})
    for index in (1, 2):
        assert f"evaluation.samples.prompts.{index} ('{prompts[index][:20]}" in said
    assert "evaluation.samples.prompts.0" not in said
    assert "but the model sees 128 tokens at most (max_position_embeddings), answer included: shorten" in said
    assert not (tmp_path / "cache").exists(), "told before rows are tokenised"


def test_samples_that_virtual_tokens_leave_no_room_for(tiny_world: World, refused: Train) -> None:
    """The prompt alone has 112 of the 128 positions."""
    prompt = {"stage": "pretrain", "data": {"train": str(tiny_world.text)}, "model": {"path": str(tiny_world.base)}}
    prompt["model"] |= FROM_FOLDER
    samples = {"samples": {"prompts": ["zq" * 56], "max_new_tokens": 4}}
    adapter = {"kind": "prompt", "tokens": 100}
    said = refused(3, adapter=adapter, evaluation=samples, **prompt)
    assert (
        "evaluation.samples.prompts.0 ('zqzq" in said and "tokens and the adapter 100, but the model sees 128" in said
    )


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_world: World, tmp_path: Path) -> Path:
    """A model folder with its tokenizer."""
    assert danlu("train", tiny_world.recipe(tmp_path / "first", steps=1, schedule={"warmup": 0})) == 0
    return (tmp_path / "first" / "model").rename(tmp_path / "model")


FROM_FOLDER = {"config": None, "tokenizer": None}


def test_a_weight_that_is_not_finite(refused: Train, model: Path) -> None:
    file = model / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = torch.nan
    save_file(weights, file, {"format": "pt"})
    said = refused(4, model={"path": str(model), **FROM_FOLDER})
    assert f"{file}: tensor model.layers.1.mlp.up_proj.weight holds NaN or infinity" in said


def spoil(file: Path, what: str) -> str:
    """Damages a file of weights; what must be said of it."""
    name = "model.layers.1.mlp.up_proj.weight"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
        return f"{file}: truncated: the header promises"
    if what == "no header":
        file.write_bytes(b"\0" * 100)
        return f"{file}: not a safetensors file"
    weights = load_file(file)
    value = weights.pop(name)
    changed = {"mis-shaped": value.T.contiguous(), "integers": value.int(), "extra": value}
    if what in changed:
        weights[name] = changed[what]
    if what == "extra":
        weights["model.layers.2.mlp.up_proj.weight"] = value.clone()
    save_file(weights, file, {"format": "pt"})
    return {
        "missing": f"{name}: missing; expected shape [64, 32]",
        "mis-shaped": f"{name} in {file.name}: expected shape [64, 32], found [32, 64]",
        "integers": f"{name} in {file.name}: expected floating point, found I32",
        "extra": "model.layers.2.mlp.up_proj.weight in model.safetensors: not a tensor of this llama model",
    }[what]


@pytest.mark.parametrize("adapter", [None, "lora"])
@pytest.mark.parametrize("what", ["truncated", "no header", "missing", "mis-shaped", "integers", "extra"])
def test_weights_that_do_not_fit_are_told_before_rows_are_tokenised(
    tiny_world: World, tmp_path: Path, refused: Train, what: str, adapter: str | None
) -> None:
    model = Path(shutil.copytree(tiny_world.base, tmp_path / "model"))
    said = spoil(model / "model.safetensors", what)
    assert said in refused(4, model={"path": str(model), **FROM_FOLDER}, adapter=adapter)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("suffix", "said"),
    [
        (".absmax", "up_proj.weight.absmax is missing"),
        ("", "up_proj.weight takes 1023 bytes, but 2048 numbers take 1024"),
        (".quant_state.bitsandbytes__nf4", "what the codes of model.layers.1.mlp.up_proj.weight mean"),
    ],
)
def test_weights_in_4_bits_that_do_not_fit_are_told_before_rows_are_tokenised(
    tiny_world: World, tmp_path: Path, refused: Train, suffix: str, said: str
) -> None:
    model = tmp_path / "model"
    assert danlu("quantize", tiny_world.base, model) == 0
    weights = load_file(model / "model.safetensors")
    value = weights.pop(f"model.layers.1.mlp.up_proj.weight{suffix}")
    if not suffix:
        weights["model.layers.1.mlp.up_proj.weight"] = value[:-1].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert said in refused(4, model={"path": str(model), **FROM_FOLDER}, adapter="lora")
    assert not (tmp_path / "cache").exists()


def test_an_adapter_cut_off_is_told_before_rows_are_tokenised(
    tiny_world: World, tmp_path: Path, refused: Train
) -> None:
    first = tmp_path / "first"
    model = {"path": str(tiny_world.base), **FROM_FOLDER}
    assert danlu("train", tiny_world.recipe(first, steps=1, schedule={"warmup": 0}, model=model, adapter="lora")) == 0
    file = first / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refused(4, model={**model, "adapters": [str(first / "adapter")]}, adapter="continue")
    assert f"{file}: truncated" in said and not (tmp_path / "cache").exists()


def test_a_resumed_run_does_not_need_the_weights_it_began_from(tiny_world: World, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_world.base, tmp_path / "model"))
    changes = {"model": {"path": str(model), **FROM_FOLDER}, "checkpoint": {"every": 4, "keep": 3}}
    recipe = tiny_world.recipe(tmp_path / "run", **changes)
    assert danlu("train", recipe) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    (model / "model.safetensors").unlink()
    assert danlu("train", recipe) == 0


def test_a_model_with_fewer_tokens_than_its_tokenizer(refused: Train) -> None:
    said = refused(4, model={"config": {**CONFIG, "vocab_size": 300}})
    assert "the tokenizer has 400 tokens, the model embeds only 300: ids from 300 on would have no embedding" in said


@pytest.mark.parametrize(
    ("sizes", "code", "message"),
    [
        ({"num_hidden_layers": 10**6}, 4, "model.config: num_hidden_layers: 1,000,000 layers; at most 10,000 can be"),
        ({"intermediate_size": 10**9}, 4, "model.config: a model of 192,000,006,368 parameters: its weights alone"),
        ({"hidden_size": 2**30, "head_dim": 8}, 4, "(the largest of its sizes is hidden_size, 1,073,741,824)"),
        (
            {"vocab_size": 10**12},
            4,
            "model.config: vocab_size is 1,000,000,000,000: at most 2,147,483,647 can be built",
        ),
        ({"num_attention_heads": 10**9}, 4, "heads is 1,000,000,000: at most 1,048,576 can be built"),
    ],
)
def test_a_model_of_absurd_size_is_refused_before_rows_are_read(
    tmp_path: Path, refused: Train, sizes: dict[str, int], code: int, message: str
) -> None:
    heads = {} if "num_attention_heads" not in sizes else {"head_dim": 8}
    said = refused(code, model={"config": {**CONFIG, **heads, **sizes}})
    assert message in said
    assert not (tmp_path / "cache").exists()


def test_a_model_that_only_several_processes_can_hold(
    monkeypatch: pytest.MonkeyPatch, tiny_world: World, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_memory, "host_memory_bytes", lambda: 100_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = read_config_values({**CONFIG, "vocab_size": 400, "tie_word_embeddings": False})
    assert config.parameter_count() == 44_192
    adapted = {"adapter": "lora", "model": {"path": str(tiny_world.base), "config": None, "tokenizer": None}}

    def check(processes: int, **changes: Any) -> None:
        machine_memory.check_size(
            load(tiny_world.recipe(tmp_path / "run", **changes)).recipe, config, "base", processes
        )

    check(2, parallel={"shard": "zero3"})
    check(1, **adapted, precision="bf16")
    check(1, **adapted, quantization="nf4", precision="bf16")
    # In float32 the embedding and the head, which stay unpacked, take 102,400 bytes.
    for changes in ({}, {"parallel": {"shard": "zero3"}}, adapted, {**adapted, "quantization": "nf4"}):
        with pytest.raises(ModelError, match=r"base: a model of 44,192 parameters: .* 0\.0 GiB here; this machine has"):
            check(1, **changes)


def test_a_folder_that_is_no_model(refused: Train, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    said = refused(4, model={"path": str(tmp_path / "nothing"), **FROM_FOLDER})
    assert str(tmp_path / "nothing") in said


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(tiny_world: World, tmp_path: Path) -> tuple[Path, Path]:
    """The recipe and the folder of a run of 12 steps that ended before its export, with checkpoints of 4, 8 and 12."""
    recipe = tiny_world.recipe(tmp_path / "run", checkpoint={"every": 4, "keep": 3})
    assert danlu("train", recipe) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    return recipe, tmp_path / "run"


def flip_a_byte(step: Path) -> str:
    file = next(step.glob("optimizer-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    return f"{file}: tensor "


def lose_a_shard(step: Path) -> str:
    file = next(step.glob("model-*.safetensors"))
    file.unlink()
    return f"{file}: missing; it held "


def lose_the_end(step: Path) -> str:
    file = next(step.glob("model-*.safetensors"))
    os.truncate(file, file.stat().st_size - 1000)
    return f"{file}: "


def change_the_state(step: Path) -> str:
    file = step / "state.json"
    file.write_text(file.read_text().replace('"next": ', '"next": 1'))
    return f"{file}: altered ("


@pytest.mark.parametrize("damage", [flip_a_byte, lose_a_shard, lose_the_end, change_the_state])
def test_a_damaged_checkpoint_is_refused_and_the_way_out_shown(
    interrupted: tuple[Path, Path], capsys: pytest.CaptureFixture[str], damage: Callable[[Path], str]
) -> None:
    recipe, output = interrupted
    shutil.copytree(output, output.with_name("whole"))
    step = output / "checkpoints" / "step-00000012"
    line = damage(step)
    capsys.readouterr()
    assert danlu("train", recipe) == 5
    said = capsys.readouterr().err
    assert f"error: {step} is damaged:\n  {line}" in said
    intact = output / "checkpoints" / "step-00000008"
    assert f"Step 8 is intact. To go on from it, add to the `danlu train` command: --resume {intact}\n" in said
    assert sorted(path.name for path in step.parent.iterdir()) == [f"step-{n:08d}" for n in (4, 8, 12)]
    assert danlu("train", output / "recipe.yaml", "--resume", intact) == 0
    assert verify(step) == []
    shutil.rmtree(output / "model")
    assert differences(output, output.with_name("whole")) == []


def test_a_half_written_checkpoint_is_passed_over_aloud(
    interrupted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, output = interrupted
    (output / "checkpoints" / "step-00000012" / "COMPLETE").unlink()
    capsys.readouterr()
    assert danlu("train", recipe, "--resume", output / "checkpoints" / "step-00000012") == 5
    assert "step-00000012: half-written, it has no COMPLETE marker: the run was stopped" in capsys.readouterr().err
    assert danlu("train", recipe) == 0
    said = capsys.readouterr().err
    assert "step-00000012 is half-written (the run was stopped while saving it) and is not used\n" in said
    assert f"resuming {output} from step-00000008\n" in said
    assert verify(output / "checkpoints" / "step-00000012") == []


# -- disks and folders ------------------------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a small disk in memory, or a folder read-only: what root, too, cannot write into."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        if not hasattr(libc, "mount") or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()):
            pytest.skip(f"this user cannot mount a small disk ({os.strerror(ctypes.get_errno())})")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        libc.umount2(bytes(folder), 2)  # detach: also where a failed test left a file open


def make_read_only(folder: Path) -> None:
    read_only, remount = 1, 32
    assert not ctypes.CDLL(None).mount(b"tmpfs", bytes(folder), b"tmpfs", read_only | remount, None)


def test_a_disk_that_fills_up_keeps_the_old_checkpoint_and_goes_on_when_there_is_room(
    tiny_world: World, tmp_path: Path, mounted: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mounted("2500k")  # a checkpoint takes 550 KiB, the model 180
    recipe = tiny_world.recipe(disk / "run", tmp_path / "recipe.yaml", checkpoint={"every": 4, "keep": 1})
    (disk / "filler").write_bytes(bytes(1_700_000))
    assert danlu("train", recipe) == 6
    said = capsys.readouterr().err
    checkpoints = disk / "run" / "checkpoints"
    assert f"error: {checkpoints}: the checkpoint of step 8 cannot be written: it needs " in said
    assert " are free, " in said and " are missing. The checkpoint of step 4 stays." in said
    assert "Free some space, and start the run again: it resumes." in said  # one checkpoint is the fewest to keep
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000004"]
    assert verify(checkpoints / "step-00000004") == []
    (disk / "filler").unlink()
    assert danlu("train", recipe) == 0
    assert danlu("train", tiny_world.recipe(tmp_path / "whole")) == 0
    assert differences(tmp_path / "whole", disk / "run") == []


def test_a_disk_that_is_full_from_the_start(
    tiny_world: World, tmp_path: Path, mounted: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mounted("64k")
    (disk / "run").mkdir()
    (disk / "run" / ".lock").touch()
    with pytest.raises(OSError, match="No space left"):
        (disk / "filler").write_bytes(bytes(100_000))
    assert danlu("train", tiny_world.recipe(disk / "run", tmp_path / "recipe.yaml")) == 6
    said = capsys.readouterr().err
    assert said == (
        f"error: {disk}/run: the run folder cannot be written: No space left on device. Free some space, or choose "
        "another `output`.\n"
    )
    assert [entry.name for entry in (disk / "run").iterdir()] == [".lock"]


def test_a_folder_that_is_read_only(
    tiny_world: World, tmp_path: Path, mounted: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mounted("4m")
    recipe = tiny_world.recipe(disk / "run", tmp_path / "recipe.yaml", steps=2)
    assert danlu("train", recipe) == 0
    make_read_only(disk)
    capsys.readouterr()
    for output in ("run", "new"):
        assert danlu("train", recipe, f"output={disk / output}") == 6
        said = capsys.readouterr().err
        assert f"error: {disk / output}: the run folder cannot be written: Read-only file system." in said
        assert "Choose another `output`." in said
    assert danlu("train", recipe, f"output={tmp_path / 'ok'}", f"data.cache={disk}/cache") == 6
    assert f"error: the token cache {disk}/cache cannot be written (Read-only file system)" in capsys.readouterr().err


def test_a_run_folder_in_use(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(tmp_path / "run"):
        assert danlu("train", tiny_world.recipe(tmp_path / "run")) == 6
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'}: another danlu process (pid {os.getpid()}) is using this run folder." in said


def test_an_output_that_is_a_file(tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("mine")
    assert danlu("train", tiny_world.recipe(tmp_path / "run")) == 6
    assert f"error: {tmp_path / 'run'}: the run folder cannot be written: File exists" in capsys.readouterr().err
    assert (tmp_path / "run").read_text() == "mine"


def test_a_disk_that_fills_up_during_the_export_loses_no_training(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_world.recipe(tmp_path / "run", steps=2)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(saving, "_write_weights", full)
        assert danlu("train", recipe) == 6
    assert (
        f"error: {tmp_path / 'run' / 'model'}: the model cannot be written: the disk is full" in capsys.readouterr().err
    )
    assert last_state(tmp_path / "run")[0].name == "step-00000002"
    assert not list((tmp_path / "run").glob("*model*"))
    monkeypatch.setattr(train, "fit", lambda trained: trained.state.step == 2 or pytest.fail("trained again"))
    assert danlu("train", recipe) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
