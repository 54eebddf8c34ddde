"""Models, adapters, checkpoints and run folders that are wrong."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from builders.tiny_world import CONFIG

from hostile.case import Arrange, Case, Place, both, json_with, recipe, text

TRAIN = ("train", "r.yaml")
GENERATE = ("generate", "@/model", "--prompt", "a")
DEEP = "[" * 100_000


def model(changed: Callable[[Path], object]) -> Arrange:
    """The world's model in `@/model`, spoilt, and a recipe that starts from it."""

    def arrange(place: Place) -> None:
        shutil.copytree(place.world.base, place.tmp / "model")
        changed(place.tmp / "model")
        place.recipe(model={"path": "@/model", "config": None, "tokenizer": None})

    return arrange


def config(**changes: object) -> Arrange:
    return model(lambda folder: json_with(folder / "config.json", **changes))


def written(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def piped(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def header(entries: object) -> bytes:
    """The bytes of a safetensors file with this header and nothing else."""
    said = json.dumps(entries).encode()
    return struct.pack("<Q", len(said)) + said


def adapter(changed: Callable[[Path], object], **values: object) -> Arrange:
    """A LoRA adapter of PEFT's form in `@/adapter` on the world's model, spoilt."""

    def arrange(place: Place) -> None:
        import torch
        from safetensors.torch import save_file

        folder = place.tmp / "adapter"
        folder.mkdir()
        said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
        said |= {"base_model_name_or_path": str(place.world.base), "task_type": "CAUSAL_LM", **values}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
        weights = {}
        for layer in range(2):
            weights[name.format(layer, "A")] = torch.zeros(2, 32)
            weights[name.format(layer, "B")] = torch.zeros(32, 2)
        save_file(weights, folder / "adapter_model.safetensors")
        changed(folder)

    return arrange


def run_folder(changed: Callable[[Path], object]) -> Arrange:
    """A finished run of one step in `@/done`, spoilt, and its recipe."""

    def arrange(place: Place) -> None:
        shutil.copytree(place.world.folder / "first", place.tmp / "done")
        place.recipe(output="@/done", steps=1, schedule={"warmup": 0})
        changed(place.tmp / "done")

    return arrange


def unfinished(changed: Callable[[Path], object]) -> Arrange:
    """The same without its result, so that it would be gone on with."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder / "model")
        changed(next((folder / "checkpoints").iterdir()))

    return run_folder(change)


def same(folder: Path) -> None:
    """Nothing is spoilt."""


def flip_a_byte(step: Path) -> None:
    file = next(step.glob("model-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-50] ^= 1
    file.write_bytes(content)


CHAT = ("generate", "@/adapter", "--prompt", "a")

CASES = [
    # -- model folders
    Case("model folder missing", ("generate", "@/none", "--prompt", "a"), 4, ("error: @/none: no such folder",)),
    Case(
        "model folder empty",
        GENERATE,
        4,
        ("error: @/model: neither a model folder (config.json is missing) nor a finished run (no",),
        lambda place: (place.tmp / "model").mkdir(),
    ),
    Case(
        "model is a file",
        GENERATE,
        4,
        ("error: @/model: a model is a folder with config.json and safetensors weights, this is a file",),
        text("x", "model"),
    ),
    Case(
        "model is a pipe",
        GENERATE,
        4,
        ("error: @/model: a model is a folder with config.json and safetensors weights, this is a file",),
        lambda place: os.mkfifo(place.tmp / "model"),
    ),
    Case("model name with NUL", ("generate", "a\0b", "--prompt", "a"), 4, ("error: a\\x00b: no such folder",)),
    Case(
        "model name with escapes", ("generate", "@/\x1b[2J", "--prompt", "a"), 4, ("error: @/\\x1b[2J: no such folder",)
    ),
    Case(
        "model name too long",
        ("generate", "@/" + "x" * 300, "--prompt", "a"),
        6,
        ("error: @/xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",),
    ),
    Case(
        "model of no user",
        ("generate", "~nosuchuser/model", "--prompt", "a"),
        2,
        ("error: a path begins with '~' and the name of no user of this machine. Write it in full",),
    ),
    Case(
        "hub id not in the cache",
        ("generate", "nobody/nothing", "--prompt", "a"),
        4,
        ("error: nobody/nothing: no such folder, and this hub id is not in the local cache while the hub cannot",),
    ),
    Case(
        "config.json missing",
        TRAIN,
        4,
        ("error: @/model: neither a model folder (config.json is missing) nor a finished run (no",),
        model(lambda folder: (folder / "config.json").unlink()),
    ),
    Case(
        "config.json empty",
        TRAIN,
        4,
        ("error: @/model/config.json:1:1: broken JSON: Expecting value",),
        model(written("config.json", "")),
    ),
    Case(
        "config.json cut off",
        TRAIN,
        4,
        ("error: @/model/config.json:1:16: broken JSON: Expecting value",),
        model(written("config.json", '{"model_type": ')),
    ),
    Case(
        "config.json is a list",
        TRAIN,
        4,
        ("error: @/model/config.json: expected a JSON object, found list",),
        model(written("config.json", "[]")),
    ),
    Case(
        "config.json nested 100,000 deep",
        TRAIN,
        4,
        ("error: @/model/config.json:1:1: broken JSON: nested too deeply",),
        model(written("config.json", DEEP)),
    ),
    Case(
        "config.json not UTF-8",
        TRAIN,
        4,
        ("error: @/model/config.json: cannot be read: 'utf-8' codec can't decode byte 0xe9 in position 7:",),
        model(written("config.json", b'{"a": "\xe9"}')),
    ),
    Case(
        "config.json with a number of 5,000 digits",
        TRAIN,
        4,
        ("error: @/model/config.json:1:1: broken JSON: a number with too many digits",),
        model(written("config.json", '{"a": %s}' % ("9" * 5000))),
    ),
    Case(
        "config.json is a pipe",
        TRAIN,
        4,
        ("error: @/model/config.json: cannot be read: it is a named pipe, not a file. Take it out of the folder",),
        model(piped("config.json")),
    ),
    Case(
        "config.json of 1 TB",
        TRAIN,
        3,
        ("error: @/model/config.json: larger than 512 MiB, as no file of a tokenizer is",),
        model(lambda folder: os.truncate(folder / "config.json", 1 << 40)),
    ),
    Case(
        "model type unknown",
        TRAIN,
        4,
        ("error: @/model/config.json: model_type 'nosuch' is not supported; supported: cohere2,",),
        config(model_type="nosuch"),
    ),
    Case(
        "model type missing",
        TRAIN,
        4,
        ("error: @/model/config.json: model_type None is not supported; supported: cohere2,",),
        config(model_type=None),
    ),
    Case(
        "model type with escapes",
        TRAIN,
        4,
        ("error: @/model/config.json: model_type '\\x1b]0;title\\x07' is not supported; supported: cohere2,",),
        config(model_type="\x1b]0;title\x07"),
    ),
    Case(
        "hidden size missing",
        TRAIN,
        4,
        ("error: @/model/config.json: hidden_size: missing; the model cannot be built without it",),
        config(hidden_size=None),
    ),
    Case(
        "hidden size a text",
        TRAIN,
        4,
        ("error: @/model/config.json: hidden_size: expected an integer, found 'many'",),
        config(hidden_size="many"),
    ),
    Case(
        "hidden size zero",
        TRAIN,
        4,
        ("error: @/model/config.json: hidden_size is 0: it must be at least 1",),
        config(hidden_size=0),
    ),
    Case(
        "hidden size negative",
        TRAIN,
        4,
        ("error: @/model/config.json: hidden_size is -32: it must be at least 1",),
        config(hidden_size=-32),
    ),
    Case(
        "heads that do not divide",
        TRAIN,
        4,
        ("error: @/model/config.json: 5 query heads cannot share 2 key/value heads evenly: the second must",),
        config(num_attention_heads=5),
    ),
    Case(
        "key heads that do not divide",
        TRAIN,
        4,
        ("error: @/model/config.json: 4 query heads cannot share 3 key/value heads evenly: the second must",),
        config(num_key_value_heads=3),
    ),
    Case(
        "layers a fraction",
        TRAIN,
        4,
        ("error: @/model/config.json: num_hidden_layers: expected an integer, found 1.5",),
        config(num_hidden_layers=1.5),
    ),
    Case(
        "layers more than stored",
        TRAIN,
        4,
        (
            "error: @/model: the weights do not fit config.json:",
            "model.layers.2.input_layernorm.weight: missing; expected shape [32]",
        ),
        config(num_hidden_layers=3),
    ),
    Case(
        "activation unknown",
        TRAIN,
        4,
        ("error: @/model/config.json: hidden_act: activation 'nosuch' is not supported; supported:",),
        config(hidden_act="nosuch"),
    ),
    Case(
        "rope scaling unknown",
        TRAIN,
        4,
        ("error: @/model/config.json: rope_scaling: rotary scaling 'nosuch' is not supported for this family;",),
        config(rope_scaling={"rope_type": "nosuch", "factor": 2.0}),
    ),
    Case(
        "vocabulary smaller than the tokenizer's",
        TRAIN,
        4,
        ("error: the tokenizer has 400 tokens, the model embeds only 300: ids from 300 on would have no",),
        recipe(model={"config": {**CONFIG, "vocab_size": 300}}),
    ),
    Case(
        "generation_config.json is a pipe",
        GENERATE,
        4,
        ("error: @/model/generation_config.json: cannot be read: it is a named pipe, not a file. Take it out of",),
        model(piped("generation_config.json")),
    ),
    Case(
        "generation_config.json cut off",
        GENERATE,
        4,
        ("error: @/model/generation_config.json:1:2: broken JSON: Expecting property name enclosed in double",),
        model(written("generation_config.json", "{")),
    ),
    Case(
        "weights missing",
        GENERATE,
        4,
        ("error: @/model: no weights: neither model.safetensors nor model.safetensors.index.json; it holds",),
        model(lambda folder: (folder / "model.safetensors").unlink()),
    ),
    Case(
        "weights empty",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: not a safetensors file (its first 8 bytes are no header length)",),
        model(written("model.safetensors", "")),
    ),
    Case(
        "weights cut off",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: truncated: the header promises 178880 bytes, the file has 5000;",),
        model(lambda folder: os.truncate(folder / "model.safetensors", 5000)),
    ),
    Case(
        "weights of random bytes",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: not a safetensors file (its first 8 bytes are no header length)",),
        model(written("model.safetensors", bytes(range(256)) * 50)),
    ),
    Case(
        "weights are a pipe",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: cannot be read: it is a named pipe, not a file. Take it out of the",),
        model(piped("model.safetensors")),
    ),
    Case(
        "weights with a header of brackets",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: broken safetensors header: nested too deeply: line 1 column 1 (char",),
        model(written("model.safetensors", struct.pack("<Q", len(DEEP)) + DEEP.encode())),
    ),
    Case(
        "weights with a header that is a list",
        GENERATE,
        4,
        ("error: @/model/model.safetensors: broken safetensors header: expected an object",),
        model(written("model.safetensors", header([]))),
    ),
    Case(
        "weights with no tensor",
        GENERATE,
        4,
        (
            "error: @/model: the weights do not fit config.json:",
            "model.embed_tokens.weight: missing; expected shape [400, 32]",
        ),
        model(written("model.safetensors", header({}))),
    ),
    Case(
        "weights pickled",
        GENERATE,
        4,
        ("error: @/model: only pickled weights (pytorch_model*.bin), which can run any code when opened; danlu",),
        model(lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
    ),
    Case(
        "index cut off",
        GENERATE,
        4,
        ("error: @/model/model.safetensors.index.json:1:2: broken JSON: Expecting property name enclosed in",),
        model(
            lambda folder: [
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors.index.json").write_text("{"),
            ]
        ),
    ),
    Case(
        "index without weight_map",
        GENERATE,
        4,
        ("error: @/model/model.safetensors.index.json: weight_map must say for each tensor which file holds it",),
        model(
            lambda folder: [
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors.index.json").write_text("{}"),
            ]
        ),
    ),
    Case(
        "index that leaves the folder",
        GENERATE,
        4,
        (
            "error: @/model/model.safetensors.index.json: weight_map has lm_head.weight in '../out.safetensors'",
            "danlu reads nothing outside of it",
        ),
        model(
            lambda folder: [
                (folder / "model.safetensors").rename(folder.parent / "out.safetensors"),
                (folder / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"lm_head.weight": "../out.safetensors"}}'
                ),
            ]
        ),
    ),
    Case(
        "index that names a missing shard",
        GENERATE,
        4,
        ("error: @/model: model.safetensors.index.json names 1 shards, absent: a.safetensors",),
        model(
            lambda folder: [
                (folder / "model.safetensors").unlink(),
                (folder / "model.safetensors.index.json").write_text(
                    '{"weight_map": {"lm_head.weight": "a.safetensors"}}'
                ),
            ]
        ),
    ),
    Case(
        "model without tokenizer",
        GENERATE,
        3,
        ("error: @/model: this model folder has no tokenizer, so no text can be given to the model. Copy its",),
        model(lambda folder: [one.unlink() for one in folder.glob("tokenizer*")]),
    ),
    Case(
        "run without result",
        ("generate", "@/done", "--prompt", "a"),
        4,
        ("error: @/done: this run has not written its model yet (no model/ folder). Finish it with `danlu train",),
        run_folder(lambda folder: shutil.rmtree(folder / "model")),
    ),
    # -- adapters
    Case(
        "adapter_config.json cut off",
        CHAT,
        4,
        ("error: @/adapter/adapter_config.json: cannot be read as JSON: Expecting property name enclosed in",),
        adapter(written("adapter_config.json", "{")),
    ),
    Case(
        "adapter_config.json is a pipe",
        CHAT,
        4,
        ("error: @/adapter/adapter_config.json: cannot be read: it is a named pipe, not a file. Take it out of",),
        adapter(piped("adapter_config.json")),
    ),
    Case(
        "adapter_config.json nested 100,000 deep",
        CHAT,
        4,
        ("error: @/adapter/adapter_config.json: cannot be read as JSON: nested too deeply: line 1 column 1 (char",),
        adapter(written("adapter_config.json", DEEP)),
    ),
    Case(
        "adapter_config.json is a list",
        CHAT,
        4,
        ("error: @/adapter/adapter_config.json: expected a JSON object",),
        adapter(written("adapter_config.json", "[]")),
    ),
    Case(
        "adapter of unknown type",
        CHAT,
        4,
        ("error: @/adapter/adapter_config.json: peft_type 'NOSUCH' is not supported; supported:",),
        adapter(same, peft_type="NOSUCH"),
    ),
    Case(
        "adapter of rank zero",
        CHAT,
        4,
        ("error: @/adapter/adapter_model.safetensors: r is 0; expected a whole number above 0",),
        adapter(same, r=0),
    ),
    Case(
        "adapter of another rank",
        CHAT,
        4,
        ("error: @/adapter/adapter_model.safetensors: the factors of model.layers.0.self_attn.q_proj have rank",),
        adapter(same, r=7),
    ),
    Case(
        "adapter on a missing base",
        CHAT,
        4,
        ("error: @/adapter: the model it was trained on cannot be had. /nowhere/at/all: no such folder. Say",),
        adapter(same, base_model_name_or_path="/nowhere/at/all"),
    ),
    Case(
        "adapter that names no base",
        CHAT,
        4,
        ("error: @/adapter: does not say which model it was trained on. Name it with --base FOLDER",),
        adapter(same, base_model_name_or_path=None),
    ),
    Case(
        "adapter without weights",
        CHAT,
        4,
        ("error: @/adapter: adapter_model.safetensors is missing.",),
        adapter(lambda folder: (folder / "adapter_model.safetensors").unlink()),
    ),
    Case(
        "adapter with weights cut off",
        CHAT,
        4,
        ("error: @/adapter/adapter_model.safetensors: cannot be read: Error while deserializing header: invalid",),
        adapter(lambda folder: os.truncate(folder / "adapter_model.safetensors", 100)),
    ),
    Case(
        "danlu.json is a pipe",
        CHAT,
        4,
        ("error: @/adapter/danlu.json: cannot be read: it is a named pipe, not a file. Take it out of the folder",),
        adapter(piped("danlu.json")),
    ),
    Case(
        "danlu.json cut off",
        CHAT,
        4,
        ("error: @/adapter/danlu.json: cannot be read as JSON: Expecting property name enclosed in double",),
        adapter(written("danlu.json", "{")),
    ),
    Case(
        "danlu.json is a list",
        CHAT,
        4,
        ("error: @/adapter/danlu.json: expected a JSON object",),
        adapter(written("danlu.json", "[]")),
    ),
    Case(
        "merge onto nothing",
        ("merge", "@/adapter", "@/out", "--into", "@/none"),
        4,
        ("error: @/none: no such folder",),
        adapter(same),
    ),
    # -- run folders and checkpoints
    Case(
        "output is a file",
        TRAIN,
        6,
        ("error: @/run: the run folder cannot be written: File exists. Choose another `output`.",),
        both(recipe(), text("mine", "run")),
    ),
    Case(
        "output below a file",
        TRAIN,
        6,
        ("error: @/file/run: the run folder cannot be written: Not a directory. Choose another `output`.",),
        both(text("mine", "file"), recipe(output="@/file/run")),
    ),
    Case(
        "output holds another's files",
        TRAIN,
        6,
        ("error: @/mine: the output folder holds other things (thesis.txt). Choose an empty or new `output`.",),
        both(lambda place: (place.tmp / "mine").mkdir(), text("x", "mine/thesis.txt"), recipe(output="@/mine")),
    ),
    Case(
        "resume from nothing",
        (*TRAIN, "--resume", "@/none"),
        5,
        ("error: @/none: no checkpoint. --resume takes auto, never, or a folder such as",),
        recipe(),
    ),
    Case(
        "resume from a file",
        (*TRAIN, "--resume", "@/file"),
        5,
        ("error: @/file: no checkpoint. --resume takes auto, never, or a folder such as",),
        both(text("x", "file"), recipe()),
    ),
    Case(
        "resume with another recipe",
        (*TRAIN, "optimizer.learning_rate=0.5"),
        5,
        (
            "error: @/done holds a run of another recipe; what differs (there -> here):",
            "optimizer.learning_rate: 0.01 -> 0.5",
        ),
        unfinished(same),
    ),
    Case(
        "checkpoint with a flipped bit",
        TRAIN,
        5,
        (
            "error: @/done/checkpoints/step-00000001 is damaged:",
            "model-00001-of-00001.safetensors: tensor lm_head.weight was",
        ),
        unfinished(flip_a_byte),
    ),
    Case(
        "checkpoint's state cut off",
        TRAIN,
        5,
        ("error: @/done/checkpoints/step-00000001 is damaged:", "state.json: altered (20 bytes, "),
        unfinished(lambda step: os.truncate(step / "state.json", 20)),
    ),
    Case(
        "checkpoint's manifest is gone",
        TRAIN,
        5,
        ("error: @/done/checkpoints/step-00000001 is damaged:", "manifest.json: missing."),
        unfinished(lambda step: (step / "manifest.json").unlink()),
    ),
    Case(
        "checkpoint's manifest nested 100,000 deep",
        TRAIN,
        5,
        ("error: @/done/checkpoints/step-00000001 is damaged:", "manifest.json: altered since it was written"),
        unfinished(lambda step: (step / "manifest.json").write_text(DEEP)),
    ),
    Case(
        "checkpoint list of nothing", ("checkpoint", "list", "@/none"), 5, ("error: @/none: there is no such folder.",)
    ),
    Case(
        "checkpoint list of a stranger's folder",
        ("checkpoint", "list", "@"),
        5,
        ("error: @: no checkpoints here. A run keeps them in its checkpoints/step-00000500, ...",),
        text("x", "thesis.txt"),
    ),
    Case(
        "checkpoint verify of a damaged one",
        ("checkpoint", "verify", "@/done"),
        5,
        ("step 1: DAMAGED", "model-00001-of-00001.safetensors: tensor lm_head.weight was altered (SHA-256 differs)"),
        run_folder(lambda folder: flip_a_byte(next((folder / "checkpoints").iterdir()))),
        on_stdout=True,
    ),
    Case(
        "checkpoint export over a file",
        ("checkpoint", "export", "@/done", "@/mine"),
        6,
        ("error: @/mine: is there already. Choose an empty or new folder",),
        both(run_folder(same), text("x", "mine")),
    ),
    Case(
        "merge into a stranger's folder",
        ("merge", "@/adapter", "@/mine"),
        6,
        ("error: @/mine: is there already. Choose an empty or new folder",),
        both(adapter(same), lambda place: (place.tmp / "mine").mkdir(), text("x", "mine/thesis.txt")),
    ),
    Case(
        "quantize into a file",
        ("quantize", "@base", "@/mine"),
        6,
        ("error: @/mine: is there already. Choose an empty or new folder",),
        text("x", "mine"),
    ),
    Case(
        "preview page over a stranger's",
        ("preview", "r.yaml", "--html", "@/mine.html"),
        2,
        ("error: --html @/mine.html: exists and is no danlu preview, so it stays as it is. Choose another name",),
        both(recipe(), text("<p>mine", "mine.html")),
    ),
]
