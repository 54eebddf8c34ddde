"""Stage rl with a real vLLM on this machine: hand-overs, log-probabilities, deaths of either side, and rewards.

The other tests speak with a stand-in. These need vLLM in an environment of its own, and the path of its program:

    python benchmarks/vllm_environment.py FOLDER
    DANLU_VLLM=FOLDER/bin/vllm pytest -m slow tests/remote_engines/test_real_vllm.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.tiny_world import danlu
from builders.vllm_process import VLLMProcess
from safetensors.torch import load_file
from transformers import AutoTokenizer

from danlu.core.http_client import HTTPClient, RequestRefused
from danlu.inference.embedded import EmbeddedEngine
from danlu.inference.engine import EngineOptions
from danlu.inference.request import Request, SamplingOptions
from danlu.models.loading import load as load_model
from danlu.remote_engines.server_interface import Continuation
from danlu.remote_engines.vllm import VLLMServer, comparable_tensors

pytestmark = pytest.mark.slow

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
BEGINNINGS = ("Once upon a time", "Lily went to the", "The dog was", "Tom and Sam", "One day a girl", "Mom said")
REWARD = 'def many_e(completion, **row):\n    return completion.count("e") / max(len(completion), 1)\n'
GUIDANCE = ("--structured-outputs-config.backend", "guidance")
ROUNDING = 1e-5
"""Nats between log-probabilities of two programs that both compute in float32."""


@pytest.fixture(scope="module")
def folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the heads that vLLM has kernels for, prompts and a reward."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    place = tmp_path_factory.mktemp("vllm")
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "weights" / "stories260K-hf")
    set_seed(0)
    values = {**MODEL, "vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    rows = [{"prompt": each} for each in BEGINNINGS]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text(REWARD)
    return place


def vllm_command() -> str:
    command = os.environ.get("DANLU_VLLM")
    if command is None:
        pytest.skip("no vLLM: benchmarks/vllm_environment.py makes one; set DANLU_VLLM to its program")
    return command


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[VLLMProcess]:
    server = VLLMProcess(vllm_command(), folder / "base", folder / "vllm.log", ("--enable-lora", *GUIDANCE))
    server.start()
    try:
        yield server
    finally:
        server.end()


def recipe(folder: Path, name: str, rollout: dict[str, Any], **more: Any) -> Path:
    values = {
        "stage": "rl",
        "model": str(folder / "base"),
        "data": {"train": str(folder / "prompts.jsonl"), "prompt": "{prompt}"},
        "rewards": [f"{folder / 'reward.py'}:many_e"],
        "rollout": {"samples": 4, "max_new_tokens": 16, **rollout},
        "batch": {"prompts": 4},
        "optimizer": {"learning_rate": 1e-3},
        "precision": "fp32",
        "steps": 4,
        "output": str(folder / name),
        **more,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def served(vllm: VLLMProcess, route: str, **server: Any) -> dict[str, Any]:
    return {"engine": "vllm", "url": vllm.url, "server": {"hand_over": route, **server}}


def begin(file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "danlu", "train", str(file)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def train(file: Path) -> str:
    """Runs a recipe and returns its messages."""
    process = begin(file)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def lines(file: Path) -> list[dict[str, Any]]:
    """The metric lines of a run's steps."""
    run = yaml.safe_load(file.read_text())["output"]
    path = Path(run) / "metrics.jsonl"
    every = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in every if "loss" in line]


def wait_for_step(file: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not any(line["step"] >= step for line in lines(file)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("route", "more"), [("adapter", {"adapter": {"kind": "lora", "rank": 8}}), ("folder", {})])
def test_the_servers_log_probabilities_are_the_trainers_after_each_step(
    folder: Path, vllm: VLLMProcess, route: str, more: dict[str, Any]
) -> None:
    file = recipe(folder, f"by-{route}", served(vllm, route), **more)
    train(file)
    steps = lines(file)
    assert len(steps) == 4 and all(line["gap"] < ROUNDING for line in steps)
    # Weights of an earlier step are far more than rounding away, so an update that is lost would be seen.
    assert all(line["grad_norm"] > 0.1 for line in steps)


def test_a_run_begins_with_its_own_weights_on_a_server_that_has_those_of_another(
    folder: Path, vllm: VLLMProcess
) -> None:
    for name in ("before", "after"):
        file = recipe(folder, name, served(vllm, "folder"))
        train(file)
        assert all(line["gap"] < ROUNDING for line in lines(file))


def test_an_adapter_over_the_weights_of_another_run_is_refused(folder: Path, vllm: VLLMProcess) -> None:
    """Here the trainer never replaces the base, which the run before this one has trained."""
    process = begin(recipe(folder, "other-base", served(vllm, "adapter"), adapter={"kind": "lora", "rank": 8}))
    _, said = process.communicate(timeout=600)
    assert process.returncode != 0 and "canary: the rollout engine does not answer with the trainer's weights" in said


def test_a_killed_trainer_leaves_a_server_that_the_next_run_takes_over(folder: Path, vllm: VLLMProcess) -> None:
    file = recipe(folder, "killed", served(vllm, "folder"), steps=16, checkpoint={"every": 2})
    process = begin(file)
    wait_for_step(file, 3)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    HTTPClient(vllm.url, 60.0).post("/pause", query={"mode": "keep"})
    said = train(file)
    assert "and goes on for this run" in said and "resuming" in said
    assert lines(file)[-1]["step"] == 16 and all(line["gap"] < ROUNDING for line in lines(file))


def test_a_server_that_dies_ends_the_run_and_the_run_goes_on_with_a_new_one(folder: Path, vllm: VLLMProcess) -> None:
    file = recipe(folder, "server-killed", served(vllm, "folder", reconnect_s=2), steps=16, checkpoint={"every": 2})
    process = begin(file)
    wait_for_step(file, 3)
    vllm.end()
    _, said = process.communicate(timeout=300)
    vllm.start()
    assert process.returncode == 6 and vllm.url in said, said
    assert "resuming" in train(file)
    assert lines(file)[-1]["step"] == 16 and all(line["gap"] < ROUNDING for line in lines(file))


FORMS: dict[str, Any] = {
    "regex": "<[ae]{1,3}>",
    "choice": ["yes", "no", "maybe so"],
    "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def in_form(folder: Path, vllm: VLLMProcess, name: str, kind: str) -> Path:
    rollout = {**served(vllm, "folder"), "format": {kind: FORMS[kind]}}
    return recipe(folder, name, rollout, steps=2)


@pytest.mark.parametrize("kind", FORMS)
def test_answers_in_a_form_have_the_trainers_log_probabilities(folder: Path, vllm: VLLMProcess, kind: str) -> None:
    """The release of llguidance there is an older one than here (1.7 and 1.9)."""
    file = in_form(folder, vllm, f"form-{kind}", kind)
    train(file)
    assert [line["gap"] < ROUNDING for line in lines(file)] == [True] * 2
    rollouts = (folder / f"form-{kind}" / "rollouts.jsonl").read_text().splitlines()
    answers = [answer for line in rollouts for answer in json.loads(line)["answers"]]
    texts = [answer["text"] for answer in answers if answer["finish"] == "stop"]
    patterns = {"regex": "<[ae]{1,3}>", "choice": "yes|no|maybe so", "json_schema": r"\{.*\}"}
    assert all(re.fullmatch(patterns[kind], text, re.DOTALL) for text in texts), texts
    assert len(answers) == 32 and (kind == "json_schema" or (len(texts) == 32 and len(set(texts)) > 2))


def test_training_without_the_tokens_that_the_form_left_has_a_gap(
    folder: Path, vllm: VLLMProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above, in this process."""
    monkeypatch.setattr("danlu.rl.experience.with_supports", lambda items, completions: list(items))
    file = in_form(folder, vllm, "form-whole", "regex")
    assert danlu("train", file) == 0
    assert min(line["gap"] for line in lines(file)) > 1


NEW_TOKENS = ("<plan>", "<act>")


@pytest.fixture(scope="module")
def rows_server(folder: Path) -> Iterator[VLLMProcess]:
    """A server of the base with rows for new tokens, which a preview names, and for its padding."""
    command = vllm_command()
    file = new_token_recipe(folder, "named", "http://127.0.0.1:9")
    shown = subprocess.run(
        [sys.executable, "-m", "danlu", "preview", str(file), "--rows", "1"], capture_output=True, text=True, check=True
    )
    (named,) = re.findall(r"start the rollout server with (\S+)", shown.stdout)
    flags = ("--enable-lora", "--logprobs-mode", "processed_logprobs")
    server = VLLMProcess(command, Path(named), folder / "rows.log", flags)
    server.start()
    try:
        yield server
    finally:
        server.end()


def new_token_recipe(folder: Path, name: str, url: str) -> Path:
    """Prompts end in one of the new tokens."""
    rows = [{"prompt": f"{each} {NEW_TOKENS[0]}"} for each in BEGINNINGS]
    (folder / "new-tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe(
        folder,
        name,
        {"engine": "vllm", "url": url, "max_new_tokens": 32},
        model={"path": str(folder / "base"), "tokens": list(NEW_TOKENS)},
        data={"train": str(folder / "new-tokens.jsonl"), "prompt": "{prompt}"},
    )


def test_rows_of_new_tokens_are_handed_over(folder: Path, rows_server: VLLMProcess) -> None:
    file = new_token_recipe(folder, "new-tokens", rows_server.url)
    train(file)
    assert [line["gap"] < ROUNDING for line in lines(file)] == [True] * 4
    rollouts = (folder / "new-tokens" / "rollouts.jsonl").read_text().splitlines()
    drawn = {token for line in rollouts for answer in json.loads(line)["answers"] for token in answer["tokens"]}
    first = AutoTokenizer.from_pretrained(folder / "new-tokens" / "model").convert_tokens_to_ids(NEW_TOKENS[0])
    assert drawn & {first, first + 1} and max(drawn) <= first + 1  # none of the padding


def test_new_tokens_have_the_log_probabilities_of_the_embedded_engine(rows_server: VLLMProcess) -> None:
    """Control: the same with a row of theirs left out."""
    client = VLLMServer(HTTPClient(rows_server.url, 120.0), bucket_bytes=1 << 20)
    model = load_model(rows_server.model)
    client.check(model.config)
    client.load_folder(rows_server.model, "0")
    client.drop_prefix_cache()
    first = model.config.vocab_size - len(NEW_TOKENS)
    prompt = (1, 300, first, 301, first + 1)
    request = Request(0, prompt, SamplingOptions(), 16)
    answer = client.answer(Continuation("new-tokens", request, prompt, 16, None))
    engine = EmbeddedEngine(model, EngineOptions(cache_gib=0.01))

    def gap() -> float:
        scored = replace(request, prompt=(*prompt, *answer.tokens), max_new_tokens=1, prompt_logprobs=True)
        (completion,) = engine.generate([scored])
        own = (completion.prompt_logprobs or [])[len(prompt) - 1 :]
        return max(abs(one - other) for one, other in zip(own, answer.logprobs, strict=True))

    assert gap() < 10 * ROUNDING
    with torch.no_grad():
        model.get_parameter("embed_tokens.weight")[first] = 0
    engine = EmbeddedEngine(model, EngineOptions(cache_gib=0.01))
    assert gap() > 0.01


def test_vllm_takes_no_rows_of_single_tokens_in_an_adapter(folder: Path, rows_server: VLLMProcess) -> None:
    """Which is why a recipe with both is refused before it runs (recipe/rules/rollout.py)."""
    lora = {"kind": "lora", "rank": 8}
    model = {"path": str(folder / "base"), "tokens": list(NEW_TOKENS)}
    train(recipe(folder, "rows-adapter", {}, model=model, adapter=lora, steps=1))
    client = VLLMServer(HTTPClient(rows_server.url, 120.0), bucket_bytes=1 << 20)
    with pytest.raises(RequestRefused, match="trainable_tokens_delta is unsupported LoRA weight"):
        client.load_adapter("rows", folder / "rows-adapter" / "adapter")


def within_noise(some: list[float], others: list[float]) -> bool:
    """Whether the means of two lists, a value a seed, are nearer than three times their spread over seeds."""
    noise = max(statistics.stdev(some), statistics.stdev(others))
    return abs(statistics.fmean(some) - statistics.fmean(others)) < 3 * noise


def test_rewards_are_those_of_the_embedded_engine_within_noise(folder: Path, vllm: VLLMProcess) -> None:
    """Control: both are told from runs that learn nothing."""
    kinds: dict[str, dict[str, Any]] = {
        "vllm": {"rollout": served(vllm, "folder")},
        "own": {"rollout": {}},
        "untrained": {"rollout": {}, "optimizer": {"learning_rate": 1e-9}},
    }
    means: dict[str, list[float]] = {name: [] for name in kinds}
    for seed, (name, changes) in product(range(3), kinds.items()):
        file = recipe(folder, f"{name}-{seed}", steps=24, seed=seed, **{"batch": {"prompts": 6}, **changes})
        train(file)
        means[name].append(statistics.fmean(line["reward"] for line in lines(file)[-8:]))
    assert within_noise(means["own"], means["vllm"]), means
    assert not within_noise(means["own"], means["untrained"]), means
    assert not within_noise(means["vllm"], means["untrained"]), means
    assert min(means["vllm"] + means["own"]) > max(means["untrained"]), means  # both have learnt


NOT_COMPARED = {
    "gpt_neox": {"gpt_neox.embed_in.weight", "embed_out.weight"},
    "phi3": {"model.embed_tokens.weight", "lm_head.weight"},
    "qwen3": {"model.embed_tokens.weight", "lm_head.weight"},
}
"""Tensors of a folder that vLLM has with further rows, by family."""


@pytest.mark.parametrize("family", NOT_COMPARED)
def test_tensors_of_other_families_are_compared(folder: Path, family: str) -> None:
    """On a CPU matrices are packed, so norms and biases are what their digests tell apart."""
    command = vllm_command()
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    set_seed(0)
    values = {**MODEL, "vocab_size": len(tokenizer), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    values |= {"model_type": family, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    if family == "gpt_neox":
        del values["num_key_value_heads"], values["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # norms and biases that differ from each other's
    model.save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    server = VLLMProcess(command, folder / family, folder / f"{family}.log")
    server.start()
    try:
        client = VLLMServer(HTTPClient(server.url, 60.0), bucket_bytes=1 << 20)
        digests = client.client.post("/weight_checker", {"action": "checksum"})["checksums"]
        tensors = load_file(folder / family / "model.safetensors")
        stacks = comparable_tensors(tensors)
        assert {name.rpartition(":")[2] for name in digests} >= stacks.keys()
        assert tensors.keys() - {part for parts in stacks.values() for part in parts} == NOT_COMPARED[family]
        assert client.differing(tensors) == []
        vectors = [name for name, tensor in tensors.items() if tensor.ndim == 1]
        moved = {name: tensor + 1 if name in vectors else tensor for name, tensor in tensors.items()}
        assert sorted(client.differing(moved)) == sorted(vectors)
    finally:
        server.end()
