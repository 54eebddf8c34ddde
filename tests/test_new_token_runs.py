"""Runs with new tokens: of which rows, in which stages and layouts, in which folders, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from builders.process_group import run_group
from builders.served import serving_rollouts
from builders.tiny_adapters import logits
from builders.tiny_world import World, danlu, differences, metrics, write_rows
from builders.train_worker import train
from builders.worst_errors import worst_relative_error
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from danlu.core.errors import ModelError
from danlu.inference.load_adapted import load_adapted_model
from danlu.inference.resolve_model import resolve_model
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config
from danlu.models.initialize import initialize
from danlu.models.loading import build, load
from danlu.models.saving import save
from danlu.training import loop

TEXT = "Two and three. <plan> Add them. <act> Five."
pytestmark = pytest.mark.usefixtures("module_tokenises_here")

ROWS = [
    {"prompt": f"{a} and {b}", "completion": f" <plan> Add {a} to {b}. <act> {a + b}"}
    for a in range(8)
    for b in range(5)
]
PREFERENCES = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " <act> No."} for row in ROWS]
TOKENS = [{"text": "<plan>", "description": "a plan"}, "<act>"]
LORA = {"kind": "lora", "rank": 4}


def recipe(world: World, output: Path, rows: Sequence[dict[str, Any]] = ROWS, **changes: Any) -> Path:
    file = write_rows(world.folder / f"new-tokens-{len(rows[0])}.jsonl", rows)
    model = {"path": str(world.base), "config": None, "tokenizer": None, "tokens": TOKENS}
    base = {"model": model, "data": {"train": str(file)}, "steps": 6}
    both = {name for name in base.keys() & changes.keys() if isinstance(changes[name], dict)}
    return world.recipe(output, **{**base, **changes, **{name: {**base[name], **changes[name]} for name in both}})


def build_tied(world: World) -> Decoder:
    model = build(replace(read_config(world.base), tie_word_embeddings=True))
    initialize(model, 0)
    return model


def cut_off(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """SIGTERM in the middle of a step, once."""
    real = loop.accumulate

    def accumulate(*arguments: Any, **options: Any) -> Any:
        if options["step"] == step:
            monkeypatch.setattr(loop, "accumulate", real)
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "accumulate", accumulate)


def ids(folder: Path) -> Tensor:
    return torch.tensor(AutoTokenizer.from_pretrained(folder).encode(TEXT, add_special_tokens=False))


def ours(folder: Path, base: Path | None = None) -> tuple[Decoder, Tensor]:
    resolved = resolve_model(str(folder), None if base is None else str(base))
    model, _ = load_adapted_model(resolved, dtype=torch.float32, device="cpu", quantization=None, merged=False)
    with torch.no_grad():
        return model, logits(model, ids(folder)[:16])


@pytest.fixture(scope="module")
def lora(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    assert danlu("train", recipe(tiny_world, folder, adapter=LORA)) == 0
    return folder


def test_peft_loads_it_with_the_rows_and_computes_the_same(lora: Path, tiny_world: World) -> None:
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(lora / "adapter").eval()
    assert theirs.get_input_embeddings().weight.shape[0] == 402  # the base's 400, resized by the tokenizer
    model, found = ours(lora / "adapter")
    assert (model.config.vocab_size, model.config.vocab_padding) == (402, 6)
    pieces = [ids(lora / "adapter")[start:end] for start, end in ((0, 5), (5, 12), (12, 16))]
    with torch.no_grad():
        wanted = torch.cat([theirs(piece.unsqueeze(0)).logits[0] for piece in pieces])
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    rows = load_file(lora / "adapter" / "adapter_model.safetensors")
    start = load(tiny_world.base).embed_tokens.weight.mean(0)
    assert not torch.allclose(rows["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"], start)
    config = json.loads((lora / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_world.base)


def test_matrices_that_are_trained_in_full_are_written_as_peft_resizes_the_base(
    tiny_world: World, tmp_path: Path
) -> None:
    """Without the rows that no token has, which are the base's when danlu reads the adapter."""
    file = recipe(
        tiny_world, tmp_path / "run", adapter={**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}, steps=2
    )
    assert danlu("train", file) == 0
    folder = tmp_path / "run" / "adapter"
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    model, found = ours(folder)
    assert (model.config.vocab_size, model.config.vocab_padding) == (402, 6)
    pieces = [ids(folder)[start:end] for start, end in ((0, 5), (5, 12), (12, 16))]
    with torch.no_grad():
        wanted = torch.cat([theirs(piece.unsqueeze(0)).logits[0] for piece in pieces])
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert danlu("merge", folder, tmp_path / "merged") == 0
    assert torch.allclose(logits(load(tmp_path / "merged"), ids(folder)[:16]), wanted, rtol=1e-5, atol=1e-5)
    start = load(tiny_world.base).embed_tokens.weight.detach()
    merged = load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.allclose(merged[402:], start.mean(0).expand(6, -1), atol=1e-6)
    assert not torch.allclose(merged[401], start.mean(0), atol=1e-4)


def test_a_reference_without_the_tokens_is_refused(lora: Path, tiny_world: World, tmp_path: Path, capsys: Any) -> None:
    changes: dict[str, Any] = {"stage": "dpo", "rows": PREFERENCES, "batch": PAIRS, "steps": 2}
    model = {"adapters": [str(lora / "adapter")], "tokens": []}
    reference = {"kind": "frozen", "model": str(tiny_world.base)}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", model=model, reference=reference, **changes)) == 2
    assert "has another vocabulary: its token 400 is absent, the policy's is '<plan>'" in capsys.readouterr().err
    assert danlu("train", recipe(tiny_world, tmp_path / "run", model=model, **changes)) == 0


def test_it_is_merged_quantized_and_answered_with(lora: Path, tmp_path: Path, capsys: Any) -> None:
    assert danlu("merge", lora / "adapter", tmp_path / "merged") == 0
    _, wanted = ours(lora / "adapter")
    merged = load(tmp_path / "merged")
    assert (merged.config.vocab_size, merged.config.vocab_padding) == (402, 6)
    assert torch.allclose(logits(merged, ids(tmp_path / "merged")[:16]), wanted, rtol=1e-5, atol=1e-5)
    assert danlu("quantize", tmp_path / "merged", tmp_path / "small") == 0
    assert read_config(tmp_path / "small").vocab_padding == 6
    assert AutoTokenizer.from_pretrained(tmp_path / "small").convert_tokens_to_ids("<act>") == 401
    capsys.readouterr()
    for folder in (lora / "adapter", tmp_path / "small"):
        assert danlu("generate", folder, "--prompt", "1 and 2", "--max-new-tokens", "8") == 0


def test_a_resumed_run_ends_bit_for_bit_as_an_undisturbed_one(
    lora: Path, tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = recipe(tiny_world, tmp_path / "run", adapter=LORA)
    cut_off(monkeypatch, 4)
    assert danlu("train", file) == 143
    assert danlu("train", file) == 0
    assert not differences(lora, tmp_path / "run")


def test_another_adapter_upon_it_adds_a_token_behind_its_tokens(lora: Path, tiny_world: World, tmp_path: Path) -> None:
    file = recipe(
        tiny_world,
        tmp_path / "run",
        model={"adapters": [str(lora / "adapter")], "tokens": ["<end>"]},
        adapter=LORA,
        steps=2,
    )
    assert danlu("train", file) == 0
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == {"embed_tokens": [402], "lm_head": [402]}
    model, _ = ours(tmp_path / "run" / "adapter")
    assert model.config.vocab_size == 403


def test_it_is_trained_on(lora: Path, tiny_world: World, tmp_path: Path) -> None:
    model = {"adapters": [str(lora / "adapter")], "tokens": []}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", model=model, adapter="continue", steps=2)) == 0
    old, new = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (lora, tmp_path / "run"))
    assert old.keys() == new.keys()
    assert not any(torch.equal(old[key], new[key]) for key in old if "token_adapter" in key)


PAIRS = {"rows": 4, "sequences": None, "micro": 2}
STAGES: dict[str, dict[str, Any]] = {
    "full": {},
    "packing": {"adapter": LORA, "data": {"packing": "none"}},
    "nf4": {"adapter": LORA, "quantization": "nf4"},
    "preference": {"stage": "dpo", "rows": PREFERENCES, "batch": PAIRS, "adapter": LORA},
    "preference of all weights": {"stage": "dpo", "rows": PREFERENCES, "batch": PAIRS},
}


@pytest.mark.parametrize("name", STAGES)
def test_rows_of_the_tokens_are_trained_and_those_that_no_token_has_are_not(
    tiny_world: World, tmp_path: Path, name: str
) -> None:
    changes = {"optimizer": {"kind": "adamw", "learning_rate": 1e-2, "weight_decay": 0}, "steps": 2, **STAGES[name]}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **changes)) == 0
    start = {key: parameter.detach().mean(0) for key, parameter in load(tiny_world.base).named_parameters()}
    if "adapter" in STAGES[name]:
        file, key = "adapter/adapter_model.safetensors", "base_model.model.{}.token_adapter.trainable_tokens_delta"
    else:
        file, key = "model/model.safetensors", "{}.weight"
        config = read_config(tmp_path / "run" / "model")
        assert (config.vocab_size, config.vocab_padding) == (402, 6)
        assert ids(tmp_path / "run" / "model").max() == 401
    weights = load_file(tmp_path / "run" / file)
    head, embedding = weights[key.format("lm_head")], weights[key.format("model.embed_tokens")]
    act_head, act = head[-1 if len(head) == 2 else 401], embedding[-1 if len(embedding) == 2 else 401]
    assert not torch.allclose(act_head, start["lm_head.weight"], atol=1e-4)
    assert not torch.allclose(act, start["embed_tokens.weight"], atol=1e-4)
    if len(head) > 2:
        assert torch.equal(head[402:], head[402:403].expand(6, -1))
        assert torch.allclose(head[402], start["lm_head.weight"], atol=1e-6)
        assert torch.allclose(embedding[402], start["embed_tokens.weight"], atol=1e-6)


def grpo_recipe(world: World, folder: Path, name: str, rollout: dict[str, Any], **changes: Any) -> Path:
    reward = folder / "letters.py"
    reward.write_text("def letters(completion, **row):\n    return float(completion.count('e'))\n")
    return recipe(
        world,
        folder / name,
        stage="grpo",
        data={"prompt": "{prompt} <plan>", "max_length": 64},
        rollout={"samples": 4, "max_new_tokens": 6, **rollout},
        rewards=[f"{reward}:letters"],
        batch={"prompts": 4, "sequences": None, "micro": 1},
        optimizer={"kind": "adamw", "learning_rate": 0.1},
        steps=3,
        **changes,
    )


def gaps(run: Path) -> list[float]:
    return [abs(line["gap"]) for line in metrics(run) if "gap" in line]


def test_rollouts_have_the_rows_of_the_policy(tiny_world: World, tmp_path: Path) -> None:
    assert danlu("train", grpo_recipe(tiny_world, tmp_path, "run", {}, adapter=LORA)) == 0
    assert 0 < max(gaps(tmp_path / "run")) < 1e-4
    start = load(tiny_world.base).get_parameter("lm_head.weight").mean(0)
    rows = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert not torch.allclose(rows["base_model.model.lm_head.token_adapter.trainable_tokens_delta"], start)


def test_rollouts_of_danlu_s_server_have_the_rows_too(tiny_world: World, tmp_path: Path, capsys: Any) -> None:
    """The server is started with the base that a preview names. An adapter's rows are handed over, or all weights."""
    rollout: dict[str, Any] = {"engine": "http", "urls": ["http://127.0.0.1:9"], "server": {"timeout_s": 20}}
    assert danlu("preview", grpo_recipe(tiny_world, tmp_path, "run", rollout, adapter=LORA), "--rows", "1") == 0
    (named,) = re.findall(r"start the rollout server with (\S+)", capsys.readouterr().out)
    with serving_rollouts(Path(named)) as served:
        rollout["urls"] = [served.root]
        assert danlu("train", grpo_recipe(tiny_world, tmp_path, "lora", rollout, adapter=LORA)) == 0
        assert danlu("train", grpo_recipe(tiny_world, tmp_path, "full", rollout)) == 0
    for name in ("lora", "full"):
        found = gaps(tmp_path / name)
        assert len(found) == 3 and 0 < max(found) < 1e-4
    weights = load_file(tmp_path / "full" / "model" / "model.safetensors")["lm_head.weight"]
    assert not torch.allclose(weights[401], weights[407], atol=1e-3)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_several_processes_end_where_one_does(tiny_world: World, tmp_path: Path, kind: str, tied: bool) -> None:
    """Cut by the vocabulary, where the last process has the new rows, and in stages, where embedding and head are
    apart."""
    base = tiny_world.base
    if tied:
        save(build_tied(tiny_world), base := tmp_path / "tied", tokenizer_from=tiny_world.tokenizer)
    layouts: dict[str, dict[str, Any]] = {
        "one": {},
        "tensor": {"tensor": 2, "sequence": True},
        "pipeline": {"pipeline": 2},
        "zero3": {"shard": "zero3"},
    }
    files = {
        name: str(
            recipe(
                tiny_world,
                tmp_path / name,
                model={"path": str(base)},
                parallel=layout,
                steps=3,
                batch={"sequences": 4, "micro": 1},
                **({"adapter": LORA} if kind == "lora" else {}),
            )
        )
        for name, layout in layouts.items()
    }
    train([files.pop("one")])
    run_group(train, 2, list(files.values()))
    result = "adapter/adapter_model.safetensors" if kind == "lora" else "model/model.safetensors"
    one = load_file(tmp_path / "one" / result)
    for name in files:
        assert worst_relative_error(load_file(tmp_path / name / result), one) < 2e-5, name


SERVED: dict[str, Any] = {"stage": "grpo", "rewards": ["x.py:y"], "batch": PAIRS}


@pytest.mark.distributed
def test_a_verification_compares_the_rows_too(
    tiny_world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe(tiny_world, tmp_path / "run", adapter=LORA)
    assert danlu("verify", file, "parallel.tensor=2", "--steps", 1) == 0
    said = capsys.readouterr().out
    assert "rows of single tokens: 3 of the small model's" in said
    assert re.search(r"lm_head +96 ", said) and "lm_head.token_adapter.trainable_tokens_delta, exported result" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"tokens": ["<plan>", "<plan>"]}}, "model.tokens.1: '<plan>' is given twice"),
        ({"adapter": "vera"}, "adapter.kind: vera trains no rows of single tokens"),
        ({"adapter": {**LORA, "trainable_tokens": ["<nowhere>"]}}, "adapter.trainable_tokens: '<nowhere>' is no token"),
        (
            {**SERVED, "rollout": {"engine": "vllm", "url": "http://x:1"}, "adapter": LORA},
            "rollout.engine: vllm takes the factors of an adapter, and no rows of single tokens, which model.tokens",
        ),
        (
            {**SERVED, "rollout": {"engine": "sglang", "url": "http://x:1"}},
            "rollout.engine: sglang draws from rows that no token has",
        ),
        (
            {
                **SERVED,
                "rollout": {"engine": "vllm", "url": "http://x:1"},
                "model": {"tokens": []},
                "adapter": {**LORA, "trainable_tokens": ["a"]},
            },
            "rollout.engine: vllm takes the factors of an adapter, and no rows of single tokens, which adapter.train",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tiny_world: World, tmp_path: Path, changes: dict[str, Any], message: str, capsys: Any
) -> None:
    assert danlu("train", recipe(tiny_world, tmp_path / "run", **changes)) in (2, 3)
    assert message in capsys.readouterr().err


def test_preview_shows_old_and_new_ids(tiny_world: World, tmp_path: Path, capsys: Any) -> None:
    file = recipe(tiny_world, tmp_path / "run")
    assert danlu("preview", file, "--rows", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["new_tokens"]
    own = AutoTokenizer.from_pretrained(tiny_world.tokenizer)
    assert shown == [
        {"text": text, "id": token, "before": own.encode(text, add_special_tokens=False)}
        for text, token in (("<plan>", 400), ("<act>", 401))
    ]
    assert danlu("preview", file, "--rows", "1", "--html", tmp_path / "page.html") == 0
    before = " ".join(map(str, shown[1]["before"]))
    assert f"<act>: 401, before {before}" in capsys.readouterr().out
    assert f"<code>&lt;act&gt;</code></th><td>401</td><td>{before}</td>" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_small_model_learns_where_two_new_tokens_belong(tiny_world: World, shared_data: Path, tmp_path: Path) -> None:
    """LoRA on stories260K and 200 rows: both tokens are drawn in their places, the end token too, and PEFT computes the
    same logits."""
    names, things = ["Tom", "Lily", "Ben", "Mia", "Sam"], ["ball", "cat", "dog", "car", "tree", "cake", "hat", "book"]
    rows = [
        {
            "prompt": f"{name} wanted a {thing}.",
            "completion": f" <plan> {name} will look for the {thing}. <act> {name} got the {thing}.",
        }
        for name, thing, _ in product(names, things, range(5))
    ]
    file = recipe(
        tiny_world,
        tmp_path / "run",
        model={"path": str(shared_data / "weights/stories260K-hf"), "tokens": ["<plan>", "<act>"]},
        data={"train": str(write_rows(tmp_path / "rows.jsonl", rows))},
        adapter={"kind": "lora", "rank": 8, "trainable_tokens": ["</s>"]},
        batch={"sequences": 16, "micro": 16},
        steps=60,
    )
    assert danlu("train", file) == 0
    folder = tmp_path / "run" / "adapter"
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    for name, thing in product(names, things):
        prompt = torch.tensor([[1, *tokenizer.encode(f"{name} wanted a {thing}.", add_special_tokens=False)]])
        answer = theirs.generate(prompt, max_new_tokens=48, do_sample=False)[0, prompt.shape[1] :].tolist()
        text = tokenizer.decode(answer)
        parts = re.fullmatch(r"\s*<plan>(.*)<act>(.*)</s>", text)
        right += parts is not None and name in parts[1] and name in parts[2] and thing in parts[2]
    assert right >= 36
    model, _ = load_adapted_model(
        resolve_model(str(folder)), dtype=torch.float32, device="cpu", quantization=None, merged=False
    )
    text = torch.tensor(tokenizer.encode(rows[0]["prompt"] + rows[0]["completion"]))[:16]
    with torch.no_grad():
        wanted = torch.cat([theirs(piece.unsqueeze(0)).logits[0] for piece in (text[:5], text[5:12], text[12:])])
        assert torch.allclose(logits(model, text), wanted, rtol=1e-5, atol=1e-5)


def test_an_adapter_that_peft_trained_on_a_resized_base_is_read(tiny_world: World, tmp_path: Path) -> None:
    """PEFT writes the base's resized matrices with the rows; which texts they are the tokenizer in the folder says."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.tokenizer)
    tokenizer.add_tokens(["<plan>", "<act>"])
    model = AutoModelForCausalLM.from_pretrained(tiny_world.base)
    model.resize_token_embeddings(len(tokenizer))
    both = {"embed_tokens": [3, 400, 401], "lm_head": [3, 400, 401]}
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices=both, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ModelError, match="has 401, and this base has 400 rows"):
        ours(shutil.copytree(tmp_path / "theirs", tmp_path / "without"), tiny_world.base)
    tokenizer.save_pretrained(tmp_path / "theirs")
    text = ids(tmp_path / "theirs")[:16]
    with torch.no_grad():
        wanted = torch.cat([adapted(piece.unsqueeze(0)).logits[0] for piece in (text[:5], text[5:12], text[12:])])
    _, computed = ours(tmp_path / "theirs", tiny_world.base)
    assert torch.allclose(computed, wanted, rtol=1e-5, atol=1e-5)
